"""The entry of the mapping environment in `bench.baselines`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.baselines import Entry
from bench.reference.coverage import baselines
from bench.reference.coverage.oracle import Mission, Settings


def settings(env: dict[str, Any]) -> Settings:
    """Convert the environment's settings to the oracle's, except the settings of map storage and backends.

    Raises ValueError: a setting that it does not know, or a value.
    """
    if (timing := env.get("reward_timing", "aligned")) != "aligned":
        raise ValueError(f"the NumPy baseline knows no reward_timing '{timing}': use 'aligned'")
    names = {field.name for field in dataclasses.fields(Settings)}
    return Settings(**{name: value for name, value in env.items() if name in names})


class NumpyMission:
    """One mission at a time on the oracle."""

    name = "NumPy"
    notes: Sequence[str] = ()

    def __init__(self, env: dict[str, Any], policy: str, seed: int) -> None:
        self._settings = settings(env)
        self._rng = np.random.default_rng(seed)
        self._policy = baselines.make_policy(policy, self._settings)
        self._mission: Mission

    def reset(self) -> None:
        self._mission = Mission(self._settings, self._rng)

    def act(self) -> np.ndarray:
        """Actions [N]."""
        return self._policy(self._mission)

    def observe(self, action: np.ndarray) -> None:
        self._mission.critic_state(action, self._mission.observe())

    def step(self, action: np.ndarray) -> bool:
        return self._mission.step(action)[1]

    def measure(self) -> Mapping[str, float]:
        return self._mission.metrics()


ENTRY = Entry(policy="random", baseline=NumpyMission)
