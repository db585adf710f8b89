"""Scripted policies of coverage: recorded greedy missions, and what each policy promises."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden
from helpers.cases import by_day
from helpers.coverage import begin, proceed, sequential_masks
from helpers.programs import get_programs

import envs_jax
from bench.parity.coverage import advance, environment, lattice, launch, rectangle, whole_map
from envs_jax.coverage import actions, baselines, terrain


@pytest.mark.slow  # by day test_coverage_against_oracle compares the scores with those of the oracle
@pytest.mark.parametrize("name", golden.COVERAGE_GREEDY)
def test_recorded_greedy_missions(name):
    record = golden.coverage_mission(name)
    env = environment(record, belief_dtype="float32", communication_range=float(record.config["range"]))
    state = launch(env)(jax.random.key(0), rectangle(record), lattice(record["positions"][0]), np.float32(0))

    @jax.jit
    def choose(state, timestep):
        chosen = env.baselines["ig"](env, state, timestep, jax.random.key(0))
        return baselines.ig_scores(env, state, timestep, record.config["communication"]), chosen

    for k in range(record.steps):
        positions, heard = lattice(record["positions"][k]), record["comm"][k].astype(bool)
        state, timestep = advance(env)(state, positions, heard, whole_map(record, k))
        (gain, score), action = choose(state, timestep)
        np.testing.assert_allclose(gain, record["raw_gain"][k], rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(score, record["utility"][k], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(gain) != 0, record["mask"][k].astype(bool))
        # equal scores (by symmetry) differ by rounding: any action of the best score will do
        best = record["utility"][k].max(-1)
        reached = np.take_along_axis(record["utility"][k], np.asarray(action)[:, None], 1)[:, 0]
        np.testing.assert_allclose(reached, best, rtol=1e-5)


def play(env, name, steps, key):
    """States and time steps of a mission of a scripted policy; every action is open."""
    policy = get_programs(dataclasses.replace(env, start="uniform")).policy(name)
    state, timestep = begin(env, key)
    steps_seen = [(state, timestep)]
    for t in range(steps):
        action = policy(state, timestep, jax.random.fold_in(key, 1000 + t))
        assert action.shape == (env.num_agents,) and action.dtype == jnp.int32
        assert np.all(np.take_along_axis(np.asarray(timestep.action_mask), np.asarray(action)[:, None], 1)), t
        state, timestep = proceed(env, state, action)
        steps_seen.append((state, timestep))
    return steps_seen


def make(**settings):
    return envs_jax.make("coverage", **{"q": 3, "budget": 40, **settings})


@pytest.mark.parametrize("num_actions", by_day([4, 6, 27], [6]))
@pytest.mark.parametrize("name", sorted(baselines.BASELINES))
def test_every_baseline_stays_inside(name, num_actions):
    play(make(num_actions=num_actions), name, 5, jax.random.key(1))


def test_random_is_uniform_over_open_actions():
    env = make(start="corners")
    state, timestep = begin(env, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 4000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: env.baselines["random"](env, state, timestep, key)))(keys))
    open_ = np.asarray(timestep.action_mask)
    for agent in range(4):
        share = np.bincount(drawn[:, agent], minlength=6) / len(drawn)
        assert np.all(share[~open_[agent]] == 0)
        np.testing.assert_allclose(share[open_[agent]], 0.2, atol=0.03)


def sweep(env, name, steps):
    """Positions int32[steps + 1, A, 3] of a lawn-mower, which looks at nothing else; every action is open."""

    @jax.jit
    def fly(key):
        def step(positions, _):
            action = env.baselines[name](env, types.SimpleNamespace(positions=positions), None, key)
            open_ = jnp.take_along_axis(actions.boundary_mask(positions, env.num_actions), action[:, None], 1)
            following = actions.move(positions, action, env.num_actions)
            return following, (following, open_)

        initial = env._draw_mission(key).positions
        _, (path, open_) = jax.lax.scan(step, initial, length=steps)
        return jnp.concatenate([initial[None], path]), open_

    path, open_ = fly(jax.random.key(5))
    assert np.all(open_)
    return np.asarray(path)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_lawnmower_flies_its_path(level):
    name, start = [("lawnmower_5", "paths_5"), ("lawnmower", "paths_10"), ("lawnmower_15", "paths_15")][level]
    path = sweep(make(num_agents=5, start=start), name, 14)
    np.testing.assert_array_equal(path[:, :4, :2].swapaxes(0, 1), baselines.PATHS)
    np.testing.assert_array_equal(path[:, 4], path[:, 0])
    assert np.all(path[..., 2] == level)


@pytest.mark.parametrize("num_actions", [4, 6])
def test_lawnmower_finds_its_path(num_actions):
    path = sweep(make(num_actions=num_actions), "lawnmower", 40)
    for agent in range(4):
        height = 1 if num_actions == 6 else path[0, agent, 2]  # of four actions none changes it
        visited = set(map(tuple, path[:, agent].tolist()))
        assert {(*point, height) for point in baselines.PATHS[agent].tolist()} <= visited


def test_sequential_greedy_respects_collisions():
    env = make(start="corners")
    masks = jax.jit(functools.partial(sequential_masks, num_actions=6))
    policy = get_programs(make()).policy("ig_sequential")
    for state, timestep in play(env, "ig_sequential", 8, jax.random.key(3)):
        action = np.asarray(policy(state, timestep, jax.random.key(0)))
        open_ = np.asarray(masks(state.positions, timestep.action_mask, action))
        assert np.all(np.take_along_axis(open_, action[:, None], 1))


def test_sequential_greedy_avoids_overlap():
    """Two agents in one place over a map that looks the same in all directions: the second flies elsewhere."""
    env = make(num_agents=2, num_actions=27)
    start = np.int32([[5, 5, 1]] * 2)

    @jax.jit
    def choose(key):
        state = env.begin(key, terrain.split(jnp.int32(0), jnp.int32(40), env.n), jnp.asarray(start), jnp.float32(25))
        state, timestep = env.observe_and_fuse(state, state.positions, *env._draw(state, state.positions))
        return env.baselines["ig_sequential"](env, state, timestep, key)

    first, second = np.asarray(choose(jax.random.key(0)))
    assert first != second


def test_greedy_beats_random():
    env, missions = make(), 8

    def final(name):
        ends = [play(env, name, 15, jax.random.key(mission))[-1][1] for mission in range(missions)]
        return np.mean([timestep.metrics["entropy"] for timestep in ends])

    scores = {name: final(name) for name in ("random", "ig", "ig_sequential")}
    assert scores["ig"] < scores["random"] - 0.05
    assert scores["ig_sequential"] < scores["random"] - 0.05
