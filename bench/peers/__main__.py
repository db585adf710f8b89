"""python -m bench.peers environments|learners: compare our environments or learners with other libraries'.

Each library runs in a virtual environment of its own, which `--make NAME` makes (or `--python NAME=PATH` names), as a
process on one core that answers one request after another. Environments take turns, round by round, with random actions
drawn in the program, auto-reset and observations; learners train with equal networks, batches and updates per step
until a greedy policy reaches a score. All speeds are per CPU second of the process, so that other load matters little.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import measure
from bench.harness.timing import Timing
from bench.peers import installs
from bench.peers.tables import rows
from envs_jax.base import closest
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import add_int
from jaxrl.common.errors import UsageError, UserError

KIND = "peers"
SIZES = "1,16,256,4096,16384"
QUICK = "1,2"  # copies, in a rehearsal
SECONDS = 0.3  # CPU seconds per sample, at least
WORK = ("environments", "learners")


@dataclasses.dataclass(frozen=True)
class Request:
    """Parameters of a measurement."""

    work: str  # a key of WORK
    pythons: Mapping[str, Path]  # {peer: its interpreter}
    core: int  # that all workers share, -1 = any
    num_envs: Sequence[int]  # copies
    only: Sequence[str]  # environments, all if there is none
    rounds: int  # samples of each environment
    min_seconds: float  # CPU seconds per sample
    limit: int  # bytes that one environment may use
    # algos, seeds: of learners
    algos: Sequence[str]
    seeds: int
    quick: bool  # a rehearsal


class Worker:
    """A process that measures one peer; see `bench.peers.worker`."""

    def __init__(self, peer: str, python: Path, core: int) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 closed with the worker
        variables = {"PYTHONPATH": str(installs.ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if core >= 0:
            variables |= {"JAX_NUM_CPU_DEVICES": "1"}
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.peers.worker", peer, str(core)], cwd=installs.ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=os.environ | variables,
        )  # fmt: skip
        self.hello = self._read()  # versions of the peer, {} where it does not start

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer, {"skipped": why} where the process has died."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            return self._report_death()
        return self._read() or self._report_death()

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def _report_death(self) -> dict[str, Any]:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return {"skipped": f"the process ended with {self._process.wait()}: {lines[-1] if lines else ''}"[:200]}


def measure_in_turns(request: Request, say: measure.Say) -> Iterator[dict[str, Any]]:
    """Measure environments; yield the entries "peers" and "rows" of a result after each number of copies."""
    peers = dict[str, Any]()
    rows = list[dict[str, Any]]()
    for copies in request.num_envs:
        workers: list[Worker] = []
        opened: list[tuple[dict[str, Any], Worker, list[dict[str, float]]]] = []
        for peer, python in request.pythons.items():
            offered = getattr(installs.PEERS[peer], request.work)
            names = [name for name in offered if name in request.only or not request.only]
            if not names:
                continue
            worker = Worker(peer, python, request.core)
            workers.append(worker)
            peers[peer] = worker.hello
            for name in names:
                facts = worker.ask(open=name, copies=copies, limit=request.limit)
                row = {"peer": peer, "environment": name, "num_envs": copies, **facts}
                say(f"{peer}, {name}, {copies:,}: {facts.get('skipped', 'compiled')}")
                rows.append(row)
                if "skipped" not in facts:
                    opened.append((row, worker, []))
        for _ in range(request.rounds + 1):  # the first one chooses the number of steps
            for row, worker, samples in opened:
                samples.append(worker.ask(sample=row["environment"], seconds=request.min_seconds))
        for row, _, samples in opened:
            row |= _speed(samples[1:])
        for worker in workers:
            worker.close()
        yield {"peers": peers, "rows": rows}


def _speed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return environment steps per CPU second ("rate") and per second."""
    broken = [sample for sample in samples if "skipped" in sample]
    if broken:
        return broken[0]
    times = {clock: Timing(tuple(one[clock] / one["env_steps"] for one in samples)) for clock in ("cpu", "wall")}
    return measure.rate(times["cpu"], 1) | {"wall_rate": 1 / times["wall"].median}


def learners(request: Request, say: measure.Say) -> Iterator[dict[str, Any]]:
    """Train; yield the entries "peers" and "rows" of a result after each run."""
    peers = dict[str, Any]()
    rows = list[dict[str, Any]]()
    for seed in range(1, request.seeds + 1):
        for algo in request.algos:
            for peer, python in request.pythons.items():
                if algo not in installs.PEERS[peer].learners:
                    continue
                worker = Worker(peer, python, request.core)
                peers[peer] = worker.hello
                row = {"peer": peer, "algo": algo, "seed": seed}
                row |= worker.ask(learn=algo, seed=seed, quick=request.quick)
                worker.close()
                rows.append(row)
                seconds = row.get("cpu_to_score")
                reached = f"the score after {seconds:.0f} s" if seconds else row.get("skipped", "the score not reached")
                say(f"{algo}, {peer}, seed {seed}: {reached}, {row.get('updates_per_second') or 0:.0f} updates/s")
                yield {"peers": peers, "rows": rows}


# Command line


def _flags(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(installs.PEERS)
    parser.add_argument("work", nargs="?", metavar="WORK", help=f"measure {' or '.join(WORK)}")
    parser.add_argument(
        "--make", metavar="A,B", help=f"install these libraries in virtual environments under .peers/: any of {names}"
    )
    parser.add_argument("--peers", metavar="A,B", help="measure these libraries (default: all that are installed)")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="use this interpreter or "
                        "virtual environment for a library, instead of making one")  # fmt: skip
    add_int(parser, "--core", -1, (os.cpu_count() or 1) - 1, 0, "run all workers on core N, -1 = any (default: 0)")
    parser.add_argument(
        "--memory_gb", default="4", metavar="X", help="let one environment use up to X GiB (default: 4)"
    )
    parser.add_argument("--only", default="", metavar="A,B", help="measure only these environments (default: all)")
    parser.add_argument(
        "--algos", default=",".join(installs.ALL), metavar="A,B", help="train these algorithms (default: all)"
    )
    add_int(parser, "--seeds", 1, 1000, 3, "train every learner N times (default: 3)")
    measure.add_common(parser, SIZES)


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def pythons(parsed: argparse.Namespace) -> dict[str, Path]:
    """Return the interpreters of the libraries to measure. Raises UsageError."""
    paths: dict[str, str] = {}
    for pair in parsed.python:
        name, _, path = pair.partition("=")
        installs.find(name)
        paths[name] = path
    if parsed.peers:
        return {name: installs.python_of(name, paths) for name in _words(parsed.peers)}
    pythons = {}
    for name, peer in installs.PEERS.items():
        if not getattr(peer, parsed.work):
            continue
        try:
            pythons[name] = installs.python_of(name, paths)
        except UsageError as missing:
            if name in paths:
                raise
            measure.say(f"left out: {missing}")
    return pythons


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.peers", __doc__)
    _flags(parser)
    parsed = parser.parse_args(list(argv))
    for name in (to_install := _words(parsed.make or "")):
        installs.find(name)
    for name in to_install:
        measure.say(f"made {installs.make(name)}")
    if parsed.work is None and to_install:
        return 0
    if parsed.work not in WORK:
        raise UsageError(f"say what to measure: {' or '.join(WORK)}")
    algos = _words(parsed.algos)
    if unknown := [algo for algo in algos if algo not in installs.ALL]:
        raise UsageError(f"--algos: there is no {unknown[0]}: choose from {', '.join(installs.ALL)}")
    only = [word.strip() for word in parsed.only.split(",") if word.strip()]  # names hold spaces
    if only and parsed.work == "learners":
        raise UsageError("--only names environments: learners are chosen with --algos and --peers")
    every = {name for peer in installs.PEERS.values() for name in getattr(peer, parsed.work)}
    if unknown := [name for name in only if name not in every]:
        kind = parsed.work.removesuffix("s")
        raise UsageError(f"--only: there is no {kind} '{unknown[0]}': {closest(unknown[0], every)}")
    chosen = pythons(parsed)
    for peer in chosen:
        if not getattr(installs.PEERS[peer], parsed.work):
            raise UsageError(f"{peer} has no {parsed.work}: leave it out of --peers")
    if only and not any(name in getattr(installs.PEERS[peer], parsed.work) for peer in chosen for name in only):
        raise UsageError(f"no library that is installed has {', '.join(only)}: make one with --make")
    path = measure.output(parsed.out, f"{KIND}_{parsed.work}")
    words = [word.replace(f"{installs.ROOT}{os.sep}", "") for word in argv]  # no path of this machine
    words = [re.sub(r"^(--python=)?([a-z0-9]+)=.*", r"\1\2=PATH", word) for word in words]
    result = measure.header(KIND, words, parsed.quick) | {"work": parsed.work, "peers": {}, "rows": []}
    result["notes"].append("speeds and seconds are CPU seconds of each worker's process, all on one core")
    request = Request(
        work=parsed.work,
        pythons=chosen,
        core=parsed.core,
        num_envs=measure.parse_list(QUICK if parsed.quick else parsed.num_envs, "--num_envs", 1, measure.MOST),
        only=only,
        rounds=measure.rounds(parsed),
        min_seconds=1e-3 if parsed.quick else SECONDS,
        limit=measure.gibibytes_of(parsed.memory_gb),
        algos=algos,
        seeds=1 if parsed.quick else parsed.seeds,
        quick=parsed.quick,
    )
    for part in (learners if parsed.work == "learners" else measure_in_turns)(request, measure.say):
        result |= part
        measure.write(result, path)  # so that what is there outlives an interruption
    print(rows(result))
    if all("skipped" in row for row in result["rows"]):
        reason = result["rows"][0]["skipped"] if result["rows"] else "no library that was chosen has any of it"
        raise UserError(f"nothing was measured: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
