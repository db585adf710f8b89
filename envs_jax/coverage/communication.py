"""Messages: who hears whom. A message is a position and the last measurement; it is never relayed, never repeated.

`draw_received` is the whole rule. All that maps and observations see of it is bool[A, A], who received whose message.
"""

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.coverage.world import SPACING

RANGES = (0.0, 15.0, 25.0, 100.0)  # metres; drawn from when the range is not fixed
_LINKS = 3  # index of this key of a mission; 0 to 2 draw its start


def draw_range(key: Array) -> Array:
    """float32[], m: the range of a mission where it is random, one of RANGES."""
    return jnp.asarray(RANGES, jnp.float32)[jax.random.randint(key, (), 0, len(RANGES), jnp.int32)]


def draw_received(key: Array, index: Array, positions: Array, comm_range: Array, failure_rate: float) -> Array:
    """bool[A, A]: [i, j] = agent i receives the message of agent j after measurement `index`.

    Args:
        key: key[], of the mission.
        index: int32[].
        positions: int32[A, 3], lattice positions of that measurement.
        comm_range: float32[], m.
        failure_rate: probability that a message within range is lost, independent per ordered pair.
    """
    return find_received(positions, comm_range, draw_delivered(key, index, positions.shape[0], failure_rate))


def find_received(positions: Array, comm_range: Array, delivered: Array | bool = True) -> Array:
    """bool[A, A]: the messages `delivered` bool[A, A] whose senders are at most the range away, in three dimensions.

    Agents in the same place always hear each other.
    """
    steps = positions[:, None, :] - positions[None, :, :]
    squared = jnp.sum(steps * steps, axis=-1, dtype=jnp.int32).astype(jnp.float32) * SPACING**2
    return (squared == 0.0) | ((squared <= comm_range * comm_range) & delivered)


def draw_delivered(key: Array, index: Array, num_agents: int, failure_rate: float) -> Array | bool:
    """bool[A, A]: messages that are not lost; True without failures."""
    if failure_rate == 0.0:
        return True
    key = jax.random.fold_in(jax.random.fold_in(key, _LINKS), index)
    return jax.random.uniform(key, (num_agents, num_agents), jnp.float32) >= failure_rate
