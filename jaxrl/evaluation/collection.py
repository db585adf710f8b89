"""Collecting expert datasets: episodes of several policies, labelled by a run of SAC on reach."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax import base as environments
from envs_jax.base import Array
from jaxrl.algos.sac import Sac, soft_value
from jaxrl.evaluation import simulator
from jaxrl.evaluation.policies import EvalPolicy
from jaxrl.evaluation.simulator import Simulator
from jaxrl.nn import distributions
from jaxrl.runtime.expert_dataset import ExpertDataset

EXPERTS = ("policy", "scripted")
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
    noise = jax.random.normal(key, next_mean.shape, jnp.float32)
    action, log_prob = distributions.squashed_normal(next_mean, next_log_std, noise)
    alpha = jnp.exp(weights["log_alpha"])[step["task"]]
    values = algo.outputs("critic", weights["critic"], behind, action)
    value = soft_value(values, log_prob, alpha)[:, 0]
    return {"mu": jnp.tanh(mean[:, 0]), "log_std": log_std[:, 0], "value": step["reward"] + algo.gamma * value}


def collect(
    subject: EvalPolicy, weights: Any, world: Simulator, names: Sequence[str], episodes: int, seed: int, expert: str
) -> ExpertDataset:
    """Return an expert dataset of episodes played in a simulator by the policies `names` in turn.

    Args:
        subject, weights: a run of SAC, and those of its algorithm.
        episodes: at least one for each policy.
        seed: of random numbers in policies and labels.
        expert: source of mu, one of EXPERTS.
    """
    algo, advised = subject.algo, expert == "scripted"
    assert isinstance(algo, Sac)
    tasks = simulator.reach_of(subject).env.tasks
    settings = subject.config.env_settings if subject.config else subject.settings
    learned = environments.make(subject.name, **settings).spec.task_names
    trained = np.array([learned.index(one.name) if one.name in learned else 0 for one in tasks], np.int32)
    label = jax.jit(lambda *inputs: worker_labels(algo, *inputs))
    played = []
    for first, name in enumerate(names):
        numbers = range(len(range(first, episodes, len(names))))
        played.append(simulator.play(subject, world, name, numbers, seed, advised))
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
