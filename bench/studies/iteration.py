"""python -m bench.studies.iteration --presets coma_quick,coma_paper_cpu [--beside CHECKOUT]: the parts of an iteration.

CPU seconds of one training iteration on one device: the environment (with all observations), acting (the rest of
collecting) and learning. With --beside, the same presets of another checkout of the project, such as an earlier
commit, are measured in turns, each in a process of its own.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KIND = "iteration"
PARTS = ("environment", "acting", "learning")
_HERE = Path(__file__).resolve().parents[2]


def measure_preset(preset: str) -> None:
    """Compile the parts of a preset; then print one sample as a line of JSON for each line of the standard input.

    It runs in other checkouts too: it may only use what they have.
    """
    import jax

    from bench.harness.rollout_timing import EnvTimer
    from bench.train_throughput import Parts, measured_phase
    from jaxrl.cli.flags import parse
    from jaxrl.runtime.build import build_run

    config = parse(["--config", preset, "--devices", "1"], KIND).config
    assert config is not None
    setup = build_run(config)
    number, steps = setup.trainer.layout.num_envs, measured_phase(setup.algo).steps
    parts = Parts(setup, least=0.0)
    collect, learn = parts.collecting("s"), parts.learning("s")
    flying = EnvTimer(setup.env, number, stages=("observation",))
    fly = flying.samplers(least=1e-9)[0]  # once

    def cpu_seconds(function: Callable[[], Any]) -> float:
        began = time.process_time()
        function()
        return time.process_time() - began

    def sample() -> dict[str, float]:
        whole = cpu_seconds(fly)  # a reset and an episode, as an iteration has
        share = steps / flying.steps
        return {"environment": whole * share, "collecting": cpu_seconds(collect), "learning": cpu_seconds(learn)}

    sample()
    versions = {"jax": jax.__version__, "missions": number, "steps": steps, "flop": parts.flop}
    print(json.dumps(versions), flush=True)
    for _ in sys.stdin:
        print(json.dumps(sample()), flush=True)


class Worker:
    """A process that measures a preset in a checkout."""

    def __init__(self, checkout: Path, preset: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_NUM_CPU_DEVICES": "1"}
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker", preset]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._line()

    def sample(self) -> dict[str, float]:
        """Take one sample."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _line(self) -> dict[str, Any]:
        from jaxrl.common.errors import UserError

        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise UserError("a measuring process ended early: its message is above")


def row(samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return medians in seconds and shares of the parts; acting is collecting less the environment."""
    median = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    parts = {
        "environment": median["environment"],
        "acting": median["collecting"] - median["environment"],
        "learning": median["learning"],
    }
    total = sum(parts.values())
    shares = {name: seconds / total for name, seconds in parts.items()}
    return {"seconds": parts, "total": total, "shares": shares, "samples": list(samples)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    head = ["preset", "code", "missions", "CPU seconds", *PARTS, "CPU ms per mission"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for entry in rows:
        missions, total = entry["about"]["missions"], entry["total"]
        shares = entry["shares"]  # a difference of two measurements may come out below 0
        parts = [
            f"{entry['seconds'][part]:.2f} ({shares[part]:.0%})" if shares[part] > 0 else "about 0" for part in PARTS
        ]
        cells = [f"`{entry['preset']}`", entry["code"], f"{missions}", f"{total:.2f}", *parts]
        lines.append(f"| {' | '.join(cells)} | {1000 * total / missions:.1f} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    if list(argv[:1]) == ["--worker"]:
        measure_preset(argv[1])
        return 0
    from jaxrl.cli.entry import exit_on_error

    return exit_on_error(compare)(argv)


def compare(argv: Sequence[str]) -> int:
    """Measure all presets; write the result and print its table. Raises UsageError, UserError."""
    from bench.harness import measure
    from envs_jax.base import short_repr
    from jaxrl.cli import flags
    from jaxrl.common.errors import UsageError

    assert __doc__ is not None
    parser = measure.parser(f"python -m bench.studies.{KIND}", __doc__)
    parser.add_argument("--presets", default="coma_quick,coma_paper_cpu", metavar="A,B", help="presets to measure")
    parser.add_argument("--beside", metavar="CHECKOUT", help="folder of another checkout of the project")
    parser.add_argument("--rounds", default="7", metavar="N", help="samples of everything, in turns (default: 7)")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")
    parsed = parser.parse_args(list(argv))
    codes = {"here": _HERE}
    if parsed.beside:
        codes = {"beside": Path(parsed.beside).resolve()} | codes
        if not (codes["beside"] / "bench" / "train_throughput.py").is_file():
            raise UsageError(f"--beside {short_repr(parsed.beside)} is no checkout of the project: name its folder")
    presets = parsed.presets.split(",")
    for preset in presets:
        flags.parse(["--config", preset], parser.prog)  # refuses unknown ones
    rounds, path = measure.rounds(parsed.rounds), measure.output(parsed.out, KIND)
    shown = ["CHECKOUT" if word == parsed.beside else word for word in argv]  # no path of this machine
    result = measure.header(f"studies.{KIND}", shown, quick=False) | {"rows": []}
    for preset in presets:
        workers = {code: Worker(folder, preset) for code, folder in codes.items()}
        samples: dict[str, list[dict[str, float]]] = {code: [] for code in codes}
        for _ in range(rounds):
            for code, worker in workers.items():
                samples[code].append(worker.sample())
        for code, worker in workers.items():
            worker.close()
            result["rows"].append({"preset": preset, "code": code, "about": worker.about} | row(samples[code]))
    measure.write(result, path)
    print(table(result["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
