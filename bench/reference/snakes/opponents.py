"""Scripted players on the oracle: the levels 0 to 4 and the evasive player of the public trainers.

They follow `jidiai/Competition_3v3snakes` (level 2, its greedy player) and `zhizhengzhao/snake` (the others), whose
quirks the docstrings name. Distances to beans are plain, not wrapped; equal ones go to the lower direction or to the
earlier bean. The levels are not ordered by strength: 2 is the strongest, then evasion, 4, 3, 1, 0.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from bench.reference.snakes.oracle import DIRECTIONS, UP, Cell, Game, Settings, State

EVASION = "evasion"
LEVELS: tuple[int | str, ...] = (0, 1, 2, 3, 4, EVASION)

Policy = Callable[[Game, int], list[int]]  # (game, side) -> actions of the side's team; the game is not changed


def choose(
    state: State,
    settings: Settings,
    snakes: Sequence[int],
    level: int | str,
    rng: np.random.Generator | None = None,
    exclusive_beans: bool = False,
    ghosts: Mapping[int, Sequence[Cell]] | None = None,
) -> list[int]:
    """Actions of the given snakes, which choose in turn; each goes for a bean near its head.

    * 0: uniform at random.
    * 1: the direction that comes closest to the bean, whatever is in the way.
    * 2: as 1 among the directions that are not blocked, else up; beans that an earlier snake chose are left to it.
    * 3: the smallest distance, where a blocked direction counts 5 cells more.
    * 4: as 2, but without leaving beans to each other.
    * "evasion": as 1, among the safe directions if there are any; see `safe_directions`.

    A direction is blocked if its cell belongs to a snake, be it a tail about to move. Without a bean to go for all
    distances are 0; a snake off the board plays up.

    Args:
        snakes: indices, in the order of choice.
        level: one of LEVELS.
        rng: for level 0.
        exclusive_beans: the levels 3, 4 and evasion leave beans to each other as 2 does; not the published players.
        ghosts: bodies that the players observe instead of the true ones, under the beans: the published trainer's bug
            until December 2021, where they are `Game.ghosts`.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}; use one of {LEVELS}.")
    if level == 0:
        if rng is None:
            raise ValueError("level 0 plays at random: give it a generator.")
        return [int(action) for action in rng.integers(4, size=len(snakes))]
    exclusive = level == 2 or (exclusive_beans and level != 1)
    visible = [(ghosts or {}).get(i, body) for i, body in enumerate(state.bodies)]
    bodies = {cell for body in visible for cell in body} - set(state.beans)
    beans = list(state.beans)
    actions = []
    for i in snakes:
        if not state.bodies[i]:
            actions.append(UP)
            continue
        head = visible[i][0]
        bean = min(beans, key=lambda b: _square(head, b), default=None)
        if exclusive and bean is not None:
            beans.remove(bean)
        actions.append(_towards(head, bean, bodies, settings, level))
    return actions


def _square(a: Cell, b: Cell) -> int:
    return (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2


def _towards(head: Cell, bean: Cell | None, bodies: Collection[Cell], settings: Settings, level: int | str) -> int:
    cells = [settings.neighbour(head, d) for d in DIRECTIONS]
    squares = [0 if bean is None else _square(cell, bean) for cell in cells]
    if level == 3:
        return min(DIRECTIONS, key=lambda d: math.sqrt(squares[d]) + 5 * (cells[d] in bodies))
    allowed: Sequence[int] = DIRECTIONS
    if level in (2, 4):
        allowed = [d for d in DIRECTIONS if cells[d] not in bodies] or [UP]
    elif level == EVASION:
        allowed = safe_directions(head, bodies, settings) or DIRECTIONS
    return min(allowed, key=lambda d: squares[d])


def safe_directions(head: Cell, bodies: Collection[Cell], settings: Settings) -> list[int]:
    """Directions that are not blocked and from where a way leads on.

    Taken in the order up, down, left, right, each claims the free cells around its cell; one that finds them all
    claimed does not count as safe, though it may be.
    """
    claimed: set[Cell] = set()
    safe = []
    for d in DIRECTIONS:
        cell = settings.neighbour(head, d)
        if cell in bodies:
            continue
        onward = {settings.neighbour(cell, e) for e in DIRECTIONS} - set(bodies) - claimed
        if onward:
            safe.append(d)
            claimed |= onward
    return safe


def scripted(level: int | str, exclusive_beans: bool = False, stale: bool = False) -> Policy:
    """A level as a policy; it takes the random numbers of the game, and observes its `ghosts` if `stale`."""

    def policy(game: Game, side: int) -> list[int]:
        rng = game.rng if level == 0 else None
        ghosts = game.ghosts if stale else None
        return choose(game.state, game.settings, game.settings.team(side), level, rng, exclusive_beans, ghosts)

    return policy


def play(game: Game, policies: Sequence[Policy]) -> np.ndarray:
    """Play a game to its end, one policy per side; team scores [teams] int."""
    while not game.done:
        game.step([action for side, policy in enumerate(policies) for action in policy(game, side)])
    return game.totals.reshape(game.settings.teams, game.settings.team_size).sum(axis=1)


def scheduled_level(strategy: str, episode: int, max_episodes: int) -> int:
    """The level of an episode, counted from 1, in a training of max_episodes; unknown strategies are "linear"."""
    progress = episode / max_episodes
    if strategy == "curriculum":
        return sum(progress >= start for start in (0.10, 0.30, 0.60, 0.85))
    return min(4, math.floor(4 * progress ** (1.5 if strategy == "exponential" else 1.0)))
