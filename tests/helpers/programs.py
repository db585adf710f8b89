"""Programs of environments, each compiled once in a process: most of the time, tests wait for the compiler."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from envs_jax import Environment
from envs_jax.batch import batched


class Programs:
    """An environment with its programs; each is compiled when it is first called.

    Attributes:
        env, batch: the environment, and its batched form.
        reset, step: of one copy, `env.reset(key, context)` and `env.step(state, action, context)`.
        reset_batch, play, step_batch: of B copies, without auto-reset (`play`) and with it (`step_batch`).
    """

    def __init__(self, env: Environment):
        self.env: Any = env
        self.batch = batched(env)
        self.reset, self.step = jax.jit(env.reset), jax.jit(env.step)
        self.reset_batch, self.play, self.step_batch = map(
            jax.jit, (self.batch.reset, self.batch.step_without_reset, self.batch.step)
        )
        self._policies: Any = {}

    def policy(self, name: str) -> Callable[..., Any]:
        """The scripted policy `name` of one copy: action = policy(state, timestep, key)."""
        if name not in self._policies:
            self._policies[name] = jax.jit(functools.partial(self.env.baselines[name], self.env))
        return self._policies[name]


@functools.cache
def get_programs(env: Environment) -> Programs:
    """The programs of an environment; equal environments share them."""
    return Programs(env)


@contextlib.contextmanager
def note_compilations() -> Iterator[list[str]]:
    """A list with an entry for each program that is compiled meanwhile, or read from the cache on the disk."""
    compiled: list[str] = []

    def note(event: str, seconds: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of what it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
