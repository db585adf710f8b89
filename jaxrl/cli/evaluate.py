"""python -m jaxrl.evaluate RUN: held-out episodes, the learned policy beside every baseline.

All policies start from the same states, drawn with random numbers that training never uses, and are compared after
equal numbers of time steps. Prints a table and writes every metric as a curve over the episode to a JSON file.
Without RUN, scripted policies alone: python -m jaxrl.evaluate --policy ig --env coverage --q 7. The environment's
settings are flags; they may differ from those of the run as far as its networks fit.

Where two teams play, policies meet every scripted player of the other team, in both sides, and the ends of the games
count. python -m jaxrl.evaluate RUN --against RUN2 --out league.json lets runs and scripted players all meet each other
and rates them.

python -m jaxrl.evaluate RUN --simulator metaworld plays a run of reach in real Meta-World; --simulator jax plays the
same episodes here.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import parse_int, parse_list
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import output, write_atomically
from jaxrl.evaluation import league
from jaxrl.evaluation.policies import EvalPolicy, load, parse
from jaxrl.evaluation.reports import evaluate, play_league, play_matches
from jaxrl.evaluation.tables import show, show_league, show_matches
from jaxrl.integrations import metaworld
from jaxrl.report.cache import enable_compilation_cache
from jaxrl.runtime.config import read_run

FILE = "evaluation.json"  # in the run's directory
REAL_FILE = "evaluation_{simulator}.json"
_EPISODES = 200
_MOST_EPISODES = 1_000_000


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", metavar="N", help="held-out episodes per policy, or games per pair of players "
                        f"(default: {_EPISODES}, or what the environment asks for)")  # fmt: skip
    parser.add_argument("--policy", metavar="A,B,...", help="which policies: learned (best action), sampled (drawn, "
                        "not the best action), zero_code (collective: without its task code) or baselines; by default "
                        "all, or some baselines where teams compete; with --against: which scripted players take part"
                        )  # fmt: skip
    parser.add_argument("--against", metavar="RUN2", action="append", default=[],
                        help="a league of RUN, this run (repeat it for more) and the scripted players")  # fmt: skip
    parser.add_argument("--seed", default="0", metavar="N", help="of the held-out set (default: 0)")
    parser.add_argument("--at", metavar="K,L,...", help="steps to show; by default a third, two thirds and all")
    parser.add_argument(
        "--json",
        "--out",
        metavar="FILE",
        help=f"where to write the numbers (default: RUN/{FILE} for all policies "
        f"in the run's own environment, RUN/{REAL_FILE.format(simulator='NAME')} in a simulator, else nowhere)",
    )
    parser.add_argument("--devices", metavar="N", help="local devices to use (default: all)")
    parser.add_argument("--chunk", default="0", metavar="N",
                        help="most episodes flown at a time on a device; 0 = by their size (default: 0)")  # fmt: skip
    metaworld.add_flag(parser)


def _own_file(wanted: EvalPolicy, names: Sequence[str], usual: Sequence[str]) -> Path | None:
    """Return the evaluation file of a run, for the usual policies in its own environment; None for anything else."""
    if wanted.run is None or wanted.config is None:
        return None
    rules = wanted.env.env.match_rules
    own = {**wanted.config.env_settings, **(rules.settings if rules else {})}
    return wanted.run / FILE if wanted.settings == own and set(names) == set(usual) else None


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    assert __doc__ is not None
    enable_compilation_cache()
    flags, read = parse(argv, "python -m jaxrl.evaluate", __doc__, _flags)
    episodes = 0 if flags.episodes is None else parse_int(flags.episodes, "--episodes", 1, _MOST_EPISODES)
    seed = parse_int(flags.seed, "--seed", 0, 2**32 - 1)
    chunk = parse_int(flags.chunk, "--chunk", 0, _MOST_EPISODES)
    present = jax.local_device_count()
    devices = present if flags.devices is None else parse_int(flags.devices, "--devices", 1, present)
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    task = metaworld.own_task(flags)
    wanted = read() if task is None else read("task")
    if flags.against:
        if flags.simulator:
            raise UsageError("--against lets teams play, which no simulator has: leave --simulator out")
        return _league(wanted, flags, episodes, seed, devices, chunk, say)
    if flags.simulator:
        metaworld.reach_of(wanted)
        if flags.devices is not None:
            raise UsageError("--simulator plays on the first device, step by step: leave --devices out")
    wanted = _set_for_matches(wanted)
    rules = wanted.env.env.match_rules
    if rules and not rules.opponents:
        players = " ".join(f"--{name} {value}" for name, value in rules.settings.items())
        raise UsageError(f"nobody is there to play the other team: choose scripted players, such as {players}")
    usual = [*league.ranked(wanted), *rules.baselines] if rules and wanted.run else list(wanted.policies)
    names = usual if flags.policy is None else parse_list(flags.policy)
    if not names:
        raise UsageError(f"--policy names no policy: choose from {', '.join(wanted.policies)}")
    for name in names:
        wanted.check_policy(name)
    if rules and flags.at is not None:
        raise UsageError(f"--at shows steps of an episode; in '{wanted.name}' the end of games counts: leave it out")
    at = sorted(parse_int(word, "--at", 0, wanted.env.spec.horizon) for word in parse_list(flags.at or ""))
    path = _own_file(wanted, names, usual)
    if flags.simulator and path:
        path = None if task else path.with_name(REAL_FILE.format(simulator=flags.simulator))
    if flags.json or path is not None:
        path = output(flags.json or str(path), "--json")
    world = None
    if flags.simulator:
        episodes = episodes or metaworld.EPISODES
        usual_lanes = metaworld.ARMS if flags.simulator == "metaworld" else episodes
        world = metaworld.world_of(flags.simulator, wanted, task, min(chunk or usual_lanes, episodes))
    if rules:
        report = play_matches(wanted, names, episodes or rules.num_games, seed, devices, chunk, say)
        show_matches(report, wanted.description, names[0])
    else:
        report = evaluate(wanted, names, episodes or _EPISODES, seed, at, devices, chunk, say, world)
        show(report, wanted.description)
    _write(path, report)
    return 0


def _set_for_matches(wanted: EvalPolicy) -> EvalPolicy:
    """Apply the environment's settings for matches, except those that the user gave."""
    rules = wanted.env.env.match_rules
    settings = rules.settings if rules else {}
    return wanted.with_env_settings({name: value for name, value in settings.items() if name not in wanted.given})


def _league(
    wanted: EvalPolicy, flags: Any, episodes: int, seed: int, devices: int, chunk: int, say: Callable[[str], None]
) -> int:
    """Run `main` with --against."""
    if wanted.run is None:
        raise UsageError("--against plays a run against others: name the run first")
    if flags.at is not None:
        raise UsageError("--at shows steps of an episode, --against the end of games: leave one of them out")
    players = None if flags.policy is None else parse_list(flags.policy)
    others = [
        load(run, config.env, config.env_settings, not flags.last) for run, config in map(read_run, flags.against)
    ]
    found = league.league([wanted, *others], players)
    path = output(flags.json, "--json") if flags.json else None
    report = play_league(found, episodes or found.rules.num_games, seed, devices, chunk, say)
    show_league(report)
    _write(path, report)
    return 0


def _write(path: Path | None, report: dict[str, Any]) -> None:
    """Write the report as JSON. Raises UserError."""
    if path is None:
        return
    try:
        write_atomically(path, json.dumps(report, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another file with --json") from None
    print(f"wrote {path}")
