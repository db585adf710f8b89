"""Scripted policies in the learner's seat: policy(env, state, timestep, key) -> int32[A]; rules in `opponents`.

And how policies are compared: in games against each of them.

random      uniform, level 0
level1 .. level4, evasion    as the opponents of these names, choosing beans each for itself as they do
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Contest, TimeStep
from envs_jax.snakes import opponents, schedule, teams
from envs_jax.snakes.types import Settings, State


def scripted(env: Settings, state: State, timestep: TimeStep, key: Array, *, level: int) -> Array:
    """What a scripted player would do in place of the learner."""
    del timestep
    word = jax.random.bits(key)
    game = teams.seen(env, state)
    return opponents.act(
        env.board, game, slice(0, env.num_agents), jnp.int32(level), word, (level,), env.exclusive_beans
    )


BASELINES: dict[str, Callable[..., Array]] = {
    name: functools.partial(scripted, level=level)
    for level, name in enumerate(("random", "level1", "level2", "level3", "level4", "evasion"))
}


GAME = ("height", "width", "snakes", "beans", "max_steps", "fixed_respawn")  # the settings that make a game


def contest(env: Settings) -> Contest:
    """As published, but in both seats: drawn actions, games against each player of the opponent's mixture."""
    only = np.eye(len(schedule.PLAYERS), dtype=np.float32)
    used = env.schedule.used if env.scripted else ()
    everyone = ",".join(opponents.LEVELS)
    return Contest(
        game={name: getattr(env, name) for name in GAME},
        settings={"opponent": everyone, "seat": "both"} | ({"stale_opponents": False} if env.stale_opponents else {}),
        league={
            "opponent": f"{everyone},self",
            "seat": "both",
            "exclusive_beans": env.exclusive_beans,
            "stale_opponents": False,
        },
        rivals={name: jnp.asarray(only[k]) for k, name in enumerate(BASELINES) if k in used},
        outside=jnp.asarray(only[schedule.SELF]) if schedule.SELF in used else None,
        beside=("random", "level2"),
        anchor=("level2", 1000.0),
        drawn=True,
    )
