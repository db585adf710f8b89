"""Scores of an environment's episodes, as each run stores them: runs are listed without their environment."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs_jax.base import EnvSpec
from jaxrl.runtime.run_directory import VERSIONS, RunError, read_versions

ENTRY = "scoring"  # in versions.json


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The `score` and `score_mode` of an `EnvSpec`, and the labels of all its metrics: "words" or "words, unit"."""

    score: str = "return"
    score_mode: str = "max"
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_spec(cls, spec: EnvSpec) -> "Scoring":
        names = dict.fromkeys([spec.score, *spec.metrics, "return", "length"])
        return cls(spec.score, spec.score_mode, {name: spec.label(name) for name in names})

    @classmethod
    def read(cls, run: Path) -> "Scoring":
        """Return the scoring in a run's versions.json; without one, runs are scored by their return.

        Raises RunError: the file or its entry is damaged.
        """
        entry = read_versions(run).get(ENTRY, {})
        try:
            scoring = cls(**entry)
            texts = (scoring.score, *scoring.labels, *scoring.labels.values())
            damaged = scoring.score_mode not in ("min", "max") or not all(isinstance(text, str) for text in texts)
        except (TypeError, AttributeError):
            damaged = True
        if damaged:
            raise RunError(f"the entry '{ENTRY}' of {run / VERSIONS} is damaged: remove it to see returns instead")
        return scoring

    def entry(self) -> dict[str, Any]:
        return {ENTRY: dataclasses.asdict(self)}

    def label(self, metric: str) -> str:
        return find_label(metric, self.labels)


def find_label(metric: str, labels: Mapping[str, str], unit: bool = True) -> str:
    """Return the label of a metric, with or without its unit; "metric/task" is the metric in episodes of one task."""
    name, _, task = metric.partition("/")
    words, comma, its_unit = labels.get(name, name.replace("_", " ")).partition(", ")
    return words + (f" ({task})" if task else "") + (comma + its_unit if unit else "")
