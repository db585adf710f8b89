"""Recorded episodes, and viewers that draw them as pages, animations and pictures.

`Environment.viewer()` returns an environment's viewer. It describes an episode once, as a `Drawing`: panels of shapes,
with the curve of a metric to their right. Pictures are PIL images; a page is one self-contained HTML text.
"""

from typing import Any

from envs_jax.viewing import pictures
from envs_jax.viewing.drawing import (
    GREY,
    INK,
    SOFT,
    Drawing,
    LegendEntry,
    Line,
    Panel,
    Record,
    Shape,
    Style,
    colours,
    label,
)  # fmt: skip
from envs_jax.viewing.page import RATES, page

__all__ = [
    "GREY",
    "INK",
    "RATES",
    "SOFT",
    "Drawing",
    "LegendEntry",
    "Line",
    "Panel",
    "Record",
    "Shape",
    "Style",
    "Viewer",
    "colours",
    "label",
]


class Viewer:
    """Draws records of one environment. A subclass defines only `drawing`."""

    rate = 2  # time steps per second that a reader can follow, one of RATES

    def drawing(self, record: Record) -> Drawing:
        """Return the episode as shapes."""
        raise NotImplementedError("a viewer needs drawing(record), which returns an envs_jax.viewing.Drawing")

    def html(self, record: Record) -> str:
        """Return a page that plays the record, one self-contained HTML text."""
        return page(record, self.drawing(record), self.rate)

    def frames(self, record: Record) -> list[Any]:
        """Return PIL images of equal size, one per time step [T + 1], for an animation."""
        return pictures.frames(record, self.drawing(record))

    def picture(self, record: Record) -> Any:
        """Return a PIL image that summarises the episode."""
        return pictures.picture(record, self.drawing(record))
