"""Data that tests of the environments compare with: what the original systems did ("recorded"), and our own.

The records of the original systems are large and not part of the repository. They are looked for in the directory named
by the environment variable JAXRL_GOLDEN, or else in `../shared/golden` beside the repository; tests that need them are
skipped, with a reason, where they are absent. Our own data lie in `tests/data`, in the same form: what the NumPy
oracles in `bench/` do, written by `scripts/record_parity.py`.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

COVERAGE_MISSIONS = tuple(f"m{i:02d}" for i in range(10))
COVERAGE_FULL_MISSIONS = (
    "m03",
    "m04",
    "m05",
    "m06",
    "m08",
    "m09",
)  # whole belief maps recorded at every step
COVERAGE_GREEDY = ("ig0", "ig1")
COVERAGE_OWN_MISSIONS = ("own-m00", "own-m01")
COVERAGE_OWN_GREEDY = ("own-ig0",)

SOURCES = ("own", "recorded")
OWN = {  # our own file by the name of the recorded one
    "coverage_missions": "parity_coverage",
    "snakes_transitions": "parity_snakes",
    "reach_episodes": "parity_reach",
}

_SIDE = {
    57: 493,
    29: 251,
    28: 242,
    11: 95,
    7: 60,
    6: 51,
    5: 43,
}  # map side in cells by pixels per footprint edge


def directory() -> Path:
    """The directory of the recorded data, whether it exists or not."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "golden"
    return Path(os.environ.get("JAXRL_GOLDEN") or default)


@functools.lru_cache(maxsize=8)
def _open(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def load(name: str, source: str = "recorded") -> dict[str, np.ndarray]:
    """All arrays of the record file `name` (suffix .npz optional), read once; skips the test if it is absent.

    source: one of SOURCES; our own data are always there.
    """
    if source == "own":
        return _open(Path(__file__).parent / "data" / f"{OWN[name]}.npz")
    path = directory() / (name if name.endswith(".npz") else name + ".npz")
    if not path.is_file():
        pytest.skip(f"no recorded data {path.name}: set JAXRL_GOLDEN to the directory that holds it")
    return _open(path)


class CoverageRecord:
    """One recorded coverage mission; `record["obs"]` is the array stored as `<name>_obs`.

    Attributes:
        name: "m00" .. "m09" or "ig0", "ig1"; "own-m00" and so on in our own data.
        config: the recorded settings (n_agents, budget, pixel, range, ...).
        n: map side in cells.
        truth: [n, n] bool, ground truth.
        readings: nested list, readings[k][agent] is the bool array over the clipped footprint; True = "occupied".
    """

    def __init__(self, name: str):
        self.name = name
        own, _, self._prefix = name.rpartition("-")
        self._arrays = load("coverage_missions", own or "recorded")
        self.config: dict[str, Any] = json.loads(str(self["config"]))
        self.num_agents: int = self.config["n_agents"]
        self.steps: int = self.config["budget"] + 1
        self.q: int = self.config["pixel"]
        self.n = int(self["grid"][0]) if "grid" in self else _SIDE[self.q]
        row_lo, row_hi, col_lo, col_hi = self["truth_bounds"]
        self.truth = np.zeros((self.n, self.n), dtype=bool)
        self.truth[row_lo:row_hi, col_lo:col_hi] = True
        self.readings = self._unpack()

    def __getitem__(self, key: str) -> np.ndarray:
        return self._arrays[f"{self._prefix}_{key}"]

    def __contains__(self, key: str) -> bool:
        return f"{self._prefix}_{key}" in self._arrays

    def _unpack(self) -> list[list[np.ndarray]]:
        bits = np.unpackbits(self["meas_bits"])[: int(self["meas_total_bits"])].astype(bool)
        rows: list[list[np.ndarray]] = []
        for boxes, offsets in zip(self["footprint"], self["meas_offset"], strict=True):
            row = []
            for (r0, r1, c0, c1), start in zip(boxes.astype(int), offsets.astype(int), strict=True):
                shape = (r1 - r0, c1 - c0)
                row.append(bits[start : start + shape[0] * shape[1]].reshape(shape))
            rows.append(row)
        return rows

    def reading(self, k: int, agent: int, footprint: Any = None) -> np.ndarray:
        """The recorded measurement k of an agent: bool over its clipped footprint (given as a check of its shape)."""
        box = tuple(int(v) for v in self["footprint"][k, agent])
        if footprint is not None and tuple(int(v) for v in footprint) != box:
            raise AssertionError(f"{self.name}: footprint {tuple(footprint)} at k={k}, agent {agent}; recorded {box}")
        return self.readings[k][agent]


@functools.lru_cache(maxsize=16)
def coverage_mission(name: str) -> CoverageRecord:
    """The recorded mission `name`; skips the test if the records are absent."""
    return CoverageRecord(name)


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
        "conv1": (0, (width, channels, 5, 5)),
        "conv2": (2, (width, width, 4, 4)),
        "conv3": (4, (width, width, 4, 4)),
        "fc1": (6, (width, width)),
        "fc3": (10, (num_actions, width)),
    }
    arrays = {}
    for name, (tag, shape) in layers.items():
        fan_in = int(np.prod(shape[1:]))
        arrays[f"{name}_weight"] = formula_tensor(shape, base + tag, fan_in)
        arrays[f"{name}_bias"] = formula_tensor(shape[:1], base + tag + 1, fan_in)
    return arrays
