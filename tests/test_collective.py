"""The collective stage: windows and codes, losses by hand, labels, phases that resume exactly, runs of workers."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.expert_datasets import make_set
from helpers.off_policy import assert_close, digest, make_trainer
from helpers.tiny import PointMass, PointState

import jaxrl.cli.evaluate
from envs_jax import EnvSpec, TimeStep
from envs_jax.base import setting
from envs_jax.progress import start
from jaxrl.algos.base import AlgoState, Trajectory
from jaxrl.algos.collective import algorithm, dataset, transformer
from jaxrl.algos.collective.algorithm import TRAINED, Collective
from jaxrl.algos.collective.networks import distillation_loss
from jaxrl.algos.collective.transformer import TrajectoryTransformer, Window
from jaxrl.algos.multi_stage import UpstreamRun
from jaxrl.algos.sac import Sac
from jaxrl.cli import train
from jaxrl.cli.flags import parse
from jaxrl.integrations import expert_dataset
from jaxrl.rl.data_parallel import REPLICATED, SPLIT, DataParallel, make_mesh, on_mesh
from jaxrl.rl.replay import TERMINATED, Replay
from jaxrl.runtime import load as loading
from jaxrl.runtime import run as runs
from jaxrl.runtime import run_directory
from jaxrl.runtime.build import build_algorithm, build_run
from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.saved_run import read_run

CORNERS = {"near": 0, "far": 1, "nearer": 2}


@dataclasses.dataclass(frozen=True)
class Corners(PointMass):
    """A point mass whose observation does not tell which corner pays."""

    task: str = setting("near,far", "corners, drawn for each episode")

    @property
    def spec(self) -> EnvSpec:
        names = tuple(self.task.split(","))
        changes = {
            "name": "corners",
            "num_tasks": len(names),
            "task_names": names,
            "compatible_settings": {"reach": self.reach},
        }
        return dataclasses.replace(super().spec, **changes)

    def _timestep(self, state: PointState, first: bool) -> TimeStep:
        corner = jnp.array([CORNERS[name] for name in self.task.split(",")])[state.task]
        timestep = super()._timestep(dataclasses.replace(state, task=corner), first)
        hidden = timestep.observation.at[:, -1].set(0.0)
        task = state.task if self.spec.num_tasks > 1 else ()
        return dataclasses.replace(timestep, observation=hidden, task=task)

    def reset(self, key: Any, context: Any = None) -> tuple[PointState, TimeStep]:
        state, _ = super().reset(key, context)
        task = jax.random.randint(jax.random.fold_in(key, 1), (), 0, self.spec.num_tasks)
        state = dataclasses.replace(state, task=task)
        return state, self._timestep(state, True)


TINY = {
    "random_steps": 16, "learner_steps": 16, "worker_steps": 16, "update_interval": 3, "env_steps_per_update": 4,
    "initial_updates": 4,
    "transformer_updates": 4, "transformer_batch": 8, "context_length": 4, "embedding_size": 8, "feedforward_size": 8,
    "num_heads": 2, "num_layers": 1,
    "actor_updates": 4, "critic_updates": 4, "batch_size": 8, "hidden_size": 8, "updates_per_call": 2, "dropout": 0.0,
    "resolved_inputs": '{"worker": {"hidden_size": 8, "gamma": 0.5}}', "state_entries": (1, 0),
}  # fmt: skip
NET = TrajectoryTransformer(3, 2, 6, 4, 8, 8, 2, 2, 0.0)


def init_state(algo: Collective, inputs: Any = None) -> AlgoState:
    """The state at the start, made in one program."""
    return jax.jit(algo.init)(jax.random.key(0), inputs)


@functools.cache
def begin_tiny() -> tuple[Collective, AlgoState]:
    """The algorithm with two environments, and its state at the start."""
    algo = Collective(Corners().spec, DataParallel(2), **TINY)
    return algo, init_state(algo)


@functools.cache
def begin_net() -> Any:
    """Parameters of `NET`."""
    one = jax.tree.map(lambda x: x[0], windows(1))
    return jax.jit(lambda key: NET.init(key, one))(jax.random.key(1))


code_of = jax.jit(lambda params, window: NET.apply(params, window)[0])
usable = jax.jit(dataset.find_usable)


def windows(count: int, seed: int = 0) -> Window:
    """Random windows of four steps, three numbers of a state and two of an action."""
    rng = np.random.default_rng(seed)
    return Window(*(rng.normal(size=(count, *shape)).astype(np.float32) for shape in ((4, 3), (3, 2), (3, 1))))


def read_set(buffer: Replay, tasks: tuple[str, ...]) -> dict[str, Any]:
    """A set on the accelerator, by the names of `ExpertDataset`, episodes one after another."""
    host = jax.tree.map(np.asarray, buffer)
    shard, env, row = np.nonzero(np.asarray(usable(buffer)).swapaxes(1, 2))  # one environment after another
    after = (shard, row + 1, env)
    return {
        "task_names": tasks,
        "task": host.observation["task"][shard, row, env],
        "step": host.action["step"][shard, row, env],
        "observation": host.observation["observation"][shard, row, env],
        "action": host.action["action"][shard, row, env],
        "reward": host.reward[after][:, 0],
        "next_observation": host.observation["observation"][after],
        "terminated": host.end[after] == TERMINATED,
        "mu": host.action["mu"][shard, row, env],
        "log_std": host.action["log_std"][shard, row, env],
        "value": host.action["value"][shard, row, env],
    }


# ---------------------------------------------------------------- the transformer


def test_a_code_tells_when_something_happened() -> None:
    params, one = begin_net(), jax.tree.map(lambda x: x[0], windows(1))
    turned = jax.tree.map(lambda x: x[::-1], one)
    assert np.allclose(code_of(params, one), code_of(params, turned), atol=1e-5)  # times are zeros at first
    times = np.random.default_rng(2).normal(size=params["params"]["times"].shape).astype(np.float32)
    params = {"params": params["params"] | {"times": times}}
    assert not np.allclose(code_of(params, one), code_of(params, turned), atol=1e-3)


def test_masks_hide_as_often_as_they_should() -> None:
    batch = Window(*(np.full((2000, *shape), 7, np.float32) for shape in ((20, 3), (19, 2), (19, 1))))
    hide = jax.jit(lambda key, batch: jax.vmap(transformer.mask_tokens)(jax.random.split(key, 2000), batch))
    view, masked = hide(jax.random.key(0), batch)
    for rows, hit in zip(jax.tree.leaves(view), jax.tree.leaves(masked), strict=True):
        rows, hit = np.asarray(rows), np.asarray(hit)
        assert (rows[~hit] == 7).all() and hit.any(1).all()
        tokens = hit.shape[1]
        assert hit.mean() == pytest.approx(0.15 + 0.85**tokens / tokens, abs=0.01)
        unchanged, zeros = (rows[hit] == 7).all(-1).mean(), (rows[hit] == 0).all(-1).mean()
        numbers = rows[hit][((rows[hit] != 7) & (rows[hit] != 0)).all(-1)]
        assert unchanged == pytest.approx(0.1, abs=0.02) and zeros == pytest.approx(0.8, abs=0.03)
        assert 0 <= numbers.min() < 0.1 and 0.9 < numbers.max() < 1


def test_losses_by_hand_on_one_device_and_on_two() -> None:
    """Eight windows, of which five count, four on one device and one on the other; masks as uneven.

    The error is of masked tokens. InfoNCE and neighbours compare with windows that count, InfoNCE only with those of
    other tasks.
    """
    rng = np.random.default_rng(3)
    target, predicted = windows(8), windows(8, seed=5)
    weight = np.float32([1, 1, 1, 1, 0, 0, 1, 0])
    masked = jax.tree.map(lambda x: (rng.random(x.shape[:2]) < 0.5) & (weight > 0)[:, None], target)
    codes = rng.normal(size=(2, 8, 3)).astype(np.float32)
    task = np.int32([0, 1, 2, 0, 1, 2, 0, 1])
    data = {"target": target, "predicted": predicted, "masked": masked, "codes": codes.swapaxes(0, 1), "task": task}
    data |= {"weight": weight}

    def means_on(devices: int) -> tuple[float, dict[str, float]]:
        layout = DataParallel(2, 2, devices)

        def loss(scale: Any, rows: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            scaled = jax.tree.map(lambda x: scale * x, rows["predicted"])
            error = transformer.reconstruction_loss(scaled, rows["target"], rows["masked"], layout.device_mean)
            first, second = (transformer.CodeBatch(rows["codes"][:, k], rows["task"], rows["weight"]) for k in (0, 1))
            others, begin = layout.all_gather(second)
            contrast = transformer.contrastive_loss(first, others, begin, device_mean=layout.device_mean)
            accuracy = transformer.neighbour_accuracy(others, first, layout.device_mean)
            return error, {"error": error, "contrast": contrast, "accuracy": accuracy}

        function = on_mesh(
            functools.partial(layout.gradient, loss), make_mesh(devices), (REPLICATED, SPLIT), REPLICATED
        )
        rows = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), data)
        slope, (_, means) = jax.jit(function)(np.float32(1.5), rows)
        return float(slope), jax.tree.map(float, means)

    errors = []
    for guess, truth, hit in zip(*map(jax.tree.leaves, (predicted, target, masked)), strict=True):
        errors.append(np.square(1.5 * np.asarray(guess) - truth).mean(-1)[np.asarray(hit)].mean())
    unit = codes / np.linalg.norm(codes, axis=-1, keepdims=True)
    cosines, used = unit[0] @ unit[1].T, weight > 0
    allowed = used[None] & ((task[:, None] != task[None]) | np.eye(8, dtype=bool))
    contrast = np.log((np.exp(cosines / 0.15) * allowed).sum(1)) - np.diag(cosines) / 0.15
    nearest = np.where(used, cosines, -np.inf).argmax(1)
    by_hand = {
        "error": sum(errors),
        "contrast": contrast[used].mean(),
        "accuracy": (task[nearest] == task)[used].mean(),
    }
    (slope, means), (one_slope, one_means) = means_on(2), means_on(1)
    assert means == pytest.approx(by_hand, rel=1e-4)
    assert one_means == pytest.approx(by_hand, rel=1e-4)
    assert slope == pytest.approx(one_slope, rel=1e-4)


# ---------------------------------------------------------------- windows

next_window = jax.jit(transformer.next_window)


def test_windows_at_the_start_of_an_episode_by_hand() -> None:
    """Steps of two environments; the second one starts anew at its third step."""
    states = np.arange(8, dtype=np.float32).reshape(4, 2, 1) + 1  # 1 3 5 7, 2 4 6 8
    window = jax.jit(lambda state: transformer.first_window(state, 1, 3))(states[0])
    for t in (1, 2, 3):
        action, reward = 10 * states[t - 1], 100 * states[t, :, 0]
        window = next_window(window, states[t], action, reward, np.array([False, t == 2]))
        window = jax.tree.map(np.asarray, window)
        if t == 1:
            assert window.state[0, :, 0].tolist() == [1, 1, 3] and window.action[0, :, 0].tolist() == [0, 10]
            assert window.reward[0, :, 0].tolist() == [0, 300]
        if t == 2:
            assert window.state[0, :, 0].tolist() == [1, 3, 5] and window.action[0, :, 0].tolist() == [10, 30]
            assert window.state[1, :, 0].tolist() == [6, 6, 6] and not window.action[1].any()
            assert not window.reward[1].any()
    assert window.state[:, :, 0].tolist() == [[3, 5, 7], [6, 6, 8]]
    assert window.action[:, :, 0].tolist() == [[30, 50], [0, 60]]
    assert window.reward[:, :, 0].tolist() == [[500, 700], [0, 800]]


def test_windows_of_a_recording_are_those_of_acting() -> None:
    rng = np.random.default_rng(0)
    rows, envs, steps = 30, 3, 5
    first = rng.random((rows, envs)) < 0.15
    first[0] = True
    state, action = rng.normal(size=(rows, envs, 2)), rng.normal(size=(rows, envs, 1))
    reward, step = rng.normal(size=(rows, envs)), np.zeros((rows, envs), np.int32)
    window, windows_seen = jax.jit(lambda state: transformer.first_window(state, 1, steps))(np.float32(state[0])), []
    for t in range(rows):
        if t:
            step[t] = np.where(first[t], 0, step[t - 1] + 1)
            window = next_window(
                window, np.float32(state[t]), np.float32(action[t - 1]), np.float32(reward[t]), first[t]
            )
        windows_seen.append(window)
    acted = jax.tree.map(lambda *x: np.concatenate(x), *windows_seen)
    stored = jax.jit(transformer.stored_windows, static_argnums=5)(
        np.float32(state), np.float32(action), np.float32(reward), step, np.arange(rows * envs, dtype=np.int32), steps
    )
    chex.assert_trees_all_equal(acted, stored)


# ---------------------------------------------------------------- losses


def test_distillation_by_hand() -> None:
    mean, log_std = np.float32([[0, 1], [2, 0]]), np.float32([[-1, 0], [-2, -3]])
    mu, expert = np.float32([[0.5, 0], [0, 0]]), np.float32([[0, -8], [-2, -5]])
    first = (0.25 + 0.2 * 1.0) + (math.tanh(1) ** 2 + 0.2 * 64 * 2 / 8)
    second = math.tanh(2) ** 2 + 0.2 * 4 * 2 / 5
    loss = jax.jit(distillation_loss)
    for weight, by_hand in (([1.0, 1.0], (first + second) / 4), ([1.0, 0.0], first / 4)):
        assert float(loss(mean, log_std, mu, expert, np.float32(weight))) == pytest.approx(by_hand, rel=1e-5)


# ---------------------------------------------------------------- the phases


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """States behind every phase; each phase is left half-way and gone on with from the disk, which must not matter."""
    trainer = make_trainer(Collective, Corners(), 4, **TINY)
    state, states, metrics = trainer.init(jax.random.key(0)), {}, {}
    patch = pytest.MonkeyPatch()
    patch.setattr(algorithm, "WINDOWS_PER_CALL", 32)  # eight rows at a time, of 28
    with Checkpoints(tmp_path_factory.mktemp("phases")) as checkpoints:
        for count, phase in enumerate(trainer.algo.phases, 1):
            block = trainer.make_block(phase)
            state, _ = block(state, jnp.int32(1))
            checkpoints.save(count, state, {})
            checkpoints.wait()
            _, restored, _ = checkpoints.restore(trainer.shapes())
            assert digest(restored) == digest(state), phase.name
            state, metrics[phase.name] = block(state, jnp.int32(phase.iterations - 1))
            assert block._cache_size() == 1
            resumed, _ = block(restored, jnp.int32(phase.iterations - 1))
            assert digest(resumed) == digest(state), phase.name
            states[phase.name] = jax.tree.map(jnp.copy, (state.algo, state.timestep))
    patch.undo()
    return {"trainer": trainer, "states": states, "metrics": metrics}


def test_phases_and_their_order() -> None:
    algo = Collective(Corners().spec, DataParallel(4), **TINY)
    assert [phase.name for phase in algo.phases] == [
        "random", "burst", "learner", "worker", "transformer", "codes", "actor", "critic"
    ]  # fmt: skip
    calls = {phase.name: (phase.steps, phase.updates, phase.iterations) for phase in algo.phases}
    assert calls["random"] == (3, 0, 3)  # 16 steps of 2 tasks are 8 of each environment, an episode has 9 rows
    assert calls["learner"] == (3, 3, 3) and calls["actor"] == (0, 2, 2) and algo.rows == 28
    bare = Collective(Corners().spec, DataParallel(4), **TINY | {"learner_steps": 0, "critic_updates": 0})
    assert [phase.name for phase in bare.phases] == ["random", "worker", "transformer", "codes", "actor"]
    files = Collective(Corners().spec, DataParallel(4), **TINY | {"expert_datasets": "a.npz"})
    assert [phase.name for phase in files.phases] == ["transformer", "codes", "actor", "critic"]
    updates = {network: algo.count_updates(network) for network in ("encoder", "actor", "critic")}
    assert updates == {"encoder": 4, "actor": 4 + 9 + 4, "critic": 4}  # until rates have fallen
    many = Collective(Corners().spec, DataParallel(4), **TINY | {"random_steps": 100})
    assert many.phases[0].iterations == 17


def test_a_window_alone_has_nothing_to_be_compared_with() -> None:
    """Issue 54: InfoNCE of a batch of one is always 0."""
    one = TINY | {"transformer_batch": 1}
    lines = [Collective(Corners().spec, DataParallel(4), **each).warnings(10**6) for each in (one, TINY)]
    assert lines == [["transformer_batch 1 leaves InfoNCE no other window to compare with: raise it"], []]
    assert Collective(Corners().spec, DataParallel(4), **one, contrast_weight=0.0).warnings(10**6) == []


@pytest.mark.slow
def test_every_phase_changes_what_it_is_for_alone(studied: dict[str, Any]) -> None:
    def parts(params: Any) -> dict[str, Any]:
        learned = {name: digest(learner.params) for name, learner in params.learners.items()}
        return {"workers": digest(params.workers), **learned}

    before = parts(studied["trainer"].init(jax.random.key(0)).algo.replicated)
    assert set(before) == {"workers", "encoder", "actor", "critic"}
    for phase in studied["trainer"].algo.phases:
        after = parts(studied["states"][phase.name][0].replicated)
        changed = [name for name in before if before[name] != after[name]]
        assert changed == ([TRAINED[phase.name]] if phase.name in TRAINED else []), phase.name
        before = after
    for phase, metrics in studied["metrics"].items():
        assert int(metrics.not_finite) == -1, phase
    assert {"reconstruction", "contrast", "held_out_contrast", "held_out_code_accuracy"} <= set(
        studied["metrics"]["transformer"].learning
    )


@pytest.mark.slow
def test_labels_are_what_the_worker_of_the_task_says(studied: dict[str, Any]) -> None:
    algo, (state, _) = studied["trainer"].algo, studied["states"]["critic"]
    buffer, worker = jax.tree.map(np.asarray, state.sharded), algo.experts.worker
    for task in (0, 1):
        rows = algo.rows
        chosen = (buffer.observation["task"] == task) & (np.arange(rows) < rows - 1)[None, :, None]
        params = jax.tree.map(lambda x, task=task: x[task], state.replicated.workers)
        mean, log_std = worker.gaussian(
            params["actor"], jnp.asarray(buffer.observation["observation"][chosen][:, None])
        )
        np.testing.assert_allclose(buffer.action["mu"][chosen], np.tanh(mean[:, 0]), atol=1e-5)
        np.testing.assert_allclose(buffer.action["log_std"][chosen], log_std[:, 0], rtol=1e-4)
    assert {0, 1} == set(buffer.observation["task"].ravel().tolist())


@pytest.mark.slow
def test_who_acts_in_which_phase(studied: dict[str, Any]) -> None:
    """Nine steps of the batch with random actions, nine of the learner, then nine of each task's worker."""
    algo, (state, first) = studied["trainer"].algo, studied["states"]["random"]
    params = state.replicated
    policy = algo.policy(state)
    key = jax.random.key(3)
    carry = algo.init_carry(policy, first, jnp.arange(4))
    keys = jax.random.split(key, 4)

    def at(steps: Any) -> Any:
        return dataclasses.replace(start(), vector_steps=jnp.array([0, steps], jnp.uint32))

    random, learner, worker = (algo.act(policy, carry, first, keys, at(n), "explore") for n in (8, 9, 18))
    noise = jax.vmap(lambda k: jax.random.normal(jax.random.fold_in(k, 0), (2,)))(keys)
    mean, log_std = algo.experts.worker.gaussian(
        jax.tree.map(lambda x: x[1], params.workers["actor"]), first.observation
    )
    expected = np.tanh(mean[:, 0] + np.exp(log_std[:, 0]) * noise)
    second = np.asarray(first.task) == 1
    np.testing.assert_allclose(worker[0][second, 0], expected[second], atol=1e-5)
    again = algo.act(policy, carry, first, keys, at(18), "sample")[0]
    np.testing.assert_allclose(learner[0], again, atol=1e-6)  # the learner acts as the policy does
    assert not np.allclose(random[0], learner[0], atol=1e-2) and not np.asarray(worker[2]["code"]).any()
    assert np.abs(np.asarray(random[2]["code"])).max() > 0


def test_expert_datasets_are_dealt_out_and_found_again() -> None:
    """Episodes of several lengths, one of which ended for good, on four environments in two shards."""
    whole = make_set()
    keep = np.ones(len(whole), bool)
    keep[2:4] = keep[23:24] = False
    rows = {name: value[keep] if isinstance(value, np.ndarray) else value for name, value in vars(whole).items()}
    lengths = dataset.count_lengths(rows["step"])
    assert sorted(lengths.tolist()) == [2, 3] + 8 * [4]
    adopted = {"tasks": ["far", "pull", "push"], "expert_datasets": [int((lengths + 1).sum()), 5]}
    settings = TINY | {"resolved_inputs": json.dumps(adopted), "expert_datasets": "a.npz"}
    algo = Collective(Corners().spec, DataParallel(4, 2), **settings)
    buffer = init_state(algo, {"expert_datasets": algo.to_dataset(rows)}).sharded
    dealt = read_set(buffer, algo.tasks)
    assert dealt["task_names"] == ("far", "pull", "push")
    order, rows_order = (np.lexsort((x["observation"][:, 0],)) for x in (dealt, rows))
    for name in ("step", "observation", "action", "reward", "next_observation", "terminated", "mu", "log_std", "value"):
        np.testing.assert_array_equal(dealt[name][order], rows[name][rows_order], err_msg=name)
    np.testing.assert_array_equal(dealt["task"][order], 2 - rows["task"][rows_order])  # push is 0 there and 2 here
    held_out = np.asarray(buffer.action["held_out"]) & np.asarray(usable(buffer))
    assert held_out.sum() == 2 + 3  # the first of five episodes of each task


@pytest.mark.slow
def test_rows_of_files_teach_nothing_before_they_have_a_code() -> None:
    adopted = {"tasks": ["near", "far", "push", "pull"], "expert_datasets": [len(make_set()) + 10, 5]}
    algo = Collective(
        Corners().spec,
        DataParallel(4, 2),
        **TINY | {"resolved_inputs": json.dumps(adopted), "expert_datasets": "a.npz"},
    )
    state = init_state(algo, {"expert_datasets": algo.to_dataset(vars(make_set()))})
    learner = state.replicated.learners["actor"]

    @jax.jit
    def compiled(params: Any) -> Any:
        return algo.fit("actor", params, state.sharded, jax.random.key(1), 2)

    fitted = [
        compiled(dataclasses.replace(state.replicated, coded=jnp.int32(rows))) for rows in (0, algo.labelled_rows)
    ]
    actors = [digest(fresh.params) for fresh, _ in fitted]
    assert actors[0] == digest(learner.params) != actors[1]
    losses = [np.asarray(metrics["actor_loss"]) for _, metrics in fitted]
    assert not losses[0].any() and losses[1].all()


LABELLED = {
    "expert_datasets": "a.npz", "resolved_inputs": json.dumps({"tasks": ["push", "pull"],
    "expert_datasets": [len(make_set()) + 10, 5]})
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [pytest.param(LABELLED | {"critic_updates": 0}, id="expert_datasets"), pytest.param({}, id="workers")]
)
def test_phases_end_alike_when_eight_devices_take_them_over(settings: dict[str, Any], tmp_path: Path) -> None:
    """Each phase is left half-way on one device; eight go on from its checkpoint to the same results."""
    one, eight = (make_trainer(Collective, Corners(), 8, devices, **TINY | settings) for devices in (1, 8))
    inputs = {"expert_datasets": one.algo.to_dataset(vars(make_set()))} if "expert_datasets" in settings else None
    state = one.init(jax.random.key(0), inputs)
    with Checkpoints(tmp_path) as checkpoints:
        for count, phase in enumerate(one.algo.phases, 1):
            half = phase.iterations // 2
            state, _ = one.make_block(phase)(state, jnp.int32(half))
            checkpoints.save(count, state, {})
            checkpoints.wait()
            _, moved, _ = checkpoints.restore(eight.shapes())
            state, _ = one.make_block(phase)(state, jnp.int32(phase.iterations - half))
            moved, _ = eight.make_block(phase)(moved, jnp.int32(phase.iterations - half))
            assert_close(moved.algo.replicated, state.algo.replicated, 2e-3)


@pytest.mark.slow
def test_value_labels_are_of_the_step_itself() -> None:
    """r + gamma V of what came, V the worker's; a step that ended its episode for good is worth what it was paid."""
    algo, state = begin_tiny()
    workers = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state.replicated.workers)
    workers["critic"]["params"]["out_bias"] += 3.0  # V is 3, less exp(-20) log pi
    workers["log_alpha"] -= 20.0
    env = Corners()
    reset = jax.jit(lambda key: jax.vmap(lambda k: env.reset(k, ()))(jax.random.split(key, 2))[1])
    first = jax.tree.map(np.asarray, reset(jax.random.key(1)))

    def row(reward: Any, ended: Any) -> Any:
        return dataclasses.replace(
            first, reward=np.full((2, 1), reward, np.float32), terminated=np.array([False, ended])
        )

    steps = jax.tree.map(lambda *x: np.stack(x), row(0.0, False), row(1.0, False))

    def zeros(*shape: Any) -> Any:
        return np.zeros((2, 2, *shape), np.float32)

    extras = {"action": zeros(2), "code": zeros(6), "step": np.zeros((2, 2), np.int32)}
    trajectory = Trajectory(steps, zeros(1, 2), extras | {"held_out": np.zeros((2, 2), bool)})
    buffer = jax.jit(algo.experts.store)(workers, state.sharded, trajectory, row(7.0, True), jax.random.key(2))
    value = np.asarray(buffer.action["value"])[0]
    np.testing.assert_allclose(value[0], 1 + 0.5 * 3, rtol=1e-5)
    np.testing.assert_allclose(value[1], [7 + 0.5 * 3, 7], rtol=1e-5)


def test_answers_by_hand_and_with_a_code_of_zeros() -> None:
    algo, begin = begin_tiny()
    policy, state = algo.weights(begin), np.ones((3, 2), np.float32)
    window = Window(*(np.full((3, *shape), one, np.float32) for shape, one in (((4, 2), 1), ((3, 2), 0), ((3, 1), 0))))
    code = jax.jit(algo.model.codes)(policy["encoder"], window)
    gaussian, answer = jax.jit(algo.model.gaussian), jax.jit(algo.model.action_distribution, static_argnums=2)
    answers = [answer(policy, window, zero) for zero in (False, True)]
    for latent, actual in zip((code, np.zeros((3, 6), np.float32)), answers, strict=True):
        expected = gaussian(policy["actor"], latent, state)
        for a, b in zip(expected, actual, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    assert not np.allclose(answers[0][0], answers[1][0])


@pytest.mark.slow
def test_the_task_is_learned_from_the_window() -> None:
    """Rewards tell the corners apart: codes of held-out windows find their task, the fitted actor its workers."""
    many = TINY | {
        "random_steps": 400, "learner_steps": 0, "worker_steps": 400, "update_interval": 9, "embedding_size": 16,
    }  # fmt: skip
    many |= {
        "feedforward_size": 32,
        "transformer_updates": 400,
        "transformer_batch": 64,
        "transformer_lr": 2e-3,
        "dropout": 0.0,
    }
    many |= {"updates_per_call": 100, "actor_updates": 1000, "batch_size": 64, "actor_lr": 3e-3, "hidden_size": 64}
    trainer = make_trainer(Collective, Corners(), 16, **many)
    state, metrics = trainer.init(jax.random.key(0)), {}
    for phase in trainer.algo.phases:
        state, block = trainer.make_block(phase)(state, jnp.int32(phase.iterations))
        metrics |= {name: np.asarray(x)[: int(block.iterations)] for name, x in block.learning.items()}
    assert metrics["held_out_code_accuracy"][-1] > 0.8
    assert metrics["contrast"][-1, -20:].mean() < 0.7 * metrics["contrast"][0, :20].mean()
    assert metrics["actor_held_out_loss"][-1] < 0.6 * metrics["actor_loss"][0, :5].mean()


# ---------------------------------------------------------------- runs of workers

WORKER = (
    "--algo sac --env test_collective:Corners --num_envs 4 --hidden_size 8 --batch_size 8 --total_env_steps 32 "
    "--devices 1"
)
FLAGS = {name: value for name, value in TINY.items() if name not in ("resolved_inputs", "state_entries")}
STUDY = "--algo collective --config {here}/tiny.yaml --devices 1"


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Runs by what is special about them, those for "near" and "far" with weights, of the others the configuration."""
    special = {
        "near": "--task near", "far": "--task far", "other": "--task nearer",
        "arm": "--task near --reach 0.4", "wide": "--task near --hidden_size 16",
        "wide_view": "--task far --dimensions 3",
    }  # fmt: skip
    directories = {}
    for name, flags in special.items():
        config = parse([*WORKER.split(), *flags.split()]).config
        directory = tmp_path_factory.mktemp("worker")
        run_directory.write_config(directory, config.to_yaml())
        if name in ("near", "far"):
            run = build_run(config)
            with Checkpoints(directory / "checkpoints") as checkpoints:
                checkpoints.save(1, run.trainer.init(jax.random.key(len(directories))), {})
        directories[name] = str(directory)
    return directories


def load_state(run: str) -> tuple[Any, AlgoState]:
    """A run's algorithm, and its whole state in the newest checkpoint."""
    directory, config = read_run(run)
    algo = build_algorithm(config)
    shapes = jax.eval_shape(lambda: algo.init(jax.random.key(0), None))
    with Checkpoints(directory / "checkpoints") as checkpoints:
        return algo, checkpoints.restore(shapes, prefix="algo")[1]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_tiny(tmp_path)
    return tmp_path


def write_tiny(folder: Path) -> None:
    """A preset without the phases of learner and critic: each phase is a program to compile."""
    settings = {"algo": "collective", "env": "test_collective:Corners", "num_envs": 4, **FLAGS}
    settings |= {"learner_steps": 0, "critic_updates": 0}
    (folder / "tiny.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))


@pytest.fixture(scope="module")
def collective_run(workers: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of both workers and a file with two more tasks."""
    here = tmp_path_factory.mktemp("collective")
    write_tiny(here)
    expert_dataset.write(here / "set.npz", make_set())
    argv = [*STUDY.format(here=here).split(), "--runs", str(here), "--expert_datasets", str(here / "set.npz")]
    assert train.main([*argv, "--workers", f"{workers['far']},{workers['near']}"]) == 0
    return (here / "latest").read_text().strip()


def test_a_run_keeps_what_it_needs_of_its_workers(
    workers: dict[str, str], collective_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = read_run(collective_run)
    assert config.algo_settings["workers"] == f"{workers['near']},{workers['far']}"  # in the order of the tasks
    adopted = json.loads(config.algo_settings["resolved_inputs"])
    assert adopted["tasks"] == ["near", "far", "push", "pull"] and adopted["worker"]["hidden_size"] == 8
    assert config.run.total_env_steps == 2 * 9 * 4  # all that the phases collect
    stacked = loading.load_policy(collective_run).params["workers"]
    for task, name in enumerate(("near", "far")):
        worker_params = loading.load_policy(workers[name]).params
        assert digest(jax.tree.map(lambda x, task=task: np.asarray(x)[task], stacked)) == digest(worker_params)
    monkeypatch.setattr(runs, "load_inputs", lambda run: pytest.fail("a run needs its workers only to begin"))
    assert train.main(["--resume", collective_run]) == 0


def test_a_run_is_evaluated_by_task_and_without_codes(collective_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert jaxrl.cli.evaluate.main([collective_run, "--episodes", "24", "--policy", "learned,zero_code", "--json",
                                f"{collective_run}/found.json"]) == 0  # fmt: skip
    assert "distance (near)" in capsys.readouterr().out
    policies = json.loads((Path(collective_run) / "found.json").read_text())["policies"]
    for policy in ("learned", "zero_code"):
        ends = {name: policies[policy][name]["mean"][-1] for name in ("distance", "distance/near", "distance/far")}
        low, high = sorted((ends["distance/near"], ends["distance/far"]))
        assert low <= ends["distance"] <= high
    assert policies["learned"]["distance"] != policies["zero_code"]["distance"]
    assert jaxrl.cli.evaluate.main([collective_run, "--episodes", "8", "--task", "nearer", "--policy", "learned"]) == 0
    output = capsys.readouterr().out
    assert "distance" in output and "(near)" not in output and "(nearer)" not in output  # one task


TAUGHT = (
    "--num_envs 4 --hidden_size 8 --batch_size 8 --env_steps_per_update 4 --random_steps 0 "
    "--teacher_constant_steps 8 --teacher_until_step 24 --devices 1 --total_env_steps 64"
)


@pytest.fixture
def student(tmp_path: Path) -> list[str]:
    """The command line of a student whose teacher is to be named."""
    (tmp_path / "student.yaml").write_text("algo: student\nenv: test_collective:Corners\n")
    return ["--config", str(tmp_path / "student.yaml"), "--runs", str(tmp_path), *TAUGHT.split()]


@pytest.mark.slow
def test_a_teacher_must_have_finished(workers: dict[str, str], here: Path, student: list[str], capsys: Any) -> None:
    argv = [*STUDY.format(here=here).split(), "--runs", str(here), "--workers", f"{workers['near']},{workers['far']}"]
    assert train.main([*argv, "--max_seconds", "0.001"]) == 0
    run = (here / "latest").read_text().strip()
    capsys.readouterr()
    assert train.main([*student, "--teacher", run]) == 1
    assert f"{run} has not finished all its phases: finish it first" in capsys.readouterr().err
    assert train.main(["--resume", run, "--max_seconds", "0"]) == 0
    assert train.main([*student, "--teacher", run]) == 0


@pytest.mark.slow
def test_a_student_of_a_run(
    workers: dict[str, str], collective_run: str, student: list[str], tmp_path: Path, capsys: Any
) -> None:
    for named, sentence in (
        ("", "a student needs a teacher: name a run of collective with --teacher RUN"),
        (workers["near"], "was trained with sac: a teacher must be a run of collective"),
    ):
        assert train.main([*student, "--teacher", named]) == 2
        assert sentence in capsys.readouterr().err
    assert train.main([*student, "--task", "nearer", "--teacher", collective_run]) == 0
    run = (tmp_path / "latest").read_text().strip()
    state, teacher = load_state(run)[1], load_state(collective_run)[1]
    for name in ("encoder", "actor"):
        assert digest(state.replicated.teacher[name]) == digest(teacher.replicated.learners[name].params)
    rho = np.asarray(state.sharded.action["rho"])[:, :16]
    assert (rho[:, :6] > 0).all() and not rho[:, 6:].any()
    assert jaxrl.cli.evaluate.main([run, "--episodes", "8", "--policy", "learned"]) == 0


def test_expert_datasets_that_do_not_fit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expert_dataset.write(here / "set.npz", make_set())
    argv = [*STUDY.format(here=here).split(), "--runs", str(here), "--expert_datasets", str(here / "set.npz")]
    assert train.main([*argv, "--dimensions", "3"]) == 2
    assert "observations of the expert datasets have 3 numbers, but 4 in 'corners'" in capsys.readouterr().err
    broken = dataclasses.asdict(make_set()) | {"version": 1}
    np.savez(here / "set.npz", **{name: value for name, value in broken.items() if name != "mu"})
    assert train.main(argv) == 1
    assert "lacks mu" in capsys.readouterr().err


WRONG = {
    "none": ("", "there is no worker for 'near', 'far': name a run of sac for each of near, far with --workers"),
    "too few": ("--workers {near}", "there is no worker for 'far'"),
    "no run": ("--workers nowhere", "nowhere does not exist"),
    "another task": ("--workers {near},{other}", "{other} was trained on 'nearer', which is not among the tasks here"),
    "another arm": ("--workers {arm},{far}", "{arm} was trained with reach 0.4, here it is 0.5: use the same value"),
    "another network": ("--workers {wide},{far}", "{wide} was trained with hidden_size 16, {far} with 8: use workers"),
    "another observation": ("--workers {near},{wide_view}", "has observations of shape (4,), here they have (3,)"),
    "weights": ("--workers {near} --init_from {near}", "starts from --workers: remove --init_from"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_workers_that_do_not_fit(what: str, workers: dict[str, str], here: Path, capsys: Any) -> None:
    flags, sentence = (text.format_map(workers) for text in WRONG[what])
    capsys.readouterr()
    assert train.main([*STUDY.format(here=here).split(), "--runs", str(here / "runs"), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (here / "runs").exists()


def test_workers_of_another_algorithm_or_environment() -> None:
    spec, layout = Corners().spec, DataParallel(4)
    algo = Collective(spec, layout, **TINY)
    with pytest.raises(ValueError, match="a was trained with collective: name runs of sac as workers"):
        Collective.resolve_inputs(spec, {}, {"workers": (UpstreamRun("a", algo, {}),)}, {})
    sac = Sac(dataclasses.replace(spec, name="room"), layout, batch_size=8, buffer_size=100)
    with pytest.raises(ValueError, match="a was trained on 'room', not on 'corners'"):
        Collective.resolve_inputs(spec, {}, {"workers": (UpstreamRun("a", sac, {}),)}, {})


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "settings", "sentence"),
    [
        (
            {"num_agents": 2},
            {},
            "collective needs one agent with vectors as observations and actions, unlike 'corners'",
        ),
        ({}, {"state_entries": (0, 3)}, "state_entries must lie between 0 and 2, as observations have 3 numbers"),
        ({}, {"state_entries": (1, 1)}, "names an entry twice: name each one once"),
        ({}, {"resolved_inputs": "[]"}, "resolved_inputs is filled in by the run itself: remove it"),
        ({}, {"num_heads": 3}, "num_heads 3 does not divide embedding_size 8: change one"),
        ({}, {"context_length": 9}, "context_length must lie between 2 and the 8 steps of an episode, not 9"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Collective(dataclasses.replace(Corners().spec, **changes), DataParallel(4), **TINY | settings)
