"""Names for the arrays and pytrees of arrays in signatures."""

from typing import Any, TypeAlias

import jax

Key: TypeAlias = jax.Array  # of `jax.random`: key[], or key[N] for a batch
Params: TypeAlias = Any  # of networks: a pytree of arrays, as flax makes it
PolicyParams: TypeAlias = Any  # what `Algorithm.policy` returns and `act` takes: a pytree of arrays


def check_key(key: Any) -> None:
    """Raise ValueError for anything but a key of `jax.random.key`."""
    if not isinstance(key, jax.Array) or not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"a key is needed, such as jax.random.key(0), not {type(key).__name__}")
