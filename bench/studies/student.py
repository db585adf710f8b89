"""python -m bench.studies.student alone guided --teacher RUN: steps and CPU seconds until a student succeeds.

Each arm trains the preset `student_sparse` with several seeds in one program; they differ in the teacher's help, and
`alone` may take twice the steps, over which its learning rates fall.
The teacher is a run of collective; without --teacher its workers and the collective are trained first. The seeds of an
arm are added to FILE (--out) as soon as the arm has ended.

CPU seconds are those of the process from the first block to the first selection evaluation that reaches the score,
divided by the number of seeds, which train in turns: without compiling, with the evaluations.
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import jaxrl
from bench.harness import measure
from envs_jax.base import closest, short_repr
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import parse_int
from jaxrl.common.errors import UsageError, UserError
from jaxrl.evaluation import learning_curves
from jaxrl.evaluation.statistics import estimate_mean
from jaxrl.report.writer import read_metrics
from jaxrl.runtime.config import read_training_run
from jaxrl.runtime.trials import trials

KIND = "student"
SCORE = 0.9  # share of the selection episodes
METRIC = "eval/success"
TASKS = ("reach", "above")  # of the workers
WORKER: dict[str, Any] = {"preset": "sac", "total_env_steps": 250_000, "eval_every": 32_000, "eval_episodes": 64}
COLLECTIVE: dict[str, Any] = {
    "task": ",".join(TASKS), "reward": "sparse", "success_radius": 0.02, "goals": "uniform",
    "learner_steps": 51_328, "worker_steps": 34_218, "transformer_updates": 2000, "actor_updates": 5000,
}  # fmt: skip
NOTHING: dict[str, Any] = {"teacher_weight": 0.0, "guide_steps": 0}
ARMS: dict[str, dict[str, Any]] = {
    "alone": NOTHING | {"total_env_steps": 240_000},  # twice the preset's
    "guided": {},
}


def helped(arm: str) -> bool:
    """Return whether an arm has a teacher."""
    return arm != "alone"


def teacher(runs: str, say: measure.Say) -> str:
    """Train the workers and the collective; its run directory."""
    workers = []
    for task in TASKS:
        workers.append(str(jaxrl.train("sac", task=task, seed=1, devices=1, runs=runs, **WORKER).directory))
        say(f"{task}: {workers[-1]}")
    made = jaxrl.train("collective", workers=",".join(workers), seed=1, devices=1, runs=runs, **COLLECTIVE)
    say(f"collective: {made.directory}")
    return str(made.directory)


def train(arm: str, teacher: str, seeds: int, runs: str) -> dict[str, Any]:
    """Train one arm; its entry of the result."""
    settings = ARMS[arm]
    helper: dict[str, Any] = {"teacher": teacher} if helped(arm) else {}
    clock: list[tuple[float, float]] = []

    def note(block: Mapping[str, Any]) -> None:
        clock.append((float(block["env_steps"]), time.process_time()))

    began = time.process_time()
    ended = jaxrl.train(
        "student", preset="student_sparse", seed=1, num_seeds=seeds, devices=1, runs=runs, callbacks=[note],
        **settings, **helper,
    )  # fmt: skip
    folders = [ended.directory / trial.folder for trial in trials(read_training_run(ended.directory)[1])]
    curves = [learning_curves.curve(read_metrics(folder), METRIC) for folder in folders]
    return {
        "settings": settings,
        "seeds": list(range(1, seeds + 1)),
        "cpu_seconds": time.process_time() - began,
        "clock": [(steps, round((at - clock[0][1]) / seeds, 2)) for steps, at in clock],
        "curves": curves,
    } | reached(curves, clock, seeds)


def reached(
    curves: Sequence[Sequence[tuple[int, float]]], clock: Sequence[tuple[float, float]], seeds: int
) -> dict[str, Any]:
    """Return when each curve first reaches SCORE; one that does not counts as the limit, its last point.

    Returns:
        {"env_steps", "seconds" of each seed; "failed": how many did not; "median", "interval" of the steps}.
    """
    first = [next((steps for steps, score in curve if score >= SCORE), None) for curve in curves]
    steps = [curve[-1][0] if found is None else found for found, curve in zip(first, curves, strict=True)]
    at, cpu = np.array(clock).T
    return {
        "env_steps": steps,
        "seconds": [round(float(np.interp(step, at, cpu) - cpu[0]) / seeds, 1) for step in steps],
        "failed": first.count(None),
        "median": statistics.median(steps),
        "interval": estimate_mean(np.array(steps)),
    }


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    flags = measure.parser("python -m bench.studies.student", __doc__)
    flags.add_argument("arms", nargs="+", metavar="ARM", help=f"one or several of {', '.join(ARMS)}")
    flags.add_argument("--teacher", metavar="RUN", help="a run of collective (default: train one)")
    flags.add_argument("--seeds", default="5", metavar="N", help="seeds of each arm (default: 5)")
    flags.add_argument("--runs", default="runs", metavar="DIR", help="where runs are kept (default: runs)")
    flags.add_argument("--out", metavar="FILE", help="JSON file to extend (default: a new one under bench/results/)")
    parsed = flags.parse_args(list(argv))
    for arm in parsed.arms:
        if arm not in ARMS:
            raise UsageError(f"unknown arm {short_repr(arm)}: {closest(arm, tuple(ARMS))}")
    seeds = parse_int(parsed.seeds, "--seeds", 1, 100)
    path = measure.output(parsed.out, KIND)
    result = measure.read(path) if path.exists() else measure.header(f"studies.{KIND}", argv, quick=False)
    if result["kind"] != f"studies.{KIND}":
        raise UserError(f"--out {parsed.out} is no result of bench.studies.{KIND}: name another file")
    result |= {"score": SCORE, "arms": result.get("arms", {})}
    run = parsed.teacher or (teacher(parsed.runs, measure.say) if any(map(helped, parsed.arms)) else "")
    for arm in parsed.arms:
        entry = train(arm, run, seeds, parsed.runs)
        result["arms"][arm] = entry
        measure.write(result, path)
        measure.say(f"{arm}: {entry['env_steps']} steps, {entry['seconds']} CPU seconds, {entry['failed']} failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
