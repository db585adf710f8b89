"""The state of a run on its devices, the metrics of a block of iterations, and the position as the host knows it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax

from envs_jax.base import Array, pytree
from jaxrl.algos.base import Phase


@pytree
class TrainState:
    """The complete training state: saving and loading it resumes a run exactly."""

    algo: Any  # AlgoState of the algorithm
    carry: Any  # the policy's carry per environment, () where phases restart
    env: Any  # BatchState of the environments, () where phases restart
    timestep: Any  # TimeStep, the time steps [B] to act on next, () where phases restart
    statistics: Any  # EpisodeStatistics, running [B], () where phases restart
    key: Any  # key[] of the run, see `make_env_key` and `Trainer.split_key`
    pool: Any  # past policies kept by the environment (snapshots that play against the learner), mostly ()
    progress: Any  # Progress
    phase: Any  # int32[], index of the phase
    iteration: Any  # uint32[], iterations done in this phase
    iterations: Any  # uint32[], iterations done in all phases
    settings: Any  # {name: float32[]}, traced settings of the algorithm, {} without a sweep


@pytree
class BlockMetrics:
    """The metrics of a block; the first axis of leaves is the iteration, and iterations that did not run are 0.

    With several trials the second axis of metrics is the trial, and `not_finite` and `iterations` have an entry for
    each.
    """

    learning: Any  # {name: float32[K] or float32[K, updates]}, of `Algorithm.learn`
    episodes: Any  # {name: float32[K]}, sums over the episodes that ended, and their number under "episodes"
    not_finite: Array  # int32[], index of the first non-finite tensor (see `Trainer.tensor_names`), -1 if all are fine
    # int32[], that ran up to the first one with a value that is not finite; a single run stops there, trials go on
    iterations: Array
    faults: Any  # {field of TimeStep: float32[K]}, see `not_finite.count_faults`

    def of_trial(self, trial: int) -> "BlockMetrics":
        """Return the metrics of one of several trials."""
        rows = jax.tree.map(lambda x: x[:, trial], (self.learning, self.episodes, self.faults))
        return BlockMetrics(rows[0], rows[1], self.not_finite[trial], self.iterations[trial], rows[2])


@dataclasses.dataclass(frozen=True)
class Position:
    """The position of a run as the host knows it, without waiting for the device."""

    phase: int = 0
    iteration: int = 0  # in the phase
    iterations: int = 0  # in all phases
    env_steps: int = 0
    updates: int = 0

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Self:
        """Return the position that a checkpoint's JSON object holds."""
        return cls(**{field.name: meta[field.name] for field in dataclasses.fields(cls)})

    def after(self, phase: Phase, num_envs: int, count: int = 1) -> "Position":
        return Position(
            self.phase,
            self.iteration + count,
            self.iterations + count,
            self.env_steps + count * phase.steps * num_envs,
            self.updates + count * phase.updates,
        )

    def axis(self, phases: tuple[Phase, ...]) -> int:
        """Return the step on a chart's axis; an iteration of a phase without environment steps counts as one."""
        iterations = sum(phase.iterations or 0 for phase in phases[: self.phase] if not phase.steps)
        if not phases[self.phase].steps:
            iterations += self.iteration
        return self.env_steps + iterations

    def remaining(self, phases: tuple[Phase, ...], num_envs: int, total_env_steps: int) -> list[int]:
        """Return the iterations left of each phase; phases that step end when the total is reached."""
        left = [0] * self.phase
        missing = total_env_steps - self.env_steps
        for index, phase in enumerate(phases[self.phase :]):
            limits = []
            if phase.iterations is not None:
                limits.append(phase.iterations - (0 if index else self.iteration))
            if phase.steps:
                limits.append(-(-missing // (phase.steps * num_envs)))
            left.append(max(min(limits), 0))
            missing -= left[-1] * phase.steps * num_envs
        return left
