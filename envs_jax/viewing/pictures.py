"""Pictures and animations of drawings by matplotlib, which is imported when the first one is made."""

from typing import Any

import numpy as np

from envs_jax.viewing.charts import chart
from envs_jax.viewing.drawing import INK, SOFT, Drawing, Panel, Record, Shape, Style

_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_TOP, _ABOVE, _GAP, _ROW = 0.85, 0.3, 0.25, 0.25  # inches: heading, a board's title, between boards, legend's row


def frames(record: Record, drawing: Drawing) -> list[Any]:
    """Return PIL images of equal size, one per time step: the panels, and the curve up to it."""
    sheet = _Sheet(record, drawing, columns=1, rows=1, size=(5.9, 4.6), dpi=100)
    canvas = sheet.figure.canvas
    images = []
    canvas.draw()
    empty = canvas.copy_from_bbox(sheet.figure.bbox)
    for step in range(record.steps + 1):
        canvas.restore_region(empty)
        words, *panels = sheet.board(0, step, f"step {step} of {record.steps}")
        for artist in (words, *panels, sheet.curve(step)):
            sheet.figure.draw_artist(artist)
        words.remove()
        images.append(image(sheet.figure))
    return images


def picture(record: Record, drawing: Drawing) -> Any:
    """Return a PIL image of the panels at four time steps, from the start to the end, and the curve."""
    sheet = _Sheet(record, drawing, columns=2, rows=2, size=(9.0, 7.4), dpi=150)
    for k, name in enumerate(("start", "a third", "two thirds", "end")):
        step = max(1, round(record.steps * k / 3)) if k else 0
        sheet.board(k, step, f"{name} · step {step}")
    sheet.curve(record.steps)
    sheet.figure.canvas.draw()
    return image(sheet.figure)


def image(figure: Any) -> Any:
    """Return what is drawn of a matplotlib figure as a PIL image."""
    from PIL import Image

    return Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3].copy())


class _Sheet:
    """A figure with boards, which show all panels at one time step, to the left of the curve of the first metric.

    Boards are laid out in `columns` and `rows` and together are at most `size` (width, height) inches large.
    """

    def __init__(
        self, record: Record, drawing: Drawing, columns: int, rows: int, size: tuple[float, float], dpi: int
    ) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.record = record
        self.drawing = drawing
        self.columns = columns
        self.axes: dict[tuple[float, float], Any] = {}
        metric = drawing.metrics[0] if drawing.metrics else record.env.spec.score
        self.chart, styles = chart(record, metric, drawing.lines.get(metric, ()))
        self.styles = {**drawing.styles, **styles}
        shapes = [panel.size[0] / panel.size[1] for panel in drawing.panels]
        gaps = _GAP * len(drawing.panels)
        self.height = min((size[0] / columns - gaps) / sum(shapes), size[1] / rows - _ABOVE - _GAP)  # a panel's
        self.wide = [self.height * shape for shape in shapes]
        self.left = 0.25 + columns * (sum(self.wide) + gaps)  # the curve's
        boards = max(rows * (self.height + _ABOVE + _GAP), 2.9)
        figure_size = max(self.left + 3.8, 9.0), _TOP + boards + 0.15 + _ROW * -(-len(drawing.legend) // 4)
        self.figure: Any = Figure(figsize=figure_size, dpi=dpi, facecolor="white")
        FigureCanvasAgg(self.figure)
        self._text(0.25, 0.27, record.title, fontsize=12, color=INK, weight="bold", va="center")
        self._text(0.25, 0.55, record.subtitle, fontsize=9.5, color=SOFT, va="center")
        self._legend()

    def curve(self, step: int) -> Any:
        """Draw the curve up to a time step; return what was drawn."""
        return self._panel(self.chart, self.left, _TOP + _ABOVE, 3.6, step)

    def _text(self, left: float, top: float, words: str, **look: Any) -> Any:
        """Text in inches from the figure's top left corner; a "$" is no formula."""
        w, h = self.figure.get_size_inches()
        return self.figure.text(left / w, 1 - top / h, words, parse_math=False, **look)

    def _legend(self) -> None:
        from matplotlib.lines import Line2D

        handles = []
        for entry in self.drawing.legend:
            style = self.drawing.styles[entry.style].with_width(1.7)
            marker = {"path": "", "area": "s", "disc": "o"}[entry.kind]
            handles.append(
                Line2D((), (), color=style.stroke, alpha=style.opacity, linewidth=1.7, linestyle=_dashes(style))
                if entry.kind == "path"
                else Line2D((), (), marker=marker, linestyle="", markersize=8, color=style.fill, alpha=style.opacity,
                            markeredgecolor=style.stroke if style.stroke != "none" else style.fill)
            )  # fmt: skip
        places = [str(place) for place in range(len(handles))]
        legend = self.figure.legend(handles, places, loc="lower left", bbox_to_anchor=(0.02, 0), ncols=4, frameon=False,
                                    fontsize=9, labelcolor=SOFT, handlelength=2.2, columnspacing=1.5)  # fmt: skip
        for text, entry in zip(legend.get_texts(), self.drawing.legend, strict=True):
            text.set(text=entry.words, parse_math=False)  # words as they are, also with "$", or "_" in front

    def board(self, position: int, step: int, words: str) -> list[Any]:
        """Draw all panels at a time step in the place of a board, with words above; return what was drawn."""
        drawing = self.drawing
        left = 0.25 + position % self.columns * (sum(self.wide) + len(self.wide) * _GAP)
        top = _TOP + _ABOVE + position // self.columns * (self.height + _ABOVE + _GAP)
        step_label = drawing.step_labels[step] if drawing.step_labels else self.record.env.step_label(step)
        words += f" · {step_label}" if step_label not in ("", f"step {step}") else ""
        drawn = [self._text(left, top - 0.13, words, fontsize=10, color=INK, weight="bold", va="center")]
        for panel, width in zip(drawing.panels, self.wide, strict=True):
            drawn.append(self._panel(panel, left, top, width, step))
            left += width + _GAP
        return drawn

    def _panel(self, panel: Panel, left: float, top: float, width: float, step: int) -> Any:
        """Draw a panel at a time step, places in inches from the figure's top left corner; return its axes."""
        w, h = self.figure.get_size_inches()
        height = width * panel.size[1] / panel.size[0]
        if (left, top) not in self.axes:
            self.axes[left, top] = self.figure.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))
            self.axes[left, top].set(xticks=(), yticks=(), facecolor="#fafbfc")
            self.axes[left, top].spines[:].set_color("#dfe3e8")
        axes = self.axes[left, top]
        for artist in (*axes.images, *axes.patches, *axes.texts):
            artist.remove()
        if len(panel.images):
            x0, y0, x1, y1 = panel.image_box
            axes.imshow(panel.images[step], extent=(x0, x1, y1, y0), interpolation="nearest", aspect="auto")
        axes.set(xlim=panel.box[::2], ylim=panel.box[:0:-2])
        for shape in (*panel.still, *panel.steps[step]):
            _draw(axes, shape, self.styles[shape.style], step, 72 * width / panel.size[0])
        axes.text(0.02, 0.97, panel.title, transform=axes.transAxes, va="top", fontsize=8, color=SOFT, parse_math=False)
        return axes


def _dashes(style: Style) -> Any:
    """The dashes of a style for matplotlib, which counts in widths of the stroke."""
    return (0, [length / style.width for length in style.dash]) if style.dash else "-"


def _draw(axes: Any, shape: Shape, style: Style, step: int, unit: float) -> None:
    """Draw a shape on axes of which one unit is so many points."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if shape.kind == "text":
        axes.text(*shape.parts[0], shape.value, color=style.fill, fontsize=style.size * unit, alpha=style.opacity,
                  ha=_ANCHORS[style.anchor], weight="bold", clip_on=True, parse_math=False)  # fmt: skip
    elif shape.parts:
        outlines = []
        for points in (np.reshape(part, (-1, 2)) for part in shape.parts):
            if shape.kind in ("disc", "marker"):
                outlines.append(Path.circle(points[step if shape.kind == "marker" else 0], shape.value))
            elif shape.kind == "area":
                outlines.append(Path([*points, points[0]], closed=True))
            else:
                outlines.append(Path(points[: step + 1] if shape.kind == "trail" else points))
        axes.add_patch(
            PathPatch(Path.make_compound_path(*outlines), facecolor=style.fill, edgecolor=style.stroke,
                      linewidth=style.width * unit, linestyle=_dashes(style), alpha=style.opacity, capstyle="round",
                      joinstyle="round")
        )  # fmt: skip
