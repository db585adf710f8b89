"""Rewards of a team of snakes, after jidiai/Competition_3v3snakes and zhizhengzhao/snake.

    original     base + 20 for a meal, else base - plain distance of the nearest bean - 10 if the game score falls
    plus         original + small terms
    v1.1         base + 30 for a meal + 0.1 if the game score falls, else - 50 (the sign is wrong as published)
    v1.1_fixed   base + 30 for a meal + (-50 for a death, else 0.1)
    lives        change of the game score - 1 for a death, so that a death at length 3 counts
    duel         lives + points that opponents lose by running into the snake, or by meeting it head to head
    score        change of the own team's score minus change of the other's

The base rewards the team for leading, at every step, or for having won, at the last one.
"""

import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.snakes.board import NOWHERE, total
from envs_jax.snakes.opponents import squared_distance
from envs_jax.snakes.rules import START_LENGTH, Game

NAMES = ("original", "v1.1", "v1.1_fixed", "plus", "lives", "duel", "score")
_ORIGINAL, _V1_1 = (0, 50, -25, 10, -5), (0, 100, -100, 30, -30)  # by code: level, won, lost, in the lead, behind
BASE = {"original": _ORIGINAL, "plus": _ORIGINAL, "v1.1": _V1_1, "v1.1_fixed": _V1_1}


def lead_code(own_score: Array, other_score: Array, done: Array) -> Array:
    """int32[...]: 0 level, 1 won, 2 lost, 3 in the lead, 4 behind, from team scores int32[...]."""
    code = jnp.where(own_score > other_score, jnp.int32(1), jnp.int32(2)) + jnp.where(done, jnp.int32(0), jnp.int32(2))
    return jnp.where(own_score == other_score, 0, code)


def _to_bean(game: Game, agents: int) -> Array:
    """float32[A, ...]: plain distance to the nearest bean, 0 without any."""
    squares = squared_distance(game.beans[:, None], game.head[None, :agents])
    nearest = jnp.min(jnp.where(game.beans[:, None] == NOWHERE, 1 << 20, squares), 0)
    return jnp.where(nearest == 1 << 20, 0.0, jnp.sqrt(nearest.astype(jnp.float32)))


def opponent_losses(collisions: Array, hit: Array, length: Array) -> Array:
    """int32[n, ...]: points that snakes of the other half lose by running into each snake, see `rules.collisions`.

    `hit` is bool[n, ...], `length` int32[n, ...] before the step.
    """
    half = len(hit) // 2
    lost = jnp.where(collisions & hit[None], length[None] - START_LENGTH, 0)
    return jnp.concatenate([total(lost[:half, half:], 1), total(lost[half:, :half], 1)])


def lives(score_change: Array, hit: Array, opponent_losses: Array, loss_weight: float) -> Array:
    """float32[A, ...]: the reward duel, or lives, where `opponent_losses` int32[A, ...] is 0.

    `score_change` int32[A, ...] are changes of the game score, `loss_weight` a factor on the points lost by a death.
    """
    points = score_change.astype(jnp.float32)
    if loss_weight != 1.0:
        points = jnp.where(score_change < 0, loss_weight * points, points)
    return points - hit.astype(jnp.float32) + opponent_losses.astype(jnp.float32)


def _either(condition: Array, yes: float, no: float) -> Array:
    """float32[...]: one of two numbers."""
    return jnp.where(condition, jnp.float32(yes), jnp.float32(no))


def shape_rewards(name: str, game: Game, score_change: Array, hit: Array, code: Array) -> Array:
    """float32[A, ...]: the reward of a name in `BASE`, by the game after the step; see `lives` and `lead_code`."""
    base = jnp.zeros(code.shape, jnp.float32)
    for index, value in enumerate(BASE[name]):
        base = jnp.where(code == index, jnp.float32(value), base)
    ate = score_change > 0
    lost = score_change < 0
    if name in ("original", "plus"):
        distance = _to_bean(game, len(score_change))
        pay = jnp.where(ate, 20.0, -distance - _either(lost, 10.0, 0.0))
        if name == "plus":
            pay += jnp.where(ate, 0.0, 0.1 / (distance + 1)) + _either(lost, 0.0, 0.1) + _either(ate, 0.05, 0.0)
    else:
        alive = _either(lost, 0.1, -50.0) if name == "v1.1" else _either(hit, -50.0, 0.1)
        pay = _either(ate, 30.0, 0.0) + alive
    return jnp.where(game.length[: len(score_change)] > 0, base[None] + pay, 0.0)
