"""The dtype policy: compute dtypes of networks and storage dtypes of rollouts.

Parameters, optimizer state, log-probabilities, targets, advantages and reductions are float32 everywhere.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Box, EnvSpec, TimeStep
from jaxrl.common.dtypes import Compute, Store


def compute_dtype(name: Compute, platform: str) -> Any:
    """Return the dtype of matmuls and convolutions: bfloat16 on accelerators, float32 on CPUs (bfloat16 is slow)."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def rollout_dtype(name: Store) -> Any:
    """Return the dtype of stored observations whose values lie in [0, 1]."""
    return jnp.dtype("float16" if name == "auto" else name)


def stored_dtype(box: Box | None, small: Any) -> Any:
    """Return `small` where the values of a float box lie in [0, 1], else the box's own dtype."""
    assert box is not None
    unit = jnp.issubdtype(box.dtype, jnp.floating) and box.lowest >= 0 and box.highest <= 1
    return small if unit else box.dtype


def store(spec: EnvSpec, timestep: TimeStep, small: Any) -> TimeStep:
    """Return a time step for a trajectory, with observation and global state in their stored dtype."""

    def cast(boxes: Any, values: Any) -> Any:
        return jax.tree.map(
            lambda box, x: x.astype(stored_dtype(box, small)), boxes, values, is_leaf=lambda x: isinstance(x, Box)
        )

    return dataclasses.replace(
        timestep,
        observation=cast(spec.observation, timestep.observation),
        global_state=cast(spec.global_state, timestep.global_state) if spec.global_state is not None else (),
    )
