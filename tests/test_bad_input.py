"""Wrong input: one sentence on stderr that says what is wrong and how to mend it, the exit code, nothing written."""

import dataclasses
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.cases import by_day
from helpers.tiny import Corridor

import bench.harness.measure
from envs_jax import EnvSpec
from envs_jax.snakes import spawn
from jaxrl.cli import evaluate, render, train
from jaxrl.cli.flags import parse
from jaxrl.common import errors, files
from jaxrl.common.errors import UserError
from jaxrl.runtime import run_directory

ROOT = Path(__file__).parents[1]
TINY = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --devices 1 --total_env_steps 64"
DDPG = "--algo ddpg --num_envs 8 --devices 1 --total_env_steps 64 --memory_gb 8"
SAC = (
    "--algo sac --env helpers.tiny:PointMass --hidden_size 8 --num_envs 8 --devices 1 --total_env_steps 64 "
    "--memory_gb 8"
)
COMA = "--algo coma --q 5 --num_agents 2 --budget 3 --hidden_size 4 --num_envs 8 --devices 1 --total_episodes 16"

# What is wrong: (arguments, a part of the sentence). {run} is a finished run of TINY, {here} a folder with files.
USAGE = {
    "unknown flag": (f"{TINY} --num_env 8", "unknown flag '--num_env': did you mean '--num_envs'?"),
    "a flag of another algorithm": (f"{TINY} --teacher_weight 3", "'--teacher_weight' is a setting of student, not "
    "of '"),
    "a setting without a flag": ("--algo collective --resolved_inputs 3", "unknown flag '--resolved_inputs'"),
    "an algorithm without its flag": ("coma", "unexpected word 'coma': did you mean --algo coma?"),
    "capitals": ("--algo COMA", "unknown algorithm 'COMA': did you mean 'coma'?"),
    "a device": ("--algo sac --gpu", "unknown flag '--gpu': JAX finds a GPU by itself"),
    "an empty command line": ("", "say what to train"),
    "a seed that does not fit": (f"{TINY} --seed -1", "seed must lie between 0 and 4,294,967,295"),
    "num_envs and shards": (f"{TINY} --num_envs 6 --logical_shards 4", "6 is not divisible by logical_shards 4: use 8"),
    "minibatch and learn_chunk": (f"{COMA} --minibatch_size 64 --learn_chunk 3", "learn_chunk 3 does not divide"),
    "num_envs and devices": (f"{TINY} --num_envs 6 --devices 4", "use --devices 2, or --num_envs 8"),
    "no total": ("--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor", "say how long to train: --total_env_steps N"),
    "total 0": ("--config coma_quick --total_env_steps 0", "total_env_steps must be at least 1, not 0: leave it out"),
    "a former name": ("--algo coma --scale_advantage true", "did you mean '--normalize_advantage"),
    "another library's name": ("--algo ppo --gae_lambda 0.9", "unknown flag '--gae_lambda': did you mean '--td_lambda"),
    "another unit": ("--algo coma --checkpoint_minutes 5", "'--checkpoint_minutes': did you mean --checkpoint_every?"),
    "a setting that was there": ("--algo ppo --initial_std 1", "unknown flag '--initial_std': see --help for all of"),
    "another that was there": ("--algo coma --block_seconds 1", "'--block_seconds': did you mean '--block_iterations'"),
    "missions for a share": (f"{COMA} --eps_anneal 10000", "not 10000 (a share of the run: 0.1 is a tenth)"),
    "exploration that would rise": (f"{COMA} --eps_min 0.6", "eps_min 0.6 exceeds eps_max 0.1"),
    "unknown key": ("--config {here}/unknown_key.yaml", "unknown setting 'gama': did you mean 'gamma'?"),
    "not YAML": ("--config {here}/torn.yaml", "cannot read the configuration {here}/torn.yaml"),
    "another algorithm's preset": (
        "--algo helpers.tiny:TinyQ --config coma",
        "is for the algorithm 'coma', not 'helpers.tiny:TinyQ'",
    ),
    "the folder of checkpoints": ("--resume {run}/checkpoints", "no config.yaml); did you mean {run}?"),
    "no such run": ("--resume {run}9", "{run}9 does not exist; did you mean {run}?"),
    "a run as preset": ("--config {run}", "use --config {run}/config.yaml to start it again"),
    "resume with a preset": ("--resume {run} --config coma", "--resume takes algorithm, environment and settings from"),
    "resume with another gamma": ("--resume {run} --gamma 0.5", "gamma cannot change on resume (the run has 0.9"),
    "weights of another algorithm": (f"{SAC} --init_from {{run}}", "trained with 'helpers.tiny:TinyQ', not 'sac'"),
    "weights of other shapes": (f"{TINY} --length 5 --init_from {{run}}", "do not match: they were built with length"),
    "an observation that does not fit": (
        f"{DDPG} --observation obs35 --beans 4", "obs35 is published for 2 teams, 6 snakes and 5 beans, not 2, 6 and 4"
    ),
    "a batch larger than the replay": (f"{DDPG} --batch_size 2000 --buffer_size 800 --learning_starts 0",
    "2,000 exceeds the 8"),
    "a replay beyond all numbers": (f"{DDPG} --buffer_size 1{'0' * 12}", ": lower buffer_size"),
    "masks of another kind": ("--algo ddpg --env coverage", "give --masking false, which plays closed actions, too"),
    "weights of another scale": (
        f"{DDPG} --scale_observation false --init_from {{teams}}",
        "they were built with scale_observation True, but this run has scale_observation False",
    ),
    "less than was done": ("--resume {run} --total_env_steps 1", "and a total of 1 is less: raise --total_env_steps"),
    "weights of another observation": (
        f"{DDPG} --config ddpg_competition --observation obs26 --init_from {{teams}}",
        "observation obs_full, action_gradient expected, layer_norm True, but this run has observation obs26, acti",
    ),
    "coma without a critic's view": ("--algo coma --env test_bad_input:Blind --total_env_steps 9", "belong together"),
    "a port that is none": (
        f"{TINY} --coordinator localhost:99999 --num_hosts 2 --host_index 0", "must be HOST:PORT of host 0, such as"
    ),
    "a path as algorithm": ("--algo ../../x:Y", "algorithm '../../x:Y' is not a class: write module:Class"),
    "a long flag": (f"{TINY} --{'x' * 5000} 1", "unknown flag '--xxx"),
    "a long file of weights": (f"{TINY} --init_from {'x' * 5000}.pth", "use them with ddpg or bicnet"),
}  # fmt: skip
RUN_TIME = {
    "too little memory": (f"{TINY} --num_envs 100000 --memory_gb 0.001", "lower --num_envs from 100000 to about "),
    "far too little memory": (f"{TINY} --memory_gb 1e-6", "choose smaller networks, batches or environments"),
    "a replay larger than memory": (f"{SAC} --buffer_size 900000000", "lower --buffer_size from 900000000 to about "),
    "a long name of a folder": (f"{TINY} --runs {'x' * 300}", "(File name too long); choose another with --runs"),
    "a folder that takes none": (f"{TINY} --runs /proc/nope", "(no folder can be made in /proc: "),
    "a file in the way": (f"{TINY} --runs {{here}}/list.yaml", "({here}/list.yaml is not a directory)"),
}


@dataclasses.dataclass(frozen=True)
class Blind(Corridor):
    """A corridor that shows critics nothing."""

    @property
    def spec(self) -> EnvSpec:
        return dataclasses.replace(super().spec, critic_input=None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints."""
    runs = tmp_path_factory.mktemp("finished")
    assert train.main([*TINY.split(), "--runs", str(runs), "--checkpoint_every", "1"]) == 0
    return runs / "helpers.tiny-TinyQ_helpers.tiny-Corridor" / "0001"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files to go wrong with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unknown_key.yaml").write_text("algo: helpers.tiny:TinyQ\nenv: helpers.tiny:Corridor\ngama: 0.9\n")
    (tmp_path / "list.yaml").write_text("- algo\n- coma\n")
    (tmp_path / "torn.yaml").write_text("algo: [coma\n")
    (tmp_path / "teams").mkdir()
    run_directory.write_config(tmp_path / "teams", parse(f"{DDPG} --observation obs_full".split()).config.to_yaml())
    return tmp_path


def contents(*folders: Path) -> dict[Path, bytes]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if path.name != ".lock"}


def one_sentence(text: str, expected: str) -> None:
    lines = [line for line in text.splitlines() if not line.startswith("warning: checkpoint")]
    assert len(lines) == 1, text
    assert lines[0].startswith("error: ")
    assert expected in lines[0]
    assert len(lines[0]) <= 1000
    assert "Traceback" not in text


def check(
    argv: str | list[str], code: int, expected: str, run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = argv.split() if isinstance(argv, str) else argv
    words = [word.format(run=run, here=here, teams=here / "teams") for word in words]
    before = contents(run.parents[1], here)
    capsys.readouterr()
    assert train.main(words) == code
    one_sentence(capsys.readouterr().err, expected.format(run=run, here=here))
    assert contents(run.parents[1], here) == before


@pytest.mark.parametrize("what", by_day(USAGE, {*USAGE} - {"weights of another scale"}))
def test_usage(what: str, finished: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(USAGE[what][0], 2, USAGE[what][1], finished, here, capsys)


@pytest.mark.parametrize("what", RUN_TIME)
def test_run_time(what: str, finished: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(RUN_TIME[what][0], 1, RUN_TIME[what][1], finished, here, capsys)


def test_too_many_snakes_to_look_through(
    finished: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "_MOST_TRIED", 1000)
    check(f"{DDPG} --height 6 --width 6 --snakes 8", 2, "6 x 6 may have no room", finished, here, capsys)


@pytest.mark.parametrize(
    ("module", "argv", "code", "expected", "platform"),
    [
        ("jaxrl.train", "--algo comma", 2, "unknown algorithm 'comma': did you mean 'coma'?", "cpu"),
        pytest.param("jaxrl.train", "--resume nowhere", 2, "nowhere does not exist", "cpu", marks=pytest.mark.slow),
        ("jaxrl.train", "--algo coma", 1, "JAX cannot use JAX_PLATFORMS='abacus' here", "abacus"),
    ],
)
def test_the_real_command(module: str, argv: str, code: int, expected: str, platform: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": platform}
    command = [sys.executable, "-m", module, *argv.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout == ""
    one_sentence(done.stderr, expected)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_users_file_ends_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of JAX and of this project stand between: the last words of the traceback say where to look."""
    text = """import dataclasses
import jax.numpy as jnp
from helpers.tiny import Corridor

@dataclasses.dataclass(frozen=True)
class Mine(Corridor):
    def step(self, state, action, context=None):
        return jnp.zeros(2) + jnp.zeros(3)
"""
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError) as caught:
        train.main(["--algo", "ppo", "--env", "mine:Mine", "--total_env_steps", "64", "--runs", str(tmp_path / "runs")])
    assert caught.value.__notes__[-1] == "It comes from mine.py:8."


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_while_programs_are_compiled(number: signal.Signals, tmp_path: Path) -> None:
    """Threads that compile must not see the end of Python, which some of them answer with a segmentation fault."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    program = """if True:
        import runpy, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
        runpy.run_module("jaxrl.train", run_name="__main__")
    """
    command = [sys.executable, "-c", program, "--config", "coma_quick", "--runs", str(tmp_path / "runs")]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "compiling" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(2)  # on the way from tracing to compiling
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (128 + number, f"stopped by {number.name}, before anything was saved\n")
    assert not (tmp_path / "runs").exists()


# Runs that somebody has changed


@pytest.fixture
def run(finished: Path, here: Path) -> Path:
    """A run of its own for each test."""
    shutil.copytree(finished, here / "run")
    return here / "run"


def resume_fails(run: Path, expected: str, capsys: pytest.CaptureFixture[str], code: int = 1, *more: str) -> str:
    before = contents(run)
    capsys.readouterr()
    assert train.main(["--resume", str(run), *more]) == code
    captured = capsys.readouterr()
    one_sentence(captured.err, expected)
    assert contents(run) == before
    return captured.out


def test_all_checkpoints_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifests = sorted((run / "checkpoints").glob("*/manifest.json"))
    assert len(manifests) == 2
    for manifest in manifests:
        manifest.write_text("{}")
    newest = manifests[-1].parent
    sentence = f"no intact checkpoint in {newest.parent} (checkpoint {newest} is damaged: manifest.json cannot be used"
    assert "compiled" not in resume_fails(run, sentence, capsys)


@pytest.mark.parametrize(
    ("before", "after", "code", "sentence"),
    [
        ("capacity: 64", "capacity: 32", 1, "capacity was 64 and is 32 in config.yaml"),
        ("gamma: 0.9", "gamma: 0.8", 1, "gamma was 0.9 and is 0.8 in config.yaml"),
    ],
)
def test_a_changed_config(
    before: str, after: str, code: int, sentence: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(before, after))
    assert "compiled" not in resume_fails(run, sentence, capsys, code)


def test_a_damaged_line_of_metrics(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for damage in (b"{\xff}\n", b"{}\n", b"[1]\n"):
        path.write_bytes(b"".join([damage, *lines[1:]]))
        resume_fails(run, f"line 1 of {path} is damaged: fix or remove that line", capsys)


def test_a_run_in_use(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_directory.lock(run):
        resume_fails(run, f"is in use by process {os.getpid()}", capsys)


def test_resume_with_too_little_memory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume_fails(run, "resume it where more is free", capsys, 1, "--memory_gb", "1e-6", "--total_env_steps", "9999")


def test_no_permission(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "locked").mkdir(mode=0o555)
    if os.getuid() == 0:  # to whom everything is allowed
        monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert train.main([*TINY.split(), "--runs", "locked/runs"]) == 1
    one_sentence(capsys.readouterr().err, "locked: Permission denied); choose another with --runs")
    assert list((here / "locked").iterdir()) == []


def test_a_disk_that_is_full_when_the_run_begins(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_directory, "write_atomically", full)
    assert train.main(TINY.split()) == 1
    one_sentence(capsys.readouterr().err, "no run directory can be made under runs (No space left on device)")


# Files that a verb would write


def test_no_device_is_replaced_by_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(here / "pipe.json")
    os.mkfifo(here / "pipe.png")
    (here / "link.json").symlink_to(here / "pipe.json")
    policy = ["--env", "coverage", "--q", "4", "--num_agents", "2", "--policy", "random"]
    for verb, argv in (
        (evaluate.main, [*policy, "--json", "pipe.json"]),
        (evaluate.main, [*policy, "--out", "link.json"]),
        (evaluate.main, [*policy, "--json", "/dev/null"]),
        (render.main, [*policy, "--out", "pipe.png"]),
    ):
        assert verb(argv) == 1
        one_sentence(capsys.readouterr().err, "it is not a regular file")
    for path in (here / "pipe.json", here / "pipe.png"):
        assert stat.S_ISFIFO(path.stat().st_mode)
        with pytest.raises(OSError, match="not a regular file"):
            files.write_atomically(path, "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(UserError, match="not a regular file"):
        bench.harness.measure.output(str(here / "link.json"), "kind")


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    files.write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "new"


def test_a_sentence_is_a_line_for_any_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--algo", "a\n\x1b[2Jb" * 3000]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "\x1b" not in err and len(err) < 1000
    assert errors.one_line("a\nb\x1b" + "c" * 5000 + "end")[:5] == "a b?c"


def test_an_installed_command_finds_the_files_of_this_folder(tmp_path: Path) -> None:
    """As `python -m` does; Python itself looks only in the folder of the command."""
    (tmp_path / "own.py").write_text("")
    command = tmp_path / "bin" / "jaxrl-evaluate"
    command.parent.mkdir()
    command.write_text("from jaxrl.cli.evaluate import main\nmain()\n")
    arguments = [sys.executable, str(command), "--env", "own:Nothing", "--policy", "random"]
    done = subprocess.run(arguments, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert b"module 'own' has no 'Nothing'" in done.stderr
