"""Traces of a device, for TensorBoard's profile plugin and ui.perfetto.dev."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from jaxrl.common.errors import one_line

Result = TypeVar("Result")


class Trace(NamedTuple):
    """Result of a trace.

    Attributes:
        seconds: of the call that was traced.
        problem: half a sentence, why there is none; else empty.
    """

    seconds: float
    problem: str = ""


def record(function: Callable[[], Result], folder: Path) -> tuple[Result, Trace]:
    """Call `function` once, wait for its result, and keep a trace in `folder`/plugins/profile/<time>.

    If no trace can be made, the function is called anyway.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # frames of Python would outnumber the operations
    problem = _attempt(lambda: jax.profiler.start_trace(str(folder), profiler_options=options))
    is_traced, began = not problem, time.perf_counter()
    try:
        result = jax.block_until_ready(function())
        seconds = time.perf_counter() - began
    finally:
        if is_traced:
            problem = _attempt(jax.profiler.stop_trace)
    return result, Trace(seconds, problem)


def _attempt(step: Callable[[], Any]) -> str:
    """Take a step of the profiler; return why it failed, or ""."""
    try:
        step()
    except (RuntimeError, OSError) as error:
        return one_line(str(error))
    return ""
