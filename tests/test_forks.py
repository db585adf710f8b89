"""A process forked after JAX began, in which JAX would wait forever, is told to be spawned; others are let alone."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxrl
from envs_jax import forks
from jaxrl.cli import evaluate

ROOT = Path(__file__).parents[1]


def run_in_fork(call: Callable[[], Any]) -> str:
    """Return the sentence of the error that `call` raises or prints in a forked child."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX and Python, about the fork
        child = os.fork()
    if not child:
        signal.alarm(100)
        try:
            with contextlib.redirect_stderr(io.StringIO()) as printed:
                call()
            os.write(writable, printed.getvalue().encode())
        except Exception as error:
            os.write(writable, str(error).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        sentence = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return sentence


CALLS = {
    "training": lambda: jaxrl.train("coma", num_envs=4),
    "a policy": lambda: jaxrl.load("pretrained:snakes"),
    "an evaluation": lambda: jaxrl.evaluate("pretrained:snakes"),
    "a command": lambda: evaluate.main(["--env", "coverage", "--episodes", "4"]),
}


@pytest.mark.parametrize("activity", CALLS)
@pytest.mark.parametrize("parent", ["used JAX", "trained"])
def test_after_jax_was_used_in_the_parent(activity: str, parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jax.numpy.ones(3).block_until_ready()
    monkeypatch.setattr(forks, "_owners", {os.getpid()} if parent == "trained" else set())
    sentence = run_in_fork(CALLS[activity])
    assert f"was forked from one in which JAX already ran, so {activity} would hang here" in sentence
    assert "'spawn' (multiprocessing.get_context('spawn'))" in sentence


# The child's second call finds the JAX of its first one.
FORK_BEFORE_JAX = """
import os, signal, jax
from envs_jax import forks
forks.check_process("the parent's call", "")
child = os.fork()
if not child:
    signal.alarm(100)
    for _ in range(2):
        forks.check_process("the child's call", "")
        jax.numpy.ones(3).block_until_ready()
    os._exit(7)
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_of_a_process_in_which_jax_had_not_begun_is_let_alone(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", FORK_BEFORE_JAX]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=True)
    assert result.stdout == "status 7\n"


def test_without_the_private_names_of_jax_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a version of JAX has renamed them."""
    monkeypatch.setattr(forks, "xla_bridge", object())
    monkeypatch.setattr(forks, "_owners", {1})  # a parent used JAX
    forks.check_process("training", "")
    assert len(forks._owners) == 2
