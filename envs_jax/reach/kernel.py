"""A control period as one kernel (Pallas, compiled by Triton) for NVIDIA GPUs, where a launch costs more than its work.

Each thread moves one arm, and all that the physics steps compute stays with it. The formulas are those of `dynamics`.
On CPUs the kernel is interpreted: for tests only.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from envs_jax import stages
from envs_jax.base import Array
from envs_jax.reach import dynamics
from envs_jax.reach.dynamics import Motion, Pose

_ARMS = 32  # in a program: one warp, so that few arms use many multiprocessors
_WARPS = 1
_POSE = 7  # numbers of a pose


@jax.jit
def control_step(q: Array, v: Array, target: Array, grip: Array, torque_scale: Array) -> tuple[Array, Array, Pose]:
    """`dynamics.control_step`, with the same arguments, and the pose after it."""
    last = [jnp.clip(grip, -1.0, 1.0), jnp.broadcast_to(torque_scale, grip.shape)]
    q, v, pose = _move_arms(q, v, jnp.concatenate([target, jnp.stack(last)]))
    return q, v, Pose(pose[:3], pose[3:6], pose[6])


@jax.custom_batching.custom_vmap
def _move_arms(q: Array, v: Array, command: Array) -> tuple[Array, Array, Array]:
    """Return q, v [9, ...] and pose [7, ...] after `command` [5, ...]: target, grip, torque scale."""
    batch = q.shape[1:]
    # arms first, as states are stored; a last program that is not full moves copies of the last arm
    inputs = [x.reshape(len(x), -1).T for x in (q, v, command)]
    arms = len(inputs[0])
    if missing := -arms % _ARMS:
        inputs = [jnp.pad(x, ((0, missing), (0, 0)), mode="edge") for x in inputs]
    columns = len(q), len(v), _POSE
    outputs = pl.pallas_call(
        _move,
        grid=(len(inputs[0]) // _ARMS,),
        in_specs=[_rows(x.shape[1]) for x in inputs],
        out_specs=[_rows(count) for count in columns],
        out_shape=[jax.ShapeDtypeStruct((len(inputs[0]), count), q.dtype) for count in columns],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=stages.on_cpu(),
        name="reach_control_step",
    )(*inputs)
    q, v, pose = (x[:arms].T.reshape(-1, *batch) for x in outputs)
    return q, v, pose


def _rows(count: int) -> pl.BlockSpec:
    """The arms of a program in an array [arms, count]."""
    return pl.BlockSpec((_ARMS, count), lambda i: (i, 0))


@_move_arms.def_vmap
def _move_more_arms(size: int, batched: list[bool], *arrays: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    """Vmapped arms fill programs together; an axis of a grid for them would give each its own."""
    moved = [
        jnp.moveaxis(x, 0, 1) if has_axis else jnp.broadcast_to(x[:, None], (len(x), size, *x.shape[1:]))
        for x, has_axis in zip(arrays, batched, strict=True)
    ]
    after = tuple(jnp.moveaxis(x, 1, 0) for x in _move_arms(*moved))
    return after, (True,) * len(after)


def _move(q: Any, v: Any, command: Any, new_q: Any, new_v: Any, pose: Any) -> None:
    """Move the arms of a program; references [_ARMS, 9], `command` [_ARMS, 5], `pose` [_ARMS, 7]."""

    def columns(reference: Any) -> list[Array]:
        return [reference[:, i] for i in range(reference.shape[1])]

    *target, grip, torque_scale = columns(command)
    after = dynamics.steps(Motion(columns(q), columns(v)), target, grip, torque_scale)
    for reference, values in ((new_q, after.q), (new_v, after.v), (pose, dynamics.pose_numbers(after.q))):
        for i, value in enumerate(values):
            reference[:, i] = value
