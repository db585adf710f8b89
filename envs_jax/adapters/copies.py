"""Copies of an environment on the host: what one returns, checked, and the arrays that hold the last steps of several.

`CopyArrays` are plain arrays of fixed shapes, for copies in this process or in others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from envs_jax.adapters.parts import MASK, Fault, Group, Part, Spaces, flatten_mask, integer_counts, to_array
from envs_jax.settings import short_repr

if TYPE_CHECKING:
    from envs_jax.base import Reduction  # JAX, which workers do not import

_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
LARGEST_NUMBER = float(np.finfo(np.float32).max)


class CopyStep(NamedTuple):
    """What a copy returns after a reset or a step."""

    observations: Sequence[Any]  # by agent, None where it has none
    infos: Sequence[Mapping[Any, Any]]  # by agent
    reward: Any = 0.0  # float, or a list with one for each agent
    # terminated, truncated: of the episode
    terminated: bool = False
    truncated: bool = False
    # present, cut: see `TimeStep`; of each agent, () of environments for one
    present: Sequence[bool] = ()
    cut: Sequence[bool] = ()


class Copy:
    """A copy of an environment on the host."""

    def reset(self, seed: int) -> CopyStep:
        raise NotImplementedError

    def step(self, action: Any) -> CopyStep:
        """Step. Raises Fault: the environment breaks its interface.

        Args:
            action: actions of the package [A, ...], or a list with one for each agent where they differ.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what the environment holds, such as a window or a process."""


def find_masks(copy: Copy, actions: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """Return the shape of the mask in the `info` of each agent after a reset, None where there is none.

    Args:
        copy: which is reset where a space holds integers; masks of boxes have no meaning.
        actions: the spaces of the agents' actions.
    """
    if all(integer_counts(space) is None for space in actions):
        return [None] * len(actions)
    try:
        infos = copy.reset(0).infos
    except Fault:  # which the first reset of a run tells
        return [None] * len(actions)
    masks = [
        np.shape(flatten_mask(info[MASK])) if MASK in info and integer_counts(space) is not None else None
        for info, space in zip(infos, actions, strict=True)
    ]
    return masks


class Layout(NamedTuple):
    """Settings that decide the arrays of copies; see `HostAdapter`."""

    spaces: Spaces
    agents_leave: bool
    horizon: int
    metric_keys: Sequence["InfoKey"]


class InfoKey(NamedTuple):
    """A number of `info` that is a metric."""

    key: str
    how: str  # a key of `COMBINE`

    @property
    def reduction(self) -> "Reduction":
        return "any" if self.how == "any" else "last"  # the host combines the steps


COMBINE: dict[str, Callable[[float, float, int], float]] = {  # value so far, of this step, number of the step from 1
    "last": lambda old, new, step: new,
    "sum": lambda old, new, step: old + new,
    "mean": lambda old, new, step: old + (new - old) / step,
    "min": lambda old, new, step: new if step == 1 else min(old, new),
    "max": lambda old, new, step: new if step == 1 else max(old, new),
    "any": lambda old, new, step: max(old, new),
}
_LATE = {"last", "any"}  # keys that need not be there before the end


class _Row(NamedTuple):
    """Where a part of an agent's observation is stored."""

    agent: int
    part: Part
    # shape, dtype: as `Part.stored`
    shape: tuple[int, ...]
    dtype: np.dtype
    stored: np.ndarray
    row: int


def _find_closed(group: Group, stored: np.ndarray) -> np.ndarray:
    """Return bool[B, agents of the group], whether a mask leaves no action, of stored masks [B, agents, ...]."""
    counts = integer_counts(group.action)
    assert group.mask is not None and counts is not None
    open_ = np.reshape(group.mask.encode(stored), (*stored.shape[:2], -1)) != 0
    if group.mask.shape == (counts.sum(),):  # the values of each integer after those of the one before
        ends = np.cumsum(counts.ravel())
        open_ = np.logical_or.reduceat(open_, ends - counts.ravel(), axis=-1)
        return np.asarray(~open_.all(-1))
    return np.asarray(~open_.any(-1))


class CopyArrays:
    """The last steps of some copies, and of their episodes what goes on from step to step; see `HostStep`."""

    def __init__(self, layout: Layout, size: int) -> None:
        spaces = layout.spaces
        self.agents_leave = layout.agents_leave
        self._horizon = layout.horizon
        self._keys = layout.metric_keys
        self._groups = spaces.groups
        self._maskless = {  # agents that choose integers and have no masks
            agent
            for group in spaces.groups
            if integer_counts(group.action) is not None and group.mask is None
            for agent in group.agents
        }
        self.parts = [group.make_stored(size) for group in spaces.groups]
        self._rows = [
            _Row(agent, part, *part.stored, arrays[part.name], row)
            for group, arrays in zip(spaces.groups, self.parts, strict=True)
            for row, agent in enumerate(group.agents)
            for part in group.parts
        ]
        self.reward = np.zeros((size, spaces.agents), np.float32)
        self.terminated, self.truncated = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        # seen: agents that have an observation; present, cut: see `TimeStep`
        self.seen, self.present = np.ones((size, spaces.agents), np.bool_), np.ones((size, spaces.agents), np.bool_)
        self.cut = np.zeros((size, spaces.agents), np.bool_)
        self.metrics = np.zeros((size, len(self._keys)), np.float64)
        self.lengths = [0] * size  # steps of the episodes so far
        self._doubles: list[tuple[int, Part, np.ndarray, int, np.ndarray]] = []  # values since the last `check`
        self.moved: tuple[int, int] | None = None  # the copy that moves now, and the step that it makes, 0 for a reset

    def move(
        self, copies: Sequence[Copy], restart: np.ndarray, moving: np.ndarray, seeds: np.ndarray, action: Any
    ) -> None:
        """Restart some copies and step others, one after another; after an error `moved` says which one failed.

        Args:
            copies: all of them.
            restart, moving: bool[B]; the other copies keep their arrays, but for the reward.
            seeds: int[B], of the episodes that begin.
            action: actions of the package [B, A, ...], or a list of [B, ...], one for each agent.
        """
        self.reward[:] = 0
        for i in np.flatnonzero(restart).tolist():
            self.moved = i, 0
            self.begin(i, copies[i].reset(int(seeds[i])))
        for i in np.flatnonzero(moving).tolist():
            self.moved = i, self.lengths[i] + 1
            self.advance(i, copies[i].step([one[i] for one in action] if isinstance(action, list) else action[i]))
        self.moved = None

    @property
    def columns(self) -> list[np.ndarray]:
        """All arrays, each with one row for each copy."""
        own = [array for array in vars(self).values() if isinstance(array, np.ndarray)]
        return [*own, *(array for arrays in self.parts for array in arrays.values())]

    def begin(self, i: int, step: CopyStep) -> None:
        """Write what copy i returned after a reset. Raises Fault: it does not fit its spaces."""
        self.lengths[i], self.terminated[i], self.truncated[i], self.metrics[i] = 0, False, False, 0
        self.reward[i] = 0
        self._write(i, step)

    def advance(self, i: int, step: CopyStep) -> None:
        """Write what copy i returned after a step. Raises Fault: it does not fit its spaces, or lacks a metric."""
        self.reward[i] = step.reward
        self.lengths[i] += 1
        self.terminated[i] = step.terminated
        self.truncated[i] = step.truncated or self.lengths[i] >= self._horizon
        self._write(i, step)
        if self._keys:
            self.measure(i, step.infos)

    def _write(self, i: int, step: CopyStep) -> None:
        observations, infos = step.observations, step.infos
        if step.present:
            self.present[i], self.cut[i] = step.present, step.cut
            self.seen[i] = [observation is not None for observation in observations]
        for agent in self._maskless:
            if MASK in infos[agent]:
                fix = "return it after every reset, the first one included"
                raise Fault(f"info has an {MASK}, but had none after the first reset", fix)
        for agent, part, shape, dtype, stored, row in self._rows:
            value = observations[agent]
            if value is None and step.present:  # an agent that is over, or not there
                continue
            if part.path:
                if part.in_info and MASK not in infos[agent] and not self._acts_next(i, agent):
                    stored[i, row] = 0  # nobody chooses from it
                    continue
                value = part.read(value, infos[agent])
            if type(value) is np.ndarray and value.dtype is dtype and value.shape == shape:  # nothing to convert
                stored[i, row] = value
            elif type(value) is np.ndarray and value.dtype is _DOUBLE and dtype is _SINGLE and value.shape == shape:
                stored[i, row] = value
                self._doubles.append((i, part, stored, row, value))
            else:
                part.store(stored, (i, row), value)

    def _acts_next(self, i: int, agent: int) -> bool:
        return bool(self.present[i, agent]) and not (self.terminated[i] or self.truncated[i])

    def measure(self, i: int, infos: Sequence[Mapping[Any, Any]]) -> None:
        """Write the metrics of copy i. Raises Fault: a key is missing where it is needed, or its value is no number."""
        step, ended = self.lengths[i], self.terminated[i] or self.truncated[i]
        for k, (key, how) in enumerate(self._keys):
            given = [to_number(info[key], f"info[{key!r}]") for info in infos if key in info]
            if given:
                number = max(given) if how == "any" else sum(given) / len(given)
                if how == "any" and not {*given} <= {0, 1}:
                    raise Fault(f"info[{key!r}] is {number:g}", "name it without ':any', or return 0 or 1")
                self.metrics[i, k] = COMBINE[how](self.metrics[i, k], number, step)
            elif ended or how not in _LATE:
                names = sorted({str(name) for info in infos for name in info})
                there = f"it has {', '.join(names)}" if names else "it is empty"
                when = "at the end of an episode" if how in _LATE else f"in every step, as '{key}:{how}' needs it"
                raise Fault(f"info has no {key!r}, which info_keys names; {there}", f"return it {when}")

    def check(self, rows: np.ndarray) -> None:
        """Raise Fault if numbers of copies that moved, bool[B], lie outside of their spaces or of float32.

        Or if a mask closes every action of an agent that acts next. One comparison for all copies; to be called after
        they have moved.
        """
        doubles, self._doubles = self._doubles, []
        if any(np.isinf(stored).any() for stored in {id(one[2]): one[2] for one in doubles}.values()):
            for i, part, stored, row, value in doubles:
                too_large = np.isinf(stored[i, row]) & np.isfinite(value)
                if too_large.any():
                    raise part.misfit(value[too_large][0], i)
        for group, arrays in zip(self._groups, self.parts, strict=True):
            for part in group.parts:
                outside = part.find_outside(arrays[part.name])
                if outside is None:
                    continue
                outside &= _lead(rows[:, None] & self.seen[:, group.agents], outside)
                if outside.any():
                    place = tuple(np.argwhere(outside)[0].tolist())
                    raise part.misfit(arrays[part.name][place], place[0])
            if group.mask is not None:
                going = rows & ~self.terminated & ~self.truncated
                chooses = going[:, None] & self.present[:, group.agents]
                if (stuck := chooses & _find_closed(group, arrays[MASK])).any():
                    what = f"an {MASK} closes every action of an agent"
                    raise Fault(what, "leave one open in every time step", int(np.argwhere(stuck)[0, 0]))

    def check_finite(self, rows: np.ndarray) -> None:
        """Raise Fault if a reward of copies bool[B] is not finite, or an observation is NaN: nobody can learn from it.

        Without this the weights become NaN, and an action of theirs is the first thing that fails.
        """
        bad = rows & ~np.isfinite(self.reward).all(-1)
        if bad.any():
            copy = int(np.argmax(bad))
            number = self.reward[copy][~np.isfinite(self.reward[copy])][0]
            raise Fault(f"the reward is {number}", "return finite numbers", copy)
        for group, arrays in zip(self._groups, self.parts, strict=True):
            for part in group.parts:
                stored = arrays[part.name]
                if stored.dtype.kind != "f" or not stored.size or not np.isnan(stored.min()):
                    continue
                bad_rows = np.isnan(stored)
                bad_rows &= _lead(rows[:, None] & self.seen[:, group.agents], stored)
                if bad_rows.any():
                    raise Fault(f"{part.where} holds nan", "return numbers", int(np.argwhere(bad_rows)[0, 0]))

    def encode(self) -> list[dict[str, np.ndarray]]:
        """Return new arrays of what learners get for each group; agents without an observation have zeros."""
        encoded = []
        for group, arrays in zip(self._groups, self.parts, strict=True):
            names = {part.name: np.array(part.encode(arrays[part.name]), part.dtype, order="C") for part in group.parts}
            seen = self.seen[:, group.agents]
            if not seen.all():
                for array in names.values():
                    array[~seen] = 0
            encoded.append(names)
        return encoded


def _lead(flags: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Return flags [B, A] with axes of length 1 after them, as many as `like` has."""
    return flags.reshape(*flags.shape, *(1,) * (like.ndim - flags.ndim))


# What an environment returns


def to_number(value: Any, name: str) -> float:
    """Return a number that float32 holds, or that is infinite or NaN itself. Raises Fault."""
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise Fault(f"{name} is {short_repr(value)}, too large for float32", "return smaller numbers")
    if not isinstance(value, float):
        array = to_array(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise Fault(f"{name} is {short_repr(value)}, not one number", "return a number")
        value = float(array.item())
    if LARGEST_NUMBER < abs(value) < np.inf:
        raise Fault(f"{name} is {value}, too large for float32", "return smaller numbers")
    return value


def to_flag(value: Any, name: str) -> bool:
    """Return whether a step ended an episode. Raises Fault: neither true nor false."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    array = to_array(value)
    if array.size != 1 or array.dtype.kind not in "biuf" or array.item() not in (0, 1):
        raise Fault(f"{name} is {short_repr(value)}, not true or false", "return a bool")
    return bool(array.item())


def describe_returned(result: Any) -> str:
    """Return the words for what a call returned in place of several values."""
    if isinstance(result, tuple | list):
        return f"{len(result)} values"
    return "None" if result is None else f"an object of type {type(result).__name__}"
