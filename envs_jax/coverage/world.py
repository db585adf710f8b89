"""The fixed geometry: planning lattice, map, camera footprints, and area resizing to 11 x 11.

The area is 50 m x 50 m. Axis 0 of every map is x (rows), axis 1 is y (columns). Agents are at lattice points
(g_x, g_y, g_z) with g_x, g_y in 0..10 (5 m apart) and g_z in 0..2 (5, 10, 15 m up). A camera of 60 degrees sees
q cells along each axis from 5 m, so that a cell measures 10 tan(30 deg) / q metres.

Another `CoverageConfig.area` stretches all these lengths by one factor: lattice, maps and footprints stay the same.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, pytree
from envs_jax.stages import materialize

LATTICE = 11  # lattice points per horizontal axis, and side of every resized map
LEVELS = 3  # altitudes
_SMALL_MAP = 8 * LATTICE  # side of the largest map that is resized without loops
AREA = 50.0  # metres along an edge of the area
SPACING = 5.0  # metres between neighbouring lattice points, in all three directions


def map_side(cells_per_footprint: int) -> int:
    """Map side n in cells: floor(50 m / cell size) = floor(sqrt(75) q), in exact arithmetic."""
    return math.isqrt(75 * cells_per_footprint**2)


def cell_size(cells_per_footprint: int) -> float:
    """Edge of a cell in metres."""
    return 10.0 * math.tan(math.pi / 6.0) / cells_per_footprint


def radius(cells_per_footprint: int, level: int) -> int:
    """Half the side of the unclipped footprint in cells at altitude index `level`: floor(q z / 10)."""
    return cells_per_footprint * (level + 1) // 2


def radii(cells_per_footprint: int) -> tuple[int, ...]:
    """`radius` of the three altitudes, lowest first."""
    return tuple(radius(cells_per_footprint, level) for level in range(LEVELS))


@functools.cache
def centres(cells_per_footprint: int) -> np.ndarray:
    """int32[11]: cell that holds lattice point g of an axis, floor(5 m g / cell size), in exact arithmetic."""
    return np.array([math.isqrt(3 * (g * cells_per_footprint) ** 2 // 4) for g in range(LATTICE)], np.int32)


@pytree
class Box:
    """A rectangle of cells, rows [top, bottom) and columns [left, right); int32 arrays of one shape."""

    top: Array
    bottom: Array
    left: Array
    right: Array

    def holds(self, rows: Array, columns: Array) -> Array:
        """Return whether cells (rows, columns) lie inside; everything broadcasts at equal rank."""
        return (rows >= self.top) & (rows < self.bottom) & (columns >= self.left) & (columns < self.right)


def footprint(positions: Array, cells_per_footprint: int) -> Box:
    """Unclipped camera footprint of lattice positions int32[..., 3]: rows [c - r, c + r), the same for columns."""
    centre = jnp.take(jnp.asarray(centres(cells_per_footprint)), positions[..., :2], mode="clip")
    half = cells_per_footprint * (positions[..., 2] + 1) // 2
    return Box(centre[..., 0] - half, centre[..., 0] + half, centre[..., 1] - half, centre[..., 1] + half)


def clip_footprint(box: Box, n: int) -> Box:
    """Return the part of a footprint that is measured.

    All bounds are clipped to [0, n - 1] and upper bounds stay exclusive, as in the original, so that the last row and
    the last column of the map are never observed.
    """
    return jax.tree.map(lambda bound: jnp.clip(bound, 0, n - 1), box)


@functools.cache
def area_matrix(n: int) -> np.ndarray:
    """float64[11, n]: resizing along one axis from n cells to 11, as OpenCV's INTER_AREA does it; rows sum to 1.

    For n >= 11 entry (d, c) is the share of block d, [d n / 11, (d + 1) n / 11), that cell c fills. For n < 11 (which
    occurs only for the footprint of a coarse camera) it is OpenCV's linear interpolation.
    """
    matrix = np.zeros((LATTICE, n))
    step = n / LATTICE
    for d in range(LATTICE):
        if n >= LATTICE:
            cells = np.arange(n)
            # 11 times the overlap of cell and block, in integers
            overlap = np.minimum(11 * (cells + 1), (d + 1) * n) - np.maximum(11 * cells, d * n)
            matrix[d] = np.clip(overlap, 0, None) / n
        else:
            left = d * n // LATTICE
            share = (d + 1) - (left + 1) / step
            share = 0.0 if share <= 0.0 else share - math.floor(share)
            if left >= n - 1:
                left = n - 1
                share = 0.0
            matrix[d, left] = 1.0 - share
            if share > 0.0:
                matrix[d, left + 1] = share
    return matrix


def interval_share(low: Array, high: Array, n: int) -> Array:
    """float32[..., 11]: share of each of the 11 blocks of an axis that the cells [low, high) fill, n >= 11.

    Equals area_matrix(n)[:, low:high].sum(1), for traced bounds int32[...].
    """
    blocks = jnp.arange(LATTICE, dtype=jnp.int32).reshape((1,) * low.ndim + (LATTICE,))

    def fill_share(bound: Array) -> Array:  # in units of 1/n of a block
        return jnp.clip(LATTICE * bound[..., None] - n * blocks, 0, n)

    return (fill_share(high) - fill_share(low)).astype(jnp.float32) * jnp.float32(1.0 / n)


def resize(values: Array, transform: Callable[[Array], Array] | None = None) -> Array:
    """Area-resize maps [..., n, n] to float32[..., 11, 11] along their last two axes.

    `transform` (elementwise, to float32) is applied to the values first. On large maps it is evaluated block of rows by
    block of rows, inside the sums, so that no transformed map is ever stored.
    """
    transform = transform or (lambda x: x.astype(jnp.float32))
    *lead, n, _ = values.shape
    matrix = area_matrix(n).astype(np.float32)
    if n <= _SMALL_MAP:  # few rows per block: flat elementwise work, sums written out
        rows = materialize(transform)(values.reshape(*lead, n * n)).reshape(values.shape)
        sums = [sum(w * rows[..., r, :] for r, w in enumerate(weights) if w) for weights in matrix]
    else:
        sums = []
        for weights in matrix:
            inside = np.flatnonzero(weights)
            low, high = int(inside[0]), int(inside[-1]) + 1
            share = weights[low:high].reshape(*(1,) * len(lead), high - low, 1)
            sums.append(jnp.sum(transform(values[..., low:high, :]) * share, axis=-2))
    return jnp.einsum("...dc,ec->...de", jnp.stack(sums, axis=-2), matrix, precision=jax.lax.Precision.HIGHEST)


def resize_rows(values: Callable[[Array], Array], n: int) -> Array:
    """`resize` of maps that are computed where they are read: `values` gives rows int32[R] as [..., R, n].

    All blocks are one sum: on GPUs a sum for each of them, with all that computes a map inside, compiles for minutes.
    """
    matrix = area_matrix(n).astype(np.float32)
    low = np.argmax(matrix > 0, axis=1)
    max_rows = int(np.count_nonzero(matrix, axis=1).max())
    rows = np.minimum(low[:, None] + np.arange(max_rows), n - 1)
    shares = np.where(low[:, None] + np.arange(max_rows) < n, np.take_along_axis(matrix, rows, axis=1), 0)
    blocks = values(jnp.asarray(rows.ravel(), jnp.int32))
    blocks = blocks.reshape(*blocks.shape[:-2], LATTICE, max_rows, n)
    weights = shares.reshape(*(1,) * (blocks.ndim - 3), LATTICE, max_rows, 1)
    sums = jnp.sum(blocks * weights, axis=-2)
    return jnp.einsum("...dc,ec->...de", sums, matrix, precision=jax.lax.Precision.HIGHEST)
