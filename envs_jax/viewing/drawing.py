"""Recorded episodes, and their drawings: panels of shapes, described once for pages, animations and pictures."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from envs_jax.base import Environment, TimeStep

INK, SOFT, GREY = "#1d2733", "#4a5560", "#8a94a0"
_PLAIN = {"random": GREY, "greedy": "#0072b2", "sampled": "#56b4e9"}
_OTHERS = ("#d55e00", "#cc79a7", "#009e73", "#e69f00", "#7a5195", "#8c564b")


@dataclasses.dataclass(frozen=True)
class Record:
    """One episode of T steps.

    Attributes:
        env: the environment.
        title: a few words.
        subtitle: the policy and the number of the episode.
        policy: name of the policy.
        states: the environment's states, leaves [T + 1, ...]; PRNG keys as they are, all else NumPy.
        timesteps: time steps, leaves [T + 1, ...].
        actions: [T, A, ...].
        curves: {metric: float[T + 1]}, "return" too: the episode's value if it ended there.
        references: {policy: {metric: float[T + 1, 2]}}: mean over many episodes and half of its 95 % interval.
        final_means: {opponent: {policy: {metric: mean at the end of many games}}}, where two teams play.
    """

    env: Environment
    title: str
    subtitle: str
    policy: str
    states: Any
    timesteps: TimeStep
    actions: np.ndarray
    curves: Mapping[str, np.ndarray]
    references: Mapping[str, Mapping[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    final_means: Mapping[str, Mapping[str, Mapping[str, float]]] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.actions)

    @property
    def rewards(self) -> np.ndarray:
        """float[T + 1]: mean reward over agents of the action that led to each time step."""
        return np.asarray(self.timesteps.reward).mean(axis=-1)


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve of a chart, with a label at its end.

    Attributes:
        label: a few words.
        colour: as in HTML, "#rrggbb".
        values: float[T + 1] of this episode; or one number for all of it: a limit, or the final value of others.
    """

    label: str
    colour: str
    values: Any


def colours(policies: Iterable[str]) -> dict[str, str]:
    """Return a colour for every policy."""
    others = [name for name in policies if name not in _PLAIN]
    return _PLAIN | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}


def label(policy: str) -> str:
    """Return the label of a policy's curves in `references`."""
    return f"{policy} (mean)"


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


path = functools.partial(_shape, "path")  # lines through points [N, 2], in a style
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
