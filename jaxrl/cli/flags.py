"""Command lines: every setting is a flat flag, and errors are one sentence."""

import argparse
import contextlib
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from envs_jax.base import find as find_class
from envs_jax.settings import ADAPTERS, format_bound, registered, short_repr
from jaxrl import algos
from jaxrl.common.errors import UsageError
from jaxrl.integrations.published import hint, translate_flags
from jaxrl.runtime.config import (
    Config,
    Field,
    apply_changes,
    check_value,
    describe_owners,
    find_fields,
    make_schema,
    suggestion,
)
from jaxrl.runtime.presets import base_and_source, presets
from jaxrl.runtime.run_directory import checkpoint_folder, choose_checkpoint, split_checkpoint
from jaxrl.runtime.saved_run import read_training_run

_WORDS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


def _parse(field: Field, text: str) -> Any:
    """Convert command-line text to the field's type. Raises UsageError."""
    value: Any = text
    if field.kind is bool:
        value = _WORDS.get(text.lower(), text)
    elif _is_list(field.kind) or ("," in text and any(map(_is_list, typing.get_args(field.kind)))):
        value = text.replace(",", " ").split()
    elif typing.get_origin(field.kind) is Literal:
        value = next((option for option in typing.get_args(field.kind) if str(option) == text), text)
    try:
        return check_value(field, value, "the command line")
    except UsageError as error:
        raise UsageError(str(error).replace(f": {field.name} ", f": --{field.name} ", 1)) from None


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-sentence errors.

    For an unknown flag they name the closest one. In a command that trains `algo` they also say what the flag of a
    published system is called here, or which algorithms have such a flag.
    """

    def __init__(self, algo: str = "", **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.algo = algo
        self._negative_number_matcher = re.compile(r"-\.?\d")  # values, not flags; argparse does not know -1e-3

    def flags(self) -> dict[str, str]:
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
            published_name = hint(word, self.algo) if self.algo else None
            if not word.startswith("-"):
                advice = published_name or _find_flag(word) or "flags begin with --"
                raise UsageError(f"unexpected word {short_repr(word)}: {advice}")
            if self.algo and word in _DEVICE_FLAGS:
                raise UsageError(
                    f"unknown flag '{word}': JAX finds a GPU by itself; to train on the CPU, put JAX_PLATFORMS=cpu "
                    "before the command"
                )
            if published_name:
                raise UsageError(f"unknown flag {short_repr(word)}: {published_name}")
            if self.algo and (owners := describe_owners(word.removeprefix("--"), self.algo)):
                raise UsageError(f"'{word}' {owners}: leave it out")
            raise UsageError(f"unknown flag {short_repr(word)}: {suggestion(word, self.flags())}")
        missing = re.fullmatch(r"argument (\S+): expected one argument", message)
        raise UsageError(f"{missing[1]} needs a value" if missing else message)


def _find_flag(word: str) -> str | None:
    """Return the advice for a name that needs its flag before it, None for any other word."""
    for flag, names in (("--algo", algos.ALGORITHMS), ("--config", presets()), ("--env", registered())):
        if word in names:
            return f"did you mean {flag} {word}?"
    return None


@dataclasses.dataclass(frozen=True)
class Request:
    """A parsed command line: a configuration, or (`resume`) a run and the changes to its configuration.

    `flags` holds the flags of the command itself, `source` a line that says which preset the configuration is from.
    """

    config: Config
    resume: str | None
    changes: dict[str, Any]
    flags: argparse.Namespace
    source: str


def _sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--algo",
        metavar="NAME",
        help=f"algorithm: {', '.join(algos.ALGORITHMS)}, or module:Class of your own; its preset is used in the "
        "environments for which it was made; with --help its settings are listed, too",
    )
    known = ", ".join(registered())
    others = ", ".join(ADAPTERS)
    parser.add_argument(
        "--env",
        metavar="NAME",
        help=f"environment: {known}; LIBRARY:NAME of another library ({others}), such as gymnax:Pendulum-v1; or "
        "module:Class of your own",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="preset, a name from configs/ or a YAML file; by default the algorithm's"
    )
    parser.add_argument("--resume", metavar="RUN", help="continue this run exactly from its last checkpoint")


_DEVICE_FLAGS = ("--gpu", "--cuda", "--tpu", "--cpu")  # flags of other trainers
_FIRST = ("num_envs", "total_env_steps", "total_episodes", "max_seconds", "seed", "runs")  # in the help
_OPPONENT_SETTINGS = ("self_play", "self_play_every")  # in the help of environments with opponents only


def parse(
    argv: Sequence[str],
    prog: str = "python -m jaxrl.train",
    description: str | None = None,
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Request:
    """Parse the command line of `train` (and of `doctor`, which plans the same run).

    `add_flags` adds the flags of the command itself, at the end of the help. Raises UsageError.
    """
    config, source, resume = _base(list(argv), prog)
    usage = f"{prog} --algo NAME [--env NAME] [--config FILE] [--SETTING VALUE ...]"
    parser = Parser(config.algo, prog=prog, description=description, usage=usage)
    _sources(parser)
    schema = make_schema(config.algo, config.env)
    groups: dict[str, Any] = {"first": parser}
    titles = {
        "algorithm": f"algorithm {config.algo} (of another: --algo NAME --help)",
        "environment": f"environment {config.env} (of another: --env NAME --help)",
        "run": "more of the run",
    }
    groups |= {section: parser.add_argument_group(title) for section, title in titles.items()}
    for name in (*_FIRST, *(name for name in schema if name not in _FIRST)):
        field = schema[name]
        if field.flag:
            hidden = name in algos.find(config.algo).fixed_settings or (
                name in _OPPONENT_SETTINGS and not hasattr(find_class(config.env), "accepts_opponent_actions")
            )
            _add_flag(groups["first" if name in _FIRST else field.section], field, _show_default(config, name), hidden)
    groups["run"].add_argument(
        "--checkpoint", metavar="N", help="with --init_from RUN: number of the checkpoint, as in RUN/checkpoints"
    )
    if add_flags is not None:
        add_flags(parser)
    flags = parser.parse_args(translate_flags(argv, config.algo, schema))
    changes = {name: _parse(schema[name], text) for name, text in vars(flags).items() if name in schema}
    if flags.checkpoint is not None:
        if resume is not None:
            raise _resumes_newest(resume, flags.checkpoint)
        changes["init_from"] = _resolve_checkpoint(changes.get("init_from", ""), flags.checkpoint)
    return Request(apply_changes(config, changes) if resume is None else config, resume, changes, flags, source)


def _base(argv: list[str], prog: str) -> tuple[Config, str, str | None]:
    """Return the configuration that the flags change, its source, and the run to resume; settings have no flags yet."""
    parser = Parser(prog=prog, add_help=False)
    _sources(parser)
    known, others = parser.parse_known_args(argv)
    helping = any(word in ("-h", "--help") for word in argv)
    if known.resume is not None:
        run, checkpoint = split_checkpoint(known.resume)
        if checkpoint is not None:
            raise _resumes_newest(run, checkpoint)
        if known.config or known.algo or known.env:
            raise UsageError(
                "--resume takes algorithm, environment and settings from the run: leave the other flag out"
            )
        directory, config = read_training_run(known.resume)
        return config, f"settings of {directory}", str(directory)
    if known.algo is None and known.config is None:
        if not helping:
            for word in others:
                if _find_flag(word) or word in _DEVICE_FLAGS:
                    Parser("coma", prog=prog).error(f"unrecognized arguments: {word}")
                if difflib.get_close_matches(word.split("=")[0][:100], list(parser.flags()), n=1, cutoff=0.7):
                    parser.error(f"unrecognized arguments: {word}")
            raise UsageError("say what to train: --algo NAME or --config FILE (or --resume RUN)")
        return *base_and_source("coma", known.config, known.env), None
    return *base_and_source(known.algo, known.config, known.env), None


def _resumes_newest(run: str | Path, checkpoint: int | str) -> UsageError:
    return UsageError(
        f"--resume {run} continues from the newest checkpoint: to begin a new run with the weights of another, give "
        f"--init_from {run} --checkpoint {checkpoint} instead"
    )


def _resolve_checkpoint(run: str, number: str) -> str:
    """Return the folder of a checkpoint of the run that `--init_from` names. Raises UsageError."""
    if not number.isdecimal():
        raise UsageError(f"--checkpoint must be the number of a checkpoint, not {short_repr(number)}")
    if not run or run.endswith(".pth"):
        raise UsageError("--checkpoint chooses one of the checkpoints of a run: name the run with --init_from")
    return str(checkpoint_folder(choose_checkpoint(run, int(number))[0], int(number)))


def _add_flag(group: Any, field: Field, default: str, hidden: bool = False) -> None:
    bounds = "" if field.between is None else f"{format_bound(field.between[0])} to {format_bound(field.between[1])}; "
    text = f"{field.help} ({bounds}default: {default})".replace("%", "%%")
    options: dict[str, Any] = {"nargs": "?", "const": "true"} if field.kind is bool else {}
    text = argparse.SUPPRESS if hidden else text
    group.add_argument(f"--{field.name}", default=argparse.SUPPRESS, metavar=_metavar(field.kind), help=text, **options)


def _show_default(config: Config, name: str) -> str:
    on_a_cpu = f", on a CPU {_show(config.cpu_settings[name])}" if name in config.cpu_settings else ""
    return _show(config.flat()[name]) + on_a_cpu


def _show(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text or "empty"


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return "|".join(map(_metavar, typing.get_args(kind)))
    return "A,B,..." if _is_list(kind) else {str: "TEXT"}.get(kind, kind.__name__.upper())


def add_environment(
    parser: argparse.ArgumentParser, env: str, current: dict[str, Any] | None = None
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Add the settings of one environment as flags of a command without an algorithm, as a group.

    A name that the command itself uses keeps the command's meaning. `current` settings, from a run, replace the class's
    defaults. Returns a function from argparse's result to all settings, which raises UsageError.

    Raises UsageError: unknown environment.
    """
    fields = find_fields(env, "environment")
    defaults = {name: field.default for name, field in fields.items()} | (current or {})
    group = parser.add_argument_group(f"environment {env}")
    flag_fields = {}
    for name, field in fields.items():
        if field.flag:
            with contextlib.suppress(argparse.ArgumentError):
                _add_flag(group, field, _show(defaults[name]))
                flag_fields[name] = field

    def read_settings(parsed: dict[str, Any]) -> dict[str, Any]:
        return defaults | {name: _parse(field, parsed[name]) for name, field in flag_fields.items() if name in parsed}

    return read_settings
