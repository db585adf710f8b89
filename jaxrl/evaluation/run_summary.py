"""Runs on disk: how far they are, what they have learned, and in which settings they differ."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.common.errors import UserError
from jaxrl.common.files import is_file
from jaxrl.evaluation import learning_curves
from jaxrl.report.writer import check_same_run, read_metrics
from jaxrl.runtime.checkpoint import Checkpoints, committed_steps
from jaxrl.runtime.config import FREE_ON_RESUME, Config, build, read_run_yaml
from jaxrl.runtime.manifest import META
from jaxrl.runtime.run_directory import CONFIG, VERSIONS, RunError, in_use, open_run
from jaxrl.runtime.scoring import Scoring
from jaxrl.runtime.trials import Trial, trials

Rows = list[dict[str, Any]]
RUNS = "runs"  # the folder that is listed by default
# Settings in which runs may differ and still be of equal settings: they change no result but its random numbers.
_ASIDE = {*FREE_ON_RESUME, "seed", "num_seeds", "runs", "rollout_chunk", "learn_chunk"} - {
    "total_env_steps", "total_episodes", "max_seconds",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A run, or a folder of its trials.

    Attributes:
        directory: the run's, or the folder of its trials.
        config: its configuration.
        scoring: how its environment is scored.
        trials: combinations of swept settings with every seed; one for most runs.
        rows: {folder of a trial: its rows of metrics}.
        state: "running" while a process trains it, "finished" once its total is reached, else "stopped".
        score: of the environment at the end, see `score_of`.
        best: number of the best checkpoint, None if none was selected.
        began: modification time of versions.json, seconds since 1970.
    """

    directory: Path
    config: Config
    scoring: Scoring
    trials: list[Trial]
    rows: dict[str, Rows]
    state: str
    score: dict[str, Any] | None
    best: int | None
    began: float

    @property
    def name(self) -> str:
        """Return the last two parts of the path, such as "coma_coverage/0001"."""
        return "/".join(self.directory.absolute().parts[-2:])

    @property
    def env_steps(self) -> int:
        """Return the environment steps of each trial."""
        return _env_steps(self.rows[self.trials[0].folder])

    @property
    def minutes(self) -> float:
        """Return the minutes of training, pauses between processes excluded."""
        points = minutes(self.rows[self.trials[0].folder])
        return points[-1][1] if points else 0.0

    def plain(self) -> dict[str, Any]:
        """Return everything that the table shows, for JSON."""
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
            "began": self.began,
        }


def find(paths: Sequence[str], warn: Callable[[str], None]) -> list[RunSummary]:
    """Return the runs at `paths` and, newest first, in the folders among them.

    Args:
        paths: runs, folders of their trials, or folders of runs.
        warn: receives a sentence for each run in a folder that cannot be read, and is left out.

    Raises:
        UserError: no run there, or a run that is named cannot be read.
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
    return list(by_directory.values())


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
        return _read(directory)
    except OSError as error:
        raise RunError(f"{directory} cannot be read ({error.strerror}): make it readable") from error


def _read(directory: Path) -> RunSummary:
    """Do what `read` does. Raises OSError, UserError."""
    config = build(read_run_yaml(directory / CONFIG), str(directory / CONFIG), with_env=False)
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
    return RunSummary(
        directory,
        config,
        scoring,
        all_trials,
        rows,
        _state(root, config, meta, _env_steps(rows[all_trials[0].folder])),
        score_of(rows, all_trials, scoring),
        Checkpoints(root / "checkpoints").best_step(),
        versions.stat().st_mtime,
    )


def score_of(rows: dict[str, Rows], all_trials: Sequence[Trial], scoring: Scoring) -> dict[str, Any] | None:
    """Return the environment's score at the end of a run; None before its first episode has ended.

    Returns:
        {"metric", "label", "mode": "min" if less is better, else "max", "of": "selection episodes" or "training
        episodes", "mean", "ci95": half of Student's 95 % interval over seeds, None for one seed}. A sweep has the
        values of its best combination.
    """
    curves = learning_curves.summarise_rows(rows, all_trials, scoring)
    if curves is None:
        return None
    curve = curves["combinations"][learning_curves.best_of(curves)]
    return {
        "metric": scoring.score,
        "label": scoring.label(scoring.score),
        "mode": scoring.score_mode,
        "of": curves["of"],
        "mean": curve["mean"][-1],
        "ci95": curve["ci95"][-1] if curves["seeds"] > 1 else None,
    }


def _env_steps(rows: Rows) -> int:
    return int(next((row["env_steps"] for row in reversed(rows) if row.get("env_steps") is not None), 0))


def _read_newest_meta(root: Path) -> dict[str, Any]:
    """Return the metadata of the newest checkpoint, {} if there is none, or if it cannot be read."""
    try:
        *_, newest = committed_steps(root / "checkpoints")
        return dict(json.loads((root / "checkpoints" / f"{newest:010d}" / META).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _state(root: Path, config: Config, meta: dict[str, Any], env_steps: int) -> str:
    if in_use(root):
        return "running"
    at = meta.get("env_steps")
    finished = isinstance(at, int) and meta.get("finished", at >= config.run.total_env_steps) and env_steps <= at
    return "finished" if finished else "stopped"


def minutes(rows: Rows) -> list[tuple[float, float]]:
    """Return step and minutes of training of each row; rows of older versions count pauses, too."""
    timed = [row for row in rows if row.get("env_steps") is not None and row.get("time/unix") is not None]
    if all(row.get("time/seconds") is not None for row in timed):
        seconds = [row["time/seconds"] for row in timed]
    else:
        seconds = [row["time/unix"] - timed[0]["time/unix"] for row in timed]
    steps = [row["step"] if "step" in row else row["env_steps"] for row in timed]
    return [(step, value / 60) for step, value in zip(steps, seconds, strict=True)]


def differences(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, with the value of each; None where a run has no such setting."""
    settings = [run.config.plain() for run in runs]
    names = dict.fromkeys(name for one in settings for name in one if name != "runs")
    values = {name: [one.get(name) for one in settings] for name in names}
    return {name: per_run for name, per_run in values.items() if any(value != per_run[0] for value in per_run)}


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
        """Return the entry of the legend."""
        others = f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else ""
        return f"{self.name}{others}" + (f", mean of {len(self.seeds)} seeds" if len(self.seeds) > 1 else "")


def series(runs: Sequence[RunSummary]) -> list[Series]:
    """Return the series of all seeds that have rows; one that repeats a seed is in a series of its own."""
    by_settings: dict[tuple[str, int], Series] = {}
    for run in runs:
        for trial in (trial for trial in run.trials if run.rows[trial.folder]):
            settings = {name: value for name, value in trial.config.plain().items() if name not in _ASIDE}
            text, seed = json.dumps(settings, sort_keys=True, default=str), trial.config.run.seed
            repeated = 0
            while (text, repeated) in by_settings and seed in by_settings[text, repeated].seeds:
                repeated += 1
            name = f"{run.name} {trial.combination}".rstrip()
            one = by_settings.setdefault((text, repeated), Series(name, [], {}))
            one.seeds[seed] = run.rows[trial.folder]
            one.runs.extend([run.name] * (run.name not in one.runs))
    return list(by_settings.values())


def metrics_of(all_series: Iterable[Series]) -> list[str]:
    """Return the names of all metrics except counters and clocks, metrics of evaluations first."""
    rows = (row for one in all_series for rows in one.seeds.values() for row in rows)
    names = dict.fromkeys(name for row in rows for name in row if "/" in name)
    metrics = [name for name in names if name not in ("time/unix", "time/seconds")]
    return sorted(metrics, key=lambda name: not name.startswith("eval/"))


def mean_curve(
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
        points, clock = learning_curves.curve(rows, metric), minutes(rows)
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
