"""Functions of all adapters: packages, their names, observations joined to one array, actions."""

import contextlib
import dataclasses
import importlib
import math
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.adapters.errors import AdapterError, UnfitError, describe_error
from envs_jax.adapters.parts import check_integers, integer_counts, misfit_mask, shorten_limit
from envs_jax.base import Array, Box, Discrete, closest, short_repr
from envs_jax.settings import SMALLEST_IMAGE

ActionMap = Callable[[Array], Any]  # actions [A, ...] of the spec -> actions of the package, see `describe_team`


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Run a package's code by JAX's usual rules of promotion, without its warnings, which no user can fix."""
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        yield


def package(module: str, library: str) -> Any:
    """Import a package. Raises AdapterError where it is missing or does not work here."""
    extra = f"pip install -e '.[{library}]'"
    try:
        with quiet():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = "is not installed" if error.name == module else f"needs '{error.name}', which is not installed"
        raise AdapterError(f"environments of {library}: the package '{module}' {missing}: {extra}") from None
    except Exception as error:
        raise AdapterError(
            f"environments of {library}: the package '{module}' does not work with jax {jax.__version__} "
            f"({describe_error(error)}): {extra} installs a version that does"
        ) from error


def call_package(name: str, make: Callable[[], Any]) -> Any:
    """Return what `make` returns. Raises AdapterError if the package cannot make its environment."""
    try:
        with quiet():
            return make()
    except AdapterError:
        raise
    except UnfitError as error:
        raise AdapterError(f"'{name}' {error}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a download that fails, a missing argument, sys.exit, ...
        raise AdapterError(f"the package cannot make '{name}' ({describe_error(error)})") from error


def strong(tree: Any) -> Any:
    """Return a package's state as arrays whose dtypes are fixed, so that jax.lax.scan can carry it."""

    def cast(x: Any) -> Array:
        x = jnp.asarray(x)
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.astype(x.dtype)  # drops weak types

    return jax.tree.map(cast, tree)


LARGEST_JOINT = 4096  # combinations of several integers, which are one integer here


def describe_actions(space: Any) -> tuple[Discrete | Box, ActionMap]:
    """Return the description of one agent's space of actions in a package, and how actions become the package's.

    Several integers become one, the index of their combination; see `join_integers`.

    Raises UnfitError: neither integers that int32 holds nor a bounded box of floats, or too many combinations of
    integers.
    """

    def read(*names: str) -> Any:  # packages name it differently
        return next((getattr(space, name) for name in names if hasattr(space, name)), None)

    low, high, kind = read("low", "minimum"), read("high", "maximum"), type(space).__name__
    counts, start = integer_counts(space), read("start", "low", "minimum")
    if counts is not None:
        exact = np.asarray(0 if start is None else start).astype(object)
        check_integers(exact, exact + counts.astype(object) - 1)
        return join_integers(counts, exact.astype(np.int32))
    if low is None:
        raise UnfitError(
            f"has actions of the kind {kind}, but jaxrl needs integers or bounded floats: choose another environment"
        )
    return bounded(tuple(space.shape), space.dtype, low, high)


def describe_team(spaces: Sequence[Any]) -> tuple[Discrete | Box, ActionMap]:
    """Return `describe_actions` of a team whose agents may have different integers.

    Where they differ, each agent chooses from the largest number of actions, of which a mask must close those that it
    does not have, and the package's actions are a list with one array for each agent.

    Raises UnfitError: see `describe_actions`; or actions differ and are not all integers.
    """
    if len({space_key(space) for space in spaces}) == 1:
        return describe_actions(spaces[0])
    if any(integer_counts(space) is None for space in spaces):
        raise UnfitError(
            "has agents with different actions that are not all integers: choose an environment whose agents all have "
            "the same actions, or integers"
        )
    maps = [describe_actions(space)[1] for space in spaces]

    def split_agents(action: Array) -> list[Array]:
        return [to_package(action[..., agent]) for agent, to_package in enumerate(maps)]

    return Discrete(max(map(_count_actions, spaces))), split_agents


def count_actions(spaces: Sequence[Any]) -> tuple[int, ...]:
    """Return how many actions each agent has, () where all have the same number, or boxes."""
    numbers = tuple(map(_count_actions, spaces))
    return numbers if len(set(numbers)) > 1 else ()


def _count_actions(space: Any) -> int:
    """Return the number of combinations of a space's integers, 0 of a box."""
    counts = integer_counts(space)
    return 0 if counts is None else math.prod(map(int, counts.flat))


def space_key(space: Any) -> Hashable:
    """Return what tells a package's spaces of actions apart, which need not define equality."""
    names = "n", "nvec", "num_values", "num_categories", "start", "low", "high", "minimum", "maximum"
    numbers = [np.asarray(getattr(space, name)) for name in names if hasattr(space, name)]
    shape = tuple(getattr(space, "shape", None) or ())
    return type(space).__name__, shape, tuple((x.shape, x.astype(np.float64).tobytes()) for x in numbers)


def name_type(agent: Any) -> str:
    """Return an agent's name without its number, the name of its type: "adversary_0" -> "adversary"."""
    return re.sub(r"[\W_]*\d+$", "", str(agent))


def number_types(keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the type of each agent, from 0 in order of appearance; () where all keys are equal."""
    order = list(dict.fromkeys(keys))
    return tuple(order.index(key) for key in keys) if len(order) > 1 else ()


def join_integers(counts: np.ndarray, start: np.ndarray) -> tuple[Discrete, ActionMap]:
    """Return one integer that stands for several with `counts` values each, from `start` on; the last one varies first.

    Raises UnfitError: there are more than LARGEST_JOINT combinations, or more integers than int32 holds.
    """
    if counts.ndim == 0 and counts >= 2**31:
        raise UnfitError(
            f"has {int(counts):,} actions, more than the {2**31 - 1:,} that jaxrl can choose from: choose another "
            "environment"
        )
    if counts.ndim == 0:
        return Discrete(int(counts)), (lambda action: action + start) if start.any() else (lambda action: action)
    sizes = [int(count) for count in counts.flat]
    if (combinations := math.prod(sizes)) > LARGEST_JOINT:
        raise UnfitError(
            f"has actions of {len(sizes)} integers with {combinations:,} combinations, more than the {LARGEST_JOINT:,} "
            "that jaxrl can choose from: choose another environment"
        )
    first = np.broadcast_to(start, counts.shape)

    def split_action(action: Array) -> Array:
        parts = jnp.stack(jnp.unravel_index(action, sizes), axis=-1).astype(jnp.int32)
        return parts.reshape(*action.shape, *counts.shape) + first

    return Discrete(combinations), split_action


def join_mask(mask: Any, space: Any) -> Array:
    """Return which combinations of an agent's integers are open, bool[n], as `join_integers` counts them.

    Args:
        mask: of the package: of all combinations, in the shape of `counts`, or of each integer: [integers, values], or
            one integer's values after the other's in any shape.
        space: of the actions.

    Raises UnfitError: the mask has another shape.
    """
    counts, mask = integer_counts(space), jnp.asarray(mask).astype(jnp.bool_)
    if counts is None or mask.shape == tuple(counts.flat) or (counts.ndim == 0 and mask.size == counts):
        return mask.reshape(-1)
    if counts.ndim and mask.ndim == 2 and len(mask) == counts.size:
        longest = jnp.pad(
            mask, ((0, 0), (0, max(int(counts.max()) - mask.shape[1], 0)))
        )  # values without a mask are closed
        first, *others = (row[: int(count)] for row, count in zip(longest, counts.flat, strict=True))
    elif counts.ndim and mask.size == counts.sum():
        first, *others = jnp.split(mask.reshape(-1), np.cumsum(counts.ravel())[:-1].tolist())
    else:
        raise misfit_mask(f"has a mask of shape {mask.shape}", counts)
    joint = first
    for part in others:
        joint = (joint[:, None] & part[None]).reshape(-1)
    return joint


def bounded(shape: tuple[int, ...], dtype: Any, low: Any, high: Any) -> tuple[Box, ActionMap]:
    """Return the description of a box of floats, in the package's units.

    Where a number can only have one value, so that there is nothing to choose, all are scaled to [-1, 1].

    Raises UnfitError: no bounds, or no floats.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UnfitError(
            f"has actions of type {np.dtype(dtype).name}, but jaxrl needs integers or bounded floats: choose another "
            "environment"
        )
    low, high = _inner_float32(low, high, shape)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise UnfitError(
            "has actions without bounds: give its space of actions low and high, or choose another environment"
        )
    fixed = low >= high
    if not fixed.any() or fixed.all():
        return Box(shape, low=low, high=high), lambda action: action
    middle, half = (high + low) / 2, (high - low) / 2
    return Box(shape, low=-1.0, high=1.0), lambda action: jnp.clip(middle + half * action, low, high)


def _inner_float32(low: Any, high: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds as float32[*shape] that no rounding has moved out of the box, which may be of float64."""
    exact_low, exact_high = (np.broadcast_to(np.asarray(bound, np.float64), shape) for bound in (low, high))
    with np.errstate(over="ignore"):
        low, high = exact_low.astype(np.float32), exact_high.astype(np.float32)
    low = np.where(low < exact_low, np.nextafter(low, np.float32(np.inf)), low)
    high = np.where(high > exact_high, np.nextafter(high, np.float32(-np.inf)), high)
    return low, high


@dataclasses.dataclass(frozen=True)
class Joined:
    """How the parts of an observation become one array.

    A single image stays an image, to which single numbers are added as constant planes; all else becomes one vector.
    An image of bytes is divided by its largest value.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]  # (name, shape) of each part that is used
    unit: bool  # all numbers of the array lie in [0, 1]: booleans, and images of bytes
    pixels: tuple[tuple[str, Box], ...] = ()  # names of the parts that are images of bytes, with their largest values

    @classmethod
    def from_observation(
        cls,
        env: str,
        observation: Any,
        observe: str = "",
        without: tuple[str, ...] = (),
        largest_byte: Callable[[str], Any] = lambda name: 255.0,
    ) -> "Joined":
        """Build one for a pytree of arrays (or their shapes); `observe` as in `Adapter`.

        `largest_byte`: returns the largest value of an image of bytes by its name, a number or an array of its shape.

        Raises ValueError: an unknown part, or one that is no array of numbers.
        """
        leaves = _leaves_by_name(observation)
        leaves = {name: leaf for name, leaf in leaves.items() if name not in without}
        words = [word.strip() for word in observe.split(",") if word.strip()]

        def is_part_of(name: str, word: str) -> bool:
            return name == word or name.startswith(f"{word}.")

        for word in words:
            if not any(is_part_of(name, word) for name in leaves):
                known = {part for name in leaves for part in (name, name.split(".")[0]) if part}
                raise ValueError(
                    f"the observation of '{env}' has no part {short_repr(word)}: "
                    + (closest(word, known) if known else "it is one array, leave observe empty")
                )
        if words:
            leaves = {name: leaf for name, leaf in leaves.items() if any(is_part_of(name, word) for word in words)}
        for name, leaf in leaves.items():
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not (jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.number)):
                raise ValueError(
                    f"the observation of '{env}' cannot be joined to one array: its part '{name}' is "
                    f"{dtype or type(leaf).__name__}, not numbers; leave it out with observe"
                )
        if not leaves:
            raise ValueError(f"the observation of '{env}' is empty: use another environment")
        parts = tuple((name, tuple(leaf.shape)) for name, leaf in leaves.items())
        is_image = cls(parts, False).image is not None
        images = [name for name, leaf in leaves.items() if is_image and leaf.ndim == 3 and leaf.dtype == jnp.uint8]
        pixels = [(name, Box(leaves[name].shape, high=largest_byte(name))) for name in images]
        unit = all(leaf.dtype == jnp.bool_ or name in images for name, leaf in leaves.items())
        return cls(parts, unit, tuple(pixels))

    @property
    def image(self) -> tuple[int, int] | None:
        """Height and width if the array is an image, else None."""
        images = [shape for _, shape in self.parts if len(shape) == 3 and min(shape[:2]) >= SMALLEST_IMAGE]
        numbers = [shape for _, shape in self.parts if not shape]
        one_image = len(images) == 1 and len(numbers) == len(self.parts) - 1
        return (images[0][0], images[0][1]) if one_image else None

    @property
    def box(self) -> Box:
        """Description of the array; packages do not keep the bounds that they state."""
        bounds = {"low": 0.0, "high": 1.0} if self.unit else {}
        if self.image:
            return Box((*self.image, sum(shape[2] if shape else 1 for _, shape in self.parts)), **bounds)
        return Box((sum(math.prod(shape) for _, shape in self.parts),), **bounds)

    @staticmethod
    def largest_box(env: str, joined: Sequence["Joined"]) -> Box:
        """Return the box of a team's arrays, each of which is padded to the largest. Raises ValueError: images."""
        boxes = list(dict.fromkeys(one.box for one in joined))
        if len(boxes) == 1:
            return boxes[0]
        if any(one.image for one in joined):
            raise ValueError(
                f"'{env}' has agents with different observations, some of them images, which cannot be padded to one "
                "shape: leave the images out with observe, or choose another environment"
            )
        bounds = {"low": 0.0, "high": 1.0} if all(one.unit for one in joined) else {}
        return Box((max(box.shape[0] for box in boxes),), **bounds)

    def __call__(self, observation: Any) -> Array:
        named, limits = _leaves_by_name(observation), {name: box.high for name, box in self.pixels}
        leaves = [jnp.asarray(named[name]).astype(jnp.float32) for name, _ in self.parts]
        leaves = [
            x / np.float32(limits[name]) if name in limits else x
            for x, (name, _) in zip(leaves, self.parts, strict=True)
        ]
        if self.image:
            planes = [leaf if leaf.ndim else jnp.broadcast_to(leaf, (*self.image, 1)) for leaf in leaves]
            return jnp.concatenate(planes, axis=-1)
        return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def read_largest_byte(space: Any, name: str) -> float | np.ndarray:
    """Return the largest value of bytes as a package's space describes their part, by the part's dotted name.

    A number, or float64[...] where numbers differ; 255 where the space does not say, at least 1.
    """
    for key in filter(None, name.split(".")):
        inner = getattr(space, "spaces", space)
        if isinstance(inner, Mapping):
            space = inner.get(key)
        elif isinstance(inner, tuple | list) and key.isdigit() and int(key) < len(inner):
            space = inner[int(key)]
        else:
            space = getattr(inner, key, None)
    high = next((getattr(space, name) for name in ("high", "maximum") if hasattr(space, name)), None)
    return shorten_limit(255.0 if high is None else np.clip(np.asarray(high, np.float64), 1.0, 255.0))


def _leaves_by_name(observation: Any) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(observation)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
