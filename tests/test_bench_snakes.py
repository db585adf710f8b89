"""The entry of snakes in the benchmarks: NumPy games and the PyTorch learner (its update: test_recorded_updates)."""

import dataclasses

import numpy as np
import pytest

from bench import baselines
from bench.baselines import snakes
from envs_jax.base import make
from envs_jax.snakes.types import PUBLISHED
from jaxrl.cli import flags as command_line

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


@pytest.mark.needs("torch")
@pytest.mark.parametrize("preset", ["ddpg_competition", "bicnet"])
def test_published_presets_in_torch(preset):
    config = command_line.parse(
        ["--config", preset, "--max_steps", "4", "--hidden_size", "8", "--batch_size", "6"]
    ).config
    count, changes = baselines.one_update(config.make_env().spec, config.algo_settings, 512)
    assert count * 4 >= 6 and changes == {"update_interval": 1, "env_steps_per_update": count}
    learner = snakes.TorchGames(config.env_settings, config.algo_settings | changes, 0)
    before = learner.learner.actor["last"].weight.detach().clone()
    assert learner.collect(count) == count * 4 and learner.threads > 0
    learner.learn()
    assert not (learner.learner.actor["last"].weight == before).all()
