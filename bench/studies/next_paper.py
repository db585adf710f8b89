"""python -m bench.studies.next_paper: seven methods under lost and delayed messages, with teams of several sizes.

Trains each method of next_paper.yaml with several seeds at once, then flies the same held-out missions with all of them
in every condition. --methods names methods or ablations, --set changes settings of the environment (q=57). Runs lie in
one folder, and finished runs are not trained again: an interrupted study goes on. The result is a JSON file, tables of
it (.md) and a figure (.png); every mission is a row of a CSV file next to each run.
--add puts further methods into a result. --draw RESULT.json makes the tables and the figure of a result.
"""

import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from matplotlib.figure import Figure

import envs_jax
import jaxrl
from bench.harness import measure
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError, UserError, usage_errors
from jaxrl.common.files import write_atomically
from jaxrl.common.yaml_files import read_mapping
from jaxrl.evaluation.policies import policy_key
from jaxrl.evaluation.statistics import estimate_difference
from jaxrl.runtime.config import build

KIND = "next_paper"
PLAN = Path(__file__).with_suffix(".yaml")
# Metrics in the result, with their headings; the CSV files have all
METRICS = {"entropy": "entropy", "f1": "F1", "rmse": "RMSE", "path_length": "path, m"}
REFERENCES = ("mappo", "risk")  # the first of them that is there is what the others are compared with
UNSEEN = ("drop 0.5", "delay 5", "drop 0.5 delay 5")  # channels that training has not had
AXES = {"drop": "share of messages dropped", "delay": "delay, steps", "team": "UAVs"}  # in conditions "NAME NUMBER"


def method_settings(plan: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the settings of a run, "algo" among them. Raises UsageError for an unknown method."""
    if name in plan["ablations"]:
        return method_settings(plan, "risk") | plan["ablations"][name]
    if name not in plan["methods"]:
        known = ", ".join([*plan["methods"], *plan["ablations"]])
        raise UsageError(f"--methods has the unknown method '{name}': choose from {known}")
    method = plan["methods"][name]
    return plan["env"] | plan["common"] | plan["algorithms"][method["algo"]] | method


def run_command(module: str, words: Sequence[str], log: Path) -> None:
    """Run a command of jaxrl. Raises UserError if it fails."""
    with log.open("a") as stream:
        if subprocess.run([sys.executable, "-m", f"jaxrl.{module}", *words], stdout=stream, stderr=stream).returncode:
            raise UserError(f"jaxrl.{module} failed: see {log}")


def train(folder: Path, settings: dict[str, Any], missions: int, seeds: int) -> Path:
    """Train the only run of a folder, or go on with it, or return it if it is done; "training.json" says which.

    Raises UserError: the run has other settings, or fails.
    """
    settings = {"env": "coverage"} | settings | {"total_episodes": missions, "num_seeds": seeds, "eval_every": 0}
    words = [word for name, value in settings.items() for word in (f"--{name}", _flag(value))]
    file = folder / "training.json"
    record: dict[str, Any] = {"flags": words, "seconds": 0.0, "finished": False}
    if file.is_file():
        record = json.loads(file.read_text())
    if record["flags"] != words:
        raise UserError(f"{folder} was trained with other settings: choose another folder with --runs")
    if not record["finished"]:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(record))
        preset = folder / "algorithm.yaml"  # or the preset of the algorithm would add settings, of the environment too
        write_atomically(preset, json.dumps({"algo": settings["algo"], "env": settings["env"]}))
        neutral = ["--config", str(preset)]
        unfinished = [word for run in folder.glob("*/0001") for word in ("--resume", str(run))]
        began = time.monotonic()
        try:
            run_command("train", unfinished or [*neutral, *words, "--runs", str(folder)], folder / "log.txt")
            record["finished"] = True
        finally:
            record["seconds"] += time.monotonic() - began
            write_atomically(file, json.dumps(record))
    (run,) = folder.glob("*/0001")
    return run


def _flag(value: Any) -> str:
    """Return a value as text of a flag."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()


def evaluate(run: Path, folder: Path, conditions: Path, missions: int, policies: Sequence[str]) -> dict[str, Any]:
    """Fly the conditions with a run's policies, unless that has been done, and return the report's conditions."""
    report = folder / f"conditions_{missions}.json"
    needed = {(name, policy_key(policy)) for name in read_mapping(conditions) for policy in policies}
    if not report.is_file() or needed - _read_pairs(report):
        words = ["--conditions", str(conditions), "--episodes", str(missions), "--policy", ",".join(policies)]
        words += ["--csv", str(report.with_suffix(".csv")), "--json", str(report), "--bound", "0.5"]
        run_command("evaluate", [str(run), *words], folder / "log.txt")
    result: dict[str, Any] = json.loads(report.read_text())["conditions"]
    return result


def read_missions(folder: Path, missions: int) -> dict[str, np.ndarray]:
    """Return the entropy float[S, N] at the end of each mission of a method's policy, by condition."""
    rows: dict[str, dict[tuple[int, int], float]] = {}
    with (folder / f"conditions_{missions}.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            if row["policy"] == "greedy":
                place = int(row["seed"]), int(row["episode"])
                rows.setdefault(row["condition"], {})[place] = float(row["entropy"])
    return {
        condition: np.array([values[place] for place in sorted(values)]).reshape(-1, missions)
        for condition, values in rows.items()
    }


def compare(scores: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return differences on the same missions by condition, with Cohen's d of the missions, and the gap to unseen ones.

    The gap is the mean entropy over the channels of UNSEEN less that over the others, all for teams of four.
    """
    differences: dict[str, Any] = {}
    for condition, values in scores.items():
        change = (values - reference[condition]).mean(0)
        effect = float(change.mean() / change.std(ddof=1)) if change.any() else 0.0
        differences[condition] = {**estimate_difference(values, reference[condition]), "effect": effect}
    means = {condition: values.mean() for condition, values in scores.items() if not condition.startswith("team")}
    unseen = [mean for condition, mean in means.items() if condition in UNSEEN]
    seen = [mean for condition, mean in means.items() if condition not in UNSEEN]
    return {"differences": differences, "gap": float(np.mean(unseen) - np.mean(seen))}


def describe(run: Path) -> dict[str, Any]:
    """Return the number of the actor's parameters, and the milliseconds of a team's decision, median of 50."""
    policy = jaxrl.load(run / "seed_0")
    timestep = jax.jit(policy.env.reset)(jax.random.key(0))[1]
    action, carry = policy(timestep)
    seconds = []
    for _ in range(50):
        began = time.perf_counter()
        action, carry = policy(timestep, carry=carry)
        jax.block_until_ready(action)
        seconds.append(time.perf_counter() - began)
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(policy.params)),
        "decision_ms": 1000 * statistics.median(seconds),
    }


def _read_pairs(report: Path) -> set[tuple[str, str]]:
    """Return the pairs of condition and policy in a report."""
    conditions = json.loads(report.read_text())["conditions"]
    return {(name, policy) for name, entry in conditions.items() for policy in entry["policies"]}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown: the entropy in each condition, and its worst tenth."""
    names = list(result["methods"])
    conditions = list(result["conditions"])
    seeds = result["seeds"]
    missions = result["missions"]
    lines = [
        f"Entropy in the region of interest at a mission's end (smaller is better): means over {seeds} seeds of "
        f"{result['training_missions']:,} training missions and {missions} held-out missions each, ± half of the 95 % "
        "interval over seeds (of scripted policies over missions); in brackets the mean of the worst tenth.",
        "",
        "| condition | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for condition in conditions:
        cells = []
        for name in names:
            score = result["methods"][name]["conditions"][condition]["entropy"]
            width = "" if score.get("ci95") is None else f" ± {score['ci95']:.3f}"
            cells.append(f"{score['mean']:.3f}{width} ({score['tail']:.3f})")
        lines.append(f"| {condition} | " + " | ".join(cells) + " |")
    tables = difference_table(result) + metric_table(result) + cost_table(result)
    return "\n".join([*lines, "", *tables, ""])


def difference_table(result: dict[str, Any]) -> list[str]:
    """Return lines of Markdown: each learned method less the reference, in each condition."""
    compared = {
        name: method["differences"]
        for name, method in result["methods"].items()
        if "differences" in method and name != result["reference"]
    }
    if not compared:
        return []
    lines = [
        f"Entropy less that of {result['reference']} on the same missions (below 0 is better), with the 95 % interval "
        "over seeds and missions, and Cohen's d of the missions:",
        "",
        "| condition | " + " | ".join(compared) + " |",
        "|---" * (len(compared) + 1) + "|",
    ]
    for condition in result["conditions"]:
        cells = []
        for differences in compared.values():
            entry = differences[condition]
            ends = "" if entry["low"] is None else f" ({entry['low']:+.3f} to {entry['high']:+.3f})"
            cells.append(f"{entry['mean']:+.3f}{ends}, {entry['effect']:+.1f}")
        lines.append(f"| {condition} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def metric_table(result: dict[str, Any]) -> list[str]:
    """Return lines of Markdown: the means of all metrics where nothing is lost or late."""
    first = result["conditions"][0]
    scores = {name: method["conditions"][first] for name, method in result["methods"].items()}
    metrics = [metric for metric in METRICS if all(metric in values for values in scores.values())]
    lines = [f"Means in condition {first}:", "", "| method | " + " | ".join(METRICS[m] for m in metrics) + " |"]
    lines.append("|---" * (len(metrics) + 1) + "|")
    lines += [
        f"| {n} | " + " | ".join(f"{values[m]['mean']:.3g}" for m in metrics) + " |" for n, values in scores.items()
    ]
    return [*lines, ""]


def cost_table(result: dict[str, Any]) -> list[str]:
    """Return lines of Markdown: what each learned method costs, and how it does where training has not been."""
    lines = [
        "| method | minutes of training, all seeds | parameters of the actor | decision of a team, ms | gap |",
        "|---|---|---|---|---|",
    ]
    for name, method in result["methods"].items():
        if method["seconds"]:
            gap = f"{method['gap']:+.3f}" if "gap" in method else ""
            cost = f"{method['seconds'] / 60:.1f} | {method['parameters']:,} | {method['decision_ms']:.1f}"
            lines.append(f"| {name} | {cost} | {gap} |")
    gap = f"Gap: mean entropy in {', '.join(UNSEEN)} less that in the other conditions with four UAVs."
    notes = "; ".join(result["notes"])
    return [*lines, "", gap, *(["", f"Notes: {notes}."] if notes else [])]


def plot(result: dict[str, Any]) -> Figure:
    """Plot the entropy of each method over losses, delays and team sizes."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, len(AXES), sharey=True)
    for axis, (word, label) in zip(axes, AXES.items(), strict=True):
        for name, method in result["methods"].items():
            points = [(0.0, "drop 0.0")] if word == "delay" else [(4.0, "drop 0.0")] if word == "team" else []
            points += [
                (float(c.split()[1]), c) for c in result["conditions"] if c.split()[0] == word and c.count(" ") == 1
            ]
            scores = sorted((x, method["conditions"][c]["entropy"]["mean"]) for x, c in points)
            style = "--" if not method["seconds"] else "-"
            axis.plot(*zip(*scores, strict=True), style, marker=".", label=name)
        axis.set_xlabel(label)
    axes[0].set_ylabel("entropy at a mission's end")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure


def extend(previous: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return the previous result for more methods. Raises UsageError: the new one has other seeds or missions."""
    for name in ("seeds", "training_missions", "missions", "conditions"):
        if previous[name] != result[name]:
            raise UsageError(f"--add: the result has other {name.replace('_', ' ')}: give the same, or another --out")
    command = f"{previous['command']}; {result['command']}"
    return previous | {"command": command, "settings": previous["settings"] | result["settings"]}


def finish(result: dict[str, Any], path: Path) -> None:
    """Write a result, its table and its figure."""
    measure.write(result, path)
    write_atomically(path.with_suffix(".md"), table(result))
    plot(result).savefig(path.with_suffix(".png"), dpi=120)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    plan = read_mapping(PLAN)
    parser = measure.parser(f"python -m bench.studies.{KIND}", __doc__)
    add = parser.add_argument
    add("--methods", default=",".join(plan["methods"]), metavar="A,B", help="methods (default: all, no ablations)")
    add("--seeds", default="5", metavar="N", help="train the seeds 0 to N - 1 (default: 5)")
    add("--missions", default=str(plan["missions"]), metavar="N", help="train for N missions per seed")
    add("--test_missions", default="200", metavar="N", help="fly N held-out missions (default: 200)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting of the environment")
    add("--runs", default="runs/next_paper", metavar="DIR", help="folder of the runs (default: runs/next_paper)")
    add("--out", metavar="FILE", help="JSON file of the result (default: a new one under bench/results/)")
    add("--add", action="store_true", help="add the methods to the result --out, without its baselines")
    add("--draw", metavar="RESULT.json", help="only make table and figure of a result")
    parsed = parser.parse_args(list(argv))
    if parsed.draw:
        finish(measure.read(Path(parsed.draw)), Path(parsed.draw))
        return 0
    seeds = measure.parse_int(parsed.seeds, "--seeds", 2, 100)
    missions = measure.parse_int(parsed.missions, "--missions", 64, 10**9)
    test_missions = measure.parse_int(parsed.test_missions, "--test_missions", 2, 10**6)
    changes = {}
    for text in parsed.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text} has no value: write {text}=VALUE")
        changes[name] = value
    if parsed.add and not parsed.out:
        raise UsageError("--add needs the result that gets further methods: --out FILE")
    names = parsed.methods.split(",")
    root = Path(parsed.runs)
    path = measure.output(parsed.out, KIND)
    settings = {name: method_settings(plan, name) | changes for name in names}
    for values in settings.values():
        typed = {setting: yaml.safe_load(value) for setting, value in changes.items()}
        config = build({"env": "coverage"} | values | typed, "--set")
        with usage_errors():
            envs_jax.make("coverage", **config.env_settings)
    root.mkdir(parents=True, exist_ok=True)
    conditions = root / "conditions.yaml"
    write_atomically(conditions, "".join(f"{json.dumps(k)}: {json.dumps(v)}\n" for k, v in plan["conditions"].items()))
    result = measure.header(f"studies.{KIND}", argv, quick=False)
    result |= {"seeds": seeds, "training_missions": missions, "missions": test_missions, "settings": settings}
    reference = next((name for name in REFERENCES if name in names), names[0])
    result |= {"conditions": list(plan["conditions"]), "reference": reference, "methods": {}}
    if parsed.add:
        result = extend(measure.read(path), result)
        reference = result["reference"]
    entropies: dict[str, dict[str, np.ndarray]] = {}
    for name in names:
        folder = root / name
        run = train(folder, settings[name], missions, seeds)
        baselines = [] if result["methods"] else plan["baselines"]
        report = evaluate(run, folder, conditions, test_missions, ["greedy", *baselines])
        seconds = json.loads((folder / "training.json").read_text())["seconds"]
        entropies[name] = read_missions(folder, test_missions)
        for policy, key in (("learned", name), *((baseline, baseline) for baseline in baselines)):
            ends = {condition: entry["policies"][policy] for condition, entry in report.items()}
            scores = {condition: {metric: end[metric] for metric in METRICS} for condition, end in ends.items()}
            result["methods"][key] = {"seconds": seconds if policy == "learned" else 0, "conditions": scores}
        result["methods"][name] |= describe(run)
        if reference in entropies:
            for one, values in entropies.items():
                result["methods"][one] |= compare(values, entropies[reference])
        mean = np.mean([scores["entropy"]["mean"] for scores in result["methods"][name]["conditions"].values()])
        measure.say(f"{name}: mean entropy {mean:.3f} over all conditions, {seconds:.0f} s of training")
        finish(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
