"""Metric lines: means over groups of iterations, which may span two processes; throughput and the time left."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxrl.report.writer import Writer

ROWS = 10_000  # approximate number in a whole run
_DENSE = 250  # rows, at least, in each doubling of the iterations of a run, until it has its final spacing


class Throughput:
    """Environment steps and updates per second of training over the last blocks, without pauses."""

    def __init__(self, env_steps: int, updates: int) -> None:
        self._paused = 0.0
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=21)
        self.mark(env_steps, updates)

    def mark(self, env_steps: int, updates: int) -> float:
        """Record the counters at the end of a block; return the seconds since the last mark."""
        now = time.monotonic() - self._paused
        seconds = now - self._marks[-1][0] if self._marks else 0.0
        self._marks.append((now, env_steps, updates))
        return seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of evaluations and of waiting for a checkpoint."""
        began = time.monotonic()
        yield
        self._paused += time.monotonic() - began

    def rates(self) -> dict[str, float]:
        (began, steps, updates), (now, steps_now, updates_now) = self._marks[0], self._marks[-1]
        seconds = max(now - began, 1e-9)
        return {
            "env_steps_per_second": (steps_now - steps) / seconds,
            "updates_per_second": (updates_now - updates) / seconds,
        }


class TimeLeft:
    """Estimates the seconds left of a phase.

    The rate is measured from the first block of this phase in this process, so that resuming a run does not bias it.
    It uses a block's "seconds" of training, if there are any, because they exclude compilation.
    """

    def __init__(self) -> None:
        self._phase: str | None = None
        self._start: tuple[float, float] | None = None  # time and fraction done at the first block of the phase

    def estimate(self, info: Mapping[str, Any]) -> float | None:
        """Return the `seconds_left` of a block if it has them, otherwise an estimate if there is one."""
        if info.get("phase") != self._phase:
            self._phase = info.get("phase")
            self._start = None
        fraction = info.get("fraction")
        known = info.get("seconds_left")
        if known is not None or fraction is None:
            return known
        now = info.get("seconds", time.monotonic())
        self._start = self._start or (now, fraction)
        since = now - self._start[0]
        gained = fraction - self._start[1]
        return since * (1.0 - fraction) / gained if gained > 0 else None


def choose_spacing(iteration: int, total_iterations: int) -> int:
    """Return the iterations per row of metrics at this iteration of a run of `total_iterations`.

    A whole run has about 10,000 rows. Up to iteration 500 each iteration has a row. After that the spacing doubles
    whenever the iteration does, up to the spacing of the whole run, so that a run stopped early still has hundreds of
    rows.
    """
    doublings = (iteration // _DENSE).bit_length() - 1
    return min(-(-total_iterations // ROWS), 1 << max(doublings, 0)) or 1


class MetricAggregator:
    """Aggregates iterations into lines of metrics.jsonl.

    Names that begin with rollout/ are means over the episodes that ended, train/ comes from the algorithm, eval/ from
    the session's evaluations. Only time/ depends on the clock and therefore differs from run to run. Counters, such as
    env_steps, have no such beginning.

    A line has `every` iterations, 0 for `choose_spacing` in a run of `total_iterations` as planned. `group` is the
    incomplete line of the process that this one resumes.
    """

    def __init__(
        self, writer: Writer, every: int, total_iterations: int, group: Mapping[str, Any] | None = None
    ) -> None:
        self._writer = writer
        self._every = every
        self._total_iterations = total_iterations
        self.group: dict[str, Any] = dict(group or {})  # sums of an incomplete line, for the checkpoint
        self.losses: dict[str, float] = {}  # and accuracies, of the last line
        self.episodes: dict[str, float] = {}

    def add(
        self, counters: Mapping[str, int], learning: Mapping[str, Any], episodes: Mapping[str, Any], pace: Throughput
    ) -> None:
        """Add one iteration: its counters, metrics of `learn`, and sums over ended episodes.

        Among the counters are "iteration" and optionally "step", the step on TensorBoard's axis.
        """
        group = self.group or {"learning": {}, "episodes": {}}
        for name, value in learning.items():
            total, number = group["learning"].get(name, (0.0, 0))
            group["learning"][name] = [total + float(np.mean(value)), number + 1]
        for name, value in episodes.items():
            group["episodes"][name] = group["episodes"].get(name, 0.0) + float(value)
        self.group = group
        iteration = counters["iteration"]
        if iteration % (self._every or choose_spacing(iteration, self._total_iterations)) == 0:
            self.flush(counters, pace)

    def flush(self, counters: Mapping[str, int], pace: Throughput) -> None:
        """Write the incomplete line, if it has any iteration."""
        if not self.group:
            return
        learning = {f"train/{name}": total / number for name, (total, number) in self.group["learning"].items()}
        sums = dict(self.group["episodes"])
        episode_count = sums.pop("episodes", 0.0)
        episodes = {name: value / episode_count for name, value in sums.items()} if episode_count else {}
        self.episodes = episodes or self.episodes  # the console shows the last ones that ended
        self.losses = {n.removeprefix("train/"): v for n, v in learning.items() if n.endswith(("loss", "accuracy"))}
        self.group = {}
        self._writer.write(
            counters["iteration"],
            {
                **{name: number for name, number in counters.items() if name not in ("iteration", "step")},
                "episodes": episode_count,
                **{f"rollout/{name}": value for name, value in episodes.items()},
                **learning,
                "time/unix": time.time(),
                **{f"time/{name}": rate for name, rate in pace.rates().items()},
            },
            counters.get("step"),
        )
