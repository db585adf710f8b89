"""Scripted opponents, after the public repositories zhizhengzhao/snake and jidiai/Competition_3v3snakes.

They act on the state before the step. All but random ones and `territory` take the bean nearest to their head by plain
distance, not across the edge, and compare their four neighbour cells by their plain distance to that bean. Ties go to
up, down, left, right in this order, and to the earlier bean. `blocked` is a neighbour cell that holds any snake.

    0         random
    1         the nearest cell, blocked or not
    2         the nearest cell that is not blocked, else up; the team's snakes choose beans in turn, each its own
    3         the smallest distance + 5 if blocked
    4         like 2, but several snakes may want the same bean
    evasion   like 1 among the cells with a way on that no earlier direction has claimed, else among all
    territory towards the nearest bean that it reaches before all other snakes, through a territory of at least as many
              cells as its own length (or 20); if there is none, to the most territory, then room; see `territory.reach`
    sharing   when longer than 15, after its own tail; else like `territory`, but the team's snakes share out beans, and
              of snakes that reach a cell in the same move the shortest has it; see `sharing.share`

The last two follow parts of the strongest public heuristic agent found, CarlossShi/Competition_3v3snakes.

`exclusive`: 3, 4 and evasion choose their beans in turn too, as 2 does. A new opponent is one more entry of
`OPPONENTS`, at its end.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.snakes import sharing, territory
from envs_jax.snakes.board import COLUMN_STEP, NOWHERE, ROW_STEP, Board, bit, choose, column, counting, row
from envs_jax.snakes.rules import Game, body_plane
from envs_jax.snakes.sharing import Shares
from envs_jax.snakes.territory import Reach
from envs_jax.stages import materialize

_FAR = 1 << 20
_IN_ONE_LOOP = 3  # snakes
_LONG = 15  # cells; the public agent's limit on this board is 22, and is a little weaker


def squared_distance(a: Array, b: Array) -> Array:
    """int32: squared plain distance of two places."""
    rows, columns = row(a) - row(b), column(a) - column(b)
    return rows * rows + columns * columns


def _nearest_bean(head: Array, beans: list[Array]) -> Array:
    """int32[...]: the bean nearest to a head, or NOWHERE."""
    nearest = jnp.full_like(head, NOWHERE)
    lowest = jnp.full_like(head, _FAR)
    for bean in beans:  # one after another, since a reduction would keep the compiler from making a single loop
        distance = jnp.where(bean == NOWHERE, _FAR, squared_distance(bean, head))
        nearest = jnp.where(distance < lowest, bean, nearest)
        lowest = jnp.minimum(distance, lowest)
    return nearest


def targets(heads: Array, beans: Array, exclusive: bool) -> Array:
    """int32[m, ...]: the bean of each snake or NOWHERE, for heads int32[m, ...] and beans int32[K, ...]."""
    # A single loop of more snakes takes twice as long with each: it chooses the earlier ones' beans again.
    choose_bean = materialize(_nearest_bean) if len(heads) > _IN_ONE_LOOP else _nearest_bean
    remaining = list(beans)
    chosen = []
    for head in heads:
        chosen.append(choose_bean(head, remaining))
        if exclusive:
            remaining = [jnp.where(bean == chosen[-1], NOWHERE, bean) for bean in remaining]
    return jnp.stack(chosen)


def _evasive(board: Board, around: list[Array]) -> list[Array]:
    """For each direction bool[...]: the cell there is free and leads on to a free cell that no earlier one claims."""
    free = {(r, c): ~bit(around[2 + r], 2 + c) for r in range(-2, 3) for c in range(-2, 3)}
    claimed: dict[tuple[int, int], Array] = {}
    safe = []
    for d in range(4):
        r = ROW_STEP[d]
        c = COLUMN_STEP[d]
        leads_on = jnp.zeros_like(free[r, c])
        claims: dict[tuple[int, int], Array] = {}
        for e in range(4):
            to = r + ROW_STEP[e], c + COLUMN_STEP[e]
            cell = to[0] % board.height, to[1] % board.width
            open_ = free[r, c] & free[to]
            leads_on |= open_ & ~claimed[cell] if cell in claimed else open_
            claims[cell] = claims[cell] | open_ if cell in claims else open_
        claimed |= {cell: claimed[cell] | m if cell in claimed else m for cell, m in claims.items()}
        safe.append(leads_on)
    return safe


def _first_of(allowed: list[Array], cost: list[Array]) -> Array:
    """int32: the allowed direction of least cost, the first of equals; 0 if none is allowed."""
    best = jnp.full_like(cost[0], _FAR)
    chosen = jnp.zeros_like(cost[0])
    for d in range(4):
        better = allowed[d] & (cost[d] < best)
        best = jnp.where(better, cost[d], best)
        chosen = jnp.where(better, d, chosen)
    return chosen


def _weigh(blocked: list[Array], cost: list[Array]) -> Array:
    """int32: the first direction of least sqrt(cost) + 5 blocked, on integers."""
    best_cost = cost[0]
    best_blocked = blocked[0]
    chosen = jnp.zeros_like(cost[0])
    for d in range(1, 4):
        lead = best_cost - cost[d] - 25  # d blocked, the best is not: sqrt(cost[d]) + 5 < sqrt(best)
        worse = (lead > 0) & (lead * lead > 100 * cost[d])
        gap = cost[d] - best_cost - 25  # the other way round, equality counts for the best
        far = (gap >= 0) & (gap * gap >= 100 * best_cost)
        better = jnp.where(
            blocked[d] == best_blocked, cost[d] < best_cost, jnp.where(blocked[d], worse, best_blocked & ~far)
        )
        best_cost = jnp.where(better, cost[d], best_cost)
        best_blocked = jnp.where(better, blocked[d], best_blocked)
        chosen = jnp.where(better, d, chosen)
    return chosen


class View(NamedTuple):
    """The game before the step for m scripted snakes; lists by direction or row."""

    board: Board
    near: list[Array]  # uint32[m, ...] five times, rows of the cells around the head that hold a snake, `Board.around`
    blocked: list[Array]  # bool[m, ...] four times, the neighbour cell holds a snake
    cost: list[Array]  # int32[m, ...] four times, squared distance of the neighbour cell from the nearest bean
    cost_in_turn: list[Array]  # the same where snakes choose their beans in turn, each its own
    cost_as_set: list[Array]  # one of these two, see `exclusive` in the module's docstring
    draw: Array  # int32[m, ...], 0 to 3, random
    reach: Callable[[], Reach]  # what the snakes reach, computed only by opponents that ask for it
    length: Array  # int32[m, ...]
    shares: Callable[[], Shares]  # what they come to if all snakes share the board


def _nearest(view: View) -> Array:
    return _first_of([jnp.ones_like(view.draw, bool)] * 4, view.cost)


def _evade(view: View) -> Array:
    safe = _evasive(view.board, view.near)
    none = ~(safe[0] | safe[1] | safe[2] | safe[3])
    return _first_of([one | none for one in safe], view.cost_as_set)


def _claim(view: View) -> Array:
    room, _, cells, bean = view.reach()
    safe = (bean <= territory.FAR) & (cells >= jnp.minimum(view.length, territory.FAR)[None])
    cost = jnp.where(safe, bean, _FAR - 1 - (cells << 10) - room)  # at most 841 cells lie within 20 moves
    return _first_of(list(room > 0), list(cost))


def _share(view: View) -> Array:
    room, _, cells, _ = view.reach()
    shares = view.shares()
    has_territory = cells >= jnp.minimum(view.length, territory.FAR)[None]
    beans = jnp.where(has_territory[:, None], shares.bean, sharing.NEVER)  # [4, K, m]
    tail = jnp.where(shares.tail < (view.length // 2)[None], shares.tail, sharing.NEVER)
    follows = (view.length > _LONG) & (jnp.min(tail, 0) < sharing.NEVER)
    assigned = sharing.assign(jnp.where(follows[None], sharing.NEVER, jnp.min(beans, 0)))
    none = jnp.full_like(tail, sharing.NEVER)
    target = jnp.where(follows[None], tail, choose(assigned[None], [*jnp.moveaxis(beans, 1, 0), none]))
    cost = jnp.where(target < sharing.NEVER, target, _FAR - 1 - (cells << 10) - room)
    return _first_of(list(room > 0), list(cost))


class Opponent(NamedTuple):
    """A scripted opponent."""

    name: str  # in the settings `opponent` and `eval_opponent`
    baseline: str  # its name as a policy in the learner's place
    choose: Callable[[View], Array]  # the actions of its snakes, int32[m, ...]


OPPONENTS = (
    Opponent("0", "random", lambda view: view.draw),
    Opponent("1", "level1", _nearest),
    Opponent("2", "level2", lambda view: _first_of([~x for x in view.blocked], view.cost_in_turn)),
    Opponent("3", "level3", lambda view: _weigh(view.blocked, view.cost_as_set)),
    Opponent("4", "level4", lambda view: _first_of([~x for x in view.blocked], view.cost_as_set)),
    Opponent("evasion", "evasion", _evade),
    Opponent("territory", "territory", _claim),
    Opponent("sharing", "sharing", _share),
)
NAMES = tuple(opponent.name for opponent in OPPONENTS)


def act(
    board: Board, game: Game, snakes: slice, level: Array, word: Array, used: tuple[int, ...], exclusive: bool = False
) -> Array:
    """int32[m, ...]: the actions of scripted snakes in the game before the step.

    Args:
        board, game: see `rules`.
        snakes: which m snakes they are.
        level: int32[...], index in OPPONENTS.
        word: uint32[...], random; two bits of it for each snake.
        used: the indices that can occur; no others are computed.
        exclusive: see the module's docstring.
    """
    heads = game.head[snakes]
    alive = game.length[snakes] > 0
    around = board.around(body_plane(game)[:, None], heads, 2)
    steps = [board.shift(heads, r, c) for r, c in zip(ROW_STEP, COLUMN_STEP, strict=True)]

    def cost(in_turn: bool) -> list[Array]:
        bean = targets(heads, game.beans, in_turn)
        return [jnp.where(bean == NOWHERE, 0, squared_distance(step, bean)) for step in steps]

    shift = 2 * counting(len(heads), word).astype(jnp.uint32)
    cost_of_nearest = cost(False)
    cost_in_turn = cost(True)
    view = View(
        board=board,
        near=around,
        blocked=[bit(around[2 + r], 2 + c) for r, c in zip(ROW_STEP, COLUMN_STEP, strict=True)],
        cost=cost_of_nearest,
        cost_in_turn=cost_in_turn,
        cost_as_set=cost_in_turn if exclusive else cost_of_nearest,
        draw=(word[None] >> shift).astype(jnp.int32) & 3,
        reach=lambda: territory.reach(board, game, snakes),
        length=game.length[snakes],
        shares=lambda: sharing.share(board, game, snakes),
    )
    chosen = [OPPONENTS[k].choose(view) if k in used else jnp.zeros_like(heads) for k in range(len(OPPONENTS))]
    action = choose(level[None], chosen) if len(used) > 1 else chosen[used[0]]
    return jnp.where(alive, action, 0)
