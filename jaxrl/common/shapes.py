"""Assertions on shapes (chex) and annotations of shapes (jaxtyping), or stand-ins where these are not installed.

An assertion runs while a function is traced, and costs nothing in the compiled program: an [N, 1] beside an [N] fails
there instead of broadcasting to [N, N]. The program does not need it to run, so a machine without these packages (often
one with a GPU and no network) runs the same program without assertions.
"""

from typing import TYPE_CHECKING, Any

import jax

__all__ = ["Bool", "Float", "Float32", "Int32", "UInt8", "assert_equal_shape", "assert_rank", "assert_shape"]

if TYPE_CHECKING:
    from chex import assert_equal_shape, assert_rank, assert_shape
    from jaxtyping import Bool, Float, Float32, Int32, UInt8
else:
    try:
        from chex import assert_equal_shape, assert_rank, assert_shape
    except ImportError:

        def assert_rank(*_: Any) -> None:
            """Check nothing."""

        assert_equal_shape = assert_shape = assert_rank

    try:
        from jaxtyping import Bool, Float, Float32, Int32, UInt8
    except ImportError:

        class Float:
            """An annotation that says no more than `jax.Array`."""

            def __class_getitem__(cls, _: Any) -> type:
                return jax.Array

        Bool = Float32 = Int32 = UInt8 = Float
