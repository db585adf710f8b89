"""Adam steps as every algorithm here takes them; a thin layer over optax."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from envs_jax.base import Array


def adam(epsilon: float = 1e-8, max_grad_norm: float = 0.0) -> optax.GradientTransformation:
    """Adam's direction (betas 0.9, 0.999) for a step size given at every update, after clipping if asked for.

    References:
        Kingma and Ba 2015, arXiv 1412.6980, algorithm 1.
    """
    clip = [optax.clip_by_global_norm(max_grad_norm)] if max_grad_norm else []
    return optax.chain(*clip, optax.scale_by_adam(b1=0.9, b2=0.999, eps=epsilon))


def descend(
    optimiser: optax.GradientTransformation, gradient: Any, params: Any, state: Any, rate: Array | float
) -> tuple[Any, Any]:
    """One step against the gradient: (new parameters, new optimiser state)."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats with int32 counters
        direction, state = optimiser.update(gradient, state, params)
    return jax.tree.map(lambda p, d: p - rate * d, params, direction), state


def steps(state: Any) -> Array:
    """How many steps the state of an `adam` has seen, int32[]."""
    count: Array = optax.tree_utils.tree_get(state, "count")
    return count


def flat(tree: Any) -> Array:
    """All leaves one after another, float32[P]: few operations instead of a few for each leaf."""
    return ravel_pytree(tree)[0]


def unflat(vector: Array, like: Any) -> Any:
    """The tree of which `flat` made a vector; `like` has its leaves or their ShapeDtypeStructs."""
    leaves, structure = jax.tree.flatten(like)
    parts = jax.lax.split(vector, [math.prod(leaf.shape) for leaf in leaves])
    return jax.tree.unflatten(structure, [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)])


def norm(tree: Any) -> Array:
    """Euclidean norm of all leaves together, float32[]."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), jnp.float32(0)))
