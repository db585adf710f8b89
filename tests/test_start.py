"""How a command starts: cores become devices, and programs are compiled when they are needed."""

import math
import os
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl.runtime.program import Program


def program(log: list[Any], function: Any = lambda x: 2 * x) -> Program:
    return Program(lambda: (jax.jit(function), jax.ShapeDtypeStruct((3,), jnp.float32)), lambda *made: log.append(made))


def test_a_program_is_compiled_when_it_is_called() -> None:
    log: list[Any] = []
    double = program(log)
    assert not double.ready and not log
    assert double(jnp.ones(3)).tolist() == [2, 2, 2]
    assert double.ready and double(jnp.ones(3)).tolist() == [2, 2, 2]
    ((_, seconds),) = log  # checked once
    assert seconds > 0 and "HloModule" in double.as_text()


def test_programs_compile_beside_each_other() -> None:
    """`begin` traces in the caller's thread, under its settings, and returns before the compiler."""
    threads: list[threading.Thread] = []

    def function(x: jax.Array) -> jax.Array:
        threads.append(threading.current_thread())
        return x + 1

    first, second = program([], function), program([], function)
    for one in (first, second, first):
        one.begin()
    assert set(threads) == {threading.main_thread()}
    assert second(jnp.ones(3)).tolist() == first(jnp.ones(3)).tolist() == [2, 2, 2]


def test_errors_of_the_check_and_of_the_trace_reach_the_caller() -> None:
    def refuse(executable: Any, seconds: float) -> None:
        raise ValueError("too large")

    with pytest.raises(ValueError, match="too large"):
        Program(lambda: (jax.jit(lambda x: x), jnp.float32(0)), refuse).finish()
    with pytest.raises(TypeError):
        program([], lambda x: x + "").finish()


@pytest.mark.parametrize(
    ("devices", "variable", "expected"),
    [(1, None, 1), (4, None, 4), (0, None, 2 ** int(math.log2(min(len(os.sched_getaffinity(0)), 8)))), (4, "2", 2)],
)
def test_cores_of_a_cpu_are_divided_into_devices(devices: int, variable: str | None, expected: int) -> None:
    """The last case: what the user set for JAX itself counts more."""
    code = f"from jaxrl.cli.train import _divide_cores as f; f({devices}); import jax; print(jax.local_device_count())"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({"JAX_NUM_CPU_DEVICES": variable} if variable else {})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == expected
