"""Drawings of recorded episodes: panels of shapes, described once for pages, animations and pictures."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from envs_jax.viewing.record import Line


class Style(NamedTuple):
    """Look of shapes; lengths in units of their panel.

    Attributes:
        fill, stroke: colours as in HTML, "#rrggbb", or "none".
        width: of strokes.
        dash: lengths of dashes and gaps in turn, () for a solid stroke.
        opacity: from 0 to 1.
        size: of text.
        anchor: which part of a text is at its place.
    """

    fill: str = "none"
    stroke: str = "none"
    width: float = 0.0
    dash: tuple[float, ...] = ()
    opacity: float = 1.0
    size: float = 0.0
    anchor: Literal["start", "middle", "end"] = "middle"

    def with_width(self, width: float) -> "Style":
        factor = width / self.width if self.width else 0.0
        return self._replace(width=width, dash=tuple(length * factor for length in self.dash))

    @property
    def css(self) -> str:
        """The style for an SVG element."""
        dash = " ".join(f"{length:g}" for length in self.dash) or "none"
        words = f"fill:{self.fill};stroke:{self.stroke};stroke-width:{self.width:g};stroke-dasharray:{dash}"
        words += f";opacity:{self.opacity:g}" if self.opacity < 1 else ""
        return words + (f";font-size:{self.size:g}px;text-anchor:{self.anchor}" if self.size else "")


class Shape(NamedTuple):
    """Things of one style.

    Attributes:
        kind: "path" lines, "area" closed lines, "trail" one line up to the point of the time step that is shown,
            "disc" discs, "marker" a disc at the point of the time step that is shown, "text" words.
        style: name of a style of the drawing.
        parts: points of each line, or places of discs or words; [x, y, x, y, ...] each, y downwards.
        value: radius of discs, or words.
    """

    kind: Literal["path", "area", "trail", "disc", "marker", "text"]
    style: str
    parts: list[list[float]]
    value: Any = None


def _shape(kind: Any, style: str, *parts: Any, value: Any = None) -> Shape:
    return Shape(kind, style, [np.round(np.asarray(part, np.float64), 2).ravel().tolist() for part in parts], value)


path = functools.partial(_shape, "path")  # of a style: lines through points [N, 2]
area = functools.partial(_shape, "area")  # areas with corners [N, 2]
trail = functools.partial(_shape, "trail")  # a line through points [K, 2], one per time step


def rectangle(style: str, left: float, top: float, right: float, bottom: float) -> Shape:
    """Return a rectangle."""
    return area(style, [(left, top), (right, top), (right, bottom), (left, bottom)])


def disc(style: str, radius: float, *places: Any) -> Shape:
    """Return discs of one radius around places (x, y)."""
    return _shape("disc", style, *places, value=radius)


def marker(style: str, radius: float, points: Any) -> Shape:
    """Return a disc around one of the points [K, 2], one per time step."""
    return _shape("marker", style, points, value=radius)


def text(style: str, place: Any, words: str) -> Shape:
    """Return words at a place (x, y) of their baseline."""
    return _shape("text", style, place, value=words)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One view of an episode of K time steps.

    Attributes:
        title: a few words, or "".
        box: left, top, right and bottom of what is shown, y downwards.
        still: shapes below all others, equal at all time steps but for trails and markers.
        steps: shapes of each time step, [K].
        images: uint8[K, h, w, 3], drawn below all shapes; () for none.
        image_box: left, top, right and bottom of the images.
    """

    title: str
    box: tuple[float, float, float, float]
    still: Sequence[Shape]
    steps: Sequence[Sequence[Shape]]
    images: np.ndarray | tuple[()] = ()
    image_box: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    @property
    def size(self) -> tuple[float, float]:
        left, top, right, bottom = self.box
        return right - left, bottom - top


class LegendEntry(NamedTuple):
    """One entry of a legend: words, and a sample of a style."""

    words: str
    style: str
    kind: Literal["path", "area", "disc"] = "path"


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A recorded episode as shapes, K time steps.

    Attributes:
        panels: views, side by side.
        styles: {name: look}.
        legend: what the styles mean.
        metrics: names of `record.curves` that a page shows, the one of pictures in front; () for all, the score in
            front.
        step_labels: words for the time steps [K]; () for the environment's.
        lines: {metric: curves drawn in place of the episode's only one, and lines of one value across its chart}.
    """

    panels: Sequence[Panel]
    styles: Mapping[str, Style]
    legend: Sequence[LegendEntry]
    metrics: Sequence[str] = ()
    step_labels: Sequence[str] = ()
    lines: Mapping[str, Sequence[Line]] = dataclasses.field(default_factory=dict)
