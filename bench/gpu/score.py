"""Part "score": seconds of training to a score, compiling apart, by the selection episodes of a run."""

import time
from pathlib import Path
from typing import Any

from bench import learning
from jaxrl import train
from jaxrl.errors import UserError
from jaxrl.report.writer import read_metrics
from jaxrl.run_directory import open_run

FLAGS = {
    "coma": "--config coma_fast --start corners --eval_every 2 --eval_episodes 256",
    "ddpg": "--config ddpg --num_envs 1024 --batch_size 512 --updates_per_step 8 --eval_every 250",
    "sac": "--config sac --eval_every 100",
}
QUICK = {
    "coma": "--num_envs 8 --width 8 --q 2 --transitions 480 --minibatches 2 --eval_every 1 --eval_episodes 8",
    "ddpg": "--num_envs 8 --units 8 --eval_every 5 --eval_episodes 8",
    "sac": "--num_envs 8 --units 8 --eval_every 5 --eval_episodes 8",
}


def coma(quick: bool, folder: Path) -> dict[str, Any]:
    """The paper's map and starts: its entropy, and 0.20."""
    return _train("coma", "entropy", (0.2842, 0.20), "min", 210, quick, folder)


def ddpg(quick: bool, folder: Path) -> dict[str, Any]:
    """Snakes: 20 points more than level 2."""
    return _train("ddpg", "score_difference", (20.0, 35.0), "max", 120, quick, folder)


def sac(quick: bool, folder: Path) -> dict[str, Any]:
    """Reach: 95 % of fresh goals."""
    return _train("sac", "success", (0.95,), "max", 90, quick, folder)


def _train(
    name: str, score: str, goals: tuple[float, ...], mode: str, seconds: float, quick: bool, folder: Path
) -> dict[str, Any]:
    limit = f"--max_seconds {2 if quick else seconds} --runs {folder / 'runs' / name}"
    began = time.time()
    arguments = f"{FLAGS[name]} {QUICK[name] if quick else ''} {limit}"
    if train.main(arguments.split()) != 0:
        raise UserError(f"training ended with an error: python -m jaxrl.train {arguments}")
    lines = read_metrics(open_run(str(folder / "runs" / name / "latest")))
    curve = learning.of_selection(lines, f"eval/{score}")
    first = next(line["time/unix"] for line in lines if "time/unix" in line)
    rows: list[list[Any]] = []
    for goal in goals:
        point = learning.first_at(curve, goal, mode)
        reached = "not reached" if point is None else float(point["seconds"])
        rows.append([f"{name}: to {score} {goal:g}", reached, "" if point is None else "s"])
    if curve:
        last = curve[-1]
        rows.append([f"{name}: {score} after {last['seconds']:.0f} s", float(last["score"]), ""])
    rows.append([f"{name}: before the first block", first - began, "s"])
    return {"rows": rows, "command": f"python -m jaxrl.train {FLAGS[name]}", "curve": curve}
