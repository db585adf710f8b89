"""Curves of an episode by matplotlib, which is imported when the first one is drawn."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from envs_jax.viewing.record import GREY, INK, Level, Line, Record, colours, label

_LABEL = 12.0  # height of a label's line, points


def plot_metric(
    axes: Any,
    record: Record,
    metric: str,
    step: int | None = None,
    lines: Sequence[Line] | None = None,
    levels: Sequence[Level] = (),
) -> None:
    """Plot a metric over the episode on matplotlib axes: the episode up to `step`, means of `references` with bands.

    A `step` of -1 draws the episode pale, without a point. Labels stand at the right ends of the
    curves, moved apart where they would overlap. `lines`, `levels`: see `page`.
    """
    if lines is None:
        lines = [Line(f"this episode ({record.policy})", INK, np.asarray(record.curves[metric]))]
    steps, colour = np.arange(record.steps + 1), colours(record.references)
    step = record.steps if step is None else step
    ends = []
    for name, curves in record.references.items():
        if metric in curves:
            mean, half = curves[metric][: record.steps + 1].T
            axes.plot(steps, mean, color=colour[name], linewidth=1.6, linestyle=(0, (5, 1.5)), zorder=2)
            axes.fill_between(steps, mean - half, mean + half, color=colour[name], alpha=0.14, linewidth=0)
            ends.append((mean[-1], label(name), colour[name], "normal"))
    for level in levels:
        axes.axhline(level.value, color=level.colour, linewidth=1.2, linestyle=(0, (2, 2)), zorder=2)
        ends.append((level.value, level.label, level.colour, "normal"))
    for line in lines:
        own, ink = line.values, line.colour
        axes.plot(steps, own, color=ink, linewidth=1.2, alpha=0.22, zorder=3)
        axes.plot(steps[: step + 1], own[: step + 1], color=ink, linewidth=2.6, zorder=4, solid_capstyle="round")
        if step >= 0:
            axes.plot(step, own[step], "o", color=ink, markersize=7, zorder=5, clip_on=False)
        ends.append((own[-1], line.label, ink, "bold"))
    axes.margins(x=0.01, y=0.06)
    axes.set_xlim(0, record.steps)
    low, high = axes.get_ylim()
    ends.sort(key=lambda end: end[0])
    gap = max(0.075, _LABEL * axes.figure.dpi / 72 / axes.bbox.height)
    places = spread([float((end[0] - low) / (high - low)) for end in ends], gap)
    places = [max(place, 0.03 + gap * i) for i, place in enumerate(places)]  # above the axis
    for place, (_, text, ink, weight) in zip(places, ends, strict=True):
        axes.annotate(text, (1, place), (7, 0), xycoords="axes fraction", textcoords="offset points", color=ink,
                      weight=weight, va="center", fontsize=9.5)  # fmt: skip
    _make_room(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors="#4a5560", labelsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)


def _make_room(axes: Any) -> None:
    """Make axes narrower where the labels beside them would leave the figure."""
    beyond = max(text.get_window_extent().x1 for text in axes.texts) - axes.figure.bbox.x1
    if beyond > 0:
        box = axes.get_position()
        axes.set_position((box.x0, box.y0, box.width - (beyond + 2) / axes.figure.bbox.width, box.height))


def spread(places: list[float], gap: float) -> list[float]:
    """Move sorted places in [0, 1] apart as little as needed for gaps of at least `gap`."""
    groups = [[place, 1.0] for place in places]  # centre and members of labels that touch
    merged: list[list[float]] = []
    for group in groups:
        merged.append(group)
        while len(merged) > 1:
            (a, m), (b, n) = merged[-2:]
            if b - a >= gap * (m + n) / 2:
                break
            merged[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    found = []
    for centre, members in merged:
        found += [centre + gap * (i - (members - 1) / 2) for i in range(int(members))]
    return found


def image(figure: Any) -> Any:
    """Return a matplotlib figure (on an Agg canvas) as a PIL image."""
    from PIL import Image

    figure.canvas.draw()
    return Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3].copy())


def figure(width: float, height: float, dpi: int) -> Any:
    """Return a matplotlib figure, size in inches, that needs no display and no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(made)
    return made
