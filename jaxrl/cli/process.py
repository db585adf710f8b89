"""What commands set in their own process before JAX has devices; a program that imports jaxrl sets it itself."""

import contextlib
import math
import os

import jax

from jaxrl.common.files import cache_root


def divide_cores(devices: int) -> None:
    """Let JAX divide the cores of a CPU into devices, 0 = one for each, unless the user has or it is too late."""
    cores = len(os.sched_getaffinity(0))
    number = devices or 2 ** int(math.log2(min(cores, 8)))
    if "JAX_NUM_CPU_DEVICES" not in os.environ and number > 1:
        with contextlib.suppress(RuntimeError):  # JAX has its devices already
            jax.config.update("jax_num_cpu_devices", number)


def enable_compilation_cache() -> None:
    """Keep compiled programs in ~/.cache/jaxrl, unless the user has named a folder or a shortest time to JAX."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_root()))
    # JAX's default leaves the dozens of small programs out that a start makes
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:  # type: ignore[attr-defined]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
