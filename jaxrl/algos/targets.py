"""TD(lambda) targets of a trajectory, of values and of quantiles.

Layout letters: T time, B environments, A agents, K quantiles.
"""

import jax
import jax.numpy as jnp

from envs_jax.base import Array, TimeStep
from jaxrl.algos.base import Trajectory, next_timesteps
from jaxrl.common.types import Key
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.policy_gradient import lambda_returns


def lambda_targets(
    trajectory: Trajectory,
    last: TimeStep,
    value: Array,
    last_value: Array,
    gamma: Array | float,
    lambda_: Array | float,
) -> Array:
    """Return TD(lambda) targets y float32[T, B, A].

    y_t = r + gamma (1 - terminated) ((1 - l) v_{t+1} + l y_{t+1}) with l = lambda (1 - done); y = v after step T. A
    truncated episode bootstraps from the value of its last observation, which has a row of its own; an agent that is
    not present in the next step has terminated (no value follows), or was truncated alone where `TimeStep.cut` (l = 0).
    `value` is v float32[T, B, A], or [T, B, A, K]; `last` is the time step after the trajectory, and `last_value` its v
    [B, A], or [B, A, K].
    """

    def over_agents(x: Array) -> Array:
        return jnp.broadcast_to(jnp.expand_dims(x.astype(jnp.float32), range(x.ndim, value.ndim)), value.shape)

    next_steps = next_timesteps(trajectory, last)
    next_value = jnp.concatenate([value[1:], last_value[None]])
    discount = gamma * over_agents(~next_steps.terminated)
    lambda_t = lambda_ * over_agents(~next_steps.done)
    if jax.tree.leaves(next_steps.present):
        cut = next_steps.cut if jax.tree.leaves(next_steps.cut) else jnp.zeros_like(next_steps.present)
        discount = discount * over_agents(next_steps.present | cut)
        lambda_t = lambda_t * over_agents(~cut)
    return lambda_returns(over_agents(next_steps.reward), discount, next_value, lambda_t)


def quantile_targets(
    layout: DataParallel,
    key: Key,
    trajectory: Trajectory,
    last: TimeStep,
    quantiles: Array,
    last_quantiles: Array,
    gamma: Array | float,
    lambda_: Array | float,
) -> Array:
    """Return samples float32[T, B, A, K] of the return: TD(lambda) targets that bootstrap at a random step.

    Each goes on with probability lambda, and otherwise ends with its quantile of the next state (SR(lambda) of Nam et
    al. 2021, arXiv 2105.11366). The mean of both, as in `lambda_targets`, would have too small a spread.
    """

    def draw(index: Array) -> Array:
        shape = len(quantiles), *quantiles.shape[2:]
        return jax.random.uniform(jax.random.fold_in(key, index), shape, jnp.float32)

    goes_on = jax.vmap(draw, out_axes=1)(layout.env_indices()) < lambda_
    return lambda_targets(trajectory, last, quantiles, last_quantiles, gamma, goes_on.astype(jnp.float32))
