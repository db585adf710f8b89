"""Respawn of snakes: the original game's breadth-first search in its exact local form.

The search takes the first free cell s, in rows from the top left corner, that lies in a region of three or more free
cells, and three cells there. Called a and b, the first two free neighbours of s in the order right, down, up, left;
m, the first free neighbour of a other than s:

    a and b at right angles     a, s, b from head to tail
    a opposite to b             s, a, b: the head is in the middle (a, s, b if `fixed`)
    no b                        s, a, m

The stored direction leads from the second cell to the head by plain coordinates, so it is inverted where that step
crosses the board's edge (never if `fixed`).
"""

import dataclasses
import functools
from typing import Any

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
    running,
    union,
)
from envs_jax.snakes.rules import START_LENGTH, Game, free_plane
from envs_jax.stages import materialize, on_cpu

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


def _search(board: Board, free: Array) -> tuple[Array, Array]:
    """Return the place of a respawn in the free cells uint32[H, ...].

    Returns:
        packed: int32[...], see `_unpack`; NOWHERE if there is no room.
        cells: int32[3, ...], its three cells in any order.
    """
    starts = _starts(board, free)
    rows = jax.lax.broadcasted_iota(jnp.int32, free.shape, 0)
    start = jnp.min(jnp.where(starts != 0, place(rows, low_bit(starts)), _NO_START), 0)
    around = board.around(free, start, 2)

    def is_free(r: int, c: int) -> Array:
        return bit(around[2 + r], 2 + c)

    side = {d: is_free(ROW_STEP[d], COLUMN_STEP[d]) for d in SEARCH}
    a = first([side[d] for d in SEARCH], SEARCH)
    b = first([side[d] & (a != d) for d in SEARCH], SEARCH, NOWHERE)
    beyond = {
        e: choose(a, [is_free(ROW_STEP[d] + ROW_STEP[e], COLUMN_STEP[d] + COLUMN_STEP[e]) for d in range(4)])
        & (a != e ^ 1)
        for e in SEARCH
    }
    m = first([beyond[e] for e in SEARCH], SEARCH)
    two = (b >= 0).astype(jnp.int32)
    packed = jnp.where(start < _NO_START, start << 5 | two << 4 | jnp.where(two > 0, b, m) << 2 | a, NOWHERE)
    start, _, _, _, second, last = _unpack(board, packed)
    return packed, jnp.where((packed >= 0)[None], jnp.stack([start, second, last]), NOWHERE)


def _unpack(board: Board, packed: Array) -> tuple[Array, ...]:
    """Unpack a word int32[...] of `_search`.

    Returns:
        start: int32[...], place of s.
        a: int32[...], direction of a from s.
        other: int32[...], direction of b from s, or else of m from a.
        two: bool[...], there is b.
        second, last: int32[...], places of a and of b, or else m.
    """
    start = packed >> 5
    a = packed & 3
    other = packed >> 2 & 3
    two = packed & 16 != 0
    second = board.neighbour(start, a)
    return start, a, other, two, second, board.neighbour(jnp.where(two, start, second), other)


def _arrange(board: Board, packed: Array, fixed: bool) -> tuple[Any, ...]:
    """Return the snake of a word int32[...] of `_search`.

    Returns:
        cells: three int32[...], places of head, middle and last cell, NOWHERE if there is no room.
        from_middle, from_last: int32[...], direction towards the next cell on the head's side.
        direction: int32[...], stored direction.
        tail_gap: bool[...]
    """
    start, a, other, two, second, last = _unpack(board, packed)
    opposite = two & (other == a ^ 1) & (not fixed)
    from_a = two & ~opposite  # a is the head, else s
    to_head = jnp.where(from_a, a, a ^ 1)
    direction = to_head if fixed else to_head ^ board.edge(start, a).astype(jnp.int32)
    cells = jnp.where(from_a, second, start), jnp.where(from_a, start, second), last
    return [jnp.where(packed >= 0, cell, NOWHERE) for cell in cells], to_head, other ^ 1, direction, opposite


def respawn(board: Board, game: Game, fixed: bool = False) -> Game:
    """Respawn the snakes without cells in index order, on cells without snake and without bean; after `rules.move`.

    With `fixed` bodies are connected and directions true.
    """
    dead = game.length == 0
    turn = running(dead)  # in round k, the k-th dead snake of every game
    search = materialize(functools.partial(_search, board))
    mark_cells = materialize(lambda cells: union(board.mark(cells), 1))

    def respawn_one(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        free, packed = carry
        in_turn = dead & (turn == k + 1)
        place, cells = search(free)
        return free & ~mark_cells(jnp.where((turn[-1] > k)[None], cells, NOWHERE)), jnp.where(
            in_turn, place[None], packed
        )

    rounds = jnp.max(turn[-1]) if on_cpu() else len(dead)  # as many as needed where that needs no synchronisation
    start = (free_plane(board, game), jnp.full_like(game.head, NOWHERE))
    _, packed = jax.lax.fori_loop(0, rounds, respawn_one, start, unroll=not on_cpu())

    respawned = packed >= 0
    (head, middle, last), from_middle, from_last, direction, tail_gap = materialize(
        functools.partial(_arrange, board, fixed=fixed)
    )(packed)
    at_head, at_middle, at_last = (board.mark(cell) for cell in (head, middle, last))

    def write_plane(k: int) -> Array:
        """Plane k of `Game.segment_direction`."""
        bits = [(way >> k & 1).astype(jnp.uint32)[None] for way in (from_middle, from_last)]
        unchanged = game.segment_direction[:, k] & ~union(at_middle | at_last, 1)
        return unchanged | union(at_middle * bits[0] | at_last * bits[1], 1)

    return dataclasses.replace(
        game,
        body=game.body | at_head | at_middle | at_last,
        segment_direction=jnp.stack([write_plane(0), write_plane(1)], axis=1),
        head=jnp.where(respawned, head, game.head),
        tail=jnp.where(respawned, last, game.tail),
        length=jnp.where(respawned, START_LENGTH, game.length),
        direction=jnp.where(respawned, direction, game.direction),
        tail_gap=jnp.where(respawned, tail_gap, game.tail_gap),
    )
