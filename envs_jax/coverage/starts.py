"""Start poses, and the missions of the public repository as a table.

Every mission starts at 15 m, except those that begin on a lawn-mower's path (`baselines.lawnmower_start`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.coverage.world import LATTICE, LEVELS

CORNERS = np.array([(2, 2), (8, 2), (8, 8), (2, 8)], np.int32)  # (10, 10), (40, 10), (40, 40), (10, 40) m
MISSIONS = 1001  # missions 0 to 1000 of the public repository are tabulated
_START_SEED = 3


def _with_height(horizontal: Array) -> Array:
    """int32[A, 3] from int32[A, 2], at the highest level."""
    return jnp.concatenate([horizontal, jnp.full_like(horizontal[:, :1], LEVELS - 1)], axis=-1)


def uniform(key: Array, num_agents: int) -> Array:
    """int32[A, 3]: independent, uniform over the lattice points of the highest level (they may coincide)."""
    return _with_height(jax.random.randint(key, (num_agents, 2), 0, LATTICE, jnp.int32))


def corners(num_agents: int) -> Array:
    """int32[A, 3]: fixed starts of at most four agents, 10 m from the borders."""
    return _with_height(jnp.asarray(CORNERS[:num_agents]))


@functools.cache
def _original_starts(num_agents: int) -> np.ndarray:
    """int32[1001, A, 2]: the repository seeds NumPy's legacy generator with 3 x mission x agent."""
    table = np.zeros((MISSIONS, num_agents, 2), np.int32)
    for mission in range(MISSIONS):
        for agent in range(num_agents):
            generator = np.random.RandomState(_START_SEED * mission * agent)
            table[mission, agent] = generator.randint(0, LATTICE), generator.randint(0, LATTICE)
    return table


@functools.cache
def _original_splits() -> np.ndarray:
    """int32[1001, 2]: side and percentage of the half-plane of each mission."""
    table = np.zeros((MISSIONS, 2), np.int32)
    for mission in range(MISSIONS):
        generator = np.random.RandomState(mission)
        table[mission] = generator.randint(4), generator.randint(30, 61)
    return table


def mission_number(key: Array) -> Array:
    """int32[]: number of the tabulated mission of a key, 1 to 1000, taken from the key's last word.

    `jax.random.key(m)` selects mission m. The repository never runs mission 0 (all its agents start in one place).
    """
    word = jax.random.key_data(key).reshape(-1)[-1]
    return ((word - jnp.uint32(1)) % jnp.uint32(MISSIONS - 1)).astype(jnp.int32) + 1


def original(mission: Array, num_agents: int) -> Array:
    """int32[A, 3]: start of a tabulated mission."""
    return _with_height(jnp.take(jnp.asarray(_original_starts(num_agents)), mission, axis=0, mode="clip"))


def original_split(mission: Array) -> tuple[Array, Array]:
    """int32[], int32[]: side and percentage of the half-plane of a tabulated mission."""
    row = jnp.take(jnp.asarray(_original_splits()), mission, axis=0, mode="clip")
    return row[0], row[1]
