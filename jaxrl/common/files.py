"""Paths as users give them, and atomic writing of small files: no reader ever sees half of one."""

import contextlib
import errno
import functools
import os
import stat
import tempfile
import uuid
from pathlib import Path

from envs_jax.settings import short_repr
from jaxrl.common.errors import UsageError, UserError


def cache_root() -> Path:
    """Return ~/.cache/jaxrl, or its like under XDG_CACHE_HOME; without a home directory, a temporary folder."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "jaxrl"
    try:
        return Path("~/.cache").expanduser() / "jaxrl"
    except RuntimeError:  # a container without HOME, whose user has no name
        return _temporary_cache()


@functools.cache
def _temporary_cache() -> Path:
    """Return a temporary folder into which only this user can write: cached programs are run.

    Raises UserError: no temporary folder is writable.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"jaxrl-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        owner = folder.lstat()
        if stat.S_ISDIR(owner.st_mode) and owner.st_uid == os.getuid() and not owner.st_mode & 0o022:
            return folder
        return Path(tempfile.mkdtemp(prefix="jaxrl-"))
    except OSError as error:
        raise UserError(
            f"this user has no home directory, and no temporary folder is writable ({error.strerror}): set "
            "XDG_CACHE_HOME to a writable folder"
        ) from error


def expand_home(path: str | Path) -> str:
    """Return a path, or several separated by commas, with "~" and "~user" replaced, as a shell does.

    Raises UsageError: there is no such home directory.
    """
    parts = [part.strip() if part.strip().startswith("~") else part for part in str(path).split(",")]
    expanded = [os.path.expanduser(part) for part in parts]  # Path's raises a RuntimeError
    for part in expanded:
        if part == "~" or (part.startswith("~") and "/" in part):
            raise UsageError(f"{short_repr(part)} names a home directory that is not known here: name the folder")
    return ",".join(expanded)


def is_file(path: Path) -> bool:
    """Return whether the path is a regular file or a link to one; False for an invalid path."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # name too long, zero byte, unreadable folder
        return False


def output(text: str, flag: str) -> Path:
    """Return the path of a file that a command will write; nothing is changed yet.

    Raises UserError: no regular file can be written there.
    """
    text = expand_home(text)
    path = Path(text)
    remedy = f"choose a file in a writable directory with {flag}"
    try:
        if text.endswith(("/", os.sep)) or path.is_dir():
            raise UserError(f"{text} is a directory: name a file with {flag}")
        _check_regular(path)
        target = Path(os.path.realpath(path))  # a link stays one
        fresh = not target.exists()
        with target.open("ab"):
            pass
        if fresh:
            target.unlink()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {text} ({getattr(error, 'strerror', None) or error}): {remedy}") from None
    return path


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file. Raises OSError, and ValueError if it is larger than `max_bytes` bytes."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes:,} bytes")
    return content


def _check_regular(path: Path) -> None:
    """Raise OSError for devices, pipes and sockets, which a file would replace."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file `path`, or the one that it links to, by text or bytes, all or nothing.

    Raises OSError: the directory is absent or not writable, its disk is full, or `path` is a device, pipe or directory;
    the file is unchanged.
    """
    _check_regular(path)
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_output(path: Path, content: str | bytes, flag: str) -> None:
    """Write the file that a flag names, atomically. Raises UserError."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another file with {flag}") from None
