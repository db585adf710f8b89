"""Environments for users of other libraries: those that are tested, and the batch that adapters must equal."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from envs_jax import Box, Discrete
from helpers.tiny import Corridor

SNAKES = {"height": 4, "width": 4, "beans": 2, "max_steps": 6}
ENVS = {
    "corridor": Corridor,
    "corridors": lambda: Corridor(num_agents=2, length=2),
    "reach": lambda: envs_jax.make("reach", horizon=4),
    "snakes": lambda: envs_jax.make("snakes_1v1", masks=True, **SNAKES),
    "snakes_team": lambda: envs_jax.make("snakes_1v1", masks=True, side="both", **SNAKES),
    "coverage": lambda: envs_jax.make("coverage", q=5, num_agents=2, budget=4),
}
SINGLE, TEAMS = ("corridor", "reach", "snakes"), ("corridors", "snakes_team", "coverage")


needs_gymnasium = pytest.mark.needs("gymnasium")
needs_pettingzoo = pytest.mark.needs("pettingzoo")


class Reference:
    """The jitted batch stepped directly, with the keys that the adapters document."""

    def __init__(self, env: Any, copies: int, seed: int) -> None:
        self.batch = envs_jax.batched(env)
        keys = jnp.stack([jax.random.fold_in(jax.random.key(seed), i) for i in range(copies)])
        self.state, self.timestep = jax.jit(self.batch.reset)(keys)
        self.program = jax.jit(self.batch.step)

    def step(self, action: np.ndarray) -> Any:
        self.state, self.timestep = self.program(self.state, self.timestep, jnp.asarray(action))
        return self.timestep


def close(actual: Any, expected: Any) -> bool:
    """Return whether numbers are equal up to the rounding of two compilations of one environment."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    return actual.dtype == expected.dtype and np.allclose(actual, expected.reshape(actual.shape), rtol=1e-6, atol=1e-6)


def drawn(env: Any, copies: int, steps: int) -> list[np.ndarray]:
    """Random actions [B, A, ...] for each step."""
    spec, generator = env.spec, np.random.default_rng(0)
    shape = (steps, copies, spec.num_agents, *spec.action.shape)
    if isinstance(spec.action, Discrete):
        return list(generator.integers(0, spec.action.n, shape).astype(np.int32))
    return list(generator.uniform(-1, 1, shape).astype(np.float32))


class Dictionaries(Corridor):
    @property
    def spec(self) -> Any:
        return envs_jax.EnvSpec("pair", 1, {"a": Box((2,)), "b": Box((3,))}, Discrete(2), 5)
