"""JAX for all tests: eight CPU devices, no silent promotion of types, compiled programs kept between runs."""

from pathlib import Path

import jax

_CACHE = Path(__file__).parents[1] / ".cache" / "jax"

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
# With a limit (and `filelock`) entries are read and written under a lock: all processes of pytest-xdist share them.
jax.config.update("jax_compilation_cache_max_size", 2**32)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
