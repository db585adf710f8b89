"""Settings of JAX that commands make in their own process before it has devices; `import jaxrl` makes none."""

import contextlib
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxrl.cli.threefry import compile_random_bits_quickly
from jaxrl.common.errors import one_line
from jaxrl.common.files import cache_root

_UNREADABLE = "Error reading persistent compilation cache entry"  # the beginnings of JAX's warnings
_UNWRITABLE = "Error writing persistent compilation cache entry"


def divide_cores(devices: int) -> None:
    """Let JAX divide the cores of a CPU into devices (0 = one for each), unless the user has done so, or JAX began."""
    cores = len(os.sched_getaffinity(0))
    number = devices or 2 ** int(math.log2(min(cores, 8)))
    if "JAX_NUM_CPU_DEVICES" not in os.environ and number > 1:
        with contextlib.suppress(RuntimeError):  # JAX has its devices already
            jax.config.update("jax_num_cpu_devices", number)


def speed_up_start() -> None:
    """Compile less: JAX's random bits in fewer kernels (same bits), and programs that are kept between runs.

    They are in ~/.cache/jaxrl, unless the user has set JAX's folder or minimum compile time. Entries that JAX cannot
    read are deleted, because JAX compiles such a program again but never replaces an entry. A folder that cannot be
    used is told once.
    """
    compile_random_bits_quickly()
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_root()))
    # By default JAX leaves out small programs, of which a start has dozens
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:  # type: ignore[attr-defined]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if not isinstance(warnings.showwarning, _CacheWarnings):
        warnings.filterwarnings("always", _UNREADABLE)
        warnings.filterwarnings("always", _UNWRITABLE)
        warnings.showwarning = _CacheWarnings(warnings.showwarning)


class _CacheWarnings:
    """Says JAX's warnings about the compilation cache once each, in a sentence; shows any other warning.

    An entry that cannot be read is deleted.
    """

    def __init__(self, show: Callable[..., None]) -> None:
        self._show = show
        self._told: set[bool] = set()

    def __call__(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if not str(message).startswith((_UNREADABLE, _UNWRITABLE)):
            self._show(message, *args, **kwargs)
            return
        folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        error = sys.exc_info()[1]
        is_damaged = str(message).startswith(_UNREADABLE) and _delete_entry(error)
        if is_damaged in self._told:
            return
        self._told.add(is_damaged)
        if is_damaged:
            sentence = f"a damaged program in {folder} is compiled again and replaced"
        else:
            reason = getattr(error, "strerror", None) or str(message).rpartition(": ")[2]
            sentence = (
                f"compiled programs cannot be kept in {folder} ({reason}), so each start compiles them again: make it "
                "writable, or set JAX_COMPILATION_CACHE_DIR to another folder"
            )
        print(f"warning: {one_line(sentence)}", file=sys.stderr)


def _delete_entry(error: BaseException | None) -> bool:
    """Delete the file of the entry whose reading failed with this error; return whether that was possible."""
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    key = next((frame.f_locals["cache_key"] for frame, _ in frames if "cache_key" in frame.f_locals), None)
    try:
        (Path(jax.config.jax_compilation_cache_dir) / f"{key}-cache").unlink()  # type: ignore[attr-defined]
    except OSError:
        return False
    return True
