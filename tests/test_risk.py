"""Risk: quantiles by their formula, advantages whose policy gradient is that of CVaR, and what is learned."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.off_policy import make_trainer
from helpers.tiny import Corridor

from envs_jax import Box, Discrete, Environment, EnvSpec, TimeStep, pytree, restart, termination
from envs_jax.base import Array
from envs_jax.progress import start
from jaxrl.algos import ppo
from jaxrl.algos.base import Trajectory
from jaxrl.algos.ppo import Ppo
from jaxrl.algos.targets import quantile_targets
from jaxrl.cli import train
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.quantiles import quantile_losses, tail_advantages
from jaxrl.rl.running_statistics import normalize_inputs


def cvar(values: np.ndarray, probabilities: np.ndarray, level: float) -> float:
    """The mean of the worst `level` of a distribution: each value counts with what is left of the level."""
    total, left = 0.0, level
    for k in np.argsort(values):
        share = min(probabilities[k], left)
        total, left = total + share * values[k], left - share
    return total / level


def test_the_quantile_loss_follows_its_formula() -> None:
    rng = np.random.default_rng(0)
    quantiles, targets = (rng.normal(0, 2, (3, 4)).astype(np.float32) for _ in range(2))
    expected = np.zeros(3)
    for n in range(3):
        for i, q in enumerate(np.float64(quantiles[n])):
            for y in np.float64(targets[n]):
                error, level = y - q, (i + 0.5) / 4
                huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
                expected[n] += abs(level - (error < 0)) * huber / 16
    np.testing.assert_allclose(quantile_losses(quantiles, targets), expected, rtol=1e-5)


@pytest.mark.parametrize("level", [0.1, 0.25, 0.3, 0.77, 1.0])
def test_an_advantage_is_the_difference_of_two_means_of_the_worst(level: float) -> None:
    """Over all outcomes together it is CVaR of the outcomes less that of the quantiles, where both have one v."""
    rng, count = np.random.default_rng(1), 20
    quantiles = rng.permutation(rng.normal(size=count)).astype(np.float32)
    assert abs(float(tail_advantages(quantiles, quantiles, level))) < 1e-6
    worst = np.sort(quantiles)[int(np.ceil(level * count - 1e-9)) - 1]
    targets = rng.normal(size=(500, 1)).astype(np.float32)
    actual = np.asarray(tail_advantages(np.tile(quantiles, (500, 1)), np.tile(targets, (1, count)), level))
    even = np.full(count, 1 / count)
    expected = worst - np.maximum(worst - targets[:, 0], 0) / level - cvar(quantiles, even, level)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    if level == 1.0:
        below = targets[:, 0] <= worst
        np.testing.assert_allclose(actual[below], (targets[:, 0] - quantiles.mean())[below], rtol=1e-4, atol=1e-5)


def test_the_policy_gradient_of_the_advantages_is_the_slope_of_cvar() -> None:
    """Three actions with known outcomes: a softmax policy, differentiated with respect to its logits in float64."""
    level, count = 0.25, 4000
    outcomes = np.array([[-3.0, 4.0, 5.0], [0.0, 1.0, 2.0], [-1.0, 0.5, 6.0]])
    chances = np.array([[0.2, 0.3, 0.5], [0.3, 0.4, 0.3], [0.4, 0.3, 0.3]])
    logits = np.array([0.3, -0.2, 0.5])

    def probabilities(logits: np.ndarray) -> np.ndarray:
        weights = np.exp(logits)
        return weights / weights.sum()

    def risk(logits: np.ndarray) -> float:
        return cvar(outcomes.ravel(), (probabilities(logits)[:, None] * chances).ravel(), level)

    slope = np.array([(risk(logits + d) - risk(logits - d)) / 2e-6 for d in 1e-6 * np.eye(3)])
    policy = probabilities(logits)
    joint = (policy[:, None] * chances).ravel()
    order = np.argsort(outcomes.ravel())
    levels = (np.arange(count) + 0.5) / count
    quantiles = outcomes.ravel()[order][np.searchsorted(np.cumsum(joint[order]), levels)].astype(np.float32)
    targets = np.broadcast_to(outcomes.reshape(9, 1), (9, count)).astype(np.float32)
    advantages = np.asarray(tail_advantages(np.tile(quantiles, (9, 1)), targets, level)).reshape(3, 3)
    by_action = (chances * advantages).sum(1)
    gradient = policy * (by_action - policy @ by_action)  # sum_a pi_a A_a d log pi_a
    np.testing.assert_allclose(gradient, slope, rtol=5e-3, atol=2e-3)
    assert abs(slope).max() > 0.1


@pytest.mark.parametrize("lambda_", [0.0, 0.4, 1.0])
def test_targets_have_the_spread_of_the_return(lambda_: float) -> None:
    """Two steps with rewards of +-1: the return from the first state is -2, 0, 0 or 2."""
    envs, rng = 4000, np.random.default_rng(2)
    rewards = rng.choice([-1.0, 1.0], (3, envs, 1)).astype(np.float32)
    flags = np.zeros((3, envs), bool)
    over = flags.copy()
    over[2] = True
    steps = TimeStep(np.zeros((3, envs, 1, 1), np.float32), rewards, over, flags, flags)
    trajectory = Trajectory(jax.tree.map(lambda x: x[:2], steps), np.zeros((2, envs, 1), np.int32), {})
    last = jax.tree.map(lambda x: x[2], steps)
    quantiles = np.broadcast_to(np.array([-1.0, 1.0], np.float32), (2, envs, 1, 2))
    targets = np.asarray(
        quantile_targets(DataParallel(envs), jax.random.key(0), trajectory, last, quantiles, quantiles[0], 1.0, lambda_)
    )
    np.testing.assert_array_equal(targets[1], np.broadcast_to(rewards[2][..., None], (envs, 1, 2)))
    values, counts = np.unique(targets[0], return_counts=True)
    np.testing.assert_array_equal(values, [-2, 0, 2])
    np.testing.assert_allclose(counts / counts.sum(), [0.25, 0.5, 0.25], atol=0.03)


def test_samples_of_the_return_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment draws with the key that shuffles an epoch."""
    steps, envs, epochs = 2, 8, 4
    keys: list[Any] = []
    algo = Ppo(Gamble().spec, DataParallel(envs), rollout_steps=steps, num_minibatches=2, risk_level=0.5)
    flags = np.zeros((steps + 1, envs), bool)
    rows = TimeStep(np.ones((steps + 1, envs, 1, 1), np.float32), np.ones((steps + 1, envs, 1)), flags, flags, flags)
    extras = {"log_prob": np.zeros((steps, envs, 1), np.float32), "mask": np.ones((steps, envs, 1, 2), bool)}
    action = np.zeros((steps, envs, 1), np.int32)
    trajectory = Trajectory(jax.tree.map(lambda x: x[:-1], rows), action, extras)
    last = jax.tree.map(lambda x: x[-1], rows)

    def spy(layout: Any, key: Any, *arguments: Any) -> Any:
        keys.append(key)
        return quantile_targets(layout, key, *arguments)

    monkeypatch.setattr(ppo, "quantile_targets", spy)

    def draw_keys(key: Any) -> Any:
        state = algo.init(jax.random.key(0), None)
        algo.begin_learning(state, trajectory, last, key, start())
        return jax.vmap(jax.random.fold_in, (None, 0))(keys[0], jnp.arange(envs)), jax.random.split(key, epochs)

    drawn, shuffled = (np.asarray(jax.random.key_data(x)) for x in jax.jit(draw_keys)(jax.random.key(3)))
    assert algo.num_epochs == epochs and not (drawn[:, None] == shuffled[None]).all(-1).any()


# ---------------------------------------------------------------- what is learned


@pytree
class GambleState:
    """draw float32[], of this episode."""

    draw: Array


@dataclasses.dataclass(frozen=True)
class Gamble(Environment):
    """One choice: 1 for certain, or 3 with probability 0.85 and -3 otherwise: 2.1 in the mean, 0 in the worst 0.3."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("gamble", 1, Box((1,), low=0.0, high=1.0), Discrete(2), 1, True, metrics={"gambles": "sum"})

    def reset(self, key: Array, context: None = None) -> tuple[GambleState, TimeStep]:
        return GambleState(jax.random.uniform(key, (), jnp.float32)), restart(
            jnp.ones((1, 1)), metrics={"gambles": jnp.float32(0)}
        )

    def step(self, state: GambleState, action: Array, context: None = None) -> tuple[GambleState, TimeStep]:
        outcome = jnp.where(state.draw < 0.85, 3.0, -3.0)
        reward = jnp.where(action == 1, outcome, 1.0)
        return state, termination(reward, jnp.ones((1, 1)), metrics={"gambles": action[0].astype(jnp.float32)})


@pytest.mark.parametrize("level", [pytest.param(1.0, marks=pytest.mark.slow), 0.3])
def test_a_gamble_is_avoided_where_the_worst_outcomes_count(level: float) -> None:
    settings = {"rollout_steps": 16, "num_minibatches": 2, "num_epochs": 4, "hidden_size": 16, "depth": 1}
    trainer = make_trainer(Ppo, Gamble(), 32, **settings, risk_level=level, actor_lr=3e-3, critic_lr=3e-3)
    state = trainer.init(jax.random.key(0))
    state, _ = trainer.make_block(trainer.algo.phases[0])(state, jnp.int32(60))
    params = trainer.algo.policy(state.algo)
    seen = normalize_inputs("actor", params["statistics"], jnp.ones((1, 1)))
    logits = trainer.algo.networks["actor"].apply(params["actor"], seen)
    gambles = float(jax.nn.softmax(logits)[0, 1])
    assert gambles > 0.8 if level == 1.0 else gambles < 0.2, gambles


@pytest.mark.slow
def test_a_level_of_one_is_the_plain_method() -> None:
    def train_for(settings: Any) -> Any:
        small = {"rollout_steps": 8, "num_minibatches": 2, "hidden_size": 8, "depth": 1}
        trainer = make_trainer(Ppo, Corridor(num_agents=2), 8, **small, **settings)
        state = trainer.init(jax.random.key(0))
        state, _ = trainer.make_block(trainer.algo.phases[0])(state, jnp.int32(3))
        return jax.device_get(state.algo.replicated.actor.params)

    plain = train_for({})
    jax.tree.map(np.testing.assert_array_equal, plain, train_for({"risk_level": 1.0, "risk_quantiles": 5}))
    cautious = train_for({"risk_level": 0.5})
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(cautious), strict=True))


def test_impossible_levels_end_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ValueError, match=r"risk_level 0\.05 covers less than one of the 8 quantiles: use --risk_quantiles 20"
    ):
        Ppo(Corridor().spec, DataParallel(8), risk_level=0.05, risk_quantiles=8, num_minibatches=2)
    assert 1 / 49 * 49 < 1  # a rounding error is no reason to refuse
    Ppo(Corridor().spec, DataParallel(8), risk_level=1 / 49, risk_quantiles=49, num_minibatches=2)
    for level in ("0", "1.5", "-1", "nan"):
        command = f"--algo ppo --env helpers.tiny:Corridor --risk_level {level} --total_env_steps 99 --runs"
        assert train.main([*command.split(), str(tmp_path)]) == 2
        assert "risk_level" in capsys.readouterr().err
