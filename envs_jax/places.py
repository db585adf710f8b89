"""Where an error comes from: the line of the user's own file, among frames of JAX, of Python and of this project."""

import os
import sys
import traceback
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[1]
_NOT_THE_USERS = (str(_PROJECT / "jaxrl"), str(_PROJECT / "envs_jax"), sys.prefix, sys.base_prefix)


def find_place(error: BaseException) -> str | None:
    """Return "file.py:line" of the innermost frame in a file of the user's own, None if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return _name(error.filename, error.lineno or 1)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.abspath(frame.filename)
        is_file = not frame.filename.startswith("<")
        if is_file and not any(path.startswith(folder + os.sep) for folder in _NOT_THE_USERS):
            return _name(path, frame.lineno or 1)
    return None


def _name(path: str, line: int) -> str:
    return f"{min(path, os.path.relpath(path), key=len)}:{line}"
