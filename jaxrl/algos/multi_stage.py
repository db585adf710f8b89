"""Algorithms that use what other runs learned: a collective uses its workers, a student its teacher."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, ClassVar

from envs_jax.base import EnvSpec
from jaxrl.algos.base import Algorithm


@dataclasses.dataclass(frozen=True)
class UpstreamRun:
    """A run that a setting refers to."""

    run: str  # the run, as the user named it
    algo: Algorithm  # the run's algorithm, with its settings and its environment's spec
    settings: dict[str, Any]  # the algorithm's settings, by name

    def check(self, spec: EnvSpec) -> None:
        """Raise ValueError unless the run's policy could act in the environment."""
        trained_spec = self.algo.spec
        if trained_spec.name != spec.name:
            raise ValueError(
                f"{self.run} was trained on '{trained_spec.name}', not on '{spec.name}': use runs of one environment"
            )
        for kind, shape, expected in (
            ("observations", trained_spec.observation.shape, spec.observation.shape),
            ("actions", trained_spec.action.shape, spec.action.shape),
        ):
            if shape != expected:
                raise ValueError(f"{self.run} has {kind} of shape {shape}, here they have {expected}: use another run")
        for name, value in spec.compatible_settings.items():
            trained = trained_spec.compatible_settings[name]
            if trained != value:
                raise ValueError(
                    f"{self.run} was trained with {name} {trained}, here it is {value}: use the same value"
                )


Sources = dict[str, tuple[UpstreamRun, ...]]  # {setting: the runs that it names}
Recordings = dict[str, dict[str, Any]]  # {setting: all its expert datasets concatenated, {name: array}}


@dataclasses.dataclass(frozen=True)
class MultiStage(Algorithm):
    """An algorithm with settings that name runs or expert datasets, from which it begins.

    The command reads the files and calls `resolve_inputs` once. The `inputs` of `init` are then {setting: value}: for
    runs the `weights` of each, in the order of the returned setting; for datasets what `to_dataset` returns.
    """

    # Settings (str) that name runs, and expert datasets, comma-separated.
    sources: ClassVar[tuple[str, ...]] = ()
    recordings: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def resolve_inputs(
        cls, spec: EnvSpec, settings: dict[str, Any], sources: Sources, recordings: Recordings
    ) -> dict[str, Any]:
        """Return a new run's settings, with what it takes from the runs and datasets that they name.

        Args:
            spec: of the environment.
            settings: of the new run's algorithm.
            sources: runs in the user's order, none where the setting is empty.
            recordings: without empty settings.

        Raises ValueError: the runs are not compatible.
        """
        raise NotImplementedError("an algorithm with `sources` needs resolve_inputs(...)")

    def to_dataset(self, recording: dict[str, Any]) -> Any:
        """Return the arrays that `init` receives for a dataset, which is as in `resolve_inputs`."""
        raise NotImplementedError("an algorithm with `recordings` needs to_dataset(recording)")


def read_resolved(text: str, names: Iterable[str]) -> dict[str, Any]:
    """Parse the JSON object that `resolve_inputs` wrote, with these names only. Raises ValueError for anything else."""
    try:
        resolved = json.loads(text)
    except (ValueError, RecursionError):
        resolved = None
    if not isinstance(resolved, dict) or not resolved.keys() <= set(names):
        raise ValueError("resolved_inputs is filled in by the run itself: remove it")
    return resolved
