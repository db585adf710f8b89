"""Tasks of `bench.studies.known` and `bench.peers`, what a learner returns, and what its policy scores."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import envs_jax
from envs_jax.base import Array, Box, Environment, TimeStep
from envs_jax.batch import batched
from jaxrl.common.errors import usage_errors

# (carry or None at the start, TimeStep [B], key or None = greedy) -> actions [B, A, ...], carry
Act = Callable[[Any, TimeStep, Array | None], tuple[Any, Any]]


EPISODES = 128
HELD_OUT = 2**20  # seed of the episodes of the evaluation


@dataclasses.dataclass(frozen=True)
class Watch:
    """An evaluation of a policy while it is trained.

    Attributes:
        every: environment steps from one evaluation to the next, all copies together.
        evaluate: (environment steps, updates, the policy) -> whether to stop.
    """

    every: int
    evaluate: Callable[[int, int, Act], bool]


class Stop(Exception):
    """Ends a training loop that asks nobody; never leaves the learner."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """Result of a learner.

    Attributes:
        act: the final policy.
        env_steps: steps made, all copies together.
        updates: gradient updates made (of the critic where there is one), as the learner's settings say.
    """

    act: Act
    env_steps: int
    updates: int


@dataclasses.dataclass(frozen=True)
class Task:
    """A known environment.

    Attributes:
        env: its name.
        steps: environment steps, all copies together.
        num_envs: copies, of replay learners.
        options: settings of the environment.
        learning_rate, batch_size, hidden_size, gamma, tau: of replay learners; two hidden layers.
        random_steps: at the start of replay learners (Brax: of its first policy).
        ours: settings of our learners that differ from `OURS` here.
        gymnasium: name of the same environment in Gymnasium, for learners that step on the host; "" = `env` itself.
    """

    env: str
    steps: int
    num_envs: int = 16
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: float = 1e-3
    batch_size: int = 128
    hidden_size: int = 128
    random_steps: int = 1024
    gamma: float = 0.99
    tau: float = 0.005
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    gymnasium: str = ""

    def make(self) -> Environment:
        """Return the environment."""
        with usage_errors():
            return envs_jax.make(self.env, **self.options)


def returns(task: Task, act: Act, sample: bool) -> np.ndarray:
    """Play held-out episodes and return their returns float32[EPISODES], means over agents."""
    env, (reset, step) = _played(task.env, tuple(task.options.items()))
    state, timestep = reset(jax.random.split(jax.random.key(HELD_OUT), EPISODES))
    total, running, carry = np.zeros(EPISODES, np.float32), np.ones(EPISODES, bool), None
    for t in range(env.spec.horizon):
        action, carry = act(carry, timestep, jax.random.key(t) if sample else None)
        state, timestep = step(state, timestep, action)
        total += running * np.asarray(timestep.reward).mean(axis=1)
        running &= ~np.asarray(timestep.terminated | timestep.truncated)
        if not running.any():
            break
    return total


@functools.lru_cache
def _played(name: str, options: tuple[tuple[str, Any], ...]) -> tuple[Environment, tuple[Any, Any]]:
    """Return an environment with its compiled reset and step, compiled once."""
    env = Task(name, 0, options=dict(options)).make()
    play = batched(env)
    return env, (jax.jit(play.reset), jax.jit(play.step))


def to_box(env: Environment, action: Any) -> Array:
    """Return the environment's actions [B, 1, n] of those in [-1, 1] [B, n]."""
    box = box_of(env)
    return (box.low + (jnp.clip(action, -1.0, 1.0) + 1.0) / 2.0 * (box.high - box.low))[:, None]


def box_of(env: Environment) -> Box:
    """Return the box of an environment's actions."""
    assert isinstance(env.spec.action, Box)
    return env.spec.action
