"""python -m jaxrl.collect RUN --out FILE.npz: record the steps of several policies, labelled by an expert.

RUN is the expert: a run of sac, or of an algorithm derived from it, on reach. The labels are mu, log_std and value. The
policies of --policy play in turn, in the run's environment or, with --simulator metaworld, in real Meta-World. Each of
them gets the run's goals in order: its pool or, with goals "uniform", the list of --pool_seed. --task names the task;
with the simulator it may also be another of its tasks, such as drawer-close-v3.

With --expert scripted, mu is the action of the task's scripted policy, in [-1, 1]; log_std and value are still the
run's. Values are r + gamma (min Q(s', a') - alpha log pi(a' | s')) of the run's critics, where a' is drawn from its
policy: the soft value of the step itself.
"""

import argparse
import sys
from collections.abc import Sequence

from envs_jax.base import short_repr
from jaxrl.algos.sac import Sac
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.policies import add_simulator, own_task, parse, parse_policies
from jaxrl.cli.process import speed_up_start
from jaxrl.cli.values import add_choice, add_int, add_seed, parse_int
from jaxrl.common.errors import UsageError
from jaxrl.common.files import output
from jaxrl.evaluation import simulator
from jaxrl.evaluation.collection import EXPERTS, collect
from jaxrl.integrations import expert_dataset
from jaxrl.runtime.load import load_all_weights

_POLICIES = "random,sampled,scripted"
_EPISODES = 150  # 60,000 steps in episodes of 400, the size of the published datasets
_MAX_EPISODES = 100_000


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", metavar="FILE", help="file to write, an expert dataset that ends in .npz")
    add("--episodes", default=str(_EPISODES), metavar="N",
        help=f"number of episodes of all policies together (default: {_EPISODES})")  # fmt: skip
    add("--policy", default=_POLICIES, metavar="A,B,...",
        help=f"policies that play in turn: greedy, sampled or baselines (default: {_POLICIES})")  # fmt: skip
    add_choice(parser, "--expert", EXPERTS, f"source of the labels mu (default: {EXPERTS[0]})", EXPERTS[0])
    add_seed(parser, "policies and labels")
    add_int(parser, "--chunk", 1, _MAX_EPISODES, simulator.ARMS, "number of episodes played in parallel; more of them "
            f"are faster and need more memory (default: {simulator.ARMS})")  # fmt: skip
    add_simulator(parser)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    speed_up_start()
    flags, read = parse(argv, "python -m jaxrl.collect", __doc__, _flags)
    if flags.run is None:
        raise UsageError("name a run of sac on reach, whose policy plays and labels the data")
    if flags.out is None:
        raise UsageError("say where to write: --out FILE.npz")
    if not flags.out.endswith(".npz"):
        raise UsageError(f"--out {short_repr(flags.out)}: an expert dataset must end in .npz")
    names = parse_policies(flags.policy)
    episodes = parse_int(flags.episodes, "--episodes", max(len(names), 1), _MAX_EPISODES)
    task = own_task(flags)
    policy_set = read() if task is None else read("task")
    simulator.require_reach(policy_set)
    if not isinstance(policy_set.algo, Sac):
        algo_name = type(policy_set.algo).__name__.lower()
        raise UsageError(
            f"labels come from a worker, a run of sac, but {flags.run} is a run of {algo_name}: name another run"
        )
    policy_set.check_policies(names)
    path = output(flags.out, "--out")
    weights = load_all_weights(flags.run, not flags.last, flags.checkpoint)
    world = simulator.make_simulator(flags.simulator, policy_set, task, min(flags.chunk, -(-episodes // len(names))))
    dataset = collect(policy_set, weights, world, names, episodes, flags.seed, flags.expert)
    expert_dataset.write(path, dataset)
    print(
        f"wrote {flags.out}: {len(dataset):,} steps, {episodes:,} episodes of {', '.join(dataset.task_names)} in "
        f"{world.description}"
    )
    if dataset.episodes.min() < expert_dataset.MIN_EPISODES:
        print(
            f"warning: collective takes sets with at least {expert_dataset.MIN_EPISODES} episodes of each task, to "
            "hold some out: collect more",
            file=sys.stderr,
        )
    return 0
