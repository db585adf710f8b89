"""Minibatches of whole segments, for policies with a memory.

A segment is what one agent of one environment did in a rollout, with the carry that its memory had before. Layout
letters: N segments, T steps, B environments, A agents, S logical shards, m segments of a minibatch in one shard, H
units of the memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from envs_jax.base import Array, TimeStep
from jaxrl.algos.base import Algorithm, Trajectory
from jaxrl.algos.on_policy import Minibatches
from jaxrl.common.types import PolicyParams
from jaxrl.nn.recurrent import Carry, Recurrent, zero_carry


class Remembering(Algorithm):
    """Base class of algorithms with these settings, which each declares in the order of its help."""

    memory: Literal["none", "gru", "lstm"]
    memory_size: int
    memory_layers: int
    initializer: Any

    @property
    def recurrent(self) -> bool:
        return self.memory != "none"

    def zero_carry(self, *batch: int) -> Any:
        """Return an empty memory, leaves float32[*batch, H], () without one."""
        return zero_carry(self.memory, self.memory_size, self.memory_layers, batch)

    def init_carry(self, policy_params: PolicyParams, timestep: TimeStep, indices: Array) -> Any:
        """Return the actor's empty memory, leaves float32[B, A, H]."""
        return self.zero_carry(*timestep.observation.shape[:2])

    def add_memory(self, encoder: Any, head: Any) -> Recurrent:
        """Return a network with a memory between an encoder and a head, which are flax modules."""
        sizes = self.memory_size, self.memory_layers, self.initializer, self.layout.compute_dtype
        return Recurrent(encoder, head, self.memory, *sizes)


@dataclasses.dataclass(frozen=True)
class Segments(Minibatches):
    """Minibatches whose rows are segments: `samples` are those of one logical shard, `size` is m."""

    def cut(self, x: Array) -> Array:
        """[T, B local, A, ...] -> [S local, segments, T, ...]."""
        rows = self.layout.split(jnp.moveaxis(x, 0, 2))
        return rows.reshape(self.layout.local_shards, -1, *rows.shape[3:])

    def join(self, x: Array) -> Array:
        """Invert `cut`."""
        return jnp.moveaxis(x.reshape(self.layout.local_envs, self.agents, *x.shape[2:]), 2, 0)

    def cut_samples(self, samples: dict[str, Array], trajectory: Trajectory) -> dict[str, Any]:
        """Return samples [S local, samples, ...] as segments [S local, segments, T, ...].

        "first" is True where an episode begins, and "carry" the trajectory's, leaves [S local, segments, H].
        """
        segments: dict[str, Any] = {name: self.cut(self.unflatten(x)) for name, x in samples.items()}
        segments["first"] = self.cut(begins(trajectory.timestep, self.agents))
        segments["carry"] = jax.tree.map(lambda x: self.cut(x)[:, :, 0], trajectory.carry)
        return segments

    def join_carry(self, carry: Carry) -> Carry:
        """Leaves [S local, segments, H] -> [B local, A, H]."""
        return jax.tree.map(lambda x: self.join(x[:, :, None])[0], carry)

    def merge(self, x: Array) -> Array:
        """[S, m, T, ...] -> [S, m T, ...]."""
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def unroll(
        self, function: Callable[..., tuple[Array, Carry]], views: Array, timestep: TimeStep, carry: Any
    ) -> tuple[Array, Carry]:
        """Return results [T, B local, A, ...] over all steps, and the carry after them, leaves [S local, segments, H].

        Args:
            function: (views [N, T, ...], where an episode begins bool[N, T], carry [N, H]) -> results [N, T, ...], the
                next carry.
            views: inputs [T, B local, A, ...].
            timestep: leaves [T, B local, ...].
            carry: before the first step, leaves [S local, segments, H]; None: zeros.
        """
        segments = self.cut(views), self.cut(begins(timestep, self.agents)), carry
        results, carry = self.layout.apply(lambda rows: function(*rows), segments, len(views))
        return self.join(results), carry


def begins(timestep: TimeStep, agents: int) -> Array:
    """Return where an episode begins for each agent, bool[..., A], of time steps [...]."""
    return jnp.broadcast_to(timestep.first[..., None], (*timestep.first.shape, agents))


def unroll_step(function: Callable[..., tuple[Array, Carry]], timestep: TimeStep, carry: Carry) -> tuple[Array, Carry]:
    """Return outputs [B, A, n] at a time step [B, ...], and the next carry, leaves [B, A, H]; see `Segments.unroll`."""
    batch, views = timestep.observation.shape[:2], timestep.observation
    flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), carry)
    first = begins(timestep, batch[1]).reshape(-1, 1)
    outputs, flat = function(views.reshape(-1, 1, *views.shape[2:]), first, flat)
    return outputs.reshape(*batch, -1), jax.tree.map(lambda x: x.reshape(*batch, -1), flat)


def flatten_segments(segments: dict[str, Any]) -> dict[str, Array]:
    """Return the steps of segments [N, T, ...] as samples [N T, ...], without what segments have of a memory."""
    return {
        name: x.reshape(-1, *x.shape[2:])
        for name, x in segments.items()
        if name not in ("first", "carry", "critic_carry")
    }
