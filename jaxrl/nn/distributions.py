"""Distributions of actions: masked categorical, and squashed Gaussian; functions of the last axis."""

import math

import jax
import jax.numpy as jnp

from envs_jax.base import Array


def epsilon_mix(logits: Array, epsilon: Array | float) -> Array:
    """Mix in uniform exploration: (1 - epsilon) softmax(logits) + epsilon / n, float32[..., n]."""
    return (1 - epsilon) * jax.nn.softmax(logits) + epsilon / logits.shape[-1]


def apply_action_mask(probabilities: Array, mask: Array) -> Array:
    """Return the probabilities of the allowed actions, renormalised; `mask` bool[..., n] has a True."""
    allowed = jnp.where(mask, probabilities, 0.0)
    return allowed / jnp.maximum(allowed.sum(-1, keepdims=True), 1e-8)


def sample(key: Array, probabilities: Array) -> Array:
    """Sample an index int32[] from probabilities[n]; zeros are never drawn (Gumbel-max)."""
    noise = jax.random.gumbel(key, probabilities.shape)
    logits = jnp.where(probabilities > 0, jnp.log(jnp.maximum(probabilities, 1e-30)), -jnp.inf)
    return jnp.argmax(logits + noise).astype(jnp.int32)


def entropy(probabilities: Array) -> Array:
    """Return the entropy in nats, float32[...]; 0 log 0 = 0."""
    return -jnp.sum(probabilities * jnp.log(jnp.maximum(probabilities, 1e-30)), axis=-1)


def select_action_value(values: Array, action: Array) -> Array:
    """Return values[..., n] at action int32[...], by comparison instead of a gather."""
    index = jax.lax.broadcasted_iota(action.dtype, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(action[..., None] == index, values, 0), axis=-1)


def squashed_normal(mean: Array, log_std: Array, noise: Array) -> tuple[Array, Array]:
    """Return a sample a = tanh(mean + exp(log_std) noise) in (-1, 1) and its log-density.

    The density of a squashed component is that of the Gaussian over 1 - a^2; the 1e-6 that is added to it keeps the
    logarithm finite where tanh rounds to 1, at a cost of 1e-6 / (1 - a^2) elsewhere.

    Args:
        mean: float32[..., d].
        log_std: float32[..., d].
        noise: float32[..., d], standard normal.

    Returns:
        action float32[..., d], log-density float32[...].

    References:
        Haarnoja et al. 2018, "Soft Actor-Critic", arXiv 1801.01290, appendix C, equation 21.
    """
    action = jnp.tanh(mean + jnp.exp(log_std) * noise)
    normal = -0.5 * jnp.square(noise) - log_std - 0.5 * math.log(2 * math.pi)
    return action, jnp.sum(normal - jnp.log(jnp.maximum(1 - jnp.square(action), 0.0) + 1e-6), axis=-1)
