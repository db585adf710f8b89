"""Peak memory of a run, to compare with its plan."""

import contextlib
from pathlib import Path

import jax

from jaxrl.report.gpu import resident_bytes


class PeakMemory:
    """Peak memory from now on, on the fullest local device.

    Where the device has no count (CPU), it is the growth of this process's resident size.
    """

    def __init__(self) -> None:
        self._before = resident_bytes()
        with contextlib.suppress(OSError):  # Linux: reset the peak, which compiling has set
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Return the peak in bytes."""
        statistics = [device.memory_stats() for device in jax.local_devices()]
        if all(statistics):
            return max(int(counts.get("peak_bytes_in_use", 0)) for counts in statistics)
        return max(_resident_peak() - self._before, 0)


def _resident_peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resident_bytes()
