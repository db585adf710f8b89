"""Part "torch": PyTorch learners on the same device at equal work, in turns, and the utilisation by both."""

import importlib.util
from pathlib import Path
from typing import Any

import jax

from bench import systems, train_throughput
from bench.gpu import job, watch
from bench.harness import measure, rates
from jaxrl.cli import flags as command_line
from jaxrl.runtime.build import build_run

SECONDS = 5.0  # of readings of utilisation, for each side
SAMPLES = 6144  # of a gradient of COMA, on both sides
QUICK = {
    "coma": job.QUICK["coma"],
    "ddpg": "--config ddpg_competition --env snakes_1v1 --hidden_size 8 --batch_size 8 --buffer_size 512",
    "sac": "--config sac_worker_original --hidden_size 8 --batch_size 8 --buffer_size 512 --horizon 4",
}


def coma(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure COMA with the published settings, 4,096 missions."""
    return _against("--algo coma", 4096, quick, "coma")


def ddpg(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure DDPG with the published settings, 1,024 games."""
    return _against("--config ddpg_competition --env_steps_per_update 1024", 1024, quick, "ddpg")


def sac(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure SAC with the published settings, 64 arms."""
    return _against("--config sac_worker_original --env_steps_per_update 64", 64, quick, "sac")


def _against(flags: str, num_envs: int, quick: bool, name: str) -> dict[str, Any]:
    missing = _missing()
    if missing:
        return {"rows": [[f"{name}: PyTorch", missing, ""]]}
    config = command_line.parse((QUICK[name] if quick else flags).split(), "python -m bench.gpu").config
    request = train_throughput.Request(
        config,
        [2 if quick else num_envs],
        seconds=60.0,
        rounds=1 if quick else 5,
        samples=12 if quick else SAMPLES,
    )
    machine_rates = rates.measure(train_throughput.network_width(config), quick=quick, rounds=1 if quick else 3)
    torch = train_throughput.make_torch(request, systems.find(config.env), SAMPLES)
    found = train_throughput.run(request, machine_rates, measure.say, torch)
    (row,) = found["rows"]
    theirs = row["torch"]
    setup = build_run(config.with_run(num_envs=request.num_envs[0]))
    work = train_throughput.iterations(setup, train_throughput.compile_block(setup))
    seconds, settle = (0.1, 0.0) if quick else (SECONDS, watch.SETTLE)
    readings = {"ours": watch.watch(work, seconds, settle), "PyTorch": watch.watch(torch.step, seconds, settle)}
    rows = [
        [f"{name}: environment steps, ours", row["env_steps_per_second"], "per second"],
        [f"{name}: environment steps, PyTorch", theirs["env_steps_per_second"], "per second"],
        [f"{name}: times as fast", theirs["times"], ""],
        [f"{name}: learner, ours", row["learn"]["rate"] / 1e12, "TFLOP/s"],
        [f"{name}: learner, PyTorch", theirs["learn"]["rate"] / 1e12, "TFLOP/s"],
    ]
    for who, reading in readings.items():
        rows += watch.rows(f"{name}: {who}", reading)
    return {"rows": rows, "rates": machine_rates.plain(), "found": found, "readings": readings}


def _missing() -> str:
    """Return why PyTorch cannot be measured here, if it cannot."""
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch

    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return "installed without CUDA"
    return ""
