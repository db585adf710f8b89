"""Observation, reward and metrics of a team. For one game, or many in the last axis (see `board`)."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from envs_jax.base import Array, Box, Reduction, TimeStep
from envs_jax.snakes import obs_full, obs_heading, observation, reward, rules, territory
from envs_jax.snakes.board import total
from envs_jax.snakes.rules import Game
from envs_jax.snakes.teams import half_turn
from envs_jax.snakes.types import SnakesConfig
from envs_jax.stages import materialize


class Metric(NamedTuple):
    """How steps become a game's value, its label, and its value at a step.

    `compute` takes score, deaths and meals: each a pair of sums int32[...], over the own team and over the other.
    """

    reduction: Reduction
    label: str
    compute: Callable[..., Array]


METRICS = {
    "score": Metric("last", "score, points", lambda score, deaths, meals: score[0]),
    "deaths": Metric("sum", "deaths", lambda score, deaths, meals: deaths[0]),
    "meals": Metric("sum", "beans eaten", lambda score, deaths, meals: meals[0]),
    "opponent_score": Metric("last", "opponents' score, points", lambda score, deaths, meals: score[1]),
    "score_difference": Metric("last", "score difference, points", lambda score, deaths, meals: score[0] - score[1]),
    "win": Metric("last", "games won", lambda score, deaths, meals: score[0] > score[1]),
    "draw": Metric("last", "games drawn", lambda score, deaths, meals: score[0] == score[1]),
    "defeat": Metric("last", "games lost", lambda score, deaths, meals: score[0] < score[1]),
    "opponent_deaths": Metric("sum", "opponents' deaths", lambda score, deaths, meals: deaths[1]),
    "opponent_meals": Metric("sum", "opponents' beans eaten", lambda score, deaths, meals: meals[1]),
}


def metrics_of(env: SnakesConfig) -> tuple[str, ...]:
    """Return the names of the metrics; without a second team there are none of opponents."""
    return tuple(METRICS) if env.teams == 2 else ("score", "deaths", "meals")


def observation_box(env: SnakesConfig) -> Box:
    """Return the Box of one snake's observation."""
    highest = max(env.height, env.width, env.snakes + 2)
    boxes = {
        "obs26": Box((6 + 2 * env.beans + 2 * (env.snakes - 1),), jnp.int8, low=0, high=highest - 1),
        "obs30": Box((30,)),
        "obs35": Box((35,)),
        "obs_full": Box((obs_full.size(env.snakes, env.beans),), jnp.int8, low=-obs_full.ONE, high=obs_full.ONE),
        "obs_heading": Box((obs_heading.size(env.snakes, env.beans),), jnp.int8, low=-obs_full.ONE, high=obs_full.ONE),
    }
    return boxes[env.observation]


def show(
    env: SnakesConfig,
    game: Game,
    score_change: Array | None = None,
    hit: Array | None = None,
    opponent_losses: Array | None = None,
) -> TimeStep:
    """Return the time step of a game for a team, its own snakes first.

    `score_change` int32[n, ...], `hit` bool[n, ...] (deaths) and `opponent_losses` int32[n, ...], see `reward`, come
    from the step that led here; None at the start of a game.
    """
    stuck, late = rules.check_end(env.board, game, env.max_steps)
    start = score_change is None
    if score_change is None or hit is None or opponent_losses is None:
        score_change = opponent_losses = jnp.zeros_like(game.head)
        hit = jnp.zeros_like(game.head, bool)
        stuck = jnp.zeros_like(stuck)
    done = stuck | late
    truncated = late & ~stuck if env.time_limit == "truncate" else jnp.zeros_like(done)
    paid = for_all_agents(env, functools.partial(_pay, done=done), game, score_change, hit, opponent_losses)
    sums = [_both(env, x) for x in (rules.score(game), hit.astype(jnp.int32), (score_change > 0).astype(jnp.int32))]
    return TimeStep(
        observation=materialized_for_all_agents(env, observe, game),
        action_mask=materialized_for_all_agents(env, open_directions, game) if env.masks else None,
        reward=jnp.zeros_like(paid) if start else paid,
        terminated=done & ~truncated,
        truncated=truncated,
        first=game.steps == 0,
        metrics={name: METRICS[name].compute(*sums).astype(jnp.float32) for name in metrics_of(env)},
    )


def _both(env: SnakesConfig, values: Array) -> tuple[Array, Array]:
    """Return sums over the own team and over the other (0 where there is none)."""
    if env.teams == 1:
        return total(values), jnp.zeros_like(values[0])
    half = env.snakes // 2
    return total(values[:half]), total(values[half:])


def for_all_agents(env: SnakesConfig, function: Callable[..., Array], game: Game, *arrays: Array) -> Array:
    """[A, ...]: of_team(env, game, *arrays, agents) for all agents; arrays [n, ...] of snakes.

    Where both teams are agents, each half is taken as the learner's team in turn.
    """
    if not env.outside:
        return function(env, game, *arrays, env.num_agents)
    half = env.snakes // 2
    other = half_turn(game, half), *(jnp.roll(x, half, 0) for x in arrays)
    return jnp.concatenate([function(env, game, *arrays, half), function(env, *other, half)])


# made once, so that a start and a step share a trace
materialized_for_all_agents = materialize(for_all_agents, static_argnums=(0, 1))


def _pay(
    env: SnakesConfig, game: Game, score_change: Array, hit: Array, opponent_losses: Array, agents: int, *, done: Array
) -> Array:
    """float32[agents, ...]"""
    if env.reward == "score":
        if env.teams == 1:
            return score_change.astype(jnp.float32)
        own_sum, other_sum = _both(env, score_change)
        return jnp.broadcast_to((own_sum - other_sum).astype(jnp.float32)[None], score_change[:agents].shape)
    if env.reward in ("lives", "duel"):
        return reward.lives(score_change[:agents], hit[:agents], opponent_losses[:agents], env.loss_weight)
    own_sum, other_sum = _both(env, rules.score(game))
    code = reward.lead_code(own_sum, other_sum, done) if env.teams == 2 else jnp.zeros_like(own_sum)
    return reward.shape_rewards(env.reward, game, score_change[:agents], hit[:agents], code)


def open_directions(env: SnakesConfig, game: Game, agents: int) -> Array:
    """bool[A, 4, ...]: the directions that agents may choose."""
    open_ = obs_full.open_directions(env.board, game, agents)
    return territory.careful(env.board, game, agents, open_, env.careful_masks) if env.careful_masks else open_


def observe(env: SnakesConfig, game: Game, agents: int) -> Array:
    """[A, F, ...]: observations."""
    if env.observation == "obs_full":
        return jnp.moveaxis(obs_full.columns(env.board, game, agents, env.teams), 0, 1)
    if env.observation == "obs_heading":
        return jnp.moveaxis(obs_heading.columns(env.board, game, agents, env.teams, env.max_steps), 0, 1)
    layouts = {"obs26": observation.classic, "obs30": observation.extended_30, "obs35": observation.extended_35}
    columns = layouts[env.observation](env.board, game, agents)
    dtype = observation_box(env).dtype
    return jnp.stack([x.astype(dtype) for x in columns], axis=1)
