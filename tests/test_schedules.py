"""Schedules of algorithms with a replay go by the counter that they name; every update draws a batch of its own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.base import Array, Box, Discrete, EnvSpec
from envs_jax.progress import Progress, count, start
from jaxrl.algos.base import AlgoState, Phase
from jaxrl.algos.ddpg import Ddpg
from jaxrl.rl.data_parallel import DataParallel

BOARDS = EnvSpec("boards", 1, Box((3,)), Discrete(2), horizon=50)


def test_ddpg_explores_by_environment_steps_not_by_steps_of_the_batch() -> None:
    """0.99 per step of any environment: a sixth after 176 of them, in one environment or eight."""
    for num_envs in (1, 8):
        algo = Ddpg(BOARDS, DataParallel(num_envs), eps_start=1.0, eps_decay=0.99)
        steps = count(176 // num_envs)
        progress = dataclasses.replace(start(), vector_steps=steps, env_steps=count(176), updates=count(5))
        assert float(algo.epsilon(progress)) == pytest.approx(0.99**176, rel=1e-5)


@dataclasses.dataclass(frozen=True)
class Weighed(Ddpg):
    """Learns nothing; reports the mean reward of a batch."""

    def update(self, params: Any, batch: dict[str, Array], count: Array, progress: Progress) -> Any:
        return params, {"reward": batch["reward"].mean()}


def test_every_update_draws_a_batch_of_its_own() -> None:
    """Four updates of one call, from rows with rewards of their own."""
    algo = Weighed(BOARDS, DataParallel(1), batch_size=8, buffer_size=100, hidden_size=4)
    state = jax.jit(lambda: algo.init(jax.random.key(0), None))()
    reward = jax.random.normal(jax.random.key(1), state.sharded.reward.shape)
    buffer = dataclasses.replace(
        state.sharded, reward=reward, filled=jnp.full_like(state.sharded.filled, reward.shape[1] - 1)
    )
    learn = jax.jit(lambda state, key: algo.learn(state, None, None, key, start(), Phase("train", 1, 4))[1])
    means = np.asarray(learn(AlgoState(state.replicated, buffer), jax.random.key(2))["reward"])
    assert len(set(means.tolist())) == 4
