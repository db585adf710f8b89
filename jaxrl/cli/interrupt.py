"""Ctrl-C that is not lost: JAX may ignore an exception while it traces and compiles, so it is raised again."""

import functools
import gc
import signal
import threading
import types

_LATER, _AGAIN = 0.02, 1.0  # seconds


def install() -> None:
    """Let signals that end a command raise KeyboardInterrupt with their number until `stop_raising`.

    Handlers that are not Python's own stay in place. SIGINT is answered even if the process was started to ignore it,
    as by `&` in a script: it was sent on purpose.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, functools.partial(_interrupt, number))


def stop_raising() -> None:
    """Stop raising: the caller has caught the KeyboardInterrupt and ends the program."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupt(first: int, number: int, frame: types.FrameType | None) -> None:
    """Raise KeyboardInterrupt for signal `first` now, and again at the next alarm, because it may be lost."""
    signal.signal(signal.SIGALRM, functools.partial(_interrupt, first))
    # Python prints and ignores exceptions in callbacks of its garbage collector, and JAX has such a callback.
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks:
            signal.setitimer(signal.ITIMER_REAL, _LATER)
            return
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, _AGAIN)
    raise KeyboardInterrupt(first)
