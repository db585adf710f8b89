"""Settings of a run: defaults of the dataclasses < a YAML preset < flags. Every field is a flat flag.

A configuration is one flat mapping: `algo`, `env`, the fields of `RunSettings`, those of the environment's class
and those of the algorithm's class. The same mapping, fully resolved, is written to a run's config.yaml.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
import yaml

from envs_jax import base as environments
from envs_jax.base import Bounds, Environment, check_bounds, check_settings, closest, plain, setting, shown
from jaxrl import algos
from jaxrl.algos.base import Algorithm
from jaxrl.cli import interrupt
from jaxrl.common.errors import UsageError, UserError, one_line
from jaxrl.common.files import is_file
from jaxrl.nn.precision import Compute, Store
from jaxrl.runtime.run_directory import CONFIG, check_environment, open_run

# What `--algo` alone trains on.
DEFAULT_ENV = {
    "coma": "coverage", "ddpg": "snakes_3v3", "bicnet": "snakes_3v3", "sac": "reach", "collective": "reach",
    "student": "reach",
}  # fmt: skip


MOST_ENVS = 2**24  # environments of a run
_COUNT = (0, 1e15)


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """How long, how large, on what, and what is kept."""

    num_envs: int = setting(
        0, "environments stepped together; 0 = as many as the algorithm's settings ask for", between=(0, MOST_ENVS)
    )
    seed: int = setting(0, "seed of everything random", between=(0, 2**32 - 1))
    total_env_steps: int = setting(
        0, "stop after so many environment steps (of all copies), in whole iterations", between=_COUNT
    )
    total_episodes: int = setting(
        0, "stop after so many episodes, for environments of fixed episode length", between=_COUNT
    )
    max_seconds: float = setting(
        0.0, "stop after so many seconds of training (of each process); moves no schedule", between=(0, 1e9)
    )
    schedule_env_steps: int = setting(
        0, "what schedules count as the whole run; 0 = the total of the first start", between=_COUNT
    )
    init_from: str = setting(
        "",
        "start with the weights of this run (of its best checkpoint), or of actor.pth[,critic.pth] of the published "
        "snakes trainer; empty = fresh ones",
    )
    devices: int = setting(0, "local devices to use; 0 = all", between=(0, 1e6))
    exact_sharding: bool = setting(False, "the same bits on any number of devices, at some cost in speed")
    logical_shards: int = setting(
        0, "parts of the batch that are sampled apart; 0 = the largest of 8, 4, 2, 1 that fits"
    )
    rollout_chunk: int = setting(
        0, "environments flown at a time where phases restart; 0 = measured, or by the memory plan",
        between=(0, MOST_ENVS),
    )  # fmt: skip
    learn_chunk: int = setting(
        0, "samples per gradient evaluation, added up to the minibatch; 0 = measured, or by the memory plan",
        between=(0, 1e9),
    )  # fmt: skip
    compiler_options: str = setting(
        "auto", "of XLA for training, name=value with spaces between; auto = those measured on this kind of device"
    )
    compute_dtype: Compute = setting("auto", "of matmuls and convolutions; auto = bfloat16 on accelerators")
    rollout_dtype: Store = setting("auto", "of stored observations in [0, 1]; auto = float16")
    memory_gb: float = setting(
        0.0, "memory per device that the plan may use, in GiB; 0 = what is free", between=(0, 1e6)
    )
    block_iterations: int = setting(16, "most iterations of one compiled call", between=(1, 10_000))
    block_seconds: float = setting(
        1.0, "iterations per compiled call are chosen to take about so long", between=(1e-3, 1e6)
    )
    log_every: int = setting(1, "iterations per line of metrics", between=(1, 1e9))
    self_play: int = setting(
        4,
        "most snapshots of the learner that play the other team wherever the opponent is 'self'; divides the games",
        between=(1, 1000),
    )
    self_play_every: int = setting(
        2000, "iterations between snapshots, the oldest of which is replaced", between=(1, 1e9)
    )
    eval_every: int = setting(
        0, "iterations between evaluations that choose the best checkpoint; 0 = never", between=(0, 1e9)
    )
    eval_episodes: int = setting(
        64, "episodes of such an evaluation, rounded up to a multiple of 8", between=(1, 100_000)
    )
    checkpoint_every: int = setting(
        0, "iterations between checkpoints; 0 = by checkpoint_minutes alone", between=(0, 1e9)
    )
    checkpoint_minutes: float = setting(
        5.0, "minutes between checkpoints; one is always written at the end", between=(1e-6, 1e6)
    )
    keep_checkpoints: int = setting(3, "newest checkpoints to keep, beside the best one", between=(1, 1_000_000))
    runs: str = setting("runs", "folder in which the run's own folder is made")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.logical_shards not in (0, 1, 2, 4, 8):
            raise ValueError(f"logical_shards must be 1, 2, 4 or 8 (or 0 = automatic), not {self.logical_shards}")


# Settings that may differ when a run is resumed. Devices change sums of floats unless the run is exact; none of the
# others changes what the next iteration computes.
FREE_ON_RESUME = (
    "total_env_steps", "total_episodes", "max_seconds", "devices", "memory_gb", "block_iterations", "block_seconds",
    "log_every", "eval_every", "eval_episodes", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints",
)  # fmt: skip
_TOTALS = ("total_env_steps", "total_episodes")  # two ways to say one thing


@dataclasses.dataclass(frozen=True)
class Config:
    """One run's settings; `env_settings` and `algo_settings` hold every field of their classes."""

    algo: str
    env: str
    run: RunSettings
    env_settings: dict[str, Any]
    algo_settings: dict[str, Any]

    def flat(self) -> dict[str, Any]:
        """The flat mapping, in the order of config.yaml."""
        head = {"algo": self.algo, "env": self.env}
        return {**head, **dataclasses.asdict(self.run), **self.env_settings, **self.algo_settings}

    def plain(self) -> dict[str, Any]:
        """The same in the types of YAML and JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.flat().items()}

    def with_run(self, **changes: Any) -> "Config":
        """A copy with other run settings. Raises UsageError for impossible values."""
        with usage_errors():
            return dataclasses.replace(self, run=dataclasses.replace(self.run, **changes))

    def to_yaml(self) -> str:
        """The text of config.yaml: reproduces the run with `--config`."""
        return yaml.safe_dump(self.plain(), sort_keys=False)

    def make_env(self) -> Environment:
        """The environment. Raises UsageError for impossible settings."""
        with usage_errors():
            return environments.make(self.env, **self.env_settings)


@contextlib.contextmanager
def usage_errors() -> typing.Iterator[None]:
    """ValueErrors, which environments and algorithms raise with a sentence, become UsageErrors.

    So do NotImplementedErrors, by which the base classes name what a user's class lacks.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None


# The schema: every setting of a run by name


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    kind: Any
    default: Any
    help: str
    section: str
    flag: bool  # whether the command line may set it
    between: Bounds | None


def _fields(cls: type, section: str) -> dict[str, _Field]:
    """The settings that a dataclass declares. Raises UsageError for one that cannot be a flag."""
    kinds = typing.get_type_hints(cls)
    given = ("spec", "layout") if issubclass(cls, Algorithm) else ()
    get = lambda f, name, default: f.metadata.get(name, default)  # noqa: E731
    fields = {
        f.name: _Field(
            *(f.name, kinds[f.name], f.default, get(f, "help", ""), section, get(f, "flag", True)),
            get(f, "between", None),
        )
        for f in dataclasses.fields(cls)
        if f.init and f.name not in given
    }
    for field in fields.values():
        if field.default is dataclasses.MISSING:
            raise UsageError(f"the {section} setting '{field.name}' has no default: declare it with setting(...)")
        inner = typing.get_args(field.kind)[:1] if typing.get_origin(field.kind) is tuple else (field.kind,)
        if inner and inner[0] not in (bool, int, float, str) and typing.get_origin(inner[0]) is not Literal:
            raise UsageError(
                f"the {section} setting '{field.name}' is of type {field.kind}: declare it as bool, int, float, str, "
                "a Literal or a tuple of one of them"
            )
    return fields


def _schema(algo: str, env: str) -> dict[str, _Field]:
    """All settings by name. Raises UsageError for unknown names and for names used twice."""
    with usage_errors():
        algo_class, env_class = algos.find(algo), environments.find(env)
    schema = _fields(RunSettings, "run")
    for section, fields in (
        ("environment", _fields(env_class, "environment")),
        ("algorithm", _fields(algo_class, "algorithm")),
    ):
        for name, field in fields.items():
            if name in schema or name in ("algo", "env", "config", "resume"):
                owner = schema[name].section if name in schema else "run"
                raise UsageError(
                    f"'{algo}' cannot be run on '{env}': the {section} setting '{name}' is already a setting of the "
                    f"{owner}; choose another environment, or rename a setting of your own"
                )
            schema[name] = field
    return schema


# Values


def _check(field: _Field, value: Any, where: str) -> Any:
    """A value from YAML in the field's type. Raises UsageError."""
    kind, origin = field.kind, typing.get_origin(field.kind)
    if origin is Literal:
        options = typing.get_args(kind)
        if any(value == option and type(value) is type(option) for option in options):
            return value
        near = closest(value if isinstance(value, str) else shown(value), [str(option) for option in options])
        raise UsageError(f"{where}: {field.name} is {shown(value)}: {near}")
    if origin is tuple and isinstance(value, list | tuple):
        kinds = _element_kinds(kind, len(value))
        if len(kinds) == len(value):
            parts = zip(kinds, value, strict=True)
            return tuple(_check(dataclasses.replace(field, kind=inner), item, where) for inner, item in parts)
    elif kind in (int, float):
        number = None if isinstance(value, bool) else _number(value)  # YAML 1.1 reads 1e-3 as a word
        if number is not None and (kind is float or number == int(number)):
            try:
                check_bounds(field.name, number, field.between)
            except ValueError as error:
                raise UsageError(f"{where}: {error}") from None
            return kind(number)
    elif isinstance(kind, type) and isinstance(value, kind):
        return value
    raise UsageError(f"{where}: {field.name} must be {_kind_name(kind)}, not {shown(value)}")


def _number(value: Any) -> int | float | None:
    if isinstance(value, int | float):
        return value if abs(value) < math.inf else None
    for convert in (int, float):
        with contextlib.suppress(ValueError, TypeError):
            number = convert(value)
            return number if abs(number) < math.inf else None
    return None


def _element_kinds(kind: Any, length: int) -> tuple[Any, ...]:
    """The types of the entries of tuple[X, ...] with `length` entries, or of tuple[X, Y]."""
    kinds = typing.get_args(kind)
    return (kinds[0],) * length if kinds[1:] == (Ellipsis,) else kinds


def _kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        return "a list of numbers" if kinds[1:] == (Ellipsis,) else f"a list of {len(kinds)} numbers"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}[kind]


_WORDS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def _parse(field: _Field, text: str) -> Any:
    """A value from the command line in the field's type. Raises UsageError."""
    value: Any = text
    if field.kind is bool:
        value = _WORDS.get(text.lower(), text)
    elif typing.get_origin(field.kind) is tuple:
        value = text.replace(",", " ").split()
    elif typing.get_origin(field.kind) is Literal:
        value = next((option for option in typing.get_args(field.kind) if str(option) == text), text)
    try:
        return _check(field, value, "the command line")
    except UsageError as error:
        raise UsageError(str(error).replace(f": {field.name} ", f": --{field.name} ", 1)) from None


# YAML


def preset_dirs() -> list[Path]:
    """Folders with presets: of the installed package, or of a checkout."""
    found = [Path(__file__).resolve().parents[2] / "configs"]
    with contextlib.suppress(ModuleNotFoundError):  # not in a checkout that is only on the path
        found.append(Path(str(resources.files("jaxrl.configs"))))
    return [folder for folder in found if folder.is_dir()]


def presets() -> dict[str, Path]:
    """All presets by name."""
    return {path.stem: path for folder in reversed(preset_dirs()) for path in sorted(folder.glob("*.yaml"))}


def find_preset(name: str) -> Path:
    """The file of `--config`: a path, or the name of a preset. Raises UsageError with the closest name."""
    path = Path(name)
    if is_file(path):
        return path
    if is_file(path / CONFIG):
        raise UsageError(f"{name} is a run: take --config {path / CONFIG} to start it anew, or --resume {name}")
    stem = path.stem if path.suffix == ".yaml" else name
    if stem in presets() and (path.parent == Path() or path.parent.name == "configs"):
        return presets()[stem]
    raise UsageError(f"there is no configuration {shown(name)}: {closest(stem, presets())}")


class _Reader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would take the last, and aliases, which repeat what they name."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds an alias (*name): write the value itself")
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # whatever Python says of a number, a date or a tag
            raise yaml.YAMLError(f"the value in line {node.start_mark.line + 1} cannot be read ({error})") from None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.YAMLError("a key stands twice in a mapping: leave one of them out")
        return mapping


_MOST_YAML = 2**20  # bytes of a configuration


def read_yaml(path: Path) -> dict[str, Any]:
    """Settings of a configuration. Raises UsageError when the file is unreadable or something else."""
    loaded = read_mapping(path, "configuration")
    for name in ("algo", "env"):
        if not isinstance(loaded.get(name, ""), str):
            raise UsageError(f"{path}: {name} must be a name, not {shown(loaded[name])}")
    return loaded


def read_mapping(path: Path, kind: str) -> dict[str, Any]:
    """A mapping in YAML; `kind` says what it is. Raises UsageError when the file is unreadable or something else."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_YAML + 1)
        if len(content) > _MOST_YAML:
            raise yaml.YAMLError(f"it is larger than {_MOST_YAML:,} bytes")
        loaded = yaml.load(content.decode(), _Reader)
    except OSError as error:
        raise UsageError(f"cannot read the {kind} {path} ({error.strerror}): name another file") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UsageError(f"cannot read the {kind} {path}: {reason[:_MOST_REASON]}") from None
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise UsageError(f"{path} must be a mapping of setting names to values")
    return loaded


_MOST_REASON = 300  # characters


def read_run(run: str | Path) -> tuple[Path, Config]:
    """A run's directory and the configuration in which its policies are used on this machine.

    Raises:
        RunError: there is no such run, or its environment has changed since.
        UsageError: its config.yaml is damaged.
    """
    directory, config = read_training_run(run)
    env = config.make_env().portable()
    settings = {name: getattr(env, name) for name in config.env_settings}
    return directory, dataclasses.replace(config, env_settings=settings)


def read_training_run(run: str | Path) -> tuple[Path, Config]:
    """The same, but the configuration in which the run is trained. Raises RunError, UsageError."""
    directory = open_run(run)
    path = directory / CONFIG
    config = build(read_yaml(path), str(path))
    check_environment(directory, config.env, environments.find(config.env).version)
    return directory, config


def build(values: dict[str, Any], where: str) -> Config:
    """A configuration from a flat mapping that names at least `algo`. Raises UsageError."""
    algo = values.get("algo")
    if algo is None:
        raise UsageError(f"{where} names no algorithm: add 'algo: NAME', one of {', '.join(algos.ALGORITHMS)}")
    env = _env_of(values)
    if env is None:
        raise UsageError(f"{where} names no environment for the algorithm '{algo}': add --env")
    schema = _schema(algo, env)
    settings = {name: field.default for name, field in schema.items()}
    for name, value in values.items():
        if name in ("algo", "env"):
            continue
        if name not in schema:
            helps = {name: field.help for name, field in schema.items()}
            raise UsageError(f"{where}: unknown setting {shown(name)}: {_suggestion(name, helps)}")
        settings[name] = _check(schema[name], value, where)
    sections: dict[str, dict[str, Any]] = {"run": {}, "environment": {}, "algorithm": {}}
    for name, field in schema.items():
        sections[field.section][name] = settings[name]
    with usage_errors():
        run = RunSettings(**sections["run"])
    return Config(algo, env, run, sections["environment"], sections["algorithm"])


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """`config` with what the command line changes; one kind of total replaces the other. Raises UsageError."""
    values = config.flat()
    if any(changes.get(name) for name in _TOTALS):
        values |= dict.fromkeys(_TOTALS, 0)
    return build({**values, **changes}, "the command line")


def resumed(config: Config, changes: dict[str, Any]) -> Config:
    """The configuration of a resumed run. Raises UsageError that names a setting which may not change."""
    for name, value in changes.items():
        if name not in FREE_ON_RESUME and value != config.flat()[name]:
            raise UsageError(
                f"{name} cannot change on resume (the run has {shown(config.flat()[name])}, you gave {shown(value)}): "
                f"start a new run with --init_from, or change only {', '.join(FREE_ON_RESUME)}"
            )
    return changed(config, changes)


# The command line


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence.

    It names the closest flag, or, if this one `trains`, the algorithms that have such a flag.
    """

    def __init__(self, trains: bool = False, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.trains = trains
        self._negative_number_matcher = re.compile(r"-\.?\d")  # values, not flags; argparse does not know -1e-3

    def flags(self) -> dict[str, str]:
        """All long flags, and the help of each."""
        return {
            option: action.help or ""
            for action in self._actions
            for option in action.option_strings
            if option.startswith("--")
        }

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            word = (message.removeprefix(prefix).split() or [" "])[0].split("=")[0]
            if not word.startswith("-"):
                raise UsageError(f"unexpected word {shown(word)}: flags begin with --")
            if self.trains and (owners := _owners(word.removeprefix("--"))):
                raise UsageError(f"'{word}' is a setting of {' and '.join(owners)}, not of what is to be trained here")
            raise UsageError(f"unknown flag {shown(word)}: {_suggestion(word, self.flags())}")
        missing = re.fullmatch(r"argument (\S+): expected one argument", message)
        raise UsageError(f"{missing[1]} needs a value" if missing else message)


def _suggestion(word: str, known: dict[str, str]) -> str:
    """Half a sentence that offers what may have been meant by an unknown name.

    Args:
        word: the name.
        known: {name: its explanation}.
    """
    words = re.split("[-_]+", word[:100].strip("-").lower())
    ending, meaning = "_" + "_".join(words), " ".join(words)
    akin = [name for name in known if name.endswith(ending)]
    if len(words) > 1:
        akin += [name for name, text in known.items() if text.startswith(meaning) and name not in akin]
    if akin:
        return f"did you mean {' or '.join(akin[:4])}?"
    near = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else "see --help for all of them"


def _owners(name: str) -> list[str]:
    """The algorithms that have a setting with a flag of this name."""
    fields = {algo: _fields(algos.find(algo), "algorithm").get(name) for algo in algos.ALGORITHMS}
    return [algo for algo, field in fields.items() if field is not None and field.flag]


@dataclasses.dataclass(frozen=True)
class Request:
    """What a command line asks for: a configuration, or (`resume`) that of a run, and what is to change in it."""

    config: Config
    resume: str | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


def _sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--algo",
        metavar="NAME",
        help=f"algorithm: {', '.join(algos.ALGORITHMS)}, or module:Class of your own; its preset comes along in the "
        "environments for which it was made; with --help: its settings too",
    )
    parser.add_argument("--env", metavar="NAME", help="environment: a registered name, or module:Class of your own")
    parser.add_argument(
        "--config", metavar="FILE", help="preset (a name from configs/ or a YAML file); else the algo's"
    )
    parser.add_argument("--resume", metavar="RUN", help="continue this run exactly where its last checkpoint stands")


# The settings of a run that the help begins with, and those that it shows where an environment has this attribute.
_FIRST = ("num_envs", "total_env_steps", "total_episodes", "max_seconds", "seed", "runs")
_SHOWN_WITH = {"self_play": "takes_rivals", "self_play_every": "takes_rivals"}


def parse(
    argv: Sequence[str],
    prog: str = "python -m jaxrl.train",
    description: str | None = None,
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Request:
    """The command line of `train` (and of `doctor`, which plans the same).

    Args:
        argv: without what `add_flags` adds.
        prog, description: for the help.
        add_flags: adds what the verb reads by itself, for the end of the help.

    Raises:
        UsageError: one sentence.
    """
    base, resume = _base(list(argv), prog)
    usage = f"{prog} --algo NAME [--env NAME] [--config FILE] [--SETTING VALUE ...]"
    parser = Parser(trains=True, prog=prog, description=description, usage=usage)
    _sources(parser)
    schema, env = _schema(base.algo, base.env), environments.find(base.env)
    groups: dict[str, Any] = {"first": parser}
    for section, title in (
        ("algorithm", f"algorithm {base.algo}"), ("environment", f"environment {base.env}"), ("run", "more of the run")
    ):  # fmt: skip
        groups[section] = parser.add_argument_group(title)
    for name in (*_FIRST, *(name for name in schema if name not in _FIRST)):
        field = schema[name]
        if field.flag:
            hidden = name in _SHOWN_WITH and not hasattr(env, _SHOWN_WITH[name])
            _add_flag(groups["first" if name in _FIRST else field.section], field, base.flat()[name], hidden)
    if add_flags is not None:
        add_flags(parser)
    parsed = vars(parser.parse_args(list(argv)))
    changes = {name: _parse(schema[name], parsed[name]) for name in schema if name in parsed}
    if resume is not None:
        return Request(base, resume, changes)
    return Request(changed(base, changes), changes=changes)


def _base(argv: list[str], prog: str) -> tuple[Config, str | None]:
    """The configuration that the flags change, found before its own flags are known, and the run to resume."""
    parser = Parser(prog=prog, add_help=False)
    _sources(parser)
    known, others = parser.parse_known_args(argv)
    helping = any(word in ("-h", "--help") for word in argv)
    if known.resume is not None:
        if known.config or known.algo or known.env:
            raise UsageError(
                "--resume takes algorithm, environment and settings from the run: leave the other flag out"
            )
        directory, config = read_training_run(known.resume)
        return config, str(directory)
    values, where = _preset(known.algo, known.config)
    if known.algo is None and known.config is None:
        if not helping:
            for word in others:
                if difflib.get_close_matches(word.split("=")[0][:100], list(parser.flags()), n=1, cutoff=0.7):
                    parser.error(f"unrecognized arguments: {word}")
            raise UsageError("say what to train: --algo NAME or --config FILE (or --resume RUN)")
        values = {"algo": "coma"}
    if known.algo is not None and values.setdefault("algo", known.algo) != known.algo:
        raise UsageError(f"{where} is for the algorithm '{values['algo']}', not '{known.algo}': leave one of them out")
    if known.env is not None and known.env != (former := _env_of(values)):
        if known.config is None and not (former and _related(former, known.env)):  # a preset for something else
            values, where = {"algo": values["algo"]}, "the command line"
        values = _moved(values, known.env)
    return build(values, where), None


def _preset(algo: str | None, config: str | None) -> tuple[dict[str, Any], str]:
    """The YAML file of `--config`, else that of `--algo` (a user's own class has none), and what to call it."""
    if config is not None:
        path = find_preset(config)
        return read_yaml(path), str(path)
    if algo is not None:
        with usage_errors():
            algos.find(algo)
        if algo in presets():
            return read_yaml(presets()[algo]), str(presets()[algo])
    return {}, "the command line"


def _env_of(values: dict[str, Any]) -> str | None:
    return values.get("env", DEFAULT_ENV.get(values.get("algo", "")))


def _moved(values: dict[str, Any], env: str) -> dict[str, Any]:
    """A preset carried over to another environment, without the former one's settings unless the two are related."""
    former, kept = _env_of(values), set()
    with usage_errors():
        dropped = set(_fields(environments.find(former), "environment")) if former else set()
        if former and _related(former, env):
            kept = set(_fields(environments.find(env), "environment"))
    return {name: value for name, value in values.items() if name not in dropped - kept} | {"env": env}


def _related(one: str, other: str) -> bool:
    """Whether two environments are of one family, so that settings mean the same. Raises UsageError."""
    with usage_errors():
        classes = [{*environments.find(name).__mro__} - {*Environment.__mro__} for name in (one, other)]
    return bool(classes[0] & classes[1])


def _add_flag(group: Any, field: _Field, default: Any, hidden: bool = False) -> None:
    value = ",".join(map(str, default)) if isinstance(default, tuple) else default
    bounds = "" if field.between is None else f"{plain(field.between[0])} to {plain(field.between[1])}; "
    text = f"{field.help} ({bounds}default: {value if value != '' else 'empty'})".replace("%", "%%")
    alone: dict[str, Any] = {"nargs": "?", "const": "true"} if field.kind is bool else {}
    text = argparse.SUPPRESS if hidden else text
    group.add_argument(f"--{field.name}", default=argparse.SUPPRESS, metavar=_metavar(field.kind), help=text, **alone)


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    return "A,B,..." if typing.get_origin(kind) is tuple else str(kind.__name__).upper()


class EnvironmentFlags:
    """The settings of one environment as flags of a verb that needs no algorithm.

    Args:
        parser: gets the flags, as a group; a name that the verb itself uses keeps the verb's meaning.
        env: a registered name, or "module:Class".
        current: settings that take the place of the class's defaults (those of a run).

    Raises:
        UsageError: unknown environment.
    """

    def __init__(self, parser: argparse.ArgumentParser, env: str, current: dict[str, Any] | None = None) -> None:
        with usage_errors():
            fields = _fields(environments.find(env), "environment")
        self._current = {name: field.default for name, field in fields.items()} | (current or {})
        self._fields: dict[str, _Field] = {}
        group = parser.add_argument_group(f"environment {env}")
        for name, field in fields.items():
            if not field.flag:
                continue
            with contextlib.suppress(argparse.ArgumentError):
                _add_flag(group, field, self._current[name])
                self._fields[name] = field

    def settings(self, parsed: dict[str, Any]) -> dict[str, Any]:
        """All settings, given what argparse found. Raises UsageError."""
        given = {name: _parse(field, parsed[name]) for name, field in self._fields.items() if name in parsed}
        return self._current | given


def _backend_works() -> bool:
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False


def exit_on_error(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """A verb's main: UserErrors become one sentence on stderr and their exit code, without a traceback."""

    @functools.wraps(main)
    def wrapped(argv: Sequence[str] | None = None) -> int:
        if argv is None:
            interrupt.install()
        try:
            return main(sys.argv[1:] if argv is None else argv) or 0
        except UserError as error:
            print(f"error: {one_line(str(error))}", file=sys.stderr)
            return error.exit_code
        except BrokenPipeError:  # whoever read the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except KeyboardInterrupt:
            interrupt.answered()
            print("stopped by the keyboard", file=sys.stderr)
            if argv is None:  # threads that compile do not survive the end of Python
                sys.stdout.flush()
                os._exit(130)
            return 130
        except (RuntimeError, AssertionError):
            platforms = os.environ.get("JAX_PLATFORMS")
            if not platforms or _backend_works():
                raise
            sentence = f"JAX_PLATFORMS={shown(platforms)} is nothing that JAX can use here: unset it"
            print(f"error: {sentence}", file=sys.stderr)
            return 1

    return wrapped
