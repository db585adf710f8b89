"""Sums and products that leave out what is known to be zero or one when the program is traced.

A number is a Python float, known at trace time, or an array of any one shape (the lanes). Most constants of the arm
are 0 or 1 (its links are turned by right angles), so the compiled program is a fraction of the matrix formulas.
"""

from collections.abc import Sequence

from envs_jax.base import Array

Number = float | Array
Vector = Sequence[Number]  # 3 numbers
Matrix = Sequence[Sequence[Number]]  # rows


def known(x: Number) -> bool:
    """Whether x is a constant of the program."""
    return isinstance(x, float)


def mul(a: Number, b: Number) -> Number:
    """The product."""
    if known(b):
        a, b = b, a
    if known(a) and not known(b):
        if a == 0.0:
            return 0.0
        if a == 1.0:
            return b
        if a == -1.0:
            return -b
    return a * b


def add(*terms: Number) -> Number:
    """The sum, constants first joined to one."""
    constant = sum((x for x in terms if isinstance(x, float)), 0.0)
    rest = [x for x in terms if not isinstance(x, float)]
    if not rest:
        return constant
    total = rest[0]
    for x in rest[1:]:
        total = total + x
    return total if constant == 0.0 else total + constant


def sub(a: Number, b: Number) -> Number:
    """The difference."""
    if known(a) and a == 0.0:
        return -b
    if known(b) and b == 0.0:
        return a
    return a - b


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
    """A vector a times as long."""
    return [mul(a, x) for x in v]


def apply(matrix: Matrix, v: Sequence[Number]) -> list[Number]:
    """Matrix times vector."""
    return [dot(row, v) for row in matrix]


def transposed(matrix: Matrix) -> list[list[Number]]:
    """Rows become columns."""
    return [list(column) for column in zip(*matrix, strict=True)]
