"""The observation `obs_full`, relative to a snake's own head.

Everything wraps around the torus and distinguishes teammates from opponents. Values are whole hundredths
in int8, from -100 to 100: divide by 100. First a crop of S x S cells around the head (S = 7), in rows:

    body      any snake's cell: 100 where it stays for longer than REACH moves, else 100 k / (REACH + 1) where it is
              free after k moves of its snake (k = 1 for a tail), one later where the snake may eat: a bean lies next to
              its head
    mates     heads of the own team; at the centre the own head
    opponents    heads of others
    bean

then columns (see `columns`): direction, blocked neighbours, lengths, beans by wrapped distance, heads of all others,
room beyond each neighbour.
"""

import functools

import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.batch import constant
from envs_jax.snakes.board import COLUMN_STEP, NOWHERE, ROW_STEP, Board, bit, count_cells, counting, union
from envs_jax.snakes.observation import difference, others_of, pick
from envs_jax.snakes.rules import Game, bean_plane, body_plane
from envs_jax.stages import materialize

RADIUS = 3
SIDE = 2 * RADIUS + 1
PLANES = 4
REACH = 5
MOVES = 10
ONE = 100


def size(snakes: int, beans: int) -> int:
    """Return the length of an observation of n snakes and K beans."""
    return PLANES * SIDE * SIDE + 4 + 4 + 1 + 5 * beans + 5 * (snakes - 1) + 8


def segments_by_direction(game: Game) -> list[Array]:
    """Four uint32[H, ...]: cells from which the next cell of the body, towards the head, lies in each direction."""
    low, high = game.segment_direction[:, 0], game.segment_direction[:, 1]
    return [~(low | high), low & ~high, high & ~low, low & high]


def ahead(board: Board, by_direction: list[Array], cells: Array, steps: int = 1) -> Array:
    """uint32[H, ...]: the cells of bodies that are `steps` ahead of `cells`, see `segments_by_direction`.

    The second cell of a tail with a gap has the direction of the first.
    """
    parts = [cells & way for way in by_direction]
    for _ in range(steps):
        parts = [board.seen_from(part, d ^ 1) for d, part in enumerate(parts)]
    return union(jnp.stack(parts))


def leaving(board: Board, game: Game) -> list[Array]:
    """uint32[H, ...] for k = 1 .. REACH: cells that are free after just k moves, see `body` above."""
    beans = bean_plane(board, game)
    next_to_bean = union(jnp.stack([board.seen_from(beans, d) for d in range(4)]))
    alive = game.length > 0
    hungry = union(board.mark(game.head) & next_to_bean[:, None]) != 0  # a bean lies next to the head
    head, tail = (board.mark(jnp.where(alive, place, NOWHERE)) for place in (game.head, game.tail))
    heads = union(head, 1)
    gap = union(jnp.where(game.tail_gap[None], tail, jnp.uint32(0)), 1)
    late = union(jnp.where(hungry[None], tail, jnp.uint32(0)), 1)
    planes = [union(jnp.where(hungry[None], jnp.uint32(0), tail), 1)]
    by_direction = segments_by_direction(game)
    step = materialize(functools.partial(ahead, board, by_direction))
    for k in range(1, REACH):
        moving = planes[-1] & ~heads
        if k > 2:
            planes.append(step(moving))
        else:  # tails among them
            beyond_gap = ahead(board, by_direction, moving & gap, 2)
            planes.append(step(moving & ~gap) | beyond_gap | (late if k == 1 else jnp.uint32(0)))
    return planes


def share(value: Array, most: int) -> Array:
    """Hundredths of `most`, at most 100 either way."""
    return jnp.clip(jnp.round(value.astype(jnp.float32) * (ONE / most)), -ONE, ONE).astype(jnp.int32)


def reachable_cells(board: Board, game: Game, agents: int, leave: list[Array]) -> Array:
    """int32[4, A, ...]: number of cells that a snake can reach in 1 to MOVES moves, by direction of the first.

    Bodies leave cells as `leaving` says and enter none; what stays for longer than REACH moves stays.
    """
    free = ~body_plane(game) & board.full_row | leave[0]
    enter = materialize(lambda head, free: board.mark_neighbours(head) & free[:, None, None])
    further = materialize(lambda cells, free: board.spread(cells) & free[:, None, None])
    cells = enter(game.head[:agents], free)
    for k in range(1, MOVES):
        free = free | leave[k] if k < REACH else free
        cells = further(cells, free)
    return count_cells(cells)


def _crop(board: Board, game: Game, agents: int, teams: int, leave: list[Array]) -> Array:
    """int32[PLANES S S, A, ...]"""
    half = game.head.shape[0] // 2
    batch = game.steps.shape
    heads = board.mark(jnp.where(game.length > 0, game.head, NOWHERE))
    mates = union(heads[:, :half], 1)[:, None] if teams == 2 else heads[:, :agents]
    opponents = union(heads, 1)[:, None] & ~mates

    stays = body_plane(game) & ~union(jnp.stack(leave))
    times = [  # in binary, moves until cells are free: 0 free, k for `leave`, REACH + 1 for longer
        union(jnp.stack([plane for k, plane in enumerate((*leave, stays), 1) if k >> p & 1]))[:, None]
        for p in range((REACH + 1).bit_length())
    ]
    planes = [jnp.broadcast_to(x, mates.shape) for x in (*times, mates, opponents, bean_plane(board, game)[:, None])]

    def cut(planes: Array, place: Array) -> Array:
        """uint32[S, planes, A, ...]: rows of the crop."""
        return jnp.stack(board.around(planes, place[None], RADIUS))

    words = materialize(cut)(jnp.stack(planes, 1), game.head[:agents])
    shifts = constant(np.arange(SIDE, dtype=np.uint32), words.shape[1:])[None]
    bits = (words[:, None] >> shifts & jnp.uint32(1)).astype(jnp.int32)  # [S, S, planes, A]
    bits = jnp.moveaxis(bits, 2, 0)
    time = sum((bits[p] << p for p in range(1, len(times))), bits[0])
    crop = jnp.concatenate([(time * ONE // (REACH + 1))[None], bits[len(times) :] * ONE])
    return crop.reshape(PLANES * SIDE * SIDE, agents, *batch)


def columns(board: Board, game: Game, agents: int, teams: int, square: bool = False) -> Array:
    """int8[F, A, ...] with F of `size`; zeros for a snake that could not respawn."""
    alive = game.length[:agents] > 0
    leave = leaving(board, game)
    reachable = reachable_cells(board, game, agents, leave)
    values = jnp.concatenate(
        [
            _crop(board, game, agents, teams, leave),
            materialize(lambda game: _rest(board, game, agents, teams, leave[0], square))(game),
            share(reachable, 20),
            share(reachable, 100),
        ]
    )
    return jnp.where(alive[None], values, 0).astype(jnp.int8)


def _find_blocked(board: Board, game: Game, agents: int, tails: Array) -> list[Array]:
    """bool[A, ...] for each direction: a body lies there, except the tails uint32[H, ...] and the snake's own tail."""
    head = game.head[:agents]
    around = board.around((body_plane(game) & ~tails)[:, None], head, 1)
    bodies = [bit(around[1 + r], 1 + c) for r, c in zip(ROW_STEP, COLUMN_STEP, strict=True)]
    return [x & (board.neighbour(head, jnp.full_like(head, d)) != game.tail[:agents]) for d, x in enumerate(bodies)]


def open_directions(board: Board, game: Game, agents: int) -> Array:
    """bool[A, 4, ...]: directions that are not backwards and lead to cells that are surely free after the move.

    If there is none, the directions that lead to the tail of a snake that may eat; if there is none either, all but
    backwards.
    """
    back = jnp.stack([game.direction[:agents] == d ^ 1 for d in range(4)], 1)
    open_ = ~back
    for tails in (union(board.mark(game.tail), 1), leaving(board, game)[0]):
        free = ~back & ~jnp.stack(_find_blocked(board, game, agents, tails), 1)
        open_ = jnp.where(jnp.any(free, 1, keepdims=True), free, open_)
    return open_


def _rest(board: Board, game: Game, agents: int, teams: int, tails: Array, square: bool) -> Array:
    """int32[F - PLANES S S, A, ...]"""
    head = game.head[:agents]
    length = game.length[:agents]
    values = [ONE * (game.direction[:agents] == d).astype(jnp.int32) for d in range(4)]
    values += [ONE * is_blocked.astype(jnp.int32) for is_blocked in _find_blocked(board, game, agents, tails)]
    values.append(share(length, 20))
    half_h = max(1, board.height // 2)
    half_w = max(1, board.width // 2)
    if square:
        half_h = half_w = max(half_h, half_w)
    values += _beans(board, game, agents, teams, half_h, half_w)
    index = others_of(game, agents, game.head.shape[0] - 1)
    others = pick(game.head, index)
    lengths = pick(game.length, index)
    rows, cols = difference(board, others, head[None])
    alive = lengths > 0
    mate = (index < game.head.shape[0] // 2) & (teams == 2)
    rows, cols = (jnp.where(alive, x, 0) for x in (rows, cols))
    features = [share(rows, half_h), share(cols, half_w), share(jnp.abs(rows) + jnp.abs(cols), half_h + half_w)]
    features += [share(lengths, 20), jnp.where(alive, jnp.where(mate, ONE, -ONE), 0)]
    return jnp.stack(values + [feature[j] for j in range(len(index)) for feature in features])


def _beans(board: Board, game: Game, agents: int, teams: int, half_h: int, half_w: int) -> list[Array]:
    """Five int32[A, ...] for each bean, the nearest by steps on the torus first.

    Rows, columns and steps to it, and how many steps less than the nearest other snake and than the nearest mate, in
    quarters.
    """
    beans = game.beans
    snakes = game.head.shape[0]
    count = len(beans)

    def measure_steps(game: Game) -> tuple[Array, ...]:
        """int32[K, n, ...] three times."""
        rows, cols = difference(board, beans[:, None], game.head[None])
        steps = jnp.where(game.length[None] > 0, jnp.abs(rows) + jnp.abs(cols), half_h + half_w)
        return rows, cols, steps

    def describe_beans(rows: Array, cols: Array, steps: Array) -> tuple[Array, Array]:
        """int32[5, K, A, ...], values in list order; int32[K, A, ...], position by steps."""
        is_self = constant(np.eye(snakes, dtype=bool)[:, :agents], game.steps.shape)[None]  # [1, n, A]
        lead = []
        for group in (snakes, snakes // 2 if teams == 2 else snakes):
            others = jnp.where(is_self[:, :group], half_h + half_w, steps[:, :group, None])
            lead.append(jnp.clip(jnp.min(others, 1) - steps[:, :agents], -4, 4) * (ONE // 4))
        exists = (beans != NOWHERE)[:, None]
        own_steps = steps[:, :agents]
        features = [share(rows[:, :agents], half_h), share(cols[:, :agents], half_w)]
        features = [jnp.where(exists, x, 0) for x in (*features, share(own_steps, half_h + half_w), *lead)]
        rank = jnp.where(exists, own_steps, 1 << 20) * count + counting(count, own_steps[0])
        return jnp.stack(features), jnp.sum(rank[None] < rank[:, None], 1, dtype=jnp.int32)

    features, position = materialize(describe_beans)(*materialize(measure_steps)(game))
    ordered = [jnp.sum(jnp.where((position == k)[None], features, 0), 1, dtype=features.dtype) for k in range(count)]
    return [values[j] for values in ordered for j in range(len(features))]
