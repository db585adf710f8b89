"""Memory, utilisation and power of JAX's devices, as far as available."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pynvml


class DeviceReading(NamedTuple):
    """One reading of the local devices."""

    memory: int  # bytes in use on the fullest device; for a CPU, the resident size of this process
    memory_limit: int | None  # bytes that JAX may use there, None if not known
    utilisation: float | None  # mean share of time, 0 to 1, in which the GPUs were computing, None without NVML
    power: float | None  # watts that the GPUs draw together, None without NVML


@contextlib.contextmanager
def nvml() -> Iterator[None]:
    """Open NVML, the driver's library. Raises pynvml.NVMLError where there is none."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


class Monitor:
    """Reads this process's local devices, within a `with` statement; NVML is opened once, if it answers."""

    def __enter__(self) -> "Monitor":
        self._devices = jax.local_devices()
        self._handles = []
        self._nvml = contextlib.ExitStack()
        if gpus := [device for device in self._devices if device.platform == "gpu"]:
            with contextlib.suppress(pynvml.NVMLError):
                self._nvml.enter_context(nvml())
                self._handles = [_handle(device.local_hardware_id) for device in gpus]
        return self

    def __exit__(self, *_: object) -> None:
        self._nvml.close()

    def read(self) -> DeviceReading:
        """Read the devices: a few microseconds on CPU, about a millisecond with NVML."""
        memory, limit = max(map(_memory, self._devices), key=lambda pair: pair[0])
        busy = self._figures(lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0)
        power = self._figures(lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0)
        return DeviceReading(memory, limit, sum(busy) / len(busy) if busy else None, sum(power) if power else None)

    def _figures(self, read: Callable[[Any], float]) -> list[float]:
        figures = []
        for handle in self._handles:
            with contextlib.suppress(pynvml.NVMLError):  # not available for a slice of a GPU (MIG)
                figures.append(read(handle))
        return figures


def _memory(device: jax.Device) -> tuple[int, int | None]:
    """Return bytes in use and the limit; on CPU, which has no count, the process's resident size and None."""
    statistics = device.memory_stats()
    if not statistics:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"), None
    return statistics["bytes_in_use"], statistics.get("bytes_limit")


def _handle(number: int) -> Any:
    """Return NVML's handle of CUDA device `number`, which CUDA_VISIBLE_DEVICES may have renumbered."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[number] if number < len(visible) else str(number)
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
