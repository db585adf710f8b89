"""Random parts of the rules: turns instead of reversals, new beans, start places. Words uint32 are injected.

A word u of 32 random bits chooses one of m by the high half of u x m: biased by less than m / 2^32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.snakes.board import DOWN, NOWHERE, RIGHT, Board, count_cells, place, total, union
from envs_jax.snakes.rules import START_LENGTH, Game, free_plane
from envs_jax.snakes.segments import neighbour
from envs_jax.stages import on_cpu


def one_of(word: Array, count: Array) -> Array:
    """int32: a number from 0 to count - 1 from a random word; count < 2^15."""
    count = count.astype(jnp.uint32)
    high, low = word >> jnp.uint32(16), word & jnp.uint32(0xFFFF)
    return ((high * count + (low * count >> jnp.uint32(16))) >> jnp.uint32(16)).astype(jnp.int32)


PER_WORD = 6  # turns drawn from one word: biased by less than 3^6 / 2^32


def turns(words: Array, snakes: int) -> Array:
    """int32[n, ...]: 0, 1 or 2 for each snake, for words uint32[ceil(n / PER_WORD), ...]: their digits in base 3."""
    three = jnp.full_like(words[0], 3)
    drawn = []
    for first in range(0, snakes, PER_WORD):
        word = words[first // PER_WORD]
        for _ in range(min(PER_WORD, snakes - first)):
            drawn.append(one_of(word, three))
            word = word * three
    return jnp.stack(drawn)


def start_words(snakes: int, beans: int, key: Array) -> tuple[Array, Array]:
    """Return the key[] of a game's steps, and uint32[n + K + 2]: the random words of its start."""
    key_steps, key_start = jax.random.split(key)
    return key_steps, jax.random.bits(key_start, (snakes + beans + 2,), jnp.uint32)


def step_words(snakes: int, beans: int, key: Array, steps: Array) -> Array:
    """uint32[K + turns + 1]: the random words of a step: for beans, for turns, for random opponents."""
    return jax.random.bits(jax.random.fold_in(key, steps), (beans + -(-snakes // PER_WORD) + 1,), jnp.uint32)


def opponent_key(key: Array, steps: Array) -> Array:
    """key[]: for a step's draws of opponents that are played from outside."""
    return jax.random.fold_in(jax.random.fold_in(key, steps), 1)


def _nth_bit(word: Array, rank: Array) -> Array:
    """int32: number of the set bit with `rank` lower set bits."""
    position = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        lower = word & jnp.uint32((1 << width) - 1)
        below = jax.lax.population_count(lower).astype(jnp.int32)
        above = rank >= below
        rank = jnp.where(above, rank - below, rank)
        word = jnp.where(above, word >> jnp.uint32(width), lower)
        position = position + jnp.where(above, width, 0)
    return position


def nth_cell(plane: Array, rank: Array) -> tuple[Array, Array]:
    """(int32[...], int32[...]): index along the first axis and column of the bit with `rank` others before it.

    plane uint32[R, ...] with more than `rank` bits; row-major order.
    """
    before = jnp.zeros_like(rank)
    index = jnp.zeros_like(rank)
    rest = jnp.zeros_like(rank)
    word = jnp.zeros_like(plane[0])
    for r in range(plane.shape[0]):
        after = before + jax.lax.population_count(plane[r]).astype(jnp.int32)
        here = (rank >= before) & (rank < after)
        index = jnp.where(here, r, index)
        rest = jnp.where(here, rank - before, rest)
        word = jnp.where(here, plane[r], word)
        before = after
    return index, _nth_bit(word, rest)


def refill(board: Board, game: Game, words: Array) -> Game:
    """Place beans for the missing ones, each uniform over the cells still free, for random words uint32[K, ...]."""

    def place_bean(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        free, beans = carry
        bean = jax.lax.dynamic_index_in_dim(beans, k, keepdims=False)
        word = jax.lax.dynamic_index_in_dim(words, k, keepdims=False)
        count = count_cells(free)
        drawn = place(*nth_cell(free, one_of(word, count)))
        bean = jnp.where((bean == NOWHERE) & (count > 0), drawn, bean)
        return free & ~board.mark(bean), jax.lax.dynamic_update_index_in_dim(beans, bean, k, 0)

    # missing ones are last
    first_missing = jnp.min(total((game.beans != NOWHERE).astype(jnp.int32))) if on_cpu() else 0
    start = (free_plane(board, game), game.beans)
    _, beans = jax.lax.fori_loop(first_missing, len(game.beans), place_bean, start, unroll=not on_cpu())
    return dataclasses.replace(game, beans=beans)


def begin(board: Board, words: Array, snakes: int, beans: int) -> Game:
    """Return a game at its start, for random words uint32[n + K, ...].

    Snakes are straight, each uniform over the places left by the earlier ones.
    """
    free = jnp.broadcast_to(board.full_row, (board.height, *words.shape[1:]))

    def place_snake(free: Array, word: Array) -> tuple[Array, tuple[Array, ...]]:
        neighbour = [board.seen_from(free, d) for d in range(4)]
        room = [free & neighbour[d] & board.seen_from(neighbour[d], d) for d in range(4)]
        plane = jnp.concatenate(room)  # [4 H]: tails by direction
        index, column = nth_cell(plane, one_of(word, count_cells(plane)))
        direction = index // board.height
        tail = place(index - board.height * direction, column)
        middle = board.neighbour(tail, direction)
        head = board.neighbour(middle, direction)
        cells = board.mark(head) | board.mark(middle) | board.mark(tail)
        return free & ~cells, (cells, head, tail, direction)

    _, (cells, head, tail, direction) = jax.lax.scan(place_snake, free, words[:snakes])
    body = jnp.moveaxis(cells, 0, 1)
    bits = jnp.stack([direction & 1, direction >> 1]).astype(jnp.uint32)
    game = Game(
        body=body,
        segment_direction=union(body[:, None] * bits[None], 2),
        head=head,
        tail=tail,
        length=jnp.full_like(head, START_LENGTH),
        direction=direction,
        tail_gap=jnp.zeros_like(head, bool),
        beans=jnp.full((beans, *words.shape[1:]), NOWHERE, jnp.int32),
        steps=jnp.zeros(words.shape[1:], jnp.int32),
    )
    return refill(board, game, words[snakes:])


# Whether there is room for every start, wherever the earlier snakes were drawn

_MOST_TRIED = 1_000_000  # draws of the first snakes that are searched
_MOST_LOST = 14  # straight places of three cells that one snake can take from the later ones


def always_room(board: Board, snakes: int) -> bool:
    """Return whether every draw of the first snakes leaves a later one three free cells in a line.

    False where the search would take too long, as for many snakes on few cells.
    """
    height, width = board

    def line(r: int, c: int, direction: int) -> int:
        """Return three cells in a line as bits."""
        cells = (neighbour(board, (r, c), direction, k) for k in range(START_LENGTH))
        return sum(1 << r * width + c for r, c in cells)

    places = {line(r, c, d) for r in range(height) for c in range(width) for d in (DOWN, RIGHT)}

    @functools.cache
    def has_room(occupied: int, more: int) -> bool:
        if has_room.cache_info().currsize > _MOST_TRIED:
            return False
        remaining = [place for place in places if not place & occupied]
        if not remaining:
            return more == 0
        if more == 0 or _MOST_LOST * (more - 1) < len(remaining):
            return True
        return all(has_room(occupied | place, more - 1) for place in remaining)

    return has_room(0, snakes)
