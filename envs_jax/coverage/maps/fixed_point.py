"""Sums over the cells of a map, in fixed point and in counts.

They do not depend on the order of the summands, and a sum updated step by step equals a recomputed one.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.stages import materialize, on_cpu

FRACTION_BITS = 21  # binary digits after the point of one summand
_LONGEST_COLUMN = 512  # summands of at most 1 that may be added in 31 bits
_MOST_ROWS = 64  # added at once
_LOW_BITS = 12


def largest_divisor(cells: int, limit: int) -> int:
    """Return the largest divisor of a number of cells that does not exceed `limit`, at least 1."""
    return max(length for length in range(1, max(limit, 1) + 1) if cells % length == 0)


def to_fixed_point(values: Array) -> Array:
    """int32: values in [-1, 1] in fixed point."""
    return jnp.round(values * jnp.float32(2**FRACTION_BITS)).astype(jnp.int32)


def total(values: Array) -> Array:
    """int32[2]: sum of fixed-point numbers int32[k], as (high, low): it is 4096 high + low, 0 <= low < 4096."""
    return totals([values])[0]


def totals(values: Sequence[Array]) -> Array:
    """int32[m, 2]: `total` of m arrays int32[k]."""
    cells = values[0].shape[0]
    max_rows = _MOST_ROWS
    if cells >= largest_divisor(cells, max_rows) << (31 - _LOW_BITS):  # the low parts might not fit in 31 bits
        max_rows = _LONGEST_COLUMN
        values = [jnp.pad(one, (0, -cells % max_rows)) for one in values]
    sums = jnp.stack([_add_rows(one, max_rows) for one in values])
    parts = sums >> _LOW_BITS, sums & (2**_LOW_BITS - 1)
    return carry(jnp.stack([jnp.sum(part, axis=1, dtype=jnp.int32) for part in parts], axis=1))


def _add_rows(values: Array, max_rows: int) -> Array:
    """int32[k / r]: column sums of int32[k] in r rows, r the largest divisor of k up to `max_rows`."""
    rows = values.reshape(largest_divisor(values.shape[0], max_rows), -1)
    if not on_cpu() or len(rows) > _MOST_ROWS:
        return jnp.sum(rows, axis=0, dtype=jnp.int32)
    return materialize(lambda rows: functools.reduce(jnp.add, rows))(rows)  # written out it takes a fifth of the time


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
    sums = _add_rows(packed, _MOST_ROWS)
    return jnp.sum((sums[None] >> jnp.arange(0, 32, 8, dtype=jnp.int32)[:, None]) & 255, axis=1, dtype=jnp.int32)
