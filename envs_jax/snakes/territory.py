"""Features beyond the crop of `obs_full`: room, territory, and moves after which a snake is lost.

All of it floods the board move by move: a cell can be entered as soon as its body has left it. The territory of a snake
consists of the cells that it reaches before any other; the strongest public heuristic agents of the competition count
it (CarlossShi/Competition_3v3snakes).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.batch import constant
from envs_jax.snakes import obs_full
from envs_jax.snakes.board import NOWHERE, Board, count_cells, total, union
from envs_jax.snakes.rules import Game, bean_plane, body_plane, score
from envs_jax.stages import materialize

NEAR, FAR = 5, 20  # moves
COLUMNS = 5 * 4 + 2


def columns(board: Board, game: Game, agents: int, teams: int, max_steps: int) -> Array:
    """int8[COLUMNS, A, ...]: whole hundredths as in `obs_full`; the first five rows by direction of the first move.

    room         cells that the snake reaches within FAR moves
    near, far    its territory within NEAR moves and within FAR moves
    opponents    the neighbour cell lies next to an opponent's head
    mates        the same for the heads of the own team
    time         share of the game that is left
    lead         own team's score minus the other's, at most 50
    """
    half = game.head.shape[0] // 2
    alive = game.length > 0
    heads = board.mark(jnp.where(alive, game.head, NOWHERE))  # [H, n, ...]
    own_heads = heads[:, :agents]
    all_heads = union(heads, 1)[:, None]
    mates = (union(heads[:, :half], 1)[:, None] if teams == 2 else own_heads) & ~own_heads
    first = board.mark_neighbours(game.head[:agents])

    def touches(heads: Array) -> Array:
        touched = union(jnp.stack([board.seen_from(heads, d) for d in range(4)]))
        return (union(first & touched[:, None]) != 0).astype(jnp.int32) * obs_full.ONE

    room, near, far, _ = materialize(lambda game: reach(board, game, slice(agents)))(game)
    scores = score(game)
    lead = total(scores[:half])[None] - total(scores[half:])[None] if teams == 2 else scores[:agents]
    steps_left = jnp.broadcast_to(max_steps - game.steps[None], game.head[:agents].shape)
    values = [
        obs_full.share(room, 100),
        obs_full.share(near, 20),
        obs_full.share(far, 100),
        touches(all_heads & ~own_heads & ~mates),
        touches(mates),
        obs_full.share(steps_left, max_steps)[None],
        obs_full.share(jnp.broadcast_to(lead, steps_left.shape), 50)[None],
    ]
    return jnp.where(alive[None, :agents], jnp.concatenate(values), 0).astype(jnp.int8)


def leaving_cells(board: Board, game: Game) -> tuple[Array, Array]:
    """uint32[H, ...]: cells without a snake; uint32[FAR, H, ...]: those that a snake leaves just before each move."""
    planes = obs_full.leaving(board, game)
    by_direction = obs_full.segments_by_direction(game)
    heads = union(board.mark(jnp.where(game.length > 0, game.head, NOWHERE)), 1)

    def step(cells: Array, _: None) -> tuple[Array, Array]:
        cells = obs_full.ahead(board, by_direction, cells & ~heads)
        return cells, cells

    _, late = jax.lax.scan(step, planes[-1], None, length=FAR - len(planes))
    return ~body_plane(game) & board.full_row, jnp.concatenate([jnp.stack(planes), late])


def _leaving(board: Board, game: Game) -> tuple[Array, Array]:
    """uint32[H, ...]: cells to enter in the first move; uint32[FAR - 1, H, ...]: those left before each later one."""
    free, leave = leaving_cells(board, game)
    return free | leave[0], leave[1:]


class Reach(NamedTuple):
    """Cells that snakes reach, int32[4, m, ...] each, by direction of the first move; see `reach`."""

    room: Array  # cells within FAR moves
    near: Array  # cells of the snake's territory within NEAR moves
    far: Array  # the same within FAR moves
    bean: Array  # the move in which the snake comes to the first bean of its territory; FAR + 1 if to none


def reach(board: Board, game: Game, snakes: slice) -> Reach:
    """Return what these m snakes reach if all others spread in all directions.

    A cell reached in the same move is nobody's.
    """
    beans = bean_plane(board, game)[:, None, None]
    heads = board.mark(jnp.where(game.length > 0, game.head, NOWHERE))
    free, leave = _leaving(board, game)
    room = board.mark_neighbours(game.head[snakes]) & free[:, None, None]
    others = board.spread(union(heads, 1)[:, None] & ~heads[:, snakes]) & free[:, None]
    territory = room & ~others[:, None]

    def further(carry: Any, leaves: Array) -> tuple[Any, tuple[Array, Array]]:
        free, others, room, territory = carry
        free = free | leaves
        room = board.spread(room) & free[:, None, None]
        others = others | board.spread(others) & free[:, None] & ~union(territory, 1)
        territory = territory | board.spread(territory) & free[:, None, None] & ~others[:, None]
        return (free, others, room, territory), (count_cells(territory), count_cells(territory & beans))

    start = free, others, room, territory
    (_, _, room, _), (cells, eaten) = jax.lax.scan(further, start, leave)
    missed = jnp.sum(
        (jnp.concatenate([count_cells(territory & beans)[None], eaten]) == 0).astype(jnp.int32), 0, dtype=jnp.int32
    )
    return Reach(count_cells(room), cells[NEAR - 2], cells[-1], 1 + missed)


def survival(board: Board, game: Game, agents: int) -> Array:
    """int32[4, A, ...]: the move in which a snake dies unless another dies before, by direction of the first; else FAR.

    A snake of length k or more cannot make k moves if it can reach fewer than k cells with them, as it does not leave
    any of these cells before.
    """
    free, leave = _leaving(board, game)
    cells = board.mark_neighbours(game.head[:agents]) & free[:, None, None]

    def further(carry: Any, row: tuple[Array, Array]) -> tuple[Any, None]:
        free, cells, death_move = carry
        k, leaves = row
        free = free | leaves
        cells = board.spread(cells) & free[:, None, None]
        dead = (count_cells(cells) < k) & (k <= game.length[None, :agents])
        return (free, cells, jnp.where(dead, jnp.minimum(death_move, k), death_move)), None

    death_move = jnp.where(count_cells(cells) < 1, jnp.int32(1), jnp.int32(FAR))
    (_, _, death_move), _ = jax.lax.scan(
        further, (free, cells, death_move), (jnp.arange(2, FAR + 1, dtype=jnp.int32), leave)
    )
    return death_move


def careful(board: Board, game: Game, agents: int, open_: Array, length: int) -> Array:
    """bool[A, 4, ...]: the open directions without dangers; dangers are removed one after the other.

    A danger closes directions only while others stay open. Dangers are: dying sooner than after other directions, see
    `survival`; a cell that a mate of a lower index can enter; a cell that an opponent can enter, for snakes of at least
    this length.
    """
    snakes = game.head.shape[0]
    batch = game.steps.shape
    around = jnp.stack([board.neighbour(game.head, jnp.full_like(game.head, d)) for d in range(4)], 1)  # [n, 4, ...]

    def can_enter(others: np.ndarray) -> Array:
        """bool[A, 4, ...]: one of the others bool[A, n] can enter the cell, too."""
        met = around[:agents, :, None, None] == around[None, None]  # [A, 4, n, 4, ...]
        return jnp.any(met & constant(others[:, None, :, None], batch), (2, 3))

    index = np.arange(snakes)
    mates = index[None] < index[:agents, None]
    opponents = np.repeat(index[None] >= snakes // 2, agents, 0)
    moves = jnp.where(open_, jnp.moveaxis(survival(board, game, agents), 0, 1), 0)
    open_ = open_ & (moves == jnp.max(moves, 1, keepdims=True))
    for danger in (can_enter(mates), can_enter(opponents) & (game.length[:agents] >= length)[:, None]):
        clear = open_ & ~danger
        open_ = jnp.where(jnp.any(clear, 1, keepdims=True), clear, open_)
    return open_
