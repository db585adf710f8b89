"""Scripted policies: policy(env, state, timestep, key) -> float32[1, 4].

random      uniform
scripted    moves the hand towards the point with a gain of 5, as Meta-World's own; the tool centre is 4.5 cm lower
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from envs_jax.base import Array, TimeStep
from envs_jax.reach.types import ReachConfig, State

GAIN = 5.0


def random(env: ReachConfig, state: State, timestep: TimeStep, key: Array) -> Array:
    """Draw uniformly from [-1, 1]."""
    del env, state, timestep
    return jax.random.uniform(key, (1, 4), jnp.float32, -1.0, 1.0)


def scripted(env: ReachConfig, state: State, timestep: TimeStep, key: Array) -> Array:
    """Move straight to the point; move the fingers only where their opening counts."""
    del env, timestep, key
    low, high = state.required_opening
    middle = 0.5 * (low + high)
    close = jnp.where(state.frame[3] > middle, jnp.float32(1), jnp.float32(-1))
    grip = jnp.where(high - low < 1.0, close, 0.0)
    move = jnp.clip(GAIN * (state.tool_goal - state.frame[:3]), -1.0, 1.0)
    return jnp.concatenate([move, grip[None]])[None]


BASELINES: dict[str, Callable[..., Array]] = {"random": random, "scripted": scripted}
