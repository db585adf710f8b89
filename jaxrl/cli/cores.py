"""Devices that the cores of a CPU are divided into, before JAX has any."""

import contextlib
import math
import os

import jax


def divide_cores(devices: int) -> None:
    """Let JAX divide the cores of a CPU into devices, 0 = one for each, unless the user has or it is too late."""
    cores = len(os.sched_getaffinity(0))
    number = devices or 2 ** int(math.log2(min(cores, 8)))
    if "JAX_NUM_CPU_DEVICES" not in os.environ and number > 1:
        with contextlib.suppress(RuntimeError):  # JAX has its devices already
            jax.config.update("jax_num_cpu_devices", number)
