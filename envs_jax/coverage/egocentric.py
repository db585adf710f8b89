"""Views as the agent sees them from where it is, in a frame that symmetric situations share. Not in the original.

A turned or mirrored mission is another mission that is nearly as likely (except for fixed starts, the agents' numbers
and the last row and column) and worth as much. Views are turned and mirrored such that their agent lies in one eighth
of the area, so networks learn once what they would learn eight times. Maps are also shown centred on the agent, as
channel 2 is: what lies next to an agent is then in nearly the same place wherever it is (cells are not lattice points).
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.coverage.actions import MOVES
from envs_jax.coverage.world import LATTICE

_POSITIONS, _OTHER_ACTIONS = 2, 11  # channels of `observation` without ages
_ABSOLUTE = (3, 5, 6, 7, 8, 9, 10, 11)  # channels that are not centred on the agent
_AGES = 7  # where planes of ages come in, which look the same from everywhere


def actions_in_frames(num_actions: int) -> np.ndarray:
    """int32[8, n]: what each action is in the frame 4 (x mirrored) + 2 (y mirrored) + (then axes exchanged)."""
    moves = MOVES[num_actions]
    rows = []
    for mirror_x, mirror_y, exchange in itertools.product((False, True), repeat=3):
        turned = moves * np.array([-1 if mirror_x else 1, -1 if mirror_y else 1, 1])
        turned = turned[:, [1, 0, 2]] if exchange else turned
        rows.append(np.argmax((turned[:, None] == moves[None]).all(-1), axis=1))
    return np.array(rows, np.int32)


def egocentric(view: Array, num_actions: int, ages: int = 0) -> tuple[Array, Array]:
    """Turn an agent's view into the frame in which the agent has x <= y <= 5, and add maps centred on it.

    On the middle and on the diagonals, where views may be their own mirror images, less is turned.

    Args:
        view: [11, 11, 7], an observation, or [11, 11, 12], a row of `observation.critic_input`.
        num_actions: n.
        ages: number of further planes that show ages.

    Returns:
        [11, 11, 10] or [11, 11, 20], and `ages` more: the view turned, then its channels 3, 5, 6 (and 7 to 11) around
        the agent, 0 beyond the maps; and int32[n]: which action of the frame each action is.
    """
    centre = LATTICE // 2
    inside = (view[:, :, _POSITIONS] > 0).astype(jnp.int32)  # the area around the agent
    row, column = inside[centre], inside[:, centre]
    ends = column[:centre], column[centre + 1 :], row[:centre], row[centre + 1 :]
    low_x, high_x, low_y, high_y = (jnp.sum(end, dtype=jnp.int32) for end in ends)  # steps to the borders, up to 5
    mirror_x = low_x > high_x
    mirror_y = low_y > high_y
    x, y = jnp.minimum(low_x, high_x), jnp.minimum(low_y, high_y)
    exchange = x > y
    frame = 4 * mirror_x.astype(jnp.int32) + 2 * mirror_y.astype(jnp.int32) + exchange.astype(jnp.int32)
    action_indices = jnp.asarray(actions_in_frames(num_actions))[frame]

    view = jnp.where(mirror_x, view[::-1], view)
    view = jnp.where(mirror_y, view[:, ::-1], view)
    view = jnp.where(exchange, view.swapaxes(0, 1), view)
    other_actions = _OTHER_ACTIONS + ages
    if view.shape[2] > other_actions:
        action_plane = jnp.round(view[:, :, other_actions].astype(jnp.float32) * num_actions)
        action_plane = action_plane.astype(jnp.int32)  # action + 1
        turned = jnp.zeros_like(action_plane)
        for a in range(num_actions):
            turned = jnp.where(action_plane == a + 1, action_indices[a] + 1, turned)
        channel = (turned.astype(jnp.float32) / num_actions).astype(view.dtype)
        view = jnp.concatenate([view[:, :, :other_actions], channel[:, :, None]], axis=2)

    absolute = [channel + (ages if channel >= _AGES else 0) for channel in _ABSOLUTE]
    maps = view[:, :, np.array([channel for channel in absolute if channel < view.shape[2]])]
    wide = jnp.pad(maps, ((centre, 0), (centre, 0), (0, 0)))  # the agent has x, y <= 5, so no map ends before its view
    around = jax.lax.dynamic_slice(wide, (jnp.minimum(x, y), jnp.maximum(x, y), jnp.int32(0)), maps.shape)
    return jnp.concatenate([view, around], axis=2), action_indices
