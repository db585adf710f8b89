"""Message delivery: every message is a position and the last measurement; never relayed, never repeated."""

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.coverage.world import SPACING

RANGES = (0.0, 15.0, 25.0, 100.0)  # metres; drawn from when the range is not fixed
_LINKS = 3  # index of this key of a mission; 0 to 2 draw its start


def find_received(positions: Array, comm_range: Array, delivered: Array | bool = True) -> Array:
    """bool[A, A]: [i, j] = agent i receives the message of agent j.

    Args:
        positions: int32[A, 3], lattice positions.
        comm_range: float32[], communication range in metres (inclusive, three-dimensional).
        delivered: bool[A, A], links that do not fail. Agents in the same place always hear each other.
    """
    steps = positions[:, None, :] - positions[None, :, :]
    squared = jnp.sum(steps * steps, axis=-1, dtype=jnp.int32).astype(jnp.float32) * SPACING**2
    return (squared == 0.0) | ((squared <= comm_range * comm_range) & delivered)


def draw_delivered(key: Array, index: Array, num_agents: int, failure_rate: float) -> Array | bool:
    """bool[A, A]: links that work after measurement `index` of the mission of `key`, independent per ordered pair."""
    if failure_rate == 0.0:
        return True
    key = jax.random.fold_in(jax.random.fold_in(key, _LINKS), index)
    return jax.random.uniform(key, (num_agents, num_agents), jnp.float32) >= failure_rate
