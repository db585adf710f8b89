"""The stale observation bug: scripted opponents of the trainer of the published weights observe a partly old game.

The trainer of jidiai/Competition_3v3snakes of August 2021 (fixed in December) shows its opponents the lists of cells
that it got at the reset. The game updates the list of the beans, and the list of every snake until the snake dies: then
it starts a new one, and the old list stays as the fatal move left it. So opponents observe beans and snakes that have
not died where they are, and all other snakes, themselves included, where they first died in this game.
"""

import dataclasses

import jax.numpy as jnp

from envs_jax.base import Array, pytree
from envs_jax.snakes.board import Board, union
from envs_jax.snakes.rules import Game, bean_plane, bodies_without_tails


@pytree
class StaleObservation:
    """Snakes that died; batch axes as in `board`."""

    died: Array  # bool[n, ...], at least once in this game
    body: Array  # uint32[H, n, ...], cells at the first death
    head: Array  # int32[n, ...], place of the head then


def begin(game: Game) -> StaleObservation:
    """Return the start: no snake has died."""
    return StaleObservation(jnp.zeros_like(game.head, bool), jnp.zeros_like(game.body), jnp.zeros_like(game.head))


def update(
    board: Board, stale: StaleObservation, before: Game, moved: Game, ate: Array, hit: Array
) -> StaleObservation:
    """Update after a move; `before`, `moved`, `ate` and `hit` are arguments and results of `rules.move`."""
    new = hit & ~stale.died
    body = bodies_without_tails(board, before, ate) | board.mark(moved.head)
    return StaleObservation(
        died=stale.died | hit,
        body=jnp.where(new[None], body, stale.body),
        head=jnp.where(new, moved.head, stale.head),
    )


def observed_game(board: Board, stale: StaleObservation, game: Game) -> Game:
    """Return the game for `opponents.act`: only the cells of snakes, heads and beans are defined.

    Beans may lie on snakes that are gone; such cells count as beans.
    """
    body = union(jnp.where(stale.died[None], stale.body, game.body), 1) & ~bean_plane(board, game)
    return dataclasses.replace(game, body=body[:, None], head=jnp.where(stale.died, stale.head, game.head))
