"""The contract that every environment keeps (`check_env`), and that each broken rule is found and named."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import by_day
from helpers.snakes import OPTIONS
from helpers.tiny import Corridor, CorridorState

import envs_jax
import jaxrl
from envs_jax import Box, EnvSpec, TimeStep
from envs_jax.base import pytree
from envs_jax.batch import BatchedEnvironment, BatchState
from envs_jax.progress import start
from envs_jax.testing import ContractError, check_env, check_types
from jaxrl.common.errors import UserError
from jaxrl.evaluation import policies

# Settings that are small and quick; the first of each registered environment are played in every run, the others
# at night, and so are environments of a class that another one here has. One without an entry is checked as it is.
AT_NIGHT = {"snakes", "snakes_1v1", "snakes_2p", "snakes_5p", "reach"}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "coverage": [
        {"q": 5, "num_agents": 2, "budget": 4},
        {"q": 5, "num_agents": 3, "budget": 4, "random_range": True, "failure_rate": 0.3, "terrain": "mixed"},
        {
            "q": 3, "num_agents": 1, "num_actions": 27, "budget": 3, "belief_dtype": "float32", "terrain": "field",
            "prior": 0.3,
        },
        {"q": 3, "budget": 3, "start": "original", "reward_timing": "original", "map_backend": "windows"},
        {"q": 7, "num_agents": 2, "num_actions": 27, "budget": 3, "belief_dtype": "float32", "start": "corners"},
        {"q": 5, "num_agents": 4, "num_actions": 4, "budget": 2, "reward_timing": "original"},
        {
            "q": 5, "num_agents": 2, "budget": 3, "delay": (0, 2), "failure_rate": (0.0, 0.3), "channel_ramp": 0.5,
            "show_ages": True,
        },
        {"q": 3, "num_agents": 5, "budget": 3, "team_sizes": (2, 4), "loss_rate": 0.3, "delay": 1, "start": "corners"},
        {"q": 3, "num_agents": 3, "num_actions": 27, "budget": 3, "loss_rate": 0.2, "mission_metrics": True},
    ],
    "reach": [{"horizon": 3}],
    "reach_family": [{"horizon": 2, "goals": "uniform", "reward": "v1", "weld": "v2", "partially_observable": True}],
    "snakes": [
        {"height": 5, "width": 6, "max_steps": 6},
        {"max_steps": 6, "observation": "obs30", "reward": "plus", "side": "second", "opponent": "evasion"},
        {"max_steps": 6, "observation": "obs35", "reward": "v1.1", "side": "both", "opponent": "curriculum"},
        {"max_steps": 6, "height": 12, "width": 24, "snakes": 8, "beans": 8, "exclusive_beans": True, "opponent": "4"},
    ],
    "snakes_3v3": [
        {"height": 5, "width": 6, "snakes": 2, "beans": 2, "max_steps": 3, "opponent": "outside", "reward": "score"},
        {"max_steps": 6, "opponent": "outside", "observation": "obs_full", "reward": "score", "masks": True},
    ],
    "snakes_1v1": [
        {"max_steps": 4, "side": "both", "time_limit": "truncate", "opponent": "0:1,1:1", "reward": "score"},
        {"max_steps": 6, "side": "both", "time_limit": "truncate", "opponent": "0:1,2:1,evasion:1", "reward": "score"},
        {
            "max_steps": 6, "height": 3, "width": 3, "beans": 1, "opponent": "outside", "reward": "v1.1_fixed",
            "masks": True,
        },
    ],
    "snakes_2p": [
        {
            "height": 4, "width": 5, "beans": 2, "max_steps": 4, "fixed_respawn": True, "observation": "obs_full",
            "reward": "lives", "masks": True,
        }
    ],
    "snakes_5p": [
        {"max_steps": 6, "time_limit": "truncate"},
        {"max_steps": 6, "observation": "obs26", "reward": "original", "masks": False},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_agents": 3, "length": 3, "horizon": 6}, {"length": 40, "horizon": 5}, {"num_agents": 2, "horizon": 1}],
)
def test_the_corridor_keeps_the_contract(settings: dict[str, int]) -> None:
    check_env(Corridor(**settings))


def registered_cases() -> Iterator[Any]:
    """The first settings of an environment always, others among the long tests."""
    for name in envs_jax.registered():
        for index, settings in enumerate(SETTINGS.get(name, [{}])):
            label = "-".join([name, *(f"{key}={value}" for key, value in settings.items())])
            yield pytest.param(name, settings, id=label, marks=pytest.mark.slow if index or name in AT_NIGHT else ())


@pytest.mark.parametrize(("name", "settings"), list(registered_cases()))
def test_registered_environments_keep_the_contract(name: str, settings: dict[str, Any]) -> None:
    check_env(envs_jax.make(name, **settings))


@pytree
class Place:
    """at float32[A, 2], t int32[], key key[]."""

    at: jax.Array
    t: jax.Array
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Drift(envs_jax.Environment):
    """Continuous actions, nested observations, a global state, a schedule; all episodes equally long."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            name="drift",
            num_agents=2,
            observation={"own": Box((2,)), "clock": Box((), jnp.uint8, 0, 4)},
            action=Box((2,), jnp.float32, -1.0, 1.0),
            horizon=4,
            fixed_horizon=True,
            metrics={"far": "any", "way": "sum"},
            global_state=Box((2, 2)),
            critic_input_spec=Box((4,)),
            critic_input=lambda timestep, action: jnp.concatenate([timestep.observation["own"], action[::-1]], axis=1),
        )

    def context(self, progress: Any) -> Any:
        return {"wind": progress.fraction}

    def _timestep(self, state: Place) -> TimeStep:
        way = jnp.abs(state.at).sum()
        return TimeStep(
            observation={"own": state.at, "clock": jnp.broadcast_to(state.t, (2,)).astype(jnp.uint8)},
            global_state=state.at,
            reward=jnp.where(state.t > 0, -jnp.abs(state.at).sum(1), 0.0),
            terminated=jnp.bool_(False),
            truncated=state.t >= 4,
            first=state.t == 0,
            metrics={"far": (way > 1).astype(jnp.float32), "way": way},
        )

    def reset(self, key: jax.Array, context: Any = None) -> tuple[Place, TimeStep]:
        state = Place(jax.random.normal(key, (2, 2)), jnp.int32(0), key)
        return state, self._timestep(state)

    def step(self, state: Place, action: jax.Array, context: Any = None) -> tuple[Place, TimeStep]:
        context = self.context(start()) if context is None else context
        noise = jax.random.normal(jax.random.fold_in(state.key, state.t), (2, 2))
        state = Place(state.at + action + context["wind"] + 0.1 * noise, state.t + 1, state.key)
        return state, self._timestep(state)

    baselines: ClassVar = {"still": lambda env, state, timestep, key: jnp.zeros((2, 2))}


def test_links_and_types_keep_the_contract() -> None:
    check_env(linked(lambda t, s: hears_other(jnp.minimum(s.t, 1)), max_link_age=1, agent_types=(0, 3))(**TWO))


def test_continuous_actions_nested_observations_and_schedules_keep_the_contract() -> None:
    check_env(Drift())


def test_an_environment_without_randomness_says_so() -> None:
    class Still(Corridor):
        def reset(self, key: Any, context: Any = None) -> Any:
            state = CorridorState(jnp.zeros(self.num_agents, jnp.int32), jnp.int32(0), jax.random.key(0))
            return state, self._timestep(state, 0.0, True)

    check_env(Still(), random=False)
    with pytest.raises(ContractError, match=r"never differ: .*random=False"):
        check_env(Still())


@pytest.mark.parametrize("name", by_day(envs_jax.registered(), {*envs_jax.registered()} - AT_NIGHT - {"snakes_3v3"}))
def test_reset_and_step_need_no_context(name: str) -> None:
    """By day of those without a context; `check_env` looks at the others."""
    env = envs_jax.make(name)
    spec = env.spec
    state, timestep = jax.eval_shape(jax.jit(jax.vmap(env.reset)), jax.random.split(jax.random.key(1), 2))
    action = jax.ShapeDtypeStruct((2, spec.num_agents, *spec.action.shape), spec.action.dtype)
    after, following = jax.eval_shape(jax.jit(jax.vmap(env.step)), state, action)
    assert after == state and following == timestep and timestep.reward.shape == (2, spec.num_agents)


def test_without_a_context_it_is_the_start_of_training() -> None:
    env = envs_jax.make("snakes_1v1", opponent="0 2@0.5", observation="obs26", masks=False)
    reset = jax.jit(env.reset, compiler_options=OPTIONS)
    at_start, without = reset(jax.random.key(1), env.context(start())), reset(jax.random.key(1))
    for a, b in zip(jax.tree.leaves(at_start[1]), jax.tree.leaves(without[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert without[0].level == 0


def test_time_steps_are_made_of_what_there_is() -> None:
    observation = {"own": jnp.ones((3, 2))}
    first = envs_jax.restart(observation, metrics={"apples": 0})
    assert first.first and not first.done and first.metrics["apples"].dtype == jnp.float32
    np.testing.assert_array_equal(first.reward, np.zeros(3, np.float32))
    assert first.action_mask is None and first.mask_state == first.global_state == first.task == ()
    middle = envs_jax.transition(2, observation, metrics={"apples": jnp.bool_(True)}, task=jnp.int32(1))
    np.testing.assert_array_equal(middle.reward, np.full(3, 2, np.float32))
    assert not (middle.first | middle.done) and middle.metrics["apples"] == 1 and middle.task == 1
    last = envs_jax.termination(np.arange(3.0), observation)
    np.testing.assert_array_equal(last.reward, np.arange(3, dtype=np.float32))
    assert last.terminated and not last.truncated
    cut = envs_jax.truncation(0.0, observation)
    assert cut.truncated and not cut.terminated
    types = [jax.tree.map(lambda x: (x.shape, x.dtype), t) for t in (last, cut, envs_jax.restart(observation))]
    assert types[0] == types[1] == types[2]
    with pytest.raises(ValueError, match=r"one number, or 3, one for each agent .* not of shape \(2,\)"):
        envs_jax.transition(np.zeros(2), observation)


# Broken environments. Each class breaks one rule of the corridor; the sentence must name it.


class Broken(Corridor):
    """A corridor whose specs, time steps or states are changed by `spoil_*`."""

    def spoil_spec(self, spec: EnvSpec) -> Any:
        return spec

    def spoil_state(self, state: CorridorState, after_reset: bool) -> Any:
        return state

    def spoil(self, timestep: TimeStep, state: CorridorState) -> Any:
        return timestep

    @property
    def spec(self) -> EnvSpec:
        return self.spoil_spec(super().spec)

    def reset(self, key: Any, context: Any = None) -> Any:
        state, timestep = super().reset(key, context)
        return self.spoil_state(state, True), self.spoil(timestep, state)

    def step(self, state: Any, action: Any, context: Any = None) -> Any:
        state, timestep = super().step(state, action, context)
        return self.spoil_state(state, False), self.spoil(timestep, state)


def spec_with(**changes: Any) -> type[Corridor]:
    return timestep_with(changes)


def timestep_with(spec_changes: dict[str, Any] | None = None, **fields: Any) -> type[Corridor]:
    """Fields of the time step as functions of (timestep, state), and changes of the spec."""

    class Changed(Broken):
        def spoil_spec(self, spec: EnvSpec) -> EnvSpec:
            return dataclasses.replace(spec, **spec_changes or {})

        def spoil(self, timestep: TimeStep, state: CorridorState) -> TimeStep:
            return dataclasses.replace(timestep, **{name: f(timestep, state) for name, f in fields.items()})

    return Changed


def linked(links: Any, **changes: Any) -> type[Corridor]:
    """Links as a function of (timestep, state), and changes of the spec."""
    return timestep_with({"links": True} | changes, links=links)


def advised(policy: Any) -> type[Corridor]:
    """A scripted policy, as a function of (env, state, timestep, key)."""
    return type("Advised", (Broken,), {"baselines": {"own": policy}})


def batched_by(batch: type[BatchedEnvironment]) -> type[Corridor]:
    return type("Batched", (Broken,), {"batched": lambda self: batch(self)})


def hears_other(age: Any) -> jax.Array:
    """Links of two agents that hear each other."""
    return jnp.where(jnp.eye(2, dtype=bool), jnp.int32(-1), jnp.int32(age))


class Undecorated(envs_jax.Environment):
    pass


class BranchesInPython(Broken):
    def step(self, state: Any, action: Any, context: Any = None) -> Any:
        if state.t > 3:
            action = 1 - action
        return super().step(state, action, context)


class NeedsAContext(Broken):
    def reset(self, key: Any, context: Any) -> Any:  # type: ignore[override]
        return super().reset(key, context)


class ReadsTheContext(Broken):
    def context(self, progress: Any) -> Any:
        return {"wind": progress.fraction}

    def reset(self, key: Any, context: Any = None) -> Any:
        state, timestep = super().reset(key, context)
        return state, dataclasses.replace(timestep, reward=timestep.reward * context["wind"])


class NoPair(Broken):
    def reset(self, key: Any, context: Any = None) -> Any:
        return super().reset(key, context)[1]


class NumpyNoise(Broken):
    def spoil(self, timestep: TimeStep, state: CorridorState) -> TimeStep:
        noise = np.random.default_rng().random(timestep.observation.shape, np.float32)
        return dataclasses.replace(timestep, observation=timestep.observation * noise)


class NumpyStart(Broken):
    def reset(self, key: Any, context: Any = None) -> Any:
        key = jax.random.fold_in(key, np.random.default_rng().integers(1 << 30))
        return super().reset(key, context)


class StateChangesType(Broken):
    def spoil_state(self, state: CorridorState, after_reset: bool) -> Any:
        return state if after_reset else dataclasses.replace(state, t=state.t.astype(jnp.float32))


class StateChangesStructure(Broken):
    def spoil_state(self, state: CorridorState, after_reset: bool) -> Any:
        return dataclasses.replace(state, key=state.key if after_reset else (state.key, state.t))


class WeakState(Broken):
    def spoil_state(self, state: CorridorState, after_reset: bool) -> Any:
        return dataclasses.replace(state, t=0 if after_reset else state.t.astype(jnp.int32))


class NanState(Broken):
    def spoil_state(self, state: CorridorState, after_reset: bool) -> Any:
        return state, jnp.where(state.t == 2, jnp.nan, 0.0)

    def step(self, state: Any, action: Any, context: Any = None) -> Any:
        return super().step(state[0], action, context)


class ForgetsItsKey(Broken):
    def reset(self, key: Any, context: Any = None) -> Any:
        return super().reset(jax.random.key(7), context)


class TwoContexts(Broken):
    calls = itertools.count()

    def context(self, progress: Any) -> Any:
        return ((), jnp.zeros(()))[next(self.calls) % 2]


@dataclasses.dataclass(frozen=True)
class MixingBatch(BatchedEnvironment):
    """Copies see each other."""

    def step_without_reset(self, state: BatchState, action: Any, context: Any) -> Any:
        state, timestep = super().step_without_reset(state, action, context)
        return state, dataclasses.replace(timestep, reward=timestep.reward + timestep.reward.mean(0, keepdims=True))


@dataclasses.dataclass(frozen=True)
class ReversedBatch(BatchedEnvironment):
    """Copies start in the wrong order."""

    def _start(self, keys: Any, episode: Any, context: Any) -> Any:
        state, timestep = super()._start(keys, episode, context)
        return state, dataclasses.replace(timestep, observation=timestep.observation[::-1])


TWO = {"num_agents": 2, "length": 3}
BROKEN: list[tuple[str, Any, dict[str, int], str]] = [
    # spec
    ("undecorated", Undecorated, {}, r"must subclass envs_jax.Environment and be decorated with @dataclasses"),
    ("agents", spec_with(num_agents=0), {}, "spec.num_agents is 0: it must be a Python int of at least 1"),
    ("horizon", spec_with(horizon=2.5), {}, "spec.horizon is 2.5: it must be a Python int"),
    ("action", spec_with(action=2), {}, r"spec.action is 2: describe ONE agent's action by Discrete\(n\)"),
    ("no observation", spec_with(observation=()), {}, "spec.observation is empty"),
    ("observation", spec_with(observation=(5,)), {}, "spec.observation holds 5: every leaf must be a Box"),
    ("box", spec_with(observation=Box((5,), low=1.0, high=0.0)), {}, "low 1.0 above high 0.0: swap them"),
    ("critic spec", spec_with(critic_input_spec=None), {}, "belong together: give both or neither"),
    ("metric", spec_with(metrics={"reached": "mean"}), {}, "is 'mean': choose one of last, sum, max, any"),
    ("share", spec_with(shares=("won",)), {}, "spec.shares names 'won', .*: choose from reached, reduced by last, max"),
    ("sum as share", spec_with(metrics={"reached": "sum"}, shares=("reached",)), {},
        "spec.shares names 'reached', which is not a metric that is 0 or 1 in each episode: choose from none"),
    ("share as text", spec_with(shares="reached"), {}, r"spec.shares is 'reached': .* in a tuple, such as \('win',\)"),
    ("taken metric", spec_with(metrics={"return": "sum"}), {}, "'return', which every environment already has"),
    ("score", spec_with(score="f1"), {}, "spec.score is 'f1': name one of spec.metrics, or 'return'"),
    ("score mode", spec_with(score_mode="big"), {}, "spec.score_mode is 'big': choose 'min' or 'max'"),
    ("tasks", spec_with(num_tasks=0), {}, "spec.num_tasks is 0: it must be a Python int of at least 1"),
    # types
    ("python branch", BranchesInPython, {},
        r"step cannot be compiled \(tests/\S+:\d+: TracerBoolConversionError: .*jax.lax.cond"),
    ("no default", NeedsAContext, {},
        r"reset must take \(key\) and \(key, context\): define reset\(self, key, context=None\)"),
    ("no context", ReadsTheContext, {}, "reset and step fail where context is None: treat None as the context"),
    ("no pair", NoPair, {}, r"reset returns TimeStep: it must return the pair \(state, TimeStep\)"),
    ("no task", spec_with(num_tasks=2), {}, "reset returns task of structure .*: make them the same pytree"),
    ("no present", spec_with(absent_agents=True), {}, "reset returns present of structure .*: make them the same"),
    ("no links", spec_with(links=True), TWO, "reset returns links of structure .*: make them the same pytree"),
    ("links dtype", linked(lambda t, s: jnp.full((2, 2), -1, jnp.float32)), TWO,
        r"links as float32\[2, 2\], expected int32\[2, 2\]"),
    ("links shape", linked(lambda t, s: jnp.full((2, 3), -1, jnp.int32)), TWO,
        r"links as int32\[2, 3\], .* int32\[2, 2\]"),
    ("links before the episode", linked(lambda t, s: hears_other(jnp.where(s.t == 0, -1, 2)), max_link_age=2), TWO,
        "agent 0 hears a message of agent 1 at step 1 .environment 0. from before the episode: write -1 until one"),
    ("link age", spec_with(max_link_age=-1), TWO, "spec.max_link_age is -1: it must be a Python int of at least 0"),
    ("age without links", spec_with(max_link_age=1), TWO, "spec.max_link_age is 1, but spec.links is False: set it"),
    ("agent types", spec_with(agent_types=(0, 1, 0)), TWO,
        "spec.agent_types has 3 entries for 2 agents: name the type"),
    ("agent type", spec_with(agent_types=(0, -1)), TWO, "spec.agent_types holds -1: number the types by Python ints"),
    ("one task", timestep_with(task=lambda t, s: jnp.int32(0)), {}, "returns a task, but spec.num_tasks is 1: set it"),
    ("reward dtype", timestep_with(reward=lambda t, s: t.reward.astype(jnp.int32)), {},
        r"reset returns reward as int32\[1\], expected float32\[1\]: reshape or cast it"),
    ("reward shape", timestep_with(reward=lambda t, s: t.reward[0]), {}, r"reward as float32\[\], .* float32\[1\]"),
    ("flag", timestep_with(first=lambda t, s: s.t), {}, r"returns first as int32\[\], expected bool\[\]"),
    ("observation shape", timestep_with(observation=lambda t, s: t.observation[:, 1:]), {},
        r"returns observation as float32\[1, 4\], expected float32\[1, 5\]"),
    ("observation tree", timestep_with(observation=lambda t, s: {"own": t.observation}), {},
        "returns observation of structure .*: make them the same pytree"),
    ("mask dtype", timestep_with(action_mask=lambda t, s: jnp.ones((1, 2))), {}, r"float32\[1, 2\], .* bool\[1, 2\]"),
    ("global state", timestep_with(global_state=lambda t, s: s.t), {}, "a global_state that spec does not describe"),
    ("metrics", timestep_with(metrics=lambda t, s: {}), {},
        r"returns the metrics \[\], spec.metrics names \['reached'\]"),
    ("state dtype", StateChangesType, {},
        r"\.t of the state that step returns is float32\[\], but after reset int32\[\]"),
    ("state structure", StateChangesStructure, {}, "state that step returns has another structure than after reset"),
    ("weak type", WeakState, {}, r"but after reset int32\[\], weakly typed: make them equal"),
    ("context", TwoContexts, {}, "context of a second call has another structure than the first call's"),
    # values
    ("numpy", NumpyNoise, {}, "the same key and action give different results in .*observation"),
    ("numpy scalar", NumpyStart, {}, "the same key and action give different results in .*never from NumPy"),
    ("deaf to keys", ForgetsItsKey, {}, "environments with different keys never differ"),
    ("bounds", timestep_with(observation=lambda t, s: 1.5 * t.observation), {},
        "0 to 1.5 .* outside its Box of 0 to 1"),
    ("not finite", timestep_with(reward=lambda t, s: jnp.where(s.t == 2, jnp.inf, t.reward)), {},
        "reward is not finite at step 2: look for 0 / 0"),
    ("nan state", NanState, {}, r"\[1\] of the state is NaN at step 2"),
    ("never first", timestep_with(first=lambda t, s: t.first & False), {}, "first is false after reset"),
    ("always first", timestep_with(first=lambda t, s: t.first | True), {}, "first is true at step 1"),
    ("reset pays", timestep_with(reward=lambda t, s: t.reward + 1), {}, "the reward is not 0 after reset"),
    ("starts done", timestep_with(truncated=lambda t, s: s.t >= 0), {}, "episode has ended after reset already"),
    ("both flags", timestep_with(truncated=lambda t, s: s.t >= 4, terminated=lambda t, s: s.t >= 4), {},
        "terminated and truncated are both true at step 4: let truncated be limit & ~terminated"),
    ("too long", timestep_with(truncated=lambda t, s: t.truncated & False), {"length": 40},
        "an episode goes on after 10 steps, spec.horizon"),
    ("ends early", spec_with(fixed_horizon=True), {"length": 2}, r"ends after \d steps, but fixed_horizon says .* 10"),
    ("half any",
        timestep_with({"metrics": {"reached": "any"}}, metrics=lambda t, s: {"reached": jnp.float32(0.5)}), {},
        "metric 'reached' is reduced by 'any' but is 0.5"),
    ("half share", timestep_with(metrics=lambda t, s: {"reached": t.metrics["reached"] / 2 + 0.25}), {},
        "metric 'reached' is one of spec.shares but is 0.25 after reset: make it 0 or 1"),
    ("old links", linked(lambda t, s: hears_other(s.t)), TWO, r"links\[0, 1\] .* lies outside -1 to 0 at step 1"),
    ("negative links", linked(lambda t, s: hears_other(1) - 2), TWO,
        r"links\[0, 0\] \(receiver, sender\) lies outside"),
    ("hears itself", linked(lambda t, s: jnp.zeros((2, 2), jnp.int32)), TWO,
        "links say that agent 0 hears itself after reset"),
    ("absent, hears",
        timestep_with(
            {"links": True, "absent_agents": True},
            present=lambda t, s: jnp.array([True, False]) | (s.t < 2),
            links=lambda t, s: jnp.array([[-1, -1], [0, -1]], jnp.int32),
        ), TWO, "links say that agent 1, which is absent, hears agent 0 at step 2"),
    # masks and centralised view
    ("all closed", timestep_with(action_mask=lambda t, s: t.action_mask & (s.t != 3)), {},
        "action_mask closes every action of agent 0 at step 4"),
    ("next closed",
        spec_with(next_mask=lambda state, mask, chosen, agent: mask[agent] & ((agent < 1) | (chosen[0] == 0))), TWO,
        r"next_mask closes every action of agent 1 at step \d .*fall back to action_mask"),
    ("next opens",
        timestep_with(
            {"next_mask": lambda state, mask, chosen, agent: mask[agent] | True},
            action_mask=lambda t, s: t.action_mask.at[:, 0].set(False),
        ), TWO, "next_mask opens action 0 of agent 0 that action_mask closes at step 1"),
    ("reads ahead",
        spec_with(next_mask=lambda state, mask, chosen, agent: mask[agent] & ((chosen[1] == 0) | (jnp.arange(2) == 1))),
        TWO, r"next_mask of agent \d depends on actions of itself or later agents"),
    ("next shape", spec_with(next_mask=lambda s, mask, c, i: mask), TWO,
        r"next_mask returns bool\[2, 2\], .* bool\[2\]"),
    ("critic shape", spec_with(critic_input=lambda timestep, action: timestep.observation), TWO,
        r"critic_input returns float32\[2, 4\], expected float32\[2, 14\]"),
    ("own action",
        spec_with(critic_input_spec=Box((1,), jnp.int32, 0, 1), critic_input=lambda timestep, action: action[:, None]),
        TWO, "critic_input of agent 0 depends on that agent's own action at step 1: leave it out"),
    ("egocentric view alone", spec_with(egocentric=lambda view: view), TWO, "it must return the pair"),
    ("egocentric actions", spec_with(egocentric=lambda view: (view, jnp.zeros(3, jnp.int32))), TWO,
        r"egocentric returns as actions int32\[3\], expected int32\[2\]"),
    # batch and baselines
    ("copies start as others", batched_by(ReversedBatch), {}, "values in a batch than by itself after reset.*obs"),
    ("copies mix", batched_by(MixingBatch), {"length": 2}, r"values in a batch than by itself at step \d.*reward"),
    ("baseline type", advised(lambda env, state, timestep, key: jnp.zeros(1)), {},
        r"baseline 'own' returns float32\[4, 1\], expected int32\[4, 1\]"),
    ("baseline range", advised(lambda env, state, timestep, key: jnp.full(1, 2, jnp.int32)), {},
        "baseline 'own' has values from 2 to 2 .*, outside its Box of 0 to 1"),
    ("baseline branch", advised(lambda env, state, timestep, key: 1 if state.t > 0 else 0), {},
        "baseline 'own' cannot be compiled"),
]  # fmt: skip


@pytest.mark.parametrize(("env", "settings", "sentence"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_a_broken_rule_is_named(env: Any, settings: dict[str, int], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence) as caught:
        check_env(env(**settings))
    text = str(caught.value)
    assert "\n" not in text and 20 < len(text) < 400
    assert isinstance(caught.value, AssertionError)


def test_bounds_of_a_box_have_names() -> None:
    with pytest.raises(ValueError, match=r"second argument is its dtype, not -1\.0: use low"):
        envs_jax.Box((2,), -1.0, 1.0)


# The part that training asks for


def test_the_check_says_what_it_checked() -> None:
    assert check_env(Corridor()) == "ok: corridor keeps the contract (4 environments, 12 steps)"
    assert check_types(Careless()) == Careless().spec


@dataclasses.dataclass(frozen=True)
class Careless(envs_jax.Environment):
    """One agent whose step breaks one rule of types."""

    what: str = envs_jax.setting("", "weak or dtype")

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("careless", 1, Box((2,)), envs_jax.Discrete(3), 3)

    def reset(self, key: Any, context: Any = None) -> Any:
        return 0 if self.what == "weak" else jnp.int32(0), envs_jax.restart(jnp.zeros((1, 2)))

    def step(self, t: Any, action: Any, context: Any = None) -> Any:
        observation = jnp.zeros((1, 2), jnp.int32 if self.what == "dtype" else jnp.float32)
        after = jnp.int32(1) if self.what == "weak" else t + 1
        return after, envs_jax.transition(1.0, observation, truncated=t >= 2)


def test_training_refuses_what_breaks_the_contract_of_types(tmp_path: Path) -> None:
    """With the sentence of `check_env`, before anything is compiled or written."""
    sentence = r"careless: step returns observation as int32\[1, 2\], expected float32\[1, 2\]: reshape or cast it"
    with pytest.raises(UserError, match=sentence):
        jaxrl.train("ppo", Careless("dtype"), total_env_steps=16, runs=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_weak_types_are_for_the_author_to_fix_but_no_obstacle() -> None:
    with pytest.raises(ContractError, match="weakly typed"):
        check_env(Careless("weak"))
    check_types(Careless("weak"))
    batch = BatchedEnvironment(Careless("weak"))
    state, timestep = jax.jit(batch.reset)(jax.random.split(jax.random.key(0), 2))
    state, _ = jax.jit(batch.step)(state, timestep, jnp.zeros((2, 1), jnp.int32))
    np.testing.assert_array_equal(state.env, [1, 1])


@pytest.mark.parametrize("kind", ["int64", "float64", "uint8", "bfloat16"])
def test_observations_of_any_dtype_keep_the_contract(kind: str) -> None:
    """JAX makes 32 bits of 64 by default."""

    class Typed(Corridor):
        @property
        def spec(self) -> EnvSpec:
            spec = super().spec
            observation = dataclasses.replace(spec.observation, dtype=jnp.dtype(kind))
            return dataclasses.replace(spec, observation=observation, critic_input=None, critic_input_spec=None)

        def _timestep(self, *arguments: Any) -> TimeStep:
            timestep = super()._timestep(*arguments)
            dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(kind))
            return dataclasses.replace(timestep, observation=timestep.observation.astype(dtype))

    check_types(Typed())


def test_without_compilation() -> None:
    """JAX_DISABLE_JIT, which people set to debug an environment: it works step by step, and the check still checks."""
    env, key = Corridor(), jax.random.key(0)
    state, _ = jax.jit(env.reset)(key)
    expected = jax.jit(env.step)(state, jnp.int32([1]))
    with jax.disable_jit():
        assert check_env(env).startswith("ok: corridor")
        actual = env.step(env.reset(key)[0], jnp.int32([1]))
        with pytest.raises(UserError, match="JAX_DISABLE_JIT is set, but training is a few large compiled programs"):
            jaxrl.train("ppo", env, total_env_steps=16)
        with pytest.raises(UserError, match="JAX_DISABLE_JIT is set, but an evaluation is a few large compiled"):
            policies.load(None, "reach", {})
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        same = (
            jax.random.key_data(a) == jax.random.key_data(b) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a == b
        )
        assert np.all(same)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("reach", {"horizon": 3}),
        ("snakes_1v1", {"height": 4, "width": 4, "beans": 2, "max_steps": 3}),
        ("coverage", {"q": 2, "num_agents": 2, "budget": 2}),
    ],
)
def test_registered_environments_without_compilation(name: str, settings: dict[str, Any]) -> None:
    batch = envs_jax.batched(envs_jax.make(name, **settings))
    spec = batch.spec
    action = jnp.zeros((2, spec.num_agents, *spec.action.shape), spec.action.dtype)
    with jax.disable_jit():
        state, timestep = batch.reset(jax.random.split(jax.random.key(0), 2))
        _, timestep = batch.step(state, timestep, action)
    assert not timestep.first.any() and all(np.isfinite(x).all() for x in jax.tree.leaves(timestep.observation))
