"""Checkpoints of a whole training state: asynchronous to write, atomic on disk, verified on reading, exact.

    checkpoints/0000000120/arrays/          written by orbax
                           meta.json        counters and other data that are not arrays
                           manifest.json    names, shapes and types of all leaves; SHA-256 of every file
    checkpoints/0000000140.orbax-...        not committed yet, or left by a killed process: never read

Orbax's CheckpointManager writes in the background, commits a checkpoint by renaming its folder once all is written, the
manifest included, deletes old ones, and clears away what a killed process left. So a folder whose name is a number
was complete once, and one that does not match its manifest (which holds the step too) has been damaged, renamed,
copied or partly deleted since. The manager is only for writing: it expects to be alone, and undamaged folders.

Orbax gets one flat dictionary from leaf names ("algo.params.Conv_0.kernel") to plain arrays, so that the format
on disk does not depend on the Python classes of the state. Typed PRNG keys are stored as their data.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrl.common.errors import UserError, one_line
from jaxrl.common.files import write_atomically
from jaxrl.runtime import hosts, manifest, run_directory
from jaxrl.runtime.manifest import ARRAYS, META, Leaf, is_key, is_stored

if TYPE_CHECKING:  # orbax takes a third of a second to import, and no run needs it before its first checkpoint
    import orbax.checkpoint as ocp

    from jaxrl.runtime import orbax_manager

_DIGITS = 10  # of the name of a checkpoint
_SHOWN = 10  # newest checkpoints that a refusal lists
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
        self._run_id = run_directory.read_run_id(self.directory.parent)
        self._keep = keep
        self._warn = warn or (lambda sentence: print(f"warning: {sentence}", file=sys.stderr, flush=True))
        self._manager: ocp.CheckpointManager | None = None  # made by the first save
        self._kept: orbax_manager.Kept
        self._arrays: orbax_manager.Arrays
        self._saving = -1  # number of the last save

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def save(self, step: int, state: Any, meta: dict[str, Any], *, best: bool = False) -> None:
        """Start saving `state`; the caller may donate its buffers as soon as this returns.

        Args:
            step: its number, at least 0; an existing checkpoint of this number is deleted first.
            state: pytree of jax.Arrays, of which one has elements; typed PRNG keys and arrays of any sharding may be
                among them.
            meta: a JSON object that can be read without the arrays.
            best: this is the best checkpoint from now on.

        Raises:
            CheckpointError: this save could not be started, or the one before it failed.
        """
        self.wait()
        leaves, text = manifest.leaves_of(state), json.dumps(meta, indent=1)
        arrays = {
            leaf.name: manifest.plain_array(value)
            for leaf, value in zip(leaves, jax.tree.leaves(state), strict=True)
            if is_stored(leaf)
        }

        def beside(arrays: Path) -> None:
            write_atomically(arrays.parent / META, text)
            manifest.write_manifest(arrays.parent, arrays, step, leaves, best, self._run_id)

        import orbax.checkpoint as ocp

        self._saving = step
        with self._one_sentence():
            manager = self._manager = self._manager or self._make_manager()
            self._arrays.beside = beside
            if step in manager.all_steps():
                manager.delete(step)
            if best:
                self._kept.best = step
            manager.save(step, args=ocp.args.Composite(**{ARRAYS: ocp.args.PyTreeSave(arrays)}), force=True)

    def _make_manager(self) -> "ocp.CheckpointManager":
        for name in _committed(self.directory) if hosts.writes() else ():
            if (self.directory / name).is_symlink() or not (self.directory / name).is_dir():
                _remove(self.directory / name)  # the manager takes it for a checkpoint, but could not delete it
        from jaxrl.runtime import orbax_manager

        self._kept, self._arrays = orbax_manager.Kept(self._keep, self.best_step()), orbax_manager.Arrays()
        return orbax_manager.manager(self.directory, self._kept, self._arrays, _DIGITS)

    @contextlib.contextmanager
    def _one_sentence(self) -> Any:
        """Free the space of a save that fails, and raise its error as one sentence."""
        try:
            yield
        except (OSError, ValueError) as error:
            manager, self._manager = self._manager, None
            if manager is not None:
                with contextlib.suppress(Exception):
                    manager.close()
            for folder in self.directory.glob(f"{self._saving:0{_DIGITS}d}.*") if hosts.writes() else ():
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {self._saving} could not be written under {self.directory} ({_reason(error)}); make the "
                "directory writable and free disk space there, then continue with --resume"
            ) from error

    def wait(self) -> None:
        """Wait until the pending save, if any, is committed. Raises CheckpointError: the save failed."""
        if self._manager is not None:
            with self._one_sentence():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the pending save and end the threads. Raises CheckpointError: the last save failed."""
        self.wait()
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints with a number above `step`, after the point where a run resumes.

        Raises CheckpointError: they cannot be deleted.
        """
        assert self._manager is None, "the manager would not know"
        if hosts.writes():
            try:
                for name in _committed(self.directory):
                    if int(name) > step:
                        _remove(self.directory / name)
            except OSError as error:
                raise CheckpointError(
                    f"old checkpoints under {self.directory} could not be deleted ({error}); "
                    "make the directory writable"
                ) from error

    # Reading

    def steps(self) -> list[int]:
        """Return the numbers of all committed checkpoints, oldest first."""
        return committed_steps(self.directory)

    def best_step(self) -> int | None:
        """Return the number of the best checkpoint, if one was kept."""
        for name in reversed(_committed(self.directory)):
            with contextlib.suppress(OSError, ValueError):
                if manifest.read_manifest(self.directory / name).best and not self._is_foreign(name):
                    return int(name)
        return None

    def _is_foreign(self, name: str) -> bool:
        """Return whether another run wrote a checkpoint. Raises OSError, ValueError: its manifest cannot be read."""
        run_id = manifest.read_manifest(self.directory / name).run_id
        return bool(run_id and self._run_id and run_id != self._run_id)

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Return number and JSON object of the newest intact checkpoint; `warn` gets a sentence for each damaged one.

        Raises CheckpointError: there is none.
        """
        self.wait()
        folder = self._newest_intact(_committed(self.directory))
        return int(folder.name), _read_meta(folder)

    def restore(
        self, like: Any, step: int | None = None, *, prefix: str | None = None, best: bool = False, intact: bool = False
    ) -> tuple[int, Any, dict[str, Any]]:
        """Read a state back, bit-identical.

        Args:
            like: pytree of jax.ShapeDtypeStruct (or arrays) with the wanted shardings, on any devices; a leaf
                without a sharding goes to the first local device.
            step: which one; by default the newest intact one. `warn` gets a sentence for each damaged one.
            prefix: read only the part of the state there, such as "algo.params", whose shape `like` then is; leaves
                outside it may be anything.
            best: read the best one, if one was kept.
            intact: `newest` has just checked this step; do not verify its files again.

        Returns:
            Its number, the state, and its JSON object.

        Raises:
            CheckpointError: no intact checkpoint, leaves of other names, shapes or types than `like` has, or training
                that replaces checkpoints faster than they are read.
        """
        self.wait()
        before = self.steps()
        try:
            return self._restore(like, self.best_step() if best else step, prefix, intact)
        except Exception:
            if step is not None or (now := self.steps()) == before:
                raise
        try:  # training has replaced it while it was read
            return self._restore(like, self.best_step() if best else None, prefix, intact)
        except Exception as error:
            if self.steps() == now:
                raise
            raise CheckpointError(
                f"training replaces the checkpoints in {self.directory} while they are read ({one_line(str(error))}): "
                "try again, or wait until it ends"
            ) from error

    def _restore(
        self, like: Any, step: int | None, prefix: str | None, intact: bool
    ) -> tuple[int, Any, dict[str, Any]]:
        """Do what `restore` does, once."""
        if step is not None and not intact and step not in (steps := self.steps()):
            known = ", ".join(f"{number}" for number in steps[-_SHOWN:]) or "none"
            raise CheckpointError(f"there is no checkpoint {step} in {self.directory}: choose from {known}")
        names = _committed(self.directory) if step is None else [f"{step:0{_DIGITS}d}"]
        folder = self.directory / names[0] if intact else self._newest_intact(names)
        return int(folder.name), _read_state(folder, like, prefix), _read_meta(folder)

    def _newest_intact(self, names: list[str]) -> Path:
        """Return the folder of the last undamaged one of `names`. Raises CheckpointError if there is none."""
        if not names:
            raise CheckpointError(
                f"there is no checkpoint in {self.directory}: the run ended before its first was complete; "
                "start it again"
            )
        return self.directory / hosts.on_first(lambda: self._not_damaged(names))

    def _not_damaged(self, names: list[str]) -> str:
        """Return the last of `names` that passes its files' digests. Raises CheckpointError if there is none."""
        for passed, name in enumerate(reversed(names)):
            folder = self.directory / name
            damage = manifest.find_damage(folder)
            if damage is None:
                if self._is_foreign(name):
                    raise CheckpointError(
                        f"checkpoint {folder} was written by another run: move it out of this run, or copy this run's "
                        "own one back"
                    )
                if passed > _NAMED:
                    self._warn(f"{passed - _NAMED} more are damaged and skipped")
                return name
            if passed < min(_NAMED, len(names) - 1):  # the error names the oldest
                self._warn(f"checkpoint {folder} is damaged: {damage}; it is skipped")
        raise CheckpointError(
            f"no intact checkpoint in {self.directory} (of {len(names)}; the oldest, {name}: {damage}); "
            "copy an intact one back, or start the run again"
        )


def _reason(error: Exception) -> str:
    """Return the cause in a few words: of TensorStore's "KIND: where: where: cause [details]" only the cause."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).rpartition(": ")[2].partition(" [")[0].strip() or type(error).__name__


def _read_state(folder: Path, like: Any, prefix: str | None) -> Any:
    """Read the state, or the part of it at `prefix`, of an intact checkpoint."""
    import orbax.checkpoint as ocp

    wanted = manifest.leaves_of(like, prefix)
    try:
        leaves = manifest.read_manifest(folder).leaves
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} could not be read ({error})") from error
    odd = manifest.difference(wanted, leaves, whole=prefix is None)
    if odd is not None and odd.startswith(("env.", "timestep.")) and "JAX_ENABLE_X64" not in odd:
        raise CheckpointError(
            f"the environment has changed since checkpoint {folder} was written: {odd}; use its former code, or begin "
            "a new run with --init_from"
        )
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
    args = ocp.args.PyTreeRestore(dict.fromkeys(restore_args, 0), restore_args, partial_restore=prefix is not None)
    arrays = {}
    if restore_args:
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                arrays = reader.restore(folder / ARRAYS, args=args)
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


def committed_steps(directory: Path) -> list[int]:
    """Return the numbers of the complete checkpoints in a folder, oldest first."""
    return [int(name) for name in _committed(directory)]


def _committed(directory: Path) -> list[str]:
    """Return the names of the complete checkpoints, oldest first."""
    names = (path.name for path in directory.iterdir()) if directory.is_dir() else ()
    return sorted((name for name in names if name.isdecimal()), key=int)


def _remove(path: Path) -> None:
    """Delete a folder and its content, or a file or link in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / META).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable {META} ({error}); use another") from error
