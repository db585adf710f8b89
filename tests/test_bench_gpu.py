"""`python -m bench.gpu`: nothing measured is lost when it is killed, a unit that hangs or fails harms no other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as command
from bench.gpu import results
from bench.gpu.units import PARTS, UNITS, Unit

ROOT = Path(__file__).parents[1]


def call(folder: Path, *flags: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "bench.gpu", "--quick", "--out", str(folder), *flags]
    return subprocess.Popen(
        arguments, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def test_a_killed_rehearsal_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    first, second = (unit for unit in UNITS if unit.part == "device")
    process = call(tmp_path, "--parts", "device")
    while not results.path(tmp_path, first).exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    results.path(tmp_path, second).unlink(missing_ok=True)
    kept = results.path(tmp_path, first).read_bytes()
    process = call(tmp_path, "--parts", "device")
    table, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages
    assert results.path(tmp_path, first).read_bytes() == kept
    assert f"device: {second.name}" in messages and first.name not in messages
    assert table == (tmp_path / "summary.md").read_text()
    assert "| device | matrix product, float32 | " in table and "launched one by one" in table


def test_the_worker_ends_with_whoever_started_it(tmp_path: Path) -> None:
    flags = [str(tmp_path), "--quick", "environments_coverage"]
    with subprocess.Popen(
        [sys.executable, "-m", "bench.gpu.worker", *flags], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None and worker.stdin is not None
        assert worker.stdout.readline() == b"begins environments_coverage\n"
        worker.stdin.close()
        assert worker.wait(timeout=30) == 1
    assert not list(tmp_path.iterdir())


HANGS, BREAKS, WORKS = (Unit("device", name, 2.0, f"strange_units:{name}") for name in ("hangs", "breaks", "works"))
STRANGE = """
import os, sys, time
from bench.gpu import units

def hangs(quick, folder): time.sleep(60)
def breaks(quick, folder): os._exit(7)
def works(quick, folder): return {"rows": [["a figure", 1234.5, "things"]]}

units.UNITS = tuple(units.Unit("device", name, 2.0, f"strange_units:{name}") for name in ("hangs", "breaks", "works"))
"""


def test_units_that_hang_or_end_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is told of other units by a module that Python imports when it starts."""
    (tmp_path / "strange_units.py").write_text(STRANGE)
    (tmp_path / "sitecustomize.py").write_text("import strange_units\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    units = (HANGS, BREAKS, WORKS)
    for module in (command, results):
        monkeypatch.setattr(module, "UNITS", units)
    out = tmp_path / "out"
    assert command.main(["--out", str(out), "--parts", "device"]) == 1
    found: dict[str, Any] = {unit.name: json.loads(results.path(out, unit).read_text()) for unit in units}
    assert [found[name]["error"] for name in ("hangs", "breaks", "works")] == [
        "took longer than 2 s", "its process ended with exit code 7", None
    ]  # fmt: skip
    assert "| device | a figure | 1,234 things |" in results.table(out)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--parts", "job,environment"], "--parts: there is no part 'environment': did you mean 'environments'?"),
        (["--minutes", "0"], "--minutes must be a number above 0, not '0'"),
    ],
)
def test_usage(flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--out", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_a_rehearsal_and_measurements_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.write(tmp_path, UNITS[0], quick=True, result={"rows": []})
    assert command.main(["--out", str(tmp_path), "--parts", "device"]) == 1
    assert "holds a rehearsal (--quick): choose another folder" in capsys.readouterr().err


@pytest.mark.long
def test_a_rehearsal_of_everything(tmp_path: Path) -> None:
    for seconds in (20, 40, 60):
        process = call(tmp_path)
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    process = call(tmp_path, "--minutes", "20")
    table, messages = process.communicate(timeout=1200)
    assert process.returncode == 0, messages
    for unit in UNITS:
        entry = json.loads(results.path(tmp_path, unit).read_text())
        assert entry["error"] is None and entry["rows"], unit.name
    assert all(f"| {part} | " in table for part in PARTS)
