"""Settings: default < YAML < flag, their types, closest names, help, and config.yaml as a way back."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from helpers.tiny import Corridor, TinyQ

from envs_jax import Box, EnvSpec
from envs_jax.base import find as find_env
from envs_jax.base import setting
from jaxrl.algos import find as find_algo
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UsageError
from jaxrl.runtime import build as building
from jaxrl.runtime import config as configuration
from jaxrl.runtime import presets
from jaxrl.runtime.config import RunSettings, build

TINY = ("--algo", "helpers.tiny:TinyQ", "--env", "helpers.tiny:Corridor", "--total_env_steps", "320", "--num_envs", "8")


@dataclasses.dataclass(frozen=True)
class Fancy(TinyQ):
    """All types of settings."""

    layers: tuple[int, ...] = setting((32, 32), "units of each layer")
    span: tuple[float, float] = setting((0.0, 1.0), "two numbers")
    mode: Literal["slow", "fast"] = setting("slow", "a choice of words")
    order: Literal[1, 2] = setting(1, "a choice of numbers")
    flag: bool = setting(False, "yes or no")
    label: str = setting("", "a word of 100 %")


FANCY = ("--algo", "test_config:Fancy", *TINY[2:])


def flat(*argv: str) -> dict[str, Any]:
    return parse(argv).config.flat()


def sentence(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    return str(caught.value)


def test_default_then_yaml_then_flag(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("algo: coma\nactor_lr: 0.25\ncritic_lr: 0.5\n")
    values = flat("--config", str(file), "--critic_lr", "0.75")
    assert (values["td_lambda"], values["actor_lr"], values["critic_lr"]) == (0.8, 0.25, 0.75)
    assert values["env"] == "coverage"
    assert flat("--config", str(file), "--critic_lr=0.75") == values


def test_a_preset_by_algorithm_by_name_and_by_path() -> None:
    by_algo = flat("--algo", "coma")
    assert by_algo["minibatch_size"] == 640
    assert by_algo["total_episodes"] == 131_072
    assert flat("--config", "coma") == flat("--config", "coma.yaml") == flat("--config", "configs/coma.yaml") == by_algo
    assert flat("--config", "coma_quick", "--algo", "coma")["q"] == 7


def test_the_preset_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that there is none."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("algo: coma\n")
    corridor = ("--env", "helpers.tiny:Corridor")
    for words, source in (
        (("--algo", "coma"), "preset: coma"),
        (("--config", "coma_quick", "--seed", "3"), "preset: coma_quick"),
        (("--config", "coma_quick", *corridor), "preset: coma_quick"),
        (("--config", "mine.yaml"), "preset: mine.yaml"),
        (("--algo", "ddpg", *corridor), "preset: none, all settings have their defaults"),
        (("--algo", "helpers.tiny:TinyQ", *corridor), "preset: none, all settings have their defaults"),
    ):
        assert parse(words).source == source


@pytest.mark.parametrize("name", sorted(presets.presets()))
def test_every_preset_can_be_read(name: str) -> None:
    read = parse(("--config", name)).config
    ends_by_itself = read.algo == "collective"  # with the last of its phases
    assert read.run.total_episodes > 0 or read.run.total_env_steps > 0 or ends_by_itself
    read.make_env()


def test_one_kind_of_total_replaces_the_other() -> None:
    values = flat("--algo", "coma", "--total_env_steps", "1e6")
    assert (values["total_env_steps"], values["total_episodes"]) == (1_000_000, 0)
    for zero in ((), ("--total_env_steps", "0")):  # with another total it says only that this one is not in use
        values = flat("--algo", "coma", "--total_episodes", "10", *zero)
        assert (values["total_env_steps"], values["total_episodes"]) == (0, 10)


def test_another_environment_takes_the_preset_along_without_its_settings() -> None:
    values = flat("--config", "coma_quick", "--env", "helpers.tiny:Corridor", "--length", "3")
    assert values["minibatch_size"] == 160
    assert values["length"] == 3
    assert "q" not in values
    assert flat("--algo", "ddpg", "--env", "snakes_1v1")["observation"] == "obs_full"  # of one family


@dataclasses.dataclass(frozen=True)
class Unbounded(Corridor):
    """Observations without bounds, no masks, and a setting that snakes have, too, with another meaning."""

    reward: str = setting("plain", "what it pays")

    @property
    def spec(self) -> EnvSpec:
        return dataclasses.replace(super().spec, observation=Box((self.length + 1,)))


def test_an_algorithm_alone_brings_nothing_that_was_tuned_for_another_environment() -> None:
    values = flat("--algo", "ddpg", "--env", "test_config:Unbounded", "--total_env_steps", "64")
    assert values["reward"] == "plain"
    assert not values["scale_observation"] and values["masking"]
    settings = {field.name: field.default for field in dataclasses.fields(find_algo("ddpg"))}
    assert all(values[name] == default for name, default in settings.items() if name in values)
    building.build_run(parse(("--algo", "ddpg", "--env", "test_config:Unbounded", "--total_env_steps", "64")).config)
    named = flat("--config", "ddpg_quick", "--env", "test_config:Unbounded", "--scale_observation", "false")
    assert (named["reward"], named["n_step"]) == ("plain", 3)


def test_types_of_flags() -> None:
    values = flat(
        *FANCY, "--layers", "8,16", "--span", "-1 2e0", "--mode", "fast", "--order", "2", "--flag", "Yes", "--label",
        "a b", "--total_env_steps", "2e3", "--lr", "-1e-3",
    )  # fmt: skip
    assert values["layers"] == (8, 16)
    assert values["span"] == (-1.0, 2.0)
    assert (values["mode"], values["order"], values["flag"], values["label"]) == ("fast", 2, True, "a b")
    assert values["total_env_steps"] == 2000
    assert isinstance(values["total_env_steps"], int)
    assert flat(*FANCY, "--flag")["flag"] is True
    assert flat(*FANCY, "--flag", "--seed", "3")["flag"] is True
    assert flat(*FANCY, "--flag=no")["flag"] is False
    assert values["lr"] == -1e-3


def test_types_of_yaml() -> None:
    values = build(
        {
            "algo": "test_config:Fancy", "env": "helpers.tiny:Corridor", "layers": [4], "span": [0, 1], "lr": "1e-3",
            "gamma": 1,
        },
        "here",
    ).flat()  # fmt: skip
    assert values["layers"] == (4,)
    assert values["span"] == (0.0, 1.0)
    assert isinstance(values["span"][0], float)
    assert values["lr"] == 1e-3  # YAML 1.1 reads 1e-3 as a word
    assert isinstance(values["gamma"], float)


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("flag", "perhaps", "--flag must be true or false, not 'perhaps'"),
        ("span", "1,2,3", "--span must be a list of 2 numbers"),
        ("mode", "fsat", "--mode is 'fsat': did you mean 'fast'?"),
    ],
)
def test_wrong_values_of_flags(flag: str, value: str, expected: str) -> None:
    assert expected in sentence(*FANCY, f"--{flag}", value)


@pytest.mark.parametrize(
    ("argv", "classes", "hidden"),
    [
        ((), (RunSettings, find_env("coverage"), find_algo("coma")), {"self_play", "self_play_every"}),
        (("--algo", "ddpg"), (RunSettings, find_env("snakes_3v3"), find_algo("ddpg")), set()),
        (FANCY, (RunSettings, Corridor, Fancy), {"self_play", "self_play_every"}),
    ],
)
def test_help_names_every_setting_with_its_sentence(
    argv: tuple[str, ...], classes: tuple[type, ...], hidden: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """But for self-play where nobody else plays; there it may only be given."""
    with pytest.raises(SystemExit) as caught:
        parse((*argv, "--help"))
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in itertools.chain(*map(dataclasses.fields, classes)):
        if field.metadata.get("flag", True) and field.name not in ("spec", "layout", "custom"):
            assert (f"--{field.name} " in text) == (field.name not in hidden)
            assert (" ".join(field.metadata["help"].split()) in text) == (field.name not in hidden), field.name
    if argv == ():
        assert "discount factor per step (0 to 1; default: 0.99, on a CPU 1.0)" in text
        assert flat("--algo", "coma", "--self_play", "3")["self_play"] == 3  # as config.yaml names it


def test_config_yaml_is_a_way_back(tmp_path: Path) -> None:
    first = building.build_run(parse((*FANCY, "--layers", "8,16", "--lr", "3e-3", "--devices", "1")).config).config
    file = tmp_path / "config.yaml"
    file.write_text(first.to_yaml())
    again = parse(("--config", str(file))).config
    assert again == first
    assert building.build_run(again).config == first
    assert all(value != "auto" for value in yaml.safe_load(first.to_yaml()).values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import jax\n\nsize = sise\n", "broken.py:3: NameError: name 'sise' is not defined"),
        ("import no_such_package\n", "broken.py:1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("\nclass Game\n", "broken.py:2: SyntaxError: expected ':'"),
        ("import math\n\n\ndef root():\n    return math.sqrt(-1)\n\n\nroot()\n", "broken.py:5: ValueError: "),
    ],
)
def test_a_module_that_cannot_be_imported(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert f"'broken:Game' cannot be imported: {expected}" in sentence("--algo", "ppo", "--env", "broken:Game")


def test_what_may_change_on_resume() -> None:
    run = parse(TINY).config
    changes = {"total_env_steps": 640, "gamma": run.flat()["gamma"]}
    assert configuration.apply_resume_changes(run, changes).run.total_env_steps == 640
    names = [field.name for field in dataclasses.fields(RunSettings)]
    assert set(configuration.FREE_ON_RESUME) - {"host_workers"} < set(names)  # which environments on the host have


@pytest.mark.parametrize(
    ("text", "iterations", "seconds"),
    [("5min", 0, 300.0), ("0.5 min", 0, 30.0), ("200", 200, 0.0), ("1_000", 1000, 0.0)],
)
def test_checkpoints_by_the_clock_or_by_iterations(text: str, iterations: int, seconds: float, tmp_path: Path) -> None:
    """On the command line, in a file, and back from the file that a run writes."""
    run = parse(["--algo", "coma", "--checkpoint_every", text]).config
    assert (run.run.checkpoint_iterations, run.run.checkpoint_seconds) == (iterations, seconds)
    (tmp_path / "config.yaml").write_text(run.to_yaml())
    assert parse(["--config", str(tmp_path / "config.yaml")]).config == run


@pytest.mark.parametrize("text", ["0", "-1", "0min", "5 hours", "min", "1e7min", "2.5", "nan"])
def test_impossible_times_between_checkpoints(text: str) -> None:
    with pytest.raises(UsageError, match="checkpoint_every must be a"):
        parse(["--algo", "coma", "--checkpoint_every", text])


def test_a_setting_that_is_a_number_or_a_list(tmp_path: Path) -> None:
    """One value and several, from the command line, Python and files."""
    for text, value in (("0.25", 0.25), ("0,0.5", (0.0, 0.5)), ("0,", (0.0,))):
        config = parse(["--algo", "coma", "--failure_rate", text]).config
        assert config.env_settings["failure_rate"] == value
        (tmp_path / "config.yaml").write_text(config.to_yaml())
        assert parse(["--config", str(tmp_path / "config.yaml")]).config == config
