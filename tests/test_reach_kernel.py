"""The kernel of a control period, interpreted, against the array code; and that Triton takes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from test_reach_dynamics import states

from envs_jax import make, stages
from envs_jax.batch import batched
from envs_jax.reach import constants, dynamics, env, kernel


def arguments(weld: str = "v3") -> list[jax.Array]:
    """Arguments of a control period: states near the limits of joints, 40 arms."""
    now = states()
    arrays = [jnp.float32(now[name].T) for name in ("q", "v", "target", "grip")]
    return [*arrays, jnp.float32(constants.torque_scale(weld))]


@pytest.mark.parametrize("weld", ["v3", "v2"])
def test_equals_the_array_code(weld):
    """40 arms fill a program and a quarter of the next one."""
    given = arguments(weld)
    q, v, pose = kernel.control_step(*given)
    expected_q, expected_v = dynamics.control_step(*given)
    np.testing.assert_allclose(q, expected_q, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(v, expected_v, rtol=1e-5, atol=1e-5)
    for actual, expected in zip(pose, dynamics.pose(q), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_vmapped_batches_and_single_arms_are_one_batch():
    *arrays, scale = arguments()
    q, v, _ = kernel.control_step(*arrays, scale)
    folded = [x.reshape(*x.shape[:-1], 5, 8) for x in arrays]
    axes = [x.ndim - 2 for x in folded]
    rows = jax.jit(jax.vmap(lambda *given: kernel.control_step(*given)[:2], (*axes, None), -2))
    single = jax.jit(jax.vmap(kernel.control_step, (-1, -1, -1, -1, None), -1))
    for expected, batches, arms in zip((q, v), rows(*folded, scale), single(*arrays, scale)[:2], strict=True):
        np.testing.assert_allclose(batches.reshape(9, 40), expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(arms, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")  # by jax 0.12
@pytest.mark.parametrize("vmapped", [False, True])
def test_a_step_has_one_kernel_on_a_gpu(vmapped, monkeypatch):
    """Steps of 64 arms, lowered for an NVIDIA GPU that is not there, have no loop of their own."""
    monkeypatch.setattr(stages, "on_cpu", lambda: False)
    monkeypatch.setattr(env, "runs_triton", lambda: True)
    arms = make("reach")
    reset, step = jax.vmap(arms.reset), jax.vmap(arms.step)
    if not vmapped:
        batch = batched(arms)
        reset, step = lambda keys: batch.reset(keys, ()), lambda *given: batch.step_without_reset(*given, ())
    state, _ = jax.eval_shape(reset, jax.random.split(jax.random.key(0), 64))
    action = jax.ShapeDtypeStruct((64, 1, 4), jnp.float32)
    gpu = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with use_abstract_mesh(gpu):
        text = jax.jit(step).trace(state, action).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 1 and "reach_control_step" in text
    assert "grid_x = 2 : i32, grid_y = 1" in text
    assert "stablehlo.while" not in text
