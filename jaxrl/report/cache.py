"""Compiled programs, kept between runs."""

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxrl.common.files import cache_root

JAX_LEAST_SECONDS = 1.0  # JAX keeps what took longer to compile; a start makes dozens of smaller programs
_DAMAGED = "Error reading persistent compilation cache entry"


def cache_folder() -> Path:
    """Return ~/.cache/jaxrl, unless JAX_COMPILATION_CACHE_DIR or the caller names a folder."""
    return Path(getattr(jax.config, "jax_compilation_cache_dir", None) or cache_root())


def enable_compilation_cache() -> None:
    """Keep compiled programs in `cache_folder`: a second start of the same program compiles nothing."""
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    # nobody has chosen another
    if getattr(jax.config, "jax_persistent_cache_min_compile_time_secs", None) == JAX_LEAST_SECONDS:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def enable_in_command() -> None:
    """Enable the cache in a command; entries that JAX cannot read are deleted, so that it writes them anew."""
    enable_compilation_cache()
    if not isinstance(warnings.showwarning, _DamagedEntries):
        warnings.filterwarnings("always", _DAMAGED)
        warnings.showwarning = _DamagedEntries(warnings.showwarning)


class _DamagedEntries:
    """Deletes an entry of the compilation cache that JAX warns it cannot read: JAX never replaces an existing one.

    JAX compiles the program after the warning, and writes it again. Any other warning is shown as before.
    """

    def __init__(self, show: Callable[..., None]) -> None:
        self._show, self._warned = show, False

    def __call__(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if not (str(message).startswith(_DAMAGED) and _delete_entry(sys.exc_info()[1])):
            self._show(message, *args, **kwargs)
        elif not self._warned:
            self._warned = True
            print(f"warning: a damaged program in {cache_folder()} is compiled again and replaced", file=sys.stderr)


def _delete_entry(error: BaseException | None) -> bool:
    """Delete the file of the entry whose reading failed with this error; return whether that was possible."""
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    key = next((frame.f_locals["cache_key"] for frame, _ in frames if "cache_key" in frame.f_locals), None)
    try:
        (cache_folder() / f"{key}-cache").unlink()
    except OSError:
        return False
    return True
