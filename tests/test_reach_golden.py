"""Recorded episodes of the real simulator, contacts included, against the environment and against the oracle.

The bounds come from `bench.parity.metaworld`: three times what was measured when the arm was first written down.
`test_reach_env` compares the environment with episodes of the oracle, which has no contacts.
"""

import jax
import numpy as np
from helpers import golden

from bench.parity import metaworld, reach
from bench.reference.reach import oracle
from envs_jax import make
from envs_jax.reach import constants, reward
from envs_jax.reach.types import TARGET_UNIT

ORACLE_EPISODES = (0, 12, 19, 22, 27, 30, 36, 39)  # all policies; the puck is touched in 22, the wall in 27 and 36
ORACLE_STEPS = 120  # it takes its time; all 500 hold too


begin = jax.jit(make("reach").begin)


@jax.jit
def judge(tool, goal):
    """Distances of tool centres from goals, and what is paid for them."""
    far = reward.distance(tool, goal)
    return far, reward.compute_reward("v2", far, goal, constants.reset())


def recording() -> metaworld.Recording:
    with golden.skipping():
        return reach.recording()
    raise AssertionError("skipping ends the test")


def test_the_environment_follows_every_recorded_episode_open_loop():
    rows = metaworld.compare(recording(), reach.replay("recorded"))
    assert all(row["holds"] for row in rows), rows
    assert recording().free.sum() == 17_364
    assert recording().success.sum() > 4_000  # the last row compares something


def test_observations_targets_and_successes():
    recording()
    comparison = reach.compare("recorded")
    comparison.check()
    assert len(comparison.figures) == 6 and all(figure.values >= 960 for figure in comparison.figures.values())


def test_episodes_begin_as_recorded():
    record = golden.load("reach_episodes")
    places = (np.float32(record[name].T) for name in ("obj_init", "goal"))
    state, timestep = jax.tree.map(np.asarray, begin(*places, np.zeros(40, np.int32)))
    np.testing.assert_allclose(timestep.observation[0].T, record["obs"][:, 0], atol=2e-7)
    np.testing.assert_allclose(state.q.T, record["qpos0"][:, :9], rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(state.v.T, record["qvel0"][:, :9], rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(np.asarray(state.mocap_target.T) * TARGET_UNIT, record["mocap_pos"][:, 0], atol=4e-8)


def test_recorded_observations_have_the_layout_of_the_oracle():
    record = recording()
    arms = oracle.Arms(record.puck, record.goal)
    np.testing.assert_allclose(arms.observe(), record.observation[:, 0], atol=1e-7)
    np.testing.assert_array_equal(record.observation[:, 1:, 18:36], record.observation[:, :-1, :18])


def test_recorded_rewards_and_successes_follow_from_the_tool_centre():
    record = recording()
    tool, goal = record.tool[:, 1:], np.broadcast_to(record.goal[:, None], record.tool[:, 1:].shape)
    np.testing.assert_allclose(oracle.reward_v2(tool, goal), record.reward, atol=1e-5)
    far, paid = judge(*(np.float32(np.moveaxis(x, -1, 0)) for x in (tool, goal)))
    np.testing.assert_allclose(paid, record.reward, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(far) <= reward.RADIUS, record.success)


def test_the_oracle_follows_recorded_episodes_within_the_rounding_of_the_record():
    rows, record = np.array(ORACLE_EPISODES), recording()
    arms = oracle.Arms(record.puck[rows], record.goal[rows])
    free = record.free[rows]
    for t in range(ORACLE_STEPS):
        paid, success = arms.step(record.action[rows, t])
        actual, expected, on = arms.observe(), record.observation[rows, t + 1], free[:, t]
        assert np.linalg.norm(actual[on, :3] - expected[on, :3], axis=-1).max(initial=0) < 1e-7  # m
        assert np.abs(actual[on, 3] - expected[on, 3]).max(initial=0) < 1e-7
        assert np.abs(paid - record.reward[rows, t])[on].max(initial=0) < 1e-6
        np.testing.assert_array_equal(success, record.success[rows, t])
