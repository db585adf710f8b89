"""Schedules of algorithms with a replay go by the counter that they name; every update draws a batch of its own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.base import Array, Box, Discrete, EnvSpec
from envs_jax.progress import count, start
from jaxrl.algos.base import AlgoState, Phase
from jaxrl.algos.ddpg import Ddpg
from jaxrl.rl.replay import Priorities
from jaxrl.runtime.data_parallel import DataParallel

BOARDS = EnvSpec("boards", 1, Box((3,)), Discrete(2), horizon=50)


def test_ddpg_explores_by_steps_of_the_batch_not_of_each_environment() -> None:
    """0.9 per step of all eight environments at once: a tenth after 22 of them, whatever else was counted."""
    algo = Ddpg(BOARDS, DataParallel(8), eps_start=1.0, eps_decay=0.9)
    progress = dataclasses.replace(start(), vector_steps=count(22), env_steps=count(8 * 22), updates=count(5))
    assert float(algo.epsilon(progress)) == pytest.approx(0.9**22, rel=1e-5)


@dataclasses.dataclass(frozen=True)
class Weighed(Ddpg):
    """Learns nothing; reports the smallest weight of a batch, whose largest is 1, and its mean reward."""

    def update(self, params: Any, batch: dict[str, Array], number: Any = None, rates: Any = 1.0) -> Any:
        metrics = dict.fromkeys(self.metric_names, batch["weight"].min()) | {"target_mean": batch["reward"].mean()}
        return params, metrics, jnp.zeros_like(batch["weight"])


def test_weights_of_prioritised_replay_correct_fully_at_the_end() -> None:
    """Rows drawn sixteen times as often count 16^-beta as much: beta from 0.4 to 1 (arXiv 1511.05952, section 3.4)."""
    algo = Weighed(
        BOARDS, DataParallel(1), prioritized=True, priority_beta=0.4, batch_size=64, buffer_size=100, hidden_size=4
    )
    state = jax.jit(lambda: algo.init(jax.random.key(0), None))()
    rows = state.sharded.priorities.priority.shape[1]
    often = jnp.where(jnp.arange(rows) % 2 == 0, 16.0, 1.0)[None, :, None]
    ring = dataclasses.replace(
        state.sharded,
        priorities=Priorities(often, jnp.full(1, 16.0)),
        filled=jnp.full_like(state.sharded.filled, rows - 1),
    )

    @jax.jit
    def smallest(fraction: Array) -> Array:
        progress = dataclasses.replace(start(), fraction=fraction)
        learned = algo.learn(
            AlgoState(state.replicated, ring), None, None, jax.random.key(1), progress, Phase("train", 1, 1)
        )
        return learned[1]["q_mean"][0]

    for fraction, beta in ((0.0, 0.4), (0.5, 0.7), (1.0, 1.0)):
        np.testing.assert_allclose(smallest(jnp.float32(fraction)), 16.0**-beta, rtol=1e-5, err_msg=str(fraction))


@pytest.mark.parametrize("prioritized", [False, True])
def test_every_update_draws_a_batch_of_its_own(prioritized: bool) -> None:
    """Four updates of one call, from rows with rewards of their own."""
    algo = Weighed(BOARDS, DataParallel(1), prioritized=prioritized, batch_size=8, buffer_size=100, hidden_size=4)
    state = jax.jit(lambda: algo.init(jax.random.key(0), None))()
    reward = jax.random.normal(jax.random.key(1), state.sharded.reward.shape)
    ring = dataclasses.replace(
        state.sharded, reward=reward, filled=jnp.full_like(state.sharded.filled, reward.shape[1] - 1)
    )
    if prioritized:
        ring = dataclasses.replace(ring, priorities=Priorities(jnp.ones_like(ring.priorities.priority), jnp.ones(1)))
    learn = jax.jit(lambda state, key: algo.learn(state, None, None, key, start(), Phase("train", 1, 4))[1])
    means = np.asarray(learn(AlgoState(state.replicated, ring), jax.random.key(2))["target_mean"])
    assert len(set(means.tolist())) == 4
