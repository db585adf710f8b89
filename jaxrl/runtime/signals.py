"""Signals that ask a run to end: Ctrl-C, SIGTERM of `timeout` and clusters, SIGUSR1 before a limit of SLURM."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TWICE_SECONDS = 0.2  # a signal that comes again so soon is the same one: `timeout` sends two


class StopSignals:
    """The signals that have come so far."""

    def __init__(self) -> None:
        self.names: list[str] = []  # of the first one, such as "SIGTERM"; empty before it
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
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.names:
            self._began = time.monotonic()
            self.names.append(signal.Signals(number).name)
        elif self.seconds > TWICE_SECONDS:
            # An orderly exit would wait for the device. Files on disk are consistent at any time.
            show_cursor = "\033[?25h" if sys.stderr.isatty() else ""
            print(f"{show_cursor}stopped at once, without a checkpoint", file=sys.stderr, flush=True)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
