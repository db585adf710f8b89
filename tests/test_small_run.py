"""Runs with weights only, to share, and those that come with the package."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.runs import shared_programs
from helpers.tiny import Corridor, TinyQ

import jaxrl
import jaxrl.cli.doctor
import jaxrl.cli.export
import jaxrl.cli.train
from jaxrl.common.errors import UserError
from jaxrl.runtime.run_directory import CONFIG, PRETRAINED

SETTINGS: dict[str, Any] = {"num_envs": 8, "devices": 1, "total_env_steps": 256, "eval_every": 0, "capacity": 4096}
NAMES = sorted(path.parent.name for path in PRETRAINED.glob(f"*/{CONFIG}"))


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its export beside it. They leave the root logger, which a program configures itself, alone."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])
        directory = jaxrl.train(TinyQ, Corridor, runs=str(root), progress=False, **SETTINGS).directory
        jaxrl.export(directory, "run", directory.parent / "small")
        assert logging.root.handlers == []
    return directory


@pytest.fixture
def small(run: Path) -> Path:
    return run.parent / "small"


def test_it_acts_and_begins_runs_as_the_run_itself(run: Path, small: Path, tmp_path: Path) -> None:
    whole, weights = jaxrl.load(run), jaxrl.load(small)
    assert np.any(whole.params)
    np.testing.assert_array_equal(weights.params, whole.params)
    assert weights.step == whole.step and size(small) < size(run) / 2
    with shared_programs():
        results = [
            jaxrl.train(TinyQ, Corridor, init_from=str(source), runs=str(tmp_path / name), progress=False, **SETTINGS)
            for name, source in (("whole", run), ("small", small))
        ]
    np.testing.assert_array_equal(*(result.policy.params for result in results))


def test_what_it_cannot_do_is_a_sentence(run: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jaxrl.cli.train.main(["--resume", str(small)]) == 2
    assert "holds only weights, which cannot be resumed: start a run with --init_from" in capsys.readouterr().err
    assert jaxrl.cli.train.main(["--resume", "pretrained:reach"]) == 2
    assert "reach holds only weights, which cannot be resumed: start a run with --init_from" in capsys.readouterr().err
    assert not (PRETRAINED / "reach" / ".lock").exists()
    finding = jaxrl.cli.doctor.look_at_checkpoints(str(small))[0]
    assert finding.state == "bad" and "holds only weights: start a run with --init_from" in finding.value
    assert jaxrl.cli.export.main([str(run), "--format", "run", "--out", str(small), "--greedy"]) == 2
    assert "--greedy has no effect on --format run" in capsys.readouterr().err
    assert jaxrl.cli.export.main([str(run), "--format", "run", "--out", str(small)]) == 2
    assert "holds a run already: choose another folder" in capsys.readouterr().err
    other = small.parent / "mixed" / "checkpoints" / "0000000001" / "commit_success.txt"  # of another program's run
    other.parent.mkdir(parents=True)
    other.write_text("")
    assert jaxrl.cli.export.main([str(run), "--format", "run", "--out", str(small.parent / "mixed")]) == 2
    assert "holds files already, and a run needs a folder of its own" in capsys.readouterr().err
    assert other.exists()
    with pytest.raises(UserError, match="needs the directory of a run"):
        jaxrl.export(jaxrl.load(run), "run", small)


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_with_the_package_is_small_and_loads(name: str) -> None:
    policy = jaxrl.load(f"pretrained:{name}")
    assert size(PRETRAINED / name) < 2**22
    assert policy.config is not None and policy.params and policy.env.spec.score
    with pytest.raises(UserError, match=f"unknown pretrained policy '{name[:-1]}': did you mean '{name}'"):
        jaxrl.load(f"pretrained:{name[:-1]}")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_comes_with_the_package_is_better_than_chance(name: str) -> None:
    policy = jaxrl.load(f"pretrained:{name}")
    evaluation = jaxrl.evaluate(policy, episodes=20, baselines=["random"])
    score = policy.env.spec.score
    learned, random = evaluation[score].mean(), evaluation.baselines["random"][score].mean()
    assert learned < random if policy.env.spec.score_mode == "min" else learned > random
