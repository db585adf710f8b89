"""A page that plays any record in a browser: controls, tiles and curves around a drawing, see `page.html`."""

import base64
import html
import io
import json
import re
from importlib import resources

import numpy as np

from envs_jax.viewing.charts import chart, shown_metrics
from envs_jax.viewing.drawing import Drawing, LegendEntry, Panel, Record, Style

RATES = (1, 2, 5, 10, 30)  # steps per second that a page offers


def page(record: Record, drawing: Drawing, rate: int = 2) -> str:
    """Return the HTML of a page that plays a record; `rate`: steps per second at first, one of RATES."""
    spec = record.env.spec
    curves = {"reward": record.rewards, **record.curves}
    names = shown_metrics(record, drawing)
    styles = dict(drawing.styles)
    charts = {}
    for name in ("reward", *names):
        panel, looks = chart(record, name, drawing.lines.get(name, ()))
        charts[name] = panel.still
        styles |= looks
    data = {
        "steps": record.steps,
        "step_labels": list(drawing.step_labels or map(record.env.step_label, range(record.steps + 1))),
        "metric": names[0],
        "labels": {name: spec.label(name) for name in charts},
        "curves": {name: [float(f"{x:.6g}") if np.isfinite(x) else None for x in curves[name]] for name in charts},
        "charts": charts,
        "panels": [{"still": panel.still, "steps": panel.steps} for panel in drawing.panels],
    }
    parts = {
        "TITLE": html.escape(record.title),
        "SUBTITLE": html.escape(record.subtitle),
        "STYLES": "\n".join(f".drawn .{name} {{ {style.css} }}" for name, style in styles.items()),
        "SCENE": "".join(_svg(panel) for panel in drawing.panels),
        "LEGEND": "".join(_sample(entry, styles[entry.style]) for entry in drawing.legend),
        "RATES": "".join(f'<option value="{r}"{" selected" * (r == rate)}>{r} / s</option>' for r in RATES),
        "DATA": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], template)


def _svg(panel: Panel) -> str:
    """Return a panel with its images; its shapes are added to the last element, step by step."""
    from PIL import Image

    (left, top, _, _), (width, height), (x0, y0, x1, y1) = panel.box, panel.size, panel.image_box
    images = ""
    for image in panel.images:
        Image.fromarray(image).save(buffer := io.BytesIO(), "PNG", optimize=True)
        images += f'<image x="{x0}" y="{y0}" width="{x1 - x0}" height="{y1 - y0}" preserveAspectRatio="none" '
        images += f'href="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"/>'
    title = f"<figcaption>{html.escape(panel.title)}</figcaption>" if panel.title else ""
    return (
        f'<figure style="flex:{width / height:.4f}">{title}<svg class="drawn" viewBox="{left} {top} {width} {height}" '
        f'role="img" aria-label="{html.escape(panel.title or "scene")}">{images}<g></g></svg></figure>'
    )


def _sample(entry: LegendEntry, style: Style) -> str:
    element = {
        "path": 'path d="M2 5H26"',
        "area": 'rect x="9" width="10" height="10"',
        "disc": 'circle cx="14" cy="5" r="4"',
    }
    look = style.with_width(2.0 if entry.kind == "path" else 1.0).css
    words = html.escape(entry.words)
    return f'<span><svg viewBox="0 0 28 10"><{element[entry.kind]} style="{look}"/></svg>{words}</span>'
