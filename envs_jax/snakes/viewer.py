"""Viewer of games: the board, the learners' actions, meals, deaths and scores.

The learner's team is drawn in cool colours, the other in warm ones; where every snake plays for itself, each has its
own hue. Snakes are counted from 1. The eyes look in the stored direction. The board has no border: a snake that leaves
on one side comes in on the other. Lengths are in cells, x = column to the right, y = row downwards.
"""

import itertools

import numpy as np

from envs_jax import viewing
from envs_jax.snakes.board import COLUMN_STEP, ROW_STEP, Board
from envs_jax.snakes.scene import NOBODY, Scene, events, scene
from envs_jax.snakes.segments import Cell
from envs_jax.viewing import INK, Drawing, LegendEntry, Panel, Record, Shape, Style
from envs_jax.viewing.drawing import area, disc, path, rectangle, text

BEAN = "#3d8f2c"
FIELDS = ("#f3f5f7", "#e9edf1")
FADING = (0.45, 0.28, 0.15)  # opacity of a snake that died one, two, three steps ago
METRICS = ("score", "opponent_score", "score_difference", "return", "meals", "deaths", "opponent_meals",
           "opponent_deaths")  # fmt: skip
_AHEAD = np.stack([COLUMN_STEP, ROW_STEP], axis=-1)  # (x, y) by direction


class SnakesViewer(viewing.Viewer):
    """See `envs_jax.viewing.Viewer`."""

    rate = 10

    def drawing(self, record: Record) -> Drawing:
        """Return the board and the curves of the scores."""
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
        head, ahead = _middle(body[0]), _AHEAD[game.directions[step, i]]
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
