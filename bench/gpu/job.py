"""Part "job": the main job, `python -m jaxrl.train --algo coma --num_envs 4096`, and four times as many missions."""

from pathlib import Path
from typing import Any

from bench import measure, train_throughput
from jaxrl import config as configuration
from jaxrl.report import rates

QUICK = "--config coma_quick --width 8 --num_agents 2 --budget 2 --q 2 --transitions 6 --minibatches 1 --data_passes 1"


def coma_4096(quick: bool, folder: Path) -> dict[str, Any]:
    """4,096 missions at once."""
    return _coma(2 if quick else 4096, quick)


def coma_16384(quick: bool, folder: Path) -> dict[str, Any]:
    """16,384 missions at once."""
    return _coma(4 if quick else 16384, quick)


def _coma(missions: int, quick: bool) -> dict[str, Any]:
    request = configuration.parse((QUICK if quick else "--algo coma").split(), "python -m bench.gpu")
    assert request.config is not None
    width = train_throughput.network_width(request.config)
    machine_rates = rates.measure(width, quick=quick, rounds=1 if quick else 3)
    asked = train_throughput.Request(request.config, [missions], seconds=60.0, rounds=1 if quick else 5)
    found = train_throughput.run(asked, machine_rates, measure.say)
    (row,) = found["rows"]
    learn = row["learn"]
    rows = [
        [f"{missions:,} missions: a training step", row["iteration_seconds"], "s"],
        [f"{missions:,} missions: environment steps", row["env_steps_per_second"], "per second"],
        [f"{missions:,} missions: the learner", learn["rate"] / 1e12, "TFLOP/s"],
        [f"{missions:,} missions: of the matrix products' rate", 100 * learn["of_matmul"], "%"],
        [f"{missions:,} missions: memory of the program", row["bytes_per_device"] / 2**30, "GiB"],
        [f"{missions:,} missions: planned", row["planned_bytes"] / 2**30, "GiB"],
        [f"{missions:,} missions: compiling", row["compile_seconds"], "s"],
    ]
    return {"rows": rows, "rates": machine_rates.plain(), **{k: v for k, v in found.items() if k != "rows"}, "row": row}
