"""Traces of a device, and the operations that take most of its time.

A trace opens in TensorBoard's profile plugin (--logdir: its folder) and, as *.trace.json.gz, in ui.perfetto.dev.
"""

import dataclasses
import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxrl.common.errors import one_line
from jaxrl.common.files import write_atomically
from jaxrl.report import tables

OPERATIONS = "operations.txt"
MOST = 10  # operations in a table
TITLE = f"The {MOST} operations of one traced block that took most of the device's time"
_WIDTH = 160  # of the table, in characters
_PARTS = 3  # last parts of an operation's origin that are shown

_LOOPS = ("while", "body", "cond", "closed_call")
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*?metadata={[^}]*?op_name="([^"]*)"', re.MULTILINE)

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program, or one kernel of a GPU.

    Attributes:
        name: given by the compiler, or by a library of kernels.
        origin: its path in the traced functions, such as "conv2/conv_general_dilated"; empty if not known.
        calls: number in the trace.
        seconds: of all calls, without the operations that it calls.
        share: of the seconds of all operations, 0 to 1.
    """

    name: str
    origin: str
    calls: int
    seconds: float
    share: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """The content of a trace.

    Attributes:
        seconds: of the call that was traced.
        operations: the longest first.
        problem: half a sentence, why there are none, or no table of them on disk; else empty.
    """

    seconds: float
    operations: tuple[Operation, ...] = ()
    problem: str = ""


def record(function: Callable[[], Result], folder: Path, program: str = "") -> tuple[Result, Profile]:
    """Call `function` once, wait for its result, and keep a trace in `folder`/plugins/profile/<time>.

    If no trace can be made, the function is called anyway.

    Args:
        function: the work of the devices.
        folder: of the trace; the most expensive operations are written there, too, as text.
        program: text of the compiled program, which gives the origins of operations.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # frames of Python would outnumber the operations
    problem = _attempt(lambda: jax.profiler.start_trace(str(folder), profiler_options=options))
    traced, began = not problem, time.perf_counter()
    try:
        result = jax.block_until_ready(function())
        seconds = time.perf_counter() - began
    finally:
        if traced:
            problem = _attempt(jax.profiler.stop_trace)
    return result, Profile(seconds, problem=problem) if problem else _read(folder, program, seconds)


def _attempt(step: Callable[[], Any]) -> str:
    """Take a step of the profiler; return why it failed, or ""."""
    try:
        step()
    except (RuntimeError, OSError) as error:
        return one_line(str(error))
    return ""


def _read(folder: Path, program: str, seconds: float) -> Profile:
    """Read the operations of the newest trace, or the problem; write their table."""
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return Profile(seconds, problem="the profiler wrote no trace")
    try:
        data: Any = jax.profiler.ProfileData.from_file(str(newest))
        with warnings.catch_warnings():  # Python warns of a type of jaxlib 0.12; where warnings are errors it aborts
            warnings.simplefilter("ignore", DeprecationWarning)
            found = operations(data.planes, dict(_INSTRUCTION.findall(program)))
    except Exception as error:  # a damaged trace must not stop training
        return Profile(seconds, problem=f"the trace {newest} cannot be read ({one_line(str(error))})")
    if not found:
        return Profile(seconds, problem="the trace holds no operations of a device")
    problem = _attempt(lambda: write_atomically(folder / OPERATIONS, f"{TITLE}\n\n{table(found)}"))
    return Profile(seconds, tuple(found), problem)


def table(found: Sequence[Operation]) -> str:
    """Format the first operations as lines of text."""
    rows = [
        tables.Row(op.name, [f"{op.calls:,}", f"{1e3 * op.seconds:,.3f}", f"{op.share:.1%}", op.origin])
        for op in found[:MOST]
    ]
    lines = tables.lines("operation", ["calls", "ms", "share", "from"], rows, _WIDTH)
    return "".join(f"{line.plain}\n" for line in lines)


def operations(planes: Iterable[Any], origins: dict[str, str]) -> list[Operation]:
    """Return all operations of the devices, longest first.

    Args:
        planes: of a trace, as `jax.profiler.ProfileData` has them.
        origins: {instruction of the program: its op_name}.
    """
    found: dict[str, list[float]] = {}
    instructions: dict[str, str] = {}
    for events in _lines(list(planes)):
        for name, instruction, seconds in _own_seconds(events):
            found.setdefault(name, []).append(seconds)
            instructions[name] = instruction
    total = sum(itertools.chain.from_iterable(found.values())) or 1.0
    rows = [
        Operation(name, _short(origins.get(instructions[name], "")), len(times), sum(times), sum(times) / total)
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


_Event = tuple[int, int, str, str]  # begin and end in nanoseconds, name, instruction


def _lines(planes: Sequence[Any]) -> list[list[_Event]]:
    """Return the operations of each stream of the GPUs; without GPUs, of each compute thread of the CPU."""
    streams = [line for plane in planes if plane.name.startswith("/device:") for line in plane.lines]
    streams = [line for line in streams if line.name.startswith("Stream")]
    threads = [line for plane in planes if plane.name == "/host:CPU" for line in plane.lines]
    lines = [[_event(event) for event in line.events] for line in streams or threads]
    return lines if streams else [[event for event in events if event[3]] for events in lines]


def _event(event: Any) -> _Event:
    begin = int(event.start_ns)
    return begin, begin + int(event.duration_ns), event.name, str(dict(event.stats).get("hlo_op", ""))


def _own_seconds(events: list[_Event]) -> list[tuple[str, str, float]]:
    """Return (name, instruction, seconds) of each event, without the seconds of events inside it."""
    own: list[float] = []
    stack: list[int] = []  # the events that enclose the current one
    ordered = sorted(events, key=lambda event: (event[0], -event[1]))
    for index, (begin, end, _, _) in enumerate(ordered):
        while stack and ordered[stack[-1]][1] <= begin:
            stack.pop()
        own.append(1e-9 * (end - begin))
        if stack:
            own[stack[-1]] -= own[-1]
        stack.append(index)
    return [(name, instruction, seconds) for (_, _, name, instruction), seconds in zip(ordered, own, strict=True)]


def _short(origin: str) -> str:
    """Return the end of an operation's path, without the loops and functions around it."""
    parts = [part for part in origin.split("/") if part not in _LOOPS and not part.startswith("jit(")]
    return "/".join(parts[-_PARTS:])
