"""The curve of a metric as a panel: the episode's lines, means of other policies, levels, labels at the right ends."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs_jax.viewing.drawing import (
    GREY,
    INK,
    SOFT,
    Drawing,
    Line,
    Panel,
    Record,
    Shape,
    Style,
    area,
    colours,
    label,
    marker,
    path,
    text,
    trail,
)  # fmt: skip

WIDTH = 460.0
HEIGHT = 270.0
_LEFT, _TOP, _BOTTOM = 46.0, 28.0, 232.0  # where the curves are
_SIZE, _LETTER = 11.0, 7.4  # height and width of letters
STYLES = {
    "grid": Style(stroke="#e3e6ea", width=1),
    "axis": Style(stroke=GREY, width=1),
    "title": Style(INK, size=13, anchor="start"),
    "left": Style(SOFT, size=_SIZE, anchor="end"),
    "below": Style(SOFT, size=_SIZE),
}


def inks(colour: str) -> dict[str, Style]:
    """Return the styles of curves and words of a colour."""
    name = colour[1:]
    return {
        f"pale-{name}": Style(stroke=colour, width=1.5, opacity=0.22),
        f"line-{name}": Style(stroke=colour, width=2.8),
        f"mean-{name}": Style(stroke=colour, width=1.8, dash=(6.0, 4.0)),
        f"band-{name}": Style(colour, opacity=0.14),
        f"dots-{name}": Style(stroke=colour, width=1.4, dash=(0.5, 3.0)),
        f"mark-{name}": Style(colour),
        f"word-{name}": Style(colour, size=_SIZE, anchor="start"),
    }


def shown_metrics(record: Record, drawing: Drawing) -> list[str]:
    """Return the names of the metrics of a drawing that have a chart, the main one in front."""
    spec = record.env.spec
    names = list(drawing.metrics) or [spec.score, *(name for name in record.curves if name != spec.score)]
    return [name for name in names if name != "length" or not spec.fixed_horizon]


def chart(record: Record, metric: str, extra_lines: Sequence[Line]) -> tuple[Panel, dict[str, Style]]:
    """Return the chart of a metric and its styles; where no curve is `extra_lines`, with the episode's only one."""
    levels, lines = ([line for line in extra_lines if np.ndim(line.values) == d] for d in (0, 1))
    curve = record.rewards if metric == "reward" else record.curves[metric]
    lines = lines or [Line(f"this episode ({record.policy})", INK, np.asarray(curve))]
    steps = np.arange(record.steps + 1)
    colour = colours(record.references)
    means = {name: curves[metric][: len(steps)] for name, curves in record.references.items() if metric in curves}
    values = [*(line.values for line in lines), *(mean[:, 0] for mean in means.values()), [x.values for x in levels]]
    finite = [float(x) for curve in values for x in np.asarray(curve) if math.isfinite(x)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    low, high = (low - 0.5, high + 0.5) if high - low < 1e-9 else (low, high)
    margin = 0.05 * (high - low)
    low, high = low - margin, high + margin
    words = [*(line.label for line in (*lines, *levels)), *map(label, means)]
    right = max(200.0, WIDTH - 10 - _LETTER * max(map(len, words)))

    def at(x: Any, y: Any) -> np.ndarray:
        """Points [..., 2] of time steps and values."""
        x, y = np.broadcast_arrays(x, np.nan_to_num(np.asarray(y, np.float64), nan=low))
        places = (
            _LEFT + (right - _LEFT) * x / max(record.steps, 1),
            _BOTTOM - (_BOTTOM - _TOP) * (y - low) / (high - low),
        )
        return np.stack(places, axis=-1)

    shapes = [text("title", (10, 15), record.env.spec.label(metric))]
    for value, tick_label in ticks(low, high):
        shapes.append(path("grid", at(steps[[0, -1]], value)))
        shapes.append(text("left", at(steps[0], value) - (6, -4), tick_label))
    shapes.append(path("axis", [(_LEFT, _TOP), (_LEFT, _BOTTOM), (right, _BOTTOM)]))
    for step in sorted({0, round(record.steps / 3), round(2 * record.steps / 3), record.steps}):
        shapes.append(text("below", (at(steps[step], low)[0], _BOTTOM + 17), str(step)))
    shapes.append(text("below", ((_LEFT + right) / 2, _BOTTOM + 33), "step"))
    ends: list[tuple[float, str, str]] = []

    def add(curve: np.ndarray, name: str, ink: str, *added: Shape) -> None:
        shapes.extend(added)
        ends.append((float(curve[-1, 1]), name, ink[1:]))

    for name, mean in means.items():
        ink = colour[name]
        half = np.nan_to_num(mean[:, 1])  # not known where all episodes are equal
        curve, upper, lower = (at(steps, mean[:, 0] + sign * half) for sign in (0, 1, -1))
        band = area(f"band-{ink[1:]}", [*upper, *lower[::-1]])
        add(curve, label(name), ink, band, path(f"mean-{ink[1:]}", curve))
    for level in levels:
        curve = at(steps[[0, -1]], level.values)
        add(curve, level.label, level.colour, path(f"dots-{level.colour[1:]}", curve))
    for line in lines:
        curve = at(steps, line.values)
        ink = line.colour[1:]
        look = path(f"pale-{ink}", curve), trail(f"line-{ink}", curve), marker(f"mark-{ink}", 4.5, curve)
        add(curve, line.label, line.colour, *look)
    ends.sort()
    places = spread([end[0] for end in ends], 1.27 * _SIZE)
    overflow = max(0.0, places[-1] - (HEIGHT - 8))
    for place, (_, name, ink) in zip(places, ends, strict=True):
        shapes.append(text(f"word-{ink}", (right + 9, place - overflow + 4), name))
    line_colours = {*(line.colour for line in (*lines, *levels)), *(colour[name] for name in means)}
    styles = STYLES | {name: style for ink in line_colours for name, style in inks(ink).items()}
    return Panel("", (0.0, 0.0, WIDTH, HEIGHT), shapes, [()] * len(steps)), styles


def ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return round values between two numbers, about four, with their words."""
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(x * power for x in (1, 2, 5, 10) if x * power >= 0.8 * raw)
    digits = max(0, -math.floor(math.log10(unit) + 1e-9))
    first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
    return [(i * unit, f"{i * unit:.{digits}f}") for i in range(first, last + 1)]


def spread(places: list[float], gap: float) -> list[float]:
    """Move sorted places apart as little as needed for gaps of at least `gap`."""
    merged: list[tuple[float, int]] = []  # centre and members of labels that touch
    for place in places:
        merged.append((place, 1))
        while len(merged) > 1 and merged[-1][0] - merged[-2][0] < gap * (merged[-2][1] + merged[-1][1]) / 2:
            (a, m), (b, n) = merged[-2:]
            merged[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [centre + gap * (i - (members - 1) / 2) for centre, members in merged for i in range(members)]
