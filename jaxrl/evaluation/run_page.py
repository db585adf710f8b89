"""A page with the curves of runs, over environment steps and over minutes, that any browser shows without a network."""

import dataclasses
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.common.errors import UserError
from jaxrl.evaluation import learning_curves, run_summary
from jaxrl.evaluation.run_summary import Rows, RunSummary, count_minutes
from jaxrl.report.tables import Row
from jaxrl.runtime.config import NOT_COMPARED

# Settings in which runs may differ and still be of equal settings: they change no result but its random numbers.
_IGNORED_SETTINGS = {*NOT_COMPARED, "seed", "num_seeds", "runs", "learn_chunk"} - {
    "total_env_steps", "total_episodes", "max_seconds",
}  # fmt: skip
_POINTS = 100  # the most that a curve has
_INK = "#1d2733"  # replaced by the colour of the page's text
_TAG = r"<[^>]*>"  # a tag of an SVG element
_GROUPS = {"eval": "selection episodes", "rollout": "training episodes", "train": "learning", "time": "speed"}
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root {{ --ink: #1d2733; --paper: #fff; --line: #dfe3e8; color-scheme: light dark; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6eaef; --paper: #12161b; --line: #3a434e; }} }}
body {{ margin: 0 auto; max-width: 1240px; padding: 18px 20px; font: 15px/1.45 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }}
h1 {{ overflow-wrap: anywhere; }}
figure {{ margin: 24px 0; }}
figcaption {{ font-weight: 600; }}
.pair {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 12px; }}
svg {{ display: block; width: 100%; height: auto; }}
summary {{ cursor: pointer; font-weight: 600; }}
.wide {{ overflow-x: auto; scrollbar-width: thin; }}
table {{ border-collapse: collapse; font-size: 14px; }}
th, td {{ padding: 3px 14px 3px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
@media (max-width: 480px) {{ table {{ font-size: 12px; }} th, td {{ padding-right: 7px; }} }}
@media (prefers-color-scheme: dark) {{ svg {{ filter: brightness(1.3); }} }}
</style></head><body>
<h1>{title}</h1>
"""


@dataclasses.dataclass(frozen=True)
class Series:
    """Seeds of equal settings, which make one curve."""

    name: str  # the first run's, and the swept settings
    env: str  # name of their environment
    runs: list[str]  # names of its runs
    seeds: dict[int, Rows]  # {seed: its rows}

    @property
    def title(self) -> str:
        others = f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else ""
        return f"{self.name}{others}" + (f", mean of {len(self.seeds)} seeds" if len(self.seeds) > 1 else "")


def group_series(runs: Sequence[RunSummary]) -> list[Series]:
    """Return the series of all seeds that have rows; one that repeats a seed is in a series of its own.

    Trials that have failed are left out, unless a run has no other.
    """
    by_settings: dict[tuple[str, int], Series] = {}
    for run in runs:
        failed = run.failed if len(run.failed) < len(run.trials) else {}
        for trial in (trial for trial in run.trials if run.rows[trial.folder] and trial.folder not in failed):
            settings = {name: value for name, value in trial.config.plain().items() if name not in _IGNORED_SETTINGS}
            text = json.dumps(settings, sort_keys=True, default=str)
            seed = trial.config.run.seed
            repeated = 0
            while (text, repeated) in by_settings and seed in by_settings[text, repeated].seeds:
                repeated += 1
            name = f"{run.name} {trial.combination}".rstrip()
            one = by_settings.setdefault((text, repeated), Series(name, trial.config.env, [], {}))
            one.seeds[seed] = run.rows[trial.folder]
            one.runs.extend([run.name] * (run.name not in one.runs))
    return list(by_settings.values())


def list_metrics(all_series: Iterable[Series]) -> list[str]:
    """Return the names of all metrics except counters and clocks, metrics of evaluations first."""
    rows = (row for one in all_series for rows in one.seeds.values() for row in rows)
    names = dict.fromkeys(name for row in rows for name in row if "/" in name)
    metrics = [name for name in names if name not in ("time/unix", "time/seconds")]
    return sorted(metrics, key=lambda name: not name.startswith("eval/"))


def average_seeds(one: Series, metric: str, over_minutes: bool = False) -> dict[str, Any] | None:
    """Return the curve of a metric over the seeds of a series, see `learning_curves.average_curves`.

    x is environment steps, or minutes of training (`over_minutes`). A single seed has no "ci95".
    """
    curves = []
    for rows in one.seeds.values():
        points = learning_curves.extract_curve(rows, metric)
        clock = count_minutes(rows)
        if not points or (over_minutes and not clock):
            continue
        x, y = np.array(points, np.float64).T
        curves.append((np.interp(x, *np.array(clock, np.float64).T) if over_minutes else x, y))
    average = learning_curves.average_curves(curves, _POINTS)
    shown = ("x", "mean", "ci95") if len(curves) > 1 else ("x", "mean")
    return average and {name: average[name] for name in shown}


def make_page(runs: Sequence[RunSummary]) -> str:
    """Return the HTML. Raises UserError if no run has any metrics."""
    all_series = group_series(runs)
    scores = {f"{group}/{run.scoring.score}" for run in runs for group in ("eval", "rollout")}
    names = sorted(list_metrics(all_series), key=lambda name: name not in scores)
    envs = dict.fromkeys(one.env for one in all_series)
    charts = [chart for name in names for env in envs if (chart := _chart(name, env, all_series, runs))]
    title = html.escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    if not charts:
        raise UserError(
            f"{', '.join(run.name for run in runs)}: no metrics yet: wait until training has written the first row"
        )
    parts = [
        _table("run", run_summary.TITLES, run_summary.make_run_rows(runs)),
        *(f"<p>{html.escape(line)}</p>" for line in run_summary.describe_scores(runs)),
        "<h2>Curves</h2>",
        "<p>Lines: means over parts of a run, or single evaluations; bands: Student's 95 % intervals over seeds.</p>",
        *charts,
        "<h2>Settings</h2>",
        _differences(runs),
    ]
    return _HEAD.format(title=title) + "\n".join(parts) + "\n</body></html>\n"


def _chart(name: str, env: str, all_series: Sequence[Series], runs: Sequence[RunSummary]) -> str:
    """Return plots of a metric over steps and over minutes, of one environment; "" if no series has any."""
    label = _label(name, [run for run in runs if run.config.env == env])
    if any(one.env != env for one in all_series):  # returns of different environments do not compare
        label += f", {env}"
    plots = []
    drawn = 0
    for over_minutes in (False, True):
        curves = {
            one.title: curve
            for one in all_series
            if one.env == env and (curve := average_seeds(one, name, over_minutes)) is not None
        }
        plots.append(_plot(curves, "minutes of training" if over_minutes else "environment steps", label))
        drawn += len(curves)
    if not drawn:
        return ""
    caption = html.escape(label)
    pair = f'<div class="pair">{"".join(plots)}</div>'
    return f'<figure aria-label="{caption}"><figcaption>{caption}</figcaption>{pair}</figure>'


def _plot(curves: Mapping[str, dict[str, list[float]]], across: str, salt: str) -> str:
    """Return curves by their titles as an SVG element; its words and axes have the colour of the page's text."""
    import matplotlib
    from matplotlib.figure import Figure  # slow to import

    inks: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    # Names within an SVG element count for the whole page: they are hashed with what makes this plot different
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{salt} {across}", **inks}):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(across)
        for title, curve in curves.items():
            learning_curves.draw(axes, curve["x"], curve["mean"], curve.get("ci95"), title)
        if curves:
            learning_curves.add_legend(axes, fontsize="small", frameon=False)
        learning_curves.shorten_numbers(axes)
        learning_curves.take_literally(figure)
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    used = set(re.findall(r'[("]#([^")]+)', " ".join(re.findall(_TAG, svg))))

    def adapt(tag: re.Match[str]) -> str:  # the names between tags stay as they are
        text = tag[0].replace(_INK, "currentColor")
        return re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", text)

    return re.sub(_TAG, adapt, svg)


def _label(name: str, runs: Sequence[RunSummary]) -> str:
    group, _, metric = name.partition("/")
    scoring = next((run.scoring for run in runs if metric.partition("/")[0] in run.scoring.labels), runs[0].scoring)
    words = scoring.label(metric) if group in ("eval", "rollout") else metric.replace("_", " ")
    return f"{words} ({_GROUPS[group]})" if group in _GROUPS else name


def _differences(runs: Sequence[RunSummary]) -> str:
    """Return the settings that differ between runs, folded: there may be many of them."""
    settings = run_summary.make_setting_rows(runs)
    if not settings:
        return "<p>All settings are equal.</p>"
    table = _table("setting", [run.name for run in runs], settings)
    return f"<details><summary>Settings that differ: {len(settings)}</summary>{table}</details>"


def _table(corner: str, titles: Sequence[str], rows: Sequence[Row]) -> str:
    def line(tag: str, cells: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = (line("td", [row.name, *row.cells]) for row in rows)
    return f'<div class="wide"><table>{line("th", [corner, *titles])}{"".join(lines)}</table></div>'
