"""Tiles of a map, and what the backend "pallas" keeps of each one, so that an update visits only those that change."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, pytree
from envs_jax.coverage.world import LATTICE


@pytree
class Tiles:
    """What is known of the tiles of all maps of one copy.

    Attributes:
        blocks: float32[A + 1, D * r, C * c], for D x C tiles, each of which overlaps up to r x c of the 11 x 11 blocks
            of a resized map: the sums over a tile's cells of their probability times the shares of the cell in the
            block, times 11^2.
        beyond: int32[A + 1, D, C], 1 where a tile holds a cell whose log-odds lie beyond the clip, else 0.
    """

    blocks: Array
    beyond: Array


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a map of n x n cells is cut into tiles."""

    n: int
    rows: int  # cells of a tile along axis 0
    columns: int  # cells of a tile along axis 1

    @property
    def down(self) -> int:
        """D, the number of tiles along axis 0."""
        return -(-self.n // self.rows)

    @property
    def across(self) -> int:
        """C, the number of tiles along axis 1."""
        return -(-self.n // self.columns)

    @property
    def row_spans(self) -> int:
        """r, the most blocks of rows that a tile overlaps."""
        return _count_spans(self.n, self.rows)

    @property
    def column_spans(self) -> int:
        """c, the most blocks of columns that a tile overlaps."""
        return _count_spans(self.n, self.columns)

    def first_block(self, cell: Any) -> Any:
        """Return the block that a cell begins in, int32 or int."""
        if isinstance(cell, int):
            return LATTICE * cell // self.n
        return jax.lax.div(LATTICE * cell, jnp.int32(self.n))

    def share(self, block: Any, cells: Any) -> Array:
        """Return 11 times the share of cells that lies in a block of their axis, float32."""
        low = jnp.maximum(LATTICE * cells, block * self.n)
        high = jnp.minimum(LATTICE * (cells + 1), (block + 1) * self.n)
        return jnp.maximum(high - low, 0).astype(jnp.float32)

    def start(self, maps: int, probability: float) -> Tiles:
        """Return the tiles of maps whose cells all have the same probability, within the clip."""
        down = self._sum_shares(self.rows, self.down, self.row_spans)
        across = self._sum_shares(self.columns, self.across, self.column_spans)
        blocks = (np.outer(down, across) * probability).astype(np.float32)
        return Tiles(
            blocks=jnp.broadcast_to(jnp.asarray(blocks), (maps, *blocks.shape)),
            beyond=jnp.zeros((maps, self.down, self.across), jnp.int32),
        )

    def _sum_shares(self, length: int, tiles: int, spans: int) -> np.ndarray:
        """Return the sum of `share` over each tile's cells, for each block that it may overlap, float64[tiles * spans].

        Blocks beyond the map have none.
        """
        sums = np.zeros((tiles, spans))
        for tile in range(tiles):
            cells = np.arange(tile * length, min((tile + 1) * length, self.n))
            for span in range(spans):
                block = self.first_block(tile * length) + span
                overlap = np.minimum(LATTICE * (cells + 1), (block + 1) * self.n)
                overlap -= np.maximum(LATTICE * cells, block * self.n)
                sums[tile, span] = np.clip(overlap, 0, None).sum() * (block < LATTICE)
        return sums.reshape(-1)

    def resize(self, blocks: Array) -> Array:
        """Return the resized maps float32[..., 11, 11] of `Tiles.blocks` [..., D * r, C * c]."""
        down = self._place_blocks(self.rows, self.down, self.row_spans)
        across = self._place_blocks(self.columns, self.across, self.column_spans) / np.float32(self.n**2)
        return jnp.einsum("...rc,rd,ce->...de", blocks, down, across, precision=jax.lax.Precision.HIGHEST)

    def _place_blocks(self, length: int, tiles: int, spans: int) -> np.ndarray:
        """Return float32[tiles * spans, 11], 1 where a tile's sum belongs to a block of the resized map."""
        first = np.array([self.first_block(tile * length) for tile in range(tiles)])
        block = (first[:, None] + np.arange(spans)[None]).reshape(-1, 1)
        return (block == np.arange(LATTICE)[None]).astype(np.float32)


def _count_spans(n: int, length: int) -> int:
    """Return the most blocks of an axis of n cells, cut into 11, that `length` cells from a multiple of it overlap."""
    starts = range(0, n, length)
    return max((min(start + length, n) * LATTICE - 1) // n - start * LATTICE // n + 1 for start in starts)
