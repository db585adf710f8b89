"""Baseline environments that the JAX side is compared with.

An environment joins the benchmarks with one entry here and a module that defines `ENTRY`. One without an entry can
also be measured, without a baseline.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

ENTRIES = {
    "coverage": "bench.baselines.coverage",
    "reach": "bench.baselines.reach",
    **dict.fromkeys(("snakes", "snakes_3v3", "snakes_1v1", "snakes_2p", "snakes_5p"), "bench.baselines.snakes"),
}


class Baseline(Protocol):
    """An independent implementation that steps one copy at a time, like the original system."""

    name: str  # its name in tables
    notes: Sequence[str]  # remarks on its figures

    def reset(self) -> None:
        """Start an episode."""

    def act(self) -> np.ndarray:
        """Return the scripted policy's actions."""

    def observe(self, action: np.ndarray) -> None:
        """Make the observations of agents, and of a centralised critic that knows the action."""

    def step(self, action: np.ndarray) -> bool:
        """Step; return whether the episode is over."""

    def measure(self) -> Mapping[str, float]:
        """Return the metrics of the current step."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One environment's entry."""

    policy: str  # scripted policy of the throughput benchmark, for both sides
    # (environment settings, policy, seed) -> Baseline. Raises ValueError for settings or a policy that it lacks.
    baseline: Callable[[dict[str, Any], str, int], Baseline]


def require(settings: Mapping[str, Any], values: Mapping[str, Any], who: str, advice: str) -> None:
    """Raise ValueError unless the settings have these values, the only ones that `who` knows."""
    for name, value in values.items():
        if settings[name] != value:
            raise ValueError(f"{who}, with {name} {value}, not {settings[name]}: {advice}")


def find(env: str) -> Entry | None:
    """Return the entry of an environment, None if it has none."""
    return importlib.import_module(ENTRIES[env]).ENTRY if env in ENTRIES else None
