"""Code that all benchmarks share: flags, the record of the machine, results as JSON.

A result is a plain mapping with "kind", "command", "machine", "notes" and the benchmark's own entries; every time in it
is a median with its samples.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from bench.harness.timing import Timing
from envs_jax.base import short_repr
from jaxrl.cli.flags import Parser
from jaxrl.cli.values import add_int, parse_int
from jaxrl.common import files
from jaxrl.common.errors import UsageError, UserError
from jaxrl.runtime import memory_plan, run_directory

RESULTS = Path(__file__).resolve().parents[1] / "results"
FORMAT = 1
MOST = 2**24  # environments

Say = Callable[[str], None]


def say(sentence: str) -> None:
    """Print to stderr, so that stdout holds nothing but the tables."""
    print(sentence, file=sys.stderr, flush=True)


# Flags


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser without flags whose errors are one sentence."""
    return Parser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_common(flags: argparse.ArgumentParser, num_envs: str) -> None:
    """Add the flags that all benchmarks have."""
    flags.add_argument(
        "--num_envs",
        default=num_envs,
        metavar="N,M,...",
        help=f"measure each of these numbers of environments (default: {num_envs})",
    )
    add_int(flags, "--rounds", 1, 1000, 5, "take N samples of everything, in turns; more take longer (default: 5)")
    flags.add_argument(
        "--out", metavar="FILE", help="write the result to this JSON file (default: a new one under bench/results/)"
    )
    flags.add_argument("--quick", action="store_true", help="rehearse in seconds; the figures mean nothing")


def add_devices(flags: argparse.ArgumentParser) -> None:
    """Add the flag --devices."""
    add_int(flags, "--devices", 0, MOST, 0, "use N devices (default: all; a CPU counts as one, or as many as the "
            "variable JAX_NUM_CPU_DEVICES says)")  # fmt: skip


def parse_list(text: str, flag: str, low: int, high: int) -> list[int]:
    """Parse whole numbers separated by commas. Raises UsageError."""
    words = text.replace(",", " ").split()
    if not words:
        raise UsageError(
            f"{flag} names no number: give one, or several separated by commas, such as {low},{min(64, high)}"
        )
    return sorted({parse_int(word, flag, low, high) for word in words})


def sizes(parsed: argparse.Namespace, default: str) -> list[int]:
    """Parse --num_envs; a rehearsal has small ones unless others than the default are named. Raises UsageError."""
    is_rehearsal = parsed.quick and parsed.num_envs == default
    return parse_list("1,2" if is_rehearsal else parsed.num_envs, "--num_envs", 1, MOST)


def rounds(parsed: argparse.Namespace) -> int:
    """Return the samples of everything: --rounds, a single one in a rehearsal."""
    return 1 if parsed.quick else int(parsed.rounds)


def gibibytes_of(text: str) -> int:
    """Parse --memory_gb to bytes, 0 for all free memory. Raises UsageError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**30:
        raise UsageError(f"--memory_gb must be a number of GiB, 0 or above, not {short_repr(text)}")
    return int(value * memory_plan.GIB)


def positive(text: str, flag: str) -> float:
    """Parse a number above 0. Raises UsageError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{flag} must be a number above 0, not {short_repr(text)}")
    return value


def output(text: str | None, kind: str) -> Path:
    """Return the path of the JSON file to write; by default a new one. Raises UserError: it cannot be written."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(text) if text else RESULTS / f"{kind}_{jax.default_backend()}_{stamp}.json"
    if path.suffix != ".json":
        raise UsageError(f"--out must end in .json, not {short_repr(path.name)}")
    try:
        if path.is_dir():
            raise UsageError(f"--out {path} is a directory: name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot make {path.parent} ({reason}): choose another file with --out") from None
    return files.output(text or str(path), "--out")


# Measuring


@contextlib.contextmanager
def fresh_compiles() -> Iterator[None]:
    """Disable JAX's persistent cache, so that compile seconds are what a first start takes."""
    previous = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", previous)


def machine() -> dict[str, Any]:
    """Return a record of the machine: versions, device, cores, memory, and load."""
    device = jax.local_devices()[0]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return run_directory.versions() | {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": device.device_kind,
        "backend_name": device.platform,
        "free_bytes": memory_plan.free_memory(device),
        "load": load,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def busy(record: dict[str, Any]) -> str | None:
    """Return a warning if other programs use the machine's cores."""
    load = record["load"]
    cores = record["cores"]
    if load is None or not cores or load < 0.5 * cores:
        return None
    return f"warning: the machine is busy (load {load:.1f} on {cores} cores): all figures will be too low"


def processor() -> str:
    """Return the name of the CPU."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def header(kind: str, argv: Sequence[str], quick: bool, module: str = "") -> dict[str, Any]:
    """Return the first entries of every result; `module` of bench is the command's, `kind` by default."""
    record = machine()
    warning = busy(record)
    notes = [warning] if warning else []
    if quick:
        notes.append("a rehearsal (--quick): the figures mean nothing")
    command = " ".join(["python", "-m", f"bench.{module or kind}", *argv])
    return {
        "format": FORMAT,
        "kind": kind,
        "command": command,
        "commit": find_commit(),
        "quick": quick,
        "machine": record,
        "notes": notes,
    }


def find_commit() -> str | None:
    """Return the commit of this checkout, with "+changes" if files differ from it; None if this is no checkout."""
    words = ["git", "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+changes"]
    try:
        done = subprocess.run(words, cwd=RESULTS.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def rate(timing: Timing, count: float) -> dict[str, Any]:
    """Return the rate of `count` things per call: {"rate", "median" seconds, "spread", "samples" seconds}."""
    return {"rate": count / timing.median, **timing.plain()}


# Results


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result. Raises UserError."""
    files.write_output(path, json.dumps(result, indent=1, allow_nan=False) + "\n", "--out")
