"""Sums and products that skip constants zero and one at trace time.

A number is a Python float, known at trace time, or an array of any one shape (the batch). Most constants of the arm
are 0 or 1 (its links are turned by right angles), so the compiled program is a fraction of the matrix formulas.

Thousands of numbers are traced, and JAX traces the functions of `lax` in a third of the time of operators.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax import lax

from envs_jax import stages
from envs_jax.base import Array

Number = float | Array
Vector = Sequence[Number]  # 3 numbers
Matrix = Sequence[Sequence[Number]]  # rows

_F = TypeVar("_F", bound=Callable)


def known(x: Number) -> bool:
    """Return whether x is a constant of the program."""
    return isinstance(x, float)


def _apply(operation: Callable[[Array, Array], Array], a: Number, b: Number) -> Array:
    """Apply an operation of `lax` to two numbers, not both known."""
    dtype = (b if known(a) else a).dtype  # type: ignore[union-attr]
    first, second = (np.asarray(x, dtype) if known(x) else x for x in (a, b))
    return operation(first, second)  # type: ignore[arg-type]


def mul(a: Number, b: Number) -> Number:
    """Multiply, without an operation for known 0, 1 and -1."""
    if known(b):
        a, b = b, a
    if known(b):
        return a * b
    if known(a):
        if a == 0.0:
            return 0.0
        if a == 1.0:
            return b
        if a == -1.0:
            return lax.neg(b)
    return _apply(lax.mul, a, b)


def add(*terms: Number) -> Number:
    """Return the sum, constants folded first."""
    constant = sum((x for x in terms if isinstance(x, float)), 0.0)
    rest = [x for x in terms if not isinstance(x, float)]
    if not rest:
        return constant
    total = rest[0]
    for x in rest[1:]:
        total = lax.add(total, x)
    return total if constant == 0.0 else _apply(lax.add, total, constant)


def sub(a: Number, b: Number) -> Number:
    """Subtract, without an operation for known 0."""
    if known(a) and known(b):
        return a - b
    if known(a) and a == 0.0:
        return lax.neg(b)
    if known(b) and b == 0.0:
        return a
    return _apply(lax.sub, a, b)


def dot(a: Sequence[Number], b: Sequence[Number]) -> Number:
    """Sum of products."""
    return add(*(mul(x, y) for x, y in zip(a, b, strict=True)))


def cross(a: Vector, b: Vector) -> list[Number]:
    """The vector product."""
    return [sub(mul(a[i], b[j]), mul(a[j], b[i])) for i, j in ((1, 2), (2, 0), (0, 1))]


def plus(*vectors: Sequence[Number]) -> list[Number]:
    """Sum of vectors."""
    return [add(*entries) for entries in zip(*vectors, strict=True)]


def scale(a: Number, v: Sequence[Number]) -> list[Number]:
    """Return a v."""
    return [mul(a, x) for x in v]


def apply(matrix: Matrix, v: Sequence[Number]) -> list[Number]:
    """Matrix times vector."""
    return [dot(row, v) for row in matrix]


def transpose(matrix: Matrix) -> list[list[Number]]:
    """Exchange rows and columns."""
    return [list(column) for column in zip(*matrix, strict=True)]


def materialize(function: _F) -> _F:
    """`envs_jax.stages.materialize` for functions of numbers: constants stay constants, in and out.

    On CPUs, the arrays that the function returns are stored before they are read. Otherwise the compiler emits eleven
    times as many operations, since it recomputes cheap ones for each reader.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        result: list[Any] = []

        def inner(*arrays: Array) -> list[Array]:
            rest = iter(arrays)
            whole = [next(rest) if isinstance(x, jax.Array) else x for x in leaves]
            outputs, shape = jax.tree.flatten(function(*jax.tree.unflatten(tree, whole)))
            result[:] = shape, [None if isinstance(x, jax.Array) else x for x in outputs]
            return [x for x in outputs if isinstance(x, jax.Array)]

        arrays = iter(stages.materialize(inner)(*(x for x in leaves if isinstance(x, jax.Array))))
        shape, constants = result
        return jax.tree.unflatten(shape, [next(arrays) if x is None else x for x in constants])

    return cast(_F, call)
