"""python -m bench.gpu --out DIR [--minutes 9] [--parts device,correct,...]: is this GPU right, and what does it reach?

Works through units of work in order of value, each in a process that is ended when it takes too long. The result of a
unit is a JSON file in DIR, written as soon as it is there. Called again with the same DIR, it does what is missing.
A table of all results, DIR/summary.md, is printed at the end. Nothing is taken from the network.
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

from bench import measure
from bench.gpu import results
from bench.gpu.units import PARTS, UNITS, Unit
from envs_jax.base import closest, shown
from jaxrl.config import exit_on_error
from jaxrl.errors import UsageError, UserError
from jaxrl.files import write_atomically

LEAST = 5.0  # seconds, below which no unit is begun


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code: 0 if everything was done and right, 1 if something failed or is missing."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.gpu", __doc__)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--minutes", default="9", metavar="X", help="time limit in minutes (default: 9)")
    parser.add_argument("--parts", metavar="A,B,...", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a rehearsal with tiny sizes: the figures mean nothing")
    asked = parser.parse_args(list(argv))
    until = time.monotonic() + 60 * measure.positive(asked.minutes, "--minutes")
    folder = Path(asked.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder} ({error.strerror}): choose another folder with --out") from None
    results.check(folder, asked.quick)
    parts = _parts(asked.parts)
    while missing := [unit for unit in UNITS if unit.part in parts and not results.path(folder, unit).exists()]:
        if until - time.monotonic() < LEAST:
            measure.say(f"out of time, {len(missing)} units are missing: call it again with the same --out")
            break
        _work(missing, folder, asked.quick, until)
    table = results.table(folder)
    write_atomically(folder / "summary.md", table)
    print(table, end="")
    return 0 if not missing and not results.failed(folder) else 1


def _parts(text: str | None) -> tuple[str, ...]:
    if text is None:
        return PARTS
    names = tuple(text.replace(",", " ").split())
    for name in names or ("",):
        if name not in PARTS:
            raise UsageError(f"--parts: there is no part {shown(name)}: {closest(name, PARTS)}")
    return names


def _work(units: Sequence[Unit], folder: Path, quick: bool, until: float) -> None:
    """One process that does units until one takes too long or the time is over."""
    command = [sys.executable, "-m", "bench.gpu.worker", str(folder), *(["--quick"] if quick else [])]
    command += [unit.name for unit in units]
    settings = {"JAX_COMPILATION_CACHE_DIR": str(folder.resolve() / "cache")}
    settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if results.without_graphs(folder):
        settings["JAXRL_GRAPHS"] = "off"
    if quick:  # a rehearsal waits for the compiler, not for what it makes
        settings["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | settings,
        start_new_session=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    began: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(child, began), daemon=True)
    reader.start()
    unit, left = None, until - time.monotonic()
    try:
        while True:
            try:
                name = began.get(timeout=max(left, 0.0))
            except queue.Empty:
                if unit is not None and time.monotonic() < until:
                    results.write(folder, unit, quick, error=f"took longer than {unit.seconds:.0f} s")
                return
            if name is None:
                break
            unit = next(each for each in units if each.name == name)
            measure.say(f"{unit.part}: {name}")
            left = min(unit.seconds, until - time.monotonic())
        if child.wait() != 0 and unit is not None and not results.path(folder, unit).exists():
            results.write(folder, unit, quick, error=f"its process ended with exit code {child.returncode}")
        elif child.returncode != 0 and unit is None:
            raise UserError("the first process ended before it began its work: see its messages above")
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        reader.join()
        child.communicate()


def _read(child: subprocess.Popen[str], began: "queue.Queue[str | None]") -> None:
    """Names of units as they begin, None at the end."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("begins "):
            began.put(line.split()[1])
    began.put(None)


if __name__ == "__main__":
    sys.exit(main())
