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
from jaxrl.evaluation.policies import PolicySet
from jaxrl.evaluation.simulator import Simulator
from jaxrl.integrations.expert_dataset import ExpertDataset
from jaxrl.nn import distributions

EXPERTS = ("policy", "scripted")
_STREAM = 0x1ABE1  # random stream of the actions in value labels


def worker_labels(algo: Sac, params: Any, step: dict[str, Array], key: Array) -> dict[str, Array]:
    """Label steps with an SAC expert of one agent: float32 "mu", "log_std" [N, n] and "value" [N].

    params: see `Sac.weights`; step: "observation", "next_observation" [N, D], "reward" [N], "task" int32[N] (selects
    the temperature). No step terminates the episode.
    """
    mean, log_std = algo.gaussian(params["actor"], step["observation"][:, None])
    next_observation = step["next_observation"][:, None]
    next_mean, next_log_std = algo.gaussian(params["actor"], next_observation)
    noise = jax.random.normal(key, next_mean.shape, jnp.float32)
    action, log_prob = distributions.squashed_normal(next_mean, next_log_std, noise)
    alpha = jnp.exp(params["log_alpha"])[step["task"]]
    values = algo.outputs("critic", params["critic"], next_observation, action)
    value = soft_value(values, log_prob, alpha)[:, 0]
    return {"mu": jnp.tanh(mean[:, 0]), "log_std": log_std[:, 0], "value": step["reward"] + algo.gamma * value}


def collect(
    policy_set: PolicySet, params: Any, world: Simulator, names: Sequence[str], episodes: int, seed: int, expert: str
) -> ExpertDataset:
    """Play episodes in a simulator with the policies `names` in turn; return them as an expert dataset.

    The policy is of a run of SAC, with the parameters `params` (see `Sac.weights`). There is at least one episode for
    each policy. The seed is for the random numbers of policies and labels; `expert`, one of EXPERTS, gives mu.
    """
    algo = policy_set.algo
    scripted_expert = expert == "scripted"
    assert isinstance(algo, Sac)
    tasks = simulator.require_reach(policy_set).env.tasks
    settings = policy_set.config.env_settings if policy_set.config else policy_set.settings
    trained_tasks = environments.make(policy_set.name, **settings).spec.task_names
    indices = [trained_tasks.index(one.name) if one.name in trained_tasks else 0 for one in tasks]
    trained_index = np.array(indices, np.int32)
    label = jax.jit(lambda *inputs: worker_labels(algo, *inputs))
    all_played = []
    for first, name in enumerate(names):
        numbers = range(len(range(first, episodes, len(names))))
        all_played.append(simulator.play(policy_set, world, name, numbers, seed, scripted_expert))
    parts = []
    for index in range(episodes):
        played = all_played[index % len(names)]
        row = index // len(names)
        steps = len(played.reward[row])
        step = {"observation": played.observation[row, :-1], "next_observation": played.observation[row, 1:]}
        step |= {"reward": played.reward[row], "task": np.full(steps, played.task[row])}
        key = jax.random.fold_in(jax.random.key(seed), _STREAM + index)
        labels = jax.device_get(label(params, step | {"task": trained_index[step["task"]]}, key))
        mu = {"mu": played.advice[row]} if scripted_expert else {}
        parts.append(step | {"step": np.arange(steps, dtype=np.int32), "action": played.action[row]} | labels | mu)
    fields = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    task_names = tuple(one.name for one in tasks)
    if world.task is not None:
        task_names, fields["task"] = (world.task,), np.zeros_like(fields["task"])
    terminated = np.zeros(len(fields["step"]), bool)  # episodes only end by truncation
    return ExpertDataset(environment=world.description, task_names=task_names, terminated=terminated, **fields)
