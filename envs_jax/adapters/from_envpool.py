"""Environments of EnvPool, which steps all copies in threads of C++: `--env envpool:CartPole-v1`. Extra: envpool.

Its seeds are fixed when copies are made, so copies are made anew whenever all of them start, from the first copy's
seed; later episodes of a copy go on with its random numbers. `max_episode_steps` is the horizon, and truncates.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs_jax.adapters.adapter import DEFAULT_HORIZON
from envs_jax.adapters.common import package
from envs_jax.adapters.host import AgentSpaces, HostAdapter, HostVector


class EnvPoolVector(HostVector):
    """Copies of an environment of EnvPool; a copy whose episode has ended is restarted by the next step."""

    pool: Any = None

    def start(self, seeds: np.ndarray) -> None:
        env: Any = self.env
        self.pool = env.make_pool(len(seeds), int(seeds[0]))
        arrays = self.arrays
        arrays.reward[:], arrays.terminated[:], arrays.truncated[:] = 0, False, False
        arrays.lengths[:] = [0] * len(seeds)
        self._take(np.ones(len(seeds), np.bool_), self.pool.reset()[0])

    def move(self, restart: np.ndarray, moving: np.ndarray, seeds: np.ndarray, action: np.ndarray) -> None:
        observations, reward, terminated, truncated, info = self.pool.step(action[:, 0])
        arrays = self.arrays
        active = restart | moving
        arrays.reward[:, 0] = np.where(moving, reward, 0)
        arrays.terminated[active] = np.asarray(terminated, np.bool_)[active]
        arrays.truncated[active] = np.asarray(truncated, np.bool_)[active]
        arrays.lengths[:] = np.where(restart, 0, np.add(arrays.lengths, moving)).tolist()
        arrays.metrics[restart] = 0
        self._take(active, observations)
        if self.env.metric_keys:
            for i in np.flatnonzero(moving).tolist():
                arrays.measure(i, ({key: values[i] for key, values in info.items() if np.ndim(values)},))

    def _take(self, rows: np.ndarray, observations: Any) -> None:
        for part in self.env.spaces.groups[0].parts:
            stored = self.arrays.parts[0][part.name][:, 0]
            part.store(stored, rows, np.asarray(part.read(observations, {}))[rows])


@dataclasses.dataclass(frozen=True)
class FromEnvPool(HostAdapter):
    """An environment of EnvPool."""

    library = "envpool"

    @classmethod
    def names(cls) -> Sequence[str]:
        return tuple(package("envpool", cls.library).list_all_envs())

    @classmethod
    def limit(cls) -> int:
        config = package("envpool", cls.library).make_spec(cls.name).config
        return int(getattr(config, "max_episode_steps", 0) or DEFAULT_HORIZON)

    def package_spaces(self) -> dict[Any, AgentSpaces]:
        spec = package("envpool", self.library).make_spec(self.name, **self._settings)
        return {"agent": AgentSpaces(spec.gymnasium_observation_space, spec.gymnasium_action_space)}

    @property
    def _settings(self) -> dict[str, Any]:
        return {"max_episode_steps": self.horizon, **self.keywords}

    def make_vector(self) -> HostVector:
        return EnvPoolVector(self)

    def make_pool(self, copies: int, seed: int) -> Any:
        """Make copies that step together."""
        envpool = package("envpool", self.library)
        return envpool.make_gymnasium(self.name, num_envs=copies, seed=seed, **self._settings)
