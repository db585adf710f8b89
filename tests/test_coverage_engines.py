"""The engines that update the maps agree: stored beliefs and counts bit for bit, what is read from them to 2e-6."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from envs_jax.batch import batched

COPIES = 4


def missions(engine: str, **settings) -> list:
    """(maps, time step) of every step of a few missions with the same masked random actions."""
    env = batched(envs_jax.make("coverage", map_engine=engine, **settings))
    state, timestep = jax.jit(env.reset)(jax.random.split(jax.random.key(0), COPIES), ())
    play = jax.jit(lambda state, action: env.play(state, action, ()))
    generator, seen = np.random.default_rng(0), [(state.env.maps, timestep)]
    for _ in range(env.spec.horizon):
        mask = np.asarray(timestep.action_mask)
        action = np.argmax(np.where(mask, generator.random(mask.shape), -1), -1).astype(np.int32)
        state, timestep = play(state, jnp.asarray(action))
        seen.append((state.env.maps, timestep))
    return seen


@pytest.mark.parametrize("dtype", ["int16", pytest.param("float32", marks=pytest.mark.long)])
def test_windows_agree_with_dense(dtype: str) -> None:
    settings = {"q": 11, "num_agents": 3, "budget": 8, "belief_dtype": dtype}
    for (dense, expected), (windows, found) in zip(
        missions("dense", **settings), missions("windows", **settings), strict=True
    ):
        np.testing.assert_array_equal(windows.sums.counts, dense.sums.counts)
        np.testing.assert_allclose(windows.beliefs, dense.beliefs, atol=0 if dtype == "int16" else 1e-5)
        np.testing.assert_allclose(found.observation, expected.observation, atol=2e-6)
        np.testing.assert_allclose(found.global_state["maps"], expected.global_state["maps"], atol=2e-6)
        np.testing.assert_allclose(found.reward, expected.reward, atol=1e-5)
