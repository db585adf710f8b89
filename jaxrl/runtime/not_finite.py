"""Errors of losses and parameters that are no longer finite, and of environments that give what nobody can use."""

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, TimeStep
from jaxrl.algos.base import Phase, Trajectory
from jaxrl.common.errors import UserError
from jaxrl.runtime.train_state import BlockMetrics, Position


class NotFiniteError(UserError):
    """A loss or a parameter is no longer finite."""


_FIELDS = ("reward", "observation", "global_state")  # fields of TimeStep
_MASK = "action_mask"
_PREFIX = "fault: "

MOST_JOINED = 2**18  # values of a tensor up to which it is checked together with others, in a copy of their values


def _is_finite(tree: Any, axes: int) -> Any:
    """Return bool[T, B] (`axes` 2) or bool[B]: whether all floats of a time step are finite; True if it has none."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    finite = [jnp.all(jnp.isfinite(x), axis=tuple(range(axes, x.ndim))) for x in leaves]
    return functools.reduce(operator.and_, finite, True)


def find_first(tensors: Sequence[Array]) -> Array:
    """Return int32[], the index of the first tensor with a value that is not finite, -1 if all are finite."""
    small = [index for index, x in enumerate(tensors) if x.size <= MOST_JOINED]
    large = [index for index, x in enumerate(tensors) if x.size > MOST_JOINED]
    bad = [jnp.where(jnp.all(jnp.isfinite(tensors[index])), len(tensors), index) for index in large]
    if small:  # one check of all their values: a kernel for each tensor compiles slowly
        dtype = jnp.float64 if any(tensors[index].dtype == jnp.float64 for index in small) else jnp.float32
        values = jnp.concatenate([tensors[index].astype(dtype).ravel() for index in small])
        positions = jnp.arange(values.size, dtype=jnp.int32)
        first = jnp.min(positions, where=~jnp.isfinite(values), initial=values.size)
        ends = jnp.asarray(np.cumsum([tensors[index].size for index in small]), jnp.int32)
        bad.append(jnp.asarray([*small, len(tensors)])[jnp.sum(first >= ends)])
    index = jnp.min(jnp.stack(bad)).astype(jnp.int32)
    return jnp.where(index < len(tensors), index, jnp.int32(-1))


def count_faults(trajectory: Trajectory, last: TimeStep) -> dict[str, Array]:
    """Count by field the time steps that nobody can use.

    These hold a value that is not finite although the action before was finite, or a mask without an open action.

    Args:
        trajectory, last: leaves [T, B, ...], and the time steps [B, ...] after them.

    Returns:
        {name: float32[]}; `split_faults` separates them from the sums over episodes.
    """
    acted = _is_finite(trajectory.action, 2)
    faults = {}
    for field in _FIELDS:
        after = _is_finite(getattr(last, field), 1)
        if not isinstance(after, bool):
            before = jnp.asarray(_is_finite(getattr(trajectory.timestep, field), 2))
            rows = jnp.concatenate([before[1:], after[None]])
            faults[_PREFIX + field] = jnp.sum(~rows & acted, dtype=jnp.float32)
    mask = trajectory.timestep.action_mask
    if mask is not None:
        closed = jnp.any(~jnp.any(mask, axis=-1), axis=-1) & ~trajectory.timestep.done
        faults[_PREFIX + _MASK] = jnp.sum(closed, dtype=jnp.float32)
    return faults


def split_faults(episodes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sums over episodes, and the counts of `count_faults` by field."""
    sums = {name: value for name, value in episodes.items() if not name.startswith(_PREFIX)}
    counts = {name.removeprefix(_PREFIX): value for name, value in episodes.items() if name.startswith(_PREFIX)}
    return sums, counts


class Failure(NamedTuple):
    """Why a run, or one of its trials, cannot go on."""

    row: int  # the first iteration of the block whose metrics do not count
    cause: str  # the beginning of a sentence, with update and iteration
    remedy: str  # its end
    is_number: bool = True  # whether a value is not finite; else the environment's mask is at fault

    def to_error(self, steps: Sequence[int], directory: Path, beginning: str = "") -> UserError:
        """Return the error that ends a run; `steps` are its checkpoints, in `directory`."""
        if not self.is_number:
            return UserError(f"{beginning}{self.cause}: {self.remedy}")
        kept = f"the last good checkpoint ({steps[-1]:,}) is kept" if steps else "there was no checkpoint yet"
        again = f" in a new run with --init_from {directory}" if steps and self.remedy == _LOWER else ""
        return NotFiniteError(f"{beginning}{self.cause}; {kept}: {self.remedy}{again}")


_LOWER = "lower the learning rate"
_CHECK = "envs_jax.testing.check_env can help find the step"


def faulty_fields(fetched: BlockMetrics) -> set[str]:
    """Return the fields that `count_faults` counted in the environments of one trial, until it failed."""
    return {field for field, counts in fetched.faults.items() if np.any(counts[: int(fetched.iterations)])}


def find_failure(
    fetched: BlockMetrics, names: Sequence[str], before: Position, phase: Phase, faulty: Collection[str] = ()
) -> Failure | None:
    """Return why a trial fails in a block, naming the tensor and the update; None if it does not.

    Args:
        fetched: metrics of the block and of one trial, fetched.
        names: `Trainer.tensor_names` of the block.
        before, phase: the position before the block, and its phase.
        faulty: `faulty_fields` of this block and earlier ones.
    """
    closed = np.flatnonzero(fetched.faults.get(_MASK, np.zeros(0))[: int(fetched.iterations)])
    if closed.size:
        iteration = before.iterations + int(closed[0]) + 1
        cause = f"the environment's action_mask closes every action of an agent, at iteration {iteration:,} or shortly "
        return Failure(int(closed[0]), f"{cause}before", f"leave one open in every time step; {_CHECK}", False)
    if int(fetched.not_finite) < 0:
        return None
    row = int(fetched.iterations) - 1
    name = names[int(fetched.not_finite)]
    place = f"iteration {before.iterations + row + 1:,}"  # for parameters: of the check after the block
    first = [  # the last updates of the iteration, where a metric has fewer: those that train the actor, too
        phase.updates - values[row].size + int(np.argmax(~np.isfinite(values[row])))
        for values in fetched.learning.values()
        if np.ndim(values[row]) == 1 and not np.all(np.isfinite(values[row]))
    ]
    if first:
        place = f"update {before.updates + row * phase.updates + min(first) + 1:,} ({place})"
    cause = f"{name} is not finite at {place}"
    if not faulty:
        return Failure(row, cause, _LOWER)
    fields = " and ".join(sorted(faulty))
    given = f"the environment gave a value that is not finite (NaN or infinity) as {fields}, and "
    return Failure(row, given + cause, f"fix the environment; {_CHECK}")
