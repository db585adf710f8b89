"""The board: a torus of at most 32 columns, its cells, and sets of cells as bits.

Batch: every array of the rules may have further trailing axes, one entry per game: none for a single game, [B] for a
batch whose innermost loop runs over games.

A place is an int32, 32 x row + column, -1 for "no place". A plane is a set of cells, uint32[H, ...]: bit c of word r
is the cell in row r and column c.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs_jax.base import Array

UP, DOWN, LEFT, RIGHT = range(4)  # directions and actions; the opposite of d is d ^ 1
ROW_STEP = (-1, 1, 0, 0)
COLUMN_STEP = (0, 0, -1, 1)
SEARCH = (RIGHT, DOWN, UP, LEFT)  # order in which the respawn tries neighbours
NOWHERE = -1
MOST_COLUMNS = 32


def total(x: Array, axis: int = 0) -> Array:
    """Sum over an axis."""
    return jnp.sum(x, axis, dtype=x.dtype)


def union(x: Array, axis: int = 0) -> Array:
    """Bitwise or (logical or of booleans) over an axis."""
    return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.bitwise_or, (axis,))


def running(x: Array) -> Array:
    """int32[...]: cumulative sums over a short first axis: plain additions, which compilers fuse."""
    sums = [x[0].astype(jnp.int32)]
    for values in x[1:]:
        sums.append(sums[-1] + values.astype(jnp.int32))
    return jnp.stack(sums)


def counting(size: int, like: Array) -> Array:
    """int32[size, *like.shape]: the index along the first axis."""
    return jax.lax.broadcasted_iota(jnp.int32, (size, *like.shape), 0)


def choose(index: Array, choices: Sequence[Array]) -> Array:
    """choices[index], element by element."""
    chosen = choices[0]
    for position, choice in enumerate(choices[1:], 1):
        chosen = jnp.where(index == position, choice, chosen)
    return chosen


def first(conditions: Sequence[Array], values: Sequence[int], otherwise: int = 0) -> Array:
    """int32: the value of the first condition that holds."""
    chosen = jnp.full_like(conditions[0], otherwise, jnp.int32)
    for condition, value in reversed(list(zip(conditions, values, strict=True))):
        chosen = jnp.where(condition, jnp.int32(value), chosen)
    return chosen


def row(place: Array) -> Array:
    """int32: row of a place (-1 for no place)."""
    return place >> 5


def column(place: Array) -> Array:
    """int32: column of a place."""
    return place & 31


def place(row: Any, column: Any) -> Any:
    """The place in a row and a column."""
    return row * 32 + column


def low_bit(word: Array) -> Array:
    """int32: number of the lowest bit of a word that is not 0."""
    return jax.lax.population_count((word & -word) - jnp.uint32(1)).astype(jnp.int32)


def count_cells(plane: Array) -> Array:
    """int32[...]: number of cells of a plane uint32[H, ...]."""
    return total(jax.lax.population_count(plane)).astype(jnp.int32)


class Board(NamedTuple):
    """Size of the board, and functions that depend on it."""

    height: int
    width: int

    @property
    def cells(self) -> int:
        return self.height * self.width

    @property
    def full_row(self) -> Array:
        """uint32[]: a word with all cells of a row."""
        return jnp.uint32((1 << self.width) - 1)

    def shift(self, place: Array, rows: int, columns: int) -> Array:
        """Return the place moved by rows down and columns to the right, at most one board away."""
        r = row(place) + rows
        c = column(place) + columns
        if rows:
            r = jnp.where(r < 0, r + self.height, jnp.where(r >= self.height, r - self.height, r))
        if columns:
            c = jnp.where(c < 0, c + self.width, jnp.where(c >= self.width, c - self.width, c))
        return r * 32 + c

    def neighbour(self, place: Array, direction: Array) -> Array:
        """Return the neighbour of a place in a direction."""
        return choose(direction, [self.shift(place, r, c) for r, c in zip(ROW_STEP, COLUMN_STEP, strict=True)])

    def edge(self, place: Array, direction: Array) -> Array:
        """bool: the step from a place in a direction crosses the board's edge."""
        r = row(place)
        c = column(place)
        return choose(direction, [r == 0, r == self.height - 1, c == 0, c == self.width - 1])

    def mark(self, place: Array) -> Array:
        """uint32[H, ...]: the plane that holds only this place, empty for no place."""
        bit = jnp.uint32(1) << column(place).astype(jnp.uint32)
        return jnp.where(counting(self.height, place) == row(place)[None], bit[None], jnp.uint32(0))

    def seen_from(self, plane: Array, direction: int) -> Array:
        """Return the plane whose every cell holds the bit of its neighbour in a direction (a Python int)."""
        if direction in (UP, DOWN):
            return jnp.roll(plane, -ROW_STEP[direction], axis=0)
        one = jnp.uint32(1)
        rest = jnp.uint32(self.width - 1)
        if direction == RIGHT:
            return (plane >> one) | (plane << rest) & self.full_row
        return (plane << one) & self.full_row | (plane >> rest)

    def spread(self, plane: Array) -> Array:
        """Return the cells of a plane and all their neighbours."""
        return union(jnp.stack([plane, *(self.seen_from(plane, d) for d in range(4))]))

    def mark_neighbours(self, place: Array) -> Array:
        """uint32[H, 4, m, ...]: for places int32[m, ...] the planes that hold only their neighbour in a direction."""
        return jnp.stack([self.mark(self.neighbour(place, jnp.full_like(place, d))) for d in range(4)], 1)

    def around(self, plane: Array, place: Array, radius: int) -> list[Array]:
        """Return the cells around a place: a word uint32[...] per row from `radius` above it to `radius` below.

        Bit k = 0 .. 2 radius of a word is the cell k - radius columns to the right; higher bits are undefined. The
        plane uint32[H, ...] has the axes of the place int32[...], or axes of length 1 in their stead; 2 radius < 32.
        """
        words = []
        c = column(place)
        start = jnp.where(c < radius, c + (self.width - radius % self.width), c - radius)  # first column, wrapped
        for offset in range(-radius, radius + 1):
            r = row(place) + (offset % self.height)
            r = jnp.where(r >= self.height, r - self.height, r)
            word = total(jnp.where(counting(self.height, r) == r[None], plane, jnp.uint32(0)))
            words.append(self._turn(word, start, 2 * radius + 1))
        return words

    def _turn(self, word: Array, start: Array, length: int) -> Array:
        """Return a row from column `start` on, repeated cyclically over at least `length` bits (at most 32)."""
        start = jnp.where(start >= self.width, start - self.width, start).astype(jnp.uint32)
        turned = (word >> start) | (word << (jnp.uint32(self.width) - start)) & self.full_row
        bits = self.width
        while bits < length:
            turned = turned | turned << jnp.uint32(bits)
            bits = 2 * bits
        return turned


def bit(word: Array, index: int) -> Array:
    """bool: a bit of a word."""
    return (word >> jnp.uint32(index)) & jnp.uint32(1) != jnp.uint32(0)
