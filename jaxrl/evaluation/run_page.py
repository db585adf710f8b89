"""A page with the curves of runs, over environment steps and over minutes, that any browser shows without a network."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from jaxrl.common.errors import UserError
from jaxrl.evaluation import learning_curves, run_tables
from jaxrl.evaluation.run_summary import RunSummary, Series, mean_curve, metrics_of, series
from jaxrl.report.tables import Row

_GROUPS = {"eval": "selection episodes", "rollout": "training episodes", "train": "learning", "time": "speed"}
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>
body {{ margin: 0 auto; max-width: 1240px; padding: 18px 20px; font: 15px/1.45 system-ui, sans-serif; }}
img {{ display: block; width: 100%; }}
table {{ border-collapse: collapse; font-size: 14px; }}
th, td {{ padding: 3px 14px 3px 0; text-align: right; border-bottom: 1px solid #dfe3e8; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
</style></head><body>
<h1>{title}</h1>
"""


def page(runs: Sequence[RunSummary]) -> str:
    """Return the HTML. Raises UserError if no run has any metrics."""
    all_series = series(runs)
    scores = {f"{group}/{run.scoring.score}" for run in runs for group in ("eval", "rollout")}
    names = sorted(metrics_of(all_series), key=lambda name: name not in scores)
    charts = [chart for name in names if (chart := _chart(name, all_series, runs))]
    title = html.escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    if not charts:
        raise UserError(f"{', '.join(run.name for run in runs)}: no metrics yet, nothing can be drawn")
    settings = run_tables.setting_rows(runs)
    parts = [
        _table("run", run_tables.TITLES, run_tables.run_rows(runs)),
        *(f"<p>{html.escape(line)}</p>" for line in run_tables.legend(runs)),
        "<h2>Settings that differ</h2>",
        _table("setting", [run.name for run in runs], settings) if settings else "<p>All settings are equal.</p>",
        "<h2>Curves</h2>",
        "<p>Lines: means over parts of a run, or single evaluations; bands: Student's 95 % intervals over seeds.</p>",
        *charts,
    ]
    return _HEAD.format(title=title) + "\n".join(parts) + "\n</body></html>\n"


def _chart(name: str, all_series: Sequence[Series], runs: Sequence[RunSummary]) -> str:
    """Return a picture of a metric over steps and over minutes; "" if no series has any."""
    import matplotlib
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(12, 4), layout="constrained")
    label = _label(name, runs)
    figure.suptitle(label, x=0.01, ha="left")
    drawn = 0
    for axes, over_minutes in zip(figure.subplots(1, 2), (False, True), strict=True):
        axes.set_xlabel("minutes of training" if over_minutes else "environment steps")
        for one in all_series:
            if (curve := mean_curve(one, name, over_minutes)) is not None:
                learning_curves.draw(axes, curve["x"], curve["mean"], curve.get("ci95"), one.title)
                drawn += 1
        if axes.lines:
            axes.legend(fontsize="small")
    if not drawn:
        return ""
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{html.escape(label)}" src="data:image/svg+xml;base64,{data}">'


def _label(name: str, runs: Sequence[RunSummary]) -> str:
    """Return the label of a metric of metrics.jsonl."""
    group, _, metric = name.partition("/")
    scoring = next((run.scoring for run in runs if metric.partition("/")[0] in run.scoring.labels), runs[0].scoring)
    words = scoring.label(metric) if group in ("eval", "rollout") else metric.replace("_", " ")
    return f"{words} ({_GROUPS[group]})" if group in _GROUPS else name


def _table(corner: str, titles: Sequence[str], rows: Sequence[Row]) -> str:
    def line(tag: str, cells: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return (
        f"<table>{line('th', [corner, *titles])}{''.join(line('td', [row.name, *row.cells]) for row in rows)}</table>"
    )
