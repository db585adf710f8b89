"""Missions of coverage for tests: small ones, and recorded ones of the public repository as this package's types."""

import functools
from typing import Any

import golden
import jax
import jax.numpy as jnp
import numpy as np

import envs_jax
from envs_jax.coverage import actions, observation, terrain
from helpers.programs import compiled

SPACING = 5  # metres


def make(**settings):
    return envs_jax.make("coverage", **{"q": 3, "budget": 4, **settings})


def fly(env, key, steps=None):
    """States and time steps of a mission with random open actions."""
    programs = compiled(env)
    state, timestep = programs.reset(key, ())
    seen = [(state, timestep)]
    for t in range(env.steps if steps is None else steps):
        action = programs.policy("random")(state, timestep, jax.random.fold_in(key, 99 + t))
        state, timestep = programs.step(state, action, ())
        seen.append((state, timestep))
    return seen


def wander(env, key):
    """As `fly`, in a mission without resets: one program, for settings that one test alone flies."""
    rng = np.random.default_rng(0)
    measure = jax.jit(lambda state, positions: env.observe_and_fuse(state, positions, *env._draw(state, positions)))
    state = jax.jit(env._draw_mission)(key)
    state, timestep = measure(state, state.positions)
    seen = [(state, timestep)]
    for _ in range(env.steps):
        mask = np.asarray(timestep.action_mask)
        action = np.argmax(np.where(mask, rng.random(mask.shape), -1), -1)
        state, timestep = measure(state, np.asarray(state.positions) + actions.MOVES[env.num_actions][action])
        seen.append((state, timestep))
    return seen


@functools.cache
def advance(env):
    """`env.observe_and_fuse`, compiled once for equal environments."""
    return jax.jit(env.observe_and_fuse)


@functools.cache
def critic(num_actions):
    """What the critic sees, compiled once for an action set."""
    return jax.jit(functools.partial(observation.critic_input, num_actions=num_actions))


def environment(record: golden.CoverageRecord, **settings: Any) -> Any:
    config = record.config
    return envs_jax.make(
        "coverage",
        num_agents=record.num_agents,
        budget=config["budget"],
        q=config["pixel"],
        num_actions=config["num_actions"],
        prior=config.get("prior", 0.5),
        **settings,
    )


def lattice(metres: np.ndarray) -> np.ndarray:
    return metres.astype(np.int32) // SPACING - np.array([0, 0, 1], np.int32)


def rectangle(record: golden.CoverageRecord) -> terrain.Terrain:
    top, bottom, left, right = (int(v) for v in record["truth_bounds"])
    return terrain.Terrain(
        rows=jnp.array([[top, bottom], [0, 0]], jnp.int32),
        columns=jnp.array([[left, right], [0, 0]], jnp.int32),
        invert=jnp.bool_(False),
        bits=(),
        count=jnp.int32((bottom - top) * (right - left)),
    )


def whole_map(record: golden.CoverageRecord, k: int) -> np.ndarray:
    """bool[A, n, n]: the readings of measurement k in their places."""
    maps = np.zeros((record.num_agents, record.n, record.n), bool)
    for agent, (top, bottom, left, right) in enumerate(record["footprint"][k]):
        maps[agent, top:bottom, left:right] = record.reading(k, agent)
    return maps
