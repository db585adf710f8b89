"""A second writer of metrics (`--logger wandb`): Weights & Biases also gets the rows of metrics.jsonl.

It works in its own thread: a service that is slow, absent or broken neither delays nor stops training, and
metrics.jsonl stays complete. A resumed run continues the same run of the service, whose id is in the run directory, and
sends the rows that a killed process did not send. Offline, each process writes a file, which `wandb sync` sends.
"""

import contextlib
import importlib
import math
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrl.common.errors import UsageError, one_line
from jaxrl.common.files import write_atomically
from jaxrl.report.writer import METRICS, Writer, iterate_rows

NONE, WANDB = "none", "wandb"
WAIT = 60.0  # seconds at the end of a run, for rows that have not been sent
_ROOM = 20_000  # groups of rows that may wait

Row = tuple[int, Mapping[str, Any], int | None]  # iteration, metrics, step


def check(text: str) -> None:
    """Check that the package of the logger `text` is installed. Raises UsageError."""
    if text == NONE:
        return
    try:
        installed = hasattr(importlib.import_module(WANDB), "init")  # a folder of this name has none
    except ImportError:
        installed = False
    if not installed:
        raise UsageError(f"--logger {WANDB} needs its package: pip install -e '.[{WANDB}]', or leave it out")


def open_writer(directory: Path, text: str, settings: Mapping[str, Any], say: Callable[[str], None]) -> Writer:
    """Return the writer of a run: to its files and, unless `text` is "none", to the logger."""
    return Writer(directory) if text == NONE else WandbWriter(directory, settings, say)


class WandbWriter(Writer):
    """A writer that also sends its rows to Weights & Biases, until the first error there.

    It works offline if this machine has no login and WANDB_MODE is not set. Its files go into the folder wandb of the
    run directory.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        super().__init__(directory)
        self._settings = settings
        self._say = say
        self._rows: queue.Queue[Iterable[Row] | bool] = queue.Queue(_ROOM)
        self._broken = False
        self._first_step = math.inf  # the first one that the service does not have; set before rows are sent
        self._thread = threading.Thread(target=self._work, name=f"logger {WANDB}", daemon=True)
        self._thread.start()

    def __exit__(self, kind: Any = None, *_: object) -> None:
        """Wait until everything is sent, or for `WAIT` seconds."""
        self.close()
        if self._broken:
            return
        with contextlib.suppress(queue.Full):
            self._rows.put(kind is not None, timeout=WAIT)
            self._thread.join(WAIT)
        if self._thread.is_alive():
            self._fail(f"it did not end within {WAIT:.0f} s")

    def write(self, iteration: int, scalars: Mapping[str, Any], step: int | None = None) -> None:
        super().write(iteration, scalars, step)
        self._put([(iteration, scalars, step)])

    def trim(self, after_iteration: int, mark: Mapping[str, Any] | None = None, evaluated: bool = True) -> str:
        """Trim the files, and send the remaining rows that the service does not have."""
        problem = super().trim(after_iteration, mark, evaluated)
        rows = iterate_rows(self._directory, (self._directory / METRICS).stat().st_size)
        each = ((row.pop("iteration"), row, row.pop("step", None)) for row in rows)
        self._put((i, row, step) for i, row, step in each if (i if step is None else step) >= self._first_step)
        return problem

    def _put(self, rows: Iterable[Row]) -> None:
        """Hand over rows, without waiting; the thread iterates over them."""
        try:
            if not self._broken:
                self._rows.put_nowait(rows)
        except queue.Full:
            self._fail("it is too slow")

    def _work(self) -> None:
        try:
            run = self._open_run()
            while not self._broken:
                rows = self._rows.get()
                if isinstance(rows, bool):
                    run.finish(exit_code=int(rows))
                    return
                for iteration, scalars, step in rows:
                    values = {name: float(value) for name, value in scalars.items() if value is not None}
                    finite = {name: value for name, value in values.items() if math.isfinite(value)}
                    run.log({"iteration": iteration, **finite}, step=iteration if step is None else step)
        except Exception as error:  # any error of the service or the network
            self._fail(f"{type(error).__name__}: {error}".rstrip(": "))

    def _open_run(self) -> Any:
        """Return the service's run: the one of the id in the run directory, or a new one."""
        import wandb

        mode = os.environ.get("WANDB_MODE")
        file = self._directory / f"{WANDB}.id"
        if not mode and not wandb.login(prompt=False, verify=False):
            mode = "offline"
            self._say(
                f"warning: wandb has no login and stays offline: later run 'wandb login' and 'wandb sync "
                f"{self._directory / 'wandb'}/offline-run-*'"
            )
        run_id = file.read_text(encoding="utf-8").strip() if file.is_file() else None
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxrl"),
            name=f"{self._directory.parent.name}/{self._directory.name}",
            id=run_id,
            resume="allow" if run_id else None,
            dir=str(self._directory),
            mode=mode,
            config=None if run_id else dict(self._settings),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        write_atomically(file, f"{run.id}\n")
        if run_id is None:
            self._first_step = 0
        elif mode not in ("offline", "disabled"):
            self._first_step = int(run.step)
        return run

    def _fail(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            self._say(f"warning: {WANDB} gets no more metrics ({one_line(reason)}); metrics.jsonl has all of them")
