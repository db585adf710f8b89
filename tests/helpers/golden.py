"""Reference data for tests, which are skipped, with a reason, where the recorded ones are absent."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from bench.parity import records
from bench.parity.records import CoverageRecord

COVERAGE_MISSIONS = records.COVERAGE_MISSIONS
COVERAGE_FULL_MISSIONS = ("m03", "m04", "m05", "m06", "m08", "m09")  # whole belief maps recorded at every step
COVERAGE_GREEDY = ("ig0", "ig1")


@contextlib.contextmanager
def skipping() -> Iterator[None]:
    """Skips the test where its recorded data are absent."""
    try:
        yield
    except records.NoRecordError as absent:
        pytest.skip(str(absent))


def load(name: str, source: str = "recorded") -> dict[str, np.ndarray]:
    """All arrays of a record file; skips the test if it is absent. source: one of records.SOURCES."""
    with skipping():
        return records.load(name, source)
    raise AssertionError("skipping ends the test")


def coverage_mission(name: str) -> CoverageRecord:
    """The recorded mission `name`; skips the test if the records are absent."""
    with skipping():
        return records.coverage_mission(name)
    raise AssertionError("skipping ends the test")


def formula_tensor(shape: tuple[int, ...], tag: int, fan_in: int) -> np.ndarray:
    """Float32 network weights of the given (PyTorch) shape from a hash of the flat index and the tensor's tag."""
    with np.errstate(over="ignore"):
        x = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)
        x += np.uint32(tag * 0x7FEB352D & 0xFFFFFFFF)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        x ^= x >> np.uint32(16)
    return ((2.0 * x / 2.0**32 - 1.0) / np.sqrt(fan_in)).astype(np.float32).reshape(shape)


def coverage_network(base: int, channels: int, num_actions: int = 6, width: int = 256) -> dict[str, np.ndarray]:
    """Formula weights of one network of the learner record, PyTorch layout: conv1_weight, conv1_bias, ..., fc3_bias.

    base: 100 actor (7 channels), 200 critic, 300 target critic (12 channels). The unused layer fc2 is left out.
    """
    layers = {  # name: (tag of the weight, shape of the weight)
        "conv1": (0, (width, channels, 5, 5)), "conv2": (2, (width, width, 4, 4)), "conv3": (4, (width, width, 4, 4)),
        "fc1": (6, (width, width)), "fc3": (10, (num_actions, width)),
    }  # fmt: skip
    arrays = {}
    for name, (tag, shape) in layers.items():
        fan_in = int(np.prod(shape[1:]))
        arrays[f"{name}_weight"] = formula_tensor(shape, base + tag, fan_in)
        arrays[f"{name}_bias"] = formula_tensor(shape[:1], base + tag + 1, fan_in)
    return arrays
