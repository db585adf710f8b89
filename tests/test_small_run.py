"""Runs with weights only, to share, and those that come with the package."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import shared_programs
from helpers.tiny import PointMass

import jaxrl
import jaxrl.cli.doctor
import jaxrl.cli.export
import jaxrl.cli.train
from jaxrl.common.errors import UserError
from jaxrl.runtime.run_directory import CONFIG, PRETRAINED

SETTINGS: dict[str, Any] = {
    "num_envs": 8, "devices": 1, "total_env_steps": 256, "hidden_size": 8, "depth": 1, "batch_size": 8,
    "buffer_size": 4096, "random_steps": 64, "eval_every": 0,
}  # fmt: skip
NAMES = sorted(path.parent.name for path in PRETRAINED.glob(f"*/{CONFIG}"))


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return jaxrl.train("sac", PointMass, runs=str(root), progress=False, **SETTINGS).directory


@pytest.fixture(scope="module")
def small(run: Path) -> Path:
    out = run.parent / "small"
    assert jaxrl.cli.export.main([str(run), "--format", "run", "--out", str(out)]) == 0
    return out


def test_it_acts_and_begins_runs_as_the_run_itself(run: Path, small: Path, tmp_path: Path) -> None:
    whole, weights = jaxrl.load(run), jaxrl.load(small)
    observation = jnp.ones((3, 1, *whole.env.spec.observation.shape))
    np.testing.assert_array_equal(weights(observation)[0], whole(observation)[0])
    assert weights.step == whole.step and size(small) < size(run) / 2
    with shared_programs():
        results = [
            jaxrl.train("sac", PointMass, init_from=str(source), runs=str(tmp_path / name), progress=False, **SETTINGS)
            for name, source in (("whole", run), ("small", small))
        ]
    np.testing.assert_array_equal(*(result.policy(observation)[0] for result in results))


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


def test_unknown_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="unknown pretrained policy 'coverag': did you mean 'coverage'"):
        jaxrl.load("pretrained:coverag")
    assert {"coverage", "snakes", "reach"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_with_the_package_acts(name: str) -> None:
    policy = jaxrl.load(f"pretrained:{name}")
    spec = policy.env.spec
    assert size(PRETRAINED / name) < 2**22
    assert policy.config is not None and policy.params
    assert spec.score


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coverage", "reach", "snakes"])
def test_what_comes_with_the_package_is_better_than_chance(name: str) -> None:
    policy = jaxrl.load(f"pretrained:{name}")
    evaluation = jaxrl.evaluate(policy, episodes=20, baselines=["random"])
    score = policy.env.spec.score
    learned, random = evaluation[score].mean(), evaluation.baselines["random"][score].mean()
    assert learned < random if policy.env.spec.score_mode == "min" else learned > random
