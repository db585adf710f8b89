"""python -m jaxrl.evaluate RUN: held-out episodes of a run's policy and of every baseline.

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
from collections.abc import Sequence

from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.policies import add_simulator, own_task, parse, parse_policies
from jaxrl.cli.process import enable_compilation_cache
from jaxrl.cli.values import add_int, add_seed, parse_list
from jaxrl.common.errors import UsageError
from jaxrl.common.files import output, write_output
from jaxrl.evaluation import league, policies, reports, simulator, tables
from jaxrl.evaluation.policies import EvalPolicy
from jaxrl.evaluation.reports import EPISODES, FILE, REAL_FILE

_MOST_EPISODES = 1_000_000


def _flags(parser: argparse.ArgumentParser) -> None:
    add_int(parser, "--episodes", 1, _MOST_EPISODES, 0, "held-out episodes per policy, or games per pair of players "
            f"(default: {EPISODES}, or what the environment asks for)")  # fmt: skip
    add = parser.add_argument
    add("--policy", metavar="A,B,...", help="which policies: greedy (best action), sampled (drawn, not the best "
        "action), zero_code (collective: without its task code) or baselines; by default all, or some baselines where "
        "teams compete; with --against: which scripted players take part")  # fmt: skip
    add("--against", metavar="RUN2", action="append", default=[],
        help="a league of RUN, this run (repeat it for more) and the scripted players")  # fmt: skip
    add("--greedy", action="store_true", help="with --against: runs take their best actions, even where "
        "the environment's rules ask for drawn ones")  # fmt: skip
    add_seed(parser, "of the held-out set")
    add("--json", "--out", metavar="FILE", help=f"where to write (default: RUN/{FILE} for all policies in the run's "
        f"own environment, RUN/{REAL_FILE.format('NAME')} in a simulator, else nowhere)")  # fmt: skip
    add_int(parser, "--chunk", 0, _MOST_EPISODES, 0, "most episodes rolled out at a time on a device; 0 = by their "
            "size (default: 0)")  # fmt: skip
    add_simulator(parser)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    enable_compilation_cache()
    flags, read = parse(argv, "python -m jaxrl.evaluate", __doc__, _flags, source_required=True)
    task = own_task(flags)
    subject = read() if task is None else read("task")
    how = flags.seed, flags.chunk, lambda line: print(line, file=sys.stderr)
    if flags.against:
        players = _league(flags, subject)
        path = output(flags.json, "--json") if flags.json else None
        report = reports.play_league(players, flags.episodes, *how)
    else:
        if flags.greedy:
            raise UsageError("--greedy is for leagues, with --against: name the policy instead, --policy greedy")
        if flags.simulator:
            simulator.reach_of(subject)
        subject = league.apply_match_settings(subject)
        names = league.default_policies(subject) if flags.policy is None else parse_policies(flags.policy)
        subject.check_policies(names)
        own = None if task or flags.checkpoint is not None else reports.evaluation_file(subject, names, flags.simulator)
        path = output(flags.json or str(own), "--json") if flags.json or own else None
        if subject.env.env.match_rules:
            report = reports.play_matches(subject, names, flags.episodes, *how)
        elif flags.simulator:
            episodes = flags.episodes or simulator.EPISODES
            arms = flags.chunk or (simulator.ARMS if flags.simulator == "metaworld" else episodes)
            world = simulator.world_of(flags.simulator, subject, task, min(arms, episodes))
            report = reports.evaluate(subject, names, episodes, *how, world)
        else:
            report = reports.evaluate(subject, names, flags.episodes or EPISODES, *how)
    tables.show(report, subject.description)
    if path is not None:
        write_output(path, json.dumps(report, indent=1, allow_nan=False) + "\n", "--json")
        print(f"wrote {path}")
    return 0


def _league(flags: argparse.Namespace, subject: EvalPolicy) -> league.League:
    """Return the league of --against. Raises UserError."""
    if flags.simulator:
        raise UsageError("--against lets teams play, which no simulator has: leave --simulator out")
    if subject.run is None:
        raise UsageError("--against plays a run against others: name the run first")
    others = [policies.load_run(run, not flags.last) for run in flags.against]
    return league.league([subject, *others], None if flags.policy is None else parse_list(flags.policy), flags.greedy)
