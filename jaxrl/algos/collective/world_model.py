"""A world model of a state and a task code: what comes next, in a latent space, and what it is paid.

Latents are softmax values in groups, which cannot collapse to a constant scale; rewards are classes on a logarithmic
scale. After TD-MPC2 (Hansen et al. 2024, arXiv 2310.16828), in the sizes of the published collective-learning pipeline
(argator18/A-transformer-based-collective-learning-framework-for-scalable-knowledge-accumulation-and-transfer).

Layout letters: N samples, s numbers of a state, c of a code, a of an action, z of a latent.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from envs_jax.base import Array

GROUP = 8  # latent values that add up to 1
CLASSES = 101
LARGEST = 10.0  # classes span rewards from -LARGEST to LARGEST


def symlog(x: Array) -> Array:
    """sign(x) log(1 + |x|)."""
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def two_hot(reward: Array) -> Array:
    """float32[N, CLASSES] of rewards float32[N]: shares of the two classes whose mean is symlog(reward)."""
    end = symlog(jnp.float32(LARGEST))
    place = (jnp.clip(symlog(reward) / end, -1.0, 1.0) + 1) / 2 * (CLASSES - 1)
    return jnp.maximum(1 - jnp.abs(place[:, None] - jnp.arange(CLASSES, dtype=jnp.float32)[None]), 0.0)


def world_loss(predicted: Array, latent: Array, logits: Array, reward: Array, weight: Array) -> Array:
    """Mean squared error of the next latent, and cross entropy of the reward, float32[].

    predicted, latent: float32[N, z], no gradient through the latter; logits: float32[N, CLASSES]; reward, weight [N].
    """
    error = jnp.square(predicted - jax.lax.stop_gradient(latent)).mean(-1)
    entropy = -jnp.sum(two_hot(reward) * jax.nn.log_softmax(logits), axis=-1)
    return jnp.mean(weight * (error + entropy))


class WorldModel(nn.Module):
    """An encoder of state and code, the latents that follow, and the logits of rewards."""

    latent: int = 512
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.encoder = _Layers((256, self.latent), grouped=True, dtype=self.dtype)
        self.dynamics = _Layers((512, 512, self.latent), grouped=True, dtype=self.dtype)
        self.reward = _Layers((512, 512, CLASSES), grouped=False, dtype=self.dtype)

    def __call__(self, state: Array, code: Array) -> Array:
        """float32[N, z] of states [N, s] and codes [N, c]."""
        latent: Array = self.encoder(jnp.concatenate([state, code], axis=-1))
        return latent

    def step(self, state: Array, code: Array, action: Array) -> tuple[Array, Array]:
        """The latents float32[N, z] that follow actions [N, a], and logits float32[N, CLASSES] of their rewards."""
        inputs = jnp.concatenate([self(state, code), action, code], axis=-1)
        return self.dynamics(inputs), self.reward(inputs)


class _Layers(nn.Module):
    """Dense layers; hidden ones end in layer norm and Mish, a grouped last one in layer norm and softmax of groups."""

    units: tuple[int, ...]
    grouped: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = lambda k: nn.LayerNorm(epsilon=1e-5, dtype=jnp.float32, name=f"norm{k}")  # noqa: E731
        for k, units in enumerate(self.units, 1):
            x = nn.Dense(units, dtype=self.dtype, name=f"fc{k}")(x).astype(jnp.float32)
            if k < len(self.units):
                x = norm(k)(x)
                x = x * jnp.tanh(jax.nn.softplus(x))
        if not self.grouped:
            return x
        groups = norm(len(self.units))(x).reshape(*x.shape[:-1], -1, GROUP)
        return jax.nn.softmax(groups).reshape(x.shape)
