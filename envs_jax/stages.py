"""Keep the compiler from fusing code that is faster unfused, and from copying arrays that are changed in place."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

_F = TypeVar("_F", bound=Callable)


def on_cpu() -> bool:
    """Return whether programs are compiled for a CPU by default."""
    return jax.default_backend() == "cpu"


def runs_triton() -> bool:
    """Return whether JAX's first device runs kernels compiled by Triton: NVIDIA GPUs from compute capability 8.0.

    They are then taken on every device, and have no reverse derivative.
    """
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    return jax.default_backend() == "gpu" and capability.replace(".", "", 1).isdigit() and float(capability) >= 8.0


def materialize(function: _F, static_argnums: tuple[int, ...] = ()) -> _F:
    """On CPUs, compile a pure function of arrays as a subroutine: what it returns is stored before it is read.

    Arguments at `static_argnums` are hashable values, not arrays.

    XLA's CPU compiler would otherwise fuse a cheap-looking function into each of its readers and recompute it for
    every element that they read, often in loops that no longer vectorise; `jax.lax.optimization_barrier`
    does not stop it. On other backends the function is unchanged.
    """

    compiled = jax.jit(function, static_argnums=static_argnums)  # traced once, however often it is called

    def call_unfused(*args: Any) -> Any:
        if not on_cpu():
            return function(*args)
        # the mark is put on the call that returns the values
        return set_xla_metadata(compiled(*args), inlineable="false")

    return cast(_F, call_unfused)


def when(condition: jax.Array, function: Callable[[jax.Array, Any], Any], operand: Any) -> Any:
    """function(zero, operand) if condition, else operand: a branch that changes big arrays in place (`cond` copies).

    It is a loop of one iteration or none. A compiler may hoist loop invariants and compute them in any case. `zero` is
    int32 0, which a compiler cannot know: what is computed from an index that `zero` was added to stays inside.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), function, operand)
