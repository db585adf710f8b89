"""Viewer of games: the board, the learners' actions, meals, deaths and scores.

The learner's team is drawn in cool colours, the other in warm ones; where every snake plays for itself, each has its
own hue. Snakes are counted from 1. The eyes look in the stored direction. The board has no border: a snake that leaves
on one side comes in on the other. Lengths are in cells, x = column to the right, y = row downwards.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from envs_jax import viewing
from envs_jax.snakes.baselines import BASELINES
from envs_jax.snakes.board import COLUMN_STEP, ROW_STEP, Board
from envs_jax.snakes.rules import START_LENGTH
from envs_jax.snakes.segments import Cell, to_segments
from envs_jax.snakes.types import SnakesConfig
from envs_jax.viewing import INK, Drawing, LegendEntry, Line, Panel, Record, Shape, Style
from envs_jax.viewing.drawing import area, disc, path, rectangle, text

COOL, WARM = ("#173f7f", "#1f83c6", "#2aa7a0"), ("#9c1630", "#e2522b", "#eb9a1c")  # families, dark to light
HUES = (
    "#1f83c6", "#e2522b", "#35b6e6", "#8a4fc4", "#c8961a", "#c2307d", "#2aa7a0",
    "#7a4a2b", "#5b6bd6", "#6f8f1f", "#9c1630", "#173f7f", "#d977b4", "#5d6673",
)  # fmt: skip
NOBODY = -1
BEAN = "#3d8f2c"
FIELDS = ("#f3f5f7", "#e9edf1")
FADING = (0.45, 0.28, 0.15)  # opacity of a snake that died one, two, three steps ago
METRICS = ("score", "opponent_score", "score_difference", "return", "meals", "deaths", "opponent_meals",
           "opponent_deaths")  # fmt: skip
_AHEAD = np.stack([COLUMN_STEP, ROW_STEP], axis=-1)  # (x, y) by direction


# What is drawn


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
    colours: tuple[str, ...]  # [n], one for each snake

    def levels(self, record: Record, metric: str) -> list[Line]:
        """Return means of policies at the end of many games against this game's opponent."""
        ends = record.final_means.get(self.sides[1].player, {}) if len(self.sides) > 1 else {}
        colour = viewing.colours(ends)
        return [
            Line(viewing.label(name), colour[name], values[metric]) for name, values in ends.items() if metric in values
        ]

    @property
    def lines(self) -> list[Line]:
        """Curves of the teams' scores, or of the snakes' where there is one team."""
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
    n = env.snakes
    board = env.board
    states = record.states
    games = [jax.tree.map(lambda leaf, k=k: np.asarray(leaf[k]), states.game) for k in range(record.steps + 1)]
    bodies, directions, beans = (list(part) for part in zip(*(to_segments(board, game) for game in games), strict=True))
    scores = np.maximum(states.game.length - START_LENGTH, 0)
    half = n // 2
    order = np.arange(n)  # the snakes as the learner counts them
    if env.teams == 2 and states.plays_second_half[0]:
        order = np.roll(order, half)
    chosen = np.full((record.steps + 1, n), NOBODY)
    chosen[:-1, order[: env.num_agents]] = np.asarray(record.actions)[:, : env.num_agents]

    died, ate = np.zeros((2, record.steps + 1, n), bool)
    for k, i in itertools.product(range(1, record.steps + 1), range(n)):
        before = bodies[k - 1][i]
        now = bodies[k][i]
        died[k, i] = now[1:] != before[: len(now) - 1]  # where a snake lives on, all but its head was there before
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


# The drawing


class SnakesViewer(viewing.Viewer):
    """See `envs_jax.viewing.Viewer`."""

    rate = 10

    def drawing(self, record: Record) -> Drawing:
        game = scene(record)
        height, width = game.board
        dark = [(c, r) for r in range(height) for c in range(width) if (r + c) % 2]
        squares = [[(c, r), (c + 1, r), (c + 1, r + 1), (c, r + 1)] for c, r in dark]
        still = [rectangle("field", 0, 0, width, height), area("dark", *squares)]
        steps = [_shapes(game, k) for k in range(record.steps + 1)]
        metrics = [name for name in METRICS if name in record.curves]
        return Drawing(
            panels=[Panel("", (0, 0, width, height), still, steps)],
            styles=_styles(game),
            legend=[
                *(
                    LegendEntry(f"{side.player} · {side.numbers}", f"side{k}", "disc")
                    for k, side in enumerate(game.sides)
                ),
                LegendEntry("chosen by a learner", "choice", "area"),
                LegendEntry("chosen straight back: one of the others is drawn", "back", "area"),
                LegendEntry("bean", "bean", "disc"),
                LegendEntry("died here, paler with time", "cross0"),
            ],
            metrics=metrics,
            step_labels=events(game),
            lines={n: game.levels(record, n) + (game.lines if n.endswith("score") else []) for n in metrics},
        )


def _styles(game: Scene) -> dict[str, Style]:
    styles = {
        "field": Style(FIELDS[0]),
        "dark": Style(FIELDS[1]),
        "bean": Style(BEAN),
        "spine": Style("#ffffff", opacity=0.63),
        "eye": Style("#ffffff"),
        "pupil": Style(INK),
        "number": Style("#ffffff", size=0.46),
        "choice": Style(INK, "#ffffff", 0.045),
        "back": Style("#ffffff", INK, 0.045),
    }
    styles |= {f"side{k}": Style(side.colour) for k, side in enumerate(game.sides)}
    styles |= {f"cross{age}": Style(stroke=INK, width=0.1, opacity=2 * fade) for age, fade in enumerate(FADING)}
    for i, colour in enumerate(game.colours):
        styles |= {f"head{i}": Style(colour), f"body{i}": Style(stroke=colour, width=0.62)}
        styles |= {f"dead{i}-{age}": Style(stroke=colour, width=0.62, opacity=o) for age, o in enumerate(FADING)}
    return styles


def _shapes(game: Scene, step: int) -> list[Shape]:
    """Return what changes from step to step: the dead, beans, snakes, the learners' choices."""
    shapes = []
    for age in reversed(range(min(len(FADING), step))):
        before = game.bodies[step - age - 1]
        dead = [(i, before[i]) for i in np.flatnonzero(game.died[step - age]) if before[i]]
        shapes += [path(f"dead{i}-{age}", *strokes(game.board, body)) for i, body in dead]
        for place in (_middle(body[0]) for _, body in dead):
            lines = ([place - (0.25, side), place + (0.25, side)] for side in (-0.25, 0.25))
            shapes.append(path(f"cross{age}", *lines))
    shapes.append(disc("bean", 0.28, *map(_middle, game.beans[step])))
    alive = [(i, body) for i, body in enumerate(game.bodies[step]) if body]
    shapes += [path(f"body{i}", *strokes(game.board, body)) for i, body in alive]
    shapes.append(disc("spine", 0.065, *(_middle(cell) for _, body in alive for cell in body[1:])))
    for i, body in alive:
        head = _middle(body[0])
        ahead = _AHEAD[game.directions[step, i]]
        eyes = [head + 0.27 * ahead + side * ahead[::-1] for side in (-0.25, 0.25)]
        shapes += [disc(f"head{i}", 0.47, head), disc("eye", 0.135, *eyes)]
        shapes += [disc("pupil", 0.07, *(eye + 0.045 * ahead for eye in eyes))]
        shapes.append(text("number", head - 0.13 * ahead + (0, 0.16), str(i + 1)))
    for i, body in alive:
        choice = game.chosen[step, i]
        if choice != NOBODY:
            way = _AHEAD[choice]
            place = (_middle(body[0]) + way) % (game.board.width, game.board.height) - 0.28 * way
            corners = [place + 0.16 * way, *(place - 0.12 * way + side * way[::-1] for side in (-0.16, 0.16))]
            shapes.append(area("back" if choice == game.directions[step, i] ^ 1 else "choice", corners))
    return shapes


def _middle(cell: Cell) -> np.ndarray:
    """float[2]: the middle of a cell (row, column) as (x, y)."""
    return np.array(cell[::-1]) + 0.5


def strokes(board: Board, body: list[Cell]) -> list[list[np.ndarray]]:
    """Return lines through the cells of a body; a step over the edge ends one and begins the next beyond the edge.

    Cells that are not neighbours are not joined.
    """
    lines = [[_middle(body[0])]]
    for before, cell in itertools.pairwise(body):
        start, end = _middle(before), _middle(cell)
        step = next((step for step in _AHEAD if np.all((start + step - end) % (board.width, board.height) == 0)), None)
        if step is None:
            lines.append([end])
        elif np.all(start + step == end):
            lines[-1].append(end)
        else:
            lines[-1].append(start + step)
            lines.append([end - step, end])
    return [line if len(line) > 1 else [line[0] - (0.1, 0), line[0] + (0.1, 0)] for line in lines]
