"""Random bits in fewer kernels: those of JAX itself and of the published test vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p, threefry_2x32

from jaxrl.cli.threefry import compile_random_bits_quickly, threefry

# Random123, kat_vectors: threefry2x32 with 20 rounds: counts, keys, words.
PUBLISHED = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counts", "keys", "words"), PUBLISHED)
def test_published_vectors(counts, keys, words):
    assert tuple(int(x) for x in threefry(*map(jnp.uint32, (*keys, *counts)))) == words


@np.errstate(over="ignore")  # of scalars
def by_numpy(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The hash, written out round by round, uint32[2, ...]."""
    x, y = counts[0] + keys[0], counts[1] + keys[1]
    keys = [*keys, keys[0] ^ keys[1] ^ np.uint32(0x1BD11BDA)]
    for number in range(20):
        rotation = (13, 15, 26, 6, 17, 29, 16, 24)[number % 8]
        x = x + y
        y = x ^ (y << np.uint32(rotation) | y >> np.uint32(32 - rotation))
        if number % 4 == 3:
            group = number // 4 + 1
            x, y = x + keys[group % 3], y + keys[(group + 1) % 3] + np.uint32(group)
    return np.stack([x, y])


def test_draws_follow_from_the_hash():
    """As JAX defines them: counts are positions, and 32 bits the two words exclusive-or."""
    compile_random_bits_quickly()
    words = np.array([3, 2**31 + 7], np.uint32)
    key = jax.random.wrap_key_data(jnp.asarray(words))

    @jax.jit
    def drawn(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, 1001)
        folded = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(1001, dtype=jnp.uint32))
        return [jax.random.bits(key, (7, 143)).ravel(), jax.random.key_data(keys).T, jax.random.key_data(folded).T]

    key_words = np.broadcast_to(words[:, None], (2, 1001))
    expected = by_numpy(key_words, np.stack([np.zeros(1001, np.uint32), np.arange(1001, dtype=np.uint32)]))
    bits, keys, folded = drawn(key)
    np.testing.assert_array_equal(bits, expected[0] ^ expected[1])
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(folded, expected)


def test_programs_use_it():
    compile_random_bits_quickly()
    program = jax.jit(lambda key: jax.random.bits(key, (3,))).lower(jax.random.key(0)).as_text()
    (loop,) = [line for line in program.splitlines() if "stablehlo.while" in line]
    assert loop.count("%iterArg") == 6  # counter, two words, three keys; JAX loops over nine


def test_arrays_of_keys_and_counts():
    compile_random_bits_quickly()
    rng = np.random.default_rng(0)
    keys, counts = (rng.integers(0, 2**32, (2, 6), dtype=np.uint32) for _ in range(2))
    words = jax.vmap(lambda key, count: threefry_2x32(key, count))(jnp.asarray(keys.T), jnp.asarray(counts.T))
    np.testing.assert_array_equal(np.asarray(words).T, by_numpy(keys, counts))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5)])
def test_shapes_of_the_primitive(shape):
    """All draws consist of it; its operands may have fewer axes than the words, or axes of length 1."""
    compile_random_bits_quickly()
    rng = np.random.default_rng(1)
    key = rng.integers(0, 2**32, (2,), dtype=np.uint32)
    counts = rng.integers(0, 2**32, (2, *shape), dtype=np.uint32)
    first = counts[0][..., :1] if shape else counts[0]
    ones = [1] * len(shape)
    words = jax.jit(threefry2x32_p.bind)(key[0].reshape(ones), key[1].reshape(ones), first, counts[1])
    full = np.stack([np.broadcast_to(first, shape), counts[1]])
    expected = by_numpy(np.broadcast_to(key.reshape(2, *ones), (2, *shape)), full)
    np.testing.assert_array_equal(np.stack(words), expected)
