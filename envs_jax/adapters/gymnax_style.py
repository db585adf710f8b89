"""Environments with the functions of gymnax, for code written for it; needs no other package.

`reset` and `step` are pure functions of one copy, to be used under `jax.jit`, `jax.vmap` and `jax.lax.scan`.

Source of the interface: the public repository RobertTLange/gymnax, versions 0.0.9 and 1.0.1, Apache-2.0 licence.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax import base
from envs_jax.adapters import outward
from envs_jax.base import Array, Environment, pytree
from envs_jax.progress import start


class Discrete(base.Discrete):
    """Integers 0 .. n - 1."""

    def sample(self, key: Array) -> Array:
        return jax.random.randint(key, (), 0, self.n, jnp.int32)

    def contains(self, x: Any) -> Array:
        """Return whether a value lies in the space, bool[]."""
        return (jnp.asarray(x) >= 0) & (jnp.asarray(x) < self.n)


class Box(base.Box):
    """Arrays of one shape and dtype whose values lie in [low, high]."""

    def sample(self, key: Array) -> Array:
        """Draw an array, uniform between the bounds; standard normal, cut at the bounds, where one is infinite."""
        low, high = (bound.astype(np.float32) for bound in self.bounds)
        whole = jnp.issubdtype(self.dtype, jnp.integer)  # the highest integer as likely as the others
        finite = np.isfinite(high - low)
        drawn = jax.random.normal(key, self.shape, jnp.float32)
        drawn = jnp.clip(drawn, low, high)
        if finite.any():
            ends = np.where(finite, low, 0), np.where(finite, high + np.float32(whole), 1)
            drawn = jnp.where(finite, jax.random.uniform(key, self.shape, jnp.float32, *ends), drawn)
        return (jnp.floor(drawn) if whole else drawn).astype(self.dtype)

    def contains(self, x: Any) -> Array:
        """Return whether all values lie between the bounds, bool[]."""
        low, high = (np.array(bound) if isinstance(bound, tuple) else bound for bound in (self.low, self.high))
        return jnp.all((jnp.asarray(x) >= low) & (jnp.asarray(x) <= high))


def _space(space: Any) -> Discrete | Box:
    if isinstance(space, base.Discrete):
        return Discrete(space.n)
    return Box(space.shape, space.dtype, space.low, space.high)


@pytree
class State:
    """State of one copy."""

    env: Any  # the environment's own state
    action_mask: Any  # bool[n], actions open now, or None
    time: Array  # int32[], steps made in this episode


@dataclasses.dataclass(frozen=True)
class GymnaxStyleEnv:
    """An environment with one agent, whose episodes follow each other without a step in between.

    The `params` of its methods are the schedules' values, as `Environment.context` returns them; None means
    `default_params`, the values at the start of training.

    Args:
        env: the environment.
        split_done: let `step` return terminated and truncated instead of done, as gymnax does from version 1.0 on.

    Raises ValueError: the environment has several agents or observations of several arrays.
    """

    env: Environment
    split_done: bool = False

    def __post_init__(self) -> None:
        outward.check_single_agent(outward.checked_spec(self.env), "choose an environment with one agent")

    @property
    def name(self) -> str:
        return self.env.spec.name

    @property
    def default_params(self) -> Any:
        """Values of the schedules at the start of training."""
        return self.env.context(start())

    @property
    def num_actions(self) -> int:
        """Number of actions, of dimensions for continuous ones."""
        action = self.env.spec.action
        return action.n if isinstance(action, base.Discrete) else action.shape[0]

    def observation_space(self, params: Any = None) -> Discrete | Box:
        return _space(self.env.spec.observation)

    def action_space(self, params: Any = None) -> Discrete | Box:
        return _space(self.env.spec.action)

    def reset(self, key: Array, params: Any = None) -> tuple[Array, State]:
        state, timestep = self.env.reset(key, params)
        return timestep.observation[0], State(state, _mask(timestep), jnp.int32(0))

    def step(self, key: Array, state: State, action: Any, params: Any = None) -> tuple[Any, ...]:
        """Make a step; after the end of an episode, return the observation and state of the next one.

        Args:
            key: of the next episode, used where this step ends one; steps draw from the key of their episode.
            state: what the last call returned.
            action: int32[] (Discrete) or float[...] (Box).
            params: see the class.

        Returns:
            observation, state, reward float32[], done bool[], info: the metrics, "terminated", "truncated", "discount"
            (0 where terminated) and "final_observation", the observation before a reset.
        """
        action = jnp.asarray(action, self.env.spec.action.dtype)
        env_state, timestep = self.env.step(state.env, action[None], params)
        stepped = timestep.observation[0], State(env_state, _mask(timestep), state.time + 1)
        restarted = self.reset(key, params)
        observation, after = jax.tree.map(lambda new, old: jnp.where(timestep.done, new, old), restarted, stepped)
        info = timestep.metrics | {
            "terminated": timestep.terminated,
            "truncated": timestep.truncated,
            "discount": 1.0 - timestep.terminated.astype(jnp.float32),
            "final_observation": stepped[0],
        }
        done = (timestep.terminated, timestep.truncated) if self.split_done else (timestep.done,)
        return observation, after, timestep.reward[0], *done, info


def _mask(timestep: base.TimeStep) -> Any:
    return None if timestep.action_mask is None else timestep.action_mask[0]
