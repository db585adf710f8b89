"""python -m jaxrl.evaluate RUN: compare a run's policy with every baseline on held-out episodes.

All policies start from the same states, drawn with random numbers that training never uses, and are compared after
equal numbers of time steps. The command prints a table and writes every metric as a curve over the episode to a JSON
file. Without RUN it compares only scripted policies: python -m jaxrl.evaluate --policy ig --env coverage --q 7. The
environment's settings are flags. They may differ from the run's settings as long as its networks fit.

Where two teams play, each policy meets every scripted player on both sides, and only the ends of the games count.
python -m jaxrl.evaluate RUN --against RUN2 --out league.json lets all runs and scripted players meet each other and
rates them.

python -m jaxrl.evaluate RUN --conditions FILE.yaml --csv FILE plays the same episodes under several settings of the
environment: the file holds lines such as 'lossy: {failure_rate: [0.1, 0.3]}', whose lists are crossed.

python -m jaxrl.evaluate RUN --simulator metaworld plays a run of reach in real Meta-World; --simulator jax plays the
same episodes in JAX.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.policies import add_simulator, own_task, parse, parse_policies
from jaxrl.cli.process import speed_up_start
from jaxrl.cli.values import add_int, add_seed, parse_list, parse_number
from jaxrl.common.errors import UsageError
from jaxrl.common.files import output, write_output
from jaxrl.evaluation import conditions, league, policies, reports, simulator, tables
from jaxrl.evaluation.policies import PolicySet
from jaxrl.evaluation.reports import EPISODES, FILE, REAL_FILE

_MAX_EPISODES = 1_000_000


def _flags(parser: argparse.ArgumentParser) -> None:
    add_int(parser, "--episodes", 1, _MAX_EPISODES, 0, "number of held-out episodes per policy, or of games per pair "
            f"of players (default: {EPISODES}, or the number that the environment asks for)")  # fmt: skip
    add = parser.add_argument
    add("--policy", metavar="A,B,...", help="policies to play: greedy (best actions), sampled (actions drawn from the "
        "policy), zero_code (collective: without its task code) or baselines; by default all, or some baselines where "
        "teams compete; with --against: the scripted players that take part")  # fmt: skip
    add("--against", metavar="RUN2", action="append", default=[],
        help="play a league of RUN, this run (repeat the flag for more runs) and the scripted players")  # fmt: skip
    add("--greedy", action="store_true", help="with --against: let runs take their best actions, even where "
        "the environment's rules ask for sampled ones")  # fmt: skip
    add_seed(parser, "the held-out episodes")
    add("--json", "--out", metavar="FILE", help=f"JSON file to write (default: RUN/{FILE} for all policies in the "
        f"run's own environment, RUN/{REAL_FILE.format('NAME')} in a simulator, otherwise none)")  # fmt: skip
    add("--conditions", metavar="FILE.yaml", help="play under each condition of this file, {name: {setting of the "
        "environment: value or list of values}}")  # fmt: skip
    add("--csv", metavar="FILE", help="with --conditions: write every episode of every policy to this CSV file")
    add("--bound", type=lambda text: parse_number(text, "--bound"), metavar="X", help="with --conditions: count the "
        "episodes whose score is worse than X")  # fmt: skip
    add_int(parser, "--chunk", 0, _MAX_EPISODES, 0, "maximum number of episodes that a device plays at a time; more of "
            "them need more memory; 0 = chosen by their size (default: 0)")  # fmt: skip
    add_simulator(parser)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    speed_up_start()
    flags, read = parse(argv, "python -m jaxrl.evaluate", __doc__, _flags, source_required=True)
    task = own_task(flags)
    policy_set = read() if task is None else read("task")
    options = flags.seed, flags.chunk, lambda line: print(line, file=sys.stderr)
    for name in ("csv", "bound"):
        if getattr(flags, name) is not None and not flags.conditions:
            raise UsageError(f"--{name} works only with --conditions FILE: add that, or leave it out")
    if flags.greedy and not flags.against:
        raise UsageError("--greedy works only with --against: use --policy greedy instead")
    if flags.conditions:
        return _play_conditions(flags, policy_set, options)
    if flags.against:
        players = _league(flags, policy_set)
        path = output(flags.json, "--json") if flags.json else None
        report = reports.play_league(players, flags.episodes, *options)
    else:
        if flags.simulator:
            simulator.require_reach(policy_set)
        policy_set = league.apply_match_settings(policy_set)
        names = league.default_policies(policy_set) if flags.policy is None else parse_policies(flags.policy)
        policy_set.check_policies(names)
        default_path = None
        if not task and flags.checkpoint is None:
            default_path = reports.evaluation_file(policy_set, names, flags.simulator)
        path = output(flags.json or str(default_path), "--json") if flags.json or default_path else None
        if policy_set.env.env.match_rules:
            report = reports.play_matches(policy_set, names, flags.episodes, *options)
        elif flags.simulator:
            episodes = flags.episodes or simulator.EPISODES
            arms = flags.chunk or (simulator.ARMS if flags.simulator == "metaworld" else episodes)
            world = simulator.make_simulator(flags.simulator, policy_set, task, min(arms, episodes))
            report = reports.evaluate(policy_set, names, episodes, *options, world)
        else:
            report = reports.evaluate(policy_set, names, flags.episodes or EPISODES, *options)
    tables.show(report, policy_set.description)
    if path is not None:
        write_output(path, json.dumps(report, indent=1, allow_nan=False) + "\n", "--json")
        print(f"wrote {path}")
    return 0


def _play_conditions(flags: argparse.Namespace, policy_set: PolicySet, options: tuple[Any, ...]) -> int:
    """Play under several conditions, print a table, write files; return the exit code. Raises UserError."""
    if flags.against or flags.simulator or policy_set.env.env.match_rules:
        raise UsageError(
            "--conditions plays one team in JAX: leave --against and --simulator out, and name a run or an environment "
            "in which no other team plays"
        )
    chosen = conditions.read_conditions(Path(flags.conditions))
    names = list(policy_set.policies) if flags.policy is None else parse_policies(flags.policy)
    policy_set.check_policies(names)
    paths = {flag: output(name, flag) for flag, name in (("--json", flags.json), ("--csv", flags.csv)) if name}
    if len({path.resolve() for path in paths.values()}) < len(paths):
        raise UsageError(f"--json and --csv are both {flags.csv}: name two files")
    episodes = flags.episodes or EPISODES
    seed = flags.seed
    outcomes = conditions.rollout(policy_set, chosen, names, episodes, *options)
    report = conditions.summarise(policy_set, chosen, outcomes, episodes, seed, flags.bound)
    tables.show(report, policy_set.description)
    texts = {"--json": json.dumps(report, indent=1, allow_nan=False) + "\n", "--csv": conditions.to_csv(outcomes)}
    for flag, path in paths.items():
        write_output(path, texts[flag], flag)
        print(f"wrote {path}")
    return 0


def _league(flags: argparse.Namespace, policy_set: PolicySet) -> league.League:
    if flags.simulator:
        raise UsageError("--against needs two teams, which no simulator has: leave --simulator out")
    if policy_set.run is None:
        raise UsageError("--against plays a run against others: name the run first")
    players = [policy_set, *(policies.load_run(run, not flags.last) for run in flags.against)]
    return league.league(players, None if flags.policy is None else parse_list(flags.policy), flags.greedy)
