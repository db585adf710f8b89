"""When a run's checkpoints are written, what they hold besides the state, and which of its policies is the best."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.runtime import hosts
from jaxrl.runtime.build import Run, fixed_settings
from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.train_state import TrainState


class Saver:
    """Decides when a run is saved, and compares the scores of its evaluations.

    Args:
        run: the run.
        checkpoints: where it is saved.
        folders: a name for each trial.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints, folders: Sequence[str]) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._has_trials = len(folders) > 1
        self.saved_iteration: int | None = None  # where the newest checkpoint is
        self.evaluated_iteration = 0
        self._saved_at = 0.0  # by the monotonic clock, s
        self._best_score: float | None = None
        self._best_ties: list[float] = []  # the tie breakers of the best policy
        self._best_trials: dict[str, list[float]] = {}  # {trial: its score and tie breakers}, of several trials

    def take(self, meta: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with this JSON object."""
        self.saved_iteration = meta["iterations"]
        self.evaluated_iteration = meta["evaluated"]
        self._best_score = meta["best"]
        self._best_ties = meta["best_ties"]
        self._best_trials = meta["best_trials"]

    def start_clock(self) -> None:
        """Count the minutes until the next checkpoint from now on."""
        self._saved_at = time.monotonic()

    def is_due(self, iteration: int) -> bool:
        """Return whether a checkpoint is due after an iteration; all hosts get the answer of host 0."""
        settings = self._run.config.run
        if settings.checkpoint_iterations:
            return iteration % settings.checkpoint_iterations == 0
        return bool(hosts.broadcast(time.monotonic() - self._saved_at >= settings.checkpoint_seconds))

    def replace_best(
        self, means: Mapping[str, float], trials: Mapping[str, Mapping[str, float]], is_last: bool
    ) -> bool:
        """Return whether a policy is the best so far, and remember it.

        Equal scores are decided by `EnvSpec.tie_breakers`; if these are equal, too, the first policy stays, except
        that the run's last one replaces it.

        Args:
            means: {metric: mean over the trials}, of an evaluation.
            trials: {trial: {metric: value}}.
            is_last: whether the run ends with this policy.
        """
        spec = self._run.env.spec
        names = (spec.score, *spec.tie_breakers)
        score, *ties = [means[name] for name in names]
        if not np.isfinite(score):
            return False
        if self._best_score is not None:
            sign = -1 if spec.score_mode == "min" else 1
            best = [sign * self._best_score, *self._best_ties]
            current = [sign * score, *ties]
            if current < best or (current == best and not is_last):
                return False
        self._best_score = score
        self._best_ties = ties
        if self._has_trials:
            self._best_trials = {trial: [values[name] for name in names] for trial, values in trials.items()}
        return True

    def compare_only(self, trials: Sequence[str]) -> None:
        """Let the best policy's score be its mean over these trials: the others have failed since."""
        if self._best_trials:
            columns = zip(*(self._best_trials[trial] for trial in trials), strict=True)
            self._best_score, *self._best_ties = [float(np.mean(column)) for column in columns]

    def save(self, state: TrainState, progress: Mapping[str, Any], best: bool) -> None:
        """Write a checkpoint, or only replace its JSON object where there is one of this iteration already.

        Args:
            state: the state of the run.
            progress: the entries of the JSON object that the loop of the run knows, its `Position` among them.
            best: whether this is the best policy so far.

        Raises CheckpointError: it cannot be written.
        """
        meta = {
            **progress,
            "best": self._best_score,
            "best_ties": self._best_ties,
            "best_trials": self._best_trials,
            "evaluated": self.evaluated_iteration,
            "devices": self._run.mesh.size,
            "settings": fixed_settings(self._run),
        }
        step = meta["iterations"]
        if self.saved_iteration == step:
            self._checkpoints.amend(step, meta, best=best)  # only what it says of the evaluation is new
        else:
            self._checkpoints.save(step, state, meta, best=best)
        self.saved_iteration = step
        self._saved_at = time.monotonic()
