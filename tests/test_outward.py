"""Environments for users of other libraries: the packages' own checkers, equality with the batch stepped directly."""

import dataclasses
import importlib.util
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny import Corridor, PointMass

import envs_jax
from envs_jax import Box, Discrete
from envs_jax.adapters import outward
from envs_jax.adapters.gymnasium import GymnasiumEnv, GymnasiumVectorEnv
from envs_jax.adapters.gymnax_style import GymnaxStyleEnv
from envs_jax.adapters.pettingzoo import PettingZooParallelEnv
from envs_jax.progress import start

PAGE = Path(__file__).parents[1] / "docs" / "other_libraries.md"
SNAKES = {"height": 4, "width": 4, "beans": 2, "max_steps": 6}
ENVS = {
    "corridor": Corridor,
    "corridors": lambda: Corridor(num_agents=2, length=2),
    "reach": lambda: envs_jax.make("reach", horizon=4),
    "snakes": lambda: envs_jax.make("snakes_1v1", masks=True, **SNAKES),
    "snakes_team": lambda: envs_jax.make("snakes_1v1", masks=True, side="both", **SNAKES),
    "coverage": lambda: envs_jax.make("coverage", q=5, num_agents=2, budget=4),
}
SINGLE, TEAMS = ("corridor", "reach", "snakes"), ("corridors", "snakes_team", "coverage")


def needs(package: str, extra: str = "") -> Any:
    """Skip without a package; `extra` names the extra that installs it."""
    how = f"the extra '{extra}', pip install -e '.[{extra}]'" if extra else f"it, pip install {package}"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}: install {how}")


needs_gymnasium = needs("gymnasium", "gymnasium")
needs_pettingzoo = needs("pettingzoo", "pettingzoo")
EXPECTED = ("minimum value is -infinity", "maximum value is infinity", "Not able to test alternative render modes")


class Reference:
    """The jitted batch stepped directly, with the keys that the adapters document."""

    def __init__(self, env: Any, copies: int, seed: int) -> None:
        self.batch = envs_jax.batched(env)
        keys = jnp.stack([jax.random.fold_in(jax.random.key(seed), i) for i in range(copies)])
        self.state, self.timestep = jax.jit(self.batch.reset)(keys)
        self.program = jax.jit(self.batch.step)

    def step(self, action: np.ndarray) -> Any:
        self.state, self.timestep = self.program(self.state, self.timestep, jnp.asarray(action))
        return self.timestep


def close(found: Any, wanted: Any) -> bool:
    """Whether numbers are equal up to the rounding of two compilations of one environment."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    return found.dtype == wanted.dtype and np.allclose(found, wanted.reshape(found.shape), rtol=1e-6, atol=1e-6)


def drawn(env: Any, copies: int, steps: int) -> list[np.ndarray]:
    """Random actions [B, A, ...] for each step."""
    spec, generator = env.spec, np.random.default_rng(0)
    shape = (steps, copies, spec.num_agents, *spec.action.shape)
    if isinstance(spec.action, Discrete):
        return list(generator.integers(0, spec.action.n, shape).astype(np.int32))
    return list(generator.uniform(-1, 1, shape).astype(np.float32))


# Gymnasium


@needs_gymnasium
@pytest.mark.parametrize("name", SINGLE)
def test_the_single_environment_passes_gymnasiums_checker(name: str) -> None:
    from gymnasium.utils.env_checker import check_env

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_env(GymnasiumEnv(ENVS[name]()))
    told = [str(warning.message) for warning in found]
    assert all(any(part in message for part in EXPECTED) for message in told), told


@needs_gymnasium
def test_names_of_gymnasium() -> None:
    import gymnasium
    from gymnasium.utils.env_checker import check_env

    env = gymnasium.make("envs_jax.adapters.gymnasium:jaxrl/snakes_1v1-v2", **SNAKES)
    check_env(env.unwrapped)  # with the checks that need a registered name
    vector = gymnasium.make_vec("jaxrl/reach-v1", num_envs=3, horizon=4)
    assert isinstance(vector, GymnasiumVectorEnv) and vector.reset()[0].shape == (3, 39)
    names = {f"jaxrl/{name}-v{envs_jax.make(name).version}" for name in ("coverage", "reach", "reach_family", "snakes")}
    assert names <= set(gymnasium.registry)
    team = gymnasium.make_vec("jaxrl/snakes_2p-v2", num_envs=4, flatten_agents=True, **SNAKES)
    assert team.num_envs == 4 and team.reset()[0].shape[0] == 4


@needs_gymnasium
def test_spaces() -> None:
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode

    env = GymnasiumVectorEnv(envs_jax.make("snakes_1v1", **SNAKES), 3)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert env.single_observation_space == spaces.Box(0, 3, env.single_observation_space.shape, np.int8)
    assert env.observation_space == spaces.Box(0, 3, (3, *env.single_observation_space.shape), np.int8)
    assert env.single_action_space == spaces.Discrete(4) and env.action_space == spaces.MultiDiscrete([4, 4, 4])
    env = GymnasiumVectorEnv(envs_jax.make("reach"), 2)
    assert env.observation_space == spaces.Box(-np.inf, np.inf, (2, 39), np.float32)
    assert env.action_space == spaces.Box(-1, 1, (2, 4), np.float32)
    assert outward.gymnasium_space(Box((2,), jnp.bfloat16, 0.0, 1.0)) == spaces.Box(0, 1, (2,), np.float32)


@needs_gymnasium
@pytest.mark.parametrize("name", [*SINGLE, *TEAMS])
def test_the_vector_environment_equals_the_batch(name: str) -> None:
    env, copies = ENVS[name](), 3
    agents = env.spec.num_agents
    vector = GymnasiumVectorEnv(env, copies * agents, seed=7, flatten_agents=agents > 1)
    wanted = Reference(env, copies, seed=7)
    observations, infos = vector.reset()
    ends = set()
    for action in [None, *drawn(env, copies, 30)]:
        if action is not None:
            before = wanted.timestep.done
            timestep = wanted.step(action)
            flat = action.reshape(-1, *env.spec.action.shape)
            observations, rewards, terminated, truncated, infos = vector.step(flat)
            assert close(rewards, np.asarray(timestep.reward, np.float64))
            assert np.array_equal(terminated.reshape(copies, agents), np.tile(timestep.terminated[:, None], agents))
            assert np.array_equal(truncated.reshape(copies, agents), np.tile(timestep.truncated[:, None], agents))
            assert not rewards[np.repeat(before, agents)].any()  # the reset step
            assert not (terminated | truncated)[np.repeat(before, agents)].any()
            assert rewards.dtype == np.float64 and terminated.dtype == truncated.dtype == bool
            ends |= set(zip(terminated.tolist(), truncated.tolist(), strict=True))
        shown = wanted.timestep
        assert close(observations, shown.observation)
        assert observations in vector.observation_space and observations.flags.writeable
        assert set(infos) == {
            key
            for metric in (*env.spec.metrics, *(["action_mask"] if shown.action_mask is not None else []))
            for key in (metric, f"_{metric}")
        }
        for metric in env.spec.metrics:
            assert close(infos[metric], np.repeat(np.asarray(shown.metrics[metric]), agents))
            assert infos[f"_{metric}"].all() and infos[f"_{metric}"].shape == (copies * agents,)
        if shown.action_mask is not None:
            assert np.array_equal(infos["action_mask"], np.asarray(shown.action_mask).reshape(copies * agents, -1))
            vector.action_space.sample(mask=tuple(infos["action_mask"]))  # a mask that Gymnasium accepts
    assert np.asarray(wanted.state.episode).min() >= 2  # several episodes, reset steps among them
    if name in ("corridor", "corridors"):  # both ends, apart
        assert ends == {(False, False), (True, False), (False, True)}


@needs_gymnasium
@pytest.mark.parametrize("name", SINGLE)
def test_one_copy_equals_gymnasiums_own_vector_environment(name: str) -> None:
    """Autoreset, final observations and infos are those of Gymnasium's SyncVectorEnv, in its default mode."""
    from gymnasium.vector import SyncVectorEnv

    env = ENVS[name]()
    ours, theirs = GymnasiumVectorEnv(env, 1), SyncVectorEnv([lambda: GymnasiumEnv(env)])
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    found, wanted = ours.reset(seed=3), theirs.reset(seed=3)
    for action in [None, *drawn(env, 1, 25)]:
        if action is not None:
            found, wanted = ours.step(action[0]), theirs.step(action[0])
        for mine, other in zip(found[:-1], wanted[:-1], strict=True):
            assert np.array_equal(mine, other) and mine.dtype == other.dtype
        assert found[-1].keys() == wanted[-1].keys()
        assert all(np.array_equal(found[-1][key], wanted[-1][key]) for key in found[-1])


@needs_gymnasium
def test_gymnasiums_wrappers_understand_the_vector_environment() -> None:
    from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

    env = Corridor(length=3, horizon=5)
    vector = DictInfoToList(RecordEpisodeStatistics(GymnasiumVectorEnv(env, 4, seed=1)))
    vector.reset()
    returns, lengths, seen = np.zeros(4), np.zeros(4, int), []
    done = np.zeros(4, bool)
    for action in drawn(env, 4, 30):
        _, rewards, terminated, truncated, infos = vector.step(action[:, 0])
        returns, lengths = np.where(done, 0, returns + rewards), np.where(done, 0, lengths + 1)
        done = terminated | truncated
        for i in np.flatnonzero(done):
            seen.append((infos[i]["episode"]["r"], infos[i]["episode"]["l"]))
            assert seen[-1] == (returns[i], lengths[i])
            assert infos[i]["reached"] == float(terminated[i])
    assert len(seen) > 8 and {value for value, _ in seen} == {0.0, 1.0}


@needs_gymnasium
def test_seeds() -> None:
    env = Corridor(length=20)
    vector = GymnasiumVectorEnv(env, 5, seed=4)

    def episodes(**seed: Any) -> list[np.ndarray]:
        shown = [vector.reset(**seed)[0]]
        return shown + [vector.step(action[:, 0])[0] for action in drawn(env, 5, 25)]

    same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))  # noqa: E731
    first, second = episodes(), episodes()
    assert not same(first, second)  # without a seed, the next episodes
    assert same(first, episodes(seed=4)) and same(second, episodes())  # the next ones again
    seeded = episodes(seed=11)
    assert same(seeded, episodes(seed=11)) and not same(seeded, first)
    assert len(np.unique(seeded[0], axis=0)) > 1  # rows differ
    small = GymnasiumVectorEnv(env, 2)  # the number of rows changes nothing
    assert np.array_equal(small.reset(seed=11)[0], seeded[0][:2])
    single = GymnasiumEnv(env)
    assert np.array_equal(single.reset(seed=11)[0], seeded[0][0])
    assert not all(np.array_equal(single.reset()[0], seeded[0][0]) for _ in range(5))
    assert vector.reset(seed=outward.LARGEST_SEED)[0].shape == (5, 21)


@needs_gymnasium
def test_equal_environments_are_compiled_once() -> None:
    former = outward._compiled.cache_info().misses
    for length in (7, 7, 8):
        GymnasiumEnv(Corridor(length=length))
    assert outward._compiled.cache_info().misses == former + 2
    assert GymnasiumEnv(Corridor(length=(unhashable := _Length(3)))).reset()[0].shape == (4,)
    assert unhashable == 3


class _Length(int):
    __hash__ = None


@needs_gymnasium
def test_refusals_of_gymnasium() -> None:
    import gymnasium

    corridor, team = Corridor(), Corridor(num_agents=3)

    def refused(call: Any, *parts: str, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert all(part in str(caught.value) for part in parts), str(caught.value)

    for adapter in (GymnasiumEnv, lambda env: GymnasiumVectorEnv(env, 2)):
        refused(lambda adapter=adapter: adapter(_Dictionaries()), "'pair'", "make an environment whose observation is")
        refused(lambda adapter=adapter: adapter("reach"), "env must be an environment", "envs_jax.make('reach')")
    refused(lambda: GymnasiumEnv(team), "'corridor' has 3 agents", "PettingZooParallelEnv")
    refused(lambda: GymnasiumVectorEnv(team, 3), "'corridor' has 3 agents", "flatten_agents=True")
    refused(lambda: GymnasiumVectorEnv(team, 4, flatten_agents=True), "a multiple of 3", "not 4")
    for number in (0, -1, 2.0, "2"):
        refused(
            lambda number=number: GymnasiumVectorEnv(corridor, number), "num_envs must be a whole number, at least 1"
        )
    for seed in (-1, 2**32):
        refused(lambda seed=seed: GymnasiumEnv(corridor, seed), "seed must lie between 0 and 4,294,967,295")
    vector, single = GymnasiumVectorEnv(corridor, 3), GymnasiumEnv(corridor)
    for env, action in ((vector, [0, 0, 0]), (single, 0)):
        refused(lambda env=env, action=action: env.step(action), "call reset() first", kind=gymnasium.error.ResetNeeded)
        env.reset()
    refused(lambda: vector.step([0, 1]), "actions must be integers of shape (3,), not int64 of shape (2,)")
    refused(lambda: vector.step(np.zeros((3, 1), int)), "shape (3,)", "(3, 1)")
    refused(lambda: vector.step(np.zeros(3)), "actions must be integers", "float64")
    refused(lambda: vector.step([0, 1, 2]), "actions must lie between 0 and 1, not [0, 1, 2]")
    refused(lambda: single.step([0]), "shape ()")
    continuous = GymnasiumVectorEnv(PointMass(), 2)
    continuous.reset()
    refused(lambda: continuous.step(np.zeros((2, 3))), "actions must be numbers of shape (2, 2)")
    single.reset(seed=0)
    while not any(single.step(1)[2:4]):
        pass
    refused(lambda: single.step(0), "call reset() first", kind=gymnasium.error.ResetNeeded)
    vector.close()
    vector.close()
    refused(vector.reset, "closed", kind=gymnasium.error.ClosedEnvironmentError)


class _Dictionaries(Corridor):
    @property
    def spec(self) -> Any:
        return envs_jax.EnvSpec("pair", 1, {"a": Box((2,)), "b": Box((3,))}, Discrete(2), 5)


@pytest.mark.parametrize(
    ("package", "adapter"),
    [
        ("gymnasium", GymnasiumEnv),
        ("gymnasium", lambda env: GymnasiumVectorEnv(env, 2)),
        ("pettingzoo", PettingZooParallelEnv),
    ],
)
def test_a_missing_package(package: str, adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=re.escape(f"install the extra '{package}', pip install -e '.[{package}]'")):
        adapter(Corridor())


# PettingZoo


@needs_pettingzoo
@pytest.mark.parametrize("mask_in_observation", [False, True])
@pytest.mark.parametrize("name", ["reach", *TEAMS])
def test_pettingzoos_own_tests(name: str, mask_in_observation: bool) -> None:
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    make = lambda: PettingZooParallelEnv(ENVS[name](), mask_in_observation=mask_in_observation)  # noqa: E731
    parallel_api_test(make(), num_cycles=40)
    parallel_seed_test(make, num_cycles=40)


@needs_pettingzoo
@pytest.mark.parametrize("name", TEAMS)
def test_the_parallel_environment_equals_the_batch(name: str) -> None:
    env = ENVS[name]()
    names = [f"agent_{i}" for i in range(env.spec.num_agents)]
    parallel, wanted = PettingZooParallelEnv(env, seed=2, mask_in_observation=True), Reference(env, 1, seed=2)
    assert parallel.possible_agents == names and parallel.agents == []
    observations, infos = parallel.reset()
    ends = set()
    for action in [None, *drawn(env, 1, 30)]:
        if action is not None:
            if not parallel.agents:  # the batch resets in a step of its own
                wanted.step(action)
                observations, infos = parallel.reset()
                assert parallel.agents == names
            else:
                timestep = wanted.step(action)
                actions = {f"agent_{i}": one for i, one in reversed(list(enumerate(action[0])))}
                observations, rewards, terminations, truncations, infos = parallel.step(actions)
                assert close([rewards[agent] for agent in names], np.asarray(timestep.reward[0], np.float64))
                assert terminations == dict.fromkeys(names, bool(timestep.terminated[0]))
                assert truncations == dict.fromkeys(names, bool(timestep.truncated[0]))
                assert parallel.agents == ([] if timestep.done[0] else names)
                ends.add((terminations["agent_0"], truncations["agent_0"]))
        shown = wanted.timestep
        for i, agent in enumerate(names):
            assert close(observations[agent]["observation"], shown.observation[0, i])
            assert np.array_equal(observations[agent]["action_mask"], np.asarray(shown.action_mask[0, i]))
            assert np.array_equal(infos[agent]["action_mask"], observations[agent]["action_mask"])
            assert observations[agent] in parallel.observation_space(agent)
            for metric, value in shown.metrics.items():
                assert close(infos[agent][metric], np.float64(value[0]))
    assert len(ends) > 1 and int(wanted.state.episode[0]) >= 2
    if name == "corridors":
        assert {(True, False), (False, True)} <= ends


@needs_pettingzoo
def test_the_global_state() -> None:
    env = ENVS["coverage"]()
    parallel, wanted = PettingZooParallelEnv(env), Reference(env, 1, seed=0)
    with pytest.raises(ValueError, match="call reset"):
        parallel.state()
    parallel.reset()
    shown = wanted.timestep.global_state
    parts = [np.asarray(shown["maps"]).ravel(), np.asarray(shown["positions"]).ravel().astype(np.float32)]
    assert close(parallel.state(), np.concatenate(parts))
    assert parallel.state() in parallel.state_space
    one = PettingZooParallelEnv(_WithGlobalState())
    one.reset()
    assert one.state().tolist() == [[1, 2], [3, 4]] and one.state() in one.state_space
    with pytest.raises(NotImplementedError, match="'corridor' has no global state"):
        PettingZooParallelEnv(Corridor()).state()


class _WithGlobalState(Corridor):
    @property
    def spec(self) -> Any:
        box = Box((2, 2), jnp.int32, 0, 4)
        return envs_jax.EnvSpec("known", 1, Box((5,)), Discrete(2), 5, metrics={"reached": "max"}, global_state=box)

    def _timestep(self, *arguments: Any) -> Any:
        return dataclasses.replace(super()._timestep(*arguments), global_state=jnp.array([[1, 2], [3, 4]]))


@needs_pettingzoo
def test_refusals_of_pettingzoo() -> None:
    parallel = PettingZooParallelEnv(Corridor(num_agents=2))
    with pytest.raises(ValueError, match=r"call reset\(\) first"):
        parallel.step({})
    parallel.reset()
    for actions in ({}, {"agent_0": 0}, {"agent_0": 0, "agent_1": 0, "agent_2": 0}):
        with pytest.raises(ValueError, match="actions must be given for agent_0, agent_1, not for"):
            parallel.step(actions)
    with pytest.raises(ValueError, match="between 0 and 1, not 5"):
        parallel.step({"agent_0": 0, "agent_1": 5})
    with pytest.raises(ValueError, match="'pair'"):
        PettingZooParallelEnv(_Dictionaries())


# gymnax


@pytest.mark.parametrize("name", ["corridor", *(pytest.param(name, marks=pytest.mark.long) for name in SINGLE[1:])])
def test_gymnax_style_equals_the_environment_stepped_by_hand(name: str) -> None:
    env = ENVS[name]()
    adapter, copies, steps = GymnaxStyleEnv(env), 3, 15
    actions = jnp.stack([jnp.asarray(action[:, 0]) for action in drawn(env, copies, steps)])
    keys = jax.random.split(jax.random.key(0), (steps + 1, copies))

    @jax.jit
    def play(keys: Any, actions: Any) -> Any:
        observation, state = jax.vmap(adapter.reset)(keys[0])

        def step(state: Any, given: Any) -> Any:
            observation, state, reward, done, info = jax.vmap(adapter.step)(given[0], state, given[1])
            return state, (observation, reward, done, info, state.action_mask, state.time)

        return observation, jax.lax.scan(step, state, (keys[1:], actions))[1]

    first, (observation, reward, done, info, mask, time) = play(keys, actions)
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    for i in range(copies):
        state, timestep = reset(keys[0, i])
        assert np.array_equal(first[i], timestep.observation[0])
        t = 0
        for at in range(steps):
            state, timestep = step(state, actions[at, i][None])
            t += 1
            np.testing.assert_allclose(info["final_observation"][at, i], timestep.observation[0], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(reward[at, i], timestep.reward[0], rtol=1e-5, atol=1e-5)
            assert bool(done[at, i]) == bool(timestep.done)
            assert bool(info["terminated"][at, i]) == bool(timestep.terminated)
            assert bool(info["truncated"][at, i]) == bool(timestep.truncated)
            assert float(info["discount"][at, i]) == 1 - float(timestep.terminated)
            for metric, value in timestep.metrics.items():
                np.testing.assert_allclose(info[metric][at, i], value, rtol=1e-5, atol=1e-5)
            if timestep.done:  # the same call returns the next episode's first observation
                state, timestep = reset(keys[at + 1, i])
                t = 0
            np.testing.assert_allclose(observation[at, i], timestep.observation[0], rtol=1e-5, atol=1e-5)
            assert int(time[at, i]) == t
            if timestep.action_mask is not None:
                assert np.array_equal(mask[at, i], timestep.action_mask[0])
    assert done.any(0).all()


def test_gymnax_style_names_and_spaces() -> None:
    env = GymnaxStyleEnv(envs_jax.make("snakes_1v1", **SNAKES))
    params = env.default_params
    assert env.name == "snakes_1v1" and env.num_actions == 4 and jnp.array_equal(params, env.env.context(start()))
    action, observation = env.action_space(params), env.observation_space(params)
    assert (action.n, action.shape) == (4, ()) and observation.dtype == jnp.int8
    keys = jax.random.split(jax.random.key(0), 200)
    assert set(np.asarray(jax.vmap(action.sample)(keys)).tolist()) == {0, 1, 2, 3}
    sampled = jax.vmap(observation.sample)(keys)
    assert jax.vmap(observation.contains)(sampled).all() and set(np.unique(sampled).tolist()) == {0, 1, 2, 3}
    assert not action.contains(4) and not action.contains(-1) and not observation.contains(jnp.int8(4))
    reach = GymnaxStyleEnv(envs_jax.make("reach"))
    assert reach.num_actions == 4 and reach.action_space().contains(reach.action_space().sample(keys[0]))
    unbounded = jax.jit(reach.observation_space().sample)(keys[0])
    assert unbounded.shape == (39,) and jnp.isfinite(unbounded).all()
    first, state = jax.jit(env.reset)(keys[0], params)
    assert observation.contains(first)
    step = jax.jit(GymnaxStyleEnv(env.env, split_done=True).step)
    found, after, reward, terminated, truncated, _ = step(keys[1], state, 0)
    assert found.shape == first.shape and not terminated and not truncated and reward.shape == ()
    assert jax.tree.structure(after) == jax.tree.structure(state)
    with pytest.raises(ValueError, match="'corridor' has 2 agents"):
        GymnaxStyleEnv(Corridor(num_agents=2))
    with pytest.raises(ValueError, match="'pair'"):
        GymnaxStyleEnv(_Dictionaries())


@needs("gymnax")
def test_gymnaxs_own_wrappers_understand_it() -> None:
    from gymnax.wrappers.purerl import LogWrapper

    env = LogWrapper(GymnaxStyleEnv(Corridor(length=2, horizon=4), split_done=True))
    with jax.numpy_dtype_promotion("standard"):  # the wrapper adds truth values to integers
        _, state = env.reset(jax.random.key(0))
        terminated, steps = False, 0
        while not terminated and steps < 2:  # two steps to the right reach the end
            _, state, _, terminated, _, info = env.step(jax.random.key(1), state, jnp.int32(1))
            steps += 1
    assert terminated and float(info["returned_episode_returns"]) == 1.0
    assert int(info["returned_episode_lengths"]) == steps


# Other people's learners


@needs_gymnasium
@needs("stable_baselines3")
@pytest.mark.filterwarnings("ignore")
def test_ppo_of_stable_baselines3_trains_on_reach() -> None:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_checker import check_env

    env = GymnasiumEnv(envs_jax.make("reach", horizon=20))
    check_env(env)
    model = PPO("MlpPolicy", env, n_steps=64, batch_size=32, n_epochs=2, seed=0, device="cpu")
    before = [weight.detach().numpy().copy() for weight in model.policy.parameters()]
    model.learn(256)
    after = [weight.detach().numpy() for weight in model.policy.parameters()]
    assert model.num_timesteps == 256
    assert all(np.isfinite(weight).all() for weight in after)
    assert any(not np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    lengths = {episode["l"] for episode in model.ep_info_buffer}
    assert lengths == {20}  # episodes of the whole horizon


@needs_gymnasium
@needs("torch")
@pytest.mark.filterwarnings("ignore")
def test_a_loop_in_torch_learns_from_the_vector_environment() -> None:
    """One-step actor-critic with masks; rows of reset steps are left out, truncated ends bootstrap."""
    import torch

    torch.manual_seed(0)
    envs = GymnasiumVectorEnv(ENVS["snakes"](), 16, seed=0)
    size = int(np.prod(envs.single_observation_space.shape))
    net = torch.nn.Sequential(torch.nn.Linear(size, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    observation, infos = envs.reset()
    done, ends, losses = np.zeros(16, bool), 0, []
    for _ in range(40):
        out = net(torch.from_numpy(observation).float())
        closed = torch.from_numpy(infos["action_mask"] == 0)
        policy = torch.distributions.Categorical(logits=out[:, :4].masked_fill(closed, -1e9))
        action = policy.sample()
        valid = torch.from_numpy(~done)
        assert torch.from_numpy(infos["action_mask"])[torch.arange(16), action][valid].all()
        observation, reward, terminated, truncated, infos = envs.step(action.numpy())
        done = terminated | truncated
        ends += int(done.sum())
        with torch.no_grad():
            following = net(torch.from_numpy(observation).float())[:, 4]
        target = torch.from_numpy(reward).float() + 0.95 * following * torch.from_numpy(~terminated)
        advantage = target - out[:, 4]
        loss = (advantage.square() - policy.log_prob(action) * advantage.detach())[valid].sum() / 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.isfinite(losses).all() and ends >= 5 * 16  # 40 steps, episodes of 6 and a reset step
    envs.close()


# The page

BLOCKS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("vector", marks=needs_gymnasium),
        pytest.param("ppo", marks=[needs_gymnasium, needs("stable_baselines3")]),
        pytest.param("parallel", marks=needs_pettingzoo),
        "scan",
    ],
)
@pytest.mark.filterwarnings("ignore")  # of other packages
def test_the_code_of_the_page_runs(name: str) -> None:
    run = {"__name__": "__main__"}
    exec(compile(BLOCKS[name], f"{name}.py", "exec"), run)
    if name == "vector":
        assert run["observations"].shape == (64, 39) and run["infos"]["success"].shape == (64,)
    if name == "parallel":
        assert set(run["rewards"]) == {"agent_0", "agent_1"} and run["env"].state().ndim == 1
    if name == "scan":
        assert run["reward"].shape == run["done"].shape == (64,)


@needs_gymnasium
def test_the_study_of_throughput(tmp_path: Path) -> None:
    from bench.studies import outward as study

    assert study.main(["--quick", "--num_envs", "1,3", "--rounds", "2", "--out", str(tmp_path / "a.json")]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert [row["num_envs"] for row in result["rows"]] == [1, 3] and result["machine"]["gymnasium"]
    for row in result["rows"]:
        for name in ("vector", "sync"):
            assert row[name]["rate"] == pytest.approx(row["num_envs"] / np.median(row[name]["samples"]))


def test_the_figures_of_the_page_are_those_of_the_result() -> None:
    result = json.loads((PAGE.parents[1] / "bench" / "results" / "outward_cpu.json").read_text())
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", PAGE.read_text(), re.MULTILINE)
    found = [[int(number.replace(",", "")) for number in row] for row in rows]
    assert [row[0] for row in found] == [row["num_envs"] for row in result["rows"]] == [1, 64, 1024]
    for row, measured in zip(found, result["rows"], strict=True):
        for shown, name in zip(row[1:], ("vector", "sync"), strict=True):
            assert abs(shown / measured[name]["rate"] - 1) < 0.05
            assert len(measured[name]["samples"]) == 5
