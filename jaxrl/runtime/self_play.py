"""Self-play: snapshots of the learner play the other team.

A pool of P snapshots is part of the training state. The games of each logical shard are cut into P contiguous groups,
one snapshot each, so that a group's networks are evaluated at once and parameters are never gathered per game; when
a snapshot is replaced, its games continue against the new one
(Bansal et al. 2018, arXiv 1710.03748, section 4.2, play old versions of the learner to keep it from forgetting).

An environment that supports it sets `accepts_opponent_actions`. Its batched form has `opponent_view(state)`, which
returns the observations of the other team and a key per game, and its `play` takes the other team's actions after the
learner's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, TimeStep
from envs_jax.batch import BatchedEnvironment, BatchState
from envs_jax.progress import Progress, final_progress
from jaxrl.algos.base import Algorithm
from jaxrl.common.types import Key, PolicyParams


@dataclasses.dataclass(frozen=True)
class SelfPlay(BatchedEnvironment):
    """A batched environment whose other team is played by the snapshots in its context."""

    inner: BatchedEnvironment  # the batched environment with opponents
    algo: Algorithm  # the players' algorithm; its policy must have no carry
    group: int  # consecutive games that share a snapshot
    snapshots: int  # P, size of the pool, whose oldest snapshot is replaced periodically
    every: int  # iterations between two snapshots

    def _start(self, keys: Key, episode: Array, context: Any) -> tuple[BatchState, TimeStep]:
        return self.inner._start(keys, episode, context[0])

    def step_without_reset(self, state: BatchState, action: Array, context: Any) -> tuple[BatchState, TimeStep]:
        """Take one step; `context` is (context of `inner`, pool [P, ...]).

        Snapshot (i // group) % P plays the other team of game i.

        Raises ValueError: the games cannot be divided into equal groups per snapshot.
        """
        inner_context, pool = context
        timestep, keys = self.inner.opponent_view(state)  # type: ignore[attr-defined]
        players = self.snapshots
        group = self.group
        games = len(keys)
        if games % (players * group):
            raise ValueError(
                f"{games} games do not divide into groups of {group} for each of {players} snapshots: change num_envs"
            )

        def by_player(x: Array) -> Array:  # [games, ...] -> [P, games / P, ...]
            rounds = x.reshape(-1, players, group, *x.shape[1:])
            return jnp.swapaxes(rounds, 0, 1).reshape(players, -1, *x.shape[1:])

        def act(parameters: PolicyParams, timestep: TimeStep, keys: Key) -> Array:
            return self.algo.act(parameters, (), timestep, keys, final_progress(), "sample")[0]

        chosen = jax.vmap(act)(pool, *jax.tree.map(by_player, (timestep, keys)))
        rounds = chosen.reshape(players, -1, group, *chosen.shape[2:])
        opponents = jnp.swapaxes(rounds, 0, 1).reshape(games, *chosen.shape[2:])
        return self.inner.step_without_reset(state, jnp.concatenate([action, opponents], axis=1), inner_context)

    def init_pool(self, policy: PolicyParams) -> Any:
        """Return P copies of a policy, leaves [P, ...]."""
        return jax.tree.map(lambda x: jnp.repeat(x[None], self.snapshots, 0), policy)

    def update_pool(self, pool: Any, policy: PolicyParams, progress: Progress) -> Any:
        calls = progress.learn_calls[1]  # the low word is enough for 2^32 iterations
        slot = (calls // self.every) % self.snapshots

        def replace(pool: Any) -> Any:
            return jax.tree.map(lambda old, new: old.at[slot].set(new), pool, policy)

        return jax.lax.cond(calls % self.every == 0, replace, lambda pool: pool, pool)

    def context(self, progress: Any, pool: Any = ()) -> Any:
        """Return (context of `inner`, pool)."""
        return self.inner.context(progress), pool
