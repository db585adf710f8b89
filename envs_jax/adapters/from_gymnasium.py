"""Environments of Gymnasium: `--env gymnasium:CartPole-v1`, or `gymnasium:my_module:MyEnv-v0`. Extra: gymnasium.

The module is imported first, to register its environments. `max_episode_steps` is the horizon, and truncates.
"""

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from envs_jax.adapters.adapter import DEFAULT_HORIZON
from envs_jax.adapters.common import package
from envs_jax.adapters.copies import Copy, find_masks
from envs_jax.adapters.gymnasium_copy import make_copy
from envs_jax.adapters.host import AgentSpaces, CopyAdapter
from envs_jax.base import Environment, load_module


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
        one: Any = self.maker()
        (mask,) = find_masks(one, [one.env.action_space])
        spaces = AgentSpaces(one.env.observation_space, one.env.action_space, mask)
        one.close()
        return {"agent": spaces}

    @property
    def maker(self) -> Callable[[], Copy]:
        module, _, name = self.name.rpartition(":")
        registered = package("gymnasium", self.library).spec(name)
        here, _, function = str(registered.entry_point).partition(":")
        if here == "__main__":  # where workers do not find it
            registered = copy.copy(registered)
            registered.entry_point = getattr(sys.modules["__main__"], function)
        return functools.partial(make_copy, module, registered, self.horizon, self.keywords)
