"""Pictures and animations of drawings by matplotlib, which is imported when the first one is made."""

from typing import Any

import numpy as np

from envs_jax.viewing.charts import HEIGHT, WIDTH, chart, shown_metrics
from envs_jax.viewing.drawing import INK, SOFT, Drawing, Panel, Record, Shape, Style

_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_TOP, _ABOVE, _GAP, _ROW = 0.85, 0.3, 0.25, 0.21  # inches: heading, a board's title, between boards, legend's row
_CURVE, _SIDE = 3.6, 3.8  # inches: width of a curve, and of the column of curves
_CURVE_HEIGHT = _CURVE * HEIGHT / WIDTH
_LETTER, _SAMPLE = 0.065, 0.6  # inches: width of a letter in a legend, and of a sample with the space around it
_BOLD = 0.0083  # inches: width of a bold letter, per point of its size


def frames(record: Record, drawing: Drawing) -> list[Any]:
    """Return PIL images of equal size, one per time step: the panels, and the curves up to it."""
    sheet = _Sheet(record, drawing, columns=1, rows=1, size=(5.9, 5.0), dpi=100)
    canvas = sheet.figure.canvas
    images = []
    canvas.draw()
    empty = canvas.copy_from_bbox(sheet.figure.bbox)
    for step in range(record.steps + 1):
        canvas.restore_region(empty)
        words, *panels = sheet.board(0, step, f"step {step} of {record.steps}")
        for artist in (words, *panels, *sheet.curves(step)):
            sheet.figure.draw_artist(artist)
        words.remove()
        images.append(image(sheet.figure))
    return images


def picture(record: Record, drawing: Drawing) -> Any:
    """Return a PIL image of the panels at four time steps, from the start to the end, and the curves."""
    sheet = _Sheet(record, drawing, columns=2, rows=2, size=(9.0, 7.4), dpi=150)
    for k, name in enumerate(("start", "a third", "two thirds", "end")):
        step = max(1, round(record.steps * k / 3)) if k else 0
        sheet.board(k, step, f"{name} · step {step}")
    sheet.curves(record.steps)
    sheet.figure.canvas.draw()
    return image(sheet.figure)


def image(figure: Any) -> Any:
    """Return what is drawn of a matplotlib figure as a PIL image."""
    from PIL import Image

    return Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3].copy())


class _Sheet:
    """A figure with boards, which show all panels at one time step, to the left of the curve of the first metric.

    Boards are laid out in `columns` and `rows` and together are at most `size` (width, height) inches large. Below the
    curve are the one of the second metric and the legend where they fit; otherwise the legend is below all.
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
        shapes = [panel.size[0] / panel.size[1] for panel in drawing.panels]
        gaps = _GAP * len(drawing.panels)
        self.height = min((size[0] / columns - gaps) / sum(shapes), size[1] / rows - _ABOVE - _GAP)  # a panel's
        self.wide = [self.height * shape for shape in shapes]
        self.left = 0.25 + columns * (sum(self.wide) + gaps)  # the curve's
        boards = max(rows * (self.height + _ABOVE + _GAP), 2.9)
        metrics = shown_metrics(record, drawing)
        for curves in range(min(2, len(metrics)), 0, -1):
            self.legend_top = _TOP + _ABOVE + curves * (_CURVE_HEIGHT + _GAP) - 0.15
            self.legend_columns = _legend_columns(drawing, _TOP + boards - _GAP - self.legend_top)
            if self.legend_columns:
                break
        self.styles = dict(drawing.styles)
        self.charts = []
        for metric in metrics[:curves]:
            panel, styles = chart(record, metric, drawing.lines.get(metric, ()))
            self.charts.append(panel)
            self.styles |= styles
        bottom = 0.15 if self.legend_columns else 0.15 + _ROW * -(-len(drawing.legend) // 4)
        figure_size = max(self.left + _SIDE, 9.0), _TOP + boards + bottom
        self.figure: Any = Figure(figsize=figure_size, dpi=dpi, facecolor="white")
        FigureCanvasAgg(self.figure)
        self._text(0.25, 0.27, record.title, fontsize=12, color=INK, weight="bold", va="center")
        self._text(0.25, 0.55, record.subtitle, fontsize=9.5, color=SOFT, va="center")
        self._legend()

    def curves(self, step: int) -> list[Any]:
        """Draw the curves up to a time step; return what was drawn."""
        tops = (_TOP + _ABOVE + k * (_CURVE_HEIGHT + _GAP) for k in range(len(self.charts)))
        return [self._panel(panel, self.left, top, _CURVE, step) for panel, top in zip(self.charts, tops, strict=True)]

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
        w, h = self.figure.get_size_inches()
        if self.legend_columns:
            where = {"loc": "upper left", "bbox_to_anchor": (self.left / w, 1 - self.legend_top / h)}
        else:
            where = {"loc": "lower left", "bbox_to_anchor": (0.02, 0)}
        legend = self.figure.legend(
            handles, places, **where, ncols=self.legend_columns or 4, frameon=False, fontsize=9, labelcolor=SOFT,
            borderaxespad=0, handlelength=2.2, columnspacing=1.5,
        )  # fmt: skip
        for text, entry in zip(legend.get_texts(), self.drawing.legend, strict=True):
            text.set(text=entry.words, parse_math=False)  # words as they are, also with "$", or "_" in front

    def board(self, position: int, step: int, words: str) -> list[Any]:
        """Draw all panels at a time step in the place of a board, with words above; return what was drawn."""
        drawing = self.drawing
        left = 0.25 + position % self.columns * (sum(self.wide) + len(self.wide) * _GAP)
        top = _TOP + _ABOVE + position // self.columns * (self.height + _ABOVE + _GAP)
        step_label = drawing.step_labels[step] if drawing.step_labels else self.record.env.step_label(step)
        words += f" · {step_label}" if step_label not in ("", f"step {step}") else ""
        width = sum(self.wide) + (len(self.wide) - 1) * _GAP
        size = min(10.0, width / (_BOLD * len(words)))
        drawn = [self._text(left, top - 0.13, words, fontsize=size, color=INK, weight="bold", va="center")]
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


def _legend_columns(drawing: Drawing, height: float) -> int:
    """Return the columns of a legend that fits below the curves, in this height in inches; 0 if none does."""
    rows = int(height / _ROW)
    if rows < 1 or not drawing.legend:
        return 0
    columns = -(-len(drawing.legend) // rows)
    longest = max(len(entry.words) for entry in drawing.legend)
    return columns if columns * (_SAMPLE + _LETTER * longest) <= _SIDE else 0


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
