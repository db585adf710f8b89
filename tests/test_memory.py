"""Policies with a memory: cells, resets, segments, updates and gradients against NumPy, learning, resume."""

import dataclasses
import functools
import pickle
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import by_day
from helpers.off_policy import make_trainer, score_after
from helpers.recall import Recall
from helpers.runs import check_resume
from helpers.tiny import Corridor

from envs_jax import Box, Discrete, EnvSpec, TimeStep
from envs_jax.progress import start
from jaxrl.algos.base import AlgoState, Custom, Trajectory
from jaxrl.algos.coma import Coma
from jaxrl.algos.coma_original import ComaOriginal
from jaxrl.algos.ppo import Ppo
from jaxrl.cli import train
from jaxrl.nn.networks import MLP
from jaxrl.nn.recurrent import Recurrent, zero_carry
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.policy import Policy

T, B, A, OBS, ACTIONS = 5, 4, 2, 3, 4
SPEC = EnvSpec("synthetic", A, Box((OBS,)), Discrete(ACTIONS), horizon=T)
SMALL: dict[str, Any] = {
    "rollout_steps": T, "num_minibatches": 1, "hidden_size": 5, "depth": 1, "memory_size": 3, "initializer": "torch",
}  # fmt: skip
COMA: dict[str, Any] = {
    "minibatch_size": 72, "num_epochs": 3, "hidden_size": 5, "depth": 1, "memory_size": 3, "normalize_advantage": True,
    "clip_ratio": 0.2, "advantage": "return", "entropy_weight": 0.01, "actor_lr": 0.01, "critic_lr": 0.01,
}  # fmt: skip
KINDS = ("gru", "lstm")


# ---------------------------------------------------------------- the network in NumPy, by the published formulas


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def cell(kind: str, weights: Any, x: np.ndarray, state: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """One step of one layer for one sequence: x [F], state (h [H]) or (h, c)."""
    size = len(state[0])
    gates = [slice(k * size, (k + 1) * size) for k in range(4)]

    def from_input(k: int) -> np.ndarray:
        return x @ weights["input_kernel"][:, gates[k]] + weights["input_bias"][gates[k]]

    def from_state(k: int) -> np.ndarray:
        return state[0] @ weights["state_kernel"][:, gates[k]] + weights["state_bias"][gates[k]]

    if kind == "gru":
        reset, update = (logistic(from_input(k) + from_state(k)) for k in (0, 1))
        candidate = np.tanh(from_input(2) + reset * from_state(2))
        return ((1 - update) * candidate + update * state[0],)
    enter, forget, show = (logistic(from_input(k) + from_state(k)) for k in (0, 1, 3))
    content = forget * state[1] + enter * np.tanh(from_input(2) + from_state(2))
    return show * np.tanh(content), content


def outputs_of_episode(kind: str, params: Any, rows: np.ndarray, states: list[tuple[np.ndarray, ...]]) -> np.ndarray:
    """Outputs [t, n] of the steps of one episode (or of what a segment has of it), from the states of each layer."""
    tree, outputs = params["params"], []
    for row in rows:
        encoder = tree["encoder"]["head"]
        x = np.maximum(row @ encoder["fc1_kernel"] + encoder["fc1_bias"], 0)
        for layer in range(len(states)):
            prefix = f"memory{layer + 1}_"
            weights = {name.removeprefix(prefix): value for name, value in tree.items() if name.startswith(prefix)}
            states[layer] = cell(kind, weights, x, states[layer])
            x = states[layer][0]
        head = tree["head"]["head"]
        outputs.append(x @ head["out_kernel"] + head["out_bias"])
    return np.array(outputs)


def numpy_outputs(
    kind: str, params: Any, x: np.ndarray, first: np.ndarray, size: int, carry: dict[str, np.ndarray] | None = None
) -> np.ndarray:
    """Outputs float64[N, T, n]: each sequence is cut into episodes, and every one of them starts anew from zeros."""
    params, layers = jax.tree.map(np.float64, params), 0
    while f"memory{layers + 1}_input_kernel" in params["params"]:
        layers += 1
    states_of_layer, results = (2 if kind == "lstm" else 1), []
    for n, rows in enumerate(np.float64(x)):
        zeros = [(np.zeros(size),) * states_of_layer for _ in range(layers)]
        before = zeros
        if carry is not None:
            names = ("hidden", "cell")[:states_of_layer]
            before = [tuple(np.float64(carry[f"{name}{k + 1}"][n]) for name in names) for k in range(layers)]
        begins = [0, *(int(t) for t in np.flatnonzero(first[n]) if t), len(rows)]
        parts = []
        for k in range(len(begins) - 1):
            states = list(before) if k == 0 and not first[n, 0] else list(zeros)
            parts.append(outputs_of_episode(kind, params, rows[begins[k] : begins[k + 1]], states))
        results.append(np.concatenate(parts))
    return np.array(results)


def make_network(kind: Any, layers: int = 1, size: int = 3, outputs: int = ACTIONS) -> Recurrent:
    return Recurrent(MLP(0, 5, 1), MLP(outputs, 5, 0), kind, size, layers, "torch")


def random_case(kind: str, layers: int, lengths: tuple[int, int] = (6, 9)) -> tuple[Recurrent, Any, Any, Any, Any]:
    """A network, its parameters, inputs [N, T, F], where episodes begin, and a carry."""
    rng, (n, t) = np.random.default_rng(layers), lengths
    x, first = rng.normal(size=(n, t, OBS)).astype(np.float32), rng.random((n, t)) < 0.3
    first[0], first[1, 0] = False, True
    network = make_network(kind, layers)
    params = jax.jit(network.init)(jax.random.key(layers), x)
    carry = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), zero_carry(network.memory, 3, layers, (n,))
    )
    return network, params, x, first, carry


@pytest.mark.parametrize("layers", by_day((1, 2), [1]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_restarts_its_memory_where_an_episode_begins(kind: str, layers: int) -> None:
    network, params, x, first, carry = random_case(kind, layers)
    assert first.any(1).sum() >= 4 and not first.all()
    actual, after = jax.jit(network.apply)(params, x, first, carry)
    expected = numpy_outputs(kind, params, x, first, 3, carry)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    fresh, _ = jax.jit(network.apply)(params, x, first)
    np.testing.assert_allclose(fresh, numpy_outputs(kind, params, x, first, 3), rtol=1e-5, atol=1e-6)
    assert set(after) == set(carry) and len(carry) == layers * (2 if kind == "lstm" else 1)
    step = jax.jit(network.apply)  # step by step, as it acts, it computes the same
    for t in range(x.shape[1]):
        outputs, carry = step(params, x[:, t : t + 1], first[:, t : t + 1], carry)
        np.testing.assert_allclose(outputs[:, 0], actual[:, t], rtol=1e-5, atol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), carry, after)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_differences_of_the_numpy_network(kind: str) -> None:
    network, params, x, first, carry = random_case(kind, 1, (3, 4))
    weights = np.random.default_rng(5).normal(size=(3, 4, ACTIONS))

    def loss(params: Any) -> Any:
        return jnp.sum(jnp.float32(weights) * network.apply(params, x, first, carry)[0])

    gradient = jax.jit(jax.grad(loss))(params)
    assert_finite_differences(lambda tree: float(np.sum(weights * numpy_outputs(kind, tree, x, first, 3, carry))),
                              params, gradient)  # fmt: skip


def assert_finite_differences(function: Any, params: Any, gradient: Any, entries: int = 3) -> None:
    """The gradient of every leaf at some entries is the slope of a function in float64."""
    leaves, structure = jax.tree.flatten(jax.tree.map(np.float64, params))
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    rng, step = np.random.default_rng(0), 1e-5
    for k, slopes in enumerate(jax.tree.leaves(gradient)):
        for index in rng.choice(leaves[k].size, min(entries, leaves[k].size), replace=False):
            values = []
            for sign in (1, -1):
                moved = [leaf.copy() for leaf in leaves]
                moved[k].flat[index] += sign * step
                values.append(function(jax.tree.unflatten(structure, moved)))
            expected = (values[0] - values[1]) / (2 * step)
            np.testing.assert_allclose(np.asarray(slopes).flat[index], expected, rtol=1e-3, atol=1e-5 * scale)


# ---------------------------------------------------------------- rollouts; see also test_team_networks


def make_batch(seed: int, steps: int = T, with_carry: Any = ()) -> tuple[Trajectory, TimeStep]:
    """A trajectory [steps, B, ...] with both kinds of end, and the time step after it."""
    rng = np.random.default_rng(seed)
    ends, kind = rng.random((steps + 1, B)) < 0.3, rng.random((steps + 1, B)) < 0.5
    for t in range(steps):
        ends[t + 1] &= ~ends[t]
    first = np.concatenate([np.zeros((1, B), bool), ends[:-1]])
    first[0, :2] = True
    ends &= ~first
    rewards = np.where(first[..., None], 0.0, rng.normal(size=(steps + 1, B, A))).astype(np.float32)
    observation = rng.normal(size=(steps + 1, B, A, OBS)).astype(np.float32)
    timesteps = TimeStep(observation, reward=rewards, terminated=ends & kind, truncated=ends & ~kind, first=first)
    action = rng.integers(0, ACTIONS, (steps, B, A)).astype(np.int32)
    mask = rng.random((steps, B, A, ACTIONS)) < 0.6
    np.put_along_axis(mask, action[..., None], True, -1)
    extras = {"log_prob": rng.normal(-1.4, 0.3, (steps, B, A)).astype(np.float32), "mask": mask}
    carry = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), with_carry)
    return (
        Trajectory(jax.tree.map(lambda x: x[:-1], timesteps), action, extras, carry),
        jax.tree.map(lambda x: x[-1], timesteps),
    )


def init_params(algo: Any) -> Any:
    return jax.jit(lambda: algo.init(jax.random.key(1), None).replicated)()


def test_the_critic_goes_on_where_the_last_rollout_ended() -> None:
    """Values of two rollouts, one after another, are those of a single long one."""
    long, short = (Ppo(SPEC, DataParallel(B, 2), memory="gru", **(SMALL | {"rollout_steps": n})) for n in (10, 5))
    params, (trajectory, last) = init_params(long), make_batch(2, 10)
    fresh = jax.jit(lambda: long.init(jax.random.key(1), None).sharded)()

    def compute(algo: Ppo, trajectory: Any, last: Any, carry: Any) -> Any:
        def values(trajectory: Any, last: Any, carry: Any) -> Any:
            rows = algo.cut_rollout(trajectory) | algo.cut_inputs(trajectory.timestep) | {"critic_carry": carry}
            value, last_value, next_carry = algo.compute_values(params, rows, last)
            return algo.batches.join(value), last_value, next_carry

        return jax.jit(values)(trajectory, last, carry)

    expected, expected_last, expected_carry = compute(long, trajectory, last, fresh)
    halves = [jax.tree.map(lambda x, k=k: x[k : k + 5], trajectory) for k in (0, 5)]
    middle = jax.tree.map(lambda x: x[0], halves[1].timestep)
    first, first_last, carry = compute(short, halves[0], middle, fresh)
    second, second_last, carry = compute(short, halves[1], last, carry)
    np.testing.assert_allclose(np.concatenate([first, second]), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first_last, second[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second_last, expected_last, rtol=1e-5, atol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), carry, expected_carry)


# ---------------------------------------------------------------- whole updates, calculated otherwise


def by_sequence(x: np.ndarray) -> np.ndarray:
    """[T, B, A, ...] -> [B x A, T, ...]."""
    return np.moveaxis(np.asarray(x), 0, 2).reshape(B * A, len(x), *np.shape(x)[3:])


@pytest.mark.parametrize("kind", by_day(KINDS, ["gru"]))
def test_a_step_of_learning_is_the_slope_of_a_loss_in_numpy(kind: Any) -> None:
    """Plain gradient descent moves each parameter against finite differences of the loss, by hand in float64."""
    chains = Custom(optimizers={"actor": optax.sgd(1.0), "critic": optax.sgd(1.0)})
    settings = SMALL | {"num_epochs": 1, "normalize_value": False, "normalize_advantage": False, "entropy_weight": 0.1}
    algo = Ppo(SPEC, DataParallel(B, 2), chains, memory=kind, normalize_observation="never", gamma=0.9, **settings)
    trajectory, last = make_batch(3, with_carry=zero_carry(kind, 3, 1, (1, B, A)))
    params = init_params(algo)
    carry = jax.tree.map(
        lambda x: np.random.default_rng(8).normal(size=x.shape).astype(np.float32),
        jax.eval_shape(lambda: algo.init(jax.random.key(0), None).sharded),
    )
    learn = jax.jit(lambda state: algo.learn(state, trajectory, last, jax.random.key(1), start(), algo.phases[0]))
    state, metrics = learn(AlgoState(params, carry))

    steps = jax.tree.map(lambda rows, x: np.concatenate([rows, x[None]]), trajectory.timestep, last)
    observation = by_sequence(steps.observation)
    first, terminated, done = (
        np.repeat(np.asarray(x).T, A, axis=0) for x in (steps.first, steps.terminated, steps.done)
    )
    reward, action = by_sequence(steps.reward), by_sequence(trajectory.action)
    mask, old = by_sequence(trajectory.extras["mask"]), np.float64(by_sequence(trajectory.extras["log_prob"]))
    actor_carry = jax.tree.map(lambda x: np.asarray(x).reshape(B * A, 3), trajectory.carry)
    critic_carry = jax.tree.map(lambda x: x.reshape(B * A, 3), carry)
    played = ~done[:, :-1]

    def values(critic: Any) -> np.ndarray:
        return numpy_outputs(kind, critic, observation, first, 3, critic_carry)[..., 0]

    value, advantage = values(params.critic.params), np.zeros((B * A, T))
    for t in reversed(range(T)):
        delta = reward[:, t + 1] + 0.9 * ~terminated[:, t + 1] * value[:, t + 1] - value[:, t]
        following = advantage[:, t + 1] if t + 1 < T else 0.0
        advantage[:, t] = delta + 0.9 * 0.95 * ~done[:, t + 1] * following
    target = advantage + value[:, :-1]

    def loss(learned: Any) -> float:
        logits = numpy_outputs(kind, learned[0], observation[:, :-1], first[:, :-1], 3, actor_carry)
        logits = np.where(mask, logits, -1e30)
        log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        log_probs -= logits.max(-1, keepdims=True)
        entropy = -(np.exp(log_probs) * np.where(mask, log_probs, 0)).sum(-1)
        ratio = np.exp(np.take_along_axis(log_probs, action[..., None], -1)[..., 0] - old)
        gain = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        error = 0.5 * (values(learned[1])[:, :-1] - target) ** 2
        return float((-gain - 0.1 * entropy + error)[played].mean())

    learned = params.actor.params, params.critic.params
    after = state.replicated.actor.params, state.replicated.critic.params
    assert done.any() and (~played).sum() >= 4
    assert_finite_differences(loss, learned, jax.tree.map(lambda x, y: x - y, learned, after), entries=2)
    assert float(metrics["critic_loss"][0]) > 0


class Plain(nn.Module):
    """A network with a memory whose every step begins an episode: a feed-forward one, by the formulas."""

    outputs: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        rows = nn.relu(nn.Dense(5, name="fc1")(x))
        input_kernel = self.param("input_kernel", nn.initializers.zeros, (5, 9))
        input_bias, state_bias = (
            self.param(name, nn.initializers.zeros, (9,)) for name in ("input_bias", "state_bias")
        )
        reset, update, new = jnp.split(rows @ input_kernel + input_bias[None], 3, axis=-1)
        reset_bias, update_bias, new_bias = jnp.split(state_bias[None], 3, axis=-1)
        candidate = jnp.tanh(new + jax.nn.sigmoid(reset + reset_bias) * new_bias)
        return nn.Dense(self.outputs, name="out")((1 - jax.nn.sigmoid(update + update_bias)) * candidate)


def test_coma_of_one_step_that_begins_episodes_is_learning_without_a_memory() -> None:
    spec = dataclasses.replace(SPEC, horizon=1)
    settings = COMA | {"minibatch_size": 8}
    recurrent = Coma(spec, DataParallel(B, 2), memory="gru", **settings)
    plain = Coma(spec, DataParallel(B, 2), Custom({"actor": Plain}), **settings)
    trajectory, last = make_batch(4, 1, zero_carry("gru", 3, 1, (1, B, A)))
    begins = np.ones((1, B), bool)
    timestep = dataclasses.replace(trajectory.timestep, first=begins, terminated=~begins, truncated=~begins)
    trajectory, last = dataclasses.replace(trajectory, timestep=timestep), dataclasses.replace(last, first=begins[0])
    params = init_params(recurrent)

    def rename(learner: Any) -> Any:
        tree = learner.params["params"]
        encoder, head = tree["encoder"]["head"], tree["head"]["head"]
        layers = {
            "fc1": {kind: encoder[f"fc1_{kind}"] for kind in ("kernel", "bias")},
            "out": {kind: head[f"out_{kind}"] for kind in ("kernel", "bias")},
        }
        names = ("input_kernel", "input_bias", "state_bias")
        return {"params": layers | {name: tree[f"memory1_{name}"] for name in names}}

    def learn(algo: Any, params: Any) -> Any:
        state, arguments = AlgoState(params, ()), (trajectory, last, jax.random.key(2), start())
        return jax.jit(functools.partial(algo.learn, phase=algo.phases[0]))(state, *arguments)

    state, metrics = learn(recurrent, params)
    same = dataclasses.replace(params, actor=plain.learner("actor", rename(params.actor)))
    plain_state, plain_metrics = learn(plain, same)
    assert metrics["actor_loss"].shape == (3,) and set(metrics) == set(plain_metrics)
    for name in metrics:
        if "norm" not in name:  # the kernel of states has a gradient, of zeros, only here
            np.testing.assert_allclose(metrics[name], plain_metrics[name], rtol=2e-4, atol=1e-5)
    before, after = rename(params.actor), rename(state.replicated.actor)
    moved = jax.tree.map(lambda x, y: y - x, before, after)
    expected = jax.tree.map(lambda x, y: y - x, before, jax.device_get(plain_state.replicated.actor.params))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(moved)) > 1e-3
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-6), moved, expected)


# ---------------------------------------------------------------- learning


LEARN: dict[str, Any] = {
    "rollout_steps": 20, "num_minibatches": 4, "num_epochs": 4, "hidden_size": 32, "depth": 1, "memory_size": 32,
    "actor_lr": 3e-3, "critic_lr": 3e-3, "gamma": 0.95, "entropy_weight": 0.01,
}  # fmt: skip


LEARN_COMA: dict[str, Any] = COMA | {
    "minibatch_size": 112, "num_epochs": 4, "hidden_size": 32, "memory_size": 32, "actor_lr": 3e-3, "critic_lr": 3e-3,
    "gamma": 0.95, "eps_max": 0.1, "eps_anneal": 3000 * Recall().spec.horizon / 4000, "td_lambda": 0.9, "tau": 0.1,
    "initializer": "he",
}  # fmt: skip


def recall_score(algorithm: Any, memory: str, seed: int, iterations: int) -> float:
    """The share of right answers in held-out episodes after training."""
    trainer = make_trainer(algorithm, Recall(), 32, memory=memory, **(LEARN_COMA if algorithm is Coma else LEARN))
    return score_after(trainer, seed, iterations, "recalled")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("algorithm", [Ppo, Coma])
def test_a_cue_is_recalled_with_a_memory_only(algorithm: Any, seed: int) -> None:
    for memory in KINDS:
        assert recall_score(algorithm, memory, seed, 150) > 0.95
    assert recall_score(algorithm, "none", seed, 150) < 0.4  # of four cues


# ---------------------------------------------------------------- runs, policies, refusals


COMMAND = (
    "--algo ppo --env helpers.tiny:Corridor --num_agents 2 --num_envs 8 --devices 1 --rollout_steps 6 "
    "--num_minibatches 2 --num_epochs 1 --hidden_size 8 --memory lstm --memory_size 4 --total_env_steps 480 "
    "--checkpoint_every 8 --log_every 3 --eval_every 240 --eval_episodes 8"
)


@pytest.mark.slow
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    """The memories of actor and critic in the middle of episodes are part of a checkpoint."""
    check_resume(COMMAND, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_remembers_by_its_carry(kind: Any) -> None:
    env = Corridor(num_agents=2)
    algo = Ppo(env.spec, DataParallel(1), memory=kind, **SMALL)
    params = jax.tree.map(lambda x: 3 * x, jax.jit(lambda: algo.policy(algo.init(jax.random.key(0), None)))())
    policy = pickle.loads(pickle.dumps(Policy(env, algo, params)))
    rng = np.random.default_rng(0)
    observation = rng.random((6, 4, 2, 5)).astype(np.float32)
    first = np.zeros((6, 4), bool)
    first[0], first[3, 1] = True, True
    carry, actions, single, single_actions = None, [], None, []
    mask = np.ones((4, 2, 2), bool)
    for t in range(6):
        action, carry = policy(observation[t], action_mask=mask, carry=carry, first=first[t])
        actions.append(np.asarray(action))
        action, single = policy(observation[t, 2], action_mask=mask[2], carry=single)
        single_actions.append(np.asarray(action))
    x, begins = (
        np.moveaxis(x, 0, 2).reshape(8, 6, *x.shape[3:]) for x in (observation, np.repeat(first[..., None], 2, 2))
    )
    logits = numpy_outputs(kind, params["actor"], x, begins, 3)
    np.testing.assert_array_equal(by_sequence(np.array(actions)), logits.argmax(-1))
    np.testing.assert_array_equal(single_actions, np.array(actions)[:, 2])
    assert len(np.unique(actions)) == 2
    forgetful = numpy_outputs(kind, params["actor"], x, np.ones_like(begins), 3).argmax(-1)
    assert (forgetful != logits.argmax(-1)).any()


@pytest.mark.parametrize(
    ("algorithm", "settings", "custom", "sentence"),
    [
        (
            Ppo,
            SMALL | {"num_minibatches": 3},
            Custom(),
            "num_minibatches 3 does not divide the 4 environments .* use 2",
        ),
        (Ppo, SMALL, Custom({"actor": Plain}), "your own network 'actor' cannot be combined with memory: use --memory"),
        (Coma, COMA, Custom({"actor": Plain}), "your own network 'actor' cannot be combined with memory"),
        (Coma, COMA | {"minibatch_size": 9}, Custom(), "minibatch_size 9 is less than the 10 transitions .* use 10 or"),
        (ComaOriginal, {}, Custom(), "memory does not apply to coma_original"),
    ],
)
def test_impossible_settings_end_in_a_sentence(algorithm: Any, settings: Any, custom: Custom, sentence: str) -> None:
    spec = dataclasses.replace(SPEC, fixed_horizon=algorithm is ComaOriginal)
    with pytest.raises(ValueError, match=sentence):
        algorithm(spec, DataParallel(B), custom, memory="gru", **settings)


def test_opponents_have_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "--algo ppo --env snakes_1v1 --opponent self --memory gru --total_env_steps 99 --runs"
    assert train.main([*command.split(), str(tmp_path)]) == 2
    assert "needs a policy without memory between steps" in capsys.readouterr().err


def test_logical_shards_keep_minibatches_whole() -> None:
    spec = dataclasses.replace(SPEC, num_agents=1)
    assert Ppo.batch(spec, {"memory": "gru", "num_minibatches": 8}, 64) == 8
    assert Ppo.batch(spec, {"memory": "gru", "num_minibatches": 8}, 16) == 2
    assert Ppo.batch(spec, {"memory": "none", "num_minibatches": 8}, 16) == 16
    assert Coma.batch(spec, {"memory": "gru", "minibatch_size": 8 * T}, 64) == 8
    assert Coma.batch(spec, {"memory": "none", "minibatch_size": 8 * T}, 64) == 64
