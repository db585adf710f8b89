"""Several hosts: how the processes of a run connect, agree, and end together; launchers start them.

A host is one process of a run, with a machine or a GPU to itself. All run the same program, and so call the functions
here in the same order. Decisions that depend on clocks, signals and the state of a disk are made by host 0 or by all
together (`broadcast`, `gather`, `call_on_host_0`). In a run of one process every function here returns at once.

JAX's coordination service connects the hosts, stores what they exchange, and knows which of them live. It is a part of
host 0: if host 0 is killed, JAX aborts the others with a message of its own.
"""

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax._src.distributed import global_state  # JAX has no public name for the client of its coordination service
from jax._src.lib import utils
from jax.experimental import multihost_utils

from envs_jax.base import short_repr
from jaxrl.common.errors import UsageError, UserError, list_names, one_line

JOIN = 300  # seconds to wait for the other hosts at the start, by default
HEARTBEAT_TIMEOUT_S = 30  # without a heartbeat a host counts as dead
WATCH_S = 0.5  # between two looks at which hosts live
STAY_S = 3  # host 0 stays so long after an error: JAX aborts hosts that have not seen by then that it ends
VISIBLE_TIMEOUT_S = 60  # after which a folder made by host 0 must be visible to the others
_FOREVER_MS = 10**10
_TASKS = "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"  # processes that a launcher has started
_FLAGS = "--coordinator", "--num_hosts", "--host_index"
_VARIABLES = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"  # in place of them
_RANKS = {"PMI_SIZE": "PMI_RANK", "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK", "WORLD_SIZE": "RANK"}  # no address


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """One process of a run, as far as the flags say; JAX asks the launcher for what is None."""

    coordinator: str | None  # "HOST:PORT" of host 0
    count: int | None  # number of hosts
    index: int | None  # this host's, from 0
    devices: list[int] | None  # [] for all visible devices; None for JAX's choice, the GPU of the task's local number


def find(coordinator: str | None, count: int | None, index: int | None) -> ProcessInfo | None:
    """Return what `--coordinator`, `--num_hosts` and `--host_index`, JAX's variables or a launcher say.

    None is returned for a single host.

    Raises UsageError: incompatible flags, or variables that do not say enough to make their processes one run.
    """
    get = os.environ.get
    local_devices = None
    flags = coordinator, count, index
    if count == 1:
        if coordinator or index:
            raise UsageError("--num_hosts 1 trains on this host only: remove --coordinator and --host_index")
        return None
    variables = _read_variables()
    coordinator = coordinator or variables[0]
    count = variables[1] if count is None else count
    index = variables[2] if index is None else index
    names = [
        name if flag is not None or value is None else variable
        for name, variable, flag, value in zip(_FLAGS, _VARIABLES, flags, variables, strict=True)
    ]
    is_shared = get(_TASKS[0]) != get("SLURM_STEP_NUM_NODES") or get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1"
    if (coordinator, count, index) == (None, None, None):
        tasks = max(_read_count(name) for name in _TASKS)
        is_innermost = tasks == 1 or "TORCHELASTIC_RUN_ID" in os.environ
        if _read_count("WORLD_SIZE") > 1 and is_innermost and get("RANK", "").isdecimal() and get("MASTER_ADDR"):
            port = _read_count("MASTER_PORT") % (2**16 - 1) + 1  # MASTER_PORT is torchrun's own
            tasks = count = _read_count("WORLD_SIZE")
            coordinator = f"{get('MASTER_ADDR')}:{port}"
            index = int(get("RANK", ""))
            local_devices = [_read_count("LOCAL_RANK")]
            is_shared = "LOCAL_RANK" in os.environ and get("LOCAL_WORLD_SIZE") != "1"
        for size, rank in _RANKS.items():
            if _read_count(size) > tasks:
                raise UsageError(
                    f"{size} says that {_read_count(size)} processes were started, but not where the first one is: for "
                    f"one run give each --coordinator HOST:PORT --num_hosts {_read_count(size)} --host_index ${rank}, "
                    "for a run of only this process --num_hosts 1"
                )
        if tasks == 1:
            return None
    elif flags == (None, None, None) and max(_read_count(name) for name in _TASKS) == 1:
        _require_all(dict(zip(_VARIABLES, variables, strict=True)))
    if count is not None and count < 1:
        raise UsageError(f"{names[1]} must be at least 1, not {count}")
    if index is not None and not 0 <= index < (count or index + 1):
        raise UsageError(f"there is no host {index} of {count}: number the hosts from 0 to N - 1 with {names[2]}")
    port_match = re.fullmatch(r"\S+:([0-9]{1,5})", coordinator or "")
    if coordinator is not None and not (port_match and 0 < int(port_match[1]) < 2**16):
        raise UsageError(f"{names[0]} must be HOST:PORT of host 0, such as node1:7733, not {short_repr(coordinator)}")
    # A task that has its machine to itself uses all GPUs, and one that its launcher has bound to a GPU sees no other.
    if not is_shared or "," not in get("CUDA_VISIBLE_DEVICES", ","):
        local_devices = []
    return ProcessInfo(coordinator, count, index, None if "JAX_LOCAL_DEVICE_IDS" in os.environ else local_devices)


def _read_variables() -> tuple[str | None, int | None, int | None]:
    """Return what JAX's variables say in place of the flags, None for each that is not set or means one process.

    Raises UsageError: numbers that are none, or another process of one.
    """
    address, *texts = (os.environ.get(name) or None for name in _VARIABLES)
    for name, text in zip(_VARIABLES[1:], texts, strict=True):
        if text is not None and not text.isdecimal():
            raise UsageError(f"{name} must be a whole number, 0 or more, not {short_repr(text)}")
    count, index = (None if text is None else int(text) for text in texts)
    if count == 1 and not index:
        return None, None, None
    return address, count, index


def _require_all(values: Mapping[str, Any]) -> None:
    """Raise UsageError if some of these variables are not set."""
    present, missing = ([name for name in values if (values[name] is None) == absent] for absent in (False, True))
    if missing:
        raise UsageError(
            f"{list_names(present)} {'is' if len(present) == 1 else 'are'} set, but not {list_names(missing)}: set all "
            "three on every host for one run, or give --num_hosts 1 for a run of only this process"
        )


def _read_count(name: str) -> int:
    """Return the number in an environment variable, 1 if there is none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 1


# Begin and end


@contextlib.contextmanager
def join(process: ProcessInfo | None, timeout: int) -> Iterator[None]:
    """Join the hosts of a run until the program ends; hosts other than 0 write nothing to stdout.

    Raises UserError: the port is not free, flags are missing, or not all hosts came within `timeout` seconds.
    """
    if process is None:
        yield
        return
    _connect(process, timeout)
    if not is_host_0():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    watcher = threading.Thread(target=_watch, daemon=True)
    watcher.start()
    try:
        yield
        gather("done")  # host 0 may still be committing a checkpoint
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            _end_without_others()  # a collective or an exchange has failed
        sys.stdout.flush()
        _leave()
        atexit.register(os._exit, getattr(error, "exit_code", 1))  # Python would wait for a block that nobody finishes
        raise
    _ending.set()
    watcher.join()
    while is_host_0() and len(_live_hosts()) > 1:
        pass  # each look waits until another host has left, which JAX would abort without host 0
    jax.distributed.shutdown()


def _connect(process: ProcessInfo, timeout: int) -> None:
    """Connect to the other hosts in a thread, as JAX ignores signals while it waits and then aborts the process."""
    address = process.coordinator or "the address that the launcher gives"
    if process.index == 0 and process.coordinator:
        _require_free_port(int(process.coordinator.rpartition(":")[2]))
    others = "the other hosts" if process.count is None else f"{process.count} hosts"
    limit = f"at most {timeout} s; --host_timeout changes it"
    print(f"waiting for {others} at {address} ({limit}) ...", file=sys.stderr, flush=True)
    jax.config.update("jax_enable_recoverability", True)  # or JAX would abort all hosts when one ends
    utils.absl_set_min_log_level(2)  # errors only: JAX would warn that this is experimental
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM from us, and knows no other signal
    errors: list[Exception] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                process.coordinator, process.count, process.index, process.devices,
                initialization_timeout=timeout + 60, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            )  # fmt: skip
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=initialize, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        atexit.register(os._exit, UserError.exit_code)
        raise UserError(
            f"not all hosts came to {address} within {timeout} s: start the same command on every host, check that "
            "they reach that address, or wait longer with --host_timeout"
        )
    for error in errors:
        cause = one_line(str(error))
        if isinstance(error, ValueError):
            raise UsageError(
                f"JAX finds no other hosts ({cause}): give each --coordinator, --num_hosts and its --host_index; "
                "--num_hosts 1 trains on this host only"
            )
        raise UserError(f"this host could not join the others ({cause}): start the same command on all hosts")


def _require_free_port(port: int) -> None:
    """Raise UserError if the port is in use, because JAX's coordination service would then crash."""
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        raise UserError(
            f"port {port} cannot be used ({os.strerror(error.errno or 0)}): choose another with --coordinator"
        ) from None


_run_directory: Path | None = None
_ending = threading.Event()  # this process ends, and the others may
_losing = threading.Lock()


def _client() -> Any:
    return global_state.client


def _live_hosts() -> Any:
    """Return indices and incarnations of the hosts that live, once each of them has asked or has left."""
    return _client().get_live_nodes(list(range(count_hosts())))


def _watch() -> None:
    """End this process when another host has ended or was started again, unless this one is ending, too."""
    before = None
    while not _ending.wait(WATCH_S):
        try:
            live = _live_hosts()
        except jax.errors.JaxRuntimeError:  # host 0 has ended
            live = {}
        before = before or live
        if (len(live) < count_hosts() or live != before) and not _ending.wait(WATCH_S):
            _end_without_others()


def _end_without_others() -> None:
    """End the process with one sentence, since another host has ended."""
    _losing.acquire()  # for good: one sentence is enough
    again = f"start all of them again with --resume {_run_directory}"
    remedy = again if _run_directory else "nothing was trained yet, start all of them again"
    sys.stdout.flush()
    os.write(2, f"\nerror: another host has ended: {remedy}\n".encode())
    if is_host_0():
        _leave()
    os._exit(1)


def _leave() -> None:
    """Let the others see that this host ends."""
    _ending.set()
    _client().shutdown()
    if is_host_0():
        time.sleep(STAY_S)


# Agreement

_turns = itertools.count()
_reader = ThreadPoolExecutor(1)  # the main thread must hear signals while it waits


def count_hosts() -> int:
    """Return the number of hosts."""
    return global_state.num_processes


def is_host_0() -> bool:
    """Return whether this process writes to the run directory and to the console."""
    return global_state.process_id == 0


def gather(value: Any) -> list[Any]:
    """Return the values, JSON objects, of all hosts in order; wait for them all.

    They go through the key-value store of JAX's coordination service: the functions of multihost_utils exchange arrays
    on the devices, which would wait for the running block.
    """
    if count_hosts() == 1:
        return [value]
    service = _client()
    turn = next(_turns)
    values = []
    service.key_value_set(f"jaxrl/{turn}/{global_state.process_id}", json.dumps(value))
    for host in range(count_hosts()):
        text = _reader.submit(service.blocking_key_value_get, f"jaxrl/{turn}/{host}", _FOREVER_MS).result()
        values.append(json.loads(text))
    if is_host_0():
        service.key_value_delete(f"jaxrl/{turn - 1}")  # all have read it, as all have come to this turn
    return values


def broadcast(value: Any) -> Any:
    """Return host 0's value, a JSON object."""
    return gather(value if is_host_0() else None)[0]


def call_on_host_0(function: Callable[[], Any]) -> Any:
    """Call `function` on host 0 and return its JSON result on all hosts; a UserError is raised on all, too."""
    if is_host_0():
        try:
            return broadcast([function(), None])[0]
        except UserError as error:
            broadcast([str(error), error.exit_code])
            raise
    result, exit_code = broadcast(None)
    if exit_code is not None:
        refusal = UserError(result)
        refusal.exit_code = exit_code
        raise refusal
    return result


def require_same(facts: Mapping[str, Any]) -> None:
    """Raise UsageError that names the first fact in which hosts differ."""
    ours, *others = gather(dict(facts))
    for host, theirs in enumerate(others, start=1):
        for name in (*ours, *theirs):
            a, b = (each.get(name, "not given") for each in (ours, theirs))
            if a != b:
                raise UsageError(
                    f"the hosts disagree: {name} is {a} on host 0 and {b} on host {host}; start all of them with the "
                    "same command, files and packages"
                )


def require_visible(directory: Path) -> None:
    """Raise UserError unless every host sees the run directory that host 0 has made.

    If a host ends later, the error message of the others names this directory.
    """
    global _run_directory
    _run_directory = directory
    until = time.monotonic() + VISIBLE_TIMEOUT_S
    while not directory.is_dir() and time.monotonic() < until:
        time.sleep(0.5)  # a network file system may be slow
    blind = [host for host, sees in enumerate(gather(directory.is_dir())) if not sees]
    if blind:
        raise UserError(f"host {blind[0]} does not see {directory}: choose --runs on a disk that all hosts share")


def fetch(tree: Any) -> Any:
    """Return NumPy copies of arrays that may be spread over several hosts."""

    def gather_shards(x: Any) -> Any:  # replicated arrays are read without waiting for the running block
        at_hand = x.is_fully_addressable or x.is_fully_replicated
        return x if at_hand else multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(gather_shards, tree))
