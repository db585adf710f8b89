"""Peak memory of a run, to compare with its plan."""

import contextlib
import re
from pathlib import Path

import jax

from jaxrl.report.gpu import resident_bytes


class PeakMemory:
    """Peak memory from now on, on the fullest local device.

    Where the device has no count (CPU), it is the growth of this process's resident size.
    """

    def __init__(self) -> None:
        self._before = resident_bytes()
        with contextlib.suppress(OSError):  # reset the peak, which compiling has set
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Return the peak in bytes."""
        statistics = [device.memory_stats() for device in jax.local_devices()]
        if all(statistics):
            return max(int(counts.get("peak_bytes_in_use", 0)) for counts in statistics)
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return max((1024 * int(peak[1]) if peak else resident_bytes()) - self._before, 0)
