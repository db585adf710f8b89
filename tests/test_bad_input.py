"""Wrong input: one sentence on stderr that says what is wrong and how to mend it, the exit code, nothing written."""

import dataclasses
import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.refusals import refuse
from helpers.tiny import Corridor, TinyQ

import bench.harness.measure
from envs_jax import EnvSpec
from envs_jax.base import setting
from envs_jax.snakes import spawn
from jaxrl.cli import train
from jaxrl.cli.flags import parse
from jaxrl.common import errors, files
from jaxrl.common.errors import UserError
from jaxrl.runtime import run as runs
from jaxrl.runtime import run_directory
from jaxrl.runtime.session import Session

ROOT = Path(__file__).parents[1]
# Words that stand for others in the tables: {here} is the working directory, {run} a run of {tiny} that has not begun.
WORDS = {
    "corridor": "--env helpers.tiny:Corridor",
    "tiny": "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --devices 1 --total_env_steps 64",
    "ddpg": "--algo ddpg --num_envs 8 --devices 1 --total_env_steps 64 --memory_gb 8",
    "sac": "--algo sac --env helpers.tiny:PointMass --hidden_size 8 --num_envs 8 --devices 1 --total_env_steps 64 "
    "--memory_gb 8",
    "coma": "--algo coma --q 5 --num_agents 2 --budget 3 --hidden_size 4 --num_envs 8 --total_episodes 16",
    "coverage": "--env coverage --q 3",
    "zeros": "0" * 12,
    "long": "x" * 5000,
}

# What is wrong: the command, and a part of its sentence.
USAGE = {
    # Flags
    "an empty command line": ("train", "say what to train"),
    "an unknown flag": ("train {tiny} --num_env 8", "unknown flag '--num_env': did you mean '--num_envs'?"),
    "an unknown flag and =": ("train {tiny} --gama=1", "unknown flag '--gama': did you mean '--gamma'?"),
    "an unlike flag": ("train {tiny} --zzzzzz 1", "unknown flag '--zzzzzz': see --help"),
    "an unknown first flag": ("train --alog coma", "unknown flag '--alog': did you mean '--algo'?"),
    "a long flag": ("train {tiny} --{long} 1", "unknown flag '--xxx"),
    "a word for a flag": ("train coma", "unexpected word 'coma': did you mean --algo coma?"),
    "a device": ("train --algo sac --gpu", "unknown flag '--gpu': JAX finds a GPU by itself"),
    "a flag of others": ("train {tiny} --teacher_weight 3", "'--teacher_weight' is a setting of student, not of '"),
    "a setting without a flag": ("train --algo collective --resolved_inputs 3", "unknown flag '--resolved_inputs'"),
    "another unit": ("train --algo coma --checkpoint_minutes 5", "did you mean --checkpoint_every?"),
    "a synonym": ("train {tiny} --seeds 1", "unknown flag '--seeds': did you mean --num_seeds?"),
    "another library's name": ("train --algo ppo --gae_lambda 0.9", "did you mean '--td_lambda"),
    # Flags of the published systems
    "their save_interval": (
        "train --algo ddpg --save_interval 1000", "of the snakes trainer is --checkpoint_every here"
    ),
    "their evasion": ("train --algo ddpg --enable_opponent_evasion", "is --opponent here ('curriculum evasion@0.8'"),
    "their n_episodes": ("train --algo coma --n_episodes 1500", "is --total_episodes here (missions, not"),
    "their learning_rate": ("train --algo coma --learning_rate 1e-4", "is --actor_lr or --critic_lr here"),
    "their max_altitude": ("train --algo coma --max_altitude 25", "has no setting here (altitudes are 5, 10, 15 m)"),
    "c_lr, which ppo never had": ("train --algo ppo --c_lr 1", "c_lr of the snakes trainer is --critic_lr here"),
    "a word of hydra": ("train --algo sac experiment.num_train_steps=9", "repository is --total_env_steps here"),
    # Values
    "a seed that does not fit": ("train {tiny} --seed -1", "seed must lie between 0 and 4,294,967,295"),
    "no number": ("train {tiny} --num_envs many", "--num_envs must be a whole number, not 'many'"),
    "num_envs and shards": ("train {tiny} --num_envs 6 --logical_shards 4", "not divisible by logical_shards 4: use 8"),
    "no total": ("train --algo helpers.tiny:TinyQ {corridor}", "say how long to train: --total_env_steps N"),
    "total 0": ("train --config coma_quick --total_env_steps 0", "must be at least 1, not 0: leave it out"),
    "missions for a share": ("train {coma} --eps_anneal 10000", "not 10000 (a share of the run: 0.1 is a tenth)"),
    "exploration that would rise": ("train {coma} --eps_min 0.6", "eps_min 0.6 exceeds eps_max 0.1"),
    "an observation that does not fit": (
        "train {ddpg} --observation obs35 --beans 4",
        "obs35 is published for 2 teams, 6 snakes and 5 beans, not 2, 6 and 4",
    ),
    "a small replay": ("train {ddpg} --batch_size 2000 --buffer_size 800 --learning_starts 0", "2,000 exceeds the 8"),
    "a replay beyond all numbers": ("train {ddpg} --buffer_size 1{zeros}", ": lower buffer_size"),
    "a port that is none": (
        "train {tiny} --coordinator localhost:99999 --num_hosts 2 --host_index 0",
        "must be HOST:PORT of host 0, such as",
    ),
    "a list for coverage's rate": ("train --algo coma --failure_rate 0,1.5", "--failure_rate must lie between 0 and 1"),
    "a word for coverage's rate": ("train --algo coma --failure_rate a", "must be a number or a list of numbers"),
    # Algorithms, environments and presets
    "capitals": ("train --algo COMA", "unknown algorithm 'COMA': did you mean 'coma'?"),
    "a path as algorithm": ("train --algo ../../x:Y", "algorithm '../../x:Y' is not a class: write module:Class"),
    "an environment as algorithm": ("train --algo helpers.tiny:Corridor {corridor}", "must be a frozen dataclass"),
    "no such module": ("train --algo tinny:TinyQ {corridor}", "there is no module 'tinny'"),
    "no such class": ("train --algo helpers.tiny:TinyR {corridor}", "module 'helpers.tiny' has no 'TinyR'"),
    "no environment": ("train --algo helpers.tiny:TinyQ", "names no environment"),
    "two settings of one name": ("train --algo test_bad_input:Clash {corridor}", "'length' is already a setting of"),
    "a setting of another type": ("train --algo test_bad_input:Odd {corridor}", "'sizes' is of type dict[str, int]"),
    "masks of another kind": ("train --algo ddpg --env coverage", "give --masking false, which plays"),
    "no critic's view": ("train --algo coma --env test_bad_input:Blind --total_env_steps 9", "belong together"),
    "another's preset": ("train --algo helpers.tiny:TinyQ --config coma", "is for the algorithm 'coma', not"),
    # Runs
    "the folder of checkpoints": ("train --resume {run}/checkpoints", "no config.yaml); did you mean {run}?"),
    "no such run": ("train --resume {run}9", "{run}9 does not exist; did you mean {run}?"),
    "a run as preset": ("train --config {run}", "use --config {run}/config.yaml to start it again"),
    "two sources": ("train --resume {run} --config coma", "--resume takes algorithm, environment and"),
    "resume with another gamma": ("train --resume {run} --gamma 0.5", "gamma cannot change on resume (the run has 0.9"),
    "weights of another algorithm": ("train {sac} --init_from {run}", "trained with 'helpers.tiny:TinyQ', not 'sac'"),
    "weights of other shapes": ("train {tiny} --length 5 --init_from {run}", "they were built with length"),
    "a folder that orbax cannot use": ("train {tiny} --runs project[1]/runs", "the name of a folder holds '['"),
    "a long file of weights": ("train {tiny} --init_from {long}.pth", "use them with ddpg or bicnet"),
    "resume from a checkpoint": ("train --resume {run}/checkpoints/0000000002", "--init_from {run} --checkpoint 2"),
    "resume and a checkpoint": ("train --resume {run} --checkpoint 4", "--init_from {run} --checkpoint 4"),
    "a checkpoint of no run": ("train --algo coma --checkpoint 2", "name the run with --init_from"),
    "two checkpoints": ("evaluate {run}/checkpoints/0000000002 --checkpoint 4", "is asked for the checkpoints 2 and 4"),
    "the last one and another": ("evaluate {run} --last --checkpoint 2", "are two checkpoints: leave one"),
    # Evaluations
    "nothing to evaluate": ("evaluate", "name a run, python -m jaxrl.evaluate RUN, or an environment"),
    "no run to evaluate": ("evaluate nowhere/at/all", "does not exist"),
    "an unknown flag of evaluate": ("evaluate --polcy ig", "did you mean '--policy'?"),
    "two runs": ("evaluate a b", "unexpected word 'b'"),
    "a run in another environment": ("evaluate {run} --env coverage", "leave --env out"),
    "an unknown policy": ("evaluate {coverage} --policy igg", "did you mean 'ig'?"),
    "a policy without a run": ("evaluate {coverage} --policy learned", "policy 'greedy' needs a run"),
    "no policy": ("evaluate {coverage} --policy ,", "names no policy"),
    "no number of episodes": ("evaluate --episodes many", "--episodes must be a whole number, not 'many'"),
    "no number of an environment": ("evaluate --env coverage --q seven", "not 'seven'"),
    "a checkpoint without a run": ("evaluate --last", "--last and --checkpoint choose a checkpoint of a run"),
    "no opponent": ("evaluate --env snakes_3v3 --opponent outside", "there is no player for the other team"),
    "a table without conditions": ("evaluate {coverage} --csv a.csv", "--csv works only with --conditions"),
    "a bound without conditions": ("evaluate {coverage} --bound 0.5", "--bound works only with --conditions"),
    "a bound that is no number": ("evaluate {coverage} --conditions a.yaml --bound nan", "--bound must be a number"),
    "--greedy": ("evaluate {coverage} --conditions a.yaml --greedy", "works only with --against"),
    "conditions of games": ("evaluate --env snakes_1v1 --conditions a.yaml", "--conditions plays one team"),
}  # fmt: skip
RUN_TIME = {
    "too little memory": ("train {tiny} --num_envs 100000 --memory_gb 0.001", "lower --num_envs from 100000 to about "),
    "too large a replay": ("train {sac} --buffer_size 900000000", "lower --buffer_size from 900000000"),
    "a long name of a folder": ("train {tiny} --runs {long}", "(File name too long); choose another with --runs"),
    "a folder that takes none": ("train {tiny} --runs /proc/nope", "(no folder can be made in /proc: "),
    "a file in the way": ("train {tiny} --runs {run}/config.yaml", "({run}/config.yaml is not a directory)"),
    "no folder for a report": ("evaluate {coverage} --policy random --json /no/such/x.json", "cannot write /no/such/x"),
}  # fmt: skip

# What is wrong: the command that reads {file}, its content, and a part of the sentence.
PRESET = "train --config {file}"
CONDITIONS = "evaluate {coverage} --conditions {file}"
FILES = {
    "an unknown setting": (PRESET, "algo: coma\ngama: 0.9\n", "{file}: unknown setting 'gama': did you mean 'gamma'?"),
    "a published name": (PRESET, "algo: ddpg\nenv: snakes_3v3\nc_lr: 1\n", "of the snakes trainer is critic_lr here"),
    "the opposite": (PRESET, "algo: coma\nfix_range: true\n", "random_range = the opposite"),
    "no whole number": (PRESET, "algo: coma\nnum_envs: yes\n", "{file}: num_envs must be a whole number, not True"),
    "no truth value": (PRESET, "algo: ddpg\nmasking: 'yes'\n", "{file}: masking must be true or false, not 'yes'"),
    "a list": (PRESET, "- algo\n- coma\n", "{file} must be a mapping of setting names to values"),
    "a torn file": (PRESET, "algo: [coma\n", "cannot read the configuration {file}"),
    "no date": (PRESET, "algo: sac\nseed: 2024-13-45\n", "month must be in 1..12"),
    "a tag of numbers": (PRESET, "algo: sac\nseed: !!int foo\n", "the value in line 2 cannot be read (invalid literal"),
    "a tag of Python": (
        PRESET, "algo: sac\nseed: !!python/object:os.system {}\n", "determine a constructor for the tag"
    ),
    "deep nesting": (PRESET, f"algo: sac\nseed: {'[' * 1000}\n", "it is nested too deeply"),
    "a sign of YAML": (PRESET, "algo: sac\nseed: @1\n", "cannot start any token in line 2, column 7"),
    "an alias": (PRESET, "a: &a [x, x]\nseed: [*a, *a]\n", "it holds an alias (*name): write the value itself"),
    "a large file": (PRESET, "#" * 2**20 + "\n", "it is larger than 1,048,576 bytes"),
    "a key twice": (PRESET, "gamma: 0.9\nseed: 1\n'gamma': 0.8\n", "'gamma' is there twice, in lines 1 and 3"),
    "a nested key twice": (PRESET, "nested:\n  a: 1\n  b: 2\n  a: 3\n", "'a' is there twice, in lines 2 and 4"),
    "no condition": (CONDITIONS, "{}", "holds no condition: write some, such as 'lossy"),
    "a number as condition": (CONDITIONS, "lossy: 0.3", "condition 'lossy' must be a mapping of the"),
    "no values": (CONDITIONS, "lossy: {failure_rate: []}", "condition 'lossy' has no values for failure_rate"),
    "a condition of an unknown setting": (CONDITIONS, "lossy: {failure_rat: 0.3}", "condition 'lossy': "),
    "a condition beyond its bounds": (CONDITIONS, "lossy: {failure_rate: 2}", "condition 'lossy': "),
    "a value that is a list": (CONDITIONS, "lossy: {team_sizes: [2, 4]}", "one value of team_sizes is a list, and "),
    "a condition twice": (CONDITIONS, "lossy: {failure_rate: [0.1, 0.1]}", "condition 'lossy: failure_rate 0.1' twice"),
    "a crossed one twice": (CONDITIONS, "{lossy: {q: [3, 4]}, 'lossy: q 3': {}}", "condition 'lossy: q 3' twice"),
    "conditions that are no text": (CONDITIONS, b"\xff\xfe\x00", "it is not a text file"),
    "one file for two": (f"{CONDITIONS} --csv {{here}}/out --json {{here}}/out", "plain: {}", "are both"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Blind(Corridor):
    """A corridor that shows critics nothing."""

    @property
    def spec(self) -> EnvSpec:
        return dataclasses.replace(super().spec, critic_input=None)


@dataclasses.dataclass(frozen=True)
class Clash(TinyQ):
    length: int = setting(3, "also a setting of the corridor")


@dataclasses.dataclass(frozen=True)
class Odd(TinyQ):
    sizes: dict[str, int] = setting(None, "no flag can give it")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a run that has written nothing but its configuration; nothing is trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Session, "train", lambda *_: pytest.fail("trains"))
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    run_directory.write_config(run, parse(WORDS["tiny"].split()).config.to_yaml())
    run_directory.write_versions(run, {"environment": 1})
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(command: str, code: int, sentence: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with this sentence, and no file is made or changed."""
    words = WORDS | {"here": str(here), "run": str(here / "run"), "file": str(here / "file.yaml")}
    before = contents(here)
    assert sentence.format(**words) in refuse(capsys, command.format(**words), code=code)
    assert contents(here) == before


@pytest.mark.parametrize("what", USAGE)
def test_usage(what: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, sentence = USAGE[what]
    check(command, 2, sentence, here, capsys)


@pytest.mark.parametrize("what", RUN_TIME)
def test_run_time(what: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, sentence = RUN_TIME[what]
    check(command, 1, sentence, here, capsys)


@pytest.mark.parametrize("what", FILES)
def test_files(what: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, content, sentence = FILES[what]
    (here / "file.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    check(command, 2, sentence, here, capsys)


def test_too_many_snakes_to_look_through(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "_MOST_TRIED", 1000)
    check("train {ddpg} --height 6 --width 6 --snakes 8", 2, "6 x 6 may have no room", here, capsys)


@pytest.mark.parametrize(
    ("command", "variables", "code", "sentence"),
    [
        ("jaxrl runs nowhere", {}, 2, "nowhere does not exist"),
        ("jaxrl.train --algo coma", {"JAX_PLATFORMS": "abacus"}, 1, "JAX cannot use JAX_PLATFORMS='abacus' here"),
        ("jaxrl.train", {"JAX_NUM_CPU_DEVICES": "abc"}, 2, 'Invalid value "abc" for JAX flag jax_num_cpu_devices'),
    ],
)
def test_a_process(command: str, variables: dict[str, str], code: int, sentence: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables
    arguments = [sys.executable, "-m", *command.split()]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and sentence in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_users_file_ends_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of JAX and of this project stand between: the last words of the traceback say where to look."""
    text = """import dataclasses
import jax.numpy as jnp
from helpers.tiny import Corridor, TinyQ

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


def test_no_permission(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "locked").mkdir(mode=0o555)
    if os.getuid() == 0:  # to whom everything is allowed
        monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=PermissionError(13, "Permission denied")))
    sentence = "locked: Permission denied); choose another with --runs"
    check("train {tiny} --runs locked/runs", 1, sentence, here, capsys)
    assert list((here / "locked").iterdir()) == []


def test_a_disk_that_is_full_when_the_run_begins(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(run_directory, "write_atomically", full)
    monkeypatch.setattr(runs, "compile_run", Mock())
    check("train {tiny}", 1, "no run directory can be made under runs (No space left on device)", here, capsys)


# Files that a verb would write


def test_no_device_is_replaced_by_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipes = [here / "pipe.json", here / "pipe.png"]
    for pipe in pipes:
        os.mkfifo(pipe)
    (here / "link.json").symlink_to(pipes[0])
    for command in (
        "evaluate {coverage} --policy random --json pipe.json",
        "evaluate {coverage} --policy random --out link.json",
        "evaluate {coverage} --policy random --json /dev/null",
        "render {coverage} --policy random --out pipe.png",
    ):
        check(command, 1, "it is not a regular file", here, capsys)
    for pipe in pipes:
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        with pytest.raises(OSError, match="not a regular file"):
            files.write_atomically(pipe, "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(UserError, match="not a regular file"):
        bench.harness.measure.output(str(here / "link.json"), "kind")


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    files.write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "new"


def test_a_sentence_is_a_line_for_any_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in refuse(capsys, "train --algo", "a\n\x1b[2Jb" * 3000)
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
