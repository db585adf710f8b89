"""What the trials of a run have learned: a curve for each combination of a sweep, mean and interval over seeds."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.common.files import write_atomically
from jaxrl.evaluation.statistics import summarise
from jaxrl.report.writer import FAILED, is_evaluation, read_metrics
from jaxrl.runtime.config import Config
from jaxrl.runtime.run_directory import versions
from jaxrl.runtime.saved_run import read_training_run
from jaxrl.runtime.scoring import Scoring
from jaxrl.runtime.trials import Trial, describe_failed, trials

FILE = "trials.json"
TABLE = "trials.csv"
PLOT = "trials.png"
_POINTS = 50  # the most that a curve of training episodes has


def summarise_rows(
    rows: Mapping[str, Sequence[dict[str, Any]]], all_trials: Sequence[Trial], scoring: Scoring
) -> dict[str, Any] | None:
    """Return the curves of a run's trials from the rows of each trial's folder; None if no episode has ended.

    Returns:
        {"metric", "score_mode": the environment's score, on selection episodes, or on training episodes if there was
        no selection; "seeds": their number in each combination; "combinations": {name: {"env_steps", and lists "mean"
        and "ci95" over seeds}}; "trials": [{"combination", "seed", "env_steps", "last", "best"}], the score of each at
        its end and the best one on the way}. Combinations are means over the seeds that have not failed, [None] without
        any; trials that have failed have no scores, and their iteration under "failed".
    """
    curves: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    selected = any(f"eval/{scoring.score}" in row for trial_rows in rows.values() for row in trial_rows)
    metric = f"{'eval' if selected else 'rollout'}/{scoring.score}"
    pick = min if scoring.score_mode == "min" else max
    each: list[dict[str, Any]] = []
    for trial in all_trials:
        entry = {"combination": trial.combination, "seed": trial.config.run.seed}
        seeds = curves.setdefault(trial.combination, [])
        if (iteration := failed_at(rows[trial.folder])) is not None:
            last_steps = count_env_steps(rows[trial.folder])
            each.append(entry | {"env_steps": last_steps, "last": None, "best": None, "failed": iteration})
            continue
        points = extract_curve(rows[trial.folder], metric)
        if not points:
            return None
        steps, values = zip(*points, strict=True)
        seeds.append((np.array(steps), np.array(values, np.float64)))
        each.append(entry | {"env_steps": steps[-1], "last": values[-1], "best": pick(values)})
    combinations = {}
    for name, seeds in curves.items():
        average = average_curves(seeds) or average_curves([(np.array([0]), np.array([math.nan]))])
        assert average is not None
        combinations[name] = {"env_steps": average.pop("x"), **average}
    return {
        "metric": scoring.score,
        "of": "selection episodes" if selected else "training episodes",
        "score_mode": scoring.score_mode,
        "seeds": sum(trial.combination == all_trials[0].combination for trial in all_trials),
        "combinations": combinations,
        "trials": each,
    }


def failed_at(rows: Sequence[dict[str, Any]]) -> int | None:
    """Return the iteration at which a trial with these rows failed, None if it did not."""
    return rows[-1]["iteration"] if rows and FAILED in rows[-1] else None


def count_env_steps(rows: Sequence[dict[str, Any]]) -> int:
    """Return the environment steps of the last row that has them, 0 without one."""
    return int(next((row["env_steps"] for row in reversed(rows) if row.get("env_steps") is not None), 0))


def extract_curve(rows: Sequence[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric in rows of metrics.jsonl: "eval/..." at each evaluation, others as means.

    Means are over parts of the run; metrics of training episodes, "rollout/...", are averaged over the episodes of a
    part. Steps are environment steps; an iteration of a phase without any counts as one (see `Position.axis`).
    """
    trained = [row for row in rows if "env_steps" in row and not is_evaluation(row)]
    if not trained:
        return []
    steps = [row.get("step", row["env_steps"]) for row in trained]
    if metric.startswith("eval/"):
        scores = [row for row in rows if row.get(metric) is not None]
        iterations = [row["iteration"] for row in trained]  # rows may be of several iterations
        at = np.interp([row["iteration"] for row in scores], iterations, steps)
        return [(row.get("step", round(float(step))), row[metric]) for step, row in zip(at, scores, strict=True)]
    points = []
    weight = "episodes" if metric.startswith("rollout/") else ""
    for part in np.array_split(np.arange(len(trained)), min(_POINTS, len(trained))):
        measured = [trained[k] for k in part if trained[k].get(metric) is not None]
        weights = [row.get(weight, 1) or 0 for row in measured]
        if any(weights):
            points.append((steps[part[-1]], float(np.average([row[metric] for row in measured], weights=weights))))
    return points


def average_curves(
    curves: Sequence[tuple[np.ndarray, np.ndarray]], max_points: int | None = None
) -> dict[str, Any] | None:
    """Return the mean of curves and half of Student's 95 % interval, at most at `max_points` points.

    Where curves have different points, they are interpolated at the points of the one that ends first.

    Args:
        curves: (x, y) of each, [points], x in ascending order.
        max_points: None for all.

    Returns:
        {"x": list, and the lists of `summarise`}; None without a common range.
    """
    if not curves:
        return None
    first = max(x[0] for x, _ in curves)
    last = min(x[-1] for x, _ in curves)
    x = min((x for x, _ in curves), key=lambda x: x[-1])
    x = x[(x >= first) & (x <= last)]
    if not len(x):
        return None
    if max_points is not None and len(x) > max_points:
        x = x[np.unique(np.linspace(0, len(x) - 1, max_points).round().astype(int))]
    values = np.stack([np.interp(x, *curve) for curve in curves], axis=1)
    return {"x": x.tolist(), **summarise(values, share=False)}


def best(directory: Path, config: Config) -> str:
    """Return the combination of a run with the best last score, the first one if no episode has ended."""
    path = directory / FILE
    return find_best(json.loads(path.read_text())) if path.is_file() else trials(config)[0].combination


def find_best(curves: dict[str, Any]) -> str:
    """Return the combination of a summary with the best last score."""
    sign = -1 if curves["score_mode"] == "min" else 1
    last = {name: curve["mean"][-1] for name, curve in curves["combinations"].items()}
    return max(last, key=lambda name: -math.inf if last[name] is None else sign * last[name])


def report(directory: Path, say: Callable[[str], None]) -> None:
    """Write the learning curves of a run's trials, and say them line by line; do nothing if it has a single trial."""
    config = read_training_run(directory)[1]
    all_trials = trials(config)
    scoring = Scoring.read(directory)
    if len(all_trials) == 1:
        return
    rows = {trial.folder: read_metrics(directory / trial.folder) for trial in all_trials}
    curves = summarise_rows(rows, all_trials, scoring)
    if curves is None:
        return
    for line in describe_curves(curves):
        say(line)
    try:
        write(curves | {"settings": config.plain(), "versions": versions()}, directory)
        say(f"learning curves: {directory / PLOT}")
    except OSError as error:
        say(f"warning: no learning curves under {directory} ({error.strerror}): make it writable, then resume")


def describe_curves(curves: dict[str, Any]) -> list[str]:
    """Return a heading, and a line for each combination: the last score, and the best one on the way."""
    pick = min if curves["score_mode"] == "min" else max
    width = max(map(len, (*curves["combinations"], "all")))
    seeds = f", {curves['seeds']} seeds" if curves["seeds"] > 1 else ""
    text_lines = [f"{curves['metric']} at the end, {curves['of']}{seeds}:"]
    for name, curve in curves["combinations"].items():
        means = [mean for mean in curve["mean"] if mean is not None]
        half = f" ±{curve['ci95'][-1]:.4g}" if curves["seeds"] > 1 and curve["ci95"][-1] is not None else ""
        last = "not finite" if curve["mean"][-1] is None else f"{curve['mean'][-1]:.4g}{half}"
        lost = [trial for trial in curves["trials"] if trial["combination"] == name and "failed" in trial]
        failed = {f"seed {trial['seed']}": trial["failed"] for trial in lost}
        if len(failed) == curves["seeds"]:
            last = "failed"
        best_mean = f", best {pick(means):.4g}" if means else ""
        mark = "*" if name == find_best(curves) and len(curves["combinations"]) > 1 else " "
        left_out = f" ({describe_failed(failed)}: left out)" if failed else ""
        text_lines.append(f"{mark} {name or 'all':{width}}  {last}{best_mean}{left_out}")
    return text_lines


def format_csv(curves: dict[str, Any]) -> str:
    """Return a line for each trial: its swept settings, seed, environment steps, last and best score, its failure."""
    rows = []
    has_failed = any("failed" in trial for trial in curves["trials"])
    for trial in curves["trials"]:
        swept = dict(part.split("=") for part in trial["combination"].split(",") if part)
        scores = {f"{curves['metric']} at the end": trial["last"], f"best {curves['metric']}": trial["best"]}
        failed = {"failed at iteration": trial.get("failed")} if has_failed else {}
        rows.append(swept | {"seed": trial["seed"], "env_steps": trial["env_steps"]} | scores | failed)
    writer = csv.DictWriter(text := io.StringIO(), list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write(curves: dict[str, Any], directory: Path) -> None:
    """Write trials.json, trials.csv with a row for each combination and seed, and trials.png. Raises OSError."""
    from matplotlib.figure import Figure  # slow to import

    write_atomically(directory / FILE, json.dumps(curves, indent=1) + "\n")
    write_atomically(directory / TABLE, format_csv(curves))
    figure = Figure(figsize=(7.5, 4.5), dpi=110)
    axes = figure.subplots()
    axes.set_title(describe_plot(curves), fontsize="medium", loc="left")
    for name, curve in curves["combinations"].items():
        half = curve["ci95"] if curves["seeds"] > 1 else None
        draw(axes, curve["env_steps"], curve["mean"], half, name or "mean over seeds")
    axes.set_xlabel("environment steps")
    axes.set_ylabel(f"{curves['metric']}, {curves['of']}")
    axes.spines[["top", "right"]].set_visible(False)
    add_legend(axes)
    shorten_numbers(axes)
    take_literally(figure)
    figure.savefig(directory / PLOT, bbox_inches="tight")


def describe_plot(curves: dict[str, Any]) -> str:
    """Return the title of a summary's plot: what the lines are, and the bands around them."""
    better = {"min": "lower", "max": "higher"}[curves["score_mode"]]
    seeds = curves["seeds"]
    lines = f"{curves['metric']} of {len(curves['trials'])} trials, {better} is better"
    return lines + (f"\nlines: means over {seeds} seeds; bands: their 95 % intervals" if seeds > 1 else "")


def add_legend(axes: Any, **look: Any) -> None:
    """Add a legend of all curves, also of those whose label begins with "_", which matplotlib leaves out."""
    lines = axes.get_lines()
    legend = axes.legend(lines, [str(place) for place in range(len(lines))], **look)
    for text, line in zip(legend.get_texts(), lines, strict=True):
        text.set_text(line.get_label())


def shorten_numbers(axes: Any) -> None:
    """Let an axis of environment steps or minutes say "20 k" for 20,000."""
    from matplotlib.ticker import EngFormatter  # slow to import

    low, high = axes.get_xlim()
    if max(abs(low), abs(high)) >= 1000:  # below, it would write thousandths as "m"
        axes.xaxis.set_major_formatter(EngFormatter())


def take_literally(figure: Any) -> None:
    """Let a figure show names of runs and metrics as they are; matplotlib takes "$...$" for a formula."""
    from matplotlib.text import Text  # slow to import

    for text in figure.findobj(Text):
        text.set_parse_math(False)


def draw(axes: Any, x: Sequence[float], mean: Sequence[float | None], half: Any, label: str) -> None:
    """Draw a curve, and a band of this half width if there is one."""
    (line,) = axes.plot(x, np.array(mean, float), label=label, marker="." if len(x) == 1 else "")
    if half is not None:
        low, high = np.array(mean, float) - np.array(half, float), np.array(mean, float) + np.array(half, float)
        axes.fill_between(x, low, high, alpha=0.2, linewidth=0, color=line.get_color())
