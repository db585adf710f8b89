"""Memory, utilisation and power of the devices that JAX uses, as far as they can be asked."""

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

try:
    import pynvml
except ImportError:  # not on every platform; without it there are no GPU figures
    pynvml = None


class DeviceReading(NamedTuple):
    """One look at the local devices.

    Attributes:
        memory: bytes in use on the fullest device; for a CPU, the resident size of this process.
        memory_limit: bytes that JAX may use there, None if not known.
        utilisation: mean share of time, 0 to 1, in which the GPUs were computing, None without NVML.
        power: watts that the GPUs draw together, None without NVML.
    """

    memory: int
    memory_limit: int | None
    utilisation: float | None
    power: float | None


class Monitor:
    """Reads this process's local devices; NVML is opened once, if it answers.

    Use it as a context manager, or call `close`.
    """

    def __init__(self) -> None:
        self._devices = jax.local_devices()
        self._handles = _nvml_handles(self._devices)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> DeviceReading:
        """A few microseconds on CPU, about a millisecond with NVML."""
        memory, limit = max(map(device_memory, self._devices), key=lambda pair: pair[0])
        rates, watts = (
            [value for handle in self._handles if (value := _asked(question, handle)) is not None]
            for question in (_utilisation, _watts)
        )
        return DeviceReading(memory, limit, sum(rates) / len(rates) if rates else None, sum(watts) if watts else None)

    def close(self) -> None:
        """Let go of NVML."""
        if self._handles:
            pynvml.nvmlShutdown()
        self._handles = []


def device_memory(device: jax.Device) -> tuple[int, int | None]:
    """Bytes in use and the limit; where the device keeps no count (CPU), the process's resident size and None."""
    statistics = device.memory_stats()
    if not statistics:
        return resident_bytes(), None
    return statistics["bytes_in_use"], statistics.get("bytes_limit")


def resident_bytes() -> int:
    """Resident size of this process: the present one on Linux, the peak elsewhere."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _nvml_handles(devices: list[Any]) -> list[Any]:
    """NVML's handles of the GPUs among `devices`; empty if there are none or NVML does not answer."""
    ids = [device.local_hardware_id for device in devices if device.platform == "gpu"]
    if pynvml is None or not ids:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_nvml_handle(number) for number in ids]
    except pynvml.NVMLError:
        pynvml.nvmlShutdown()
        return []


def _nvml_handle(number: int) -> Any:
    """The handle of CUDA device `number`, which CUDA_VISIBLE_DEVICES may have renamed."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[number] if number < len(visible) else str(number)
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)


def _asked(question: Callable[[Any], float], handle: Any) -> float | None:
    try:
        return question(handle)
    except pynvml.NVMLError:  # not kept for a slice of a GPU (MIG)
        return None


def _utilisation(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0


def _watts(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetPowerUsage(handle)) / 1000.0
