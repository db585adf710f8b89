"""Types that all map backends share: their inputs, maps and reports."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from envs_jax.base import Array, pytree
from envs_jax.coverage import world
from envs_jax.coverage.belief import PREDICTED, Storage, Weights
from envs_jax.coverage.maps.fixed_point import to_fixed_point, uniform_total
from envs_jax.coverage.maps.tiles import Tiling
from envs_jax.coverage.sensor import Noise
from envs_jax.coverage.terrain import Terrain


@dataclasses.dataclass(frozen=True)
class MapConfig:
    """Static settings of a map backend."""

    cells_per_footprint: int  # cells along a footprint edge at the lowest altitude
    num_agents: int  # A
    storage: Storage  # how log-odds are stored
    weights: Weights  # importance of cells in the reward
    tile: tuple[int, int] | None = None  # rows and columns of a tile, for the backend that has tiles

    @property
    def n(self) -> int:
        return world.map_side(self.cells_per_footprint)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a stored map, which is padded to whole tiles."""
        if self.tile is None:
            return self.n, self.n
        return self.tiling.down * self.tiling.rows, self.tiling.across * self.tiling.columns

    @property
    def tiling(self) -> Tiling:
        """The tiles of a map; only where there are some."""
        assert self.tile is not None
        return Tiling(self.n, *self.tile)


@pytree
class Sent:
    """The measurements that arriving messages hold, where these were sent earlier."""

    positions: Array  # int32[A, 3], lattice positions that they were taken from
    source: Noise | Array  # noise of their readings, or recorded readings bool[A, n, n]


@pytree
class Measurements:
    """One round of measurements and messages."""

    terrain: Terrain  # ground truth
    positions: Array  # int32[A, 3], lattice positions that the measurements are taken from
    received: Array  # bool[A, A], [i, j] = agent i receives the message of agent j (the diagonal is not read)
    source: Noise | Array  # noise of the readings, or recorded readings bool[A, n, n]
    sent: Any = ()  # Sent, what the messages received hold; () = these measurements
    present: Any = ()  # bool[A], agents that measure; () = all

    @property
    def messages(self) -> "Measurements":
        """The measurements that the messages hold."""
        return Measurements(self.terrain, self.sent.positions, self.received, self.sent.source) if self.sent else self


@pytree
class Sums:
    """Sums over the cells of the team map. Sums of entropies are pairs of integers, see `total`."""

    weighted: Array  # int32[2], weighted entropy w(p) H(p), in units of the largest weight
    interest: Array  # int32[2], entropy H(p) of cells whose true class is 1
    counts: Array  # int32[4], cells predicted as class 1, correctly so, ever observed, ever observed of class 1


@pytree
class ClipOverflow:
    """Cells whose log-odds lie beyond the clip. Kept up to date by the backend "windows" only."""

    cells: Array  # bool[A + 1], maps that have any
    probability: Array  # float32[A + 1, 11, 11], their share in the resized probabilities beyond the clip


@pytree
class Maps:
    """All maps of one copy, and values derived from them.

    Attributes:
        beliefs: int16 or float32 [A + 1, n, n], stored log-odds: local maps in the order of the agents, the
            team's last. ([A + 1, *MapConfig.shape]: what lies beyond n is padding.)
        probability: float32[A + 1, 11, 11], area-resized probabilities.
        sums: of the team map.
        overflow: the clip's bookkeeping of the backend "windows".
        tiles: `Tiles` of the backend "pallas", () in others.
    """

    beliefs: Array
    probability: Array
    sums: Sums
    overflow: ClipOverflow
    tiles: Any = ()


@pytree
class UpdateStats:
    """By-products of an update.

    Attributes:
        measured: float32[A, 11, 11], every agent's own reading on its unclipped footprint, +1 for class 1, -1 for class
            0, 0 where nothing is measured, area-resized.
        before: int32[2], sum over the team map of w(p') H(p), p before and p' after the update, in units of the largest
            weight, see `total`; `Sums.weighted` of the new maps is its counterpart w(p') H(p').
    """

    measured: Array
    before: Array


def empty(config: MapConfig, terrain: Terrain) -> Maps:
    """Return the maps before the first measurement, at the start of a mission over `terrain`."""
    maps = config.num_agents + 1
    n = config.n
    storage = config.storage
    prior = jnp.full((), storage.unseen)
    entropy = storage.entropy(prior)
    predicted = storage.above(prior, PREDICTED).astype(jnp.int32)
    sums = Sums(
        weighted=uniform_total(
            to_fixed_point(storage.weight(prior, config.weights.relative) * entropy), jnp.int32(n * n)
        ),
        interest=uniform_total(to_fixed_point(entropy), terrain.count),
        counts=jnp.stack([n * n * predicted, terrain.count * predicted, jnp.int32(0), jnp.int32(0)]),
    )
    return Maps(
        beliefs=jnp.full((maps, *config.shape), storage.unseen),
        probability=jnp.full((maps, world.LATTICE, world.LATTICE), storage.prior, jnp.float32),
        sums=sums,
        overflow=ClipOverflow(
            cells=jnp.zeros((maps,), jnp.bool_),
            probability=jnp.zeros((maps, world.LATTICE, world.LATTICE), jnp.float32),
        ),
        tiles=() if config.tile is None else config.tiling.start(maps, storage.start_probability),
    )
