"""The workers of a collective: what they and labelled sets must have in common, how they act, what they say of steps.

Layout letters: T time, B environments, N samples, K workers, D numbers of an observation, n of an action.
"""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec, TimeStep
from jaxrl.algos.base import Source, Trajectory, read_adopted
from jaxrl.algos.collective import dataset
from jaxrl.algos.sac import Sac
from jaxrl.nn import distributions
from jaxrl.rl import replay
from jaxrl.rl.replay import Replay

ADOPTED = ("tasks", "worker", "labelled")  # names, settings of workers, rows of files and of their longest episode
# What workers must have in common, so that their networks can be stacked and their labels mean the same.
ALIKE = ("units", "depth", "critics", "layer_norm", "scale_observation", "log_std_min", "log_std_max", "gamma")


# Which runs and files may be taken


def adopt_workers(
    spec: EnvSpec, settings: dict[str, Any], sources: tuple[Source, ...], recording: dict[str, Any] | None
) -> dict[str, Any]:
    """Workers in the order of the environment's tasks, what their networks are like, and the size of files."""
    ordered = ordered_workers(spec, sources, recording is not None)
    worker = {name: ordered[0].settings[name] for name in ALIKE} if ordered else {}
    for source in ordered:
        for name, value in worker.items():
            if source.settings[name] != value:
                raise ValueError(
                    f"{ordered[0].run} was trained with {name} {value}, {source.run} with "
                    f"{source.settings[name]}: take workers that are alike"
                )
    tasks, rows = list(spec.task_names), [0, 0]
    if recording is not None:
        check_recording(recording, spec)
        tasks = list(dict.fromkeys([*(tasks if ordered else ()), *recording["task_names"]]))
        lengths = dataset.lengths(recording["step"]) + 1
        rows = [int(lengths.sum()), int(lengths.max())]
    if len(tasks) < 2:
        raise ValueError(
            f"collective needs several tasks, there is {', '.join(tasks)} alone: name workers of more tasks and "
            "let the environment set them, or add labelled sets"
        )
    adopted = json.dumps(dict(zip(ADOPTED, (tasks, worker, rows), strict=True)))
    return settings | {"workers": ",".join(source.run for source in ordered), "adopted": adopted}


def adopted_of(spec: EnvSpec, text: str) -> dict[str, Any]:
    """What `adopt_workers` wrote; where nothing was named, as if there were a default worker for each of the tasks."""
    default = dict(zip(ADOPTED, (list(spec.task_names), {}, [0, 0]), strict=True))
    return default | read_adopted(text or "{}", ADOPTED)


def ordered_workers(spec: EnvSpec, sources: tuple[Source, ...], without: bool) -> list[Source]:
    """Workers in the order of the environment's tasks; none only if one can do `without`. Raises ValueError."""
    if without and not sources:
        return []
    workers: dict[str, Source] = {}
    for source in sources:
        task = check_worker(source, spec)
        if task in workers:
            raise ValueError(f"{workers[task].run} and {source.run} are both workers for '{task}': take one")
        workers[task] = source
    missing = [name for name in spec.task_names if name not in workers]
    if missing or not spec.task_names:
        raise ValueError(
            f"there is no worker for {', '.join(map(repr, missing)) or spec.name}: name a run of sac for each of "
            f"{', '.join(spec.task_names) or 'several named tasks'} with --workers RUN1,RUN2,..."
        )
    return [workers[name] for name in spec.task_names]


def check_worker(source: Source, spec: EnvSpec) -> str:
    """The task of a worker. Raises ValueError where it cannot teach in an environment."""
    run, algo = source.run, source.algo
    if not isinstance(algo, Sac):
        raise ValueError(f"{run} was trained with {type(algo).__name__.lower()}: workers are runs of sac")
    source.check(spec)
    names = algo.spec.task_names
    if len(names) != 1:
        raise ValueError(f"{run} was trained on {len(names)} tasks: a worker knows one")
    if names[0] not in spec.task_names:
        raise ValueError(
            f"{run} was trained on '{names[0]}', which is not among the tasks here ({', '.join(spec.task_names)}): "
            "leave it out, or name its task, too"
        )
    return names[0]


def check_recording(recording: dict[str, Any], spec: EnvSpec) -> None:
    """Raises ValueError where labelled steps are of another kind than the environment's."""
    for what, name, box in (("observations", "observation", spec.observation), ("actions", "action", spec.action)):
        size = recording[name].shape[1]
        if (size,) != box.shape:
            raise ValueError(
                f"{what} of the labelled sets have {size} numbers, those of '{spec.name}' {math.prod(box.shape)}: take "
                "sets of one arm and one kind of observation"
            )


# What they do and say


@dataclasses.dataclass(frozen=True)
class Experts:
    """Workers whose parameters are stacked, leaves [K, ...].

    Attributes:
        worker: the algorithm of each.
        tasks: of the environment, one for each.
    """

    worker: Sac
    tasks: int

    def task(self, timestep: TimeStep) -> Array:
        """int32[...], the task that each time step belongs to."""
        return timestep.task if self.tasks > 1 else jnp.zeros(timestep.first.shape, jnp.int32)

    def act(self, actors: Any, timestep: TimeStep, noise: Array) -> Array:
        """Actions float32[B, n] that the worker of each task draws; noise [B, n]."""
        mean, log_std = jax.vmap(lambda params: self.worker.gaussian(params, timestep.observation))(actors)
        mean, log_std = (_of_task(x[:, :, 0], self.task(timestep)) for x in (mean, log_std))
        return distributions.squashed_normal(mean, log_std, noise)[0]

    def judge(self, workers: Any, observation: Array, task: Array, noise: Array) -> dict[str, Array]:
        """What each task's worker says of observations [N, D], leaves float32[N, ...]; noise [N, n]."""

        def of(worker: Any) -> dict[str, Array]:
            mean, log_std = self.worker.gaussian(worker["actor"], observation[:, None])
            action, log_prob = distributions.squashed_normal(mean, log_std, noise[:, None])
            values = self.worker.values(worker["critic"], observation[:, None], action).min(0)
            soft = values - jnp.exp(worker["log_alpha"])[None] * log_prob
            return {"mu": jnp.tanh(mean[:, 0]), "log_std": log_std[:, 0], "soft_value": soft[:, 0]}

        return jax.tree.map(lambda x: _of_task(x, task), jax.vmap(of)(workers))

    def labels(self, workers: Any, rows: dict[str, Array]) -> dict[str, Array]:
        """Labels "mu", "log_std" and "value" (Q of the step) of rows [T, B, ...], of T + 1 with the one behind.

        rows: {"observation", "task", "noise", "reward", "terminated"}, the last two of them float32[T + 1, B].
        """
        shape = rows["task"].shape
        merged = [rows[name].reshape(-1, *rows[name].shape[2:]) for name in ("observation", "task", "noise")]
        judged = self.judge(workers, *merged)
        judged = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), judged)
        later = self.worker.gamma * (1 - rows["terminated"][1:]) * judged.pop("soft_value")[1:]
        return {name: x[:-1] for name, x in judged.items()} | {"value": rows["reward"][1:] + later}

    def store(self, workers: Any, ring: Replay, trajectory: Trajectory, last: TimeStep, key: Array) -> Replay:
        """The set with the trajectory, its labels, and the row behind it."""
        step, layout = trajectory.timestep, self.worker.layout
        join = lambda rows, last: jnp.concatenate([rows, last[None].astype(rows.dtype)])  # noqa: E731
        flat = lambda x: x.reshape(*x.shape[:-2], -1).astype(jnp.float32)  # noqa: E731
        seen = {
            "observation": join(flat(step.observation), flat(last.observation)),
            "task": join(self.task(step), self.task(last)),
        }
        reward, terminated = join(step.reward, last.reward), join(step.terminated, last.terminated)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, layout.env_indices())
        numbers = math.prod(self.worker.spec.action.shape)
        noise = jax.vmap(lambda k: jax.random.normal(k, (len(reward), numbers)))(keys).swapaxes(0, 1)
        rows = seen | {"noise": noise, "reward": reward[..., 0], "terminated": terminated.astype(jnp.float32)}
        labels = layout.map_shards(lambda rows: self.labels(workers, rows), rows, axis=1)
        end = replay.ends(terminated, join(step.truncated, last.truncated))
        return replay.write(ring, seen, trajectory.extras | labels, reward, end)


def _of_task(values: Array, task: Array) -> Array:
    """[N, ...] of [K, N, ...]: the entry of each sample's task int32[N]."""
    index = task.astype(jnp.int32).reshape(1, -1, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=0)[0]
