"""Assertions on shapes, which run while a function is traced, and annotations of shapes (jaxtyping).

An [N, 1] with an [N] then fails instead of broadcasting to [N, N]; the compiled program holds no check.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, UInt8

__all__ = ["Bool", "Float", "Float32", "Int32", "UInt8", "assert_equal_shape", "assert_rank", "assert_shape"]


def assert_equal_shape(arrays: Sequence[Any]) -> None:
    """Raise AssertionError unless all arrays have the same shape."""
    shapes = [array.shape for array in arrays]
    if len(set(shapes)) > 1:
        raise AssertionError(f"arrays have different shapes: {shapes}")


def assert_shape(array: Any, expected: Sequence[int | None]) -> None:
    """Raise AssertionError unless the array has the shape `expected`, in which None is any size."""
    fits = len(array.shape) == len(expected)
    if not fits or any(size not in (None, actual) for actual, size in zip(array.shape, expected, strict=True)):
        raise AssertionError(f"an array has the shape {array.shape}, not {tuple(expected)}")


def assert_rank(arrays: Any, ranks: int | Sequence[int]) -> None:
    """Raise AssertionError unless an array has this number of axes; or several arrays, a number for each."""
    arrays, expected = (arrays, list(ranks)) if isinstance(ranks, Sequence) else ([arrays], [ranks])
    shapes = [np.shape(array) for array in arrays]  # also of numbers
    if [len(shape) for shape in shapes] != expected:
        raise AssertionError(f"arrays have the shapes {shapes}, not {expected} axes")
