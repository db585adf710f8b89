"""Environments of Gymnasium: `--env gymnasium:CartPole-v1`, or `gymnasium:my_module:MyEnv-v0`. Extra: gymnasium.

The module is imported first, to register its environments. `max_episode_steps` is the horizon, and truncates.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs_jax.adapters.adapter import DEFAULT_HORIZON
from envs_jax.adapters.common import package
from envs_jax.adapters.copies import Copy, CopyStep, describe_returned, find_masks, to_flag, to_number
from envs_jax.adapters.host import AgentSpaces, CopyAdapter
from envs_jax.adapters.parts import Fault
from envs_jax.base import Environment, load_module

_INTERFACE = "as Gymnasium has it since version 0.26"


class GymnasiumCopy(Copy):
    """A copy of an environment of Gymnasium."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, seed: int) -> CopyStep:
        result = self.env.reset(seed=seed)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise Fault(
                f"reset returned {describe_returned(result)}",
                f"return the pair (observation, info), {_INTERFACE}, info a dictionary",
            )
        observation, info = result
        return CopyStep((observation,), (info,))

    def step(self, action: np.ndarray) -> CopyStep:
        one = int(action[0]) if action.ndim == 1 and action.dtype == np.int32 else action[0]
        result = self.env.step(one)
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            raise Fault(
                f"step returned {describe_returned(result)}",
                f"return the five values observation, reward, terminated, truncated, info, {_INTERFACE}, info a "
                "dictionary",
            )
        observation, reward, terminated, truncated, info = result
        if type(terminated) is not bool:
            terminated = to_flag(terminated, "terminated")
        if type(truncated) is not bool:
            truncated = to_flag(truncated, "truncated")
        return CopyStep((observation,), (info,), to_number(reward, "the reward"), terminated, truncated)


@dataclasses.dataclass(frozen=True)
class FromGymnasium(CopyAdapter):
    """An environment of Gymnasium."""

    library = "gymnasium"

    @classmethod
    def class_of(cls, name: str) -> type[Environment]:
        package("gymnasium", cls.library)
        module, colon, _ = name.rpartition(":")
        if colon:
            load_module(module, "environment")
        return super().class_of(name)

    @classmethod
    def names(cls) -> Sequence[str]:
        return tuple(package("gymnasium", cls.library).registry)

    @classmethod
    def is_known(cls, name: str) -> bool:
        return name.rpartition(":")[2] in cls.names()

    @classmethod
    def limit(cls) -> int:
        registered = package("gymnasium", cls.library).spec(cls.name.rpartition(":")[2])
        return int(registered.max_episode_steps or DEFAULT_HORIZON)

    def package_spaces(self) -> dict[Any, AgentSpaces]:
        env = self._make()
        (mask,) = find_masks(GymnasiumCopy(env), [env.action_space])
        spaces = AgentSpaces(env.observation_space, env.action_space, mask)
        env.close()
        return {"agent": spaces}

    def make_copy(self) -> Copy:
        return GymnasiumCopy(self._make())

    def _make(self) -> Any:
        gymnasium, name = package("gymnasium", self.library), self.name.rpartition(":")[2]
        limit = {"max_episode_steps": self.horizon, "disable_env_checker": True}
        env = gymnasium.make(name, **limit, **self.keywords)
        # `horizon` cuts here too, and this wrapper fails where a step does not return five values
        return env.env if type(env) is gymnasium.wrappers.TimeLimit else env
