"""The panel of a run in a terminal: a bar, and tables of values side by side."""

from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_GAP = 2  # columns between tables


def bar(share: float) -> RenderableType:
    """Return a bar as wide as there is room, with the percentage to its right."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_row(ProgressBar(total=1.0, completed=share), Text(f"{share:.1%}"))
    return grid


def table(heading: str, values: Mapping[str, str], evaluation: Mapping[str, str] | None = None) -> Table:
    """Return a table of {label: value}, with the evaluated values of the same labels beside them."""
    evaluated = evaluation or {}
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", overflow="fold")  # where it is narrow the labels get more lines, and no value is cut
    for _ in range(1 + bool(evaluated)):
        grid.add_column(justify="right", no_wrap=True)
    headings = (heading, "training", "evaluation") if evaluated else (heading, "")
    grid.add_row(*(Text(text, style="bold cyan") for text in headings))
    for label in dict.fromkeys((*values, *evaluated)):
        grid.add_row(label, values.get(label, ""), *([evaluated.get(label, "")] if evaluated else []))
    return grid


def draw(title: str, share: float | None, tables: Sequence[Table], screen: Console) -> RenderableType:
    """Return a panel with a bar, if the share that is done is known, and the tables that have values."""
    rows = [] if share is None else [bar(share)]
    rows.append(_side_by_side([one for one in tables if one.row_count > 1], screen))
    return Panel(Group(*rows), title=title, title_align="left", border_style="cyan")


def _side_by_side(tables: Sequence[Table], screen: Console) -> Table:
    """Return tables in as many columns as fit, each table below the others of the shortest column."""
    widths = [screen.measure(one).maximum for one in tables]
    for number in range(len(tables), 0, -1):
        columns: list[list[int]] = [[] for _ in range(number)]
        for k in range(len(tables)):
            min(columns, key=lambda column: sum(tables[i].row_count + 1 for i in column)).append(k)
        if sum(max(widths[k] for k in column) + _GAP for column in columns) <= screen.width - 4 + _GAP:
            break
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_row(*(Group(*[part for k in column for part in (Text(), tables[k])][1:]) for column in columns))
    return grid
