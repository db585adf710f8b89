"""What the trials of a run have learned: a curve for each combination of a sweep, mean and interval over seeds."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs_jax.base import EnvSpec
from jaxrl.common.files import write_atomically
from jaxrl.evaluation.statistics import summarise
from jaxrl.report import tables
from jaxrl.report.writer import read_metrics
from jaxrl.runtime.config import Config
from jaxrl.runtime.trials import Trial, trials

FILE, PLOT = "trials.json", "trials.png"
_POINTS = 50  # of a curve of training episodes


def summary(directory: Path, all_trials: Sequence[Trial], spec: EnvSpec) -> dict[str, Any] | None:
    """Return the curves of a run's trials; None if no episode has ended.

    Returns:
        {"metric", "score_mode": of the environment's score on selection episodes, or of training episodes if there was
        no selection; "seeds": of each combination; "combinations": {name: {"env_steps", and lists "mean" and "ci95"
        over seeds}}}.
    """
    curves: dict[str, list[list[tuple[int, float]]]] = {}
    rows = {trial.folder: read_metrics(directory / trial.folder) for trial in all_trials}
    selected = any(f"eval/{spec.score}" in row for row in next(iter(rows.values())))
    for trial in all_trials:
        found = rows[trial.folder]
        curve = _of_selection(found, spec.score) if selected else _of_training(found, spec.score)
        curves.setdefault(trial.combination, []).append(curve)
    if not all(curve for found in curves.values() for curve in found):
        return None
    combinations = {}
    for name, seeds in curves.items():
        length = min(map(len, seeds))
        values = np.array([[value for _, value in curve[:length]] for curve in seeds]).T
        entry = summarise(values, few=len(seeds) > 1)
        combinations[name] = {"env_steps": [steps for steps, _ in seeds[0][:length]], **entry}
    return {
        "metric": spec.score,
        "of": "selection episodes" if selected else "training episodes",
        "score_mode": spec.score_mode,
        "seeds": len(next(iter(curves.values()))),
        "combinations": combinations,
    }


def _of_selection(rows: Sequence[dict[str, Any]], score: str) -> list[tuple[int, float]]:
    """Return environment steps and score of each evaluation."""
    trained = [row for row in rows if "env_steps" in row]
    scores = [row for row in rows if row.get(f"eval/{score}") is not None]
    if not trained:
        return []
    iterations, steps = ([row[name] for row in trained] for name in ("iteration", "env_steps"))  # of several iterations
    at = np.interp([row["iteration"] for row in scores], iterations, steps)
    return [(round(float(step)), row[f"eval/{score}"]) for step, row in zip(at, scores, strict=True)]


def _of_training(rows: Sequence[dict[str, Any]], score: str) -> list[tuple[int, float]]:
    """Return environment steps and score of the training episodes, means over parts of the run."""
    trained = [row for row in rows if "env_steps" in row]
    curve = []
    for part in np.array_split(np.array(trained, object), min(_POINTS, len(trained))) if trained else ():
        ended = [row for row in part if row.get("episodes") and row.get(f"episode/{score}") is not None]
        if ended:
            weights = [row["episodes"] for row in ended]
            mean = float(np.average([row[f"episode/{score}"] for row in ended], weights=weights))
            curve.append((part[-1]["env_steps"], mean))
    return curve


def best(directory: Path, config: Config) -> str:
    """Return the combination of a run with the best last score, the first one if no episode has ended."""
    path = directory / FILE
    return _best(json.loads(path.read_text())) if path.is_file() else trials(config)[0].combination


def _best(found: dict[str, Any]) -> str:
    sign = -1 if found["score_mode"] == "min" else 1
    last = {name: curve["mean"][-1] for name, curve in found["combinations"].items()}
    return max(last, key=lambda name: -math.inf if last[name] is None else sign * last[name])


def table(found: dict[str, Any], width: int) -> list[Any]:
    """Return lines of one row per combination, with the last score and the best one on the way."""
    pick = min if found["score_mode"] == "min" else max
    rows = []
    for name, curve in found["combinations"].items():
        means = [mean for mean in curve["mean"] if mean is not None]
        half = f" ±{curve['ci95'][-1]:.4g}" if found["seeds"] > 1 and curve["ci95"][-1] is not None else ""
        last = "not finite" if curve["mean"][-1] is None else f"{curve['mean'][-1]:.4g}{half}"
        cells = [last, f"{pick(means):.4g}" if means else ""]
        rows.append(tables.Row(name or "all", cells, "bold cyan" if name == _best(found) else ""))
    seeds = f", {found['seeds']} seeds" if found["seeds"] > 1 else ""
    return tables.lines(f"{found['metric']}, {found['of']}{seeds}", ["at the end", "best"], rows, width)


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw the curves of all combinations with their intervals, as PNG."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(7.5, 4.5), dpi=110)
    axes = figure.subplots()
    for name, curve in found["combinations"].items():
        steps, mean, half = (np.array(curve[part], float) for part in ("env_steps", "mean", "ci95"))
        axes.plot(steps, mean, label=name or "mean over seeds")
        if found["seeds"] > 1:
            axes.fill_between(steps, mean - half, mean + half, alpha=0.2, linewidth=0)
    axes.set_xlabel("environment steps")
    axes.set_ylabel(f"{found['metric']}, {found['of']}")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def write(found: dict[str, Any], directory: Path) -> None:
    """Write trials.json and trials.png."""
    write_atomically(directory / FILE, json.dumps(found, indent=1) + "\n")
    plot(found, directory / PLOT)
