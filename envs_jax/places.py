"""Where an error comes from: the line of the user's own file, among frames of libraries, Python and this project."""

import contextlib
import os
import sysconfig
import traceback
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[1]
_FOLDERS = (str(_PROJECT / "jaxrl"), str(_PROJECT / "envs_jax"), sysconfig.get_paths()["stdlib"])
_LIBRARIES = ("site-packages", "dist-packages")


def find_place(error: BaseException) -> str | None:
    """Return "file.py:line" of the innermost frame in a file of the user's own, None if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return _name(error.filename, error.lineno or 1)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith("<") and _is_the_users(frame.filename):
            return _name(frame.filename, frame.lineno or 1)
    return None


def _is_the_users(filename: str) -> bool:
    in_library = any(part in _LIBRARIES for part in Path(filename).parts)
    return not in_library and not any(filename.startswith(folder + os.sep) for folder in _FOLDERS)


def _name(path: str, line: int) -> str:
    """Name a line by the shorter one of the absolute and the relative path."""
    with contextlib.suppress(OSError, ValueError):  # the working directory is gone, or on another drive
        path = min(os.path.abspath(path), os.path.relpath(path), key=len)
    return f"{path}:{line}"
