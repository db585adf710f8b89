"""Folders of checkpoints damaged at random: 600 resumes of COMA, DDPG and SAC. Run with -m fuzz (-s shows the counts).

Each example copies a finished run, damages its checkpoints, resumes it and asks for its best policy. Whatever was done
to the files: the exit code is 0, 1 or 2, stderr holds at most 12 lines and 1,000 characters, no error of Python gets
out, every state that is read has the hash that was saved under its number, and what is passed over is named.
A run that goes on ends in the same bits and the same metrics as the one that was left alone.
"""

import collections
import contextlib
import dataclasses
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.harness.state_digest import digest
from jaxrl.algos.base import STANDARD, Custom
from jaxrl.cli import train
from jaxrl.cli.entry import exit_on_error
from jaxrl.runtime import load as loading
from jaxrl.runtime import run as runs
from jaxrl.runtime.build import CompiledRun, Run, build_run, compile_run
from jaxrl.runtime.checkpoint import Checkpoints
from scripts.kill_and_resume import SMALL, UNCOMMITTED, only_run, outcome

pytestmark = pytest.mark.fuzz

TOTAL = {"coma": 3200, "ddpg": 1280, "sac": 1280}  # environment steps of 40 iterations
EXAMPLES = 200  # of each algorithm
COUNTS: collections.Counter[str] = collections.Counter()


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that was left alone: its directory, final state and metrics, and hashes of what it saved by number."""

    run: Path
    outcome: Any
    states: dict[int, str]
    policies: dict[int, str]


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan and compile each configuration once."""
    setups: dict[str, Run] = {}
    programs: dict[str, CompiledRun] = {}

    def prepared(config: Any, resuming: bool = False, custom: Custom = STANDARD) -> Run:
        name = f"{config.plain()}"
        if name not in setups:
            setups[name] = build_run(config, resuming, custom)
        return setups[name]

    def compiled(setup: Run, inputs: Any, say: Any, *where: Any) -> CompiledRun:
        name = setup.config.algo
        if name not in programs:
            programs[name] = compile_run(setup, None, say)
        return programs[name]

    monkeypatch.setattr(runs, "build_run", prepared)
    monkeypatch.setattr(runs, "compile_run", compiled)


@pytest.fixture(scope="module", params=list(SMALL))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    monkeypatch = pytest.MonkeyPatch()
    quick(monkeypatch)
    runs = tmp_path_factory.mktemp("runs")
    total = str(TOTAL[request.param])
    flags = [*SMALL[request.param].split(), "--total_env_steps", total, "--eval_every", "320", "--runs", str(runs)]
    states, policies = {}, {}
    save = Checkpoints.save

    def noted(self: Checkpoints, step: int, state: Any, meta: Any, **more: Any) -> None:
        states[step], policies[step] = digest(state), digest(loading._without_optimizers(state.algo.replicated))
        save(self, step, state, meta, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", noted)
        assert train.main(flags) == 0
    run = only_run(runs)
    assert run is not None and len(states) >= 4
    yield Finished(run, outcome(run), states, policies)
    monkeypatch.undo()
    print(f"\n{request.param}: {dict(sorted(COUNTS.items()))}")
    COUNTS.clear()


# What is done to folders; `pick` chooses among what is there


def folders(checkpoints: Path) -> list[Path]:
    return sorted(path for path in checkpoints.glob("*") if path.is_dir() and not path.is_symlink())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    file = pick(files(pick(folders(checkpoints))))
    content = bytearray(file.read_bytes())
    if content:
        content[number % len(content)] ^= 1 << number % 8
        file.write_bytes(content)


def cut(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    file = pick(files(pick(folders(checkpoints))))
    file.write_bytes(file.read_bytes()[: number % (file.stat().st_size + 1)])


def grow(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    file = pick(files(pick(folders(checkpoints))))
    file.write_bytes(file.read_bytes() + b"[" * (number % 5000))


def remove(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    pick(files(pick(folders(checkpoints)))).unlink()


def nest(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    (pick(folders(checkpoints)) / pick(["manifest.json", "meta.json"])).write_text("[" * (number % 200_000))


def exchange(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    one, other = pick(folders(checkpoints)), pick(folders(checkpoints))
    if one != other:
        one.rename(checkpoints / "aside")
        other.rename(one)
        (checkpoints / "aside").rename(other)


def exchange_files(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    one, other, name = (
        pick(folders(checkpoints)),
        pick(folders(checkpoints)),
        pick(["arrays", "meta.json", "manifest.json"]),
    )
    if (one / name).exists() and (other / name).exists() and one != other:
        (one / name).rename(checkpoints / "aside")
        (other / name).rename(one / name)
        (checkpoints / "aside").rename(other / name)


def renumber(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    folder, name = pick(folders(checkpoints)), pick([str(number % 60), f"{number % 60:010d}", f"{number:010d}"])
    if not (folder.parent / name).exists():
        folder.rename(folder.parent / name)


def copy(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    folder, name = pick(folders(checkpoints)), pick([str(number % 60), f"{number % 60:010d}", f"{number:010d}", "٣"])
    target = checkpoints / name
    if not target.exists():
        shutil.copytree(folder, target)


def unfinished(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    folder = pick(folders(checkpoints))
    target = folder.with_name(folder.name.partition(".")[0] + UNCOMMITTED)
    if not target.exists():
        folder.rename(target)


def lose(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    shutil.rmtree(pick(folders(checkpoints)))


def replace(checkpoints: Path, pick: Callable[[Any], Any], number: int) -> None:
    folder = pick(folders(checkpoints))
    shutil.rmtree(folder)
    kind = pick(["file", "folder", "link", "nowhere"])
    if kind == "file":
        folder.write_bytes(b"x" * (number % 100))
    elif kind == "folder":
        folder.mkdir()
    else:
        folder.symlink_to(pick(folders(checkpoints)) if kind == "link" and folders(checkpoints) else "nowhere")


HARMS = (flip, flip, cut, grow, remove, nest, exchange, exchange_files, renumber, copy, unfinished, lose, replace)


@settings(
    max_examples=EXAMPLES, derandomize=True, database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(data=st.data(), harms=st.lists(st.sampled_from(HARMS), min_size=1, max_size=3))
def test_damaged_checkpoints(finished: Finished, data: st.DataObject, harms: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        shutil.copytree(finished.run, run)

        def pick(things: list[Any]) -> Any:
            index = data.draw(st.integers(0, 99))
            return things[index % len(things)] if things else [][index]

        for harm in harms:
            with contextlib.suppress(IndexError):  # nothing left of what it wants
                harm(run / "checkpoints", pick, data.draw(st.integers(0, 10**6)))
        check(finished, run)


def check(finished: Finished, run: Path) -> None:
    """Resume the run, ask for its best policy, and see what both say and do."""
    loaded: list[int] = []
    restore = Checkpoints.restore

    def noted(self: Checkpoints, *arguments: Any, **more: Any) -> Any:
        step, state, meta = restore(self, *arguments, **more)
        whole = more.get("prefix") is None
        saved = (finished.states if whole else finished.policies).get(step)
        assert digest(state) == saved, f"another {'state' if whole else 'policy'} than that of {step}"
        loaded.extend([step] * whole)
        return step, state, meta

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "restore", noted)
        COUNTS["policy " + said(exit_on_error(lambda argv: loading.load_policy(argv[0]) and 0), [str(run)])[0]] += 1
        there = [p.name for p in (run / "checkpoints").iterdir() if p.name.isdecimal()]
        above, out = said(train.main, ["--resume", str(run)])
    if loaded:  # what was passed over is named
        told = out.count("is damaged: ") + sum(int(n) for n in re.findall(r"(\d+) more are damaged", out))
        assert told >= sum(int(name) > loaded[0] for name in there), out
    if above == "exit code 0":
        found, rows = outcome(run)
        assert (found, rows) == finished.outcome
        above = (
            "the newest"
            if loaded == [max(finished.states)]
            else "an older one"
            if loaded
            else "started from the beginning"
        )
    COUNTS["resume: " + above] += 1


def said(verb: Callable[[list[str]], int], argv: list[str]) -> tuple[str, str]:
    """What a verb ended with, and its output."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = verb(argv)
    text = errors.getvalue()
    assert code in (0, 1, 2), text
    assert text.count("\n") <= 12 and len(text) <= 1000 and "Traceback" not in text, text
    assert (code == 0) or text.count("error: ") == 1, text
    return f"exit code {code}", out.getvalue()
