"""One step of the game without its draws: snakes move, eat, collide and respawn. Batch axes and planes: see `board`.

Rules after the engine of the public repository jidiai/Competition_3v3snakes, its respawn bugs included. A step is
`resolve_directions` (draws), `move`, `respawn.respawn`, `spawn.refill` (draws); n snakes, K places for beans.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, pytree
from envs_jax.batch import constant
from envs_jax.snakes.board import NOWHERE, Board, counting, running, total, union

START_LENGTH = 3


@pytree
class Game:
    """State of a game.

    Attributes:
        body: uint32[H, n, ...], the cells of each snake. No cell belongs to two snakes.
        segment_direction: uint32[H, 2, ...], low and high bit of the direction that leads from a body cell to the next
            cell of its snake on the head's side; undefined elsewhere.
        head: int32[n, ...], place of each head; meaningless for a snake without cells.
        tail: int32[n, ...], place of each last cell.
        length: int32[n, ...], 0 for a snake that could not respawn.
        direction: int32[n, ...], may differ from the body's: after a respawn it may lead into the neck.
        tail_gap: bool[n, ...], the last two cells are two steps apart, one of the snake's other cells between them.
        beans: int32[K, ...], places in their order; missing ones (-1) are last.
        steps: int32[...], steps made.
    """

    body: Array
    segment_direction: Array
    head: Array
    tail: Array
    length: Array
    direction: Array
    tail_gap: Array
    beans: Array
    steps: Array


def score(game: Game) -> Array:
    """int32[n, ...]: game score of each snake since the reset."""
    return jnp.maximum(game.length - START_LENGTH, 0)


def bean_plane(board: Board, game: Game) -> Array:
    """uint32[H, ...]: where beans lie."""
    return union(board.mark(game.beans), 1)


def body_plane(game: Game) -> Array:
    """uint32[H, ...]: where any snake lies."""
    return total(game.body, 1)


def free_plane(board: Board, game: Game) -> Array:
    """uint32[H, ...]: cells without snake and without bean."""
    return ~(body_plane(game) | bean_plane(board, game)) & board.full_row


def resolve_directions(direction: Array, action: Array, drawn: Array) -> Array:
    """int32[n, ...]: the directions in which the snakes move, from the stored and the requested ones int32[n, ...].

    A snake that reverses turns instead to one of the other three directions, `drawn` int32[n, ...] from 0 to 2.
    """
    opposite = direction ^ 1
    return jnp.where(action == opposite, drawn + (drawn >= opposite).astype(jnp.int32), action)


def bodies_without_tails(board: Board, game: Game, ate: Array) -> Array:
    """uint32[H, n, ...]: the cells that bodies keep in a move: tails leave, except of snakes that eat, bool[n, ...]."""
    return game.body & ~jnp.where(ate[None], jnp.uint32(0), board.mark(game.tail))


def next_tail(board: Board, segment_direction: Array, tail: Array, tail_gap: Array) -> Array:
    """int32[n, ...]: next places of the tails int32[n, ...] when they move, see `Game`."""
    low, high = (union(segment_direction[:, k, None] & board.mark(tail)) != 0 for k in (0, 1))
    direction = low.astype(jnp.int32) + 2 * high.astype(jnp.int32)
    following = board.neighbour(tail, direction)
    return jnp.where(tail_gap, board.neighbour(following, direction), following)


def move(board: Board, game: Game, direction: Array) -> tuple[Game, Array, Array, Array]:
    """Move all snakes in the resolved directions int32[n, ...] and let them eat, then resolve all collisions.

    Returns:
        game: snakes that were hit have no cells (length 0), beans that were eaten are gone.
        reward: int32[n, ...], 1 for a meal; 3 - length before the step for a snake that was hit.
        hit: bool[n, ...].
        ate: bool[n, ...], of snakes that were hit, too.
    """
    snakes = game.head.shape[0]
    batch = game.steps.shape
    head = board.neighbour(game.head, direction)

    meeting = (head[:, None] == head[None]) & constant(~np.eye(snakes, dtype=bool), batch)  # [n, n]: heads that meet
    on_bean = head[None] == game.beans[:, None]  # [K, n]
    earlier = constant(np.triu(np.ones((snakes, snakes), bool), 1), batch)  # [j, i]: j moves before i
    ate = union(on_bean) & ~union(meeting & earlier)
    beans = _without(game.beans, union(on_bean, 1))

    body = bodies_without_tails(board, game, ate)
    new_heads = board.mark(head)
    others = total(body, 1)
    hit = (union(others[:, None] & new_heads) != 0) | union(meeting)
    body = jnp.where(hit[None], jnp.uint32(0), body | new_heads)

    old_heads = board.mark(game.head)
    unchanged = game.segment_direction & ~union(old_heads, 1)[:, None]
    bits = jnp.stack([direction & 1, direction >> 1]).astype(jnp.uint32)  # [2, n]
    written = union(old_heads[:, None] * bits[None], 2)

    moved = dataclasses.replace(
        game,
        body=body,
        segment_direction=unchanged | written,
        head=head,
        tail=jnp.where(ate, game.tail, next_tail(board, game.segment_direction, game.tail, game.tail_gap)),
        length=jnp.where(hit, 0, game.length + ate.astype(jnp.int32)),
        direction=direction,
        tail_gap=game.tail_gap & ate,
        beans=beans,
        steps=game.steps + 1,
    )
    reward = jnp.where(hit, START_LENGTH - game.length, ate.astype(jnp.int32))
    return moved, reward, hit, ate


def collisions(board: Board, game: Game, direction: Array, ate: Array) -> Array:
    """bool[n, n, ...]: [i, j] whether snake j ran into snake i, or they met head to head; arguments as in `move`."""
    snakes = game.head.shape[0]
    batch = game.steps.shape
    head = board.neighbour(game.head, direction)
    into = union(bodies_without_tails(board, game, ate)[:, :, None] & board.mark(head)[:, None]) != 0
    met = (head[:, None] == head[None]) & constant(~np.eye(snakes, dtype=bool), batch)
    return into | met


def _without(beans: Array, eaten: Array) -> Array:
    """The beans int32[K, ...] that are not eaten, bool[K, ...], moved up in their order."""
    remaining = (beans != NOWHERE) & ~eaten
    position = running(remaining) - 1
    moved = jnp.full_like(beans, NOWHERE)
    places = counting(len(beans), beans[0])
    for k, bean in enumerate(beans):
        moved = jnp.where(remaining[k][None] & (position[k][None] == places), bean[None], moved)
    return moved


def check_end(board: Board, game: Game, max_steps: int) -> tuple[Array, Array]:
    """bool[...] twice: the board is full or a respawn failed; the time is up. The episode ends with either."""
    crowded = game.beans.shape[0] + total(game.length) > board.cells
    return crowded | union(game.length == 0), game.steps >= max_steps
