"""Compiled programs of environments, each compiled once in a process: tests wait for the compiler most of all."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

import envs_jax
from envs_jax.batch import BatchedEnvironment, batched


@dataclasses.dataclass(frozen=True)
class Programs:
    """An environment with its programs; each is compiled when it is first called.

    Attributes:
        env, batch: the environment, and its batched form.
        reset, step: of one copy, `env.reset(key, context)` and `env.step(state, action, context)`.
        reset_batch, play, step_batch: of B copies, without auto-reset (`play`) and with it (`step_batch`).
    """

    env: Any
    batch: BatchedEnvironment
    reset: Callable[..., Any]
    step: Callable[..., Any]
    reset_batch: Callable[..., Any]
    play: Callable[..., Any]
    step_batch: Callable[..., Any]

    @functools.cache  # noqa: B019 - lives as long as the process
    def policy(self, name: str) -> Callable[..., Any]:
        """The scripted policy `name` of one copy: action = policy(state, timestep, key)."""
        return jax.jit(functools.partial(self.env.baselines[name], self.env))


@functools.cache
def compiled(name: str, **settings: Any) -> Programs:
    """The programs of a registered environment under these settings (hashable values)."""
    env = envs_jax.make(name, **settings)
    batch = batched(env)
    one = (jax.jit(env.reset), jax.jit(env.step))
    return Programs(env, batch, *one, jax.jit(batch.reset), jax.jit(batch.play), jax.jit(batch.step))
