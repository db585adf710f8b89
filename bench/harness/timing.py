"""The stopwatch of the benchmarks: warm-up, several samples, medians, turns.

Things that are compared take turns in one process, so that other load on the machine affects all of them equally.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

Sampler = Callable[[], Mapping[str, float]]  # one sample of one or more things: {name: seconds}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Time samples of one measured thing."""

    seconds: tuple[float, ...]  # one entry per sample

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median: well below 1 on a quiet machine."""
        return (max(self.seconds) - min(self.seconds)) / self.median if self.median > 0 else 0.0

    def plain(self) -> dict[str, Any]:
        return {"median": self.median, "spread": self.spread, "samples": list(self.seconds)}


def seconds_of(function: Callable[[], Any], calls: int = 1) -> float:
    """Return the seconds per call of `function`, waiting for the last result."""
    result: Any = None
    began = time.perf_counter()
    for _ in range(calls):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / calls


def stopwatch(name: str, function: Callable[[], Any], min_seconds: float = 0.05) -> Sampler:
    """Return a sampler of `function`, called as often as makes a sample at least `min_seconds` seconds long."""
    calls: list[int] = []

    def sample() -> dict[str, float]:
        if not calls:
            once = seconds_of(function)
            calls.append(max(1, round(min_seconds / once)) if 0 < once < min_seconds else 1)
        return {name: seconds_of(function, calls[0])}

    return sample


def measure_interleaved(samplers: Iterable[Sampler], rounds: int = 5) -> dict[str, Timing]:
    """Take `rounds` samples of everything, in turns, after a discarded warm-up round."""
    samplers = list(samplers)
    for sampler in samplers:
        sampler()
    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        for sampler in samplers:
            for name, seconds in sampler().items():
                samples.setdefault(name, []).append(seconds)
    return {name: Timing(tuple(seconds)) for name, seconds in samples.items()}
