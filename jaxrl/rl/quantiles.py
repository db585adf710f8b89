"""Quantiles of returns: their regression, and advantages that look at the lower tail.

The return from a state has K equally likely values, its quantiles q_k at the levels (k + 1/2) / K.
"""

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from jaxrl.common.shapes import Float32, assert_equal_shape


def quantile_losses(
    quantiles: Float32[Array, "*batch K"], targets: Float32[Array, "*batch K"]
) -> Float32[Array, "*batch"]:
    """Return the quantile Huber loss (Dabney et al. 2018, arXiv 1710.10044, equation 10), a mean over all pairs.

    Their algorithm 1 sums over the quantiles and takes the mean over the targets. kappa is 1.
    """
    assert_equal_shape([quantiles, targets])
    count = quantiles.shape[-1]
    levels = np.float32((np.arange(count) + 0.5) / count).reshape(*(1,) * (quantiles.ndim - 1), count, 1)
    error = targets[..., None, :] - quantiles[..., :, None]  # [..., of quantiles, of targets]
    size = jnp.abs(error)
    huber = jnp.where(size <= 1, 0.5 * jnp.square(error), size - 0.5)
    return jnp.mean(jnp.abs(levels - (error < 0).astype(jnp.float32)) * huber, axis=(-2, -1))


def tail_advantages(quantiles: Array, targets: Array, level: float) -> Array:
    """Return how much better than expected an outcome is for the mean of the worst share `level` of returns.

    With v the quantile at that level, CVaR = v - E[max(v - Z, 0)] / level for returns Z (Rockafellar and Uryasev 2000,
    theorem 1). The advantage is the sample of this from the targets less its value from the quantiles: the mean of
    (max(v - q_k, 0) - max(v - y_k, 0)) / level. It makes the policy gradient of CVaR (Tamar et al. 2015, arXiv
    1404.3862), for the returns from each state.

    Args:
        quantiles: q, float32[..., K], in any order.
        targets: y, float32[..., K], samples of the return.
        level: above 0.
    """
    count = quantiles.shape[-1]
    index = int(np.ceil(level * count - 1e-6)) - 1
    value_at_risk = jnp.sort(quantiles, axis=-1)[..., index][..., None]
    loss = jax.nn.relu(value_at_risk - targets) - jax.nn.relu(value_at_risk - quantiles)
    return -jnp.mean(loss, axis=-1) / jnp.float32(level)
