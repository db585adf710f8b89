"""JAX's random bits on CPUs in fewer kernels: equal bits, a third to two thirds less to compile.

Every draw and every split of a key is a loop of five steps on CPUs. JAX's own loop carries the keys and the rotations
in eight arrays, which it exchanges, and becomes some 25 kernels, each of which XLA compiles for about 20 ms. This one
carries only the two words. Unrolled it would be quicker still, but where draws follow from each other XLA
repeats the first in every user of it, and compiles for minutes.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), Threefry-2x32 with 20 rounds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

from envs_jax.base import Array

_ROTATIONS = ((13, 17), (15, 29), (26, 16), (6, 24))  # of the rounds of even and of odd steps
_PARITY = 0x1BD11BDA


def threefry(key_0: Array, key_1: Array, count_0: Array, count_1: Array) -> tuple[Array, Array]:
    """Return the two words uint32[...] of the hash for keys and counts uint32[...] of equal shape."""
    key_2 = key_0 ^ key_1 ^ np.uint32(_PARITY)

    def step(index: Array, words: tuple[Array, Array]) -> tuple[Array, Array]:
        x, y = words
        even = index % 2 == 0
        for rotations in _ROTATIONS:
            left = jnp.where(even, np.uint32(rotations[0]), np.uint32(rotations[1]))
            x = x + y
            y = x ^ ((y << left) | (y >> (np.uint32(32) - left)))
        by_third = functools.partial(_select, index % 3)
        step_number = index.astype(jnp.uint32) + np.uint32(1)
        return x + by_third(key_1, key_2, key_0), y + by_third(key_2, key_0, key_1) + step_number

    return jax.lax.fori_loop(np.int32(0), np.int32(5), step, (count_0 + key_0, count_1 + key_1))


def _select(third: Array, *keys: Array) -> Array:
    return jnp.where(third == 0, keys[0], jnp.where(third == 1, keys[1], keys[2]))


@functools.cache
def compile_random_bits_quickly() -> None:
    """Use `threefry` in all programs for CPUs that this process traces from now on; only our commands call this."""
    mlir.register_lowering(threefry2x32_p, mlir.lower_fun(_lower, multiple_results=True), platform="cpu")


def _lower(*arguments: Array) -> tuple[Array, Array]:
    return threefry(*jnp.broadcast_arrays(*arguments))
