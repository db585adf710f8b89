"""Flags of JAX that users set while debugging change no type, and make nothing fail that works without them.

All tests of this project run with JAX_NUMPY_RANK_PROMOTION=raise and JAX_NUMPY_DTYPE_PROMOTION=strict (conftest.py).
Processes here have each other flag as users set it. `test_x64` is about environments.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.flag_runs import ENVIRONMENTS, RUNS, make_run
from test_env_contract import SETTINGS
from test_x64 import equations

import envs_jax

TESTS = Path(__file__).parent
FLAGS = ("JAX_ENABLE_X64", "JAX_DEBUG_NANS", "JAX_DISABLE_JIT")
DEFAULT = ("ppo", "sac")  # in every run of the tests; the others are long


@pytest.mark.long
@pytest.mark.parametrize("name", [*SETTINGS, *RUNS])
@pytest.mark.parametrize("flag", FLAGS)
def test_everything_works_with_the_flag(flag: str, name: str) -> None:
    if flag == "JAX_DISABLE_JIT" and name in RUNS:
        pytest.skip("training refuses this flag")
    variables = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0", flag: "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    command = [sys.executable, "-m", "helpers.flag_runs", name]
    done = subprocess.run(command, env=variables, cwd=TESTS.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [name]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.long) for n in RUNS])
def test_programs_of_algorithms_name_their_dtypes(name: str) -> None:
    """With x64 the state is of the same types, no number is wide but whole ones, and no draw takes wide bits."""

    def types() -> list[str]:
        leaves = jax.tree_util.tree_leaves_with_path(make_run(name).trainer.shapes())
        return [f"{jax.tree_util.keystr(path)}: {leaf.dtype}{leaf.shape}" for path, leaf in leaves]

    with jax.enable_x64(False):
        expected = types()
    with jax.enable_x64(True):
        assert types() == expected
        trainer = make_run(name).trainer
        for phase in trainer.algo.phases:
            traced = trainer.make_block(phase).trace(trainer.shapes(), jax.ShapeDtypeStruct((), jnp.int32))
            assert not [x for x in jax.tree.leaves(traced.out_info) if str(x.dtype) in ("int64", "uint64")]
            for equation in equations(traced.jaxpr.jaxpr):
                kinds = {str(getattr(variable.aval, "dtype", "")) for variable in equation.outvars}
                assert not kinds & {"float64", "complex128"}, equation
                assert equation.primitive.name != "random_bits" or equation.params["bit_width"] <= 32, equation


@pytest.mark.long
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments_can_be_stepped_without_compilation(name: str) -> None:
    """The same games as with it, for a debugger that looks into them."""
    env = envs_jax.make(name, **ENVIRONMENTS[name])
    shape = (env.spec.num_agents, *env.spec.action.shape)
    action = jnp.zeros(shape, env.spec.action.dtype)

    def games(reset, step) -> list[np.ndarray]:
        state, timestep = reset(jax.random.key(1))
        return [np.asarray(step(state, action)[1].reward), np.asarray(jax.tree.leaves(timestep.observation)[0])]

    expected = games(jax.jit(env.reset), jax.jit(env.step))
    with jax.disable_jit():
        actual = games(env.reset, env.step)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
