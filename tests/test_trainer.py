"""The training loop with tiny algorithms: learning, phases, keys, restarts, chunks, values that are not finite."""

import dataclasses
import functools
import json
import operator
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import off_policy
from helpers.tiny import Corridor, CorridorState, TinyQ, Treadmill

import jaxrl.cli.train
from envs_jax import Environment, TimeStep
from envs_jax.batch import batched
from envs_jax.progress import total
from jaxrl.algos.base import Algorithm, AlgoState, Phase, Trajectory
from jaxrl.algos.coma import Coma
from jaxrl.rl.data_parallel import DataParallel, logical_shards, make_mesh
from jaxrl.runtime.not_finite import count_faults
from jaxrl.runtime.self_play import SelfPlay
from jaxrl.runtime.trainer import BlockMetrics, Trainer, TrainState, make_env_key

FLAGS = "--num_envs 8 --devices 1 --total_env_steps 200"


def make_trainer(
    env: Environment,
    algo: type[Algorithm],
    num_envs: int = 8,
    block: int = 10,
    rollout_chunk: int = 0,
    total_env_steps: int = 1000,
    **settings: Any,
) -> Trainer:
    shards = logical_shards(num_envs, algo.batch(env.spec, settings, num_envs))
    layout = DataParallel(num_envs, shards)
    algorithm = algo(env.spec, layout, **settings)
    return off_policy.Compiled(
        batched(env), algorithm, layout, make_mesh(1), block, rollout_chunk, jnp.dtype("float16"), total_env_steps
    )


def run(trainer: Trainer, iterations: dict[str, int]) -> tuple[TrainState, list[BlockMetrics]]:
    """So many iterations of each named phase in one block each."""
    state, metrics = trainer.init(jax.random.key(0)), []
    for phase in trainer.algo.phases:
        state = dataclasses.replace(state, iteration=jnp.zeros_like(state.iteration))  # counted anew, as a session does
        state, values = trainer.make_block(phase)(state, jnp.int32(iterations[phase.name]))
        metrics.append(values)
    return state, metrics


def mean_of_episodes(metrics: BlockMetrics, name: str, last: int) -> float:
    """Of the episodes that ended in the last iterations that ran."""
    rows = slice(int(metrics.iterations) - last, int(metrics.iterations))
    return float(metrics.episodes[name][rows].sum() / metrics.episodes["episodes"][rows].sum())


class Logged(TinyQ):
    """Q-learning that also reports what it was given."""

    def learn(self, state: AlgoState, trajectory: Any, last_timestep: Any, key: Any, progress: Any, phase: Any) -> Any:
        state, metrics = super().learn(state, trajectory, last_timestep, key, progress, phase)
        step = trajectory.timestep
        return state, metrics | {
            "observation": step.observation,
            "action": trajectory.action,
            "reward": step.reward,
            "terminated": step.terminated,
            "done": step.done,
            "first": step.first,
            "last_observation": last_timestep.observation,
        }


# ---------------------------------------------------------------- learning


@pytest.fixture(scope="module")
def corridor_run() -> tuple[Trainer, TrainState, list[BlockMetrics]]:
    """Q-learning that reaches the end of a corridor of three steps."""
    trainer = make_trainer(Corridor(length=3, horizon=12), Logged, num_envs=8, block=80, updates_per_step=2.0)
    return trainer, *run(trainer, {"fill": 2, "train": 80})


def test_q_learning_learns_the_corridor(corridor_run: Any) -> None:
    _, state, (_, metrics) = corridor_run
    assert mean_of_episodes(metrics, "reached", 10) > 0.95
    assert mean_of_episodes(metrics, "length", 10) < 4  # random walks take 8; starts are 1 to 3 steps away
    weights = np.asarray(state.algo.replicated["weights"])
    np.testing.assert_allclose(weights[:3], [[0.729, 0.81], [0.729, 0.9], [0.81, 1.0]], atol=0.01)


def test_counters_and_statistics_agree(corridor_run: Any) -> None:
    _, state, blocks = corridor_run
    progress = state.progress
    assert [int(total(x)) for x in (progress.env_steps, progress.vector_steps, progress.learn_calls)] == [2624, 328, 82]
    assert int(total(progress.updates)) == 80 * 8
    assert float(progress.fraction) == 1.0  # past the 1,000 steps that count as the whole run
    assert [int(x) for x in (state.iteration, state.iterations)] == [80, 82]  # of the phase, of the run
    assert [int(block.iterations) for block in blocks] == [2, 80]
    assert all(int(block.not_finite) == -1 for block in blocks)
    for block in blocks:  # faults are no sums over episodes
        assert set(block.episodes) == {"episodes", "return", "length", "reached"}
        assert {name: float(counts.sum()) for name, counts in block.faults.items()} == {
            "reward": 0, "observation": 0, "action_mask": 0
        }  # fmt: skip
    ended = sum(float(block.episodes["episodes"].sum()) for block in blocks)
    assert int(total(progress.episodes)) == ended
    done = np.concatenate(
        [np.asarray(block.learning["done"]).reshape(-1, 8)[: 4 * int(block.iterations)] for block in blocks]
    )
    last = np.asarray(state.timestep.done)
    assert ended == done[1:].sum() + last.sum()  # an end is counted when it is reached, not when it is answered


def test_the_environments_go_on_from_block_to_block(corridor_run: Any) -> None:
    """Rows of all iterations are one trajectory of each copy: every step moves by one, every end is followed by a
    restart in the next row."""
    _, _, blocks = corridor_run
    log = {
        name: np.concatenate([np.asarray(b.learning[name])[: int(b.iterations)] for b in blocks]).reshape(-1, 8)
        for name in ("action", "first", "done")
    }
    position = np.concatenate([np.asarray(b.learning["observation"])[: int(b.iterations)] for b in blocks])
    position = position.reshape(-1, 8, 4).argmax(-1)
    np.testing.assert_array_equal(log["first"][1:], log["done"][:-1])
    moved = np.clip(position[:-1] + 2 * log["action"][:-1] - 1, 0, 3)
    np.testing.assert_array_equal(np.where(log["first"][1:], position[1:], moved), position[1:])
    assert log["first"].sum() > 100


def test_a_truncated_mission_of_coma_is_bootstrapped() -> None:
    """The critic's targets: every step is worth 1 and the last one is cut, so that they approach 10."""
    settings = {"td_lambda": 0.9, "target_update_period": 1, "critic_lr": 1e-2, "minibatch_size": 80, "hidden_size": 8}
    trainer = make_trainer(Treadmill(length=2, horizon=4), Coma, num_envs=16, block=150, gamma=0.9, **settings)
    _, (metrics,) = run(trainer, {"train": 150})
    targets = np.asarray(metrics.learning["target_mean"])
    assert targets[-20:].mean() == pytest.approx(10.0, abs=0.3) and targets[0] < 4.5


def test_rows_that_did_not_run_are_empty(corridor_run: Any) -> None:
    _, _, (fill, _) = corridor_run
    observation = np.asarray(fill.learning["observation"])
    assert int(fill.iterations) == 2
    assert observation.shape[0] == 80 and observation[:2].any((1, 2, 3, 4)).all() and not observation[2:].any()


# ---------------------------------------------------------------- phases and compiling


class ThreePhases(TinyQ):
    """Looks, studies without steps, and learns."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("look", 2, 0, iterations=3), Phase("study", 0, 0, iterations=2), Phase("go", 4, 4))

    def learn(self, state: AlgoState, trajectory: Any, last_timestep: Any, key: Any, progress: Any, phase: Any) -> Any:
        if trajectory is None:
            assert last_timestep is None and phase.name == "study"
            params = state.replicated | {"weights": state.replicated["weights"] + 1}
            return AlgoState(params, state.sharded), {"seen": total(progress.env_steps)}
        return super().learn(state, trajectory, last_timestep, key, progress, phase)


@pytest.fixture(scope="module")
def three_phases() -> Trainer:
    return make_trainer(Corridor(), ThreePhases, block=3)


def test_phases_steps_and_environments_draw_from_other_keys(corridor_run: Any) -> None:
    """Nearly all actions of the first iterations are random, so that equal keys would show."""
    _, _, (fill, train) = corridor_run
    filled, trained = (np.asarray(block.learning["action"])[:2] for block in (fill, train))  # [iterations, T, B, A]
    pairs = [(filled, trained), (filled[:, 1:], filled[:, :-1]), (filled[:, :, 1:], filled[:, :, :-1])]
    for one, other in pairs:
        assert 0.2 < np.mean(one == other) < 0.8


@dataclasses.dataclass(frozen=True)
class Pooled(SelfPlay):
    """Keeps the policy that it was given last; nobody plays the other team."""

    def init_pool(self, policy: Any) -> Any:
        return policy

    def update_pool(self, pool: Any, policy: Any, progress: Any) -> Any:
        return policy

    def context(self, progress: Any, pool: Any = ()) -> Any:
        return (), ()

    def step_without_reset(self, state: Any, action: Any, context: Any) -> Any:
        return self.inner.step_without_reset(state, action, context[0])


def test_the_pool_gets_the_policy_of_after_the_update(three_phases: Trainer) -> None:
    env, algo = three_phases.env, three_phases.algo
    trainer = dataclasses.replace(three_phases, env=Pooled(env.env, env, algo, 1, 1, 1))
    state, _ = trainer.make_block(trainer.algo.phases[1])(trainer.init(jax.random.key(0)), jnp.int32(2))
    np.testing.assert_array_equal(state.algo.replicated["weights"], 2.0)
    np.testing.assert_array_equal(state.pool, 2.0)


def test_a_phase_without_steps_only_learns(three_phases: Trainer) -> None:
    """And shapes of the state are known without making it."""
    look, study, _ = map(three_phases.make_block, three_phases.algo.phases)
    state = three_phases.init(jax.random.key(0))
    described, expected = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (three_phases.shapes(), state))
    assert described == expected
    state, _ = look(state, jnp.int32(3))
    before = jax.tree.map(np.asarray, (state.env.env.position, state.timestep, state.statistics))
    state, metrics = study(state, jnp.int32(2))
    chex.assert_trees_all_equal(before, (state.env.env.position, state.timestep, state.statistics))
    np.testing.assert_array_equal(metrics.learning["seen"], [48, 48, 0])
    assert metrics.episodes == {}
    np.testing.assert_array_equal(state.algo.replicated["weights"], 2.0)
    assert int(total(state.progress.learn_calls)) == 5 and int(total(state.progress.env_steps)) == 48


class Silent(TinyQ):
    """Reports nothing but a schedule."""

    def learn(self, *arguments: Any) -> Any:
        return super().learn(*arguments)[0], {}

    def schedules(self, progress: Any) -> dict[str, Any]:
        return {"share": progress.fraction}


def test_schedules_are_reported_where_updates_run() -> None:
    trainer = make_trainer(Corridor(), Silent, block=2)
    reported = [
        list(jax.eval_shape(trainer.make_block(phase), trainer.shapes(), jnp.int32(1))[1].learning)
        for phase in trainer.algo.phases
    ]
    assert reported == [[], ["share"]]


def test_a_run_takes_the_phases_in_order(tmp_path: Path) -> None:
    flags = f"{FLAGS} --algo test_trainer:ThreePhases --env helpers.tiny:Corridor --runs {tmp_path}"
    assert jaxrl.cli.train.main(flags.split()) == 0
    lines = [json.loads(line) for path in tmp_path.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    order = [line["phase"] for line in lines if "phase" in line]
    assert order == sorted(order) and set(order) == {0, 1, 2}
    assert [order.count(phase) for phase in range(3)] == [3, 2, 5]  # 48 steps, none, and 152 by 32


# ---------------------------------------------------------------- restarts and chunks


class Fresh(Logged):
    """The same, but every iteration starts new episodes."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("fill", 12, 0, restart=True),)


@functools.cache
def logged_run(algo: type[Algorithm], rollout_chunk: int) -> tuple[TrainState, dict[str, np.ndarray], Any]:
    env = Corridor(num_agents=2, length=3, horizon=6)
    trainer = make_trainer(env, algo, num_envs=12, block=3, rollout_chunk=rollout_chunk, batch_size=12)
    state, metrics = trainer.make_block(trainer.algo.phases[0])(trainer.init(jax.random.key(5)), jnp.int32(3))
    assert int(metrics.iterations) == 3
    return state, {name: np.asarray(x) for name, x in metrics.learning.items()}, metrics.episodes


@pytest.mark.parametrize(
    ("algo", "chunk"),
    [pytest.param(Fresh, 1, marks=pytest.mark.slow), (Fresh, 4), pytest.param(Logged, 4, marks=pytest.mark.slow)],
)
def test_chunks_of_environments_fly_the_same(algo: type[Algorithm], chunk: int) -> None:
    state, trajectory, episodes = logged_run(algo, 0)
    chunked_state, chunked, chunked_episodes = logged_run(algo, chunk)
    chex.assert_trees_all_equal((trajectory, episodes, state.algo), (chunked, chunked_episodes, chunked_state.algo))
    assert trajectory["action"].shape[1:] == ((12 if algo is Fresh else 4), 12, 2)
    assert not np.array_equal(trajectory["action"][:, :, 0], trajectory["action"][:, :, 4])


def test_restarting_iterations_begin_with_fresh_episodes() -> None:
    state, trajectory, episodes = logged_run(Fresh, 0)
    assert (state.env, state.timestep, state.statistics, state.carry) == ((), (), (), ())
    assert trajectory["first"][:, 0].all() and not trajectory["first"][:, 1].any()
    starts = trajectory["observation"][:, 0]
    assert not np.array_equal(starts[0], starts[1])
    # iteration k of copy i starts from fold_in(its root, k), as any environment with that key does
    env, run_key = Corridor(num_agents=2, length=3, horizon=6), state.key
    for iteration, copy in ((0, 0), (1, 7), (2, 11)):
        key = jax.random.fold_in(make_env_key(run_key, jnp.int32(copy)), iteration)
        np.testing.assert_array_equal(env.reset(key, ())[1].observation, starts[iteration, copy])
    ended = trajectory["done"].sum((1, 2)) - trajectory["done"][:, 0].sum(1)
    assert (np.asarray(episodes["episodes"]) >= ended).all() and episodes["episodes"].sum() > 30


# ---------------------------------------------------------------- non-finite values


class Explodes(TinyQ):
    """A loss is not a number in the third call of `learn`, and a weight is infinite after the seventh."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("train", 4, 4),)

    def learn(self, state: AlgoState, trajectory: Any, last_timestep: Any, key: Any, progress: Any, phase: Any) -> Any:
        state, metrics = super().learn(state, trajectory, last_timestep, key, progress, phase)
        call = progress.learn_calls[1]
        metrics["loss"] = metrics["loss"].at[1].set(jnp.where(call == 2, jnp.nan, metrics["loss"][1]))
        weights = state.replicated["weights"]
        weights = weights.at[0, 0].set(jnp.where(call == 6, jnp.inf, weights[0, 0]))
        return AlgoState(state.replicated | {"weights": weights}, state.sharded), metrics


def test_a_block_finds_what_is_not_finite() -> None:
    """It stops behind a metric of `learn`; parameters are looked at behind the block."""
    trainer = make_trainer(Corridor(), Explodes, block=8)
    block = trainer.make_block(trainer.algo.phases[0])
    state, found = trainer.init(jax.random.key(0)), []
    for iterations in (2, 6, 4):
        state, metrics = block(state, jnp.int32(iterations))
        name = trainer.tensor_names(metrics.learning)[metrics.not_finite] if metrics.not_finite >= 0 else ""
        found.append((int(state.iterations), int(metrics.iterations), name))
    assert found == [(2, 2, ""), (3, 1, "loss"), (7, 4, "weights")]


@pytest.mark.parametrize("most_joined", [0, 4, 2**18])
def test_the_first_tensor_that_is_not_finite(most_joined: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first by name is reported, whatever the sizes and dtypes."""
    monkeypatch.setattr("jaxrl.runtime.not_finite.MOST_JOINED", most_joined)
    trainer = make_trainer(Corridor(), TinyQ)
    tensors = {"a": jnp.ones(5, jnp.bfloat16), "b": jnp.ones(0), "c": jnp.ones((2, 2)), "d": jnp.ones(6, jnp.float16)}
    metrics = {"loss": jnp.ones(3), "count": jnp.int32(1)}
    names = trainer.tensors_to_check(AlgoState(tensors, ()), metrics)
    assert int(trainer.find_not_finite(AlgoState(tensors, ()), metrics)) == -1
    for index, name in enumerate(names):
        if name not in ("b", "count"):
            bad = {other: x.at[-1].set(jnp.nan) if other in (name, "d") else x for other, x in tensors.items()}
            learning = metrics | ({name: jnp.asarray([1.0, 1.0, jnp.inf])} if name == "loss" else {})
            assert int(trainer.find_not_finite(AlgoState(bad, ()), learning)) == index


def test_large_tensors_are_checked_in_place() -> None:
    """Without a copy of their values, and more of these than int32 counts."""
    trainer = make_trainer(Corridor(), TinyQ)

    def check(weights: Any) -> Any:
        return trainer.find_not_finite(AlgoState(weights, ()), {})

    def lower(size: int) -> Any:
        weights = [jax.ShapeDtypeStruct((size,), jnp.float32)] * 2 + [jax.ShapeDtypeStruct((3,), jnp.float32)]
        return jax.jit(check).lower(weights)

    lower(2**30)
    assert lower(2**22).compile().memory_analysis().temp_size_in_bytes < 2 * 2**22 * 4


def test_tensors_are_named_by_their_layers() -> None:
    trainer = off_policy.trainer_of("ddpg expected")
    names = set(trainer.tensors_to_check(trainer.shapes().algo, {}))
    assert {"actor.params.params.fc1_kernel", "target_critic.params.norm2_scale"} < names


def test_a_run_that_is_not_finite_names_the_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{FLAGS} --algo test_trainer:Explodes --env helpers.tiny:Corridor --runs {tmp_path}"
    assert jaxrl.cli.train.main(flags.split()) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "loss" in error and "update 10" in error  # the second of four updates in the third call


def test_an_environment_is_to_blame_only_for_what_follows_finite_actions() -> None:
    """Copy 0 breaks its observation at time 1; in copy 1 the policy broke first, and later a reward."""
    nan = np.nan
    observation = np.zeros((4, 2, 1, 2))  # times 0 to 3, the last one after the trajectory
    observation[1:, 0, 0, 1] = nan
    reward = np.zeros((4, 2, 1))
    reward[1, 1] = nan
    reward[3, 1] = np.inf
    action = np.zeros((3, 2, 1, 1))
    action[1:, 0] = nan
    action[0, 1] = nan
    flags = jnp.zeros((4, 2), bool)
    steps = TimeStep(jnp.float32(observation), jnp.float32(reward), flags, flags, flags)
    before, last = (jax.tree.map(operator.itemgetter(rows), steps) for rows in (slice(3), 3))
    counts = count_faults(Trajectory(before, jnp.float32(action), ()), last)
    assert {name.rpartition(" ")[2]: float(count) for name, count in counts.items()} == {"reward": 1, "observation": 1}


def test_a_mask_may_be_closed_only_where_nobody_acts() -> None:
    """In row 1 of copy 1 no action of an agent is open, in row 2 of copy 0 the episode is over."""
    mask = np.ones((3, 2, 2, 4), bool)
    mask[1, 1, 0] = False
    mask[2, 0] = False
    no = jnp.zeros((3, 2), bool)
    over = no.at[2, 0].set(True)
    steps = TimeStep(jnp.zeros((3, 2, 2, 1)), jnp.zeros((3, 2, 2)), over, no, no, action_mask=jnp.asarray(mask))
    last = jax.tree.map(operator.itemgetter(0), steps)
    counts = count_faults(Trajectory(steps, jnp.zeros((3, 2, 2), jnp.int32), ()), last)
    assert {name.rpartition(" ")[2]: float(x) for name, x in counts.items() if x} == {"action_mask": 1}


class ClosedCorridor(Corridor):
    """No action is open once in each episode."""

    def step(self, state: CorridorState, action: Any, context: Any = None) -> tuple[CorridorState, TimeStep]:
        state, timestep = super().step(state, action, context)
        return state, dataclasses.replace(timestep, action_mask=timestep.action_mask & (state.t != 2))


def test_a_mask_without_an_open_action_ends_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{FLAGS} --algo helpers.tiny:TinyQ --env test_trainer:ClosedCorridor --runs {tmp_path}"
    assert jaxrl.cli.train.main(flags.split()) == 1
    error = capsys.readouterr().err
    assert "action_mask closes every action of an agent" in error and "Traceback" not in error
