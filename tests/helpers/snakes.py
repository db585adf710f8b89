"""Contexts of training for tests of snakes, and a compiler in a hurry."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

# Compiling takes longer than playing here, so the compiler does not optimise.
OPTIONS = {"xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=OPTIONS)


def context(env: Any, fraction: float = 0.0) -> Any:
    """The environment's context at a fraction of training."""
    return env.context(type("Progress", (), {"fraction": jnp.float32(fraction)}))
