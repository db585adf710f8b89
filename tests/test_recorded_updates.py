"""Updates of every learner against independent PyTorch learners, recorded by scripts/record_torch_updates.py.

Compared is by how much weights moved: in units of the learning rates, not of the weights.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.off_policy import with_epsilon

from bench.parity.learner import image_spec
from envs_jax import Box, Discrete, EnvSpec, TimeStep
from envs_jax.progress import Progress, count, start
from jaxrl.algos.base import Algorithm, AlgoState, Trajectory
from jaxrl.algos.coma import Coma
from jaxrl.algos.ddpg import Bicnet, Ddpg
from jaxrl.algos.sac import Sac
from jaxrl.rl.data_parallel import DataParallel

FILE = Path(__file__).parent / "data" / "torch_updates.npz"
Recorded = tuple[dict[str, np.ndarray], list[dict[str, Any]]]

# Two float32 learners: shares of the longest move, of the largest weight (3 roundings) and of a loss; half was seen.
MOVES, WEIGHTS, LOSSES = 4e-6, 2e-7, 2e-6


@functools.cache
def records() -> dict[str, np.ndarray]:
    with np.load(FILE, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def settings(case: str) -> dict[str, Any]:
    return json.loads(str(records()["settings"]))[case]


def configure(algorithm: type[Algorithm], case: str) -> Any:
    """The algorithm with the recorded settings, of which Adam's epsilon is one."""
    case_settings = settings(case)
    if "num_minibatches" in case_settings:
        case_settings["minibatch_size"] = MISSIONS * STEPS * TEAM // case_settings.pop("num_minibatches")
    for name in ("eps_anneal", "entropy_anneal"):  # recorded as missions
        if name in case_settings:
            case_settings[name] /= RUN
    if "scale_advantage" in case_settings:
        case_settings["normalize_advantage"] = case_settings.pop("scale_advantage")
    return functools.partial(with_epsilon(algorithm, case_settings.pop("adam_epsilon")), **case_settings)


def load_updates(case: str) -> Recorded:
    """Initial vectors by network, and of each update {"batch", "after", "metrics"}."""
    initial: dict[str, np.ndarray] = {}
    updates: dict[int, dict[str, Any]] = {}
    for path, values in records().items():
        owner, *place = path.split("/")
        if owner != case:
            continue
        if place[0] == "initial":
            initial[place[1]] = values
        elif place[1] == "metrics":
            updates.setdefault(int(place[0]), {})["metrics"] = json.loads(str(values))
        else:
            updates.setdefault(int(place[0]), {}).setdefault(place[1], {})[place[2]] = values
    return initial, [updates[index] for index in range(len(updates))]


# ---------------------------------------------------------------- networks in PyTorch's order and layout


def places(params: dict[str, Any]) -> list[tuple[str, ...]]:
    """Paths of a network's leaves in PyTorch's order."""
    head = ("head",) if "head" in params else ()
    paths: list[tuple[str, ...]] = [(f"conv{k}_{kind}",) for k in (1, 2, 3) for kind in ("kernel", "bias") if head]
    for layer in (1, 2):
        for name in (f"fc{layer}_kernel", f"fc{layer}_bias", f"norm{layer}_scale", f"norm{layer}_bias"):
            paths += [(*head, name)] if name in (params["head"] if head else params) else []
        if layer == 1 and "lstm" in params:
            for way in ("there", "back"):
                paths += [
                    ("lstm", f"{way}_{source}_{kind}") for kind in ("kernel", "bias") for source in ("input", "state")
                ]
    return paths + [(*head, "out_kernel"), (*head, "out_bias")]


AXES = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}  # ours -> PyTorch's


def from_vector(template: Any, vector: np.ndarray) -> Any:
    """A network like `template`, without an axis of critics, from a recorded vector; all of it is used."""
    tree: dict[str, Any] = {"params": {}}
    for path in places(template["params"]):
        leaf = functools.reduce(lambda part, key: part[key], path, template["params"])
        axes = AXES[len(leaf.shape)]
        shape = tuple(leaf.shape[axis] for axis in axes)
        size = int(np.prod(shape))
        values, vector = vector[:size].reshape(shape).transpose(np.argsort(axes)), vector[size:]
        place = functools.reduce(lambda part, key: part.setdefault(key, {}), path[:-1], tree["params"])
        place[path[-1]] = np.ascontiguousarray(values)
    assert len(vector) == 0 and jax.tree.structure(tree) == jax.tree.structure(template)
    return tree


def to_vector(tree: Any) -> np.ndarray:
    leaves = [functools.reduce(lambda part, key: part[key], path, tree["params"]) for path in places(tree["params"])]
    return np.concatenate([np.asarray(x).transpose(AXES[x.ndim]).ravel() for x in leaves])


def critics_from(template: Any, vector: np.ndarray) -> Any:
    """Critics [C, ...] from the vectors of all, one after another."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), template)
    critics = [from_vector(one, part) for part in np.split(vector, jax.tree.leaves(template)[0].shape[0])]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *critics)


def critics_to(tree: Any) -> np.ndarray:
    count = jax.tree.leaves(tree)[0].shape[0]
    return np.concatenate([to_vector(jax.tree.map(lambda x, k=k: np.asarray(x)[k], tree)) for k in range(count)])


# ---------------------------------------------------------------- comparison


def check(initial: dict[str, np.ndarray], update: dict[str, Any], ours: dict[str, np.ndarray], index: int) -> None:
    """By how much every network has moved since the start, number by number."""
    assert set(ours) == set(update["after"])
    for name, values in ours.items():
        expected = update["after"][name] - initial[name]
        actual = np.asarray(values) - initial[name]
        allowed = MOVES * (1 + index) * np.abs(expected).max() + WEIGHTS * np.abs(initial[name]).max()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=allowed, err_msg=f"{name}, update {index}")


def check_metrics(update: dict[str, Any], ours: dict[str, Any], index: int, scale: float = 0.1) -> None:
    """All that was recorded, to LOSSES of its size or of `scale`."""
    for name, expected in update["metrics"].items():
        allowed = LOSSES * (1 + index)
        assert float(ours[name]) == pytest.approx(expected, rel=allowed, abs=allowed * scale), (name, index)


# ---------------------------------------------------------------- COMA

MISSIONS, STEPS, TEAM, CHOICES = 3, 3, 3, 4
RUN = 4 * MISSIONS  # missions


def missions(batch: dict[str, np.ndarray]) -> tuple[Trajectory, TimeStep]:
    """A recorded batch [K, ...], mission after mission, as what our learner gets."""

    def rows(values: np.ndarray) -> jax.Array:
        return np.ascontiguousarray(values.reshape(MISSIONS, STEPS, *values.shape[1:]).swapaxes(0, 1))

    reward = jnp.repeat(rows(batch["reward"])[..., None], TEAM, axis=-1)
    flags = np.zeros((STEPS, MISSIONS), bool)
    timestep = TimeStep(
        observation=rows(batch["observation"] / np.float32(8)),
        action_mask=np.ones((STEPS, MISSIONS, TEAM, CHOICES), bool),
        global_state=rows(batch["critic_input"] / np.float32(8)),
        reward=np.concatenate([np.zeros_like(reward[:1]), reward[:-1]]),
        terminated=flags,
        truncated=flags,
        first=np.arange(STEPS)[:, None] * np.ones_like(flags) == 0,
    )
    last = jax.tree.map(lambda x: x[-1], timestep)
    last = dataclasses.replace(last, reward=reward[-1], terminated=~flags[0])
    extras = {"mask": rows(batch["mask"]), "log_prob": rows(batch["log_prob"])}
    return Trajectory(timestep, rows(batch["action"].astype(np.int32)), extras), last


@pytest.mark.parametrize("case", ["coma", "coma soft", "coma clipped"])
def test_coma(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole training steps: targets, passes over shuffled minibatches, copies of the critic, schedules."""
    initial, updates = load_updates(case)
    algo = configure(Coma, case)(image_spec(TEAM, CHOICES, STEPS), DataParallel(MISSIONS))
    nets = {name: algo.networks[name.removeprefix("target_")] for name in initial}
    networks = {name: from_vector(nets[name].shapes, values) for name, values in initial.items()}
    state = jax.jit(lambda inputs: algo.init(jax.random.key(0), inputs))(networks)
    state = AlgoState(dataclasses.replace(state.replicated, target=networks["target_critic"]), state.sharded)

    def learn(state: AlgoState, trajectory: Trajectory, last: TimeStep, order: jax.Array, progress: Progress) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(jax.random, "permutation", lambda key, samples: order)
            return algo.learn(state, trajectory, last, jax.random.key(0), progress, algo.phases[0])

    learn = jax.jit(learn)
    for index, update in enumerate(updates):
        progress = dataclasses.replace(
            start(RUN * STEPS),
            env_steps=count(index * MISSIONS * STEPS),
            episodes=count(index * MISSIONS),
            learn_calls=count(index),
            fraction=jnp.float32(index / 4),
        )
        order = jnp.asarray(update["batch"]["order"].astype(np.int32))
        state, metrics = learn(state, *missions(update["batch"]), order, progress)
        params = state.replicated
        ours = {"actor": params.actor.params, "critic": params.critic.params, "target_critic": params.target}
        means = {name: float(values.mean()) for name, values in metrics.items()}
        means["advantage_mean"] = means["advantage"]
        del update["metrics"]["advantage_std"]  # of samples, not of the batch
        check_metrics(update, means, index)
        check(initial, update, {name: to_vector(tree) for name, tree in ours.items()}, index)


# ---------------------------------------------------------------- algorithms with a replay


def sample_of(batch: dict[str, np.ndarray], answer: str) -> dict[str, jax.Array]:
    """A recorded batch as `update` takes it, [1, M, ...]."""
    names = {"observation": "observation", "next": "next_observation", answer: "action"}
    names |= {name: name for name in ("reward", "end", "weight", "mask", "next_mask", "noise", "task")}
    return {names[name]: values[None] for name, values in batch.items() if name in names}


def replay(algo: Any, case: str, networks: tuple[str, ...], answer: str) -> None:
    """Run the recorded updates and compare after each; `networks`, and log_alpha if there is one."""
    initial, updates = load_updates(case)
    nets = {name: algo.networks[name.removeprefix("target_")] for name in networks}
    trees = {
        name: (from_vector if name.endswith("actor") else critics_from)(nets[name].shapes, initial[name])
        for name in networks
    }
    inputs = {"actor": trees["actor"], "critic": trees["critic"]}
    extra = tuple(set(initial) - set(networks))
    inputs |= {name: jnp.asarray(initial[name]) for name in extra}
    params = jax.jit(lambda inputs: algo.init(jax.random.key(0), inputs).replicated)(inputs)
    targets = {name: trees[name] for name in networks if name.startswith("target_")}
    params = dataclasses.replace(params, **targets)
    algo = dataclasses.replace(algo, final_lr_fraction=0.0)

    @jax.jit
    def step(params: Any, batch: Any, count: jax.Array, rate: jax.Array) -> Any:
        return algo.update(params, batch, count, dataclasses.replace(start(), fraction=1 - rate))

    for index, update in enumerate(updates):
        batch = sample_of(update["batch"], answer)
        if algo.spec.num_tasks == 1:
            batch.pop("task", None)
        if "mask" in batch:
            batch["action"] = jnp.argmax(batch["action"], axis=-1).astype(jnp.uint8)
        params, metrics = step(params, batch, np.uint32(index), np.asarray(update["batch"]["rate"]))
        check_metrics(update, metrics, index)
        parts = {name: getattr(params, name) for name in networks}
        ours = {
            name: (to_vector if name.endswith("actor") else critics_to)(getattr(part, "params", part))
            for name, part in parts.items()
        }
        check(initial, update, ours | {name: np.asarray(params.alpha.params) for name in extra}, index)


BOARDS = EnvSpec("boards", 3, Box((5,)), Discrete(4), horizon=50)
ARM = EnvSpec("arm", 2, Box((6,)), Box((3,), low=-1.0, high=1.0), horizon=50)
TWO_TASKS = dataclasses.replace(ARM, num_agents=1, num_tasks=2)


@pytest.mark.parametrize(("case", "cls"), [("ddpg", Ddpg), ("ddpg expected", Ddpg), ("bicnet", Bicnet)])
def test_ddpg(case: str, cls: type[Ddpg]) -> None:
    """Windows of three steps, clipped gradients, samples that count less or not; masks, entropy; an LSTM."""
    algo = configure(cls, case)(BOARDS, DataParallel(1))
    replay(algo, case, ("actor", "critic", "target_actor", "target_critic"), "vector")


@pytest.mark.parametrize(("case", "spec"), [("sac", ARM), ("sac tasks", TWO_TASKS)])
def test_sac(case: str, spec: EnvSpec) -> None:
    """Two agents with the default target entropy; two tasks, windows of three steps, steps of actor and targets due."""
    replay(configure(Sac, case)(spec, DataParallel(1)), case, ("actor", "critic", "target_critic"), "action")


@pytest.mark.slow
@pytest.mark.needs("torch")
def test_the_records_are_what_the_learners_in_pytorch_do() -> None:
    from scripts import record_torch_updates

    again = record_torch_updates.record()
    assert set(again) == set(records())
    for name, values in records().items():
        if values.dtype.kind != "f":
            continue
        np.testing.assert_allclose(again[name], values, rtol=0, atol=1e-6, err_msg=name)
