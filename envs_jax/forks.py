"""Processes forked from one that used JAX: there every call of JAX would wait forever for threads that are gone."""

import contextlib
import os
from pathlib import Path

from jax._src import xla_bridge  # no public function says whether JAX has begun

_owners: set[int] = set()  # processes that called `check_process` and may use JAX: this one and its parents


def check_process(what: str, instead: str) -> None:
    """Raise ValueError in a process forked from one that used JAX; `what` would hang, `instead` says what to do."""
    process = os.getpid()
    if process in _owners:
        return
    if _has_begun() and (_owners or _has_lost_threads()):
        raise ValueError(
            f"this process was forked from one in which JAX already ran, so {what} would hang here: start the workers "
            f"with 'spawn' ({instead})"
        )
    _owners.add(process)


def _has_begun() -> bool:
    """Return whether JAX runs in this process; False where its private function for that is gone."""
    is_initialized = getattr(xla_bridge, "backends_are_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _has_lost_threads() -> bool:
    """Return whether no thread of JAX's CPU client runs, of which a fork copies none; False where that is unknown."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):  # on Linux
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
            names.append(path.read_text())
    uses_cpu = "cpu" in getattr(xla_bridge, "_backends", ())
    return uses_cpu and bool(names) and not any(name.startswith("tf_XLA") for name in names)
