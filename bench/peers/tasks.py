"""What the learners of `bench.peers` train on: one environment for each algorithm, and equal settings for all."""

import dataclasses
from collections.abc import Callable
from typing import Any

from envs_jax.base import Array, TimeStep

# (carry or None at the start, TimeStep [B], key or None = greedy) -> actions [B, A, ...], carry
Act = Callable[[Any, TimeStep, Array | None], tuple[Any, Any]]

ENVS, STEPS, MINIBATCHES, EPOCHS = 8, 128, 4, 4  # for ppo: rollouts of 1,024 steps in minibatches of 256


@dataclasses.dataclass(frozen=True)
class Watch:
    """An evaluation of a policy while it is trained."""

    every: int  # environment steps from one evaluation to the next, all copies together
    evaluate: Callable[[int, int, Act], bool]  # (environment steps, updates, the policy) -> whether to stop


class Stop(Exception):
    """Ends a training loop that asks nobody; never leaves the learner."""


@dataclasses.dataclass(frozen=True)
class Task:
    """An environment and the settings that all learners share.

    Attributes:
        gymnasium: name of the environment, in gymnax too.
        steps: environment steps, all copies together.
        num_envs: copies.
        hidden_size: of two hidden layers.
        learning_rate, batch_size, gamma, tau: of replay learners.
        random_steps: at the start of replay learners (Brax: of its first policy).
    """

    gymnasium: str
    steps: int
    num_envs: int
    hidden_size: int
    learning_rate: float = 1e-3
    batch_size: int = 256
    random_steps: int = 1024
    gamma: float = 0.99
    tau: float = 0.005


PENDULUM = Task("Pendulum-v1", 20_000, num_envs=4, hidden_size=256)
CARTPOLE = Task("CartPole-v1", 500 * ENVS * STEPS, num_envs=ENVS, hidden_size=64)
# algorithm: task, greedy return that ends it, environment steps between scores
TASKS = {"sac": (PENDULUM, -200.0, 1000), "td3": (PENDULUM, -200.0, 1000), "ppo": (CARTPOLE, 475.0, 8 * ENVS * STEPS)}
