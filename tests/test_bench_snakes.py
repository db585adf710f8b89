"""The entry of snakes in the benchmarks: NumPy games."""

import dataclasses

import numpy as np
import pytest

from bench import baselines
from bench.baselines import snakes
from envs_jax.base import make
from envs_jax.snakes.types import PUBLISHED

pytestmark = pytest.mark.bench


def settings(env="snakes_3v3", **changes):
    return dataclasses.asdict(make(env, **(PUBLISHED | changes)))


def play(env, policy="random", games=1):
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
def test_random_games_are_lost_to_level_2_in_either_seat(side):
    ends = play(settings(side=side, max_steps=60), games=4)
    assert (ends[:, 0] == 60).all() and (ends[:, 2] > ends[:, 1]).all()


def test_a_scripted_policy_wins_against_random_opponents():
    ends = play(settings(opponent="0", max_steps=60), "level2", games=2)
    assert (ends[:, 1] > ends[:, 2]).all()


def test_settings_that_the_baseline_lacks():
    for changes, word in (({"observation": "obs_full"}, "obs26"), ({}, "random"), ({"opponent": "linear"}, "mixture")):
        with pytest.raises(ValueError, match=word):
            snakes.NumpyGames(settings(**changes), "randm" if not changes else "random", 0)
