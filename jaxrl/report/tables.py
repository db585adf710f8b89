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
    """Return the lines of a table under a corner (title of the names) and titles, which may have several lines each.

    `rows` with cells have one for each title. A line is longer than `width` only if a name and a single cell are.
    """
    deep = 1 + max(title.count("\n") for title in titles)
    heads = [("\n" * (deep - 1 - title.count("\n")) + title).split("\n") for title in (corner, *titles)]
    rows = [*(Row(name, cells, "dim") for name, *cells in zip(*heads, strict=True)), *rows]
    left = max(cell_len(row.name) for row in rows if row.cells)
    wide = [max(cell_len(row.cells[column]) for row in rows if row.cells) for column in range(len(titles))]
    table: list[Text] = []
    for columns in _blocks(wide, width - left):
        table += [Text()] if table else []
        for place, row in enumerate(rows):
            if row.cells:
                cells = [" " * (wide[k] - cell_len(row.cells[k])) + row.cells[k] for k in columns]
                name = row.name + " " * (left - cell_len(row.name))
                table.append(Text(_GAP.join([name, *cells]).rstrip(), row.style))
            else:
                table += [Text()] if place > deep else []
                table.append(Text(row.name, row.style or "bold"))
    return table


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
