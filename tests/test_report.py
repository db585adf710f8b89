"""What a run reports can be read back, without stale points and without lost lines."""

import io
import itertools
import json
import logging
import mmap
import re
import threading
import time
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

import jaxrl
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
    with Writer(tmp_path) as writer:
        writer.write(1, {"a/b": np.float32(0.5), "n": np.int64(2**53 + 1), "j": jnp.float32(-0.25), "yes": True})
        writer.write(2, {"a/b": 0.1})
        # without closing: a kill loses nothing
        first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(first) == {"iteration": 1, "a/b": 0.5, "n": 2**53 + 1, "j": -0.25, "yes": 1}
        assert second == '{"iteration": 2, "a/b": 0.1}'
        assert points(tmp_path)["a/b"] == [(1, 0.5)]  # the second follows within seconds
    assert points(tmp_path)["a/b"] == [(1, 0.5), (2, pytest.approx(0.1))]
    assert read_metrics(tmp_path) == [json.loads(first), json.loads(second)]


def test_not_finite_is_null_in_json(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.write(1, {"nan": float("nan"), "inf": float("inf"), "fine": 1.0})
    assert read_metrics(tmp_path) == [{"iteration": 1, "nan": None, "inf": None, "fine": 1.0}]
    assert list(points(tmp_path)) == ["fine"]


def test_trim_leaves_no_stale_point(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    write(tmp_path, 4, 5)
    write(tmp_path, 6)
    with Writer(tmp_path) as writer:
        writer.trim(4)
        assert [row["iteration"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
        for iteration in (5, 6, 7):
            writer.write(iteration, {"loss/actor": iteration + 0.5})
    assert points(tmp_path)["loss/actor"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.5), (6, 6.5), (7, 7.5)]
    assert [row["loss/actor"] for row in read_metrics(tmp_path)] == [1.0, 2.0, 3.0, 4.0, 5.5, 6.5, 7.5]
    assert len(list((tmp_path / "events").iterdir())) == 4


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


def test_trim_at_every_iteration(tmp_path: Path) -> None:
    """With two rows of one iteration."""
    write(tmp_path, 1, 2, 2, 4, 5)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for after, count in ((6, 5), (5, 5), (4, 4), (3, 3), (2, 3), (1, 1), (0, 0)):
        with Writer(tmp_path) as writer:
            writer.trim(after, {"bytes": 0})
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:count])


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


def test_tensorboard_shows_no_counters_and_no_clocks(tmp_path: Path) -> None:
    """They are diagonals, and their names would stand above the scores."""
    counters = {"phase": 0, "env_steps": 640, "updates": 5, "episodes": 4.0, "time/unix": 1e9, "time/seconds": 3.0}
    shown = {"rollout/return": 0.5, "train/actor_loss": 0.25, "time/env_steps_per_second": 9.0, "failed": 1}
    with Writer(tmp_path) as writer:
        writer.write(1, counters | shown)
    assert set(points(tmp_path)) == set(shown)
    assert read_metrics(tmp_path) == [{"iteration": 1, **counters, **shown}]


def test_the_axis_of_tensorboard_is_another_than_the_iteration(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        for iteration in (1, 2, 3):
            writer.write(iteration, {"a": iteration}, step=1000 * iteration)
    assert points(tmp_path) == {"a": [(1000, 1.0), (2000, 2.0), (3000, 3.0)]}
    with Writer(tmp_path) as writer:
        writer.trim(2)
    assert points(tmp_path) == {"a": [(1000, 1.0), (2000, 2.0)]}
    assert read_metrics(tmp_path) == [{"iteration": i, "step": 1000 * i, "a": i} for i in (1, 2)]


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

INFO: dict[str, Any] = {
    "fraction": 0.25, "iteration": 250, "env_steps": 1_234_567, "env_steps_per_second": 85_123.0, "updates": 1250,
    "updates_per_second": 3.21, "return": 0.5, "environment": {"entropy": 0.41}, "losses": {"actor": -0.00123},
    "memory": 3 * 2**29, "memory_limit": 139 * 2**30, "utilisation": 0.87,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the console's time in seconds, as the only item of a list."""
    now = [100.0]
    for module in (console, metrics_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_plain_lines() -> None:
    stream = io.StringIO()
    with Console(every=0.0, stream=stream) as console:
        console.say("compiled in 12.3 s")
        console.block(INFO)
        console.block({})
    sentence, *lines = stream.getvalue().splitlines()
    assert sentence == "compiled in 12.3 s"
    assert lines == [
        "iteration 250     done 25.0%   env steps 1.23 M  updates 1.25 k  env steps/s 85.1 k  updates/s 3.21",
        "  episodes    return 0.5       entropy 0.41",
        "  losses      actor -0.00123",
        "  device      memory in use 1.5 GiB   of 139.0 GiB  GPU busy 87%",
    ]


@pytest.mark.parametrize("seconds", [0.5, 1.0, 4.0, 8.0, 14.0, 15.0, 20.0])
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


# What a run tells a console: names of all losses, by algorithm
LOSSES = {
    "coma": ("critic_loss", "actor_loss"),
    "sac": ("critic_loss", "actor_loss"),
    "student": ("critic_loss", "actor_loss"),
    "collective": (
        *(f"{name}{kind}_loss" for name in ("transformer", "actor", "critic") for kind in ("", "_held_out")),
        "code_accuracy",
    ),
}
PHASES = {"coma": None, "sac": "burst (2 of 3)", "student": "burst (2 of 3)", "collective": "critic (8 of 8)"}
EXTREMES = (0.1, -1.23456e-12, float("nan"), -float("inf"), 1.5e300, 12345.678, -9_999_999.4, 0.0, -0.00123456, 1e-7)


def realistic_block(algo: str, env: str, shift: int) -> dict[str, Any]:
    """Return data of a console with as many metrics as there are; another shift gives other numbers."""
    spec = make(env).spec
    values = (EXTREMES[(k + shift) % len(EXTREMES)] for k in range(1000))
    metrics = {name: next(values) for name in spec.metrics}
    tasks = spec.task_names or ()
    return {
        "phase": PHASES[algo],
        "fraction": (0.001, 0.5, 1.0)[shift % 3],
        "seconds_left": (None, 3_599.0, 0.0)[shift % 3],
        "iteration": (1, 99, 999_999)[shift % 3],
        "env_steps": (64, 10**6, 123_456_789_012)[shift % 3],
        "updates": (0, 950, 12_345)[shift % 3],
        "env_steps_per_second": (0.0123, 85_123.0, 9.99e6)[shift % 3],
        "updates_per_second": (3.21, 0.0, 123_456.0)[shift % 3],
        "return": next(values),
        "environment": metrics,
        "losses": {name: next(values) for name in LOSSES[algo]},
        "memory": (3 * 2**29, 2**20, 138 * 2**30)[shift % 3],
        "memory_limit": 139 * 2**30,
        "utilisation": (0.0, 0.87, 1.0)[shift % 3],
        "power": (61.2, 612.0, 1012.0)[shift % 3],
        "evaluation": {name: next(values) for name in (*metrics, "return", "length")}
        | {f"{spec.score}/{task}": next(values) for task in tasks},
    }


def write_blocks(*blocks: dict[str, Any], **settings: Any) -> list[str]:
    """Return the plain lines of blocks."""
    stream = io.StringIO()
    with Console(stream=stream, **settings) as console:
        for block in blocks:
            console.block(block)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("algo", LOSSES)
@pytest.mark.parametrize("env", registered())
def test_plain_lines_are_short_and_lose_nothing(algo: str, env: str) -> None:
    label = make(env).spec.label
    for shift in range(3):
        block = realistic_block(algo, env, shift)
        lines = write_blocks(block, label=label)
        assert max(map(len, lines)) <= 120 and lines[0].startswith("iteration ")
        text = "  ".join(lines)
        assert (block["phase"] or "iteration") in text
        for metrics in (block["environment"], block["evaluation"], block["losses"]):
            for name, value in metrics.items():
                metric, _, task = name.partition("/")
                words, _, unit = label(metric).partition(", ")
                words = name.replace("_", " ") if metrics is block["losses"] else words + (f" ({task})" if task else "")
                fact = f"{words} {console.format_number(value)} {unit}".rstrip()
                assert re.search(rf"  {re.escape(fact)}(  |$)", text), (fact, text)


def test_lines_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with Console(stream=stream) as console:
        console.block(INFO)
        console.say("one sentence " * 10)
    lines = stream.getvalue().replace("\r\x1b[K", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-2:] == ["one sentence" + 5 * " one sentence", "  one sentence" + 3 * " one sentence"]


def test_an_evaluation_lies_below_the_episodes_and_does_not_repeat_its_block() -> None:
    block = {"iteration": 7, "return": 0.5, "environment": {"b": 0.25, "a": 1.0}, "losses": {"loss": float("nan")}}
    lines = write_blocks(block, block | {"evaluation": {"return": -1.5, "b": 0.125, "a": 0.75, "length": 60.0}})
    assert lines == [
        "iteration 7",
        "  episodes    return 0.5       b 0.25      a 1",
        "  losses      loss nan",
        "  evaluation  return -1.5      b 0.125     a 0.75      length 60",
    ]
    other = block | {"iteration": 8, "evaluation": {"a": 0.75}}
    assert write_blocks(block, other)[3:] == [
        "iteration 8",
        "  episodes    return 0.5       b 0.25      a 1",
        "  losses      loss nan",
        "  evaluation  a 0.75",
    ]


def test_long_work_tells_how_long_it_has_gone_on() -> None:
    stream, threads = io.StringIO(), set(threading.enumerate())
    with Console(every=0.01, stream=stream) as console, console.working("compiling"):
        while stream.getvalue().count("\n") < 3:
            time.sleep(0.01)
        console.say("compiled a part")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["compiling ...", "compiling ... 0 s"] and "compiled a part" in lines
    assert set(threading.enumerate()) <= threads


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


def test_a_run_and_its_export_leave_the_root_logger_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    settings = {"num_envs": 8, "devices": 1, "total_env_steps": 96, "eval_every": 0, "runs": str(tmp_path / "runs")}
    result = jaxrl.train("helpers.tiny:TinyQ", "helpers.tiny:Corridor", progress=False, **settings)
    jaxrl.export(result.directory, "run", tmp_path / "small")
    assert logging.root.handlers == []


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


def test_the_time_left_is_by_the_clock_of_training() -> None:
    """A compiler between two blocks takes 100 s of the other clock: 10 s for a quarter leave 20 s for the last half."""
    left = TimeLeft()
    assert left.estimate({"fraction": 0.25, "seconds": 5.0}) is None
    assert left.estimate({"fraction": 0.5, "seconds": 15.0}) == pytest.approx(20.0)


def test_progress_in_an_iteration_is_written_at_once_and_then_now_and_then(clock: list[float], caplog: Any) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "jaxrl"), Console(stream=stream) as progress_console, Log() as log:
        for done in range(0, 768, 8):  # one second each
            for report in (progress_console, log):
                report.progress("iteration 3: learning", done, 768, "minibatches", (768 - done) / 8)
            clock[0] += 1.0
    expected = [
        "iteration 3: learning: 0 of 768 minibatches, left 1 min 36 s",
        *(  # every 7 s
            f"iteration 3: learning: {8 * second} of 768 minibatches, left {console.format_duration(96 - second)}"
            for second in range(7, 96, 7)
        ),
    ]
    assert Console.LOG_SECONDS == Log.LOG_SECONDS == 15.0
    assert stream.getvalue().splitlines() == expected
    assert [record.message for record in caplog.records] == expected


def test_progress_is_not_written_right_after_a_block(clock: list[float]) -> None:
    stream = io.StringIO()
    with Console(stream=stream) as console:
        console.block({"iteration": 1})
        for iteration in (2, 3):
            console.progress(
                f"iteration {iteration}: rolling out", 512, 4096, "episodes", None
            )  # first of a run: at once
            clock[0] += 20.0
            console.block({"iteration": iteration})
        clock[0] += 6.5
        console.progress("iteration 4: rolling out", 512, 4096, "episodes", None)
        clock[0] += 1.0
        console.progress("iteration 4: rolling out", 1024, 4096, "episodes", None)
    assert stream.getvalue().splitlines() == [
        "iteration 1",
        "iteration 2: rolling out: 512 of 4,096 episodes",
        "iteration 2",
        "iteration 3",
        "iteration 4: rolling out: 1,024 of 4,096 episodes",
    ]


def test_time_left_is_that_of_the_phase(clock: list[float]) -> None:
    stream = io.StringIO()
    with Console(every=0.0, stream=stream) as console:
        for phase, fraction in (("walk", 0.1), ("walk", 0.6), ("read", 0.2), ("read", 0.6)):
            console.block({"phase": phase, "fraction": fraction})
            clock[0] += 60.0
    assert stream.getvalue().splitlines() == [
        "phase done 10.0%",
        "  phase       walk",
        "phase done 60.0%   phase left 48 s",  # 0.4 at 0.5 per minute
        "  phase       walk",
        "phase done 20.0%",
        "  phase       read",
        "phase done 60.0%   phase left 1 min 00 s",
        "  phase       read",
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


class FakeNvml:
    """Two GPUs as the driver's library shows them; the second is a slice that keeps neither utilisation nor power."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.opened = fails, 0

    def nvmlInit(self) -> None:
        if self.fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return 1000 + index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        assert name == "MIG-abc"
        return 7

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self._figure_of_handle(handle, 40), memory=99)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._figure_of_handle(handle, 321_500)

    def _figure_of_handle(self, handle: int, figure: int) -> int:
        if handle != 1003:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return figure


def fake_gpus(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    devices = [
        SimpleNamespace(
            platform="gpu", local_hardware_id=i, memory_stats=lambda i=i: {"bytes_in_use": 5 + i, "bytes_limit": 100}
        )
        for i in range(2)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    for name in (name for name in dir(FakeNvml) if name.startswith("nvml")):
        monkeypatch.setattr(pynvml, name, getattr(nvml, name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, MIG-abc")


def test_gpus_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    fake_gpus(monkeypatch, nvml)
    with gpu.Monitor() as monitor:
        assert nvml.opened == 1
        assert monitor.read() == gpu.DeviceReading(6, 100, 0.4, 321.5)
    assert nvml.opened == 0


def test_a_label_and_a_path_stay_in_one_line() -> None:
    path = "/a" * 100
    assert console.fold(f"run directory: {path}") == f"run directory: {path}"
    assert console.fold("a sentence: " + "word " * 30).count("\n") == 1
