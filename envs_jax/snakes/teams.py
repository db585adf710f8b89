"""The two teams: the game from each side, and scripted opponents' actions. For one game or a batch (see `board`)."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.snakes import opponents, schedule, stale_observation
from envs_jax.snakes.rules import Game
from envs_jax.snakes.types import SnakesConfig, State


def _reorder(game: Game, order: Callable[[Array, int], Array]) -> Game:
    """Return the game with its snakes in another order; `order` takes an array and its axis of snakes."""
    names = ("head", "tail", "length", "direction", "tail_gap")
    changed = {name: order(getattr(game, name), 0) for name in names}
    return dataclasses.replace(game, body=order(game.body, 1), **changed)


def half_turn(game: Game, half: int) -> Game:
    """Return the game from the other team's side."""
    return _reorder(game, lambda values, axis: jnp.roll(values, half, axis))


def swap_teams(env: SnakesConfig, values: Array, plays_second_half: Array, axis: int = 0) -> Array:
    """Values along an axis of all snakes, the halves exchanged where the learner plays the second."""
    if env.side == "first" or env.teams == 1:
        return values
    swapped = jnp.roll(values, env.snakes // 2, axis)
    return swapped if env.side == "second" else jnp.where(plays_second_half[(None,) * (axis + 1)], swapped, values)


def learner_view(env: SnakesConfig, state: State) -> Game:
    """Return the game from the learner's side: its own snakes come first."""
    return _reorder(state.game, lambda values, axis: swap_teams(env, values, state.plays_second_half, axis))


def with_opponents(env: SnakesConfig, state: State, word: Array, action: Array) -> Array:
    """int32[n, ...]: the actions of the learner's team, then the actions of the other team, in the state's game."""
    half = env.snakes // 2
    players = tuple(k for k in env.schedule.used if k != schedule.SELF)
    if not players:
        return action
    observed = state.game
    if env.stale_observation_bug:
        observed = stale_observation.observed_game(env.board, state.stale, observed)
    view = learner_view(env, dataclasses.replace(state, game=observed))
    snakes = slice(half, env.snakes)
    others = opponents.act(env.board, view, snakes, state.level, word, players, env.exclusive_beans)
    if env.accepts_opponent_actions:
        others = jnp.where((state.level == schedule.SELF)[None], action[half:], others)
    return jnp.concatenate([action[:half], others])
