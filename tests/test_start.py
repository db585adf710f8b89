"""How a command starts: without JAX where it can, and with programs compiled when they are needed."""

import gc
import importlib.metadata
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import envs_jax
from envs_jax.settings import registry
from jaxrl.algos import ALGORITHMS
from jaxrl.common.garbage import collected_rarely
from jaxrl.runtime import declared
from jaxrl.runtime.declared import fields_named
from jaxrl.runtime.program import Program

ROOT = Path(__file__).parent.parent
COMMAND = "import sys; from jaxrl.cli.train import main; code = main(sys.argv[1:]); print(code, 'jax' in sys.modules)"


def command(argv: str, cache: Path) -> tuple[str, bool]:
    """The output of `train`, exit code included, and whether JAX was imported."""
    environment = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "100"}
    helping = f"try:\n    {COMMAND}\nexcept SystemExit as end:\n    print(end.code, 'jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", helping, *argv.split()],
        cwd=cache, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *lines, end = (done.stdout + done.stderr if not done.stderr else done.stderr + done.stdout).splitlines()
    code, with_jax = end.split()
    return "\n".join([*lines, code]), with_jax == "True"


def test_help_and_wrong_flags_need_no_jax(tmp_path: Path) -> None:
    """After the first call, which reads the classes."""
    argv = "--config ddpg_quick --help"
    first, with_jax = command(argv, tmp_path)
    assert with_jax and "--self_play" in first and first.endswith("\n0")
    assert command(argv, tmp_path) == (first, False)
    sentence, with_jax = command("--config ddpg_quick --gamma 2", tmp_path)
    assert sentence == "error: the command line: --gamma must lie between 0 and 1, not 2\n2" and not with_jax


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Begin as a new process without JAX does; the cache is in an empty folder."""

    def begin() -> None:
        declared._kept.cache_clear()
        declared._sources.cache_clear()

    monkeypatch.setattr(declared, "_WITHOUT_JAX", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begin()
    return begin


SECTIONS = [("algorithm", tuple(ALGORITHMS)), ("environment", envs_jax.registered())]


@pytest.mark.parametrize(("section", "names"), SECTIONS)
def test_fields_survive_the_file(section: str, names: tuple[str, ...], process: Callable[[], None]) -> None:
    imported = {name: fields_named(name, section) for name in names}
    process()
    assert set(declared._kept()) == {f"{section} {name}" for name in names}
    assert repr({name: fields_named(name, section) for name in names}) == repr(imported)


@pytest.mark.parametrize("change", ["source", "jax", "python", "damaged"])
def test_the_file_is_not_trusted_after(
    change: str, process: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "jaxrl" / "some.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.setattr(declared, "_folders", lambda: (source.parent,))
    fields_named("sac", "algorithm")
    process()
    assert declared._lookup("algorithm", "sac")
    process()
    if change == "source":
        os.utime(source, (1, 1))
    elif change == "jax":
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")
    elif change == "python":
        monkeypatch.setattr(sys, "version", "2.7")
    else:
        declared._file().write_text("{")
    assert declared._lookup("algorithm", "sac") is None


@pytest.mark.parametrize("folder", ["/dev/null", "~absent"])
def test_a_cache_that_cannot_be_written_is_done_without(
    folder: str, process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder == "~absent":  # no home directory: an unknown user without HOME
        monkeypatch.setattr(declared, "cache_root", lambda: Path("~no such user/x").expanduser())
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    assert "gamma" in fields_named("sac", "algorithm")


def test_classes_of_others_are_always_imported(process: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry, "tiny", "helpers.tiny:Tiny")
    declared._keep("environment", "tiny", {})
    declared._keep("environment", "helpers.tiny:Tiny", {})
    assert not declared._kept()


def test_a_process_with_jax_reads_the_classes() -> None:
    assert declared._lookup("algorithm", "sac") is None


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


def test_garbage_is_collected_again_afterwards() -> None:
    former = gc.get_threshold()
    with collected_rarely():
        assert gc.get_threshold()[0] >= 200_000
    assert gc.get_threshold() == former


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


@pytest.mark.parametrize(("error", "code"), [("ValueError('of the user')", 1), ("SystemExit(3)", 3)])
def test_an_error_while_a_program_compiles_ends_the_process_in_order(error: str, code: int) -> None:
    script = f"""
import jax, jax.numpy as jnp
from jaxrl.runtime.program import Program
jax.config.update("jax_enable_compilation_cache", False)
def slow(x):
    for k in range(1000):
        x = jnp.sin(x) + k
    return x
Program(lambda: (jax.jit(slow), jnp.float32(0)), lambda *_: None).begin()
raise {error}
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and "FATAL" not in done.stderr
    assert code != 1 or done.stderr.endswith("ValueError: of the user\n")
