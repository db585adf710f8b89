"""`--profile`: a trace that readers can open, times that add up, and a run that it does not change."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.runs import outcome, resume, run, shared_programs

from jaxrl.report import profile

FLAGS = (
    "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --devices 1 --total_env_steps 1280 "
    "--block_iterations 4"
)


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    with shared_programs():
        yield


def test_a_traced_run_is_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, traced = run(FLAGS, tmp_path / "a"), run(f"{FLAGS} --profile", tmp_path / "b")
    assert outcome(traced) == outcome(plain)
    settings = [(directory / "config.yaml").read_text().partition("runs:")[0] for directory in (plain, traced)]
    assert settings[0] == settings[1] and "profile" not in settings[0]
    printed, folder = capsys.readouterr().out, traced / "profile"
    title, _, listed = (folder / "operations.txt").read_text().partition("\n\n")
    assert title == profile.TITLE and f"ms, in {folder}:\n{listed}" in printed
    (trace,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [line.split()[0] for line in listed.splitlines()[1:]]
    assert 1 <= len(names) <= profile.MOST and set(names) <= {event.get("name") for event in events}
    assert not (plain / "profile").exists()


def test_a_resumed_run_can_be_traced(tmp_path: Path) -> None:
    whole = run(FLAGS, tmp_path / "a")
    half = run(FLAGS.replace("1280", "640"), tmp_path / "b")
    resume(half, "--total_env_steps 1280 --profile")
    assert outcome(half)[0] == outcome(whole)[0]
    assert (half / "profile" / "operations.txt").exists()


def test_training_goes_on_where_no_trace_can_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with jax.profiler.trace(str(tmp_path / "other")):  # there can be only one at a time
        directory = run(f"{FLAGS} --profile", tmp_path)
    printed = capsys.readouterr().out
    assert "warning: no profile: Profile has already been started." in printed
    assert "finished at iteration" in printed and not (directory / "profile").exists()
    run(f"{FLAGS.replace('1280', '128')} --profile", tmp_path)
    assert "warning: no profile: no phase that learns had more than 3 blocks" in capsys.readouterr().out


def test_training_goes_on_where_a_trace_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = jax.profiler.stop_trace

    def damage() -> None:
        stop()
        for trace in tmp_path.rglob("*.xplane.pb"):
            trace.write_bytes(b"\xff" * 100)

    monkeypatch.setattr(jax.profiler, "stop_trace", damage)
    run(f"{FLAGS} --profile", tmp_path)
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "warning: no profile: the trace " in printed and "cannot be read" in printed and "finished at" in printed


def test_calls_and_seconds_of_a_known_program(tmp_path: Path) -> None:
    def multiply(x: Any) -> Any:
        with jax.named_scope("seven_products"):
            return jax.lax.fori_loop(0, 7, lambda _, x: x @ x / 512.0, x)

    ones = jnp.ones((512, 512))
    program = jax.jit(multiply).lower(ones).compile()
    result, found = profile.record(lambda: program(ones), tmp_path, program.as_text())
    assert found.problem == "" and result.shape == (512, 512)
    first = found.operations[0]
    assert first.calls == 7 and first.origin.startswith("seven_products/"), first
    assert sum(operation.share for operation in found.operations) == pytest.approx(1.0)
    assert 0.0 < sum(operation.seconds for operation in found.operations) <= found.seconds


def plane(name: str, **lines: list[tuple[str, int, int]]) -> SimpleNamespace:
    """(name, begin, nanoseconds) of each event of each line."""
    rows = [
        SimpleNamespace(
            name=line,
            events=[
                SimpleNamespace(name=event, start_ns=begin, duration_ns=length, stats=[("hlo_op", event)])
                for event, begin, length in events
            ],
        )
        for line, events in lines.items()
    ]
    return SimpleNamespace(name=name, lines=rows)


def test_operations_inside_others_are_not_counted_twice() -> None:
    thread = [("while", 0, 1000), ("add", 100, 200), ("call", 400, 500), ("add", 500, 100), ("sine", 1000, 300)]
    found = profile.operations([plane("/host:CPU", thread=thread, other=[("add", 0, 50)])], {"add": "jit(f)/while/x/y"})
    assert [(op.name, op.calls, round(1e9 * op.seconds)) for op in found] == [
        ("call", 1, 400), ("add", 3, 350), ("while", 1, 300), ("sine", 1, 300)
    ]  # fmt: skip
    assert found[1].origin == "x/y" and found[1].share == pytest.approx(350 / 1350)


def test_kernels_of_a_gpu_are_read_from_its_streams() -> None:
    gpu = plane("/device:GPU:0", **{"Stream #1": [("gemm", 0, 500), ("add", 500, 100)], "XLA Ops": [("dot", 0, 600)]})
    found = profile.operations([gpu, plane("/host:CPU", thread=[("launch", 0, 700)])], {})
    assert [(op.name, op.share) for op in found] == [("gemm", pytest.approx(5 / 6)), ("add", pytest.approx(1 / 6))]
