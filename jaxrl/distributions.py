"""Policies over discrete actions with masks; functions of the last axis."""

import jax
import jax.numpy as jnp

from envs_jax.base import Array


def epsilon_mix(logits: Array, epsilon: Array | float) -> Array:
    """(1 - epsilon) softmax(logits) + epsilon / n, float32[..., n]."""
    return (1 - epsilon) * jax.nn.softmax(logits) + epsilon / logits.shape[-1]


def renormalise(probabilities: Array, mask: Array) -> Array:
    """Probabilities of the allowed actions, summing to 1; `mask` bool[..., n] has a True."""
    allowed = jnp.where(mask, probabilities, 0.0)
    return allowed / jnp.maximum(allowed.sum(-1, keepdims=True), 1e-8)


def sample(key: Array, probabilities: Array) -> Array:
    """int32[], index drawn in proportion to probabilities[n]; zeros are never drawn (Gumbel-max)."""
    noise = jax.random.gumbel(key, probabilities.shape)
    logits = jnp.where(probabilities > 0, jnp.log(jnp.maximum(probabilities, 1e-30)), -jnp.inf)
    return jnp.argmax(logits + noise).astype(jnp.int32)


def entropy(probabilities: Array) -> Array:
    """Entropy in nats, float32[...]; 0 log 0 = 0."""
    return -jnp.sum(probabilities * jnp.log(jnp.maximum(probabilities, 1e-30)), axis=-1)


def choose(values: Array, action: Array) -> Array:
    """values[..., n] at action int32[...], by comparison instead of a gather."""
    index = jax.lax.broadcasted_iota(action.dtype, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(action[..., None] == index, values, 0), axis=-1)
