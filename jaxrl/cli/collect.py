"""python -m jaxrl.collect RUN --out FILE.npz: an expert dataset of what several policies come across.

RUN is a run of sac (or of an algorithm made after it) on reach, the expert whose labels are written: mu, log_std and
value. Episodes are played in the run's environment or, with --simulator metaworld, in real Meta-World, by the policies
of --policy in turn; each of them meets the run's own goals in order: its pool, or with goals "uniform" the list of
--pool_seed. --task names what is played, with the simulator also another of its tasks, such as drawer-close-v3.

With --expert scripted the scripted policy of the task gives mu instead (its action, in [-1, 1]); log_std and value are
still the run's. Values are r + gamma (min Q(s', a') - alpha log pi(a' | s')) of the run's critics, for a' that its
policy draws: the soft value of the step itself.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax import base as environments
from envs_jax.base import Array, closest, short_repr
from jaxrl.algos.sac import Sac, soft_value
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import parse_int, parse_list
from jaxrl.common.errors import UsageError
from jaxrl.common.files import output
from jaxrl.evaluation.policies import EvalPolicy, parse
from jaxrl.integrations import metaworld
from jaxrl.integrations.metaworld import Simulator
from jaxrl.nn import distributions
from jaxrl.report.cache import enable_compilation_cache
from jaxrl.runtime import expert_dataset
from jaxrl.runtime.expert_dataset import ExpertDataset
from jaxrl.runtime.load import load_policy

EXPERTS = ("policy", "scripted")
_POLICIES = "random,sampled,scripted"
_EPISODES = 150  # 60,000 steps in episodes of 400, the size of the published datasets
_MOST_EPISODES = 100_000
_STREAM = 0x1ABE1  # random stream of the actions in value labels


def worker_labels(algo: Sac, weights: Any, step: dict[str, Array], key: Array) -> dict[str, Array]:
    """Return an SAC expert's labels of steps, leaves float32[N, ...]: "mu", "log_std" [N, n] and "value" [N].

    Args:
        algo: with one agent.
        weights: see `Sac.weights`.
        step: "observation", "next_observation" [N, D], "reward" [N], "task" int32[N] (selects the temperature); none
            of them terminates.
        key: of the sampled actions.
    """
    mean, log_std = algo.gaussian(weights["actor"], step["observation"][:, None])
    behind = step["next_observation"][:, None]
    next_mean, next_log_std = algo.gaussian(weights["actor"], behind)
    noise = jax.random.normal(key, next_mean.shape)
    action, log_prob = distributions.squashed_normal(next_mean, next_log_std, noise)
    alpha = jnp.exp(weights["log_alpha"])[step["task"]]
    value = soft_value(algo.values(weights["critic"], behind, action), log_prob, alpha)[:, 0]
    return {"mu": jnp.tanh(mean[:, 0]), "log_std": log_std[:, 0], "value": step["reward"] + algo.gamma * value}


def collect(
    subject: EvalPolicy, weights: Any, world: Simulator, names: Sequence[str], episodes: int, seed: int, expert: str
) -> ExpertDataset:
    """Return an expert dataset of episodes played by the policies `names` in turn.

    Args:
        subject: a run of SAC.
        weights: of its algorithm.
        world: the simulator in which they play.
        names: of `subject.policies`.
        episodes: at least one for each of them.
        seed: of random numbers in policies and labels.
        expert: source of mu, one of EXPERTS.
    """
    algo, advised = subject.algo, expert == "scripted"
    assert isinstance(algo, Sac)
    tasks, learned = metaworld.reach_of(subject).reach.tasks, _tasks_of_run(subject)
    trained = np.array([learned.index(one.name) if one.name in learned else 0 for one in tasks], np.int32)
    label = jax.jit(lambda *inputs: worker_labels(algo, *inputs))
    played = []
    for first, name in enumerate(names):
        numbers = range(len(range(first, episodes, len(names))))
        played.append(metaworld.play(subject, world, name, numbers, seed, advised))
    parts = []
    for number in range(episodes):
        own, row = played[number % len(names)], number // len(names)
        rows = len(own.reward[row])
        seen = {"observation": own.observation[row, :-1], "next_observation": own.observation[row, 1:]}
        step = seen | {"reward": own.reward[row], "task": np.full(rows, own.task[row])}
        key = jax.random.fold_in(jax.random.key(seed), _STREAM + number)
        labels = jax.device_get(label(weights, step | {"task": trained[step["task"]]}, key))
        mu = {"mu": own.advice[row]} if advised else {}
        parts.append(step | {"step": np.arange(rows, dtype=np.int32), "action": own.action[row]} | labels | mu)
    fields = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    names_of_tasks = tuple(one.name for one in tasks)
    if world.task is not None:
        names_of_tasks, fields["task"] = (world.task,), np.zeros_like(fields["task"])
    never = np.zeros(len(fields["step"]), bool)  # episodes only end by truncation
    return ExpertDataset(environment=world.description, task_names=names_of_tasks, terminated=never, **fields)


def _tasks_of_run(subject: EvalPolicy) -> tuple[str, ...]:
    """Return the names of the tasks that the run was trained on."""
    settings = subject.config.env_settings if subject.config else subject.settings
    return environments.make(subject.name, **settings).spec.task_names


# Command


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="the expert dataset to write, an .npz file")
    parser.add_argument(
        "--episodes", default=str(_EPISODES), metavar="N", help=f"of all policies together (default: {_EPISODES})"
    )
    parser.add_argument("--policy", default=_POLICIES, metavar="A,B,...",
                        help=f"who plays, in turn: learned, sampled or baselines (default: {_POLICIES})")  # fmt: skip
    parser.add_argument(
        "--expert",
        default=EXPERTS[0],
        metavar="NAME",
        help=f"whose mu is written: {' or '.join(EXPERTS)} (default: {EXPERTS[0]})",
    )
    parser.add_argument(
        "--seed", default="0", metavar="N", help="of what is random in policies and labels (default: 0)"
    )
    parser.add_argument(
        "--chunk",
        default=str(metaworld.ARMS),
        metavar="N",
        help=f"episodes played side by side (default: {metaworld.ARMS})",
    )
    metaworld.add_flag(parser)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    assert __doc__ is not None
    enable_compilation_cache()
    flags, read = parse(argv, "python -m jaxrl.collect", __doc__, _flags)
    if flags.run is None:
        raise UsageError("labels need an expert: name the directory of a run of sac on reach")
    if flags.out is None:
        raise UsageError("say where to write: --out FILE.npz")
    if flags.expert not in EXPERTS:
        raise UsageError(f"unknown expert {short_repr(flags.expert)}: {closest(flags.expert, EXPERTS)}")
    names = parse_list(flags.policy)
    if not names:
        raise UsageError(f"--policy names no policy: take some of {_POLICIES}")
    episodes = parse_int(flags.episodes, "--episodes", len(names), _MOST_EPISODES)
    seed = parse_int(flags.seed, "--seed", 0, 2**32 - 1)
    lanes = min(parse_int(flags.chunk, "--chunk", 1, _MOST_EPISODES), -(-episodes // len(names)))
    task = metaworld.own_task(flags)
    wanted = read() if task is None else read("task")
    metaworld.reach_of(wanted)
    if not isinstance(wanted.algo, Sac):
        found = type(wanted.algo).__name__.lower()
        raise UsageError(f"labels are those of a worker, a run of sac; {flags.run} is one of {found}: name another")
    for name in names:
        wanted.check_policy(name)
    path = output(flags.out, "--out")
    weights = load_policy(flags.run, best=not flags.last).weights
    world = metaworld.world_of(flags.simulator, wanted, task, lanes)
    made = collect(wanted, weights, world, names, episodes, seed, flags.expert)
    expert_dataset.write(path, made)
    print(
        f"wrote {flags.out}: {len(made):,} steps, {episodes:,} episodes of {', '.join(made.task_names)} in "
        f"{world.description}"
    )
    if made.episodes.min() < expert_dataset.LEAST_EPISODES:
        print(
            f"warning: collective takes sets with at least {expert_dataset.LEAST_EPISODES} episodes of each task, to "
            "hold some out: collect more",
            file=sys.stderr,
        )
    return 0
