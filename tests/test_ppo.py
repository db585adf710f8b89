"""PPO: advantages and losses by hand, whole updates against plain calculations, acting, views of critics, learning."""

import contextlib
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import by_day
from helpers.off_policy import assert_close, make_trainer, run
from helpers.tiny import Corridor, PointMass

from envs_jax import Box, Discrete, Environment, EnvSpec, TimeStep, pytree, restart, setting, transition
from envs_jax.base import Array
from envs_jax.progress import start
from jaxrl.algos import find, ppo
from jaxrl.algos.base import AlgoState, Trajectory
from jaxrl.algos.ppo import Ppo, PpoParameters, update_statistics
from jaxrl.nn.team_policy import Situation
from jaxrl.rl import running_statistics
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.running_statistics import RunningStatistics

T, B, A, OBS, ACTIONS = 7, 6, 2, 3, 4
DISCRETE = EnvSpec("synthetic", A, Box((OBS,)), Discrete(ACTIONS), horizon=T)
BOX = dataclasses.replace(DISCRETE, action=Box((ACTIONS,), low=-2.0, high=4.0))
SMALL = {"rollout_steps": T, "num_minibatches": 1, "hidden_size": 8}


def init_params(algo: Ppo) -> PpoParameters:
    """Fresh parameters by key 0."""
    return jax.jit(lambda: algo.init(jax.random.key(0), None).replicated)()


def make_batch(seed: int = 0, spec: EnvSpec = DISCRETE) -> tuple[Trajectory, TimeStep]:
    """A trajectory [T, B, ...] with both kinds of end, each followed by a first time step, and the one after it."""
    rng = np.random.default_rng(seed)
    ends, kind = rng.random((T + 1, B)) < 0.45, rng.random((T + 1, B)) < 0.5
    for t in range(T):
        ends[t + 1] &= ~ends[t]
    first = np.concatenate([np.ones((1, B), bool), ends[:-1]])
    ends &= ~first
    reward = np.where(first[..., None], 0.0, rng.normal(size=(T + 1, B, A)))
    steps = TimeStep(
        observation=rng.normal(1.0, 2.0, (T + 1, B, A, OBS)).astype(np.float32),
        reward=reward.astype(np.float32),
        terminated=ends & kind,
        truncated=ends & ~kind,
        first=first,
    )
    extras: dict[str, Any] = {"log_prob": rng.normal(-1.4, 0.3, (T, B, A)).astype(np.float32)}
    action = rng.integers(0, ACTIONS, (T, B, A)).astype(np.int32)
    if isinstance(spec.action, Discrete):
        mask = rng.random((T, B, A, ACTIONS)) < 0.6
        np.put_along_axis(mask, action[..., None], True, -1)
        extras["mask"] = mask
    else:
        extras["action"] = rng.normal(size=(T, B, A, ACTIONS)).astype(np.float32)
        extras["log_prob"] -= 4.0
        action = np.clip(3 * extras["action"] + 1, -2, 4)
    return Trajectory(jax.tree.map(lambda x: x[:-1], steps), action, extras), jax.tree.map(lambda x: x[-1], steps)


# ---------------------------------------------------------------- advantages and losses by hand


def gae(steps: TimeStep, value: np.ndarray, gamma: float, lambda_: float) -> np.ndarray:
    """The sum of discounted temporal differences of every row to the end of its episode, term by term."""
    advantage = np.zeros((T, B, A))
    for b, a, t in np.ndindex(B, A, T):
        weight = 1.0
        for k in range(t, T):
            follows = 0.0 if steps.terminated[k + 1, b] else value[k + 1, b, a]
            advantage[t, b, a] += weight * (steps.reward[k + 1, b, a] + gamma * follows - value[k, b, a])
            weight *= gamma * lambda_
            if steps.terminated[k + 1, b] or steps.truncated[k + 1, b]:
                break
    return advantage


def whole(trajectory: Trajectory, last: TimeStep) -> TimeStep:
    """All time steps, [T + 1, B, ...]."""
    return jax.tree.map(lambda rows, x: np.concatenate([rows, x[None]]), trajectory.timestep, last)


@pytest.mark.parametrize(("gamma", "lambda_"), [(0.9, 0.8), (0.99, 1.0), (0.9, 0.0)])
def test_advantages_are_sums_of_temporal_differences(gamma: float, lambda_: float) -> None:
    algo = Ppo(DISCRETE, DataParallel(B), gamma=gamma, td_lambda=lambda_, **SMALL)
    trajectory, last = make_batch()
    value = np.random.default_rng(1).normal(size=(T + 1, B, A)).astype(np.float32)
    actual = jax.jit(algo.compute_advantages)(trajectory, last, value[:-1], value[-1])
    steps, played = whole(trajectory, last), ~trajectory.timestep.done
    assert steps.terminated.sum() > 3 and steps.truncated.sum() > 3 and played.sum() < T * B
    expected = gae(steps, np.float64(value), gamma, lambda_)
    np.testing.assert_allclose(np.asarray(actual)[played], expected[played], rtol=1e-5, atol=1e-5)


def test_the_clipped_loss_and_its_gradient_by_hand() -> None:
    """Inside the clip the slope is - r A; outside it is 0 where the ratio has moved as the advantage wants."""
    ratio = np.float32([1.1, 1.1, 1.5, 1.5, 0.5, 0.5])
    advantage = np.float32([2, -2, 2, -2, 2, -2])
    arguments = np.log(ratio) - 1, np.full(6, -1, np.float32), advantage, np.float32(0.2)
    losses = jax.jit(ppo.clipped_losses)(*arguments)
    slope = jax.jit(jax.grad(lambda *x: ppo.clipped_losses(*x).sum()))(*arguments)
    np.testing.assert_allclose(losses, [-2.2, 2.2, -2.4, 3.0, -1.0, 1.6], rtol=1e-6)
    np.testing.assert_allclose(slope, [-2.2, 2.2, 0.0, 3.0, -1.0, 0.0], rtol=1e-6)


# ---------------------------------------------------------------- a whole iteration, calculated otherwise


def dense(tree: Any, x: Any) -> Any:
    """Two hidden layers of ReLU, of parameters as flax has them."""
    layers = tree["head"]
    for name in ("fc1", "fc2"):
        x = jnp.maximum(x @ layers[f"{name}_kernel"] + layers[f"{name}_bias"][None], 0)
    return x @ layers["out_kernel"] + layers["out_bias"][None]


def merge(old: RunningStatistics, rows: np.ndarray, added: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of old samples and new ones [n, ...], which count as `added`, by sums of squares."""
    count, mean, variance = (np.float64(x) for x in (old.count, old.mean, old.variance))
    new = rows.reshape(len(rows), *mean.shape).astype(np.float64)
    first = (count * mean + added * new.mean(0)) / (count + added)
    second = (count * (variance + mean**2) + added * (new**2).mean(0)) / (count + added)
    return first, np.sqrt(second - first**2 + 1e-8)


def plain_iteration(algo: Ppo, params: PpoParameters, trajectory: Trajectory, last: TimeStep) -> tuple[Any, Any, Any]:
    """Actor and critic as flax has them after an iteration of one minibatch per epoch, and the last losses."""
    steps, played = whole(trajectory, last), np.broadcast_to(~trajectory.timestep.done[..., None], (T, B, A))
    actor, critic = (getattr(params, part).params["params"] for part in ("actor", "critic"))
    observation, values = steps.observation, params.statistics["value"]
    statistics = params.statistics["actor"]  # as the policy that acted saw its observations
    observation = np.clip(
        (observation - np.asarray(statistics.mean)) / np.sqrt(np.asarray(statistics.variance) + 1e-8), -10, 10
    )
    observation = observation.astype(np.float32)
    outputs = np.float64(dense(critic, observation.reshape(-1, OBS))).reshape(T + 1, B, A)
    value = outputs * np.sqrt(np.float64(values.variance) + 1e-8) + np.float64(values.mean)
    advantage = gae(steps, value, algo.gamma, algo.td_lambda)[played]
    target = advantage + value[:-1][played]
    explained = 1 - np.var(advantage) / np.var(target)
    mean, deviation = merge(values, target, int(played.sum()))
    target = ((target - mean) / deviation).astype(np.float32)
    advantage = ((advantage - advantage.mean()) / advantage.std()).astype(np.float32)
    rows, acted = observation[:-1][played], {name: x[played] for name, x in trajectory.extras.items()}

    def loss(learned: Any) -> Any:
        actor, critic = learned
        if "mask" in acted:
            logits = jnp.where(acted["mask"], dense(actor, rows), -jnp.inf)
            log_probs = logits - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
            log_prob = jnp.take_along_axis(log_probs, trajectory.action[played][:, None], 1)[:, 0]
            entropy = -jnp.where(acted["mask"], jnp.exp(log_probs) * jnp.where(acted["mask"], log_probs, 0), 0).sum(-1)
        else:
            means, log_std = dense(actor["means"], rows), actor["log_std"][None]
            log_prob = jax.scipy.stats.norm.logpdf(acted["action"], means, jnp.exp(log_std)).sum(-1)
            entropy = jnp.full(len(rows), (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum())
        ratio, predicted = jnp.exp(log_prob - acted["log_prob"]), dense(critic, rows)[:, 0]
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        critic_loss = 0.5 * (predicted - target) ** 2
        total = (-gain + critic_loss - algo.entropy_weight * entropy).mean()
        return total, (-gain.mean(), critic_loss.mean(), entropy.mean(), ((ratio - 1) - jnp.log(ratio)).mean())

    rates = (algo.actor_lr, algo.critic_lr)
    chains = [optax.chain(optax.clip_by_global_norm(algo.max_grad_norm), optax.adam(rate, eps=1e-5)) for rate in rates]

    @jax.jit
    def descend(learned: Any, states: Any) -> Any:
        (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(learned)
        moved = []
        for part in (0, 1):
            with jax.numpy_dtype_promotion("standard"):
                step, state = chains[part].update(gradient[part], states[part])
            moved.append((optax.apply_updates(learned[part], step), state))
        return *zip(*moved, strict=True), metrics

    learned, metrics = (actor, critic), ()
    states = jax.jit(lambda trees: tuple(chain.init(tree) for chain, tree in zip(chains, trees, strict=True)))(learned)
    for _ in range(algo.num_epochs):
        learned, states, metrics = descend(learned, states)
    return *learned, (*metrics, explained)


@pytest.mark.parametrize("spec", [DISCRETE, BOX], ids=["discrete", "box"])
def test_an_iteration_is_that_of_a_plain_calculation(spec: EnvSpec) -> None:
    settings = {"num_epochs": 4, "entropy_weight": 0.05, "actor_lr": 0.03, "critic_lr": 0.02}
    algo = Ppo(spec, DataParallel(B), initializer="he", final_lr_fraction=1.0, max_grad_norm=0.3, **settings, **SMALL)
    trajectory, last = make_batch(3, spec)
    earlier = {
        "actor": RunningStatistics(jnp.float32(50), jnp.float32([1.0, -1.0, 0.5]), jnp.float32([2.0, 1.0, 3.0])),
        "value": RunningStatistics(jnp.float32(50), jnp.float32(0.7), jnp.float32(2.0)),
    }
    earlier["critic"] = earlier["actor"]
    params = dataclasses.replace(init_params(algo), statistics=earlier)
    learn = jax.jit(lambda state, key: algo.learn(state, trajectory, last, key, start(), algo.phases[0]))
    state, metrics = learn(AlgoState(params, ()), jax.random.key(1))
    actor, critic, expected_metrics = plain_iteration(algo, params, trajectory, last)
    for part, expected in (("actor", actor), ("critic", critic)):
        ours = getattr(state.replicated, part).params["params"]
        before = getattr(params, part).params["params"]
        moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ours, before)
        assert min(jax.tree.leaves(moved)) > 1e-3
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), ours, expected)
    names = ("actor_loss", "critic_loss", "policy_entropy", "kl", "explained_variance")
    np.testing.assert_allclose([np.ravel(metrics[name])[-1] for name in names], expected_metrics, rtol=1e-4, atol=1e-5)
    played = np.broadcast_to(~trajectory.timestep.done[..., None], (T, B, A))
    mean, deviation = merge(earlier["actor"], whole(trajectory, last).observation[:-1][played], int(played.sum()))
    after = state.replicated.statistics["actor"]
    np.testing.assert_allclose(after.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(after.variance), deviation, rtol=1e-4)
    assert metrics["actor_loss"].shape == (4,) and 0.2 < float(metrics["clip_fraction"][-1]) < 1


def test_statistics_are_those_of_all_valid_samples() -> None:
    layout, rng = DataParallel(8, shards=4), np.random.default_rng(0)
    statistics: Any = {"actor": running_statistics.start((2, 3))}
    expected_rows = []
    add = jax.jit(lambda statistics, rows, weight: update_statistics(statistics, rows, weight, layout))
    for offset in (5.0, -3.0, 0.0):
        rows = rng.normal(offset, 2.0, (4, 10, 2, 3)).astype(np.float32)
        valid = rng.permutation(np.arange(40) < 20).reshape(4, 10)
        rows[~valid] = 1e3
        statistics = add(statistics, {"actor": rows, "critic": rows}, np.float32(valid * 2))
        expected_rows.append(rows[valid])
    every = np.concatenate(expected_rows).astype(np.float64)
    assert set(statistics) == {"actor"} and float(statistics["actor"].count) == 60
    np.testing.assert_allclose(statistics["actor"].mean, every.mean(0), rtol=1e-4)
    np.testing.assert_allclose(statistics["actor"].variance, every.var(0), rtol=1e-4)
    again = statistics["actor"].denormalize(statistics["actor"].normalize(every.astype(np.float32)))
    np.testing.assert_allclose(again, every, rtol=1e-4, atol=1e-4)
    unchanged = add(statistics, {"actor": rows, "critic": rows}, np.zeros((4, 10), np.float32))
    jax.tree.map(np.testing.assert_array_equal, unchanged, statistics)


# ---------------------------------------------------------------- acting


def close_taken(mask_state: Any, action_mask: Array, chosen: Array, agent: Any) -> Array:
    """Closes what earlier agents chose, unless nothing would be left."""
    closed = jnp.any((jnp.arange(ACTIONS)[:, None] == chosen[None]) & (jnp.arange(A)[None] < agent), axis=1)
    mask = action_mask[agent] & ~closed
    return jnp.where(jnp.any(mask), mask, action_mask[agent])


def make_acting(copies: int, spec: EnvSpec) -> tuple[Any, TimeStep, Any]:
    """Parameters of a policy, time steps, and `act` of (policy, mode)."""
    algo = Ppo(spec, DataParallel(B), initializer="torch", **SMALL)
    rng = np.random.default_rng(0)
    mask = rng.random((copies, A, ACTIONS)) < 0.5
    mask[..., 1] |= ~mask.any(-1)
    flags = np.zeros(copies, bool)
    timestep = TimeStep(
        rng.normal(size=(copies, A, OBS)).astype(np.float32), np.zeros((copies, A), np.float32), flags, flags, flags,
        action_mask=mask if isinstance(spec.action, Discrete) else None,
    )  # fmt: skip
    timestep.observation[:, 0] = 0.5
    policy = jax.jit(lambda: algo.policy(algo.init(jax.random.key(0), None)))()
    keys = jax.random.split(jax.random.key(1), copies)
    act = jax.jit(lambda policy, mode: algo.act(policy, (), timestep, keys, start(), mode), static_argnums=1)
    return policy, timestep, act


def scale_outputs(policy: Any, scale: float) -> Any:
    """Return the policy with its last layer multiplied by a factor."""
    actor = jax.tree_util.tree_map_with_path(lambda path, x: scale * x if "out_" in str(path) else x, policy["actor"])
    return policy | {"actor": actor}


@pytest.mark.parametrize("mode", ["explore", "sample", "greedy"])
def test_agents_choose_one_after_another_what_their_masks_allow(mode: str) -> None:
    """Also where the network all but excludes everything that is allowed; agent 0 sees the same everywhere."""
    copies = 1000
    policy, timestep, act = make_acting(copies, dataclasses.replace(DISCRETE, next_mask=close_taken))
    for scale in (3.0, 1e4):
        scaled = scale_outputs(policy, scale)
        views = timestep.observation.reshape(-1, OBS)  # fresh statistics change nothing
        logits = np.float64(dense(scaled["actor"]["params"], views)).reshape(copies, A, ACTIONS)
        action, _, extras = jax.tree.map(np.asarray, act(scaled, mode))
        masks = np.array(timestep.action_mask)
        left = masks[:, 1] & (np.arange(ACTIONS) != action[:, :1])
        masks[:, 1] = np.where(left.any(-1, keepdims=True), left, masks[:, 1])
        np.testing.assert_array_equal(extras["mask"], masks)
        assert action.dtype == np.int32 and np.take_along_axis(masks, action[..., None], -1).all()
        open_ = np.where(masks, logits, -np.inf)
        log_probs = open_ - np.logaddexp.reduce(open_, axis=-1, keepdims=True)
        expected = np.take_along_axis(log_probs, action[..., None], -1)[..., 0]
        np.testing.assert_allclose(extras["log_prob"], expected, rtol=1e-4, atol=1e-4)
        if mode == "greedy":
            np.testing.assert_array_equal(action, open_.argmax(-1))
            continue
        drawn = action[:, 0, None] == np.arange(ACTIONS)
        probs = np.exp(log_probs[:, 0])
        deviation = np.sqrt((probs * (1 - probs)).sum(0))
        assert np.all(np.abs((drawn - probs).sum(0)) < 4 * deviation + 1e-6)


def test_actions_of_a_box_are_clipped_and_their_samples_kept() -> None:
    """A deviation of 0.6 of half the box, which is [-2, 4]; means near 0 become 1."""
    policy, _, act = make_acting(4_000, BOX)
    centred = scale_outputs(policy, 0.0)
    action, _, extras = act(centred, "sample")
    sample = np.float64(extras["action"])
    assert abs(sample.mean()) < 0.02 and abs(sample.std() - 0.6) < 0.01 and np.abs(sample).max() > 1.5
    np.testing.assert_allclose(action, np.clip(3 * sample + 1, -2, 4), rtol=1e-5, atol=1e-5)
    log_prob = np.sum(-0.5 * (sample / 0.6) ** 2 - np.log(0.6) - 0.5 * np.log(2 * np.pi), axis=-1)
    np.testing.assert_allclose(extras["log_prob"], log_prob, rtol=1e-4)
    greedy, _, _ = act(centred, "greedy")
    np.testing.assert_allclose(greedy, 1.0, atol=1e-6)


# ---------------------------------------------------------------- views of the critic


@pytree
class Counted:
    """t int32[]."""

    t: Array


@dataclasses.dataclass(frozen=True)
class Clock(Environment):
    """Pays 1 per step whatever is done; ends after `horizon` steps for good, or by a limit only.

    A time step is shown modulo `period`: the last one, on which no action is taken, then looks like earlier ones.
    """

    horizon: int = setting(4, "steps")
    period: int = setting(2, "hands of the clock")
    ends: bool = setting(False, "terminate instead of truncate")

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            "clock", 2, Box((self.period,), low=0.0, high=1.0), Discrete(2), self.horizon, fixed_horizon=True
        )

    def _observe(self, t: Array) -> Array:
        time = jax.nn.one_hot(t % self.period, self.period)
        return jnp.broadcast_to(time[None], (2, self.period))

    def reset(self, key: Array, context: Any = None) -> tuple[Counted, TimeStep]:
        return Counted(jnp.int32(0)), restart(self._observe(jnp.int32(0)))

    def step(self, state: Counted, action: Array, context: Any = None) -> tuple[Counted, TimeStep]:
        late = state.t + 1 >= self.horizon
        over = {"terminated" if self.ends else "truncated": late}
        return Counted(state.t + 1), transition(1.0, self._observe(state.t + 1), **over)


@pytest.mark.parametrize(
    ("kind", "rollout_steps"), by_day([("cut", 7), ("cut", 0), ("ends", 7), ("ends", 0), ("scaled", 7)], [("cut", 7)])
)
def test_values_are_the_known_ones(kind: str, rollout_steps: int) -> None:
    """1 / (1 - gamma) where episodes are only cut; where they end the value falls with the time left."""
    ends = kind == "ends"
    env = Clock(ends=ends, period=5 if ends else 2)
    settings = {"gamma": 0.8, "critic_lr": 0.02, "num_minibatches": 2, "hidden_size": 16, "final_lr_fraction": 0.01}
    settings |= {"rollout_steps": rollout_steps, "normalize_value": kind != "scaled", "max_grad_norm": 0.0}
    trainer = make_trainer(Ppo, env, 8, critic="local", **settings)
    trainer = dataclasses.replace(trainer, total_env_steps=8 * 150 * trainer.algo.steps)
    state, _ = run(trainer, 150)
    params = state.algo.replicated
    rows = {"observation": jnp.eye(env.period)[:, None, None], "situation": Situation((), ()), "critic_carry": ()}
    value = trainer.algo.values(params.critic.params, params, rows)[0][:, 0, 0]
    value = params.statistics["value"].denormalize(value) if kind != "scaled" else value
    if ends:
        np.testing.assert_allclose(value[:4], [(1 - 0.8**k) / 0.2 for k in (4, 3, 2, 1)], rtol=0.03)
    else:
        np.testing.assert_allclose(value, 5.0, rtol=0.03)
    assert trainer.algo.phases[0].restart == (rollout_steps == 0) == (not trainer.keeps_envs)


def test_a_central_critic_sees_states_and_no_actions() -> None:
    """The environment's own view, with unknown actions, or each agent's observation with the global state."""
    observation, state = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([7, 8])
    flag = np.bool_(False)
    step = TimeStep(observation, np.zeros(2, np.float32), flag, flag, flag, global_state=state)
    spec_with_view = dataclasses.replace(
        DISCRETE,
        critic_input_spec=Box((1,)),
        critic_input=lambda step, action: step.observation[:, :1] + action[:, None].astype(jnp.float32),
    )
    spec_with_state = dataclasses.replace(DISCRETE, global_state=Box((2,)))
    for spec, expected in ((spec_with_view, [[0], [3]]), (spec_with_state, [[1, 2, 3, 7, 8], [4, 5, 6, 7, 8]])):
        np.testing.assert_array_equal(ppo.central_input(spec, step), expected)
        central, local = (Ppo(spec, DataParallel(B), critic=critic, **SMALL) for critic in ("auto", "local"))
        assert central.view_shapes == {"actor": (3,), "critic": (len(expected[0]),)}
        assert local.view_shapes == {"actor": (3,), "critic": (3,)}


def test_what_is_normalised() -> None:
    def names(spec: EnvSpec, **settings: Any) -> set[str]:
        return set(
            jax.eval_shape(
                lambda: Ppo(spec, DataParallel(B), **settings).init(jax.random.key(0), None)
            ).replicated.statistics
        )

    bounded, image = (
        dataclasses.replace(DISCRETE, observation=box) for box in (Box((3,), low=0.0, high=1.0), Box((9, 9, 2)))
    )
    assert names(DISCRETE) == {"actor", "critic", "value"} and names(bounded) == names(image) == {"value"}
    assert names(bounded, normalize_observation="always", normalize_value=False) == {"actor", "critic"}
    assert names(DISCRETE, normalize_observation="never") == {"value"}


def test_images_and_weights_of_another_run() -> None:
    """Small images are flattened; statistics go along with the networks."""
    for shape, kernel in (((9, 9, 2), "conv1_kernel"), ((5, 5, 2), "head")):
        spec = dataclasses.replace(DISCRETE, observation=Box(shape))
        algo = Ppo(spec, DataParallel(B), hidden_size=4, depth=1, normalize_observation="always")
        assert kernel in algo.networks["actor"].shapes["params"]
        state = jax.jit(lambda algo=algo: algo.init(jax.random.key(0), None))()
        moved = dataclasses.replace(state.replicated.statistics["actor"], count=jnp.float32(7))
        params = dataclasses.replace(state.replicated, statistics=state.replicated.statistics | {"actor": moved})
        again = algo.init(jax.random.key(1), algo.weights(AlgoState(params, ()))).replicated
        np.testing.assert_array_equal(again.actor.params, params.actor.params)
        assert float(again.statistics["actor"].count) == 7
        policy = algo.policy(AlgoState(params, ()))
        assert set(policy["statistics"]) == {"actor"} and float(policy["statistics"]["actor"].count) == 7


# ---------------------------------------------------------------- learning

QUICK = {
    "rollout_steps": 16, "num_minibatches": 4, "hidden_size": 32, "actor_lr": 3e-3, "critic_lr": 3e-3, "gamma": 0.9,
}  # fmt: skip


CASES: dict[str, tuple[Environment, dict[str, Any]]] = {
    "corridor": (Corridor(num_agents=2), {"entropy_weight": 0.01}),
    "point": (PointMass(num_agents=2, tasks=2), {"rollout_steps": 0, "normalize_observation": "always"}),
    "memory": (
        Corridor(num_agents=2),
        {"memory": "lstm", "memory_size": 8, "normalize_observation": "always", "num_minibatches": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_computes_the_same_on_one_and_eight_devices(case: str) -> None:
    env, settings = CASES[case]
    one, eight = (run(make_trainer(Ppo, env, 16, devices, **(QUICK | settings)), 2)[0] for devices in (1, 8))
    assert_close(one.algo.replicated, eight.algo.replicated, 2e-3)


@pytest.mark.parametrize(("name", "env"), [("ppo", Corridor()), ("coma", Corridor(num_agents=2))])
def test_updates_are_traced_once(monkeypatch: pytest.MonkeyPatch, name: str, env: Environment) -> None:
    algo, calls = find(name), list[str]()

    def counted(update: str, original: Any) -> Any:
        def count(self: Any, *arguments: Any) -> Any:
            calls.append(update)
            return original(self, *arguments)

        return count

    losses = ["actor_loss", "critic_loss"]
    for loss in losses:
        monkeypatch.setattr(algo, loss, counted(loss, getattr(algo, loss)))
    trainer = make_trainer(algo, env, 16, num_epochs=2)
    jax.eval_shape(trainer.make_block(trainer.algo.phases[0]), trainer.shapes(), jnp.int32(1))
    assert sorted(calls) == losses


def test_traced_settings_are_those_of_the_updates() -> None:
    """A swept algorithm keeps nothing that was traced with the settings before."""
    plain = make_trainer(Ppo, Corridor(), 16).algo
    assert plain.jitted_updates["update"].__wrapped__.func.__self__ is plain
    swept = plain.with_sweep_values({"entropy_weight": jnp.float32(5.0)})
    assert swept.jitted_updates["update"].__wrapped__.func.__self__ is swept and swept.entropy_weight == 5.0


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "settings", "sentence"),
    [
        ({}, {"clip_ratio": 0.0}, "clip_ratio must lie between 1e-06 and"),
        ({}, {"num_minibatches": 1000}, "num_minibatches 1000 exceeds the 768 samples of a logical shard"),
        ({}, {"critic": "central"}, "critic central needs a critic_input or a single array as global_state"),
        ({}, {"rollout_steps": 0}, "rollout_steps 0 needs episodes of one length, and in 'synthetic' they may end"),
        ({"observation": {"a": Box((2,))}}, {}, "ppo needs one array per agent as observation"),
        ({"action": Box((2,))}, {}, "ppo needs float actions with bounds"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], settings: dict[str, Any], sentence: str) -> None:
    spec = dataclasses.replace(DISCRETE, num_agents=1, **changes)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        find("ppo")(spec, DataParallel(B), **settings)


@pytest.mark.parametrize(
    ("num_envs", "agents", "horizon", "steps", "holds_one"),
    [
        (1, 1, 7, 1, True),
        (2, 1, 7, 1, False),
        (1, 2, 7, 1, False),
        (1, 1, 7, 2, False),
        (1, 1, 1, 2, True),  # every other row is the end of an episode, which does not count
        (1, 1, 1, 3, False),
        (1, 1, 1, 0, True),  # whole episodes
        (2, 1, 1, 0, False),
    ],
)
def test_a_rollout_of_one_sample_is_refused(
    num_envs: int, agents: int, horizon: int, steps: int, holds_one: bool
) -> None:
    """Issue 54: its normalised advantage is 0, so that the actor would never move."""
    spec = dataclasses.replace(DISCRETE, num_agents=agents, horizon=horizon, fixed_horizon=True)
    settings = {"rollout_steps": steps, "num_minibatches": 1, "hidden_size": 8}
    assert Ppo(spec, DataParallel(num_envs), **settings, normalize_advantage=False).normalize_advantage is False
    refusal = pytest.raises(ValueError, match=r"one sample, .* raise num_envs or rollout_steps, or give --normalize")
    with refusal if holds_one else contextlib.nullcontext():
        Ppo(spec, DataParallel(num_envs), **settings)
