"""B copies of an environment: vmap, next-step auto-reset, episode statistics.

The step that ends an episode returns its true final observation; the following call ignores the action, resets
that copy and returns `first = True` with reward 0. Where `spec.fixed_horizon`, all copies end together and the
reset is one branch taken once per episode; otherwise it is a branch taken when any copy of the batch has ended.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Environment, EnvSpec, TimeStep, pytree
from envs_jax.progress import Progress


def where(condition: Array, yes: Any, no: Any) -> Any:
    """Select, leaf by leaf, `yes` where condition [B] holds, else `no`; leaves [B, ...]."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b)

    return jax.tree.map(pick, yes, no)


@pytree
class BatchState:
    """State of B copies.

    Attributes:
        env: the environment's own state, leaves [B, ...].
        key: key[B], the root of each copy's randomness; episode e of a copy starts from fold_in(key, e).
        episode: uint32[B], number of the episode being played, from 0.
    """

    env: Any
    key: Array
    episode: Array


@dataclasses.dataclass(frozen=True)
class BatchedEnvironment:
    """Environments as a trainer steps them. All methods are pure and work on any number of copies."""

    env: Environment

    on_host: ClassVar[bool] = False  # steps are made outside of the compiled program, see `adapters.host`
    lead_steps: ClassVar[int] = 0  # calls of `step_episodes` that start whole episodes, see `begin_episodes`

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    @property
    def failure(self) -> str | None:
        """A sentence about what made all results since then invalid, None if nothing did."""
        return None

    def close(self) -> None:
        """End processes that make steps; a later start starts new ones."""

    def describe_time(self, seconds: float) -> str | None:
        """Return a sentence about the share of `seconds` that steps took; None where it is not known."""
        del seconds
        return None

    def context(self, progress: Progress) -> Any:
        """See `Environment.context`."""
        return self.env.context(progress)

    def reset(self, keys: Array, context: Any = None, episode: Array | int = 0) -> tuple[BatchState, TimeStep]:
        """Start every copy; keys key[B] (one root per copy), `episode` the number of the first episode.

        `context` is what `self.context` returned; None: the context at the start of training. `step` takes the same.
        """
        episode = jnp.broadcast_to(jnp.asarray(episode, jnp.uint32), keys.shape)
        return self._start(keys, episode, context)

    def _start(self, keys: Array, episode: Array, context: Any) -> tuple[BatchState, TimeStep]:
        episode_keys = jax.vmap(jax.random.fold_in)(keys, episode)
        state, timestep = jax.vmap(self.env.reset, in_axes=(0, None))(episode_keys, context)
        return BatchState(env=state, key=keys, episode=episode), timestep

    def step_without_reset(self, state: BatchState, action: Array, context: Any) -> tuple[BatchState, TimeStep]:
        """Step every copy without auto-reset; action [B, A, ...]."""
        env, timestep = jax.vmap(self.env.step, in_axes=(0, 0, None))(state.env, action, context)
        return dataclasses.replace(state, env=env), timestep

    # A loop over whole episodes: `begin_episodes`, `lead_steps` calls of `step_episodes`, then one for each step

    def begin_episodes(self, keys: Array, context: Any, episode: Array | int = 0) -> tuple[BatchState, TimeStep]:
        """Return that from which `lead_steps` calls of `step_episodes`, with any actions, start what `reset` does."""
        return self.reset(keys, context, episode)

    def step_episodes(
        self, state: BatchState, previous: TimeStep, action: Array, context: Any
    ) -> tuple[BatchState, TimeStep]:
        """Step every copy within its episode; where one has ended, the results are undefined."""
        del previous
        return self.step_without_reset(state, action, context)

    # Episodes without end

    def step(
        self, state: BatchState, previous: TimeStep, action: Array, context: Any = None
    ) -> tuple[BatchState, TimeStep]:
        """Step with next-step auto-reset; `previous` is the time step [B] in which the actions were chosen."""
        done = previous.done

        def restart(state: BatchState) -> tuple[BatchState, TimeStep]:
            return self._start(state.key, state.episode + jnp.uint32(1), context)

        def play(state: BatchState) -> tuple[BatchState, TimeStep]:
            return self.step_without_reset(state, action, context)

        if self.spec.fixed_horizon:
            return jax.lax.cond(done[0], restart, play, state)

        played = play(state)  # before the condition: in both branches it would be compiled twice

        def restart_some(played: tuple[BatchState, TimeStep]) -> tuple[BatchState, TimeStep]:
            return where(done, restart(state), played)

        return jax.lax.cond(jnp.any(done), restart_some, lambda played: played, played)


def constant(values: Any, batch: tuple[int, ...], dtype: Any = None) -> Array:
    """Return a constant array with an axis of length 1 for each axis of a batch in the last axes."""
    values = np.asarray(values, dtype)
    return jnp.asarray(values.reshape(values.shape + (1,) * len(batch)))


def batch_first(tree: Any) -> Any:
    """Return leaves [..., B] as [B, ...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), tree)


def batch_last(tree: Any) -> Any:
    """Return leaves [B, ...] as [..., B]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), tree)


def for_keys(function: Callable[..., Any], keys: Array, *arrays: Array) -> Any:
    """Return function(key, ...) of one key, or of keys [B] and arrays [B] with leaves [..., B]."""
    return jax.vmap(function, out_axes=-1)(keys, *arrays) if keys.ndim else function(keys, *arrays)


@functools.partial(jax.jit, static_argnums=0, inline=True)  # one trace for shapes, the first state and later starts
def _reset_batch(env: Environment, keys: Array, context: Any) -> tuple[Any, TimeStep]:
    return env.reset(keys, context)


class BatchLast(BatchedEnvironment):
    """B copies that are the last axis inside a step, so that every operation runs over copies.

    For environments whose `reset` and `step` take one copy, or many with leaves [..., B] (and keys [B]).
    """

    def _start(self, keys: Array, episode: Array, context: Any) -> tuple[BatchState, TimeStep]:
        state, timestep = _reset_batch(self.env, jax.vmap(jax.random.fold_in)(keys, episode), context)
        return BatchState(env=batch_first(state), key=keys, episode=episode), batch_first(timestep)

    def step_without_reset(self, state: BatchState, action: Array, context: Any) -> tuple[BatchState, TimeStep]:
        env, timestep = self.env.step(batch_last(state.env), batch_last(action), context)
        return dataclasses.replace(state, env=batch_first(env)), batch_first(timestep)


def batched(env: Environment) -> BatchedEnvironment:
    """Return the batched form of `env`: `env.batched()` where it has that method, else vmap."""
    make_batched: Callable[[], BatchedEnvironment] | None = getattr(env, "batched", None)
    return make_batched() if make_batched is not None else BatchedEnvironment(env)


@pytree
class EpisodeStatistics:
    """Running values of the episodes being played, leaves float32[B] (`returns` float32[B, A])."""

    returns: Array
    length: Array
    metrics: Any


def start_statistics(timestep: TimeStep) -> EpisodeStatistics:
    """Return the statistics at a time step [B] that starts an episode."""
    return EpisodeStatistics(
        returns=jnp.zeros_like(timestep.reward), length=jnp.zeros_like(timestep.reward[:, 0]), metrics=timestep.metrics
    )


def update_statistics(spec: EnvSpec, statistics: EpisodeStatistics, timestep: TimeStep) -> EpisodeStatistics:
    """Return the statistics after one more time step [B]; a first time step restarts them."""

    def reduce(name: str, old: Array, new: Array) -> Array:
        kind = spec.metrics[name]
        if kind == "last":
            return new
        return old + new if kind == "sum" else jnp.maximum(old, new)

    continued = EpisodeStatistics(
        returns=statistics.returns + timestep.reward,
        length=statistics.length + 1,
        metrics={name: reduce(name, statistics.metrics[name], new) for name, new in timestep.metrics.items()},
    )
    return where(timestep.first, start_statistics(timestep), continued)


def finished_episodes(statistics: EpisodeStatistics, timestep: TimeStep) -> dict[str, Array]:
    """Return sums over the episodes that ended at this time step [B]: {"episodes": count, name: sum of values}.

    "return" is the mean over agents of the undiscounted return.
    """
    ended = timestep.done
    values = {"return": statistics.returns.mean(-1), "length": statistics.length, **statistics.metrics}
    # one sum of all values: a kernel for each compiles slowly
    rows = jnp.where(ended[None], jnp.stack([jnp.ones_like(statistics.length), *values.values()]), 0.0)
    return dict(zip(("episodes", *values), rows.sum(-1), strict=True))
