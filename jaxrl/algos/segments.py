"""Minibatches that keep the agents of a team together, for policies with a memory, messages or parameters by type.

A row holds L steps of one environment: a whole rollout where acting needs a carry, otherwise one. Layout letters: N
rows, T steps of a rollout, B environments, A agents, S logical shards, m rows of a minibatch in one shard.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from jaxrl.algos.base import Trajectory
from jaxrl.algos.on_policy import Minibatches
from jaxrl.algos.team import Situation
from jaxrl.nn.recurrent import Carry


@dataclasses.dataclass(frozen=True)
class Segments(Minibatches):
    """Minibatches whose rows are L steps of a team; `samples` are rows of one logical shard, `size` is m."""

    @property
    def steps(self) -> int:
        return self.row_samples // self.agents

    def cut(self, x: Array) -> Array:
        """Return samples [S local, samples, ...] as rows [S local, rows, L, A, ...]."""
        return x.reshape(self.layout.local_shards, -1, self.steps, self.agents, *x.shape[2:])

    def by_env(self, tree: Any) -> Any:
        """Leaves [T, B local, ...] -> [S local, B / S, T, ...]."""
        return self.layout.split(jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree))

    def cut_samples(self, samples: dict[str, Array], trajectory: Trajectory, situation: Situation) -> dict[str, Any]:
        """Return samples [S local, samples, ...] as rows, with "situation" and the trajectory's "carry"."""
        rows: dict[str, Any] = {name: self.cut(x) for name, x in samples.items()}
        rows["situation"] = jax.tree.map(
            lambda x: x.reshape(len(x), -1, self.steps, *x.shape[3:]), self.by_env(situation)
        )
        rows["carry"] = self.layout.split(jax.tree.map(lambda x: x[0], trajectory.carry))
        return rows

    def unroll(
        self, function: Callable[..., tuple[Array, Carry]], views: Array, situation: Situation, carry: Carry
    ) -> tuple[Array, Carry]:
        """Return results [T, B local, A, ...] over all steps, and the carry after them.

        Args:
            function: (views [N, T, A, ...], situation [N, T], carry [N, A, ...]) -> results [N, T, A, ...], the next
                carry.
            views: inputs [T, B local, A, ...].
            situation: leaves [T, B local, ...].
            carry: before the first step, leaves [S local, B / S, A, ...].
        """
        rows = self.by_env(views), self.by_env(situation), carry
        per_row = len(views) * self.agents
        results, carry = self.layout.apply(lambda rows: function(*rows), rows, per_row)
        return jnp.swapaxes(results.reshape(self.layout.local_envs, *results.shape[2:]), 0, 1), carry
