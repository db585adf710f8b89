"""Signals that ask a run to end: Ctrl-C, SIGTERM of `timeout` and clusters, SIGUSR1 before a limit of SLURM."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TWICE_SECONDS = 0.2  # a signal that comes again so soon is the same one: `timeout` sends two
HANDLER_SECONDS = 1.0  # within which Python handles a signal, unless the main thread is stuck outside of Python


class StopSignals:
    """The signals that have come so far."""

    def __init__(self) -> None:
        self.names: list[str] = []  # the first one, such as "SIGTERM"; empty before it
        self._began = 0.0

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def seconds(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return time.monotonic() - self._began if self.names else 0.0

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect signals, which would otherwise end the process; a second one ends it at once.

        Ignored signals are collected, too: scripts start a process with `&` so that it ignores SIGINT. Outside the main
        thread, where Python cannot handle signals, this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {number: signal.signal(number, self._handle) for number in NUMBERS}
        try:
            with _watch():
                yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.names:
            self._began = time.monotonic()
            self.names.append(signal.Signals(number).name)
        elif self.seconds > TWICE_SECONDS:
            _say_stopped()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _say_stopped() -> None:
    # An orderly exit would wait for the device. Files on disk are consistent at any time.
    show_cursor = "\033[?25h" if sys.stderr.isatty() else ""
    print(f"{show_cursor}stopped at once, without a checkpoint", file=sys.stderr, flush=True)


@contextmanager
def _watch() -> Iterator[None]:
    """End the process at a second signal, also while the main thread cannot handle it.

    Python calls handlers in the main thread, which waits inside of JAX while an environment on the host steps. A thread
    of our own learns of signals through a pipe, to which Python writes at once.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=_end_at_second_signal, args=(reading,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writing)  # which ends the thread
        thread.join()
        os.close(reading)


def _end_at_second_signal(reading: int) -> None:
    first: float | None = None
    while number := int.from_bytes(os.read(reading, 1)):
        if number not in NUMBERS:
            continue
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first > TWICE_SECONDS:
            time.sleep(HANDLER_SECONDS)
            _say_stopped()
            os._exit(128 + number)
