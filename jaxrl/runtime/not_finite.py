"""What is said when a loss or a parameter is no longer finite."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl.algos.base import Phase
from jaxrl.common.errors import UserError
from jaxrl.runtime.train_state import BlockMetrics, Position


class NotFiniteError(UserError):
    """A loss or a parameter is no longer finite."""


def not_finite_error(
    fetched: BlockMetrics,
    several: bool,
    names: Sequence[str],
    before: Position,
    phase: Phase,
    steps: Sequence[int],
    directory: Path,
) -> NotFiniteError:
    """Return the error of a block with a value that is not finite, which names it and the update.

    Args:
        fetched: metrics of the block, fetched; the first value that is not finite is in its last iteration.
        several: whether there are several trials, the axis before that of updates.
        names: `Trainer.tensor_names` of the phase.
        before: position before the block.
        phase: of the block.
        steps: numbers of the checkpoints of the run in `directory`.
        directory: of the run.
    """
    row, name = int(fetched.done) - 1, names[int(fetched.not_finite)]
    at = f"iteration {before.iterations + row + 1:,}"  # for parameters: of the check after the block
    first = [  # the last updates of the iteration, where a metric has fewer: those that train the actor, too
        phase.updates
        - values[row].shape[-1]
        + int(np.argmax(np.any(~np.isfinite(values[row]).reshape(-1, values[row].shape[-1]), axis=0)))
        for values in fetched.learning.values()
        if np.ndim(values[row]) == 1 + several and not np.all(np.isfinite(values[row]))
    ]
    if first:
        at = f"update {before.updates + row * phase.updates + min(first) + 1:,} ({at})"
    kept = f"the last good checkpoint ({steps[-1]:,}) is kept" if steps else "there was no checkpoint yet"
    remedy = "lower the learning rate" + (f" in a new run with --init_from {directory}" if steps else "")
    return NotFiniteError(f"{name} is not finite at {at}; {kept}: {remedy}")
