"""Observations of the first A snakes: the published layouts, their bugs included, and a better one (`obs_full`).

Published layouts after jidiai/Competition_3v3snakes (26 values) and zhizhengzhao/snake (30 and 35 values). All numbers
are not normalised. "Code": 0 empty, 1 bean, k + 2 for a cell of snake k. A snake that could not respawn observes
zeros, and appears as zeros. Functions return a list of columns [A, ...] for the first A snakes of the game.
"""

import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.snakes.board import COLUMN_STEP, NOWHERE, ROW_STEP, Board, bit, column, counting, row, total
from envs_jax.snakes.rules import Game, bean_plane

_FAR = 1 << 20


def wrap_offset(x: Array, size: int) -> Array:
    """Return the shorter way around a torus of `size` cells; at exactly half of it both signs survive."""
    return jnp.where(jnp.abs(x) <= size // 2, x, x - jnp.sign(x) * size)


def difference(board: Board, a: Array, b: Array) -> tuple[Array, Array]:
    """(rows, columns) int32 of the short way from place b to place a."""
    return wrap_offset(row(a) - row(b), board.height), wrap_offset(column(a) - column(b), board.width)


def _distance(rows: Array, columns: Array) -> Array:
    return jnp.sqrt((rows * rows + columns * columns).astype(jnp.float32))


def _where_columns(condition: Array, place: Array) -> list[Array]:
    """Row and column of a place, 0 where the condition fails."""
    return [jnp.where(condition, row(place), 0), jnp.where(condition, column(place), 0)]


def _neighbours(board: Board, game: Game, agents: int) -> list[Array]:
    """Codes at up, down, left, right: four int32[A, ...]."""
    snakes = game.body.shape[1]
    beans = bean_plane(board, game)
    planes = []  # uint32[H, ...], the codes of all cells in binary, lowest plane first
    for p in range((snakes + 1).bit_length()):
        plane = beans if p == 0 else jnp.zeros_like(beans)
        for k in range(snakes):
            if (k + 2) >> p & 1:
                plane |= game.body[:, k]
        planes.append(plane)
    around = board.around(jnp.stack(planes, 1)[:, :, None], game.head[None, :agents], 1)  # rows of [P, A]
    codes = []
    for r, c in zip(ROW_STEP, COLUMN_STEP, strict=True):
        bits = bit(around[1 + r], 1 + c).astype(jnp.int32)
        codes.append(sum((bits[p] << p for p in range(1, len(bits))), bits[0]))
    return codes


def _beans(game: Game, agents: int) -> list[Array]:
    """Row and column of the beans in list order, missing ones 0."""
    columns = _where_columns(game.beans != NOWHERE, game.beans)
    return [jnp.broadcast_to(x[j], game.head[:agents].shape) for j in range(len(game.beans)) for x in columns]


def others_of(game: Game, agents: int, count: int) -> Array:
    """int32[count, A, ...]: the first `count` other snakes in index order, as indices."""
    self_index = counting(agents, game.steps)[None]
    index = counting(count, self_index[0])
    return index + (index >= self_index).astype(jnp.int32)


def pick(values: Array, index: Array) -> Array:
    """values[n, ...] at index [count, A, ...], without a gather."""
    picked = jnp.zeros(index.shape, values.dtype)
    for k in range(len(values)):
        picked = jnp.where(index == k, values[k][None, None], picked)
    return picked


def _heads(game: Game, agents: int, count: int) -> list[Array]:
    """Absolute row and column of the heads of the first `count` others."""
    index = others_of(game, agents, count)
    rows, columns = _where_columns(pick(game.length, index) > 0, pick(game.head, index))
    return [x[j] for j in range(count) for x in (rows, columns)]


def _zero_if_gone(game: Game, columns: list[Array]) -> list[Array]:
    alive = game.length[: columns[0].shape[0]] > 0
    return [jnp.where(alive, x, jnp.zeros_like(x)) for x in columns]


def classic(board: Board, game: Game, agents: int) -> list[Array]:
    """6 + 2 K + 2 (n - 1) integers: own head, codes of the neighbours, beans, heads of all others; absolute."""
    return _zero_if_gone(game, _start(board, game, agents) + _heads(game, agents, game.head.shape[0] - 1))


def _start(board: Board, game: Game, agents: int) -> list[Array]:
    """The first 6 + 2 K columns of `classic`."""
    head = game.head[:agents]
    return [row(head), column(head), *_neighbours(board, game, agents), *_beans(game, agents)]


def _nearest_beans(board: Board, game: Game, agents: int, missing: float) -> list[Array]:
    """Columns, rows and distance to the two nearest beans on the torus, ties in list order: six float32[A, ...]."""
    head = game.head[None, :agents]
    beans = game.beans[:, None]
    rows, columns = difference(board, beans, head)  # [K, A]
    count = len(game.beans)
    rank = rows * rows + columns * columns
    rank = jnp.where(beans == NOWHERE, _FAR, rank) * count + counting(count, rank[0])
    values = []
    for _ in range(2):
        lowest = jnp.min(rank, 0)
        best = rank == lowest[None]
        known = lowest < _FAR
        dr, dc = (total(jnp.where(best, x, 0)) for x in (rows, columns))
        values += [jnp.where(known, x, 0).astype(jnp.float32) for x in (dc, dr)]
        values.append(jnp.where(known, _distance(dr, dc), jnp.float32(missing)))
        rank = jnp.where(best, _FAR * count, rank)
    return values


def _threat(board: Board, game: Game, other: Array, agents: int) -> Array:
    """float32[A, ...]: 1 / (distance of the heads + 1) x length of the snake `other` int32[A, ...]."""
    head, length = (pick(x, other[None])[0] for x in (game.head, game.length))
    closeness = 1 / (_distance(*difference(board, head, game.head[:agents])) + jnp.float32(1e-8) + 1)
    return closeness * length.astype(jnp.float32)


def extended_30(board: Board, game: Game, agents: int) -> list[Array]:
    """30 values: the "first two others" of threats and heads are teammates, as published."""
    others = others_of(game, agents, 2)
    zero = jnp.zeros_like(game.head[:agents])
    start = _start(board, game, agents)
    beans = _nearest_beans(board, game, agents, missing=2 * board.width)
    threats = [_threat(board, game, others[j], agents) / 3 for j in range(2)]
    return _zero_if_gone(game, [*start[:6], *beans, *threats, *start[6:], zero, zero, *_heads(game, agents, 2)])


def extended_35(board: Board, game: Game, agents: int) -> list[Array]:
    """35 values: threats of snakes 3 and 4 only, as published."""
    length = game.length[:agents].astype(jnp.float32)
    beans = _nearest_beans(board, game, agents, missing=0.0)
    threats = [
        _threat(board, game, jnp.full_like(game.head[:agents], k), agents) / jnp.maximum(length, 1) for k in (3, 4)
    ]
    start = _start(board, game, agents)
    heads = _heads(game, agents, 5)
    return _zero_if_gone(game, [*start, *beans, length / 20, *heads, *threats])
