"""Baseline environments and learners that the JAX side is compared with, environment by environment.

An environment joins the benchmarks with one entry here and a module that defines `ENTRY`. One without an entry can
also be measured, without a baseline.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from envs_jax.base import EnvSpec

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


class Learner(Protocol):
    """A learner in PyTorch with the baseline's environment, updated from the host."""

    threads: int  # number of PyTorch's threads

    def collect(self, episodes: int, copies: int = 1) -> int:
        """Play episodes one after another, keep them for `learn`; return the number of environment steps.

        `copies` are kept of each, so that a training step on much data needs few episodes; a replay needs one.
        """

    def learn(self) -> None:
        """Make one training step on the last collected episodes."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One environment's entry."""

    algo: str  # the algorithm that trains on it
    policy: str  # scripted policy of the throughput benchmark, for both sides
    # settings that `bench.compare` measures, by name; the environment is measured once for all cases that agree in its
    # settings
    cases: Mapping[str, Mapping[str, Any]]
    # (environment settings, policy, seed) -> Baseline. Raises ValueError for settings or a policy that it lacks.
    baseline: Callable[[dict[str, Any], str, int], Baseline]
    # (environment settings, algorithm settings, seed, device "cpu" or "cuda") -> Learner, or None. Raises ValueError
    # for settings that it lacks, ImportError without PyTorch.
    learner: Callable[[dict[str, Any], dict[str, Any], int, str], Learner] | None
    # (spec, algorithm settings, samples) -> number of environments and changed algorithm settings of a training step of
    # the same kind with about `samples` samples: few updates of the same arithmetic
    shorten: Callable[[EnvSpec, dict[str, Any], int], tuple[int, dict[str, Any]]]
    preset: str | None = None  # default preset of `bench.compare`; None = the algorithm's own
    presets: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by case, where a case has another one


def one_update(spec: EnvSpec, algo: dict[str, Any], samples: int) -> tuple[int, dict[str, Any]]:
    """`Entry.shorten` for algorithms with a replay: one update with a full batch, and episodes that fill it."""
    del samples
    num_envs = -(-algo["batch_size"] // spec.horizon)
    return num_envs, {"update_interval": 1, "env_steps_per_update": float(num_envs)}


def require(settings: Mapping[str, Any], values: Mapping[str, Any], who: str, advice: str) -> None:
    """Raise ValueError unless the settings have these values, the only ones that `who` knows."""
    for name, value in values.items():
        if settings[name] != value:
            raise ValueError(f"{who}, with {name} {value}, not {settings[name]}: {advice}")


def find(env: str) -> Entry | None:
    """Return the entry of an environment, None if it has none."""
    return importlib.import_module(ENTRIES[env]).ENTRY if env in ENTRIES else None
