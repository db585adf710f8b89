"""Learning from episodes: epochs over shuffled minibatches of their transitions.

Layout letters: T time, B environments, A agents, S logical shards, m samples of a minibatch in one shard.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from jaxrl.algos.base import Trajectory
from jaxrl.common.types import Key
from jaxrl.rl.data_parallel import DataParallel


@dataclasses.dataclass(frozen=True)
class Minibatches:
    """The minibatches of a training step, and epochs over them.

    Attributes:
        layout: of the environments.
        agents: A.
        samples: agent transitions of one logical shard.
        per_epoch: minibatches per epoch.
        size: m, samples of a minibatch in one logical shard; the remainder is dropped after shuffling.
    """

    layout: DataParallel
    agents: int
    samples: int
    per_epoch: int
    size: int

    def flatten(self, x: Array) -> Array:
        """[T, B local, A, ...] -> [S local, samples, ...]."""
        return self.layout.split(jnp.swapaxes(x, 0, 1)).reshape(self.layout.local_shards, -1, *x.shape[3:])

    def flatten_all(self, **rows: Array) -> dict[str, Array]:
        return {name: self.flatten(x) for name, x in rows.items()}

    def unflatten(self, x: Array) -> Array:
        """Invert `flatten`."""
        return jnp.swapaxes(x.reshape(self.layout.local_envs, -1, self.agents, *x.shape[2:]), 0, 1)

    def shuffle(self, keys: Key) -> Array:
        """Return shuffled sample indices of every minibatch, int32[S local, epochs, per_epoch, m], from key[epochs]."""

        def shuffle_epoch(key: Key) -> Array:
            return jax.vmap(lambda k: jax.random.permutation(k, jnp.arange(self.samples, dtype=jnp.int32)))(
                self.layout.shard_keys(key)
            )

        order = jnp.swapaxes(jax.lax.map(shuffle_epoch, keys), 0, 1)[:, :, : self.size * self.per_epoch]
        return order.reshape(*order.shape[:2], self.per_epoch, self.size)

    def empty_metrics(self, update: Callable[..., Any], *arguments: Any, epochs: int) -> dict[str, Array]:
        """Return zeros float32[updates] for each metric that `update(*arguments)` returns second."""
        shapes = jax.eval_shape(update, *arguments)[1]
        return {name: jnp.zeros(epochs * self.per_epoch, jnp.float32) for name in shapes}

    def sample_weights(self, trajectory: Trajectory) -> Array:
        """Return the weight float32[T, B, A] of each transition: 0 after an episode's end, with a mean of 1."""
        valid = jnp.broadcast_to(~trajectory.timestep.done[..., None], trajectory.action.shape[:3]).astype(jnp.float32)
        share = self.layout.sample_mean(self.flatten(valid))
        return valid / jnp.maximum(share, 1e-8)

    weights = sample_weights  # the former name, for programs that use it

    def deviation(self, values: Array, weight: Array) -> Array:
        """Return the standard deviation of values [S local, m] over the whole minibatch, repeated for each of them."""
        mean = self.layout.sample_mean(weight * values)
        variance = self.layout.sample_mean(weight * jnp.square(values - mean))
        return jnp.full_like(values, jnp.maximum(jnp.sqrt(variance), 1e-6))


def pick(data: dict[str, Array], indices: Array, *names: str) -> dict[str, Array]:
    """Select the samples int32[S, m] of data [S, samples, ...], by name."""
    take = jax.vmap(lambda rows, i: jnp.take(rows, i, axis=0, mode="clip"))
    return {name: take(data[name], indices) for name in names}
