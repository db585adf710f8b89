"""Ground truth: a binary map, described by a few integers and evaluated cell by cell.

Class 1 is the region of interest. Every family but "field" is made of at most two products of a set of rows and a set
of columns, each set an interval or the complement of one. A percentage c of the side n is floor(n c / 100) cells; "the
last c percent" are floor(n (c - 1) / 100) cells, as in the public repository.
"""

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, pytree
from envs_jax.coverage.raster import Raster

FAMILIES = ("split", "corner", "band", "diagonal", "four", "field")
FIELD_EXPONENT = 2.5  # amplitude of the random field falls with this power of the frequency


@pytree
class Terrain:
    """A ground truth map; class 1 = (invert xor (rows0 and columns0 or rows1 and columns1)) or bits."""

    # rows, columns: int32[2, 2], two sets [low, high); low > high means everything outside [high, low)
    rows: Array
    columns: Array
    invert: Array  # bool[]
    # uint8[ceil(n / 8), n], cell (r, c) is bit r % 8 of byte (r // 8, c); () unless the family needs it; a `Raster`
    # where the ground comes from a file, which no mission changes
    bits: Array | Raster | tuple[()]
    count: Array  # int32[], number of class-1 cells


def _inside(cells: Array, interval: Array) -> Array:
    low, high = interval[0], interval[1]
    return (cells >= low) ^ (cells >= high) ^ (low > high)


def truth(terrain: Terrain, rows: Array, columns: Array) -> Array:
    """bool: class of the cells (rows, columns), integer arrays of equal rank that broadcast, e.g. [k, 1] and [1, l].

    Random fields are looked up cell by cell; `whole` is faster for entire maps.
    """
    return _with_bits(terrain, _rectangles(terrain, rows, columns), rows, columns)


def axis_marks(terrain: Terrain, n: int) -> tuple[Array, Array]:
    """int32[n] of rows and of columns: bit i is set inside the set i of `Terrain`; for `truth_from_marks`."""
    cells = jnp.arange(n, dtype=jnp.int32)

    def marks(sets: Array) -> Array:
        return _inside(cells, sets[0]).astype(jnp.int32) | (_inside(cells, sets[1]).astype(jnp.int32) << 1)

    return marks(terrain.rows), marks(terrain.columns)


def truth_from_marks(terrain: Terrain, marks: Array, rows: Array, columns: Array) -> Array:
    """`truth` of cells from the `axis_marks` that their row and column share: cheaper where cells are read twice."""
    return _with_bits(terrain, (marks != 0) ^ terrain.invert, rows, columns)


def _with_bits(terrain: Terrain, value: Array, rows: Array, columns: Array) -> Array:
    if isinstance(terrain.bits, tuple):
        return value
    byte = bit_array(terrain.bits)[rows >> 3, columns]
    return value | (((byte >> (rows & 7).astype(jnp.uint8)) & jnp.uint8(1)) == 1)


def bit_array(bits: Array | Raster) -> Array:
    """uint8[ceil(n / 8), n]: the bits as an array, also of a raster."""
    return jnp.asarray(bits.bits) if isinstance(bits, Raster) else bits


def _rectangles(terrain: Terrain, rows: Array, columns: Array) -> Array:
    first = _inside(rows, terrain.rows[0]) & _inside(columns, terrain.columns[0])
    second = _inside(rows, terrain.rows[1]) & _inside(columns, terrain.columns[1])
    return (first | second) ^ terrain.invert


def whole(terrain: Terrain, n: int) -> Array:
    """bool[n, n]: class of every cell."""
    rows = jnp.arange(n, dtype=jnp.int32)[:, None]
    columns = jnp.arange(n, dtype=jnp.int32)[None, :]
    value = _rectangles(terrain, rows, columns)
    if not isinstance(terrain.bits, tuple):
        value |= unpack(bit_array(terrain.bits), n)
    return value


def pack(cells: Array) -> Array:
    """uint8[ceil(n / 8), n] from bool[n, n]: eight rows in one byte, the first in the lowest bit."""
    n = cells.shape[0]
    padded = jnp.pad(cells, ((0, -n % 8), (0, 0))).reshape(-1, 8, n).astype(jnp.uint8)
    return jnp.sum(padded << jnp.arange(8, dtype=jnp.uint8)[None, :, None], axis=1, dtype=jnp.uint8)


def unpack(bits: Array, n: int) -> Array:
    """bool[n, n]: inverse of `pack`."""
    planes = (bits[:, None, :] >> jnp.arange(8, dtype=jnp.uint8)[None, :, None]) & jnp.uint8(1)
    return planes.reshape(-1, bits.shape[1])[:n] == 1


def _describe(family: str, side: Array, first: Array, second: Array, n: int) -> tuple[Array, Array, Array]:
    """(rows, columns, invert) of a family of rectangles; percentages `first` and `second`."""
    all_cells = jnp.array([0, n], jnp.int32)
    none = jnp.array([0, 0], jnp.int32)

    def head(percent: Array) -> Array:
        return jnp.stack([jnp.int32(0), n * percent // 100])

    def tail(percent: Array) -> Array:
        return jnp.stack([n - n * (percent - 1) // 100, jnp.int32(n)])

    def across(strip: Array) -> tuple[Array, Array]:
        return jnp.where(side < 2, strip, all_cells), jnp.where(side < 2, all_cells, strip)

    sets = (none, none)
    invert = jnp.bool_(False)
    if family == "diagonal":  # squares in two opposite corners
        rows = jnp.stack([head(first), tail(first)])
        return rows, jnp.where(side % 2 == 0, rows, rows[::-1]), invert
    if family == "split":  # a half-plane: first rows, last rows, first columns, last columns
        sets = across(jnp.where(side % 2 == 1, tail(first), head(first)))
    elif family == "corner":  # one rectangle in a corner
        rows = jnp.where((side == 1) | (side == 2), tail(first), head(first))
        sets = rows, jnp.where(side >= 2, tail(second), head(second))
    elif family == "band":  # a strip across the map, or all but it
        sets = across(jnp.stack([n * first // 100, n * second // 100]))
        invert = side % 2 == 1
    elif family == "four":  # squares in all four corners, or all but them
        edges = jnp.stack([tail(first)[0], head(first)[1]])
        sets = (edges, edges)
        invert = side % 2 == 1
    rows, columns = (jnp.stack([one, none]) for one in sets)
    return rows, columns, invert


def _percentages(family: str, side: Array, key: Array) -> tuple[Array, Array]:
    """The two percentages of a family, drawn uniformly from its (inclusive) bounds."""
    low, high = {
        "split": ((30, 30), (60, 60)),
        "corner": ((55, 55), (74, 74)),
        "band": ((20, 65), (34, 79)),
        "diagonal": ((40, 40), (54, 54)),
        "four": ((28, 28), (37, 37)),
        "field": ((0, 0), (0, 0)),
    }[family]
    drawn = jax.random.randint(key, (2,), np.array(low, np.int32), np.array(high, np.int32) + 1, jnp.int32)
    if family == "four":
        drawn += jnp.where(side % 2 == 1, jnp.int32(4), jnp.int32(0))
    return drawn[0], drawn[1]


def _random_field(key: Array, n: int) -> Array:
    """bool[n, n]: a Gaussian random field of power spectrum k^-5, class 1 in the upper half of its range of values."""
    frequency = np.fft.fftfreq(n, 1.0 / n)
    length = np.hypot(frequency[:, None], frequency[None, :])
    amplitude = np.where(length > 0.0, np.maximum(length, 1.0) ** -FIELD_EXPONENT, 0.0).astype(np.float32)
    noise = jax.random.normal(key, (n, n), jnp.float32)
    field = jnp.real(jnp.fft.ifft2(jnp.fft.fft2(noise) * amplitude.astype(np.complex64)))
    return 2.0 * (field - field.min()) >= field.max() - field.min()


def _finish(rows: Array, columns: Array, invert: Array, bits: Array | tuple[()], n: int) -> Terrain:
    terrain = Terrain(rows, columns, invert, bits, jnp.int32(0))
    count = _area(terrain, n) if isinstance(bits, tuple) else jnp.sum(whole(terrain, n), dtype=jnp.int32)
    return Terrain(rows, columns, invert, bits, count)


def _area(terrain: Terrain, n: int) -> Array:
    """int32[]: number of class-1 cells of a terrain without bits, from the lengths of its sets."""
    marks = jnp.stack(axis_marks(terrain, n))
    inside = jnp.stack([marks & 1, marks >> 1, marks & (marks >> 1)])  # set 0, set 1 and what they share
    lengths = jnp.sum(inside, axis=2, dtype=jnp.int32)
    first, second, shared = jnp.unstack(lengths[:, 0] * lengths[:, 1])
    area = first + second - shared
    return jnp.where(terrain.invert, n * n - area, area)


def split(side: Array, percent: Array, n: int) -> Terrain:
    """The half-plane of a given side (0 first rows, 1 last rows, 2 first columns, 3 last columns) and percentage."""
    rows, columns, invert = _describe("split", jnp.int32(side), jnp.int32(percent), jnp.int32(percent), n)
    return _finish(rows, columns, invert, (), n)


def from_raster(ground: Raster) -> Terrain:
    """The ground of a file."""
    nothing = jnp.zeros((2, 2), jnp.int32)
    return Terrain(nothing, nothing, jnp.bool_(False), ground, jnp.int32(ground.count))


def draw(key: Array, families: tuple[str, ...], n: int) -> Terrain:
    """Draw a terrain: one of `families` with equal probability, then its side (0..3) and its percentages."""
    key_family, key_side, key_percent, key_field = jax.random.split(key, 4)
    side = jax.random.randint(key_side, (), 0, 4, jnp.int32)
    family = jax.random.randint(key_family, (), 0, len(families), jnp.int32)
    descriptions = [_describe(name, side, *_percentages(name, side, key_percent), n) for name in families]
    rows, columns, invert = (jnp.take(jnp.stack(part), family, axis=0) for part in zip(*descriptions, strict=True))
    bits: Array | tuple[()] = ()
    if "field" in families:
        bits = pack(_random_field(key_field, n) & (family == families.index("field")))
    return _finish(rows, columns, invert, bits, n)
