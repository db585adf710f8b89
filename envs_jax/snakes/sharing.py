"""A scripted team whose snakes share the board and its beans, after the strongest public heuristic agent.

Idea: CarlossShi/Competition_3v3snakes. All six snakes spread over the board move by move; a cell belongs to the snake
that reaches it first, of those in the same move to the shortest.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.snakes import territory
from envs_jax.snakes.board import NOWHERE, Board, count_cells, counting, union
from envs_jax.snakes.rules import Game
from envs_jax.snakes.territory import FAR

NEVER = FAR + 1


class Shares(NamedTuple):
    """What m snakes come to in the cells that belong to them, by direction of the first move."""

    cells: Array  # int32[4, m, ...]: number of them within FAR moves
    bean: Array  # int32[4, K, m, ...]: move in which the snake comes to a bean, NEVER
    tail: Array  # int32[4, m, ...]: the first move in which it enters the cell that its tail has just left, NEVER


def share(board: Board, game: Game, snakes: slice) -> Shares:
    """Let all snakes spread, and return what these m come to."""
    heads = board.mark(jnp.where(game.length > 0, game.head, NOWHERE))  # [H, n, ...]
    beans = board.mark(game.beans)[:, None, :, None]  # [H, 1, K, 1, ...]
    free, leave = territory.leaving_cells(board, game)
    shorter = (game.length[None] < game.length[:, None])[None]  # [1, n, n, ...]

    def contest(reached: Array) -> Array:
        taken = union(jnp.where(shorter, reached[:, None], jnp.uint32(0)), 2)
        return reached & ~taken

    def covers(ways: Array, planes: Array) -> Array:
        return union(ways & planes) != 0

    def further(carry: Any, row: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array]]:
        free, claimed, fronts, ways = carry
        k, leaves = row
        own_tails = leaves[:, None] & game.body
        reached = board.spread(fronts) & (free[:, None] | own_tails) & ~claimed[:, None]
        fronts = contest(reached)
        # In the first move a way is a neighbour cell, afterwards what spreads from its cells.
        ways = jnp.where(k == 1, board.mark_neighbours(game.head[snakes]), board.spread(ways)) & fronts[:, None, snakes]
        at_bean = covers(ways[:, :, None], beans)
        at_tail = covers(ways, own_tails[:, None, snakes])
        carry = free | leaves, claimed | union(reached, 1), fronts, ways
        return carry, (count_cells(ways), at_bean, at_tail)

    start = free, jnp.zeros_like(free), heads, jnp.zeros_like(board.mark_neighbours(game.head[snakes]))
    moves = jnp.arange(1, FAR + 1, dtype=jnp.int32)
    _, (cells, at_bean, at_tail) = jax.lax.scan(further, start, (moves, leave))

    def first_move(reached: Array) -> Array:
        index = counting(FAR, reached[0]) + 1
        return jnp.min(jnp.where(reached, index, NEVER), 0)

    return Shares(jnp.sum(cells, 0, dtype=jnp.int32), first_move(at_bean), first_move(at_tail))


def assign(moves: Array) -> Array:
    """int32[m, ...]: the bean of each snake, K for none, for moves int32[K, m, ...] in which they come to beans.

    The nearest pair of snake and bean goes first; each bean goes to one snake.
    """
    beans, snakes = moves.shape[:2]
    index = (counting(beans, moves[0, 0])[:, None] * snakes + counting(snakes, moves[0, 0])[None]).astype(jnp.int32)
    key = jnp.where(moves < NEVER, moves * (beans * snakes) + index, NEVER * beans * snakes)
    chosen = jnp.full_like(moves[0], beans)
    for _ in range(min(beans, snakes)):
        best = jnp.min(key, (0, 1))
        found = best < NEVER * beans * snakes
        pair = best % (beans * snakes)
        bean, snake = pair // snakes, pair % snakes
        mine = found[None] & (counting(snakes, snake) == snake[None])
        chosen = jnp.where(mine, bean[None], chosen)
        used = mine[None] | found[None, None] & (counting(beans, bean) == bean[None])[:, None]
        key = jnp.where(used, NEVER * beans * snakes, key)
    return chosen
