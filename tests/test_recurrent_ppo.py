"""bench.studies.recurrent_ppo: refusals, and what is read from a worker, without training."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bench.studies import recurrent_ppo
from jaxrl.common.errors import UserError

FIGURES = {
    "process_cpu_seconds": 9.0, "compile_cpu_seconds": 2.0, "run_cpu_seconds": 4.0, "versions": {},
    "returns": [0.0] * 5 + [0.95] + [0.8] * 5 + [1.0] * 5, "episodes": [300] * 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "--python is missing: name a virtual environment"),
        (("--python", "/nowhere"), "--python /nowhere is neither an interpreter nor a virtual environment"),
        (("--python", sys.executable), "--repository is missing: name a checkout of PureJaxRL"),
        (("--python", sys.executable, "--repository", "/nowhere"), "/nowhere has no purejaxrl/ppo_rnn.py"),
    ],
)
def test_what_is_missing_is_refused(
    flags: tuple[str, ...], sentence: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(recurrent_ppo.VARIABLE, raising=False)
    assert recurrent_ppo.main(flags) == 2
    error = capfd.readouterr().err
    assert sentence in error and len(error.strip().splitlines()) == 1


def test_a_row_holds_rates_without_compilation_and_the_last_updates() -> None:
    row = recurrent_ppo.summarize("jaxrl", 3, FIGURES)
    assert row["env_steps"] == 16 * 64 * 32 and row["episodes"] == 4800
    assert row["env_steps_per_cpu_second"] == 16 * 64 * 32 / 4.0
    assert row["final_return"] == pytest.approx(0.9)
    assert row["env_steps_to_near"] == 6 * 64 * 32
    never = recurrent_ppo.summarize("jaxrl", 3, FIGURES | {"returns": [0.0] * 16})
    assert never["env_steps_to_near"] is None
    result = {"rows": [row, never], "command": "c", "machine": {"processor": "p", "cores": 1}, "notes": ["n"]}
    lines = recurrent_ppo.markdown(result).splitlines()
    assert lines[4] == "| jaxrl | 3 | 9.0 | 2.0 | 4.0 | 8,192 | 0.900 | 12,288 |"
    assert lines[5].endswith("| 0.000 | never |") and lines[-1] == "- n"


def test_a_worker_is_read_and_its_failure_is_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import sys\nsum(range(3_000_000))\nprint('noise')\nprint('{\"returns\": [1.0]}')\n")
    figures = recurrent_ppo.run_worker([sys.executable, script])
    assert figures["returns"] == [1.0] and figures["process_cpu_seconds"] > 0
    script.write_text("raise ImportError('no distrax')\n")
    with pytest.raises(UserError, match=r"cannot train \(ImportError: no distrax\)"):
        recurrent_ppo.run_worker([sys.executable, script])
