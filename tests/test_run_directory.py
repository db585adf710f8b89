"""Run directories: never the same twice, recognised, held by one process."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envs_jax import Box, Discrete, EnvSpec
from jaxrl.runtime import run_directory
from jaxrl.runtime.run_directory import RunError


def make_run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("seed: 1\n")
    return path


def test_numbers_count_up_and_latest_follows(tmp_path: Path) -> None:
    first = run_directory.create(tmp_path, "coma", "coverage")
    second = run_directory.create(tmp_path, "coma", "coverage")
    other = run_directory.create(tmp_path, "sac", "module:Class")
    names = [str(run.relative_to(tmp_path)) for run in (first, second, other)]
    assert names == ["coma_coverage/0001", "coma_coverage/0002", "sac_module-Class/0001"]
    assert (tmp_path / "latest").read_text() == f"{other}\n"


def test_many_at_once_get_different_directories(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(lambda _: run_directory.create(tmp_path, "coma", "coverage"), range(24)))
    assert len(set(runs)) == 24


def test_every_run_has_an_id_of_its_own(tmp_path: Path) -> None:
    one, other = (run_directory.read_run_id(run_directory.create(tmp_path, "coma", "coverage")) for _ in range(2))
    assert one and other and one != other
    assert run_directory.read_run_id(tmp_path) == ""


def test_a_run_of_another_version_of_its_environment(tmp_path: Path) -> None:
    run = run_directory.create(tmp_path, "ddpg", "snakes_3v3", 2)
    run_directory.check_version(run, "snakes_3v3", 2)
    with pytest.raises(RunError, match="trained in version 2 of the environment 'snakes_3v3', this is version 3"):
        run_directory.check_version(run, "snakes_3v3", 3)
    (run / "versions.json").write_text(json.dumps({"jaxrl": "0.1.0"}))
    with pytest.raises(RunError, match=r"versions.json is damaged.*its checksum differs"):
        run_directory.check_version(run, "snakes_3v3", 2)
    (run / "versions.json").unlink()
    run_directory.check_version(run, "snakes_3v3", 2)


def test_a_run_of_an_environment_with_other_observations(tmp_path: Path) -> None:
    before, after = (EnvSpec("mine", 2, Box((n,)), Discrete(3), 5) for n in (4, 6))
    run = run_directory.create(
        tmp_path, "ppo", "mine", 1, {run_directory.SPACES: run_directory.describe_spaces(before)}
    )
    run_directory.check_spaces(run, "mine", before)
    with pytest.raises(RunError, match=r"'mine' has changed .*: observation was float32\[4\] and is float32\[6\]; use"):
        run_directory.check_spaces(run, "mine", after)


def test_a_root_that_is_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for root in (tmp_path / "link", tmp_path / "link" / "below"):
        with pytest.raises(RunError, match=r"link is a link to nowhere, which is not there\); choose another"):
            run_directory.check_root(root)


def test_latest_is_the_newest_run_also_when_its_folder_has_moved(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    make_run(root / "coma_coverage" / "0001")
    run = make_run(root / "sac_reach" / "0001")
    run_directory.write_latest(root, run)
    assert run_directory.open_run(root / "latest") == run
    moved = root.rename(tmp_path / "elsewhere")
    assert run_directory.open_run(moved / "latest") == moved / "sac_reach" / "0001"
    (moved / "latest").write_bytes(b"\xff\x00")
    with pytest.raises(RunError, match="latest is not a run directory"):
        run_directory.open_run(moved / "latest")
    (moved / "latest").unlink()
    with pytest.raises(RunError, match="latest does not exist"):
        run_directory.open_run(moved / "latest")


def test_open_names_near_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("runs/coma_coverage/0003"))
    for path, problem in [
        ("runs/coma_coverage/0004", "does not exist"),
        ("runs/coma_covrage/0003", "does not exist"),
        ("runs/coma_coverage", "is not a run directory (it has no config.yaml)"),
        ("runs", "is not a run directory (it has no config.yaml)"),
    ]:
        with pytest.raises(RunError, match=re.escape(f"{path} {problem}; did you mean {run}?")):
            run_directory.open_run(path)


def test_only_one_holds_a_run(tmp_path: Path) -> None:
    with (
        run_directory.lock(tmp_path),
        pytest.raises(RunError, match=f"in use by process {os.getpid()}; wait"),
        run_directory.lock(tmp_path),
    ):
        pass
    with run_directory.lock(tmp_path):  # and it is free again
        pass
