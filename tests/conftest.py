"""JAX for all tests: eight CPU devices, no silent promotion of types, compiled programs kept between runs."""

import os
from pathlib import Path

import jax

# One folder for each pytest-xdist worker: without the optional package `filelock`, JAX's cache does not guard
# a reader against another process that is writing the same entry.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_CACHE = Path(__file__).parents[1] / ".cache" / "jax" / _WORKER

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
