"""Start poses of missions (`draw`), the lawn-mower's paths, and the missions of the public repository as a table.

Every mission starts at 15 m, except those that begin on a lawn-mower's path.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.coverage.world import LATTICE, LEVELS

CORNERS = np.array([(2, 2), (8, 2), (8, 8), (2, 8)], np.int32)  # (10, 10), (40, 10), (40, 40), (10, 40) m
_SIDES = np.array([(5, 2), (8, 5), (5, 8), (2, 5)], np.int32)  # halfway between them
_BORDERS = np.array([(0, 0), (10, 0), (10, 10), (0, 10)], np.int32)  # the corners of the area
_IN_CORNERS = np.concatenate([CORNERS, _SIDES, _BORDERS])
MISSIONS = 1001  # missions 0 to 1000 of the public repository are tabulated
_START_SEED = 3

_THERE = tuple((x, 2) for x in range(2, 9))
_BACK = tuple((x, 4) for x in range(8, 1, -1))
_SWEEP = np.array([*_THERE, (8, 3), *_BACK], np.int32)  # x 10 to 40 m at y = 10 m, across, and back at y = 20 m
_SHIFT = np.array([[0, 4]], np.int32)
PATHS = np.stack([_SWEEP, _SWEEP + _SHIFT, _SWEEP[:, ::-1], (_SWEEP + _SHIFT)[:, ::-1]])
"""int32[4, 15, 2]: lattice points of the lawn-mower's four paths."""
_PATH_LEVELS = {"paths_5": 0, "paths_10": 1, "paths_15": 2}  # altitude index
NAMES = ("uniform", "corners", "original", *_PATH_LEVELS)


def draw(name: str, mission_key: Array, key: Array, num_agents: int) -> Array:
    """int32[A, 3]: the start, one of NAMES, of the mission of a key; `key` draws what is random.

    uniform     independent, uniform over the lattice points of the highest level (they may coincide)
    corners     fixed: four agents 10 m from two borders, the next four halfway between these, and four more in the
                corners of the area
    original    of the tabulated mission of the key
    paths_5, paths_10, paths_15    the first poses of the lawn-mower's paths, at this altitude
    """
    if name == "uniform":
        return _with_height(jax.random.randint(key, (num_agents, 2), 0, LATTICE, jnp.int32))
    if name == "corners":
        return _with_height(jnp.asarray(_IN_CORNERS[:num_agents]))
    if name == "original":
        return original(mission_number(mission_key), num_agents)
    first = PATHS[np.arange(num_agents) % len(PATHS), 0]
    return jnp.asarray(np.concatenate([first, np.full((num_agents, 1), _PATH_LEVELS[name], np.int32)], axis=-1))


def _with_height(horizontal: Array) -> Array:
    """int32[A, 3] from int32[A, 2], at the highest level."""
    return jnp.concatenate([horizontal, jnp.full_like(horizontal[:, :1], LEVELS - 1)], axis=-1)


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
