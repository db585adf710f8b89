"""Part "score": seconds of training to a score, without compiling, by the selection episodes of a run."""

import shlex
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import job, results
from bench.studies import learning
from jaxrl.cli import train
from jaxrl.common.errors import UserError
from jaxrl.report.writer import read_metrics
from jaxrl.runtime.run_directory import follow_latest

EVERY = 2.0  # seconds between two checks of the metrics
FLAGS = {
    "coma": "--algo coma --num_envs 4096 --eval_episodes 256",
    "ddpg": "--algo ddpg --num_envs 4096",
    "sac": "--algo sac --num_envs 4096",
}
QUICK = " --eval_every 1 --eval_episodes 8"

Goals = dict[str, tuple[str, tuple[float, ...]]]  # {metric: ("min" or "max", values to reach)}


def coma(quick: bool, folder: Path) -> dict[str, Any]:
    """Train COMA on the paper's map and starts to its entropy, and to 0.20."""
    return _train("coma", {"entropy": ("min", (0.2842, 0.20))}, 210, quick, folder)


def ddpg(quick: bool, folder: Path) -> dict[str, Any]:
    """Train DDPG on snakes to a lead of 20 points over level 2, and to 95 % of the games."""
    return _train("ddpg", {"score_difference": ("max", (20.0,)), "win": ("max", (0.95,))}, 120, quick, folder)


def sac(quick: bool, folder: Path) -> dict[str, Any]:
    """Train SAC on reach to 95 % of fresh goals."""
    return _train("sac", {"success": ("max", (0.95,))}, 90, quick, folder)


def _train(name: str, goals: Goals, seconds: float, quick: bool, folder: Path) -> dict[str, Any]:
    """Train until all goals are reached, or for `seconds`."""
    unit = f"score_{name}"
    seconds = 2.0 if quick else seconds
    began = time.time()
    place = folder / "runs" / f"{name}_{began:.0f}"
    words = (job.QUICK[name] + QUICK if quick else FLAGS[name]).split()
    words += ["--runs", str(place), "--max_seconds", f"{seconds:.0f}"]
    done = threading.Event()

    def measure() -> tuple[list[list[Any]], bool]:
        run = follow_latest(place / "latest")
        return _rows(name, goals, read_metrics(run) if run.is_dir() else [], began)

    def watch() -> None:
        while not done.wait(EVERY):
            rows, reached = measure()
            results.note(folder, unit, rows=rows)
            if reached:
                signal.raise_signal(signal.SIGTERM)  # a second one would end training without a checkpoint
                return

    previous = signal.signal(signal.SIGTERM, lambda *_: None)  # in case training has ended already
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        code = train.main(words)
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGTERM, previous)
    command = f"python -m jaxrl.train {shlex.join(words)}"
    if code != 0:
        raise UserError(f"training ended with an error: {command}")
    rows, _ = measure()
    if not rows:
        raise UserError(f"training ended before its first line of metrics: give it more than {seconds:.0f} s")
    return {"rows": rows, "command": command, "run": place.name}


def _rows(name: str, goals: Goals, lines: Sequence[dict[str, Any]], began: float) -> tuple[list[list[Any]], bool]:
    """Return rows of the metrics of a run, and whether all goals are reached; no rows before the first line."""
    timed = [line["time/unix"] for line in lines if "time/unix" in line]
    if not timed:
        return [], False
    rows: list[list[Any]] = []
    for metric, (mode, values) in goals.items():
        curve = learning.selection_curve(lines, f"eval/{metric}")
        for value in values:
            point = learning.first_at(curve, value, mode)
            reached = "not reached" if point is None else float(point["seconds"])
            rows.append([f"{name}: to {metric} {value:g}", reached, "" if point is None else "s"])
        if curve:
            rows.append([f"{name}: {metric} after {curve[-1]['seconds']:.0f} s", float(curve[-1]["score"]), ""])
    missed = any(figure == "not reached" for _, figure, _ in rows)
    rows.append([f"{name}: before the first block", timed[0] - began, "s"])
    return rows, not missed
