"""The 39 values of an observation: this step (18), the one before (18), the goal (3). The batch is trailing axes.

0-2 hand, 3 opening of the gripper, 4-6 puck, 7-10 its quaternion x, y, z, w, 11-17 zeros; 18-35 the same one step
earlier; 36-38 goal. The puck does not move, except that it sinks half a millimetre into the table at first.
"""

import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.batch import constant
from envs_jax.reach import constants
from envs_jax.reach.constants import Reset
from envs_jax.reach.dynamics import Pose

FRAME = 18
SIZE = 39


def frame(pose: Pose, puck: Array, t: Array, reset: Reset) -> Array:
    """[18, ...]: the observed frame of step t int32[...], not yet clipped; `puck` [3, ...] is its start position, m."""
    numbers = constants.data()
    sink = np.array(numbers["puck"]["z_offset_after_steps_mm"], np.float32) / np.float32(1000)
    sunk = jnp.asarray(sink)[jnp.minimum(t, len(sink) - 1)]
    # the first observation shows the quaternion left over from the settling
    first = reset.puck_turn.astype(np.float32)
    still = np.array([0.0, 0.0, 0.0, 1.0], np.float32)
    turn = [jnp.where(t == 0, a, b) for a, b in zip(first, still, strict=True)]
    zeros = [jnp.zeros_like(pose.opening)] * (FRAME - 11)
    return jnp.stack([*pose.hand, pose.opening, puck[0], puck[1], puck[2] + sunk, *turn, *zeros])


def observe(frame: Array, previous_frame: Array, goal: Array) -> Array:
    """[39, ...] of frames [18, ...] and the goal [3, ...]; hand positions are clipped to their box."""
    numbers = constants.data()
    low, high = (constant(numbers[f"hand_obs_{end}"], frame.shape[1:], np.float32) for end in ("low", "high"))
    parts = [part for seen in (frame, previous_frame) for part in (jnp.clip(seen[:3], low, high), seen[3:])]
    return jnp.concatenate([*parts, goal])
