"""Training progress, read by environments in `Environment.context`, by algorithms in `act` and `learn`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def count(number: int = 0) -> Array:
    """Return a 64-bit counter as uint32[2] (high word, low word): JAX has no 64-bit integers by default."""
    return jnp.asarray(np.array([number >> 32, number & 0xFFFFFFFF], np.uint32))


def add(counter: Array, number: Array | int) -> Array:
    """Return `counter` + `number` (below 2^32) with carry, uint32[2]."""
    low = counter[1] + jnp.asarray(number, jnp.uint32)
    return jnp.stack([counter[0] + (low < counter[1]).astype(jnp.uint32), low])


def total(counter: Array) -> Array:
    """Return a counter as float32[], exact below 2^24 and to a relative 6e-8 above."""
    return counter[0].astype(jnp.float32) * jnp.float32(2.0**32) + counter[1].astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """Counters of training; schedules name the counter that they read.

    Attributes:
        env_steps: uint32[2], steps of all copies together.
        vector_steps: uint32[2], steps of the batch.
        updates: uint32[2], gradient updates.
        learn_calls: uint32[2], calls of an algorithm's `learn` (COMA's training steps).
        episodes: uint32[2], episodes finished.
        fraction: float32[], share of the run's configured total, never of its wall time.
        total_env_steps: float32[], that total, infinite where it is not known.
    """

    env_steps: Array
    vector_steps: Array
    updates: Array
    learn_calls: Array
    episodes: Array
    fraction: Array
    total_env_steps: Array


def start(total_env_steps: float = math.inf) -> Progress:
    """Return the progress at the start of training."""
    return Progress(count(), count(), count(), count(), count(), jnp.float32(0), jnp.float32(total_env_steps))


def final_progress() -> Progress:
    """Return a progress at which every schedule, whatever counter it reads, has ended."""
    far = count(1 << 62)
    return Progress(far, far, far, far, far, jnp.float32(1), jnp.float32(1))
