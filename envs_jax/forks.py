"""Processes forked after JAX had run, in which every call of JAX would wait forever for threads that are not there."""

import os
import sys

_forked_after_jax = False


def _after_fork() -> None:
    """Remember whether JAX had its devices in the parent."""
    global _forked_after_jax
    backends = sys.modules.get("jax._src.xla_bridge")  # which has no public name, and must not be imported here
    is_started = getattr(backends, "backends_are_initialized", lambda: True)
    _forked_after_jax = _forked_after_jax or (backends is not None and is_started())


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_fork)


def check_process(what: str, instead: str) -> None:
    """Raise ValueError in a process forked from one in which JAX ran; `what` would hang, `instead` says what to do."""
    if _forked_after_jax:
        raise ValueError(
            f"this process was forked from one in which JAX already ran, so {what} would hang here: start the workers "
            f"with 'spawn' ({instead})"
        )
