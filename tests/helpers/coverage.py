"""Missions of coverage for tests: small ones, and recorded ones of the public repository as this package's types."""

import dataclasses
import functools
from typing import Any

import golden
import jax
import numpy as np

import envs_jax
from envs_jax.batch import batched
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


move = jax.jit(actions.move, static_argnums=2)


@functools.cache
def _measurement(env):
    def measure(state, positions):
        return env.observe_and_fuse(state, positions, *env._draw(state, positions))

    return jax.jit(measure)


def measurement(env):
    """state, positions -> what a reset and a step end with, compiled once wherever missions start."""
    return _measurement(dataclasses.replace(env, start="uniform"))


@functools.cache
def _mission(env):
    return jax.jit(env._draw_mission)


def begin(env, key):
    """State and time step of the first measurement of a mission, as `env.reset` returns them."""
    state = _mission(env)(key)
    return measurement(env)(state, state.positions)


def proceed(env, state, action):
    """As `env.step`, by the program of `begin`."""
    return measurement(env)(state, move(state.positions, action, env.num_actions))


def wander(env, key):
    """As `fly`, in fewer programs, with moves that do not depend on the key."""
    rng = np.random.default_rng(0)
    seen = [begin(env, key)]
    for _ in range(env.steps):
        mask = np.asarray(seen[-1][1].action_mask)
        action = np.argmax(np.where(mask, rng.random(mask.shape), -1), -1).astype(np.int32)
        seen.append(proceed(env, seen[-1][0], action))
    return seen


@functools.cache
def batch(env):
    """Missions of keys [B], their measurement at positions [B, A, 3], and their moves: three programs of a batch."""
    move = functools.partial(actions.move, num_actions=env.num_actions)
    draw, measure = jax.vmap(env._draw_mission), batched(env)._advance  # which a reset and a step end with
    return jax.jit(draw), jax.jit(measure), jax.jit(jax.vmap(move))


@functools.cache
def launch(env):
    """`env.begin`, compiled once for equal environments."""
    return jax.jit(env.begin)


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
        rows=np.int32([[top, bottom], [0, 0]]),
        columns=np.int32([[left, right], [0, 0]]),
        invert=np.array(False),
        bits=(),
        count=np.array((bottom - top) * (right - left), np.int32),
    )


def probability(env: Any, beliefs: np.ndarray) -> np.ndarray:
    """Probabilities of beliefs as a map stores them."""
    stored = np.where(beliefs == env.storage.unseen, env.storage.start, beliefs).astype(np.float64) / env.storage.unit
    return 1.0 / (1.0 + np.exp(-stored))


def whole_map(record: golden.CoverageRecord, k: int) -> np.ndarray:
    """bool[A, n, n]: the readings of measurement k in their places."""
    maps = np.zeros((record.num_agents, record.n, record.n), bool)
    for agent, (top, bottom, left, right) in enumerate(record["footprint"][k]):
        maps[agent, top:bottom, left:right] = record.reading(k, agent)
    return maps
