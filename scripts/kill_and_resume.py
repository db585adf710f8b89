"""Does a run that is killed again and again end in the same bits as one that is left alone?

    python -m scripts.kill_and_resume [--kills 10] [--seed 0] [--out DIR] [-- FLAGS OF jaxrl.train]

Trains once without disturbance. Then trains the same again, sends SIGKILL at random moments (a few of them while
the process is still starting) and resumes, until the kills are used up, and lets the run end. Finally flips one
byte in the newest checkpoint of a copy that was stopped half way and resumes that too. Prints the SHA-256 of the
final state of each and whether metrics.jsonl agrees (all but what is measured in time); exits with 1 if anything
differs. Without flags a small COMA team learns to map a coarse field.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxrl.checkpoint import Checkpoints
from jaxrl.report.writer import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "--algo coma --q 5 --num_agents 2 --budget 3 --width 8 --num_envs 8 --devices 1 --data_passes 2 --minibatches 2 "
    "--total_episodes 4800 --eval_every 30 --eval_episodes 8 --log_every 4 --checkpoint_every 10 --block_seconds 0.2"
)
STARTING = 0.2  # share of the kills that fall into the time before the first block


class Train:
    """A process of jaxrl.train; its output goes to a file."""

    def __init__(self, flags: list[str], log: Path) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxrl.train", *flags],
                env=os.environ | {"PYTHONPATH": path, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def wait_for_first_block(self) -> None:
        """Until the process begins to train, or ends."""
        while self.runs and "run directory: " not in self._log.read_text():
            time.sleep(0.01)

    def sleep(self, seconds: float) -> None:
        """So long, or until the process ends."""
        until = time.monotonic() + seconds
        while self.runs and time.monotonic() < until:
            time.sleep(min(0.005, seconds))

    def wait_for_iteration(self, runs: Path, iteration: int) -> None:
        """Until the metrics of the run have come so far, or the process ends."""
        while self.runs and reached(runs) < iteration:
            time.sleep(0.005)

    def kill(self) -> bool:
        """SIGKILL; False if the process had ended by itself."""
        killed = self.runs
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        if not killed:
            self.finish()
        return killed

    def finish(self) -> None:
        """Wait for a good end."""
        if self._process.wait() != 0:
            raise SystemExit(f"jaxrl.train failed:\n{self._log.read_text()}")


def only_run(runs: Path) -> Path | None:
    """The run below a folder that holds one at most."""
    return next(iter(runs.glob("*/*/config.yaml")), Path()).parent if any(runs.glob("*/*/config.yaml")) else None


def reached(runs: Path) -> int:
    """The iteration of the newest metrics of the only run below a folder; 0 if there are none."""
    run = only_run(runs)
    rows = read_metrics(run) if run else []
    return rows[-1]["iteration"] if rows else 0


def outcome(run: Path) -> tuple[str, list[dict[str, Any]]]:
    """Digest of the final state, and the metrics that do not depend on time."""
    with Checkpoints(run / "checkpoints") as checkpoints:
        digest = checkpoints.digest()
    return digest, [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


def train_undisturbed(flags: list[str], folder: Path) -> tuple[float, float]:
    """The seconds before the first block of a run, and those after it."""
    began = time.monotonic()
    process = Train([*flags, "--runs", str(folder / "undisturbed")], folder / "undisturbed.log")
    process.wait_for_first_block()
    starting = time.monotonic() - began
    process.finish()
    return starting, time.monotonic() - began - starting


def train_killed(
    flags: list[str], folder: Path, kills: int, starting: float, iterations: int, chance: random.Random
) -> Path:
    """A run of the same flags, and so many iterations, that is killed so many times."""
    runs, made = folder / "killed", 0
    while True:
        run = only_run(runs)
        process = Train(["--resume", str(run)] if run else [*flags, "--runs", str(runs)], folder / "killed.log")
        if made == kills:
            process.finish()
            break
        if chance.random() < STARTING:
            process.sleep(chance.uniform(0, starting))
        else:
            # Each kill has a part of the run of its own; the last fifth is left to those who look late.
            process.wait_for_iteration(runs, int(0.8 * iterations * (made + chance.random()) / kills))
        if not process.kill():
            print(f"the run ended by itself after {made} of {kills} kills: give it more --total_episodes")
            break
        made += 1
        print(f"kill {made:2d} at iteration {reached(runs)}", flush=True)
    run = only_run(runs)
    assert run is not None
    return run


def damage_newest(run: Path, folder: Path) -> Path:
    """A copy of a run without its last checkpoint, a byte of the one before flipped, and resumed."""
    copy = folder / "damaged" / run.parent.name / run.name
    shutil.copytree(run, copy)
    steps = sorted(path for path in (copy / "checkpoints").iterdir() if path.name.isdecimal())
    shutil.rmtree(steps[-1])
    file = max((path for path in (steps[-2] / "arrays").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    log = folder / "damaged.log"
    Train(["--resume", str(copy)], log).finish()
    named = [line for line in log.read_text().splitlines() if "is damaged" in line]
    print(f"flipped a byte of checkpoint {int(steps[-2].name)}: {'named' if named else 'NOT NAMED'}")
    return copy


def main() -> int:
    """Run the experiment; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.kill_and_resume",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="where the runs are kept; otherwise they are deleted")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of jaxrl.train")
    arguments = parser.parse_args()
    flags = arguments.flags or SMALL.split()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        starting, training = train_undisturbed(flags, folder)
        print(f"undisturbed: {starting:.1f} s to the first block, {training:.1f} s of training", flush=True)
        chance = random.Random(arguments.seed)
        undisturbed = only_run(folder / "undisturbed")
        assert undisturbed is not None
        iterations = reached(folder / "undisturbed")
        runs = {"undisturbed": undisturbed}
        runs["killed"] = train_killed(flags, folder, arguments.kills, starting, iterations, chance)
        runs["damaged"] = damage_newest(undisturbed, folder)
        outcomes = {name: outcome(run) for name, run in runs.items()}
    digest, metrics = outcomes["undisturbed"]
    for name, (found, rows) in outcomes.items():
        agree = "equal" if rows == metrics else "DIFFERENT"
        print(f"{name:12} state {found}  metrics {agree} ({len(rows)} lines)")
    same = all(found == (digest, metrics) for found in outcomes.values())
    print("all equal" if same else "NOT EQUAL")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
