"""Coverage as an environment: its settings, batches, rewards and messages, and what must hold in every mission."""

from typing import Any

import jax
import numpy as np
import pytest
from helpers.coverage import make, wander
from helpers.off_policy import digest

import envs_jax
from bench.reference.coverage import oracle
from envs_jax.batch import batched
from envs_jax.coverage import communication, maps
from envs_jax.progress import start


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_agents": 0}, "num_agents"),
        ({"num_agents": 13}, "between 1 and 12"),
        ({"budget": 0}, "budget"),
        ({"q": 1}, "q must lie between 2 and 200, not 1"),
        ({"num_actions": 9}, "4, 6 or 27"),
        ({"communication_range": -1.0}, "communication_range must lie between 0"),
        ({"failure_rate": 1.5}, "failure_rate must lie between 0 and 1"),
        ({"prior": 1.0}, "prior"),
        ({"class_weights": (-1.0, 1.0)}, "class_weights must lie between 0"),
        ({"terrain": "splitt"}, "did you mean 'split'"),
        ({"start": "corner"}, "did you mean 'corners'"),
        ({"map_backend": "window"}, "did you mean 'windows'"),
    ],
)
def test_impossible_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        make(**settings)


def test_the_reward_of_the_region_is_what_the_score_loses():
    steps_seen = wander(make(reward="region", reward_scale=10.0, reward_offset=0.25), jax.random.key(2))
    entropy = [float(timestep.metrics["entropy"]) for _, timestep in steps_seen]
    rewards = [float(timestep.reward[0]) for _, timestep in steps_seen]
    assert rewards[0] == 0.0
    np.testing.assert_allclose(rewards[1:], 0.25 - 10 * np.diff(entropy), atol=1e-5)
    assert entropy[-1] < entropy[0] - 0.01


def test_messages_within_range_are_those_of_the_oracle():
    """Also between agents in one place, where nothing is lost, and at exactly 5, 15 and 25 m."""
    rng = np.random.default_rng(0)
    places = rng.integers(0, (11, 11, 3), (100, 8, 3))
    places[:, 1] = places[:, 0]
    delivered = rng.random((100, 8, 8)) < 0.7
    hear = jax.jit(jax.vmap(communication.find_received, in_axes=(0, None, 0)))
    for comm_range in (0.0, 5.0, 12.3, 15.0, 25.0, 100.0):
        received = hear(np.int32(places), np.float32(comm_range), delivered)
        for ours, place, kept in zip(received, places, delivered, strict=True):
            np.testing.assert_array_equal(ours, oracle.received_messages(5 * place, comm_range, kept, 0.5))


def test_bytes_of_the_state():
    env = envs_jax.make("coverage", q=57)
    shapes = jax.eval_shape(env.reset, jax.random.key(0), ())[0]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes) if leaf.dtype.name != "key<fry>")
    assert size < 5 * 493 * 493 * 2 + 8192
    assert maps.choose("dense", 57, True) is not maps.choose("windows", 57, True)


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"delay": (0, 1), "failure_rate": (0.3,), "channel_ramp": 0.5}],
)
def test_a_step_after_an_end_starts_what_reset_does(settings: Any) -> None:
    """Bit for bit, from the end of a mission and from nothing: both are compiled as one."""
    batch = batched(envs_jax.make("coverage", q=2, budget=2, num_agents=2, **settings))
    keys, context = jax.random.split(jax.random.key(4), 3), batch.context(start())
    step, action = jax.jit(batch.step), np.zeros((3, 2), np.int32)
    reset = jax.jit(batch.reset)
    expected = reset(keys, context, np.uint32(5))
    state, timestep = step(*batch.begin_episodes(keys, context, 5), action, context)
    for _ in range(batch.spec.horizon):
        assert digest((state, timestep)) == digest(expected)
        for _ in range(batch.spec.horizon):
            assert not timestep.done.any()
            state, timestep = step(state, timestep, action, context)
        assert timestep.done.all()
        expected = reset(keys, context, state.episode[0] + np.uint32(1))
        state, timestep = step(state, timestep, action, context)
