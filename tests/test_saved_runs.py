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
from helpers.refusals import refuse
from helpers.run_directories import make_checkpoint, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrl
import jaxrl.runtime.run
from jaxrl.cli import doctor, export, runs, train
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.yaml_files import read_mapping
from jaxrl.report.metrics import MetricAggregator, Throughput
from jaxrl.report.writer import METRICS, MetricsError, NullWriter, Writer, describe_lost_rows
from jaxrl.runtime import manifest, memory_plan, run_directory, saved_run
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


# Paths


@pytest.mark.parametrize("name", REFUSED)
def test_paths_that_orbax_takes_for_others_are_refused(name: str, tmp_path: Path) -> None:
    root = tmp_path / name / "runs"
    with pytest.raises(UsageError, match=r"^no run directory can be made under .* choose another with --runs$"):
        run_directory.check_root(root)
    with pytest.raises(CheckpointError, match="no checkpoint can be written under"):
        save_steps(root / "checkpoints", 1)
    assert names(tmp_path) == []


def test_checkpoints_below_any_other_names_are_read_as_they_were_written(tmp_path: Path) -> None:
    root = tmp_path.joinpath(*TAKEN)
    run_directory.check_root(root)
    folder = root / "checkpoints"
    assert save_steps(folder, 1, 2, 3, 4, keep=2, best=1) == []
    assert names(folder) == ["0000000001", "0000000003", "0000000004"]
    with Checkpoints(folder) as checkpoints:
        assert_state(checkpoints.restore(STATE)[1])


def test_a_root_so_long_that_checkpoints_would_not_fit(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["x" * 200] * 18)
    with pytest.raises(RunError, match="File name too long"):
        run_directory.check_root(deep)
    run_directory.check_root(tmp_path.joinpath(*["x" * 200] * 15))


def test_a_run_that_was_moved_to_such_a_folder_is_read_and_keeps_its_checkpoints(run: Path, capsys: Any) -> None:
    moved = Path(shutil.move(run, run.parent / "old [1]"))
    before = names(moved / "checkpoints")
    assert jaxrl.load(moved).step == 2
    sentence = refuse(capsys, "train --total_env_steps 999 --resume", moved, code=1)
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
        assert "no run can be written to" in refuse(capsys, f"export {run} --format run --out", out)
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


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    sentences: list[str] = []
    with Checkpoints(tmp_path, 2, sentences.append) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, STATE, {})
        checkpoints.wait()
        cut(tmp_path / "0000000002" / "arrays" / "manifest.ocdbt")
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


def files_in(folder: Path) -> dict[Path, int]:
    """All files, with their sizes."""
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("harm", [vanish, move, replace])
@pytest.mark.parametrize("written", [True, False])
def test_nothing_is_written_into_another_folder(written: bool, harm: Callable[[Path], None], tmp_path: Path) -> None:
    """Neither before the first file nor behind it."""
    run = tmp_path / "run"
    run.mkdir()
    problem = "run is no longer the folder of this run: it, or a folder above"
    with Checkpoints(run / "checkpoints") as checkpoints, Writer(run) as writer:
        if written:
            problem = "run/metrics.jsonl is no longer the file that this run writes"
            writer.write(1, {"x": 1})
            checkpoints.save(1, STATE, {})
            checkpoints.wait()
        harm(run)
        left = files_in(tmp_path)
        with pytest.raises(CheckpointError, match=r"the run's folder was deleted, moved or replaced\)"):
            checkpoints.save(2, STATE, {})
        for write in (lambda: writer.write(2, {"x": 2}), writer.mark if written else lambda: writer.trim(0)):
            with pytest.raises(MetricsError, match=problem):
                write()
    assert files_in(tmp_path) == left


@pytest.mark.parametrize(
    ("place", "moment", "harm", "sentence"),
    [
        (Session, "begin", vanish, "{run} is no longer the folder of this run: it, or a folder above it, was deleted"),
        (jaxrl.runtime.run, "_compile", replace, "{run} is no longer the folder of this run: it, or a folder above"),
        (Session, "_run_block", move, "metrics.jsonl is no longer the file that this run writes"),
        (Session, "_run_block", replace, "metrics.jsonl is no longer the file that this run writes"),
    ],
)
def test_a_run_whose_folder_vanishes_ends_in_a_sentence(
    place: Any, moment: str, harm: Callable[[Path], None], sentence: str, run: Path, monkeypatch: Any, capsys: Any
) -> None:
    """After the directory is announced, while programs are compiled, and after the first block."""
    shutil.rmtree(run / "checkpoints")
    original, left = getattr(place, moment), []

    def harm_once(*arguments: Any) -> Any:
        result = original(*arguments) if moment == "_run_block" else None
        if not left:
            harm(run)
            left.append(files_in(run.parent))
        return original(*arguments) if result is None else result

    monkeypatch.setattr(place, moment, harm_once)
    assert sentence.format(run=run) in refuse(capsys, "train --resume", run, code=1)
    assert files_in(run.parent) == left[0]


# Runs that cannot go on


def refuse_resume(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence with which a resume ends that changes nothing, and compiles nothing."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxrl.runtime.run, "compile_run", lambda *_: pytest.fail("compiles"))
        sentence = refuse(capsys, "train --resume", run, code=1)
    assert {path: path.read_bytes() for path in before} == before
    return sentence


def test_all_checkpoints_are_damaged(run: Path, capsys: Any) -> None:
    for file in (run / "checkpoints").glob("*/manifest.json"):
        file.write_text("{}")
    newest = run / "checkpoints" / "0000000002"
    sentence = f"no intact checkpoint in {newest.parent} (checkpoint {newest} is damaged: manifest.json cannot be used"
    assert sentence in refuse_resume(run, capsys)


@pytest.mark.parametrize("line", [b"{\xff}", b"{}", b"[1]"])
def test_a_line_of_metrics_is_damaged(line: bytes, run: Path, capsys: Any) -> None:
    path = run / METRICS
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([line, *lines[1:], b""]))
    assert f"line 1 of {path} is damaged: fix or remove that line" in refuse_resume(run, capsys)


def test_a_run_is_in_use(run: Path, capsys: Any) -> None:
    with run_directory.lock(run):
        assert f"is in use by process {os.getpid()}" in refuse_resume(run, capsys)


# Settings


def refuse_everywhere(run: Path, capsys: Any) -> dict[str, str]:
    """The sentence with which each command refuses a run."""
    out = run.parent / "out"
    commands = (
        f"train --resume {run} --total_env_steps 999",
        f"train {TINY} --init_from {run} --runs {out}",
        f"evaluate {run} --episodes 8",
        f"render {run} --out {out}.png",
        f"export {run} --format numpy --out {out}",
        f"export {run} --format run --out {out}",
        f"doctor --resume {run}",
        f"runs {run}",
    )
    sentences = {command: refuse(capsys, command, code=1) for command in commands}
    assert not out.exists() and not out.with_suffix(".png").exists()
    return sentences


def test_every_command_compares_config_yaml_with_the_checkpoint(run: Path, capsys: Any) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("\nlength: 4\n", "\nlength: 2\n"))
    sentence = "length was 4 and is 2 in config.yaml; put the previous value back"
    for command, said in refuse_everywhere(run, capsys).items():
        assert sentence in said, command
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        jaxrl.load(run)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (r"\nseed: 0\n", "\nseed: 1\n", "seed was 0 and is 1 in config.yaml"),
        (r"\ncapacity: 64\n", "\ncapacity: 32\n", "capacity was 64 and is 32 in config.yaml"),
        (r"\nlength: 4\n", "\nlength: three\n", "length must be "),
        (r"\nlength: 4\n", "\nlength: 4: 4\n", "cannot read the configuration"),
        (r"\ngamma: 0\.9\n.*", "\ngamma: 0.", "gamma was 0.9 and is 0.0 in config.yaml"),  # cut off
    ],
)
def test_changes_of_config_yaml_are_named(before: str, after: str, sentence: str, run: Path) -> None:
    config = run / "config.yaml"
    text, changes = re.subn(before, after, config.read_text(), flags=re.DOTALL)
    assert changes == 1
    config.write_text(text)
    with pytest.raises(UserError, match=sentence):
        saved_run.read_run(run)


def test_a_loaded_policy_builds_no_run(finished: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", lambda *_: pytest.fail("plans memory"))
    assert jaxrl.load(finished).step == 2


def test_settings_that_a_resume_may_change_are_not_compared(run: Path) -> None:
    """Nor is one that is left out, which has its default."""
    config = run / "config.yaml"
    text = config.read_text()
    for before, after in (
        ("eval_every: 0", "eval_every: 32"),
        ("total_env_steps: 64", "total_env_steps: 96"),
        ("keep_checkpoints: 3", "keep_checkpoints: 4"),
        ("length: 4\n", ""),
    ):
        assert f"\n{before}" in text
        text = text.replace(f"\n{before}", f"\n{after}")
    config.write_text(text)
    assert jaxrl.load(run).step == 2
    assert runs.main([str(run)]) == 0
    assert train.main(["--resume", str(run)]) == 0


@pytest.mark.parametrize(
    ("folder", "before", "after"),
    [
        ("gamma=0.5/seed_1", "seed: 1", "seed: 0"),
        ("gamma=0.5/seed_1", "gamma: 0.5", "gamma: 0.1"),
        ("gamma=0.5", "length: 4", "length: 2"),
        (".", "length: 4", "length: 2"),
    ],
)
def test_folders_of_trials_are_compared_with_their_run(
    folder: str, before: str, after: str, sweep: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(sweep, tmp_path / "run"))
    config = root / folder / "config.yaml"
    text = config.read_text()
    assert f"\n{before}\n" in text
    trial = root / "gamma=0.5/seed_1" if folder == "." else root / folder
    saved_run.read_run(trial)
    config.write_text(text.replace(f"\n{before}\n", f"\n{after}\n"))
    name, value = before.split(": ")
    with pytest.raises(CheckpointError, match=f"{name} was {value} and is {after.split(': ')[1]} in config.yaml"):
        saved_run.read_run(trial)


def test_small_runs_are_compared_too(run: Path) -> None:
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
    ("before", "after"),
    [
        (".{20}$", ""),
        (".*", ""),
        (".*", "[]"),
        (".*", "[" * 100_000),
        ('"run": "', '"run": "0'),
        ('"environment": 1', '"environment": 0'),
        ('"spaces"', '"spades"'),
        ("float32", "float16"),
    ],
    ids=str,
)
def test_a_damaged_versions_json_is_named(before: str, after: str, run: Path) -> None:
    versions = run / "versions.json"
    text, changes = re.subn(before, after, versions.read_text(), count=1, flags=re.DOTALL)
    assert changes == 1
    versions.write_text(text)
    with pytest.raises(RunError, match=r"versions\.json is damaged: remove it, or put an intact copy back"):
        saved_run.read_run(run)


@pytest.mark.parametrize(
    "entries", [{"run": 7}, {"jax": None}, {"environment": []}, {"spaces": []}, {"spaces": {"agents": 1}}], ids=str
)
def test_entries_of_versions_json_have_their_types(entries: dict[str, Any], tmp_path: Path) -> None:
    """Also where the digest is right."""
    run_directory.write_versions(tmp_path, {"environment": 1} | entries)
    with pytest.raises(RunError, match=f"versions.json is damaged: .*its entry '{next(iter(entries))}' is not"):
        run_directory.read_versions(tmp_path)


def test_every_command_names_a_damaged_versions_json(run: Path, capsys: Any) -> None:
    versions = run / "versions.json"
    versions.write_text("[]")
    for command, said in refuse_everywhere(run, capsys).items():
        assert f"{versions} is damaged: remove it, or put an intact copy back" in said, command
    assert versions.read_text() == "[]"


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
    for command in (f"train --total_env_steps 999 --resume {run}", f"evaluate {run} --episodes 8"):
        assert f"{versions} is not of the run that wrote the checkpoints" in refuse(capsys, command, code=1)
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
    look_at_resume_point(run)  # what nobody forged is accepted
    return run


TRIALS = [f"gamma={gamma}/seed_{seed}" for gamma in (0.5, 0.9) for seed in (0, 1)]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two seeds of two settings, which has evaluated them."""
    runs = tmp_path_factory.mktemp("sweep")
    words = f"{TINY} --num_seeds 2 --sweep gamma=0.5,0.9 --eval_every 32 --eval_episodes 8 --runs {runs}"
    assert train.main(words.split()) == 0
    return runs / "helpers.tiny-TinyQ_helpers.tiny-Corridor" / "0001"


@settings(max_examples=120, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_forged_files_are_read_or_refused_in_one_sentence(victim: Path, data: st.DataObject) -> None:
    """With the right digests; whatever is in them, no other error than ours."""
    forge_and_read(victim, data, ["manifest", "meta", "versions"])


@pytest.mark.slow
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_forged_metadata_of_several_trials(sweep: Path, data: st.DataObject) -> None:
    forge_and_read(sweep, data, ["meta"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("failed", ["x"]),
        ("failed", None),
        ("failed", {TRIALS[1]: "a"}),
        ("failed", {"seed_7": 1}),
        ("failed", dict.fromkeys(TRIALS, 1)),
        ("best_trials", {TRIALS[0]: []}),
        ("best_trials", {TRIALS[0]: [1.0]}),
        ("best_trials", {trial: [1.0] for trial in TRIALS} | {TRIALS[0]: [1.0, 2.0]}),
        ("best_trials", {trial: ["a"] for trial in TRIALS}),
        ("best_trials", {trial: [1.0] for trial in [*TRIALS, "seed_7"]}),
        ("trial_groups", []),
        ("trial_groups", ...),
        ("metrics", [None]),
        ("metrics", None),
    ],
)
def test_forged_entries_of_trials_are_named(sweep: Path, name: str, value: Any) -> None:
    folder = sweep / "checkpoints" / "0000000002"
    meta = manifest.read_meta(folder, read_manifest(folder))
    saved_run.check_meta(meta, 2, sweep, 2, TRIALS)
    with pytest.raises(CheckpointError, match=f"cannot be used: the entry '{name}' of its meta.json is absent or "):
        saved_run.check_meta(forge(meta, (name,), value), 2, sweep, 2, TRIALS)


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


def test_a_key_may_be_there_once_in_each_mapping(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("algo: ppo\nnested: {a: 1, b: 2}\nother: {a: 1}\n")
    assert read_mapping(file) == {"algo": "ppo", "nested": {"a": 1, "b": 2}, "other": {"a": 1}}


def test_runs_in_folders_whose_names_no_terminal_shows_are_listed(tmp_path: Path) -> None:
    """In a process of its own, whose output is strict."""
    rows = [{"iteration": 1, "env_steps": 8, "episodes": 1, "rollout/distance": 2.5}]
    for name in (NOT_UTF_8, "a\x1b[31mb", "c\nd", "[red]e"):
        make_checkpoint(make_run(tmp_path / "runs" / name / "0001", rows), 1, env_steps=8)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8:strict"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = """
import sys
from jaxrl.cli.runs import main
assert main(["runs", "--compare"]) == 0
sys.argv[1:] = ["runs", "--out", "page.html"]
main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for name in ("a?b/0001", "a?[31mb/0001", "c d/0001", "[red]e/0001"):
        assert done.stdout.count(name) >= 2
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
