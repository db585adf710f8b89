"""Do two map backends agree on this device?

Both run the same missions with the same random moves. What is exact must be equal bit for bit: stored beliefs and
counts of cells. Real numbers (observations, rewards, metrics) may differ by rounding.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.batch import batched
from envs_jax.coverage.env import Coverage
from envs_jax.coverage.types import State
from envs_jax.progress import start
from jaxrl.rl.data_parallel import compiler_options
from jaxrl.runtime.rollouts import scripted_policy

TOLERANCE = 2e-5  # for real numbers; exp and log differ by a few units in the last place between kernels


def compare(envs: tuple[Any, Any], num_envs: int, steps: int) -> tuple[int, float]:
    """Step two backends with the same random actions, and compare them after every step.

    Returns:
        number of integers that differ, and the largest difference of real numbers (relative for numbers above 1).
    """
    keys = jax.random.split(jax.random.key(0), num_envs)
    differences = [_differences(envs, *(_rollout(env, keys, t) for env in envs)) for t in range(steps + 1)]
    exact, real = zip(*jax.device_get(differences), strict=True)
    return int(sum(map(int, exact))), float(max(real))


def agree(exact: int, real: float) -> bool:
    """Return whether these results of `compare` are equal up to rounding."""
    return exact == 0 and real <= TOLERANCE


def _rollout(env: Coverage, keys: Array, steps: int) -> Any:
    """Return (state, time step) of missions [B] after random steps; keys key[B]."""
    return jax.jit(_step_randomly, static_argnums=0, compiler_options=compiler_options())(env, keys, jnp.int32(steps))


def _step_randomly(env: Coverage, keys: Array, steps: Array) -> Any:
    batch = batched(env)
    context = batch.context(start())
    policy = scripted_policy(batch, "random")

    def step(t: Array, carry: Any) -> Any:
        state, timestep = carry
        keys_action = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, t)
        action, _ = policy((), (), state, timestep, keys_action)
        return batch.step_without_reset(state, action, context)

    state, timestep = jax.lax.fori_loop(0, steps, step, batch.reset(keys, context))
    return state.env, timestep


@functools.partial(jax.jit, static_argnums=0)
def _differences(envs: tuple[Coverage, Coverage], *results: Any) -> tuple[Array, Array]:
    """Return the number of integers that differ, and the largest difference of real numbers (relative above 1)."""
    exact = jnp.int32(0)
    real = jnp.float32(0)
    pair = [(_stored_values(env, state), timestep) for env, (state, timestep) in zip(envs, results, strict=True)]
    for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            size = jnp.maximum(jnp.maximum(jnp.abs(a), jnp.abs(b)), jnp.ones((), a.dtype))
            difference = jnp.where(a == b, jnp.zeros((), a.dtype), jnp.abs(a - b) / size).astype(jnp.float32)
            real = jnp.maximum(real, jnp.max(jnp.where(jnp.isfinite(difference), difference, jnp.inf)))
        else:
            exact += jnp.sum(a != b, dtype=jnp.int32)
    return exact, real


def _stored_values(env: Coverage, state: State) -> tuple[Array, Array]:
    """Return what all backends store alike: beliefs as integers, without padding, and counts of cells."""
    beliefs = state.maps.beliefs[..., : env.n, : env.n]
    if beliefs.dtype == jnp.float32:  # stored beliefs are exact in either form
        beliefs = jax.lax.bitcast_convert_type(beliefs, jnp.int32)
    return beliefs, state.maps.sums.counts
