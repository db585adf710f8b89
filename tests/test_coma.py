"""COMA by its equations: each is compared with NumPy, with finite differences, or with numbers worked by hand.

test_recorded_updates.py compares whole training steps with PyTorch learners: targets of either kind, minibatches,
copies and moves of the target critic, the dueling critic, rates that fall, scaled advantages, clipped ratios.
test_coma_records.py compares with the recorded training step of the public repository.
"""

import dataclasses
import functools
import math
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.coma import (
    VECTOR,
    close,
    flat,
    gradient_of,
    init_params,
    make_batch,
    make_update,
    make_values,
    prepare,
    progress,
    random_timestep,
    small,
    unflatten,
)

from envs_jax import Box, TimeStep
from envs_jax.progress import start
from jaxrl.algos.base import AlgoState, Learner, Phase, Trajectory
from jaxrl.algos.coma import Coma, ComaParameters
from jaxrl.algos.coma_original import ComaOriginal
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UsageError
from jaxrl.nn import distributions
from jaxrl.runtime.build import build_algorithm, build_run

FIXED = dataclasses.replace(VECTOR, fixed_horizon=True)
ORIGINAL = {"kind": ComaOriginal, "spec": FIXED}

# ---------------------------------------------------------------- targets: y = r + d ((1 - l) Q'_next + l y_next)


def test_targets_and_weights_of_a_rollout_by_hand() -> None:
    """One agent in two environments, gamma = lambda = 1/2.

    In the first one row 1 terminates, row 2 restarts, and row 4 is cut: y0 = 1; y3 = 4 + 1/2 16; y2 = 2 + 1/2 [1/2 40 +
    1/2 12]. The actions of rows 1 and 4 are ignored and weigh nothing. The second one goes on after the rollout, where
    the reward 3 and the value 8 follow: y4 = 3 + 1/2 8; y3 = 1/2 [1/2 7].
    """
    algo = small(2, dataclasses.replace(VECTOR, num_agents=1), gamma=0.5, td_lambda=0.5)
    reward = np.float32([[7, 1, 0, 2, 4], [0, 0, 0, 0, 0]]).T[..., None]
    value = np.float32([[100, 200, 300, 40, 16], [0, 0, 0, 0, 0]]).T[..., None]
    terminated = np.zeros((5, 2), bool)
    truncated = np.zeros((5, 2), bool)
    terminated[1, 0] = True
    truncated[4, 0] = True
    timestep = dataclasses.replace(
        random_timestep(np.random.default_rng(0), (5, 2), algo.spec),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
    )
    last = dataclasses.replace(
        random_timestep(np.random.default_rng(0), (2,), algo.spec), reward=np.float32([[0], [3]])
    )
    trajectory = Trajectory(timestep, np.zeros((5, 2, 1), np.int32), {})
    targets = np.asarray(jax.jit(algo.compute_targets)(trajectory, last, value, np.float32([[9], [8]])))[..., 0]
    close(targets[[0, 2, 3], 0], [1, 15, 12], 1e-6)
    close(targets[3:, 1], [1.75, 7], 1e-6)
    weight = algo.batches.sample_weights(trajectory)[..., 0]
    close(np.transpose(weight), [[1.25, 0, 1.25, 1.25, 0], [1.25] * 5], 1e-6)


def test_the_critic_sees_fractions_next_to_integer_observations() -> None:
    """A view with values from 0 to 1 is stored as small as the observations are, unless these are whole numbers."""
    spec = dataclasses.replace(
        VECTOR,
        critic_input_spec=Box((1,), low=0.0, high=1.0),
        critic_input=lambda timestep, action: jnp.full((len(action), 1), 0.25),
    )
    algo = small(2, spec)
    timestep = random_timestep(np.random.default_rng(0), (5, 2), spec)
    action = np.zeros((5, 2, spec.num_agents), np.int32)
    for dtype, stored in ((jnp.int8, jnp.float32), (jnp.float16, jnp.float16)):
        seen = dataclasses.replace(timestep, observation=jnp.zeros(timestep.observation.shape, dtype))
        inputs = algo.critic_inputs(Trajectory(seen, action, {}))
        assert inputs.dtype == stored and np.all(inputs == 0.25)


def test_the_soft_target_moves_by_tau_before_the_first_minibatch_of_an_epoch() -> None:
    algo = small(tau=0.25)
    params = ComaParameters(actor=None, critic=Learner(jnp.ones(2), ()), target=jnp.zeros(2))  # type: ignore[arg-type]
    for stage, index, expected in (("critic", 0, 0.25), ("critic", 1, 0.0), ("actor", 0, 0.0)):
        close(algo.move_targets(params, stage, jnp.int32(index)).target, [expected, expected], 1e-7)


# ---------------------------------------------------------------- policy: pi ~ mask ((1 - e) softmax + e / n)


def test_vanished_probabilities_leave_allowed_actions_equal() -> None:
    """A closed action that the softmax is sure of must not be drawn; nor may the others' ratio be lost before that."""
    mask = np.array([[False, True, True]] * 2)
    chances = jax.nn.softmax(jnp.array([[200.0, 1, 0], [26.0, math.log(3), 0]]))
    policy = distributions.apply_action_mask(chances, mask)
    close(policy, [[0, 0.5, 0.5], [0, 0.75, 0.25]], 1e-6)
    gradient = jax.grad(lambda logits: jnp.log(distributions.apply_action_mask(jax.nn.softmax(logits), mask[0])[1]))
    close(gradient(jnp.array([26.0, math.log(3), 0])), [0, 0.25, -0.25], 1e-3)
    assert not np.any(gradient(jnp.array([200.0, 1, 0])))


def test_schedules_by_hand() -> None:
    """Exploration and entropy bonus change linearly with the share of the run, and then stay."""
    algo = small(1, eps_max=0.5, eps_min=0.02, eps_anneal=0.5, entropy_weight=0.4, entropy_final=0.1,
                 entropy_anneal=0.75)  # fmt: skip
    steps = algo.spec.horizon
    epsilon = jax.jit(algo.epsilon)
    for mission, expected in ((1, 0.5 - 0.48e-4), (5_000, 0.26), (10_000, 0.02), (20_000, 0.02)):
        at = progress(env_steps=(mission - 1) * steps, total_env_steps=20_000 * steps)
        close(epsilon(at), expected, 1e-6)
    bonus = jax.jit(algo.entropy_bonus)
    for share, expected in ((0.0, 0.4), (0.375, 0.25), (0.75, 0.1), (1.0, 0.1)):
        close(bonus(progress(fraction=share)), expected, 1e-6)
    close(small(entropy_weight=0.4).entropy_bonus(progress(fraction=0.9)), 0.4, 1e-6)


# ---------------------------------------------------------------- advantage: A = Q(s, a) - sum_b pi(b) Q(s, b)


@pytest.mark.parametrize(("advantage", "expected"), [("critic", 1 - 1.75), ("return", 4 - 1.75)])
def test_advantages_by_hand(advantage: Any, expected: float) -> None:
    sample = {"values": np.float32([[1, 2]]), "action": np.zeros(1, np.int32), "target": np.float32([4])}
    close(small(advantage=advantage).compute_advantages(sample, np.float32([[0.25, 0.75]])), [expected], 1e-6)


def test_the_example_has_the_advantages_of_gae() -> None:
    """Sums of temporal differences, worked in NumPy from the critic's values of states."""
    path = Path(__file__).parents[1] / "examples" / "coma_gae.py"
    algo = small(kind=runpy.run_path(str(path))["GaeComa"], gamma=0.9, td_lambda=0.7)
    trajectory, last = make_batch(algo)
    params = init_params(algo)
    rows = prepare(algo)(params, trajectory, last, jax.random.key(1), start())
    compute_values = jax.jit(make_values(algo))
    values = np.asarray(compute_values(params.critic.params, rows["critic_input"][0]))
    assert np.ptp(values, axis=-1).max() == 0 and np.ptp(values) > 0.01
    ours = algo.compute_advantages({"target": rows["target"][0], "values": values}, None)
    steps, envs, agents = trajectory.action.shape
    value = np.float64(values[:, 0]).reshape(envs, steps, agents).swapaxes(0, 1)
    seen = np.asarray(last.observation).reshape(-1, 3)
    following = np.float64(compute_values(params.critic.params, seen)[:, 0]).reshape(envs, agents)
    reward = np.concatenate([trajectory.timestep.reward[1:], last.reward[None]])
    expected = np.zeros_like(value)
    advantage = 0.0
    for t in reversed(range(steps)):
        advantage = reward[t] + 0.9 * following - value[t] + 0.9 * 0.7 * advantage
        expected[t] = advantage
        following = value[t]
    close(np.asarray(ours).reshape(envs, steps, agents).swapaxes(0, 1), expected, 1e-5)


# ---------------------------------------------------------------- loss: - mean w A log pi(a)


def test_the_masked_loss_ascends_the_value_of_the_policy_that_is_sampled() -> None:
    """For every open action weighted by its probability, minus the gradient equals the gradient of sum_a pi(a) Q(a)."""
    algo = small(hidden_size=3, depth=1)
    generator = np.random.default_rng(0)
    actor = jax.jit(lambda: algo.init(jax.random.key(3), None).replicated.actor)()
    observation = generator.normal(size=3)
    mask = np.array([True, False, True, True])
    values = generator.normal(size=4)
    epsilon = float(algo.epsilon(start()))

    def policy(weights: np.ndarray) -> np.ndarray:  # float64, by hand
        logits = numpy_logits(unflatten(weights, actor.params), observation)
        mixed = (1 - epsilon) * np.exp(logits) / np.exp(logits).sum() + epsilon / 4
        return mixed * mask / (mixed * mask).sum()

    weights = flat(actor.params)
    numeric = np.zeros_like(weights)
    for k in range(weights.size):
        step = np.zeros_like(weights)
        step[k] = 1e-5
        numeric[k] = (policy(weights + step) @ values - policy(weights - step) @ values) / 2e-5
    batch = {
        "observation": np.tile(np.float32(observation), (4, 1)),
        "action": np.arange(4, dtype=np.int32),
        "mask": np.tile(mask, (4, 1)),
        "log_prob": np.zeros(4, np.float32),
        "values": np.tile(np.float32(values), (4, 1)),
        "target": np.zeros(4, np.float32),
        "weight": np.float32(4 * policy(weights)),  # the mean over the four samples is the sum over the actions
    }
    new, metrics = jax.jit(make_update(algo, "actor"))(actor, {name: x[None] for name, x in batch.items()}, start())
    analytic = -gradient_of(new, actor)
    assert np.abs(numeric).max() > 1e-2
    close(analytic, numeric, 1e-6)
    close(metrics["actor_grad_norm"], np.linalg.norm(numeric), 1e-6)
    assert np.sign(flat(new.params) - weights) @ numeric > 0  # against the gradient of its loss


def numpy_logits(params: Any, observation: np.ndarray) -> np.ndarray:
    """Logits float64 of a network with one hidden layer."""
    layers = params["params"]["head"]
    hidden = np.maximum(observation @ np.float64(layers["fc1_kernel"]) + np.float64(layers["fc1_bias"]), 0)
    return hidden @ np.float64(layers["out_kernel"]) + np.float64(layers["out_bias"])


def make_minibatch(samples: int, shards: int = 1) -> dict[str, np.ndarray]:
    """A made-up minibatch [shards, samples / shards, ...], the last two of whose samples weigh nothing."""
    generator = np.random.default_rng(2)
    mask = generator.random((samples, 4)) < 0.6
    action = generator.integers(0, 4, samples)
    mask[np.arange(samples), action] = True
    batch = {
        "observation": generator.normal(size=(samples, 3)).astype(np.float32),
        "critic_input": generator.normal(size=(samples, 3)).astype(np.float32),
        "action": action.astype(np.int32),
        "mask": mask,
        "log_prob": np.log(generator.uniform(0.2, 0.9, samples)).astype(np.float32),
        "values": generator.normal(size=(samples, 4)).astype(np.float32),
        "target": generator.normal(size=samples).astype(np.float32),
        "weight": np.r_[np.ones(samples - 2), np.zeros(2)].astype(np.float32),
    }
    return {name: x.reshape(shards, samples // shards, *x.shape[1:]) for name, x in batch.items()}


def test_metrics_of_an_actor_update_in_numpy() -> None:
    """The loss is of the policy that acts; entropy is of the masked policy without exploration."""
    algo = small(normalize_advantage=True, entropy_weight=0.25)
    batch = make_minibatch(12)
    actor = init_params(algo).actor
    _, metrics = jax.jit(make_update(algo, "actor"))(actor, batch, start())
    mask, action, values, weight, old_log_prob = (
        batch[name][0] for name in ("mask", "action", "values", "weight", "log_prob")
    )
    logits = numpy_logits(actor.params, batch["observation"][0])
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    epsilon = float(algo.epsilon(start()))
    masked = mask * ((1 - epsilon) * softmax + epsilon / 4)
    pi = masked / masked.sum(-1, keepdims=True)
    log_prob = np.log(pi[np.arange(12), action])
    advantage = values[np.arange(12), action] - (pi * values).sum(-1)
    deviation = np.std(advantage[weight > 0])
    ratio = np.exp(log_prob - old_log_prob)
    unmixed = mask * softmax / (mask * softmax).sum(-1, keepdims=True)
    entropy = -(unmixed * np.log(np.where(mask, unmixed, 1))).sum(-1)
    expected = {
        "actor_loss": np.mean(weight * (-advantage / deviation * log_prob - 0.25 * entropy)),
        "advantage": np.mean(weight * advantage),
        "advantage_square": np.mean(weight * advantage**2),
        "log_prob": np.mean(weight * log_prob),
        "policy_entropy": np.mean(weight * entropy),
        "kl": np.mean(weight * (ratio - 1 - np.log(ratio))),
    }
    assert {name: float(metrics[name]) for name in expected} == pytest.approx(expected, abs=1e-6)


def test_chunks_give_the_same_gradients() -> None:
    """Of two logical shards, with advantages that are scaled by the deviation over both."""
    settings = {"normalize_advantage": True, "clip_ratio": 0.3, "entropy_weight": 0.1}
    whole, pieces = (small(layout={"shards": 2, "learn_chunk": chunk}, **settings) for chunk in (0, 4))
    params = init_params(whole)
    batch = make_minibatch(24, shards=2)
    outcomes = []
    for algo in (whole, pieces):

        def update(params: Any, algo: Coma = algo) -> Any:
            return [make_update(algo, part)(getattr(params, part), batch, start()) for part in ("critic", "actor")]

        (critic, losses), (actor, metrics) = jax.jit(update)(params)
        gradients = gradient_of(critic, params.critic), gradient_of(actor, params.actor)
        outcomes.append((gradients, losses, metrics))
    jax.tree.map(lambda a, b: close(a, b, 1e-6), *outcomes)
    jaxpr = str(jax.make_jaxpr(make_update(pieces, "critic"))(params.critic, batch, start()))
    assert "length=6" in jaxpr  # 24 samples by 4


# ---------------------------------------------------------------- when the actor is trained


def test_the_actor_waits_for_the_critic_and_stays_near_the_policy_that_acted() -> None:
    """In the first `critic_warmup` episodes, and from one and a half times `target_kl` on, it is left alone."""
    algo = small(critic_warmup=7, target_kl=0.1)
    assert algo.decide_step("critic", {}, start())[0] is None
    for episodes, kl, trains in ((6, 0.0, False), (7, 0.0, True), (7, 0.149, True), (7, 0.151, False)):
        active, metrics = algo.decide_step("actor", {"kl": jnp.float32(kl)}, progress(episodes=episodes))
        assert bool(active) is bool(metrics["actor_moved"]) is trains


@pytest.mark.parametrize(("advantage", "independent"), [("critic", False), ("return", True)])
def test_the_baseline_of_returns_is_of_the_critic_before_it_learns_them(advantage: Any, independent: bool) -> None:
    """However fast the critic learns in a training step of two epochs, the actor's steps are the same."""
    moved = []
    for critic_lr in (1e-3, 1e-1):
        algo = small(advantage=advantage, critic_lr=critic_lr)
        learn = jax.jit(functools.partial(algo.learn, phase=algo.phases[0]))
        state, _ = learn(AlgoState(init_params(algo), ()), *make_batch(algo), jax.random.key(0), progress())
        moved.append(flat(state.replicated.actor))
    assert np.array_equal(*moved) is independent


def test_critic_warmup_freezes_the_actor() -> None:
    """Training steps of six episodes, of which the first two train only the critic; then all passes train both."""
    algo = small(critic_warmup=7)
    learn = jax.jit(functools.partial(algo.learn, phase=algo.phases[0]))
    state = AlgoState(init_params(algo), ())
    for step in range(3):
        before = state.replicated
        state, metrics = learn(state, *make_batch(algo), jax.random.key(step), progress(episodes=6 * step))
        moved = {name: np.any(flat(getattr(before, name)) != flat(getattr(state.replicated, name)))
                 for name in ("actor", "critic")}  # fmt: skip
        assert moved == {"actor": step == 2, "critic": True}
        assert metrics["actor_loss"].shape == metrics["critic_loss"].shape == (4,)


# ---------------------------------------------------------------- acting


def close_taken(mask_state: Any, action_mask: jax.Array, chosen: jax.Array, agent: Any) -> jax.Array:
    """Closes what earlier agents chose, unless nothing would be left."""
    closed = jnp.any((jnp.arange(4)[:, None] == chosen[None]) & (jnp.arange(3)[None] < agent), axis=1)
    mask = action_mask[agent] & ~closed
    return jnp.where(jnp.any(mask), mask, action_mask[agent])


CROWD = dataclasses.replace(VECTOR, num_agents=3, next_mask=close_taken)
COPIES = 1_000


@pytest.fixture(scope="module")
def crowd() -> tuple[TimeStep, np.ndarray, dict[str, Any]]:
    """Copies of three agents, their logits, and by mode what they do; agent 0 sees the same everywhere."""
    algo = small(spec=CROWD)
    generator = np.random.default_rng(0)
    policy = jax.tree.map(lambda x: 3 * x, init_params(algo).actor.params)
    mask = generator.random((COPIES, 3, 4)) < 0.5
    mask[..., 1] |= ~mask.any(-1)
    mask[:, 0] = [True, True, False, True]
    timestep = random_timestep(generator, (COPIES,), CROWD)
    timestep.observation[:, 0] = 0.3
    timestep = dataclasses.replace(timestep, action_mask=mask)
    keys = jax.random.split(jax.random.key(4), COPIES)

    @jax.jit
    def act() -> dict[str, Any]:
        return {mode: algo.act(policy, (), timestep, keys, start(), mode) for mode in ("explore", "sample", "greedy")}

    return timestep, numpy_logits(policy, timestep.observation), jax.tree.map(np.asarray, act())


@pytest.mark.parametrize("mode", ["explore", "sample", "greedy"])
def test_agents_choose_one_after_another_what_their_masks_allow(crowd: Any, mode: str) -> None:
    timestep, logits, acted = crowd
    action, _, extras = acted[mode]
    epsilon = float(small().epsilon(start())) if mode == "explore" else 0.0
    mixed = (1 - epsilon) * np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) + epsilon / 4
    masks = timestep.action_mask.copy()
    for agent in (1, 2):
        taken = (action[:, :agent, None] == np.arange(4)).any(1)
        left = masks[:, agent] & ~taken
        masks[:, agent] = np.where(left.any(-1, keepdims=True), left, masks[:, agent])
    np.testing.assert_array_equal(extras["mask"], masks)
    pi = mixed * masks / (mixed * masks).sum(-1, keepdims=True)
    chosen = np.take_along_axis(pi, action[..., None], -1)[..., 0]
    assert action.dtype == np.int32 and (chosen > 0).all()
    np.testing.assert_allclose(extras["log_prob"], np.log(chosen), rtol=0, atol=1e-4)
    if mode == "greedy":
        np.testing.assert_allclose(chosen, pi.max(-1), rtol=1e-5)
        return
    shares = np.bincount(action[:, 0], minlength=4) / COPIES
    assert np.all(np.abs(shares - pi[0, 0]) < 4 * np.sqrt(pi[0, 0] * (1 - pi[0, 0]) / COPIES) + 1e-9)
    assert np.ptp(pi[0, 0, [0, 1, 3]]) > 0.02


def test_without_a_mask_every_action_is_open() -> None:
    algo = small()
    timestep = dataclasses.replace(random_timestep(np.random.default_rng(0), (200,), VECTOR), action_mask=None)
    policy = init_params(algo).actor.params
    act = jax.jit(lambda keys: algo.act(policy, (), timestep, keys, start(), "explore"))
    action, _, extras = act(jax.random.split(jax.random.key(0), 200))
    assert extras["mask"].shape == (200, 2, 4) and bool(extras["mask"].all())
    assert set(np.ravel(action)) == {0, 1, 2, 3}


# ---------------------------------------------------------------- sizes


def test_an_episode_brings_as_many_updates_for_any_number_of_environments() -> None:
    for num_envs, shards in ((6, 1), (48, 8), (600, 8)):
        algo = small(num_envs, layout={"shards": shards}, minibatch_size=40)
        assert algo.phases == (Phase("train", 5, 2 * (num_envs * 10 // 40), restart=True),)
        assert algo.batches.size * shards == 40
    lone = small(2, minibatch_size=640)  # fewer transitions than one minibatch
    assert (lone.batches.per_epoch, lone.batches.size) == (1, 20)


@pytest.mark.parametrize(("preset", "missions", "minibatch"), [("coma_fork", 11, 128), ("coma_light", 3, 48)])
def test_whole_missions_leave_a_surplus_behind(preset: str, missions: int, minibatch: int) -> None:
    """128 x 5 and 48 x 2 transitions, from the 660 and 108 that the missions have."""
    algo = make_algorithm("--config", preset)
    assert (algo.layout.num_envs, algo.layout.shards, algo.batches.size) == (missions, 1, minibatch)
    algo = make_algorithm("--config", preset, "--num_envs", str(8 * missions))
    assert algo.batches.size * algo.layout.shards == minibatch


def make_algorithm(*argv: str) -> Any:
    """The algorithm of a command line, without tracing it."""
    return build_algorithm(parse(argv).config)


def test_original_targets_see_all_missions() -> None:
    argv = ["--algo", "coma_original", "--q", "7", "--hidden_size", "8", "--num_envs", "6"]
    assert make_algorithm(*argv).layout.shards == 1
    config = parse(argv).config
    with pytest.raises(UsageError, match="use --logical_shards 1"):
        build_run(config.with_run(logical_shards=2))


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"actor_lr": 0.0}, "actor_lr must lie between 1e-12 and 10, not 0"),
        ({"actor_epochs": 9}, "actor_epochs 9 exceeds num_epochs 2: lower it"),
        ({"normalize_advantage": True, "minibatch_size": 1}, "one sample, .* raise minibatch_size or num_envs, or"),
        (ORIGINAL | {"clip_ratio": 0.1}, "clip_ratio does not apply to coma_original"),
        (ORIGINAL | {"tau": 0.1}, "tau does not apply to coma_original"),
        (ORIGINAL | {"spec": VECTOR}, "coma_original needs episodes that all have the same length"),
        ({"spec": dataclasses.replace(VECTOR, action=Box((2,)))}, "coma needs discrete actions, 'vector' has"),
        ({"spec": dataclasses.replace(VECTOR, critic_input=None)}, "coma needs a centralised observation, but"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        small(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"critic_warmup": 9}, None),
        ({"critic_warmup": 10}, "critic_warmup 10 leaves the actor untrained in a run of 10 episodes"),
        ({"entropy_weight": 0.1, "entropy_final": 0.01}, "entropy_final 0.01 has no effect"),
        ({"entropy_weight": 0.1, "entropy_final": 0.01, "entropy_anneal": 0.5}, None),
        ({"memory_size": 64}, "memory_size 64 has no effect without memory: set --memory too"),
        ({"memory": "gru", "memory_size": 64}, None),
    ],
)
def test_settings_without_effect_are_named(settings: dict[str, Any], sentence: str | None) -> None:
    warnings = small(spec=FIXED, **settings).warnings(10 * VECTOR.horizon)
    assert len(warnings) == (sentence is not None) and (sentence or "") in "".join(warnings)


def test_a_run_whose_episodes_end_early_may_have_enough_of_them() -> None:
    assert not small(critic_warmup=10).warnings(10 * VECTOR.horizon)


@pytest.mark.parametrize(("minibatch_size", "fitting"), [(0.5, None), (0.52, 0.5), (0.7, 0.5), (0.95, None), (2, None)])
def test_transitions_that_no_minibatch_takes_are_told(minibatch_size: float, fitting: float | None) -> None:
    """As shares of the transitions of an epoch; a tenth may be dropped."""
    rows = small().batches.rows_per_shard
    warnings = small(spec=FIXED, minibatch_size=round(minibatch_size * rows)).warnings(10 * VECTOR.horizon)
    if fitting is None:
        assert not warnings
        return
    (warning,) = warnings
    assert f"use --minibatch_size {round(fitting * rows)}" in warning
    assert not small(spec=FIXED, minibatch_size=round(fitting * rows)).warnings(10 * VECTOR.horizon)
