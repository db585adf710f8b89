"""The file that `bench.gpu` writes, and the table made of it."""

import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.units import GRAPHS, UNITS, Unit
from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically

RESULTS, SUMMARY = "results.json", "summary.md"  # {unit: its result}; the table
CUT = "cut off"  # the error of a running unit
CALL, LIMIT = "end of the call", "time limit"  # reasons to cut a unit off
CALLS, LIMITS = 3, 1  # cuts after which a unit is still retried: in all, and by its time limit


def write(
    folder: Path,
    unit: Unit,
    quick: bool,
    result: dict[str, Any] | None = None,
    error: str | None = None,
    took: float | None = None,
    cuts: Sequence[str] = (),
) -> None:
    """Save the result of a unit, and rewrite the table. One process at a time. Raises UserError.

    Args:
        folder: of the results.
        unit: the unit that ended, or begins.
        quick: a rehearsal, whose figures mean nothing.
        result: its result; without an error it replaces earlier notes.
        error: why it did not finish.
        took: seconds, if it did.
        cuts: CALL or LIMIT for each time that it was cut off; without any an error is final.
    """
    entries = read(folder)
    noted = entries.get(unit.name, {}) if error else {}
    own = {"part": unit.part, "unit": unit.name, "quick": quick, "error": error, "took": took, "cuts": list(cuts)}
    _store(folder, entries | {unit.name: noted | (result or {}) | own})


def begin(folder: Path, unit: Unit, quick: bool) -> None:
    """Save that a unit is running, in case its process is killed. Raises UserError."""
    cuts = read(folder).get(unit.name, {}).get("cuts", [])
    write(folder, unit, quick, {"runs": None}, error=CUT, cuts=[*cuts, CALL])


def note(folder: Path, name: str, **found: Any) -> None:
    """Save the results of a running unit so far, in case it is cut off. Raises UserError."""
    entries = read(folder)
    if name in entries:  # not where the unit was called from elsewhere
        _store(folder, entries | {name: entries[name] | found})


def running(folder: Path, unit: Unit) -> float:
    """Return seconds since a unit reported that its programs are compiled and run; infinite if it has not."""
    began = read(folder).get(unit.name, {}).get("runs")
    return time.time() - began if began else float("inf")


def end(folder: Path, unit: Unit, quick: bool, error: str, limit: bool = False) -> None:
    """Save why the process of a unit has ended, unless the unit has; after its time limit it may be retried.

    Raises:
        UserError: nothing can be written.
    """
    entry = read(folder).get(unit.name, {})
    if entry.get("error") == CUT:
        write(folder, unit, quick, error=error, cuts=[*entry["cuts"][:-1], LIMIT] if limit else ())


def waiting(folder: Path, parts: Collection[str]) -> list[Unit]:
    """Return the units to do: those without a result, then retries after their time limit."""
    entries = read(folder)
    found = [
        unit for unit in UNITS if unit.part in parts and (unit.name not in entries or _may_retry(entries[unit.name]))
    ]
    return sorted(found, key=lambda unit: entries.get(unit.name, {}).get("cuts", []).count(LIMIT))


def _may_retry(entry: dict[str, Any]) -> bool:
    """Return whether a unit was cut off, and not too often: with its programs in the cache it gets further now."""
    cuts = entry.get("cuts", [])
    return 0 < len(cuts) <= CALLS and cuts.count(LIMIT) <= LIMITS and not _blames_graphs(entry)


def forget(folder: Path, names: Collection[str]) -> None:
    """Remove the results of the units of these names. Raises UserError."""
    _store(folder, {name: entry for name, entry in read(folder).items() if name not in names})


def _store(folder: Path, entries: dict[str, dict[str, Any]]) -> None:
    try:
        write_atomically(folder / RESULTS, json.dumps(entries, indent=1) + "\n")
        write_atomically(folder / SUMMARY, table(folder))
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror}): choose another folder with --out") from None


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results by unit, in the order of the units. Raises UserError."""
    file = folder / RESULTS
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(map(_is_entry, found.values())):
        raise UserError(f"{file} cannot be read, or holds no results: choose another folder with --out")
    return {unit.name: found[unit.name] for unit in UNITS if unit.name in found} | found


def _is_entry(found: Any) -> bool:
    if not isinstance(found, dict) or not {"part", "unit", "quick", "error"} <= found.keys():
        return False
    rows, cuts, error = found.get("rows", []), found.get("cuts", []), found["error"]
    return (
        isinstance(found["unit"], str)
        and (error is None or isinstance(error, str))
        and isinstance(cuts, list)
        and isinstance(rows, list)
        and all(isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) for row in rows)
    )


def check(folder: Path, quick: bool) -> None:
    """Raise UserError if the folder holds results of a rehearsal and this is none, or the other way round."""
    if any(entry["quick"] != quick for entry in read(folder).values()):
        which = "a rehearsal (--quick)" if not quick else "measurements that are no rehearsal"
        raise UserError(f"{folder} holds {which}: choose another folder with --out")


def failed(folder: Path) -> list[str]:
    """Return the units that ended with an error or found something wrong."""
    return [name for name, entry in read(folder).items() if entry["error"] or entry.get("wrong")]


def without_graphs(folder: Path) -> bool:
    """Return whether CUDA graphs have failed here, or given other results."""
    return _blames_graphs(read(folder).get(GRAPHS[1], {}))


def _blames_graphs(entry: dict[str, Any]) -> bool:
    """Return whether an error came when the programs ran (since `runs`): slow compiling proves nothing about graphs."""
    return bool(entry.get("runs")) and entry.get("error") not in (None, CUT)


def table(folder: Path) -> str:
    """Return all results as Markdown."""
    lines, entries = ["| unit | what | figure |", "|---|---|---|"], read(folder)
    for name, entry in entries.items():
        if entry["error"]:
            told = f"FAILED: {entry['error']}"
            told += ", it is tried again" if _may_retry(entry) else f" (--again {name} does it anew)"
            lines.append(f"| {name} | did not end | {_cell(told)} |")
        for what, figure, unit in entry.get("rows", ()):
            lines.append(f"| {name} | {_cell(what)} | {_cell(f'{_number(figure)} {unit}')} |")
    if without_graphs(folder):
        lines.append(f"\n{GRAPHS[1]} failed: the rest was done without CUDA graphs. Train with JAXRL_GRAPHS=off here.")
    if any(entry["quick"] for entry in entries.values()):
        lines.append("\nA rehearsal (--quick): the figures mean nothing.")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|")


def _number(figure: Any) -> str:
    if isinstance(figure, bool):
        return "yes" if figure else "NO"
    return f"{figure:,.4g}" if isinstance(figure, float) else str(figure)
