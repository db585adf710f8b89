"""Settings of a run: defaults of the dataclasses < a YAML preset < flags. Every field is a flat flag.

A configuration is one flat mapping: `algo`, `env`, the fields of `RunSettings`, those of the environment's class
and those of the algorithm's class. The same mapping, fully resolved, is written to a run's config.yaml.
"""

import argparse
import contextlib
import dataclasses
import math
import sys
import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from envs_jax import base as environments
from envs_jax.base import Environment, closest, setting
from jaxrl import algos
from jaxrl.algos.base import Algorithm
from jaxrl.errors import UsageError
from jaxrl.precision import Compute, Store

DEFAULT_ENV = {"coma": "coverage"}  # what `--algo` alone trains on


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """How long, how large, on what, and what is kept."""

    num_envs: int = setting(0, "environments stepped together; 0 = as many as the algorithm's settings ask for")
    seed: int = setting(0, "seed of everything random")
    total_env_steps: int = setting(0, "stop after so many environment steps (all copies together)")
    total_episodes: int = setting(0, "stop after so many episodes, for environments of fixed episode length")
    max_seconds: float = setting(0.0, "stop after so many seconds of training; moves no schedule; 0 = no limit")
    schedule_env_steps: int = setting(0, "what schedules count as the whole run; 0 = the total of the first start")
    devices: int = setting(0, "local devices to use; 0 = all")
    exact_sharding: bool = setting(False, "the same bits on any number of devices, at some cost in speed")
    logical_shards: int = setting(
        0, "parts of the batch that are sampled apart; 0 = the largest of 8, 4, 2, 1 that fits"
    )
    rollout_chunk: int = setting(0, "environments flown at a time where phases restart; 0 = by the memory plan")
    learn_chunk: int = setting(0, "samples per gradient evaluation, added up to the minibatch; 0 = by the memory plan")
    compute_dtype: Compute = setting("auto", "of matmuls and convolutions; auto = bfloat16 on accelerators")
    rollout_dtype: Store = setting("auto", "of stored observations in [0, 1]; auto = float16")
    memory_gb: float = setting(0.0, "memory per device that the plan may use, in GiB; 0 = what is free")
    block_iterations: int = setting(16, "most iterations of one compiled call")
    block_seconds: float = setting(1.0, "iterations per compiled call are chosen to take about so long")
    log_every: int = setting(1, "iterations per line of metrics")
    eval_every: int = setting(0, "iterations between evaluations that choose the best checkpoint; 0 = never")
    eval_episodes: int = setting(64, "episodes of such an evaluation")
    checkpoint_every: int = setting(0, "iterations between checkpoints; 0 = by checkpoint_minutes alone")
    checkpoint_minutes: float = setting(5.0, "minutes between checkpoints; one is always written at the end")
    keep_checkpoints: int = setting(3, "newest checkpoints to keep, beside the best one")
    runs: str = setting("runs", "folder in which the run's own folder is made")

    def __post_init__(self) -> None:
        for name in (
            "num_envs",
            "total_env_steps",
            "total_episodes",
            "max_seconds",
            "schedule_env_steps",
            "devices",
            "rollout_chunk",
            "learn_chunk",
            "memory_gb",
            "eval_every",
            "checkpoint_every",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or above, not {getattr(self, name)}")
        for name in (
            "block_iterations",
            "block_seconds",
            "log_every",
            "eval_episodes",
            "checkpoint_minutes",
            "keep_checkpoints",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie between 0 and {2**32 - 1}, not {self.seed}")
        if self.logical_shards not in (0, 1, 2, 4, 8):
            raise ValueError(f"logical_shards must be 1, 2, 4 or 8 (or 0 = automatic), not {self.logical_shards}")


# Fields that may differ when a run is resumed: none of them changes what the next iteration computes.
FREE_ON_RESUME = (
    "total_env_steps", "total_episodes", "max_seconds", "devices", "memory_gb", "block_iterations", "block_seconds",
    "log_every", "eval_every", "eval_episodes", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "runs",
)  # fmt: skip


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

    def with_run(self, **changes: Any) -> "Config":
        """A copy with other run settings. Raises UsageError for impossible values."""
        try:
            return dataclasses.replace(self, run=dataclasses.replace(self.run, **changes))
        except ValueError as error:
            raise UsageError(str(error)) from None

    def to_yaml(self) -> str:
        """The text of config.yaml: reproduces the run with `--config`."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in self.flat().items()}
        return yaml.safe_dump(plain, sort_keys=False)

    def make_env(self) -> Environment:
        """The environment. Raises UsageError for impossible settings."""
        try:
            return environments.make(self.env, **self.env_settings)
        except ValueError as error:
            raise UsageError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    kind: Any
    default: Any
    help: str
    section: str


def _fields(cls: type, section: str) -> dict[str, _Field]:
    kinds = typing.get_type_hints(cls)
    return {
        f.name: _Field(f.name, kinds[f.name], f.default, f.metadata.get("help", ""), section)
        for f in dataclasses.fields(cls)
        if f.init and not (issubclass(cls, Algorithm) and f.name in ("spec", "layout"))
    }


def _schema(algo: str, env: str) -> dict[str, _Field]:
    """All settings by name. Raises UsageError for unknown names and for names used twice."""
    try:
        algo_class, env_class = algos.find(algo), environments.find(env)
    except ValueError as error:
        raise UsageError(str(error)) from None
    schema = _fields(RunSettings, "run")
    for section, fields in (
        ("environment", _fields(env_class, "environment")),
        ("algorithm", _fields(algo_class, "algorithm")),
    ):
        for name, field in fields.items():
            if name in schema or name in ("algo", "env", "config", "resume", "init_from"):
                raise UsageError(f"the {section} setting '{name}' is already a setting of the run: rename it")
            if field.default is dataclasses.MISSING:
                raise UsageError(f"the {section} setting '{name}' has no default: declare it with setting(...)")
            schema[name] = field
    return schema


def _check(field: _Field, value: Any, where: str) -> Any:
    """A value from YAML in the field's type. Raises UsageError."""
    kind, origin = field.kind, typing.get_origin(field.kind)
    if origin is Literal:
        options = typing.get_args(kind)
        if value in options:
            return value
        raise UsageError(f"{where}: {field.name} is {value!r}: {closest(str(value), [str(o) for o in options])}")
    if origin is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(kind)[0]
        return tuple(_check(dataclasses.replace(field, kind=inner), item, where) for item in value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind if isinstance(kind, type) else object) and not (kind is int and isinstance(value, bool)):
        return value
    name = getattr(kind, "__name__", str(kind))
    raise UsageError(f"{where}: {field.name} must be of type {name}, not {value!r}")


def _parse(field: _Field, text: str) -> Any:
    """A value from the command line in the field's type. Raises UsageError."""
    kind, origin = field.kind, typing.get_origin(field.kind)
    flag = f"--{field.name}"
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}[text.lower()]
        if origin is tuple:
            inner = typing.get_args(kind)[0]
            return tuple(inner(part) for part in text.replace(",", " ").split())
        if kind is int:
            return int(float(text)) if float(text).is_integer() else int(text)
        if kind is float:
            return float(text)
    except (ValueError, KeyError, OverflowError):
        name = "true or false" if kind is bool else "numbers" if origin is tuple else f"of type {kind.__name__}"
        raise UsageError(f"{flag} must be {name}, not '{text}'") from None
    return _check(field, text, flag) if origin is Literal else text


def preset_dirs() -> list[Path]:
    """Folders with presets: of the installed package, or of a checkout."""
    found = [Path(__file__).resolve().parent.parent / "configs"]
    try:
        found.insert(0, Path(str(resources.files("jaxrl.configs"))))
    except ModuleNotFoundError:  # an editable install without the mapping: the checkout's folder serves
        pass
    return [folder for folder in found if folder.is_dir()]


def find_preset(name: str) -> Path:
    """The file of `--config`: a path, or the name of a preset. Raises UsageError with the closest name."""
    presets = {path.stem: path for folder in reversed(preset_dirs()) for path in folder.glob("*.yaml")}
    path = Path(name)
    if path.is_file():
        return path
    stem = path.stem if path.suffix == ".yaml" else name
    if stem in presets and (path.parent == Path() or path.parent.name == "configs"):
        return presets[stem]
    raise UsageError(f"there is no configuration '{name}': {closest(stem, presets)}")


def read_yaml(path: Path) -> dict[str, Any]:
    """A flat mapping. Raises UsageError when the file is unreadable or something else."""
    try:
        loaded = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"cannot read the configuration {path}: {reason}") from None
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise UsageError(f"{path} must be a mapping of setting names to values")
    return loaded


def build(values: dict[str, Any], where: str) -> Config:
    """A configuration from a flat mapping that names at least `algo`. Raises UsageError."""
    algo = values.get("algo")
    if not isinstance(algo, str):
        raise UsageError(f"{where} names no algorithm: add 'algo: coma'")
    env = values.get("env", DEFAULT_ENV.get(algo))
    if not isinstance(env, str):
        raise UsageError(f"{where} names no environment for the algorithm '{algo}': add --env")
    schema = _schema(algo, env)
    settings = {name: field.default for name, field in schema.items()}
    for name, value in values.items():
        if name in ("algo", "env"):
            continue
        if name not in schema:
            raise UsageError(f"{where}: unknown setting '{name}': {closest(name, schema)}")
        settings[name] = _check(schema[name], value, where)
    part = lambda section: {n: settings[n] for n, f in schema.items() if f.section == section}  # noqa: E731
    try:
        run = RunSettings(**part("run"))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Config(algo, env, run, part("environment"), part("algorithm"))


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, with the closest flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        flags = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            word = message[len(prefix) :].split()[0].split("=")[0]
            hint = closest(word, flags) if word.startswith("-") else "flags begin with --"
            near = hint if hint.startswith("did") or "begin" in hint else "see --help for all flags"
            message = f"unknown flag '{word}': {near}" if word.startswith("-") else f"unexpected word '{word}': {near}"
        raise UsageError(message)


@dataclasses.dataclass(frozen=True)
class Request:
    """What a command line asks for: a configuration, or a run to resume with changed settings."""

    config: Config | None
    resume: str | None = None
    init_from: str | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


def _sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algo", metavar="NAME", help="algorithm: coma, or module:Class of your own")
    parser.add_argument("--env", metavar="NAME", help="environment: a registered name, or module:Class of your own")
    parser.add_argument(
        "--config", metavar="FILE", help="preset (a name from configs/ or a YAML file); else the algo's"
    )
    parser.add_argument("--resume", metavar="RUN", help="continue this run exactly where its last checkpoint stands")
    parser.add_argument("--init_from", metavar="RUN", help="start with the weights of this run (the best it kept)")


def parse(argv: Sequence[str], prog: str = "python -m jaxrl.train", description: str | None = None) -> Request:
    """The command line of `train` (and of `doctor`, which plans the same). Raises UsageError."""
    first = Parser(prog=prog, add_help=False)
    _sources(first)
    known, _ = first.parse_known_args(list(argv))
    helping = any(word in ("-h", "--help") for word in argv)
    if known.resume is not None and (known.config or known.algo or known.env or known.init_from):
        raise UsageError("--resume takes algorithm, environment and settings from the run: leave the other flag out")
    values: dict[str, Any] = {}
    where = "the command line"
    if known.resume is not None:
        path = Path(known.resume) / "config.yaml"
        if not path.is_file() and not helping:
            from jaxrl.run_directory import open_run

            open_run(known.resume)  # raises the sentence
        values, where = read_yaml(path), str(path)
    elif known.config is not None or known.algo is not None:
        if known.config is not None:
            path = find_preset(known.config)
        elif ":" in known.algo:
            path = None
        else:
            try:
                algos.find(known.algo)
            except ValueError as error:
                raise UsageError(str(error)) from None
            path = find_preset(known.algo)
        if path is not None:
            values, where = read_yaml(path), str(path)
    elif not helping:
        raise UsageError("say what to train: --algo NAME or --config FILE (or --resume RUN)")
    if known.algo is not None and values.get("algo", known.algo) != known.algo:
        raise UsageError(f"{where} is for the algorithm '{values['algo']}', not '{known.algo}': leave one of them out")
    values = {"algo": known.algo or "coma", **values} if known.algo or helping else values
    if known.env is not None and known.env != values.get("env", DEFAULT_ENV.get(values.get("algo", ""))):
        values = _without_other_env(values, known.env)
    base = build(values, where)
    parser = Parser(prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    _sources(parser)
    schema = _schema(base.algo, base.env)
    groups: dict[str, Any] = {}
    for name, field in schema.items():
        title = {"environment": f"environment {base.env}", "algorithm": f"algorithm {base.algo}"}.get(field.section)
        group = groups.setdefault(field.section, parser.add_argument_group(title or "run"))
        _add_flag(group, field, base.flat()[name])
    parsed = vars(parser.parse_args(list(argv)))
    changes = {name: _parse(schema[name], parsed[name]) for name in schema if name in parsed}
    if known.resume is not None:
        return Request(base, resume=known.resume, changes=changes)
    config = build({**base.flat(), **changes}, "the command line")
    return Request(config, init_from=known.init_from, changes=changes)


def _add_flag(group: Any, field: _Field, default: Any) -> None:
    text = f"{field.help} (default: {default})".replace("%", "%%")
    group.add_argument(f"--{field.name}", default=argparse.SUPPRESS, metavar=_metavar(field.kind), help=text)


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
        try:
            fields = _fields(environments.find(env), "environment")
        except ValueError as error:
            raise UsageError(str(error)) from None
        self._current = {name: field.default for name, field in fields.items()} | (current or {})
        self._fields: dict[str, _Field] = {}
        group = parser.add_argument_group(f"environment {env}")
        for name, field in fields.items():
            with contextlib.suppress(argparse.ArgumentError):
                _add_flag(group, field, self._current[name])
                self._fields[name] = field

    def settings(self, parsed: dict[str, Any]) -> dict[str, Any]:
        """All settings, given what argparse found. Raises UsageError."""
        given = {name: _parse(field, parsed[name]) for name, field in self._fields.items() if name in parsed}
        return self._current | given


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    return "A,B,..." if typing.get_origin(kind) is tuple else str(kind.__name__).upper()


def _without_other_env(values: dict[str, Any], env: str) -> dict[str, Any]:
    """A preset carried over to another environment: settings of the former environment are dropped."""
    former = values.get("env", DEFAULT_ENV.get(values.get("algo", "")))
    try:
        dropped = set(_fields(environments.find(former), "environment")) if former else set()
        kept = set(_fields(environments.find(env), "environment"))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return {name: value for name, value in values.items() if name not in dropped - kept} | {"env": env}


def resumed(config: Config, changes: dict[str, Any]) -> Config:
    """The configuration of a resumed run. Raises UsageError that names a setting which may not change."""
    for name, value in changes.items():
        if name not in FREE_ON_RESUME and value != config.flat()[name]:
            raise UsageError(
                f"{name} cannot change on resume (the run has {config.flat()[name]}, you gave {value}): start a new run "
                f"with --init_from, or change only {', '.join(FREE_ON_RESUME)}"
            )
    return build({**config.flat(), **changes}, "the command line")


def exit_on_error(main: Any) -> Any:
    """A verb's main: UserErrors become one sentence on stderr and their exit code, without a traceback."""
    from jaxrl.errors import UserError

    def wrapped(argv: Sequence[str] | None = None) -> int:
        try:
            return main(sys.argv[1:] if argv is None else argv) or 0
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print("stopped by the keyboard", file=sys.stderr)
            return 130

    return wrapped
