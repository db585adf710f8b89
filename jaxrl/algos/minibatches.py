"""Minibatches of a rollout: rows of transitions that stay together, shuffled within each logical shard.

A row holds L steps of K agents of one environment. Acting with a carry needs whole rollouts of a team, messages and
parameters by type need one step of a team; otherwise a row is one transition, L = K = 1. Layout letters: T steps of a
rollout, B environments, A agents, S logical shards, R rows of a logical shard, m rows of a minibatch in one shard.
"""

import dataclasses
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
        team_size: A.
        row_steps: L.
        row_agents: K.
        rows_per_shard: R.
        per_epoch: minibatches per epoch.
        size: m; the remainder of the rows is dropped after shuffling.
    """

    layout: DataParallel
    team_size: int
    row_steps: int
    row_agents: int
    rows_per_shard: int
    per_epoch: int
    size: int

    @property
    def row_samples(self) -> int:
        """Agent transitions of a row, L K."""
        return self.row_steps * self.row_agents

    def cut(self, x: Array) -> Array:
        """Return rows [S local, R, L, K, ...] of [T, B local, A, ...]; with T < L rows are T steps long."""
        steps = min(self.row_steps, len(x))
        return jnp.swapaxes(x, 0, 1).reshape(self.layout.local_shards, -1, steps, self.row_agents, *x.shape[3:])

    def cut_teams(self, tree: Any) -> Any:
        """Return rows [S local, R, L, ...] of leaves [T, B local, ...] that belong to whole teams."""

        def cut(x: Array) -> Array:
            steps = min(self.row_steps, len(x))
            return jnp.swapaxes(x, 0, 1).reshape(self.layout.local_shards, -1, steps, *x.shape[2:])

        return jax.tree.map(cut, tree)

    def join(self, rows: Array) -> Array:
        """Invert `cut`: [S local, R, L, K, ...] -> [T, B local, A, ...]."""
        return jnp.swapaxes(rows.reshape(self.layout.local_envs, -1, self.team_size, *rows.shape[4:]), 0, 1)

    def shuffle(self, keys: Key) -> Array:
        """Return shuffled row indices of every minibatch, int32[S local, epochs, per_epoch, m], from key[epochs]."""

        def shuffle_epoch(key: Key) -> Array:
            return jax.vmap(lambda k: jax.random.permutation(k, jnp.arange(self.rows_per_shard, dtype=jnp.int32)))(
                self.layout.shard_keys(key)
            )

        order = jnp.swapaxes(jax.lax.map(shuffle_epoch, keys), 0, 1)[:, :, : self.size * self.per_epoch]
        return order.reshape(*order.shape[:2], self.per_epoch, self.size)

    def sample_weights(self, trajectory: Trajectory) -> Array:
        """Return the weight float32[T, B, A] of each transition, with a mean of 1.

        It is 0 on an episode's last observation, the action on which is ignored, and for agents that are not present.
        """
        valid = jnp.broadcast_to(~trajectory.timestep.done[..., None], trajectory.action.shape[:3]).astype(jnp.float32)
        if jax.tree.leaves(trajectory.timestep.present):
            valid = valid * trajectory.timestep.present.astype(jnp.float32)
        share = self.layout.sample_mean(self.cut(valid))
        return valid / jnp.maximum(share, 1e-8)

    def deviation(self, values: Array, weight: Array) -> Array:
        """Return the standard deviation of values [S local, m, ...] over a minibatch, repeated for each of them.

        It is 1 where a single sample counts, which has none.
        """
        total = jnp.maximum(self.layout.sample_mean(weight), 1e-8)  # 1 over a rollout, not in each minibatch
        mean = self.layout.sample_mean(weight * values) / total
        variance = self.layout.sample_mean(weight * jnp.square(values - mean)) / total
        counted = self.layout.sample_mean((weight > 0).astype(jnp.float32)) * (weight[0].size * self.layout.shards)
        deviation = jnp.where(counted < 1.5, 1.0, jnp.maximum(jnp.sqrt(variance), 1e-6))
        return jnp.full_like(values, deviation)


def pick(data: Any, indices: Array) -> Any:
    """Select the rows int32[S, m] of leaves [S, R, ...]."""
    take = jax.vmap(lambda rows, i: jnp.take(rows, i, axis=0, mode="clip"))
    return jax.tree.map(lambda rows: take(rows, indices), data)
