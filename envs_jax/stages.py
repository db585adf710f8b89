"""Keep the compiler from fusing code that is faster unfused."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.experimental.xla_metadata import set_xla_metadata

_F = TypeVar("_F", bound=Callable)


def on_cpu() -> bool:
    """Return whether programs are compiled for a CPU by default."""
    return jax.default_backend() == "cpu"


def materialize(function: _F) -> _F:
    """On CPUs, compile a pure function of arrays as a subroutine: what it returns is stored before it is read.

    XLA's CPU compiler would otherwise fuse a cheap-looking function into each of its readers and recompute it for
    every element that they read, often in loops that no longer vectorise; `jax.lax.optimization_barrier`
    does not stop it. On other backends the function is unchanged.
    """

    compiled = jax.jit(function)  # traced once, however often it is called

    def call_unfused(*args: Any) -> Any:
        if not on_cpu():
            return function(*args)
        # the mark is put on the call that returns the values
        return set_xla_metadata(compiled(*args), inlineable="false")

    return cast(_F, call_unfused)
