"""Environments with the functions of gymnax, for code written for it; needs no other package.

`reset` and `step` are pure functions of one copy, to be used under `jax.jit`, `jax.vmap` and `jax.lax.scan`.

Source of the interface: the public repository RobertTLange/gymnax, versions 0.0.9 and 1.0.1, Apache-2.0 licence.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.adapters import outward
from envs_jax.base import Array, Box, Discrete, Environment, TimeStep, pytree
from envs_jax.progress import start


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
        return action.n if isinstance(action, Discrete) else action.shape[0]

    def observation_space(self, params: Any = None) -> Any:
        """The Box or Discrete of an observation; it has `sample` and `contains`."""
        return self.env.spec.observation

    def action_space(self, params: Any = None) -> Discrete | Box:
        return self.env.spec.action

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


def _mask(timestep: TimeStep) -> Any:
    return None if timestep.action_mask is None else timestep.action_mask[0]
