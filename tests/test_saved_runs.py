"""What lies in a run directory is this run's and undamaged, wherever it lies, or a sentence says what is not.

Issue 54: characters in paths, folders that vanish, changed settings, a damaged versions.json, forged manifests.
"""

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.run_directories import make_checkpoint, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrl
import jaxrl.runtime.run
from jaxrl.cli import doctor, evaluate, export, render, runs, train
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.yaml_files import read_mapping
from jaxrl.report.metrics import MetricAggregator, Throughput
from jaxrl.report.writer import METRICS, MetricsError, NullWriter, Writer, describe_lost_rows
from jaxrl.runtime import manifest, run_directory, saved_run
from jaxrl.runtime.checkpoint import CheckpointError, Checkpoints
from jaxrl.runtime.manifest import read_manifest
from jaxrl.runtime.run_directory import RunError
from jaxrl.runtime.session import Session
from jaxrl.runtime.trials import describe_failed, trials

STATE = {"a": jnp.arange(4.0), "b": {"c": jnp.ones((3, 2))}}
TINY = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --devices 1 --total_env_steps 64"
NOT_UTF_8 = os.fsdecode(b"a\xffb")
REFUSED = ["a[1]", "[!a]", "a[", "a*b", "a?b", "back\\slash", "a\\*", "gs:", "s3:", NOT_UTF_8]
TAKEN = [
    "]", "a b", " a ", "a%20b", "%d", "{a}", "$a$", "a#b", "a:b", "~", "a'b", 'a"b', "a&b;c|d", "<a>", "a,b=c", "-a",
    ".a", "日本", "ü", "a\nb", "a\tb", "0000000001", "checkpoints", "a.orbax-checkpoint-tmp",
]  # fmt: skip


def save_steps(directory: Path, *steps: int, keep: int = 3, best: int | None = None) -> list[str]:
    """Save the state; return what was warned of."""
    sentences: list[str] = []
    with Checkpoints(directory, keep, sentences.append) as checkpoints:
        for step in steps:
            checkpoints.save(step, STATE, {"step": step}, best=step == best)
    return sentences


def assert_state(state: Any) -> None:
    for expected, actual in zip(jax.tree.leaves(STATE), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(actual, expected)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    assert train.main([*TINY.split(), "--runs", str(root), "--checkpoint_every", "1"]) == 0
    return root / "helpers.tiny-TinyQ_helpers.tiny-Corridor" / "0001"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A run of two checkpoints, for one test."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def refuse(command: Callable[..., int], *words: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only sentence of a command that fails."""
    capsys.readouterr()
    assert command(list(map(str, words))) in (1, 2)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: "), errors
    return errors[0]


# Paths


@pytest.mark.parametrize("name", REFUSED)
def test_paths_that_orbax_takes_for_others_are_refused(name: str, tmp_path: Path) -> None:
    root = tmp_path / name / "runs"
    with pytest.raises(UsageError, match=r"^no run directory can be made under .* choose another with --runs$"):
        run_directory.check_root(root)
    with pytest.raises(CheckpointError, match="no checkpoint can be written under"):
        save_steps(root / "checkpoints", 1)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", TAKEN)
def test_checkpoints_below_any_other_name_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    run_directory.check_root(tmp_path / name)
    folder = tmp_path / name / "checkpoints"
    assert save_steps(folder, 1, 2, 3, 4, keep=2, best=1) == []
    assert names(folder) == ["0000000001", "0000000003", "0000000004"]
    with Checkpoints(folder) as checkpoints:
        assert_state(checkpoints.restore(STATE)[1])


def test_a_root_so_long_that_checkpoints_would_not_fit(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["x" * 200] * 18)
    with pytest.raises(RunError, match="File name too long"):
        run_directory.check_root(deep)
    run_directory.check_root(tmp_path.joinpath(*["x" * 200] * 15))


def test_a_run_in_such_a_folder_is_refused_before_anything_is_trained(tmp_path: Path, capsys: Any) -> None:
    root = tmp_path / "project[1]" / "runs"
    sentence = refuse(train.main, *TINY.split(), "--runs", root, capsys=capsys)
    assert train.main([*TINY.split(), "--runs", str(root)]) == 2
    assert "the name of a folder holds '['" in sentence
    assert names(tmp_path) == []


def test_a_run_that_was_moved_to_such_a_folder_is_read_and_keeps_its_checkpoints(run: Path, capsys: Any) -> None:
    moved = Path(shutil.move(run, run.parent / "old [1]"))
    before = names(moved / "checkpoints")
    assert jaxrl.load(moved).step == 2
    sentence = refuse(train.main, "--resume", moved, "--total_env_steps", 999, capsys=capsys)
    assert "cannot be trained further" in sentence and "holds '['" in sentence
    assert names(moved / "checkpoints") == before
    moved = Path(shutil.move(moved, moved.parent / "back\\slash"))
    with pytest.raises(CheckpointError, match=r"cannot be read where the name of a folder holds a backslash"):
        jaxrl.load(moved)
    moved = Path(shutil.move(moved, moved.parent / NOT_UTF_8))
    with pytest.raises(CheckpointError, match=r"cannot be read where the name of a folder is not UTF-8"):
        jaxrl.load(moved)
    assert names(moved / "checkpoints") == before


def test_weights_are_not_exported_to_such_a_folder(run: Path, tmp_path: Path, capsys: Any) -> None:
    for out in (tmp_path / "x[1]", tmp_path / "x\\y"):
        assert "no run can be written to" in refuse(export.main, run, "--format", "run", "--out", out, capsys=capsys)
        assert not out.exists()


def test_arrays_that_orbax_did_not_put_together_replace_no_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    """As when it does not find what it has written, for whatever reason."""
    folder = tmp_path / "a[1]" / "checkpoints"
    monkeypatch.setattr(run_directory, "find_obstacle", lambda path, writing=True: "")
    with pytest.raises(CheckpointError, match="checkpoint 1 could not be written under"):
        save_steps(folder, 1)
    plain = tmp_path / "plain" / "checkpoints"
    save_steps(plain, 1, 2, keep=2, best=1)
    moved = Path(shutil.move(plain.parent, tmp_path / "b[1]")) / "checkpoints"
    with pytest.raises(CheckpointError, match="checkpoint 3 could not be written under"):
        save_steps(moved, 3, keep=1, best=3)
    with Checkpoints(moved) as checkpoints:
        assert checkpoints.steps() == [1, 2] and checkpoints.best_step() == 1
        assert_state(checkpoints.restore(STATE)[1])


# Rotation


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_a_damaged_checkpoint_does_not_count_as_kept(harm: Callable[[Path], None], tmp_path: Path) -> None:
    sentences: list[str] = []
    with Checkpoints(tmp_path, 2, sentences.append) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, STATE, {})
        checkpoints.wait()
        harm(
            max((tmp_path / "0000000002" / "arrays").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
        )
        for step in (3, 4):
            checkpoints.save(step, STATE, {})
            checkpoints.wait()
            assert 1 in checkpoints.steps() or step == 4
        assert checkpoints.steps() == [3, 4]
    assert len(sentences) == 1 and "0000000002 is damaged, so older ones are kept" in sentences[0]


def test_a_new_checkpoint_that_is_incomplete_replaces_none(tmp_path: Path, monkeypatch: Any) -> None:
    """A file that is cut off after its digest was taken is noticed before the older checkpoint is deleted."""
    save_steps(tmp_path, 1)
    write = manifest.write_manifest

    def write_then_cut(folder: Path, arrays: Path, *others: Any) -> None:
        write(folder, arrays, *others)
        cut(arrays / "manifest.ocdbt")

    monkeypatch.setattr(manifest, "write_manifest", write_then_cut)
    with pytest.raises(CheckpointError, match="checkpoint 2 could not be written under"):
        save_steps(tmp_path, 2, keep=1)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        assert_state(checkpoints.restore(STATE)[1])


def test_deleted_checkpoints_are_told_and_the_next_one_is_written(tmp_path: Path) -> None:
    sentences: list[str] = []
    with Checkpoints(tmp_path / "checkpoints", 2, sentences.append) as checkpoints:
        checkpoints.save(1, STATE, {})
        checkpoints.wait()
        shutil.rmtree(tmp_path / "checkpoints")
        checkpoints.save(2, STATE, {})
        assert_state(checkpoints.restore(STATE)[1])
    assert len(sentences) == 1 and "0000000001 is damaged" in sentences[0]


def test_a_folder_without_its_zeros_is_told(tmp_path: Path, run: Path, capsys: Any) -> None:
    save_steps(tmp_path / "checkpoints", 1, 20)
    (tmp_path / "checkpoints" / "0000000020").rename(tmp_path / "checkpoints" / "20")
    sentences: list[str] = []
    with Checkpoints(tmp_path / "checkpoints", warn=sentences.append) as checkpoints:
        assert checkpoints.newest()[0] == 1
        with pytest.raises(CheckpointError, match=r"choose from 1; .*/20 is ignored: .* rename it to 0000000020"):
            checkpoints.restore(STATE, 20)
        (tmp_path / "checkpoints" / "0000000001").rename(tmp_path / "checkpoints" / "00000000001")
        with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*/00000000001 is ignored"):
            checkpoints.newest()
    assert "checkpoints/20 is ignored: if it is a checkpoint, rename it to 0000000020" in sentences[0]
    (run / "checkpoints" / "0000000002").rename(run / "checkpoints" / "2")
    assert train.main(["--resume", str(run)]) == 0
    assert "/2 is ignored" in " ".join(capsys.readouterr().out.split())


# Folders that vanish


def vanish(folder: Path) -> None:
    shutil.rmtree(folder)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def replace(folder: Path) -> None:
    move(folder)
    shutil.copytree(folder.with_name("moved"), folder)


@pytest.mark.parametrize("harm", [vanish, move, replace])
def test_metrics_are_not_written_to_nowhere(harm: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Writer(tmp_path / "run") as writer:
        writer.write(1, {"x": 1})
        harm(tmp_path / "run")
        left = names(tmp_path)
        for write in (lambda: writer.write(2, {"x": 2}), writer.mark):
            with pytest.raises(MetricsError, match=r"run/metrics.jsonl is no longer the file that this run writes"):
                write()
    assert names(tmp_path) == left
    for file in tmp_path.rglob(METRICS):
        assert len(file.read_text().splitlines()) == 1


@pytest.mark.parametrize("harm", [vanish, move, replace])
def test_no_checkpoint_is_written_into_another_folder(harm: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(1, STATE, {})
        checkpoints.wait()
        harm(tmp_path / "run")
        for step in (2, 3):
            with pytest.raises(CheckpointError, match=r"the run's folder was deleted, moved or replaced\)"):
                checkpoints.save(step, STATE, {})
    assert not list(tmp_path.rglob("0000000002*")) and not list(tmp_path.rglob("0000000003*"))


@pytest.mark.parametrize("harm", [vanish, move, replace])
def test_a_run_whose_folder_vanishes_ends_in_a_sentence(
    harm: Callable[[Path], None], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    run_block, harmed = Session._run_block, []

    def run_and_harm(self: Session, state: Any) -> Any:
        state = run_block(self, state)
        if not harmed and self.position.iterations >= 1:
            self.checkpoints.wait()
            harmed.append(self.directory)
            harm(self.directory)
        return state

    monkeypatch.setattr(Session, "_run_block", run_and_harm)
    sentence = refuse(train.main, *TINY.split(), "--runs", tmp_path / "runs", capsys=capsys)
    assert "metrics.jsonl is no longer the file that this run writes" in sentence
    assert harmed[0].exists() == (harm is replace)
    if harm is replace:
        assert not list(harmed[0].glob("checkpoints/*"))


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("harm", [vanish, move, replace])
def test_nothing_is_written_before_the_first_file_if_the_folder_has_gone(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints, Writer(tmp_path / "run") as writer:
        harm(tmp_path / "run")
        left = files_in(tmp_path)
        with pytest.raises(CheckpointError, match=r"the run's folder was deleted, moved or replaced\)"):
            checkpoints.save(1, STATE, {})
        for write in (lambda: writer.write(1, {"x": 1}), lambda: writer.trim(0)):
            with pytest.raises(MetricsError, match=r"run is no longer the folder of this run: it, or a folder above"):
                write()
    assert files_in(tmp_path) == left


@pytest.mark.parametrize("harm", [vanish, move, replace])
@pytest.mark.parametrize("moment", ["begin", "_compile"])
def test_a_run_whose_folder_vanishes_before_it_writes_ends_in_a_sentence(
    moment: str, harm: Callable[[Path], None], run: Path, monkeypatch: Any, capsys: Any
) -> None:
    """On resuming without a checkpoint: after the directory is announced, and while the programs are compiled."""
    shutil.rmtree(run / "checkpoints")
    place = Session if moment == "begin" else jaxrl.runtime.run
    original, left = getattr(place, moment), []

    def harm_first(*arguments: Any) -> Any:
        harm(run)
        left[:] = files_in(run.parent)
        return original(*arguments)

    monkeypatch.setattr(place, moment, harm_first)
    sentence = refuse(train.main, "--resume", run, capsys=capsys)
    assert f"{run} is no longer the folder of this run: it, or a folder above it, was deleted, moved" in sentence
    assert files_in(run.parent) == left


# Settings


def show(run: Path, capsys: Any) -> dict[str, str]:
    """Return the sentence with which each command refuses a run."""
    out = run.parent / "out"
    return {
        "resume": refuse(train.main, "--resume", run, "--total_env_steps", 999, capsys=capsys),
        "init_from": refuse(train.main, *TINY.split(), "--init_from", run, "--runs", out, capsys=capsys),
        "evaluate": refuse(evaluate.main, run, "--episodes", 8, capsys=capsys),
        "render": refuse(render.main, run, "--out", out.with_suffix(".png"), capsys=capsys),
        "export": refuse(export.main, run, "--format", "numpy", "--out", out, capsys=capsys),
        "small": refuse(export.main, run, "--format", "run", "--out", out, capsys=capsys),
        "doctor": refuse(doctor.main, "--resume", run, capsys=capsys),
        "runs": refuse(runs.main, run, capsys=capsys),
    }


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("length: 4", "length: 2", "length was 4 and is 2 in config.yaml; put the previous value back"),
        ("seed: 0", "seed: 1", "seed was 0 and is 1 in config.yaml"),
        ("gamma: 0.9", "gamma: 0.1", "gamma was 0.9 and is 0.1 in config.yaml"),
    ],
)
def test_every_command_compares_config_yaml_with_the_checkpoint(
    before: str, after: str, sentence: str, run: Path, capsys: Any
) -> None:
    config = run / "config.yaml"
    assert f"\n{before}\n" in config.read_text()
    config.write_text(config.read_text().replace(f"\n{before}\n", f"\n{after}\n"))
    for command, said in show(run, capsys).items():
        assert sentence in said, command
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        jaxrl.load(run)
    assert not (run.parent / "out").exists()


def test_settings_that_a_resume_may_change_are_not_compared(run: Path, capsys: Any) -> None:
    config = run / "config.yaml"
    text = (
        config.read_text()
        .replace("eval_every: 0", "eval_every: 32")
        .replace("total_env_steps: 64", "total_env_steps: 96")
    )
    config.write_text(text.replace("keep_checkpoints: 3", "keep_checkpoints: 4"))
    assert jaxrl.load(run).step == 2
    assert runs.main([str(run)]) == 0
    assert train.main(["--resume", str(run)]) == 0


def test_what_makes_config_yaml_unreadable_is_a_sentence(run: Path, capsys: Any) -> None:
    text = (run / "config.yaml").read_text()
    for harm, sentence in {
        text.replace("\nlength: 4\n", "\nlength: three\n"): "length must be ",
        text.replace("\nlength: 4\n", "\nlength: 4: 4\n"): "cannot read the configuration",
        text.replace("\nlength: 4\n", "\n"): "",  # the default, 4
        text[: text.index("gamma: 0.9") + len("gamma: 0.")]: "gamma was 0.9 and is 0.0 in config.yaml",  # cut off
    }.items():
        (run / "config.yaml").write_text(harm)
        if sentence:
            assert sentence in refuse(evaluate.main, run, "--episodes", 8, capsys=capsys)
        else:
            assert jaxrl.load(run).step == 2


def test_folders_of_trials_are_compared_with_their_run(tmp_path: Path, capsys: Any) -> None:
    words = ["--num_seeds", "2", "--sweep", "gamma=0.5,0.9", "--runs", str(tmp_path)]
    if train.main([*TINY.split(), *words]) != 0:
        pytest.fail(capsys.readouterr().err)
    (root,) = tmp_path.glob("*/0001")
    for folder, before, after in (
        ("gamma=0.5/seed_1", "seed: 1", "seed: 0"),
        ("gamma=0.5/seed_1", "gamma: 0.5", "gamma: 0.1"),
        ("gamma=0.5", "length: 4", "length: 2"),
        (".", "length: 4", "length: 2"),
    ):
        config = root / folder / "config.yaml"
        text = config.read_text()
        jaxrl.load(root / "gamma=0.5/seed_1")
        config.write_text(text.replace(f"\n{before}\n", f"\n{after}\n"))
        assert config.read_text() != text
        name, value = before.split(": ")
        sentence = f"{name} was {value} and is {after.split(': ')[1]} in config.yaml"
        trial = root / "gamma=0.5/seed_1" if folder == "." else root / folder
        assert sentence in refuse(evaluate.main, trial, "--episodes", 8, capsys=capsys)
        assert sentence in refuse(runs.main, trial, capsys=capsys)
        config.write_text(text)


def test_small_runs_are_compared_too(run: Path, capsys: Any) -> None:
    small = run.parent / "small"
    assert export.main([str(run), "--format", "run", "--out", str(small)]) == 0
    config = small / "config.yaml"
    config.write_text(config.read_text().replace("\nlength: 4\n", "\nlength: 2\n"))
    with pytest.raises(CheckpointError, match=r"length was 4 and is 2 in config\.yaml"):
        jaxrl.load(small)


def test_a_configuration_above_the_runs_that_is_no_run_is_passed_over(run: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "project", tmp_path / "project" / "runs"):
        folder.mkdir()
        (folder / "config.yaml").write_text("name: my project\n")
    moved = Path(shutil.move(run, tmp_path / "project" / "runs" / "0001"))
    assert jaxrl.load(moved).step == 2
    assert saved_run.locate(moved)[0] == moved


def test_a_checkpoint_that_is_amended_while_it_is_read_is_no_damaged_one(run: Path, monkeypatch: Any) -> None:
    """A reader has the manifest from before, and finds the new meta.json."""
    folder, before = run / "checkpoints" / "0000000002", []
    meta = manifest.read_meta(folder, read_manifest(folder)) | {"seconds": 123.0}

    def read_older(path: Path) -> manifest.Manifest:
        return before.pop() if before and path == folder else read_manifest(path)

    monkeypatch.setattr(manifest, "read_manifest", read_older)
    with Checkpoints(run / "checkpoints", warn=pytest.fail) as checkpoints:
        for read in (
            lambda: manifest.verify(folder).step,
            lambda: checkpoints.newest()[0],
            lambda: (saved_run._read_newest(run) or (0,))[0],
            lambda: checkpoints.restore((), 2, prefix="algo.replicated")[0],
        ):
            older = read_manifest(folder)
            meta["seconds"] += 1
            manifest.amend(folder, json.dumps(meta), best=True)
            before[:] = [older]
            assert read() == 2 and not before


# versions.json


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: text[:20],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"run": "', '"run": "0'),
        lambda text: text.replace('"environment": 1', '"environment": 0'),
        lambda text: text.replace('"environment": 1', '"environment": []'),
        lambda text: text.replace('"spaces"', '"spades"'),
        lambda text: text.replace("float32", "float16"),
        lambda text: json.dumps({"run": 7}),
        lambda text: json.dumps({"spaces": {"agents": 1}}),
        lambda text: json.dumps({"spaces": []}),
    ],
)
def test_a_damaged_versions_json_is_named_by_every_command(harm: Callable[[str], str], run: Path, capsys: Any) -> None:
    versions = run / "versions.json"
    text = versions.read_text()
    assert harm(text) != text
    versions.write_text(harm(text))
    for command, said in show(run, capsys).items():
        assert f"{versions} is damaged: remove it, or put an intact copy back" in said, command
    assert versions.read_text() == harm(text)


def test_without_versions_json_a_warning_says_what_is_not_checked(run: Path, capsys: Any) -> None:
    (run / "versions.json").unlink()
    capsys.readouterr()
    assert jaxrl.load(run).step == 2
    assert f"warning: {run / 'versions.json'} is missing, so nothing checks " in capsys.readouterr().err


def test_an_id_that_fits_no_checkpoint_blames_versions_json(run: Path, capsys: Any) -> None:
    """The file is whole, but another run's."""
    versions = run / "versions.json"
    text = versions.read_text()
    run_directory.write_versions(run, json.loads(text) | {"run": "another"})
    for sentence in (
        refuse(train.main, "--resume", run, "--total_env_steps", 999, capsys=capsys),
        refuse(evaluate.main, run, "--episodes", 8, capsys=capsys),
    ):
        assert f"{versions} is not of the run that wrote the checkpoints" in sentence
    versions.write_text(text)
    assert jaxrl.load(run).step == 2


# Forgeries


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the ways to all parts of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, part in items for deeper in paths_in(part, (*path, key)))]


def forge(value: Any, path: tuple[Any, ...], part: Any) -> Any:
    """Return a copy with another part in a place, or without it if it is `...`."""
    if not path:
        return None if part is ... else part
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    if part is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = part
    return value


def seal(folder: Path, contents: Any) -> None:
    digest = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"sha256": digest, "contents": contents}))


@pytest.fixture(scope="module")
def victim(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Path(shutil.copytree(finished, tmp_path_factory.mktemp("victim") / "run"))
    shutil.rmtree(run / "checkpoints" / "0000000001")
    return run


@pytest.fixture(scope="module")
def victim_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two seeds, which has evaluated them."""
    root = tmp_path_factory.mktemp("two")
    words = ["--num_seeds", "2", "--eval_every", "32", "--eval_episodes", "8", "--log_every", "4"]
    assert train.main([*TINY.split(), *words, "--runs", str(root)]) == 0
    return root / "helpers.tiny-TinyQ_helpers.tiny-Corridor" / "0001"


@settings(max_examples=120, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_forged_files_are_read_or_refused_in_one_sentence(victim: Path, data: st.DataObject) -> None:
    """With the right digests; whatever is in them, no other error than ours."""
    forge_and_read(victim, data, ["manifest", "meta", "versions"])


@pytest.mark.slow
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_forged_metadata_of_several_trials(victim_of_two: Path, data: st.DataObject) -> None:
    forge_and_read(victim_of_two, data, ["meta"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("failed", ["x"]),
        ("failed", None),
        ("failed", {"seed_1": "a"}),
        ("failed", {"seed_7": 1}),
        ("failed", {"seed_0": 1, "seed_1": 2}),
        ("best_trials", {"seed_0": []}),
        ("best_trials", {"seed_0": [1.0]}),
        ("best_trials", {"seed_0": [1.0], "seed_1": [1.0, 2.0]}),
        ("best_trials", {"seed_0": ["a"], "seed_1": ["b"]}),
        ("best_trials", {"seed_0": [1.0], "seed_1": [1.0], "seed_7": [1.0]}),
        ("trial_groups", []),
        ("trial_groups", ...),
        ("metrics", [None]),
        ("metrics", None),
    ],
)
def test_forged_entries_of_trials_are_named(victim_of_two: Path, name: str, value: Any, tmp_path: Path) -> None:
    run = Path(shutil.copytree(victim_of_two, tmp_path / "run"))
    folder = run / "checkpoints" / "0000000002"
    meta = manifest.read_meta(folder, read_manifest(folder))
    manifest.amend(folder, json.dumps(forge(meta, (name,), value)), best=True)
    for read in (lambda: jaxrl.load(run), lambda: look_at_resume_point(run)):
        with pytest.raises(CheckpointError, match=f"cannot be used: the entry '{name}' of its meta.json is absent or "):
            read()


def forge_and_read(victim: Path, data: st.DataObject, files: list[str]) -> None:
    """Forge a part of one of the files, read the run in all ways, and put the files back."""
    folder = victim / "checkpoints" / "0000000002"
    intact = {
        path: path.read_text() for path in (folder / "manifest.json", folder / "meta.json", victim / "versions.json")
    }
    try:
        which = data.draw(st.sampled_from(files))
        part = data.draw(VALUES | st.just(...))
        contents = json.loads(intact[folder / "manifest.json"])["contents"]
        if which == "manifest":
            seal(folder, forge(contents, data.draw(st.sampled_from(paths_in(contents))), part))
        elif which == "meta":
            meta = json.loads(intact[folder / "meta.json"])
            text = json.dumps(forge(meta, data.draw(st.sampled_from(paths_in(meta))), part))
            (folder / "meta.json").write_text(text)
            contents["files"]["meta.json"] = hashlib.sha256(text.encode()).hexdigest()
            contents["sizes"]["meta.json"] = len(text.encode())
            seal(folder, contents)
        else:
            versions = json.loads(intact[victim / "versions.json"])
            del versions["sha256"]
            forged = forge(versions, data.draw(st.sampled_from(paths_in(versions))), part)
            if isinstance(forged, dict):
                run_directory.write_versions(victim, forged)
            else:
                (victim / "versions.json").write_text(json.dumps(forged))
        for read in (
            lambda: jaxrl.load(victim),
            lambda: runs.run_summary.read(victim),
            lambda: doctor.look_at_checkpoints(str(victim)),
            lambda: look_at_resume_point(victim),
        ):
            with contextlib.suppress(UserError):
                read()
    finally:
        for path, text in intact.items():
            path.write_text(text)


def look_at_resume_point(run: Path) -> None:
    """Do what a resume does before it trains, and until a trial fails."""
    directory, config = saved_run.read_training_run(run)
    folders = [trial.folder for trial in trials(config)]
    with Checkpoints(directory / "checkpoints") as checkpoints:
        step, meta = checkpoints.newest()
    saved_run.check_meta(meta, step, directory, 1, folders)
    saved_run.check_resume_settings(config.plain(), meta, step, 1, directory)
    writers = [NullWriter(directory / folder) for folder in ([".", *folders] if len(folders) > 1 else ["."])]
    groups = [meta["group"], *meta["trial_groups"]]
    lines = [MetricAggregator(writer, 1, 2, group) for writer, group in zip(writers, groups, strict=True)]
    for writer, mark in zip(writers, meta["metrics"], strict=True):
        describe_lost_rows(writer._directory, mark, step)
    for line in lines:
        line.flush({"iteration": step}, Throughput(0, 0))
    describe_failed(failed := meta["failed"])
    if best_trials := meta["best_trials"]:
        for values in zip(*(best_trials[folder] for folder in folders if folder not in failed), strict=True):
            np.mean(values)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("leaves", [["x", "float32", [-1]]], "its entry 'leaves'"),
        ("leaves", {"x": 1}, "its entry 'leaves'"),
        ("leaves", None, "its entry 'leaves'"),
        ("files", ["meta.json"], "its entry 'files'"),
        ("files", {"meta.json": None}, "its entry 'files'"),
        ("files", {"../../versions.json": "0"}, "its entry 'files'"),
        ("files", {}, "it does not list meta.json"),
        ("step", 10**30, "its entry 'step'"),
        ("step", True, "its entry 'step'"),
        ("best", "yes", "its entry 'best'"),
        ("run", 7, "its entry 'run'"),
        ("sizes", [], "its entry 'sizes'"),
    ],
)
def test_forged_manifests_are_named(name: str, value: Any, sentence: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    contents = json.loads((tmp_path / "0000000001" / "manifest.json").read_text())["contents"]
    seal(tmp_path / "0000000001", contents | {name: value})
    with pytest.raises(ValueError, match=sentence):
        read_manifest(tmp_path / "0000000001")
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=r"manifest\.json cannot be used"):
        checkpoints.restore(STATE)


# Small things


def test_a_key_that_is_there_twice_is_named_with_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    for text, sentence in {
        "algo: ppo\ngamma: 0.9\nseed: 1\n'gamma': 0.8\n": "the key 'gamma' is there twice, in lines 2 and 4",
        "algo: ppo\nnested:\n  a: 1\n  b: 2\n  a: 3\n": "the key 'a' is there twice, in lines 3 and 5",
    }.items():
        file.write_text(text)
        with pytest.raises(UsageError, match=sentence):
            read_mapping(file)
    file.write_text("algo: ppo\nnested: {a: 1, b: 2}\nother: {a: 1}\n")
    assert read_mapping(file) == {"algo": "ppo", "nested": {"a": 1, "b": 2}, "other": {"a": 1}}


def test_runs_in_folders_whose_names_no_terminal_shows_are_listed(tmp_path: Path) -> None:
    """In a process of its own, whose output is strict."""
    rows = [{"iteration": 1, "env_steps": 8, "episodes": 1, "rollout/distance": 2.5}]
    for name in (NOT_UTF_8, "a\x1b[31mb", "c\nd", "[red]e"):
        make_checkpoint(make_run(tmp_path / "runs" / name / "0001", rows), 1, env_steps=8)
    program = "import sys; from jaxrl.cli.runs import main; main()"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8:strict"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    for words in (["--compare"], ["--out", "page.html"]):
        done = subprocess.run(
            [sys.executable, "-c", program, "runs", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == "" and "\x1b" not in done.stdout
        assert all(name in done.stdout for name in ("a?b/0001", "a?[31mb/0001", "c d/0001", "[red]e/0001"))
    assert "a?b/0001" in (tmp_path / "page.html").read_text(encoding="utf-8")


PROGRAMS = """
import warnings
import jax
from jaxrl.cli.process import speed_up_start
speed_up_start()
for factor in range(2, 5):
    jax.jit(lambda x: factor * x + 1)(1.0)
warnings.warn("another warning")
"""


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"])
def test_a_cache_that_cannot_be_written_is_told_once(variable: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path), variable: str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-c", PROGRAMS], env=environment, capture_output=True, text=True)
    first, *others = done.stderr.splitlines()
    assert first.startswith(f"warning: compiled programs cannot be kept in {tmp_path / 'file'}"), done.stderr
    assert "so each start compiles them again: make it writable, or set JAX_COMPILATION_CACHE_DIR to" in first
    assert "UserWarning: another warning" in others[0], done.stderr
    assert len(others) == 1 or others[1:] == ['  warnings.warn("another warning")'], done.stderr  # as Python 3.13 shows
