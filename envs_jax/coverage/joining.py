"""Missions under several settings in one environment, so that one program flies them all.

The joined environment has the largest sizes, and what differs comes in its context, as `Numbers`. A mission is the one
that it is in an environment of its own: no draw of an agent, or of a pair of agents, depends on how many there are.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, pytree


@pytree
class Choices:
    """Values of which each mission draws one, with equal probability."""

    values: Any  # float32[K] or int32[K]
    count: Any  # int32[], number of leading entries that are drawn from

    def draw(self, key: Array) -> Array:
        """Return one of the values for the mission of a key."""
        values = jnp.asarray(self.values)
        return values[jax.random.randint(key, (), 0, self.count, jnp.int32)] if len(values) > 1 else values[0]


@pytree
class Numbers:
    """Settings of missions that may come in the context of an environment."""

    num_agents: Any  # int32[], length of the array of agents; the places beyond it are empty
    failure_rates: Choices  # float32[K]
    delays: Choices  # int32[K], steps
    team_sizes: Choices  # int32[K]
    loss_rate: Any  # float32[]
    comm_range: Any  # float32[], m, divided by `CoverageConfig.stretch`; not read where ranges are random


# Settings that `join` takes away from the program; of what changes during training only the end counts
_FREE = {
    "num_agents", "team_sizes", "loss_rate", "communication_range", "failure_rate", "delay", "channel_ramp",
    "small_maps_first",
}  # fmt: skip


def join(envs: Sequence[Any]) -> tuple[Any, list[Numbers]] | None:
    """Return what `Environment.join` of the first environment and the others does, `Coverage` each.

    None: they differ in what a program must know.
    """
    first = envs[0]
    free = _FREE - {"num_agents"} if first.show_ages else _FREE  # ages have a plane for each agent of the array
    fixed = [field.name for field in dataclasses.fields(first) if field.name not in free]
    if any(getattr(env, name) != getattr(first, name) for env in envs for name in fixed):
        return None
    if len({env.communication_range > 0 for env in envs}) > 1:  # which the scripted policy `ig` asks for
        return None
    agents = max(env.num_agents for env in envs)
    sizes = _union(env.team_sizes or (env.num_agents,) for env in envs)
    joined = dataclasses.replace(
        first,
        num_agents=agents,
        team_sizes=() if sizes == (agents,) else sizes,
        loss_rate=max(env.loss_rate for env in envs),
        communication_range=max(env.communication_range for env in envs),
        channel_ramp=0.0,
        small_maps_first=0.0,
        failure_rate=_one_or_several(_union(env.failure_rates for env in envs)),
        delay=_one_or_several(_union(env.delays for env in envs)),
    )
    return joined, _pad([env.numbers for env in envs])


def _union(lists: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(sorted(set(itertools.chain(*lists))))


def _one_or_several(values: tuple[Any, ...]) -> Any:
    """Return the number that all missions have, or the values that they draw it from."""
    return values[0] if len(values) == 1 else values


def _pad(all_numbers: list[Numbers]) -> list[Numbers]:
    """Return numbers as arrays of the same shapes: those of one program."""

    def pad(name: str) -> list[Choices]:
        choices = [getattr(numbers, name) for numbers in all_numbers]
        longest = max(len(one.values) for one in choices)
        return [
            Choices(np.pad(one.values, (0, longest - len(one.values)), mode="edge"), np.int32(one.count))
            for one in choices
        ]

    return [
        Numbers(
            num_agents=np.int32(numbers.num_agents),
            failure_rates=failure_rates,
            delays=delays,
            team_sizes=team_sizes,
            loss_rate=np.float32(numbers.loss_rate),
            comm_range=np.float32(numbers.comm_range),
        )
        for numbers, failure_rates, delays, team_sizes in zip(
            all_numbers, pad("failure_rates"), pad("delays"), pad("team_sizes"), strict=True
        )
    ]
