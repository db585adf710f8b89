"""Processes forked from one that used JAX: there every call of JAX would wait forever for threads that are gone."""

import os

_users: set[int] = set()  # that called `check_process`: this process and its parents


def check_process(what: str, instead: str) -> None:
    """Raise ValueError in a process forked from one that called this; `what` would hang, `instead` says what to do."""
    _users.add(os.getpid())
    if len(_users) > 1:
        raise ValueError(
            f"this process was forked from one in which JAX already ran, so {what} would hang here: start the workers "
            f"with 'spawn' ({instead})"
        )
