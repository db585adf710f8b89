"""Tables of what was measured on a kind of device: automatic values take what fits, and runs keep what they took."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.runs import outcome, resume, run

from bench.gpu import job, tuning
from bench.harness.timing import Timing
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UsageError
from jaxrl.runtime import memory_plan, tuned
from jaxrl.runtime.build import Run, build_run, unchecked_run
from jaxrl.runtime.config import Config
from jaxrl.runtime.memory_plan import GIB

COMA = (
    "--algo coma --q 5 --num_agents 2 --budget 2 --hidden_size 4 --num_envs 64 --minibatch_size 76 --total_episodes 64 "
    "--devices 1"
)
TINY = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --devices 1 --total_env_steps 128"
OPTION = "xla_llvm_disable_expensive_passes=true"


def setup_of(argv: str = COMA, resuming: bool = False) -> Run:
    return unchecked_run(parse(argv.split()).config, resuming)


@pytest.fixture(scope="module")
def plain() -> Run:
    """Of the tiny main job, where nothing is measured."""
    return setup_of()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only table."""
    monkeypatch.setattr(tuned, "files", lambda: [tmp_path / "tuned.json"])
    return tmp_path / "tuned.json"


def write(table: Path, setup: Run, kind: str = "cpu", **entry: Any) -> None:
    tuned.record(tuned.job(setup.config, setup.env, setup.algo, kind), entry, table, lambda sentence: None)


def test_automatic_values_are_those_that_were_measured(plain: Run, table: Path) -> None:
    assert (plain.config.run.rollout_chunk, plain.config.run.compiler_options) == (64, "")
    write(table, plain, rollout_chunk=4)
    write(table, plain, learn_chunk=8, compiler_options=OPTION)
    found = setup_of()
    assert (found.config.run.rollout_chunk, found.config.run.learn_chunk) == (4, 8)
    assert found.trainer.rollout_chunk == 4 and found.trainer.layout.learn_chunk == 8
    assert found.config.run.compiler_options == OPTION
    assert found.trainer.layout.compiler_options == {"xla_llvm_disable_expensive_passes": True}
    note = f"rollout_chunk 4, learn_chunk 8, compiler_options {OPTION}"
    assert f"tuned settings for cpu, as far as memory allows: {note}" in found.notes
    given = setup_of(f"{COMA} --rollout_chunk 16 --learn_chunk 12 --compiler_options=").config.run
    assert (given.rollout_chunk, given.learn_chunk, given.compiler_options) == (16, 12, "")
    exact = setup_of(f"{COMA} --exact_sharding").trainer.layout.compiler_options
    assert list(exact) == ["xla_disable_hlo_passes"]


def test_other_devices_and_other_sizes_take_nothing(plain: Run, table: Path) -> None:
    write(table, plain, kind="NVIDIA H200", rollout_chunk=4)
    assert setup_of().config == plain.config
    write(table, plain, rollout_chunk=4)
    assert setup_of().config.run.rollout_chunk == 4
    assert setup_of(COMA.replace("--q 5", "--q 6")).config.run.rollout_chunk == 64
    assert setup_of(COMA.replace("--hidden_size 4", "--hidden_size 8")).config.run.rollout_chunk == 64


@pytest.mark.parametrize(
    "entry",
    [
        {"rollout_chunk": 5, "learn_chunk": 7},  # divide nothing
        {"rollout_chunk": -4, "learn_chunk": -8},
        {"rollout_chunk": "4", "learn_chunk": 8.0, "compiler_options": 3},
        {"rollout_chunk": True, "rollout_timing": 4},
    ],
)
def test_what_cannot_be_used_is_left_out(entry: dict[str, Any], plain: Run, table: Path) -> None:
    write(table, plain, **entry)
    assert setup_of().config == plain.config


def test_what_does_not_fit_is_left_out(plain: Run, table: Path) -> None:
    small = f"{COMA} --memory_gb {plain.plan.total * 1.05 / GIB}"
    planned = setup_of(small).config.run.rollout_chunk
    assert planned < 64
    write(table, plain, rollout_chunk=64)
    assert setup_of(small).config.run.rollout_chunk == planned
    write(table, plain, rollout_chunk=planned // 2)
    assert setup_of(small).config.run.rollout_chunk == planned // 2


@pytest.mark.parametrize("content", ["{", "[1]", '{"cpu": 3}', '{"JOB": [4]}'])
def test_damaged_tables(content: str, plain: Run, table: Path) -> None:
    name = tuned.job(plain.config, plain.env, plain.algo)
    table.write_text(content.replace("JOB", name))
    found = setup_of()
    assert found.config == plain.config
    warned = f"warning: {table} cannot be read, or holds no mapping, and is ignored: delete it" in found.notes
    assert warned == (content in ("{", "[1]"))
    write(table, plain, rollout_chunk=4)
    assert json.loads(table.read_text())[name] == {"rollout_chunk": 4}


def test_the_users_table_outdoes_the_packaged_one(plain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(tuned.PACKAGED.read_text()) is not None
    monkeypatch.setattr(tuned, "PACKAGED", tmp_path / "packaged.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tuned, "cache_folder", lambda: tmp_path / "here")
    packaged, home, here = tuned.files()
    assert (home, here) == (tmp_path / "home" / "jaxrl" / "tuned.json", tmp_path / "here" / "tuned.json")
    job = (plain.config, plain.env, plain.algo)
    tuned.record(tuned.job(*job), {"rollout_chunk": 1, "learn_chunk": 1}, packaged, pytest.fail)
    tuned.record(tuned.job(*job), {"learn_chunk": 2, "compiler_options": "a=1"}, home, pytest.fail)
    tuned.record(tuned.job(*job), {"compiler_options": "a=2"}, here, pytest.fail)
    assert tuned.find(*job, pytest.fail) == tuned.Tuned(1, 2, "a=2")


def test_a_resumed_run_keeps_what_it_began_with(plain: Run, table: Path, tmp_path: Path) -> None:
    write(table, plain, rollout_chunk=4, learn_chunk=8, compiler_options=OPTION)
    assert unchecked_run(plain.config, resuming=True).config == plain.config
    assert setup_of(resuming=True).config.run.compiler_options == ""  # of a run that is older than this setting
    write(table, setup_of(TINY), compiler_options=OPTION)
    directory = run(TINY, tmp_path / "cut")
    table.unlink()
    resume(directory, "--total_env_steps 192")
    assert yaml.safe_load((directory / "config.yaml").read_text())["compiler_options"] == OPTION
    whole = f"{TINY} --total_env_steps 192 --schedule_env_steps 128 --compiler_options {OPTION}"
    assert outcome(run(whole, tmp_path / "whole")) == outcome(directory)


def test_options_of_the_compiler() -> None:
    text = "xla_gpu_enable_command_buffer=FUSION,CUBLAS xla_gpu_graph_min_graph_size=1 xla_gpu_triton_gemm_any=true"
    options = tuned.parse_options(f"--{text}")
    assert options == {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS",
        "xla_gpu_graph_min_graph_size": "1",
        "xla_gpu_triton_gemm_any": True,
    }
    assert tuned.write_options(options) == text
    assert tuned.known_options(text) == (text, [])
    taken, refused = tuned.known_options("xla_no_such_option=1 xla_gpu_triton_gemm_any=false")
    assert taken == "xla_gpu_triton_gemm_any=false"
    why = "No such compile option: 'xla_no_such_option'"
    assert refused == [f"the compiler option xla_no_such_option cannot be used here ({why})"]


def test_options_that_the_compiler_does_not_take(table: Path) -> None:
    flag = "--compiler_options=xla_no_such_option=1"
    with pytest.raises(UsageError, match=r"xla_no_such_option cannot be used here \(.*: remove it from --compiler_opt"):
        setup_of(f"{TINY} {flag}")
    with pytest.raises(UsageError, match="exact_sharding chooses the compiler's passes: remove xla_disable_hlo_passes"):
        setup_of(f"{TINY} --exact_sharding --compiler_options=xla_disable_hlo_passes=algsimp")
    with pytest.raises(UsageError, match="compiler_options: 'fast' is not an option: write name=value"):
        setup_of(f"{TINY} --compiler_options fast")
    found = setup_of(f"{TINY} {flag}", resuming=True)  # by another version than the run began with
    assert found.config.run.compiler_options == "xla_no_such_option=1" and "it is ignored" in found.notes[-1]
    assert found.algo.layout.options == ()
    # a number for the compilers that have it, an unknown option for later ones
    with pytest.raises(UsageError, match=r"_effort cannot be used here \((.high. is of the|No such)"):
        setup_of(f"{TINY} --compiler_options=memory_fitting_effort=high")
    write(table, found, compiler_options="fast")  # no option at all
    assert setup_of(TINY).config.run.compiler_options == ""
    write(table, found, compiler_options="xla_no_such_option=1")
    found = setup_of(TINY)
    assert found.config.run.compiler_options == "" and "it is ignored" in found.notes[-1]


# What the benchmark writes


@pytest.mark.parametrize(
    ("usual", "other", "best"),
    [
        ((3.0, 3.1, 3.2), (2.0, 2.1, 2.2), "other"),
        ((3.0, 3.1, 3.2), (2.9, 3.0, 3.1), "usual"),
        ((3.0, 3.1, 3.2), (1.0, 2.1, 9.9), "usual"),
        ((1.0, 3.1, 9.9), (2.0, 2.1, 2.2), "usual"),
        ((2.0, 2.1, 2.2), (3.0, 3.1, 3.2), "usual"),
    ],
)
def test_only_what_beats_the_spread_wins(usual: Any, other: Any, best: str) -> None:
    assert tuning.winner({"usual": Timing(usual), "other": Timing(other)}, "usual") == best


def test_what_wins_is_taken_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tuned, tuning):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(job.QUICK, "coma", TINY)
    monkeypatch.setattr(tuning, "winner", lambda timings, usual: "second")
    changes = {"first": {}, "second": {"compiler_options": OPTION}, "third": {"compiler_options": "xla_none=1"}}
    free = itertools.count(100 * memory_plan.GIB, -memory_plan.GIB)  # a device fills up while candidates are compiled
    monkeypatch.setattr(memory_plan, "free_memory", lambda *_: next(free))
    made: list[tuple[Any, ...]] = []

    def watched(config: Config) -> Run:
        setup = build_run(config)
        made.append((setup.plan.limit, setup.config.run.rollout_chunk, setup.config.run.learn_chunk))
        return setup

    monkeypatch.setattr(tuning, "build_run", watched)
    found = tuning._compare("coma", changes, quick=True, keep=True)
    assert list(found["seconds"]) == list(found["compile_seconds"]) == ["first", "second"]
    assert len(made) >= 2 and len(set(made)) == 1  # all are laid out alike
    assert "xla_none" in found["skipped"]["third"]
    assert list(found["kept"].values()) == [{"compiler_options": OPTION}]
    assert setup_of(TINY).config.run.compiler_options == OPTION
    assert (tmp_path / "cache" / "tuned.json").exists() and not (tmp_path / "home").exists()


@pytest.mark.parametrize("job", list(tuning.JOBS))
def test_jobs_are_configurations(job: str) -> None:
    assert parse(tuning.JOBS[job].split()).config.algo == job
    for text in tuning.all_options().values():
        assert tuned.known_options(text) == (text, [])
