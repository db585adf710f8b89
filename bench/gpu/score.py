"""Part "score": seconds of training to a score, compiling apart, by the selection episodes of a run."""

import time
from pathlib import Path
from typing import Any

from bench.gpu import job
from bench.studies import learning
from jaxrl.cli import train
from jaxrl.common.errors import UserError
from jaxrl.report.writer import read_metrics
from jaxrl.runtime.run_directory import open_run

FLAGS = {
    "coma": "--config coma_fast --start corners --eval_every 2 --eval_episodes 256",
    "ddpg": "--config ddpg --num_envs 1024 --batch_size 512 --updates_per_step 8 --eval_every 250",
    "sac": "--config sac --eval_every 100",
}
SMALL = "--num_envs 8 --units 8 --buffer_size 512 --batch_size 8 --eval_every 5 --eval_episodes 8"
QUICK = {
    "coma": f"{job.QUICK} --eval_every 1 --eval_episodes 8",
    "ddpg": f"--config ddpg_quick --env snakes --height 3 --width 4 --snakes 2 --beans 1 --warmup 0 "
    f"--opponent 0 {SMALL}",
    "sac": f"--config sac_quick --init_steps 0 {SMALL}",
}


Goals = dict[str, tuple[str, tuple[float, ...]]]  # {metric: ("min" or "max", values to reach)}


def coma(quick: bool, folder: Path) -> dict[str, Any]:
    """The paper's map and starts: its entropy, and 0.20."""
    return _train("coma", {"entropy": ("min", (0.2842, 0.20))}, 210, quick, folder)


def ddpg(quick: bool, folder: Path) -> dict[str, Any]:
    """Snakes: 20 points more than level 2, and 95 % of the games."""
    return _train("ddpg", {"score_difference": ("max", (20.0,)), "win": ("max", (0.95,))}, 120, quick, folder)


def sac(quick: bool, folder: Path) -> dict[str, Any]:
    """Reach: 95 % of fresh goals."""
    return _train("sac", {"success": ("max", (0.95,))}, 90, quick, folder)


def _train(name: str, goals: Goals, seconds: float, quick: bool, folder: Path) -> dict[str, Any]:
    limit = f"--max_seconds {2 if quick else seconds} --runs {folder / 'runs' / name}"
    began = time.time()
    arguments = f"{QUICK[name] if quick else FLAGS[name]} {limit}"
    if train.main(arguments.split()) != 0:
        raise UserError(f"training ended with an error: python -m jaxrl.train {arguments}")
    lines = read_metrics(open_run(str(folder / "runs" / name / "latest")))
    timed = [line for line in lines if "time/unix" in line]
    if not timed:
        raise UserError(f"training ended before its first line of metrics: give it more than {seconds:.0f} s")
    rows: list[list[Any]] = []
    curves = {metric: learning.of_selection(lines, f"eval/{metric}") for metric in goals}
    for metric, (mode, values) in goals.items():
        for value in values:
            point = learning.first_at(curves[metric], value, mode)
            reached = "not reached" if point is None else float(point["seconds"])
            rows.append([f"{name}: to {metric} {value:g}", reached, "" if point is None else "s"])
        if curves[metric]:
            last = curves[metric][-1]
            rows.append([f"{name}: {metric} after {last['seconds']:.0f} s", float(last["score"]), ""])
    rows.append([f"{name}: before the first block", timed[0]["time/unix"] - began, "s"])
    return {"rows": rows, "command": f"python -m jaxrl.train {arguments}", "curves": curves}
