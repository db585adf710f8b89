"""A control period as one kernel (Pallas, compiled by Triton) for NVIDIA GPUs, where a launch costs more than its work.

Each thread moves one arm; all that the physics steps compute stays in its registers. The formulas are those of
`dynamics`. On CPUs the kernel is interpreted: for tests only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from envs_jax.base import Array
from envs_jax.reach import dynamics
from envs_jax.reach.dynamics import Motion

_ARMS = 32  # in a program: one warp, as many programs as possible
_WARPS = 1


@functools.partial(jax.jit, static_argnames="interpret")
def control_step(
    q: Array, v: Array, target: Array, grip: Array, torque_scale: Array, interpret: bool = False
) -> tuple[Array, Array]:
    """`dynamics.control_step`."""
    batch = grip.shape
    command = jnp.concatenate([target, jnp.clip(grip, -1.0, 1.0)[None]])
    # arms first, as states are stored; a last program that is not full moves copies of the last arm
    inputs = [x.reshape(len(x), -1).T for x in (q, v, command)]
    missing = -grip.size % _ARMS
    if missing:
        inputs = [jnp.pad(x, ((0, missing), (0, 0)), mode="edge") for x in inputs]
    arms = len(inputs[0])

    def rows(count: int) -> pl.BlockSpec:
        return pl.BlockSpec((_ARMS, count), lambda i: (i, 0))

    outputs = pl.pallas_call(
        _move,
        grid=(arms // _ARMS,),
        in_specs=[*(rows(x.shape[1]) for x in inputs), pl.BlockSpec((1,), lambda i: (0,))],
        out_specs=[rows(len(q)), rows(len(v))],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:2]],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="reach_control_step",
    )(*inputs, torque_scale[None])
    q, v = (x[: grip.size].T.reshape(-1, *batch) for x in outputs)
    return q, v


def _move(q: Any, v: Any, command: Any, torque_scale: Any, new_q: Any, new_v: Any) -> None:
    """Move the arms of a program; references [_ARMS, 9], `command` [_ARMS, 4]: target and grip."""

    def columns(reference: Any) -> list[Array]:
        return [reference[:, i] for i in range(reference.shape[1])]

    *target, grip = columns(command)
    after = dynamics.steps(Motion(columns(q), columns(v)), target, grip, torque_scale[0])
    for reference, values in ((new_q, after.q), (new_v, after.v)):
        for i, value in enumerate(values):
            reference[:, i] = value
