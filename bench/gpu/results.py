"""The files that `bench.gpu` writes, and the table made of them."""

import json
from pathlib import Path
from typing import Any

from bench.gpu.units import GRAPHS, UNITS, Unit
from jaxrl.errors import UserError
from jaxrl.files import write_atomically


def path(folder: Path, unit: Unit) -> Path:
    """The file of a unit's result."""
    return folder / f"{unit.name}.json"


def write(
    folder: Path,
    unit: Unit,
    quick: bool,
    result: dict[str, Any] | None = None,
    error: str | None = None,
    seconds: float | None = None,
) -> None:
    """Keep what a unit found, or why it found nothing."""
    entry = {"part": unit.part, "unit": unit.name, "quick": quick, "error": error, "seconds": seconds}
    text = json.dumps(entry | (result or {}), indent=1)
    write_atomically(path(folder, unit), text + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """Results in the order of the units. Raises UserError."""
    found = []
    for unit in UNITS:
        if path(folder, unit).exists():
            try:
                found.append(json.loads(path(folder, unit).read_text()))
            except (OSError, ValueError):
                raise UserError(f"{path(folder, unit)} is damaged: delete it, and it is measured again") from None
    return found


def check(folder: Path, quick: bool) -> None:
    """Raises UserError if the folder holds results of a rehearsal and this is none, or the other way round."""
    if any(entry["quick"] != quick for entry in read(folder)):
        which = "a rehearsal (--quick)" if not quick else "measurements that are no rehearsal"
        raise UserError(f"{folder} holds {which}: choose another folder with --out")


def failed(folder: Path) -> list[str]:
    """Units that ended with an error or found something wrong."""
    return [entry["unit"] for entry in read(folder) if entry["error"] or entry.get("wrong")]


def without_graphs(folder: Path) -> bool:
    """Whether CUDA graphs have failed here, or given other results."""
    return GRAPHS[1] in failed(folder)


def table(folder: Path) -> str:
    """All results as Markdown."""
    lines = ["| part | what | figure |", "|---|---|---|"]
    for entry in read(folder):
        if entry["error"]:
            lines.append(f"| {entry['part']} | {entry['unit']} | FAILED: {entry['error']} |")
        for what, figure, unit in entry.get("rows", ()):
            lines.append(f"| {entry['part']} | {_cell(what)} | {_cell(f'{_number(figure)} {unit}')} |")
    if any(entry["quick"] for entry in read(folder)):
        lines.append("\nA rehearsal (--quick): the figures mean nothing.")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|")


def _number(figure: Any) -> str:
    if isinstance(figure, bool):
        return "yes" if figure else "NO"
    return f"{figure:,.4g}" if isinstance(figure, float) else str(figure)
