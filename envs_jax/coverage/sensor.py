"""The camera: noisy readings of the class of each cell of the footprint.

A reading shows the true class with probability 1 - e and the other one with probability e, where e depends on the
altitude (`ERROR`). Nothing random is stored: whether the reading of a cell is wrong is a hash of (mission key,
measurement index, agent, cell), evaluated wherever a reading is needed.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, pytree
from envs_jax.coverage import terrain as ground
from envs_jax.coverage.terrain import Terrain

ERROR = (0.01, 0.265, 0.375)  # probability of a wrong reading at 5, 10 and 15 m
EVIDENCE = tuple(math.log((1.0 - e) / e) for e in ERROR)  # summand of one reading for the log-odds of the class read

_LOW_HALF = 0xFFFF


def _mix(x: Array) -> Array:
    """A 32-bit finaliser (xor-shift, multiply) of low bias; uint32 in and out."""
    x ^= x >> 16
    x *= jnp.uint32(0x7FEB352D)
    x ^= x >> 15
    x *= jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


@pytree
class Noise:
    """Randomness of the readings of one measurement index."""

    # uint32[ceil(A / 2), 2]; two agents share a seed, one takes the upper half of each hash, one the lower
    seeds: Array


def noise(key: Array, index: Array, num_agents: int) -> Noise:
    """Noise of measurement `index` (int32[]) in the mission of `key`."""
    pairs = jnp.arange((num_agents + 1) // 2, dtype=jnp.uint32)
    state = _mix(pairs * jnp.uint32(0x9E3779B1) + index.astype(jnp.uint32))
    for word in jax.random.key_data(key).reshape(-1):
        state = _mix(state + word)
    return Noise(jnp.stack([state, _mix(state ^ jnp.uint32(0x5BD1E995))], axis=-1))


def limit(level: Array) -> Array:
    """uint32: a reading is wrong where the 16 bits drawn for it are below this, at altitude index `level`."""
    return jnp.take(jnp.asarray(np.array([round(e * 65536) for e in ERROR], np.uint32)), level, mode="clip")


def draw(first: Array, second: Array, cells: Array) -> Array:
    """uint32: 32 bits for each cell (flat indices int32) from a pair of seeds."""
    x = cells.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + first
    x ^= x >> 16
    x *= jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) + second
    x *= jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def half(bits: Array, agent: int | Array) -> Array:
    """uint32: the 16 of the drawn bits that belong to `agent`."""
    return (bits >> (16 * (jnp.asarray(agent) & 1)).astype(jnp.uint32)) & jnp.uint32(_LOW_HALF)


def wrong(noise: Noise, agent: int | Array, level: Array, cells: Array) -> Array:
    """bool: whether `agent` at altitude index `level` misreads the cells (flat indices int32)."""
    seeds = noise.seeds[agent // 2]
    return half(draw(seeds[0], seeds[1], cells), agent) < limit(level)


def reads_occupied(
    source: Noise | Array,
    terrain: Terrain,
    agent: int | Array,
    level: Array,
    rows: Array,
    columns: Array,
    n: int,
    truth: Array | None = None,
) -> Array:
    """bool: whether `agent` at altitude index `level` reads class 1 in the cells (rows, columns).

    `source` is the noise, or recorded readings bool[A, n, n]. Rows and columns are int32 of equal rank, e.g. [k, 1] and
    [1, l]; values are meaningful inside the map only. `truth` bool is the class of the cells where it is known already.
    """
    if not isinstance(source, Noise):
        return source[agent, jnp.clip(rows, 0, n - 1), jnp.clip(columns, 0, n - 1)]
    truth = ground.truth(terrain, rows, columns) if truth is None else truth
    return truth ^ wrong(source, agent, level, rows * n + columns)
