"""How a command starts: cores become devices, and programs are compiled when they are needed."""

import os
import pwd
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxrl.cli import process
from jaxrl.common import files
from jaxrl.common.errors import UserError
from jaxrl.runtime.program import Program


def test_a_user_without_a_home_has_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME is not set and the uid has no name; a folder into which others can write is not trusted."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files._temporary_cache.cache_clear()
    folder = tmp_path / f"jaxrl-{os.getuid()}"
    assert files.cache_root() == folder and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    files._temporary_cache.cache_clear()
    assert files.cache_root() != folder and files.cache_root().parent == tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    files._temporary_cache.cache_clear()
    with pytest.raises(UserError, match=r"no home directory, .* \(No such file or directory\): set XDG_CACHE_HOME"):
        files.cache_root()
    files._temporary_cache.cache_clear()


@pytest.mark.parametrize("harm", [lambda content: content[: len(content) // 2], lambda content: b""])
def test_a_damaged_program_in_the_cache_is_replaced(
    harm: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}

    def configure(values: dict[str, Any]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    configure(settings)

    def compile_again(factor: int) -> str:
        def damaged_probe(x: jax.Array) -> jax.Array:
            return factor * x + 1

        assert jax.jit(damaged_probe)(np.float32(2.0)) == 2 * factor + 1
        return capsys.readouterr().err

    with warnings.catch_warnings():
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        process.speed_up_start()
        try:
            assert compile_again(3) == compile_again(5) == ""
            entries = {path: path.read_bytes() for path in tmp_path.glob("*damaged_probe*-cache")}
            assert len(entries) == 2
            for path, content in entries.items():
                path.write_bytes(harm(content))
            message = f"warning: a damaged program in {tmp_path} is compiled again and replaced\n"
            assert compile_again(3) + compile_again(5) == message
            assert all(len(path.read_bytes()) > len(content) / 2 for path, content in entries.items())
            assert compile_again(3) == compile_again(5) == ""
            with pytest.warns(UserWarning, match="another"):
                warnings.warn("another", stacklevel=1)
        finally:
            configure(before)


ROOT = Path(__file__).parent.parent


def program(log: list[Any], function: Any = lambda x: 2 * x) -> Program:
    return Program(
        lambda: (jax.jit(function), jax.ShapeDtypeStruct((3,), jnp.float32)), lambda *compiled: log.append(compiled)
    )


def test_a_program_is_compiled_when_it_is_called() -> None:
    log: list[Any] = []
    double = program(log)
    assert not double.ready and not log
    assert double(jnp.ones(3)).tolist() == [2, 2, 2]
    assert double.ready and double(jnp.ones(3)).tolist() == [2, 2, 2]
    ((_, seconds),) = log  # checked once
    assert seconds > 0


def test_programs_compile_beside_each_other() -> None:
    """`begin` traces in the caller's thread, under its settings, and returns before the compiler."""
    threads: list[threading.Thread] = []

    def function(x: jax.Array) -> jax.Array:
        threads.append(threading.current_thread())
        return x + 1

    first, second = program([], function), program([], function)
    for one in (first, second, first):
        one.start_compiling()
    assert set(threads) == {threading.main_thread()}
    assert second(jnp.ones(3)).tolist() == first(jnp.ones(3)).tolist() == [2, 2, 2]


def test_errors_of_the_check_and_of_the_trace_reach_the_caller() -> None:
    def refuse(executable: Any, seconds: float) -> None:
        raise ValueError("too large")

    with pytest.raises(ValueError, match="too large"):
        Program(lambda: (jax.jit(lambda x: x), jnp.float32(0)), refuse).compile()
    with pytest.raises(TypeError):
        program([], lambda x: x + "").compile()


@pytest.mark.parametrize(
    ("devices", "cores", "variable", "expected"),
    [(0, 8, None, 8), (0, 6, None, 4), (0, 64, None, 8), (4, 8, None, 4), (0, 1, None, None), (4, 8, "2", None)],
)
def test_cores_of_a_cpu_are_divided_into_devices(
    devices: int, cores: int, variable: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last case: what the user set for JAX itself counts more."""
    update = Mock()
    monkeypatch.setattr(jax.config, "update", update)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    if variable:
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", variable)
    process.divide_cores(devices)
    assert update.mock_calls == ([call("jax_num_cpu_devices", expected)] if expected else [])


@pytest.mark.parametrize(
    ("error", "code"), [("ValueError('of the user')", 1), pytest.param("SystemExit(3)", 3, marks=pytest.mark.slow)]
)
def test_an_error_while_a_program_compiles_ends_the_process_in_order(error: str, code: int) -> None:
    script = f"""
import jax, jax.numpy as jnp
from jaxrl.runtime.program import Program
jax.config.update("jax_enable_compilation_cache", False)
def slow(x):
    for k in range(1000):
        x = jnp.sin(x) + k
    return x
Program(lambda: (jax.jit(slow), jnp.float32(0)), lambda *_: None).start_compiling()
raise {error}
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and "FATAL" not in done.stderr
    assert code != 1 or done.stderr.endswith("ValueError: of the user\n")


def test_an_interrupt_while_modules_are_imported_ends_without_a_traceback() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "jaxrl.train", "--algo", "sac"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.rstrip().endswith(" numpy"):
                process.send_signal(signal.SIGINT)
                break
        lines += process.stderr
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in "".join(lines)


def test_commands_collect_garbage_rarely_and_imports_change_nothing() -> None:
    script = """
import gc
gc.disable()
before = gc.get_threshold()
frozen = gc.get_freeze_count()
import jaxrl.cli
from jaxrl.cli import entry
assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == (False, before, frozen)
gc.enable()
entry.exit_on_error(lambda argv: print(gc.isenabled(), gc.get_threshold() > before, gc.get_freeze_count() > frozen))()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True True True\n"
