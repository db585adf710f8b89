"""Units of work of `bench.gpu`, in order of importance; the file of their results, and the table made of it."""

import dataclasses
import importlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically

RESULTS, SUMMARY = "results.json", "summary.md"  # {unit: its result}; the table
CUT = "cut off"  # begins the error of a running unit, and of one that took too long
TRIES = 3  # a unit that was cut off gets further with its programs in the cache
GRAPHS = "correct_graphs"  # if this unit fails, the others run without CUDA graphs
MIN_SECONDS = 20.0  # left of a call for a unit to begin


@dataclasses.dataclass(frozen=True)
class Unit:
    """One job with a result of its own."""

    part: str  # that it belongs to
    name: str  # its result's
    seconds: float  # limit, compiling included
    # "module:function", called as function(quick=bool, folder=Path), whose result has "rows": [[what, figure, unit],
    # ...] for the table, and entries of its own
    where: str

    def load(self) -> Callable[..., dict[str, Any]]:
        module, _, function = self.where.partition(":")
        return getattr(importlib.import_module(module), function)


UNITS = tuple(
    Unit(part, f"{part}_{name}", seconds, f"bench.gpu.{part}:{name}")
    for part, name, seconds in (
        ("device", "rates", 60),
        ("device", "launches", 30),
        ("correct", "graphs", 240),
        ("correct", "coverage", 120),
        ("correct", "snakes", 120),
        ("correct", "reach", 120),
        ("correct", "learner", 120),
        ("correct", "maps", 90),
        ("correct", "resume", 180),
        ("correct", "donation", 60),
        ("environments", "coverage", 240),
        ("environments", "snakes", 240),
        ("environments", "reach", 240),
        ("scaling", "coma", 900),
        ("scaling", "ddpg", 600),
        ("scaling", "sac", 600),
        ("scaling", "snakes", 600),
        ("scaling", "reach", 600),
    )
)
SCALING = "scaling"  # the part that is only for machines with several devices
PARTS = tuple(dict.fromkeys(unit.part for unit in UNITS if unit.part != SCALING))


def begin(folder: Path, unit: Unit, quick: bool) -> None:
    """Save that a unit is running, in case its process is killed. Raises UserError."""
    tries = read(folder).get(unit.name, {}).get("tries", 0) + 1
    end(folder, unit, quick, error=CUT, tries=tries)


def note(folder: Path, name: str, **entries: Any) -> None:
    """Save the results of a running unit so far, in case it is cut off. Raises UserError."""
    results = read(folder)
    if name in results:  # not where the unit was called from elsewhere
        _store(folder, results | {name: results[name] | entries})


def end(folder: Path, unit: Unit, quick: bool, result: dict[str, Any] | None = None, **entries: Any) -> None:
    """Save the result of a unit, or its "error", and rewrite the table. One process at a time. Raises UserError."""
    results = read(folder)
    noted = {} if result is not None else results.get(unit.name, {})
    entry = {"part": unit.part, "unit": unit.name, "quick": quick, "error": None}
    _store(folder, results | {unit.name: noted | (result or {}) | entry | entries})


def waiting(folder: Path, parts: Collection[str]) -> list[Unit]:
    """Return the units to do in their order, those that took too long after all others."""
    results = read(folder)

    def tries(unit: Unit) -> int:
        entry = results.get(unit.name, {"error": CUT})
        return 0 if entry["error"] == CUT else int(entry["tries"])

    missing = [unit for unit in UNITS if unit.name not in results or may_retry(results[unit.name])]
    return sorted((unit for unit in missing if unit.part in parts), key=tries)


def may_retry(entry: Mapping[str, Any]) -> bool:
    """Return whether a unit was cut off, and not too often."""
    return (entry.get("error") or "").startswith(CUT) and entry["tries"] < TRIES


def forget(folder: Path, names: Collection[str]) -> None:
    """Remove the results of the units of these names. Raises UserError."""
    _store(folder, {name: entry for name, entry in read(folder).items() if name not in names})


def _store(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    try:
        write_atomically(folder / RESULTS, json.dumps(results, indent=1) + "\n")
        write_atomically(folder / SUMMARY, table(folder))
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror}): choose another folder with --out") from None


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results by unit, in the order of the units. Raises UserError."""
    file = folder / RESULTS
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        assert all({"part", "unit", "quick", "error"} <= entry.keys() for entry in results.values())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, AttributeError, AssertionError):
        raise UserError(f"{file} cannot be read, or holds no results: choose another folder with --out") from None
    return {unit.name: results[unit.name] for unit in UNITS if unit.name in results} | results


def check(folder: Path, quick: bool) -> None:
    """Raise UserError if the folder holds results of a rehearsal and this is none, or the other way round."""
    if any(entry["quick"] != quick for entry in read(folder).values()):
        which = "a rehearsal (--quick)" if not quick else "measurements that are no rehearsal"
        raise UserError(f"{folder} holds {which}: choose another folder with --out")


def find_failed(folder: Path) -> list[str]:
    """Return the units that ended with an error or found something wrong."""
    return [name for name, entry in read(folder).items() if entry["error"] or entry.get("wrong")]


def without_graphs(folder: Path) -> bool:
    """Return whether CUDA graphs have failed here; slow compiling proves nothing about them."""
    error = read(folder).get(GRAPHS, {}).get("error")
    return error is not None and not error.startswith(CUT)


def table(folder: Path) -> str:
    """Return all results as Markdown."""
    lines = ["| unit | what | figure |", "|---|---|---|"]
    results = read(folder)
    for name, entry in results.items():
        if entry["error"]:
            again = ", it is tried again" if may_retry(entry) else f" (--again {name} does it anew)"
            lines.append(f"| {name} | did not end | {_cell('FAILED: ' + entry['error'] + again)} |")
        for what, figure, unit in entry.get("rows", ()):
            lines.append(f"| {name} | {_cell(what)} | {_cell(f'{_number(figure)} {unit}')} |")
    if without_graphs(folder):
        lines.append(f"\n{GRAPHS} failed: the rest was done without CUDA graphs. Train with JAXRL_GRAPHS=off here.")
    if any(entry["quick"] for entry in results.values()):
        lines.append("\nA rehearsal (--quick): the figures mean nothing.")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|")


def _number(figure: Any) -> str:
    if isinstance(figure, bool):
        return "yes" if figure else "NO"
    return f"{figure:,.4g}" if isinstance(figure, float) else str(figure)
