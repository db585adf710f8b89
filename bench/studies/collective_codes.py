"""python -m bench.studies.collective_codes RUN --name arms: how well task codes of a collective identify tasks.

Looks for the nearest training window of each held-out window, by the cosine of their codes, and reports how often it is
of the same task; draws held-out codes along their two principal axes, and the errors of the transformer over its
updates. Writes bench/results/collective_codes_NAME.json and .png."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import jax
import numpy as np
from matplotlib.figure import Figure

from bench.harness import measure
from jaxrl.algos.collective import dataset
from jaxrl.algos.collective.algorithm import Collective
from jaxrl.algos.collective.losses import neighbour_accuracy
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import parse_int
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import write_atomically
from jaxrl.report.writer import read_metrics
from jaxrl.runtime import run_directory
from jaxrl.runtime.load import load_state

KIND = "collective_codes"
CURVES = ("reconstruction", "held_out_reconstruction", "contrast", "held_out_contrast")


def principal(codes: np.ndarray, axes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Project codes [N, c] on their principal axes [N, axes]; return also the share of the variance of each axis."""
    centred = codes - codes.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    return (left * sizes)[:, :axes], (sizes**2 / np.sum(sizes**2))[:axes]


def study(tasks: Sequence[str], windows: dict[str, np.ndarray], most: int, seed: int) -> dict[str, Any]:
    """Return accuracies and projections of up to `most` training and held-out windows, see `dataset.coded_windows`.

    Raises:
        UserError: one of the two kinds has no windows.
    """
    rng, parts = np.random.default_rng(seed), []
    for held_out in (False, True):
        rows = np.flatnonzero(windows["held_out"] == held_out)
        rows = rng.permutation(rows)[:most]
        codes = windows["code"][rows]
        codes = codes / np.maximum(np.linalg.norm(codes, axis=1, keepdims=True), 1e-6)
        parts.append((codes, windows["task"][rows]))
    (known, known_task), (asked, task) = parts
    if not len(known) or not len(asked):
        raise UserError("the run holds no training windows or no held-out ones: collect more episodes")

    compiled = jax.jit(neighbour_accuracy)

    def accuracy(chosen: np.ndarray) -> float:
        weights = np.ones(len(known), np.float32), chosen.astype(np.float32)
        return round(float(compiled(known, known_task, asked, task, *weights)), 4)

    places, shares = principal(asked)
    return {
        "tasks": list(tasks),
        "windows": {"training": len(known), "held_out": len(asked)},
        "accuracy": accuracy(np.ones(len(task), bool)),
        "accuracy_by_task": {name: accuracy(task == k) for k, name in enumerate(tasks) if (task == k).any()},
        "largest_task": round(float(np.bincount(task).max() / len(task)), 4),
        "variance": [round(float(share), 4) for share in shares],
        "places": np.round(places, 4).tolist(),
        "place_tasks": task.tolist(),
    }


def curves(directory: Path) -> dict[str, list[float]]:
    """Read the errors of the transformer's updates, and of held-out windows, from the run's lines."""
    lines = [line for line in read_metrics(directory) if "train/contrast" in line]
    found: dict[str, list[float]] = {"updates": []}
    for line in lines:
        found["updates"].append(line["updates"] - lines[0]["updates"])
        for name in CURVES:
            found.setdefault(name, []).append(round(line[f"train/{name}"], 4))
    return found


def plot(result: dict[str, Any]) -> Figure:
    """Plot the held-out codes, a colour for each task, and the transformer's errors."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes, errors = figure.subplots(1, 2)
    for name in CURVES:
        errors.plot(result["curves"]["updates"], result["curves"][name], label=name.replace("_", " "), linewidth=0.8)
    errors.set_yscale("log")
    errors.set_xlabel("updates of the transformer")
    errors.legend()
    places, task = np.array(result["places"]), np.array(result["place_tasks"])
    for index, name in enumerate(result["tasks"]):
        own = places[task == index]
        axes.scatter(own[:, 0], own[:, 1], s=4, alpha=0.5, label=name)
    first, second = (f"principal axis {k + 1} ({100 * share:.0f} %)" for k, share in enumerate(result["variance"]))
    axes.set_xlabel(first)
    axes.set_ylabel(second)
    axes.set_title(f"task codes of {len(task):,} held-out windows, {100 * result['accuracy']:.1f} % found")
    axes.legend(markerscale=3)
    return figure


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    flags = measure.parser("python -m bench.studies.collective_codes", __doc__)
    flags.add_argument("run", metavar="RUN", help="directory of a run of collective")
    flags.add_argument("--name", required=True, help="name of the figure")
    flags.add_argument(
        "--windows", default="4000", metavar="N", help="maximum number of windows of each kind (default: 4000)"
    )
    flags.add_argument("--seed", default="0", metavar="N", help="seed of the choice of windows (default: 0)")
    flags.add_argument("--results", default=str(measure.RESULTS), metavar="DIR", help="folder of both files")
    asked = flags.parse_args(list(argv))
    most, seed = parse_int(asked.windows, "--windows", 2, 2**20), parse_int(asked.seed, "--seed", 0, 2**31)
    algo, state, step = load_state(asked.run)
    if not isinstance(algo, Collective):
        raise UsageError(f"{asked.run} was trained with {type(algo).__name__.lower()}: name a run of collective")
    if int(state.replicated.coded) < algo.timing.rows:
        raise UserError(f"{asked.run} has not computed its codes yet: continue with --resume {asked.run}")
    result = {"kind": KIND, "name": asked.name, "run": asked.run, "checkpoint": step, "seed": seed}
    directory = run_directory.open_run(asked.run)
    result |= {"versions": run_directory.versions(), "curves": curves(directory)}
    result |= study(algo.tasks, dataset.coded_windows(state.sharded, algo.context_length), most, seed)
    folder = Path(asked.results)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{KIND}_{asked.name}"
    write_atomically(stem.with_suffix(".json"), json.dumps(result) + "\n")
    plot(result).savefig(stem.with_suffix(".png"), dpi=110)
    print(f"{100 * result['accuracy']:.1f} % of {result['windows']['held_out']:,} held-out windows find their task")
    for name, share in result["accuracy_by_task"].items():
        print(f"  {name}: {100 * share:.1f} %")
    print(f"wrote {stem}.json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
