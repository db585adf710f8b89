"""JAX's random bits on CPUs in fewer kernels: equal bits, a third to two thirds less to compile.

Every draw and every split of a key is a loop of five steps on CPUs. JAX's own loop carries the keys and the rotations
in eight arrays, which it exchanges, and becomes some 25 kernels, each of which XLA compiles for about 20 ms. This one
carries only the two words. Unrolled it would be quicker still, but where draws follow from each other XLA
repeats the first in every user of it, and compiles for minutes.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), Threefry-2x32 with 20 rounds.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

from envs_jax.base import Array

_ROTATIONS = ((13, 17), (15, 29), (26, 16), (6, 24))  # the rounds of even and of odd steps
_PARITY = 0x1BD11BDA


def threefry(key_0: Array, key_1: Array, count_0: Array, count_1: Array) -> tuple[Array, Array]:
    """Return the two words uint32[...] of the hash for keys and counts uint32[...] of equal shape.

    It calls `lax`, because the functions of `jax.numpy` would be traced anew for each shape.
    """
    shape = key_0.shape
    word = np.uint32
    key_2 = key_0 ^ key_1 ^ lax.full(shape, word(_PARITY))

    def step(loop: Any) -> Any:
        index, x, y = loop
        even = lax.eq(lax.rem(index, word(2)), word(0))
        for rotations in _ROTATIONS:
            left = lax.select(even, *map(word, rotations))
            x = lax.add(x, y)
            high, low = (lax.broadcast(bits, shape) for bits in (left, lax.sub(word(32), left)))
            rotated = lax.bitwise_or(lax.shift_left(y, high), lax.shift_right_logical(y, low))
            y = lax.bitwise_xor(x, rotated)
        third = lax.rem(index, word(3))
        first, second = (lax.broadcast(lax.eq(third, word(n)), shape) for n in (0, 1))

        def by_third(*keys: Array) -> Array:
            return lax.select(first, keys[0], lax.select(second, keys[1], keys[2]))

        index = lax.add(index, word(1))
        y = lax.add(y, lax.broadcast(index, shape))
        return index, lax.add(x, by_third(key_1, key_2, key_0)), lax.add(y, by_third(key_2, key_0, key_1))

    words = lax.add(count_0, key_0), lax.add(count_1, key_1)
    _, first_word, second_word = lax.while_loop(lambda loop: lax.lt(loop[0], word(5)), step, (word(0), *words))
    return first_word, second_word


@functools.cache
def compile_random_bits_quickly() -> None:
    """Use `threefry` in all programs for CPUs that this process traces from now on; only our commands call this."""
    mlir.register_lowering(threefry2x32_p, mlir.lower_fun(_lower, multiple_results=True), platform="cpu")


def _lower(*arguments: Array) -> tuple[Array, Array]:
    return threefry(*jnp.broadcast_arrays(*arguments))
