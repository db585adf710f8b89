"""Settings: default < YAML < flag, their types, closest names, help, and config.yaml as a way back."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from tiny import Corridor, TinyQ

from envs_jax.base import find as find_env
from envs_jax.base import setting
from jaxrl import config, prepare
from jaxrl.algos import find as find_algo
from jaxrl.config import RunSettings, UsageError, build, parse

TINY = ("--algo", "tiny:TinyQ", "--env", "tiny:Corridor", "--total_env_steps", "320", "--num_envs", "8")


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
    assert by_algo["transitions"] == 3000
    assert by_algo["total_episodes"] == 75_000
    assert flat("--config", "coma") == flat("--config", "coma.yaml") == flat("--config", "configs/coma.yaml") == by_algo
    assert flat("--config", "coma_quick", "--algo", "coma")["q"] == 7


@pytest.mark.parametrize("name", sorted(config.presets()))
def test_every_preset_can_be_read(name: str) -> None:
    read = parse(("--config", name)).config
    ends_by_itself = read.algo == "collective"  # with the last of its phases
    assert read.run.total_episodes > 0 or read.run.total_env_steps > 0 or ends_by_itself
    read.make_env()


def test_one_kind_of_total_replaces_the_other() -> None:
    values = flat("--algo", "coma", "--total_env_steps", "1e6")
    assert (values["total_env_steps"], values["total_episodes"]) == (1_000_000, 0)
    values = flat("--algo", "coma", "--total_episodes", "10")
    assert (values["total_env_steps"], values["total_episodes"]) == (0, 10)


def test_another_environment_takes_the_preset_along_without_its_settings() -> None:
    values = flat("--algo", "coma", "--env", "tiny:Corridor", "--length", "3")
    assert values["minibatches"] == 5
    assert values["length"] == 3
    assert "q" not in values


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
        {"algo": "test_config:Fancy", "env": "tiny:Corridor", "layers": [4], "span": [0, 1], "lr": "1e-3", "gamma": 1},
        "here",
    ).flat()
    assert values["layers"] == (4,)
    assert values["span"] == (0.0, 1.0)
    assert isinstance(values["span"][0], float)
    assert values["lr"] == 1e-3  # YAML 1.1 reads 1e-3 as a word
    assert isinstance(values["gamma"], float)


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("num_envs", "many", "--num_envs must be a whole number, not 'many'"),
        ("num_envs", "2.5", "--num_envs must be a whole number, not '2.5'"),
        ("lr", "nan", "--lr must be a number, not 'nan'"),
        ("lr", "inf", "--lr must be a number, not 'inf'"),
        ("flag", "perhaps", "--flag must be true or false, not 'perhaps'"),
        ("layers", "1,x", "--layers must be a whole number, not 'x'"),
        ("span", "1,2,3", "--span must be a list of 2 numbers"),
        ("mode", "fsat", "--mode is 'fsat': did you mean 'fast'?"),
        ("order", "3", "--order is '3': choose from: 1, 2"),
        ("compute_dtype", "float31", "--compute_dtype is 'float31': did you mean 'float32'?"),
    ],
)
def test_wrong_values_of_flags(flag: str, value: str, wanted: str) -> None:
    assert wanted in sentence(*FANCY, f"--{flag}", value)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("num_envs", True, "num_envs must be a whole number, not True"),
        ("num_envs", None, "num_envs must be a whole number, not None"),
        ("lr", "fast", "lr must be a number, not 'fast'"),
        ("lr", float("nan"), "lr must be a number, not nan"),
        ("flag", "yes", "flag must be true or false, not 'yes'"),
        ("label", 5, "label must be a word, not 5"),
        ("layers", 5, "layers must be a list of numbers, not 5"),
        ("span", [1], "span must be a list of 2 numbers, not [1]"),
        ("mode", "quick", "mode is 'quick': choose from: fast, slow"),
        ("gama", 0.9, "unknown setting 'gama': did you mean 'gamma'?"),
    ],
)
def test_wrong_values_in_yaml(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        build({"algo": "test_config:Fancy", "env": "tiny:Corridor", name: value}, "my.yaml")
    assert str(caught.value) == f"my.yaml: {wanted}"


def test_a_word_without_dashes_and_a_flag_without_value() -> None:
    assert "unexpected word '7'" in sentence(*TINY, "7")
    assert sentence(*TINY, "--seed") == "--seed needs a value"
    assert "--algo needs a value" in sentence("--algo")


def test_closest_flags() -> None:
    assert "unknown flag '--gama': did you mean '--gamma'?" in sentence(*TINY, "--gama", "1")
    assert "unknown flag '--gama': did you mean '--gamma'?" in sentence(*TINY, "--gama=1")
    assert "unknown flag '--zzzzzz': see --help" in sentence(*TINY, "--zzzzzz", "1")
    assert "unknown flag '--alog': did you mean '--algo'?" in sentence("--alog", "coma")
    assert "unknown flag '--seeds': did you mean '--seed'?" in sentence(*TINY, "--seeds", "1")


def test_flags_are_never_abbreviated() -> None:
    assert "unknown flag '--see'" in sentence(*TINY, "--see", "1")


def test_help_names_every_setting_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, classes in (
        (("--help",), (RunSettings, find_env("coverage"), find_algo("coma"))),
        ((*FANCY, "--help"), (RunSettings, Corridor, Fancy)),
    ):
        with pytest.raises(SystemExit) as caught:
            parse(argv)
        assert caught.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        for cls in classes:
            for field in dataclasses.fields(cls):
                if field.name not in ("spec", "layout"):
                    assert f"--{field.name} " in text
                    assert " ".join(field.metadata["help"].split()) in text, field.name


def test_every_setting_has_a_sentence() -> None:
    for cls in (RunSettings, find_env("coverage"), find_algo("coma")):
        for field in dataclasses.fields(cls):
            assert field.name in ("spec", "layout") or field.metadata["help"], field.name


def test_config_yaml_is_a_way_back(tmp_path: Path) -> None:
    first = prepare.prepare(parse((*FANCY, "--layers", "8,16", "--lr", "3e-3", "--devices", "1")).config).config
    file = tmp_path / "config.yaml"
    file.write_text(first.to_yaml())
    again = parse(("--config", str(file))).config
    assert again == first
    assert prepare.prepare(again).config == first
    assert all(value != "auto" for value in yaml.safe_load(first.to_yaml()).values())


@dataclasses.dataclass(frozen=True)
class Clash(TinyQ):
    length: int = setting(3, "also a setting of the corridor")


@dataclasses.dataclass(frozen=True)
class Odd(TinyQ):
    sizes: dict[str, int] = setting(None, "no flag can give it")


def test_settings_that_cannot_be_flags() -> None:
    assert "'length' is already a setting of the environment" in sentence("--algo", "test_config:Clash", *TINY[2:])
    assert "'sizes' is of type dict[str, int]" in sentence("--algo", "test_config:Odd", *TINY[2:])


def test_a_user_class_that_is_no_algorithm_or_not_there() -> None:
    assert "must be a frozen dataclass" in sentence("--algo", "tiny:Corridor", "--env", "tiny:Corridor")
    assert "there is no module 'tinny'" in sentence("--algo", "tinny:TinyQ", "--env", "tiny:Corridor")
    assert "module 'tiny' has no 'TinyR'" in sentence("--algo", "tiny:TinyR", "--env", "tiny:Corridor")
    assert "names no environment" in sentence("--algo", "tiny:TinyQ")


def test_what_may_change_on_resume() -> None:
    run = parse(TINY).config
    assert config.resumed(run, {"total_env_steps": 640, "gamma": run.flat()["gamma"]}).run.total_env_steps == 640
    with pytest.raises(UsageError, match=r"gamma cannot change on resume \(the run has 0.9, you gave 0.5\)"):
        config.resumed(run, {"gamma": 0.5})
    names = [field.name for field in dataclasses.fields(RunSettings)]
    assert set(config.FREE_ON_RESUME) < set(names)
