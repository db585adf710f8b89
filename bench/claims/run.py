"""Running a claim: training and evaluating one seed in processes of its own, as a user would type the commands."""

import contextlib
import hashlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.claims.claim import Claim, take
from bench.claims.needs import digest_files
from bench.harness import measure
from bench.parity.comparison import DIFFERS
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import write_atomically
from jaxrl.report.writer import read_metrics

ROOT = Path(__file__).resolve().parents[2]
# What decides about the figures of a run: rows and runs of other sources are not used again
SOURCES = ("jaxrl", "envs_jax", "configs", "bench/claims/settings", "bench/parity", "bench/reference")
_NO_SOURCE = ":(exclude)bench/results"
REACHED = "reached/"  # begins paths of figures from training, see `find_reached`
SPENT = "spent.json"  # the seconds of a stage, written at the end of each process that trained it
_STOPPED = "stopped by SIG"  # what training says after a signal, which is no error to it
_CUT = "stopped by max_seconds"  # what it says at the end of its time, which some presets limit


def git(*words: str) -> str:
    """Return what a git command says about this checkout. Raises UserError: this is none."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise UserError("claims name the commit that they hold for: run them in a git checkout of jaxrl") from None
    return done.stdout.strip()


def digest_sources() -> str:
    """Return a digest of the committed SOURCES. Raises UsageError: there are changes that no commit holds."""
    changes = git("status", "--porcelain", "--", *SOURCES, "bench", _NO_SOURCE).splitlines()
    if changes:
        first = changes[0].split(maxsplit=1)[1]
        more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        raise UsageError(f"a result names the commit that it holds for, and {first}{more} is in none: commit it first")
    return hashlib.sha256(git("ls-tree", "HEAD", "--", *SOURCES).encode()).hexdigest()[:12]


def run_seed(claim: Claim, seed: int | None, runs: Path, sources: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Train and evaluate one seed; return its row of the result. Interrupted runs go on, finished ones are kept.

    Args:
        claim: what to run.
        seed: of its training, None where nothing is trained.
        runs: folder of all claims' runs.
        sources: digest of the sources.
        files: paths by the names of the files that commands need, see `needs`.

    Raises:
        UserError: a command failed, or was stopped.
    """
    key = hashlib.sha256("\n".join([sources, *claim.train]).encode()).hexdigest()[:8]
    folder = runs / claim.trained_by / key
    places = {**files, "seed": str(seed)}
    if seed is not None:
        folder = folder / f"seed_{seed}"
    records = []
    for number, flags in enumerate(claim.train, 1):
        stage = folder / f"stage_{number}"
        measure.say(f"{claim.name}, seed {seed}: training, {number} of {len(claim.train)} (output: {stage}/log.txt)")
        places["previous"] = places["run"] = str(train(stage, [*fill(flags, places), "--seed", str(seed)]))
        records.append(json.loads((stage / SPENT).read_text()))
    measure.say(f"{claim.name}: {claim.command.split()[0]} (output: {folder}/{claim.name}.txt)")
    figures, versions = evaluate(claim, folder, places)
    if digest_sources() != sources:
        raise UserError(f"the sources were changed while {claim.name} ran: run it again")
    curve = {"curve": read_curve(Path(places["run"]), claim.curve)} if claim.curve else {}
    return {
        "seed": seed,
        "figures": figures,
        "commit": git("rev-parse", "HEAD"),
        "sources": sources,
        "versions": versions,
        "processor": measure.processor(),
        "files": digest_files(claim, files),
        "training_seconds": round(sum(record["seconds"] for record in records), 1),
        "training_cpu_seconds": round(sum(record["cpu_seconds"] for record in records), 1),
        **curve,
    }


def fill(text: str, places: Mapping[str, str]) -> list[str]:
    """Return the words of a command with {run} and other names in them replaced."""
    return [word.format(**places) for word in shlex.split(text)]


def train(stage: Path, words: list[str]) -> Path:
    """Train the only run of a folder, or go on with it, or leave it if it is finished; return its directory."""
    spent = stage / SPENT
    if not (spent.is_file() and json.loads(spent.read_text())["finished"]):
        stage.mkdir(parents=True, exist_ok=True)
        # --max_seconds counts the seconds of one process: such a run begins anew
        name = "run"
        if "--max_seconds" in words:
            name = f"again_{len(list(stage.glob('*/*')))}"
            spent.unlink(missing_ok=True)
        with _count(spent):
            run_command(["jaxrl.train", *words, "--runs", str(stage), "--resume_or_start", name], stage / "log.txt")
    return max(stage.glob("*/*/config.yaml"), key=lambda file: file.stat().st_mtime).parent


@contextlib.contextmanager
def _count(file: Path) -> Iterator[None]:
    """Add the seconds of what is done here to those in a file, and note whether it came to its end."""
    record = {"seconds": 0.0, "cpu_seconds": 0.0, "finished": False}
    if file.is_file():
        record = json.loads(file.read_text())
    began = time.monotonic()
    before = os.times()
    try:
        yield
        record["finished"] = True
    finally:
        after = os.times()
        record["seconds"] += time.monotonic() - began
        record["cpu_seconds"] += after.children_user + after.children_system
        record["cpu_seconds"] -= before.children_user + before.children_system
        write_atomically(file, json.dumps(record))


def evaluate(claim: Claim, folder: Path, places: Mapping[str, str]) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Run the last command of a claim; return its figures by name, and the versions that it names."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{claim.name}.json"
    log = out.with_suffix(".txt")
    words = fill(claim.command, places)
    words += ["--out", str(out)]
    if claim.kind == "parity":
        return {"exit_code": run_command(words, log, codes=(0, DIFFERS))}, {}
    run_command(words, log)
    result = json.loads(out.read_text())
    run = places.get("run", "")
    values = {
        figure.name: find_reached(Path(run), figure.path)
        if figure.path.startswith(REACHED)
        else take(result, figure.path, run)
        for figure in claim.figures
    }
    return values, find_versions(result)


def find_reached(run: Path, path: str) -> float | None:
    """Return the environment steps of the first selection evaluation that reaches a value; None if none does.

    The path is reached/METRIC/VALUE.
    """
    _, metric, value = path.split("/")
    for row in read_metrics(run):
        if row.get(f"eval/{metric}", -math.inf) >= float(value):
            return float(row["env_steps"])
    return None


def read_curve(run: Path, metric: str) -> list[list[float]]:
    """Return [environment steps, metric of the selection episodes] of each evaluation during the last stage."""
    return [[row["env_steps"], round(row[f"eval/{metric}"], 5)] for row in read_metrics(run) if f"eval/{metric}" in row]


def find_versions(result: Any) -> dict[str, Any]:
    """Return the versions in a result, which commands write at different places."""
    if "versions" in result:
        return dict(result["versions"])
    names = ("python", "jaxrl", "jax", "jaxlib", "backend", "devices")
    return {name: value for name, value in result.get("machine", {}).items() if name in names}


def run_command(words: list[str], log: Path, codes: tuple[int, ...] = (0,)) -> int:
    """Run a command of this repository, its output appended to a file; return its exit code.

    When this process is interrupted the command gets the time to save. Raises UserError: it failed, or was stopped.
    """
    with log.open("a") as stream:
        began = stream.tell()
        process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=stream, stderr=stream)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)  # or the interrupt is raised again, see `jaxrl.cli.entry`
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    said = " ".join(log.read_text()[began:].split())
    if _CUT in said and "--max_seconds" not in words:
        raise UserError(f"{words[0]} reached its preset's max_seconds: run the claim again, and it goes on (see {log})")
    if _STOPPED in said:
        raise UserError(f"{words[0]} was stopped by a signal: run the claim again, and it goes on (see {log})")
    if code not in codes:
        raise UserError(f"{words[0]} ended with exit code {code}: see {log}")
    return code
