"""Adam with a learning rate of 1, schedules and moving copies: a thin layer over optax, which functions import.

It is slow to import, and a command that only reads settings does without.
"""

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from envs_jax.base import Array
from jaxrl.common.types import Params

if TYPE_CHECKING:
    import optax

BETA1, BETA2 = 0.9, 0.999  # Adam's


def adam(epsilon: float = 1e-8, max_grad_norm: float = 0.0) -> "optax.GradientTransformation":
    """Adam (betas 0.9, 0.999) with a learning rate of 1, for `Algorithm.step`, after optional gradient clipping.

    Equal to `optax.adam` except for the bias correction 1 - beta^t: in float32 that difference of numbers near 1 has
    a relative error of 1e-5 in the first steps, which the updates inherit.

    References:
        Kingma and Ba 2015, arXiv 1412.6980, algorithm 1.
    """
    import optax

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
    # on all layers as one vector: a few operations instead of a few for each layer
    return optax.flatten(optax.chain(*clip, optax.GradientTransformation(optax.scale_by_adam().init, update)))


def decay_linearly(chain: "optax.GradientTransformation", end: float, steps: int) -> "optax.GradientTransformation":
    """Return a chain whose updates fall linearly to the share `end` over this many steps."""
    import optax

    return optax.chain(chain, optax.scale_by_schedule(optax.linear_schedule(1.0, end, steps)))


def move(params: Params, copy: Params, rate: Array | float) -> Params:
    """Return the copy moved towards the parameters: rate params + (1 - rate) copy."""
    import optax

    return optax.incremental_update(params, copy, rate)


def copy_periodically(params: Params, copy: Params, step: Array, period: int) -> Params:
    """Return the parameters where the period divides the step int32[], else the copy."""
    import optax

    return optax.periodic_update(params, copy, step, period)


def norm(tree: Any) -> Array:
    """Return the Euclidean norm of all leaves together, float32[]."""
    return jnp.sqrt(jnp.sum(jnp.square(ravel_pytree(tree)[0])))
