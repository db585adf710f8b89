"""Peak rates of a machine: memory copies and matrix products.

Everything runs inside a compiled loop, as training does: a loop reuses its memory, while every call from outside
allocates new pages, and some backends compile an operation in a loop differently.
"""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp

from bench.harness.timing import Sampler, measure_interleaved, stopwatch


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured rates."""

    copy: float  # bytes read plus bytes written per second, updating an array in place that exceeds all caches
    fresh: float  # the same with the result in newly allocated memory; far below `copy` where page faults are expensive
    # {dtype: FLOP per second} of large square products; "tf32", on GPUs, is their default for float32 unless full
    # precision is requested, as in training
    matmul: dict[str, float]

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def measure(min_seconds: float = 0.1, rounds: int = 5, quick: bool = False) -> Rates:
    """Measure the first local device in a few seconds.

    Args:
        min_seconds: minimum seconds per sample.
        rounds: samples of each rate.
        quick: use small arrays; the figures are then meaningless.
    """
    platform = jax.default_backend()
    cells = 2**18 if quick else 2**26 if platform == "cpu" else 2**28
    # CPUs emulate bfloat16 slowly: smaller
    sides = {"float32": 1024, "bfloat16": 512} if platform == "cpu" else {"float32": 8192, "bfloat16": 8192}
    if platform == "gpu":
        sides["tf32"] = 8192
    if quick:
        sides = dict.fromkeys(sides, 64)
    samplers = [*copies(cells, min_seconds), *(matmul(name, side, min_seconds) for name, side in sides.items())]
    seconds = {name: timing.median for name, timing in measure_interleaved(samplers, rounds).items()}
    moved = 2 * 4 * cells
    return Rates(
        copy=moved / seconds["copy"],
        fresh=moved / seconds["fresh"],
        matmul={name: 2 * side**3 / seconds[name] for name, side in sides.items()},
    )


def copies(cells: int, min_seconds: float) -> list[Sampler]:
    """Return samplers "copy" (in place) and "fresh" (into new memory) of float32[cells]."""
    in_place = jax.jit(operator.neg, donate_argnums=0)
    new = jax.jit(operator.neg)
    held = [jnp.ones(cells, jnp.float32)]

    def step() -> Any:
        held[0] = in_place(held[0])
        return held[0]

    return [stopwatch("copy", step, min_seconds), stopwatch("fresh", lambda: new(held[0]), min_seconds)]


def repeat(name: str, body: Any, carry: Any, min_seconds: float) -> Sampler:
    """Return a sampler of `body` (carry -> carry) run repeatedly inside one compiled loop; seconds per run."""
    loop = jax.jit(lambda carry, times: jax.lax.fori_loop(0, times, lambda _, c: body(c), carry))
    times: list[int] = []
    watch = stopwatch(name, lambda: loop(carry, jnp.int32(times[0] if times else 2)), min_seconds=0.0)

    def sample() -> dict[str, float]:
        if not times:
            watch()  # compiles
            once = watch()[name] / 2
            times.append(max(2, round(min_seconds / once)) if once > 0 else 2)
        return {name: watch()[name] / times[0]}

    return sample


def matmul(dtype: str, side: int, min_seconds: float) -> Sampler:
    """Return a sampler named after `dtype` (or "tf32") of one product of square matrices."""
    precision = "highest" if dtype == "float32" else None
    ones = jnp.ones((side, side), "float32" if dtype == "tf32" else dtype)
    return repeat(
        dtype, lambda pair: (jnp.matmul(*pair, precision=precision), pair[1]), (ones, ones / side), min_seconds
    )
