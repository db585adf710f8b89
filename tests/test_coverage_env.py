"""Coverage as an environment: its settings, batches, rewards and messages, and what must hold in every mission."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.coverage import fly, make
from helpers.programs import get_programs

from envs_jax.coverage import communication, terrain


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_agents": 9}, "between 1 and 8"),
        ({"q": 1}, "q must lie between 2 and 200, not 1"),
        ({"num_actions": 9}, "4, 6 or 27"),
        ({"class_weights": (-1.0, 1.0)}, "class_weights must lie between 0"),
        ({"terrain": "splitt"}, "did you mean 'split'"),
        ({"start": "corners", "num_agents": 5}, "uniform"),
    ],
)
def test_impossible_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        make(**settings)


USUAL = make(failure_rate=0.2)  # what most tests fly, so that it is compiled once
COPIES = 300


def test_a_mission_from_start_to_end():
    env = USUAL
    steps_seen = fly(env, jax.random.key(4))
    for t, (state, timestep) in enumerate(steps_seen):
        assert int(state.t) == t
        assert bool(timestep.first) == (t == 0)
        assert bool(timestep.terminated) == (t == 5) and not bool(timestep.truncated)
        np.testing.assert_allclose(timestep.observation[..., 0], max(0.0, (4 - t) / 4), atol=1e-6)
        assert np.all(np.asarray(timestep.reward) == np.asarray(timestep.reward)[0])
        observation = np.asarray(timestep.observation)
        assert observation.min() >= 0.0 and observation.max() <= 1.0
        assert np.asarray(timestep.global_state["maps"]).max() <= 1.0
    assert np.all(np.asarray(steps_seen[0][1].reward) == 0.0)
    coverage = [float(timestep.metrics["coverage"]) for _, timestep in steps_seen]
    assert all(a <= b for a, b in itertools.pairwise(coverage))
    assert 0.0 < coverage[0] < coverage[-1] < 1.0


def test_the_reward_of_the_region_is_what_the_score_loses():
    steps_seen = fly(make(reward="region", reward_scale=10.0, reward_offset=0.25), jax.random.key(2))
    entropy = [float(timestep.metrics["entropy"]) for _, timestep in steps_seen]
    rewards = [float(timestep.reward[0]) for _, timestep in steps_seen]
    assert rewards[0] == 0.0
    np.testing.assert_allclose(rewards[1:], 0.25 - 10 * np.diff(entropy), atol=1e-5)
    assert entropy[-1] < entropy[0] - 0.01


heard = jax.jit(communication.find_received)
split = jax.jit(terrain.split, static_argnums=2)


def test_messages_fail_independently():
    message_keys = np.arange(300, dtype=np.int32)
    draws = np.asarray(
        jax.jit(jax.vmap(lambda i: communication.draw_delivered(jax.random.key(0), i, 4, 0.3)))(message_keys)
    )
    off = ~np.eye(4, dtype=bool)
    assert draws[:, off].mean() == pytest.approx(0.7, abs=0.03)
    assert not np.array_equal(draws, draws.swapaxes(1, 2))  # one-way failures
    positions = np.int32([[0, 0, 2], [0, 0, 2], [1, 0, 2], [10, 10, 0]])
    none = heard(positions, np.float32(25.0), np.zeros((4, 4), bool))
    np.testing.assert_array_equal(none, [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    all_ = heard(positions, np.float32(5.0))
    np.testing.assert_array_equal(all_, [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize(("backend", "copies"), [("auto", COPIES), pytest.param("windows", 12, marks=pytest.mark.long)])
def test_a_copy_alone_equals_the_copy_in_a_batch(backend, copies):
    programs = get_programs(dataclasses.replace(USUAL, map_backend=backend))
    keys = jax.random.split(jax.random.key(11), copies)
    states, timesteps = programs.reset_batch(keys, ())
    history = [(states.env, timesteps)]
    actions_ = np.random.default_rng(1).integers(0, 6, (3, copies, 4), np.int32)
    for action in actions_:
        states, timesteps = programs.step_batch(states, timesteps, action, ())
        history.append((states.env, timesteps))
    history = jax.tree.map(_numbers, history)
    for i in (0, copies // 2, copies - 1):
        state, timestep = programs.reset(jax.random.fold_in(keys[i], 0), ())
        for t, many in enumerate(history):
            if t:
                state, timestep = programs.step(state, actions_[t - 1, i], ())
            alone = [_numbers(leaf) for leaf in jax.tree.leaves((state, timestep))]
            for a, b in zip(alone, jax.tree.leaves(many), strict=True):
                if np.issubdtype(a.dtype, np.floating):
                    np.testing.assert_allclose(a, b[i], atol=1e-6, rtol=1e-6)
                else:
                    np.testing.assert_array_equal(a, b[i])


def _numbers(leaf):
    """A leaf in NumPy, keys as their numbers."""
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def test_episodes_of_a_batch_follow_each_other():
    programs = get_programs(USUAL)
    keys = jax.random.split(jax.random.key(0), COPIES)
    state, timestep = programs.reset_batch(keys, ())
    firsts, starts = [], []
    for _ in range(13):
        state, timestep = programs.step_batch(state, timestep, np.zeros((COPIES, 4), np.int32), ())
        firsts.append(bool(np.asarray(timestep.first)[0]))
        starts.append(np.asarray(state.env.maps.sums.counts))
    assert firsts == [False] * 5 + [True] + [False] * 5 + [True, False]
    again, _ = programs.reset(jax.random.fold_in(keys[1], 1), ())
    np.testing.assert_array_equal(again.maps.sums.counts, starts[5][1])
