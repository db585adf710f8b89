"""python -m bench.startup [--presets coma_quick,sac_quick]: seconds from `python -m jaxrl.train` to the first update.

Starts real processes: cold with an empty cache of compiled programs, warm with the one that the cold start filled, and
`--help` and a wrong flag. With --before, the code in another checkout takes turns with this one. CPU seconds are of
all threads of a process; they hardly depend on what else the machine does, wall seconds do.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import measure
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import parse_int
from jaxrl.cli.values import parse_list as words_of
from jaxrl.common.errors import UsageError, UserError
from jaxrl.runtime.presets import presets

KIND = "startup"
ROOT = Path(__file__).resolve().parents[1]
PRESETS = "coma_quick,coma_paper_cpu,ddpg_quick,sac_quick,ppo_reach,ppo_coverage"
MARKS = ("imported", "built", "compiled", "dispatched", "first block", "first update")
COMMANDS = {"help": "--help", "wrong flag": "--num_env=1"}


@dataclasses.dataclass(frozen=True)
class Code:
    """A checkout whose code is measured, under its name in the result, with a cache folder of its own."""

    name: str
    folder: Path
    caches: Path

    def _run(self, argv: Sequence[str], cache: Path) -> tuple[int, float, float, float]:
        """Run Python there; return its exit code, when it began, and its wall and CPU seconds."""
        environment = os.environ | {"PYTHONPATH": str(self.folder), "XDG_CACHE_HOME": str(cache)}
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache / "programs")}
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=self.folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 2):
            raise UserError(f"{self.name}: {argv} ended with {process.returncode}: {errors.decode()[-300:]}")
        return process.returncode, began, time.monotonic() - began, usage.ru_utime + usage.ru_stime

    def start(self, preset: str, cache: Path) -> dict[str, tuple[float, float]]:
        """Return wall and CPU seconds from the start of a process to each of `MARKS`."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "marks.json"
            child = self.folder / "bench" / "harness" / "startup_child.py"
            child = child if child.exists() else ROOT / "bench" / "harness" / "startup_child.py"
            _, began, *_ = self._run([str(child), str(file), "--config", preset, "--runs", folder], cache)
            found = json.loads(file.read_text())
        return {name: (found[name][0] - began, found[name][1]) for name in MARKS}

    def command(self, flag: str) -> dict[str, tuple[float, float]]:
        """Return wall and CPU seconds of a command that only prints."""
        _, _, *seconds = self._run(["-m", "jaxrl.train", "--config", "coma_quick", flag], self.caches / "commands")
        return {"end": (seconds[0], seconds[1])}


def samples(found: Sequence[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Return {mark: medians and samples of wall and CPU seconds}."""
    rows: dict[str, Any] = {}
    for name in found[0]:
        wall, cpu = ([round(one[name][k], 3) for one in found] for k in (0, 1))
        rows[name] = {"wall": statistics.median(wall), "cpu": statistics.median(cpu), "wall_samples": wall} | {
            "cpu_samples": cpu
        }
    return rows


def measured(codes: Sequence[Code], preset: str, rounds: int, cold: int) -> dict[str, Any]:
    """Measure the cold and warm starts of a preset, the checkouts in turns."""
    found: dict[str, dict[str, list[Any]]] = {code.name: {"cold": [], "warm": []} for code in codes}
    for number in range(max(rounds, cold)):
        for code in codes:
            cache = code.caches / f"{preset}-{min(number, cold - 1)}"
            for kind, most in (("cold", cold), ("warm", rounds)):
                if number < most:
                    found[code.name][kind].append(code.start(preset, cache))
                    wall, cpu = found[code.name][kind][-1]["first update"]
                    measure.say(f"{preset} {code.name} {kind}: first update after {wall:.1f} s, {cpu:.1f} s of CPU")
    return {name: {kind: samples(rows) for kind, rows in kinds.items()} for name, kinds in found.items()}


def of_commands(codes: Sequence[Code], rounds: int) -> dict[str, Any]:
    """Measure the commands that only print; "first" is the first call after an installation."""
    found: dict[str, dict[str, list[Any]]] = {code.name: {} for code in codes}
    for code in codes:
        found[code.name]["help, first"] = [code.command(COMMANDS["help"])]
        code.command(COMMANDS["wrong flag"])
    for _ in range(rounds):
        for code in codes:
            for name, flag in COMMANDS.items():
                found[code.name].setdefault(name, []).append(code.command(flag))
    return {name: {what: samples(rows)["end"] for what, rows in kinds.items()} for name, kinds in found.items()}


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.startup", __doc__)
    parser.add_argument("--presets", default=PRESETS, metavar="A,B,...", help=f"presets (default: {PRESETS})")
    parser.add_argument("--rounds", default="3", metavar="N", help="warm starts and commands (default: 3)")
    parser.add_argument("--cold_rounds", default="1", metavar="N", help="cold starts (default: 1)")
    parser.add_argument("--before", metavar="DIR", help="another checkout, measured in turns with this one")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")
    parsed = parser.parse_args(list(argv))
    names, rounds = words_of(parsed.presets), measure.rounds(parsed.rounds)
    cold = parse_int(parsed.cold_rounds, "--cold_rounds", 1, 100)
    if unknown := [name for name in names if name not in presets()]:
        raise UsageError(f"--presets: there is no preset '{unknown[0]}': choose from {', '.join(presets())}")
    if parsed.before and not (Path(parsed.before) / "jaxrl").is_dir():
        raise UsageError(f"--before {parsed.before} holds no package jaxrl: name a checkout")
    path = measure.output(parsed.out, KIND)
    shown = ["DIR" if word == parsed.before else word for word in argv]
    result = measure.header(KIND, shown, quick=False)
    with tempfile.TemporaryDirectory() as folder:
        checkouts = (
            {"after": ROOT} if parsed.before is None else {"before": Path(parsed.before).resolve(), "after": ROOT}
        )
        codes = [Code(name, checkout, Path(folder) / name) for name, checkout in checkouts.items()]
        result["commands"] = of_commands(codes, rounds)
        result["presets"] = {}
        for name in names:
            result["presets"][name] = measured(codes, name, rounds, cold)
            measure.write(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
