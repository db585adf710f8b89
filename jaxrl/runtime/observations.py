"""Checks of the observations that users give to a policy: what cannot be meant is refused, never cast."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Box, EnvSpec

_SLACK = 1.0  # widths of a box by which floats may leave it, such as by noise of a user's sensors
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """One array of an agent's observation, and what it may hold.

    Attributes:
        what: it in words, for errors.
        box: of the spec.
    """

    what: str
    box: Box

    @functools.cached_property
    def limits(self) -> tuple[Any, Any]:
        """Lowest and highest numbers that a policy takes."""
        return self.find_limits(_SLACK)

    def find_limits(self, slack: float) -> tuple[Any, Any]:
        """Return the lowest and highest numbers that can be meant: numbers, or float64[*shape] where they differ.

        Floats may leave the box by `slack` times its width.
        """
        low, high = self.box.bounds
        if jnp.issubdtype(self.box.dtype, jnp.bool_):
            low, high = np.maximum(low, 0), np.minimum(high, 1)
        elif self.is_whole:
            kind = jnp.iinfo(self.box.dtype)
            low, high = np.maximum(low, kind.min), np.minimum(high, kind.max)
        else:
            with np.errstate(invalid="ignore"):
                width = high - low
                bounded = np.isfinite(width)
                low, high = (
                    bound + side * slack * np.where(bounded, width, np.maximum(1, abs(bound)))
                    for bound, side in ((low, -1), (high, 1))
                )
        low, high = np.clip(low, -_LARGEST, _LARGEST), np.clip(high, -_LARGEST, _LARGEST)
        if low.size and (low == low.flat[0]).all() and (high == high.flat[0]).all():
            return float(low.flat[0]), float(high.flat[0])
        return low, high

    @property
    def is_whole(self) -> bool:
        return not jnp.issubdtype(self.box.dtype, jnp.floating)

    def take(self, value: Any) -> Any:
        """Return an array [..., *shape] of real numbers, also from nested lists. Raises ValueError: it is none."""
        is_known = not any(isinstance(part, jax.Array) for part in jax.tree.leaves(value))
        try:
            array = np.asarray(value) if is_known else jnp.asarray(value)
        except (ValueError, TypeError):  # the latter from JAX
            raise ValueError(f"{self.what} must be arrays of numbers, or nested lists of equal lengths") from None
        kinds = (jnp.bool_, jnp.integer, jnp.floating)
        if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
            raise ValueError(f"{self.what} must be arrays of real numbers, not of {array.dtype}")
        return array

    def check(self, array: Any, in_box: bool) -> None:
        """Raise ValueError for numbers that are not finite or, with `in_box`, cannot be meant; if they are known."""
        if isinstance(array, jax.core.Tracer) or not array.size:
            return
        values = np.asarray(array)
        low, high = self.limits if in_box else (-_LARGEST, _LARGEST)
        if isinstance(low, float):
            fits = low <= float(values.min()) and float(values.max()) <= high  # also false for NaN
        else:
            fits = bool(((values >= low) & (values <= high)).all())
        is_fraction = in_box and self.is_whole and jnp.issubdtype(values.dtype, jnp.floating)
        if not fits or (is_fraction and (values != np.floor(values)).any()):
            self._refuse(values, low, high)

    def _refuse(self, values: np.ndarray, low: Any, high: Any) -> None:
        values = values.astype(np.float64)
        if np.isnan(values).any():
            raise ValueError(f"{self.what} hold NaN: find out which step made them")
        if (abs(values) > _LARGEST).any():
            raise ValueError(
                f"{self.what} hold {values[abs(values) > _LARGEST][0]:g}, which is not finite in float32: find out "
                "which step made it"
            )
        outside = (values < low) | (values > high)
        if outside.any():
            index = tuple(np.argwhere(outside)[0])
            place = index[len(index) - len(self.box.shape) :]
            least, most = (bound[place] for bound in self.box.bounds)
            if self.is_whole:  # whose bounds may be those of the dtype
                least, most = (np.broadcast_to(limit, self.box.shape)[place] for limit in self.limits)
            raise ValueError(
                f"{self.what} hold {values[index]:g}, outside of their box of {least:g} to {most:g}: give them in the "
                "units of the environment's spec"
            )
        fraction = values[values != np.floor(values)][0]
        raise ValueError(
            f"{self.what} must be whole numbers ({np.dtype(self.box.dtype).name}), not {fraction:g}: give them in the "
            "units of the environment's spec"
        )

    def cast(self, array: Any) -> Array:
        """Return the array in the dtype of the spec; fractions that are not known yet stay as they are."""
        fraction = self.is_whole and jnp.issubdtype(array.dtype, jnp.floating)
        return jnp.asarray(array) if fraction else jnp.asarray(array, self.box.dtype)


def list_arrays(observation: Any, spec: EnvSpec) -> list[Any]:
    """Return the arrays of an observation; nested lists of numbers are arrays unless the spec has lists of parts."""

    def is_list(x: Any) -> bool:
        return isinstance(x, list)

    has_lists = any(map(is_list, jax.tree.leaves(spec.observation, is_leaf=is_list)))
    return jax.tree.leaves(observation, is_leaf=None if has_lists else is_list)


def describe_leaves(spec: EnvSpec) -> list[Leaf]:
    """Return the arrays of an agent's observation, in the order of jax.tree.leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(spec.observation, is_leaf=lambda x: isinstance(x, Box))
    names = [(jax.tree_util.keystr(path, simple=True, separator="."), box) for path, box in leaves]
    return [Leaf(f"observations{f' {name}' if name else ''} of '{spec.name}'", box) for name, box in names]
