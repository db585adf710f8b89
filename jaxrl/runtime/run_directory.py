"""Run directories: `runs/<algo>_<env>/<NNNN>`, new for every run, never overwritten, used by one process at a time.

A run directory holds config.yaml (which makes it one), versions.json, metrics.jsonl, events/, checkpoints/ and
any images; this module makes, finds and locks directories, and reads and checks versions.json. `runs/latest` is a text
file with the path of the newest run.
"""

import contextlib
import difflib
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.extend.backend
import numpy as np

from envs_jax.base import Box, Discrete, EnvSpec
from envs_jax.settings import closest, short_repr
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import expand_home, is_file, write_atomically
from jaxrl.common.version import __version__

CONFIG = "config.yaml"
VERSIONS = "versions.json"
CHECKPOINTS = "checkpoints"
PRETRAINED = Path(__file__).parents[1] / "pretrained"  # small runs that come with the package, by name
_LATEST = "latest"
_LOCK = ".lock"
_PRETRAINED = "pretrained:"  # begins their names
_RUN_ID = "run"  # entry of versions.json: tells a run from every other one
_ENV = "environment"  # entry of versions.json: the version of its rules and observations
SPACES = "spaces"  # entry of versions.json: shapes of observations and actions
_DIGEST = "sha256"  # entry of versions.json: the digest of the others, see `_digest`
_LONGEST_NAME = 255  # bytes of a name in a path, on the file systems in use
_LONGEST_ROOT = 4096 - 512  # bytes of a path below which a checkpoint's files still have paths that Linux takes
_GLOB = "*?["  # orbax finds the arrays that it has written by a pattern, and does not escape the path in it
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class RunError(UserError):
    """A run directory cannot be made, is not one, or is in use."""


class NoRunError(RunError):
    """A path that was named is no run."""

    exit_code = 2


def create(
    root: Path | str, algo: str, env: str, env_version: int = 1, facts: Mapping[str, Any] | None = None, name: str = ""
) -> Path:
    """Make the next directory `root/<algo>_<env>/<NNNN>`, write its versions.json and point `root/latest` to it.

    versions.json gets an id of the run, the version of the environment's rules and `facts`, too. With a `name` the
    directory is `root/<algo>_<env>/<name>`, which may be there already, without a run.

    Raises RunError: `root` is not writable, or its disk is full.
    """
    group = _group(root, algo, env)
    entries = {**versions(), _RUN_ID: uuid.uuid4().hex, _ENV: env_version, **(facts or {})}
    try:
        group.mkdir(parents=True, exist_ok=True)
        run = group / name if name else _next(group)
        run.mkdir(exist_ok=True)
        write_versions(run, entries)
        write_latest(root, run)
    except OSError as error:
        raise RunError(
            f"no run directory can be made under {root} ({error.strerror}); make it writable or choose another root"
        ) from error
    return run


def named_directory(root: Path | str, algo: str, env: str, name: str) -> Path:
    """Return the directory for a run of this name, whether or not it exists. Raises UsageError: impossible name."""
    if not re.fullmatch(r"[A-Za-z_][\w.-]{0,99}", name):
        raise UsageError(f"a run cannot be named {short_repr(name)}: begin with a letter, then letters, digits, _ . -")
    return _group(root, algo, env) / name


def _group(root: Path | str, algo: str, env: str) -> Path:
    return Path(root).absolute() / re.sub(r"[^\w.-]+", "-", f"{algo}_{env}")


def check_root(root: Path | str) -> None:
    """Check that `create` could work before anything expensive is computed; leaves nothing behind.

    Raises:
        UsageError: `root` is empty, or its name is one below which no checkpoint can be written.
        RunError: `root` is not a directory, or not writable.
    """
    if not str(root):
        raise UsageError("--runs is empty: name a folder, such as runs")
    path = Path(root).absolute()
    problem = ""
    if obstacle := find_obstacle(path):
        raise UsageError(
            f"no run directory can be made under {root} (checkpoints cannot be written where {obstacle}); choose "
            "another with --runs"
        )
    try:
        dangling = [folder for folder in (path, *path.parents) if folder.is_symlink() and not folder.exists()]
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        if max(len(os.fsencode(part)) for part in path.parts) > _LONGEST_NAME or len(str(path)) > _LONGEST_ROOT:
            problem = "File name too long"
        elif dangling:
            problem = f"{dangling[0]} is a link to {os.readlink(dangling[0])}, which is not there"
        elif not existing.is_dir():
            problem = f"{existing} is not a directory"
        else:
            try:  # permissions do not always show it
                os.rmdir(tempfile.mkdtemp(dir=existing))
            except OSError as error:
                problem = f"no folder can be made in {existing}: {error.strerror}"
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    if problem:
        raise RunError(f"no run directory can be made under {root} ({problem}); choose another with --runs")


def find_obstacle(path: Path, writing: bool = True) -> str:
    """Return half a sentence about what in a path keeps orbax from writing, or reading, checkpoints below; or ""."""
    path = path.absolute()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return "the name of a folder is not UTF-8"
    if "\\" in str(path):  # which TensorStore takes for a slash
        return "the name of a folder holds a backslash"
    if any(part.endswith(":") for part in path.parts):  # gs:/ would be Google's storage
        return "the name of a folder ends in ':'"
    found = next((character for character in _GLOB if character in str(path)), "") if writing else ""
    return f"the name of a folder holds '{found}'" if found else ""


def require_writable_path(run: Path) -> None:
    """Raise RunError if the checkpoints of a run cannot be written where it lies."""
    if obstacle := find_obstacle(run):
        raise RunError(
            f"{run} cannot be trained further, because checkpoints cannot be written where {obstacle}: rename that "
            "folder, or move the run to another"
        )


def write_config(run: Path, text: str) -> None:
    """Write config.yaml, which makes a directory a run. Raises RunError: it cannot be written."""
    try:
        write_atomically(run / CONFIG, text)
    except OSError as error:
        raise RunError(
            f"{run / CONFIG} cannot be written ({error.strerror}); make it writable or free disk space"
        ) from error


def _next(group: Path) -> Path:
    """Make the directory with the next number; mkdir is atomic between processes."""
    first = 1 + max((int(path.name) for path in group.iterdir() if path.name.isdecimal()), default=0)
    for number in itertools.count(first):
        with contextlib.suppress(FileExistsError):
            (group / f"{number:04d}").mkdir()
            break
    return group / f"{number:04d}"


def write_latest(root: Path | str, run: Path) -> None:
    """Write the path of `run` into the text file `root/latest`. Raises OSError: it cannot be written."""
    write_atomically(Path(root) / _LATEST, f"{run.absolute()}\n")


def versions() -> dict[str, str]:
    """Return the versions that results depend on besides configuration and seed; initialises JAX's devices."""
    result = {"python": platform.python_version(), "jaxrl": __version__}
    result |= {package: importlib.metadata.version(package) for package in _PACKAGES}
    devices = jax.devices()
    result["platform"] = f"{platform.system()} {platform.machine()}"
    result["backend"] = " ".join(f"{devices[0].platform} {jax.extend.backend.get_backend().platform_version}".split())
    result["devices"] = f"{len(devices)} x {devices[0].device_kind}"
    return result


def other_versions(run: Path) -> list[str]:
    """Return sentences about versions that have changed since the run began: its numbers may differ slightly."""
    previous = read_versions(run)
    current = versions()
    return [
        f"the run began with {name} {previous[name]}, this is {current[name]}: the last bits of its numbers may differ"
        for name in ("jaxrl", *_PACKAGES, "backend")
        if name in previous and previous[name] != current[name]
    ]


def check_version(run: Path, env: str, version: int) -> None:
    """Raise RunError if the rules of a run's environment have changed since it began."""
    stored = read_versions(run)
    previous = stored.get(_ENV)
    if stored and previous != version:
        raise RunError(
            f"{run} was trained in version {previous} of the environment '{env}', this is version {version}, where "
            "observations or rules differ: use the jaxrl that trained it, or train again"
        )


def describe_spaces(spec: EnvSpec) -> dict[str, str]:
    """Return {"agents", "observation", "action", "global_state": shapes and dtypes, such as "float32[4]"}."""

    def describe_one(space: Any) -> str:
        if isinstance(space, Discrete):
            return f"Discrete({space.n})"
        return f"{np.dtype(space.dtype).name}{list(space.shape)}"

    def describe_all(tree: Any) -> str:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Box))
        return ", ".join(f"{jax.tree_util.keystr(path)} {describe_one(box)}".strip() for path, box in leaves)

    return {
        "agents": str(spec.num_agents),
        "observation": describe_all(spec.observation),
        "action": describe_one(spec.action),
        "global_state": describe_all(spec.global_state),
    }


def check_spaces(run: Path, env: str, spec: EnvSpec) -> None:
    """Raise RunError if observations or actions of a run's environment have changed since it began."""
    spaces = describe_spaces(spec)
    stored = {**spaces, **read_versions(run).get(SPACES, {})}
    if changes := [f"{name} was {stored[name]} and is {now}" for name, now in spaces.items() if stored[name] != now]:
        raise RunError(
            f"the environment '{env}' has changed since {run} was trained: {', '.join(changes)}; use its previous "
            "code, or train again"
        )


def write_versions(run: Path, entries: Mapping[str, Any]) -> None:
    """Write a run's versions.json, with a digest of its entries. Raises OSError."""
    entries = {name: value for name, value in entries.items() if name != _DIGEST}
    write_atomically(run / VERSIONS, json.dumps({**entries, _DIGEST: _digest(entries)}, indent=1) + "\n")


def _digest(entries: Mapping[str, Any]) -> str:
    """Return the digest of all entries but versions, other ones of which are only told."""
    told = ("python", "jaxrl", *_PACKAGES, "platform", "backend", "devices")
    checked = {name: value for name, value in entries.items() if name not in told}
    return hashlib.sha256(json.dumps(checked).encode()).hexdigest()


def read_versions(run: Path) -> dict[str, Any]:
    """Return a run's versions.json; {} if there is none. Raises RunError: it is damaged, or cannot be read."""
    try:
        entries = json.loads((run / VERSIONS).read_text(encoding="utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("it is not a JSON object")
        if entries.pop(_DIGEST, None) != _digest(entries):
            raise ValueError("its checksum differs")
        _check_types(entries)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"{run / VERSIONS} is damaged: remove it, or put an intact copy back ({reason}); without it versions, "
            "spaces and the run of the checkpoints are not checked, and the run is scored by its return"
        ) from None
    return entries


def _check_types(entries: Mapping[str, Any]) -> None:
    """Raise ValueError if entries of versions.json that are read here have other types than they are written with."""
    for name in (_RUN_ID, "jaxrl", *_PACKAGES, "backend"):
        if not isinstance(entries.get(name, ""), str):
            raise ValueError(f"its entry '{name}' is not text")
    if not isinstance(entries.get(_ENV), int):
        raise ValueError(f"its entry '{_ENV}' is not a number")
    spaces = entries.get(SPACES, {})
    if not isinstance(spaces, dict) or not all(isinstance(text, str) for text in spaces.values()):
        raise ValueError(f"its entry '{SPACES}' is not a mapping of texts")


def read_run_id(run: Path) -> str:
    """Return the id that a run got at its start, "" where there is no versions.json."""
    return str(read_versions(run).get(_RUN_ID, ""))


def follow_latest(path: Path | str) -> Path:
    """Return the run that a file like `runs/latest` names, even if moved with its root; any other path unchanged."""
    file = Path(path)
    if file.name != _LATEST or not is_file(file):
        return file
    try:
        run = Path(file.read_text(encoding="utf-8").strip())
        return run if run.exists() else file.parent / run.parent.name / run.name
    except (OSError, ValueError):  # unreadable, or no path: `open_run` says that it is no run
        return file


def checkpoint_folder(run: Path | str, number: int) -> Path:
    """Return the folder of a checkpoint of a run or of a trial; it can be named wherever a run can."""
    return follow_latest(run) / CHECKPOINTS / f"{number:010d}"


def split_checkpoint(path: Path | str) -> tuple[Path, int | None]:
    """Return the run and the number of RUN/checkpoints/NUMBER; of any other path, the path and None.

    Raises NoRunError: a name such as pretrained:coverage that is unknown.
    """
    if str(path).startswith(_PRETRAINED):
        return _find_pretrained(str(path).removeprefix(_PRETRAINED)), None
    path = Path(expand_home(path))
    if path.parent.name == CHECKPOINTS and path.name.isdecimal():
        return path.parent.parent, int(path.name)
    return path, None


def _find_pretrained(name: str) -> Path:
    names = sorted(folder.parent.name for folder in PRETRAINED.glob(f"*/{CONFIG}"))
    if name not in names:
        raise NoRunError(f"unknown pretrained policy {short_repr(name)}: {closest(name, names)}")
    return PRETRAINED / name


def choose_checkpoint(run: str | Path, number: int | None = None) -> tuple[Path, int | None]:
    """Return a run and the number of the checkpoint to use, None for its best or newest.

    The run may be named by the folder of one of its checkpoints. Raises UsageError if that is another one.
    """
    run, folder_number = split_checkpoint(run)
    if None not in (folder_number, number) and folder_number != number:
        raise UsageError(f"{run} is asked for the checkpoints {folder_number} and {number}: name one of them")
    return run, folder_number if number is None else number


def open_run(path: Path | str) -> Path:
    """Return the run directory at `path`; the newest run for `runs/latest`, the run of a checkpoint for its folder.

    Raises NoRunError: there is none; the sentence suggests similar runs.
    """
    run = follow_latest(split_checkpoint(path)[0])
    if is_file(run / CONFIG):
        return run
    try:
        problem = "is not a run directory (it has no config.yaml)" if run.exists() else "does not exist"
        candidates = _find_similar_runs(run)
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        candidates = []
    advice = f"did you mean {' or '.join(candidates)}?" if candidates else "no run was found near it: name one"
    raise NoRunError(f"{path} {problem}; {advice}")


def _find_similar_runs(path: Path) -> list[str]:
    """Return up to three runs: the newest below `path`, or else siblings or runs under runs/ with a similar name."""
    if path.name == CHECKPOINTS and is_file(path.parent / CONFIG):
        return [str(path.parent)]
    below = sorted([*path.glob(f"*/{CONFIG}"), *path.glob(f"*/*/{CONFIG}")], key=lambda file: -file.stat().st_mtime)
    if below:
        return [str(file.parent) for file in below[:3]]
    others = {*path.parent.glob(f"*/{CONFIG}"), *Path("runs").glob(f"*/*/{CONFIG}")}
    return difflib.get_close_matches(str(path), sorted(str(file.parent) for file in others), n=3, cutoff=0.4)


@contextlib.contextmanager
def lock(run: Path) -> Iterator[None]:
    """Lock a run for this process; the kernel releases the lock when the process ends, however it ends.

    Raises RunError: another process holds it, or the directory is not writable.
    """
    try:
        file = (run / _LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise RunError(f"run {run} cannot be locked ({error.strerror}); make it writable") from error
    with file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # perhaps `in_use`, which is quick
                time.sleep(0.1)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunError(
                f"run {run} is in use by process {file.read().strip() or 'unknown'}; "
                "wait until it ends, stop it, or start a new run"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def stat_folder(path: Path) -> os.stat_result | None:
    """Return what tells a folder from others that its path may lead to later; None if there is none."""
    try:
        return path.stat()
    except OSError:
        return None


def is_same_folder(path: Path, folder: os.stat_result | None) -> bool:
    """Return whether a path leads to this folder."""
    current = stat_folder(path)
    return folder is not None and current is not None and os.path.samestat(folder, current)


def require_same_folder(run: Path, folder: os.stat_result | None) -> None:
    """Raise RunError unless a run directory is still the folder that was locked."""
    if not is_same_folder(run, folder):
        raise RunError(
            f"{run} is no longer the folder of this run: it, or a folder above it, was deleted, moved or replaced; put "
            "it back, then continue with --resume"
        )


def in_use(run: Path) -> bool:
    """Return whether a process holds the lock of a run; shares the lock for a moment if none does."""
    try:
        with (run / _LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # never locked, or a file system without locks
        return False
    return False
