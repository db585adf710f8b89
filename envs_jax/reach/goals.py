"""Positions of puck and goal: bounds, the pool of 50 pairs, fresh draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array

PUCK = np.array([(-0.1, 0.1), (0.6, 0.7), (0.02, 0.02)])  # lower and upper bounds, m
GOAL = np.array([(-0.1, 0.1), (0.8, 0.9), (0.05, 0.3)])
MIN_DISTANCE = 0.15  # horizontal distance of puck and goal at least, m
POOL = 50
_TRIES = 16  # one draw in sixteen is too close


@functools.cache
def pool(seed: int) -> np.ndarray:
    """float64[50, 6]: puck and goal of every member."""
    generator = np.random.default_rng(seed)
    low, high = np.concatenate([PUCK, GOAL]).T
    rows: list[np.ndarray] = []
    while len(rows) < POOL:
        row = generator.uniform(low, high)
        if np.hypot(*(row[:2] - row[3:5])) >= MIN_DISTANCE:
            rows.append(row)
    return np.array(rows)


def from_pool(key: Array, seed: int) -> Array:
    """float32[6]: the member chosen by a key's last word: any for hashed keys, m % 50 for key(m)."""
    index = jax.random.key_data(key).reshape(-1)[-1] % jnp.uint32(POOL)
    return jnp.asarray(pool(seed), jnp.float32)[index.astype(jnp.int32)]


def list_entry(kind: str, seed: int, index: Array | int) -> Array:
    """float32[6], entry int32[] of an endless list: the pool repeated, or ("uniform") fresh draws."""
    if kind == "uniform":
        return fresh(jax.random.fold_in(jax.random.key(seed), index))
    return jnp.asarray(pool(seed), jnp.float32)[index % POOL]


def fresh(key: Array) -> Array:
    """float32[6], the first of sixteen draws that are far enough apart."""
    low, high = jnp.asarray(np.concatenate([PUCK, GOAL]).T, jnp.float32)
    rows = low[None] + (high - low)[None] * jax.random.uniform(key, (_TRIES, 6), jnp.float32)
    far_enough = jnp.sum((rows[:, :2] - rows[:, 3:5]) ** 2, axis=1) >= MIN_DISTANCE**2
    return rows[jnp.argmax(far_enough)]
