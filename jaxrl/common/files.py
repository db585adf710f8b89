"""Writing small files so that a reader, or the next run after a kill, never meets half of one."""

import errno
import os
import uuid
import zipfile
from pathlib import Path

from jaxrl.common.errors import UserError


def is_file(path: Path) -> bool:
    """Whether there is a regular file (or a link to one), whatever stands in the path."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, a zero byte, a folder that may not be looked into
        return False


def output(text: str, flag: str) -> Path:
    """The path of a file that a verb is going to write; nothing that is there changes.

    Raises:
        UserError: no regular file can be written there.
    """
    path = Path(text)
    remedy = f"choose a file in a writable directory with {flag}"
    try:
        if text.endswith(("/", os.sep)) or path.is_dir():
            raise UserError(f"{text} is a directory: name a file with {flag}")
        _check_regular(path)
        fresh = not path.exists()
        with path.open("ab"):
            pass
        if fresh:
            path.unlink()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {text} ({getattr(error, 'strerror', None) or error}): {remedy}") from None
    return path


_DEFLATE = 1032  # times its size is the most that a compressed archive can make


def read_member(archive: zipfile.ZipFile, name: str, head: int = -1) -> bytes:
    """A file in an archive, or its first `head` bytes, unless the archive claims more than it can hold.

    Raises:
        ValueError, OSError, zipfile.BadZipFile, zlib.error, KeyError: it is damaged, or there is none of this name.
    """
    info = archive.getinfo(name)
    if info.file_size > _DEFLATE * info.compress_size or info.compress_size > os.path.getsize(str(archive.filename)):
        raise ValueError(f"it claims {info.file_size:,} bytes of {name}, which it cannot hold")
    with archive.open(info) as file:
        return file.read(head)


def _check_regular(path: Path) -> None:
    """Raises OSError for devices, pipes and sockets, which a file would take the place of."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file `path`, or the one that it links to, by text or bytes, all or nothing.

    Raises:
        OSError: the directory is absent, not writable, or its disk is full, or `path` is a device, pipe or directory;
            it is as it was before.
    """
    _check_regular(path)
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
