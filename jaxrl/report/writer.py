"""Metrics on disk: metrics.jsonl (one JSON object per line) and TensorBoard events, the same numbers in both.

TensorBoard's axis shows environment steps, so that runs of any batch size can be compared (see `Position.axis`).

Every line is written to the operating system at once, so a killed process loses none. `trim` removes the lines
after the checkpoint that a run resumes from. Event files are rewritten for that, because TensorBoard's own
purge marks leave the stale points in the file for every other reader.
"""

import json
import math
import numbers
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically

try:
    from tensorboardX.proto import event_pb2, summary_pb2
    from tensorboardX.record_writer import masked_crc32c
except ImportError:  # without it there are no event files
    event_pb2 = None

METRICS = "metrics.jsonl"
EVENTS = "events"


class MetricsError(UserError):
    """Metrics cannot be written."""


class Writer:
    """Appends to `directory/metrics.jsonl` and to a new event file under `directory/events`.

    Files are made by the first write. Use it as a context manager, or call `close`. Without tensorboardX there are no
    events: none are written, and those of an earlier process are unchanged.

    Attributes:
        rows: lines kept (see `trim`) and written.
        note: a sentence about files that are not written, else empty.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)
        self.rows = 0
        self.note = (
            "" if event_pb2 else "no events for TensorBoard: pip install tensorboardX; metrics.jsonl has all metrics"
        )
        self._lines: RawIOBase | None = None
        self._events: RawIOBase | None = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, iteration: int, scalars: Mapping[str, Any], step: int | None = None) -> None:
        """Append the scalars of one iteration (Python, NumPy or JAX numbers; "/" in a name makes a group).

        A value that is not finite becomes null in the JSON line, since JSON has no such numbers. `step` is the step on
        TensorBoard's axis, the iteration where it is None.

        Raises:
            MetricsError: the directory is not writable, or its disk is full.
        """
        values = {name: _number(value) for name, value in scalars.items()}
        line = {"iteration": iteration} | {name: v if math.isfinite(v) else None for name, v in values.items()}
        try:
            if self._lines is None:
                self._lines = self._open()
            _append(self._lines, json.dumps(line, allow_nan=False).encode() + b"\n")
            self.rows += 1
            if self._events is not None:
                _append(self._events, _scalars(values, iteration if step is None else step))
        except OSError as error:
            raise _error(self._directory, error) from error

    def _open(self) -> RawIOBase:
        """Open the lines, unbuffered, and a new event file, which begins with the version that readers expect."""
        if event_pb2:
            folder = self._directory / EVENTS
            folder.mkdir(parents=True, exist_ok=True)
            now = time.time()
            name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
            self._events = (folder / name).open("xb", buffering=0)
            _append(self._events, _record(event_pb2.Event(wall_time=now, file_version="brain.Event:2")))
        return (self._directory / METRICS).open("ab", buffering=0)

    def trim(self, after_iteration: int, after_step: int | None = None) -> None:
        """Remove every line of an iteration above `after_iteration`, every event of a step above `after_step` (the
        iteration where it is None), and an incomplete last line.

        Raises:
            MetricsError: a file cannot be rewritten.
        """
        self.close()
        try:
            path, self.rows = self._directory / METRICS, 0
            if path.exists():
                kept = [line for line, row in _lines(path) if row["iteration"] <= after_iteration]
                write_atomically(path, "".join(kept))
                self.rows = len(kept)
            for file in (self._directory / EVENTS).glob("events.out.tfevents.*") if event_pb2 else ():
                _trim_events(file, after_iteration if after_step is None else after_step)
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

    def trim(self, after_iteration: int, after_step: int | None = None) -> None:
        """Do nothing."""


def read_metrics(directory: Path | str) -> list[dict[str, Any]]:
    """Return all rows of a run's metrics.jsonl in order, without an incomplete last line; [] if there is none."""
    path = Path(directory) / METRICS
    return [row for _, row in _lines(path)] if path.exists() else []


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

    Raises:
        MetricsError: another line is damaged.
    """
    lines = path.read_bytes().splitlines(keepends=True)
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


# TensorBoard's event files: records of length (8 bytes), its checksum (4), an Event, its checksum (4).


def _scalars(values: Mapping[str, float], step: int) -> bytes:
    """Return a record of scalars by name."""
    points = [summary_pb2.Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
    return _record(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=points)))


def _record(event: Any) -> bytes:
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def _records(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Yield each complete record of an event file, with its event, up to the first incomplete one."""
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            if struct.pack("<I", masked_crc32c(head[:8])) != head[8:]:
                return
            rest = file.read(length + 4)
            if len(rest) < length + 4 or struct.pack("<I", masked_crc32c(rest[:length])) != rest[length:]:
                return
            yield head + rest, event_pb2.Event.FromString(rest[:length])


def _trim_events(path: Path, after_step: int) -> None:
    """Rewrite an event file without later events, or delete it if only its version is left."""
    kept = [(record, event) for record, event in _records(path) if event.step <= after_step]
    if not any(event.HasField("summary") for _, event in kept):
        path.unlink()
        return
    temporary = path.with_name("trimmed.tmp")  # a name that readers of event files ignore
    temporary.write_bytes(b"".join(record for record, _ in kept))
    temporary.replace(path)
