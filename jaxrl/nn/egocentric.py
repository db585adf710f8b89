"""Egocentric views: how networks see an observation from its agent, and whose their outputs are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from envs_jax.base import Array

# A view [...] -> what its agent sees, and which output of a network belongs to each action, int32[n], or None
Turn = Callable[[Array], tuple[Array, Array | None]]


def turn_views(turn: Turn | None, views: Array) -> tuple[Array, Array | None]:
    """Return views [N, ...] as networks see them, and the order of their outputs, int32[N, n]; None: as they are."""
    if turn is None:
        return views, None
    turned_views, action_indices = jax.vmap(turn)(views)
    return turned_views, action_indices


def reorder(out: Array, action_indices: Array | None) -> Array:
    """Return outputs float32[N, k + n] with the last n in the order of the actions, int32[N, n]; None: as they are."""
    if action_indices is None:
        return out
    n = action_indices.shape[1]
    # a product, because the gradient of a gather is a slow scatter
    chosen = jax.nn.one_hot(action_indices, n, dtype=out.dtype)
    return jnp.concatenate([out[:, :-n], jnp.sum(chosen * out[:, None, -n:], axis=-1)], axis=1)
