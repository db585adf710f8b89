"""Flags of JAX that users set while debugging change no type, and make nothing fail that works without them.

All tests of this project run with JAX_NUMPY_RANK_PROMOTION=raise and JAX_NUMPY_DTYPE_PROMOTION=strict (conftest.py).
Processes here have each other flag as users set it. `test_x64` is about environments.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import by_day
from helpers.flag_runs import RUNS, make_run
from helpers.programs import equations
from helpers.tiny import Corridor
from test_env_contract import SETTINGS

import jaxrl
from envs_jax import check_env
from jaxrl.cli import export, train
from jaxrl.common.errors import UserError
from jaxrl.evaluation import policies

TESTS = Path(__file__).parent
FLAGS = ("JAX_ENABLE_X64", "JAX_DEBUG_NANS", "JAX_DISABLE_JIT")
DEFAULT = ("ppo", "sac")  # in every run of the tests; the others at night


@pytest.mark.slow
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


@pytest.mark.parametrize("name", by_day(RUNS, DEFAULT))
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


DRAWS = {
    "jax_default_prng_impl": "rbg", "jax_threefry_partitionable": False, "jax_random_seed_offset": 3,
    "jax_high_dynamic_range_gumbel": True,
}  # fmt: skip
REFUSED = DRAWS | {
    "jax_transfer_guard": "disallow", "jax_transfer_guard_device_to_host": "disallow_explicit",
    "jax_debug_key_reuse": True,
}  # fmt: skip
TINY = {"num_envs": 8, "total_env_steps": 64}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> jaxrl.Result:
    return jaxrl.train("helpers.tiny:TinyQ", Corridor(), runs=tmp_path_factory.mktemp("runs"), progress=False, **TINY)


@contextlib.contextmanager
def updated(flag: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, flag)
    jax.config.update(flag, value)
    try:
        yield
    finally:
        jax.config.update(flag, before)


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_with_other_numbers_or_none_are_refused(
    flag: str, trained: jaxrl.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 54: at once, by one sentence that names the variable, wherever numbers are drawn."""
    whole = jaxrl.make_train("helpers.tiny:TinyQ", Corridor(), **TINY)
    key, named = jax.random.key(0), f"^{flag.upper()} is {REFUSED[flag]}, .* unset it .*config.update..{flag}., "
    with updated(flag, REFUSED[flag]):
        for call in (
            lambda: jaxrl.train("helpers.tiny:TinyQ", Corridor(), runs=tmp_path / "runs", **TINY),
            lambda: jaxrl.make_train("helpers.tiny:TinyQ", Corridor(), **TINY),
            lambda: jaxrl.evaluate(trained.policy, episodes=8),
            lambda: jaxrl.evaluate(trained.directory, episodes=8),
            lambda: policies.load(None, "reach", {}),
        ):
            with pytest.raises(UserError, match=named):
                call()
        if flag in DRAWS:
            observation = np.zeros((1, 5), np.float32)
            for draw in (lambda: trained.policy(observation, key=key), lambda: whole(key)):
                with pytest.raises(ValueError, match=named):
                    draw()
            assert check_env(Corridor()).startswith("ok: corridor")  # environments alone are anyone's
        capsys.readouterr()
        assert train.main(["--resume", str(trained.directory), "--total_env_steps", "128"]) == 2
        assert re.fullmatch(f"error: {named[1:]}.*\n", capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()


def test_contexts_of_a_thread_are_heeded_too() -> None:
    """Programs are compiled in other threads, which have the flags of the process."""
    with jax.threefry_partitionable(False), pytest.raises(UserError, match="JAX_THREEFRY_PARTITIONABLE is False"):
        policies.load(None, "reach", {})
    with jax.transfer_guard("disallow"), pytest.raises(UserError, match=r"JAX_TRANSFER_GUARD\w* is disallow"):
        policies.load(None, "reach", {})
    refusal = pytest.raises(UserError, match="JAX_THREEFRY_PARTITIONABLE is False")
    with updated("jax_threefry_partitionable", False), jax.threefry_partitionable(True), refusal:
        policies.load(None, "reach", {})
    assert policies.load(None, "reach", {}).policies


def test_an_export_that_may_move_nothing_is_refused(
    trained: jaxrl.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with updated("jax_transfer_guard", "disallow"):
        assert export.main([str(trained.directory), "--format", "safetensors", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: JAX_TRANSFER_GUARD is disallow, but jaxrl moves numbers ")
