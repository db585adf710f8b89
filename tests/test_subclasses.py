"""A user's subclass of one of the package's algorithms starts from the presets of its parent."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from helpers.runs import outcome, resume, run, shared_programs
from helpers.tiny import Corridor

import jaxrl
from envs_jax.base import setting
from jaxrl.algos.coma import Coma
from jaxrl.algos.coma_original import ComaOriginal
from jaxrl.algos.ddpg import Bicnet
from jaxrl.algos.ppo import Ppo
from jaxrl.cli import evaluate, train
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UsageError
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.presets import presets

TINY = (
    "--env helpers.tiny:Corridor --num_envs 8 --minibatch_size 8 --hidden_size 4 --depth 0 --devices 1 "
    "--eval_every 0 --egocentric false --critic_warmup 0 --max_seconds 0"
)


@dataclasses.dataclass(frozen=True)
class Own(Coma):
    """COMA with a setting more, and another default."""

    warmth: float = setting(0.5, "a setting that COMA does not have", between=(0, 1))
    gamma: float = setting(0.25, "another default")


@dataclasses.dataclass(frozen=True)
class Further(Own):
    """A subclass of a subclass."""


@dataclasses.dataclass(frozen=True)
class Fixed(Coma):
    """COMA with a memory, always."""

    fixed_settings: ClassVar[dict[str, Any]] = {"memory": "gru", "clip_ratio": 0, "entropy_anneal": 0}


@dataclasses.dataclass(frozen=True)
class Misspelt(Coma):
    fixed_settings: ClassVar[dict[str, Any]] = {"memry": "gru"}


@dataclasses.dataclass(frozen=True)
class Impossible(Coma):
    fixed_settings: ClassVar[dict[str, Any]] = {"memory": "elephant"}


@dataclasses.dataclass(frozen=True)
class OwnOriginal(ComaOriginal):
    """Its parent has fixed settings, which presets of COMA change."""


@dataclasses.dataclass(frozen=True)
class OwnPpo(Ppo):
    """PPO, unchanged."""


@dataclasses.dataclass(frozen=True)
class FixedPpo(Ppo):
    """PPO with two minibatches, always: more than its policy needs in a team of another size."""

    fixed_settings: ClassVar[dict[str, Any]] = {"num_minibatches": 2}


@dataclasses.dataclass(frozen=True)
class OwnBicnet(Bicnet):
    """A subclass of a subclass of the package."""


def read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(presets()[name].read_text(encoding="utf-8")))


def flat(*words: str) -> dict[str, Any]:
    return parse(words).config.flat()


def test_a_subclass_takes_a_preset_of_its_parent() -> None:
    for cls in ("Own", "Further", "Fixed"):
        values = flat("--config", "coma_quick", "--algo", f"test_subclasses:{cls}", "--num_envs", "16")
        fixed = {"memory": "gru", "clip_ratio": 0, "entropy_anneal": 0} if cls == "Fixed" else {}
        expected = read("coma_quick") | fixed | {"algo": f"test_subclasses:{cls}", "num_envs": 16}
        assert {name: values[name] for name in expected} == expected
    assert flat("--config", "coma_quick", "--algo", "test_subclasses:Own")["warmth"] == 0.5
    assert type(flat("--config", "coma_quick", "--algo", "test_subclasses:Fixed")["clip_ratio"]) is float


def test_a_file_and_a_parent_s_default_environment(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("algo: coma\nbudget: 3\nactor_lr: 0.5\n", encoding="utf-8")
    values = flat("--config", str(file), "--algo", "test_subclasses:Own")
    assert (values["env"], values["budget"], values["actor_lr"]) == ("coverage", 3, 0.5)
    assert flat("--config", "ppo", "--algo", "test_subclasses:OwnPpo")["env"] == "reach"  # the preset names none
    assert flat("--config", "ppo", "--algo", "test_subclasses:OwnPpo", "--env", "snakes_1v1")["env"] == "snakes_1v1"
    for preset in ("bicnet", "ddpg"):  # of a parent's parent, too
        assert (
            flat("--config", preset, "--algo", "test_subclasses:OwnBicnet")["batch_size"] == read(preset)["batch_size"]
        )
    file.write_text("algo: test_subclasses:Own\nwarmth: 0.75\nenv: coverage\n", encoding="utf-8")
    assert flat("--config", str(file), "--algo", "test_subclasses:Further")["warmth"] == 0.75


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--config ddpg --algo test_subclasses:Own", "is for the algorithm 'ddpg', not 'test_subclasses:Own': leave"),
        ("--config ddpg --algo bicnet", "is for the algorithm 'ddpg', not 'bicnet': leave one of them out"),
        ("--config coma --algo coma_original", "is for the algorithm 'coma', not 'coma_original'"),
        ("--config bicnet --algo jaxrl.algos.ddpg:Ddpg", "is for the algorithm 'bicnet', not 'jaxrl.algos.ddpg:Ddpg'"),
        ("--config coma --algo test_subclasses:Nothing", "has no 'Nothing'"),
        (
            "--config coma_quick --algo test_subclasses:Misspelt",
            "fixed_settings of Misspelt names 'memry': did you mean",
        ),
        ("--config coma_quick --algo test_subclasses:Impossible", "memory is 'elephant': choose from: "),
    ],
)
def test_other_algorithms_are_refused(words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words.split())
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("Fixed --memory none", "memory is always gru in Fixed, not none: give gru"),
        ("OwnOriginal --clip_ratio 0.2", "clip_ratio does not apply to coma_original"),
    ],
)
def test_a_fixed_setting_cannot_be_changed(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(f"--config coma_quick --algo test_subclasses:{words} {TINY}".split()) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1


def test_a_fixed_setting_in_another_team(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose policy only acts: its minibatches do not matter, which in training cannot be changed."""
    words = "--algo test_subclasses:FixedPpo --env helpers.tiny:Corridor --num_envs 4 --hidden_size 4 --depth 1"
    words += " --rollout_steps 5 --devices 1 --eval_every 0 --total_env_steps 40"
    assert train.main(f"{words} --num_minibatches 1".split()) == 2
    assert "num_minibatches is always 2 in FixedPpo, not 1: give 2" in capsys.readouterr().err
    directory = run(words, tmp_path)
    assert evaluate.main([str(directory), "--num_agents", "3", "--episodes", "2"]) == 0
    assert "greedy" in capsys.readouterr().out
    assert train.main(f"{words.replace('_size 4', '_size 8')} --init_from {directory}".split()) == 2
    assert "but this run has hidden_size 8: give --hidden_size 4" in capsys.readouterr().err
    spec = Corridor().spec
    with pytest.raises(ValueError, match=r"num_minibatches is always 2 in FixedPpo, not 8: give 2$"):
        FixedPpo(spec, DataParallel(8))
    assert FixedPpo(spec, DataParallel(8), num_minibatches=2).num_minibatches == 2


def test_help_shows_the_defaults_that_a_run_would_have(capsys: pytest.CaptureFixture[str]) -> None:
    def help_of(*words: str) -> str:
        with pytest.raises(SystemExit):
            parse((*words, "--algo", "test_subclasses:Own", "--help"))
        return " ".join(capsys.readouterr().out.split())

    quick = help_of("--config", "coma_quick")
    assert "discount factor" not in quick and "another default (default: 0.99)" in quick
    assert "a setting that COMA does not have (0 to 1; default: 0.5)" in quick
    alone = help_of()
    assert "another default (default: 0.25)" in alone and "environment coverage" in alone


def test_runs_of_subclasses(tmp_path: Path) -> None:
    """Train, resume, load and train again from the run's own file; the numbers are those of the parent."""
    words = f"--config coma_quick {TINY} --total_env_steps 160"
    with shared_programs():
        parent, own = (run(f"{words} --algo {algo}", tmp_path) for algo in ("coma", "test_subclasses:Further"))
        assert outcome(own) == outcome(parent)
        resume(own, "--total_env_steps 320")
        assert isinstance(jaxrl.load(own).algo, Further)
        again = run(f"--config {own / 'config.yaml'} --total_env_steps 160", tmp_path)
        assert outcome(again) == outcome(parent)
        flags = f"{TINY} --total_env_steps 160".replace("--", "").split()
        settings = dict(zip(flags[::2], map(yaml.safe_load, flags[1::2]), strict=True))
        result = jaxrl.train(Further, preset="coma_quick", progress=False, runs=str(tmp_path), **settings)
        assert outcome(result.directory) == outcome(parent)
