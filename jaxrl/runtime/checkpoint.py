"""Checkpoints of a whole training state: asynchronous to write, atomic on disk, verified on reading, exact.

    checkpoints/0000000120/arrays/          written by orbax
                           meta.json        counters and other data that are not arrays
                           manifest.json    names, shapes and types of all leaves; SHA-256 of every file
    checkpoints/0000000140.writing/         not committed yet, or left by a killed process: never read
    checkpoints/best/0000000080/            a separate copy

A checkpoint is written under `<step>.writing` and committed, once orbax has finished and every file is hashed, by
renaming that folder; it is deleted by renaming it to `<step>.trash` first. So a folder whose name is a number
is complete, however the process ended, and one that does not match its manifest (which holds the step too) has
been damaged, renamed or copied since.

Orbax gets one flat dictionary from leaf names ("algo.params.Conv_0.kernel") to plain arrays, so that the format
on disk does not depend on the Python classes of the state. Typed PRNG keys are stored as their data.
"""

import functools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically
from jaxrl.runtime import hosts
from jaxrl.runtime.manifest import (
    Leaf,
    difference,
    digest_of,
    find_damage,
    is_key,
    is_stored,
    leaves_of,
    plain_array,
    read_manifest,
    write_manifest,
)

# Orbax reports every failure twice: by an exception, which becomes one sentence here, and by a logged traceback.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())


@functools.cache
def _hush_late_writes() -> None:
    """Hide TensorStore's follow-up errors of a failed write.

    When one array cannot be written, orbax closes its event loop, and TensorStore prints a Python error for each array
    that finishes later; only the first error is reported.
    """
    former = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            former(unraisable)

    sys.unraisablehook = hook


_ARRAYS, _META = "arrays", "meta.json"
_WRITING, _TRASH = ".writing", ".trash"
_NAMED = 3  # damaged checkpoints in a row that are named; the others are counted


class CheckpointError(UserError):
    """A checkpoint cannot be written, is damaged, or belongs to another configuration."""


class Checkpoints:
    """The checkpoints of one run.

    Only a process that holds the run's lock may call `save` or `discard_after`; other processes may read. With
    several hosts every process makes the same calls, and process 0 commits and deletes.

    Args:
        directory: where they are; made by the first save.
        keep: how many of the newest are kept, in addition to the best one.
        warn: receives one sentence for each damaged checkpoint that is skipped; stderr by default.
    """

    def __init__(self, directory: Path | str, keep: int = 3, warn: Callable[[str], None] | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.directory = Path(directory).absolute()
        self._best = self.directory / "best"
        self._keep = keep
        self._warn = warn or (lambda sentence: print(f"warning: {sentence}", file=sys.stderr, flush=True))
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._unfinished: Future[None] | None = None
        self._swept = False

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def save(self, step: int, state: Any, meta: dict[str, Any], *, best: bool = False) -> None:
        """Start saving `state`; the caller may donate its buffers as soon as this returns.

        Args:
            step: its number, at least 0; an existing checkpoint of this number is replaced.
            state: pytree of jax.Arrays; typed PRNG keys and arrays of any sharding may be among them.
            meta: a JSON object that can be read without the arrays.
            best: keep a copy as the best checkpoint, replacing the former one.

        Raises:
            CheckpointError: this save could not be started, or the one before it failed.
        """
        self.wait()
        _hush_late_writes()
        leaves = leaves_of(state)
        arrays = {
            leaf.name: plain_array(value)
            for leaf, value in zip(leaves, jax.tree.leaves(state), strict=True)
            if is_stored(leaf)
        }
        folder = self.directory / f"{step:010d}{_WRITING}"
        try:
            if hosts.writes():
                self._sweep()
                folder.mkdir(parents=True)
                write_atomically(folder / _META, json.dumps(meta, indent=1))
            if arrays:
                self._orbax.save(folder / _ARRAYS, args=ocp.args.PyTreeSave(arrays))
        except (OSError, ValueError) as error:
            raise self._failed(step, folder, error) from error
        self._unfinished = self._thread.submit(self._finish, step, folder, leaves, best)

    def _finish(self, step: int, folder: Path, leaves: list[Leaf], best: bool) -> None:
        """Wait for orbax, commit the checkpoint and delete those it replaces (on a separate thread)."""
        try:
            self._orbax.wait_until_finished()
            if not hosts.writes():
                return
            write_manifest(folder, step, leaves)
            _commit(folder)
            if best:
                copy = self._best / folder.name
                shutil.copytree(self.directory / folder.stem, copy)
                _commit(copy)
                _delete(self._best / name for name in _committed(self._best) if name != copy.stem)
            _delete(self.directory / name for name in _committed(self.directory)[: -self._keep])
        except (OSError, ValueError) as error:
            raise self._failed(step, folder, error) from error

    def _failed(self, step: int, folder: Path, error: Exception) -> CheckpointError:
        """Free the space of a failed save and return its error."""
        if hosts.writes():
            shutil.rmtree(folder, ignore_errors=True)
            self._swept = False  # pending writes of other arrays may recreate the folder
        return CheckpointError(
            f"checkpoint {step} could not be written under {self.directory} ({_reason(error)}); make the directory "
            "writable and free disk space there, then continue with --resume"
        )

    def _sweep(self) -> None:
        """Delete incomplete saves and deletions, once per run and after a failure."""
        if not self._swept:
            for folder in (self.directory, self._best):
                for name in _names(folder):
                    if name.endswith((_WRITING, _TRASH)):
                        _remove(folder / name)
        self._swept = True

    def wait(self) -> None:
        """Wait until the pending save, if any, is committed.

        Raises:
            CheckpointError: the save failed.
        """
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            unfinished.result()

    def close(self) -> None:
        """Wait for the pending save and end the thread.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints with a number above `step`, after the point where a run resumes.

        Raises:
            CheckpointError: they cannot be deleted.
        """
        self.wait()
        if hosts.writes():
            try:
                _delete(self.directory / name for name in _committed(self.directory) if int(name) > step)
            except OSError as error:
                raise CheckpointError(
                    f"old checkpoints under {self.directory} could not be deleted ({error}); "
                    "make the directory writable"
                ) from error

    # Reading

    def steps(self) -> list[int]:
        """Return the numbers of all committed checkpoints, oldest first, without the best one."""
        return committed_steps(self.directory)

    def best_step(self) -> int | None:
        """Return the number of the best checkpoint, if one was kept."""
        best = _committed(self._best)
        return int(best[-1]) if best else None

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Return number and JSON object of the newest intact checkpoint; `warn` gets a sentence for each damaged one.

        Raises:
            CheckpointError: there is none.
        """
        self.wait()
        folder = self._newest_intact(self.directory, _committed(self.directory))
        return int(folder.name), _read_meta(folder)

    def restore(self, like: Any, step: int | None = None, intact: bool = False) -> tuple[int, Any, dict[str, Any]]:
        """Read a whole state back, bit-identical.

        Args:
            like: pytree of jax.ShapeDtypeStruct (or arrays) with the wanted shardings, on any devices; a leaf
                without a sharding goes to the first local device.
            step: which one; by default the newest intact one. `warn` gets a sentence for each damaged one.
            intact: `newest` has just checked it; do not verify its files again.

        Returns:
            Its number, the state, and its JSON object.

        Raises:
            CheckpointError: no intact checkpoint, or leaves of other names, shapes or types than `like` has.
        """
        return self._restore(self.directory, like, step=step, intact=intact)

    def digest(self, step: int | None = None) -> str:
        """Return the SHA-256 of the state in a checkpoint, by default the newest; equal to `manifest.digest(state)`.

        Raises:
            CheckpointError: no such checkpoint, or it is damaged.
        """
        self.wait()
        names = _committed(self.directory)
        folder = self.directory / (f"{step:010d}" if step is not None else names[-1] if names else "none")
        damage = find_damage(folder)
        if damage is not None:
            raise CheckpointError(f"checkpoint {folder} is damaged: {damage}; use another")
        leaves = read_manifest(folder).leaves
        wanted = [leaf.name for leaf in leaves if is_stored(leaf)]
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
        args = ocp.args.PyTreeRestore(dict.fromkeys(wanted, 0), as_numpy)
        arrays = self._orbax.restore(folder / _ARRAYS, args=args) if wanted else {}
        return digest_of(leaves, [arrays.get(leaf.name) for leaf in leaves])

    def restore_subtree(self, like: Any, prefix: str, *, best: bool = False) -> tuple[int, Any, dict[str, Any]]:
        """Read only the part of the state at `prefix`, such as "algo.params"; `like` is the shape of that part.

        Raises:
            CheckpointError: as `restore` does; leaves outside the part may be anything.
        """
        return self._restore(self._best if best else self.directory, like, prefix=prefix)

    def _restore(
        self, directory: Path, like: Any, *, step: int | None = None, prefix: str | None = None, intact: bool = False
    ) -> tuple[int, Any, dict[str, Any]]:
        self.wait()
        names = _committed(directory) if step is None else [f"{step:010d}"]
        folder = directory / names[0] if intact else self._newest_intact(directory, names)
        return int(folder.name), _read_state(self._orbax, folder, like, prefix), _read_meta(folder)

    def _newest_intact(self, directory: Path, names: list[str]) -> Path:
        """Return the folder of the last undamaged one of `names`. Raises CheckpointError if there is none."""
        if not names:
            raise CheckpointError(
                f"there is no checkpoint in {directory}: the run ended before its first was complete; start it again"
            )
        return directory / hosts.on_first(lambda: self._not_damaged(directory, names))

    def _not_damaged(self, directory: Path, names: list[str]) -> str:
        """Return the last of `names` that passes its files' digests. Raises CheckpointError if there is none."""
        for passed, name in enumerate(reversed(names)):
            folder = directory / name
            damage = find_damage(folder)
            if damage is None:
                if passed > _NAMED:
                    self._warn(f"{passed - _NAMED} more are damaged and skipped")
                return name
            if passed < min(_NAMED, len(names) - 1):  # the error names the oldest
                self._warn(f"checkpoint {folder} is damaged: {damage}; it is skipped")
        raise CheckpointError(
            f"no intact checkpoint in {directory} (of {len(names)}; the oldest, {name}: {damage}); "
            "copy an intact one back, or start the run again"
        )


def _reason(error: Exception) -> str:
    """Return the cause in a few words: of TensorStore's "KIND: where: where: cause [details]" only the cause."""
    if isinstance(error, shutil.Error):  # of a copy: (source, target, "[Errno 28] cause") for each file
        return str(error.args[0][-1][-1]).rpartition("] ")[2]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).rpartition(": ")[2].partition(" [")[0].strip() or type(error).__name__


def _read_state(orbax: ocp.AsyncCheckpointer, folder: Path, like: Any, prefix: str | None) -> Any:
    """Read the state, or the part of it at `prefix`, of an intact checkpoint."""
    wanted = leaves_of(like, prefix)
    odd = difference(wanted, read_manifest(folder).leaves, whole=prefix is None)
    if odd is not None:
        raise CheckpointError(
            f"checkpoint {folder} is from another configuration: {odd}; use the configuration that the "
            "run was started with, its networks= and optimizers= included"
        )
    values, structure = jax.tree.flatten(like)
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = [getattr(value, "sharding", None) or first_device for value in values]
    restore_args = {
        leaf.name: ocp.ArrayRestoreArgs(sharding=sharding)
        for leaf, sharding in zip(wanted, shardings, strict=True)
        if is_stored(leaf)
    }
    arrays = {}
    if restore_args:
        args = ocp.args.PyTreeRestore(dict.fromkeys(restore_args, 0), restore_args, partial_restore=prefix is not None)
        try:
            arrays = orbax.restore(folder / _ARRAYS, args=args)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {folder} could not be read ({error})") from error

    def finish(leaf: Leaf, value: Any, sharding: jax.sharding.Sharding) -> Any:
        if not is_stored(leaf):
            return jax.device_put(jnp.empty(leaf.shape, value.dtype), sharding)
        array = arrays[leaf.name]
        if not is_key(value):
            return array
        impl = jax.random.key_impl(jnp.empty((), value.dtype))
        return jax.device_put(jax.random.wrap_key_data(array, impl=impl), sharding)

    return jax.tree.unflatten(structure, map(finish, wanted, values, shardings))


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def committed_steps(directory: Path) -> list[int]:
    """Return the numbers of the complete checkpoints in a folder, oldest first."""
    return [int(name) for name in _committed(directory)]


def _committed(directory: Path) -> list[str]:
    """Return the names of the complete checkpoints, oldest first."""
    return sorted((name for name in _names(directory) if name.isdecimal()), key=int)


def _commit(folder: Path) -> None:
    """Rename `<step>.writing` to `<step>`; an existing checkpoint of this name is replaced."""
    sealed = folder.with_suffix("")
    _delete([sealed] if os.path.lexists(sealed) else [])
    folder.rename(sealed)


def _delete(folders: Iterable[Path]) -> None:
    for folder in list(folders):
        trash = folder.with_suffix(_TRASH)
        _remove(trash)
        folder.rename(trash)
        _remove(trash)


def _remove(path: Path) -> None:
    """Delete a folder and its content, or a file or link in its place; do nothing if it is absent."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / _META).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable {_META} ({error}); use another") from error
