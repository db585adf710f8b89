"""Part "device": the machine, and its peak rates."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.harness import measure
from bench.harness.rates import measure as measure_rates
from bench.harness.timing import measure_interleaved, stopwatch

OPERATIONS = 512  # length of the chain for counting launches
GRAPHS = {"launched one by one": "", "in command buffers": "FUSION"}


def rates(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure versions, memory, copy rate and matrix products."""
    machine_rates = measure_rates(quick=quick, rounds=1 if quick else 5)
    machine = measure.machine()
    rows: list[list[Any]] = [
        ["device", machine["device"], ""],
        ["jax", machine["jax"], ""],
        ["free memory", machine["free_bytes"] / 2**30, "GiB"],
        ["copy, read and written", machine_rates.copy / 1e9, "GB/s"],
    ]
    rows += [[f"matrix product, {name}", rate / 1e12, "TFLOP/s"] for name, rate in machine_rates.matmul.items()]
    return {"rows": rows, "machine": machine, "rates": machine_rates.plain()}


def launches(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure seconds of one tiny kernel in a chain of them, with and without command buffers (CUDA graphs)."""
    count = 8 if quick else OPERATIONS
    on_gpu = jax.default_backend() == "gpu"

    def chain(x: Any) -> Any:
        for _ in range(count):  # a barrier prevents fusion of neighbours
            x = jax.lax.optimization_barrier(x + 1.0)
        return x

    samplers = []
    tiny = jnp.zeros(32)
    for name, kinds in GRAPHS.items() if on_gpu else [("launched one by one", "")]:
        options = {"xla_gpu_enable_command_buffer": kinds} if on_gpu else None
        program = jax.jit(chain, compiler_options=options).lower(tiny).compile()
        samplers.append(stopwatch(name, functools.partial(program, tiny), 0.0 if quick else 0.1))
    timings = measure_interleaved(samplers, 1 if quick else 5)
    rows = [[f"a kernel of 32 numbers, {name}", 1e6 * t.median / count, "us"] for name, t in timings.items()]
    return {"rows": rows, "operations": count, "seconds": {name: t.plain() for name, t in timings.items()}}
