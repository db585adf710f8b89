"""Episodes of reach in a real simulator, step by step on the host, with the policies of any evaluation.

The same loop runs the JAX environment, so that the two can be compared episode by episode.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.adapters import metaworld as adapter
from envs_jax.base import Array, EnvSpec, TimeStep
from envs_jax.batch import BatchState, start_statistics, update_statistics
from envs_jax.reach.env import ReachBatch
from jaxrl.common.errors import UsageError, usage_errors
from jaxrl.evaluation.policies import LEARNED, PolicySet
from jaxrl.runtime.rollouts import held_out_key, learned_policy, make_step_keys, scripted_policy, split_by_task, values
from jaxrl.runtime.trainer import make_env_keys

SIMULATORS = ("metaworld", "jax")
EPISODES = 100
ARMS = 8  # batch of Meta-World environments; more hardly save time


class Simulator(NamedTuple):
    """A simulator that runs B arms."""

    description: str  # a few words
    task: str | None  # the simulator's own task; None: it plays the environment's tasks
    spec: EnvSpec  # describes the environment that is simulated
    batch_size: int  # B, the batch size
    # (keys key[B], numbers int32[B]) -> initial steps of these episodes of one infinite list
    in_order: Callable[[Array, Array], tuple[BatchState, TimeStep]]
    # (state, action [B, 1, 4], ()) -> the next step
    step: Callable[[BatchState, Array, Any], tuple[BatchState, TimeStep]]
    # () -> actions [B, 1, 4] of the simulator's scripted policy; None: use the environment's
    scripted: Callable[[], np.ndarray] | None
    stream: str = "pool in order"  # source of the goals


@dataclasses.dataclass(frozen=True)
class Episodes:
    """N episodes of one policy."""

    curves: dict[str, np.ndarray]  # {metric: float32[T + 1, N]}, as in `jaxrl.evaluation.reports.rollout`
    observation: np.ndarray  # float32[N, T + 1, D]
    action: np.ndarray  # float32[N, T, n]
    advice: Any  # float32[N, T, n], the scripted policy's actions in the same states, or () if not requested
    reward: np.ndarray  # float32[N, T], of each action
    task: np.ndarray  # int32[N], index in the environment's tasks


# Simulators


def require_reach(policy_set: PolicySet) -> ReachBatch:
    """Return the reach environment of a policy. Raises UsageError for any other."""
    if not isinstance(policy_set.env, ReachBatch):
        origin = f"{policy_set.run} was trained on" if policy_set.run else "this is"
        raise UsageError(f"the simulator plays only 'reach', but {origin} '{policy_set.name}': choose a run of reach")
    return policy_set.env


def make_simulator(name: str | None, policy_set: PolicySet, task: str | None, batch_size: int) -> Simulator:
    """Return a simulator of `batch_size` arms: "metaworld", or the policy's own environment ("jax" or None).

    `task` is one of the simulator's own, None for the environment's tasks.

    Raises UsageError: not reach, Meta-World is not installed, or it has no such task.
    """
    env = require_reach(policy_set)
    stream = "fresh pairs in order" if env.env.goals == "uniform" and task is None else "pool in order"
    if name != "metaworld":
        in_order = jax.jit(env.in_order)
        step = jax.jit(env.step_without_reset)
        return Simulator(policy_set.name, None, env.spec, batch_size, in_order, step, None, stream)
    with usage_errors():
        real = adapter.RealReach.make(env.env, task, batch_size)
    description = f"Meta-World {adapter.version()}, {task or f'{adapter.REACH}, task {env.env.task}'}"
    script = real.scripted if task else None
    return Simulator(description, task, real.spec, batch_size, real.in_order, real.step_without_reset, script, stream)


# Playing


def _make_act(policy_set: PolicySet, world: Simulator, name: str) -> Callable[..., tuple[Any, Any]]:
    """Return one of `policy_set.policies` in a simulator: a `Policy` that takes the step's number, too."""
    if name == "scripted" and world.scripted is not None:
        script = world.scripted
        return lambda params, carry, state, timestep, keys, t: (jnp.asarray(script()), carry)
    algo = policy_set.algo
    learned = name in LEARNED
    policy = learned_policy(algo, LEARNED[name]) if algo and learned else scripted_policy(policy_set.env, name)

    def act(params: Any, carry: Any, state: BatchState, timestep: TimeStep, keys: Array, t: Array) -> Any:
        return policy(params, carry, state, timestep, make_step_keys(keys, t))

    return jax.jit(act)


def play(
    policy_set: PolicySet, world: Simulator, name: str, indices: Sequence[int], seed: int, advised: bool = False
) -> Episodes:
    """Roll out episodes `indices` (at least one) of the simulator's list with one of `policy_set.policies`.

    An episode does not depend on which others are played; `seed` is for the random numbers of the policy. If `advised`,
    the scripted policy's action is recorded at every step.
    """
    algo = policy_set.algo
    params = policy_set.params
    act = _make_act(policy_set, world, name)
    script = _make_act(policy_set, world, "scripted") if advised else None
    begin = jax.jit(start_statistics)
    measure = jax.jit(values)
    update = jax.jit(functools.partial(update_statistics, world.spec))

    def episodes(numbers: np.ndarray) -> tuple[Any, ...]:
        """Return the fields of `Episodes` for a batch of episodes, curves [B, T + 1]."""
        indices = jnp.asarray(numbers)
        keys = make_env_keys(held_out_key(seed, "evaluation"), indices)
        state, timestep = world.in_order(keys, indices)
        statistics = begin(timestep)
        carry = algo.init_carry(params, timestep, indices) if algo and name in LEARNED else ()
        measured = [(measure(statistics), timestep.observation)]
        transitions = []
        for t in range(world.spec.horizon):
            step = np.uint32(t)
            action, carry = act(params, carry, state, timestep, keys, step)
            advice = script(params, (), state, timestep, keys, step)[0] if script else ()
            state, timestep = world.step(state, action, ())
            statistics = update(statistics, timestep)
            measured.append((measure(statistics), timestep.observation))
            transitions.append((action, advice, timestep.reward))

        def stack(*rows: Any) -> Any:
            return np.stack(rows, axis=1)

        curves, observation = jax.tree.map(stack, *measured)
        single_agent = jax.tree.map(lambda *rows: stack(*rows)[:, :, 0], *transitions)  # there is one agent
        return curves, observation[:, :, 0], *single_agent, np.asarray(state.env.task)

    parts = []
    for first in range(0, len(indices), world.batch_size):
        batch = np.asarray(indices[first : first + world.batch_size], np.int32)
        padded = np.concatenate([batch, np.repeat(batch[-1:], world.batch_size - len(batch))])
        parts.append(episodes(padded))
    curves, *rest = jax.tree.map(lambda *rows: np.concatenate(rows)[: len(indices)], *parts)  # only the last is padded
    return Episodes({metric: curve.T for metric, curve in curves.items()}, *rest)


def rollout(
    policy_set: PolicySet, world: Simulator, names: Sequence[str], episodes: int, seed: int
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Roll out as `jaxrl.evaluation.reports.rollout`, on the first `episodes` of the simulator's list."""
    for name in names:
        played = play(policy_set, world, name, range(episodes), seed)
        task = {"task": played.task[None]} if world.spec.num_tasks > 1 and world.task is None else {}
        yield name, split_by_task(world.spec, played.curves | task)
