"""Errors that a user caused or can mend: one clear sentence and an exit code, no traceback.

The verbs (`train`, `evaluate`, ...) catch `UserError`, print its sentence on stderr and exit with its code.
Everything else that is raised is a defect of the program and keeps its traceback.
"""

import contextlib
import typing


class UserError(Exception):
    """Something went wrong at run time; the message is one sentence that says what, and how to mend it."""

    exit_code = 1


class UsageError(UserError):
    """The command line or the configuration asks for something impossible."""

    exit_code = 2


_HEAD, _TAIL = 500, 250  # characters of a sentence


def one_line(sentence: str) -> str:
    """A sentence for the console: one line of bounded length without control characters, whatever it quotes."""
    if len(sentence) > _HEAD + _TAIL:
        sentence = f"{sentence[:_HEAD]} [...] {sentence[-_TAIL:]}"
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in sentence)


@contextlib.contextmanager
def usage_errors() -> typing.Iterator[None]:
    """ValueErrors, which environments and algorithms raise with a sentence, become UsageErrors.

    So do NotImplementedErrors, by which the base classes name what a user's class lacks.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
