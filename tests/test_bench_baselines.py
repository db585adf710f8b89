"""What environments are compared with in benchmarks: an arm in NumPy and in Meta-World, NumPy games and missions."""

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest

from bench import baselines
from bench.baselines import coverage, reach, snakes
from envs_jax.base import make
from envs_jax.reach import goals
from envs_jax.snakes.types import PUBLISHED

pytestmark = pytest.mark.bench


def settings(env: str, **changes: Any) -> dict[str, Any]:
    published = PUBLISHED if env.startswith("snakes") else {}
    return dataclasses.asdict(make(env, **(published | changes)))


# One arm


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Meta-World is not installed."""
    monkeypatch.setitem(sys.modules, "metaworld", None)


def play_episode(baseline: Any) -> tuple[int, float, np.ndarray]:
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


def test_the_arm_says_what_it_is(without: None) -> None:
    baseline = baselines.find("reach").baseline(settings("reach", horizon=3), "random", 0)
    assert baseline.name == "NumPy" and "install the extra 'real'" in baseline.notes[0]
    steps, _, observation = play_episode(baseline)
    assert steps == 3 and observation.shape == (39,)


def test_the_scripted_policy_reaches_the_goal(without: None) -> None:
    assert play_episode(reach.OneArm(settings("reach", horizon=90), "scripted", 0))[:2] == (90, 1.0)


@pytest.mark.needs("metaworld")
@pytest.mark.filterwarnings("ignore")  # of the simulator's packages
def test_both_arms_move_alike() -> None:
    """Same puck, goal and actions: the same observations, rewards and successes within the oracle's bounds."""
    row = goals.pool(3)[7]
    arms = [kind(settings("reach")) for kind in (reach.OracleArm, reach.RealArm)]
    for arm in arms:
        arm.reset(row[:3], row[3:])
    for action in np.random.default_rng(0).uniform(-1, 1, (20, 4)).astype(np.float32):
        (ours, success), (theirs, expected) = (arm.step(action) for arm in arms)
        assert ours == pytest.approx(theirs, abs=1e-5) and success == expected
        np.testing.assert_allclose(arms[0].observe(), arms[1].observe(), atol=2.3e-3)  # the puck trembles
        np.testing.assert_allclose(arms[0].observe()[:4], arms[1].observe()[:4], atol=1e-6)


# Games of snakes


def play_games(env: dict[str, Any], policy: str, games: int) -> np.ndarray:
    """Steps and scores of both teams, of each game."""
    baseline = baselines.find("snakes_3v3").baseline(env, policy, 0)
    ends = []
    for _ in range(games):
        baseline.reset()
        done, steps = False, 0
        while not done:
            action = baseline.act()
            baseline.observe(action)
            done, steps = baseline.step(action), steps + 1
        ends.append((steps, *baseline.measure().values()))
    return np.array(ends)


@pytest.mark.parametrize("side", ["first", "second", "both"])
def test_random_games_are_lost_to_level_2_in_either_seat(side: str) -> None:
    ends = play_games(settings("snakes_3v3", side=side, max_steps=60), "random", 4)
    assert (ends[:, 0] == 60).all() and (ends[:, 2] > ends[:, 1]).all()


def test_a_scripted_policy_wins_against_random_opponents() -> None:
    ends = play_games(settings("snakes_3v3", opponent="0", max_steps=60), "level2", 2)
    assert (ends[:, 1] > ends[:, 2]).all()


# Missions of coverage


def test_a_mission_lasts_its_budget() -> None:
    baseline = coverage.ENTRY.baseline(settings("coverage", q=3, budget=2), "random", 0)
    baseline.reset()
    ends = []
    for _ in range(3):
        action = baseline.act()
        baseline.observe(action)
        ends.append(baseline.step(action))
    assert ends == [False, False, True] and 0 < baseline.measure()["coverage"] < 1


@pytest.mark.parametrize(
    ("baseline", "env", "changes", "policy", "sentence"),
    [
        (coverage.ENTRY.baseline, "coverage", {}, "clever", "unknown policy"),
        (reach.OneArm, "reach", {"task": "mirrored"}, "scripted", "task reach"),
        (reach.OneArm, "reach", {"partially_observable": True}, "scripted", "observable False"),
        (reach.OneArm, "reach", {}, "randm", "did you mean 'random'"),
        (snakes.NumpyGames, "snakes_3v3", {"observation": "obs_full"}, "random", "obs26"),
        (snakes.NumpyGames, "snakes_3v3", {"opponent": "linear"}, "random", "mixture"),
        (snakes.NumpyGames, "snakes_3v3", {}, "randm", "random"),
    ],
)
def test_what_a_baseline_lacks(
    without: None, baseline: Any, env: str, changes: dict[str, Any], policy: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        baseline(settings(env, **changes), policy, 0)
