"""Runs by the real command's main, how they ended, and programs that runs of one configuration share."""

import dataclasses
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tensorboardX.proto.event_pb2 import Event, SessionLog

from bench.harness.state_digest import checkpoint_digest
from jaxrl.cli import train
from jaxrl.report.writer import read_metrics
from jaxrl.runtime import run as runs
from jaxrl.runtime.build import Run
from jaxrl.runtime.compiling import CompiledRun, RunCompiler, compile_run
from jaxrl.runtime.train_state import Position

# What a run may have otherwise with the same programs; how long schedules last is a setting of its own.
BESIDE = {"total_env_steps": 1, "max_seconds": 0.0, "log_every": 1, "checkpoint_every": 1, "runs": "runs"}


def run(argv: str, runs: Path) -> Path:
    """A new run by the real command's main; its directory."""
    assert train.main([*argv.split(), "--runs", str(runs)]) == 0
    return Path((runs / "latest").read_text().strip())


def resume(directory: Path, argv: str = "") -> None:
    assert train.main(["--resume", str(directory), *argv.split()]) == 0


def outcome(directory: Path) -> tuple[str, list[dict[str, Any]]]:
    """Digest of the newest state, and the metrics that do not depend on time."""
    return checkpoint_digest(directory / "checkpoints"), outcome_rows(directory)


def outcome_rows(directory: Path) -> list[dict[str, Any]]:
    """The metrics that do not depend on time."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(directory)]


def points(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """All points of all event files by tag, read as TensorBoard does.

    Files in the order of their names, an incomplete last record of a killed process skipped; a mark of a restart drops
    the points from its step on.
    """
    points_by_tag: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(directory.rglob("*tfevents*")):
        content, position = path.read_bytes(), 0
        while position + 8 <= len(content):
            (length,) = struct.unpack_from("<Q", content, position)
            if position + 16 + length > len(content):
                break
            event = Event.FromString(content[position + 12 : position + 12 + length])
            position += 16 + length
            if event.session_log.status == SessionLog.START:
                points_by_tag = {
                    tag: [point for point in tag_points if point[0] < event.step]
                    for tag, tag_points in points_by_tag.items()
                }
            for value in event.summary.value:
                points_by_tag.setdefault(value.tag, []).append((event.step, value.simple_value))
    return {tag: tag_points for tag, tag_points in points_by_tag.items() if tag_points}


@contextmanager
def shared_programs() -> Iterator[None]:
    """Sessions in here compile each configuration once, also when a run goes on: it gets what it may still need.

    A process of its own compiles again, to the same bits; that is not what tests within one process are about.
    """
    compiled_runs: dict[Any, CompiledRun] = {}

    def once(run: Run, inputs: Any, say: Any, position: Position | None = None, *_: int) -> CompiledRun:
        settings, phases = run.config.run, run.algo.phases
        places = (Position(), position or Position())
        whole, left = (place.remaining(phases, settings.num_envs, settings.total_env_steps) for place in places)
        init_from = "weights" if settings.init_from else ""
        sweep = re.sub("[^=, ]+(?=[, ]|$)", "value", settings.sweep)
        key = run.config.with_run(**BESIDE, init_from=init_from, sweep=sweep).to_yaml(), tuple(map(bool, whole))
        if key not in compiled_runs:
            compiled_runs[key] = compile_run(run, inputs, say)
        elif settings.sweep and position is None:  # only the start knows the values of a sweep
            start = RunCompiler(run, say).make_start(inputs)
            compiled_runs[key] = dataclasses.replace(compiled_runs[key], start=start)
        blocks = [
            block if iterations else None for block, iterations in zip(compiled_runs[key].blocks, left, strict=True)
        ]
        return dataclasses.replace(compiled_runs[key], blocks=blocks)

    with mock.patch.object(runs, "compile_run", once):
        yield


def check_resume(argv: str, folder: Path) -> None:
    """A run that is stopped after its first block and continued ends in the same bits as one that is not stopped."""
    with shared_programs():
        whole, stopped = run(argv, folder / "whole"), run(f"{argv} --max_seconds 1e-9", folder / "stopped")
        resume(stopped, "--max_seconds 0")
    assert outcome(stopped) == outcome(whole)
