"""Environments of gymnax (github.com/RobertTLange/gymnax): `--env gymnax:Pendulum-v1`. Extra: gymnax.

`step_env` is played, without the reset of `step`; `params.max_steps_in_episode` is the horizon, and truncates.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.adapters.adapter import Adapter, PackageStep
from envs_jax.adapters.common import ActionMap, UnfitError, describe_actions, package, read_largest_byte
from envs_jax.base import Array, Box, Discrete


@dataclasses.dataclass(frozen=True)
class Gymnax(Adapter):
    """An environment of gymnax."""

    library = "gymnax"

    @classmethod
    def names(cls) -> Sequence[str]:
        return tuple(package("gymnax", cls.library).registered_envs)

    @classmethod
    def limit(cls) -> int:
        return int(package("gymnax", cls.library).make(cls.name)[1].max_steps_in_episode)

    def package_env(self) -> Any:
        env, params = package("gymnax", self.library).make(self.name)
        if not hasattr(env, "is_truncated"):
            raise UnfitError(
                "needs gymnax 1.0 or newer, which marks ends by the time limit: pip install -e '.[gymnax]'"
            )
        return env, params.replace(max_steps_in_episode=type(params.max_steps_in_episode)(self.horizon))

    def agent_action(self) -> tuple[Discrete | Box, ActionMap]:
        env, params = self.env
        return describe_actions(env.action_space(params))

    def largest_byte(self, agent: int, name: str) -> Any:
        env, params = self.env
        return read_largest_byte(env.observation_space(params), name)

    def package_reset(self, key: Array) -> tuple[Any, PackageStep]:
        env, params = self.env
        observation, inner = env.reset_env(key, params)
        return inner, PackageStep([self._encode(observation)])

    def package_step(self, inner: Any, action: Array, key: Array) -> tuple[Any, PackageStep]:
        env, params = self.env
        observation, inner, reward, terminated, _ = env.step_env(key, inner, action[0], params)
        return inner, PackageStep([self._encode(observation)], reward, terminated, env.is_truncated(inner, params))

    def _encode(self, observation: Any) -> Any:
        """Return the observation, the number of a state one-hot."""
        env, params = self.env
        states = getattr(env.observation_space(params), "n", None)
        return observation if states is None else jax.nn.one_hot(observation, int(states), dtype=jnp.float32)
