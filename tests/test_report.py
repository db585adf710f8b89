"""What is told of a run can be read back, without stale points and without lines lost."""

import io
import json
import logging
import mmap
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pynvml
import pytest
from helpers.runs import points

from envs_jax.base import make, registered
from jaxrl.report import console, gpu
from jaxrl.report import writer as writer_module
from jaxrl.report.console import Console, Log
from jaxrl.report.writer import MetricsError, Writer, read_metrics


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


def test_events_reach_the_disk_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(writer_module, "time", SimpleNamespace(time=lambda: now[0], time_ns=lambda: 1))
    with Writer(tmp_path) as writer:
        for iteration in (1, 2, 3):
            writer.write(iteration, {"a": iteration})
            now[0] += 4.0
        assert points(tmp_path)["a"] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_without_tensorboardx_there_are_lines_and_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, 2)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with Writer(tmp_path) as writer:
        assert "pip install tensorboardX" in writer.note
        writer.trim(1)
        writer.write(2, {"a": 0.5})
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [1, 2]
    assert len(points(tmp_path)["loss/actor"]) == 2  # what is there already stays


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
    assert len(list((tmp_path / "events").iterdir())) == 1


def test_the_axis_of_tensorboard_is_another_than_the_iteration(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        for iteration in (1, 2, 3):
            writer.write(iteration, {"a": iteration}, step=1000 * iteration)
    assert points(tmp_path) == {"a": [(1000, 1.0), (2000, 2.0), (3000, 3.0)]}
    with Writer(tmp_path) as writer:
        writer.trim(2)
        assert writer.rows == 2
    assert points(tmp_path) == {"a": [(1000, 1.0), (2000, 2.0)]}
    assert read_metrics(tmp_path) == [{"iteration": i, "step": 1000 * i, "a": i} for i in (1, 2)]


def test_events_follow_from_the_lines_alone(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for file in (tmp_path / "events").iterdir():
        file.write_bytes(b"damaged")
    with Writer(tmp_path) as writer:
        writer.trim(2)
    assert points(tmp_path)["loss/actor"] == [(1, 1.0), (2, 2.0)]


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
    with Writer(tmp_path) as writer:
        writer.trim(0)
    assert read_metrics(tmp_path) == [] and points(tmp_path) == {}


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with (
        Writer(tmp_path / "run") as writer,
        pytest.raises(MetricsError, match=r"\(Not a directory\); make it writable"),
    ):
        writer.write(1, {"a": 1.0})


# Console

INFO: dict[str, Any] = {
    "fraction": 0.25,
    "iteration": 250,
    "iterations": 1000,
    "env_steps": 1_234_567,
    "env_steps_per_second": 85_123.0,
    "updates": 1250,
    "updates_per_second": 3.21,
    "return": 0.5,
    "environment": {"entropy": 0.41},
    "losses": {"actor": -0.00123},
    "memory": 3 * 2**29,
    "memory_limit": 139 * 2**30,
    "utilisation": 0.87,
}
SHOWN = [
    "25.0%",
    "250 of 1,000",
    "1.23 M",
    "85.1 k",
    "1.25 k",
    "3.21",
    "0.41",
    "-0.00123",
    "1.5 GiB of 139.0 GiB",
    "87%",
]


def test_plain_lines() -> None:
    stream = io.StringIO()
    with Console("coma on coverage", stream, every=0.0) as shown:
        shown.say("compiled in 12.3 s")
        shown.block(INFO)
        shown.block({})
    sentence, line, _ = stream.getvalue().split("\n", 2)
    assert sentence == "compiled in 12.3 s"
    assert all(text in line for text in SHOWN), line
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_are_not_too_many_but_first_last_and_evaluations_are_there() -> None:
    stream = io.StringIO()
    with Console("title", stream, every=3600.0) as shown:
        for iteration in range(1, 11):
            shown.block({"iteration": iteration} | ({"evaluation": {"f1": 0.9}} if iteration == 5 else {}))
    lines = stream.getvalue().splitlines()
    assert lines == ["iteration 1", "iteration 5  | evaluation: f1 0.9", "iteration 10"]


def test_live_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    with Console("coma on coverage", stream, live=True) as shown:
        shown.say("a sentence above [the panel]")
        shown.block(INFO | {"evaluation": {"f1": 0.777}})
        shown.block(INFO)
    last = stream.getvalue().rsplit("coma on coverage", 1)[1]
    for text in [*SHOWN, "0.777"]:
        assert text in last
    assert "a sentence above [the panel]" in stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("env", registered())
def test_the_panel_fits_a_terminal(env: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 lines, with all that a GPU, training and evaluation tell; no label is cut."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "24")
    spec = make(env).spec
    metrics = dict.fromkeys(spec.metrics, -1234.5)
    info = INFO | {"seconds_left": 7500, "power": 612.0, "losses": {"actor_loss": -0.00123, "critic_loss": 0.4567}}
    stream = io.StringIO()
    with Console("title", stream, live=True, label=spec.label) as shown:
        shown.block(info | {"environment": metrics, "evaluation": metrics | {"return": 0.25, "length": 12.5}})
    lines = re.sub(r"\x1b\[[\d;?]*\w", "", "╭" + stream.getvalue().rsplit("╭", 1)[1]).splitlines()
    lines = [line for line in lines if line.strip()]
    assert len(lines) <= 24 and max(map(len, lines)) == width and lines[-1].startswith("╰")
    for name in metrics:
        words, _, unit = spec.label(name).partition(", ")
        (line,) = [line for line in lines if re.search(rf"(│|  ) ?{re.escape(words)}  ", line)]
        assert line.count(f"-1234 {unit}".rstrip()) == 2, line


def test_plain_lines_of_a_terminal_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with Console("title", stream) as shown:
        shown.block(INFO)
    lines = stream.getvalue().splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 80
    whole = io.StringIO()
    with Console("title", whole) as shown:
        shown.block(INFO)
    assert stream.getvalue().split() == whole.getvalue().split() and whole.getvalue().count("\n") == 1


def test_metrics_have_the_environments_names_and_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    label = make("coverage", q=2).spec.label
    info = {"environment": {"roi_coverage": 0.25}, "evaluation": {"entropy": 0.5}, "losses": {"actor_loss": 0.125}}
    for live in (False, True):
        stream = io.StringIO()
        with Console("title", stream, live=live, label=label) as shown:
            shown.block(info)
        words = " ".join(re.sub(r"\x1b\[[\d;?]*\w|[│╭╮╰╯─]", " ", stream.getvalue()).split())
        for text in ("share of region seen 0.25", "entropy in region 0.5 bit", "actor loss 0.125"):
            assert text in words, (live, words)


def test_long_work_tells_how_long_it_has_gone_on() -> None:
    stream, threads = io.StringIO(), set(threading.enumerate())
    with Console("title", stream, patience=0.01) as shown, shown.working("compiling"):
        while stream.getvalue().count("\n") < 3:
            time.sleep(0.01)
        shown.say("compiled a part")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["compiling ...", "compiling ... 0 s"] and "compiled a part" in lines
    assert set(threading.enumerate()) <= threads


def test_long_work_in_a_terminal_counts_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    now = [100.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    with Console("title", stream, live=True) as shown:
        with shown.working("compiling"):
            now[0] += 75.0
            shown.say("compiled a part")  # which draws anew what is below
        shown.block({"iteration": 1})
    assert "compiling ... 1 min 15 s" in stream.getvalue()
    assert "compiling" not in stream.getvalue().rsplit("title", 1)[1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the console's time in seconds, as the only item of a list."""
    now = [100.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_progress_in_an_iteration_is_written_at_once_and_then_now_and_then(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "jaxrl"), Console("title", stream) as shown, Log() as log:
        for done in range(0, 768, 8):  # one second each
            for report in (shown, log):
                report.progress("iteration 3: learning", done, 768, "minibatches", (768 - done) / 8)
            clock[0] += 1.0
    expected = [
        "iteration 3  learning: 0 of 768 minibatches  left 1 min 36 s",
        "iteration 3  learning: 120 of 768 minibatches  left 1 min 21 s",
        "iteration 3  learning: 240 of 768 minibatches  left 1 min 06 s",
        "iteration 3  learning: 360 of 768 minibatches  left 51 s",
        "iteration 3  learning: 480 of 768 minibatches  left 36 s",
        "iteration 3  learning: 600 of 768 minibatches  left 21 s",
        "iteration 3  learning: 720 of 768 minibatches  left 6 s",
    ]
    assert Console.LOG_SECONDS == Log.LOG_SECONDS == 15.0
    assert stream.getvalue().splitlines() == expected
    assert [record.message for record in caplog.records] == expected


def test_progress_is_not_written_right_after_a_block(clock: list[float]) -> None:
    stream = io.StringIO()
    with Console("title", stream) as shown:
        shown.block({"iteration": 1})
        for iteration in (2, 3):
            shown.progress(
                f"iteration {iteration}: rolling out", 512, 4096, "episodes", None
            )  # first of a run: at once
            clock[0] += 20.0
            shown.block({"iteration": iteration})
        clock[0] += 14.0
        shown.progress("iteration 4: rolling out", 512, 4096, "episodes", None)
        clock[0] += 1.0
        shown.progress("iteration 4: rolling out", 1024, 4096, "episodes", None)
    assert stream.getvalue().splitlines() == [
        "iteration 1",
        "iteration 2  rolling out: 512 of 4,096 episodes",
        "iteration 2",
        "iteration 3",
        "iteration 4  rolling out: 1,024 of 4,096 episodes",
    ]


@pytest.mark.parametrize("left", [None, float("nan"), float("inf")])
def test_progress_without_a_known_end(left: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for live in (False, True):
        stream = io.StringIO()
        with Console("title", stream, live=live) as shown:
            shown.progress("evaluation", 0, 0, "episodes", left)
        assert "0 of 0 episodes" in stream.getvalue() and "left" not in stream.getvalue()


@pytest.mark.parametrize("width", [40, 120])
def test_progress_is_a_bar_below_the_panel_until_the_next_block(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    with Console("title", stream, live=True) as shown:

        def screen() -> list[str]:
            """Return the lines that are drawn last, without control sequences."""
            shown.say("draw again")
            last = stream.getvalue().rsplit("\x1b[2K", 1)[-1]
            return [line.rstrip() for line in re.sub(r"\x1b\[[\d;?]*\w", "", last).splitlines() if line.strip()]

        shown.progress("iteration 1: rolling out", 0, 4096, "missions", None)  # before any panel
        *words, bar = screen()
        assert " ".join(words) == "iteration 1: rolling out  0 of 4,096 missions" and bar.endswith(" 0.0%")
        shown.block({"iteration": 1})
        panel = screen()
        assert panel[0].startswith("╭") and panel[-1].startswith("╰")
        for done, share, left in ((0, " 0.0%", None), (1024, " 25.0%", 24.0), (5000, " 100.0%", 0.0)):
            shown.progress("iteration 2: rolling out", done, 4096, "missions", left)
            *words, bar = screen()[len(panel) :]
            expected = f"iteration 2: rolling out {done:,} of 4,096 missions" + (
                "" if left is None else f" left {left:.0f} s"
            )
            assert screen()[: len(panel)] == panel and " ".join(words).split() == expected.split()
            assert bar.startswith("━") and bar.endswith(share) and len(bar) <= width
        shown.block({"iteration": 1})
        assert screen() == panel


def test_time_left_counts_from_where_this_process_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    with Console("title", stream, every=0.0) as shown:
        shown.block({"fraction": 0.5})
        now[0] += 60.0
        shown.block({"fraction": 0.6})
        shown.block({"fraction": 0.6, "seconds_left": 5.0})
    assert stream.getvalue().splitlines() == ["done 50.0%", "done 60.0%  left 4 min 00 s", "done 60.0%  left 5 s"]


def test_time_left_is_that_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    with Console("title", stream, every=0.0) as shown:
        for phase, fraction in (("walk", 0.1), ("walk", 0.6), ("read", 0.2), ("read", 0.6)):
            shown.block({"phase": phase, "fraction": fraction})
            now[0] += 60.0
    assert stream.getvalue().splitlines() == [
        "phase walk  done 10.0%",
        "phase walk  done 60.0%  left 48 s",  # 0.4 at 0.5 per minute
        "phase read  done 20.0%",
        "phase read  done 60.0%  left 1 min 00 s",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (273_600, "3 d 4 h")],
)
def test_durations(value: float, text: str) -> None:
    assert console.format_duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (3.21, "3.21"), (999.7, "1 k"), (12_345, "12.3 k"), (4.56e6, "4.56 M"), (7e12, "7 T")],
)
def test_short_counts(value: float, text: str) -> None:
    assert console.format_si(value) == text


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
        return SimpleNamespace(gpu=self._kept(handle, 40), memory=99)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._kept(handle, 321_500)

    def _kept(self, handle: int, figure: int) -> int:
        if handle != 1003:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return figure


def fake_gpus(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    devices = [
        SimpleNamespace(
            platform="gpu",
            local_hardware_id=i,
            memory_stats=lambda i=i: {"bytes_in_use": 5 + i, "bytes_limit": 100},
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


def test_gpus_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, FakeNvml(fails=True))
    with gpu.Monitor() as monitor:
        assert monitor.read() == gpu.DeviceReading(6, 100, None, None)
