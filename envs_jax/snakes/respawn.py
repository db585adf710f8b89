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
    LEFT,
    NOWHERE,
    RIGHT,
    ROW_STEP,
    SEARCH,
    UP,
    Board,
    bit,
    choose,
    first,
    fold,
    low_bit,
    place,
)
from envs_jax.snakes.rules import START_LENGTH, Game, free_plane

_NO_START = 1 << 20


def _starts(board: Board, free: Array) -> Array:
    """uint32[H, ...]: free cells in regions of three or more cells, for the free cells uint32[H, ...]."""
    right, down, up, left = (board.seen_from(free, d) for d in SEARCH)
    two = (right & down) | ((right | down) & (up | left)) | (up & left)
    upper, lower = board.seen_from(right | left, UP), board.seen_from(right | left, DOWN)  # of the diagonals
    beyond_right = board.seen_from(right | up | down, RIGHT)
    beyond_left = board.seen_from(left | up | down, LEFT)
    one = (right & beyond_right) | (down & (lower | board.seen_from(down, DOWN)))
    one |= (up & (upper | board.seen_from(up, UP))) | (left & beyond_left)
    return free & (two | one)


def _cells(board: Board, free: Array, fixed: bool) -> tuple[Array, ...]:
    """Where a snake respawns in the free cells uint32[H, ...].

    Returns:
        head, middle, last: int32[...], places, NOWHERE if there is no room.
        from_middle, from_last: int32[...], direction towards the next cell on the head's side.
        direction: int32[...], stored direction.
        split: bool[...], last is two steps away from middle.
    """
    starts = _starts(board, free)
    rows = jax.lax.broadcasted_iota(jnp.int32, free.shape, 0)
    start = fold(jnp.minimum, jnp.where(starts != 0, place(rows, low_bit(starts)), _NO_START))
    found = start != _NO_START
    start = jnp.where(found, start, 0)

    near = board.around(free, start, 2)

    def is_free(r: int, c: int) -> Array:
        return bit(near[2 + r], 2 + c)

    side = {d: is_free(ROW_STEP[d], COLUMN_STEP[d]) for d in SEARCH}
    a = first([side[d] for d in SEARCH], SEARCH)
    b = first([side[d] & (a != d) for d in SEARCH], SEARCH, -1)
    beyond = {
        e: choose(a, [is_free(ROW_STEP[d] + ROW_STEP[e], COLUMN_STEP[d] + COLUMN_STEP[e]) for d in range(4)])
        & (a != e ^ 1)
        for e in SEARCH
    }
    m = first([beyond[e] for e in SEARCH], SEARCH)

    two = b >= 0
    opposite = two & (b == a ^ 1) & (not fixed)
    corner = two & ~opposite
    beside = board.beside(start, a)
    head, middle = jnp.where(corner, beside, start), jnp.where(corner, start, beside)
    last = jnp.where(two, board.beside(start, b), board.beside(beside, m))
    from_middle = jnp.where(corner, a, a ^ 1)
    from_last = jnp.where(two, b, m) ^ 1
    direction = from_middle if fixed else from_middle ^ board.edge(start, a).astype(jnp.int32)
    nowhere = [jnp.where(found, x, NOWHERE) for x in (head, middle, last)]
    return *nowhere, from_middle, from_last, direction, opposite


def respawn(board: Board, game: Game, fixed: bool = False) -> Game:
    """The snakes without cells come back in index order, on cells without snake and without bean.

    Args:
        board: its size.
        game: after `rules.move`.
        fixed: bodies are connected and directions true.
    """
    free = free_plane(board, game)
    toward = game.toward

    def one(carry: tuple[Array, Array], dead: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        free, toward = carry
        head, middle, last, from_middle, from_last, direction, split = _cells(board, free, fixed)
        head, middle, last = (jnp.where(dead, x, NOWHERE) for x in (head, middle, last))
        at_head, at_middle, at_last = (board.mark(x) for x in (head, middle, last))
        cells = at_head | at_middle | at_last

        def written(k: int) -> Array:
            kept = toward[:, k] & ~cells
            bits = (((x >> k) & 1).astype(jnp.uint32)[None] for x in (from_middle, from_last))
            return kept | at_middle * next(bits) | at_last * next(bits)

        toward = jnp.stack([written(0), written(1)], axis=1)
        return (free & ~cells, toward), (head, last, direction, split, cells)

    dead = game.length == 0
    (_, toward), (head, last, direction, split, cells) = jax.lax.scan(one, (free, toward), dead)
    came = dead & (head >= 0)
    return dataclasses.replace(
        game,
        body=game.body | jnp.moveaxis(cells, 0, 1),
        toward=toward,
        head=jnp.where(came, head, game.head),
        tail=jnp.where(came, last, game.tail),
        length=jnp.where(came, START_LENGTH, game.length),
        direction=jnp.where(came, direction, game.direction),
        split=jnp.where(dead, split & came, game.split),
    )
