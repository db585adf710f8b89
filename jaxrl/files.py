"""Writing small files so that a reader, or the next run after a kill, never meets half of one."""

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file `path` by text or bytes, all or nothing.

    Raises:
        OSError: the directory is absent, not writable, or its disk is full; `path` is as it was before.
    """
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
