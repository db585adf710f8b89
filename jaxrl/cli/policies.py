"""The command line of commands that take a run, or an environment and its scripted policies."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envs_jax.base import short_repr
from envs_jax.reach import tasks
from jaxrl.cli.flags import Parser, add_environment
from jaxrl.cli.values import add_checkpoint, add_choice, find_checkpoint, parse_list
from jaxrl.common.errors import UsageError
from jaxrl.evaluation.policies import PolicySet, load, policy_key
from jaxrl.evaluation.simulator import SIMULATORS
from jaxrl.runtime import saved_run

DEFAULT_ENV = "coverage"


def parse(
    argv: Sequence[str],
    prog: str,
    description: str | None,
    add_flags: Callable[[argparse.ArgumentParser], None],
    source_required: bool = False,
) -> tuple[argparse.Namespace, Callable[..., PolicySet]]:
    """Return the command's own flags, and a function that loads the policies that the command line asks for.

    Flags are `[RUN] [--last | --checkpoint N] [--env NAME]`, the flags of `add_flags`, and every setting of the
    environment. The function takes the names of settings whose flags the command handles itself.

    Raises:
        UserError: one sentence; with `source_required` also if the command line names neither a run nor an environment.
    """
    parser = Parser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="directory of a run, or of one of its seeds; without it only scripted "
        "policies play")  # fmt: skip
    add_checkpoint(parser)
    add("--env", metavar="NAME", help="environment, where no run is named"
        + ("" if source_required else f" (default: {DEFAULT_ENV})"))  # fmt: skip
    add_flags(parser)
    run, env, current = _source(parser, list(argv))
    settings_of = add_environment(parser, env, current)
    parsed = parser.parse_args(list(argv))
    if run is None and (parsed.last or parsed.checkpoint is not None):
        raise UsageError("--last and --checkpoint choose a checkpoint of a run: name the run's directory")
    parsed.checkpoint = None if run is None else find_checkpoint(parsed)
    if source_required and run is None and parsed.env is None:
        raise UsageError(f"name a run, {prog} RUN, or an environment for its scripted policies, --env {DEFAULT_ENV}")

    def read(*without: str) -> PolicySet:
        parsed_values = {name: value for name, value in vars(parsed).items() if name not in without}
        settings = settings_of(parsed_values)
        policy = load(run, env, settings, not parsed.last, parsed.checkpoint)
        return dataclasses.replace(policy, named_settings=frozenset(settings) & frozenset(parsed_values))

    return parsed, read


def _source(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[Path | None, str, dict[str, Any] | None]:
    """Return the run, the environment and the run's settings of it, before the environment's flags are known."""
    switches = {option for action in parser._actions if action.nargs == 0 for option in action.option_strings}
    pairs = list(zip(["", *argv], argv, strict=False))  # each word, after the one before it
    runs = [
        word
        for before, word in pairs
        if not word.startswith("-") and not (before.startswith("--") and "=" not in before and before not in switches)
    ]
    if len(runs) > 1:
        raise UsageError(f"unexpected word {short_repr(runs[1])}: name only one run; flags begin with --")
    named = [word for before, word in pairs if before == "--env"]
    named += [word.removeprefix("--env=") for word in argv if word.startswith("--env=")]
    if not runs:
        return None, named[-1] if named else DEFAULT_ENV, None
    run, config = saved_run.read_run(runs[0])
    if named and named[-1] != config.env:
        raise UsageError(f"{run} was trained on '{config.env}', not on '{named[-1]}': leave --env out")
    return run, config.env, config.env_settings


def parse_policies(text: str) -> list[str]:
    """Return the policies of --policy A,B,... by their names in files."""
    return [policy_key(name) for name in parse_list(text)]


def add_simulator(parser: argparse.ArgumentParser) -> None:
    """Add the flag of commands that can play in a simulator."""
    add_choice(parser, "--simulator", SIMULATORS, "play the run's own goals in order (its pool or, with goals "
               "'uniform', the list of --pool_seed): metaworld plays in real Meta-World (extra 'real'), where --task "
               "may also name one of its own tasks, such as drawer-close-v3, with its own reward and success; jax "
               "plays the same episodes in the run's environment")  # fmt: skip


def own_task(flags: argparse.Namespace) -> str | None:
    """Return the simulator's own task that the command line names; None if --task is absent or the environment's.

    Raises UsageError: several of its tasks, or one of its tasks without it.
    """
    names = parse_list(getattr(flags, "task", None) or "")
    if all(name in (*tasks.TASKS, tasks.ALL) for name in names):
        return None
    simulator_tasks = [name for name in names if name.endswith("-v3")]
    if flags.simulator != "metaworld":
        if simulator_tasks:
            raise UsageError(f"'{simulator_tasks[0]}' is a task of Meta-World itself: use --simulator metaworld")
        return None  # a task of an environment other than reach, or an unknown one
    if simulator_tasks and len(names) > 1:
        raise UsageError(f"Meta-World plays one of its own tasks at a time, not {flags.task}: name one")
    return names[0] if len(names) == 1 else None
