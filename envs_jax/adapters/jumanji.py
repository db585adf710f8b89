"""Environments of jumanji (github.com/instadeepai/jumanji): `--env jumanji:Snake-v1`. Extra: jumanji.

A last time step of discount 0 terminates, one of another discount truncates. In many of its environments the time
limit has discount 0, and the observation counts the steps. A `horizon` below that limit truncates.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from envs_jax.adapters.adapter import DEFAULT_HORIZON, Adapter, PackageStep
from envs_jax.adapters.common import (
    ActionMap,
    UnfitError,
    describe_actions,
    join_mask,
    package,
    read_largest_byte,
)
from envs_jax.base import Array, Box, Discrete


@dataclasses.dataclass(frozen=True)
class Jumanji(Adapter):
    """An environment of jumanji with one agent and one action at a time."""

    library = "jumanji"
    unseen = ("action_mask",)

    @classmethod
    def names(cls) -> Sequence[str]:
        return tuple(package("jumanji", cls.library).registered_environments())

    @classmethod
    def limit(cls) -> int:
        return int(getattr(package("jumanji", cls.library).make(cls.name), "time_limit", None) or DEFAULT_HORIZON)

    def package_env(self) -> Any:
        return package("jumanji", self.library).make(self.name)

    def agent_action(self) -> tuple[Discrete | Box, ActionMap]:
        if self.env.reward_spec.shape or self.env.discount_spec.shape:
            raise UnfitError("gives several rewards in a step: choose an environment of jumanji with one agent")
        return describe_actions(self.env.action_spec)

    def largest_byte(self, agent: int, name: str) -> Any:
        return read_largest_byte(self.env.observation_spec, name)

    def package_reset(self, key: Array) -> tuple[Any, PackageStep]:
        return self._to_package_step(*self.env.reset(key))

    def package_step(self, inner: Any, action: Array, key: Array) -> tuple[Any, PackageStep]:
        return self._to_package_step(*self.env.step(inner, action[0]))

    def _to_package_step(self, inner: Any, timestep: Any) -> tuple[Any, PackageStep]:
        mask = getattr(timestep.observation, "action_mask", None)
        ended = timestep.last()
        final = timestep.discount == 0
        reward = jnp.asarray(timestep.reward)
        output = PackageStep([timestep.observation], reward, ended & final, ended & ~final)
        return inner, output if mask is None else output._replace(action_mask=self._open(mask))

    def _open(self, mask: Any) -> Array:
        return join_mask(mask, self.env.action_spec)[None]
