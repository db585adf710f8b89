"""Message passing and parameters by type: formulas in NumPy, symmetries, updates, learning, refusals."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import by_day
from helpers.off_policy import make_trainer, score_after
from helpers.runs import check_resume
from helpers.tiny import Corridor, CorridorState, PointMass
from helpers.whisper import Whisper
from test_x64 import assert_the_same, describe, equations

from envs_jax import Box, Discrete, EnvSpec, TimeStep
from envs_jax.base import setting
from envs_jax.batch import batched
from envs_jax.progress import start
from jaxrl.algos.base import AlgoState, Custom, Trajectory
from jaxrl.algos.coma import Coma
from jaxrl.algos.ppo import Ppo
from jaxrl.evaluation.policies import _refit_algorithm
from jaxrl.nn import distributions
from jaxrl.nn.networks import MLP, orthogonal
from jaxrl.nn.recurrent import orthogonal_gates
from jaxrl.nn.team_policy import message_ages
from jaxrl.nn.teams import Attention, deliver, map_agents
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.running_statistics import normalize_inputs
from jaxrl.runtime.policy import Policy

T, B, A, OBS, ACTIONS = 4, 4, 3, 5, 4
SPEC = EnvSpec("synthetic", A, Box((OBS,)), Discrete(ACTIONS), horizon=T, links=True, max_link_age=2)
SMALL: dict[str, Any] = {
    "rollout_steps": T, "num_minibatches": 2, "num_epochs": 2, "hidden_size": 8, "depth": 1, "memory_size": 3,
    "message_heads": 2, "actor_lr": 0.01,
}  # fmt: skip
COMA: dict[str, Any] = {
    "minibatch_size": 24, "num_epochs": 2, "hidden_size": 8, "depth": 1, "memory_size": 3, "message_heads": 2,
    "normalize_advantage": True, "clip_ratio": 0.2, "advantage": "return", "entropy_weight": 0.01, "actor_lr": 0.01,
    "critic_lr": 0.01,
}  # fmt: skip


# ---------------------------------------------------------------- the networks, by their formulas


def attention(params: Any, embedding: np.ndarray, messages: np.ndarray, heard: np.ndarray, heads: int) -> np.ndarray:
    """One agent's result, head by head and sender by sender."""
    tree = {name: np.float64(value) for name, value in params["params"].items()}

    def project(name: str, x: np.ndarray) -> np.ndarray:
        return x @ tree[f"{name}_kernel"] + tree[f"{name}_bias"]

    width, parts = len(embedding) // heads, []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        query = project("query", embedding)[part]
        senders = np.flatnonzero(heard)
        scores = np.array([query @ project("key", messages[j])[part] for j in senders]) / np.sqrt(width)
        shares = np.exp(scores) / np.exp(scores).sum()
        parts.append(sum((a * project("value", messages[j])[part] for a, j in zip(shares, senders, strict=True)),
                         np.zeros(width)))  # fmt: skip
    return np.maximum(embedding + project("out", np.concatenate(parts)), 0)


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_follows_its_formula(heads: int) -> None:
    rng, module = np.random.default_rng(heads), Attention(heads, "torch")
    embedding = rng.normal(size=(7, 6)).astype(np.float32)
    messages = rng.normal(size=(7, 4, 6)).astype(np.float32) * 3
    heard = rng.random((7, 4)) < 0.5
    heard[0], heard[1] = False, True
    params = jax.jit(module.init)(jax.random.key(0), embedding, messages, heard)
    actual = jax.jit(module.apply)(params, embedding, messages, heard)
    expected = [attention(params, *row, heads) for row in zip(embedding, messages, heard, strict=True)]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)

    def loss(messages: Any) -> Any:
        return jnp.sum(module.apply(params, embedding, messages, heard))

    slopes = jax.jit(jax.grad(loss))(messages)
    assert np.isfinite(slopes).all() and not slopes[~heard].any() and slopes[heard].any()


def test_messages_arrive_after_their_delay() -> None:
    rng = np.random.default_rng(0)
    for before in (0, 2):
        sent = rng.normal(size=(2, before + 5, 3, 4)).astype(np.float32)
        ages = rng.integers(-1, before + 1, (2, 5, 3, 3)).astype(np.int32)
        elapsed = np.array([[9, 9, 0, 1, 2], [0, 1, 2, 0, 1]], np.int32)
        actual = np.asarray(jax.jit(deliver)(sent, ages, elapsed))
        for n, t, i, j in np.argwhere(ages >= 0):
            age = ages[n, t, i, j]
            expected = sent[n, before + t - age, j] if age <= elapsed[n, t] else np.zeros(4)
            np.testing.assert_array_equal(actual[n, t, i, j], expected)


def test_everyone_is_heard_who_is_present_unless_the_environment_says_otherwise() -> None:
    first = np.zeros((2,), bool)
    present = np.array([[True, False, True], [True, True, True]])
    timestep = TimeStep(np.zeros((2, 3, 1)), np.zeros((2, 3)), first, first, first, present=present)
    spec = dataclasses.replace(SPEC, links=False)
    everyone = [[-1, 0, 0], [0, -1, 0], [0, 0, -1]]
    np.testing.assert_array_equal(message_ages(spec, timestep), [everyone] * 2)
    absent = message_ages(dataclasses.replace(spec, absent_agents=True), timestep)
    np.testing.assert_array_equal(absent, [[[-1, -1, 0], [0, -1, 0], [0, -1, -1]], everyone])
    links = np.array([[[2, 1, -1], [0, 0, 0], [1, -1, 0]]] * 2, np.int32)
    expected = [[[-1, 1, -1], [0, -1, 0], [1, -1, -1]]] * 2
    np.testing.assert_array_equal(message_ages(SPEC, dataclasses.replace(timestep, links=links)), expected)


def test_each_agent_has_the_parameters_of_its_type() -> None:
    module, x = MLP(2, 4), np.random.default_rng(1).normal(size=(5, 3, 6)).astype(np.float32)
    sets = [module.init(jax.random.key(k), x[:, 0]) for k in range(2)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)
    actual = map_agents(module.apply, params, (1, 0, 1), x)
    for agent, kind in enumerate((1, 0, 1)):
        np.testing.assert_allclose(actual[:, agent], module.apply(sets[kind], x[:, agent]), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- made-up rollouts


def make_batch(spec: EnvSpec, seed: int, carry: Any = ()) -> tuple[Trajectory, TimeStep]:
    """A trajectory [T, B, ...] in which episodes end, with links of all ages, and the time step after it."""
    rng, agents = np.random.default_rng(seed), spec.num_agents
    ends = rng.random((T + 1, B)) < 0.2
    for t in range(T):
        ends[t + 1] &= ~ends[t]
    first = np.concatenate([np.ones((1, B), bool), ends[:-1]])
    ends &= ~first
    links = rng.integers(-1, spec.max_link_age + 1, (T + 1, B, agents, agents)).astype(np.int32)
    timesteps = TimeStep(
        rng.normal(size=(T + 1, B, agents, OBS)).astype(np.float32),
        reward=rng.normal(size=(T + 1, B, agents)).astype(np.float32),
        terminated=ends, truncated=np.zeros_like(ends), first=first, links=links if spec.links else (),
    )  # fmt: skip
    action = rng.integers(0, ACTIONS, (T, B, agents)).astype(np.int32)
    extras = {
        "log_prob": rng.normal(-1.4, 0.3, (T, B, agents)).astype(np.float32),
        "mask": np.ones((T, B, agents, ACTIONS), bool),
    }
    return (
        Trajectory(jax.tree.map(lambda x: x[:-1], timesteps), action, extras, carry),
        jax.tree.map(lambda x: x[-1], timesteps),
    )


def learn(algo: Any, params: Any, trajectory: Trajectory, last: TimeStep) -> Any:
    sharded = jax.jit(lambda: algo.init(jax.random.key(0), None).sharded)()
    run = jax.jit(lambda params: algo.learn(
        AlgoState(params, sharded), trajectory, last, jax.random.key(2), start(), algo.phases[0]
    ))  # fmt: skip
    return run(params)


def fresh_carry(algo: Any) -> Any:
    return jax.tree.map(lambda x: x[None], algo.networks["actor"].zero_carry(B, algo.spec.num_agents))


SETTINGS = [(Ppo, SMALL), (Coma, COMA)]


@pytest.mark.parametrize(("algorithm", "settings"), SETTINGS)
def test_permuting_agents_permutes_what_they_do(algorithm: Any, settings: Any) -> None:
    order = np.array([2, 0, 1])
    env = Whisper(delay=1)
    spec = dataclasses.replace(env.spec, observation=Box((OBS,)), action=Discrete(ACTIONS))
    algo = algorithm(spec, DataParallel(B), message_passing="attention", memory="gru", **settings)
    params = jax.jit(lambda: algo.policy(algo.init(jax.random.key(1), None)))()
    params = jax.tree_util.tree_map_with_path(  # messages count little at the start
        lambda path, x: 100 * x if "out_kernel" in jax.tree_util.keystr(path) else x, params
    )
    trajectory, _ = make_batch(spec, 3)
    timestep = jax.tree.map(lambda x: x[0], trajectory.timestep)
    rng = np.random.default_rng(4)
    carry = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32), algo.init_carry(params, timestep, jnp.arange(B))
    )

    def outputs(observation: Any, links: Any, carry: Any) -> Any:
        step = dataclasses.replace(timestep, observation=observation, links=links, first=np.zeros(B, bool))
        situation = algo.situation(jax.tree.map(lambda x: x[:, None], step))
        views = jnp.asarray(step.observation)[:, None]
        actor = params
        if algorithm is Ppo:
            actor, views = params["actor"], normalize_inputs("actor", params["statistics"], views)
        return algo.networks["actor"].apply_team(actor, views, situation, carry)

    plain, after = jax.jit(outputs)(timestep.observation, timestep.links, carry)
    turned, turned_after = jax.jit(outputs)(
        timestep.observation[:, order],
        timestep.links[:, order][:, :, order],
        jax.tree.map(lambda x: x[:, order], carry),
    )
    np.testing.assert_allclose(turned, plain[:, :, order], rtol=1e-4, atol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[:, order], rtol=1e-4, atol=1e-6), turned_after, after)
    unheard, _ = jax.jit(outputs)(timestep.observation, np.full_like(timestep.links, -1), carry)
    assert np.abs(unheard - plain).max() > 1e-3


@dataclasses.dataclass(frozen=True)
class Calling(Corridor):
    """A corridor in which two agents hear each other a step later; episodes end early or are cut."""

    num_agents: int = setting(2, "agents in the corridor")
    length: int = setting(3, "steps from end to end")
    horizon: int = setting(9, "steps after which an episode is cut")

    @property
    def spec(self) -> EnvSpec:
        return dataclasses.replace(super().spec, links=True, max_link_age=1)

    def _timestep(self, state: CorridorState, reward: Any, first: bool) -> TimeStep:
        hears = ~jnp.eye(2, dtype=bool) & (state.t >= 1)
        timestep = super()._timestep(state, reward, first)
        return dataclasses.replace(timestep, links=jnp.where(hears, jnp.int32(1), jnp.int32(-1)))


@pytest.mark.parametrize(
    ("algorithm", "memory", "share_parameters"),
    by_day(
        [(Ppo, "lstm", False), (Coma, "gru", True), (Ppo, "none", True), (Coma, "none", False)],
        [(Ppo, "lstm", False), (Coma, "gru", True)],
    ),
)
def test_learning_reproduces_what_acting_computed(algorithm: Any, memory: str, share_parameters: bool) -> None:
    """The probabilities of actions, by links, episodes and, where a rollout begins within episodes, by its carry."""
    settings = dict(SETTINGS)[algorithm] | {"memory": memory, "share_parameters": share_parameters}
    settings |= {"rollout_steps": 9} if algorithm is Ppo else {"minibatch_size": 72}
    trainer = make_trainer(algorithm, Calling(), 8, message_passing="attention", **settings)
    algo, (phase,) = trainer.algo, trainer.algo.phases
    state = trainer.init(jax.random.key(0))
    actor = jax.tree_util.tree_map_with_path(  # messages count little at the start
        lambda path, x: 10 * x if "out_kernel" in jax.tree_util.keystr(path) else x, state.algo.replicated.actor
    )
    params = dataclasses.replace(state.algo.replicated, actor=actor)
    state = dataclasses.replace(state, algo=AlgoState(params, state.algo.sharded))
    collect = jax.jit(lambda state, key: trainer.rollout(state, phase, key))
    trajectory, last, env_carry, _ = collect(state, jax.random.key(4))
    if algorithm is Ppo:
        carry, env, timestep, statistics = env_carry
        state = dataclasses.replace(state, carry=carry, env=env, timestep=timestep, statistics=statistics)
        trajectory, last, _, _ = collect(state, jax.random.key(5))
        assert not trajectory.timestep.first[0].all()
    assert trajectory.timestep.first[1:].any()

    @jax.jit
    def compute(links: Any, first: Any, carry: Any) -> Any:
        timestep = dataclasses.replace(trajectory.timestep, links=links, first=first)
        moved = dataclasses.replace(trajectory, timestep=timestep, carry=carry)
        data = algo.prepare(state.algo, moved, last, jax.random.key(0), state.progress).data
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
        if algorithm is Ppo:
            outputs = algo.actor_outputs(params.actor.params, params, rows)
            return algo.log_prob(outputs, rows)[0].ravel(), rows["log_prob"].ravel()
        mixed = distributions.epsilon_mix(algo.logits(params.actor.params, rows), algo.epsilon(state.progress))
        probs = distributions.apply_action_mask(mixed, rows["mask"])
        return jnp.log(distributions.select_action_value(probs, rows["action"])).ravel(), rows["log_prob"].ravel()

    seen = trajectory.timestep.links, trajectory.timestep.first, trajectory.carry
    actual, acted = compute(*seen)
    assert actual.shape == (8 * 9 * 2,)
    np.testing.assert_allclose(actual, acted, rtol=0, atol=3e-6)
    changes = [(jnp.full_like(seen[0], -1), *seen[1:])]
    if memory != "none":
        changes.append((seen[0], jnp.zeros_like(seen[1]), seen[2]))
    if algorithm is Ppo:
        changes.append((*seen[:2], jax.tree.map(jnp.zeros_like, seen[2])))
    for changed in changes:
        assert np.abs(compute(*changed)[0] - acted).max() > 1e-4


@pytest.mark.parametrize(
    ("algorithm", "part", "extra"),
    by_day(
        itertools.product((Ppo, Coma), ("actor", "critic"), ("none", "memory", "messages")),
        [(Ppo, "critic", "none"), (Coma, "actor", "messages")],
    ),
)
def test_shared_parameters_move_by_the_sum_of_separate_ones(algorithm: Any, part: str, extra: Any) -> None:
    """A step of plain gradient descent on one network, from sets of parameters that are equal: the chain rule."""
    settings = dict(SETTINGS)[algorithm]
    extra = {"none": {}, "memory": {"memory": "gru"}, "messages": {"message_passing": "attention"}}[extra]
    spec = dataclasses.replace(SPEC, agent_types=(0, 1, 0))
    chains = Custom(optimizers={"actor": optax.sgd(0.0), "critic": optax.sgd(0.0)} | {part: optax.sgd(0.1)})
    one = {"num_minibatches": 1, "num_epochs": 1} if algorithm is Ppo else {"minibatch_size": 999, "num_epochs": 1}
    settings = settings | one | extra
    shared = algorithm(spec, DataParallel(B, 2), chains, **(settings | {"memory": extra.get("memory", "none")}))
    separate = algorithm(spec, DataParallel(B, 2), chains, share_parameters=False, **settings)
    trajectory, last = make_batch(spec, 5, fresh_carry(shared))
    params = jax.jit(lambda: shared.init(jax.random.key(1), None).replicated)()

    @jax.jit
    def copy_parameters(params: Any) -> Any:
        doubled = jax.tree.map(lambda x: jnp.stack([x, x]), params)
        parts = {name: separate.learner(name, getattr(doubled, name).params) for name in ("actor", "critic")}
        target = {"target": doubled.target} if algorithm is Coma else {}
        return dataclasses.replace(params, **parts, **target)

    copies = copy_parameters(params)
    after, metrics = learn(shared, params, trajectory, last)
    separate_after, separate_metrics = learn(separate, copies, trajectory, last)
    name = f"{part}_loss"
    np.testing.assert_allclose(metrics[name], separate_metrics[name], rtol=1e-4, atol=1e-5)
    before, after, separate_after = jax.device_get(
        [getattr(one, part).params for one in (params, after.replicated, separate_after.replicated)]
    )
    moved = jax.tree.map(lambda x, y: y - x, before, after)
    by_type = jax.tree.map(lambda x, y: y - x[None], before, separate_after)
    assert max(np.abs(leaf[0] - leaf[1]).max() for leaf in jax.tree.leaves(by_type)) > 1e-4
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(moved)) > 1e-4
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y.sum(0), rtol=2e-3, atol=1e-6), moved, by_type)


def test_gradients_run_through_messages() -> None:
    """What an agent sends is trained by the losses of those that hear it, a step later: finite differences."""
    algo = Ppo(SPEC, DataParallel(B), message_passing="attention", initializer="torch", **SMALL)
    params = jax.jit(lambda: algo.init(jax.random.key(1), None).replicated)().actor.params
    trajectory, _ = make_batch(SPEC, 7)
    steps = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), trajectory.timestep)
    weights = np.random.default_rng(8).normal(size=(B, T, ACTIONS)).astype(np.float32)

    def loss(observation: Any) -> Any:  # of the first agent only
        actor = algo.networks["actor"]
        outputs, _ = actor.apply_team(params, observation, algo.situation(steps), actor.zero_carry(B, A))
        return jnp.sum(weights * outputs[:, :, 0])

    slopes = np.asarray(jax.jit(jax.grad(loss))(steps.observation))
    ages = np.asarray(algo.situation(steps).ages)
    heard = np.zeros((B, T, A), bool)
    heard[:, :, 0] = True
    for b, t, j in np.argwhere(ages[:, :, 0] >= 0):
        sent = t - ages[b, t, 0, j]
        if sent >= 0:  # else before the first step
            heard[b, sent, j] = True
    assert not slopes[~heard].any()
    assert (np.abs(slopes[heard]).max(-1) > 0).mean() > 0.6  # the others' units are all at rest
    rng, step, value = np.random.default_rng(9), 1e-2, jax.jit(loss)
    for index in rng.choice(np.argwhere(np.abs(slopes) > 0.02), 6, replace=False):
        moved = [np.array(steps.observation) for _ in range(2)]
        moved[0][tuple(index)] += step
        moved[1][tuple(index)] -= step
        slope = (float(value(moved[0])) - float(value(moved[1]))) / (2 * step)
        np.testing.assert_allclose(slopes[tuple(index)], slope, rtol=0.05, atol=2e-3)


# ---------------------------------------------------------------- learning


def whisper_score(algorithm: Any, seed: int, iterations: int, env: Any, **settings: Any) -> float:
    """The share of cues that were repeated, of those that could be, in held-out episodes after training."""
    common = {"hidden_size": 32, "actor_lr": 3e-3, "critic_lr": 3e-3, "gamma": 0.5, "message_heads": 2}
    common |= {"num_minibatches": 4, "rollout_steps": 12} if algorithm is Ppo else {"minibatch_size": 144}
    exploration = {"eps_max": 0.1, "eps_anneal": 3000 * env.spec.horizon / 4000}  # missions of a run of 4,000 steps
    common |= exploration | {"tau": 0.1} if algorithm is Coma else {"num_epochs": 4}
    base = SMALL if algorithm is Ppo else COMA
    trainer = make_trainer(algorithm, env, 32, **(base | common | settings))
    return score_after(trainer, seed, iterations, "repeated") / (env.horizon - env.delay)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("algorithm", [Ppo, Coma])
def test_a_team_that_sends_messages_solves_what_others_cannot(algorithm: Any, delay: int) -> None:
    env = Whisper(delay=delay)
    assert whisper_score(algorithm, 0, 300, env, message_passing="attention") > 0.9
    assert whisper_score(algorithm, 0, 300, env) < 0.45  # of three cues


@pytest.mark.slow
def test_agents_that_hear_nobody_do_not_learn_from_messages() -> None:
    score = whisper_score(Ppo, 0, 300, Whisper(deaf=True), message_passing="attention")
    assert 0.65 < score < 0.85  # two agents of three, and a third of the guesses of the other


# ---------------------------------------------------------------- runs, policies, refusals


COMMAND = (
    "--algo ppo --env helpers.whisper:Whisper --delay 2 --num_envs 8 --devices 1 --rollout_steps 4 "
    "--num_minibatches 2 --num_epochs 1 --hidden_size 8 --depth 1 --message_passing attention --share_parameters false "
    "--total_env_steps 480 --checkpoint_every 8 --log_every 3 --eval_every 240 --eval_episodes 8"
)


@pytest.mark.slow
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Messages that are under way are part of a checkpoint."""
    check_resume(COMMAND, tmp_path)


def test_a_policy_needs_to_know_who_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Whisper()
    algo = Ppo(env.spec, DataParallel(1), message_passing="attention", **SMALL)
    policy = Policy(env, algo, jax.jit(lambda: algo.policy(algo.init(jax.random.key(0), None)))())
    _, timestep = env.reset(jax.random.key(1))
    action, _ = policy(timestep)
    assert action.shape == (3,)
    with pytest.raises(ValueError, match="who hears whom: pass the whole time step"):
        policy(timestep.observation)
    corridor = Corridor(num_agents=2)
    absent = dataclasses.replace(corridor.spec, absent_agents=True)  # messages of those who are absent reach nobody
    monkeypatch.setattr(Corridor, "spec", property(lambda env: absent))
    settings = SMALL | {"message_passing": "attention"}
    policy = Policy(corridor, Ppo(absent, DataParallel(B), **settings), {})
    with pytest.raises(ValueError, match="who hears whom: pass the whole time step"):
        policy(np.zeros((2, 5), np.float32), action_mask=np.ones((2, 2), bool))


@pytest.mark.parametrize(
    ("algorithm", "settings", "changes"),
    [
        (Ppo, SMALL | {"num_minibatches": 4}, {"delay": 2}),
        (Coma, COMA | {"minibatch_size": 18, "memory": "gru"}, {"horizon": 7}),
    ],
)
def test_minibatches_limit_no_environment_in_which_a_policy_acts(
    algorithm: Any, settings: dict[str, Any], changes: dict[str, int]
) -> None:
    """With delays minibatches would hold whole rollouts, and with longer episodes more than `minibatch_size`."""
    trained, other = Whisper(), Whisper(**changes)
    algo = algorithm(trained.spec, DataParallel(8, 8), message_passing="attention", **settings)
    with pytest.raises(ValueError, match="minibatch"):
        dataclasses.replace(algo, spec=other.spec)
    params = jax.eval_shape(lambda: algo.policy(algo.init(jax.random.key(0), None)))
    refitted = _refit_algorithm(
        algo, batched(other), params, changes, {name: getattr(trained, name) for name in changes}
    )
    assert (refitted.spec.max_link_age, refitted.spec.horizon) == (other.delay, other.horizon)


def test_impossible_settings_end_in_a_sentence() -> None:
    for spec, settings, custom, sentence in (
        (Corridor().spec, {}, Custom(), "message_passing is for teams, and 'corridor' has one agent: use .* none"),
        (SPEC, {"message_heads": 3}, Custom(), "message_heads 3 does not divide hidden_size 8.*change one"),
        (
            SPEC,
            {"depth": 0},
            Custom(),
            "messages come from the last hidden layer, and depth 0 .*: use --depth 1 or more",
        ),
        (
            SPEC,
            {},
            Custom({"actor": MLP}),
            "your own network 'actor' cannot .* message_passing: use --message_passing none",
        ),
        (SPEC, {"num_minibatches": 3}, Custom(), "num_minibatches 3 does not divide the 4 environments"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Ppo(spec, DataParallel(B), custom, message_passing="attention", **(SMALL | settings))
    separate = PointMass(num_agents=2).spec
    assert Ppo(separate, DataParallel(B), share_parameters=False, **SMALL).types == (0, 1)
    assert Ppo(PointMass().spec, DataParallel(B), share_parameters=False, **SMALL).types is None


# ---------------------------------------------------------------- types, devices, chunks


EVERYTHING: dict[str, Any] = {
    "message_passing": "attention", "memory": "gru", "share_parameters": False, "num_epochs": 2, "num_minibatches": 2,
}  # fmt: skip


def make_team_trainer(algorithm: Any, devices: int = 1, learn_chunk: int = 0) -> Any:
    """All features at once, with messages that are under way."""
    settings = SMALL | EVERYTHING | {"risk_level": 0.5, "risk_quantiles": 4}
    if algorithm is Coma:
        settings = COMA | EVERYTHING | {"minibatch_size": 36}
        del settings["num_minibatches"]
    trainer = make_trainer(algorithm, Whisper(delay=1), 8, devices, **settings)
    layout = dataclasses.replace(trainer.layout, learn_chunk=learn_chunk)
    return dataclasses.replace(trainer, layout=layout, algo=dataclasses.replace(trainer.algo, layout=layout))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [Ppo, Coma])
def test_programs_are_the_same_with_x64(algorithm: Any) -> None:
    def see() -> dict[str, dict[str, list[str]]]:
        trainer = make_team_trainer(algorithm)
        state = jax.eval_shape(lambda: trainer._init(jax.random.key(0), None))
        phase = trainer.algo.phases[0]
        return {"iteration": describe(lambda state: trainer.iterate(state, phase), state)[1]}

    assert_the_same(see)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [Ppo, Coma])
def test_devices_and_chunks_change_roundings_only(algorithm: Any) -> None:
    results = []
    for devices, learn_chunk in ((1, 0), (2, 0), (1, 18)):
        trainer = make_team_trainer(algorithm, devices, learn_chunk)
        # Adam's first steps are as long for gradients that are nothing but rounding
        descent = Custom(optimizers={part: optax.sgd(0.1) for part in ("actor", "critic")})
        trainer = dataclasses.replace(trainer, algo=dataclasses.replace(trainer.algo, custom=descent))
        state, metrics = trainer.make_block(trainer.algo.phases[0])(trainer.init(jax.random.key(0)), jnp.int32(2))
        results.append(jax.device_get((state.algo.replicated, metrics.learning)))
    for other in results[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), results[0], other)


@pytest.mark.parametrize("initialise", [orthogonal(2**0.5), orthogonal_gates(7)], ids=["layer", "gates"])
def test_orthogonal_kernels_are_drawn_one_after_another(initialise) -> None:
    """Batched QR factorizations lock jaxlib for good on two cores; the numbers are those of each key alone."""
    keys = jax.random.split(jax.random.key(3), 3)
    draw = jax.vmap(lambda key: initialise(key, (20, 7), jnp.float32))
    factorized = [
        equation.invars[0].aval.shape
        for equation in equations(jax.make_jaxpr(draw)(keys).jaxpr)
        if equation.primitive.name in ("qr", "geqrf")
    ]
    assert factorized and all(len(shape) == 2 for shape in factorized)
    kernels = jax.jit(draw)(keys)
    for key, kernel in zip(keys, kernels, strict=True):
        np.testing.assert_array_equal(kernel, jax.jit(initialise, static_argnums=(1, 2))(key, (20, 7), jnp.float32))
        np.testing.assert_allclose(kernel.T @ kernel / (kernel.T @ kernel)[0, 0], np.eye(7), atol=1e-5)
