"""What all algorithms with a replay do alike: train, store, bootstrap; see also test_same_results.

A new algorithm gets all of it by a row in `helpers.off_policy.CASES`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import by_day
from helpers.off_policy import CASES, SMALL, VARIANTS, digest, make_trainer, run, trainer_of
from helpers.tiny import Corridor, PointMass, Treadmill

from envs_jax.progress import total
from jaxrl.algos.base import Phase
from jaxrl.algos.ddpg import Ddpg
from jaxrl.algos.sac import Sac
from jaxrl.rl.replay import CONTINUES, TERMINATED, TRUNCATED

TRAINED = ("ddpg expected",)  # in every run; the others at night


def networks_of(params: Any, name: str) -> list[Any]:
    """The leaves of a network or target network, if there is one."""
    network = getattr(params, name, ())
    return jax.tree.leaves(getattr(network, "params", network))


@pytest.mark.parametrize("case", by_day(CASES, TRAINED))
def test_every_variant_trains_in_one_trace(case: str) -> None:
    trainer = trainer_of(case)
    state, metrics = run(trainer, 3)
    learning = {name: np.asarray(x)[:3] for name, x in metrics.learning.items()}
    assert learning["critic_loss"].shape == (3, 4)
    assert all(np.isfinite(x).all() for x in learning.values())
    assert (learning["critic_grad_norm"] > 0).all() and (learning["actor_grad_norm"][:, 1:] > 0).all()
    initial = trainer.init(jax.random.key(0)).algo.replicated
    for net in ("actor", "critic", "target_actor", "target_critic"):
        before, after = (networks_of(x, net) for x in (initial, state.algo.replicated))
        assert not any(np.array_equal(a, b) for a, b in zip(before, after, strict=True) if a.size > 4), net
    burst = sum(phase.iterations * phase.updates for phase in trainer.algo.phases[:-1])
    assert int(total(state.progress.updates)) == burst + 12


@pytest.mark.parametrize("case", by_day(["ddpg expected", "ddpg continuous", "sac"], ["ddpg expected"]))
def test_the_replay_holds_what_was_played(case: str) -> None:
    """Rows of the ring are consistent: what is seen next follows from the stored action, unless an episode ended.

    So the row that ends an episode holds its true last observation.
    """
    trainer, follows = trainer_of(case), CASES[case].follows
    state, _ = run(trainer, 8)  # later all reach the corridor's end in time
    ended_rows, ends = 0, set()
    for shard in range(8):
        buffer = jax.tree.map(lambda x, shard=shard: np.asarray(x)[shard], state.algo.sharded)
        rows, head = buffer.end.shape[0], int(buffer.head)
        assert buffer.filled == rows - 1 == 24 + trainer.algo.n_step
        for age in range(rows - 1, 0, -1):
            row, after = (head - age) % rows, (head - age + 1) % rows
            expected = follows(buffer.observation["observation"][row].astype(float), buffer.action[row])
            for env in range(buffer.end.shape[1]):
                if buffer.end[row, env] == CONTINUES:
                    np.testing.assert_allclose(buffer.observation["observation"][after, env], expected[env], atol=1e-6)
                else:
                    ended_rows += 1
                    assert not np.allclose(buffer.observation["observation"][after, env], expected[env], atol=1e-3)
                    assert (buffer.reward[after, env] == 0).all() and buffer.end[after, env] == CONTINUES
        ends |= set(buffer.end.ravel().tolist())
    assert ended_rows >= 40 and TRUNCATED in ends
    if case == "ddpg expected":
        assert TERMINATED in ends and buffer.observation["observation"].dtype == np.float16


@pytest.mark.parametrize("n_step", by_day([1, 3], [3]))
def test_a_cut_episode_is_bootstrapped(n_step: int) -> None:
    """Worth 1 / (1 - 0.8) = 5; if the cut after four steps were an end, at most 2.95."""
    settings = VARIANTS["expected"] | {"n_step": n_step, "num_critics": 1, "gamma": 0.8, "critic_lr": 1e-2}
    trainer = make_trainer(Ddpg, Treadmill(length=2, horizon=4), 8, update_interval=4, **settings)
    _, metrics = run(trainer, 200)
    assert np.asarray(metrics.learning["target_mean"])[190:200].mean() == pytest.approx(5.0, abs=0.1)


class Counted(Ddpg):
    """Shows the index of each update, by which algorithms with updates of their own decide what is due."""

    def update(self, params: Any, batch: Any, update_index: Any, progress: Any) -> Any:
        params, metrics = super().update(params, batch, update_index, progress)
        return params, metrics | {"index": update_index.astype(jnp.float32)}


@pytest.mark.parametrize("tau", by_day([1.0, 0.25], [1.0]))
def test_updates_for_random_steps_heed_the_period_of_the_targets(tau: float) -> None:
    """Issue 54: of eight updates for random steps and four of training, every third moves the targets."""
    settings = VARIANTS["expected"] | {"random_steps": 64, "update_interval": 1, "tau": tau, "target_update_period": 3}
    trainer = make_trainer(Counted, Corridor(), 8, **settings)
    block, state, indices = trainer.make_block(None), trainer.init(jax.random.key(0)), []
    for number, phase in enumerate(trainer.algo.phases):
        state = dataclasses.replace(state, phase=jnp.int32(number))
        for _ in range(phase.iterations or 4):
            before = jax.tree.map(np.asarray, state.algo.replicated)
            state, metrics = block(state, jnp.int32(1))
            if not phase.updates:
                continue
            after = jax.tree.map(np.asarray, state.algo.replicated)
            indices.append(int(metrics.learning["index"][0, 0]))
            for part in ("actor", "critic"):
                old, moved = (networks_of(x, f"target_{part}") for x in (before, after))
                share = tau if len(indices) % 3 == 0 else 0.0
                for target, online, result in zip(old, networks_of(after, part), moved, strict=True):
                    np.testing.assert_allclose(result, (1 - share) * target + share * online, rtol=1e-5, atol=1e-6)
                assert all(np.array_equal(*pair) for pair in zip(old, moved, strict=True)) == (share == 0)
    assert indices == list(range(1, 13))


@pytest.mark.parametrize("case", by_day(["ddpg expected", "sac"], TRAINED))
def test_learning_rates_fall_to_their_final_share(case: str) -> None:
    """To none at the run's total, 4,000 environment steps: behind it networks stay, and moved before it."""
    trainer = trainer_of(case)
    state = trainer.init(jax.random.key(0))
    for phase in trainer.algo.phases[:-1]:
        state, _ = trainer.make_block(phase)(state, jnp.int32(phase.iterations))
    block, rates = trainer.make_block(trainer.algo.phases[-1]), []
    for iterations in (50, 30, 10):
        state, _ = block(state, jnp.int32(iterations))
        networks = {name: getattr(state.algo.replicated, name).params for name in ("actor", "critic")}
        rates.append((int(total(state.progress.env_steps)), digest(networks)))
    assert rates[0][0] < 4000 < rates[1][0]
    assert rates[0][1] != rates[1][1] == rates[2][1]


class Patient(Sac):
    """Stores more steps per iteration at first than later."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("fill", 20, 0, iterations=1), Phase("train", self.steps_per_call, self.updates))


def test_a_subclass_with_other_phases_has_a_program_for_each() -> None:
    """They are not parts of one another, as those of its base are."""
    for algo, env, expected in ((Sac, PointMass(), True), (Patient, PointMass(), False), (Counted, Corridor(), True)):
        assert make_trainer(algo, env, 8, **SMALL).algo.one_program == expected
