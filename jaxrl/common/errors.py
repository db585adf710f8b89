"""Errors that a user caused or can fix: one clear sentence and an exit code, no traceback.

The commands (`train`, `evaluate`, ...) catch `UserError`, print its sentence on stderr and exit with its code.
Any other exception is a bug and keeps its traceback.
"""

import contextlib
import traceback
import typing
from collections.abc import Sequence


class UserError(Exception):
    """An error at run time; the message is one sentence that says what is wrong, and how to fix it."""

    exit_code = 1


class UsageError(UserError):
    """The command line or the configuration asks for something impossible."""

    exit_code = 2


_HEAD = 500  # characters kept at the beginning of a long sentence
_TAIL = 250  # and at its end


def one_line(sentence: str) -> str:
    """Return a sentence as one line of bounded length without control characters, for the console."""
    if len(sentence) > _HEAD + _TAIL:
        sentence = f"{sentence[:_HEAD]} [...] {sentence[-_TAIL:]}"
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in sentence)


def list_names(names: Sequence[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@contextlib.contextmanager
def usage_errors(traced: bool = False) -> typing.Iterator[None]:
    """Convert ValueErrors, which environments and algorithms raise with a sentence, into UsageErrors.

    Convert NotImplementedErrors too, by which the base classes name methods that a user's class lacks. Around code that
    is `traced`, the user's own, errors raised elsewhere keep their traceback.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if traced and str(frame.f_globals.get("__name__")).partition(".")[0] not in ("jaxrl", "envs_jax"):
            raise
        raise UsageError(str(error)) from None
