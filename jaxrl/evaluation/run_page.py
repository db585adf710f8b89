"""A page with the curves of runs, over environment steps and over minutes, that any browser shows without a network."""

import base64
import dataclasses
import html
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl.common.errors import UserError
from jaxrl.evaluation import learning_curves, run_summary
from jaxrl.evaluation.run_summary import Rows, RunSummary, count_minutes
from jaxrl.report.tables import Row
from jaxrl.runtime.config import FREE_ON_RESUME

# Settings in which runs may differ and still be of equal settings: they change no result but its random numbers.
_IGNORED_SETTINGS = {*FREE_ON_RESUME, "seed", "num_seeds", "runs", "rollout_chunk", "learn_chunk"} - {
    "total_env_steps", "total_episodes", "max_seconds",
}  # fmt: skip
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


@dataclasses.dataclass(frozen=True)
class Series:
    """Seeds of equal settings, which make one curve.

    Attributes:
        name: of the first run, and of the swept settings.
        runs: names of its runs.
        seeds: {seed: its rows}.
    """

    name: str
    runs: list[str]
    seeds: dict[int, Rows]

    @property
    def title(self) -> str:
        others = f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else ""
        return f"{self.name}{others}" + (f", mean of {len(self.seeds)} seeds" if len(self.seeds) > 1 else "")


def group_series(runs: Sequence[RunSummary]) -> list[Series]:
    """Return the series of all seeds that have rows; one that repeats a seed is in a series of its own."""
    by_settings: dict[tuple[str, int], Series] = {}
    for run in runs:
        for trial in (trial for trial in run.trials if run.rows[trial.folder]):
            settings = {name: value for name, value in trial.config.plain().items() if name not in _IGNORED_SETTINGS}
            text, seed = json.dumps(settings, sort_keys=True, default=str), trial.config.run.seed
            repeated = 0
            while (text, repeated) in by_settings and seed in by_settings[text, repeated].seeds:
                repeated += 1
            name = f"{run.name} {trial.combination}".rstrip()
            one = by_settings.setdefault((text, repeated), Series(name, [], {}))
            one.seeds[seed] = run.rows[trial.folder]
            one.runs.extend([run.name] * (run.name not in one.runs))
    return list(by_settings.values())


def list_metrics(all_series: Iterable[Series]) -> list[str]:
    """Return the names of all metrics except counters and clocks, metrics of evaluations first."""
    rows = (row for one in all_series for rows in one.seeds.values() for row in rows)
    names = dict.fromkeys(name for row in rows for name in row if "/" in name)
    metrics = [name for name in names if name not in ("time/unix", "time/seconds")]
    return sorted(metrics, key=lambda name: not name.startswith("eval/"))


def average_seeds(
    one: Series, metric: str, over_minutes: bool = False, max_points: int = 100
) -> dict[str, list[float]] | None:
    """Return the mean over the seeds of a series, and half of Student's 95 % interval.

    Where seeds have different points or clocks, curves are interpolated at the points of the shortest one.

    Args:
        one: the series.
        metric: its name in metrics.jsonl.
        over_minutes: x is minutes of training instead of environment steps.
        max_points: largest number of points.

    Returns:
        {"x", "mean", and "ci95" if there are several seeds}; None without a common range.
    """
    curves = []
    for rows in one.seeds.values():
        points, clock = learning_curves.extract_curve(rows, metric), count_minutes(rows)
        if not points or (over_minutes and not clock):
            continue
        x, y = np.array(points, np.float64).T
        curves.append((np.interp(x, *np.array(clock, np.float64).T) if over_minutes else x, y))
    if not curves:
        return None
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    x = min((x for x, _ in curves), key=lambda x: x[-1])
    x = x[(x >= first) & (x <= last)]
    if not len(x):
        return None
    x = x[np.unique(np.linspace(0, len(x) - 1, min(max_points, len(x))).round().astype(int))]
    values = np.stack([np.interp(x, *curve) for curve in curves], axis=1)
    summary = learning_curves.summarise(values, share=False)
    return {"x": x.tolist(), "mean": summary["mean"]} | ({"ci95": summary["ci95"]} if len(curves) > 1 else {})


def make_page(runs: Sequence[RunSummary]) -> str:
    """Return the HTML. Raises UserError if no run has any metrics."""
    all_series = group_series(runs)
    scores = {f"{group}/{run.scoring.score}" for run in runs for group in ("eval", "rollout")}
    names = sorted(list_metrics(all_series), key=lambda name: name not in scores)
    charts = [chart for name in names if (chart := _chart(name, all_series, runs))]
    title = html.escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    if not charts:
        raise UserError(f"{', '.join(run.name for run in runs)}: no metrics yet, nothing can be drawn")
    settings = run_summary.make_setting_rows(runs)
    parts = [
        _table("run", run_summary.TITLES, run_summary.make_run_rows(runs)),
        *(f"<p>{html.escape(line)}</p>" for line in run_summary.describe_scores(runs)),
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
            if (curve := average_seeds(one, name, over_minutes)) is not None:
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
