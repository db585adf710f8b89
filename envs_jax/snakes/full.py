"""The observation `obs_full`: what a snake needs, seen from its own head.

Everything is relative to the head, wraps around the torus and tells mates from opponents. Values are whole hundredths
in int8, from -100 to 100: divide by 100. First a crop of S x S cells around the head (S = 7), in rows:

    body      any snake's cell: 100 where it stays for longer than REACH steps, else 100 k / (REACH + 1) where it is
              free after k moves of its snake without a meal (k = 1 for a tail)
    mates     heads of the own team; at the centre the own head
    rivals    heads of others
    bean

then columns (see `columns`): direction, blocked neighbours, lengths, beans by wrapped distance, heads of all others.
"""

from typing import NamedTuple

import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.snakes.board import COLUMN_STEP, NOWHERE, ROW_STEP, Board, bit, counting, union
from envs_jax.snakes.observation import _others, _pick, difference
from envs_jax.snakes.rules import Game, bean_plane, body_plane, next_tail

RADIUS = 3
SIDE = 2 * RADIUS + 1
PLANES = 4
REACH = 5
ONE = 100


class Layout(NamedTuple):
    """Where things lie in an observation of n snakes and K beans."""

    snakes: int
    beans: int

    @property
    def planes(self) -> tuple[int, int, int]:
        """Shape of the crop, which comes first: planes, rows, columns."""
        return PLANES, SIDE, SIDE

    @property
    def size(self) -> int:
        return PLANES * SIDE * SIDE + 4 + 4 + 1 + 5 * self.beans + 5 * (self.snakes - 1)


def leaving(board: Board, game: Game) -> list[Array]:
    """uint32[H, ...] for k = 1 .. REACH: cells that are free after just k moves of their snakes without a meal."""
    planes = []
    tail, split = game.tail, game.split
    alive = game.length > 0
    for k in range(1, REACH + 1):
        planes.append(union(board.mark(jnp.where(alive & (game.length > k - 1), tail, NOWHERE)), 1))
        tail, split = next_tail(board, game.toward, tail, split), jnp.zeros_like(split)
    return planes


def _share(value: Array, most: int) -> Array:
    """Hundredths of `most`, at most 100 either way."""
    return jnp.clip((value * ONE) // most, -ONE, ONE)


def _crop(board: Board, game: Game, agents: int, teams: int) -> list[Array]:
    half = game.head.shape[0] // 2
    heads = board.mark(jnp.where(game.length > 0, game.head, NOWHERE))
    leave = leaving(board, game)
    mates = union(heads[:, :half], 1)[:, None] if teams == 2 else heads[:, :agents]
    rivals = union(heads, 1)[:, None] & ~mates
    place = game.head[:agents]

    def cut(plane: Array) -> list[Array]:
        """int32[A, ...] of 0 and 1 for each cell of the crop."""
        near = board.around(plane, place, RADIUS)
        return [bit(word, k).astype(jnp.int32) for word in near for k in range(SIDE)]

    body = cut(body_plane(game)[:, None])
    value = [ONE * b for b in body]
    for k, plane in enumerate(leave, 1):
        less = ONE - ONE * k // (REACH + 1)
        value = [v - less * b for v, b in zip(value, cut(plane[:, None]), strict=True)]
    planes = [cut(plane) for plane in (mates, rivals, bean_plane(board, game)[:, None])]
    return value + [ONE * x for plane in planes for x in plane]


def columns(board: Board, game: Game, agents: int, teams: int) -> list[Array]:
    """int32[A, ...] for each value, `Layout.size` of them; zeros for a snake that could not respawn."""
    head, length = game.head[:agents], game.length[:agents]
    values = _crop(board, game, agents, teams)
    values += [ONE * (game.direction[:agents] == d).astype(jnp.int32) for d in range(4)]
    tails = union(board.mark(game.tail), 1)
    near = board.around((body_plane(game) & ~tails)[:, None], head, 1)
    values += [ONE * bit(near[1 + r], 1 + c).astype(jnp.int32) for r, c in zip(ROW_STEP, COLUMN_STEP, strict=True)]
    values.append(_share(length, 20))
    half_h, half_w = max(1, board.height // 2), max(1, board.width // 2)
    values += _beans(board, game, agents, teams, half_h, half_w)
    index = _others(game, agents, game.head.shape[0] - 1)
    others, lengths = _pick(game.head, index), _pick(game.length, index)
    rows, cols = difference(board, others, head[None])
    there = lengths > 0
    mate = (index < game.head.shape[0] // 2) & (teams == 2)
    for j in range(len(index)):
        dr, dc = jnp.where(there[j], rows[j], 0), jnp.where(there[j], cols[j], 0)
        distance = jnp.abs(dr) + jnp.abs(dc)
        values += [_share(dr, half_h), _share(dc, half_w), _share(distance, half_h + half_w)]
        values += [_share(lengths[j], 20), jnp.where(there[j], jnp.where(mate[j], ONE, -ONE), 0)]
    return [jnp.where(length > 0, x, 0) for x in values]


def _beans(board: Board, game: Game, agents: int, teams: int, half_h: int, half_w: int) -> list[Array]:
    """Beans by steps on the torus, nearest first: rows, columns, steps, steps less than the nearest other snake and
    mate need (in quarters), each."""
    beans, snakes = game.beans, game.head.shape[0]
    count = len(beans)
    rows, cols = difference(board, beans[:, None], game.head[None])  # [K, n]
    steps = jnp.where(game.length[None] > 0, jnp.abs(rows) + jnp.abs(cols), half_h + half_w)
    own = counting(agents, game.steps)  # [A]
    lead = []
    for group in (range(snakes), range(snakes // 2 if teams == 2 else snakes)):
        other = jnp.full((count, agents, *game.steps.shape), half_h + half_w, jnp.int32)
        for j in group:
            other = jnp.where((own == j)[None], other, jnp.minimum(other, steps[:, j][:, None]))
        lead.append(jnp.clip(other - steps[:, :agents], -4, 4) * (ONE // 4))
    there = (beans != NOWHERE)[:, None]
    rank = jnp.where(there, steps[:, :agents], 1 << 20) * count + counting(count, own)
    features = [_share(rows[:, :agents], half_h), _share(cols[:, :agents], half_w)]
    features += [_share(steps[:, :agents], half_h + half_w), *lead]
    values = []
    for _ in range(count):
        best = there & (rank == jnp.min(rank, 0)[None])
        values += [jnp.sum(jnp.where(best, x, 0), 0) for x in features]
        rank = jnp.where(best, jnp.int32(2**31 - 1), rank)
    return values
