"""The file that `bench.gpu` writes, and the table made of it."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from bench.gpu.units import GRAPHS, UNITS, Unit
from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically

RESULTS, SUMMARY = "results.json", "summary.md"  # {unit: what it found}; the table


def write(
    folder: Path,
    unit: Unit,
    quick: bool,
    result: dict[str, Any] | None = None,
    error: str | None = None,
    seconds: float | None = None,
) -> None:
    """Keep what a unit found, or why it found nothing, and renew the table. One process at a time. Raises UserError."""
    entry = {"part": unit.part, "unit": unit.name, "quick": quick, "error": error, "seconds": seconds}
    _store(folder, read(folder) | {unit.name: entry | (result or {})})


def forget(folder: Path, names: Collection[str]) -> None:
    """Take out what the units of these names found. Raises UserError."""
    _store(folder, {name: entry for name, entry in read(folder).items() if name not in names})


def _store(folder: Path, entries: dict[str, dict[str, Any]]) -> None:
    try:
        write_atomically(folder / RESULTS, json.dumps(entries, indent=1) + "\n")
        write_atomically(folder / SUMMARY, table(folder))
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror}): choose another folder with --out") from None


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Results by unit, in the order of the units. Raises UserError."""
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
    return isinstance(found, dict) and {"part", "unit", "quick", "error"} <= found.keys()


def check(folder: Path, quick: bool) -> None:
    """Raises UserError if the folder holds results of a rehearsal and this is none, or the other way round."""
    if any(entry["quick"] != quick for entry in read(folder).values()):
        which = "a rehearsal (--quick)" if not quick else "measurements that are no rehearsal"
        raise UserError(f"{folder} holds {which}: choose another folder with --out")


def failed(folder: Path) -> list[str]:
    """Units that ended with an error or found something wrong."""
    return [name for name, entry in read(folder).items() if entry["error"] or entry.get("wrong")]


def without_graphs(folder: Path) -> bool:
    """Return whether CUDA graphs have failed here, or given other results."""
    return GRAPHS[1] in failed(folder)


def table(folder: Path) -> str:
    """All results as Markdown."""
    lines, entries = ["| part | what | figure |", "|---|---|---|"], read(folder).values()
    for entry in entries:
        if entry["error"]:
            lines.append(f"| {entry['part']} | {entry['unit']} | FAILED: {_cell(entry['error'])} |")
        for what, figure, unit in entry.get("rows", ()):
            lines.append(f"| {entry['part']} | {_cell(what)} | {_cell(f'{_number(figure)} {unit}')} |")
    if without_graphs(folder):
        lines.append(f"\n{GRAPHS[1]} failed: the rest was done without CUDA graphs. Train with JAXRL_GRAPHS=off here.")
    if any(entry["quick"] for entry in entries):
        lines.append("\nA rehearsal (--quick): the figures mean nothing.")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|")


def _number(figure: Any) -> str:
    if isinstance(figure, bool):
        return "yes" if figure else "NO"
    return f"{figure:,.4g}" if isinstance(figure, float) else str(figure)
