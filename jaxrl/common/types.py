"""Names for the arrays and pytrees of arrays in signatures."""

from typing import Any, TypeAlias

import jax

from jaxrl.common.jax_flags import check_draws

Key: TypeAlias = jax.Array  # as `jax.random` makes it: key[], or key[N] for a batch
Params: TypeAlias = Any  # networks' parameters: a pytree of arrays, as flax makes it
PolicyParams: TypeAlias = Any  # what `Algorithm.policy` returns and `act` takes: a pytree of arrays


def check_key(key: Any) -> None:
    """Raise ValueError for anything but a key of `jax.random.key`, and where JAX is told to draw other numbers."""
    check_draws()
    if not isinstance(key, jax.Array) or not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"a key is needed, such as jax.random.key(0), not {type(key).__name__}")
