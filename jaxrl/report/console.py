"""Progress of a run as plain lines, to a stream or to the logger "jaxrl", and numbers as short texts."""

import logging
import math
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from jaxrl.report.metrics import TimeLeft

_WIDTH = 120  # characters of the longest line
_HEADING_WIDTH = len("evaluation")
_NUMBER_WIDTH = 8  # characters of most numbers
_COUNT_WIDTH = 6  # characters of most counters
_BAR_WIDTH = 20  # characters
_CLEAR = "\r\x1b[K"  # what a terminal shows in the present line
_FIRST_BLOCKS = 3  # written however fast they follow one another
logger = logging.getLogger("jaxrl")


class Console:
    """Writes sentences, blocks, progress and long operations; at its end, as a context manager, the last block.

    A block becomes a group of lines: counters, phase, episodes, losses, device, evaluation.

    Args:
        label: {metric of the environment} -> "words" or "words, unit".
        every: seconds between groups. Blocks that follow one another faster are left out, except the first ones, the
            last one and blocks with an evaluation.
        stream: where to write; stdout by default.
    """

    LOG_SECONDS = 15.0  # between groups

    def __init__(
        self, label: Callable[[str], str] = str, every: float = LOG_SECONDS, stream: TextIO | None = None
    ) -> None:
        self._label = label
        self._every = every
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._width = min(_WIDTH, shutil.get_terminal_size().columns) if self._is_terminal else _WIDTH
        self._lock = threading.RLock()  # other threads may write progress and long operations
        self._time_left = TimeLeft()
        self._cell_widths: dict[str, int] = {}  # by label; they only grow, so that numbers stay in their columns
        self._blocks = 0
        self._block_time = self._group_time = -math.inf  # when the last block and the last group of lines came
        self._progress_time: float | None = None  # when the last line of progress was written
        self._written: Mapping[str, Any] = {}  # the block of the last group
        self._left_out: tuple[Mapping[str, Any], float | None] | None = None  # the last block and its seconds left

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        if self._left_out is not None:
            self._write_group(*self._left_out)

    def say(self, sentence: str) -> None:
        self._write(fold(sentence, self._width))

    def _write(self, line: str) -> None:
        with self._lock:
            print(_CLEAR + line if self._is_terminal else line, file=self._stream, flush=True)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Write that a long operation such as "compiling" begins, and now and then how long it has been running."""
        began = time.monotonic()
        done = threading.Event()

        def repeat() -> None:
            while not done.wait(self._every):
                self._write(f"{what} ... {format_duration(time.monotonic() - began)}")

        thread = threading.Thread(target=repeat, daemon=True)
        self._write(f"{what} ...")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def progress(self, activity: str, done: int, total: int, unit: str, seconds_left: float | None) -> None:
        """Write how far a long iteration is, except when a line was written recently.

        In a terminal it is a bar, which the next line replaces. `activity` is such as "iteration 3: rolling out";
        `done` of its `total` units, such as "episodes", are complete.
        """
        with self._lock:
            now = time.monotonic()
            last = self._progress_time
            # sooner than `every`: the next call may be some seconds away
            is_recent = last is not None and now - max(last, self._group_time) < 0.45 * self._every
            if not self._is_terminal and (is_recent or (seconds_left is not None and seconds_left < 1)):
                return
            self._progress_time = now
            is_known = seconds_left is not None and math.isfinite(seconds_left)
            left = f", left {format_duration(max(seconds_left or 0.0, 0.0))}" if is_known else ""
            line = f"{activity}: {done:,} of {total:,} {unit}{left}"
            if self._is_terminal:
                full = _BAR_WIDTH * done // max(total, 1)
                bar = "█" * full + "░" * (_BAR_WIDTH - full)
                print(f"{_CLEAR}{bar} {line}"[: len(_CLEAR) + self._width - 1], end="", file=self._stream, flush=True)
            else:
                self.say(line)

    def block(self, info: Mapping[str, Any]) -> None:
        """Write the state after a block, unless the last group is recent. All entries may be absent.

        Args:
            info: phase (a few words; `fraction` and the time left are then of this phase), fraction (share done, or
                of the seconds available, 0 to 1), seconds_left (estimated from `fraction` if absent), iteration,
                env_steps, env_steps_per_second, updates, updates_per_second, return (mean episode return),
                environment / losses / evaluation (name to number), memory and memory_limit (bytes), utilisation (0 to
                1), power (watts).
        """
        with self._lock:
            seconds_left = self._time_left.estimate(info)
            now = time.monotonic()
            since = now - self._block_time
            self._block_time = now
            self._blocks += 1
            # The next block would come too late if it took as long as this one.
            is_due = self._blocks <= _FIRST_BLOCKS or now + since - self._group_time > self._every
            evaluation = info.get("evaluation")
            numbers = {**info, "evaluation": None}
            if not (evaluation or is_due):
                self._left_out = numbers, seconds_left
                return
            if numbers != self._written:
                self._write_group(numbers, seconds_left)
            self._write_cells("evaluation", self._describe_metrics(evaluation or {}))

    def _write_group(self, info: Mapping[str, Any], seconds_left: float | None) -> None:
        self._group_time = time.monotonic()
        self._written = info
        self._left_out = None
        info = {**info, "seconds_left": seconds_left}
        episodes = {} if info.get("return") is None else {"return": info["return"]}
        losses = (info.get("losses") or {}).items()
        whole = "phase " if info.get("phase") else ""
        counters = _format_known(info, _COUNTERS)
        self._write_cells("", [(whole * (label in ("done", "left")) + label, text) for label, text in counters])
        self._write_cells("phase", [(str(info["phase"]), "")] if info.get("phase") else [])
        self._write_cells("episodes", self._describe_metrics({**episodes, **(info.get("environment") or {})}))
        self._write_cells("losses", [(_plain_words(name), format_number(value)) for name, value in losses])
        self._write_cells("device", _format_known(info, _DEVICE))

    def _describe_metrics(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield label and text of each metric of episodes; "metric/task" is a metric of the episodes of one task."""
        for name, value in metrics.items():
            metric, _, task = name.partition("/")
            words, _, unit = self._label(metric).partition(", ")
            yield words + (f" ({task})" if task else ""), f"{format_number(value)} {unit}".rstrip()

    def _write_cells(self, heading: str, cells: Iterable[tuple[str, str]]) -> None:
        """Write as many pairs of a label and a text in a line as its width allows, below their heading."""
        indent = " " * (2 + _HEADING_WIDTH)
        start = f"  {heading:{_HEADING_WIDTH}}" if heading else ""
        line = start
        for label, text in cells:
            min_width = len(label) + 1 + (_NUMBER_WIDTH if heading else _COUNT_WIDTH)
            self._cell_widths[label] = max(self._cell_widths.get(label, min_width), len(label) + 1 + len(text))
            cell = f"{label} {text}".ljust(self._cell_widths[label])
            if line != start and len(line) + 2 + len(cell.rstrip()) > self._width:
                self._write(fold(line.rstrip(), self._width, 4))
                line = start = indent
            line += f"  {cell}" if line else cell
        if line != start:
            self._write(fold(line.rstrip(), self._width, 4))


@contextmanager
def lend_handler() -> Iterator[None]:
    """Give the root logger a handler meanwhile if it has none, so that warnings have one form and absl adds none.

    When absl first logs, such as for a checkpoint, it would configure the root logger for good.
    """
    if logging.root.handlers:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    if logger.handlers:  # the user's, which write this package's messages already
        handler.addFilter(lambda record: record.name != logger.name)
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


class Log(Console):
    """Replaces the console in runs that a program starts.

    Sentences and lines go to the logger "jaxrl". If it drops messages of level INFO and `printed` is set, they go to
    stdout instead. Warnings always go to the logger.

    Each of `callbacks` gets the argument of each `block`; `every` and `label` are as in `Console`.
    """

    def __init__(
        self,
        callbacks: Sequence[Callable[[Mapping[str, Any]], None]] = (),
        every: float = Console.LOG_SECONDS,
        label: Callable[[str], str] | None = None,
        printed: bool = False,
    ) -> None:
        super().__init__(label or _plain_words, every)
        self._callbacks = callbacks
        self._printed = printed and not logger.isEnabledFor(logging.INFO)
        self._until_end = ExitStack()

    def __enter__(self) -> "Log":
        self._until_end.enter_context(lend_handler())
        return self

    def __exit__(self, *error: object) -> None:
        with self._until_end:
            super().__exit__(*error)

    def say(self, sentence: str) -> None:
        """Log a sentence, at level WARNING if it is a warning, else INFO."""
        if sentence.startswith("warning: "):
            with lend_handler():
                logger.warning(sentence.removeprefix("warning: "))
        else:
            self._write(sentence)

    def _write(self, line: str) -> None:
        if self._printed:
            super()._write(line)
        else:
            with lend_handler():
                logger.info(line)

    def block(self, info: Mapping[str, Any]) -> None:
        for callback in self._callbacks:
            callback(info)
        super().block(info)


def fold(line: str, width: int = _WIDTH, indent: int = 2) -> str:
    """Return a sentence in lines of at most `width` characters, broken between words only.

    A label and one word, such as "run directory: PATH", stay in one line: programs read it.
    """
    value = line.partition(": ")[2]
    if value and " " not in value:
        return line
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _plain_words(name: str) -> str:
    return name.replace("_", " ")


def format_si(number: float) -> str:
    """Format a count in at most six characters and a unit: 950, 12.3 k, 4.56 M."""
    for unit in ("", " k", " M", " G"):
        if abs(number) < 999.5:
            return f"{number:.0f}" if unit == "" and number == int(number) else f"{number:.3g}{unit}"
        number /= 1000.0
    return f"{number:.3g} T"


def format_number(number: float) -> str:
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


_Entries = Sequence[tuple[str, str, Callable[[Any], str]]]  # label, name in a block, format
_COUNTERS: _Entries = (
    ("iteration", "iteration", "{:,}".format),
    ("done", "fraction", "{:.1%}".format),
    ("left", "seconds_left", format_duration),
    ("env steps", "env_steps", format_si),
    ("updates", "updates", format_si),
    ("env steps/s", "env_steps_per_second", format_si),
    ("updates/s", "updates_per_second", format_si),
)
_DEVICE: _Entries = (
    ("memory in use", "memory", gibibytes),
    ("of", "memory_limit", gibibytes),
    ("GPU busy", "utilisation", "{:.0%}".format),
    ("power", "power", "{:.0f} W".format),
)


def _format_known(info: Mapping[str, Any], entries: _Entries) -> list[tuple[str, str]]:
    return [(label, text(info[name])) for label, name, text in entries if info.get(name) is not None]
