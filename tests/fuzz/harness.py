"""What the fuzzers share: a folder with runs and odd files, verbs called in process, and the judgement of what they do.

A verb is stopped where its computing would begin (the memory plan, an evaluator, a measurement): what comes before is
what looks at the user's input. That counts as exit code 0.
"""

import contextlib
import io
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from bench import compare, env_throughput, train_throughput
from bench.harness import measure, plots
from bench.studies import learning
from jaxrl.cli import collect, doctor, evaluate, export, render, train
from jaxrl.evaluation import simulator
from jaxrl.evaluation.policies import EvalPolicy
from jaxrl.runtime import diagnosis, memory_plan
from jaxrl.runtime import run as runs

TINY = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --devices 1 --total_env_steps 64"
SNAKES = (
    "--algo ddpg --env snakes_1v1 --num_envs 8 --devices 1 --total_env_steps 16 --hidden_size 4 --buffer_size 64 "
    "--batch_size 8 --learning_starts 8 --env_steps_per_update 8 --eval_every 0"
)
REACH = (
    "--algo sac --env reach --num_envs 8 --devices 1 --total_env_steps 16 --hidden_size 4 --buffer_size 64 "
    "--batch_size 8 "
    "--random_steps 8 --env_steps_per_update 8 --n_step 1 --horizon 4 --eval_every 0"
)
RUNS = {"tiny": TINY, "snakes": SNAKES, "reach": REACH}
COVERAGE = "--env coverage --q 4 --num_agents 2 --budget 2"
VERBS: dict[str, Callable[..., int]] = {
    "train": train.main,
    "evaluate": evaluate.main,
    "collect": collect.main,
    "render": render.main,
    "export": export.main,
    "doctor": doctor.main,
    "plots": plots.main,
    "env_throughput": env_throughput.main,
    "train_throughput": train_throughput.main,
    "compare": compare.main,
    "learning": learning.main,
}
SECONDS = 120  # after which a verb counts as one that does not answer
MOST_LINES, MOST_CHARACTERS = 12, 1000  # of stderr


class Computes(BaseException):
    """The verb has accepted its input and begins to compute."""


class Endless(BaseException):
    """The verb does not answer."""


def _computes(*args: Any, **kwargs: Any) -> NoReturn:
    raise Computes


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, made once."""
    folder = tmp_path_factory.mktemp("world")
    with contextlib.chdir(folder):
        for name, argv in RUNS.items():
            assert train.main([*argv.split(), "--runs", "made"]) == 0
            shutil.move(Path("made/latest").read_text().strip(), name)
        shutil.rmtree("made")
        Path("empty").mkdir()
        Path("folder.json").mkdir()
        Path("text").write_text("text\n")
        Path("text.npz").write_text("text\n")
        Path("text.pth").write_text("text\n")
        Path("text.json").write_text("{}")
        Path("nothing").write_bytes(b"")
        Path("bytes.yaml").write_bytes(bytes(range(256)))
        Path("small.yaml").write_text(
            "algo: helpers.tiny:TinyQ\nenv: helpers.tiny:Corridor\nnum_envs: 8\ntotal_env_steps: 64\n"
        )
        Path("result.json").write_text(json.dumps({"format": measure.FORMAT, "kind": "env_throughput"}))
        np.savez("arrays.npz", a=np.zeros(3))
        os.mkfifo("pipe.json")
        Path("link.json").symlink_to("pipe.json")
        Path("away").symlink_to("nowhere")
    return folder


@pytest.fixture
def world(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(made)
    monkeypatch.setattr(runs, "_compile", _computes)
    monkeypatch.setattr(memory_plan, "rollout_env_bytes", lambda env: 1000)
    monkeypatch.setattr(memory_plan, "make_plan", _computes)
    monkeypatch.setattr(EvalPolicy, "evaluator", _computes)
    monkeypatch.setattr(simulator, "play", _computes)
    monkeypatch.setattr(diagnosis, "checks", _computes)
    monkeypatch.setattr(measure, "fresh_compiles", _computes)
    monkeypatch.setenv("COLUMNS", "80")
    return made


def contents(folder: Path) -> dict[str, tuple[Any, ...]]:
    """What stands in a folder, without the locks of runs."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if name != ".lock":
                path = os.path.join(root, name)
                about = os.lstat(path)
                own = (about.st_size, about.st_mtime_ns, about.st_ino) if name in files else ()
                found[path] = (about.st_mode, *own)
    return found


def call(verb: str, argv: Sequence[str], folder: Path, outcomes: Counter[str]) -> None:
    """Call a verb, judge it, and remove what it has made."""
    before = contents(folder)
    out, err = io.StringIO(), io.StringIO()

    def endless(number: int, frame: Any) -> NoReturn:
        raise Endless(f"{verb} {argv} has not answered in {SECONDS} s")

    former = signal.signal(signal.SIGALRM, endless)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = VERBS[verb](list(argv))
    except SystemExit as ended:  # --help
        code = ended.code
    except Computes:
        code = "computes"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    text, what = err.getvalue(), f"{verb} {argv}"
    after = contents(folder)
    changed = [path for path, about in before.items() if after.get(path) != about]
    fresh = sorted(set(after) - set(before))
    for path in fresh:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.remove(path)
    assert code in (0, 1, 2, "computes"), f"{what}: exit code {code}"
    assert "Traceback" not in text, f"{what}: {text}"
    assert len(text.splitlines()) <= MOST_LINES and len(text) <= MOST_CHARACTERS, f"{what}: {text[:3000]}"
    if code in (1, 2):
        assert text.strip(), f"{what}: silent with exit code {code}"
        assert not fresh, f"{what}: refused, and yet it has made {fresh[:3]}"
    assert not changed, f"{what}: {changed[:3]} changed"
    outcomes[f"{verb} {code}"] += 1
    outcomes[f"exit code {0 if code == 'computes' else code}"] += 1


def told(outcomes: Counter[str], capsys: pytest.CaptureFixture[str], what: str) -> None:
    """Print the counts."""
    with capsys.disabled():
        codes = ", ".join(f"{name}: {outcomes[name]}" for name in sorted(outcomes) if name.startswith("exit"))
        verbs = ", ".join(f"{name}: {outcomes[name]}" for name in sorted(outcomes) if not name.startswith("exit"))
        print(f"\n{what}: {codes} ({verbs})")
