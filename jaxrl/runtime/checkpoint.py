"""Checkpoints of a whole training state: written in the background, atomic on disk, verified on reading, exact.

The session decides when one is written.

    checkpoints/0000000120/arrays/          written by orbax
                           meta.json        counters and other data that are not arrays
                           manifest.json    names, shapes and types of all leaves; SHA-256 of every file
    checkpoints/0000000140.orbax-...        not committed yet, or left by a killed process: never read

Orbax's CheckpointManager commits a checkpoint by renaming its folder once all is written and read back, the manifest
included; then it deletes old ones, of which only intact ones count as kept. The digests are there because orbax loads
arrays with changed bytes without a word. The manager is only for writing: it expects undamaged folders and no other
process. It gets one flat dictionary from leaf names ("algo.params.Conv_0.kernel") to plain arrays, so that the format
does not depend on the Python classes of the state.
"""

import contextlib
import errno
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.common.errors import UserError, one_line
from jaxrl.common.files import write_atomically
from jaxrl.runtime import hosts, manifest, run_directory
from jaxrl.runtime.manifest import ARRAYS, META, Leaf, is_key, is_stored

# Orbax takes a third of a second to import, and no run needs it before its first checkpoint: functions import it.


_MERGED = "manifest.ocdbt"  # file of orbax: without it none of the arrays can be read
_DIGITS = 10  # in the name of a checkpoint's folder
SMALL = "small"  # entry of the JSON object of a checkpoint that holds weights only, see `load.write_small_run`


class CheckpointError(UserError):
    """A checkpoint cannot be written, is damaged, or belongs to another configuration."""


class UnknownCheckpointError(CheckpointError):
    """A run has no checkpoint of the number that was named."""

    exit_code = 2


def _print_warning(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


class Checkpoints:
    """The checkpoints in a directory of one run, which the first save makes, unless the run's folder has gone by then.

    Only a process that holds the run's lock may call `save` or `discard_after`; other processes may read. With
    several hosts every process makes the same calls, and process 0 commits and deletes.

    The newest `keep` intact ones and the best one are kept. `warn` receives a sentence for each damaged one that is
    skipped.

    Raises RunError: the run's versions.json is damaged.
    """

    def __init__(self, directory: Path | str, keep: int = 3, warn: Callable[[str], None] = _print_warning) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.directory = Path(directory).absolute()
        self._run_id = run_directory.read_run_id(self.directory.parent)
        self._run_folder = run_directory.stat_folder(
            self.directory.parent
        )  # None until the first save if there is none
        self._keep = keep
        self._warn = warn
        self._manager: Any = None  # orbax's CheckpointManager, which the first save makes
        self._best: int | None = None  # the best one, once there is a manager
        self._damaged: set[int] = set()  # those that `warn` was told of
        self._last_save: tuple[int, str, list[Leaf], bool]  # number, meta, leaves, whether it is the best

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def save(self, step: int, state: Any, meta: dict[str, Any], *, best: bool = False) -> None:
        """Start saving `state`; the caller may donate its buffers as soon as this returns.

        Args:
            step: its number, at least 0; an existing checkpoint of this number is deleted first.
            state: pytree of jax.Arrays, at least one of them not empty; typed PRNG keys and any sharding are allowed.
            meta: a JSON object that can be read without the arrays.
            best: whether this is the best checkpoint so far.

        Raises CheckpointError: this save could not be started, or the one before it failed.
        """
        self.wait()
        if obstacle := run_directory.find_obstacle(self.directory):
            raise CheckpointError(f"no checkpoint can be written under {self.directory}, where {obstacle}: rename it")
        leaves = manifest.list_leaves(state)
        values = zip(leaves, jax.tree.leaves(state), strict=True)
        arrays = {leaf.name: manifest.plain_array(value) for leaf, value in values if is_stored(leaf)}
        self._last_save = step, json.dumps(meta, indent=1), leaves, best
        import orbax.checkpoint as ocp

        with self._failure_in_one_sentence():
            if hosts.is_host_0():
                self._require_run_folder()
            self._manager = self._manager or self._make_manager()
            if step in self._manager.all_steps():
                self._manager.delete(step)
            self._best = step if best else self._best
            self._manager.save(step, args=ocp.args.Composite(**{ARRAYS: ocp.args.PyTreeSave(arrays)}), force=True)

    def amend(self, step: int, meta: dict[str, Any], *, best: bool) -> None:
        """Replace the JSON object of a committed checkpoint, and note whether it is the best; its arrays stay.

        Raises CheckpointError: it cannot be written.
        """
        self.wait()
        self._best = step if best else self._best

        def replace() -> None:
            try:
                manifest.amend(self.directory / _folder_name(step), json.dumps(meta, indent=1), best)
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"checkpoint {step} under {self.directory} could not be changed ({one_line(str(error))}): make the "
                    "directory writable and free disk space there, then continue with --resume"
                ) from error

        hosts.call_on_host_0(replace)

    def _make_manager(self) -> Any:
        import orbax.checkpoint as ocp

        write_other_files = self._write_other_files

        class Handler(ocp.PyTreeCheckpointHandler):
            def finalize(self, directory: Any) -> None:  # on host 0, before orbax commits the checkpoint
                super().finalize(directory)
                write_other_files(Path(directory))

        self._best = self.best_step()
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        # replicas are not shared out among devices: orbax would compile a slice of each shape
        types = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
        )
        registry.add(ARRAYS, ocp.args.PyTreeSave, Handler(type_handler_registry=types))
        options = ocp.CheckpointManagerOptions(
            step_format_fixed_length=_DIGITS,
            preservation_policy=self,
            cleanup_tmp_directories=True,
            single_host_load_and_broadcast=True,  # a network file system may show others an older folder
            lightweight_initialize=True,
            save_root_metadata=False,
        )
        return ocp.CheckpointManager(self.directory, options=options, handler_registry=registry)

    def _write_other_files(self, arrays: Path) -> None:
        """Write what belongs to a checkpoint whose arrays are written, and read it back.

        Raises OSError, ValueError: the checkpoint must not be committed, nor an older one deleted.
        """
        self._require_run_folder()
        step, meta, leaves, best = self._last_save
        if not (arrays / _MERGED).is_file():
            raise ValueError(f"write: orbax has not put the arrays together: {_MERGED} is absent")
        write_atomically(arrays.parent / META, meta)
        manifest.write_manifest(arrays.parent, arrays, step, leaves, best, self._run_id)
        manifest.check_sizes(arrays.parent, step, arrays)

    def _require_run_folder(self) -> None:
        """Make the folder of checkpoints. Raises OSError: the run's folder is no longer the one that it was."""
        if self._run_folder is None:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self._run_folder = self.directory.parent.stat()
        elif not self._is_in_place():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        self.directory.mkdir(exist_ok=True)

    def _is_in_place(self) -> bool:
        return self._run_folder is None or run_directory.is_same_folder(self.directory.parent, self._run_folder)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return which of the checkpoints, oldest first, are kept: what orbax asks of a `PreservationPolicy`.

        The last one is about to be written. Nothing is deleted unless it is written, see `_write_other_files`.
        """
        steps = [int(info.step) for info in checkpoints]
        kept: list[bool] = hosts.call_on_host_0(functools.partial(self._choose_kept, steps))
        return kept

    def _choose_kept(self, steps: list[int]) -> list[bool]:
        kept = []
        intact = 0
        for step in reversed(steps):
            kept.append(intact < self._keep or step == self._best)
            intact += step == steps[-1] or self._is_complete(step)
        return kept[::-1]

    def _is_complete(self, step: int) -> bool:
        """Return whether the files of an older checkpoint are there; `warn` gets a sentence if not, once."""
        folder = self.directory / _folder_name(step)
        try:
            manifest.check_sizes(folder, step)
        except ValueError as error:
            if step not in self._damaged:
                self._damaged.add(step)
                self._warn(f"checkpoint {folder} is damaged, so older ones are kept: {error}")
            return False
        return True

    @contextlib.contextmanager
    def _failure_in_one_sentence(self) -> Iterator[None]:
        """Raise the error of a failed save as one sentence; the next save makes a manager, which clears the files."""
        try:
            yield
        except (OSError, ValueError) as error:
            manager = self._manager
            self._manager = None
            if manager is not None:
                with contextlib.suppress(Exception):  # it repeats the error that is raised below
                    manager.close()
            reason = getattr(error, "strerror", None)
            # TensorStore says "KIND: where: where: cause [details]"
            reason = reason or str(error).rpartition(": ")[2].partition(" [")[0].strip() or type(error).__name__
            advice = "make the directory writable and free disk space there"
            if not self._is_in_place():
                reason = "the run's folder was deleted, moved or replaced"
                advice = "put it back"
            raise CheckpointError(
                f"checkpoint {self._last_save[0]} could not be written under {self.directory} ({reason}); {advice}, "
                "then continue with --resume"
            ) from error

    def wait(self) -> None:
        """Wait until the pending save, if any, is committed. Raises CheckpointError: the save failed."""
        if self._manager is not None:
            with self._failure_in_one_sentence():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the pending save and end the threads. Raises CheckpointError: the last save failed."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
        self._manager = None

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints above `step`, where a run resumes. Raises CheckpointError: they cannot be deleted."""
        assert self._manager is None, "the manager would not know"
        try:
            for later in [number for number in self.steps() if number > step and hosts.is_host_0()]:
                shutil.rmtree(self.directory / _folder_name(later))
        except OSError as error:
            raise CheckpointError(
                f"old checkpoints under {self.directory} could not be deleted ({error}); make the directory writable"
            ) from error

    # Reading

    def steps(self) -> list[int]:
        return committed_steps(self.directory)

    def best_step(self) -> int | None:
        for step in reversed(self.steps()):
            with contextlib.suppress(ValueError):
                stored = manifest.read_manifest(self.directory / _folder_name(step))
                if stored.best and not self._is_foreign(stored):
                    return step
        return None

    def _is_foreign(self, stored: manifest.Manifest) -> bool:
        return bool(stored.run and self._run_id and stored.run != self._run_id)

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Return number and JSON object of the newest intact checkpoint; `warn` gets a sentence for each damaged one.

        Raises CheckpointError: there is none.
        """
        self.wait()
        step = hosts.call_on_host_0(functools.partial(self._find_intact, self.steps()))
        folder = self.directory / _folder_name(step)
        with _reading(folder):
            return step, manifest.read_both(folder)[1]

    def read(self, step: int, like: Any) -> Any:
        """Return the state of a checkpoint that `newest` has verified; see `restore`."""
        folder = self.directory / _folder_name(step)
        with _reading(folder):
            contents = manifest.read_manifest(folder)
        return _read_state(folder, contents.leaves, like, None)

    def restore(
        self, like: Any, step: int | None = None, *, prefix: str | None = None, best: bool = False
    ) -> tuple[int, Any, dict[str, Any]]:
        """Read a state back, bit-identical; return its number, the state, and its JSON object.

        Args:
            like: pytree of jax.ShapeDtypeStruct (or arrays) with the shardings to restore to, on any devices; a leaf
                without a sharding goes to the first local device.
            step: number of the checkpoint; by default the newest intact one.
            prefix: name of the only part of the state to read, such as "algo.params"; `like` then describes this part.
            best: read the best checkpoint, if there is one.

        Raises CheckpointError: there is no intact checkpoint; its leaves have other names, shapes or types than `like`;
        or training replaces checkpoints faster than they are read.
        """
        self.wait()
        for _ in range(2):  # training may replace it while it is read
            before = self.steps()
            number = self.best_step() if best else step
            if step is not None and step not in before:
                known = ", ".join(map(str, before[-10:])) or "none"
                others = "".join(f"; {sentence}" for sentence in _describe_misnamed(self.directory))
                raise UnknownCheckpointError(
                    f"there is no checkpoint {step} in {self.directory}: choose from {known}{others}"
                )
            try:
                steps = before if number is None else [number]
                chosen: int = hosts.call_on_host_0(functools.partial(self._find_intact, steps))
                folder = self.directory / _folder_name(chosen)
                with _reading(folder):
                    contents, meta = manifest.read_both(folder)
                return chosen, _read_state(folder, contents.leaves, like, prefix), meta
            except Exception as error:
                if step is not None or self.steps() == before:
                    raise
                cause = error
        raise CheckpointError(
            f"training replaces the checkpoints in {self.directory} while they are read ({one_line(str(cause))}): "
            "try again, or wait until it ends"
        ) from cause

    def _find_intact(self, steps: list[int]) -> int:
        """Return the last of `steps` whose files have their digests. Raises CheckpointError if there is none."""
        damaged: list[str] = []
        misnamed = _describe_misnamed(self.directory)
        for sentence in misnamed:
            self._warn(sentence)
        for step in reversed(steps):
            folder = self.directory / _folder_name(step)
            try:
                stored = manifest.verify(folder)
            except ValueError as error:
                damaged.append(f"checkpoint {folder} is damaged: {error}")
                continue
            self._check_run_id(folder, stored)
            for sentence in damaged:
                self._warn(f"{sentence}; it is skipped")
            return step
        if misnamed and not damaged:
            raise CheckpointError(f"there is no checkpoint in {self.directory}; {misnamed[0]}")
        if damaged:
            problem = f"no intact checkpoint in {self.directory} ({damaged[0]})"
            advice = "copy an intact one back, or "
        else:
            problem = f"there is no checkpoint in {self.directory}: the run ended before its first"
            advice = ""
        raise CheckpointError(f"{problem}; {advice}start the run again")

    def _check_run_id(self, folder: Path, stored: manifest.Manifest) -> None:
        """Raise CheckpointError if an intact checkpoint is of another run; warn if nothing can tell."""
        versions = self.directory.parent / run_directory.VERSIONS
        if stored.run and not versions.exists():
            self._warn(
                f"{versions} is missing, so nothing checks that versions, spaces and checkpoints belong to this run"
            )
        if not self._is_foreign(stored):
            return
        if any(self._is_own(step) for step in self.steps()):
            raise CheckpointError(
                f"checkpoint {folder} was written by another run: move it out of this run, or put the run's back"
            )
        raise CheckpointError(
            f"{versions} is not of the run that wrote the checkpoints in {self.directory}, or is damaged: put the "
            "run's own file (or its checkpoints) back, or remove the file to go on without its checks"
        )

    def _is_own(self, step: int) -> bool:
        try:
            return not self._is_foreign(manifest.read_manifest(self.directory / _folder_name(step)))
        except ValueError:
            return False


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} could not be read ({error})") from error


def _read_state(folder: Path, stored: list[Leaf], like: Any, prefix: str | None) -> Any:
    """Return the state of an intact checkpoint with these leaves, or the part of it at `prefix`, in the form of `like`.

    Raises CheckpointError: it has other leaves than `like`, or cannot be read.
    """
    if obstacle := run_directory.find_obstacle(folder, writing=False):
        raise CheckpointError(f"checkpoint {folder} cannot be read where {obstacle}: rename that folder")
    expected = manifest.list_leaves(like, prefix)
    difference = manifest.find_difference(expected, stored, whole=prefix is None)
    if difference is None:
        with _reading(folder):
            return _read_arrays(folder, like, expected)
    if difference.startswith(("env.", "timestep.")) and "JAX_ENABLE_X64" not in difference:
        raise CheckpointError(
            f"the environment has changed since checkpoint {folder} was written: {difference}; use its previous code, "
            "or begin a new run with --init_from"
        )
    raise CheckpointError(
        f"checkpoint {folder} is from another configuration: {difference}; use the configuration that the run was "
        "started with, including its networks= and optimizers="
    )


def _read_arrays(folder: Path, like: Any, leaves: list[Leaf]) -> Any:
    """Return the arrays of a checkpoint in the structure of `like`, which has these leaves.

    Raises OSError, ValueError.
    """
    values, structure = jax.tree.flatten(like)
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = [getattr(value, "sharding", None) or first_device for value in values]
    pairs = zip(leaves, shardings, strict=True)
    arrays: dict[str, Any] = {}
    stored = {leaf.name: sharding for leaf, sharding in pairs if is_stored(leaf)}
    if stored and all(isinstance(sharding, jax.sharding.SingleDeviceSharding) for sharding in stored.values()):
        arrays = jax.device_put(_read_whole_arrays(folder, list(stored)), stored)
    elif stored:
        import orbax.checkpoint as ocp

        restore_args = {name: ocp.ArrayRestoreArgs(sharding=sharding) for name, sharding in stored.items()}
        args = ocp.args.PyTreeRestore(dict.fromkeys(stored, 0), restore_args, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            arrays = reader.restore(folder / ARRAYS, args=args)

    def make_leaf(leaf: Leaf, value: Any, sharding: jax.sharding.Sharding) -> Any:
        if not is_stored(leaf):
            return jax.device_put(jnp.empty(leaf.shape, value.dtype), sharding)
        if not is_key(value):
            return arrays[leaf.name]
        impl = jax.random.key_impl(jnp.empty((), value.dtype))
        return jax.device_put(jax.random.wrap_key_data(arrays[leaf.name], impl=impl), sharding)

    return jax.tree.unflatten(structure, map(make_leaf, leaves, values, shardings))


def _read_whole_arrays(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Return arrays of a checkpoint by name, without orbax: policies are read quickly. Raises ValueError."""
    import tensorstore

    base = {"driver": "file", "path": f"{folder / ARRAYS}/"}
    context = tensorstore.Context()
    opening = [
        tensorstore.open(
            {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": name}}, context=context, open=True
        )
        for name in names
    ]
    reading = [opened.result().read() for opened in opening]
    return {name: values.result() for name, values in zip(names, reading, strict=True)}


def committed_steps(directory: Path) -> list[int]:
    """Return the numbers of the complete checkpoints in a folder, oldest first."""
    names = (path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else ()
    return sorted(int(name) for name in names if re.fullmatch(rf"[0-9]{{{_DIGITS}}}", name))


def _describe_misnamed(directory: Path) -> list[str]:
    """Return a sentence for each folder that may be a checkpoint but for its name, such as 120 for 0000000120."""
    names = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else ()
    return [
        f"{directory / name} is ignored: if it is a checkpoint, rename it to {_folder_name(int(name))}"
        for name in names
        if re.fullmatch(r"[0-9]{1,18}", name) and len(name) != _DIGITS
    ]


def _folder_name(step: int) -> str:
    return f"{step:0{_DIGITS}d}"
