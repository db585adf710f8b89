"""python -m bench.studies.small_to_large --small 15360 --large 5120: COMA on small maps, then on the paper's maps.

Trains `coma_paper_small` for so many missions, then `coma_paper_cpu` from its weights, once per seed, as the commands
that a user would type. Seconds count from the first command to the end of the second, with imports and compiling.
Schedules end after three quarters of the missions. Learned and scripted policies fly the same held-out missions.
--draw RESULT.json draws the selection evaluations of a result.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.harness import measure
from bench.studies.learning import selection_curve
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.process import speed_up_start
from jaxrl.common.errors import UserError
from jaxrl.evaluation import policies
from jaxrl.evaluation.reports import rollout
from jaxrl.evaluation.statistics import interval
from jaxrl.report.writer import read_metrics

KIND = "small_to_large"
STAGES = ("coma_paper_small", "coma_paper_cpu")
REWARDS = {"relative": {}, "region": {"reward": "region", "reward_offset": 0.0}}  # the presets' and the paper's
BASELINES = ("ig", "ig_sequential", "lawnmower_5", "random")
METRICS = ("entropy", "f1")


def train(preset: str, folder: Path, settings: dict[str, Any]) -> tuple[Path, dict[str, float]]:
    """Train the only run of a new folder, as a user would start it.

    Returns:
        The run's directory; "seconds" and "cpu_seconds", with imports, compiling and selection episodes.

    Raises:
        UserError: training fails.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "jaxrl.train", "--config", preset, "--runs", str(folder)]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    began = time.monotonic()
    before = os.times()
    with (folder / "log.txt").open("w") as log:
        if subprocess.run(command, stdout=log, stderr=log).returncode:
            raise UserError(f"training {preset} failed: see {folder / 'log.txt'}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    (run,) = folder.glob("*/0001")
    return run, {"seconds": time.monotonic() - began, "cpu_seconds": cpu}


def run_seed(
    seed: int, missions: Sequence[int], changes: dict[str, Any], folder: Path, episodes: int
) -> dict[str, Any]:
    """Train one seed with settings of the environment changed, and evaluate it."""
    run: Path | None = None
    stages: dict[str, Any] = {}
    settings: dict[str, Any]
    for preset, num_missions in zip(STAGES, missions, strict=True):
        settings = changes | {"seed": seed, "total_episodes": num_missions, "eps_anneal": 2000 / num_missions}
        settings |= {} if run is None else {"init_from": run}
        run, spent = train(preset, folder / f"{seed}" / preset, settings)
        curve = selection_curve(read_metrics(run), "eval/entropy")
        stages[preset] = {"missions": num_missions, "selection": curve} | spent
    assert run is not None
    scores = {
        name: {metric: interval(curves[metric][-1], share=False) for metric in METRICS}
        for name, curves in rollout(policies.load_run(run), ("learned", *BASELINES), episodes, seed=0)
    }
    return {"seed": seed, "stages": stages, "policies": scores}


def plot(result: dict[str, Any]) -> Figure:
    """Plot the selection evaluations of each seed against minutes of training: small maps dashed, large maps solid."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, row in enumerate(result["rows"]):
        begin = 0.0
        for preset, style in zip(STAGES, ("--", "-"), strict=True):
            stage = row["stages"][preset]
            points = [((begin + point["seconds"]) / 60, point["score"]) for point in stage["selection"]]
            label = f"seed {row['seed']}" if preset == STAGES[-1] else None
            if not points:
                continue
            axes.plot(*zip(*points, strict=True), style, color=f"C{i}", marker=".", label=label)
            begin = 60 * points[-1][0]
    scores = result["rows"][0]["policies"]
    for name, text in {"ig": "greedy information gain", "random": "random"}.items():
        height = scores[name]["entropy"]["mean"]
        axes.axhline(height, color="grey", linestyle=":", linewidth=0.8)
        axes.annotate(text, (0.99, height), xycoords=("axes fraction", "data"), ha="right", va="top", fontsize=9)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes of training (dashed: maps of 60 x 60 cells, solid: 493 x 493)")
    axes.set_ylabel("entropy, selection missions")
    axes.legend(loc="lower left")
    return figure


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser(f"python -m bench.studies.{KIND}", __doc__)
    parser.add_argument(
        "--seeds", default="1,2,3", metavar="A,B", help="train with each of these seeds (default: 1,2,3)"
    )
    for name in ("small", "large"):
        parser.add_argument(
            f"--{name}", default="15360", metavar="N", help=f"train for N missions on {name} maps (default: 15360)"
        )
    parser.add_argument(
        "--start", default="corners", choices=("corners", "uniform"), help="start positions (default: corners)"
    )
    parser.add_argument("--reward", default="relative", choices=REWARDS, help="reward (default: relative, the paper's)")
    parser.add_argument("--episodes", default="200", metavar="N", help="evaluate on N held-out missions (default: 200)")
    parser.add_argument(
        "--runs", default="runs/small_to_large", metavar="DIR", help="write the runs to this new folder"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the result to this JSON file (default: a new one under bench/results/)"
    )
    parser.add_argument("--draw", metavar="RESULT.json", help="draw a result as .png next to it, instead of training")
    parsed = parser.parse_args(list(argv))
    if parsed.draw:
        result = measure.read(Path(parsed.draw))
        if result["kind"] != f"studies.{KIND}" or not result["rows"]:
            raise UserError(f"{parsed.draw} is no result of bench.studies.{KIND}: name another file")
        picture = Path(parsed.draw).with_suffix(".png")
        plot(result).savefig(picture, dpi=120)
        print(f"wrote {picture}")
        return 0
    seeds = measure.parse_list(parsed.seeds, "--seeds", 0, 2**31)
    missions = [measure.parse_int(getattr(parsed, name), f"--{name}", 64, 10**9) for name in ("small", "large")]
    episodes = measure.parse_int(parsed.episodes, "--episodes", 1, 100_000)
    path = measure.output(parsed.out, KIND)
    folder = Path(parsed.runs).absolute()
    if folder.exists():
        raise UserError(f"--runs {parsed.runs} exists: name a new folder")
    result = measure.header(f"studies.{KIND}", argv, quick=False)
    result |= {"start": parsed.start, "reward": parsed.reward, "episodes": episodes, "rows": []}
    changes = {"start": parsed.start} | REWARDS[parsed.reward]
    speed_up_start()
    for seed in seeds:
        row = run_seed(seed, missions, changes, folder, episodes)
        result["rows"].append(row)
        seconds = sum(stage["seconds"] for stage in row["stages"].values())
        measure.say(f"seed {seed}: entropy {row['policies']['learned']['entropy']['mean']:.4f} after {seconds:.0f} s")
        measure.write(result, path)
        plot(result).savefig(path.with_suffix(".png"), dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
