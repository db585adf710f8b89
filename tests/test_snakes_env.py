"""Snakes as an environment: its contract, settings, schedules and seats."""

import pytest

import envs_jax
from envs_jax.testing import check_env


@pytest.mark.parametrize(
    "settings",
    [
        {"observation": "obs_full", "reward": "score", "opponent": "0:1,2:1,evasion:1", "seat": "both"},
        {"height": 3, "width": 3, "beans": 1, "opponent": "outside", "time_limit": "truncate", "reward": "v1.1_fixed"},
        {"height": 4, "width": 5, "teams": 1, "snakes": 3, "fixed_respawn": True, "observation": "obs_full"},
    ],
)
def test_contract(settings):
    check_env(envs_jax.make("snakes_1v1", **{"max_steps": 12, **settings}))
