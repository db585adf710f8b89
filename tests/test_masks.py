"""Closed actions are never played: by any algorithm with discrete actions, its policy, and every export of it."""

import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import by_day
from helpers.exported import load_agent
from helpers.tiny import TinyQ

from envs_jax import Box, Discrete, Environment, EnvSpec, TimeStep, restart, transition
from envs_jax.base import Array, setting
from envs_jax.batch import batched
from envs_jax.progress import start
from jaxrl.algos.base import Custom
from jaxrl.algos.coma import Coma
from jaxrl.algos.coma_original import ComaOriginal
from jaxrl.algos.ddpg import Bicnet, Ddpg
from jaxrl.algos.ppo import Ppo
from jaxrl.integrations.export.formats import export
from jaxrl.integrations.export.greedy import make_greedy
from jaxrl.nn import distributions
from jaxrl.rl.data_parallel import DataParallel, make_mesh
from jaxrl.runtime.policy import Policy
from jaxrl.runtime.rollouts import Evaluator, learned_policy

ROWS, AGENTS, ACTIONS = 50_000, 2, 4  # 10^5 choices of an action
REPLAY: dict[str, Any] = {"batch_size": 8, "buffer_size": 64, "hidden_size": 4, "depth": 1}
ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo": (Ppo, {"normalize_observation": "never", "num_minibatches": 1, "hidden_size": 4, "depth": 1}),
    "coma": (Coma, {"minibatch_size": 8, "hidden_size": 4, "depth": 1}),
    "coma_original": (ComaOriginal, {"minibatch_size": 8, "hidden_size": 4, "depth": 1}),
    "ddpg": (Ddpg, REPLAY),
    "ddpg_random_steps": (Ddpg, REPLAY | {"random_steps": 800, "eps_start": 0.0}),
    "ddpg_expected": (Ddpg, REPLAY | {"action_gradient": "expected"}),
    "bicnet": (Bicnet, REPLAY),
}


@dataclasses.dataclass(frozen=True)
class Closing(Environment):
    """Random observations and, unless `masks` is False, random masks; `closed` counts the closed actions played."""

    masks: bool = setting(True, "close actions")

    @property
    def spec(self) -> EnvSpec:
        box = Box((ACTIONS,))
        return EnvSpec("closing", AGENTS, box, Discrete(ACTIONS), 8, fixed_horizon=True, metrics={"closed": "sum"})

    def _draw_view(self, key: Array) -> tuple[Array, Array]:
        keys = jax.random.split(key)
        mask = jax.random.bernoulli(keys[0], 0.4, (AGENTS, ACTIONS))
        mask |= ~mask.any(-1, keepdims=True) & (jnp.arange(ACTIONS) == 2)[None]
        return 3 * jax.random.normal(keys[1], (AGENTS, ACTIONS)), mask

    def reset(self, key: Array, context: Any = None) -> tuple[Any, TimeStep]:
        observation, mask = self._draw_view(key)
        optional = {"action_mask": mask if self.masks else None}
        return (key, jnp.int32(0), mask), restart(observation, metrics={"closed": 0}, **optional)

    def step(self, state: Any, action: Array, context: Any = None) -> tuple[Any, TimeStep]:
        key, t, mask = state
        closed = jnp.sum(~jnp.take_along_axis(mask, action[:, None], 1), dtype=jnp.int32)
        observation, mask = self._draw_view(jax.random.fold_in(key, t))
        optional = {"action_mask": mask if self.masks else None, "truncated": t + 1 >= 8}
        return (key, t + 1, mask), transition(0.0, observation, metrics={"closed": closed}, **optional)


class Logits(nn.Module):
    """The observation is the logits."""

    outputs: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + self.param("shift", nn.initializers.zeros, (1,))[0]


def make_policy(name: str, custom: bool = True, **changes: Any) -> Policy:
    """A policy that takes its observations for logits, or one with fresh networks."""
    cls, settings = ALGORITHMS[name]
    env = Closing()
    more: dict[str, Any] = {"custom": Custom({"actor": Logits})} if custom else {}
    algo = cls(env.spec, DataParallel(8), **settings, **more, **changes)
    params = jax.jit(lambda key: algo.policy(algo.init(key, None)))(jax.random.key(0))
    return Policy(env, algo, params if custom else jax.tree.map(lambda x: 3 * x, params))


def drawn() -> tuple[np.ndarray, np.ndarray]:
    """Logits float32 and masks bool [ROWS, AGENTS, ACTIONS]: one action open, all of them, or some."""
    rng = np.random.default_rng(0)
    some = rng.random((ROWS, AGENTS, ACTIONS)) < 0.5
    only = rng.integers(0, ACTIONS, (ROWS, AGENTS))[..., None] == np.arange(ACTIONS)
    kind = rng.integers(0, 3, ROWS)[:, None, None]
    mask = np.where(kind == 0, only, (kind == 1) | some | ~some.any(-1, keepdims=True) & only)
    plain = rng.normal(size=mask.shape).round(2)  # rounding must not decide between them
    huge, reopening = np.where(plain > 0, 1e30, -1e30), np.where(mask, -1e30, 1e30)
    kinds = [plain, 1e4 * plain, huge, reopening, np.where(mask, plain, 100.0)]
    logits = np.choose(rng.integers(0, len(kinds), ROWS)[:, None, None], kinds)
    return logits.astype(np.float32), mask


LOGITS, MASK = drawn()


def check(action: Any, every: bool = True, mask: np.ndarray = MASK) -> None:
    action = np.asarray(action)
    assert action.shape == mask.shape[:2] and np.take_along_axis(mask, action[..., None], -1).all()
    assert not every or np.all(np.bincount(action.ravel()) > 100)


@pytest.mark.parametrize("name", by_day(ALGORITHMS, {*ALGORITHMS} - {"coma_original"}))  # which acts as coma does
def test_closed_actions_are_never_played(name: str) -> None:
    """While exploring, by the policy, drawn and greedy, and in evaluation; masks of bool and of int8."""
    policy = make_policy(name)
    timestep = jax.eval_shape(jax.vmap(policy.env.reset), jax.random.split(jax.random.key(0), ROWS))[1]
    timestep = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), timestep)
    timestep = dataclasses.replace(timestep, observation=jnp.asarray(LOGITS), action_mask=jnp.asarray(MASK))
    explore = jax.jit(lambda timestep, keys: policy.algo.act(policy.params, (), timestep, keys, start(), "explore")[0])
    check(explore(timestep, jax.random.split(jax.random.key(1), ROWS)))
    check(policy(LOGITS, action_mask=MASK, key=jax.random.key(2))[0])
    greedy = policy(LOGITS, action_mask=MASK.astype(np.int8))[0]
    check(greedy)
    np.testing.assert_array_equal(greedy, np.where(MASK, LOGITS, -np.inf).argmax(-1))
    evaluator = Evaluator(batched(policy.env), learned_policy(policy.algo, "sample"), 256, make_mesh(1))
    assert float(evaluator.jit_final_values()(policy.params, jax.random.key(3), ())["closed"].max()) == 0


@pytest.mark.parametrize("name", ["ppo", "coma", "ddpg", "ddpg_expected", "bicnet"])
def test_exported_agents_play_no_closed_action(name: str, tmp_path: Path) -> None:
    """They take the mask, and choose as the policy does: agent.py, and the function in StableHLO and ONNX files."""
    policy = make_policy(name, custom=False)
    expected = policy(LOGITS, action_mask=MASK)[0]
    check(expected, every=False)
    export(policy, "numpy", tmp_path)
    act = load_agent(tmp_path).act
    agent = act(LOGITS, action_mask=MASK.astype(np.int8))
    check(agent, every=False)
    assert np.mean(agent == expected) > 0.999  # except where rounding decides between logits that are nearly equal
    greedy = make_greedy(policy)
    assert [argument.name for argument in greedy.inputs] == ["observation", "action_mask"]
    check(jax.jit(greedy.function)(LOGITS, MASK), every=False)


@pytest.mark.needs("onnx", "onnxruntime")
def test_onnx_plays_no_closed_action(tmp_path: Path) -> None:
    import onnxruntime

    for name in ("ppo", "coma", "ddpg"):
        export(make_policy(name, custom=False), "onnx", tmp_path)
        session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"), providers=["CPUExecutionProvider"])
        check(session.run(None, {"observation": LOGITS, "action_mask": MASK})[0], every=False)


WRONG: dict[str, tuple[Any, str]] = {
    "floats": (np.where(MASK[0], 0.0, -np.inf), r"of bool or of integers 0 and 1 \(open\), not of float64"),
    "words": ([["open"] * ACTIONS] * AGENTS, "of bool or of integers"),
    "other numbers": (2 * MASK[0].astype(np.int8), "must hold 1 where an action is open and 0 elsewhere"),
    "negative": (-MASK[0].astype(np.int64), "must hold 1 where an action is open and 0 elsewhere"),
    "another agent": (MASK[0, :1], r"must have the shape \(2, 4\), as the observation has, not \(1, 4\)"),
    "a batch": (MASK[:1], r"must have the shape \(2, 4\), as the observation has, not \(1, 2, 4\)"),
    "nothing open": (np.array([[0, 1, 1, 1], [0] * 4]), "closes every action of an agent: leave at least one open"),
}


def test_what_is_no_mask_is_refused(tmp_path: Path) -> None:
    policy, observation = make_policy("ddpg", custom=False), np.zeros((AGENTS, ACTIONS), np.float32)
    timestep = policy.env.reset(jax.random.key(0))[1]
    export(policy, "numpy", tmp_path)
    act = load_agent(tmp_path).act
    for mask, sentence in WRONG.values():
        with pytest.raises(ValueError, match=sentence):
            policy(observation, action_mask=mask)
        with pytest.raises(ValueError, match=sentence):
            act(observation, action_mask=mask)
        with pytest.raises(ValueError, match=sentence):
            policy(dataclasses.replace(timestep, action_mask=mask))


def test_a_mask_is_given_where_it_is_needed_and_nowhere_else(tmp_path: Path) -> None:
    observation = np.zeros((AGENTS, ACTIONS), np.float32)
    policy = make_policy("ddpg", custom=False)
    free = dataclasses.replace(policy, env=Closing(masks=False))
    timestep = policy.env.reset(jax.random.key(0))[1]
    for without in (observation, observation[None], dataclasses.replace(timestep, action_mask=None)):
        with pytest.raises(ValueError, match=r"'closing' closes actions.*give action_mask, bool\[.*2, 4\]"):
            policy(without)
    masked = policy(timestep.observation, action_mask=timestep.action_mask)[0]
    np.testing.assert_array_equal(policy(timestep)[0], masked)
    assert free(observation)[0].shape == (AGENTS,)
    with pytest.raises(ValueError, match="has no action masks: leave action_mask out"):
        free(observation, action_mask=MASK[0])
    for name, one in (("needed", policy), ("free", free)):
        export(one, "numpy", tmp_path / name)
    with pytest.raises(ValueError, match=r"needs action_mask, bool\[2, 4\], true where an action is open"):
        load_agent(tmp_path / "needed").act(observation)
    assert load_agent(tmp_path / "free").act(observation).shape == (AGENTS,)
    with pytest.raises(ValueError, match="trained without action masks: leave action_mask out"):
        load_agent(tmp_path / "free").act(observation, action_mask=MASK[0])


def test_masking_false_plays_closed_actions_and_says_so() -> None:
    """As the published trainers do; a mask of one's own is not ignored, but refused."""
    policy = make_policy("ddpg", masking=False)
    assert policy(LOGITS)[0].shape == MASK.shape[:2]
    with pytest.raises(ValueError, match="ignores action masks, as in its training"):
        policy(LOGITS, action_mask=MASK)
    evaluator = Evaluator(batched(policy.env), learned_policy(policy.algo), 256, make_mesh(1))
    assert float(evaluator.jit_final_values()(policy.params, jax.random.key(3), ())["closed"].mean()) > 1


def test_an_algorithm_that_ignores_masks_is_found_out() -> None:
    class Careless(TinyQ):
        respects_masks = True

    env = Closing()
    policy = Policy(env, Careless(env.spec, DataParallel(1)), jnp.eye(ACTIONS))
    with pytest.raises(ValueError, match="Careless chose an action that action_mask closes"):
        policy(LOGITS, action_mask=MASK)


def test_policies_take_masks_in_compiled_functions() -> None:
    """Values are not known there; types and shapes are."""
    policy = make_policy("ppo")
    act = jax.jit(lambda observation, mask: policy(observation, action_mask=mask)[0])
    check(act(LOGITS, MASK.astype(np.int8)))
    with pytest.raises(ValueError, match="of bool or of integers"):
        act(LOGITS, MASK.astype(np.float32))


def test_exploring_numbers_of_0_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform number is 0 once in 2^23."""
    algo, only = Ddpg(Closing().spec, DataParallel(8)), np.arange(ACTIONS) == 3
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape=(), *_, **__: jnp.zeros(shape))
    vector, mask = np.full((1, AGENTS, ACTIONS), 0.25, np.float32), np.broadcast_to(only, (1, AGENTS, ACTIONS))
    keys, always = jax.random.split(jax.random.key(0), 1), jnp.ones(1)
    assert np.all(algo.explore(vector, mask, keys, always, None)[0] == 3)


def test_masked_logits_by_hand() -> None:
    """-inf where an action is closed, however small the others are; padding without an open action stays finite."""
    logits = np.array([[1.0, -1e30, 3.0], [1.0, 2.0, 3.0]], np.float32)
    mask = np.array([[False, True, False], [False, False, False]])
    masked = distributions.mask_logits(logits, mask)
    np.testing.assert_array_equal(masked, np.array([[-np.inf, -1e30, -np.inf], [1.0, 2.0, 3.0]], np.float32))
    np.testing.assert_array_equal(jax.nn.softmax(masked)[0], [0.0, 1.0, 0.0])
    gradient = jax.grad(lambda x: jax.nn.softmax(distributions.mask_logits(x, mask))[:, 1].sum())(jnp.asarray(logits))
    assert np.isfinite(gradient).all()
