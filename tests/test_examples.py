"""The programs in examples/ run as they are, each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHORT = {"coma_gae.py": ["256"]}  # arguments that make an example short


def run_example(name: str, folder: Path) -> str:
    """Run an example in a folder; return what it prints."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / name), *SHORT.get(name, [])]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    assert re.search(r"\d", run_example(name, tmp_path).splitlines()[-1])  # the score
