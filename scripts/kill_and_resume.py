"""Kill training, resume it, and see whether the final states are equal: python -m scripts.kill_and_resume [flags].

    python -m scripts.kill_and_resume [--algo coma|ddpg|sac] [--kills 10] [--only kills,...] [--seed 0] [--out DIR]
                                      [-- FLAGS OF jaxrl.train]

Trains once without disturbance. Then trains the same again and again, each time with another disturbance, resumes
until the run ends, and compares the SHA-256 of the final state and metrics.jsonl (all but what is measured in time):

    kills      SIGKILL at random moments (a few of them while the process is still starting), and aimed at what a
               checkpoint does with files: the writing of arrays, of the manifest, and the renaming of folders
    stops      SIGTERM, one SIGINT, and two
    devices    1, then 2, then 1 of them; only the number of rows must be equal, as sums are rounded otherwise
    damage     a flipped byte in the newest checkpoint

Each ends with the exit code and the sentence that belong to it, or the script says what else happened; exits with 1 if
anything differs. The moments follow from --seed. `--algo` picks a small run of that algorithm.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.state_digest import checkpoint_digest
from jaxrl.report.writer import read_metrics
from jaxrl.runtime.checkpoint import committed_steps

ROOT = Path(__file__).resolve().parents[1]
COMMON = (
    "--devices 1 --block_iterations 8 --num_envs 8 --eval_episodes 8 --eval_every 960 --log_every 4 "
    "--checkpoint_every 10 "
)
SMALL = {  # the environments of the tests, so that a start takes seconds
    "coma": COMMON + "--algo coma --env helpers.tiny:Corridor --num_agents 2 --num_epochs 2 --hidden_size 8 "
    "--num_envs 8 --minibatch_size 80 --total_env_steps 24000",
    "ddpg": COMMON + "--algo ddpg --env helpers.tiny:Corridor --batch_size 16 --buffer_size 2000 --learning_starts 160 "
    "--env_steps_per_update 8 --hidden_size 8 --depth 1 --update_interval 4 --total_env_steps 9600",
    "sac": COMMON + "--algo sac --env helpers.tiny:PointMass --batch_size 16 --buffer_size 2000 --random_steps 160 "
    "--env_steps_per_update 8 --hidden_size 8 --depth 1 --update_interval 4 --total_env_steps 9600",
}
PARTS = ("kills", "stops", "devices", "damage")
UNCOMMITTED = ".orbax-checkpoint-tmp"  # end of the name of a folder that orbax has not committed
AIMS = ("random", "arrays", "manifest", "renaming")
STARTING = 0.2  # share of the random kills that fall into the time before the first block


# The process that is disturbed


def train_until_killed(aim: str, checkpoint: int, event: int) -> int:
    """Train, but SIGKILL this process before the given event of that kind in so many-th of its checkpoints.

    Events are what Python does with files of a checkpoint: opening one, making or renaming a folder, deleting one.
    """
    from jaxrl.cli.train import main

    counts = {"checkpoint": 0, "event": 0}

    def matches_aim(name: str, path: str) -> bool:
        if aim == "arrays":
            return f"{UNCOMMITTED}/arrays" in path
        if aim == "manifest":
            return "manifest.json" in path and f"{UNCOMMITTED}/" in path and "/arrays" not in path
        return name in ("os.rename", "os.rmdir", "shutil.rmtree") and "/checkpoints/" in path

    def watch(name: str, arguments: tuple[Any, ...]) -> None:
        if name not in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"):
            return
        path = str(arguments[0])
        if name == "os.mkdir" and path.rpartition("/")[2].endswith(UNCOMMITTED) and "/arrays" not in path:
            counts["checkpoint"] += 1
            counts["event"] = 0
        if counts["checkpoint"] >= checkpoint and matches_aim(name, path):
            counts["event"] += 1
            if counts["event"] == event or counts["checkpoint"] > checkpoint:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return main(sys.argv[1:])


class Train:
    """A process of jaxrl.train; its output goes to a file.

    Args:
        flags: of jaxrl.train.
        log: the file.
        doom: arguments of `train_until_killed`, if it is to kill itself.
    """

    def __init__(self, flags: list[str], log: Path, doom: tuple[str, int, int] | None = None) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
        self.log = log
        program = ["-m", "jaxrl.train"]
        if doom is not None:
            program = [
                "-c",
                f"import sys, scripts.kill_and_resume as k; sys.exit(k.train_until_killed{doom!r})",
            ]

        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, *program, *flags],
                env=os.environ
                | {
                    "PYTHONPATH": path,
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                    "JAX_NUM_CPU_DEVICES": "2",
                    "PJRT_NPROC": "2",
                },
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def wait_for_first_block(self) -> None:
        """Until the process begins to train, or ends."""
        while self.runs and "run directory: " not in self.log.read_text():
            time.sleep(0.02)

    def sleep(self, seconds: float) -> None:
        """So long, or until the process ends."""
        until = time.monotonic() + seconds
        while self.runs and time.monotonic() < until:
            time.sleep(min(0.005, seconds))

    def wait_for_iteration(self, runs: Path, iteration: int) -> None:
        """Until the metrics of the run have come so far, or the process ends."""
        while self.runs and newest_iteration(runs) < iteration:
            time.sleep(0.02)

    def send(self, signum: signal.Signals) -> None:
        """A signal, unless the process has ended."""
        if self.runs:
            self._process.send_signal(signum)

    def kill(self) -> bool:
        """SIGKILL; False if the process had ended by itself."""
        self.send(signal.SIGKILL)
        if self.end() == -signal.SIGKILL:
            return True
        self.finish()
        return False

    def end(self) -> int:
        """Wait for the exit code."""
        return self._process.wait()

    def finish(self) -> None:
        """Wait for a good end."""
        self.expect(0)

    def expect(self, code: int, *words: str, errors: int | None = None) -> None:
        """Wait for an end with this exit code, and output that holds these words, so many `errors` and no traceback."""
        exit_code, text = self.end(), self.log.read_text()
        error_count = sum(line.startswith(("error: ", "stopped at once")) for line in text.splitlines())
        wrong = [f"exit code {exit_code}, not {code}"] * (exit_code != code)
        wrong += [f"no '{word}'" for word in words if word not in text]
        wrong += ["a traceback"] * ("Traceback" in text)
        wrong += [f"{error_count} errors"] * (errors is not None and error_count != errors)
        if wrong:
            raise SystemExit(f"jaxrl.train: {', '.join(wrong)}\n{text}")


def only_run(runs: Path) -> Path | None:
    """The run below a folder that holds one at most."""
    return next(iter(runs.glob("*/*/config.yaml")), Path()).parent if any(runs.glob("*/*/config.yaml")) else None


def newest_iteration(runs: Path) -> int:
    """The iteration of the newest metrics of the only run below a folder; 0 if there are none."""
    run = only_run(runs)
    rows = read_metrics(run) if run else []
    return rows[-1]["iteration"] if rows else 0


def outcome(run: Path) -> tuple[str, list[dict[str, Any]]]:
    """Digest of the final state, and the metrics that do not depend on time, of each trial too."""
    folders = sorted(path.parent for path in run.rglob("metrics.jsonl"))
    rows = [row for folder in folders for row in read_metrics(folder)]
    metrics = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
    return checkpoint_digest(run / "checkpoints"), metrics


# The disturbances; each returns the run that it has disturbed


class Trials:
    """The runs of one set of flags.

    Args:
        flags: of jaxrl.train.
        folder: where runs and logs go.
        chance: of the moments.
    """

    def __init__(self, flags: list[str], folder: Path, chance: random.Random) -> None:
        self.flags, self.folder, self.chance = flags, folder, chance
        began = time.monotonic()
        process = self.train("undisturbed")
        process.wait_for_first_block()
        self.starting = time.monotonic() - began
        process.finish()
        rest = time.monotonic() - began - self.starting
        print(f"undisturbed: {self.starting:.1f} s to the first block, {rest:.1f} s of training", flush=True)
        self.undisturbed = self.run("undisturbed")
        self.iterations = newest_iteration(folder / "undisturbed")

    def run(self, name: str) -> Path:
        run = only_run(self.folder / name)
        assert run is not None
        return run

    def train(self, name: str, *more: str, doom: tuple[str, int, int] | None = None) -> Train:
        """A process of the run of this name, which is begun or resumed."""
        runs = self.folder / name
        run = only_run(runs)
        command = [*self.flags, "--runs", str(runs)] if run is None else ["--resume", str(run)]
        return Train([*command, *more], self.folder / f"{name}.log", doom)

    def at(self, name: str, share: float, *more: str) -> Train:
        """The same, once it has come to this share of the iterations."""
        process = self.train(name, *more)
        process.wait_for_iteration(self.folder / name, int(share * self.iterations))
        return process

    def kill_often(self, kills: int) -> Path:
        """Killed so many times, in turns at random and at each aim, then left to its end."""
        runs, kill_count = self.folder / "killed", 0
        while kill_count < kills:
            aim = AIMS[kill_count % len(AIMS)]
            doom = None
            if aim != "random":
                doom = (aim, self.chance.randint(1, 2), self.chance.randint(1, 6))
            process = self.train("killed", doom=doom)
            if aim == "random" and self.chance.random() < STARTING:
                process.sleep(self.chance.uniform(0, self.starting))
            elif aim == "random":
                # Each kill has a part of the run of its own; the last fifth is left to those who look late.
                process.wait_for_iteration(
                    runs, int(0.8 * self.iterations * (kill_count + self.chance.random()) / kills)
                )
            else:
                process.end()
            if not process.kill():
                print(f"the run ended by itself after {kill_count} of {kills} kills: give it more iterations")
                break
            kill_count += 1
            run = only_run(runs)
            left = sorted(p.name for p in (run / "checkpoints").glob("**/0*.*")) if run else []
            at = f" of checkpoint {doom[1]}, event {doom[2]}" if doom else ""
            print(
                f"kill {kill_count:2d} ({aim}{at}) behind iteration {newest_iteration(runs)}; left behind: {left}",
                flush=True,
            )
        self.train("killed").finish()
        return self.run("killed")

    def stop_by_signals(self) -> Path:
        """Stopped by SIGTERM and SIGINT, which save, and by two SIGINT, which do not."""
        for share, signum in ((0.2, signal.SIGTERM), (0.4, signal.SIGINT)):
            process = self.at("stopped", share)
            process.send(signum)
            process.expect(0, f"stopped by {signum.name} at iteration")
            print(f"{signum.name}: exit code 0, checkpoint {committed_steps(self.run('stopped') / 'checkpoints')[-1]}")
        process = self.at("stopped", 0.6)
        process.send(signal.SIGINT)
        process.sleep(self.chance.uniform(0, 0.02))
        process.send(signal.SIGINT)
        if process.end() == 0:  # it had saved and ended before the second one came
            process.expect(0, "stopped by SIGINT at iteration")
        else:
            process.expect(-signal.SIGINT, "stopped at once, without a checkpoint", errors=1)
        print(f"two SIGINT: exit code {process.end()}", flush=True)
        self.train("stopped").finish()
        return self.run("stopped")

    def change_devices(self) -> Path:
        """On one device, then two, then one."""
        for share, devices in ((0.3, 1), (0.6, 2)):
            process = self.at("moved", share, "--devices", str(devices))
            process.send(signal.SIGTERM)
            process.expect(0, f"{devices} x ", "stopped by SIGTERM at iteration")
            print(f"{devices} devices: until {committed_steps(self.run('moved') / 'checkpoints')[-1]}", flush=True)
        self.train("moved", "--devices", "1").finish()
        return self.run("moved")

    def damage_checkpoints(self) -> Path:
        """Without its last checkpoint, and with a byte of the one before flipped."""
        copy = self.folder / "damaged" / self.undisturbed.parent.name / self.undisturbed.name
        shutil.copytree(self.undisturbed, copy)
        steps = sorted(path for path in (copy / "checkpoints").iterdir() if path.name.isdecimal())
        shutil.rmtree(steps[-1])
        files = (path for path in (steps[-2] / "arrays").rglob("*") if path.is_file())
        file = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        self.train("damaged").expect(0, f"checkpoint {steps[-2]} is damaged")
        print(f"flipped a byte of checkpoint {int(steps[-2].name)}: named")
        return copy


def main() -> int:
    """Run the experiment; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.kill_and_resume",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--algo", choices=tuple(SMALL), default="coma", help="train this algorithm, in a small run")
    parser.add_argument("--kills", type=int, default=10, help="kill the run N times (default: 10)", metavar="N")
    parser.add_argument("--only", default=",".join(PARTS), help="make only these disturbances, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="choose the moments by this seed")
    parser.add_argument("--out", type=Path, help="keep the runs in this folder; without it they are deleted")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="pass these flags to jaxrl.train")
    arguments = parser.parse_args()
    parts_to_run = arguments.only.split(",")
    if unknown := [name for name in parts_to_run if name not in PARTS]:
        parser.error(f"--only {unknown[0]}: choose from {', '.join(PARTS)}")
    flags = arguments.flags or SMALL[arguments.algo].split()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.out or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        trials = Trials(flags, folder, random.Random(arguments.seed))
        parts: dict[str, tuple[str, Callable[[], Path]]] = {
            "kills": ("killed", lambda: trials.kill_often(arguments.kills)),
            "stops": ("stopped", trials.stop_by_signals),
            "devices": ("moved", trials.change_devices),
            "damage": ("damaged", trials.damage_checkpoints),
        }
        runs = {"undisturbed": trials.undisturbed}
        for part in parts_to_run:
            name, disturb = parts[part]
            runs[name] = disturb()
        outcomes = {name: outcome(run) for name, run in runs.items()}
    digest, metrics = outcomes["undisturbed"]
    for name, (state_digest, rows) in outcomes.items():
        agree = "equal" if rows == metrics else "DIFFERENT"
        print(f"{name:12} state {state_digest}  metrics {agree} ({len(rows)} lines)")
    # on other devices sums are rounded otherwise; tests compare states on 1, 2 and 8 devices within tolerances
    same = all(result == (digest, metrics) for name, result in outcomes.items() if name != "moved")
    same &= all(len(rows) == len(metrics) for _, rows in outcomes.values())
    print("all equal where they must be" if same else "NOT EQUAL")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
