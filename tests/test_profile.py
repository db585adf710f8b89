"""`--profile`: a trace that readers can open, and a run that it does not change."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from helpers.runs import outcome, resume, run, shared_programs

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
    printed, folder = " ".join(capsys.readouterr().out.split()), traced / "profile"
    assert f"ms: tensorboard --logdir {folder} " in printed
    (trace,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("args", {}).get("hlo_op") for event in events)
    assert not (plain / "profile").exists()


def test_a_resumed_run_can_be_traced(tmp_path: Path) -> None:
    whole = run(FLAGS, tmp_path / "a")
    half = run(FLAGS.replace("1280", "640"), tmp_path / "b")
    resume(half, "--total_env_steps 1280 --profile")
    assert outcome(half)[0] == outcome(whole)[0]
    assert list((half / "profile").rglob("*.xplane.pb"))


@pytest.mark.long
def test_training_goes_on_where_no_trace_can_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with jax.profiler.trace(str(tmp_path / "other")):  # there can be only one at a time
        directory = run(f"{FLAGS} --profile", tmp_path)
    printed = capsys.readouterr().out
    assert "warning: no profile: Profile has already been started." in printed
    assert "finished at iteration" in printed and not (directory / "profile").exists()
    run(f"{FLAGS.replace('1280', '128')} --profile", tmp_path)
    assert "warning: no profile: no phase that learns had more than 3 blocks" in capsys.readouterr().out
