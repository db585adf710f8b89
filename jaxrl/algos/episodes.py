"""Minibatches of whole episodes: how many episodes a training step needs, and how they are shuffled and split.

Layout letters: T time, B environments, A agents, S logical shards, m samples of a minibatch in one shard.
"""

import dataclasses

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec
from jaxrl.common.types import Key
from jaxrl.runtime.data_parallel import DataParallel


def episodes_for(transitions: int, spec: EnvSpec) -> int:
    """Return the number of whole episodes with at least this many agent transitions (agents x steps each)."""
    return max(1, -(-transitions // (spec.num_agents * spec.horizon)))


@dataclasses.dataclass(frozen=True)
class Minibatches:
    """The minibatches of a training step.

    Attributes:
        spec, layout: of the environments, one episode of each.
        batch_transitions: agent transitions requested per training step.
        number: minibatches per epoch.
    """

    spec: EnvSpec
    layout: DataParallel
    batch_transitions: int
    number: int

    @property
    def samples(self) -> int:
        """Return the agent transitions of one logical shard."""
        return self.layout.num_envs // self.layout.shards * self.spec.horizon * self.spec.num_agents

    @property
    def size(self) -> int:
        """Return m; the remainder is dropped after shuffling.

        Rounding `batch_transitions` up to whole episodes leaves a remainder too; it grows with num_envs.
        """
        collected = self._usual * self.spec.horizon * self.spec.num_agents
        return self.samples * self.batch_transitions // collected // self.number

    @property
    def _usual(self) -> int:
        return episodes_for(self.batch_transitions, self.spec)

    def flatten(self, x: Array) -> Array:
        """[T, B local, A, ...] -> [S local, samples, ...]."""
        return self.layout.split(jnp.swapaxes(x, 0, 1)).reshape(self.layout.local_shards, -1, *x.shape[3:])

    def unflatten(self, x: Array) -> Array:
        """Invert `flatten`."""
        sizes = self.layout.local_envs, self.spec.horizon, self.spec.num_agents
        return jnp.swapaxes(x.reshape(*sizes, *x.shape[2:]), 0, 1)

    def shuffled(self, key: Key) -> Array:
        """Return shuffled sample indices of every minibatch, int32[number, S local, m]."""
        order = jax.vmap(lambda k: jax.random.permutation(k, self.samples))(self.layout.shard_keys(key))
        return order[:, : self.size * self.number].reshape(-1, self.number, self.size).swapaxes(0, 1)

    def summary(self, passes: int) -> list[str]:
        """Return sentences for the user about sizes."""
        spec, episodes, usual = self.spec, self.layout.num_envs, self._usual
        lines = [
            f"A training step collects {episodes} episodes ({episodes * spec.horizon * spec.num_agents:,} agent "
            f"transitions) and trains for {passes} epochs of {self.number} minibatches of "
            f"{self.size * self.layout.shards:,} samples."
        ]
        if episodes != usual:
            lines.append(
                f"num_envs {episodes}, where batch_transitions {self.batch_transitions} asks for {usual} episodes per "
                f"training step: "
                f"minibatches have {episodes / usual:.3g} times as many samples, and the same number of episodes gives "
                f"{usual / episodes:.3g} times as many updates; more minibatches, higher learning rates and shorter "
                "schedules compensate."
            )
        return lines


def pick(data: dict[str, Array], indices: Array, *names: str) -> dict[str, Array]:
    """Select the samples int32[S, m] of data [S, samples, ...], by name."""
    take = jax.vmap(lambda rows, i: jnp.take(rows, i, axis=0, mode="clip"))
    return {name: take(data[name], indices) for name in names}
