"""Exported actions are those that the environment's own package gets from training and evaluation."""

import json
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import by_day
from helpers.exported import OPENERS

from envs_jax.base import make
from envs_jax.batch import batched
from jaxrl.algos.ddpg import Ddpg
from jaxrl.algos.ppo import Ppo
from jaxrl.algos.sac import Sac
from jaxrl.integrations.export.formats import export
from jaxrl.rl.data_parallel import DataParallel, make_mesh
from jaxrl.runtime.policy import Policy
from jaxrl.runtime.rollouts import Evaluator, learned_policy

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("pettingzoo")
from gymnasium import spaces  # noqa: E402

pytestmark = pytest.mark.needs("gymnasium", "pettingzoo", "onnx", "onnxruntime", "flatbuffers", "safetensors")

ROWS = 8  # episodes, of LIMIT steps
LIMIT = 3


class Recorder(gymnasium.Env):  # type: ignore[misc, name-defined]
    """Draws observations, and keeps what it showed before each action that it got."""

    rows: ClassVar[list[tuple[np.ndarray, Any]]] = []

    def __init__(self, action: Any) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = action

    def _draw(self) -> np.ndarray:
        self.shown = self.np_random.normal(size=3).astype(np.float32)
        return self.shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> Any:
        assert np.asarray(action) in self.action_space
        self.rows.append((self.shown, np.array(action)))
        return self._draw(), 0.0, False, False, {}


def box(low: Any, high: Any, dtype: Any = np.float32) -> Any:
    return spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


FLOAT64 = box([[0.1, -0.1], [-3, 2]], [[0.3, 0.7], [-1, 2.5]], np.float64)
# {name: (space, its lowest and its highest actions as the manifest shows them)}
SPACES: dict[str, tuple[Any, Any, Any]] = {
    "unequal": (box([0, -200], [1, 200]), [0, -200], [1, 200]),
    "equal": (box([-2, -2], [2, 2]), -2, 2),
    "float64": (FLOAT64, FLOAT64.low.tolist(), FLOAT64.high.tolist()),
    "fixed": (box([0, 5, -200], [1, 5, 200]), [0, 5, -200], [1, 5, 200]),
    "from five": (spaces.Discrete(3, start=5), 5, 7),
    "several": (spaces.MultiDiscrete([2, 3], start=[0, 5]), [0, 5], [1, 7]),
    "table": (spaces.MultiDiscrete(np.array([[2, 2], [2, 1]])), 0, [[1, 1], [1, 0]]),
    "binary": (spaces.MultiBinary(2), 0, 1),
    "integers": (box([-1, 3], [1, 4], np.int64), [-1, 3], [1, 4]),
    "one": (spaces.Discrete(4), 0, 3),
}
SMALL: dict[str, Any] = {"hidden_size": 8, "depth": 1}
OFF: dict[str, Any] = SMALL | {"batch_size": 8, "buffer_size": 64, "env_steps_per_update": 1}


def make_policy(env: Any, algo: Any = Ppo, **settings: Any) -> Policy:
    """Large weights make actions differ between observations."""
    more = {"num_minibatches": 1, "initializer": "torch"} if algo is Ppo else OFF
    algorithm = algo(env.spec, DataParallel(1), **SMALL | more | settings)
    params = jax.jit(lambda: algorithm.policy(algorithm.init(jax.random.key(1), None)))()
    return Policy(env, algorithm, jax.tree.map(lambda x: 3 * x, params))


def play(policy: Policy) -> None:
    env = batched(policy.env)
    evaluator = Evaluator(env, learned_policy(policy.algo), ROWS, make_mesh(1), init_carry=policy.algo.init_carry)
    jax.block_until_ready(evaluator.jit_final_values()(policy.params, jax.random.key(3), ()))
    assert env.failure is None


def play_recorded(policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """What `Recorder` showed, [N, 1, 3], and the actions that it got for it."""
    Recorder.rows.clear()
    play(policy)
    shown, actions = zip(*Recorder.rows, strict=True)
    return np.stack(shown)[:, None], np.stack(actions)


def gymnasium_policy(name: str, *arguments: Any) -> Policy:
    """A policy in an environment with one of SPACES."""
    full_name = f"units/{name.replace(' ', '-')}-v0"
    if full_name not in gymnasium.registry:
        gymnasium.register(full_name, entry_point=lambda: Recorder(SPACES[name][0]), max_episode_steps=LIMIT)
    return make_policy(make(f"gymnasium:{full_name}"), *arguments)


def run(form: str, policy: Policy, folder: Path, arrays: dict[str, Any]) -> list[np.ndarray]:
    """Actions of a policy that is exported to a folder; NumPy's are also taken without a batch axis."""
    export(policy, form, folder)
    act = OPENERS[form](folder)
    actions, _ = act(arrays)
    if form == "numpy":
        for action, one in zip(actions, act({key: x[1] for key, x in arrays.items()})[0], strict=True):
            np.testing.assert_allclose(action[1], one, atol=1e-5)
    return actions


@pytest.mark.parametrize("name", by_day(SPACES, {"unequal", "fixed", "from five", "several", "binary"}))
def test_actions_are_those_that_the_package_got(name: str, tmp_path: Path) -> None:
    policy = gymnasium_policy(name)
    space, *bounds = SPACES[name]
    observation, expected = play_recorded(policy)
    assert len(expected) == ROWS * LIMIT and len(np.unique(expected, axis=0)) > 1
    for form in OPENERS:
        (action,) = run(form, policy, tmp_path / form, {"observation": observation})
        assert action.shape == (len(expected), 1, *space.shape)
        np.testing.assert_allclose(action[:, 0], expected, rtol=1e-5, atol=1e-5)
    chosen = policy.env.to_package_action(policy(observation)[0])
    np.testing.assert_allclose(np.asarray(chosen)[:, 0], expected, rtol=1e-5, atol=1e-5)
    if name in ("unequal", "equal", "float64"):
        np.testing.assert_array_equal(chosen, policy(observation)[0])
    for form in ("stablehlo", "onnx"):
        (row,) = json.loads((tmp_path / form / "policy.json").read_text())["action"]
        assert "environment's own units" in row["about"]
        for side, bound in zip(("low", "high"), bounds, strict=True):
            np.testing.assert_allclose(row[side], bound, rtol=1e-6)
            assert isinstance(row[side], list) == isinstance(bound, list)


@pytest.mark.parametrize("algo", [Sac, pytest.param(Ddpg, marks=pytest.mark.slow)])
def test_other_algorithms(algo: Any, tmp_path: Path) -> None:
    policy = gymnasium_policy("unequal", algo)
    observation, expected = play_recorded(policy)
    (action,) = run("numpy", policy, tmp_path, {"observation": observation})
    np.testing.assert_allclose(action[:, 0], expected, rtol=1e-4, atol=1e-4)
    assert np.abs(action[..., 1]).max() > 20


def test_a_team_whose_actions_have_different_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hunters choose two integers, the prey one; each has an output of its own."""
    from helpers import hunt

    rows: list[tuple[int, dict[str, Any]]] = []
    step = hunt.Hunt.step

    def record(self: Any, actions: dict[str, Any]) -> Any:
        rows.append((self.t, dict(actions)))
        return step(self, actions)

    monkeypatch.setattr(hunt.Hunt, "step", record)
    policy = make_policy(make("pettingzoo:helpers.hunt"))
    play(policy)
    rows = [row for row in rows if "prey_0" in row[1]]
    times = np.array([t for t, _ in rows])
    assert set(times) == {0, 1}
    observation = np.zeros((len(rows), 3, 2), np.float32)
    observation[:, :, 0], observation[:, [0, 2], 1] = times[:, None], 1
    mask = np.ones((len(rows), 3, 4), bool)
    mask[:, 1, 1], mask[:, 1, 3] = times % 2 == 0, False
    names = ("hunter_0", "prey_0", "hunter_1")
    for form in OPENERS:
        actions = run(form, policy, tmp_path / form, {"observation": observation, "action_mask": mask})
        for name, action in zip(names, actions, strict=True):
            np.testing.assert_array_equal(action, [row[name] for _, row in rows])
    manifest = json.loads((tmp_path / "onnx" / "policy.json").read_text())
    assert [row["name"] for row in manifest["action"]] == [f"action.{name}" for name in names]
    assert [row["shape"] for row in manifest["action"]] == [["batch", 2], ["batch"], ["batch", 2]]
    assert [(row["low"], row["high"]) for row in manifest["action"]] == [(0, 1), (0, 2), (0, 1)]
    assert manifest["agents"] == list(names)
    hunters, prey = manifest["observation_parts"]
    assert (hunters["agents"], prey["agents"]) == (["hunter_0", "hunter_1"], ["prey_0"])
    assert prey["parts"][0]["part"] == "observation" and "action_mask" not in json.dumps(prey)


class Kinds(Recorder):
    """Observations of all kinds."""

    def __init__(self) -> None:
        super().__init__(spaces.Discrete(2))
        self.observation_space = spaces.Dict({
            "box": spaces.Box(-1, 1, (2, 2), np.float64),
            "two": spaces.Tuple((spaces.Discrete(3, start=-1), spaces.MultiBinary(2))),
            "counts": spaces.MultiDiscrete([2, 3], start=[0, 1]),
        })  # fmt: skip


class Pixels(Recorder):
    """An image of bytes, planes first."""

    def __init__(self) -> None:
        super().__init__(spaces.Discrete(2))
        self.observation_space = spaces.Box(0, 255, (2, 9, 10), np.uint8)


def test_the_manifest_says_how_observations_are_built(tmp_path: Path) -> None:
    for kind in (Kinds, Pixels):
        if f"units/{kind.__name__}-v0" not in gymnasium.registry:
            gymnasium.register(f"units/{kind.__name__}-v0", entry_point=kind, max_episode_steps=LIMIT)

    def describe(name: str) -> Any:
        export(make_policy(make(f"gymnasium:units/{name}-v0")), "onnx", tmp_path / name)
        manifest = json.loads((tmp_path / name / "policy.json").read_text())
        (group,) = manifest["observation_parts"]
        assert group["agents"] == manifest["agents"] == ["agent"]
        return manifest["inputs"][0], group["parts"]

    row, parts = describe("Kinds")
    assert row["shape"] == ["batch", 1, 14] and row["low"] is row["high"] is None
    assert parts == [
        {"part": "box", "space": "Box[2, 2] of float64", "shape": [2, 2], "encoding": "as it is", "numbers": [0, 4]},
        {"part": "counts", "space": str(Kinds().observation_space["counts"]), "shape": [5],
         "encoding": "each integer one-hot, one after the other", "numbers": [4, 9]},
        {"part": "two.0", "space": "Discrete(3, start=-1)", "shape": [3], "encoding": "one-hot, the first is -1",
         "numbers": [9, 12]},
        {"part": "two.1", "space": "MultiBinary(2)", "shape": [2], "encoding": "as it is", "numbers": [12, 14]},
    ]  # fmt: skip
    row, parts = describe("Pixels")
    assert (row["shape"], row["low"], row["high"]) == (["batch", 1, 9, 10, 2], 0, 1)
    assert parts == [
        {"space": "Box[2, 9, 10] of uint8", "shape": [9, 10, 2], "encoding": "divided by 255, channels last",
         "channels": [0, 2]}
    ]  # fmt: skip


def test_safetensors_have_the_bounds(tmp_path: Path) -> None:
    import safetensors

    export(gymnasium_policy("unequal"), "safetensors", tmp_path)
    with safetensors.safe_open(str(tmp_path / "policy.safetensors"), framework="numpy") as file:
        bounds = json.loads(file.metadata()["bounds"])
    assert bounds["action"] == {"low": [0, -200], "high": [1, 200]}
    assert bounds["observation"] == {"low": None, "high": None}


def test_json_of_bounds_is_strict(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    export(gymnasium_policy("unequal"), "stablehlo", tmp_path)
    manifest = json.loads((tmp_path / "policy.json").read_text(), parse_constant=refuse)
    assert manifest["call"] == "jax.export.deserialize(bytes).call(observation) -> action"
    assert jnp.float32(manifest["action"][0]["high"][1]) == 200
