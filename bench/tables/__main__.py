"""python -m bench.tables: write the tables of README.md, docs/ and bench/ from claims and the figures in bench/results.

With --check nothing is written: it names the tables that are not up to date, with exit code 1 if there are any.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from jinja2.runtime import Macro

from bench.tables import formats, reference
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import Parser
from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "bench/README.md", "bench/results/README.md", "docs/**/*.md")
RESULTS = "bench/results"
_LINE = re.compile(r"^<!-- (?:((?:generated:|settings|names:|api) .+)|end) -->$", re.MULTILINE)
_MACRO = "generated: "
NOTE = (
    f"{formats.RECORDED} Not yet measured by `python -m bench.claims` with all seeds: figures of one seed, or from "
    "before it (see CHANGELOG.md)."
)

Tables = Mapping[str, Callable[[], str]]


def tables(folder: Path) -> dict[str, Callable[[], str]]:
    """Return {"template.macro": macro} of all templates in a folder. Raises UserError if one cannot be read."""
    loader = FileSystemLoader(folder)
    jinja = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.globals |= formats.GLOBALS
    jinja.filters |= formats.FILTERS
    macros_by_name: dict[str, Callable[[], str]] = {}
    for path in sorted(folder.glob("*.jinja")):
        with _one_sentence(path.name):
            macros = vars(jinja.get_template(path.name).module)
        macros_by_name |= {f"{path.stem}.{name}": macro for name, macro in macros.items() if isinstance(macro, Macro)}
    return macros_by_name


def fill_page(page: str, text: str, tables_by_name: Tables) -> tuple[str, list[str], list[str]]:
    """Fill in the tables of one page, whose links to bench/results/ become relative to the page.

    Returns:
        The page's new text, the names of all its tables, and the names of those that were not up to date.

    Raises UserError: a line around a table is missing, or a table has no macro or cannot be made.
    """
    done, *parts = _LINE.split(text)
    lines, texts = parts[::2], parts[1::2]  # what each line names, None for the end of a table; the text after it
    if len(lines) % 2 or any((line is None) != (place % 2 == 1) for place, line in enumerate(lines)):
        found = ", ".join((line or "end").removeprefix(_MACRO) for line in lines)
        raise UserError(f"{page}: every <!-- generated: NAME --> needs one <!-- end --> after it; found: {found}")
    results = os.path.relpath(RESULTS, os.path.dirname(page))
    names = []
    stale = []
    for line, old, after in zip(lines[::2], texts[::2], texts[1::2], strict=True):
        name = line.removeprefix(_MACRO)
        names.append(name)
        content = _fill_macro(page, name, tables_by_name) if line.startswith(_MACRO) else reference.make(line)
        content = content.replace(f"]({RESULTS}/", "](" + f"{results}/".removeprefix("./"))
        new = f"\n\n{content}\n\n"
        stale += [name] if new != old else []
        done += f"<!-- {line} -->{new}<!-- end -->{after}"
    return done, names, stale


def _fill_macro(page: str, name: str, tables_by_name: Tables) -> str:
    if name not in tables_by_name:
        raise UserError(f"{page}: no template in bench/tables has {name}: write its macro or remove the two lines")
    with _one_sentence(name):
        content = re.sub(r"\n{3,}", "\n\n", str(tables_by_name[name]())).strip()
    return f"{content}\n\n{NOTE}" if formats.RECORDED in content else content


@contextlib.contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    try:
        yield
    except (TemplateError, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{name} cannot be made from its files in bench/results: {error}") from error


def update(root: Path, tables_by_name: Tables, check: bool) -> list[str]:
    """Write all pages of a repository, or nothing with `check`; return the names of tables that were not up to date.

    Raises UserError: see `fill_page`; or a table is on no page, or on two.
    """
    pages: dict[Path, str] = {}
    placed: list[str] = []
    stale: list[str] = []
    for path in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        pages[path], names, old = fill_page(str(path.relative_to(root)), path.read_text(), tables_by_name)
        placed = placed + names
        stale = stale + old
    for name in tables_by_name:
        if placed.count(name) != 1:
            raise UserError(f"{name} is in {placed.count(name)} places: put its two lines into one page, once")
    for path, text in pages.items():
        if not check and text != path.read_text():
            write_atomically(path, text)
    return stale


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    flags = Parser(prog="python -m bench.tables", description=__doc__)
    flags.add_argument("--check", action="store_true", help="write nothing; name the tables that are not up to date")
    check = flags.parse_args(list(argv)).check
    stale = update(ROOT, tables(Path(__file__).parent), check)
    if check and stale:
        raise UserError(f"not up to date: {', '.join(stale)}; run python -m bench.tables")
    print(f"wrote {', '.join(stale)}" if stale else "all tables are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
