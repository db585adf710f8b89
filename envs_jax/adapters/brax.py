"""Environments of brax and of MuJoCo Playground: `--env brax:halfcheetah`, `--env playground:CartpoleBalance`.

github.com/google/brax, github.com/google-deepmind/mujoco_playground. Extras: brax, playground. The bare environment is
played, without the wrappers that count an episode's steps and reset it: `done` terminates, `horizon` truncates.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from envs_jax.adapters.adapter import Adapter, PackageStep
from envs_jax.adapters.common import ActionMap, bounded, package
from envs_jax.base import Array, Box, Discrete, setting

BACKENDS = ("", "generalized", "spring", "positional", "mjx")


@dataclasses.dataclass(frozen=True)
class Brax(Adapter):
    """An environment of brax."""

    backend: str = setting(
        "", "simulate with generalized, spring, positional or mjx; empty = the environment's own", choices=BACKENDS
    )

    library = "brax"

    @classmethod
    def names(cls) -> Sequence[str]:
        return tuple(package("brax.envs", cls.library)._envs)

    def package_env(self) -> Any:
        options = {"backend": self.backend} if self.backend else {}
        return package("brax.envs", self.library).get_environment(self.name, **options)

    def agent_action(self) -> tuple[Discrete | Box, ActionMap]:
        return bounded((int(self.env.action_size),), "float32", -1.0, 1.0)  # by brax's convention

    def package_reset(self, key: Array) -> tuple[Any, PackageStep]:
        return _to_package_step(self.env.reset(key))

    def package_step(self, inner: Any, action: Array, key: Array) -> tuple[Any, PackageStep]:
        return _to_package_step(self.env.step(inner, action[0]))


def _to_package_step(state: Any) -> tuple[Any, PackageStep]:
    return state, PackageStep([state.obs], state.reward, state.done > 0, metrics=state.metrics)


@dataclasses.dataclass(frozen=True)
class Playground(Adapter):
    """An environment of MuJoCo Playground."""

    impl: str = setting("jax", "simulate with jax, or with warp on NVIDIA devices", choices=("jax", "warp"))

    library = "playground"

    @classmethod
    def names(cls) -> Sequence[str]:
        return tuple(cls._registry().ALL_ENVS)

    @classmethod
    def limit(cls) -> int:
        return int(cls._registry().get_default_config(cls.name).episode_length)

    @classmethod
    def _registry(cls) -> Any:
        return package("mujoco_playground", cls.library).registry

    def package_env(self) -> Any:
        known = "impl" in self._registry().get_default_config(self.name)
        return self._registry().load(self.name, config_overrides={"impl": self.impl} if known else None)

    agent_action = Brax.agent_action
    package_reset = Brax.package_reset
    package_step = Brax.package_step
