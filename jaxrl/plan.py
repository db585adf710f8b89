"""The memory plan: how a run is laid out on the devices, what it will need, and a refusal before it fails.

The estimate comes from shapes alone. The compiled block then tells the exact figure; both are checked against
the device before anything of size is allocated.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.batch import BatchedEnvironment
from jaxrl.algos.base import Algorithm, Phase, start
from jaxrl.errors import UsageError, UserError
from jaxrl.parallel import Layout, largest_divisor
from jaxrl.trainer import Trainer

GIB = 2**30
SHARE = 0.15  # of the memory, for what is in flight: flying environments, activations of one gradient
CPU_FLIGHT = 64  # environments flown at a time on a CPU: more would only fall out of its caches
CPU_SAMPLES = 512  # samples per gradient evaluation on a CPU, for the same reason


class TooLargeError(UserError):
    """The run does not fit into the memory of the device."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device.

    Attributes:
        parts: {what: bytes}, from shapes.
        limit: bytes that may be used.
        num_envs: environments over all devices.
        scaling: the share of `parts` that grows with the number of environments, in bytes.
    """

    parts: dict[str, int]
    limit: int
    num_envs: int
    scaling: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def check(self, needed: int | None = None) -> None:
        """Raises TooLargeError that names the largest num_envs that fits, if `needed` bytes do not."""
        needed = self.total if needed is None else needed
        if needed <= self.limit:
            return
        factor = needed / self.total
        fixed, per_env = (self.total - self.scaling) * factor, self.scaling * factor / self.num_envs
        largest = int((self.limit - fixed) / per_env) if self.limit > fixed and per_env else 0
        largest -= largest % 8 if largest >= 8 else 0
        advice = (
            f"the largest --num_envs that fits is about {largest}" if largest else "choose a smaller network or map"
        )
        raise TooLargeError(
            f"the run needs {needed / GIB:.2f} GiB per device, but {self.limit / GIB:.2f} GiB may be used "
            f"(--memory_gb): {advice}"
        )

    def lines(self) -> list[str]:
        """For people."""
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts.items())
        return [f"memory plan in GiB per device: {parts}; {self.total / GIB:.2f} of {self.limit / GIB:.2f}"]


def free_memory(device: jax.Device) -> int:
    """Bytes that a run may use: of a CPU what the system calls available (within a container's limit)."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(0.95 * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    available = (
        next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable")
        )
        if Path("/proc/meminfo").exists()
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    for name, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, current = Path("/sys/fs/cgroup", name), Path("/sys/fs/cgroup", used)
        if limit.exists() and current.exists() and limit.read_text().strip().isdigit():
            available = min(available, int(limit.read_text()) - int(current.read_text()))
    return int(0.95 * available)


def size(tree: Any) -> int:
    """Bytes of the arrays (or shapes) of a pytree."""

    def of(leaf: Any) -> int:
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return int(leaf.size) * (8 if key else jnp.dtype(leaf.dtype).itemsize)

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


def choose_devices(requested: int, num_envs: int, shards: int) -> tuple[int, str | None]:
    """How many devices to use, and a warning if some are left out.

    Raises:
        UsageError: more requested than there are, or a requested number that cannot share the batch.
    """
    present = jax.local_device_count()
    if requested > present:
        raise UsageError(f"--devices {requested}, but there are only {present}: choose {present} or fewer")
    wanted = requested or present
    used = max(d for d in range(1, wanted + 1) if shards % d == 0)
    if used == wanted:
        return used, None
    fitting = -(-num_envs // 8) * 8
    sentence = (
        f"{num_envs} environments are cut into {shards} logical shards, which {wanted} devices cannot share evenly"
    )
    if requested:
        raise UsageError(f"{sentence}: use --devices {used}, or --num_envs {fitting} with 1, 2, 4 or 8 devices")
    return used, f"{sentence}: {wanted - used} devices stay idle; --num_envs {fitting} would use {min(wanted, 8)}"


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Resolved sizes, see `RunSettings`."""

    rollout: int
    learn: int


def choose_chunks(
    env: BatchedEnvironment,
    make_algo: Callable[[Layout], Algorithm],
    layout: Layout,
    rollout: int,
    learn: int,
    limit: int,
) -> Chunks:
    """Chunk sizes that keep what is in flight within SHARE of the memory; given ones are checked and kept.

    Raises:
        UsageError: a given chunk does not divide what it cuts.
    """
    platform = jax.default_backend()
    algo = make_algo(layout)
    whole = layout.num_envs // layout.shards if layout.exact else layout.local_envs
    largest = algo.largest_chunk()
    for name, chunk, of in (("rollout_chunk", rollout, whole), ("learn_chunk", learn, largest)):
        if chunk and of % chunk:
            raise UsageError(f"{name} {chunk} does not divide {of}: use {largest_divisor(of, chunk)}")
    if not rollout:
        per_env = 3 * flying_bytes(env)  # before, after, and what the compiler keeps in between
        affordable = max(1, int(SHARE * limit) // max(per_env, 1))
        rollout = largest_divisor(whole, min(affordable, CPU_FLIGHT if platform == "cpu" else affordable))
        if not all(phase.restart or not phase.steps for phase in algo.phases):
            rollout = whole
    if not learn:
        affordable = max(1, int(SHARE * limit) // max(algo.sample_bytes(), 1))
        learn = largest_divisor(largest, min(affordable, CPU_SAMPLES if platform == "cpu" else affordable))
    return Chunks(rollout, learn)


def flying_bytes(env: BatchedEnvironment) -> int:
    """Bytes of the state of one environment."""
    progress = jax.eval_shape(start)
    context = jax.eval_shape(env.context, progress)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    return size(jax.eval_shape(env.reset, keys, context))


def make_plan(trainer: Trainer, limit: int) -> Plan:
    """What a run needs, from shapes."""
    layout, algo = trainer.layout, trainer.algo
    shapes = trainer.shapes()
    replicated = size((shapes.algo.replicated, shapes.progress))
    split = size(shapes.algo.split) // layout.devices
    kept = size((shapes.actor, shapes.env, shapes.timestep, shapes.statistics)) // layout.devices
    rollout = trainer.rollout_chunk or layout.local_envs
    parts = {
        "parameters": 2 * replicated,  # and gradients, optimiser step
        "replay": split,
        "environments": 2 * kept,
        "flying": 0 if kept else 3 * flying_bytes(trainer.env) * rollout,
        "trajectory": max((trajectory_bytes(trainer, phase) for phase in algo.phases if phase.steps), default=0),
        "learner": algo.data_bytes(),
        "activations": algo.sample_bytes() * (layout.learn_chunk or algo.largest_chunk()),
    }
    scaling = sum(parts[name] for name in ("replay", "environments", "trajectory", "learner"))
    return Plan({name: part for name, part in parts.items() if part}, limit, layout.num_envs, scaling)


def trajectory_bytes(trainer: Trainer, phase: Phase) -> int:
    """Bytes on one device of what one iteration of a phase collects."""
    rows = trainer.trajectory_shapes(phase)
    return size(rows) // trainer.layout.devices


def compiled_bytes(compiled: Any) -> int:
    """Bytes that a compiled call holds at its peak: arguments, results that do not reuse them, temporaries."""
    memory = compiled.memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
