"""python -m bench.studies.learning RUN RUN RUN --name coma_quick: several seeds of one configuration as one figure.

Reads what each run wrote: the curve of its selection episodes, or of its training episodes (metrics.jsonl), and its
held-out evaluation (evaluation.json, made by `jaxrl.evaluate`), and writes bench/results/learning_NAME.json and .png.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

from bench.harness import measure
from envs_jax.base import short_repr
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import Parser
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import write_atomically
from jaxrl.evaluation.reports import FILE
from jaxrl.report.writer import read_metrics
from jaxrl.runtime.run_directory import open_run

HUNDRED = 100
_LABEL = 0.08  # height of a label, as a share of the range of the scripted policies


def read(run: str, training: str | None = None) -> dict[str, Any]:
    """Read a run: its seed, curve and held-out scores; with `training` the curve is that metric of training episodes.

    Raises:
        UserError: the run was not evaluated, or its training has no such metric.
    """
    directory = open_run(run)
    path = directory / FILE
    if not path.is_file():
        raise UserError(f"{run} has no {FILE}: evaluate it first with python -m jaxrl.evaluate {run}")
    try:
        evaluation = json.loads(path.read_text())
        score = f"eval/{evaluation['score']}"
        seed = evaluation["settings"]["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged: evaluate the run again with python -m jaxrl.evaluate {run}") from None
    lines = read_metrics(directory)
    timed = [line for line in lines if "time/unix" in line]
    if not timed:
        raise UserError(f"{run} has no rows of training in metrics.jsonl: there is nothing to draw")
    if training is not None:
        curve = in_hundreds(timed, f"rollout/{training}")
        if not curve:
            raise UserError(f"{run} has no hundred training episodes with a '{training}': name one of their metrics")
        return {"seed": seed, "curve": curve, "evaluation": evaluation}
    curve = selection_curve(lines, score)
    return {"seed": seed, "curve": curve, "evaluation": evaluation}


def selection_curve(lines: Sequence[dict[str, Any]], score: str) -> list[dict[str, Any]]:
    """Return the selection episodes' mean `score`, with environment steps and seconds since the first block."""
    timed = [line for line in lines if "time/unix" in line]
    began = timed[0]["time/unix"]
    curve = []
    for line in lines:
        if score in line:  # evaluations lie between the lines of training: take the last one before
            before = [row for row in timed if row["iteration"] <= line["iteration"]]
            last = max(before or timed[:1], key=lambda row: row["iteration"])
            seconds = round(last["time/unix"] - began, 1)
            steps = line.get("env_steps", last["env_steps"])  # older rows of evaluations have none
            curve.append({"env_steps": steps, "seconds": seconds, "score": line[score]})
    return curve


def in_hundreds(timed: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return means over a hundred training episodes or a few more each; a rest of fewer is left out."""
    curve = []
    episodes = 0.0
    total = 0.0
    began = timed[0]["time/unix"]
    for line in (row for row in timed if name in row):
        episodes = episodes + line["episodes"]
        total = total + line["episodes"] * line[name]
        if episodes >= HUNDRED:
            seconds = round(line["time/unix"] - began, 1)
            curve.append({"env_steps": line["env_steps"], "seconds": seconds, "score": total / episodes})
            episodes = 0.0
            total = 0.0
    return curve


def summary(runs: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Summarise several runs; the final scores of every policy come from the held-out episodes."""
    first = runs[0]["evaluation"]
    metric = first["score"]
    others = {}
    if "matches" in first:
        scores = _collect_matches(runs)
    else:
        scores = _collect_policies(runs, metric)
        names = next(iter(first["policies"].values()))
        others = {name: _collect_policies(runs, name) for name in names if name != metric}
    return {
        "kind": "learning",
        "name": name,
        "metric": metric,
        "score_mode": first.get("score_mode", "max"),
        "contest": "matches" in first,
        "episodes": first["episodes"],
        "settings": {key: value for key, value in first["settings"].items() if key not in ("runs", "seed")},
        "versions": first["versions"],
        "seeds": [run["seed"] for run in runs],
        "held_out": scores,
        "other_metrics": others,
        "curves": [run["curve"] for run in runs],
    }


def first_at(curve: Sequence[dict[str, Any]], score: float, mode: str) -> dict[str, Any] | None:
    """Return the first point of a curve that is as good as `score`, or None; small is good in mode "min"."""
    sign = -1.0 if mode == "min" else 1.0
    return next((point for point in curve if sign * point["score"] >= sign * score), None)


def _collect_matches(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Collect games between teams: {"policy against player": [{metric: {"mean", "error", ...}} of each run]}."""
    scores: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for match in run["evaluation"]["matches"]:
            values = {key: value for key, value in match.items() if key not in ("first", "second")}
            scores.setdefault(f"{match['first']} against {match['second']}", []).append(values)
    return scores


def _collect_policies(runs: Sequence[dict[str, Any]], metric: str) -> dict[str, list[dict[str, float]]]:
    """Collect {policy: [mean, deviation and interval of each run at the end of the episode]}."""
    ended = [run["evaluation"]["policies"] for run in runs]
    return {policy: [_last(policies[policy][metric]) for policies in ended] for policy in ended[0]}


def _last(entry: dict[str, Any]) -> dict[str, float]:
    """Return mean, deviation and interval at the end of the episode."""
    return {part: values[-1] for part, values in entry.items() if isinstance(values, list)}


def plot(result: dict[str, Any]) -> Figure:
    """Plot curves against environment steps and against wall time; baselines, which matches do not have, as lines."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    policies = {} if result["contest"] or result["training"] else result["held_out"]
    baselines = {p: s[0]["mean"] for p, s in policies.items() if p not in ("learned", "sampled")}
    for axis, unit, label, scale in (
        (axes[0], "env_steps", "environment steps (thousands)", 1e-3),
        (axes[1], "seconds", "minutes since the run began", 1 / 60),
    ):
        for seed, curve in zip(result["seeds"], result["curves"], strict=True):
            axis.plot([scale * point[unit] for point in curve], [p["score"] for p in curve], label=f"seed {seed}")
        place = -math.inf
        for policy, mean in sorted(baselines.items(), key=lambda item: item[1]):
            axis.axhline(mean, color="grey", linestyle="--", linewidth=0.8)
            place = max(mean, place + _LABEL * (max(baselines.values()) - min(baselines.values())))
            axis.annotate(policy, (1.0, place), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7)
        if (reached := result.get("reached")) and reached.get("name"):
            axis.axhline(reached["score"], color="C3", linestyle=":")
            corner = (1.0, reached["score"])
            axis.annotate(
                reached["name"], corner, xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
            )
        axis.set_xlabel(label)
    label = f"{result['metric']} at the end of an episode"
    if result["training"]:
        label = f"{result['training']}, means of {HUNDRED} training episodes"
    axes[0].set_ylabel(label)
    axes[0].legend()
    return figure


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    flags: argparse.ArgumentParser = Parser(prog="python -m bench.studies.learning", description=__doc__)
    flags.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories of one configuration, with different seeds"
    )
    flags.add_argument("--name", required=True, help="name the figure")
    flags.add_argument("--note", default="", help="store a sentence with the figures, such as what else was running")
    flags.add_argument(
        "--reach", type=float, metavar="SCORE", help="also report when each curve first reaches this score"
    )
    flags.add_argument("--reach_name", default="", metavar="TEXT", help="label the line drawn at that score")
    flags.add_argument("--training", metavar="METRIC", help="draw this metric of training episodes, means of a hundred")
    parsed = flags.parse_args(list(argv))
    if parsed.reach is not None and not math.isfinite(parsed.reach):
        raise UsageError(f"--reach must be a finite score, not {parsed.reach}")
    if Path(parsed.name).name != parsed.name or parsed.name in ("", ".", ".."):
        raise UsageError(
            f"--name {short_repr(parsed.name)} must be a name without folders: the files go to {measure.RESULTS}"
        )
    result = summary([read(run, parsed.training) for run in parsed.runs], parsed.name)
    result |= {"training": parsed.training, "note": parsed.note}
    if parsed.reach is not None:
        # The curve may be any metric of training episodes; only the score says whether small is good.
        mode = "max" if parsed.training not in (None, result["metric"]) else result["score_mode"]
        points = [first_at(curve, parsed.reach, mode) or {} for curve in result["curves"]]
        steps, seconds = ([point.get(unit) for point in points] for unit in ("env_steps", "seconds"))
        median = statistics.median(math.inf if step is None else step for step in steps)
        result["reached"] = {"score": parsed.reach, "env_steps": steps, "median": median if median < math.inf else None}
        if parsed.reach_name:
            result["reached"]["name"] = parsed.reach_name
        result["reached"] |= {"seconds": seconds}
        metric = parsed.training or result["metric"]
        print(f"{metric} {parsed.reach:g} first after {steps} environment steps, median {median:g}; {seconds} seconds")
    stem: Path = measure.RESULTS / f"learning_{parsed.name}"
    measure.RESULTS.mkdir(exist_ok=True)
    write_atomically(stem.with_suffix(".json"), json.dumps(result, indent=1) + "\n")
    plot(result).savefig(stem.with_suffix(".png"), dpi=110)
    print(f"wrote {stem}.json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
