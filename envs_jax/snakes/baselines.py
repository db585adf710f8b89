"""Scripted policies in the learner's seat: policy(env, state, timestep, key) -> int32[A]; rules in `opponents`.

random      uniform, level 0
level1 .. level4, evasion    as the opponents of these names, choosing beans each for itself as they do
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from envs_jax.base import Array, TimeStep
from envs_jax.snakes import opponents

if TYPE_CHECKING:
    from envs_jax.snakes.env import Snakes, State


def scripted(env: "Snakes", state: "State", timestep: TimeStep, key: Array, *, level: int) -> Array:
    """What a scripted player would do in place of the learner."""
    del timestep
    word = jax.random.bits(key)
    game = env.seen(state)
    return opponents.act(
        env.board, game, slice(0, env.num_agents), jnp.int32(level), word, (level,), env.exclusive_beans
    )


BASELINES: dict[str, Callable[..., Array]] = {
    name: functools.partial(scripted, level=level)
    for level, name in enumerate(("random", "level1", "level2", "level3", "level4", "evasion"))
}
