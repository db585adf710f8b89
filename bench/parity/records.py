"""Reference data of the environments: records of the original systems ("recorded"), and our own ("own").

The records of the original systems are large and not part of the repository. They are searched in the directory named
by the environment variable JAXRL_GOLDEN, or else in `../shared/golden` next to the repository. Our own data lie in
`tests/data`, in the same form: records of the NumPy oracles in `bench/`, made at commit abbf87e.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.common.errors import UserError

COVERAGE_MISSIONS = tuple(f"m{i:02d}" for i in range(10))

SOURCES = ("own", "recorded")
OWN = {  # our own file by the name of the recorded one
    "coverage_missions": "parity_coverage",
    "snakes_transitions": "parity_snakes",
    "reach_episodes": "parity_reach",
}

_SIDE = {57: 493, 29: 251, 28: 242, 11: 95, 7: 60, 6: 51, 5: 43}  # map side in cells by pixels per footprint edge


_ROOT = Path(__file__).resolve().parents[2]  # the repository


class NoRecordError(UserError):
    """Recorded data are not available."""


def directory() -> Path:
    """Return the directory of the recorded data, whether it exists or not."""
    default = _ROOT.parent / "shared" / "golden"
    return Path(os.environ.get("JAXRL_GOLDEN") or default)


@functools.lru_cache(maxsize=8)
def _open(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def path(name: str, source: str = "recorded") -> Path:
    """Return the path of the record file `name`; `source`: one of SOURCES."""
    if source == "own":
        return _ROOT / "tests" / "data" / f"{OWN[name]}.npz"
    return directory() / f"{name}.npz"


def load(name: str, source: str = "recorded") -> dict[str, np.ndarray]:
    """Load all arrays of the record file `name`, cached; our own data always exist.

    Raises NoRecordError: the file is absent.
    """
    file = path(name, source)
    if not file.is_file():
        raise NoRecordError(f"no recorded data {file.name}: set JAXRL_GOLDEN to the directory that holds it")
    return _open(file)


class CoverageRecord:
    """One recorded coverage mission; `record["obs"]` is the array stored as `<name>_obs`."""

    def __init__(self, name: str):
        self.name = name  # "m00" .. "m09" or "ig0", "ig1"; "own-m00" and so on in our own data
        source, _, self._prefix = name.rpartition("-")
        self._arrays = load("coverage_missions", source or "recorded")
        # the recorded settings (n_agents, budget, pixel, range, ...)
        self.config: dict[str, Any] = json.loads(str(self["config"]))
        self.num_agents: int = self.config["n_agents"]
        self.steps: int = self.config["budget"] + 1
        self.q: int = self.config["pixel"]
        self.n = int(self["grid"][0]) if "grid" in self else _SIDE[self.q]  # map side in cells
        row_lo, row_hi, col_lo, col_hi = self["truth_bounds"]
        self.truth = np.zeros((self.n, self.n), dtype=bool)  # [n, n] bool, ground truth
        self.truth[row_lo:row_hi, col_lo:col_hi] = True
        # nested list, readings[k][agent] is the bool array over the clipped footprint; True = "occupied"
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
        """Return the recorded measurement k of an agent: bool over its clipped footprint (given as a check)."""
        box = tuple(int(v) for v in self["footprint"][k, agent])
        if footprint is not None and tuple(int(v) for v in footprint) != box:
            raise AssertionError(f"{self.name}: footprint {tuple(footprint)} at k={k}, agent {agent}; recorded {box}")
        return self.readings[k][agent]


@functools.lru_cache(maxsize=16)
def coverage_mission(name: str) -> CoverageRecord:
    """Load the recorded mission `name`. Raises NoRecordError."""
    return CoverageRecord(name)
