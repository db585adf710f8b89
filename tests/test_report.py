"""What a run reports can be read back, without stale points and without lost lines."""

import io
import itertools
import json
import logging
import mmap
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import pynvml
import pytest
from helpers.runs import points

from envs_jax.base import make, registered
from jaxrl.report import console, gpu
from jaxrl.report import metrics as metrics_module
from jaxrl.report.console import Console, Log
from jaxrl.report.metrics import TimeLeft
from jaxrl.report.writer import MetricsError, Writer, check_same_run, read_metrics


def write(directory: Path, *iterations: int, offset: float = 0.0) -> None:
    with Writer(directory) as writer:
        for iteration in iterations:
            writer.write(iteration, {"loss/actor": iteration + offset, "env_steps": iteration * 2**40})


def test_the_same_numbers_in_both_places(tmp_path: Path) -> None:
    """Values that are not finite are null in JSON, and no points in TensorBoard."""
    with Writer(tmp_path) as writer:
        writer.write(1, {"a/b": np.float32(0.5), "n": np.int64(2**53 + 1), "j": jnp.float32(-0.25), "yes": True})
        writer.write(2, {"a/b": 0.1})
        # without closing: a kill loses nothing
        first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(first) == {"iteration": 1, "a/b": 0.5, "n": 2**53 + 1, "j": -0.25, "yes": 1}
        assert second == '{"iteration": 2, "a/b": 0.1}'
        assert points(tmp_path)["a/b"] == [(1, 0.5)]  # the second follows within seconds
        writer.write(3, {"nan": float("nan"), "inf": float("inf"), "fine": 1.0})
    assert points(tmp_path)["a/b"] == [(1, 0.5), (2, pytest.approx(0.1))]
    assert set(points(tmp_path)) == {"a/b", "n", "j", "yes", "fine"}
    third = {"iteration": 3, "nan": None, "inf": None, "fine": 1.0}
    assert read_metrics(tmp_path) == [json.loads(first), json.loads(second), third]


@pytest.mark.parametrize("seed", range(8))
def test_processes_that_trim_and_write_leave_what_a_list_would_hold(seed: int, tmp_path: Path) -> None:
    """Each begins after some iteration, and an evaluation adds a second row; points before it are never stale."""
    generator = np.random.default_rng(seed)
    expected: list[dict[str, Any]] = []
    for process in range(5):
        after = int(generator.integers(0, 8))
        expected = [row for row in expected if row["iteration"] <= after]
        with Writer(tmp_path) as writer:
            writer.trim(after, {"bytes": 0})
            assert read_metrics(tmp_path) == expected
            for iteration in range(after + 1, after + 1 + int(generator.integers(0, 5))):
                value = iteration + process / 8
                rows = [{"loss": value}, {"eval/loss": value}][: generator.integers(1, 3)]
                for row in rows:
                    writer.write(iteration, row)
                    expected.append({"iteration": iteration, **row})
        assert read_metrics(tmp_path) == expected
        found = [(step, name, value) for name, pairs in points(tmp_path).items() for step, value in pairs]
        assert sorted(found) == sorted(
            (row["iteration"], name, row[name]) for row in expected for name in ("loss", "eval/loss") if name in row
        )


def test_a_resume_reads_only_the_end_of_the_lines(tmp_path: Path) -> None:
    """A damaged line far before the checkpoint is not seen, and no byte before it changes."""
    write(tmp_path, *range(1, 5001))
    path = tmp_path / "metrics.jsonl"
    content = b"{}" + path.read_bytes()[2:]
    path.write_bytes(content)
    with Writer(tmp_path) as writer:
        assert writer.trim(3000) == ""
    trimmed = path.read_bytes()
    assert content.startswith(trimmed) and json.loads(trimmed.splitlines()[-1])["iteration"] == 3000


def test_a_damaged_line_at_the_end_is_named_and_nothing_is_removed(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in (
        b"[" * 100_000 + b"\n",
        b"[1]\n",
        b'{"iteration": NaN}\n',
        b"\n",
        b'{"iteration": 3, "step": "x"}\n',
    ):
        content = b"".join((*lines[:2], damaged, lines[3]))
        path.write_bytes(content)
        with Writer(tmp_path) as writer, pytest.raises(MetricsError, match=r"^line 3 of .* is damaged: fix or remove"):
            writer.trim(1)
        assert path.read_bytes() == content
        with pytest.raises(MetricsError, match=r"^line 3 of .* is damaged: fix or remove"):
            read_metrics(tmp_path)


def test_events_before_a_checkpoint_outlive_a_kill(tmp_path: Path) -> None:
    """A row, the mark of a checkpoint, another row; nothing is closed before another process resumes."""
    killed = Writer(tmp_path)
    killed.write(1, {"a": 1.0})
    killed.write(2, {"a": 2.0})
    mark = killed.mark()
    killed.write(3, {"a": 3.0})
    with Writer(tmp_path) as writer:
        assert writer.trim(2, mark) == ""
        writer.write(3, {"a": 3.5})
    assert points(tmp_path)["a"] == [(1, 1.0), (2, 2.0), (3, 3.5)]
    killed.close()


def test_lines_of_another_run_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "one", 1, 2)
    write(tmp_path / "other", 1, 2, offset=0.5)
    with Writer(tmp_path / "one") as writer:
        mark = writer.mark()
    check_same_run(tmp_path / "one", mark)
    check_same_run(tmp_path / "other", None)
    check_same_run(tmp_path / "gone", mark)  # `trim` tells that they are lost
    with pytest.raises(MetricsError, match=r"other/metrics.jsonl is not of this run: .*; put the run's own file back"):
        check_same_run(tmp_path / "other", mark)


def test_tensorboard_has_an_axis_of_its_own_and_neither_counters_nor_clocks(tmp_path: Path) -> None:
    """They are diagonals, and their names would stand above the scores."""
    counters = {"phase": 0, "env_steps": 640, "updates": 5, "episodes": 4.0, "time/unix": 1e9, "time/seconds": 3.0}
    shown = {"rollout/return": 0.5, "train/actor_loss": 0.25, "time/env_steps_per_second": 9.0, "failed": 1}
    rows = [{"iteration": i, "step": 1000 * i, **counters, **shown} for i in (1, 2, 3)]
    with Writer(tmp_path) as writer:
        for iteration in (1, 2, 3):
            writer.write(iteration, counters | shown, step=1000 * iteration)
    assert points(tmp_path) == {name: [(1000 * i, value) for i in (1, 2, 3)] for name, value in shown.items()}
    assert read_metrics(tmp_path) == rows
    with Writer(tmp_path) as writer:
        writer.trim(2)
    assert points(tmp_path)["failed"] == [(1000, 1), (2000, 1)]
    assert read_metrics(tmp_path) == rows[:2]


@pytest.mark.parametrize("cut", [1, 3, 20])
def test_a_torn_end_is_removed(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 1, 2, 3)
    (events,) = (tmp_path / "events").iterdir()
    for path in (tmp_path / "metrics.jsonl", events):
        path.write_bytes(path.read_bytes()[:-cut])
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [1, 2]
    with Writer(tmp_path) as writer:
        writer.trim(3)
        writer.write(3, {"loss/actor": 3.0})
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert points(tmp_path)["loss/actor"] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_trim_to_nothing_and_of_nothing(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.trim(10)
    assert read_metrics(tmp_path) == [] and points(tmp_path) == {}
    write(tmp_path, 1, 2)
    lines = (tmp_path / "metrics.jsonl").read_text()
    with Writer(tmp_path) as writer:  # there is no checkpoint: a run of hours may have been
        assert writer.trim(0).endswith("the previous rows of metrics are kept in metrics.lost.jsonl")
    assert read_metrics(tmp_path) == [] and points(tmp_path) == {}
    assert (tmp_path / "metrics.lost.jsonl").read_text() == lines


# Console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the console's time in seconds, as the only item of a list."""
    now = [100.0]
    for module in (console, metrics_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def write_blocks(*blocks: dict[str, Any], **settings: Any) -> list[str]:
    """Return the plain lines of blocks."""
    stream = io.StringIO()
    with Console(stream=stream, **settings) as console:
        for block in blocks:
            console.block(block)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("seconds", [0.5, 4.0, 14.0, 20.0])
def test_plain_lines_come_every_15_seconds(seconds: float, clock: list[float]) -> None:
    """Never later, if a block ends in time; the first three at once; half as often is enough for very short blocks."""
    start, times = clock[0], []
    stream = io.StringIO()
    with Console(stream=stream) as console:
        for iteration in range(1, 201):
            before = stream.getvalue()
            console.block({"iteration": iteration})
            times += [clock[0] - start] if stream.getvalue() != before else []
            clock[0] += seconds
    assert times[:3] == [0.0, seconds, 2 * seconds]
    gaps = {after - before for before, after in itertools.pairwise(times[2:])}
    assert gaps == {max(seconds, 15.0 - 15.0 % seconds)}


COUNTERS = {
    "iteration": 250, "fraction": 0.25, "seconds_left": 3_725.0, "env_steps": 1_234_567, "updates": 950,
    "env_steps_per_second": 85_123.0, "updates_per_second": 3.21, "phase": "burst (2 of 3)", "memory": 3 * 2**29,
    "memory_limit": 139 * 2**30, "utilisation": 0.87, "power": 612.0,
}  # fmt: skip
SHOWN_COUNTERS = (
    "iteration 250", "phase done 25.0%", "phase left 1 h 02 min", "env steps 1.23 M", "updates 950",
    "env steps/s 85.1 k", "updates/s 3.21", "burst (2 of 3)", "memory in use 1.5 GiB", "of 139.0 GiB", "GPU busy 87%",
    "power 612 W",
)  # fmt: skip
LOSSES = [f"{name}_loss{where}" for name in ("transformer", "actor", "critic") for where in ("", "_held_out")]
EXTREMES = (0.1, -1.23456e-12, float("nan"), -float("inf"), 1.5e300, 12345.678, -9_999_999.4, 0.0, -0.00123456, 1e-7)


@pytest.mark.parametrize("env", registered())
def test_lines_lose_nothing_and_fit(env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many metrics as there are, with units and of tasks, in 120 characters, or those of a terminal."""
    spec = make(env).spec
    values = itertools.cycle(EXTREMES)
    metrics = {name: next(values) for name in ("return", *spec.metrics)}
    evaluated = (*metrics, "length", *(f"{spec.score}/{task}" for task in spec.task_names or ()))
    evaluation = {name: next(values) for name in evaluated}
    losses = {name: next(values) for name in LOSSES}
    block = COUNTERS | {"environment": metrics, "evaluation": evaluation, "losses": losses}
    lines = write_blocks(block, label=spec.label)
    assert max(map(len, lines)) <= 120
    facts = [*SHOWN_COUNTERS, *(f"{name.replace('_', ' ')} {value:.4g}" for name, value in losses.items())]
    for name, value in (*metrics.items(), *evaluation.items()):
        metric, _, task = name.partition("/")
        words, _, unit = spec.label(metric).partition(", ")
        shown = f"{words} ({task})" if task else words
        facts.append(f"{shown} {value:.4g} {unit}".rstrip())
    text = "  ".join(lines)
    for fact in facts:
        assert re.search(rf"(^|  ){re.escape(fact)}(  |$)", text), (fact, text)
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with Console(label=spec.label, stream=stream) as terminal:
        terminal.block(block)
        terminal.say("one sentence " * 10)
    assert max(map(len, stream.getvalue().replace("\r\x1b[K", "").splitlines())) <= 80


def test_an_evaluation_does_not_repeat_its_block() -> None:
    block = {"iteration": 7, "return": 0.5, "losses": {"loss": float("nan")}}
    once = write_blocks(block, block | {"evaluation": {"return": -1.5}})
    assert once[:-1] == write_blocks(block) and re.fullmatch(r"  evaluation +return -1.5", once[-1])
    assert len(write_blocks(block, block | {"iteration": 8, "evaluation": {"a": 0.75}})) == 2 * len(once) - 1


def test_warnings_look_alike_before_and_after_absl_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 54: in a program without handlers absl gives the root one, as soon as a checkpoint is first written."""
    monkeypatch.setattr(logging.root, "handlers", [])
    log = Log()
    log.say("warning: before")
    with log:
        log.say("warning: once")
        absl.logging.vlog(1, "saved")
        log.say("warning: twice")
    assert capsys.readouterr().err == "WARNING:jaxrl:before\nWARNING:jaxrl:once\nWARNING:jaxrl:twice\n"
    absl.logging.vlog(1, "loaded")
    log.say("warning: after")
    assert capsys.readouterr().err == "WARNING:jaxrl:after\n"


def test_logging_is_the_user_s_to_configure_before_and_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    own = logging.StreamHandler(io.StringIO())
    for handlers, printed in (([], "WARNING:jaxrl:look out\n"), ([own], "")):
        monkeypatch.setattr(console.logger, "handlers", handlers)
        with Log() as log:
            log.say("warning: look out")
            absl.logging.vlog(1, "saved")
            log.say("warning: look out")
        assert capsys.readouterr().err == 2 * printed and logging.root.handlers == []
        assert (console.logger.handlers, console.logger.propagate) == (handlers, True)
    assert own.stream.getvalue() == "look out\nlook out\n"
    logging.basicConfig(filename=tmp_path / "own.log", format="%(message)s")
    try:
        with Log() as log:
            log.say("warning: to the file")
        assert (tmp_path / "own.log").read_text() == "to the file\n" and not capsys.readouterr().err
    finally:
        for handler in logging.root.handlers:
            handler.close()


def test_long_work_is_logged_at_once_and_then_with_its_seconds(clock: list[float], caplog: Any) -> None:
    threads = set(threading.enumerate())

    def compile_and_fail(log: Log) -> None:
        with log.working("compiling"):
            assert caplog.records[0].message == "compiling ..."
            clock[0] += 75.0
            while "compiling ... 1 min 15 s" not in [record.message for record in caplog.records]:
                time.sleep(0.01)
            raise ValueError("too large")

    with caplog.at_level(logging.INFO, "jaxrl"), Log(every=0.01) as log:
        with pytest.raises(ValueError, match="too large"):
            compile_and_fail(log)
        assert set(threading.enumerate()) <= threads


def test_lines_are_printed_unless_the_logger_takes_them(capsys: Any, caplog: Any) -> None:
    for level, printed, expected in (
        (logging.WARNING, True, "sentence\niteration 1\n"),
        (logging.WARNING, False, ""),
        (logging.INFO, True, ""),
    ):
        with caplog.at_level(level, "jaxrl"), Log(printed=printed) as log:
            caplog.clear()
            log.say("sentence")
            log.say("warning: look out")
            log.block({"iteration": 1})
        assert capsys.readouterr().out == expected
        assert "look out" in caplog.messages and ("sentence" in caplog.messages) == (level == logging.INFO)


def test_the_time_left_is_that_of_the_phase_by_the_clock_of_training(clock: list[float]) -> None:
    """A compiler between two blocks takes 100 s of the other clock: 10 s for a quarter leave 20 s for the last half."""
    left = TimeLeft()
    assert left.estimate({"fraction": 0.25, "seconds": 5.0}) is None
    assert left.estimate({"fraction": 0.5, "seconds": 15.0}) == pytest.approx(20.0)
    estimates = []
    for phase, fraction in (("walk", 0.1), ("walk", 0.6), ("read", 0.2), ("read", 0.6)):
        estimates.append(left.estimate({"phase": phase, "fraction": fraction}))
        clock[0] += 60.0
    assert estimates == [None, pytest.approx(48.0), None, pytest.approx(60.0)]


def test_progress_in_an_iteration_is_written_at_once_and_then_now_and_then(clock: list[float], caplog: Any) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "jaxrl"), Console(stream=stream) as progress_console, Log() as log:
        for done in range(0, 768, 8):  # one second each
            for report in (progress_console, log):
                report.progress("iteration 3: learning", done, 768, "minibatches", (768 - done) / 8)
            clock[0] += 1.0
    lines = stream.getvalue().splitlines()
    assert lines[0] == "iteration 3: learning: 0 of 768 minibatches, left 1 min 36 s"
    assert [int(re.search(r"(\d+) of", line)[1]) for line in lines] == list(range(0, 768, 7 * 8))
    assert caplog.messages == lines


def test_progress_is_not_written_right_after_a_block(clock: list[float]) -> None:
    stream = io.StringIO()
    with Console(stream=stream) as console:
        for iteration in (1, 2):
            console.progress(f"iteration {iteration}: rolling out", 512, 4096, "episodes", None)
            clock[0] += 20.0
            console.block({"iteration": iteration})
        for done in (512, 1024):
            clock[0] += 6.5
            console.progress("iteration 3: rolling out", done, 4096, "episodes", None)
    assert stream.getvalue().splitlines() == [
        "iteration 1: rolling out: 512 of 4,096 episodes",
        "iteration 1",
        "iteration 2",
        "iteration 3: rolling out: 1,024 of 4,096 episodes",
    ]


# Devices


def test_on_cpu_memory_is_the_resident_size() -> None:
    with gpu.Monitor() as monitor:
        reading = monitor.read()
        assert 2**25 < reading.memory < 2**36
        assert reading[1:] == (None, None, None)
        with mmap.mmap(-1, 2**26) as ballast:  # new pages; an array might lie where one was before
            ballast.write(b"1" * 2**26)
            assert monitor.read().memory > reading.memory + 2**25


def test_gpus_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs; the second is a slice that keeps neither utilisation nor power."""

    def make_device(index: int) -> Any:
        memory = {"bytes_in_use": 5 + index, "bytes_limit": 100}
        return SimpleNamespace(platform="gpu", local_hardware_id=index, memory_stats=lambda: memory)

    handles = {3: "whole", "MIG-abc": "slice"}
    opened: list[bool] = []

    def answer(figure: Any) -> Callable[[str], Any]:
        def read(handle: str) -> Any:
            if handle == "slice":
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return figure

        return read

    monkeypatch.setattr(jax, "local_devices", lambda: [make_device(0), make_device(1)])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: opened.append(True))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: opened.append(False))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handles.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handles.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", answer(SimpleNamespace(gpu=40, memory=99)))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", answer(321_500))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, MIG-abc")
    with gpu.Monitor() as monitor:
        assert opened == [True]
        assert monitor.read() == gpu.DeviceReading(6, 100, 0.4, 321.5)
    assert opened == [True, False]


def test_a_label_and_a_path_stay_in_one_line() -> None:
    path = "/a" * 100
    assert console.fold(f"run directory: {path}") == f"run directory: {path}"
    assert console.fold("a sentence: " + "word " * 30).count("\n") == 1
