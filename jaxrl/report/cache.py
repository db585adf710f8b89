"""The persistent compilation cache: a second start of the same program compiles nothing."""

import os
from pathlib import Path

import jax


def enable_compilation_cache() -> None:
    """Keep compiled programs under JAX_COMPILATION_CACHE_DIR, by default ~/.cache/jaxrl."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return  # JAX reads it by itself
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(root / "jaxrl"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 2.0)
