"""The two teams: the game from each side, and scripted opponents' actions. For one game or a batch (see `board`)."""

import dataclasses

import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.snakes import opponents, schedule, stale_observation
from envs_jax.snakes.rules import Game
from envs_jax.snakes.types import Settings, State


def half_turn(game: Game, half: int) -> Game:
    """Return the game from the other team's side."""
    names = ("head", "tail", "length", "direction", "split")
    changed = {name: jnp.roll(getattr(game, name), half, 0) for name in names}
    return dataclasses.replace(game, body=jnp.roll(game.body, half, 1), **changed)


def swapped(env: Settings, values: Array, second: Array, axis: int = 0) -> Array:
    """Values along an axis of all snakes, the halves exchanged where the learner plays the second."""
    if env.side == "first" or env.teams == 1:
        return values
    swapped = jnp.roll(values, env.snakes // 2, axis)
    return swapped if env.side == "second" else jnp.where(second[(None,) * (axis + 1)], swapped, values)


def learner_view(env: Settings, state: State) -> Game:
    """Return the game from the learner's side: its own snakes come first."""
    game, second = state.game, state.second
    names = ("head", "tail", "length", "direction", "split")
    changed = {name: swapped(env, getattr(game, name), second) for name in names}
    return dataclasses.replace(game, body=swapped(env, game.body, second, 1), **changed)


def _shown_to_opponents(env: Settings, state: State) -> Game:
    """Return the game that scripted opponents observe, whose snakes come last."""
    if not env.stale_observation_bug:
        return learner_view(env, state)
    game = stale_observation.shown(env.board, state.stale, state.game)
    return learner_view(env, dataclasses.replace(state, game=game))


def with_opponents(env: Settings, state: State, word: Array, action: Array) -> Array:
    """int32[n, ...]: the actions of the learner's team, then those of the other in the state's game."""
    half = env.snakes // 2
    players = tuple(k for k in env.schedule.used if k != schedule.SELF)
    if not players:
        return action
    others = opponents.act(
        env.board,
        _shown_to_opponents(env, state),
        slice(half, env.snakes),
        state.level,
        word,
        players,
        env.exclusive_beans,
    )
    if env.accepts_opponent_actions:
        others = jnp.where((state.level == schedule.SELF)[None], action[half:], others)
    return jnp.concatenate([action[:half], others])
