"""Spaces of Gymnasium as arrays: what a copy on the host stores of an observation, and what learners get.

Copies store numbers as their space describes them. Values that a space does not hold are refused, never cast.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from envs_jax.adapters.errors import UnfitError
from envs_jax.settings import SMALLEST_IMAGE, short_repr

MASK = "action_mask"  # where an observation or an `info` says which actions are open, by PettingZoo's convention


class Fault(Exception):
    """An environment breaks its interface.

    Args:
        what: is wrong.
        fix: what to do.
        copy: the copy that did it, None for the one that is being stepped.
    """

    def __init__(self, what: str, fix: str, copy: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.copy = copy


class Part(NamedTuple):
    """An array of an observation."""

    path: tuple[Any, ...]  # keys and indices that lead to it
    space: Any  # of Gymnasium
    stored: tuple[tuple[int, ...], np.dtype]  # shape and dtype on the host
    # shape, dtype: of the encoded array
    shape: tuple[int, ...]
    dtype: Any
    encode: Callable[[np.ndarray], np.ndarray]  # stored arrays [..., *shape of the stored] -> [..., *shape]
    low: Any = None  # smallest and largest stored number where the dtype holds others too, else None
    high: Any = None
    limit: Any = 255.0  # by which an image of bytes is divided: a number, or float64[*shape]
    in_info: bool = False  # it is a part of `info` instead

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def where(self) -> str:
        """The words that a sentence has for it."""
        if self.in_info:
            return f"info[{MASK!r}]"
        return f"'{self.name}' of an observation" if self.path else "an observation"

    def read(self, observation: Any, info: Mapping[str, Any]) -> Any:
        """Return its value in what an environment returned. Raises Fault: there is none."""
        if not self.path:
            return observation
        value = info if self.in_info else observation
        try:
            for key in self.path:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            raise Fault(f"there is no {self.where}", "return it after every reset and step") from None
        return flatten_mask(value) if self.in_info else value

    def store(self, rows: np.ndarray, index: Any, value: Any) -> None:
        """Write a value, or values [B, ...] of B rows, into rows [..., *shape]. Raises Fault: the space has no such."""
        shape, dtype = self.stored
        if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
            rows[index] = value
        else:
            rows[index] = self._fit(value, rows[index].shape)

    def _fit(self, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        array = to_array(value)
        if array.dtype.kind not in "biuf":
            raise Fault(f"{self.where} is {short_repr(value)}, not numbers", f"return values of {self._space()}")
        if array.shape != shape:  # NumPy would repeat one number
            if [size for size in array.shape if size != 1] != [size for size in shape if size != 1]:
                shapes = f"the shape {array.shape}, but its space has {shape}"
                raise Fault(f"{self.where} has {shapes}", "return arrays of that shape")
            array = array.reshape(shape)
        dtype = self.stored[1]
        if array.dtype == dtype:
            return array
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = array.astype(dtype)
        changed = np.isinf(numbers) & np.isfinite(array) if dtype.kind == "f" else numbers != array
        if changed.any():
            raise self.misfit(array[changed].flat[0])
        return numbers

    def find_outside(self, stored: np.ndarray) -> np.ndarray | None:
        """Return where integers [..., *shape] lie outside of the bounds, bool[...]; None where none does."""
        if self.low is None or not stored.size:
            return None
        if stored.min() >= np.max(self.low) and stored.max() <= np.min(self.high):  # the bounds of all
            return None
        outside: np.ndarray = (stored < self.low) | (stored > self.high)
        return outside if outside.any() else None

    def misfit(self, number: Any, copy: int | None = None) -> Fault:
        """Return the error about a number that the space does not hold."""
        value = number.item() if isinstance(number, np.generic) else number
        holder = "float32" if self.stored[1].kind == "f" else f"its space {self._space()}"
        return Fault(f"{self.where} holds {value}, outside of {holder}", "return values of the space", copy)

    def _space(self) -> str:
        text = " ".join(str(self.space).split())
        return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"


def to_array(value: Any) -> np.ndarray:
    """Return what an environment returned as an array, of objects where it holds what is no number.

    Integers of more than 64 bits become the nearest float64.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        return np.asarray(None)
    if array.dtype == object and array.size and all(isinstance(one, int) for one in array.flat):
        largest = int(np.finfo(np.float64).max)
        array = np.reshape([float(min(max(one, -largest), largest)) for one in array.flat], array.shape)
    return array


def integer_counts(space: Any) -> np.ndarray | None:
    """Return the number of values of each integer of an action, int64[...]; None for a space of another kind.

    Raises UnfitError: see `check_integers`, of a box.
    """
    kind = type(space).__name__
    if kind == "MultiBinary":
        return np.full(space.shape, 2, np.int64)
    for name in ("n", "num_values", "nvec", "num_categories"):
        counts = getattr(space, name, None)
        if counts is not None:
            return np.asarray(counts, np.int64)
    dtype = getattr(space, "dtype", None)
    if dtype is None or np.dtype(dtype).kind not in "iu":
        return None
    low, high = (getattr(space, a, getattr(space, b, None)) for a, b in (("low", "minimum"), ("high", "maximum")))
    if low is None or high is None:
        return None
    low, high = (np.asarray(bound).astype(object) for bound in (low, high))
    check_integers(low, high)
    return np.broadcast_to(np.asarray(high - low + 1, np.int64), tuple(space.shape))


def check_integers(low: Any, high: Any) -> None:
    """Raise UnfitError if int32, in which actions are, does not hold integers from `low` to `high`, arrays of int."""
    least, most = np.min(low, initial=0), np.max(high, initial=0)
    if least < -(2**31) or most >= 2**31:
        raise UnfitError(
            f"has integers from {np.min(low)} to {np.max(high)} as actions, which do not fit into int32: use smaller "
            "ones"
        )


def describe_parts(space: Any, path: tuple[Any, ...] = ()) -> Iterator[Part]:
    """Yield the arrays of a space of Gymnasium: integers become one-hot, images channels-last, other numbers float32.

    Raises UnfitError: a space that is no array, such as Text, Graph and Sequence.
    """
    spaces, kind = importlib.import_module("gymnasium.spaces"), type(space).__name__
    if isinstance(space, spaces.Dict | spaces.Tuple):
        entries = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, entry in entries:
            yield from describe_parts(entry, (*path, key))
    elif isinstance(space, spaces.Box):
        yield _describe_box(path, space)
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        counts = integer_counts(space)
        assert counts is not None
        start = np.asarray(space.start, np.int64)
        encode = functools.partial(_encode_integers, counts, start)
        stored = tuple(space.shape), np.dtype(np.int64)
        yield Part(path, space, stored, (int(counts.sum()),), np.bool_, encode, start, start + counts - 1)
    elif isinstance(space, spaces.MultiBinary):
        yield describe_bits(path, space, tuple(space.shape))
    else:
        part = f" in '{'.'.join(map(str, path))}'" if path else ""
        raise UnfitError(
            f"has observations of the kind {kind}{part}, but jaxrl needs arrays of a fixed shape: choose another "
            "environment"
        )


def describe_bits(path: tuple[Any, ...], space: Any, shape: tuple[int, ...], in_info: bool = False) -> Part:
    """Return the part of an array of zeros and ones; `space`: what a sentence calls them."""
    return Part(path, space, (shape, np.dtype(np.int8)), shape, np.bool_, np.asarray, 0, 1, in_info=in_info)


def flatten_mask(mask: Any) -> Any:
    """Return a mask in an `info`; one for each of several integers, as Gymnasium has them, become one vector."""
    if isinstance(mask, list):
        has_arrays = any(isinstance(one, tuple) or (isinstance(one, np.ndarray) and one.ndim) for one in mask)
        is_nested = has_arrays or to_array(mask).dtype == object  # rows of different lengths
    else:
        is_nested = isinstance(mask, tuple)
    if not is_nested or not mask:
        return mask
    return np.concatenate([np.ravel(flatten_mask(one)) for one in mask])


def fits_mask(shape: tuple[int, ...], counts: np.ndarray) -> bool:
    """Return whether a mask of a shape says which integers are open; see `join_mask`."""
    is_rows = counts.ndim > 0 and len(shape) == 2 and shape[0] == counts.size
    return is_rows or shape == tuple(counts.flat) or math.prod(shape) == counts.sum()


def misfit_mask(what: str, counts: np.ndarray) -> UnfitError:
    """Return the error about a mask, `what` it is, that does not fit integers."""
    sizes = [int(count) for count in counts.flat]
    order = ", the values of each integer after those of the one before" if len(sizes) > 1 else ""
    return UnfitError(f"{what} for actions of {sizes} values: return one of shape ({sum(sizes)},){order}")


def choose_mask(parts: tuple[Part, ...], action: Any, in_info: tuple[int, ...] | None) -> tuple[Part, ...]:
    """Return an agent's parts with one mask: that of its observations or, where that cannot be used, of its `info`.

    Args:
        parts: of its observations.
        action: its space of actions.
        in_info: shape of the mask in its `info`, None where there is none.

    Raises UnfitError: a mask of its observations cannot be used, and `info` has none.
    """
    counts, own = integer_counts(action), [part for part in parts if part.path[:1] == (MASK,)]
    if counts is None or (in_info is None and not own):
        return parts
    others = tuple(part for part in parts if part.path[:1] != (MASK,))
    kind = type(own[0].space).__name__ if own else ""
    is_array = len(own) == 1 and own[0].path == (MASK,) and kind in ("Box", "MultiBinary")
    if is_array and fits_mask(own[0].stored[0], counts):
        return *others, own[0]._replace(shape=own[0].stored[0], dtype=np.bool_, encode=np.asarray)
    if in_info is not None:
        return *others, _describe_mask(action, in_info)
    if is_array:
        what = f"of shape {own[0].stored[0]}"
    else:
        what = "of several arrays" if own[0].path != (MASK,) else f"of the kind {kind}"
    raise misfit_mask(f"has an {MASK} {what} in its observations", counts)


def _describe_mask(action: Any, shape: tuple[int, ...]) -> Part:
    """Return the part of a mask in `info`; Gymnasium's own for MultiBinary has 2 where both values are open."""
    if type(action).__name__ != "MultiBinary" or shape != tuple(action.shape):
        return describe_bits((MASK,), f"MultiBinary{shape}", shape, in_info=True)
    encode, stored = functools.partial(_encode_pairs, len(shape)), (shape, np.dtype(np.int8))
    return Part((MASK,), "{0, 1, 2}", stored, (2 * math.prod(shape),), np.bool_, encode, 0, 2, in_info=True)


def _encode_pairs(axes: int, values: np.ndarray) -> np.ndarray:
    """Return whether 0 and 1 are open, bool[..., 2 bits], for values [..., *axes] that are 0, 1, or 2 for both."""
    lead, size = values.shape[: values.ndim - axes], math.prod(values.shape[values.ndim - axes :])
    pairs = np.stack([values != 1, values != 0], axis=-1)
    return pairs.reshape(*lead, 2 * size)


def _encode_integers(counts: np.ndarray, start: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the one-hot vectors bool[..., sum of counts] of integers [..., *shape of counts]."""
    lead = values.shape[: values.ndim - counts.ndim]
    rows = (values - start).reshape(*lead, counts.size)
    return np.concatenate([rows[..., k, None] == np.arange(count) for k, count in enumerate(counts.flat)], axis=-1)


def _describe_box(path: tuple[Any, ...], space: Any) -> Part:
    """Return the part of a box; bytes stay bytes in images, of which single planes and channels-first are known."""
    shape, dtype = tuple(space.shape), np.dtype(space.dtype)
    if dtype.kind == "f":
        return Part(path, space, (shape, np.dtype(np.float32)), shape, np.float32, np.asarray)
    low, high = space.low, space.high
    if dtype.kind == "b":
        part = Part(path, space, (shape, dtype), shape, np.bool_, np.asarray)
    elif dtype != np.uint8:
        part = Part(path, space, (shape, dtype), shape, np.float32, np.asarray)
    else:
        part = _describe_bytes(path, space, shape, shorten_limit(np.maximum(high, 1).astype(np.float64)))
    if dtype.kind in "iu" and low.size:
        kind = np.iinfo(dtype)
        if (low > kind.min).any() or (high < kind.max).any():
            part = part._replace(low=_shorten(low), high=_shorten(high))
    return part


def shorten_limit(limit: Any) -> Any:
    """Return a `Part.limit` as one float where all numbers are equal."""
    return float(np.ravel(limit)[0]) if np.ptp(limit) == 0 else limit


def _shorten(bounds: np.ndarray) -> Any:
    return bounds.flat[0] if (bounds == bounds.flat[0]).all() else bounds


def _describe_bytes(path: tuple[Any, ...], space: Any, shape: tuple[int, ...], limit: Any) -> Part:
    stored = shape, np.dtype(np.uint8)
    if len(shape) == 2 and min(shape) >= SMALLEST_IMAGE:
        encode: Callable[[np.ndarray], np.ndarray] = _add_axis
        image: tuple[int, ...] = (*shape, 1)
    elif len(shape) == 3 and shape[0] < SMALLEST_IMAGE <= min(shape[1:]):
        encode, image = _channels_last, (*shape[1:], shape[0])
    else:
        is_image = len(shape) == 3 and min(shape[:2]) >= SMALLEST_IMAGE
        return Part(path, space, stored, shape, np.uint8 if is_image else np.float32, np.asarray, limit=limit)
    return Part(path, space, stored, image, np.uint8, encode, limit=limit if np.ndim(limit) == 0 else encode(limit))


def _add_axis(values: np.ndarray) -> np.ndarray:
    return values[..., None]


def _channels_last(values: np.ndarray) -> np.ndarray:
    return np.moveaxis(values, -3, -1)


class Group(NamedTuple):
    """Agents with equal spaces, and what one of them sees and does."""

    agents: tuple[int, ...]
    parts: tuple[Part, ...]
    action: Any  # space of Gymnasium

    def make_arrays(self, make: Callable[..., Any], *lead: int) -> dict[str, Any]:
        """Return `make(shape, dtype)` for each part by name, shapes [*lead, agents of the group, ...]."""
        return {part.name: make((*lead, len(self.agents), *part.shape), part.dtype) for part in self.parts}

    def make_stored(self, size: int) -> dict[str, np.ndarray]:
        """Return zeros [size, agents of the group, ...] for each part by name, as the host stores it."""
        shapes = {part.name: ((size, len(self.agents), *part.stored[0]), part.stored[1]) for part in self.parts}
        return {name: np.zeros(*shape) for name, shape in shapes.items()}

    @property
    def mask(self) -> Part | None:
        """The part that says which actions are open, None without one."""
        if integer_counts(self.action) is None:
            return None
        return next((part for part in self.parts if part.path == (MASK,)), None)

    @property
    def all_open(self) -> np.ndarray:
        """Mask of an agent that may do everything, for actions that are integers."""
        counts = integer_counts(self.action)
        assert counts is not None
        return np.ones([int(count) for count in counts.flat], np.bool_)


class Spaces(NamedTuple):
    """The groups of a team's agents, and the spaces of actions by the names of the agents."""

    groups: tuple[Group, ...]
    actions: Mapping[Any, Any]

    @property
    def agents(self) -> int:
        return len(self.actions)
