"""Distributions of actions: masked categorical, Gaussian and squashed Gaussian; functions of the last axis."""

import math

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from jaxrl.common.shapes import Bool, Float, Float32, Int32, assert_equal_shape, assert_rank, assert_shape
from jaxrl.common.types import Key

_VANISHED = 1e-15  # the square of its inverse, in gradients, is still finite in float32


def epsilon_mix(logits: Float32[Array, "*batch n"], epsilon: Float32[Array, ""] | float) -> Float32[Array, "*batch n"]:
    """Mix in uniform exploration: (1 - epsilon) softmax(logits) + epsilon / n."""
    assert_rank(epsilon, 0)
    return (1 - epsilon) * jax.nn.softmax(logits) + epsilon / logits.shape[-1]


def apply_action_mask(
    probabilities: Float32[Array, "*batch n"], mask: Bool[Array, "*batch n"]
) -> Float32[Array, "*batch n"]:
    """Return the probabilities of the allowed actions, renormalised; each row of `mask` has a True.

    Where all of them have vanished, allowed actions are equally probable.
    """
    assert_equal_shape([probabilities, mask])
    allowed = jnp.where(mask, probabilities, 0.0)
    total = allowed.sum(-1, keepdims=True)
    uniform = mask.astype(jnp.float32) / jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32)
    return jnp.where(total < _VANISHED, uniform, allowed / jnp.maximum(total, _VANISHED))


def mask_logits(logits: Float32[Array, "*batch n"], mask: Bool[Array, "*batch n"]) -> Float32[Array, "*batch n"]:
    """Return the logits of the allowed actions, -inf elsewhere; a row of `mask` without a True allows all actions.

    Such rows are padding, of a replay for example, and must not become NaN.
    """
    assert_equal_shape([logits, mask])
    return jnp.where(mask | ~jnp.any(mask, axis=-1, keepdims=True), logits, -jnp.inf)


def draw_noise(keys: Key, actions: int) -> Float32[Array, "A n"]:
    """Return standard Gumbel noise float32[A, actions] from key[A], for `sample`."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (actions,), jnp.float32))(keys)


def sample(noise: Float32[Array, "n"], probabilities: Float32[Array, "n"]) -> Int32[Array, ""]:
    """Sample an index by Gumbel noise; zeros are never drawn (Gumbel-max)."""
    assert_equal_shape([noise, probabilities])
    logits = jnp.where(probabilities > 0, jnp.log(jnp.maximum(probabilities, 1e-30)), -jnp.inf)
    return jnp.argmax(logits + noise).astype(jnp.int32)


def entropy(probabilities: Float32[Array, "*batch n"]) -> Float32[Array, "*batch"]:
    """Return the entropy in nats; 0 log 0 = 0."""
    return -jnp.sum(probabilities * jnp.log(jnp.maximum(probabilities, 1e-30)), axis=-1)


def select_action_value(values: Float[Array, "*batch n"], action: Int32[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Return the values at the actions, by comparison instead of a gather."""
    assert_shape(action, values.shape[:-1])
    index = jax.lax.broadcasted_iota(action.dtype, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(action[..., None] == index, values, 0), axis=-1)


def squashed_normal(
    mean: Float32[Array, "*batch d"], log_std: Float32[Array, "*batch d"], noise: Float32[Array, "*batch d"]
) -> tuple[Float32[Array, "*batch d"], Float32[Array, "*batch"]]:
    """Return a sample a = tanh(mean + exp(log_std) noise) in (-1, 1) and its log-density.

    The density of a squashed component is the Gaussian's density over 1 - a^2. The 1e-6 that is added to 1 - a^2 keeps
    the logarithm finite where tanh rounds to 1, and costs 1e-6 / (1 - a^2) elsewhere (Haarnoja et al. 2018, "Soft
    Actor-Critic", arXiv 1801.01290, appendix C, equation 21). The noise is standard normal.
    """
    assert_equal_shape([mean, log_std, noise])
    action = jnp.tanh(mean + jnp.exp(log_std) * noise)
    normal = -0.5 * jnp.square(noise) - log_std - 0.5 * math.log(2 * math.pi)
    return action, jnp.sum(normal - jnp.log(jnp.maximum(1 - jnp.square(action), 0.0) + 1e-6), axis=-1)


def normal_log_prob(
    mean: Float32[Array, "*batch d"], log_std: Float32[Array, "*batch d"], sample: Float32[Array, "*batch d"]
) -> Float32[Array, "*batch"]:
    """Return the log-density of a sample of independent Gaussians."""
    assert_equal_shape([mean, log_std, sample])
    noise = (sample - mean) * jnp.exp(-log_std)
    return jnp.sum(-0.5 * jnp.square(noise) - log_std - 0.5 * math.log(2 * math.pi), axis=-1)


def normal_entropy(log_std: Float32[Array, "*batch d"]) -> Float32[Array, "*batch"]:
    """Return the entropy of independent Gaussians in nats."""
    return jnp.sum(log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1)
