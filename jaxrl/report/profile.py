"""Traces of a device, and the operations that take most of its time.

A trace opens in TensorBoard's profile plugin (--logdir: its folder) and, as *.trace.json.gz, in ui.perfetto.dev.
"""

import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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


class Operation(NamedTuple):
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


class Profile(NamedTuple):
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

    The most expensive operations are written to `folder`, too; the text of the compiled `program` gives their origins.
    If no trace can be made, the function is called anyway.
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
            longest_first = operations(data.planes, dict(_INSTRUCTION.findall(program)))
    except Exception as error:  # a damaged trace must not stop training
        return Profile(seconds, problem=f"the trace {newest} cannot be read ({one_line(str(error))})")
    if not longest_first:
        return Profile(seconds, problem="the trace holds no operations of a device")
    problem = _attempt(lambda: write_atomically(folder / OPERATIONS, f"{TITLE}\n\n{table(longest_first)}"))
    return Profile(seconds, tuple(longest_first), problem)


def table(longest_first: Sequence[Operation]) -> str:
    """Format the first operations as lines of text."""
    rows = [
        tables.Row(op.name, [f"{op.calls:,}", f"{1e3 * op.seconds:,.3f}", f"{op.share:.1%}", op.origin])
        for op in longest_first[:MOST]
    ]
    lines = tables.lines("operation", ["calls", "ms", "share", "from"], rows, _WIDTH)
    return "".join(f"{line.plain}\n" for line in lines)


def operations(planes: Iterable[Any], origins: dict[str, str]) -> list[Operation]:
    """Return all operations of the devices, longest first.

    Args:
        planes: of the trace; streams of GPUs count or, without GPUs, the CPU's compute threads.
        origins: {instruction of the program: its path in the traced functions}.
    """
    lines = [(plane.name, line) for plane in planes for line in plane.lines]
    streams = [line for name, line in lines if name.startswith("/device:") and line.name.startswith("Stream")]
    seconds_of: dict[str, list[float]] = {}
    instructions: dict[str, str] = {}
    for line in streams or [line for name, line in lines if name == "/host:CPU"]:
        rows = [
            (int(e.start_ns), int(e.duration_ns), e.name, str(dict(e.stats).get("hlo_op", ""))) for e in line.events
        ]
        for name, instruction, seconds in _own_seconds([row for row in rows if streams or row[3]]):
            seconds_of.setdefault(name, []).append(seconds)
            instructions[name] = instruction
    total = sum(itertools.chain.from_iterable(seconds_of.values())) or 1.0
    made = [
        Operation(name, _short(origins.get(instructions[name], "")), len(times), sum(times), sum(times) / total)
        for name, times in seconds_of.items()
    ]
    return sorted(made, key=lambda operation: -operation.seconds)


def _own_seconds(rows: list[tuple[int, int, str, str]]) -> Iterator[tuple[str, str, float]]:
    """Yield name, instruction and seconds, without those of events inside, of (begin, ns, name, instruction) each."""
    rows.sort(key=lambda row: (row[0], -row[1]))
    own_ns = [length for _, length, _, _ in rows]
    stack: list[int] = []  # the events that enclose the current one
    for index, (begin, length, _, _) in enumerate(rows):
        while stack and sum(rows[stack[-1]][:2]) <= begin:
            stack.pop()
        if stack:
            own_ns[stack[-1]] -= length
        stack.append(index)
    yield from ((name, instruction, 1e-9 * ns) for (_, _, name, instruction), ns in zip(rows, own_ns, strict=True))


def _short(origin: str) -> str:
    """Return the end of an operation's path, without the loops and functions around it."""
    parts = [part for part in origin.split("/") if part not in _LOOPS and not part.startswith("jit(")]
    return "/".join(parts[-_PARTS:])
