"""Further writers of metrics (`--logger`): Weights & Biases gets the rows of metrics.jsonl, too.

They are for looking at a run. Each works in a thread of its own: a service that is slow, absent or broken neither
delays nor stops training, and metrics.jsonl stays complete. A resumed run continues the same run of the service, whose
id is in the run directory, and gets the rows that a killed process did not send: those after the checkpoint again,
and earlier ones from the step on that the service says it does not have.
"""

import contextlib
import importlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs_jax.settings import closest
from jaxrl.common.errors import UsageError, one_line
from jaxrl.common.files import write_atomically
from jaxrl.report.writer import METRICS, Writer, iterate_rows

NONE = "none"
PROJECT = "jaxrl"  # of wandb, unless WANDB_PROJECT names another
WAIT = 60.0  # seconds that the end of a run waits for a logger
_ROOM = 20_000  # groups of rows that may wait

Row = tuple[int, Mapping[str, float], int]  # iteration, metrics, step


class WandbLogger:
    """A run of Weights & Biases, offline if this machine has no login and WANDB_MODE is not set.

    A run that is continued ignores steps that it has passed, so that rows may be sent twice.

    Args:
        directory: of the run; files of wandb go into its folder wandb.
        settings: of the run.
        run_id: of the service's run to continue, None for a new one.
        say: receives a warning.

    Attributes:
        id: of the service's run.
        next_step: the first step that it does not have; None if that is not known, offline.
    """

    probe = "init"  # a name that the package has

    def __init__(
        self, directory: Path, settings: Mapping[str, Any], run_id: str | None, say: Callable[[str], None]
    ) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if not mode and not wandb.login(prompt=False, verify=False):
            mode = "offline"
            say(
                f"warning: wandb has no login and stays offline: later run 'wandb login' and 'wandb sync "
                f"{directory / 'wandb'}/offline-run-*'"
            )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=_title(directory),
            id=run_id,
            resume="allow" if run_id else None,
            dir=str(directory),
            mode=mode,
            config=None if run_id else dict(settings),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id = str(self._run.id)
        self.next_step = None if mode in ("offline", "disabled") else int(self._run.step)

    def write(self, iteration: int, scalars: Mapping[str, float], step: int) -> None:
        """Send one row; wandb ignores a step that it has passed."""
        self._run.log({"iteration": iteration, **scalars}, step=step)

    def close(self, failed: bool = False) -> None:
        """Send the rest, and end the run."""
        self._run.finish(exit_code=int(failed))


LOGGERS: dict[str, Any] = {"wandb": WandbLogger}


def named(text: str) -> list[str]:
    """Return the loggers of a setting such as "wandb" or "none". Raises ValueError for another name."""
    names = list(dict.fromkeys(name for name in text.replace(",", " ").split() if name != NONE))
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"unknown logger '{name}': {closest(name, [*LOGGERS, NONE])}")
    return names


def check(text: str) -> None:
    """Check that the packages of a setting's loggers are installed. Raises UsageError."""
    for name in named(text):
        try:
            installed = hasattr(importlib.import_module(name), LOGGERS[name].probe)  # a folder of this name has none
        except ImportError:
            installed = False
        if not installed:
            raise UsageError(f"--logger {name} needs the package {name}: pip install -e '.[{name}]', or leave it out")


def open_writer(directory: Path, text: str, settings: Mapping[str, Any], say: Callable[[str], None]) -> Writer:
    """Return the writer of a run: of its files, and to the loggers of the setting `text`."""
    names = named(text)
    if not names:
        return Writer(directory)
    return LoggingWriter(directory, [_Thread(name, directory, settings, say) for name in names])


class LoggingWriter(Writer):
    """A writer that hands its rows to loggers, too."""

    def __init__(self, directory: Path, threads: Sequence["_Thread"]) -> None:
        super().__init__(directory)
        self._threads, self._failed = threads, False

    def __exit__(self, kind: Any = None, *_: object) -> None:
        self._failed = kind is not None
        self.close()
        for thread in self._threads:
            thread.close(self._failed)

    def write(self, iteration: int, scalars: Mapping[str, Any], step: int | None = None) -> None:
        """Append the row, then hand over its finite numbers."""
        super().write(iteration, scalars, step)
        for thread in self._threads:
            thread.put([_row(iteration, scalars, step)])

    def trim(self, after_iteration: int, mark: Mapping[str, Any] | None = None) -> str:
        """Trim the files; the loggers get the kept rows that they do not have."""
        problem = super().trim(after_iteration, mark)
        path = self._directory / METRICS
        size = path.stat().st_size if path.exists() else 0
        for thread in self._threads:
            rows = iterate_rows(self._directory, size)
            thread.put_missing(_row(row["iteration"], _metrics(row), row.get("step")) for row in rows)
        return problem


class _Thread:
    """Makes a logger and hands it rows, in a thread; after its first error it is silent."""

    def __init__(self, name: str, directory: Path, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._name, self._directory, self._settings, self._say = name, directory, settings, say
        self._file = directory / f"{name}.id"
        self._rows: queue.Queue[Iterable[Row] | bool] = queue.Queue(_ROOM)
        self._is_new, self._broken = not self._file.is_file(), False
        self._next_step: int | None = None  # the first one that the service does not have, if known
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def put(self, rows: Iterable[Row]) -> None:
        """Hand over rows, without waiting; the thread iterates over them."""
        if self._broken:
            return
        try:
            self._rows.put_nowait(rows)
        except queue.Full:
            self._fail("it is too slow")

    def put_missing(self, rows: Iterable[Row]) -> None:
        """Hand over those rows that the service does not have."""
        self.put(row for row in rows if self._next_step is not None and row[2] >= self._next_step)

    def close(self, failed: bool) -> None:
        """Wait until everything is sent, or for `WAIT` seconds."""
        if self._broken:
            return
        until = time.monotonic() + WAIT
        with contextlib.suppress(queue.Full):
            self._rows.put(failed, timeout=WAIT)
            self._thread.join(max(until - time.monotonic(), 0))
        if self._thread.is_alive():
            self._fail(f"it did not end within {WAIT:.0f} s")

    def _work(self) -> None:
        try:
            run_id = None if self._is_new else self._file.read_text(encoding="utf-8").strip()
            logger = LOGGERS[self._name](self._directory, self._settings, run_id, self._say)
            write_atomically(self._file, f"{logger.id}\n")
            self._next_step = 0 if self._is_new else logger.next_step
            while not self._broken:
                rows = self._rows.get()
                if isinstance(rows, bool):
                    logger.close(rows)
                    return
                for row in rows:
                    logger.write(*row)
        except Exception as error:  # of any service and network
            self._fail(f"{type(error).__name__}: {error}".rstrip(": "))

    def _fail(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            self._say(f"warning: {self._name} gets no more metrics ({one_line(reason)}); metrics.jsonl has all of them")


def _row(iteration: int, scalars: Mapping[str, Any], step: int | None) -> Row:
    """Return a row with the finite numbers among the scalars."""
    values = {name: float(value) for name, value in scalars.items() if value is not None}
    return iteration, {name: v for name, v in values.items() if math.isfinite(v)}, iteration if step is None else step


def _metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a line of metrics.jsonl."""
    return {name: value for name, value in row.items() if name not in ("iteration", "step")}


def _title(directory: Path) -> str:
    return f"{directory.parent.name}/{directory.name}"
