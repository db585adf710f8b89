"""The memory plan: layout of a run on the devices, its memory, and an error before it runs out of memory.

The estimate comes from shapes alone, the exact figure from the compiled block; both are checked against
the device before any large array is allocated.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from envs_jax.batch import BatchedEnvironment
from jaxrl.algos.base import Algorithm
from jaxrl.common.errors import UsageError, UserError
from jaxrl.report.console import gibibytes
from jaxrl.rl.data_parallel import largest_divisor
from jaxrl.runtime.trainer import Trainer

GIB = 2**30
SHARE = 0.15  # of the memory, for temporaries: stepped environments, activations of one gradient
CPU_ROLLOUT = 64  # environments rolled out at a time on a CPU: more would not fit into its caches
CPU_SAMPLES = 512  # samples per gradient evaluation on a CPU, for the same reason
FREE = 0.95  # share of the free memory that a plan may use
NOTHING_FITS = "choose smaller networks, batches or environments, or a machine with more memory"
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUPS = (  # version 2, version 1: limit, use, statistics, and the statistic of cached files
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


class TooLargeError(UserError):
    """The run does not fit into the memory of the device."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device.

    Attributes:
        parts: {what: bytes}, from shapes.
        limit: bytes that may be used.
        num_envs: environments over all devices.
        scaling: bytes of `parts` that grow with the number of environments.
        eval_chunk: episodes of an evaluation that are rolled out at a time on a device.
    """

    parts: dict[str, int]
    limit: int
    num_envs: int
    scaling: int
    eval_chunk: int = 0

    @property
    def total(self) -> int:
        """Return the bytes from shapes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Return whether the bytes from shapes fit."""
        return self.total <= self.limit

    def largest(self, needed: int | None = None) -> int:
        """Estimate the largest num_envs that fits, if this one needs `needed` bytes; 0 if none does."""
        factor = 1.0 if needed is None else needed / self.total
        fixed, per_env = (self.total - self.scaling) * factor, self.scaling * factor / self.num_envs
        return rounded((self.limit - fixed) / per_env) if self.limit > fixed and per_env else 0

    def refusal(self, needed: int, advice: str) -> TooLargeError:
        """Return the error for a plan that does not fit."""
        return TooLargeError(
            f"the run needs {gibibytes(needed)} per device, but {gibibytes(self.limit)} may be used (--memory_gb): "
            + advice
        )

    def check(self, needed: int) -> None:
        """Raise TooLargeError with an estimate of the largest num_envs that fits, if `needed` bytes do not."""
        if needed > self.limit:
            largest = self.largest(needed)
            raise self.refusal(needed, f"the largest --num_envs that fits is {largest}" if largest else NOTHING_FITS)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gibibytes(size)}" for name, size in self.parts.items())
        return f"memory plan per device: {parts}; together {gibibytes(self.total)} of {gibibytes(self.limit)}"


def rounded(num_envs: float) -> int:
    """Round a number of environments down so that eight devices can share it, if it is large enough for that."""
    return int(num_envs) - int(num_envs) % 8 if num_envs >= 8 else int(num_envs)


def two_digits(value: float) -> float:
    """Round a positive number down to two digits."""
    step = 10.0 ** (math.floor(math.log10(max(value, 1e-9))) - 1)
    return math.floor(value / step) * step


def search_largest(
    plan: Plan, value: float, replan: Callable[[Any], Plan | None], rounding: Callable[[float], float]
) -> float:
    """Return the largest value of a setting whose plan fits, to a few percent; 0 if none does.

    Args:
        plan: of `value`, which does not fit.
        value: of the setting; memory is about linear in it.
        replan: the plan for another value, None where there is none.
        rounding: rounds values down.
    """
    fitting, below = 0.0, None  # the largest value that fits so far, and its bytes
    above, guess = plan.total, rounding(value / 2)  # bytes of `value`, from now on the smallest that does not fit
    for _ in range(10):
        found = replan(guess) if guess > fitting else None
        if found is None:
            break
        slope = (above - found.total) / (value - guess)
        if found.fits:
            fitting, below = guess, found.total
        else:
            value, above = guess, found.total
        if below is not None:
            slope = (above - below) / (value - fitting)
        meets = value - (above - plan.limit) / slope if slope > 0 else 0.0  # where the line reaches the limit
        if value < 1.05 * fitting or (below is None and meets <= 0):
            break
        guess = rounding(min(max(meets, guess / 8), 0.97 * value))
        if guess < 1.02 * fitting:  # the line says little: halve the range
            guess = rounding((fitting + value) / 2)
    return fitting


def free_memory(device: jax.Device, devices: int = 1) -> int:
    """Return the bytes that a run may use on each of `devices` devices of this host, which are like this one.

    CPU devices share the memory that the system reports as available (within a container's limit).
    """
    if device.platform != "cpu":
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            return int(FREE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    available = min(_available(), *(_left_in_cgroup(*names) for names in CGROUPS))
    return int(FREE * available / devices)


def _available() -> int:
    with contextlib.suppress(OSError):
        if found := re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_in_cgroup(limit: str, used: str, statistics: str, reclaimable: str, root: Path = CGROUP_ROOT) -> float:
    """Return the bytes left of a container's limit, infinite without one; cached files do not count as used."""
    try:
        text = (root / limit).read_text().strip()
        if not text.isdecimal():
            return math.inf
        lines = dict(line.split() for line in (root / statistics).read_text().splitlines())
        return int(text) - int((root / used).read_text()) + int(lines.get(reclaimable, 0))
    except (OSError, ValueError):
        return math.inf


def size(tree: Any) -> int:
    """Return the bytes of the arrays (or shapes) of a pytree."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def choose_devices(requested: int, num_envs: int, shards: int) -> tuple[int, str | None]:
    """Return the number of devices to use, equal on every host, and a warning if some are left out.

    `requested` are the devices of every host, 0 for all; `num_envs` and `shards` belong to the whole run.

    Raises UsageError: more requested than there are, or a requested number that cannot share the batch.
    """
    present, hosts = jax.local_device_count(), jax.process_count()
    if requested > present:
        raise UsageError(f"--devices {requested}, but there are only {present}: choose {present} or fewer")
    wanted = requested or present
    used = max((d for d in range(1, wanted + 1) if shards % (d * hosts) == 0), default=0)
    if used == wanted:
        return used * hosts, None
    fitting = -(-num_envs // 8) * 8
    if fitting == num_envs:
        remedy = "a minibatch that 8 divides and no --logical_shards"
    else:
        remedy = f"--num_envs {fitting}"
    devices = f"{wanted} devices" if hosts == 1 else f"{hosts} hosts of {wanted} devices"
    cut = f"{num_envs} environments are cut into {shards} logical shards, which {devices} cannot share evenly"
    if not used:
        others = f", or {remedy} with 2, 4 or 8 hosts" if shards < 8 else ""
        raise UsageError(f"{cut}: start {_power_of_two(min(hosts, shards))} of them{others}")
    if requested:
        raise UsageError(f"{cut}: use --devices {used}, or {remedy} with 1, 2, 4 or 8 devices")
    better = _power_of_two(min(wanted, 8 // hosts))
    advice = f"; {remedy} would let {better} be used" if better > used else ""
    return used * hosts, f"{cut}: only {used} of them are used{' on each' if hosts > 1 else ''}{advice}"


def _power_of_two(limit: int) -> int:
    return 1 << (limit.bit_length() - 1)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Resolved chunk sizes, see `RunSettings`."""

    rollout: int
    learn: int


def choose_chunks(
    env: BatchedEnvironment,
    algo: Algorithm,
    rollout: int,
    learn: int,
    limit: int,
    adapt: bool = False,
) -> Chunks:
    """Choose chunk sizes that keep temporaries within SHARE of the memory; given ones are checked and kept.

    Args:
        env, algo: with the layout of the run.
        rollout, learn: `--rollout_chunk` and `--learn_chunk`.
        limit: bytes that may be used on a device.
        adapt: lower given chunks that do not divide the environments and samples of a device, whose number may
            have changed since they were chosen.

    Raises:
        UsageError: a given chunk does not divide its axis.
    """
    layout, cpu = algo.layout, jax.default_backend() == "cpu"
    together = layout.local_envs
    learned = most_samples(algo)
    rollout = min(rollout, together)
    if adapt:
        rollout = rollout and largest_divisor(together, rollout)
        learn = learn and largest_divisor(learned, learn)
    for name, chunk, whole in (("rollout_chunk", rollout, together), ("learn_chunk", learn, learned)):
        if chunk and whole > 1 and whole % chunk:
            raise UsageError(f"{name} {chunk} does not divide {whole}: use {largest_divisor(whole, chunk)}")
    if not rollout and all(phase.restart or not phase.steps for phase in algo.phases):
        per_env = 3 * rollout_env_bytes(env)  # before, after, and compiler temporaries
        affordable = SHARE * limit / max(per_env, 1)
        rollout = _chunk(together, affordable, CPU_ROLLOUT if cpu else together)
    if not learn and learned > 1:  # else the algorithm cannot split its gradients
        affordable = SHARE * limit / max(algo.memory.sample_bytes, 1)
        learn = _chunk(learned, affordable, CPU_SAMPLES if cpu else learned)
    return Chunks(rollout or together, learn)


def most_samples(algo: Algorithm) -> int:
    """Return the samples of one gradient evaluation of a device without chunks."""
    return algo.memory.largest_chunk * algo.layout.local_shards


def _chunk(whole: int, affordable: float, wanted: int) -> int:
    """Return a divisor of `whole` not above `affordable`, near `wanted`."""
    affordable = max(1, int(affordable))
    below = largest_divisor(whole, min(affordable, wanted))
    if below >= min(affordable, wanted, whole) / 4:
        return below
    above = [d for d in range(wanted, min(affordable, whole) + 1) if whole % d == 0]
    return above[0] if above else below


def rollout_env_bytes(env: BatchedEnvironment) -> int:
    """Return the bytes of the state and the time step of one environment."""
    return size(env.shapes)


def make_plan(trainer: Trainer, limit: int, episodes: int = 0) -> Plan:
    """Estimate the memory of a run from shapes.

    `limit` are the bytes that may be used on a device, `episodes` those of an evaluation there. They are rolled out as
    many at a time as in training where that has a size of its own (where environments restart), else as many as fit.
    """
    layout, algo, shapes = trainer.layout, trainer.algo, trainer.shapes()
    devices, trials = trainer.mesh.size, max(trainer.trials // trainer.mesh.size, 1)  # of one device
    replicated = size((shapes.algo.replicated, shapes.progress)) // (devices if trainer.trials > 1 else 1)
    split = size(shapes.algo.sharded) // devices
    kept = size((shapes.carry, shapes.env, shapes.timestep, shapes.statistics)) // devices
    per_env = size((shapes.env, shapes.timestep)) // layout.num_envs // trainer.trials if kept else 0
    rollout = 3 * (per_env or rollout_env_bytes(trainer.env))  # tracing it again takes a second
    fitting = int(SHARE * limit / trials / rollout) if kept else 0
    evaluation = min(max(trainer.rollout_chunk, fitting), episodes)
    # Of the phases that restart their environments, the longest collects most.
    longest = {phase.restart: phase for phase in sorted(algo.phases, key=lambda phase: phase.steps) if phase.steps}
    work = {
        "rollout": 0 if kept else trials * rollout * (trainer.rollout_chunk or layout.local_envs),
        "trajectory": max((size(trainer.trajectory_shapes(phase)) // devices for phase in longest.values()), default=0),
        "learner": trials * algo.memory.data_bytes,
        "activations": trials * algo.memory.sample_bytes * (layout.learn_chunk or most_samples(algo)),
    }
    parts = {
        "parameters": 2 * replicated,  # and gradients, optimizer step
        "replay": split,
        "environments": 2 * kept,
        **work,
        # only what exceeds training's temporaries
        "evaluation": max(0, trials * rollout * evaluation - sum(work.values())),
        # On a CPU the host's copy of a checkpoint is in the same memory.
        "checkpoint": replicated + split + kept if jax.default_backend() == "cpu" else 0,
    }
    scaling = split + 2 * kept + work["trajectory"] + work["learner"] + bool(parts["checkpoint"]) * (split + kept)
    return Plan({name: part for name, part in parts.items() if part}, limit, layout.num_envs, scaling, evaluation)


def compiled_bytes(compiled: Any) -> int:
    """Return the peak bytes of a compiled call: arguments, results that do not reuse them, temporaries."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)
