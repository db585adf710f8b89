"""Scripted policies in the learner's place: policy(env, state, timestep, key) -> int32[A]; rules in `opponents`.

Also the match rules: games against each of them.

random      uniform, level 0
level1 .. level4, evasion    as the opponents of these names, each choosing beans for itself as they do
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, TimeStep
from envs_jax.matches import MatchRules
from envs_jax.snakes import opponents, schedule, teams
from envs_jax.snakes.types import SnakesConfig, State


def scripted(env: SnakesConfig, state: State, timestep: TimeStep, key: Array, *, level: int) -> Array:
    """Return the actions of a scripted opponent in the learner's place."""
    del timestep
    word = jax.random.bits(key, dtype=jnp.uint32)
    game = teams.learner_view(env, state)
    return opponents.act(
        env.board, game, slice(0, env.num_agents), jnp.int32(level), word, (level,), env.exclusive_beans
    )


BASELINES: dict[str, Callable[..., Array]] = {
    opponent.baseline: functools.partial(scripted, level=level) for level, opponent in enumerate(opponents.OPPONENTS)
}


def match_rules(env: SnakesConfig) -> MatchRules:
    """Return the published rules, but on both sides: sampled actions, games against each opponent of the mixture."""
    only = np.eye(len(schedule.PLAYERS), dtype=np.float32)
    used = env.schedule.used if env.scripted else ()
    everyone = ",".join(opponents.NAMES)
    fixed = {"stale_observation_bug": False} if env.stale_observation_bug else {}
    defining = ("height", "width", "snakes", "beans", "max_steps", "fixed_respawn")
    return MatchRules(
        game={name: getattr(env, name) for name in defining},
        settings={"opponent": everyone, "side": "both"} | fixed,
        league={
            "opponent": f"{everyone},self",
            "side": "both",
            "exclusive_beans": env.exclusive_beans,
            "stale_observation_bug": False,
        },
        opponents={name: only[k] for k, name in enumerate(BASELINES) if k in used},
        outside=only[schedule.SELF] if schedule.SELF in used else None,
        baselines=("random", "level2"),
        anchor=("level2", 1000.0),
        sampled=True,
    )
