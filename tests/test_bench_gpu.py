"""`python -m bench.gpu`: nothing measured is lost when it is killed, a unit that hangs or fails harms no other."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.gpu import __main__ as command
from bench.gpu import correct, results, scaling
from bench.gpu.results import PARTS, UNITS, Unit
from bench.harness.collectives import Collective, list_collectives
from bench.parity import coverage as coverage_parity
from bench.parity.comparison import Comparison, Figure
from jaxrl.rl.data_parallel import AXIS, REPLICATED, make_mesh, on_mesh

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[1]


NAMES = ("hangs", "slow", "breaks", "fails", "correct_graphs", "works")
STRANGE = f"""
import os, time
from bench.gpu import results

def hangs(quick, folder): time.sleep(60)
def slow(quick, folder):
    rows = results.read(folder)["slow"].get("rows", [])
    results.note(folder, "slow", rows=[*rows, ["a size", len(rows), ""]])
    time.sleep(0 if rows else 60)
    return {{"rows": results.read(folder)["slow"]["rows"]}}
def breaks(quick, folder): os._exit(7)
def fails(quick, folder): raise RuntimeError(f"a|b, process {{os.getpid()}}")
def correct_graphs(quick, folder):
    results.note(folder, "correct_graphs", process=os.getpid())
    raise RuntimeError("no graphs")
def works(quick, folder):
    return {{"rows": [["a figure", 1234.5, "things"], ["graphs", os.environ.get("JAXRL_GRAPHS"), ""]],
            "flags": os.environ.get("XLA_FLAGS", ""), "error": "a word of its own"}}

results.UNITS = tuple(results.Unit("device", name, 2.0, f"strange_units:{{name}}") for name in {NAMES})
"""


def test_units_that_hang_or_end_their_process(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A unit that takes too long is tried again, after all others, with its notes."""
    # The worker knows these units by a module that Python imports when it starts.
    (tmp_path / "strange_units.py").write_text(STRANGE)
    (tmp_path / "sitecustomize.py").write_text("import strange_units\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    out = tmp_path / "out"
    units = tuple(Unit("device", name, 2.0, f"strange_units:{name}") for name in NAMES)
    for module in (command, results):
        monkeypatch.setattr(module, "UNITS", units)
    assert command.main(["--out", str(out), "--parts", "device"]) == 1
    started = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines() if line.startswith("device: ")]
    assert started == [*NAMES, "hangs", "slow", "hangs"]
    entries = results.read(out)
    assert [entries[name]["error"] for name in ("hangs", "slow", "breaks", "works")] == [
        "cut off after 2 s", None, "its process ended with exit code 7", None
    ]  # fmt: skip
    assert [row[1] for row in entries["slow"]["rows"]] == [0, 1]
    assert "| works | a figure | 1,234 things |" in results.table(out)
    assert entries["works"]["rows"][1] == ["graphs", "off", ""]  # since they failed
    assert "--xla_gpu_enable_command_buffer=" in entries["works"]["flags"].split()
    process = entries["correct_graphs"]["process"]  # a new one behind a unit that failed
    assert entries["fails"]["error"].startswith("RuntimeError: a|b, process ")
    assert entries["fails"]["error"] != f"RuntimeError: a|b, process {process}"
    row = f"| fails | did not end | FAILED: {entries['fails']['error']} (--again fails does it anew) |"
    assert row.replace("a|b", "a\\|b") in results.table(out)
    assert command.main(["--out", str(out), "--parts", "device", "--again", "works", "--minutes", "0.3"]) == 1
    assert set(results.read(out)) == set(NAMES) - {"works"}


def test_a_resume_that_learns_nothing_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bits agree, and would whatever the learner did."""
    rows = correct.resume(True, tmp_path)["rows"]
    assert [row[:2] for row in rows] == [
        ["coma: a resumed run has the same bits", True],
        ["coma: all of the learner has moved", True],
    ]
    monkeypatch.setattr(correct, "ITERATIONS", 2)
    monkeypatch.setattr(correct, "SAVED", 1)
    result = correct.resume(True, tmp_path)
    assert [row[1] for row in result["rows"]] == [True, False] and result["wrong"]
    correct._program.cache_clear()


@pytest.mark.parametrize("text", ["{", "[1]", '{"device_rates": {"quick": true}}', "\udcff"])
def test_a_damaged_file_is_a_sentence(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert command.main(["--out", str(tmp_path), "--quick"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {file} cannot be read, or holds no results")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--parts", "device,environment"], "--parts: there is no part 'environment': did you mean 'environments'?"),
        (["--minutes", "0"], "--minutes must be a number above 0, not '0'"),
        (["--again", "correct_resme"], "--again: there is no unit 'correct_resme': did you mean 'correct_resume'?"),
        (["--parts", "device", "--devices"], "argument --devices: not allowed with argument --parts"),
    ],
)
def test_usage(flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--out", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_a_wrong_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXRL_GOLDEN", str(tmp_path))
    monkeypatch.setattr(coverage_parity, "INT16", coverage_parity.INT16 | {"entropy": 1e-7})
    result = correct.coverage(True, tmp_path)
    wrong = [row[0] for row in result["rows"] if not row[1]]
    assert result["wrong"] and wrong == ["coverage, mission own-m00, int16: entropy"]


def test_comparisons() -> None:
    comparison = Comparison()
    assert not comparison.agrees  # nothing was compared
    comparison.exact("words", [1, 2, 3], [1, 2, 3])
    comparison.close("numbers", [1.0, 2.5], 2.0, 1.0)
    comparison.close("numbers", 300.0, 303.0, 1.0, 3.0)
    comparison.direction("vector", np.array([3.0, 4.5]), np.array([3.0, 4.0]), 0.11)
    comparison.check()
    assert str(comparison.figures["numbers"]) == "3 values, 0 differ, by 1.0e+00 at most, allowed 1.0e+00"
    assert comparison.figures["vector"] == Figure(2, 0, pytest.approx(0.1), 0.11)
    comparison.close("numbers", [math.nan, 3.1], 2.0, 1.0)
    comparison.exact("words", 4, [4, 5])
    assert [row[1] for row in comparison.rows("x")] == [False, False, True]
    assert comparison.figures["numbers"].differ == 2
    with pytest.raises(AssertionError, match="words: 5 values, 1 differ; numbers: 5 values, 2 differ"):
        comparison.check()


# Several devices


def test_collectives_are_counted_with_their_loops() -> None:
    """Three sums of 5 numbers in each of two turns, one of 2 numbers at the end, and a gathering of 4 times 3."""

    def exchange(x: Any) -> Any:
        def turn(_: Any, x: Any) -> Any:
            return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(jax.lax.psum(y, AXIS)), x) + x

        x = jax.lax.fori_loop(0, 2, turn, x)
        return jax.lax.psum(x[:2], AXIS), jax.lax.all_gather(x[:3], AXIS)

    function = on_mesh(exchange, make_mesh(4), (REPLICATED,), REPLICATED)
    text = jax.jit(function).lower(jnp.zeros(5)).compile().as_text()
    assert list_collectives(text) == [
        Collective("all-reduce", 20, 6),
        Collective("all-gather", 48, 1),
        Collective("all-reduce", 8, 1),
    ]


def test_scaling_goes_on_with_the_points_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with less of them than it planned, which is saved after each."""
    unit = next(unit for unit in UNITS if unit.name == "scaling_sac")
    results.begin(tmp_path, unit, True)
    points = scaling.plan_points(8)
    assert points == [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 8)]
    assert scaling.plan_points(5) == points[:5]
    measured: list[tuple[int, int]] = []

    def measure_point(config: Any, quick: bool, devices: int, work: int) -> dict[str, Any]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((devices, work))
        return {"num_envs": 8 * work, "rate": 10.0 * devices}

    monkeypatch.setattr(scaling, "_train", measure_point)
    with pytest.raises(KeyboardInterrupt):
        scaling.sac(True, tmp_path)
    assert [row[0] for row in results.read(tmp_path)[unit.name]["rows"]] == [
        "sac, 1 device, 8 environments",
        "sac, 2 devices, 8 environments",
        "sac, 2 devices, 16 environments",
    ]
    measured.clear()
    with pytest.raises(KeyboardInterrupt):
        scaling.sac(True, tmp_path)
    measured.clear()
    found = scaling.sac(True, tmp_path)
    assert measured == [(8, 8)]
    assert [(point["devices"], point["work"]) for point in found["points"]] == points
    assert found["rows"][-1] == ["sac, 8 devices, 64 environments", 80.0, "env steps/s, 8.00 times one device's"]


@pytest.mark.parametrize("name", ["coma", "ddpg", "sac"])
def test_more_devices_make_as_many_updates_and_exchange_little_but_gradients(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "COUNTS", (1, 8))
    found = getattr(scaling, name)(True, tmp_path)
    one, shared, grown = found["points"]
    assert one["collectives"] == [] and one["updates"] == shared["updates"] == grown["updates"]
    assert (one["num_envs"], shared["num_envs"], grown["num_envs"]) == (8, 8, 64)
    for point in (shared, grown):
        exchanged = sum(each["bytes"] * each["times"] for each in point["collectives"])
        assert point["gradient_bytes"] <= exchanged < point["gradient_bytes"] + 200 * (point["updates"] + 1)
        assert len(point["samples"]) == 5 and point["rate"] > 0
    assert found["machine"]["jax"] == jax.__version__ and found["present"] == 8


# What a machine needs

OPTIONAL = ("tensorboardX", "torch", "pytest", "hypothesis", "metaworld", "gymnasium")


def call(folder: Path, *flags: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "bench.gpu", "--quick", "--out", str(folder), *flags]
    return subprocess.Popen(
        arguments, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


@pytest.mark.slow
def test_a_rehearsal_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed three times, wherever it is, and without any package that is optional."""
    blocked = f"import sys\nfor name in {OPTIONAL}: sys.modules[name] = None\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    out, done = tmp_path / "out", set[str]()
    for seconds in (20, 60):
        process = call(out)
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        finished = {
            name: entry for name, entry in results.read(out).items() if not entry["error"]
        }  # nothing is damaged
        assert done <= set(finished)
        done = set(finished)
    process = call(out, "--minutes", "20")
    table, messages = process.communicate(timeout=1200)
    assert process.returncode == 0, messages
    entries = results.read(out)
    units = [unit for unit in UNITS if unit.part in PARTS]
    assert list(entries) == [unit.name for unit in units] and entries | finished == entries
    for unit in units:
        entry = entries[unit.name]
        assert entry["error"] is None and entry["rows"], unit.name
    assert all(f"| {unit.name} | " in table for unit in units)
