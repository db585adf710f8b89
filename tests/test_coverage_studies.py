"""The study of coverage: small maps before large ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.studies import small_to_large

pytestmark = pytest.mark.slow


def test_the_second_stage_begins_with_the_first_ones_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    class Done:
        returncode = 0

    def run(command: list[str], **_: Any) -> Done:
        commands.append(command)
        folder = Path(command[command.index("--runs") + 1])
        (folder / "coma_coverage" / "0001").mkdir(parents=True)
        return Done()

    monkeypatch.setattr(small_to_large.subprocess, "run", run)
    monkeypatch.setattr(small_to_large, "read_metrics", lambda run: [])
    monkeypatch.setattr(small_to_large, "selection_curve", lambda lines, score: [])
    monkeypatch.setattr(small_to_large.policies, "load_run", lambda run: run)
    monkeypatch.setattr(small_to_large, "rollout", lambda *arguments, **_: [])
    small_to_large.run_seed(7, (640, 64), {"start": "uniform"}, tmp_path, 1)
    first, second = commands
    assert all(command[command.index("--start") + 1] == "uniform" for command in commands)
    assert "--init_from" not in first and "--entropy_anneal" not in first  # a share of each run
    (first_run,) = tmp_path.glob("7/coma_paper_small/*/0001")
    assert second[second.index("--init_from") + 1] == str(first_run)
    assert second[second.index("--config") + 1] == "coma_paper_cpu" and second[second.index("--seed") + 1] == "7"


def test_picture_of_the_curves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The curve of the second stage begins where the first stage's ends; seconds become minutes."""
    curve = [{"seconds": 60.0, "score": 0.5}, {"seconds": 120.0, "score": 0.25}]
    stages = {preset: {"selection": curve} for preset in small_to_large.STAGES}
    scores = {name: {"entropy": {"mean": 0.6}} for name in ("ig", "random")}
    result = {"kind": "studies.small_to_large", "rows": [{"seed": 1, "stages": stages, "policies": scores}]}
    first, second = small_to_large.plot(result).axes[0].lines[:2]
    assert list(first.get_xdata()) == [1, 2] and list(second.get_xdata()) == [3, 4]
    assert list(second.get_ydata()) == [0.5, 0.25] and second.get_label() == "seed 1"
    path = tmp_path / "found.json"
    for kind, code in (("studies.small_to_large", 0), ("compare", 1)):
        path.write_text(json.dumps(result | {"kind": kind, "format": 1}))
        assert small_to_large.main(["--draw", str(path)]) == code
    assert (tmp_path / "found.png").stat().st_size > 1000
    assert "is no result of bench.studies.small_to_large" in capfd.readouterr().err
