"""The belief maps, and the engines that update them.

Every agent keeps a local map; one more map fuses the measurements of all. One update, at measurement index k:

    1. every agent enters its own measurement into its local map: cells of its footprint are clipped, then changed;
    2. agent i fuses the messages that it received, senders in increasing order: the WHOLE map is clipped, then the
       cells of the sender's footprint are changed;
    3. the team map fuses all measurements in the same way.

Engines obey the same rules and differ in speed only. An engine is a module with two functions,

    update(mapper, maps, survey) -> (Maps, Report)          for one copy of the environment
    update_batch(mapper, maps, survey) -> (Maps, Report)    for [B] copies

`maps_dense` sweeps whole maps with plain array code and is the reference. `maps_windows` touches footprints only: for
CPUs. `maps_pallas` sweeps whole maps in three kernels: for GPUs. Maps that one engine made are not for another.
"""

import dataclasses
import functools
import types

import jax.numpy as jnp

from envs_jax.base import Array, pytree
from envs_jax.coverage import world
from envs_jax.coverage.belief import PREDICTED, Storage, Weights
from envs_jax.coverage.sensor import Noise
from envs_jax.coverage.terrain import Terrain

WINDOWS_FROM = 14  # resolution q from which windows are faster than whole maps on CPUs
ENGINES = ("auto", "dense", "windows", "pallas")


@dataclasses.dataclass(frozen=True)
class Mapper:
    """What an engine must know beforehand.

    Attributes:
        q: cells along a footprint edge at the lowest altitude.
        num_agents: A.
        storage: how log-odds are stored.
        weights: importance of cells in the reward.
        tile: maps are stored with rows and columns added up to multiples of these, which no engine but one needs.
    """

    q: int
    num_agents: int
    storage: Storage
    weights: Weights
    tile: tuple[int, int] = (1, 1)

    @property
    def n(self) -> int:
        return world.map_side(self.q)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a map as it is stored."""
        rows, columns = (-(-self.n // size) * size for size in self.tile)
        return rows, columns


@pytree
class Survey:
    """One round of measurements and messages.

    Attributes:
        terrain: ground truth.
        positions: int32[A, 3], lattice positions that the measurements are taken from.
        received: bool[A, A], [i, j] = agent i receives the message of agent j (the diagonal is not read).
        source: noise of the readings, or recorded readings bool[A, n, n].
    """

    terrain: Terrain
    positions: Array
    received: Array
    source: Noise | Array


@pytree
class Sums:
    """Sums over the cells of the team map. Sums of entropies are pairs of integers, see `total`.

    Attributes:
        weighted: int32[2], weighted entropy w(p) H(p), in units of the largest weight.
        interest: int32[2], entropy H(p) of cells whose true class is 1.
        counts: int32[4], cells predicted as class 1, rightly predicted as class 1, ever seen, ever seen of class 1.
    """

    weighted: Array
    interest: Array
    counts: Array


@pytree
class Excess:
    """Cells whose log-odds lie beyond the clip. Kept up to date by the engine "windows" only.

    Attributes:
        cells: bool[A + 1], whether a map has any.
        probability: float32[A + 1, 11, 11], what they add to the resized probabilities beyond the clip.
    """

    cells: Array
    probability: Array


@pytree
class Maps:
    """All maps of one copy and what is known of them.

    Attributes:
        beliefs: int16 or float32 [A + 1, n, n], stored log-odds: local maps in the order of the agents, the
            team's last. ([A + 1, *Mapper.shape]: what lies beyond n is never seen.)
        probability: float32[A + 1, 11, 11], area-resized probabilities.
        sums: of the team map.
        excess: what an engine wants to remember beside.
    """

    beliefs: Array
    probability: Array
    sums: Sums
    excess: Excess


@pytree
class Report:
    """What an update says beside the new maps.

    Attributes:
        measured: float32[A, 11, 11], every agent's own reading on its unclipped footprint, +1 for class 1, -1 for class
            0, 0 where nothing is measured, area-resized.
        before: int32[2], sum over the team map of w(p') H(p), p before and p' after the update, in units of the largest
            weight, see `total`; `Sums.weighted` of the new maps is its counterpart w(p') H(p').
    """

    measured: Array
    before: Array


# Sums of entropies are kept in fixed point: they do not depend on the order of the summands, and a sum that is changed
# step by step equals one that is computed anew.

FRACTION_BITS = 21  # binary digits after the point of one summand
_LONGEST_ROW = 512  # summands of at most 1 that may be added in 31 bits
_LOW_BITS = 12


def largest_divisor(cells: int, limit: int) -> int:
    """The largest divisor of a number of cells that does not exceed `limit`; 1 if the limit is smaller still."""
    return max(length for length in range(1, max(limit, 1) + 1) if cells % length == 0)


def fixed(values: Array) -> Array:
    """int32: values in [-1, 1] in fixed point."""
    return jnp.round(values * jnp.float32(2**FRACTION_BITS)).astype(jnp.int32)


def total(values: Array) -> Array:
    """int32[2]: sum of fixed-point numbers int32[k], as (high, low): it is 4096 high + low, 0 <= low < 4096."""
    length = largest_divisor(values.shape[0], _LONGEST_ROW)
    if values.shape[0] >= length << (31 - _LOW_BITS):  # so many rows that their low parts might not fit into 31 bits
        length = _LONGEST_ROW
        values = jnp.pad(values, (0, -values.shape[0] % length))
    rows = jnp.sum(values.reshape(-1, length), axis=-1)
    return carry(jnp.stack([jnp.sum(rows >> _LOW_BITS), jnp.sum(rows & (2**_LOW_BITS - 1))]))


def carry(pair: Array) -> Array:
    """int32[..., 2]: the same sum with 0 <= low < 4096; pairs may be added and subtracted part by part before."""
    high, low = pair[..., 0], pair[..., 1]
    return jnp.stack([high + (low >> _LOW_BITS), low & (2**_LOW_BITS - 1)], axis=-1)


def real(pair: Array) -> Array:
    """float32[]: value of a sum (or of a difference of sums) in fixed point."""
    scale = 2.0**-FRACTION_BITS
    return pair[0].astype(jnp.float32) * (scale * 2**_LOW_BITS) + pair[1].astype(jnp.float32) * scale


def uniform_total(value: Array, count: Array) -> Array:
    """int32[2]: `count` int32[] (below 2^22) times the fixed-point number `value` int32[]."""
    high, low = value >> _LOW_BITS, value & (2**_LOW_BITS - 1)
    low_high = low * (count >> _LOW_BITS)  # low * count = 4096 low_high + the rest
    return carry(jnp.stack([high * count + low_high, low * (count & (2**_LOW_BITS - 1))]))


def pack_flags(*flags: Array) -> Array:
    """int32[k]: up to four numbers from 0 to 2 (or bool) [k] of each cell in one byte each, for `count_flags`."""
    return functools.reduce(jnp.add, (flag.astype(jnp.int32) << (8 * i) for i, flag in enumerate(flags)))


def count_flags(packed: Array) -> Array:
    """int32[4]: sums over all cells of the packed numbers."""
    rows = jnp.sum(packed.reshape(-1, largest_divisor(packed.shape[0], 127)), axis=-1)
    return jnp.stack([jnp.sum((rows >> (8 * i)) & 255) for i in range(4)])


def empty(mapper: Mapper, terrain: Terrain) -> Maps:
    """Maps before the first measurement, at the start of a mission over `terrain`."""
    maps, n, storage = mapper.num_agents + 1, mapper.n, mapper.storage
    prior = jnp.full((), storage.unseen)
    entropy = storage.entropy(prior)
    predicted = storage.above(prior, PREDICTED).astype(jnp.int32)
    sums = Sums(
        weighted=uniform_total(fixed(storage.weight(prior, mapper.weights.relative) * entropy), jnp.int32(n * n)),
        interest=uniform_total(fixed(entropy), terrain.count),
        counts=jnp.stack([n * n * predicted, terrain.count * predicted, jnp.int32(0), jnp.int32(0)]),
    )
    return Maps(
        beliefs=jnp.full((maps, *mapper.shape), storage.unseen),
        probability=jnp.full((maps, world.LATTICE, world.LATTICE), storage.prior, jnp.float32),
        sums=sums,
        excess=Excess(
            cells=jnp.zeros((maps,), jnp.bool_),
            probability=jnp.zeros((maps, world.LATTICE, world.LATTICE), jnp.float32),
        ),
    )


def engine(name: str) -> types.ModuleType:
    """The engine of a name in ENGINES but "auto"."""
    from envs_jax.coverage import maps_dense, maps_windows

    if name == "pallas":
        from envs_jax.coverage import maps_pallas

        return maps_pallas
    return {"dense": maps_dense, "windows": maps_windows}[name]


def tile(name: str, n: int) -> tuple[int, int]:
    """`Mapper.tile` as the engine of a name needs it for maps of side n."""
    return engine(name).tile(n) if name == "pallas" else (1, 1)
