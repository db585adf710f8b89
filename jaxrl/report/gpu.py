"""Memory, utilisation and power of JAX's devices, as far as available."""

import ctypes
import os
import resource
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

NVML = "libnvidia-ml.so.1"  # part of the driver; without it there are no GPU figures


class NvmlError(Exception):
    """NVML does not answer, or has no such figure."""


class DeviceReading(NamedTuple):
    """One reading of the local devices.

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
        self._nvml, self._handles = _nvml_handles(self._devices)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> DeviceReading:
        """Read the devices: a few microseconds on CPU, about a millisecond with NVML."""
        memory, limit = max(map(device_memory, self._devices), key=lambda pair: pair[0])
        rates, watts = (
            [value for handle in self._handles if (value := self._asked(figure, handle)) is not None]
            for figure in ("utilisation", "watts")
        )
        return DeviceReading(memory, limit, sum(rates) / len(rates) if rates else None, sum(watts) if watts else None)

    def close(self) -> None:
        """Release NVML."""
        if self._nvml is not None:
            self._nvml.close()
        self._nvml, self._handles = None, []

    def _asked(self, figure: str, handle: Any) -> float | None:
        try:
            return float(getattr(self._nvml, figure)(handle))
        except NvmlError:  # not available for a slice of a GPU (MIG)
            return None


class Nvml:
    """The driver's library, the functions used here. Raises NvmlError, as all its methods do."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(NVML)
        except OSError:
            raise NvmlError("no driver") from None
        self._ask("nvmlInit_v2")

    def _ask(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._library, function)(*arguments):
            raise NvmlError(f"{function} returned {code}")

    def handle(self, name: str) -> ctypes.c_void_p:
        """Return the handle of the GPU with this number or UUID."""
        found = ctypes.c_void_p()
        if name.isdecimal():
            self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(found))
        else:
            self._ask("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(found))
        return found

    def utilisation(self, handle: ctypes.c_void_p) -> float:
        """Return the share of the last sampling period in which a kernel ran, 0 to 1."""
        found = (ctypes.c_uint * 2)()  # of the GPU and of its memory, in percent
        self._ask("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(found))
        return found[0] / 100.0

    def watts(self, handle: ctypes.c_void_p) -> float:
        """Return the power in watts."""
        found = ctypes.c_uint()
        self._ask("nvmlDeviceGetPowerUsage", handle, ctypes.byref(found))
        return found.value / 1000.0

    def close(self) -> None:
        """Release the library."""
        self._library.nvmlShutdown()


def device_memory(device: jax.Device) -> tuple[int, int | None]:
    """Return bytes in use and the limit; on CPU, which has no count, the process's resident size and None."""
    statistics = device.memory_stats()
    if not statistics:
        return resident_bytes(), None
    return statistics["bytes_in_use"], statistics.get("bytes_limit")


def resident_bytes() -> int:
    """Return the resident size of this process: the current one on Linux, the peak elsewhere."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _nvml_handles(devices: list[Any]) -> tuple[Nvml | None, list[Any]]:
    """Return NVML and its handles of the GPUs among `devices`; none without GPUs or NVML."""
    ids = [device.local_hardware_id for device in devices if device.platform == "gpu"]
    if not ids:
        return None, []
    try:
        nvml = Nvml()
    except NvmlError:
        return None, []
    try:
        return nvml, [nvml.handle(_name(number)) for number in ids]
    except NvmlError:
        nvml.close()
        return None, []


def _name(number: int) -> str:
    """Return NVML's name of CUDA device `number`, which CUDA_VISIBLE_DEVICES may have renumbered."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[number] if number < len(visible) else str(number)
