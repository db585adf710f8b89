"""Part "job": the main job, `python -m jaxrl.train --algo coma --num_envs 4096`, and four times as many missions."""

from pathlib import Path
from typing import Any

from bench import train_throughput
from bench.harness import measure, rates
from jaxrl.cli import flags as command_line

SMALL = "--num_envs 8 --hidden_size 8 --buffer_size 512 --batch_size 8"
QUICK = {  # the same tiny programs for all parts of a rehearsal, which is bound by the compiler
    "coma": "--config coma_quick --hidden_size 8 --num_agents 2 --budget 2 --q 2 --num_envs 2 --num_epochs 1 "
    "--critic_warmup 10",
    "ddpg": "--config ddpg_quick --env snakes --height 3 --width 4 --snakes 2 --beans 1 --learning_starts 0 "
    "--opponent 0 "
    f"{SMALL}",
    "sac": f"--config sac_quick --random_steps 0 {SMALL}",
}


def coma_4096(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure 4,096 missions at once."""
    return _coma(2 if quick else 4096, quick)


def coma_16384(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure 16,384 missions at once."""
    return _coma(2 if quick else 16384, quick)


def _coma(missions: int, quick: bool) -> dict[str, Any]:
    flags = QUICK["coma"] if quick else "--algo coma"
    config = command_line.parse(flags.split(), "python -m bench.gpu").config
    width = train_throughput.network_width(config)
    machine_rates = rates.measure(width, quick=quick, rounds=1 if quick else 3)
    request = train_throughput.Request(config, [missions], seconds=60.0, rounds=1 if quick else 5)
    measured = train_throughput.run(request, machine_rates, measure.say)
    (row,) = measured["rows"]
    learn = row["learn"]
    rows = [
        [f"{missions:,} missions: a training step", row["iteration_seconds"], "s"],
        [f"{missions:,} missions: environment steps", row["env_steps_per_second"], "per second"],
        [f"{missions:,} missions: the learner", learn["rate"] / 1e12, "TFLOP/s"],
        [f"{missions:,} missions: of the matrix products' rate", 100 * learn["of_matmul"], "%"],
        [f"{missions:,} missions: memory of the program", row["bytes_per_device"] / 2**30, "GiB"],
        [f"{missions:,} missions: compiling", row["compile_seconds"], "s, or reading what was compiled before"],
    ]
    return {
        "rows": rows,
        "rates": machine_rates.plain(),
        **{k: v for k, v in measured.items() if k != "rows"},
        "row": row,
    }
