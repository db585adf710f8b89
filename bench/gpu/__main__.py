"""python -m bench.gpu --out DIR [--minutes 9] [--parts device,correct,... | --devices]: benchmark and verify this GPU.

Runs units of work in order of importance, each in a process that is stopped when it takes too long. DIR/results.json
holds what they found and DIR/summary.md, printed at the end, a table of it; both are rewritten after each unit.
Run again with the same DIR, or with one that holds only results.json, it does the missing units; those that were cut
off are tried once more after all others. Nothing is downloaded. With --devices it measures how training steps and
environments scale to 2, 4 and 8 GPUs of this machine instead.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import results
from bench.gpu.results import MIN_SECONDS, PARTS, SCALING, UNITS, Unit
from bench.harness import measure
from envs_jax.base import closest, short_repr
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError, UserError


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code: 0 if everything was done and correct, 1 if something failed or is missing."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.gpu", __doc__)
    parser.add_argument("--out", required=True, metavar="DIR", help="write the results to this folder")
    parser.add_argument("--minutes", default="9", metavar="X", help="stop after X minutes (default: 9)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--parts", metavar="A,B,...", help=f"run these parts of {', '.join(PARTS)} (default: all)")
    what.add_argument("--devices", action="store_true", help="measure scaling over 1, 2, 4 and 8 devices instead")
    parser.add_argument("--again", metavar="A,B,...", help="repeat these units, named as in results.json")
    parser.add_argument("--quick", action="store_true", help="rehearse with tiny sizes; the figures mean nothing")
    parsed = parser.parse_args(list(argv))
    until = time.monotonic() + 60 * measure.positive(parsed.minutes, "--minutes")
    parts = _parse_names(parsed.parts, "--parts", "part", PARTS) or PARTS
    parts = (SCALING,) if parsed.devices else parts
    again = _parse_names(parsed.again, "--again", "unit", [unit.name for unit in UNITS])
    for unit in UNITS:
        if unit.name in again and unit.part not in parts:
            flag = "--devices" if unit.part == SCALING else f"--parts {unit.part}"
            raise UsageError(f"--again {unit.name} needs {flag}, too: it belongs to that part")
    folder = Path(parsed.out).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder} ({error.strerror}): choose another folder with --out") from None
    results.check(folder, parsed.quick)
    results.forget(folder, again)  # also checks that results can be written
    while missing := results.waiting(folder, parts):
        if until - time.monotonic() < MIN_SECONDS:
            measure.say(f"out of time, {len(missing)} units are missing: call it again with the same --out")
            break
        _work(missing, folder, parsed.quick, until)
    print(results.table(folder), end="")
    return 0 if not missing and not results.find_failed(folder) else 1


def _parse_names(text: str | None, flag: str, what: str, choices: Sequence[str]) -> Sequence[str]:
    """Parse the names of a flag, () without it. Raises UsageError."""
    if text is None:
        return ()
    names = text.replace(",", " ").split()
    for name in names or ("",):
        if name not in choices:
            raise UsageError(f"{flag}: there is no {what} {short_repr(name)}: {closest(name, choices)}")
    return names


def _work(units: Sequence[Unit], folder: Path, quick: bool, until: float) -> None:
    """Run one process that does units until one takes too long or the time is over."""
    ends = time.time() + until - time.monotonic()
    command = [sys.executable, "-m", "bench.gpu.worker", str(folder), str(ends), *(["--quick"] if quick else [])]
    command += [unit.name for unit in units]
    settings = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache" / "programs")}
    settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    flags = [os.environ.get("XLA_FLAGS", "")]
    if results.without_graphs(folder):
        settings["JAXRL_GRAPHS"] = "off"
        flags.append("--xla_gpu_enable_command_buffer=")  # for programs that have no options
    if quick:  # a rehearsal waits mostly for the compiler
        flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    settings["XLA_FLAGS"] = " ".join(flags).strip()
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | settings,
        start_new_session=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    began: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(child, began), daemon=True)
    reader.start()
    unit = None
    left = until - time.monotonic()
    error = ""
    try:
        while True:
            try:
                name = began.get(timeout=max(left, 0.0))
            except queue.Empty:
                if unit is not None and time.monotonic() < until:
                    error = f"{results.CUT} after {unit.seconds:.0f} s"
                break
            if name is None:
                if code := child.wait():
                    error = f"its process ended with exit code {code}"
                break
            unit = next(each for each in units if each.name == name)
            measure.say(f"{unit.part}: {name}")
            left = min(unit.seconds, until - time.monotonic())
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        reader.join()
        child.communicate()
    if error and unit is None:
        raise UserError(f"no unit was begun, {error}: see its messages above")
    if error and unit is not None and results.read(folder)[unit.name]["error"] == results.CUT:
        results.end(folder, unit, quick, error=error)


def _read(child: subprocess.Popen[str], began: "queue.Queue[str | None]") -> None:
    """Names of units as they begin, None at the end."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("begins "):
            began.put(line.split()[1])
    began.put(None)


if __name__ == "__main__":
    sys.exit(main())
