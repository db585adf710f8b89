"""The study of the parts of an iteration."""

import json
from pathlib import Path

import pytest

from bench.studies import iteration


def test_acting_is_what_collecting_takes_beside_the_environment() -> None:
    samples = [
        {"environment": 1.0, "collecting": 3.0, "learning": 6.0},
        {"environment": 2.0, "collecting": 4.0, "learning": 9.0},
        {"environment": 9.0, "collecting": 5.0, "learning": 4.0},
    ]
    found = iteration.row(samples)  # medians 2, 4 and 6
    assert found["seconds"] == {"environment": 2.0, "acting": 2.0, "learning": 6.0}
    assert found["total"] == 10.0
    assert found["shares"] == {"environment": 0.2, "acting": 0.2, "learning": 0.6}
    line = iteration.table([found | {"preset": "coma", "code": "here", "about": {"missions": 80}}]).splitlines()[-1]
    assert line == "| `coma` | here | 80 | 10.00 | 2.00 (20%) | 2.00 (20%) | 6.00 (60%) | 125.0 |"


def test_wrong_inputs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert iteration.main(["--beside", str(tmp_path)]) == 2
    assert "is no checkout of the project: name its folder" in capfd.readouterr().err
    out = tmp_path / "found.json"
    assert iteration.main(["--presets", "coma_quik", "--out", str(out)]) == 2
    assert "coma_quick" in capfd.readouterr().err
    assert not out.exists()


@pytest.mark.long
def test_a_preset_is_measured_beside_another_checkout(tmp_path: Path) -> None:
    out, here = tmp_path / "found.json", Path(iteration.__file__).resolve().parents[2]
    argv = ["--presets", "coma_light", "--beside", str(here), "--rounds", "2", "--out", str(out)]
    assert iteration.main(argv) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["code"] for row in rows] == ["beside", "here"]
    for row in rows:
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert sum(row["shares"].values()) == pytest.approx(1)
