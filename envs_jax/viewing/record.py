"""Recorded episodes, and the curves that they are compared with."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from envs_jax.base import Environment, TimeStep

INK, SOFT, GREY = "#1d2733", "#4a5560", "#8a94a0"
_PLAIN = {"random": GREY, "learned": "#0072b2", "sampled": "#56b4e9"}
_OTHERS = ("#d55e00", "#cc79a7", "#009e73", "#e69f00", "#7a5195", "#8c564b")


@dataclasses.dataclass(frozen=True)
class Record:
    """One episode of T steps.

    Attributes:
        env: the environment.
        title: a few words.
        subtitle: the policy and the number of the episode.
        policy: name of the policy.
        states: the environment's states, leaves [T + 1, ...]; PRNG keys as they are, all else NumPy.
        timesteps: time steps, leaves [T + 1, ...].
        actions: [T, A, ...].
        curves: {metric: float[T + 1]}, "return" too: the episode's value if it ended there.
        references: {policy: {metric: float[T + 1, 2]}}: mean over many episodes and half of its 95 % interval.
        final_means: {opponent: {policy: {metric: mean at the end of many games}}}, where two teams play.
    """

    env: Environment
    title: str
    subtitle: str
    policy: str
    states: Any
    timesteps: TimeStep
    actions: np.ndarray
    curves: Mapping[str, np.ndarray]
    references: Mapping[str, Mapping[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    final_means: Mapping[str, Mapping[str, Mapping[str, float]]] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.actions)

    @property
    def rewards(self) -> np.ndarray:
        """float[T + 1]: mean reward over agents of the action that led to each time step."""
        return np.asarray(self.timesteps.reward).mean(axis=-1)


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve of a chart, with a label at its end.

    Attributes:
        label: a few words.
        colour: as in HTML, "#rrggbb".
        values: float[T + 1] of this episode; or one number for all of it: a limit, or the final value of others.
    """

    label: str
    colour: str
    values: Any


def colours(policies: Iterable[str]) -> dict[str, str]:
    """Return a colour for every policy."""
    others = [name for name in policies if name not in _PLAIN]
    return _PLAIN | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}


def label(policy: str) -> str:
    """Return the label of a policy's curves in `references`."""
    return f"{policy} (mean)"
