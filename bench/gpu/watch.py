"""Utilisation and power of a busy device, where it reports them."""

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxrl.report.gpu import DeviceReading, Monitor

EVERY = 0.1  # seconds between readings
UNKNOWN = "not measured: NVML, the driver's library, gives no figure here"
SETTLE = 1.0  # seconds before the first: a reading of NVML is a mean over up to one


def watch(work: Callable[[], Any], seconds: float, settle: float = SETTLE) -> dict[str, Any]:
    """Call `work` repeatedly, and read the device meanwhile.

    Args:
        work: the device's work; its result is waited for.
        seconds: of the readings.
        settle: seconds of work before them.

    Returns:
        utilisation (mean, 0 to 1) and power (mean, watts), None where not reported; calls, seconds and
        readings.
    """
    readings: list[DeviceReading] = []
    done = threading.Event()

    def read() -> None:
        with Monitor() as monitor:
            while not done.wait(EVERY):
                readings.append(monitor.read())

    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < settle:
        jax.block_until_ready(work())
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    began = time.perf_counter()
    try:
        while (took := time.perf_counter() - began) < seconds or not calls:
            jax.block_until_ready(work())
            calls += 1
    finally:
        done.set()
        reader.join()
    found = {name: _mean(getattr(reading, name) for reading in readings) for name in ("utilisation", "power")}
    return {**found, "calls": calls, "seconds": took, "readings": len(readings)}


def rows(who: str, found: dict[str, Any]) -> list[list[Any]]:
    """Return rows of the table; a figure that could not be read is marked as such."""
    busy, power = found["utilisation"], found["power"]
    return [
        [f"{who}: GPU busy", UNKNOWN if busy is None else 100.0 * busy, "" if busy is None else "%"],
        [f"{who}: power", UNKNOWN if power is None else power, "" if power is None else "W"],
    ]


def answers() -> bool:
    """Return whether the device reports its readings."""
    with Monitor() as monitor:
        reading = monitor.read()
    return reading.utilisation is not None or reading.power is not None


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
