"""The state of a run on its devices, and the metrics of a block of iterations."""

from typing import Any

from envs_jax.base import Array, pytree


@pytree
class TrainState:
    """The complete training state: saving and loading it resumes a run exactly.

    Attributes:
        algo: AlgoState of the algorithm.
        carry: the policy's carry per environment, () where phases restart.
        env: BatchState of the environments, () where phases restart.
        timestep: TimeStep, the time steps [B] to act on next, () where phases restart.
        statistics: EpisodeStatistics, running [B], () where phases restart.
        key: key[] of the run, see `key_of_env` and `key_of_iteration`.
        pool: past policies kept by the environment (snapshots that play against the learner), mostly ().
        progress: Progress, counters.
        phase: int32[], index of the phase.
        iteration: uint32[], iterations done in this phase.
        iterations: uint32[], iterations done in all phases.
        settings: {name: float32[]}, traced settings of the algorithm, {} without a sweep.
    """

    algo: Any
    carry: Any
    env: Any
    timestep: Any
    statistics: Any
    key: Any
    pool: Any
    progress: Any
    phase: Any
    iteration: Any
    iterations: Any
    settings: Any


@pytree
class BlockMetrics:
    """The metrics of a block, leaves with the iteration as first axis; iterations that did not run are 0.

    With several trials the second axis of metrics is the trial, and the last two have an entry for each device, or for
    each trial.

    Attributes:
        learning: {name: float32[K] or float32[K, updates]}, of `Algorithm.learn`.
        episodes: {name: float32[K]}, sums over the episodes that ended, and their number under "episodes".
        not_finite: int32[], index of the first non-finite tensor (see `Trainer.tensor_names`), -1 if all are fine.
        done: int32[], iterations that ran (fewer than requested only after a non-finite metric of `learn`).
    """

    learning: Any
    episodes: Any
    not_finite: Array
    done: Array
