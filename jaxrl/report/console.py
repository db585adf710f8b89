"""Progress of a run: a live panel in a terminal, plain lines everywhere else."""

import dataclasses
import logging
import math
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from jaxrl.report import panel
from jaxrl.report.metrics import TimeLeft

_LOG_SECONDS = 15.0
_LOG_WIDTH = 120  # characters of the longest line
_HEADING_WIDTH = len("evaluation")
_NUMBER_WIDTH = 8  # characters of the longest `format_number`
_FIRST_BLOCKS = 3  # written however fast they follow one another
logger = logging.getLogger("jaxrl")


@dataclasses.dataclass(frozen=True)
class _Fact:
    """A value to show: its name, its text, what follows it, and the width that most of its texts need."""

    label: str
    value: str
    unit: str = ""
    width: int = _NUMBER_WIDTH

    @property
    def text(self) -> str:
        """The value with its unit."""
        return f"{self.value} {self.unit}".rstrip()


class _Lines:
    """Writes blocks, progress and long operations as plain lines.

    A block becomes a group of lines: counters, phase, episodes, losses, device, evaluation. Each number stays in its
    column from group to group.

    Args:
        write: takes a line.
        label: {metric of the environment} -> "words" or "words, unit".
        every: seconds between lines. Blocks that follow one another faster are left out, except the first ones, the
            last one and those with an evaluation.
        width: characters of the longest line.
    """

    def __init__(self, write: Callable[[str], None], label: Callable[[str], str], every: float, width: int) -> None:
        self._write, self._label, self._every, self._width = write, label, every, width
        self._lock = threading.RLock()  # other threads may write progress and long operations
        self._time_left = TimeLeft()
        self._value_widths: dict[tuple[str, str], int] = {}  # by kind and label; they only grow
        self._blocks = 0
        self._block_time = self._group_time = -float("inf")  # of the last block and of the last group of lines
        self._progress_time: float | None = None  # of the last line of progress
        self._written: Mapping[str, Any] = {}  # the block of the last group
        self._left_out: tuple[Mapping[str, Any], float | None] | None = None  # the last block and its seconds left

    def block(self, info: Mapping[str, Any]) -> None:
        """Write the argument of `Console.block`, or leave it out."""
        with self._lock:
            seconds_left, now = self._time_left.estimate(info), time.monotonic()
            since, self._block_time = now - self._block_time, now
            self._blocks += 1
            # The next block would come too late if it took as long as this one.
            is_due = self._blocks <= _FIRST_BLOCKS or now + since - self._group_time > self._every
            if info.get("evaluation") and {**info, "evaluation": None} == {**self._written, "evaluation": None}:
                self._put(self._arrange(self._evaluation(info)))
            elif info.get("evaluation") or is_due:
                self._write_group(info, seconds_left)
            else:
                self._left_out = info, seconds_left

    def close(self) -> None:
        """Write the last block if it was left out."""
        with self._lock:
            if self._left_out is not None:
                self._write_group(*self._left_out)

    def progress(self, activity: str, done: int, total: int, unit: str, seconds_left: float | None) -> None:
        """Write the arguments of `Console.progress`, unless it is not the first time and the last line is recent."""
        with self._lock:
            now = time.monotonic()
            last = self._progress_time
            # sooner than `every`: the next call may be some seconds away
            if last is not None and now - max(last, self._group_time) < 0.45 * self._every:
                return
            self._progress_time = now
            where, colon, what = activity.partition(": ")
            text = f"{where}  {what}" if colon else where
            self._put(self._fold(f"{text}: {_progress_text(done, total, unit, seconds_left)}"))

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Write that a long operation begins, and now and then how long it has been running."""
        began, done = time.monotonic(), threading.Event()

        def repeat() -> None:
            while not done.wait(self._every):
                self._put([f"{what} ... {format_duration(time.monotonic() - began)}"])

        thread = threading.Thread(target=repeat, daemon=True)
        self._put([f"{what} ..."])
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _put(self, lines: Sequence[str]) -> None:
        with self._lock:
            for line in lines:
                self._write(line)

    def _write_group(self, info: Mapping[str, Any], seconds_left: float | None) -> None:
        self._group_time, self._written, self._left_out = time.monotonic(), info, None
        facts = _facts({**info, "seconds_left": seconds_left})
        counters = [fact for fact in (*facts.get("run", ()), *facts.get("speed", ())) if fact.label != "phase"]
        if info.get("fraction") is not None and seconds_left is None:  # keep the column
            at = next(k for k, fact in enumerate(counters) if fact.label.endswith("done"))
            counters.insert(at + 1, _Fact(counters[at].label[:-4] + "left", "unknown", width=_WIDTHS["left"]))
        episodes = {} if info.get("return") is None else {"return": info["return"]}
        groups = [
            ("", counters),
            ("phase", [_Fact(info["phase"], "", width=0)] if info.get("phase") else []),
            *self._metrics("episodes", {**episodes, **(info.get("environment") or {})}),
            ("losses", _losses(info, format_number)),
            ("device", facts.get("device", [])),
            *self._evaluation(info),
        ]
        self._put(self._arrange(groups))

    def _evaluation(self, info: Mapping[str, Any]) -> list[tuple[str, list[_Fact]]]:
        """Return the evaluation in the order of the episodes, so that the numbers lie below those of training."""
        order = ["return", *(info.get("environment") or {})]
        metrics = dict(info.get("evaluation") or {})
        names = sorted(metrics, key=lambda name: order.index(name) if name in order else len(order))
        return self._metrics("evaluation", {name: metrics[name] for name in names})

    def _metrics(self, heading: str, metrics: Mapping[str, Any]) -> list[tuple[str, list[_Fact]]]:
        """Return facts of episodes by heading; "metric/task" belongs to a heading of its own for each metric."""
        groups: dict[str, list[_Fact]] = {heading: []}
        for name, value in metrics.items():
            metric, _, task = name.partition("/")
            fact = _metric_fact(self._label(metric), value, format_number)
            if task:
                task_fact = dataclasses.replace(fact, label=task)
                groups.setdefault(f"{heading}, {fact.label} by task:", []).append(task_fact)
            else:
                groups[heading].append(fact)
        return list(groups.items())

    def _arrange(self, groups: Sequence[tuple[str, Sequence[_Fact]]]) -> list[str]:
        """Return the lines of groups of facts: as many facts in a line as its width allows."""
        lines = []
        for heading, facts in groups:
            kind = "episodes" if heading == "evaluation" else heading
            start = f"  {heading:{_HEADING_WIDTH}}" if heading else ""
            line, is_empty = start, True
            for fact in facts:
                cell = self._cell(kind, fact)
                if not is_empty and len(line) + 2 + len(cell) > self._width:
                    lines += self._fold(line)
                    line = " " * (2 + _HEADING_WIDTH)
                line += f"  {cell}" if line else cell
                is_empty = False
            if not is_empty:
                lines += self._fold(line)
        return lines

    def _cell(self, kind: str, fact: _Fact) -> str:
        """Return a fact as text, with spaces to the width of the widest of its kind and label so far."""
        width = max(self._value_widths.get((kind, fact.label), fact.width), len(fact.value))
        self._value_widths[kind, fact.label] = width
        return f"{fact.label} {fact.text:{width + len(fact.unit) + bool(fact.unit)}}"

    def _fold(self, line: str) -> list[str]:
        """Return a line in pieces if a single fact is too long for it."""
        return [line.rstrip()] if len(line.rstrip()) <= self._width else fold(line, self._width, 4).splitlines()


class Console:
    """Shows block after block; a context manager, which restores the terminal at the end.

    Args:
        title: the panel's heading, for example "coma on coverage".
        stream: where to write; stdout by default.
        live: a live panel or plain lines; by default a panel if `stream` is a terminal.
        every: seconds between plain lines. Blocks that follow one another faster are left out, except the first ones,
            the last one and those with an evaluation.
        label: {metric of the environment} -> "words" or "words, unit".
    """

    LOG_SECONDS = _LOG_SECONDS  # between plain lines

    def __init__(
        self,
        title: str,
        stream: TextIO | None = None,
        live: bool | None = None,
        every: float = LOG_SECONDS,
        label: Callable[[str], str] = str,
    ) -> None:
        self._title = title
        self._stream = stream or sys.stdout
        if live is None:
            live = self._stream.isatty() and not RichConsole(file=self._stream).is_dumb_terminal
        self._rich = RichConsole(file=self._stream, force_terminal=live, highlight=False)
        self._wants_live = live
        self._label = label
        self._live: Live | None = None
        self._view: Callable[[], RenderableType] = Text  # of the live panel
        self._panel: RenderableType | None = None  # of the last block
        self._time_left = TimeLeft()
        self._evaluation: dict[str, float] = {}
        width = min(self._rich.width, _LOG_WIDTH) if self._stream.isatty() else _LOG_WIDTH
        self._lines = _Lines(self._print, label, every, width)

    def __enter__(self) -> "Console":
        if self._wants_live:
            self._live = Live(console=self._rich, get_renderable=lambda: self._view(), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self._lines.close()

    def say(self, sentence: str) -> None:
        """Write one sentence, above the panel if there is one."""
        if self._live is not None:
            self._rich.print(Text(sentence))
            self._live.refresh()
        else:
            self._print(sentence)

    def _print(self, line: str) -> None:
        """Print a plain line, wrapped between words."""
        print(fold(line, self._rich.width if self._stream.isatty() else _LOG_WIDTH), file=self._stream, flush=True)

    def working(self, what: str) -> AbstractContextManager[None]:
        """Show that a long operation such as "compiling" is running, and for how long."""
        return self._lines.working(what) if self._live is None else self._count_seconds(what)

    @contextmanager
    def _count_seconds(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        self._show(lambda: Text(f"{what} ... {format_duration(time.monotonic() - began)}"))
        if self._live is not None:
            self._live.refresh()
        try:
            yield
        finally:
            self._show()

    def _show(self, *below: Callable[[], RenderableType]) -> None:
        """Show the panel of the last block, if there was one, and below it what functions return at each drawing."""
        above = [] if self._panel is None else [self._panel]

        def draw() -> RenderableType:
            parts = [part() for part in below]
            view = Group(*above, *parts)
            is_cut = bool(parts) and len(self._rich.render_lines(view)) > self._rich.height  # at its lower end
            return Group(*parts, *above) if is_cut else view

        self._view = draw

    def block(self, info: Mapping[str, Any]) -> None:
        """Show the state after a block. All entries may be left out.

        Args:
            info: phase (a few words; `fraction` and the time left are then of this phase), fraction (share done, or
                of the seconds available, 0 to 1), seconds_left (estimated from `fraction` if absent), iteration,
                iterations, env_steps, env_steps_per_second, updates, updates_per_second, return (mean episode
                return), environment / losses / evaluation (name to number; an evaluation stays on the panel), memory
                and memory_limit (bytes), utilisation (0 to 1), power (watts).
        """
        if self._live is None:
            self._lines.block(info)
            return
        self._evaluation = dict(info.get("evaluation") or self._evaluation)
        computed = {"seconds_left": self._time_left.estimate(info), "evaluation": self._evaluation}
        self._panel = self._draw({**info, **computed})
        self._show()

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
            self._lines.progress(activity, done, total, unit, seconds_left)
            return
        text = Text(f"{activity}  {_progress_text(done, total, unit, seconds_left)}")  # wraps where it is narrow
        bar = panel.bar(_share(done, total))
        self._show(lambda: text, lambda: bar)

    def _draw(self, info: dict[str, Any]) -> RenderableType:
        metrics, evaluation = (
            [
                _metric_fact(self._label(name), value, format_significant)
                for name, value in (info.get(group) or {}).items()
            ]
            for group in ("environment", "evaluation")
        )
        facts = _facts({**info, "fraction": None})
        if info.get("return") is not None:
            facts.setdefault("run", []).append(_Fact("return", format_significant(info["return"])))
        facts |= {"environment": metrics, "losses": _losses(info, format_significant)}
        texts = {heading: {fact.label: fact.text for fact in group} for heading, group in facts.items()}
        # Evaluated metrics stand beside those of training, as most are the same: the panel fits 80 columns, 24 lines.
        evaluated = {"environment": {fact.label: fact.text for fact in evaluation}}
        order = ("run", "device", "environment", "speed", "losses")
        tables = [panel.table(name, texts.get(name, {}), evaluated.get(name)) for name in order]
        return panel.draw(self._title, info.get("fraction"), tables, self._rich)


def fold(line: str, width: int = _LOG_WIDTH, indent: int = 2) -> str:
    """Return a sentence in lines of at most `width` characters, broken between words only."""
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _plain_words(name: str) -> str:
    return name.replace("_", " ")


class Log:
    """The replacement of a console for runs started by a program instead of a person.

    Sentences and lines go to the logger "jaxrl", or to stdout where they are to be printed and the logger leaves them
    out; warnings always go to the logger. The arguments of `Console.block` go to callbacks.

    Args:
        callbacks: take the argument of each `block`.
        every: seconds between lines, as of a console.
        label: {metric of the environment} -> "words" or "words, unit".
        printed: print what the logger leaves out.
    """

    LOG_SECONDS = _LOG_SECONDS  # between lines

    def __init__(
        self,
        callbacks: Sequence[Callable[[Mapping[str, Any]], None]] = (),
        every: float = LOG_SECONDS,
        label: Callable[[str], str] = _plain_words,
        printed: bool = False,
    ) -> None:
        self._callbacks = callbacks
        self._printed = printed and not logger.isEnabledFor(logging.INFO)
        self._lines = _Lines(self._write, label, every, _LOG_WIDTH)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def say(self, sentence: str) -> None:
        """Log a sentence, at level WARNING if it is a warning, else INFO."""
        if sentence.startswith("warning: "):
            logger.warning(sentence.removeprefix("warning: "))
        else:
            self._write(sentence)

    def _write(self, line: str) -> None:
        if self._printed:
            print(line, flush=True)
        else:
            logger.info(line)

    def working(self, what: str) -> AbstractContextManager[None]:
        """Log that a long operation begins, and now and then how long it has been running."""
        return self._lines.working(what)

    def block(self, info: Mapping[str, Any]) -> None:
        """Call the callbacks with the argument of `Console.block`, and log it now and then."""
        for callback in self._callbacks:
            callback(info)
        self._lines.block(info)

    def progress(self, activity: str, done: int, total: int, unit: str, seconds_left: float | None) -> None:
        """Log how far a long iteration is, now and then; the arguments are those of `Console.progress`."""
        self._lines.progress(activity, done, total, unit, seconds_left)


def _share(done: int, total: int) -> float:
    return min(max(done / total, 0.0), 1.0) if total > 0 else 1.0


def _progress_text(done: int, total: int, unit: str, seconds_left: float | None) -> str:
    left = ""
    if seconds_left is not None and math.isfinite(seconds_left):
        left = f"  left {format_duration(max(seconds_left, 0.0))}"
    return f"{done:,} of {total:,} {unit}{left}"


_WIDTHS = {"iteration": 7, "left": 11, "memory in use": 9, "GPU busy": 4}


def _facts(info: Mapping[str, Any]) -> dict[str, list[_Fact]]:
    """Return everything known but metrics and losses, by heading and in reading order."""
    facts: dict[str, list[_Fact]] = {}
    for heading, label, name, text, total in (
        ("run", "phase", "phase", str, ""),
        ("run", "iteration", "iteration", "{:,}".format, "iterations"),
        ("run", "done", "fraction", "{:.1%}".format, ""),
        ("run", "left", "seconds_left", format_duration, ""),
        ("run", "env steps", "env_steps", format_si, ""),
        ("run", "updates", "updates", format_si, ""),
        ("speed", "env steps/s", "env_steps_per_second", format_si, ""),
        ("speed", "updates/s", "updates_per_second", format_si, ""),
        ("device", "memory in use", "memory", gibibytes, "memory_limit"),
        ("device", "GPU busy", "utilisation", "{:.0%}".format, ""),
        ("device", "power", "power", "{:.0f} W".format, ""),
    ):
        if info.get(name) is not None:
            of = f"of {text(info[total])}" if info.get(total) is not None else ""
            where = "phase " if info.get("phase") and label in ("done", "left") else ""
            facts.setdefault(heading, []).append(_Fact(where + label, text(info[name]), of, _WIDTHS.get(label, 6)))
    return facts


def _metric_fact(label: str, value: Any, text: Callable[[Any], str]) -> _Fact:
    """Return a metric of episodes, from its label "words" or "words, unit"."""
    words, _, unit = label.partition(", ")
    return _Fact(words, text(value), unit)


def _losses(info: Mapping[str, Any], text: Callable[[Any], str]) -> list[_Fact]:
    return [_Fact(_plain_words(name), text(value)) for name, value in (info.get("losses") or {}).items()]


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


def format_number(number: float) -> str:
    """Format in at most eight characters, with three or more significant digits if they fit: -0.00123, 1.23e-5."""
    if isinstance(number, int) and len(f"{number:,}") <= _NUMBER_WIDTH:
        return f"{number:,}"
    value = float(number)
    if 9_999.5 <= abs(value) < 9_999_999.5:
        return f"{value:.0f}"
    text = ""
    for digits in (4, 3, 2, 1):
        mantissa, e, exponent = f"{value:.{digits}g}".partition("e")
        text = f"{mantissa}e{int(exponent)}" if e else mantissa
        if len(text) <= _NUMBER_WIDTH:
            break
    return text


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
