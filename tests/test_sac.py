"""SAC: density, losses and targets by hand, schedules, temperatures of tasks, phases, bounds of actions."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.off_policy import at_step, outputs_of

from envs_jax import TimeStep
from envs_jax.base import Box, Discrete, EnvSpec
from envs_jax.progress import Progress, count, start
from jaxrl.algos import sac
from jaxrl.algos.base import Phase
from jaxrl.algos.sac import Sac, SacParameters
from jaxrl.nn import distributions
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.replay import TERMINATED, TRUNCATED

OBS, ACTIONS, TASKS = 5, 3, 2
ARM = EnvSpec("arm", 1, Box((OBS,)), Box((ACTIONS,), low=-1.0, high=1.0), horizon=400, num_tasks=TASKS)


def init_params(algo: Sac, seed: int = 0) -> SacParameters:
    """Parameters at the start."""
    return jax.jit(lambda key: algo.init(key, None).replicated)(jax.random.key(seed))


def actor_tree(params: SacParameters) -> Any:
    """The actor's parameters, to be written into."""
    return jax.tree.map(np.array, params.actor.params)


def with_log_alpha(params: SacParameters, log_alpha: Any) -> SacParameters:
    return dataclasses.replace(params, alpha=dataclasses.replace(params.alpha, params=log_alpha))


# ---------------------------------------------------------------- density

squashed_normal = jax.jit(distributions.squashed_normal)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.3), (2.0, -3.0), (0.0, -8.0)])
def test_the_density_of_squashed_actions_integrates_to_one(mean: float, log_std: float) -> None:
    """Over actions in (-1, 1), at points that lie dense where the density is large; and it has the closed form."""
    u = np.linspace(mean - 8 * math.exp(log_std), mean + 8 * math.exp(log_std), 20_001)
    noise = ((u - mean) / math.exp(log_std)).astype(np.float32)[:, None]
    arguments = np.full_like(noise, mean), np.full_like(noise, log_std), noise
    action, log_prob = map(np.asarray, squashed_normal(*arguments))
    exact = np.tanh(u)
    np.testing.assert_allclose(action[:, 0], exact, atol=1e-5)
    density = np.exp(np.asarray(log_prob, np.float64))
    assert np.trapezoid(density, exact) == pytest.approx(1.0, abs=2e-3)
    inside = np.abs(u) < 3
    normal = np.exp(-0.5 * ((u - mean) / math.exp(log_std)) ** 2) / math.exp(log_std) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(density[inside], (normal * np.cosh(u) ** 2)[inside], rtol=2e-3)


def test_the_gradient_of_the_smallest_value_goes_to_one_critic() -> None:
    """Also where critics agree: a gradient divided by how many have the smallest value is NaN when none seems to."""
    values = np.float32(
        [[[1.0], [2.0], [0.5], [np.inf]], [[3.0], [2.0], [0.5], [1e30]], [[2.0], [2.0], [0.25], [2e30]]]
    )
    arguments = values, np.zeros((4, 1), np.float32), np.zeros(4, np.float32)
    soft_values = np.asarray(jax.jit(sac.soft_value)(*arguments))
    gradient = np.asarray(jax.jit(jax.grad(lambda *x: sac.soft_value(*x).sum()))(*arguments))
    np.testing.assert_allclose(soft_values[:, 0], [1.0, 2.0, 0.25, 1e30])
    np.testing.assert_array_equal(gradient[..., 0], [[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])


def test_components_add_up_and_the_far_ends_stay_finite() -> None:
    arguments = np.random.default_rng(0).normal(size=(3, 7, ACTIONS)).astype(np.float32)
    _, whole = squashed_normal(*arguments)
    parts = [np.asarray(squashed_normal(*arguments[..., i : i + 1])[1]) for i in range(3)]
    np.testing.assert_allclose(whole, sum(parts), rtol=1e-5)
    action, far = squashed_normal(*np.float32([[40, 40], [2, 2], [3, -1]]))
    by_hand = sum(-0.5 * e**2 - 2 - 0.5 * math.log(2 * math.pi) - math.log(1e-6) for e in (3.0, -1.0))
    assert np.all(np.asarray(action) == 1) and float(far) == pytest.approx(by_hand, rel=1e-5)


# ---------------------------------------------------------------- losses


def test_soft_values_by_hand() -> None:
    values = np.float32([[[1.0], [4.0]], [[2.0], [3.0]]])  # two critics, two samples
    log_prob, alpha = np.float32([[-2.0], [1.0]]), np.float32([0.5, 0.25])
    np.testing.assert_allclose(jax.jit(sac.soft_value)(values, log_prob, alpha), [[1 + 1.0], [3 - 0.25]])


def test_the_default_entropy_to_aim_at_is_that_of_one_agent() -> None:
    for agents in (1, 2):
        assert Sac(dataclasses.replace(ARM, num_agents=agents), DataParallel(1)).entropy_target == -ACTIONS
    assert Sac(ARM, DataParallel(1), target_entropy=-7.5).entropy_target == -7.5


SETTINGS = {
    "hidden_size": 8, "batch_size": 6, "buffer_size": 64, "gamma": 0.9, "n_step": 2, "alpha_lr": 0.01, "tau": 0.1,
}  # fmt: skip


@functools.cache
def make_scheduled() -> tuple[Sac, Any, Any]:
    """An algorithm with schedules, its update compiled, and its parameters, targets unlike the critics."""
    algo = Sac(ARM, DataParallel(1), **SETTINGS, actor_update_period=2, target_update_period=3)
    params = dataclasses.replace(init_params(algo, 3), target_critic=init_params(algo, 4).critic.params)
    return algo, jax.jit(lambda params, batch, count: algo.update(params, batch, count, start())), params


gaussian = jax.jit(Sac(ARM, DataParallel(1), **SETTINGS).gaussian)


def make_batch(seed: int = 0, task: Any = (0, 1, 0, 1, 0, 1)) -> dict[str, Any]:
    """A batch [1, 6, ...] of two-step windows with every kind of end."""
    random, m = np.random.default_rng(seed), 6
    ends = [[0, 0], [0, TERMINATED], [0, TRUNCATED], [TERMINATED, 0], [TRUNCATED, TERMINATED], [0, 0]]
    batch = {
        "observation": random.normal(size=(m, 1, OBS)), "next_observation": random.normal(size=(m, 1, OBS)),
        "action": random.uniform(-1, 1, (m, 1, ACTIONS)), "reward": random.normal(size=(m, 2, 1)),
        "weight": np.array([1.0, 1, 1, 1, 1, 0]), "noise": random.normal(size=(m, 2, 1, ACTIONS)),
    }  # fmt: skip
    batch = {name: value.astype(np.float32) for name, value in batch.items()}
    batch |= {"end": np.array(ends, np.uint8), "task": np.array(task, np.uint8)}
    batch["next_task"] = batch["task"]
    return {name: value[None] for name, value in batch.items()}


def log_density(mean: Any, log_std: Any, noise: Any) -> Any:
    """In float64, by the change of variables."""
    mean, log_std, noise = (np.asarray(x, np.float64) for x in (mean, log_std, noise))
    u = mean + np.exp(log_std) * noise
    normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    return np.tanh(u).astype(np.float32), (normal - np.log(1 - np.tanh(u) ** 2)).sum(-1)


def test_targets_and_losses_of_an_update() -> None:
    """Two-step returns, ends, twin minimum, temperatures of tasks: against NumPy on the networks' own outputs.

    Behind a cut episode counts the value of what was seen last; behind a terminated one nothing does.
    """
    algo, update, params = make_scheduled()
    params = with_log_alpha(params, np.log(np.float32([0.5, 0.1])))
    batch = make_batch()
    sample = jax.tree.map(lambda x: x[0], batch)
    alpha = np.array([0.5, 0.1])[sample["task"]][:, None]
    reward, weight = np.asarray(sample["reward"]), np.asarray(sample["weight"])

    values_of = outputs_of(algo, "critic")
    mean, log_std = gaussian(params.actor.params, sample["next_observation"])
    action, log_prob = log_density(mean, log_std, sample["noise"][:, 0])
    twin = np.asarray(values_of(params.target_critic, sample["next_observation"], action))
    value = twin.min(0) - alpha * log_prob
    lengths, bootstrap = [2, 2, 2, 1, 1, 2], [0.81, 0, 0.81, 0, 0.9, 0.81]
    expected = [sum(0.9**k * reward[i, k] for k in range(lengths[i])) + bootstrap[i] * value[i] for i in range(6)]
    np.testing.assert_allclose(jax.jit(algo.compute_target)(params, sample), expected, rtol=1e-4, atol=1e-5)

    values = np.asarray(values_of(params.critic.params, sample["observation"], sample["action"]))
    by_hand = sum((weight[:, None] * np.square(np.array(expected) - values[c])).mean() for c in range(2))
    new, metrics = update(params, batch, np.uint32(2))
    assert float(metrics["critic_loss"]) == pytest.approx(by_hand, rel=1e-4)
    assert float(metrics["target_mean"]) == pytest.approx(np.mean(expected), rel=1e-4)

    # the actor climbs the critics after their step
    mean, log_std = gaussian(params.actor.params, sample["observation"])
    action, log_prob = log_density(mean, log_std, sample["noise"][:, 1])
    values = np.asarray(values_of(new.critic.params, sample["observation"], action))
    by_hand = (weight[:, None] * (alpha * log_prob - values.min(0))).mean()
    assert float(metrics["actor_loss"]) == pytest.approx(by_hand, rel=1e-4)
    assert float(metrics["policy_entropy"]) == pytest.approx(-(weight[:, None] * log_prob).mean(), rel=1e-4)


def test_schedules_of_actor_and_targets() -> None:
    """Critics move with every update, actor and temperatures with every second, targets with every third."""
    _, update, params = make_scheduled()
    for index in range(1, 8):
        new, _ = update(params, make_batch(index), np.uint32(index))
        moved = {
            name: not all(map(np.array_equal, *map(jax.tree.leaves, (getattr(params, name), getattr(new, name)))))
            for name in ("critic", "actor", "alpha", "target_critic")
        }
        due = index % 2 == 0
        assert moved == {"critic": True, "actor": due, "alpha": due, "target_critic": index % 3 == 0}, index
        if moved["target_critic"]:
            blend = jax.tree.map(lambda old, x: 0.9 * old + 0.1 * x, params.target_critic, new.critic.params)
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), new.target_critic, blend)
        params = new


def test_a_temperature_follows_the_entropy_of_its_own_task() -> None:
    """The initial policy is nearly certain, so that alpha rises; with a wide one it falls; the other task's stays."""
    _, update, params = make_scheduled()
    wide = jax.tree.map(np.zeros_like, actor_tree(params))
    wide["params"]["out_bias"] = np.float32([0.0] * ACTIONS + [math.atanh(9 / 11)] * ACTIONS)  # deviation 1
    for actor, sign in ((params.actor.params, 1), (wide, -1)):
        for task in range(TASKS):
            began = dataclasses.replace(params, actor=dataclasses.replace(params.actor, params=actor))
            new, _ = update(began, make_batch(task=(task,) * 6), np.uint32(2))
            change = np.asarray(new.alpha.params) - np.asarray(params.alpha.params)
            assert change[task] * sign == pytest.approx(0.01, rel=1e-3)  # Adam's first step
            assert change[1 - task] == 0


def test_a_huge_critic_loss_counts_as_infinite() -> None:
    """So that the loop stops there, naming it (see test_trainer)."""
    _, update, params = make_scheduled()
    batch = make_batch()
    for reward, stops in ((1e3, False), (1e5, True)):
        new, metrics = update(params, batch | {"reward": np.full_like(batch["reward"], reward)}, np.uint32(1))
        assert np.isposinf(metrics["critic_loss"]) == stops
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(new) if jnp.issubdtype(x.dtype, jnp.floating))


# ---------------------------------------------------------------- phases


def test_random_steps_are_followed_by_as_many_updates() -> None:
    """In the proportion of all training, and counted on behind them."""
    settings = SETTINGS | {"buffer_size": 400, "update_interval": 4, "env_steps_per_update": 8.0}
    algo = Sac(ARM, DataParallel(4), **settings, random_steps=100)
    random, burst, train = algo.phases
    assert (random, burst) == (Phase("random", 4, 0, iterations=7), Phase("burst", 0, 2, iterations=7))
    assert (train.steps, train.updates, train.iterations) == (4, 2, None)
    numbers = jax.jit(algo.update_indices, static_argnums=1)
    random_steps, one_more = count(7 * 4 * 4), count(8 * 4 * 4)
    in_burst = dataclasses.replace(start(), updates=count(6), env_steps=random_steps)
    in_training = dataclasses.replace(start(), updates=count(14), env_steps=one_more)
    np.testing.assert_array_equal(numbers(in_burst, burst.updates), [7, 8])
    np.testing.assert_array_equal(numbers(in_training, train.updates), [15, 16])
    original = Sac(ARM, DataParallel(1), env_steps_per_update=1.0, random_steps=4000)
    assert [phase.iterations for phase in original.phases] == [4000, 4000, None]
    few = Sac(ARM, DataParallel(1), env_steps_per_update=1.0, random_steps=10)
    assert few.phases[0].iterations == 512  # a batch must be there
    assert [phase.name for phase in Sac(ARM, DataParallel(1), learning_starts=1).phases] == ["train"]


def make_timestep(spec: EnvSpec, batch: int) -> TimeStep:
    """Made-up time steps [batch] in which nothing ends."""
    false = np.zeros(batch, bool)
    shape = (batch, spec.num_agents, *spec.observation.shape)
    observation = np.random.default_rng(5).normal(size=shape).astype(np.float32)
    reward = np.zeros((batch, 1), np.float32)
    return TimeStep(observation, None, (), (), reward, false, false, false, {}, np.zeros(batch, np.int32))


def actor_of(algo: Sac, copies: int = 2000) -> Any:
    """policy, steps so far, mode -> actions [copies, agents, dimensions], one program for each mode."""
    timestep = jax.tree.map(lambda x: np.repeat(x, copies, axis=0), make_timestep(algo.spec, 1))

    @functools.partial(jax.jit, static_argnums=2)
    def act(policy: Any, progress: Progress, mode: Any) -> jax.Array:
        keys = jax.random.split(jax.random.key(2), copies)
        return algo.act(policy, (), timestep, keys, progress, mode)[0]

    return lambda policy, steps, mode: np.asarray(act(policy, at_step(steps), mode))


def test_actions_lie_in_their_box() -> None:
    """Random ones fill it for `random_steps`; then they follow the policy, whose best action is the squashed mean."""
    spec = dataclasses.replace(ARM, action=Box((ACTIONS,), low=-1.0, high=3.0))
    algo = Sac(spec, DataParallel(1), **SETTINGS, env_steps_per_update=1.0, random_steps=50)
    policy = actor_tree(init_params(algo))
    mean, log_std = (np.asarray(x)[0, 0] for x in gaussian(policy, make_timestep(spec, 1).observation))
    acted = actor_of(algo)
    random = acted(policy, 49, "explore")[:, 0]
    np.testing.assert_allclose(random.mean(0), 1.0, atol=0.1)
    np.testing.assert_allclose(random.std(0), 4 / math.sqrt(12), rtol=0.05)
    for steps, mode in ((50, "explore"), (0, "sample")):
        drawn = acted(policy, steps, mode)[:, 0]
        inner = np.arctanh((drawn - 1) / 2)
        np.testing.assert_allclose(inner.mean(0), mean, atol=5 * np.exp(log_std).max() / math.sqrt(2000))
        np.testing.assert_allclose(inner.std(0), np.exp(log_std), rtol=0.1)
    np.testing.assert_allclose(acted(policy, 0, "greedy")[:3, 0], np.tile(1 + 2 * np.tanh(mean), (3, 1)), rtol=1e-5)
    policy["params"]["out_bias"] = np.float32([300.0, -300.0, 0.0, 5.0, 5.0, 5.0])
    drawn = acted(policy, 50, "explore")[:, 0]
    assert drawn.min() == -1 and drawn.max() == 3 and (drawn[:, 0] == 3).all() and (drawn[:, 1] == -1).all()
    assert np.abs(drawn[:, 2] - 1).max() > 1.9  # deviation e^2


def test_deviations_reach_from_one_bound_to_the_other() -> None:
    _, _, params = make_scheduled()
    actor = jax.tree.map(np.zeros_like, actor_tree(params))
    for raw, expected in ((-50.0, -20.0), (0.0, -9.0), (50.0, 2.0)):
        actor["params"]["out_bias"] = np.full(2 * ACTIONS, raw, np.float32)
        assert np.all(np.asarray(gaussian(actor, np.zeros((1, 1, OBS), np.float32))[1]) == expected)


def test_initial_networks() -> None:
    """Glorot uniform and no biases; twin critics differ, and their targets are copies of them."""
    algo = Sac(ARM, DataParallel(1))
    params = init_params(algo)
    net = jax.tree.map(np.asarray, params.critic.params)["params"]
    assert net["fc1_kernel"].shape == (2, OBS + ACTIONS, 256) and params.alpha.params.shape == (TASKS,)
    for name, fans in (("fc1", OBS + ACTIONS + 256), ("fc2", 512), ("out", 257)):
        assert 0.9 < float(np.abs(net[f"{name}_kernel"]).max()) / math.sqrt(6 / fans) <= 1.0
        assert not net[f"{name}_bias"].any() and not np.array_equal(*net[f"{name}_kernel"])
    jax.tree.map(np.testing.assert_array_equal, params.critic.params, params.target_critic)
    algo = Sac(ARM, DataParallel(1), **SETTINGS, layer_norm=True)
    normed = jax.eval_shape(lambda key: algo.weights(algo.init(key, None)), jax.random.key(0))
    assert "norm1_scale" in normed["critic"]["params"] and "norm1_scale" not in normed["actor"]["params"]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("spec", "settings", "sentence"),
    [
        (dataclasses.replace(ARM, action=Discrete(4)), {}, "sac needs continuous actions, 'arm' has discrete ones"),
        (dataclasses.replace(ARM, action=Box((2,))), {}, "float actions with bounds, but in 'arm' they are float32"),
        (dataclasses.replace(ARM, action=Box((2,), jnp.int32, 0, 4)), {}, "but in 'arm' they are int32 from 0 to 4"),
        (dataclasses.replace(ARM, observation={"a": Box((2,))}), {}, "sac needs one array per agent as observation"),
        (ARM, {"actor_update_period": 0}, "actor_update_period must lie between 1 and 1e+09, not 0"),
        (ARM, {"initial_alpha": 0.0}, "initial_alpha must lie between 1e-30 and"),
        (ARM, {"alpha_lr": -1.0}, "alpha_lr must lie between 0 and 10, not -1"),
        (ARM, {"critic_lr": math.nan}, "critic_lr must lie between 1e-12 and 10, not nan"),
        (ARM, {"gamma": 1.5}, "gamma must lie between 0 and 1, not 1.5"),
        (ARM, {"random_steps": 1 << 24}, "random_steps must lie between 0 and 16,777,215, not 16777216"),
        (ARM, {"buffer_size": 60, "env_steps_per_update": 1.0}, "batch_size 512 exceeds the"),
    ],
)
def test_impossible_settings_are_refused(spec: EnvSpec, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Sac(spec, DataParallel(1), **settings)


def test_fewer_updates_than_steps() -> None:
    algo = Sac(ARM, DataParallel(8), **SETTINGS | {"batch_size": 8}, update_interval=8, env_steps_per_update=32.0)
    assert algo.phases[-1] == Phase("train", 8, 2)
    assert "every 64 environment steps bring updates from 2 x 8 stored steps" in algo.summary()[0]


def test_returns_longer_than_an_episode_are_told() -> None:
    warnings_by_n = [
        Sac(ARM, DataParallel(8), **SETTINGS | {"n_step": n}).warnings(1000) for n in (ARM.horizon, ARM.horizon + 1)
    ]
    assert warnings_by_n == [[], [f"n_step {ARM.horizon + 1} exceeds the {ARM.horizon} steps of an episode"]]
