"""Runs on disk: how far they are, what they have learned, and in which settings they differ; as data and as tables."""

import collections
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxrl.common.errors import UserError, one_line
from jaxrl.common.files import is_file
from jaxrl.evaluation import learning_curves
from jaxrl.report.console import format_si
from jaxrl.report.tables import Row, make_table
from jaxrl.report.writer import check_same_run, read_metrics
from jaxrl.runtime.checkpoint import Checkpoints, committed_steps
from jaxrl.runtime.config import Config
from jaxrl.runtime.manifest import META
from jaxrl.runtime.run_directory import CONFIG, VERSIONS, RunError, in_use, open_run
from jaxrl.runtime.saved_run import read_config
from jaxrl.runtime.scoring import Scoring
from jaxrl.runtime.trials import Trial, describe_failed, trials

Rows = list[dict[str, Any]]
RUNS = "runs"  # the folder that is listed by default
TITLES = ("seeds", "env steps", "minutes", "score", "state", "best checkpoint")  # of a table of runs
_STYLES = {"running": "bold cyan", "stopped": "yellow", "crashed": "bold red"}


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A run, or a folder of its trials."""

    directory: Path  # the run's, or the folder of its trials
    config: Config
    scoring: Scoring
    trials: list[Trial]  # combinations of swept settings with every seed; one for most runs
    rows: dict[str, Rows]  # {folder of a trial: its rows of metrics}
    # "running" while a process trains it, "finished" once its total is reached, "crashed" without a last checkpoint,
    # else "stopped"
    state: str
    score: dict[str, Any] | None  # of the environment at the end, see `summarise_score`
    best: int | None  # number of the best checkpoint, None if none was selected
    began: float  # modification time of versions.json, seconds since 1970
    parts: int = 2  # of the path, the last ones, that are its name

    @property
    def name(self) -> str:
        """Return the last parts of the path, such as "coma_coverage/0001", in characters that any output can show."""
        return one_line("/".join(self.directory.absolute().parts[-self.parts :]))

    @property
    def failed(self) -> dict[str, int]:
        """Return {folder: iteration} of the trials that failed."""
        at = {trial.folder: learning_curves.failed_at(self.rows[trial.folder]) for trial in self.trials}
        return {folder: iteration for folder, iteration in at.items() if iteration is not None}

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings; a swept one is that of the trial whose score is shown, or a list while there is none."""
        shown = (self.score or {}).get("trial")
        tried = [trial.config.plain() for trial in self.trials if shown in (None, trial.combination)]
        swept = [word.partition("=")[0] for word in self.config.run.sweep.split()]
        values = {name: list(dict.fromkeys(one[name] for one in tried)) for name in swept}
        return self.config.plain() | {name: one[0] if len(one) == 1 else one for name, one in values.items()}

    @property
    def env_steps(self) -> int:
        return max(map(learning_curves.count_env_steps, self.rows.values()))

    @property
    def minutes(self) -> float:
        points = count_minutes(max(self.rows.values(), key=learning_curves.count_env_steps))
        return points[-1][1] if points else 0.0

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "directory": str(self.directory),
            "algorithm": self.config.algo,
            "environment": self.config.env,
            "seeds": [self.config.run.seed + k for k in range(self.config.run.num_seeds)],
            "env_steps": self.env_steps,
            "minutes": round(self.minutes, 3),
            "score": self.score,
            "state": self.state,
            "best_checkpoint": self.best,
            "failed": self.failed,
            "began": self.began,
        }


def find(paths: Sequence[str], warn: Callable[[str], None]) -> list[RunSummary]:
    """Return the runs at `paths` and, newest first, in the folders among them.

    Args:
        paths: runs, folders of their trials, or folders of runs.
        warn: receives a sentence for each run in a folder that cannot be read, and is left out.

    Raises UserError: no run there, or a run that is named cannot be read.
    """
    by_directory: dict[Path, RunSummary] = {}
    for path in map(Path, paths):
        if is_file(path / CONFIG) or not os.path.isdir(path):
            runs = [read(open_run(path))]
        else:
            runs, problems = [], []
            for directory in _runs_in(path):
                try:
                    runs.append(read(directory))
                except UserError as error:
                    problems.append(str(error))
            if not runs:
                advice = "train one with python -m jaxrl.train, or name another folder or a run"
                raise RunError(problems[0] if problems else f"{path} holds no run: {advice}")
            for problem in problems:
                warn(problem)
        by_directory |= {run.directory.absolute(): run for run in newest_first(runs)}
    return _tell_apart(list(by_directory.values()))


def _tell_apart(runs: list[RunSummary]) -> list[RunSummary]:
    """Return runs, of different directories, with longer names where two had the same."""
    counts = collections.Counter(run.name for run in runs)
    if all(count == 1 for count in counts.values()):
        return runs
    longer = [dataclasses.replace(run, parts=run.parts + 1) if counts[run.name] > 1 else run for run in runs]
    return _tell_apart(longer)


def newest_first(runs: Iterable[RunSummary]) -> list[RunSummary]:
    """Return runs in the order of a list."""
    return sorted(runs, key=lambda run: (-run.began, run.name))


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder and in its folders that are no runs themselves: runs/coma_coverage, but no trials."""
    runs = {file.parent for file in folder.glob(f"*/{CONFIG}")}
    return sorted(runs | {file.parent for file in folder.glob(f"*/*/{CONFIG}") if file.parent.parent not in runs})


def read(directory: Path) -> RunSummary:
    """Return the run in a directory. Raises UserError if its files are damaged, or cannot be read."""
    try:
        config = read_config(directory, with_env=False)
        all_trials = trials(config)
        rows = {trial.folder: read_metrics(directory / trial.folder) for trial in all_trials}
        outer = (directory, *directory.absolute().parents[:2])  # all trials share their checkpoints
        root = next((run for run in outer if (run / CONFIG).is_file() and (run / "checkpoints").is_dir()), directory)
        versions = next((run / VERSIONS for run in outer if (run / VERSIONS).is_file()), directory / CONFIG)
        meta = _read_newest_meta(root)
        if root == directory:
            marks = meta.get("metrics")
            for folder, mark in zip([".", *rows], marks if isinstance(marks, list) else [], strict=False):
                check_same_run(directory / folder, mark if isinstance(mark, dict) else None)
        scoring = Scoring.read(versions.parent)
        state = _state(root, meta, max(map(learning_curves.count_env_steps, rows.values())))
        score, best = summarise_score(rows, all_trials, scoring), Checkpoints(root / "checkpoints").best_step()
        return RunSummary(directory, config, scoring, all_trials, rows, state, score, best, versions.stat().st_mtime)
    except OSError as error:
        raise RunError(f"{directory} cannot be read ({error.strerror}): make it readable") from error


def summarise_score(rows: dict[str, Rows], all_trials: Sequence[Trial], scoring: Scoring) -> dict[str, Any] | None:
    """Return the environment's score at the end of a run; None before its first episode has ended.

    Returns:
        {"metric", "label", "mode": "min" if less is better, else "max", "of": "selection episodes" or "training
        episodes", "mean", "ci95": half of Student's 95 % interval over seeds, None for one seed}. A sweep has the
        values of its best combination, whose name is "trial".
    """
    curves = learning_curves.summarise_rows(rows, all_trials, scoring)
    if curves is None:
        return None
    trial = learning_curves.find_best(curves)
    curve = curves["combinations"][trial]
    return {
        "metric": scoring.score,
        "label": scoring.label(scoring.score),
        "mode": scoring.score_mode,
        "of": curves["of"],
        "mean": curve["mean"][-1],
        "ci95": curve["ci95"][-1] if curves["seeds"] > 1 else None,
        **({"trial": trial} if trial else {}),
    }


def _read_newest_meta(root: Path) -> dict[str, Any]:
    """Return the metadata of the newest checkpoint, {} if there is none, or if it cannot be read."""
    try:
        *_, newest = committed_steps(root / "checkpoints")
        return dict(json.loads((root / "checkpoints" / f"{newest:010d}" / META).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _state(root: Path, meta: dict[str, Any], env_steps: int) -> str:
    if in_use(root):
        return "running"
    saved = meta.get("env_steps")
    if not committed_steps(root / "checkpoints") or (isinstance(saved, int) and env_steps > saved):
        return "crashed"  # a run that is stopped saves everything
    return "finished" if meta.get("finished") else "stopped"


def count_minutes(rows: Rows) -> list[tuple[float, float]]:
    """Return step and minutes of training of each row with a number of environment steps."""
    timed = [row for row in rows if row.get("env_steps") is not None and row.get("time/seconds") is not None]
    return [(row["step"] if "step" in row else row["env_steps"], row["time/seconds"] / 60) for row in timed]


def differences(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, with the value of each; None where a run has no such setting.

    Swept settings are those of the trial whose score is shown, see `RunSummary.settings`.
    """
    settings = [run.settings for run in runs]
    names = dict.fromkeys(name for one in settings for name in one if name != "runs")
    values = {name: [one.get(name) for one in settings] for name in names}
    return {name: per_run for name, per_run in values.items() if any(value != per_run[0] for value in per_run)}


# Tables


def make_run_rows(runs: Sequence[RunSummary]) -> list[Row]:
    """Return one row per run, with cells for TITLES. Names of runs hold the algorithm and the environment."""
    rows = []
    for run in runs:
        best = "" if run.best is None else f"{run.best:,}"
        seeds = f"{run.config.run.num_seeds}" + (f" ({len(run.failed)} failed)" if run.failed else "")
        cells = (seeds, format_si(run.env_steps), _minutes(run), _score(run), run.state, best)
        rows.append(Row(run.name, cells, _STYLES.get(run.state, "")))
    return rows


def list_runs(runs: Sequence[RunSummary]) -> list[Table | str]:
    """Return the table of the runs, and what their scores and columns are."""
    return [make_table("run", TITLES, make_run_rows(runs)), "", *describe_scores(runs)]


def _score(run: RunSummary) -> str:
    """Return the score at the end of a run, with half of its interval over seeds and the trial of a sweep that has it.

    Empty before its first episode.
    """
    if run.score is None:
        return ""
    half = "" if run.score["ci95"] is None else f" ±{run.score['ci95']:.2g}"
    if run.score["mean"] is None:
        return "failed" if len(run.failed) == len(run.trials) else "not finite"
    trial = f" ({run.score['trial']})" if "trial" in run.score else ""
    return f"{run.score['mean']:.4g}{half}{trial}"


def _minutes(run: RunSummary) -> str:
    return f"{run.minutes:,.1f}" if run.minutes >= 10 else f"{run.minutes:.2g}"


def describe_scores(runs: Sequence[RunSummary]) -> list[str]:
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
    for run in runs:
        if len(run.trials) > 1 and run.failed:
            lines.append(f"{run.name}: {describe_failed(run.failed)}; its score is of the other trials")
        elif run.failed:
            lines.append(f"{describe_failed({run.name: run.failed[run.trials[0].folder]})}")
    return lines


def compare_runs(runs: Sequence[RunSummary]) -> list[Table | str]:
    """Return a table of one row per differing setting and one column per run, with the scores at the end."""
    settings = make_setting_rows(runs)
    rows = [
        Row("settings that differ" if settings else "all settings are equal"),
        *settings,
        Row("at the end"),
        Row("environment steps", [format_si(run.env_steps) for run in runs]),
        Row("minutes", [_minutes(run) for run in runs]),
        Row("score", [_score(run) or "none" for run in runs]),
    ]
    return [make_table("run", [run.name for run in runs], rows), "", *describe_scores(runs)]


def make_setting_rows(runs: Sequence[RunSummary]) -> list[Row]:
    """Return one row per setting in which runs differ."""
    return [Row(name, [_text(value) for value in values]) for name, values in differences(runs).items()]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "empty"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"
