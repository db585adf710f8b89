"""Runs as text: a list of them, and the settings in which they differ."""

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from jaxrl.evaluation.run_summary import RunSummary, differences
from jaxrl.report import tables
from jaxrl.report.console import format_si

_STYLES = {"running": "bold cyan", "stopped": "yellow"}
_WIDE = ("algorithm", "environment", "seeds", "env\nsteps", "minutes", "score", "state", "best")
_NARROW = _WIDE[2:]  # names of runs hold the algorithm and the environment


def listing(runs: Sequence[RunSummary], width: int) -> list[Text]:
    """Return lines of one row per run, in as many columns as fit, and what their scores and columns are."""
    cells = {
        run.directory: [
            run.config.algo,
            run.config.env,
            f"{run.config.run.num_seeds}",
            format_si(run.env_steps),
            minutes(run),
            score(run),
            run.state,
            "" if run.best is None else f"{run.best:,}",
        ]
        for run in runs
    }
    rows = [tables.Row(run.name, cells[run.directory], _STYLES.get(run.state, "")) for run in runs]
    lines = tables.lines("run", _WIDE, rows, width)
    if len(lines) > 2 + len(rows):  # in blocks
        rows = [tables.Row(row.name, row.cells[len(_WIDE) - len(_NARROW) :], row.style) for row in rows]
        lines = tables.lines("run", _NARROW, rows, width)
    return [*lines, Text(), *_wrapped(legend(runs), width)]


def score(run: RunSummary) -> str:
    """Return the score at the end of a run, with half of its interval over seeds; empty before its first episode."""
    found = run.score
    if found is None:
        return ""
    half = "" if found["ci95"] is None else f" ±{found['ci95']:.2g}"
    return "not finite" if found["mean"] is None else f"{found['mean']:.4g}{half}"


def minutes(run: RunSummary) -> str:
    """Return the minutes of training."""
    return f"{run.minutes:,.1f}" if run.minutes >= 10 else f"{run.minutes:.2g}"


def legend(runs: Sequence[RunSummary], best: bool = True) -> list[str]:
    """Return a sentence about the score of each environment, and some about other columns, that of `best` if shown."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if (own := run.score) is not None:
            better = "lower" if own["mode"] == "min" else "higher"
            environments = found.setdefault(f"{own['label']}, on {own['of']} ({better} is better)", [])
            environments.extend([run.config.env] * (run.config.env not in environments))
    lines = [f"score of {', '.join(environments)}: {text}" for text, environments in found.items()]
    if any(run.config.run.num_seeds > 1 for run in runs):
        lines.append("±: half of Student's 95 % interval over the seeds; env steps are those of each seed")
    shown = best and any(run.best is not None for run in runs)
    return [*lines, "best: iteration of the best checkpoint"] if shown else lines


def _wrapped(sentences: Sequence[str], width: int) -> list[Text]:
    return [Text(line, "dim") for sentence in sentences for line in textwrap.wrap(sentence, width)]


def comparison(runs: Sequence[RunSummary], width: int) -> list[Text]:
    """Return lines of one row per differing setting and one column per run, with the scores at the end."""
    rows = [tables.Row("settings that differ"), *setting_rows(runs)]
    if len(rows) == 1:
        rows = [tables.Row("all settings are equal")]
    rows += [
        tables.Row("at the end"),
        tables.Row("environment steps", [format_si(run.env_steps) for run in runs]),
        tables.Row("minutes", [minutes(run) for run in runs]),
        tables.Row("score", [score(run) or "none" for run in runs]),
    ]
    lines = tables.lines("run", [run.name for run in runs], rows, width)
    return [*lines, Text(), *_wrapped(legend(runs, best=False), width)]


def setting_rows(runs: Sequence[RunSummary]) -> list[tables.Row]:
    """Return one row per setting in which runs differ."""
    return [tables.Row(name, [_text(value) for value in values]) for name, values in differences(runs).items()]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "empty"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"
