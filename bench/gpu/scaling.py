"""Part "scaling": the same work shared by 1, 2, 4 and 8 devices of this machine, and as much more as there are devices.

A training step exchanges gradients, the environments of the last two units nothing.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bench import env_throughput
from bench.gpu import environments, results, tiny
from bench.harness import measure
from bench.harness.collectives import list_collectives
from bench.harness.timing import measure_interleaved, stopwatch
from bench.harness.training import compile_block, iterations, measured_phase
from envs_jax.snakes.types import PUBLISHED
from jaxrl.algos.base import Learner
from jaxrl.cli import flags as command_line
from jaxrl.common.errors import UserError
from jaxrl.runtime import memory_plan
from jaxrl.runtime.build import Run, build_run
from jaxrl.runtime.config import Config

COUNTS = (1, 2, 4, 8)  # devices
ROUNDS = 5  # samples of each point, after a warm-up
COPIES = {"snakes": 65_536, "reach": 65_536}  # of an environment on one device
QUICK_ENVS = 8  # 8 devices share them

# What a training step of n times the work has n times as much of: it makes as many updates, from larger minibatches.
GROWING = {
    "coma": ("minibatch_size",),
    "ddpg": ("env_steps_per_update", "batch_size", "buffer_size"),
    "sac": ("env_steps_per_update", "batch_size", "buffer_size"),
}

MeasurePoint = Callable[[int, int], dict[str, Any]]  # (devices, times the work) -> its "rate" and other entries


def coma(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure training steps of the main job."""
    return _measure_training("coma", quick, folder)


def ddpg(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure training steps of DDPG on snakes."""
    return _measure_training("ddpg", quick, folder)


def sac(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure training steps of SAC on reach."""
    return _measure_training("sac", quick, folder)


def snakes(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure snakes without a learner, three against three."""
    name, settings = environments.SMALL["snakes_3v3"] if quick else ("snakes_3v3", PUBLISHED)
    return _measure_points("snakes", functools.partial(_step_env, "snakes", name, settings, quick), folder)


def reach(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure reach without a learner."""
    name, settings = environments.SMALL["reach"] if quick else ("reach", {})
    return _measure_points("reach", functools.partial(_step_env, "reach", name, settings, quick), folder)


def _measure_training(name: str, quick: bool, folder: Path) -> dict[str, Any]:
    flags = f"{tiny.FLAGS[name]} --num_envs {QUICK_ENVS}" if quick else f"--algo {name} --num_envs 4096"
    config = command_line.parse(flags.split(), "python -m bench.gpu").config
    return _measure_points(name, functools.partial(_train, config, quick), folder)


def _measure_points(name: str, measure_point: MeasurePoint, folder: Path) -> dict[str, Any]:
    """Measure point by point; results are saved, and stay if a later point is cut off. Raises UserError."""
    present = jax.local_device_count()
    if present == 1:
        raise UserError("there is one device, which shares its work with none; JAX_NUM_CPU_DEVICES=8 makes 8 of a CPU")
    unit = f"scaling_{name}"
    points: list[dict[str, Any]] = results.read(folder).get(unit, {}).get("points", [])
    done = {(point["devices"], point["work"]) for point in points}
    for devices, work in plan_points(present):
        if (devices, work) in done:
            continue
        measure.say(f"{name}: {devices} of {present} devices, {work} times the work of one")
        points.append({"devices": devices, "work": work, **measure_point(devices, work)})
        results.note(folder, unit, points=points, rows=_make_rows(name, points))
    return {"rows": _make_rows(name, points), "points": points, "present": present, "machine": measure.machine()}


def plan_points(present: int) -> list[tuple[int, int]]:
    """Return (devices, times the work of one device) of all points: one device, then both kinds of scaling."""
    counts = [count for count in COUNTS if 1 < count <= present]
    return [(1, 1), *((count, work) for count in counts for work in (1, count))]


def _make_rows(name: str, points: list[dict[str, Any]]) -> list[list[Any]]:
    """Return rows of the table, with speeds as multiples of the first point's, which has one device."""
    rows: list[list[Any]] = []
    for point in points:
        devices = point["devices"]
        speed = point["rate"] / points[0]["rate"]
        what = f"{name}, {devices} {'device' if devices == 1 else 'devices'}, {point['num_envs']:,} environments"
        rows.append([what, point["rate"], f"env steps/s, {speed:.2f} times one device's"])
        if devices > 1 and "collectives" in point:
            exchanged = sum(each["bytes"] * each["times"] for each in point["collectives"])
            need = f"MB in a training step, its gradients are {point['gradient_bytes'] / 1e6:.4g}"
            rows.append([f"{what}: exchanged by each", exchanged / 1e6, need])
    return rows


# Points


def _train(config: Config, quick: bool, devices: int, work: int) -> dict[str, Any]:
    """Measure training steps of a multiple of the work of `config`."""
    grown = {name: work * config.algo_settings[name] for name in GROWING[config.algo]}
    config = dataclasses.replace(config, algo_settings=config.algo_settings | grown)
    run = build_run(config.with_run(devices=devices, num_envs=work * config.run.num_envs))
    phase = measured_phase(run.algo)
    began = time.perf_counter()
    block = compile_block(run)
    compile_seconds = time.perf_counter() - began
    sampler = stopwatch("step", iterations(run, block), 0.0 if quick else 0.1)
    timing = measure_interleaved([sampler], ROUNDS)["step"]
    num_envs = run.trainer.layout.num_envs
    return {
        "num_envs": num_envs,
        **measure.rate(timing, phase.steps * num_envs),
        "updates": phase.updates,
        "gradient_bytes": phase.updates * _count_learned_bytes(run),
        "collectives": [each._asdict() for each in list_collectives(block.as_text())],
        "bytes_per_device": memory_plan.compiled_bytes(block),
        "compile_seconds": compile_seconds,
    }


def _count_learned_bytes(run: Run) -> int:
    """Return the bytes of all learned parameters, those of the gradients of an update."""
    parts = jax.tree.leaves(run.trainer.shapes().algo.replicated, is_leaf=lambda part: isinstance(part, Learner))
    return sum(memory_plan.size(part.params) for part in parts if isinstance(part, Learner))


def _step_env(
    job_name: str, env: str, settings: dict[str, Any], quick: bool, devices: int, work: int
) -> dict[str, Any]:
    """Measure steps of an environment with its observations, without resets."""
    request = env_throughput.Request(
        env=env,
        settings=settings,
        policy="random",
        num_envs=[work * (QUICK_ENVS if quick else COPIES[job_name])],
        rounds=ROUNDS,
        min_seconds=1e-6 if quick else 0.2,
        baseline=False,
        devices=devices,
    )
    measured = env_throughput.run(request, measure.say)
    if not measured["rows"]:
        raise UserError(measured["notes"][-1])
    (row,) = measured["rows"]
    return {"num_envs": row["num_envs"], "together": row["together"], **row["stages"]["observation"]}
