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
import sys
from collections.abc import Sequence

import jax

from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.policies import parse
from jaxrl.cli.values import parse_int, parse_list
from jaxrl.common.errors import UsageError
from jaxrl.common.files import output
from jaxrl.evaluation import league, policies, reports, tables
from jaxrl.evaluation.reports import EPISODES, FILE, REAL_FILE
from jaxrl.integrations import metaworld
from jaxrl.report.cache import enable_compilation_cache

_MOST_EPISODES = 1_000_000


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--episodes", metavar="N", help="held-out episodes per policy, or games per pair of players "
        f"(default: {EPISODES}, or what the environment asks for)")  # fmt: skip
    add("--policy", metavar="A,B,...", help="which policies: learned (best action), sampled (drawn, not the best "
        "action), zero_code (collective: without its task code) or baselines; by default all, or some baselines where "
        "teams compete; with --against: which scripted players take part")  # fmt: skip
    add("--against", metavar="RUN2", action="append", default=[],
        help="a league of RUN, this run (repeat it for more) and the scripted players")  # fmt: skip
    add("--seed", default="0", metavar="N", help="of the held-out set (default: 0)")
    add("--at", metavar="K,L,...", help="steps to show; by default a third, two thirds and all")
    add("--json", "--out", metavar="FILE", help=f"where to write the numbers (default: RUN/{FILE} for all policies in "
        f"the run's own environment, RUN/{REAL_FILE.format('NAME')} in a simulator, else nowhere)")  # fmt: skip
    add("--devices", metavar="N", help="local devices to use (default: all)")
    add("--chunk", default="0", metavar="N",
        help="most episodes rolled out at a time on a device; 0 = by their size (default: 0)")  # fmt: skip
    metaworld.add_flag(parser)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    enable_compilation_cache()
    flags, read = parse(argv, "python -m jaxrl.evaluate", __doc__, _flags)
    episodes = 0 if flags.episodes is None else parse_int(flags.episodes, "--episodes", 1, _MOST_EPISODES)
    seed = parse_int(flags.seed, "--seed", 0, 2**32 - 1)
    chunk = parse_int(flags.chunk, "--chunk", 0, _MOST_EPISODES)
    present = jax.local_device_count()
    devices = present if flags.devices is None else parse_int(flags.devices, "--devices", 1, present)
    how = seed, devices, chunk, lambda line: print(line, file=sys.stderr)
    task = metaworld.own_task(flags)
    wanted = read() if task is None else read("task")
    if flags.against:
        if flags.simulator:
            raise UsageError("--against lets teams play, which no simulator has: leave --simulator out")
        if wanted.run is None:
            raise UsageError("--against plays a run against others: name the run first")
        if flags.at is not None:
            raise UsageError("--at shows steps of an episode, --against the end of games: leave one of them out")
        players = None if flags.policy is None else parse_list(flags.policy)
        found = league.league([wanted, *(policies.load_run(run, not flags.last) for run in flags.against)], players)
        path = output(flags.json, "--json") if flags.json else None
        report = reports.play_league(found, episodes, *how)
    else:
        if flags.simulator:
            metaworld.reach_of(wanted)
            if flags.devices is not None:
                raise UsageError("--simulator plays on the first device, step by step: leave --devices out")
        wanted = league.set_for_matches(wanted)
        names = league.usual(wanted) if flags.policy is None else parse_list(flags.policy)
        wanted.check_policies(names)
        if wanted.env.env.match_rules and flags.at is not None:
            raise UsageError(
                f"--at shows steps of an episode; in '{wanted.name}' the end of games counts: leave it out"
            )
        at = sorted(parse_int(word, "--at", 0, wanted.env.spec.horizon) for word in parse_list(flags.at or ""))
        path = None if task else reports.own_file(wanted, names, flags.simulator)
        if flags.json or path is not None:
            path = output(flags.json or str(path), "--json")
        report = reports.play(wanted, names, episodes, *how, at, flags.simulator, task)
    tables.show(report, wanted.description)
    if path is not None:
        reports.write(path, report)
        print(f"wrote {path}")
    return 0
