"""Progress of a run: a live panel in a terminal, plain lines everywhere else."""

import logging
import math
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_GROUPS = ("environment", "losses", "evaluation")
_GAP = 2  # columns between the blocks of a panel
_LOG_SECONDS = 15.0
logger = logging.getLogger("jaxrl")


class _ProgressLines:
    """Writes how far the present iteration is, at most every `seconds`, and the first time at once."""

    def __init__(self, write: Callable[[str], None], seconds: float) -> None:
        self._write, self._seconds = write, seconds
        self._lock = threading.Lock()  # a program on the device calls from threads of its own
        self._written: float | None = None  # when

    def write(self, activity: str, done: int, total: int, unit: str, seconds_left: float | None) -> None:
        """Write a line, unless the last one is too recent."""
        with self._lock:
            now = time.monotonic()
            if self._written is not None and now - self._written < self._seconds:
                return
            self._written = now
        where, colon, what = activity.partition(": ")
        start = f"{where}  {what}" if colon else where
        self._write(f"{start}: {_progress_text(done, total, unit, seconds_left)}")

    def postpone(self) -> None:
        """Count the time to the second and later lines from now, as other lines tell as much."""
        with self._lock:
            if self._written is not None:
                self._written = time.monotonic()


class Console:
    """Shows block after block; a context manager, which restores the terminal at the end.

    Args:
        title: the panel's heading, for example "coma on coverage".
        stream: where to write; stdout by default.
        live: a live panel or plain lines; by default a panel if `stream` is a terminal.
        every: minimum seconds between plain lines; the first and the last block, and blocks with an
            evaluation, are always written.
        patience: seconds between plain lines during a long operation.
        label: {metric of the environment} -> "words" or "words, unit".
    """

    LOG_SECONDS = _LOG_SECONDS  # least time between plain lines of `progress`

    def __init__(
        self,
        title: str,
        stream: TextIO | None = None,
        live: bool | None = None,
        every: float = 5.0,
        patience: float = 15.0,
        label: Callable[[str], str] = str,
    ) -> None:
        self._title = title
        self._stream = stream or sys.stdout
        if live is None:
            live = self._stream.isatty() and not RichConsole(file=self._stream).is_dumb_terminal
        self._rich = RichConsole(file=self._stream, force_terminal=live, highlight=False)
        self._wants_live = live
        self._every, self._patience, self._label = every, patience, label
        self._live: Live | None = None
        self._view: Callable[[], RenderableType] = Text  # of the live panel
        self._panel: RenderableType = Text()  # of the last block
        self._progress = _ProgressLines(self._print, self.LOG_SECONDS)
        self._start: tuple[float, float] | None = None  # time and fraction done at the first block (of a phase)
        self._phase: str | None = None
        self._shown = -float("inf")
        self._unshown: dict[str, Any] | None = None
        self._evaluation: dict[str, float] = {}

    def __enter__(self) -> "Console":
        if self._wants_live:
            self._live = Live(console=self._rich, get_renderable=lambda: self._view(), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._unshown is not None:
            self._line(self._unshown)

    def say(self, sentence: str) -> None:
        """Write one sentence, above the panel if there is one."""
        if self._live is not None:
            self._rich.print(Text(sentence))
            self._live.refresh()
        else:
            self._print(sentence)

    def _print(self, line: str) -> None:
        """Print a plain line; a terminal without panels gets it wrapped between words."""
        if self._stream.isatty():
            line = textwrap.fill(line, self._rich.width, subsequent_indent="  ", break_on_hyphens=False)
        print(line, file=self._stream, flush=True)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that a long operation such as "compiling" is running, and for how long."""
        began = time.monotonic()
        sentence = lambda: f"{what} ... {format_duration(time.monotonic() - began)}"  # noqa: E731
        done = threading.Event()

        def repeat() -> None:
            while not done.wait(self._patience):
                self.say(sentence())

        thread = threading.Thread(target=repeat, daemon=True)
        if self._live is None:
            self.say(f"{what} ...")
            thread.start()
        else:
            self._view = lambda: Text(sentence())
            self._live.refresh()
        try:
            yield
        finally:
            self._view = Text
            done.set()
            if self._live is None:
                thread.join()

    def block(self, info: Mapping[str, Any]) -> None:
        """Show the state after a block. All entries may be left out.

        Args:
            info: phase (a few words; `fraction` and the time left are then of this phase), fraction (share done, or
                of the seconds available, 0 to 1), seconds_left (estimated from `fraction` if absent), iteration,
                iterations, env_steps, env_steps_per_second, updates, updates_per_second, return (mean episode
                return), environment / losses / evaluation (name to number; an evaluation stays on the panel), memory
                and memory_limit (bytes), utilisation (0 to 1), power (watts).
        """
        state = dict(info)
        if state.get("phase") != self._phase:
            self._phase, self._start = state.get("phase"), None
        if state.get("seconds_left") is None:
            state["seconds_left"] = self._seconds_left(state.get("fraction"))
        if self._live is not None:
            self._evaluation = dict(state.get("evaluation") or self._evaluation)
            panel = self._panel = self._draw(state | {"evaluation": self._evaluation})
            self._view = lambda: panel
        elif state.get("evaluation") or time.monotonic() - self._shown >= self._every:
            self._line(state)
        else:
            self._unshown = state

    def progress(self, activity: str, done: int, total: int, unit: str, seconds_left: float | None) -> None:
        """Show how far a long iteration is: a bar below the panel until the next block, or now and then a line.

        Args:
            activity: what is running, for example "iteration 3: rolling out".
            done: units that are complete.
            total: units of the whole activity.
            unit: in the plural, for example "episodes".
            seconds_left: of the activity, if known.
        """
        if self._live is None:
            self._progress.write(activity, done, total, unit, seconds_left)
            return
        text = Text(f"{activity}  {_progress_text(done, total, unit, seconds_left)}")  # wraps where it is narrow
        view = Group(self._panel, text, _bar(_share(done, total)))
        self._view = lambda: view

    def _seconds_left(self, fraction: float | None) -> float | None:
        """Estimate from the rate since the first block of this process and phase, so that resuming does not bias it."""
        if fraction is None:
            return None
        now = time.monotonic()
        self._start = self._start or (now, fraction)
        since, gained = now - self._start[0], fraction - self._start[1]
        return since * (1.0 - fraction) / gained if gained > 0 else None

    def _line(self, info: Mapping[str, Any]) -> None:
        self._shown, self._unshown = time.monotonic(), None
        self._progress.postpone()
        parts = [f"{label} {value}" for facts in _facts(info).values() for label, value in facts]
        for group in _GROUPS:
            numbers = "  ".join(f"{name} {value}" for name, value in self._numbers(info, group))
            if numbers:
                parts.append(f"| {group}: {numbers}" if group == "evaluation" else f"| {numbers}")
        self._print("  ".join(parts))

    def _numbers(self, info: Mapping[str, Any], group: str) -> list[tuple[str, str]]:
        """Return names and values of a group, with units."""
        numbers = []
        for name, value in (info.get(group) or {}).items():
            words, _, unit = (name.replace("_", " ") if group == "losses" else self._label(name)).partition(", ")
            numbers.append((words, f"{format_significant(value)} {unit}".rstrip()))
        return numbers

    def _draw(self, info: dict[str, Any]) -> RenderableType:
        rows: list[RenderableType] = []
        if info.get("fraction") is not None:
            rows.append(_bar(info["fraction"]))
        metrics, losses, evaluation = (self._numbers(info, group) for group in _GROUPS)
        facts = {heading: _block(heading, pairs) for heading, pairs in _facts(info | {"fraction": None}).items()}
        # Evaluated metrics stand beside those of training, as most are the same: the panel fits 80 columns, 24 lines.
        facts["environment"] = _block("environment", metrics, "evaluation", evaluation)
        facts["losses"] = _block("losses", losses)
        order = ("run", "device", "environment", "speed", "losses")
        rows.append(self._side_by_side([facts[name] for name in order if name in facts and facts[name].row_count > 1]))
        return Panel(Group(*rows), title=self._title, title_align="left", border_style="cyan")

    def _side_by_side(self, blocks: list[Table]) -> Table:
        """Return blocks in as many columns as fit, each block below the others of the shortest column."""
        widths = [self._rich.measure(block).maximum for block in blocks]
        for number in range(len(blocks), 0, -1):
            columns: list[list[int]] = [[] for _ in range(number)]
            for k in range(len(blocks)):
                min(columns, key=lambda column: sum(blocks[i].row_count + 1 for i in column)).append(k)
            if sum(max(widths[k] for k in column) + _GAP for column in columns) <= self._rich.width - 4 + _GAP:
                break
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        grid.add_row(*(Group(*[part for k in column for part in (Text(), blocks[k])][1:]) for column in columns))
        return grid


class Log:
    """The replacement of a console for runs started by a program instead of a person.

    Sentences go to the logger "jaxrl"; the arguments of `Console.block` go to callbacks.
    """

    LOG_SECONDS = _LOG_SECONDS  # least time between lines of `progress`

    def __init__(self, callbacks: Sequence[Callable[[Mapping[str, Any]], None]] = ()) -> None:
        self._callbacks = callbacks
        self._progress = _ProgressLines(logger.info, self.LOG_SECONDS)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, sentence: str) -> None:
        """Log a sentence, at level WARNING if it is a warning, else INFO."""
        is_warning = sentence.startswith("warning: ")
        logger.log(logging.WARNING if is_warning else logging.INFO, sentence.removeprefix("warning: "))

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Log that a long operation begins."""
        self.say(what)
        yield

    def block(self, info: Mapping[str, Any]) -> None:
        """Call the callbacks with the argument of `Console.block`."""
        for callback in self._callbacks:
            callback(info)

    def progress(self, activity: str, done: int, total: int, unit: str, seconds_left: float | None) -> None:
        """Log how far a long iteration is, with the arguments of `Console.progress`, at most every `LOG_SECONDS`."""
        self._progress.write(activity, done, total, unit, seconds_left)


def _share(done: int, total: int) -> float:
    return min(max(done / total, 0.0), 1.0) if total > 0 else 1.0


def _progress_text(done: int, total: int, unit: str, seconds_left: float | None) -> str:
    left = ""
    if seconds_left is not None and math.isfinite(seconds_left):
        left = f"  left {format_duration(max(seconds_left, 0.0))}"
    return f"{done:,} of {total:,} {unit}{left}"


def _bar(share: float) -> RenderableType:
    """Return a bar as wide as there is room, with the percentage to its right."""
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(ratio=1)
    bar.add_row(ProgressBar(total=1.0, completed=share), Text(f"{share:.1%}"))
    return bar


def _block(
    heading: str, facts: list[tuple[str, str]], beside: str = "", others: Sequence[tuple[str, str]] = ()
) -> Table:
    """Return a table of facts under a heading, with the other values of the same names beside them."""
    values, beside_values = dict(facts), dict(others)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    for _ in range(1 + bool(beside_values)):
        table.add_column(justify="right", no_wrap=True)
    if beside_values:
        table.add_row(*(Text(text, style="bold cyan") for text in (heading, "training", beside)))
    else:
        table.add_row(Text(heading, style="bold cyan"), "")
    for label in dict.fromkeys((*values, *beside_values)):
        table.add_row(label, values.get(label, ""), *([beside_values.get(label, "")] if beside_values else []))
    return table


def _facts(info: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return label and text of everything known, by heading and in reading order."""
    facts: dict[str, list[tuple[str, str]]] = {}
    for heading, label, name, text, total in (
        ("run", "phase", "phase", str, ""),
        ("run", "done", "fraction", "{:.1%}".format, ""),
        ("run", "left", "seconds_left", format_duration, ""),
        ("run", "iteration", "iteration", "{:,}".format, "iterations"),
        ("run", "env steps", "env_steps", format_si, ""),
        ("run", "updates", "updates", format_si, ""),
        ("run", "return", "return", format_significant, ""),
        ("speed", "env steps/s", "env_steps_per_second", format_si, ""),
        ("speed", "updates/s", "updates_per_second", format_si, ""),
        ("device", "memory in use", "memory", gibibytes, "memory_limit"),
        ("device", "GPU busy", "utilisation", "{:.0%}".format, ""),
        ("device", "power", "power", "{:.0f} W".format, ""),
    ):
        if info.get(name) is not None:
            of = f" of {text(info[total])}" if info.get(total) is not None else ""
            facts.setdefault(heading, []).append((label, text(info[name]) + of))
    return facts


def format_si(number: float) -> str:
    """Format a count in at most six characters and a unit: 950, 12.3 k, 4.56 M."""
    for unit in ("", " k", " M", " G"):
        if abs(number) < 999.5:
            return f"{number:.0f}" if unit == "" and number == int(number) else f"{number:.3g}{unit}"
        number /= 1000.0
    return f"{number:.3g} T"


def format_significant(number: float) -> str:
    """Format with four significant digits; whole numbers without a point."""
    return f"{number:,}" if isinstance(number, int) else f"{float(number):.4g}"


def gibibytes(number: float) -> str:
    """Format bytes as GiB, or as MiB or KiB if smaller."""
    if number >= 2**30:
        return f"{number / 2**30:.1f} GiB"
    return f"{number / 2**20:.0f} MiB" if number >= 2**20 else f"{number / 2**10:.0f} KiB"


def format_duration(seconds: float) -> str:
    """Format seconds in the two largest units: 45 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
