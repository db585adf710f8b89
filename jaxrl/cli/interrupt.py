"""Ctrl-C that is not lost: what is raised while JAX traces and compiles may be ignored, so it is raised again."""

import gc
import signal
import threading
import types

_LATER, _AGAIN = 0.02, 1.0  # seconds


def install() -> None:
    """Let SIGINT raise KeyboardInterrupt until `answered`; handlers other than Python's own stay in place.

    A SIGINT that the process was started to ignore, as a script's `&` asks, is answered, too: it was sent on purpose.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN):
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)


def answered() -> None:
    """Stop raising: the caller has caught the KeyboardInterrupt and ends the program."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    # Python prints and ignores exceptions in callbacks of its garbage collector, and JAX has such a callback.
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks:
            signal.setitimer(signal.ITIMER_REAL, _LATER)
            return
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, _AGAIN)
    raise KeyboardInterrupt
