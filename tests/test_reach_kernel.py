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


interpreted = jax.jit(lambda *arrays: kernel.control_step(*arrays, interpret=True))


@pytest.mark.parametrize("weld", ["v3", "v2"])
def test_equals_the_array_code(weld):
    """40 arms fill a program and a quarter of the next one."""
    given = arguments(weld)
    for actual, expected in zip(interpreted(*given), dynamics.control_step(*given), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_more_axes_of_a_batch():
    *arrays, scale = arguments()
    folded = [x.reshape(*x.shape[:-1], 5, 8) for x in arrays]
    for flat, actual in zip(interpreted(*arrays, scale), interpreted(*folded, scale), strict=True):
        np.testing.assert_array_equal(actual, flat.reshape(9, 5, 8))


def test_a_step_has_one_kernel_on_a_gpu(monkeypatch):
    """A batched step, lowered for an NVIDIA GPU that is not there, has no loop of its own."""
    monkeypatch.setattr(stages, "on_cpu", lambda: False)
    monkeypatch.setattr(env, "runs_triton", lambda: True)
    arms = batched(make("reach"))
    state, _ = jax.eval_shape(lambda keys: arms.reset(keys, ()), jax.random.split(jax.random.key(0), 64))
    action = jax.ShapeDtypeStruct((64, 1, 4), jnp.float32)
    step = jax.jit(lambda state, action: arms.step_without_reset(state, action, ()))
    gpu = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with use_abstract_mesh(gpu):
        text = step.trace(state, action).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 1 and "reach_control_step" in text
    assert "stablehlo.while" not in text
