"""Tables on the console, by rich."""

import io
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 10_000  # columns if the output is not a terminal


class Row(NamedTuple):
    """A name and its cells; without cells, a heading for the rows below it."""

    name: str
    cells: Sequence[str] = ()
    style: str = ""


def make_table(corner: str, titles: Sequence[str], rows: Sequence[Row]) -> Table:
    """Return a table; `corner` is the title of the column of names. If it is too wide, cells get more lines."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(Text(corner), overflow="fold")
    for title in titles:
        table.add_column(Text(title), justify="right", overflow="fold")
    for row in rows:
        if not row.cells and table.row_count:
            table.add_row()
        table.add_row(Text(row.name), *map(Text, row.cells), style=row.style or ("" if row.cells else "bold"))
    return table


def print_parts(parts: Sequence[Table | Text | str]) -> None:
    """Print tables and sentences to stdout, in colour for a terminal."""
    print(_render(parts, Console(highlight=False, width=None if sys.stdout.isatty() else _UNBOUNDED)))


def to_text(table: Table) -> str:
    """Return a table as plain text, its rows as wide as they are."""
    return _render([table], Console(file=io.StringIO(), width=_UNBOUNDED, color_system=None))


def _render(parts: Sequence[Table | Text | str], console: Console) -> str:
    with console.capture() as capture:
        for part in parts:
            console.print(Text(part) if isinstance(part, str) else part, soft_wrap=not isinstance(part, Table))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
