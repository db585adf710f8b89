"""How a command starts: without JAX where it can, and with programs compiled when they are needed."""

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl.common.garbage import collected_rarely
from jaxrl.runtime import declared
from jaxrl.runtime.config import _decoded, _encoded, fields_named
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
    """After the first call, which reads the classes; the file is not trusted when it is damaged or of other sources."""
    argv = "--config ddpg_quick --help"
    first, with_jax = command(argv, tmp_path)
    assert with_jax and "--self_play" in first and first.endswith("\n0")
    assert command(argv, tmp_path) == (first, False)
    sentence, with_jax = command("--config ddpg_quick --gamma 2", tmp_path)
    assert sentence == "error: the command line: --gamma must lie between 0 and 1, not 2\n2" and not with_jax
    (kept,) = (tmp_path / "jaxrl").glob("settings-*.json")
    kept.write_text(kept.read_text().replace('"sources": "', '"sources": "0'))
    assert command(argv, tmp_path) == (first, True)
    assert command(argv, tmp_path) == (first, False)
    kept.write_text("{")
    assert command(argv, tmp_path) == (first, True)


@pytest.mark.parametrize("section", ["algorithm", "environment"])
def test_fields_survive_the_file(section: str) -> None:
    names = ("coma", "ddpg", "sac", "ppo", "student") if section == "algorithm" else ("coverage", "snakes_3v3", "reach")
    for name in names:
        for key, field in fields_named(name, section).items():
            assert _decoded(key, section, _encoded(field)) == field


def test_a_process_with_jax_reads_the_classes() -> None:
    assert declared.lookup("algorithm", "sac") is None


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
