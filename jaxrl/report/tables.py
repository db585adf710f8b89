"""Text tables as wide as a terminal: columns that do not fit go into a further block, and nothing is truncated."""

import dataclasses
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

_GAP = "  "


@dataclasses.dataclass(frozen=True)
class Row:
    """A name and its cells; without cells, a heading for the rows below it."""

    name: str
    cells: Sequence[str] = ()
    style: str = ""


def lines(corner: str, titles: Sequence[str], rows: Sequence[Row], width: int) -> list[Text]:
    """Return the lines of a table.

    Args:
        corner: title of the names.
        titles: of the other columns; a title may have several lines.
        rows: all of them; those with cells have one for each title.
        width: of the terminal. A line is longer only if a name and a single cell are.
    """
    left = max(map(cell_len, [corner, *(row.name for row in rows if row.cells)]))
    wide = [
        max(map(cell_len, [*title.split("\n"), *(row.cells[column] for row in rows if row.cells)]))
        for column, title in enumerate(titles)
    ]
    found: list[Text] = []
    for columns in _blocks(wide, width - left):
        if found:
            found.append(Text())
        heads = [titles[column].split("\n") for column in columns]
        deep = max(map(len, heads))
        for k in range(deep):
            cells = [head[k - deep] if k - deep >= -len(head) else "" for head in heads]
            words = _line(corner if k == deep - 1 else "", left, cells, [wide[column] for column in columns])
            found.append(Text(words, "dim"))
        for place, row in enumerate(rows):
            if row.cells:
                cells = [row.cells[column] for column in columns]
                found.append(Text(_line(row.name, left, cells, [wide[column] for column in columns]), row.style))
            else:
                found += [Text()] if place else []
                found.append(Text(row.name, row.style or "bold"))
    return found


def _blocks(wide: Sequence[int], room: int) -> list[list[int]]:
    """Return the columns of each block, at least one."""
    blocks: list[list[int]] = []
    used = 0
    for column, needed in enumerate(wide):
        used += len(_GAP) + needed
        if not blocks or used > room:
            blocks.append([])
            used = len(_GAP) + needed
        blocks[-1].append(column)
    return blocks


def _line(name: str, left: int, cells: Sequence[str], wide: Sequence[int]) -> str:
    parts = [name + " " * (left - cell_len(name))]
    parts += [" " * (most - cell_len(cell)) + cell for cell, most in zip(cells, wide, strict=True)]
    return _GAP.join(parts).rstrip()
