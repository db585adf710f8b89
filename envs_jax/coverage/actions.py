"""Moves on the lattice and the masks that close some of them.

Sets of 4, 6 and 27 actions; each moves an agent by one lattice step or keeps it in place. Agents choose in order
0, 1, ..., A - 1 and move at once.
"""

import itertools

import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.coverage.world import LATTICE, LEVELS

LATERAL = ((-1, 0), (0, -1), (0, 1), (1, 0))  # x and y steps of the four lateral moves, in the order of the actions

MOVES = {
    6: np.array([(0, 0, 1), *((x, y, 0) for x, y in LATERAL), (0, 0, -1)], np.int32),
    4: np.array([(x, y, 0) for x, y in LATERAL], np.int32),
    27: np.array([(x, y, z) for z, x, y in itertools.product((1, 0, -1), (-1, 0, 1), (-1, 0, 1))], np.int32),
}
"""Lattice steps (x, y, z), int32[n, 3], by number of actions n."""

_HIGHEST = np.array([LATTICE - 1, LATTICE - 1, LEVELS - 1], np.int32)


def move(positions: Array, action: Array, num_actions: int) -> Array:
    """int32[A, 3]: lattice positions after the actions int32[A], clipped to the area."""
    step = jnp.take(jnp.asarray(MOVES[num_actions]), action, axis=0, mode="clip")
    return jnp.clip(positions + step, 0, _HIGHEST[None])


def boundary_mask(positions: Array, num_actions: int) -> Array:
    """bool[A, n]: moves that stay inside the area, for lattice positions int32[A, 3]. Hovering is never allowed."""
    moves = MOVES[num_actions]
    target = positions[:, None, :] + moves[None]
    inside = jnp.all((target >= 0) & (target <= _HIGHEST[None, None]), axis=-1)
    return inside & np.any(moves != 0, axis=-1)[None]


def _close(mask: Array, offset: Array, num_actions: int) -> Array:
    """Close the moves bool[n] towards an earlier agent at `offset` int32[3] = its new position minus the own one."""
    moves = MOVES[num_actions]
    if num_actions == 27:
        lateral = np.any(moves[:, :2] != 0, axis=-1)
        adjacent = lateral & jnp.all(moves[:, :2] == offset[None, :2], axis=-1) & (jnp.abs(offset[2]) <= 1)
        column = jnp.all(offset[:2] == 0) & (jnp.abs(offset[2]) == 1)
        vertical = ~lateral & (moves[:, 2] != 0)
        return mask & ~(adjacent | (vertical & column))
    # a column is closed whatever its altitude; above or under an earlier agent both vertical moves are
    closed = jnp.all(moves[:, :2] == offset[None, :2], axis=-1)
    if num_actions == 6:  # the last open action is left open
        closed &= jnp.sum(mask, dtype=jnp.int32) > 1
    return mask & ~closed


def collision_mask(position: Array, earlier: Array, moved: Array, boundary: Array, num_actions: int) -> Array:
    """bool[n]: actions open to one agent once earlier agents have chosen.

    Args:
        position: int32[3], own lattice position.
        earlier: int32[M, 3], new positions of other agents.
        moved: bool[M], which of them count; they are respected one after the other.
        boundary: bool[n], own boundary mask.
        num_actions: n.

    Returns:
        the mask; the boundary mask if none is left. As in the original, altitude differences are ignored by 4 and 6
        actions, the last action of 6 is never closed (unless two vertical ones are closed at once), and agents may
        still swap places.
    """
    mask = boundary
    for j in range(earlier.shape[0]):
        mask = jnp.where(moved[j], _close(mask, earlier[j] - position, num_actions), mask)
    return jnp.where(jnp.any(mask), mask, boundary)


def next_mask(
    positions: Array, boundary: Array, chosen: Array, agent: Array, num_actions: int, present: Array | None = None
) -> Array:
    """bool[n]: mask of `agent` given the actions int32[A] chosen by agents 0 .. agent - 1 (the rest is ignored).

    `positions` int32[A, 3] are those before the moves, `boundary` bool[A, n] the boundary masks. Agents that are not
    `present` bool[A] close nothing; None: all are.
    """
    moved = jnp.arange(positions.shape[0]) < agent
    moved = moved if present is None else moved & present
    earlier = move(positions, chosen, num_actions)
    position = jnp.take(positions, agent, axis=0)
    return collision_mask(position, earlier, moved, jnp.take(boundary, agent, axis=0), num_actions)


def next_team_mask(
    mask_state: dict[str, Array], boundary: Array, chosen: Array, agent: Array, num_actions: int
) -> Array:
    """`next_mask` where agents may be absent: the state is {"positions": int32[A, 3], "present": bool[A]}."""
    positions = mask_state["positions"]
    present = mask_state["present"]
    return next_mask(positions, boundary, chosen, agent, num_actions, present)
