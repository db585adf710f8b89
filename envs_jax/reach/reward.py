"""Reward of a step; `env.py` decides success. Leading axes are coordinates, trailing ones the batch."""

import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.batch import constant
from envs_jax.reach.constants import Reset

NAMES = ("v2", "v1", "sparse")
RADIUS = 0.05  # where Meta-World says success, m
MOST = 10.0  # v2, a step
_NOMINAL = np.array([0.0, 0.6, 0.2])  # the hand at the start, approximately, m
MARGIN = 0.5  # distance of the opening from its range at which a tenth of the reward is left


def distance(a: Array, b: Array) -> Array:
    """[...]: m between positions [3, ...]."""
    offset = a - b
    return jnp.sqrt(jnp.sum(offset * offset, axis=0))


def tail(excess: Array) -> Array:
    """1 up to an excess of 0, 1/10 at 1, and a long tail: 1 / (1 + 9 excess^2)."""
    positive = jnp.maximum(excess, 0.0)
    return 1.0 / (1.0 + 9.0 * positive * positive)


def compute_reward(name: str, tool_distance: Array, tool_goal: Array, reset: Reset, radius: float = RADIUS) -> Array:
    """Reward of a distance, formula "v2" (0 to 10) or "v1" (thousands), as in Meta-World's versions of the task.

    Args:
        name: "v2" or "v1".
        tool_distance: [...], m from the tool centre to `tool_goal`.
        tool_goal: [3, ...], m.
        reset: state at the start of the episode.
        radius: distance up to which "v2" pays most, m.
    """
    start = constant(_NOMINAL if name == "v2" else reset.tool_before, tool_goal.shape[1:], tool_goal.dtype)
    initial_distance = distance(tool_goal, start)
    if name == "v2":
        return MOST * tail((tool_distance - radius) / initial_distance)
    squared = tool_distance * tool_distance
    closeness = jnp.exp(squared * (-1 / 0.01)) + jnp.exp(squared * (-1 / 0.001))
    return jnp.maximum(1000.0 * (initial_distance - tool_distance) + 1000.0 * closeness, 0.0)


def outside(opening: Array, required: Array) -> Array:
    """[...]: distance of an opening of the gripper from the range `required` [2, ...]; 0 inside."""
    return jnp.maximum(jnp.maximum(required[0] - opening, opening - required[1]), 0.0)
