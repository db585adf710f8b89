"""Metrics on disk: metrics.jsonl (one JSON object per line), and TensorBoard events of all but counters and clocks.

Every line is written to the operating system at once, so a killed process loses none. A resume reads the file from its
end, so it costs the same after any number of rows. Events reach the disk every few seconds and before a checkpoint.
Each process has its own event file, which begins with TensorBoard's mark of a restart: TensorBoard then drops later
points of earlier files.
"""

import contextlib
import hashlib
import json
import math
import mmap
import numbers
import os
import time
from collections.abc import Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

from jaxrl.common.errors import UserError

METRICS = "metrics.jsonl"
LOST = "metrics.lost.jsonl"  # lines of a run that started again without a checkpoint
EVENTS = "events"
FAILED = "failed"  # entry of a row: 1 where the trial fails; in a run of several, how many have failed
FLUSH = 5.0  # seconds between flushes of the events
# Counters and clocks, which TensorBoard would show as diagonals above all others.
_NO_EVENTS = {"iteration", "step", "phase", "env_steps", "updates", "episodes", "time/unix", "time/seconds"}
_LONGEST = 2**20  # bytes of a first line that is compared
_LARGEST = 1e300  # number that a line may hold


class MetricsError(UserError):
    """Metrics cannot be written or read."""


class Writer:
    """Appends to `directory/metrics.jsonl` and to an event file under `directory/events`.

    Files are made by the first write or `trim`, unless the directory has gone by then. Use it as a context
    manager, or call `close`.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)
        self._folder = _stat(self._directory)  # None if there is none yet
        self._lines: RawIOBase | None = None
        self._events: _Events | None = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, iteration: int, scalars: Mapping[str, Any], step: int | None = None) -> None:
        """Append the scalars of one iteration (Python, NumPy or JAX numbers; "/" in a name makes a group).

        A value that is not finite becomes null in the JSON line, since JSON has no such numbers, and no event. `step`
        is the step on TensorBoard's axis (see `Position.axis`), the iteration where it is None.

        Raises MetricsError: the directory is not writable, its disk is full, or it was moved or deleted.
        """
        values = {name: _number(value) for name, value in scalars.items()}
        row: dict[str, Any] = {"iteration": iteration} | ({} if step is None else {"step": step})
        row |= {name: v if math.isfinite(v) else None for name, v in values.items()}
        with _errors_in_one_sentence(self._directory):
            if self._lines is None or self._events is None:
                self._lines, self._events = self._open()
            self._require_place(self._lines)
            _append(self._lines, json.dumps(row, allow_nan=False).encode() + b"\n")
            self._events.write(row)

    def _open(self) -> tuple[RawIOBase, "_Events"]:
        self._require_folder()
        (self._directory / EVENTS).mkdir(parents=self._folder is None, exist_ok=True)
        return (self._directory / METRICS).open("ab", buffering=0), _Events(self._directory / EVENTS)

    def _require_folder(self) -> None:
        """Raise MetricsError if the path no longer leads to the folder that it led to at first."""
        if self._folder is not None and not _leads_to(self._directory, self._folder):
            raise MetricsError(
                f"{self._directory} is no longer the folder of this run: it, or a folder above it, was deleted, moved "
                "or replaced; put it back, then continue with --resume"
            )

    def _require_place(self, lines: RawIOBase) -> None:
        """Raise MetricsError if the path leads to another file than the open one, or to none."""
        path = self._directory / METRICS
        if not _leads_to(path, os.fstat(lines.fileno())):
            raise MetricsError(
                f"{path} is no longer the file that this run writes: it, or a folder above it, was deleted, moved or "
                "replaced; put it back, then continue with --resume"
            )

    def mark(self) -> dict[str, Any] | None:
        """Write all events to the disk; return the mark of the lines for a checkpoint.

        It holds their bytes, and a digest of the first line, by which lines of another run are recognised.

        Raises MetricsError: the events cannot be written, or the directory was moved or deleted.
        """
        path = self._directory / METRICS
        if self._lines is not None:
            self._require_place(self._lines)
        with _errors_in_one_sentence(self._directory):
            if self._events is not None:
                self._events.flush()
            return {"bytes": path.stat().st_size if path.exists() else 0, "first": _digest(_first_line(path))}

    def trim(self, after_iteration: int, mark: Mapping[str, Any] | None = None, evaluated: bool = True) -> str:
        """Remove every line of a later iteration, and an incomplete last line; TensorBoard drops the later points.

        Args:
            after_iteration: the last one whose lines stay; with 0 and without a mark all lines go to LOST.
            mark: `mark` of the checkpoint of that iteration.
            evaluated: whether the line of that iteration's evaluation stays, too.

        Returns:
            A sentence if lines went to LOST, or some from before the mark are lost, else "".

        Raises MetricsError: a file cannot be written, or a line at the end is damaged.
        """
        self.close()
        self._require_folder()
        path = self._directory / METRICS
        problem = ""
        with _errors_in_one_sentence(self._directory):
            if after_iteration == 0 and mark is None and path.exists() and path.stat().st_size:
                path.replace(self._directory / LOST)
                problem = f"there is no checkpoint; the previous rows of metrics are kept in {LOST}"
            size, last = _find_end(path, after_iteration, evaluated)
            if path.exists():
                os.truncate(path, size)
            expected = mark["bytes"] if mark else 0
            if last is None and not expected:
                for file in (self._directory / EVENTS).glob("events.out.tfevents.*"):
                    file.unlink()
            self._lines, self._events = self._open()
            if last is not None:
                self._events.restart(_step(last) + 1)
        return describe_lost_rows(self._directory, mark, after_iteration) or problem

    def close(self) -> None:
        """Close both files; a later write appends to the lines and begins a new event file."""
        for file in (self._lines, self._events):
            if file is not None:
                file.close()
        self._lines = self._events = None


class NullWriter(Writer):
    """A writer without files, for hosts that do not write."""

    def write(self, iteration: int, scalars: Mapping[str, Any], step: int | None = None) -> None:
        pass

    def mark(self) -> dict[str, Any] | None:
        return None

    def trim(self, after_iteration: int, mark: Mapping[str, Any] | None = None, evaluated: bool = True) -> str:
        return ""


class _Events:
    """A new file of TensorBoard events.

    Written by this thread: tensorboardX's SummaryWriter has one of its own, which waits forever once its disk is full.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._flushed = -math.inf

    def write(self, row: Mapping[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name not in _NO_EVENTS and value is not None
        ]
        now = time.time()
        event = Event(wall_time=row.get("time/unix", now), step=_step(row), summary=Summary(value=values))
        self._file.write_event(event)
        if now > self._flushed + FLUSH:
            self.flush()

    def restart(self, step: int) -> None:
        """Make TensorBoard drop the points of earlier files from this step on."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._file.write_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.time()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full: writing the lines has raised this error
            self._file.close()


def read_metrics(directory: Path | str) -> list[dict[str, Any]]:
    """Return all rows of a run's metrics.jsonl in order, without an incomplete last line; [] if there is none."""
    return list(iterate_rows(directory))


def iterate_rows(directory: Path | str, size: float = math.inf) -> Iterator[dict[str, Any]]:
    """Yield the rows among the first `size` bytes of a run's metrics.jsonl, without an incomplete last line.

    Raises MetricsError: another line is damaged, or the file cannot be read.
    """
    path = Path(directory) / METRICS
    damaged = 0
    end = 0
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                end += len(line)
                if damaged:
                    raise MetricsError(f"line {damaged} of {path} is damaged: fix or remove that line")
                if end > size:
                    return
                if (row := _parse_row(line)) is None:
                    damaged = number  # or the last line, which may be incomplete after a kill
                else:
                    yield row
    except OSError as error:
        raise MetricsError(f"{path} cannot be read ({error.strerror}): make it readable") from error


def _parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the object of a complete line of numbers, None if it is damaged or incomplete."""
    try:
        row = json.loads(line)
        whole = line.endswith(b"\n") and isinstance(row["iteration"], int) and isinstance(row.get("step", 0), int)
        whole = whole and all(value is None or abs(value) < _LARGEST for value in row.values())
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return row if whole else None


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Return whether a row holds the scores of an evaluation."""
    return any(name.startswith("eval/") for name in row)


def check_same_run(directory: Path | str, mark: Mapping[str, Any] | None) -> None:
    """Check that a checkpoint's `mark` describes the lines in a directory; None = no checkpoint says what they are.

    Raises MetricsError: they begin with another row, or a damaged one.
    """
    path = Path(directory) / METRICS
    try:
        first = _first_line(path)
    except OSError as error:
        raise MetricsError(f"{path} cannot be read ({error.strerror}): make it readable") from error
    if first and _parse_row(first) is None:
        raise MetricsError(f"line 1 of {path} is damaged: fix or remove that line")
    if mark and mark.get("first") and first and _digest(first) != mark["first"]:
        raise MetricsError(
            f"{path} is not of this run: its first row differs from the row that the run wrote; put the run's own "
            "file back, or move this one away to continue without the previous rows"
        )


def describe_lost_rows(directory: Path | str, mark: Mapping[str, Any] | None, iteration: int) -> str:
    """Return a sentence if a directory has fewer bytes of metrics than its checkpoint's `mark` says, else ""."""
    path = Path(directory) / METRICS
    expected = mark["bytes"] if mark else 0
    size = path.stat().st_size if path.exists() else 0
    if size >= expected:
        return ""
    return (
        f"{path} holds {size:,} of the {expected:,} bytes that were written up to iteration {iteration:,}: the other "
        "rows are lost, the run continues without them"
    )


def _leads_to(path: Path, expected: os.stat_result) -> bool:
    current = _stat(path)
    return current is not None and os.path.samestat(expected, current)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _number(value: Any) -> int | float:
    """Convert to a Python number; integers stay integers, bool becomes 0 or 1."""
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _append(file: RawIOBase, data: bytes) -> None:
    """Write all of `data`; an unbuffered file may accept it in parts."""
    while data:
        data = data[file.write(data) :]


@contextlib.contextmanager
def _errors_in_one_sentence(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MetricsError(
            f"metrics cannot be written under {directory} ({error.strerror}); make it writable or free disk space, "
            "then continue with --resume"
        ) from error


def _step(row: Mapping[str, Any]) -> int:
    return int(row.get("step", row["iteration"]))


def _first_line(path: Path) -> bytes:
    """Return the first line of a file, b"" if there is no complete one. Raises OSError."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        line = file.readline(_LONGEST)
    return line if line.endswith(b"\n") else b""


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest() if line else ""


def _find_end(path: Path, after_iteration: int, evaluated: bool) -> tuple[int, dict[str, Any] | None]:
    """Return the bytes up to the last line that stays, and its object; 0 and None without one. See `Writer.trim`.

    Raises:
        OSError: the file cannot be read.
        MetricsError: a line that was read is damaged. The last one may be incomplete after a kill.
    """
    if not path.exists() or not path.stat().st_size:
        return 0, None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = len(content)
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            row = _parse_row(content[start:end])
            if row is not None and (row["iteration"], is_evaluation(row)) <= (after_iteration, evaluated):
                return end, row
            if row is None and end < len(content):
                number = content[:start].count(b"\n") + 1
                raise MetricsError(f"line {number} of {path} is damaged: fix or remove that line")
            end = start
    return 0, None
