"""A run that is stopped, killed or damaged and resumed ends in the same bits and metrics as an undisturbed one."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from helpers.runs import outcome, outcome_rows, points, resume, run, shared_programs
from helpers.tiny import TinyQ

from envs_jax.base import Array, setting
from envs_jax.progress import Progress, total
from jaxrl.algos.base import AlgoState, Phase, Trajectory
from jaxrl.cli import train
from jaxrl.cli.flags import parse
from jaxrl.common.files import write_atomically
from jaxrl.report.console import Console
from jaxrl.report.metrics import MetricAggregator, Throughput, choose_spacing
from jaxrl.report.writer import LOST, METRICS, Writer, read_metrics
from jaxrl.runtime import load as loading
from jaxrl.runtime import manifest, memory_plan, pieces, session, signals
from jaxrl.runtime import run as runs
from jaxrl.runtime.build import _warn_of_incomplete_phases, build_run
from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.compiling import compile_run
from jaxrl.runtime.program import Program, StopRequestedError
from jaxrl.runtime.signals import StopSignals
from jaxrl.runtime.train_state import Position

ROOT = Path(__file__).parents[1]
TINY = "--env helpers.tiny:Corridor --num_envs 8 --devices 1 --total_env_steps 1280 --checkpoint_every 8 --log_every 3"


@dataclasses.dataclass(frozen=True)
class Study(TinyQ):
    """TinyQ with a phase that only learns at the end, weights to begin with, and a loss that breaks on demand."""

    breaks_at: int = setting(0, "call of learn whose second loss is not a number; 0 = never")

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (*super().phases, Phase("settle", 0, 1, iterations=5))

    def init(self, key: Array, inputs: Any) -> AlgoState:
        state = super().init(key, inputs)
        return state if inputs is None else AlgoState(state.replicated | {"weights": inputs}, state.sharded)

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: Any,
        key: Array,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, dict[str, Array]]:
        if trajectory is None:
            weights = state.replicated["weights"] * 0.5
            return AlgoState(state.replicated | {"weights": weights}, state.sharded), {"size": jnp.abs(weights).max()}
        state, metrics = super().learn(state, trajectory, last_timestep, key, progress, phase)
        if self.breaks_at and phase.updates:
            broken = total(progress.learn_calls) == self.breaks_at - 1
            metrics["loss"] = metrics["loss"].at[1].set(jnp.where(broken, jnp.nan, metrics["loss"][1]))
        return state, metrics


STUDY = f"--algo test_session:Study {TINY} --eval_every 320 --eval_episodes 8"


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    with shared_programs():
        yield


def steps(directory: Path) -> list[int]:
    return Checkpoints(directory / "checkpoints").steps()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run of STUDY."""
    return run(STUDY, tmp_path_factory.mktemp("alone"))


def at_iteration(monkeypatch: pytest.MonkeyPatch, iteration: int, act: Callable[[], None]) -> None:
    """Do something when the line of this iteration is written."""
    write = Writer.write

    def call_hook(self: Writer, at: int, *more: Any) -> None:
        write(self, at, *more)
        if at == iteration:
            act()

    monkeypatch.setattr(Writer, "write", call_hook)


# The plan of phases


STEP, OPEN, LEARN = Phase("step", 4, 1, iterations=10), Phase("open", 4, 1), Phase("learn", 0, 1, iterations=7)


@pytest.mark.parametrize(
    ("phases", "position", "total_env_steps", "left"),
    [
        ((OPEN,), Position(), 320, [10]),
        ((OPEN,), Position(0, 10, 10, 320), 640, [10]),  # lengthened
        ((STEP, OPEN), Position(), 640, [10, 10]),
        ((STEP, OPEN), Position(), 320, [10, 0]),
        ((STEP, OPEN), Position(), 96, [3, 0]),  # the total is reached inside the first phase
        ((STEP, OPEN), Position(1, 4, 14, 448), 640, [0, 6]),
        ((OPEN, LEARN), Position(), 64, [2, 7]),  # learning needs no steps
        ((STEP, LEARN, STEP), Position(), 10_000, [10, 7, 10]),  # ends before the total
        ((dataclasses.replace(STEP, iterations=0), OPEN), Position(), 64, [0, 2]),
    ],
)
def test_remaining_iterations(
    phases: tuple[Phase, ...], position: Position, total_env_steps: int, left: list[int]
) -> None:
    assert position.remaining(phases, 8, total_env_steps) == left


@pytest.mark.parametrize(
    ("phases", "total_env_steps", "cut"),
    [
        ((OPEN,), 320, None),
        ((STEP, OPEN), 640, None),
        ((STEP, OPEN), 320, "open"),
        ((STEP, OPEN), 96, "step"),
        ((STEP, LEARN), 300, None),  # its tenth iteration begins before that
        ((STEP, LEARN), 288, "step"),
        ((STEP, LEARN, STEP), 10_000, None),
        ((OPEN, STEP), 96, "step"),  # the open one takes all
    ],
)
def test_a_total_that_cuts_phases_short_is_told(
    phases: tuple[Phase, ...], total_env_steps: int, cut: str | None
) -> None:
    message = _warn_of_incomplete_phases(phases, 8, total_env_steps)
    assert (cut is None) == (message is None)
    if cut:
        more = " or more" if OPEN in phases else ""
        needed = sum((phase.iterations or 1) * phase.steps * 8 for phase in phases)
        assert f"{total_env_steps:,} environment steps are too few for the phase '{cut}'" in message
        assert f"all phases take {needed:,}{more})" in message


def test_a_run_of_three_phases(alone: Path) -> None:
    rows = [row for row in read_metrics(alone) if "phase" in row]
    # Iteration 3 is the first of the phase that learns, and its line covers 1 to 3.
    assert [row["iteration"] for row in rows] == [*range(3, 46, 3)]
    assert rows[0]["updates"] == 4
    assert rows[-1]["env_steps"] == 1280
    assert rows[-1]["phase"] == 2
    assert "train/loss" in rows[0]
    assert "train/size" in rows[-1]
    assert steps(alone) == [20, 32, 40, 45]  # the best one and the newest three
    with Checkpoints(alone / "checkpoints") as checkpoints:
        step, meta = checkpoints.newest()
    assert step == 45
    assert {name: meta[name] for name in ("phase", "iteration", "iterations", "env_steps", "updates")} == {
        "phase": 2, "iteration": 5, "iterations": 45, "env_steps": 1280, "updates": 38 * 4 + 5
    }  # fmt: skip


# Stops and resumes


def test_stopped_by_max_seconds(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(f"{STUDY} --max_seconds 1e-9", tmp_path)  # over before the first block, which is made all the same
    assert steps(directory)[-1] == 1
    assert "stopped by max_seconds" in capsys.readouterr().out
    resume(directory, "--max_seconds 1e-9")
    assert "continue with --resume" in capsys.readouterr().out
    assert steps(directory)[-1] == 2
    resume(directory, "--max_seconds 0")
    assert "finished at iteration 45" in capsys.readouterr().out
    assert outcome(directory) == outcome(alone)


@pytest.mark.parametrize(("number", "iteration"), [(signal.SIGTERM, 9), (signal.SIGINT, 39)])
def test_stopped_by_a_signal(
    number: signal.Signals, iteration: int, alone: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        at_iteration(patch, iteration, lambda: signal.raise_signal(number))
        directory = run(f"{STUDY} --block_iterations 2", tmp_path)
    assert f"stopped by {number.name} at iteration" in capsys.readouterr().out
    assert iteration <= steps(directory)[-1] < 45
    assert signal.getsignal(number) == before
    resume(directory)
    assert outcome(directory) == outcome(alone)


@pytest.mark.slow
def test_killed_and_damaged() -> None:
    """Three kills at random moments and a flipped byte, each in processes of their own."""
    more = "--total_env_steps 28800 --checkpoint_every 40 --eval_every 3200 --block_iterations 8"
    flags = f"{STUDY} {more}".split()
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": f"{jax.config.jax_compilation_cache_dir}_killed",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-m", "scripts.kill_and_resume", "--kills", "3", "--", *flags],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal" in done.stdout
    assert "kill  3" in done.stdout
    assert "named" in done.stdout


def start_long_block(tmp_path: Path) -> subprocess.Popen[str]:
    """A process in a block of many minutes; nothing but the process itself knows that it should end."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "JAX_COMPILATION_CACHE_DIR": f"{jax.config.jax_compilation_cache_dir}_interrupted",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
    }
    argv = f"-u -m jaxrl.train --algo helpers.tiny:TinyQ {TINY} --updates_per_step 3000000 --runs {tmp_path}".split()
    process = subprocess.Popen(
        [sys.executable, *argv], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("run directory: "))
    time.sleep(2.0)
    return process


@pytest.mark.slow
def test_the_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    process = start_long_block(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    line = next(line for line in process.stdout if "SIGINT" in line)
    assert "finishing the current iterations within 10 s, then saving" in line
    time.sleep(2 * signals.TWICE_SECONDS)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == -signal.SIGINT
    assert errors == "stopped at once, without a checkpoint\n"


@pytest.mark.slow
def test_a_block_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    process = start_long_block(tmp_path)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and time.monotonic() - began < 15
    assert "took longer than 10 s and are lost; continue from iteration 0 with --resume" in " ".join(said.split())


COMA = (
    "--algo coma --env helpers.tiny:Corridor --num_agents 2 --num_envs 8 --minibatch_size 40 --num_epochs 2 "
    "--devices 1 --hidden_size 8 --total_env_steps 400 --eval_every 0"
)


def test_a_signal_gives_up_a_long_iteration(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """While it rolls out, or learns: the checkpoint holds the state before it, and the resumed run ends alike."""
    monkeypatch.setattr(pieces, "MIN_TRANSITIONS", 1)
    monkeypatch.setattr(pieces, "PIECE_SECONDS", 1e-9)
    monkeypatch.setattr(pieces, "SHORT_SECONDS", 0.0)
    monkeypatch.setattr(session, "FINISH_SECONDS", -1.0)  # however soon it would end
    whole, progress = outcome(run(COMA, tmp_path / "alone")), Console.progress
    assert "an iteration takes about" in capsys.readouterr().out
    for piece in (1, 4):
        calls = []

        def raise_in_progress(self: Console, activity: str, *more: Any, piece: int = piece, calls: Any = calls) -> None:
            progress(self, activity, *more)
            calls.append(activity)
            if sum(activity.startswith("iteration 3:") for activity in calls) == piece:
                signal.raise_signal(signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(Console, "progress", raise_in_progress)
            directory = run(COMA, tmp_path)
        said = capsys.readouterr().out
        assert "stopped by SIGTERM at iteration 2 " in said
        assert "(the next one was not finished: " in said and steps(directory)[-1] == 2
        resume(directory)
        assert outcome(directory) == whole


def test_a_signal_while_the_last_evaluation_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was trained is saved, without it; the resumed run makes up for it."""
    argv = COMA.replace("--eval_every 0", "--eval_every 400 --eval_episodes 24")
    with monkeypatch.context() as patch:
        patch.setattr(session, "COMPILE_SECONDS", -1.0)
        at_iteration(patch, 5, lambda: signal.raise_signal(signal.SIGTERM))
        directory = run(argv, tmp_path)
    assert steps(directory) == [5] and not any("eval/return" in row for row in read_metrics(directory))
    resume(directory)
    assert sum("eval/return" in row for row in read_metrics(directory)) == 1


def test_a_signal_while_the_next_phase_is_compiled(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is the one that an undisturbed run writes at the end of the phase before: its arrays, too."""
    compile_program = session.Session._compile

    def stop(self: session.Session, program: Any, what: str, state: Any) -> None:
        if what == "phase 'settle'":
            signal.raise_signal(signal.SIGTERM)
            raise StopRequestedError
        compile_program(self, program, what, state)

    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "_compile", stop)
        patch.setattr(Program, "ready", property(lambda self: False, lambda *_: None), raising=False)
        directory = run(STUDY.replace("--checkpoint_every 8", "--checkpoint_every 7"), tmp_path)
    assert "stopped by SIGTERM at iteration 40 " in capsys.readouterr().out
    stored = []
    for folder in (alone, directory):
        with Checkpoints(folder / "checkpoints") as checkpoints:
            _, phase, meta = checkpoints.restore(jax.ShapeDtypeStruct((), np.int32), 40, prefix="phase")
            _, iteration, _ = checkpoints.restore(jax.ShapeDtypeStruct((), np.uint32), 40, prefix="iteration")
        stored.append((int(phase), int(iteration), Position.from_meta(meta)))
    assert stored[1] == stored[0] and stored[0][:2] == (1, 38)
    resume(directory)
    assert outcome(directory) == outcome(alone)


# An evaluation that was due when a signal came


def interrupt_evaluation(patch: pytest.MonkeyPatch, iteration: int) -> None:
    """Let a signal come while the evaluation of this iteration waits for its program, which takes too long."""
    compile_program = session.Session._compile

    def stop(self: session.Session, program: Any, what: str, state: Any) -> None:
        if what == "the evaluation" and self.position.iterations == iteration:
            signal.raise_signal(signal.SIGTERM)
            raise StopRequestedError
        compile_program(self, program, what, state)

    patch.setattr(session.Session, "_compile", stop)


class Killed(BaseException):
    pass


def best_flags(directory: Path) -> list[int]:
    folders = [directory / "checkpoints" / f"{step:010d}" for step in steps(directory)]
    return [stored.step for stored in map(manifest.verify, folders) if stored.best]


@pytest.mark.parametrize("iteration", [10, 20, 45])  # before any checkpoint, the best one, unscheduled at the end
def test_a_resumed_run_first_makes_the_evaluation_that_a_signal_ended(
    iteration: int, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_evaluation(patch, iteration)
        directory = run(STUDY, tmp_path)
        assert steps(directory)[-1] == iteration
        resume(directory)  # a signal ends it again
        assert steps(directory)[-1] == iteration
    assert not any("eval/return" in row for row in read_metrics(directory) if row["iteration"] == iteration)
    resume(directory, "--max_seconds 1e-9")  # the evaluation, and one block
    assert steps(directory)[-1] == min(iteration + 1, 45)
    resume(directory, "--max_seconds 0")
    assert outcome(directory) == outcome(alone)
    assert best_flags(directory)[-1] == best_flags(alone)[-1] == 20
    capsys.readouterr()
    resume(directory)
    assert "nothing is left to do" in capsys.readouterr().out and outcome(directory) == outcome(alone)


@pytest.mark.parametrize(("iteration", "number"), [(20, 1), (20, 2), (20, 3), (45, 3)])
def test_a_kill_after_an_evaluation_that_was_made_up_for(
    iteration: int, number: int, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one of the writes that change the checkpoint that owed it: its row is on disk, the checkpoint intact."""
    with monkeypatch.context() as patch:
        interrupt_evaluation(patch, iteration)
        directory = run(STUDY, tmp_path)
    writes = itertools.count(1)

    def write_or_end(*arguments: Any) -> None:
        if next(writes) == number:
            raise Killed
        write_atomically(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_atomically", write_or_end)
        with pytest.raises(Killed):
            resume(directory)
    (row,) = [row for row in read_metrics(directory) if row["iteration"] == iteration and "eval/return" in row]
    assert row in read_metrics(alone)
    assert manifest.verify(directory / "checkpoints" / f"{iteration:010d}").step == iteration
    resume(directory)
    assert outcome(directory) == outcome(alone)
    assert best_flags(directory)[-1] == 20


def test_an_evaluation_of_several_trials_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = f"{STUDY} --num_seeds 2 --total_env_steps 640"
    whole = run(argv, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_evaluation(patch, 10)
        directory = run(argv, tmp_path)
    resume(directory)
    assert outcome(directory) == outcome(whole) and best_flags(directory) == best_flags(whole)
    for seed in ("seed_0", "seed_1"):
        assert outcome_rows(directory / seed) == outcome_rows(whole / seed)


def test_a_signal_that_the_process_was_started_to_ignore_is_answered() -> None:
    """As SIGINT is in a process that a script starts with `&`; afterwards it is ignored again."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signals = StopSignals()
        with signals.collect():
            signal.raise_signal(signal.SIGINT)
            assert signals.names == ["SIGINT"]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_signal_does_not_wait_for_the_compiler() -> None:
    class Slow:
        """What JAX's stages look like to a `Program`."""

        out_info = None

        def lower(self) -> "Slow":
            return self

        def compile(self) -> None:
            compiling.wait(10)

    compiling = threading.Event()
    program = Program(lambda: (Slow(),), lambda *_: None)
    with pytest.raises(StopRequestedError):
        program.compile(lambda: True)
    assert not program.ready
    compiling.set()
    program.compile()
    assert program.ready


@pytest.mark.parametrize("kept", [(), (20,), (20, 32)])
def test_a_run_that_was_killed(kept: tuple[int, ...], alone: Path, tmp_path: Path) -> None:
    """Before its first checkpoint, behind its best one, and where no evaluation is due."""
    directory = Path(shutil.copytree(alone, tmp_path / "run"))
    for step in set(steps(alone)) - set(kept):
        shutil.rmtree(directory / "checkpoints" / f"{step:010d}")
    resume(directory)
    assert outcome(directory) == outcome(alone)
    assert best_flags(directory)[-1] == 20
    if not kept:
        assert (directory / LOST).read_text() == (alone / METRICS).read_text()  # nothing is lost


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Its last line covers 1 iteration instead of 4, at one of its checkpoints.
    finished = run(f"{STUDY} --log_every 4 --checkpoint_every 5", tmp_path)
    assert [row["iteration"] for row in read_metrics(finished) if "phase" in row][-2:] == [44, 45]
    shutil.copytree(finished, tmp_path / "run")
    versions = tmp_path / "run" / "versions.json"
    versions.write_text(versions.read_text().replace(jax.__version__, "0.0.1"))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    resume(tmp_path / "run")
    out = " ".join(capsys.readouterr().out.split())
    assert f"warning: the run began with jax 0.0.1, this is {jax.__version__}" in out
    assert "finished at iteration 45 (1,280 environment steps): nothing is left to do" in out
    assert "compil" not in out and "no effect" not in out
    resume(tmp_path / "run", "--keep_checkpoints 7")
    assert "so these settings have no effect: keep_checkpoints" in " ".join(capsys.readouterr().out.split())
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    ignored = [path for path in before | after if path.name == ".lock" or "events" in path.parts]
    assert [before.pop(path, None) or after.pop(path, None) for path in ignored]
    assert {path: text for path, text in after.items() if path not in ignored} == before
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"")
    resume(tmp_path / "run")
    assert "metrics.jsonl holds 0 of the" in " ".join(capsys.readouterr().out.split())


def test_a_lengthened_run_goes_on_and_its_schedules_do_not_move(tmp_path: Path) -> None:
    base = f"--algo helpers.tiny:TinyQ {TINY} --log_every 4"
    directory = run(base, tmp_path / "short")
    resume(directory, "--total_env_steps 1920")
    settings = yaml.safe_load((directory / "config.yaml").read_text())
    assert (settings["total_env_steps"], settings["schedule_env_steps"]) == (1920, 1280)
    whole = run(f"{base} --total_env_steps 1920 --schedule_env_steps 1280", tmp_path / "long")
    assert outcome(directory) == outcome(whole)
    assert train.main(["--resume", str(directory), "--total_env_steps", "640"]) == 2  # less than was done
    assert outcome(directory) == outcome(whole)
    assert yaml.safe_load((directory / "config.yaml").read_text())["total_env_steps"] == 1920


def test_config_yaml_reproduces_the_run_and_overwrites_nothing(alone: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in alone.rglob("*") if path.is_file()}
    again = run(f"--config {alone / 'config.yaml'}", tmp_path)
    third = run(f"--config {alone / 'config.yaml'} --max_seconds 0.001", tmp_path)
    assert (again.name, third.name) == ("0001", "0002")
    assert outcome(again) == outcome(alone)
    assert {path: path.read_bytes() for path in alone.rglob("*") if path.is_file()} == before


def test_a_new_run_first_compiles_what_its_first_update_needs() -> None:
    """On a CPU; the rest when it is called."""
    run, said = build_run(parse(STUDY.split()).config), []
    programs = compile_run(run, None, said.append)
    learns = [bool(phase.updates) for phase in run.algo.phases].index(True)
    ready = [block is not None and block.ready for block in programs.blocks]
    assert ready == [k <= learns for k in range(len(ready))] and not all(ready)
    assert programs.start is not None and programs.start.ready
    assert programs.evaluate is not None and not programs.evaluate.ready
    assert min(programs.needed) > 0
    programs.compile()
    assert len(said) == len(programs.needed) == len(ready) + 2


def test_episodes_count_their_resets_as_steps() -> None:
    """Where environments go on; where an iteration is a whole episode they do not."""
    argv = "--algo ppo --env helpers.tiny:PointMass --num_envs 4 --num_minibatches 1 --total_episodes 8"
    whole, parts = (build_run(parse([*f"{argv} --rollout_steps {n}".split()]).config) for n in (0, 4))
    assert whole.config.run.total_env_steps == 8 * whole.env.spec.horizon
    assert parts.config.run.total_env_steps == 8 * (parts.env.spec.horizon + 1)


# What goes wrong


def test_a_loss_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = f"{STUDY} --breaks_at 20 --log_every 1 --eval_every 0 --runs {tmp_path}"
    assert train.main(argv.split()) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    # Iterations 1 and 2 have no updates; 3 to 19 have four each; the second of iteration 20 is broken.
    assert "loss is not finite at update 70 (iteration 20); the last good checkpoint (16) is kept" in error
    directory = tmp_path / "test_session-Study_helpers.tiny-Corridor" / "0001"
    assert steps(directory) == [8, 16]
    assert [row["iteration"] for row in read_metrics(directory)] == list(range(1, 20))
    assert train.main(["--resume", str(directory)]) == 1  # it is the same run, so it breaks again
    assert steps(directory) == [8, 16]


def test_what_is_trained_is_kept_when_a_later_program_does_not_fit(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """The evaluation is compiled when it is first due, in iteration 10; the checkpoints are due in every eighth."""
    compiled_bytes, sizes = memory_plan.compiled_bytes, []

    def larger(executable: Any) -> int:
        sizes.append(compiled_bytes(executable) if len(sizes) < 3 else 2**60)
        return sizes[-1]

    monkeypatch.setattr(memory_plan, "compiled_bytes", larger)
    assert train.main(f"{STUDY} --breaks_at 1000 --runs {tmp_path}".split()) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "GiB per device" in error
    assert steps(tmp_path / "test_session-Study_helpers.tiny-Corridor" / "0001") == [8, 10]


# Weights and policies of other runs


def test_init_from(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(f"{alone}\n")  # what config.yaml must not repeat: it changes with every run
    argv = f"{STUDY} --seed 5 --init_from {tmp_path / 'latest'}".split()
    init_run = build_run(parse(argv).config)
    weights = loading.load_weights(str(alone), init_run)
    best = loading.load_policy(alone)
    assert best.step == Checkpoints(alone / "checkpoints").best_step()
    assert np.array_equal(weights, best.params)
    programs = runs.compile_run(init_run, weights, lambda sentence: None)
    assert programs.start is not None
    state = programs.start(jax.random.key(5), weights)
    assert np.array_equal(state.algo.replicated["weights"], weights)
    directory = run(" ".join(argv), tmp_path)
    config = yaml.safe_load((directory / "config.yaml").read_text())
    assert config["init_from"] == str(alone)
    assert outcome(run(f"--config {directory / 'config.yaml'}", tmp_path)) == outcome(directory)


def test_load_policy_falls_back_on_the_newest_checkpoint(alone: Path, tmp_path: Path) -> None:
    shutil.copytree(alone, tmp_path / "run")
    assert loading.load_policy(alone, best=False).step == 45
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / f"{Checkpoints(checkpoints).best_step():010d}" / "meta.json").write_text("{}")
    assert loading.load_policy(tmp_path / "run").step == 45


def test_the_best_checkpoint_is_the_one_with_the_best_score(alone: Path) -> None:
    scores = {row["iteration"]: row["eval/return"] for row in read_metrics(alone) if "eval/return" in row}
    assert list(scores) == [10, 20, 30, 40, 45]  # and once more at the end
    first_best = max(scores, key=lambda iteration: scores[iteration])
    with Checkpoints(alone / "checkpoints") as checkpoints:
        assert checkpoints.best_step() == first_best
        step, meta = checkpoints.newest()
    assert (step, meta["best"]) == (45, scores[first_best])


# Lines and rates


def test_metrics_are_in_four_groups_and_counters_in_none(alone: Path) -> None:
    names = dict.fromkeys(name for row in read_metrics(alone) for name in row)
    assert {name.partition("/")[0] for name in names if "/" in name} == {"rollout", "train", "eval", "time"}
    counters = {"iteration", "step", "phase", "env_steps", "updates", "episodes"}
    assert {name for name in names if "/" not in name} == counters


def test_rows_that_were_lost_are_told_in_one_line(alone: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(alone, tmp_path / "run")
    *_, previous, newest = steps(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"{newest:010d}")
    content = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    rows = [line for line in content if json.loads(line)["iteration"] <= previous]
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"".join(rows[:5]) + rows[5][:9])
    left, whole = (f"{sum(map(len, lines)):,}" for lines in (rows[:5], rows))
    resume(tmp_path / "run")
    out = " ".join(capsys.readouterr().out.split())
    assert f"metrics.jsonl holds {left} of the {whole} bytes that were written up to iteration {previous}: the" in out
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"{newest:010d}")
    shutil.copy(alone / "metrics.jsonl", tmp_path / "run")
    resume(tmp_path / "run")
    assert "metrics.jsonl" not in capsys.readouterr().out


def test_the_axis_of_charts_are_environment_steps(alone: Path) -> None:
    """The five iterations of the last phase make none: each counts as one."""
    phases = build_run(parse(STUDY.split()).config).algo.phases
    assert Position(1, 3, 5, 160, 12).axis(phases) == 160
    assert Position(2, 0, 40, 1280, 152).axis(phases) == 1280
    assert Position(2, 5, 45, 1280, 157).axis(phases) == 1285
    charts = points(alone)
    assert charts
    for name, chart in charts.items():
        rows = [row for row in read_metrics(alone) if name in row]
        assert [step for step, _ in chart] == [row["env_steps"] + max(0, row["iteration"] - 40) for row in rows], name


@pytest.mark.parametrize("total", [0, 500, 100_000])
def test_a_run_has_some_ten_thousand_rows_and_some_hundred_if_it_is_stopped_early(total: int) -> None:
    rows = np.array(
        [iteration for iteration in range(1, total + 1) if iteration % choose_spacing(iteration, total) == 0]
    )
    assert len(rows) <= 14_000 and len(rows) >= min(total, 5_000)
    assert np.diff(rows[-100:]).tolist() == [max(-(-total // 10_000), 1)] * (min(total, 100) - 1 if total else 0)
    for stopped in (100, 500, 1_000, 30_000):
        assert (rows <= stopped).sum() >= min(stopped, total, 500)


def test_lines_are_means_over_their_iterations(tmp_path: Path) -> None:
    pace = Throughput(0, 0)
    with Writer(tmp_path) as writer:
        lines = MetricAggregator(writer, 2, 100)
        lines.add({"iteration": 1, "phase": 0}, {}, {"episodes": 2.0, "return": 3.0}, pace)
        lines = MetricAggregator(writer, 2, 100, lines.group)  # another process
        lines.add({"iteration": 2, "phase": 1}, {"loss": np.array([1.0, 3.0])}, {"episodes": 1.0, "return": 6.0}, pace)
        lines.add({"iteration": 3, "phase": 1}, {"loss": np.array([4.0, 4.0])}, {}, pace)
        lines.flush({"iteration": 3, "phase": 1}, pace)
        lines.flush({"iteration": 3, "phase": 1}, pace)
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(tmp_path)]
    assert rows == [
        {"iteration": 2, "phase": 1, "episodes": 3.0, "rollout/return": 3.0, "train/loss": 2.0},
        {"iteration": 3, "phase": 1, "episodes": 0.0, "train/loss": 4.0},
    ]
    assert lines.losses == {"loss": 4.0}


def test_pauses_do_not_slow_the_rates_down(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Throughput(1000, 10)
    now[0] += 2.0
    assert pace.mark(1200, 30) == 2.0
    with pace.pause():
        now[0] += 50.0
    now[0] += 2.0
    assert pace.mark(1400, 50) == 2.0
    assert pace.rates() == {"env_steps_per_second": 100.0, "updates_per_second": 10.0}
