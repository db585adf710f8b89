"""Where snakes come back: the engine's breadth-first search in its exact local form.

The search takes the first free cell s, in rows from the top left corner, that lies in a region of three or more free
cells, and three cells there. Called a and b, the first two free neighbours of s in the order right, down, up, left;
m, the first free neighbour of a other than s:

    a and b at right angles     a, s, b from head to tail
    a opposite to b             s, a, b: the head is in the middle (a, s, b if `fixed`)
    a alone                     s, a, m

The direction stored is that of the first two cells as plain coordinates show it: inverted where the step crosses the
board's edge (never if `fixed`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.snakes.board import (
    COLUMN_STEP,
    DOWN,
    NOWHERE,
    ROW_STEP,
    SEARCH,
    UP,
    Board,
    bit,
    choose,
    first,
    low_bit,
    place,
    union,
)
from envs_jax.snakes.rules import START_LENGTH, Game, free_plane

_NO_START = 1 << 20


def _starts(board: Board, free: Array) -> Array:
    """uint32[H, ...]: free cells in regions of three or more cells, for the free cells uint32[H, ...]."""
    right, down, up, left = (board.seen_from(free, d) for d in SEARCH)
    sides = right | left
    two = (right & left) | (up & down) | (sides & (up | down))
    lower, upper = (board.seen_from(sides | board.seen_from(free, d), d) for d in (DOWN, UP))  # beyond down and up
    beyond = [s & board.seen_from(s | up | down, d) for s, d in zip((right, left), (SEARCH[0], SEARCH[3]), strict=True)]
    one = (down & lower) | (up & upper) | beyond[0] | beyond[1]
    return free & (two | one)


def _search(board: Board, free: Array) -> tuple[Array, ...]:
    """The cells of a respawn in the free cells uint32[H, ...].

    Returns:
        start: int32[...], place of s, NOWHERE if there is no room.
        a: int32[...], direction of a from s.
        two: bool[...], there is b.
        other: int32[...], direction of b from s, or else of m from a.
    """
    starts = _starts(board, free)
    rows = jax.lax.broadcasted_iota(jnp.int32, free.shape, 0)
    start = jnp.min(jnp.where(starts != 0, place(rows, low_bit(starts)), _NO_START), 0)
    near = board.around(free, start, 2)

    def is_free(r: int, c: int) -> Array:
        return bit(near[2 + r], 2 + c)

    side = {d: is_free(ROW_STEP[d], COLUMN_STEP[d]) for d in SEARCH}
    a = first([side[d] for d in SEARCH], SEARCH)
    b = first([side[d] & (a != d) for d in SEARCH], SEARCH, NOWHERE)
    beyond = {
        e: choose(a, [is_free(ROW_STEP[d] + ROW_STEP[e], COLUMN_STEP[d] + COLUMN_STEP[e]) for d in range(4)])
        & (a != e ^ 1)
        for e in SEARCH
    }
    m = first([beyond[e] for e in SEARCH], SEARCH)
    two = b >= 0
    return jnp.where(start < _NO_START, start, NOWHERE), a, two, jnp.where(two, b, m)


def respawn(board: Board, game: Game, fixed: bool = False) -> Game:
    """The snakes without cells come back in index order, on cells without snake and without bean.

    Args:
        board: its size.
        game: after `rules.move`.
        fixed: bodies are connected and directions true.
    """

    def one(free: Array, dead: Array) -> tuple[Array, tuple[Array, ...]]:
        start, a, two, other = _search(board, free)
        start = jnp.where(dead, start, NOWHERE)
        beside = board.beside(start, a)
        last = board.beside(jnp.where(two, start, beside), other)
        cells = union(board.mark(jnp.where(start[None] >= 0, jnp.stack([start, beside, last]), NOWHERE)), 1)
        return free & ~cells, (start, a, beside, last, two, other, cells)

    dead = game.length == 0
    _, (start, a, beside, last, two, other, cells) = jax.lax.scan(one, free_plane(board, game), dead)

    came = start >= 0
    opposite = two & (other == a ^ 1) & (not fixed)
    from_a = two & ~opposite  # a is the head, else s
    towards_head = jnp.where(from_a, a, a ^ 1)  # from the middle cell
    at_middle = board.mark(jnp.where(came, jnp.where(from_a, start, beside), NOWHERE))
    at_last = board.mark(jnp.where(came, last, NOWHERE))

    def written(k: int) -> Array:
        """Plane k of `Game.toward`."""
        bits = [(direction >> k & 1).astype(jnp.uint32)[None] for direction in (towards_head, other ^ 1)]
        return game.toward[:, k] & ~union(at_middle | at_last, 1) | union(at_middle * bits[0] | at_last * bits[1], 1)

    direction = towards_head if fixed else towards_head ^ board.edge(start, a).astype(jnp.int32)
    return dataclasses.replace(
        game,
        body=game.body | jnp.moveaxis(cells, 0, 1),
        toward=jnp.stack([written(0), written(1)], axis=1),
        head=jnp.where(came, jnp.where(from_a, beside, start), game.head),
        tail=jnp.where(came, last, game.tail),
        length=jnp.where(came, START_LENGTH, game.length),
        direction=jnp.where(came, direction, game.direction),
        split=jnp.where(came, opposite, game.split),
    )
