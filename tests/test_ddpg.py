"""DDPG, TD3 and BiCNet: networks, acting, targets and losses by hand, schedules; see also test_recorded_updates."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden
from helpers.off_policy import MODERN, SMALL, at_step, outputs_of
from jax.test_util import check_grads

from envs_jax import TimeStep
from envs_jax.base import Box, Discrete, EnvSpec
from envs_jax.progress import final_progress, start
from jaxrl.algos.ddpg import Bicnet, Ddpg
from jaxrl.nn import networks
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.replay import CONTINUES, TERMINATED, TRUNCATED

OBS, AGENTS, ACTIONS = 26, 3, 4
SNAKES = EnvSpec("boards", AGENTS, Box((OBS,), jnp.int16, 0, 19), Discrete(ACTIONS), horizon=200)


def init_params(algo: Ddpg, seed: int = 0, inputs: Any = None) -> Any:
    """Parameters at the start, made in one program."""
    return jax.jit(lambda key, inputs: algo.init(key, inputs).replicated)(jax.random.key(seed), inputs)


def select_values(algo: Ddpg, critic: Any, sample: dict[str, Any]) -> Any:
    """The critics' values of stored actions."""
    vector = algo.stored_vector(sample["action"])
    return algo.value(critic, sample["observation"], vector, lambda values: values)


def flat(tree: Any) -> np.ndarray:
    """All leaves one after another."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def formula_weights(tag: int, template: Any) -> Any:
    """`template` with other numbers, leaf after leaf."""
    leaves, structure = jax.tree.flatten(template)
    return jax.tree.unflatten(structure, [golden.formula_tensor(x.shape, tag + i, 256) for i, x in enumerate(leaves)])


# ---------------------------------------------------------------- the published networks


@pytest.mark.parametrize(("cls", "actor", "critic"), [(Ddpg, 73_732, 73_985), (Bicnet, 1_191_940, 1_192_193)])
def test_published_networks_have_the_published_sizes(cls: type[Ddpg], actor: int, critic: int) -> None:
    algo = cls(SNAKES, DataParallel(1))
    params = jax.eval_shape(lambda: algo.init(jax.random.key(0), None)).replicated
    sizes = [sum(x.size for x in jax.tree.leaves(learner.params)) for learner in (params.actor, params.critic)]
    assert sizes == [actor, critic]


def test_published_initial_weights_are_uniform_by_fan_in() -> None:
    algo = Bicnet(SNAKES, DataParallel(1))
    params = init_params(algo).critic.params["params"]
    for leaf, fan_in in (
        (params["fc1_kernel"], 30), (params["fc1_bias"], 30), (params["fc2_kernel"], 512), (params["out_kernel"], 256),
        (params["lstm"]["there_input_kernel"], 256), (params["lstm"]["back_state_bias"], 256),
    ):  # fmt: skip
        assert 0.9 < np.abs(leaf).max() * fan_in**0.5 <= 1.0


# ---------------------------------------------------------------- acting


def make_timestep(batch: int, mask: np.ndarray | None = None, seed: int = 0) -> TimeStep:
    """A time step [batch] of random boards."""
    observation = np.random.default_rng(seed).integers(0, 20, (batch, AGENTS, OBS)).astype(np.int16)
    false, reward = np.zeros(batch, bool), np.zeros((batch, AGENTS), np.float32)
    return TimeStep(
        observation=observation, action_mask=mask, mask_state=(), global_state=(), reward=reward,
        terminated=false, truncated=false, first=false, metrics={},
    )  # fmt: skip


def act_steps(algo: Ddpg, timestep: TimeStep, steps: int, mode: str = "explore") -> Any:
    keys = jax.random.split(jax.random.key(2), len(timestep.first))

    @jax.jit
    def act(timestep: TimeStep, keys: Any, progress: Any) -> Any:
        policy = algo.policy(algo.init(jax.random.key(1), None))
        carry = algo.init_carry(policy, timestep, jnp.arange(len(keys)))
        return *algo.act(policy, carry, timestep, keys, progress, mode), policy

    return act(timestep, keys, at_step(steps))


def softmax_of(algo: Ddpg) -> Any:
    return jax.jit(lambda policy, observation: jax.nn.softmax(algo.outputs("actor", policy, observation)))


def test_an_environment_explores_with_all_agents_or_none() -> None:
    """Exploring: uniform vectors, stored as they are; else the softmax. Actions are drawn in proportion."""
    algo = Ddpg(SNAKES, DataParallel(8), eps_start=0.5)
    timestep = jax.tree.map(lambda x: np.repeat(np.asarray(x)[:1], 20_000, axis=0), make_timestep(1))
    action, _, extras, policy = act_steps(algo, timestep, 0)
    vector, softmax = np.asarray(extras["stored"]), np.asarray(softmax_of(algo)(policy, make_timestep(1).observation))
    by_actor = np.isclose(vector, softmax).all((1, 2))
    assert by_actor.mean() == pytest.approx(0.5, abs=0.02)
    sums = vector.sum(-1)
    np.testing.assert_allclose(sums[by_actor], 1.0, rtol=1e-5)
    assert sums[~by_actor].mean() == pytest.approx(2.0, abs=0.03) and vector.max() <= 1.0
    for agent in range(AGENTS):
        share = np.bincount(np.asarray(action)[by_actor, agent], minlength=ACTIONS) / by_actor.sum()
        np.testing.assert_allclose(share, softmax[0, agent], atol=0.02)
    random = vector[~by_actor, 0]
    drawn = np.eye(ACTIONS)[np.asarray(action)[~by_actor, 0]]
    expected = random / random.sum(-1, keepdims=True)
    np.testing.assert_allclose(drawn.mean(0), expected.mean(0), atol=0.02)
    assert (drawn * random).sum(-1).mean() == pytest.approx((expected * random).sum(-1).mean(), abs=0.01)


def test_exploration_falls_with_every_step() -> None:
    algo = Ddpg(SNAKES, DataParallel(1))
    assert float(algo.epsilon(at_step(0))) == 0.5
    assert float(algo.epsilon(at_step(34_657))) == pytest.approx(0.25, rel=1e-4)
    fast = Ddpg(SNAKES, DataParallel(1), eps_decay=0.9995, eps_min=0.01)
    assert float(fast.epsilon(at_step(1386))) == pytest.approx(0.25, rel=1e-3)
    assert float(fast.epsilon(at_step(50_000))) == pytest.approx(0.01)
    assert float(algo.epsilon(final_progress())) == 0.0


def test_evaluation_takes_the_most_probable_action() -> None:
    algo = Ddpg(SNAKES, DataParallel(8))
    action, _, _, policy = act_steps(algo, make_timestep(32), 0, "greedy")
    np.testing.assert_array_equal(
        action, np.argmax(outputs_of(algo, "actor")(policy, make_timestep(32).observation), -1)
    )


# ---------------------------------------------------------------- losses


def test_targets_and_losses_by_hand() -> None:
    """Expected values, twin minimum, three-step return, entropy: against numpy on the networks' own outputs."""
    settings = MODERN | {"action_gradient": "expected", "masking": True, "gamma": 0.9}
    algo = Ddpg(SNAKES, DataParallel(1), **settings)
    params = init_params(algo, 3)
    nets = algo.networks
    critic = dataclasses.replace(params.critic, params=formula_weights(90, nets["critic"].shapes))
    params = dataclasses.replace(  # other targets, and values that are not all near 0
        params,
        target_actor=formula_weights(7, nets["actor"].shapes),
        target_critic=formula_weights(50, nets["critic"].shapes),
        critic=critic,
    )
    random, m = np.random.default_rng(0), 5
    mask = random.random((2, m, AGENTS, ACTIONS)) < 0.6
    mask[..., 1] = True
    reward = random.normal(size=(m, 3, AGENTS)).astype(np.float32)
    end = np.array([[0, 0, 0], [0, 0, 1], [0, 2, 1], [1, 0, 0], [2, 0, 0]], np.uint8)
    boards = random.integers(0, 20, (2, m, AGENTS, OBS)).astype(np.int8)
    action = random.integers(0, ACTIONS, (m, AGENTS)).astype(np.uint8)
    weight = np.array([1.0, 0.5, 0.0, 1.0, 1.0], np.float32)
    sample = {
        "observation": boards[0], "next_observation": boards[1], "mask": mask[0], "next_mask": mask[1],
        "reward": reward, "end": end, "action": action, "weight": weight,
    }  # fmt: skip
    sample = jax.tree.map(jnp.asarray, sample)

    def softmax(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
        powers = np.where(mask, np.exp(logits - logits.max(-1, keepdims=True)), 0.0)
        return powers / powers.sum(-1, keepdims=True)

    logits_of, values_of = outputs_of(algo, "actor"), outputs_of(algo, "critic")
    policy = softmax(np.asarray(logits_of(params.target_actor, sample["next_observation"])), mask[1])
    twin = np.asarray(values_of(params.target_critic, sample["next_observation"]))
    value = (policy * twin.min(0)).sum(-1)
    lengths, bootstraps = [3, 3, 2, 1, 1], [0.9**3, 0, 0.9**2, 0, 0.9]
    expected = [
        sum(0.9**k * reward[i, k] for k in range(lengths[i])) + bootstraps[i] * value[i] for i in range(m)
    ]  # fmt: skip
    target = np.asarray(jax.jit(algo.compute_target)(params, sample))
    np.testing.assert_allclose(target, expected, rtol=1e-4, atol=1e-5)

    online = np.asarray(values_of(params.critic.params, sample["observation"]))
    chosen = np.take_along_axis(online, np.broadcast_to(action[None, ..., None], (2, m, AGENTS, 1)).astype(int), -1)
    errors = np.square(target[None] - chosen[..., 0])
    by_hand = sum((weight[:, None] * errors[critic]).mean() for critic in range(2))
    _, metrics = jax.jit(algo.update)(params, jax.tree.map(lambda x: x[None], sample), jnp.uint32(1), start())
    assert float(metrics["critic_loss"]) == pytest.approx(by_hand, rel=1e-4)

    logits = np.asarray(logits_of(params.actor.params, sample["observation"]))
    policy = softmax(logits, mask[0])
    entropy = -(policy * np.log(np.maximum(policy, 1e-30))).sum(-1)
    used = (weight > 0)[:, None]
    by_hand = -(used * (policy * online.mean(0)).sum(-1)).mean() - 0.01 * (used * entropy).mean()
    by_hand += 1e-3 * (used[..., None] * logits**2).mean()
    loss, _ = jax.jit(algo.actor_loss)(params.actor.params, sample, params.critic.params)
    assert float(loss) == pytest.approx(by_hand, rel=1e-4)


def test_the_gradient_of_layer_norm() -> None:
    """That of `nets` is its own: against differences of values."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype(np.float32) for shape in [(5, 16), (16,), (16,), (16,)]]
    check_grads(jax.jit(networks._norm_relu), values, order=1, modes=["rev"], eps=1e-3, atol=0.02, rtol=0.02)


def test_scaled_observations_are_shares_of_the_bound() -> None:
    raw, scaled = (Ddpg(SNAKES, DataParallel(1), hidden_size=8, scale_observation=scale) for scale in (False, True))
    actor, boards = init_params(raw).actor.params, make_timestep(3).observation
    shares = np.asarray(boards).astype(np.float32) / 19
    np.testing.assert_allclose(
        outputs_of(scaled, "actor")(actor, boards), outputs_of(raw, "actor")(actor, shares), rtol=1e-5
    )


def test_outputs_follow_the_order_of_actions_in_the_observation() -> None:
    """With `action_order` networks do not see the order; their output k belongs to action order[k]."""
    spec = dataclasses.replace(SNAKES, observation=Box((OBS + ACTIONS,), jnp.int16, 0, 19), action_order=True)
    ordered, plain = (
        Ddpg(s, DataParallel(8), **SMALL, action_gradient="expected", num_critics=2) for s in (spec, SNAKES)
    )
    params = init_params(plain)
    rng = np.random.default_rng(0)
    order = rng.permuted(np.tile(np.arange(ACTIONS), (5, AGENTS, 1)), axis=-1)
    observation = rng.integers(0, 20, (5, AGENTS, OBS))
    both = jnp.asarray(np.concatenate([order, observation], -1), jnp.int16)
    for part in ("actor", "critic"):
        network = getattr(params, part).params
        outputs = np.asarray(plain.outputs(part, network, jnp.asarray(observation, jnp.int16)))
        expected = np.zeros_like(outputs)
        np.put_along_axis(expected, np.broadcast_to(order, outputs.shape), outputs, -1)
        assert len(np.unique(outputs)) == outputs.size
        np.testing.assert_array_equal(ordered.outputs(part, network, both), expected)
    ordered, plain = (Ddpg(s, DataParallel(8), **SMALL) for s in (spec, SNAKES))  # critics see vectors of actions
    critic, vector = init_params(plain).critic.params, rng.random((5, AGENTS, ACTIONS), np.float32)
    values = plain.outputs("critic", critic, jnp.asarray(observation, jnp.int16), np.take_along_axis(vector, order, -1))
    np.testing.assert_array_equal(ordered.outputs("critic", critic, both, jnp.asarray(vector)), values)


def test_bicnet_mixes_agents_and_ddpg_does_not() -> None:
    boards = np.asarray(make_timestep(4).observation)
    other = boards.copy()
    other[:, 2] = (other[:, 2] + 1) % 20
    for cls, independent in ((Ddpg, True), (Bicnet, False)):
        algo = cls(SNAKES, DataParallel(1), hidden_size=32)
        actor, logits = formula_weights(100, algo.networks["actor"].shapes), outputs_of(algo, "actor")
        a, b = (np.asarray(logits(actor, x))[:, :2] for x in (boards, other))
        assert np.allclose(a, b, atol=1e-6) is independent


# ---------------------------------------------------------------- training


@pytest.mark.parametrize(("num_envs", "interval", "calls"), [(1, 1, 10), (1, 4, 3), (2, 1, 5), (16, 1, 1)])
def test_the_first_update_comes_with_the_step_that_completes_a_batch(num_envs: int, interval: int, calls: int) -> None:
    settings = SMALL | {"batch_size": 10, "update_interval": interval, "env_steps_per_update": float(num_envs)}
    *fill, train = Ddpg(SNAKES, DataParallel(num_envs), **settings).phases
    assert sum(phase.iterations for phase in fill) == calls - 1 and train.updates == interval


# ---------------------------------------------------------------- continuous actions

ARM = EnvSpec("arm", 2, Box((5,)), Box((3,), low=-1.0, high=3.0), horizon=50)


def rows_of_the_arm(m: int, n: int = 1) -> dict[str, np.ndarray]:
    """A made-up batch of one logical shard, leaves [1, m, ...]."""
    random = np.random.default_rng(0)
    batch = {name: random.normal(size=(1, m, 2, 5)).astype(np.float32) for name in ("observation", "next_observation")}
    return batch | {
        "action": random.uniform(-1, 1, (1, m, 2, 3)).astype(np.float32),
        "reward": random.normal(size=(1, m, n, 2)).astype(np.float32),
        "end": np.full((1, m, n), CONTINUES, np.uint8),
        "weight": np.ones((1, m), np.float32),
        "noise": random.normal(size=(1, m, 2, 3)).astype(np.float32),
    }


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_targets_of_continuous_actions_by_hand(noise: float) -> None:
    """The smaller of two critics at the target actor's action, whose noise is cut, and the sum too (TD3)."""
    algo = Ddpg(ARM, DataParallel(1), n_step=2, gamma=0.9, target_noise=noise, target_noise_clip=0.3, num_critics=2,
                hidden_size=16)  # fmt: skip
    params, m = init_params(algo, 3), 40
    random = np.random.default_rng(1)

    def shift(network: Any) -> Any:
        return jax.tree.map(lambda x: x + 0.3 * random.normal(size=x.shape).astype(np.float32), network)

    params = dataclasses.replace(
        params, target_actor=shift(params.target_actor), target_critic=shift(params.target_critic)
    )
    sample = {name: x[0] for name, x in rows_of_the_arm(m, 2).items()}
    sample["end"] = random.choice([CONTINUES, TERMINATED, TRUNCATED], (m, 2)).astype(np.uint8)
    if not noise:
        assert algo.noise(jax.random.key(0), 4) is None
        del sample["noise"]

    outputs = np.asarray(outputs_of(algo, "actor")(params.target_actor, sample["next_observation"]))
    action = np.tanh(outputs)
    if noise:
        assert jax.eval_shape(lambda: algo.noise(jax.random.key(0), 4)).shape == (4, *sample["noise"].shape[1:])
        shift = np.clip(0.4 * sample["noise"], -0.3, 0.3)
        assert 0.2 < np.mean(np.abs(shift) == np.float32(0.3)) < 0.8 and np.any(np.abs(action + shift) > 1)
        action = np.clip(action + shift, -1, 1)
    values = np.asarray(outputs_of(algo, "critic")(params.target_critic, sample["next_observation"], action))
    assert values.shape == (2, m, 2) and 0.2 < np.mean(values[0] < values[1]) < 0.8
    expected = np.zeros((m, 2))
    for i, ((first, second), reward) in enumerate(zip(sample["end"], sample["reward"], strict=True)):
        expected[i] = reward[0]
        if first == CONTINUES:
            expected[i] += 0.9 * reward[1]
        if first == TRUNCATED:
            expected[i] += 0.9 * values[:, i].min(0)
        if first == CONTINUES and second != TERMINATED:
            expected[i] += 0.81 * values[:, i].min(0)
    np.testing.assert_allclose(jax.jit(algo.compute_target)(params, sample), expected, rtol=1e-4, atol=1e-5)


def test_the_actor_climbs_the_mean_of_the_critics() -> None:
    """At its own actions without noise, outputs that grow too large cost; stored actions are valued as they are."""
    algo = Ddpg(ARM, DataParallel(1), target_noise=0.4, num_critics=2, hidden_size=16, logit_weight=0.1)
    params, sample = init_params(algo, 3), {name: x[0] for name, x in rows_of_the_arm(7).items()}
    sample["weight"] = np.float32([1, 1, 0, 1, 1, 1, 2])
    actor, critic = params.actor.params, params.critic.params
    outputs = np.asarray(outputs_of(algo, "actor")(actor, sample["observation"]))
    values = np.asarray(outputs_of(algo, "critic")(critic, sample["observation"], np.tanh(outputs)))
    used = (sample["weight"] > 0)[:, None]
    loss, metrics = jax.jit(algo.actor_loss)(actor, sample, critic)
    by_hand = (used * (0.1 * np.square(outputs).mean(-1) - values.mean(0))).mean()
    assert float(loss) == pytest.approx(by_hand, rel=1e-4) and set(metrics) == {"actor_loss"}
    actual = jax.jit(functools.partial(select_values, algo))(critic, sample)
    expected = outputs_of(algo, "critic")(critic, sample["observation"], sample["action"])
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_exploration_noise_has_its_deviation_and_stays_in_the_box() -> None:
    """Around the actor's action, in the box scaled to [-1, 1]; uniform during the random steps; none in evaluation."""
    copies = 4000
    observation = np.repeat(np.random.default_rng(0).normal(size=(1, 2, 5)).astype(np.float32), copies, axis=0)
    timestep = dataclasses.replace(make_timestep(copies), observation=observation, action_mask=None)
    for noise in (0.1, 1.5):
        algo = Ddpg(
            ARM, DataParallel(8), exploration_noise=noise, env_steps_per_update=8.0, random_steps=800, hidden_size=16
        )
        action, _, extras, policy = act_steps(algo, timestep, 800)
        best = np.tanh(np.asarray(outputs_of(algo, "actor")(policy, observation[:1])))[0]
        assert np.abs(best).max() < 0.5
        stored = np.asarray(extras["stored"])
        np.testing.assert_allclose(action, 1 + 2 * stored, atol=1e-6)
        assert action.shape == (copies, 2, 3) and np.all((action >= -1) & (action <= 3)) and np.ptp(stored, 0).min() > 0
        if noise == 0.1:  # five deviations are inside
            np.testing.assert_allclose(stored.std(0), 0.1, rtol=0.06)
            np.testing.assert_allclose(stored.mean(0), best, atol=0.1 * 4.5 / copies**0.5)
            assert abs(np.corrcoef(stored.reshape(copies, -1).T)[0, 1:]).max() < 0.08  # each number has its own
        else:
            assert 0.3 < np.mean(np.abs(stored) == 1) < 0.7
        random, _, extras, _ = act_steps(algo, timestep, 799)
        np.testing.assert_allclose(np.mean(random, 0), 1.0, atol=0.1)
        np.testing.assert_allclose(np.std(random, 0), 4 / 12**0.5, rtol=0.05)
        np.testing.assert_allclose(random, 1 + 2 * np.asarray(extras["stored"]), atol=1e-6)
        for mode in ("greedy", "sample"):
            np.testing.assert_allclose(
                act_steps(algo, timestep, 0, mode)[0], np.tile(1 + 2 * best, (copies, 1, 1)), 1e-5
            )
        assert float(algo.schedules(at_step(800))["epsilon"]) == np.float32(noise)


def test_actor_and_targets_wait_for_the_updates_that_are_due() -> None:
    """The actor at every second update, the targets at every third, the critics at all of them."""
    settings = {"actor_update_period": 2, "target_update_period": 3, "target_noise": 0.2, "num_critics": 2}
    algo = Ddpg(ARM, DataParallel(1), hidden_size=16, tau=0.1, actor_lr=1e-2, critic_lr=1e-2, **settings)
    update = jax.jit(lambda params, count: algo.update(params, rows_of_the_arm(8), count, start()))
    old = init_params(algo)
    for count in range(1, 8):
        new, metrics = update(old, np.uint32(count))
        new = jax.tree.map(np.asarray, new)
        assert np.any(flat(new.critic.params) != flat(old.critic.params))
        for name, due in (("actor", count % 2 == 0), ("shown", count % 2 == 0)):
            before, after = (jax.tree.leaves(getattr(x, name)) for x in (old, new))
            assert any(np.any(a != b) for a, b in zip(before, after, strict=True)) == due, (count, name)
        for name in ("actor", "critic"):
            before, online = flat(getattr(old, f"target_{name}")), flat(getattr(new, name).params)
            expected = 0.9 * before + 0.1 * online if count % 3 == 0 else before
            after = flat(getattr(new, f"target_{name}"))
            np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-7)
            assert np.any(after != before) == (count % 3 == 0 and np.any(online != before))
        assert metrics["actor_loss"] == new.shown["actor_loss"]
        old = new


# ---------------------------------------------------------------- settings


def test_capacity_in_steps_and_its_bytes() -> None:
    algo = Ddpg(SNAKES, DataParallel(4), buffer_size=1000, masking=False)
    masked = dataclasses.replace(algo, masking=True)
    assert masked.row_bytes == algo.row_bytes + AGENTS * ACTIONS  # a mask is stored
    row = AGENTS * (OBS * 1 + ACTIONS * 4 + 4) + 1  # boards up to 19 fit into int8
    assert algo.row_bytes == row and algo.replay_rows == 251
    assert f"holds 1,000 environment steps in {251 * 4 * row / 1e6:.3g} MB" in algo.summary()[0]
    buffer = jax.eval_shape(lambda: algo.init(jax.random.key(0), None)).sharded
    leaves = jax.tree.leaves((buffer.observation, buffer.action, buffer.reward, buffer.end))
    assert sum(x.size * x.dtype.itemsize for x in leaves) == 251 * 4 * row


UNBOUNDED = dataclasses.replace(SNAKES, action=Box((2,)))
DEPENDENT = dataclasses.replace(SNAKES, next_mask=lambda state, mask, chosen, agent: mask[agent])


@pytest.mark.parametrize(
    ("spec", "settings", "sentence"),
    [
        (UNBOUNDED, {}, "needs float actions with bounds"),
        (ARM, {"entropy_weight": 0.1}, "entropy_weight needs discrete actions, 'arm' has continuous ones: remove it"),
        (ARM, {"action_gradient": "expected"}, "action_gradient needs discrete actions, 'arm' has continuous ones"),
        (ARM, {"eps_start": 0.1}, "eps_start needs discrete actions, 'arm' has continuous ones: remove it"),
        (SNAKES, {"target_noise": 0.1}, "target_noise needs continuous actions, 'boards' has discrete ones: remove it"),
        (ARM, {"exploration_noise": -0.1}, "exploration_noise must lie between 0 and 10"),
        (ARM, {"target_noise_clip": -1.0}, "target_noise_clip must lie between 0 and 2"),
        (dataclasses.replace(SNAKES, observation={"a": Box((2,))}), {}, "one array per agent"),
        (DEPENDENT, {}, "depend on other agents' actions, which ddpg cannot use"),
        (
            dataclasses.replace(SNAKES, observation=Box((2,))),
            {"scale_observation": True},
            "needs observations with bounds",
        ),
        (SNAKES, {"n_step": 0}, "n_step must lie between 1 and"),
        (SNAKES, {"actor_lr": 0.0}, "actor_lr must lie between 1e-12"),
        (SNAKES, {"max_grad_norm": -1.0}, "max_grad_norm must lie between 0"),
        (SNAKES, {"tau": 1.5}, "tau must lie between 0 and 1"),
        (SNAKES, {"update_interval": 200, "buffer_size": 100}, "but 200 are made between two calls to learn"),
        (SNAKES, {"env_steps_per_update": 200.0, "buffer_size": 100}, "but 200 are made between two calls to learn"),
        (SNAKES, {"buffer_size": 60, "env_steps_per_update": 1.0}, "steps that the replay holds"),
        (SNAKES, {"learning_starts": 200_000}, "learning_starts 200,000 exceeds the"),
    ],
)
def test_impossible_settings_are_refused(spec: EnvSpec, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Ddpg(spec, DataParallel(1), **settings)
    with pytest.raises(ValueError, match="batch_size 63 is not a multiple of the 2 logical shards"):
        Ddpg(SNAKES, DataParallel(8, 2), batch_size=63)
