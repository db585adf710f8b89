"""The workers of a collective: compatibility checks of workers and datasets, acting, and labels of steps.

Layout letters: T time, B environments, N samples, K workers, D observation dims, n action dims.
"""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec, TimeStep
from jaxrl.algos.base import Trajectory, append_last
from jaxrl.algos.collective import dataset
from jaxrl.algos.multi_stage import UpstreamRun
from jaxrl.algos.sac import Sac, soft_value
from jaxrl.common.types import Key, Params
from jaxrl.nn import distributions
from jaxrl.rl import replay
from jaxrl.rl.replay import Replay

# Task names, worker settings, rows of files and of their longest episode.
RESOLVED = ("tasks", "worker", "expert_datasets")
# Settings that workers must share, so that their networks can be stacked and their labels are comparable.
SHARED_SETTINGS = ("hidden_size", "depth", "num_critics", "layer_norm", "scale_observation", "gamma")


# Compatibility checks


def resolve_workers(
    spec: EnvSpec, settings: dict[str, Any], sources: tuple[UpstreamRun, ...], recording: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the workers in the order of the environment's tasks, their network settings, and the size of files."""
    workers = order_workers(spec, sources) if sources or recording is None else []
    worker = {name: workers[0].settings[name] for name in SHARED_SETTINGS} if workers else {}
    for source in workers:
        for name, value in worker.items():
            if source.settings[name] != value:
                raise ValueError(
                    f"{workers[0].run} was trained with {name} {value}, {source.run} with "
                    f"{source.settings[name]}: use workers with the same settings"
                )
    tasks = list(spec.task_names)
    rows = [0, 0]
    if recording is not None:
        for kind, name, box in (("observations", "observation", spec.observation), ("actions", "action", spec.action)):
            size = recording[name].shape[1]
            if (size,) != box.shape:
                raise ValueError(
                    f"{kind} of the expert datasets have {size} numbers, but {math.prod(box.shape)} in '{spec.name}': "
                    "use datasets of one arm and one kind of observation"
                )
        tasks = list(dict.fromkeys([*(tasks if workers else ()), *recording["task_names"]]))
        lengths = dataset.count_lengths(recording["step"]) + 1
        rows = [int(lengths.sum()), int(lengths.max())]
    if len(tasks) < 2:
        raise ValueError(
            f"collective needs several tasks, and there is only {', '.join(tasks)}: name workers of more tasks and "
            "give the environment these tasks, or add expert datasets"
        )
    resolved = json.dumps(dict(zip(RESOLVED, (tasks, worker, rows), strict=True)))
    return settings | {"workers": ",".join(source.run for source in workers), "resolved_inputs": resolved}


def order_workers(spec: EnvSpec, sources: tuple[UpstreamRun, ...]) -> list[UpstreamRun]:
    """Return the workers in the order of the tasks. Raises ValueError where one cannot teach, or a task has no one."""
    workers: dict[str, UpstreamRun] = {}
    for source in sources:
        run = source.run
        algo = source.algo
        if not isinstance(algo, Sac):
            raise ValueError(f"{run} was trained with {type(algo).__name__.lower()}: name runs of sac as workers")
        source.check(spec)
        names = algo.spec.task_names
        if len(names) != 1:
            raise ValueError(f"{run} was trained on {len(names)} tasks: name workers with one task each")
        if names[0] not in spec.task_names:
            raise ValueError(
                f"{run} was trained on '{names[0]}', which is not among the tasks here ({', '.join(spec.task_names)}): "
                "remove it, or add its task"
            )
        if names[0] in workers:
            raise ValueError(f"{workers[names[0]].run} and {run} are both workers for '{names[0]}': use one")
        workers[names[0]] = source
    missing = [name for name in spec.task_names if name not in workers]
    if missing or not spec.task_names:
        raise ValueError(
            f"there is no worker for {', '.join(map(repr, missing)) or spec.name}: name a run of sac for each of "
            f"{', '.join(spec.task_names) or 'several named tasks'} with --workers RUN1,RUN2,..."
        )
    return [workers[name] for name in spec.task_names]


# Acting and labels


@dataclasses.dataclass(frozen=True)
class Experts:
    """Workers with stacked parameters, leaves [K, ...]."""

    worker: Sac  # the algorithm of each
    tasks: int  # number of the environment's tasks, one per worker

    def task(self, timestep: TimeStep) -> Array:
        """Return the task of each time step, int32[...]."""
        return timestep.task if self.tasks > 1 else jnp.zeros(timestep.first.shape, jnp.int32)

    def act(self, actors: Params, timestep: TimeStep, noise: Array) -> Array:
        """Sample actions float32[B, n] from the worker of each step's task; noise [B, n]."""
        mean, log_std = jax.vmap(lambda params: self.worker.gaussian(params, timestep.observation))(actors)
        mean, log_std = (_select_task(x[:, :, 0], self.task(timestep)) for x in (mean, log_std))
        return distributions.squashed_normal(mean, log_std, noise)[0]

    def labels(self, workers: Params, rows: dict[str, Array]) -> dict[str, Array]:
        """Return labels "mu", "log_std" and "value" (Q of the step) of the first T of T + 1 rows, [T, B, ...].

        rows: {"observation", "task", "noise", "reward", "terminated"}, the last two of them float32[T + 1, B].
        """
        shape = rows["task"].shape
        observation, task, noise = (
            rows[name].reshape(-1, *rows[name].shape[2:]) for name in ("observation", "task", "noise")
        )

        def label_by_worker(worker: Params) -> dict[str, Array]:
            mean, log_std = self.worker.gaussian(worker["actor"], observation[:, None])
            action, log_prob = distributions.squashed_normal(mean, log_std, noise[:, None])
            values = self.worker.outputs("critic", worker["critic"], observation[:, None], action)
            alpha = jnp.broadcast_to(jnp.exp(worker["log_alpha"]), len(action))  # a worker has a single task
            soft = soft_value(values, log_prob, alpha)
            return {"mu": jnp.tanh(mean[:, 0]), "log_std": log_std[:, 0], "soft_value": soft[:, 0]}

        labels = jax.tree.map(lambda x: _select_task(x, task), jax.vmap(label_by_worker)(workers))
        labels = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), labels)
        next_value = self.worker.gamma * (1 - rows["terminated"][1:]) * labels.pop("soft_value")[1:]
        return {name: x[:-1] for name, x in labels.items()} | {"value": rows["reward"][1:] + next_value}

    def store(self, workers: Params, buffer: Replay, trajectory: Trajectory, last: TimeStep, key: Key) -> Replay:
        """Append the trajectory, its labels and the last observation to the dataset."""
        step = trajectory.timestep
        layout = self.worker.layout

        def flat(x: Array) -> Array:
            return x.reshape(*x.shape[:-2], -1).astype(jnp.float32)

        observed = {
            "observation": append_last(flat(step.observation), flat(last.observation)),
            "task": append_last(self.task(step), self.task(last)),
        }
        reward, terminated = append_last(step.reward, last.reward), append_last(step.terminated, last.terminated)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, layout.env_indices())
        action_size = math.prod(self.worker.spec.action.shape)
        noise = jax.vmap(lambda k: jax.random.normal(k, (len(reward), action_size), jnp.float32))(keys).swapaxes(0, 1)
        rows = observed | {"noise": noise, "reward": reward[..., 0], "terminated": terminated.astype(jnp.float32)}
        labels = self.labels(workers, rows)
        end = replay.ends(terminated, append_last(step.truncated, last.truncated))
        return replay.write(buffer, observed, trajectory.extras | labels, reward, end)


def _select_task(values: Array, task: Array) -> Array:
    """Select from [K, N, ...] the entry of each sample's task int32[N]: [N, ...]."""
    index = task.astype(jnp.int32).reshape(1, -1, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=0)[0]
