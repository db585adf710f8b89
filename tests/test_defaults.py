"""What `envs_jax.make(name)` gives without settings is what the recommended presets learn from."""

import dataclasses
from typing import Any

import jax
import pytest
import yaml

import envs_jax
from envs_jax.snakes.types import PUBLISHED
from jaxrl.runtime.presets import presets

RECOMMENDED = {"snakes_3v3": "ddpg", "reach": "sac", "coverage": "ppo_coverage"}
LENGTH = {"q", "opponent"}  # resolution, and the players of a curriculum: no defaults
SNAKES = ("ddpg_competition", "ddpg_ext30", "ddpg_ext30_multi", "ddpg_ext35", "ddpg_ext35_multi", "bicnet")
ARMS = ("sac_worker_original", "sac_worker_gpu_server", "student_original", "collective_original")


def read(preset: str) -> dict[str, Any]:
    return yaml.safe_load(presets()[preset].read_text())


@pytest.mark.parametrize(("name", "preset"), RECOMMENDED.items())
def test_defaults_are_those_of_the_recommended_preset(name: str, preset: str) -> None:
    env: Any = envs_jax.make(name)
    chosen = read(preset)
    fields = {field.name for field in dataclasses.fields(env)} - LENGTH
    named = fields & set(chosen)
    assert named and {key: getattr(env, key) for key in named} == {key: chosen[key] for key in named}


def test_snakes_show_the_board_and_the_open_directions() -> None:
    env: Any = envs_jax.make("snakes_3v3")
    context = env.context(envs_jax.progress.start())
    _, timestep = jax.eval_shape(env.reset, jax.random.key(0), context)
    assert timestep.action_mask.shape == (env.num_agents, 4)
    published = envs_jax.make("snakes_3v3", **PUBLISHED)
    _, narrow = jax.eval_shape(published.reset, jax.random.key(0), context)
    assert narrow.action_mask is None
    assert timestep.observation.shape[1] > 100 > narrow.observation.shape[1]


@pytest.mark.parametrize("preset", SNAKES)
def test_published_presets_of_snakes_name_what_they_were_published_with(preset: str) -> None:
    named = read(preset)
    assert named["observation"] in ("obs26", "obs30", "obs35") and named["masks"] is False
    assert named["reward"] in ("original", "plus", "v1.1")


@pytest.mark.parametrize("preset", ARMS)
def test_published_presets_of_reach_name_the_pool(preset: str) -> None:
    assert read(preset)["goals"] in ("pool", "order")
