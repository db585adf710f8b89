"""The command line of verbs that take a run, or an environment and its scripted policies."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envs_jax.base import short_repr
from jaxrl.cli.flags import EnvironmentFlags, Parser
from jaxrl.common.errors import UsageError
from jaxrl.evaluation.policies import EvalPolicy, load
from jaxrl.runtime import config as configuration

DEFAULT_ENV = "coverage"


def parse(
    argv: Sequence[str], prog: str, description: str | None, add_flags: Callable[[argparse.ArgumentParser], None]
) -> tuple[argparse.Namespace, Callable[..., EvalPolicy]]:
    """Return the command's own flags, and a function that loads the policies that the command line asks for.

    `[RUN] [--last] [--env NAME]`, the flags of `add_flags`, and every setting of the environment. The function takes
    the names of settings whose flags the command handles itself.

    Raises:
        UserError: one sentence.
    """
    first = Parser(prog=prog, add_help=False)
    _add_sources(first)
    add_flags(first)
    run, env, current = _source(first, list(argv))
    parser = Parser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_sources(parser)
    add_flags(parser)
    flags = EnvironmentFlags(parser, env, current)
    parsed = parser.parse_args(list(argv))
    if run is None and parsed.last:
        raise UsageError("--last chooses a checkpoint of a run: name the run's directory")

    def read(*without: str) -> EvalPolicy:
        named = {name: value for name, value in vars(parsed).items() if name not in without}
        settings = flags.settings(named)
        found = load(run, env, settings, best=not parsed.last)
        return dataclasses.replace(found, given=frozenset(settings) & frozenset(named))

    return parsed, read


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="directory of a run, or of one of its seeds; leave it "
        "out for scripted policies")  # fmt: skip
    parser.add_argument("--last", action="store_true", help="the run's newest checkpoint instead of its best")
    parser.add_argument("--env", metavar="NAME", help=f"without a run: the environment (default: {DEFAULT_ENV})")


def _source(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[Path | None, str, dict[str, Any] | None]:
    """Return the run, the environment and the run's settings of it, before the environment's flags are known."""
    switches = {option for action in parser._actions if action.nargs == 0 for option in action.option_strings}
    words, found, env = iter(argv), [], None
    for word in words:
        if not word.startswith("-"):
            found.append(word)
        elif "=" in word:
            env = word.removeprefix("--env=") if word.startswith("--env=") else env
        elif word not in (*switches, "-h", "--help"):  # every other flag takes one value
            value = next(words, None)
            env = value if word == "--env" else env
    if len(found) > 1:
        raise UsageError(
            f"unexpected word {short_repr(found[1])}: flags begin with --, and one run is looked at at a time"
        )
    if not found:
        return None, env or DEFAULT_ENV, None
    run, config = configuration.read_run(found[0])
    if env not in (None, config.env):
        raise UsageError(f"{run} was trained on '{config.env}', not on '{env}': leave --env out")
    return run, config.env, config.env_settings
