"""Environments of Gymnasium: `--env gymnasium:CartPole-v1`, or `gymnasium:my_module:MyEnv-v0`. Extra: gymnasium.

The module is imported first, to register its environments. `max_episode_steps` is the horizon, and truncates.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs_jax.adapters.adapter import DEFAULT_HORIZON
from envs_jax.adapters.common import package
from envs_jax.adapters.host import Copy, HostAdapter
from envs_jax.base import Environment, load_module


class GymnasiumCopy(Copy):
    """A copy of an environment of Gymnasium."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, seed: int) -> Sequence[Any]:
        return (self.env.reset(seed=seed)[0],)

    def step(self, action: np.ndarray) -> tuple[Sequence[Any], Any, bool, bool]:
        one = int(action[0]) if action.ndim == 1 and action.dtype == np.int32 else action[0]
        observation, reward, terminated, truncated, _ = self.env.step(one)
        return (observation,), reward, bool(terminated), bool(truncated)


@dataclasses.dataclass(frozen=True)
class FromGymnasium(HostAdapter):
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

    def package_spaces(self) -> dict[Any, tuple[Any, Any]]:
        env = self._make()
        spaces = env.observation_space, env.action_space
        env.close()
        return {"agent": spaces}

    def make_copy(self) -> Copy:
        return GymnasiumCopy(self._make())

    def _make(self) -> Any:
        gymnasium, name = package("gymnasium", self.library), self.name.rpartition(":")[2]
        limit = {"max_episode_steps": self.horizon, "disable_env_checker": True}
        return gymnasium.make(name, **limit, **self.keywords)
