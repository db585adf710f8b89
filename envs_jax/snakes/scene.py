"""Data drawn of a game: bodies, choices, meals, deaths, colours, and the scores of both sides."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from envs_jax import viewing
from envs_jax.snakes.baselines import BASELINES
from envs_jax.snakes.board import Board
from envs_jax.snakes.rules import START_LENGTH
from envs_jax.snakes.segments import Cell, to_segments
from envs_jax.snakes.types import SnakesConfig
from envs_jax.viewing import Line, Record

COOL, WARM = ("#173f7f", "#1f83c6", "#2aa7a0"), ("#9c1630", "#e2522b", "#eb9a1c")  # families, dark to light
HUES = (
    "#1f83c6", "#e2522b", "#35b6e6", "#8a4fc4", "#c8961a", "#c2307d", "#2aa7a0",
    "#7a4a2b", "#5b6bd6", "#6f8f1f", "#9c1630", "#173f7f", "#d977b4", "#5d6673",
)  # fmt: skip
NOBODY = -1


@dataclasses.dataclass(frozen=True)
class Side:
    """A team: its player, the colour of its score, its snakes, and the sum of their scores int[K]."""

    player: str
    colour: str
    snakes: tuple[int, ...]
    score: np.ndarray

    @property
    def numbers(self) -> str:
        """Numbers of its snakes in words."""
        first, last = self.snakes[0] + 1, self.snakes[-1] + 1
        return f"snakes {first}-{last}" if last > first else f"snake {first}"


@dataclasses.dataclass(frozen=True)
class Scene:
    """Data drawn of a game, K = T + 1 time steps, n snakes."""

    board: Board
    bodies: list[list[list[Cell]]]  # cells (row, column) of every snake, [K][n], head first; none for a stuck snake
    directions: np.ndarray  # int32[K, n], the stored ones
    beans: list[list[Cell]]  # cells in their order, [K]
    chosen: np.ndarray  # int32[K, n], a learner's action at a time step; NOBODY for other snakes and at the end
    scores: np.ndarray  # int[K, n]
    ate: np.ndarray  # bool[K, n], in the step before
    died: np.ndarray  # bool[K, n], in the step before; False if it came back just where it would have gone
    sides: tuple[Side, ...]  # the learner's team and the other, or the only one
    colours: tuple[str, ...]  # of the snakes, [n]

    def levels(self, record: Record, metric: str) -> list[Line]:
        """Return means of policies at the end of many games against this game's opponent."""
        ends = record.final_means.get(self.sides[1].player, {}) if len(self.sides) > 1 else {}
        colour = viewing.colours(ends)
        return [
            Line(viewing.label(name), colour[name], values[metric]) for name, values in ends.items() if metric in values
        ]

    @property
    def lines(self) -> list[Line]:
        """Return curves of the scores: of the teams, or of the snakes where there is one team."""
        if len(self.sides) > 1:
            players_differ = len({side.player for side in self.sides}) > 1
            return [Line(s.player if players_differ else s.numbers, s.colour, s.score) for s in self.sides]
        return [Line(f"snake {i + 1}", colour, self.scores[:, i]) for i, colour in enumerate(self.colours)]


def family(anchors: Sequence[str], count: int) -> list[str]:
    """Return `count` colours, evenly from the first to the last of three anchors; a single one is the middle."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    colours = LinearSegmentedColormap.from_list("family", anchors, N=count if count > 1 else 3)
    return [to_hex(colours(k)) for k in (range(count) if count > 1 else [1])]


def scene(record: Record) -> Scene:
    """Return the scene of a record."""
    env: SnakesConfig = record.env  # type: ignore[assignment]
    n, board, states = env.snakes, env.board, record.states
    games = [jax.tree.map(lambda leaf, k=k: np.asarray(leaf[k]), states.game) for k in range(record.steps + 1)]
    bodies, directions, beans = (list(part) for part in zip(*(to_segments(board, game) for game in games), strict=True))
    scores = np.maximum(states.game.length - START_LENGTH, 0)
    half = n // 2
    order = np.arange(n)  # of the snakes as the learner counts them
    if env.teams == 2 and states.plays_second_half[0]:
        order = np.roll(order, half)
    chosen = np.full((record.steps + 1, n), NOBODY)
    chosen[:-1, order[: env.num_agents]] = np.asarray(record.actions)[:, : env.num_agents]

    died, ate = np.zeros((2, record.steps + 1, n), bool)
    for k, i in itertools.product(range(1, record.steps + 1), range(n)):
        before, now = bodies[k - 1][i], bodies[k][i]
        died[k, i] = now[1:] != before[: len(now) - 1]  # of snakes that live on, all but the head was there before
    ate[1:] = ~died[1:] & (np.diff(states.game.length, axis=0) > 0)

    teams = [order] if env.teams == 1 else [order[:half], order[half:]]
    players = [record.policy] * len(teams)
    if env.scripted:
        players[1] = (*BASELINES, "self")[int(states.level[0])]
    colours = np.full(n, "", object)
    for team, anchors in zip(teams, (COOL, WARM), strict=False):
        colours[team] = family(anchors, len(team)) if len(teams) > 1 else HUES[:n]
    sides = tuple(
        Side(player, anchors[1], tuple(int(i) for i in team), scores[:, team].sum(-1))
        for player, team, anchors in zip(players, teams, (COOL, WARM), strict=False)
    )
    return Scene(board, bodies, np.array(directions), beans, chosen, scores, ate, died, sides, tuple(colours))


def events(game: Scene) -> list[str]:
    """Describe the step before each time step [K] in words."""
    texts = []
    for k in range(len(game.bodies)):
        parts = []
        for happened, one, several in ((game.ate[k], "eats", "eat"), (game.died[k], "dies", "die")):
            numbers = [str(i + 1) for i in np.flatnonzero(happened)]
            if numbers:
                listed = " and ".join([", ".join(numbers[:-1]), numbers[-1]]) if len(numbers) > 1 else numbers[0]
                parts.append(f"{listed} {one if len(numbers) == 1 else several}")
        texts.append(", ".join(parts))
    return texts
