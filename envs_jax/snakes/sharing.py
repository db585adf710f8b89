"""Cells and beans that snakes share out among them, for the scripted opponent `sharing`.

After the strongest public heuristic agent found, CarlossShi/Competition_3v3snakes. All snakes spread over the board
move by move, and enter cells when bodies have left them. A cell belongs to the snake that reaches it first, of those
that reach it in the same move to the shortest, or to all of these. Into the cell of a tail that moves away just then,
only its own snake can follow.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.snakes import territory
from envs_jax.snakes.board import NOWHERE, Board, counting, union
from envs_jax.snakes.rules import Game
from envs_jax.snakes.territory import FAR

NEVER = FAR + 1


class Shares(NamedTuple):
    """The first moves in which m snakes come to places of their own, by direction of the first move; else NEVER."""

    bean: Array  # int32[4, K, m, ...]: to each of the beans
    tail: Array  # int32[4, m, ...]: to a cell that their own tail has left


def share(board: Board, game: Game, snakes: slice) -> Shares:
    """Let all snakes spread, FAR moves, and return what these m come to."""
    heads = board.mark(jnp.where(game.length > 0, game.head, NOWHERE))  # [H, n, ...]
    beans = board.mark(game.beans)[:, None, :, None]  # [H, 1, K, 1, ...]
    free, leave = territory.leaving_cells(board, game)
    is_shorter = (game.length[None] < game.length[:, None])[None]  # [1, n, n, ...]: the second one
    first_cells = board.mark_neighbours(game.head[snakes])

    def further(carry: Any, row: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array]]:
        free, taken, fronts, ways = carry
        k, leaves = row
        own_tails = leaves[:, None] & game.body
        reached = board.spread(fronts) & (free[:, None] | own_tails) & ~taken[:, None]
        fronts = reached & ~union(jnp.where(is_shorter, reached[:, None], jnp.uint32(0)), 2)
        ways = jnp.where(k == 1, first_cells, board.spread(ways)) & fronts[:, None, snakes]
        at_bean = union(ways[:, :, None] & beans) != 0
        at_tail = union(ways & game.body[:, None, snakes]) != 0
        return (free | leaves, taken | union(reached, 1), fronts, ways), (at_bean, at_tail)

    start = free, jnp.zeros_like(free), heads, jnp.zeros_like(first_cells)
    moves = jnp.arange(1, FAR + 1, dtype=jnp.int32)
    _, (at_bean, at_tail) = jax.lax.scan(further, start, (moves, leave))

    def first_move(happens: Array) -> Array:
        """The number of the first move in which it happens, bool[FAR, ...]."""
        return jnp.min(jnp.where(happens, counting(FAR, happens[0]) + 1, NEVER), 0)

    return Shares(first_move(at_bean), first_move(at_tail))


def assign(moves: Array) -> Array:
    """int32[m, ...]: the bean of each snake, K for none, for moves int32[K, m, ...] in which they come to beans.

    Of the snakes and beans that are left, the nearest two go together, the earlier bean or snake first.
    """
    beans, snakes = moves.shape[:2]
    pairs = beans * snakes
    bean_index = counting(beans, moves[0, 0])
    snake_index = counting(snakes, moves[0, 0])
    key = moves * pairs + bean_index[:, None] * snakes + snake_index[None]  # of equals the lowest pair
    chosen = jnp.full_like(moves[0], beans)
    for _ in range(min(beans, snakes)):
        best = jnp.min(key, (0, 1))
        is_bean = bean_index == (best % pairs // snakes)[None]
        is_snake = (snake_index == (best % snakes)[None]) & (best < NEVER * pairs)[None]
        chosen = jnp.where(is_snake, (best % pairs // snakes)[None], chosen)
        key = jnp.where(is_bean[:, None] | is_snake[None], (NEVER + 1) * pairs, key)
    return chosen
