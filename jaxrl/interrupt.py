"""Ctrl-C that is not lost: Python ignores what is raised in a callback of its garbage collector, and JAX has one."""

import gc
import signal
import threading
import types

_LATER = 0.02  # seconds


def install() -> None:
    """Let SIGINT raise KeyboardInterrupt, outside such callbacks; handlers other than Python's own stay as they are."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks:
            signal.setitimer(signal.ITIMER_REAL, _LATER)
            return
        frame = frame.f_back
    raise KeyboardInterrupt
