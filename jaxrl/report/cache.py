"""Compiled programs, kept between runs."""

from pathlib import Path

import jax

from jaxrl.common.files import cache_root

JAX_LEAST_SECONDS = 1.0  # JAX keeps what took longer to compile; a start makes dozens of smaller programs


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
