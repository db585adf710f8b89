"""The persistent compilation cache: a second start of the same program compiles nothing."""

import os
from pathlib import Path

import jax


def enable_compilation_cache() -> None:
    """Keep compiled programs in ~/.cache/jaxrl, unless JAX_COMPILATION_CACHE_DIR or the caller names a folder."""
    if getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    jax.config.update("jax_compilation_cache_dir", str(root / "jaxrl"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
