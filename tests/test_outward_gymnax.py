"""Environments for users of gymnax: equality with the environment stepped by hand, spaces, gymnax's own wrappers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import by_day
from helpers.outward import ENVS, SINGLE, SNAKES, Dictionaries, drawn
from helpers.tiny import Corridor

import envs_jax
from envs_jax.adapters.gymnax_style import GymnaxStyleEnv
from envs_jax.progress import start


@pytest.mark.parametrize("name", by_day(SINGLE, ["corridor"]))
def test_gymnax_style_equals_the_environment_stepped_by_hand(name: str) -> None:
    env = ENVS[name]()
    adapter, copies, steps = GymnaxStyleEnv(env), 3, 15
    actions = jnp.stack([jnp.asarray(action[:, 0]) for action in drawn(env, copies, steps)])
    keys = jax.random.split(jax.random.key(0), (steps + 1, copies))

    @jax.jit
    def play(keys: Any, actions: Any) -> Any:
        observation, state = jax.vmap(adapter.reset)(keys[0])

        def step(state: Any, key_and_action: Any) -> Any:
            observation, state, reward, done, info = jax.vmap(adapter.step)(key_and_action[0], state, key_and_action[1])
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
    env = GymnaxStyleEnv(envs_jax.make("snakes_1v1", observation="obs26", **SNAKES), split_done=True)
    params = env.default_params
    assert env.name == "snakes_1v1" and env.num_actions == 4 and jnp.array_equal(params, env.env.context(start()))
    action, observation = env.action_space(params), env.observation_space(params)
    assert (action.n, action.shape) == (4, ()) and observation.dtype == jnp.int8
    keys = jax.random.split(jax.random.key(0), 200)
    assert set(np.asarray(jax.jit(jax.vmap(action.sample))(keys)).tolist()) == {0, 1, 2, 3}
    sampled = jax.jit(jax.vmap(observation.sample))(keys)
    assert jax.jit(jax.vmap(observation.contains))(sampled).all() and set(np.unique(sampled).tolist()) == {0, 1, 2, 3}
    assert not action.contains(4) and not action.contains(-1) and not observation.contains(jnp.int8(4))
    first, state = jax.eval_shape(env.reset, keys[0], params)
    observed, after, reward, terminated, truncated, _ = jax.eval_shape(env.step, keys[1], state, 0)
    assert first.shape == observed.shape == observation.shape and first.dtype == observed.dtype == observation.dtype
    assert reward.shape == terminated.shape == truncated.shape == () and after == state
    reach = GymnaxStyleEnv(envs_jax.make("reach"))
    assert reach.num_actions == 4 and reach.action_space().contains(reach.action_space().sample(keys[0]))
    unbounded = reach.observation_space().sample(keys[0])
    assert unbounded.shape == (39,) and jnp.isfinite(unbounded).all()
    with pytest.raises(ValueError, match="'corridor' has 2 agents"):
        GymnaxStyleEnv(Corridor(num_agents=2))
    with pytest.raises(ValueError, match="'pair'"):
        GymnaxStyleEnv(Dictionaries())


@pytest.mark.needs("gymnax")
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
