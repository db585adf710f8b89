"""Teams: which agents of the array fly in a mission, and which of them fail in it.

The array of agents has a fixed length. The first `size` of them are present at the start; each then fails with
probability `loss_rate` at every step, on its way to the measurement that it does not take any more. An agent that is
absent, from the start or since it failed, neither moves, measures, sends nor receives. What it sees is 0, others do not
see it, and learners give what it does no weight (`TimeStep.present`). A mission of 4 in an array of 12 is the mission
of 4 in an array of 4: all draws of an agent depend on its number, never on the length of the array.
"""

import jax
import jax.numpy as jnp

from envs_jax.base import Array, pytree
from envs_jax.coverage.joining import Choices

_SIZE, _LOSSES = 5, 6  # indices of these keys of a mission; 0 to 4 are used elsewhere


@pytree
class Team:
    """The agents of one mission."""

    size: Array  # int32[], present at the start: those with the numbers 0 to size - 1
    present: Array  # bool[A], present now


def draw(key: Array, sizes: Choices, num_agents: int) -> Team:
    """Return the team of the mission of a key, of one of `sizes`."""
    size = sizes.draw(jax.random.fold_in(key, _SIZE))
    return Team(size, jnp.arange(num_agents, dtype=jnp.int32) < size)


def lose(key: Array, index: Array, team: Team, loss_rate: Array | float) -> Team:
    """Return the team at measurement `index` int32[], without the agents that fail on the way to it."""
    if isinstance(loss_rate, float) and loss_rate == 0.0:
        return team
    step_key = jax.random.fold_in(jax.random.fold_in(key, _LOSSES), index)
    keeps = jax.random.uniform(step_key, team.present.shape, jnp.float32) >= loss_rate
    return Team(team.size, team.present & keeps)


def pairs(present: Array) -> Array:
    """bool[A, A]: both agents are present."""
    return present[:, None] & present[None, :]
