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
from jaxrl.runtime.run_directory import follow_latest, open_run

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
    """Train until all goals are reached, or for `seconds` without compiling.

    Progress is saved periodically; a run that was cut off is resumed from its last checkpoint.
    """
    unit, seconds = f"score_{name}", 2.0 if quick else seconds
    noted = results.read(folder).get(unit, {})
    began = [*noted.get("began", []), time.time()]
    place = folder / "runs" / (noted.get("run") or f"{name}_{began[0]:.0f}")
    results.note(folder, unit, run=place.name, began=began)

    def found() -> tuple[dict[str, Any], bool]:
        lines = read_metrics(follow_latest(place / "latest"))
        return _found(name, goals, without_pauses(lines, began), began)

    left = ["--checkpoint_minutes", "1", "--max_seconds", f"{max(seconds - found()[0]['trained'], 1.0):.0f}"]
    try:
        words = ["--resume", str(open_run(place / "latest")), *left]
    except UserError:  # not begun, or cut off before it had a directory
        words = [*(job.QUICK[name] + QUICK if quick else FLAGS[name]).split(), "--runs", str(place), *left]
    command = f"python -m jaxrl.train {shlex.join(words)}"
    done = threading.Event()

    def watch() -> None:
        while not done.wait(EVERY):
            result, reached = found()
            results.note(folder, unit, **result)
            if reached:  # training stops cleanly if it has begun, else the next time
                signal.raise_signal(signal.SIGTERM)

    former = signal.signal(signal.SIGTERM, lambda *_: None)  # in case training has ended already
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        code = train.main(words)
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGTERM, former)
    if code != 0:
        raise UserError(f"training ended with an error: {command}")
    result, _ = found()
    if not result["rows"]:
        raise UserError(f"training ended before its first line of metrics: give it more than {seconds:.0f} s")
    return {**result, "command": command, "run": place.name, "began": began}


def without_pauses(lines: Sequence[dict[str, Any]], began: Sequence[float]) -> list[dict[str, Any]]:
    """Return the lines of metrics, their clock stopped between a call that was cut off and the next one's first line.

    Args:
        lines: of a run.
        began: start time of each process of the run, in order.
    """
    kept, pause, last = [], 0.0, None
    for line in lines:
        if "time/unix" in line:
            now = line["time/unix"]
            if last is not None and any(last < start <= now for start in began):
                pause += now - last
            last = now
            line = line | {"time/unix": now - pause}
        kept.append(line)
    return kept


def _found(
    name: str, goals: Goals, lines: Sequence[dict[str, Any]], began: Sequence[float]
) -> tuple[dict[str, Any], bool]:
    """Return rows of the metrics of a run, and whether all goals are reached; no rows before the first line."""
    timed = [line["time/unix"] for line in lines if "time/unix" in line]
    if not timed:
        return {"rows": [], "trained": 0.0}, False
    rows: list[list[Any]] = []
    missed = False
    curves = {metric: learning.of_selection(lines, f"eval/{metric}") for metric in goals}
    for metric, (mode, values) in goals.items():
        for value in values:
            point = learning.first_at(curves[metric], value, mode)
            missed |= point is None
            reached = "not reached" if point is None else float(point["seconds"])
            rows.append([f"{name}: to {metric} {value:g}", reached, "" if point is None else "s"])
        if curves[metric]:
            last = curves[metric][-1]
            rows.append([f"{name}: {metric} after {last['seconds']:.0f} s", float(last["score"]), ""])
    first = max((start for start in began if start <= timed[0]), default=began[0])  # one before may have been cut off
    rows.append([f"{name}: before the first block", timed[0] - first, "s"])
    return {"rows": rows, "curves": curves, "trained": timed[-1] - timed[0]}, not missed
