"""Traces of a device, for TensorBoard's profile plugin and ui.perfetto.dev."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

from jaxrl.common.errors import one_line

Result = TypeVar("Result")


def record(function: Callable[[], Result], folder: Path) -> tuple[Result, float, str]:
    """Call `function` once, wait for its result, and keep a trace in `folder`/plugins/profile/<time>.

    Returns:
        the result, the seconds of the call, and half a sentence why there is no trace, or "".
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # frames of Python would outnumber the operations
    problem = ""
    try:
        jax.profiler.start_trace(str(folder), profiler_options=options)
    except (RuntimeError, OSError) as error:
        problem = one_line(str(error))
    began = time.perf_counter()
    try:
        result = jax.block_until_ready(function())
        seconds = time.perf_counter() - began
    finally:
        try:
            if not problem:
                jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:
            problem = one_line(str(error))
    return result, seconds, problem
