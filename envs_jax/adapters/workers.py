"""Processes that step copies of an environment: an `AsyncVectorEnv` of Gymnasium, each of whose members is many copies.

Every copy gets the seeds and actions that it would get in one process, so the numbers are the same. Workers are
spawned: JAX does not survive a fork. They import neither JAX nor the user's main script, ignore Ctrl-C, which reaches
the whole group of processes, and end with the process that started them.
"""

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from envs_jax.adapters.copies import Copy, CopyArrays, Layout
from envs_jax.adapters.errors import describe_error
from envs_jax.adapters.parts import Fault

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}  # which schedulers send to all processes of a job
_END_SECONDS = 2.0  # that a worker gets to close its copies
_POLL_SECONDS = 0.5  # between looks at whether the parent process lives


class _Job(NamedTuple):
    """The part of one worker in a call; see `CopyArrays.move`."""

    restart: np.ndarray
    moving: np.ndarray
    seeds: np.ndarray
    action: Any


class _Failure(NamedTuple):
    """The first error of a worker's copies."""

    is_step: bool  # first, as one process restarts all copies before it steps others
    copy: int
    moved: tuple[int, int] | None  # see `CopyArrays.moved`
    # what, fix: of a `Fault`
    what: str
    fix: str
    trace: str  # traceback of an error that is no Fault, else ""


class Workers:
    """Processes that step the copies of `arrays`, each a part of them; the first parts are larger where they differ.

    Raises Fault: this process may not start others, or the environment cannot be sent to them.
    """

    def __init__(self, maker: Callable[[], Copy], layout: Layout, arrays: CopyArrays, count: int) -> None:
        self._arrays = arrays
        parts = np.array_split(np.arange(len(arrays.reward)), count)
        self._rows = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
        if multiprocessing.current_process().daemon:
            raise Fault(
                "this process is a daemonic worker of multiprocessing, which may not start others",
                "use host_workers 1, or a concurrent.futures.ProcessPoolExecutor",
            )
        try:
            content = cloudpickle.dumps((maker, layout))
        except Exception as error:  # a class that refers to an open file, ...
            raise Fault(
                f"it cannot be sent to another process: {describe_error(error)}",
                "use host_workers 1, or register it in a module of its own",
            ) from error
        shape = len(parts[0]), _record(arrays).itemsize
        members = [
            functools.partial(_Member, content, os.getpid(), rows.stop - rows.start, rows.start, shape)
            for rows in self._rows
        ]
        with _without_signals(), _without_main():
            self._processes = _Processes(members)
        self._pairs: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # arrays here, and those in the memory that is shared with the workers
        for rows, shared_bytes in zip(self._rows, self._processes.observations, strict=True):
            columns = [column[rows] for column in arrays.columns]
            self._pairs += zip(columns, _fields(arrays, shared_bytes[: rows.stop - rows.start]), strict=True)

    def move(self, restart: np.ndarray, moving: np.ndarray, seeds: np.ndarray, action: Any) -> None:
        """See `CopyArrays.move`. Raises Fault: the first error that one process would have met, or a worker died."""
        jobs = []
        for rows in self._rows:
            part = [one[rows] for one in action] if isinstance(action, list) else action[rows]
            jobs.append(_Job(restart[rows], moving[rows], seeds[rows], part))
        try:
            infos = self._processes.step(jobs)[-1]
        except (EOFError, OSError) as error:
            raise self._processes.find_death() or error from None
        if failures := [failure for failure in infos.get("failure", ()) if failure is not None]:
            first = min(failures)
            if first.trace:
                print(f"in a process of host_workers:\n{first.trace}", end="", file=sys.stderr, flush=True)
            self._arrays.moved = first.moved
            raise Fault(first.what, first.fix)
        for column, shared in self._pairs:
            column[...] = shared
        lengths = self._arrays.lengths
        for i in np.flatnonzero(restart | moving).tolist():
            lengths[i] = 0 if restart[i] else lengths[i] + 1

    def close(self) -> None:
        """End the processes."""
        self._processes.close()

    def kill(self) -> None:
        """End the processes although another thread waits for them, whose `move` then fails."""
        for process in self._processes.processes:
            process.kill()


def _record(arrays: CopyArrays) -> np.dtype:
    """Return the record of one copy: its row of each array."""
    return np.dtype([(f"{k}", column.dtype, column.shape[1:]) for k, column in enumerate(arrays.columns)])


def _fields(arrays: CopyArrays, content: np.ndarray) -> list[np.ndarray]:
    """Return the arrays whose rows are the records in the bytes uint8[B, size of a record], without copying."""
    record = _record(arrays)
    rows = content.view(record)[:, 0]
    return [rows[name] for name in record.names or ()]


class _Processes(AsyncVectorEnv):
    """Members in processes that always end, also where this one is ended or drops them."""

    def __init__(self, members: Sequence[Any]) -> None:
        try:
            super().__init__(members, copy=False, context="spawn", autoreset_mode=AutoresetMode.DISABLED)
        except BaseException as error:
            death = self.find_death() if isinstance(error, EOFError | OSError) else None
            self.close_extras()
            raise death or error from None
        # before multiprocessing's own end, which would wait for workers that are deaf to SIGTERM
        multiprocessing.util.Finalize(self, _end_processes, (self.processes, self.parent_pipes), exitpriority=1)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the processes, whatever they do."""
        _end_processes(getattr(self, "processes", ()), getattr(self, "parent_pipes", ()))

    def __del__(self) -> None:
        """Leave the end to `Finalize`."""

    def find_death(self) -> Fault | None:
        """Return the error about a process that has ended; None if none has."""
        processes = getattr(self, "processes", ())
        multiprocessing.connection.wait([process.sentinel for process in processes], timeout=_END_SECONDS)
        for number, process in enumerate(processes, 1):
            if (code := process.exitcode) is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return Fault(
                    f"process {number} of {len(processes)} of host_workers {how}",
                    "correct it, or use fewer host_workers if memory is short, and start again",
                )
        return None


def _end_processes(processes: Sequence[Any], pipes: Sequence[Any]) -> None:
    """Close the pipes, at whose end a worker closes its copies and exits; kill those that do not."""
    for pipe in pipes:
        if pipe is not None:
            pipe.close()
    limit = time.monotonic() + _END_SECONDS
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        process.kill()
        process.join()


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Let processes begin with signals blocked, until `_settle` takes them: Python's start would print a traceback."""
    multiprocessing.resource_tracker.ensure_running()  # whose start would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main script, which a spawned process would run again: without a guard it would train there, too."""
    main = sys.modules["__main__"]
    names: tuple[str, ...] = "__spec__", "__file__"
    hidden = {name: vars(main)[name] for name in names if name in vars(main)}
    for name in hidden:
        delattr(main, name)
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


# In the workers


class _Member(gymnasium.Env):
    """Copies that step in one process. An action is a `_Job`, an observation the bytes of their records.

    Args:
        content: pickled: what makes a copy, and the layout of the arrays.
        parent: number of the process that starts the others; there this object only describes its spaces.
        size: number of copies.
        first: number of the first copy among those of all workers.
        shape: of the observation: (number of copies of the largest worker, bytes of a record).
    """

    def __init__(self, content: bytes, parent: int, size: int, first: int, shape: tuple[int, int]) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gymnasium.spaces.Box(0, 1, ())  # Gymnasium only divides lists by it
        self._content = content
        self._size = size
        self._first = first
        self._bytes = np.zeros(shape, np.uint8)
        self._copies: list[Copy] = []
        self._arrays: CopyArrays | None = None
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []  # the arrays, and their fields in the bytes
        self._in_worker = os.getpid() != parent
        if self._in_worker:
            _settle(parent)

    def step(self, action: _Job) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Do a job. Errors are information: Gymnasium would pickle them, which not every one survives."""
        try:
            arrays = self._arrays or self._begin()
            arrays.move(self._copies, *action)
            arrays.check(action.restart | action.moving)
        except Fault as fault:
            if fault.copy is not None and self._arrays is not None:
                self._arrays.moved = fault.copy, self._arrays.lengths[fault.copy]
            return self._fail(fault.what, fault.fix)
        except BaseException as error:  # SystemExit too
            return self._fail(describe_error(error), "correct it and start again", traceback.format_exc())
        for column, field in self._pairs:
            field[...] = column
        return self._bytes, 0.0, False, False, {}

    def _begin(self) -> CopyArrays:
        maker, layout = pickle.loads(self._content)
        arrays = CopyArrays(layout, self._size)
        self._pairs = list(zip(arrays.columns, _fields(arrays, self._bytes[: self._size]), strict=True))
        self._copies = [maker() for _ in range(self._size)]
        self._arrays = arrays
        return arrays

    def _fail(self, what: str, fix: str, trace: str = "") -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        moved = self._arrays.moved if self._arrays else None
        if moved is not None:
            moved = self._first + moved[0], moved[1]
        copy, step = moved or (self._first, 0)
        failure = _Failure(step > 0, copy, moved, what, fix, trace)
        return self._bytes, 0.0, False, False, {"failure": failure}

    def close(self) -> None:
        """Close the copies and end the process, quietly: the pipe is closed, of which Gymnasium prints a traceback."""
        if not self._in_worker:
            return
        try:
            for copy in self._copies:
                copy.close()
        except BaseException:
            traceback.print_exc()
        os._exit(0)


def _settle(parent: int) -> None:
    """Make this process a worker: without an accelerator, deaf to signals of its group, not outliving its parent."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: None)  # ignored signals would be inherited by a simulator
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, even in the middle of a step."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    time.sleep(_END_SECONDS)  # in which the main thread closes its copies
    os._exit(1)
