"""Optimizers with a learning rate of 1 and the steps that all algorithms take; a thin layer over optax."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from envs_jax.base import Array
from jaxrl.common.types import Params

BETA1, BETA2 = 0.9, 0.999  # Adam's


def adam(epsilon: float = 1e-8, max_grad_norm: float = 0.0) -> optax.GradientTransformation:
    """Adam (betas 0.9, 0.999) with a learning rate of 1, for `apply_gradients`, after optional gradient clipping.

    Equal to `optax.adam` except for the bias correction 1 - beta^t: in float32 that difference of numbers near 1 has
    a relative error of 1e-5 in the first steps, which the updates inherit.

    References:
        Kingma and Ba 2015, arXiv 1412.6980, algorithm 1.
    """

    def update(gradient: Any, state: Any, params: Params = None) -> tuple[Any, Any]:
        del params
        count = optax.safe_increment(state.count)
        t = count.astype(jnp.float32)
        first, second = (-jnp.expm1(t * math.log(beta)) for beta in (BETA1, BETA2))
        mu = jax.tree.map(lambda g, m: (1 - BETA1) * g + BETA1 * m, gradient, state.mu)
        nu = jax.tree.map(lambda g, n: (1 - BETA2) * jnp.square(g) + BETA2 * n, gradient, state.nu)
        step = jax.tree.map(lambda m, n: -(m / first) / (jnp.sqrt(n / second) + epsilon), mu, nu)
        return step, optax.ScaleByAdamState(count, mu, nu)

    clip = [optax.clip_by_global_norm(max_grad_norm)] if max_grad_norm else []
    return optax.chain(*clip, optax.GradientTransformation(optax.scale_by_adam().init, update))


def apply_gradients(
    optimizer: optax.GradientTransformation, gradient: Any, params: Params, state: Any, rate: Array | float
) -> tuple[Params, Any]:
    """Apply one step of an optimizer with learning rate 1, scaled by `rate`; return parameters and optimizer state."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats with int32 counters
        step, state = optimizer.update(gradient, state, params)
    return jax.tree.map(lambda p, d: p + rate * d, params, step), state


def ravel(tree: Any) -> Array:
    """Concatenate all leaves, float32[P]: few operations instead of a few per leaf."""
    return ravel_pytree(tree)[0]


def unravel(vector: Array, like: Any) -> Any:
    """Invert `ravel`; `like` has the tree's leaves or their ShapeDtypeStructs."""
    leaves, structure = jax.tree.flatten(like)
    parts = jax.lax.split(vector, [math.prod(leaf.shape) for leaf in leaves])
    return jax.tree.unflatten(structure, [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)])


def of_tree(chain: optax.GradientTransformation, like: Any) -> optax.GradientTransformation:
    """Return a chain for vectors of `ravel` that works on the original trees, with leaves as in `like`."""

    def init(vector: Array) -> Any:
        return chain.init(unravel(vector, like))

    def update(gradient: Array, state: Any, vector: Array) -> tuple[Array, Any]:
        step, state = chain.update(unravel(gradient, like), state, unravel(vector, like))
        return ravel(step), state

    return optax.GradientTransformation(init, update)


def norm(tree: Any) -> Array:
    """Return the Euclidean norm of all leaves together, float32[]."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), jnp.float32(0)))
