"""Metrics on disk: metrics.jsonl (one JSON object per line), and the same numbers as TensorBoard events.

Every line is written to the operating system at once, so a killed process loses none. `trim` removes the lines
after the checkpoint that a run resumes from. Events follow from the lines: they reach the disk every few seconds, and
`trim` writes them anew, because TensorBoard's own purge marks leave stale points in the file for every other reader.
"""

import contextlib
import importlib.util
import json
import math
import numbers
import time
from collections.abc import Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically

METRICS = "metrics.jsonl"
LOST = "metrics.lost.jsonl"  # lines of a run that had to start again
EVENTS = "events"
FLUSH = 5.0  # seconds between flushes of the events


class MetricsError(UserError):
    """Metrics cannot be written."""


class Writer:
    """Appends to `directory/metrics.jsonl` and to an event file under `directory/events`.

    Files are made by the first write or `trim`. Use it as a context manager, or call `close`. Without tensorboardX no
    events are written, and those of an earlier process are unchanged.

    Attributes:
        rows: lines kept (see `trim`) and written.
        note: a sentence about files that are not written, else empty.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)
        self.rows = 0
        self.note = ""
        if importlib.util.find_spec("tensorboardX") is None:
            self.note = "no events for TensorBoard: pip install tensorboardX; metrics.jsonl has all metrics"
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

        Raises:
            MetricsError: the directory is not writable, or its disk is full.
        """
        values = {name: _number(value) for name, value in scalars.items()}
        row: dict[str, Any] = {"iteration": iteration} | ({} if step is None else {"step": step})
        row |= {name: v if math.isfinite(v) else None for name, v in values.items()}
        try:
            if self._lines is None:
                self._open()
            assert self._lines is not None
            _append(self._lines, json.dumps(row, allow_nan=False).encode() + b"\n")
            self.rows += 1
            if self._events is not None:
                self._events.write(row)
        except OSError as error:
            raise _error(self._directory, error) from error

    def _open(self) -> None:
        """Open the lines, unbuffered, and a new event file."""
        (self._directory / ("" if self.note else EVENTS)).mkdir(parents=True, exist_ok=True)
        self._lines = (self._directory / METRICS).open("ab", buffering=0)
        self._events = None if self.note else _Events(self._directory / EVENTS)

    def keep_former(self) -> int:
        """Copy all lines to LOST, for a run that starts again where it had no checkpoint; return their number.

        Raises MetricsError: the file cannot be written.
        """
        try:
            lines = [line for line, _ in _lines(self._directory / METRICS)]
            if lines:
                write_atomically(self._directory / LOST, "".join(lines))
        except OSError as error:
            raise _error(self._directory, error) from error
        return len(lines)

    def trim(self, after_iteration: int) -> None:
        """Remove every line of a later iteration, and an incomplete last line; write all events anew.

        Raises MetricsError: a file cannot be rewritten.
        """
        self.close()
        try:
            path, self.rows = self._directory / METRICS, 0
            kept = [(line, row) for line, row in _lines(path) if row["iteration"] <= after_iteration]
            if path.exists():
                write_atomically(path, "".join(line for line, _ in kept))
            self.rows = len(kept)
            if not self.note:
                for file in (self._directory / EVENTS).glob("events.out.tfevents.*"):
                    file.unlink()
            self._open()
            if self._events is not None:
                for _, row in kept:
                    self._events.write(row)
        except OSError as error:
            raise _error(self._directory, error) from error

    def close(self) -> None:
        """Close both files; a later write appends to the lines and begins a new event file."""
        for file in (self._lines, self._events):
            if file is not None:
                file.close()
        self._lines = self._events = None


class NullWriter(Writer):
    """A writer without files, for processes that are not the one that writes."""

    def write(self, iteration: int, scalars: Mapping[str, Any], step: int | None = None) -> None:
        """Do nothing."""

    def keep_former(self) -> int:
        """Do nothing."""
        return 0

    def trim(self, after_iteration: int) -> None:
        """Do nothing."""


class _Events:
    """A new file of TensorBoard events.

    Written by this thread: tensorboardX's SummaryWriter has one of its own, which waits forever once its disk is full.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._flushed = -math.inf

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of a line of metrics.jsonl."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name not in ("iteration", "step") and value is not None
        ]
        now = time.time()
        step = row.get("step", row["iteration"])
        self._file.write_event(Event(wall_time=row.get("time/unix", now), step=step, summary=Summary(value=values)))
        if now > self._flushed + FLUSH:
            self._file.flush()
            self._flushed = now

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full: the lines have told so
            self._file.close()


def read_metrics(directory: Path | str) -> list[dict[str, Any]]:
    """Return all rows of a run's metrics.jsonl in order, without an incomplete last line; [] if there is none."""
    return [row for _, row in _lines(Path(directory) / METRICS)]


def _number(value: Any) -> int | float:
    """Convert to a Python number; integers stay integers, bool becomes 0 or 1."""
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _append(file: RawIOBase, data: bytes) -> None:
    """Write all of `data`; an unbuffered file may accept it in parts."""
    while data:
        data = data[file.write(data) :]


def _error(directory: Path, error: OSError) -> MetricsError:
    return MetricsError(
        f"metrics cannot be written under {directory} ({error.strerror}); make it writable or free disk space, "
        "then continue with --resume"
    )


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each complete line of a file of JSON objects, with its object; the last may be incomplete after a kill.

    Raises MetricsError: another line is damaged.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            whole = line.endswith(b"\n") and isinstance(row["iteration"], int)
        except (ValueError, TypeError, KeyError, RecursionError):
            whole = False
        if whole:
            yield line.decode(), row
        elif number < len(lines):
            raise MetricsError(f"line {number} of {path} is damaged: fix or remove that line")
