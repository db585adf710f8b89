"""Memory of a run: what a device has, what compiled programs need, the sizes of chunks, and the refusal.

Nothing large is allocated before the run is known to fit. First the bytes of its state are compared with the free
memory, then the compiler's figures for each program.
"""

import contextlib
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from envs_jax.batch import BatchedEnvironment
from envs_jax.progress import start as start_progress
from jaxrl.algos.base import Algorithm
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.types import Key
from jaxrl.report.console import gibibytes
from jaxrl.rl.data_parallel import SPLIT, largest_divisor, on_mesh
from jaxrl.runtime.config import Config, RunSettings
from jaxrl.runtime.train_state import TrainState

GIB = 2**30
SHARE = 0.15  # share of the memory for a rollout's environments, or for a gradient's activations
CPU_ROLLOUT = 64  # environments rolled out at a time on a CPU: more would not fit into its caches
CPU_SAMPLES = 512  # samples per gradient evaluation on a CPU, for the same reason
FORWARD_SAMPLES = 2**16  # samples per pass without a gradient on a GPU
SAMPLE_BYTES = 2**17  # bytes of activations per sample, roughly, in the larger networks
FREE = 0.95  # share of the free memory that a run may use
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUPS = (  # version 2, version 1: limit, use, statistics, and the statistic of cached files
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


class TooLargeError(UserError):
    """The run does not fit into the memory of the device."""


def free_memory(device: jax.Device, devices: int = 1) -> int:
    """Return the bytes that a run may use on each of `devices` devices of this host; `device` is one of them.

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
        if line := re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return int(line[1]) * 1024
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
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def local_size(tree: Any) -> int:
    """Return the bytes that a pytree of shapes with shardings needs on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def rollout_env_bytes(env: BatchedEnvironment, envs: int, mesh: Mesh) -> int:
    """Return the bytes of the state and the time step of one environment.

    JAX traces the reset of `envs` environments on each device of the mesh; a rollout of as many uses that trace again.
    """
    count = envs * mesh.size

    def reset(keys: Key) -> Any:
        return env.reset(keys, env.context(start_progress()))

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
    return size(jax.eval_shape(on_mesh(reset, mesh, SPLIT, SPLIT), keys)) // count


def most_environments(limit: float, env_bytes: int) -> int:
    """Return how many environments may be stepped together, each in three copies: before, after and temporary."""
    return int(SHARE * limit / max(3 * env_bytes, 1))


def compiled_bytes(compiled: Any) -> int:
    """Return the peak bytes of a compiled call on a device: arguments, temporaries, results not stored in arguments."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)


def choose_chunks(
    settings: RunSettings, env: BatchedEnvironment, algo: Algorithm, mesh: Mesh, limit: float, adapt: bool
) -> tuple[int, int, int]:
    """Return the environments that are rolled out at a time on a device, its samples per gradient and per forward pass.

    Where `settings` do not say, they are quick and take a share of `limit`, the bytes of a device for each trial.
    The rollout will be on `mesh`. `adapt` lowers a chunk that does not divide the environments or samples of a device:
    a resumed run may have others.

    Raises UsageError: a number does not divide.
    """
    layout = algo.layout
    cpu = jax.default_backend() == "cpu"
    envs = layout.local_envs
    samples = algo.gradient_samples * layout.local_shards
    rollout = _fit("rollout_chunk", min(settings.rollout_chunk, envs), envs, adapt)
    if not rollout and all(phase.restart or not phase.steps for phase in algo.phases):
        preferred = CPU_ROLLOUT if cpu else envs
        env_bytes = rollout_env_bytes(env, _divide(envs, envs, preferred), mesh)
        rollout = _divide(envs, most_environments(limit, env_bytes), preferred)
    learn = _fit("learn_chunk", settings.learn_chunk, samples, adapt)
    most = max(int(SHARE * limit / SAMPLE_BYTES), CPU_SAMPLES)
    if not learn and samples > 1:  # else the algorithm cannot split its gradients
        learn = _divide(samples, most, CPU_SAMPLES if cpu else samples)
    forward = learn
    if learn == samples and not cpu:
        # GPUs want few large kernels; a resumed run must find the same number, though other memory may be free
        forward = max(samples, 2 ** int(math.log2(min(FORWARD_SAMPLES, most))))
    return rollout or envs, learn, forward


def _fit(name: str, chunk: int, whole: int, adapt: bool) -> int:
    """Return the requested chunk, 0 if none is; `adapt` lowers it to a divisor of `whole`. Raises UsageError."""
    if not chunk or whole <= 1 or whole % chunk == 0:
        return chunk
    if not adapt:
        raise UsageError(f"{name} {chunk} does not divide {whole}: use {largest_divisor(whole, chunk)}")
    return largest_divisor(whole, chunk)


def _divide(whole: int, most: int, preferred: int) -> int:
    """Return a divisor of `whole` not above `most`, near `preferred`."""
    most = max(1, min(most, whole))
    divisor = largest_divisor(whole, min(most, preferred))
    if divisor >= min(most, preferred) / 4:
        return divisor
    return next((d for d in range(preferred, most + 1) if whole % d == 0), divisor)


def check_fits(
    needed: int, limit: int, state: TrainState, config: Config, algo: Algorithm, resuming: bool = False
) -> int:
    """Return the bytes that a run needs on a device while a checkpoint is written.

    Args:
        needed: bytes of its state, or of a compiled program and everything else in memory while it runs.
        limit: bytes that may be used.
        state: shapes of its state with their shardings.

    Raises TooLargeError: they do not fit; names the setting to lower.
    """
    copies = 2 if jax.default_backend() == "cpu" else 1  # the host's copy for a checkpoint is in the same memory
    needed += (copies - 1) * local_size(state)
    if needed <= limit:
        return needed
    flat = config.flat()
    replicated = copies * local_size(state.algo.replicated)
    storage = copies * local_size(state.algo.sharded) if algo.storage_setting else 0
    setting = "num_envs"
    scaling = needed - storage - replicated
    if storage > needed / 2:
        setting = algo.storage_setting
        scaling = storage
    fitting = int(flat[setting] * (1 - (needed - limit) / scaling)) if scaling > 0 else 0
    fitting -= fitting % 8 if fitting > 8 else 0
    if resuming:
        advice = "resume it where more is free, or with more --devices"
    elif fitting < 1:
        advice = "choose smaller networks, batches or environments, or a machine with more memory"
    else:
        advice = f"lower --{setting} from {flat[setting]} to about {fitting}"
        if needed > 2 * copies * local_size(state):  # most is for what was collected, or for gradients
            chunks = (f"--{name} from {flat[name]}" for name in ("learn_chunk", "batch_size") if flat.get(name))
            advice = ", or ".join((advice, *chunks))
    raise TooLargeError(
        f"the run needs {gibibytes(needed)} per device, but {gibibytes(limit)} may be used (--memory_gb): {advice}"
    )
