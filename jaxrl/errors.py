"""Errors that a user caused or can mend: one clear sentence and an exit code, no traceback.

The verbs (`train`, `evaluate`, ...) catch `UserError`, print its sentence on stderr and exit with its code.
Everything else that is raised is a defect of the program and keeps its traceback.
"""


class UserError(Exception):
    """Something went wrong at run time; the message is one sentence that says what, and how to mend it."""

    exit_code = 1


class UsageError(UserError):
    """The command line or the configuration asks for something impossible."""

    exit_code = 2
