"""Runs as tables: a list of them, and the settings in which they differ."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from jaxrl.evaluation.run_summary import RunSummary, differences
from jaxrl.report.console import format_si
from jaxrl.report.tables import Row, make_table

_STYLES = {"running": "bold cyan", "stopped": "yellow"}
TITLES = ("seeds", "env steps", "minutes", "score", "state", "best checkpoint")


def run_rows(runs: Sequence[RunSummary]) -> list[Row]:
    """Return one row per run, with cells for TITLES. Names of runs hold the algorithm and the environment."""
    rows = []
    for run in runs:
        best = "" if run.best is None else f"{run.best:,}"
        cells = (f"{run.config.run.num_seeds}", format_si(run.env_steps), minutes(run), score(run), run.state, best)
        rows.append(Row(run.name, cells, _STYLES.get(run.state, "")))
    return rows


def listing(runs: Sequence[RunSummary]) -> list[Table | str]:
    """Return the table of the runs, and what their scores and columns are."""
    return [make_table("run", TITLES, run_rows(runs)), "", *legend(runs)]


def score(run: RunSummary) -> str:
    """Return the score at the end of a run, with half of its interval over seeds; empty before its first episode."""
    if run.score is None:
        return ""
    half = "" if run.score["ci95"] is None else f" ±{run.score['ci95']:.2g}"
    return "not finite" if run.score["mean"] is None else f"{run.score['mean']:.4g}{half}"


def minutes(run: RunSummary) -> str:
    """Return the minutes of training."""
    return f"{run.minutes:,.1f}" if run.minutes >= 10 else f"{run.minutes:.2g}"


def legend(runs: Sequence[RunSummary]) -> list[str]:
    """Return a sentence about the score of each environment, and some about other columns."""
    environments: dict[str, list[str]] = {}
    for run in runs:
        if run.score is not None:
            better = "lower" if run.score["mode"] == "min" else "higher"
            text = f"{run.score['label']}, on {run.score['of']} ({better} is better)"
            names = environments.setdefault(text, [])
            names.extend([run.config.env] * (run.config.env not in names))
    lines = [f"score of {', '.join(names)}: {text}" for text, names in environments.items()]
    if any(run.config.run.num_seeds > 1 for run in runs):
        lines.append("±: half of Student's 95 % interval over the seeds; env steps are per seed")
    return lines


def comparison(runs: Sequence[RunSummary]) -> list[Table | str]:
    """Return a table of one row per differing setting and one column per run, with the scores at the end."""
    settings = setting_rows(runs)
    rows = [
        Row("settings that differ" if settings else "all settings are equal"),
        *settings,
        Row("at the end"),
        Row("environment steps", [format_si(run.env_steps) for run in runs]),
        Row("minutes", [minutes(run) for run in runs]),
        Row("score", [score(run) or "none" for run in runs]),
    ]
    return [make_table("run", [run.name for run in runs], rows), "", *legend(runs)]


def setting_rows(runs: Sequence[RunSummary]) -> list[Row]:
    """Return one row per setting in which runs differ."""
    return [Row(name, [_text(value) for value in values]) for name, values in differences(runs).items()]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "empty"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"
