"""Expert datasets: what is written is read again, and a file that will not do is refused in one sentence."""

import dataclasses
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.expert_datasets import make_set

from jaxrl.integrations import expert_dataset
from jaxrl.integrations.expert_dataset import ExpertDatasetError


def save(path: Path, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """The same as a file that nobody has checked."""
    arrays = dataclasses.asdict(make_set()) | {"version": 1} | changes
    np.savez(path, **{name: value for name, value in arrays.items() if name not in without})
    return path


def change(name: str, place: Any, value: float) -> dict[str, np.ndarray]:
    array = np.array(getattr(make_set(), name))
    array[place] = value
    return {name: array}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    expert_dataset.write(tmp_path / "set.npz", make_set())
    loaded = expert_dataset.read(tmp_path / "set.npz")
    for name, value in dataclasses.asdict(make_set()).items():
        np.testing.assert_array_equal(getattr(loaded, name), value)
    assert len(loaded) == 40 and loaded.episodes.tolist() == [5, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["set.npz"]  # nothing half-written is left


def test_sets_are_joined_by_the_names_of_their_tasks(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a.npz"), save(tmp_path / "b.npz", task_names=("lift", "push"))
    both = expert_dataset.read_all([str(first), str(second)])
    assert both.task_names == ("push", "pull", "lift") and both.episodes.tolist() == [10, 5, 5]
    assert both.task[len(make_set())] == 2 and both.task[-1] == 0


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a field is missing": ({"without": ("mu", "value")}, "lacks mu, value: see jaxrl/integrations/expert_dataset.py"),
    "another version": ({"version": 2}, "is of version 2, this program reads version 1: create it again"),
    "not a number": (change("log_std", (7, 1), np.nan), "has a log_std that is not finite in row 7"),
    "sizes": ({"next_observation": np.zeros((40, 5), np.float32)}, "observation has 3 numbers, next_observation has 5"),
    "rows": ({"reward": np.zeros(39, np.float32)}, "holds reward as float32[39] for 40 rows of step"),
    "box": (change("action", (3, 0), 1.5), "has values of action outside [-1, 1]"),
    "task": (change("task", slice(36, 40), 2), "names 2 tasks, but has rows of task 2"),
    "no numbers": ({name: np.zeros((40, 0), np.float32) for name in ("action", "mu", "log_std")},
                   "has an empty action"),
    "a wild deviation": (change("log_std", (3, 0), 1e30), "has values of log_std outside ±50"),
    "a gap": (change("step", 6, 3), "breaks an episode at row 6"),
    "a step behind the end": (change("terminated", 5, True), "breaks an episode at row 6"),
    "a successor that is none": (change("observation", (6, 1), 99.0), "has a next_observation in row 5 that is not"),
    "nothing": ({name: x[:0] for name, x in dataclasses.asdict(make_set()).items() if isinstance(x, np.ndarray)},
                "holds no steps: collect some"),
    "few episodes": ({name: x[:36] for name, x in dataclasses.asdict(make_set()).items() if isinstance(x, np.ndarray)},
                     "has too few episodes of the task 'pull' to hold some out: 4; collect 5"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_set_that_will_not_do_is_refused(what: str, tmp_path: Path) -> None:
    changes, sentence = BROKEN[what]
    path = save(tmp_path / "set.npz", **changes)
    with pytest.raises(ExpertDatasetError) as caught:
        expert_dataset.read(path)
    assert sentence in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "array.npy", np.zeros(3))
    for bit in (1, 1 << 6):  # "encrypted", "strongly encrypted": flags in the headers of a zip archive
        content = bytearray(save(tmp_path / "set.npz").read_bytes())
        for header, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            at = content.find(header)
            while at >= 0:
                content[at + offset] |= bit
                at = content.find(header, at + 1)
        (tmp_path / f"flag{bit}.npz").write_bytes(content)
    for name, sentence in (
        ("flag1.npz", "not an .npz archive of plain arrays): name a file that jaxrl.collect wrote, or create it again"),
        ("flag64.npz", "not an .npz archive of plain arrays"),
        ("absent.npz", "cannot be read (No such file or directory)"),
        ("text.npz", "not an .npz archive of plain arrays"),
        ("array.npy", "not an .npz archive of plain arrays"),
    ):
        with pytest.raises(ExpertDatasetError) as caught:
            expert_dataset.read(tmp_path / name)
        assert sentence in str(caught.value)


def test_sets_of_different_arms_do_not_mix(tmp_path: Path) -> None:
    wide = {name: np.zeros((40, 5), np.float32) for name in ("observation", "next_observation")}
    paths = [str(save(tmp_path / "a.npz")), str(save(tmp_path / "b.npz", **wide))]
    with pytest.raises(ExpertDatasetError, match=r"a\.npz have 3 numbers, but 5 in .*b\.npz"):
        expert_dataset.read_all(paths)


def test_what_is_no_set_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ExpertDatasetError, match="not finite in row 2"):
        expert_dataset.write(tmp_path / "set.npz", make_set(**change("value", 2, np.nan)))
    with pytest.raises(ExpertDatasetError, match="cannot be written"):
        expert_dataset.write(tmp_path / "absent" / "set.npz", make_set())
    assert not list(tmp_path.iterdir())


def header(shape: str, kind: str) -> bytes:
    """The head of an array's file."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"


@pytest.mark.parametrize(
    "claim",
    [
        header(f"({10**13},)", "<f4"),
        header(f"({10**26},)", "<f4"),
        header("(-1,)", "<f4"),
        header("(3,)", "|O") + b"\x80" * 24,
        b"",
    ],
)
def test_a_header_that_claims_more_than_there_is(claim: bytes, tmp_path: Path) -> None:
    path = save(tmp_path / "set.npz", without=("reward",))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("reward.npy", claim)
    with pytest.raises(ExpertDatasetError, match=r"cannot be read|holds reward as") as caught:
        expert_dataset.read(path)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_an_archive_that_claims_more_than_it_can_hold(tmp_path: Path) -> None:
    path = save(tmp_path / "set.npz", without=("reward",))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("reward.npy", header(f"({10**9},)", "<f4"))
        archive.infolist()[-1].file_size = 4 * 10**9 + len(header(f"({10**9},)", "<f4"))  # closed with this in its list
    with pytest.raises(ExpertDatasetError, match="cannot be read"):
        expert_dataset.read(path)
