"""Several hosts: how the processes of a run connect, agree, and end together.

A host is one process of a run, on a machine of its own or with a GPU of its own. All run the same program, and so
call the functions here in the same order. Decisions that depend on clocks, signals and the state of a disk are
made by host 0 or by all together (`first`, `gather`, `on_first`), over a socket between host 0 and each other: no
device takes part, so that an exchange does not wait for the running block. In a run of one process every function
here returns at once.

When a process ends, the system closes its socket: host 0 sees it, or the others see that of host 0, and all end with
one sentence. A machine that falls silent closes nothing: JAX ends the others within `LOST` seconds, in its own words.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import pickle
import queue
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from envs_jax.base import short_repr
from jaxrl.common.errors import UsageError, UserError, one_line

JOIN = 300  # seconds to wait for the others at the start
LOST = 30  # seconds of silence after which a host counts as dead
SEEN = 60  # seconds after which a folder made by host 0 must be visible to the others
FAREWELL = 1, 2  # seconds that a host stays after an error, so that the others can read it; that host 0 stays longer
_ADDRESS = 512  # bytes of the broadcast of host 0's address
_TASKS = "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"  # processes that a launcher has started
_TORCHRUN = "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"  # which accelerate and DeepSpeed set, too
_RANKS = {"PMI_SIZE": "PMI_RANK", "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK", "WORLD_SIZE": "RANK"}  # no address


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """One process of a run, as far as the flags tell; JAX finds the rest.

    Attributes:
        coordinator: "HOST:PORT" of host 0.
        number: of hosts.
        index: of this one, from 0.
        devices: [] to use all visible devices, None for those that JAX chooses: the GPU of the task's local number.
    """

    coordinator: str | None
    number: int | None
    index: int | None
    devices: list[int] | None


def find(coordinator: str | None, number: int | None, index: int | None) -> ProcessInfo | None:
    """Return the place of this process, None if it trains alone: without flags and launcher, or with `number` 1.

    The arguments are `--coordinator`, `--num_hosts` and `--host_index`.

    Raises:
        UsageError: incompatible flags, or a launcher that does not say enough to make its processes one run.
    """
    get = os.environ.get
    if number == 1 and (coordinator or index):
        raise UsageError("--num_hosts 1 trains on this host only: remove --coordinator and --host_index")
    if number == 1:
        return None
    if (coordinator, number, index) == (None, None, None):
        tasks = max(_count(name) for name in _TASKS)
        innermost = tasks == 1 or "TORCHELASTIC_RUN_ID" in os.environ
        if _count("WORLD_SIZE") > 1 and innermost and all(map(get, _TORCHRUN)):
            return _from_torchrun(*(os.environ[name] for name in _TORCHRUN))
        for size, rank in _RANKS.items():
            if _count(size) > tasks:
                raise UsageError(
                    f"{size} says that {_count(size)} processes were started, but not where the first one is: for one "
                    f"run give each --coordinator HOST:PORT --num_hosts {_count(size)} --host_index ${rank}, for a "
                    "run of this process alone --num_hosts 1"
                )
        if tasks == 1:
            return None
    if (number is not None and number < 1) or (index is not None and not 0 <= index < (number or index + 1)):
        raise UsageError(f"--host_index {index} of --num_hosts {number}: give hosts the numbers 0 to N - 1")
    port = re.fullmatch(r"\S+:([0-9]{1,5})", coordinator or "")
    if coordinator is not None and not (port and 0 < int(port[1]) < 2**16):
        raise UsageError(
            f"--coordinator must be HOST:PORT of host 0, such as node1:7733, not {short_repr(coordinator)}"
        )
    # A task alone on its machine uses all of its GPUs, and one that its launcher has bound to a GPU sees no other.
    one_per_machine = get(_TASKS[0]) == get("SLURM_STEP_NUM_NODES") and get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") == "1"
    bound = "," not in get("CUDA_VISIBLE_DEVICES", ",")
    every = "JAX_LOCAL_DEVICE_IDS" not in os.environ and (one_per_machine or bound)
    return ProcessInfo(coordinator, number, index, [] if every else None)


def _count(name: str) -> int:
    """Return the number in an environment variable, 1 if there is none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 1


def _from_torchrun(size: str, rank: str, address: str, port: str) -> ProcessInfo:
    """Return the place of a process that torchrun has started; each uses the GPU of its local number.

    Host 0 listens on the port after MASTER_PORT, which is torchrun's own. Raises UsageError: impossible numbers.
    """
    if not (size.isdecimal() and rank.isdecimal() and port.isdecimal() and int(rank) < int(size)):
        told = ", ".join(f"{name}={short_repr(os.environ[name])}" for name in _TORCHRUN)
        raise UsageError(f"{told} are not the variables of torchrun: start with torchrun, or unset WORLD_SIZE")
    devices: list[int] | None = []
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        devices = None
    elif "LOCAL_RANK" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") != "1":
        bound = "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
        devices = [] if bound else [_count("LOCAL_RANK")]
    return ProcessInfo(f"{address}:{int(port) % (2**16 - 1) + 1}", int(size), int(rank), devices)


@contextlib.contextmanager
def joined(place: ProcessInfo | None) -> Iterator[None]:
    """Join the hosts of a run until the program ends; hosts other than 0 write nothing to stdout.

    Raises UserError: the other hosts were not found, or flags are missing.
    """
    if place is None:
        yield
        return
    try:
        found = place.coordinator, place.number, place.index, place.devices
        jax.distributed.initialize(*found, initialization_timeout=JOIN, heartbeat_timeout_seconds=LOST)
        if not writes():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _peers[:] = map(Peer, _connect(place))
    except (RuntimeError, ValueError, LookupError, OSError, EOFError, AuthenticationError) as error:
        cause = one_line(str(error))
        if isinstance(error, ValueError):
            raise UsageError(
                f"JAX finds no other hosts ({cause}): give each --coordinator, --num_hosts and its --host_index; "
                "--num_hosts 1 trains on this host only"
            ) from None
        raise UserError(
            f"this host could not join the others ({cause}): start the same command on all hosts, and check that they "
            "reach the coordinator's port and the second port that host 0 opens"
        ) from None
    try:
        yield
        gather("done")  # host 0 may still be committing a checkpoint
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            _lost()  # a collective that has failed
        _ending.set()
        atexit.register(_leave, getattr(error, "exit_code", 1))  # JAX would wait for the others, which have not ended
        raise
    _ending.set()
    jax.distributed.shutdown()


def _leave(code: int) -> None:
    """End the process when the others have had time to read its messages; host 0, JAX's coordinator, as the last."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(FAREWELL[0])
    for peer in _peers:
        peer.send(None, last=True)
    time.sleep(FAREWELL[1] if writes() else 0)
    os._exit(code)


def _connect(place: ProcessInfo) -> list[Connection]:
    """Open sockets between host 0 and all others, with mutual authentication for this run."""
    if not writes():
        name, port, secret = json.loads(_from_first(b""))
        connection = Client((name, port), authkey=bytes.fromhex(secret))
        connection.send_bytes(json.dumps(jax.process_index()).encode())
        return [connection]
    secret = secrets.token_hex(16)
    with Listener(("", 0), backlog=number(), authkey=bytes.fromhex(secret)) as listener:
        name = (place.coordinator or "").rpartition(":")[0] or socket.gethostname()  # SLURM's and Open MPI's names
        _from_first(json.dumps([name, listener.address[1], secret]).encode())
        found = [_accepted(listener) for _ in range(number() - 1)]
    by_index = {json.loads(connection.recv_bytes()): connection for connection in found}  # they connect in any order
    return [by_index[index] for index in sorted(by_index)]


def _accepted(listener: Listener) -> Connection:
    """Return the next connection of one of this run's hosts; strangers do not know the secret."""
    while True:
        with contextlib.suppress(AuthenticationError, EOFError, ConnectionError):
            return listener.accept()


def _from_first(text: bytes) -> bytes:
    """Broadcast host 0's text over the devices, before any socket exists."""
    sent = np.zeros(_ADDRESS, np.uint8)
    sent[: len(text)] = np.frombuffer(text, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent))).rstrip(b"\0")


# The end of a host

_run: Path | None = None  # the run directory
_ending = threading.Event()  # the others may close their sockets
_losing = threading.Lock()


def _lost() -> None:
    """End the process with one sentence, since another host has ended."""
    _losing.acquire()  # for good: one sentence is enough
    remedy = (
        f"start all of them again with --resume {_run}" if _run else "nothing was trained yet, start all of them again"
    )
    sys.stdout.flush()
    os.write(2, f"\nerror: another host has ended: {remedy}\n".encode())
    _leave(1)


class Peer:
    """The socket to another host; a thread reads it, and ends this process when the other one has ended."""

    def __init__(self, connection: Connection, lost: Callable[[], None] = _lost) -> None:
        self._connection, self._lost = connection, lost
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError, ValueError):
            while text := self._connection.recv_bytes():
                self._received.put(json.loads(text))
        if not _ending.is_set():
            self._lost()

    def send(self, value: Any, last: bool = False) -> None:
        """Send a JSON object, or tell the other host that this one ends."""
        with contextlib.suppress(OSError):  # the thread sees it, too
            self._connection.send_bytes(b"" if last else json.dumps(value).encode())

    def receive(self) -> Any:
        """Return the next JSON object; wait for a slow host."""
        return self._received.get()


_peers: list[Peer] = []  # of host 0, all others in order; of another, host 0


# Agreement


def number() -> int:
    """Return the number of hosts."""
    return jax.process_count()


def writes() -> bool:
    """Return whether this process writes to the run directory and to the console."""
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """Return the values, JSON objects, of all hosts in order; wait for them all."""
    return [value] if jax.process_count() == 1 else exchange(value, _peers, writes())


def exchange(value: Any, peers: list[Peer], collects: bool) -> list[Any]:
    """Return the values of all hosts: the one that collects has all others as peers, which have only it."""
    if not collects:
        peers[0].send(value)
        return list(peers[0].receive())
    values = [value, *(peer.receive() for peer in peers)]
    for peer in peers:
        peer.send(values)
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
    """Raise UserError unless every host sees the run directory that host 0 has made; it is named if one is lost."""
    global _run
    _run, until = directory, time.monotonic() + SEEN
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
