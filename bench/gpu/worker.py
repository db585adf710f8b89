"""Process in which `bench.gpu` does its work: python -m bench.gpu.worker DIR UNTIL [--quick] UNIT ...

Prints "begins NAME" to stdout before each unit, and starts none shortly before UNTIL (seconds since 1970). It ends with
its parent, whose pipe is its standard input, and after a unit that failed: it may not be able to use the device again.
"""

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from bench.gpu import results
from bench.gpu.results import MIN_SECONDS, UNITS
from jaxrl.common.errors import UserError, one_line


def main(argv: list[str]) -> int:
    """Do the units, one after another."""
    folder = Path(argv[0])
    until = float(argv[1])
    names = [word for word in argv[2:] if word != "--quick"]
    quick = "--quick" in argv
    threading.Thread(target=_end_with_parent, daemon=True).start()
    say, sys.stdout = sys.stdout, sys.stderr  # stdout is for messages to the parent
    units = {unit.name: unit for unit in UNITS}
    for unit in (units[name] for name in names):
        if until - time.time() < MIN_SECONDS:
            break
        results.begin(folder, unit, quick)
        print(f"begins {unit.name}", file=say, flush=True)
        began = time.perf_counter()
        try:
            result = unit.load()(quick=quick, folder=folder)
        except UserError as error:
            results.end(folder, unit, quick, error=one_line(str(error)))
        except Exception as error:  # a bug in one unit must not stop the others
            traceback.print_exc()
            results.end(folder, unit, quick, error=one_line(f"{type(error).__name__}: {error}")[:500])
            break
        else:
            results.end(folder, unit, quick, result, took=time.perf_counter() - began)
        if results.without_graphs(folder) and os.environ.get("JAXRL_GRAPHS") != "off":
            break  # the next process sets it
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    if os.getpgrp() == os.getpid():  # with the processes that it has started
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
