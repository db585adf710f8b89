"""Small missions of coverage for tests."""

import dataclasses
import functools

import jax
import numpy as np

import envs_jax
from envs_jax.batch import batched
from envs_jax.coverage import actions


def make(**settings):
    return envs_jax.make("coverage", **{"q": 3, "budget": 4, **settings})


move = jax.jit(actions.move, static_argnums=2)


def sequential_masks(positions, boundary, chosen, num_actions):
    """bool[A, n]: `actions.next_mask` of every agent, given what all chose."""
    agents = jax.numpy.arange(positions.shape[0])
    return jax.vmap(lambda i: actions.next_mask(positions, boundary, chosen, i, num_actions))(agents)


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
    """States and time steps of a mission with random open actions, which do not depend on the key."""
    rng = np.random.default_rng(0)
    steps_seen = [begin(env, key)]
    for _ in range(env.steps):
        mask = np.asarray(steps_seen[-1][1].action_mask)
        action = np.argmax(np.where(mask, rng.random(mask.shape), -1), -1).astype(np.int32)
        steps_seen.append(proceed(env, steps_seen[-1][0], action))
    return steps_seen


@functools.cache
def batch(env):
    """Missions of keys [B], their measurement at positions [B, A, 3], and their moves: three programs of a batch."""
    move = functools.partial(actions.move, num_actions=env.num_actions)
    draw, measure = jax.vmap(env._draw_mission), batched(env)._advance  # which a reset and a step end with
    return jax.jit(draw), jax.jit(measure), jax.jit(jax.vmap(move))
