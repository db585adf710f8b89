"""Assertions on shapes (chex), which run while a function is traced, and annotations of shapes (jaxtyping).

An [N, 1] with an [N] then fails instead of broadcasting to [N, N]; the compiled program holds no check.
"""

from chex import assert_equal_shape, assert_rank, assert_shape
from jaxtyping import Bool, Float, Float32, Int32, UInt8

__all__ = ["Bool", "Float", "Float32", "Int32", "UInt8", "assert_equal_shape", "assert_rank", "assert_shape"]
