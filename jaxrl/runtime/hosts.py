"""Several hosts: how the processes of a run connect, agree, and end together.

A host is one process of a run, on a machine of its own or with a GPU of its own. All run the same program, and so
call the functions here in the same order. Decisions that depend on clocks, signals and the state of a disk are
made by host 0 or by all together (`first`, `gather`, `on_first`), over a socket between host 0 and each other: no
device takes part, so that an exchange does not wait for the running block. In a run of one process every function
here returns at once.

When a host dies, the others see its socket close, or JAX ends them within `LOST` seconds, by aborting them or by an
error of the running collective. So the process that a user starts only supervises the one that trains, and reports in
one sentence what happened.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import json
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from envs_jax.base import short_repr
from jaxrl.common.errors import UsageError, UserError

JOIN = 300  # seconds to wait for the others at the start
LOST = 30  # seconds of silence after which a host counts as dead
SEEN = 60  # seconds after which a folder made by host 0 must be visible to the others
FAREWELL = 3  # seconds that host 0, the coordinator, stays after an error, so that the others can read it
_GUARDED = "JAXRL_SUPERVISED"  # set for a supervised process: the supervisor's folder and its stderr's file descriptor
_RUN, _STDERR = "run", "stderr"  # files in the supervisor's folder
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_LEFT = 86  # exit code of a supervised process that has lost the others
_ADDRESS = 512  # bytes of the broadcast of host 0's address
_connections: list[Connection] = []  # host 0's to each other host in order, or that of another host to host 0


class LostError(Exception):
    """Another host has ended."""


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """One process of a run.

    Attributes:
        coordinator: "HOST:PORT" of host 0; None where the launcher tells JAX.
        number: of hosts.
        index: of this one, from 0.
        devices: local device numbers to use; [] for all that are visible.
    """

    coordinator: str | None
    number: int
    index: int
    devices: list[int]


def find(coordinator: str | None, number: int | None, index: int | None) -> ProcessInfo | None:
    """Return the place of this process: from the flags, else from SLURM or Open MPI; None if it trains alone.

    Args:
        coordinator: `--coordinator`.
        number: `--num_hosts`; 1 trains alone, under any launcher.
        index: `--host_index`.

    Raises:
        UsageError: incompatible flags.
    """
    launched = _launched()
    if number == 1 or (launched is None and (coordinator, number, index) == (None, None, None)):
        if number == 1 and (coordinator or index):
            raise UsageError("--num_hosts 1 trains on this host only: remove --coordinator and --host_index")
        return None
    found = {
        "--coordinator HOST:PORT": coordinator or ("" if launched and launched.coordinator else None),
        "--num_hosts N": number if number is not None or not launched else launched.number,
        "--host_index I": index if index is not None or not launched else launched.index,
    }
    missing = [flag for flag, value in found.items() if value is None]
    if missing:
        why = "Open MPI 5 does not say where its first process runs" if launched else "several hosts need it"
        raise UsageError(f"{' and '.join(missing)}: missing; {why} (--num_hosts 1 trains on this host only)")
    address, number, index = found.values()  # type: ignore[assignment]
    assert isinstance(number, int) and isinstance(index, int)
    if number < 1 or not 0 <= index < number:
        raise UsageError(f"--host_index {index} of --num_hosts {number}: give hosts the numbers 0 to N - 1")
    port = re.fullmatch(r"\S+:([0-9]{1,5})", str(address))
    if address and not (port and 0 < int(port[1]) < 2**16):
        raise UsageError(f"--coordinator must be HOST:PORT of host 0, such as node1:7733, not {short_repr(address)}")
    return ProcessInfo(str(address) or None, number, index, launched.devices if launched else [])


def _launched() -> ProcessInfo | None:
    """Return the place given by SLURM or Open MPI; None if they have not started several processes.

    A process that shares its machine with others uses the GPU of its local rank, unless it sees only one.
    """
    get = os.environ.get
    if get("SLURM_STEP_NUM_TASKS") and get("SLURM_PROCID"):
        number, index = _number("SLURM_STEP_NUM_TASKS"), _number("SLURM_PROCID")
        alone = number == _number("SLURM_STEP_NUM_NODES", "0")
        local, known = "SLURM_LOCALID", "SLURM_STEP_NODELIST" in os.environ
    elif get("OMPI_COMM_WORLD_SIZE") and get("OMPI_COMM_WORLD_RANK"):
        number, index = _number("OMPI_COMM_WORLD_SIZE"), _number("OMPI_COMM_WORLD_RANK")
        alone = get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
        local, known = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_hnp_uri" in os.environ
    else:
        return None
    bound = "," not in get("CUDA_VISIBLE_DEVICES", ",")
    devices = [] if alone or bound or get(local) is None else [_number(local)]
    return ProcessInfo("known to JAX" if known else None, number, index, devices) if number > 1 else None


def _number(name: str, default: str = "") -> int:
    """Return the integer value of an environment variable. Raises UsageError."""
    text = os.environ.get(name) or default
    if not text.isdecimal():
        raise UsageError(
            f"the environment variable {name} must be a number, not {short_repr(text)}: unset it to train on one host"
        )
    return int(text)


@contextlib.contextmanager
def joined(place: ProcessInfo | None) -> Iterator[None]:
    """Join the hosts of a run until the program ends; hosts other than 0 write nothing to stdout.

    Raises:
        UserError: the other hosts were not found.
    """
    if place is None:
        yield
        return
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.number,
            place.index,
            None if "JAX_LOCAL_DEVICE_IDS" in os.environ else place.devices,
            initialization_timeout=JOIN,
            heartbeat_timeout_seconds=LOST,
        )
        if place.index:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _connections[:] = _connect(place)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"host {place.index} of {place.number} could not join the others ({_cause(str(error))}): start the same "
            "command on all hosts, and check that they reach the coordinator's port"
        ) from None
    try:
        yield
        gather("done")  # host 0 may still be committing a checkpoint
    except BaseException as error:
        broken = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)
        if broken or isinstance(error, LostError):
            os.write(2, f"\n{_cause(str(error))}\n".encode())
            _leave(_LEFT)
        # The others have not finished, and JAX would wait for them.
        atexit.register(_leave, getattr(error, "exit_code", 1), FAREWELL if writes() else 0)
        raise
    jax.distributed.shutdown()


def _leave(code: int, seconds: float = 0) -> None:
    """End the process at once, or after so many seconds."""
    time.sleep(seconds)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _connect(place: ProcessInfo) -> list[Connection]:
    """Open sockets between host 0 and all others, with mutual authentication for this run."""
    if place.index:
        name, port, secret = json.loads(_from_first(b""))
        connection = Client((name, port), authkey=bytes.fromhex(secret))
        _send(connection, json.dumps(place.index).encode())
        return [connection]
    secret = secrets.token_hex(16)
    with Listener(("", 0), backlog=place.number, authkey=bytes.fromhex(secret)) as listener:
        coordinator = place.coordinator or ""
        name = coordinator.rpartition(":")[0] or socket.gethostname()  # SLURM's and Open MPI's names of nodes
        _from_first(json.dumps([name, listener.address[1], secret]).encode())
        found = [listener.accept() for _ in range(place.number - 1)]
    by_index = {json.loads(_read(connection)): connection for connection in found}  # they connect in any order
    return [by_index[index] for index in sorted(by_index)]


def _from_first(text: bytes) -> bytes:
    """Broadcast host 0's text over the devices, before any socket exists."""
    sent = np.zeros(_ADDRESS, np.uint8)
    sent[: len(text)] = np.frombuffer(text, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent))).rstrip(b"\0")


def _read(connection: Connection) -> bytes:
    """Read a message of another host; wait for a slow host, end the process for a dead one."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        raise LostError("another host has ended") from None


def _send(connection: Connection, text: bytes) -> None:
    try:
        connection.send_bytes(text)
    except OSError:
        raise LostError("another host has ended") from None


# Agreement


def number() -> int:
    """Return the number of hosts."""
    return jax.process_count()


def writes() -> bool:
    """Return whether this process writes to the run directory and to the console."""
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """Return the values, JSON objects, of all hosts in order; wait for them all."""
    if jax.process_count() == 1:
        return [value]
    return exchange(value, _connections, writes())


def exchange(value: Any, connections: Sequence[Connection], collects: bool) -> list[Any]:
    """Return the values of all hosts: the one that collects has connections to all others, which have one to it."""
    if not collects:
        _send(connections[0], json.dumps(value).encode())
        return list(json.loads(_read(connections[0])))
    values = [value, *(json.loads(_read(connection)) for connection in connections)]
    for connection in connections:
        _send(connection, json.dumps(values).encode())
    return values


def first(value: Any) -> Any:
    """Return host 0's value, a JSON object."""
    return value if jax.process_count() == 1 else gather(value if writes() else None)[0]


def on_first(function: Callable[[], Any]) -> Any:
    """Call `function` on host 0 and return its JSON result on all hosts; a UserError is raised on all, too."""
    if jax.process_count() == 1:
        return function()
    answer, refusal = None, None
    if writes():
        try:
            answer = function()
        except UserError as error:
            refusal = pickle.dumps(error).hex()
    answer, refusal = first([answer, refusal])
    if refusal is not None:
        raise pickle.loads(bytes.fromhex(refusal))
    return answer


def require_same(facts: Mapping[str, Any]) -> None:
    """Raise UsageError that names the first fact in which hosts differ."""
    ours, *others = gather(dict(facts))
    for host, theirs in enumerate(others, start=1):
        for name in (*ours, *theirs):
            a, b = (found.get(name, "not given") for found in (ours, theirs))
            if a != b:
                raise UsageError(
                    f"the hosts disagree: {name} is {a} on host 0 and {b} on host {host}; start all of them with the "
                    "same command, files and packages"
                )


def require_visible(directory: Path) -> None:
    """Raise UserError unless every host sees the run directory that host 0 has made."""
    until = time.monotonic() + SEEN
    while not directory.is_dir() and time.monotonic() < until:
        time.sleep(0.5)  # a network file system may be slow
    blind = [host for host, seen in enumerate(gather(directory.is_dir())) if not seen]
    if blind:
        raise UserError(f"host {blind[0]} does not see {directory}: choose --runs on a disk that all hosts share")


def fetched(tree: Any) -> Any:
    """Return NumPy copies of arrays that may be spread over several hosts."""

    def whole(x: Any) -> Any:  # replicated arrays are read without waiting for the running block
        at_hand = x.is_fully_addressable or x.is_fully_replicated
        return x if at_hand else multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))


# The supervisor


def supervise(module: str, argv: Sequence[str], checkpoints: Callable[[Path], list[int]]) -> int:
    """Run `python -m module argv` in a separate process; return its exit code, or 1 with a sentence if it died.

    Its stderr output from Python is shown at once; output of libraries (aborts of JAX, with their stack) only if it
    ends by itself.

    Args:
        module: of the command.
        argv: its arguments.
        checkpoints: the numbers of the complete checkpoints in a run directory, for the sentence.

    Raises:
        UserError: the process died, or lost the others.
    """
    received: list[int] = []
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / _STDERR).open("w+b") as log:
        shown = os.dup(2)
        child = subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            env=os.environ | {_GUARDED: f"{shown}:{folder}"},
            stderr=log,
            pass_fds=(shown,),
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )

        def relay(number: int, frame: FrameType | None) -> None:
            received.append(number)
            child.send_signal(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, relay)
        code = child.wait()
        os.close(shown)
        text = (Path(folder) / _STDERR).read_text(errors="replace")
        run = Path(folder) / _RUN
        where = Path(run.read_text()) if run.exists() else None
    if code == -signal.SIGINT and signal.SIGINT in received:
        return 128 + signal.SIGINT
    if code >= 0 and code != _LEFT:
        sys.stderr.write(text)
        return code
    raise UserError(f"{_story(code, text)}; {_remedy(where, checkpoints(where) if where else [])}")


def supervised() -> bool:
    """Return whether a supervisor has started this process, and connect to it; to be called once."""
    if _GUARDED not in os.environ:
        return False
    sys.stderr = os.fdopen(int(os.environ[_GUARDED].partition(":")[0]), "w", buffering=1)
    with contextlib.suppress(OSError, AttributeError):  # Linux: SIGTERM when the supervisor ends for any reason
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return True


def remember(directory: Path) -> None:
    """Report the run directory to the supervisor, if any."""
    if _GUARDED in os.environ:
        (Path(os.environ[_GUARDED].partition(":")[2]) / _RUN).write_text(str(directory))


def _story(code: int, text: str) -> str:
    """Explain why a supervised process ended, given the libraries' output on its stderr."""
    if code == _LEFT:
        return f"this host has lost the others ({text.strip().splitlines()[-1]})"
    fatal = re.search(r"^F\d{4} .*?\] (.*?)(?:^\*\*\*|\Z)", text, re.MULTILINE | re.DOTALL)
    if fatal and "distributed service" in fatal[1]:
        return f"this host has lost the others ({_cause(fatal[1])})"
    cause = f" ({_cause(fatal[1])})" if fatal else ""
    return f"the process of this host was ended by {signal.Signals(-code).name}{cause}"


def _cause(text: str) -> str:
    """Return the essence of a JAX message, in at most 200 characters of one line."""
    gist = re.sub(r"/job:\S+/task:(\d+)", r"host \1", " ".join(text.rpartition("absl::Status: ")[2].split()))
    return gist if len(gist) <= 200 else gist[:197] + "..."


def _remedy(run: Path | None, checkpoints: list[int]) -> str:
    """Return how to continue an interrupted run."""
    if run is None:
        return "nothing was trained yet: start all hosts again"
    at = f"the last good checkpoint ({checkpoints[-1]:,}) is kept" if checkpoints else "there was no checkpoint yet"
    return f"{at}: continue with --resume {run}"
