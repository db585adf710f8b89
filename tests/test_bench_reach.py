"""The entry of reach in the benchmarks: one arm, in NumPy and in Meta-World."""

import dataclasses
import sys

import numpy as np
import pytest

from bench import baselines
from bench.baselines import reach
from envs_jax.base import make
from envs_jax.reach import goals

pytestmark = pytest.mark.bench

real = pytest.mark.needs("metaworld")
quiet = pytest.mark.filterwarnings("ignore")  # of the simulator's packages


def settings(**changes):
    return dataclasses.asdict(make("reach", **changes))


@pytest.fixture
def without(monkeypatch):
    """As where Meta-World is not installed."""
    monkeypatch.setitem(sys.modules, "metaworld", None)


def play(baseline):
    """Steps of an episode, whether the scripted policy has succeeded, and the last observation."""
    baseline.reset()
    done, steps, best = False, 0, 0.0
    while not done:
        action = baseline.act()
        assert action.shape == (4,) and action.dtype == np.float32
        baseline.observe(action)
        done, steps = baseline.step(action), steps + 1
        best = max(best, baseline.measure()["success"])
    return steps, best, baseline._episodes.arm.observe()


# One arm


def test_the_baseline_says_what_it_is(without):
    baseline = baselines.find("reach").baseline(settings(horizon=3), "random", 0)
    assert baseline.name == "NumPy" and "install the extra 'real'" in baseline.notes[0]
    steps, _, observation = play(baseline)
    assert steps == 3 and observation.shape == (39,)


def test_the_scripted_policy_reaches_the_goal(without):
    assert play(reach.OneArm(settings(horizon=90), "scripted", 0))[:2] == (90, 1.0)


@real
@quiet
def test_both_arms_move_alike():
    """Same puck, goal and actions: the same observations, rewards and successes within the oracle's bounds."""
    row = goals.pool(3)[7]
    arms = [kind(settings()) for kind in (reach.OracleArm, reach.RealArm)]
    for arm in arms:
        arm.reset(row[:3], row[3:])
    for action in np.random.default_rng(0).uniform(-1, 1, (20, 4)).astype(np.float32):
        (ours, success), (theirs, expected) = (arm.step(action) for arm in arms)
        assert ours == pytest.approx(theirs, abs=1e-5) and success == expected
        np.testing.assert_allclose(arms[0].observe(), arms[1].observe(), atol=2.3e-3)  # the puck trembles
        np.testing.assert_allclose(arms[0].observe()[:4], arms[1].observe()[:4], atol=1e-6)


def test_settings_that_the_baseline_lacks(without):
    for changes, word in (({"task": "mirrored"}, "task reach"), ({"partially_observable": True}, "observable False")):
        with pytest.raises(ValueError, match=word):
            reach.OneArm(settings(**changes), "scripted", 0)
    with pytest.raises(ValueError, match="did you mean 'random'"):
        reach.OneArm(settings(), "randm", 0)
