"""The COMA learner against the recorded training step of dmar-bonn/ipp-marl, and against numbers worked by hand."""

import dataclasses
import functools
import math
import runpy
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden
from helpers.cases import by_day

from bench.parity.learner import image_spec
from envs_jax import Box, Discrete, EnvSpec, TimeStep
from envs_jax.progress import Progress, count, start
from jaxrl.algos.base import AlgoState, Learner, Phase, Trajectory
from jaxrl.algos.coma import Coma, ComaParameters
from jaxrl.algos.coma_original import ComaOriginal, OriginalParameters, ipp_marl_targets
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UsageError
from jaxrl.nn import convolutions, distributions, networks
from jaxrl.nn.team_policy import Situation, Sizes
from jaxrl.rl import policy_gradient
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.build import build_algorithm, build_run

TD, VALUE, NORM = 1e-6, 4e-7, 2e-5  # tolerances; 4e-7, 1.5e-7 and 1e-5 were seen between two float32 systems


def progress(**changes: Any) -> Progress:
    """Nothing done yet, but for `changes` (counters as ints)."""
    shares = ("fraction", "total_env_steps")
    counters = {name: jnp.float32(value) if name in shares else count(value) for name, value in changes.items()}
    return dataclasses.replace(start(), **counters)


def random_timestep(generator: np.random.Generator, lead: tuple[int, ...], spec: EnvSpec) -> TimeStep:
    """A made-up time step [*lead, ...] in which nothing ends."""
    agents, actions = spec.num_agents, spec.action.n  # type: ignore[union-attr]
    flags = np.zeros(lead, bool)
    return TimeStep(
        observation=generator.random((*lead, agents, *spec.observation.shape)).astype(np.float32),
        action_mask=np.ones((*lead, agents, actions), bool),
        reward=generator.normal(size=(*lead, agents)).astype(np.float32),
        terminated=flags,
        truncated=flags,
        first=flags,
    )


_INITIAL_PARAMS: dict[Any, ComaParameters] = {}


def init_params(algo: Coma) -> ComaParameters:
    """Fresh parameters by key 0, made in one program for all algorithms with the same networks."""
    key = (algo.networks["actor"].module, algo.networks["critic"].module, type(algo))
    if key not in _INITIAL_PARAMS:
        _INITIAL_PARAMS[key] = jax.jit(lambda: algo.init(jax.random.key(0), None).replicated)()
    return _INITIAL_PARAMS[key]


def to_rows(samples: dict[str, Any]) -> dict[str, Any]:
    """Minibatches of lone transitions [S, m, ...] as the learner has them, [S, m, 1, 1, ...]."""
    rows = {name: x[:, :, None, None] for name, x in samples.items()}
    return rows | {"situation": Situation((), ()), "carry": ()}


def to_samples(rows: dict[str, Any]) -> dict[str, np.ndarray]:
    """The inverse of `to_rows`."""
    return {name: np.asarray(x)[:, :, 0, 0] for name, x in rows.items() if name not in ("situation", "carry")}


def make_update(algo: Coma, part: str) -> Any:
    """A step on the critic or the actor: (learner, samples [S, m, ...], progress) -> (learner, metrics)."""

    def update(learner: Learner, samples: dict[str, Any], at: Progress) -> tuple[Learner, dict[str, Any]]:
        empty = ComaParameters(actor=None, critic=None, target=None)  # type: ignore[arg-type]
        params = dataclasses.replace(empty, **{part: learner})
        params, _, metrics = algo.update(part, params, to_rows(samples), at)
        return getattr(params, part), metrics

    return update


def make_values(algo: Coma) -> Any:
    """Values of (weights of a critic, its inputs [N, ...]), [N, n]."""
    return lambda critic, inputs: algo.values(critic, inputs[:, None, None])[:, 0, 0]


def prepare(algo: Coma) -> Any:
    """Transitions of a trajectory, [S, samples, ...], of the arguments of `Coma.prepare`, in one program."""
    make_rows = jax.jit(lambda params, *rollout: algo.prepare(AlgoState(params, ()), *rollout).data)
    return lambda *arguments: to_samples(make_rows(*arguments))


def close(a: Any, b: Any, atol: float, rtol: float = 0.0) -> None:
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=atol, rtol=rtol)


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def flat(tree: Any) -> np.ndarray:
    """All leaves one after another, float64."""
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def unflatten(vector: np.ndarray, like: Any) -> Any:
    """The inverse of `flat` for a tree with leaves as in `like`."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(vector, np.cumsum([leaf.size for leaf in leaves])[:-1])
    return jax.tree.unflatten(structure, [p.reshape(leaf.shape) for p, leaf in zip(parts, leaves, strict=True)])


def gradient_of(new: Learner, old: Learner) -> np.ndarray:
    """The gradient of one Adam step, all layers flat, from its first moments (beta 0.9) before and after."""
    after, before = (next(s.mu for s in learner.opt_state if hasattr(s, "mu")) for learner in (new, old))
    return (np.float64(after) - 0.9 * np.float64(before)) / 0.1


# ---------------------------------------------------------------- recorded training step

MISSIONS, STEPS, AGENTS, ACTIONS = 5, 15, 4, 6
RUN = 75_000  # missions
TENSORS = {  # our parameters in the order of the records; the unused layer fc2 (rows 8, 9) is left out
    "conv1_kernel": 0, "conv1_bias": 1, "conv2_kernel": 2, "conv2_bias": 3, "conv3_kernel": 4, "conv3_bias": 5,
    "fc1_kernel": 6, "fc1_bias": 7, "out_kernel": 10, "out_bias": 11,
}  # fmt: skip


def from_torch(arrays: dict[str, np.ndarray]) -> Any:
    """ConvStack parameters of PyTorch weights: conv [out, in, h, w] -> [h, w, in, out], linear transposed."""
    params: dict[str, Any] = {"head": {}}
    for name, values in arrays.items():
        layer, kind = name.split("_")
        values = values.transpose(2, 3, 1, 0) if values.ndim == 4 else values.T
        place = params if layer.startswith("conv") else params["head"]
        place[f"{layer.replace('fc3', 'out')}_{kind.replace('weight', 'kernel')}"] = np.ascontiguousarray(values)
    return {"params": params}


def to_torch(tree: Any) -> dict[int, np.ndarray]:
    """{row of the records: tensor in PyTorch's layout}, float64."""
    layers = {**tree["params"], **tree["params"]["head"]}
    arrays = {row: np.asarray(layers[name], np.float64) for name, row in TENSORS.items()}
    return {row: x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T for row, x in arrays.items()}


@dataclasses.dataclass
class Recorded:
    """The recorded training step as our learner sees it."""

    arrays: dict[str, np.ndarray]
    algo: ComaOriginal
    params: OriginalParameters
    trajectory: Trajectory
    last: TimeStep
    progress: Progress

    @functools.cached_property
    def values(self) -> Any:
        """Values of (weights of a critic, its inputs), in one program."""
        return jax.jit(make_values(self.algo))

    @functools.cached_property
    def data(self) -> dict[str, np.ndarray]:
        """Transitions and targets, [1, 300, ...]."""
        arguments = (self.params, self.trajectory, self.last, jax.random.key(0), self.progress)
        return prepare(self.algo)(*arguments)

    def minibatch(self, index: int) -> dict[str, np.ndarray]:
        return {name: values[:, self.arrays["batch_index"][index]] for name, values in self.data.items()}

    @functools.cached_property
    def training(self) -> dict[str, Any]:
        """The recorded five minibatches, critic first, through the algorithm's two update functions."""
        critic_update, actor_update = (jax.jit(make_update(self.algo, part)) for part in ("critic", "actor"))
        rows: dict[str, Any] = {"critic": [], "critic_gradient": [], "q_after": [], "actor": [], "actor_gradient": []}
        actor, critic = self.params.actor, self.params.critic
        for index in range(MISSIONS):
            batch, before = self.minibatch(index), critic
            critic, metrics = critic_update(critic, batch, self.progress)
            rows["critic"].append(metrics)
            rows["critic_gradient"].append(to_torch(unflatten(gradient_of(critic, before), critic.params)))
            rows["q_after"].append(np.asarray(self.values(critic.params, batch["critic_input"][0])))
        for index in range(MISSIONS):
            batch, before = self.minibatch(index) | {"values": rows["q_after"][index][None]}, actor
            actor, metrics = actor_update(actor, batch, self.progress)
            rows["actor"].append(metrics)
            rows["actor_gradient"].append(to_torch(unflatten(gradient_of(actor, before), actor.params)))
        return rows | {"params": dataclasses.replace(self.params, actor=actor, critic=critic)}


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    arrays = golden.load("coverage_learner")

    def by_mission(values: np.ndarray) -> np.ndarray:  # [75, ...] -> [T, B, ...]
        values = values.astype(np.float32) if values.dtype == np.float64 else values
        return values.reshape(MISSIONS, STEPS, *values.shape[1:]).swapaxes(0, 1)

    reward = np.repeat(by_mission(arrays["reward"])[..., None], AGENTS, axis=-1)
    done = by_mission(arrays["done"]).astype(bool)
    state = by_mission(np.concatenate([arrays["obs"], arrays["state_extra"]], axis=-1))
    timestep = TimeStep(
        observation=by_mission(arrays["obs"]),
        action_mask=np.ones((STEPS, MISSIONS, AGENTS, ACTIONS), bool),
        global_state=state,
        reward=np.concatenate([np.zeros_like(reward[:1]), reward[:-1]]),  # of the previous action
        terminated=np.concatenate([np.zeros_like(done[:1]), done[:-1]]),
        truncated=np.zeros_like(done),
        first=np.arange(STEPS)[:, None] * np.ones_like(done) == 0,
    )
    last = dataclasses.replace(jax.tree.map(lambda x: x[-1], timestep), reward=reward[-1], terminated=done[-1])
    mask = by_mission(arrays["mask"]).astype(bool)
    extras = {"mask": mask, "log_prob": np.zeros(mask.shape[:-1], np.float32)}
    algo = ComaOriginal(image_spec(AGENTS, ACTIONS, STEPS), DataParallel(MISSIONS), eps_anneal=10_000 / RUN)
    actor, critic, target = (from_torch(golden.coverage_network(b, c)) for b, c in ((100, 7), (200, 12), (300, 12)))
    begin = jax.jit(lambda networks: algo.init(jax.random.key(0), networks).replicated)
    params = dataclasses.replace(begin({"actor": actor, "critic": critic}), first_target=target)
    trajectory = Trajectory(timestep, by_mission(arrays["action"]).astype(np.int32), extras)
    at = progress(episodes=2 * MISSIONS, env_steps=2 * MISSIONS * STEPS, total_env_steps=RUN * STEPS)
    return Recorded(arrays, algo, params, trajectory, last, at)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _epsilon(eps_max: float, eps_min: float, eps_anneal: float, steps: int, at: Progress) -> jax.Array:
    spec = dataclasses.replace(VECTOR, horizon=steps)
    return small(1, spec, eps_max=eps_max, eps_min=eps_min, eps_anneal=eps_anneal).epsilon(at)


def epsilon_of(algo: Coma, at: Progress) -> jax.Array:
    """Exploration, in one program for all algorithms with the same schedule."""
    return _epsilon(algo.eps_max, algo.eps_min, algo.eps_anneal, algo.layout.num_envs * algo.steps, at)


@jax.jit
def logits_of(actor: Any, observation: np.ndarray) -> jax.Array:
    return small().networks["actor"].apply(actor, observation)


def test_weights_of_the_records_are_loaded(recorded: Recorded) -> None:
    params = recorded.params
    for label, tree in (
        ("actor", params.actor.params),
        ("critic", params.critic.params),
        ("target", params.first_target),
    ):
        for row, tensor in to_torch(tree).items():
            close([tensor.sum(), (tensor**2).sum()], recorded.arrays[f"{label}_param_summary_init"][row], 1e-9)
    expected = from_torch(golden.coverage_network(100, 7))
    same(params.actor.params, expected)


def test_epsilon_is_that_of_the_last_mission(recorded: Recorded) -> None:
    close(epsilon_of(recorded.algo, recorded.progress), recorded.arrays["eps"], 1e-7)


def test_recorded_networks(recorded: Recorded) -> None:
    batch = recorded.minibatch(0)

    @jax.jit
    def mix(actor: Any, observation: jax.Array) -> jax.Array:
        logits = recorded.algo.networks["actor"].apply(actor, observation)
        return distributions.epsilon_mix(logits, recorded.algo.epsilon(recorded.progress))

    probs = mix(recorded.params.actor.params, batch["observation"][0])
    close(probs, recorded.arrays["probs_first_batch"], VALUE)
    values = recorded.values(recorded.params.critic.params, batch["critic_input"][0])
    close(values, recorded.arrays["q_first_batch"], VALUE)
    state = recorded.data["critic_input"][0]
    q_target = recorded.values(recorded.params.first_target, state)
    close(np.reshape(q_target, (-1, AGENTS, ACTIONS)), recorded.arrays["q_target_net"], VALUE)


original_targets = jax.jit(ipp_marl_targets, static_argnums=(3, 4, 5))


def test_recorded_targets(recorded: Recorded) -> None:
    close(recorded.data["target"][0].reshape(-1, AGENTS), recorded.arrays["td_target"], TD)
    np.testing.assert_array_equal(recorded.data["weight"], 1.0)
    q = np.take_along_axis(recorded.arrays["q_target_net"], recorded.arrays["action"][..., None].astype(int), -1)[
        ..., 0
    ]
    reward, done = np.float32(recorded.arrays["reward"]), recorded.arrays["done"].astype(bool)
    for agent in range(AGENTS):
        target, full = original_targets(reward, done, np.float32(q[:, agent]), 0.99, 0.8, STEPS)
        close(target, recorded.arrays["td_target"][:, agent], TD)
        close(full, recorded.arrays["discounted_return"][:, agent], TD, rtol=1e-6)


def test_intended_targets_of_the_recorded_missions(recorded: Recorded) -> None:
    algo = Coma(image_spec(AGENTS, ACTIONS, STEPS), DataParallel(MISSIONS))
    params = dataclasses.replace(recorded.params, target=recorded.params.first_target)
    arguments = (params, recorded.trajectory, recorded.last, jax.random.key(0), recorded.progress)
    ours = prepare(algo)(*arguments)["target"].reshape(-1, AGENTS)
    q = np.take_along_axis(recorded.arrays["q_target_net"], recorded.arrays["action"][..., None].astype(int), -1)[
        ..., 0
    ]
    expected = np.zeros((MISSIONS * STEPS, AGENTS))
    for t in reversed(range(MISSIONS * STEPS)):
        expected[t] = recorded.arrays["reward"][t]
        if not recorded.arrays["done"][t]:
            expected[t] += 0.99 * (0.2 * q[t + 1] + 0.8 * expected[t + 1])
    close(ours, expected, TD)


@pytest.mark.parametrize(("source", "case"), [("own", 0), *(("recorded", case) for case in range(4))])
def test_recorded_target_tables(source: str, case: int) -> None:
    arrays = golden.load("coverage_missions", source)
    table = {name: arrays[f"td{case}_{name}"] for name in ("gamma_lambda", "reward", "done", "q", "target", "return")}
    gamma, lambda_ = (float(x) for x in table["gamma_lambda"])
    reward, done, q = np.float32(table["reward"]), table["done"].astype(bool), np.float32(table["q"])
    target, full = original_targets(reward, done, q, gamma, lambda_, len(reward))
    close(target, table["target"], TD, rtol=1e-6)
    close(full, table["return"], TD, rtol=1e-6)


def test_recorded_critic_updates(recorded: Recorded) -> None:
    losses, norms = ([row[f"critic_{name}"] for row in recorded.training["critic"]] for name in ("loss", "grad_norm"))
    close(np.mean(losses), recorded.arrays["critic_loss_mean"], VALUE)
    for b in range(MISSIONS):
        expected = recorded.arrays["critic_grad_norms"][b]
        for row, gradient in recorded.training["critic_gradient"][b].items():
            close(np.sqrt((gradient**2).sum()), expected[row], 0, rtol=NORM)
        close(norms[b], np.sqrt((expected**2).sum()), 0, rtol=NORM)
        close(recorded.training["q_after"][b], recorded.arrays["q_after"][b], VALUE)


def test_recorded_actor_updates(recorded: Recorded) -> None:
    metrics = {name: np.array([row[name] for row in recorded.training["actor"]], np.float64)
               for name in recorded.training["actor"][0]}  # fmt: skip
    close(metrics["actor_loss"].mean(), recorded.arrays["actor_loss_mean"], VALUE)
    close(metrics["advantage"].mean(), recorded.arrays["advantage_mean"], VALUE)
    close(metrics["log_prob"].mean(), recorded.arrays["log_prob_chosen_mean"], VALUE)
    samples = MISSIONS * STEPS * AGENTS
    variance = metrics["advantage_square"].mean() - metrics["advantage"].mean() ** 2
    close(np.sqrt(variance * samples / (samples - 1)), recorded.arrays["advantage_std"], VALUE)
    for b in range(MISSIONS):
        expected = recorded.arrays["actor_grad_norms"][b]
        for row, gradient in recorded.training["actor_gradient"][b].items():
            close(np.sqrt((gradient**2).sum()), expected[row], 0, rtol=NORM)
        close(metrics["actor_grad_norm"][b], np.sqrt((expected**2).sum()), 0, rtol=NORM)


def check_parameters_after(params: ComaParameters, arrays: dict[str, np.ndarray]) -> None:
    for name in ("actor", "critic"):
        for row, tensor in to_torch(getattr(params, name).params).items():
            close(tensor.ravel()[:6], arrays[f"{name}_param_heads_after"][row], VALUE)
            close([tensor.sum(), (tensor**2).sum()], arrays[f"{name}_param_summary_after"][row],
                  VALUE + 1e-9 * tensor.size)  # fmt: skip


def test_recorded_parameters_after_five_adam_steps(recorded: Recorded) -> None:
    check_parameters_after(recorded.training["params"], recorded.arrays)


@pytest.mark.slow
def test_recorded_training_step_through_learn(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers when `learn` does it all; only the shuffle is put in."""
    order = jnp.asarray(recorded.arrays["batch_index"].reshape(-1))
    monkeypatch.setattr(jax.random, "permutation", lambda key, samples: order + 0 * jnp.int32(samples))
    algo = dataclasses.replace(recorded.algo, num_epochs=1, minibatch_size=order.size // 5)
    arguments = (recorded.trajectory, recorded.last, jax.random.key(0), recorded.progress)
    state, metrics = jax.jit(functools.partial(algo.learn, phase=algo.phases[0]))(
        AlgoState(recorded.params, ()), *arguments
    )
    check_parameters_after(state.replicated, recorded.arrays)
    close(metrics["critic_loss"].mean(), recorded.arrays["critic_loss_mean"], VALUE)
    close(metrics["actor_loss"].mean(), recorded.arrays["actor_loss_mean"], VALUE)
    same(state.replicated.first_target, recorded.params.first_target)


# ---------------------------------------------------------------- networks


@pytest.mark.parametrize(
    ("shape", "stride"), [pytest.param((11, 11, 3), 1, marks=pytest.mark.slow), ((9, 12, 2), 1), ((11, 12, 2), 2)]
)
def test_ways_to_convolve_agree_in_value_and_gradient(shape: tuple[int, int, int], stride: int) -> None:
    x = np.random.default_rng(0).random((3, *shape), np.float32)
    methods = get_args(convolutions.Convolution)
    stacks = {method: networks.ConvStack(5, 8, methods=(method,) * 3, stride=stride) for method in methods}
    params = jax.jit(stacks["conv"].init)(jax.random.key(1), x)

    @jax.jit
    def all_ways(params: Any, x: jax.Array) -> Any:
        """Outputs; the sum of their sines with its slopes, by parameters and by pixels."""
        outputs = {method: net.apply(params, x) for method, net in stacks.items()}
        slopes = {
            method: jax.value_and_grad(lambda p, x, net=net: jnp.sum(jnp.sin(net.apply(p, x))), argnums=(0, 1))(
                params, x
            )
            for method, net in stacks.items()
        }
        return outputs, slopes

    outputs, results = all_ways(params, x)
    for method in ("dense", "patches"):
        close(outputs[method], outputs["conv"], 1e-6)
        jax.tree.map(lambda a, b: close(a, b, 2e-6, 1e-5), results[method], results["conv"])
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(results["conv"][1]))


@pytest.mark.parametrize("method", get_args(convolutions.Convolution))
def test_stride_leaves_out_outputs(method: convolutions.Convolution) -> None:
    rng = np.random.default_rng(0)
    x, kernel = rng.random((2, 11, 12, 3), np.float32), rng.random((5, 4, 3, 6), np.float32)
    convolve = functools.partial(convolutions.convolve, method=method)
    every, second = (jax.jit(functools.partial(convolve, stride=stride))(x, kernel) for stride in (1, 2))
    assert second.shape == (2, 4, 5, 6)
    close(second, every[:, ::2, ::2], 1e-5)


def test_images_too_small_for_the_stride_are_refused() -> None:
    sizes = Sizes(hidden_size=8, depth=1, initializer="he", stride=2, convolution="auto", dtype=None)
    network = sizes.make_network(5, (11, 11, 2))
    assert isinstance(network, networks.ConvStack) and network.stride == 2
    with pytest.raises(ValueError, match=r"at least 11 x 11 pixels, not 10 x 12: choose --stride 1"):
        sizes.make_network(5, (10, 12, 2))


def test_networks_return_float32_whatever_they_compute_in() -> None:
    x = np.random.default_rng(0).random((3, 11, 11, 2), np.float32)
    exact = networks.ConvStack(5, 8)
    coarse = networks.ConvStack(5, 8, dtype=jnp.bfloat16)
    params = jax.jit(coarse.init)(jax.random.key(1), x)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    roughly, exactly = jax.jit(lambda params: (coarse.apply(params, x), exact.apply(params, x)))(params)
    assert roughly.dtype == jnp.float32
    close(roughly, exactly, 2e-2)
    assert np.abs(np.asarray(roughly) - np.asarray(exactly)).max() > 0


def test_he_networks_start_near_zero() -> None:
    x = np.random.default_rng(0).random((4, 11, 11, 2), np.float32)
    net = networks.ConvStack(5, 32, initializer="he")
    params = jax.jit(net.init)(jax.random.key(1), x)
    assert np.abs(jax.jit(net.apply)(params, x)).max() < 0.05
    assert all(not np.any(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if "bias" in str(path))


# ---------------------------------------------------------------- equations


def test_lambda_returns_by_hand() -> None:
    # Rows end in: an ordinary step, a termination, a truncation, the end of the data. gamma = lambda = 1/2.
    rows = np.float32([[1, 2, 3, 4], [0.5, 0, 0.5, 0.5], [10, 20, 30, 8], [0.5, 0, 0, 0.5]])
    targets = jax.jit(policy_gradient.lambda_returns)(*rows)
    # y4 = 4 + 1/2 [1/2 8 + 1/2 8] = 8; y3 = 3 + 1/2 30 = 18; y2 = 2; y1 = 1 + 1/2 [1/2 10 + 1/2 2] = 4
    close(targets, [4.0, 2.0, 18.0, 8.0], 1e-6)
    other = np.random.default_rng(0).random((4, 4, 3), np.float32)
    many = jax.jit(policy_gradient.lambda_returns)(
        *np.concatenate([rows[..., None], other], axis=-1)
    )  # time is the first axis
    close(many[:, 0], targets, 1e-6)
    close(many[:, 3], jax.jit(policy_gradient.lambda_returns)(*other[..., 2]), 1e-6)


VECTOR = EnvSpec(
    name="vector",
    num_agents=2,
    observation=Box((3,)),
    action=Discrete(4),
    horizon=5,
    critic_input_spec=Box((3,)),
    critic_input=lambda timestep, action: timestep.observation,
)
FIXED = dataclasses.replace(VECTOR, fixed_horizon=True)
ORIGINAL = {"kind": ComaOriginal, "spec": FIXED}


def small(
    num_envs: int = 6,
    spec: EnvSpec = VECTOR,
    layout: dict[str, Any] | None = None,
    kind: type[Coma] = Coma,
    **settings: Any,
) -> Coma:
    defaults: dict[str, Any] = {
        "minibatch_size": num_envs * spec.horizon * spec.num_agents // 2,
        "num_epochs": 2,
        "hidden_size": 8,
        "actor_lr": 1e-2,
        "critic_lr": 1e-2,
    }
    defaults["final_lr_fraction"] = 0.2  # of which nothing is seen at the beginning of a run
    return kind(spec, DataParallel(num_envs, **(layout or {})), **(defaults | settings))


@functools.cache
def updates(**settings: Any) -> tuple[Any, Any]:
    """The update functions of the critic and of the actor of `small(**settings)`, compiled once."""
    return jax.jit(make_update(small(**settings), "critic")), jax.jit(make_update(small(**settings), "actor"))


LONE = small(1, dataclasses.replace(VECTOR, num_agents=1), gamma=0.5, td_lambda=0.5)
lone_targets = jax.jit(LONE.compute_targets)


def test_targets_of_a_trajectory_with_both_kinds_of_end() -> None:
    """One agent: a termination in row 1, a restart in row 2, a truncation in row 4, a restart behind the end."""
    algo = LONE
    timestep = random_timestep(np.random.default_rng(0), (5, 1), algo.spec)
    timestep = dataclasses.replace(
        timestep,
        reward=np.array([7.0, 1.0, 0.0, 2.0, 4.0], np.float32).reshape(5, 1, 1),
        terminated=np.array([False, True, False, False, False]).reshape(5, 1),
        truncated=np.array([False, False, False, False, True]).reshape(5, 1),
    )
    last = jax.tree.map(lambda x: np.asarray(x)[0], timestep)
    last = dataclasses.replace(last, reward=np.zeros((1, 1), np.float32))
    trajectory = Trajectory(timestep, np.zeros((5, 1, 1), np.int32), ())
    value = np.array([100.0, 200.0, 300.0, 40.0, 16.0], np.float32).reshape(5, 1, 1)
    targets = lone_targets(trajectory, last, value, np.full((1, 1), 9, np.float32))
    # row 0: the action was paid 1 and ended it; row 3: 4 + 1/2 16, cut; row 2: 2 + 1/2 [1/2 40 + 1/2 12]
    close(np.ravel(targets)[[0, 2, 3]], [1.0, 15.0, 12.0], 1e-6)
    # rows 1 and 4 hold final time steps, whose action was ignored: they weigh nothing
    extras = {"mask": np.ones((5, 1, 1, 4), bool), "log_prob": np.zeros((5, 1, 1), np.float32)}
    trajectory = dataclasses.replace(trajectory, extras=extras)
    weight = prepare(algo)(init_params(algo), trajectory, last, jax.random.key(1), start())["weight"]
    close(weight, [[5 / 3, 0, 5 / 3, 5 / 3, 0]], 1e-6)


def test_a_trajectory_that_is_cut_bootstraps_from_what_follows() -> None:
    algo = LONE
    timestep = random_timestep(np.random.default_rng(0), (5, 1), algo.spec)
    last = dataclasses.replace(
        jax.tree.map(lambda x: np.asarray(x)[0], timestep), reward=np.full((1, 1), 3, np.float32)
    )
    trajectory = Trajectory(timestep, np.zeros((5, 1, 1), np.int32), ())
    targets = lone_targets(trajectory, last, np.zeros((5, 1, 1), np.float32), np.full((1, 1), 8, np.float32))
    close(np.asarray(targets)[-1, 0, 0], 3 + 0.5 * 8, 1e-6)


def test_vanished_probabilities_leave_allowed_actions_equal() -> None:
    """A closed action that the softmax is sure of must not be drawn; nor may the others' ratio be lost before that."""
    mask = np.array([[False, True, True]] * 2)
    chances = jax.nn.softmax(jnp.array([[200.0, 1, 0], [26.0, math.log(3), 0]]))
    policy = distributions.apply_action_mask(chances, mask)
    close(policy, [[0, 0.5, 0.5], [0, 0.75, 0.25]], 1e-6)
    gradient = jax.grad(lambda logits: jnp.log(distributions.apply_action_mask(jax.nn.softmax(logits), mask[0])[1]))
    close(gradient(jnp.array([26.0, math.log(3), 0])), [0, 0.25, -0.25], 1e-3)
    assert not np.any(gradient(jnp.array([200.0, 1, 0])))
    noise = distributions.draw_noise(jax.random.split(jax.random.key(0), 100), policy.shape[-1])
    drawn = jax.vmap(distributions.sample, (0, None))(noise, policy[0])
    assert set(np.asarray(drawn)) == {1, 2}


def test_a_uniform_critic_gives_no_advantage() -> None:
    algo, generator = small(), np.random.default_rng(0)
    chances, mask = generator.random((50, 4)).astype(np.float32), generator.random((50, 4)) < 0.6
    mask[:, 0] = True
    policy = jax.jit(distributions.apply_action_mask)(chances, mask)
    action = generator.integers(0, 4, 50).astype(np.int32)
    sample = {"values": np.full((50, 4), 3.5, np.float32), "action": action, "target": np.full(50, 4, np.float32)}
    returned = dataclasses.replace(algo, advantage="return")
    both = jax.jit(lambda *arguments: (algo.compute_advantages(*arguments), returned.compute_advantages(*arguments)))
    advantage, paid = both(sample, policy)
    close(advantage, np.zeros(50), 1e-6)
    values, first = np.float32([[1, 2]]), np.zeros(1, np.int32)
    labelled = {"values": values, "action": first, "target": np.float32([4])}
    for actual, expected in zip(both(labelled, np.float32([[0.25, 0.75]])), (1 - 1.75, 4 - 1.75), strict=True):
        close(actual, [expected], 1e-6)
    close(paid, np.full(50, 0.5), 1e-6)


def actor_batch(algo: Coma, generator: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    """A made-up minibatch of one logical shard, the last two of whose samples weigh nothing."""
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
    return {name: values[None] for name, values in batch.items()}


def test_the_masked_loss_ascends_the_value_of_the_policy_that_is_sampled() -> None:
    """For every open action weighted by its probability, minus the gradient equals the gradient of sum_a pi(a) Q(a)."""
    algo, generator = small(hidden_size=3, depth=1), np.random.default_rng(0)
    actor = jax.jit(lambda: algo.init(jax.random.key(3), None).replicated.actor)()
    observation = generator.normal(size=3)
    mask, values = np.array([True, False, True, True]), generator.normal(size=4)
    epsilon = float(epsilon_of(algo, start()))

    def policy(weights: np.ndarray) -> np.ndarray:  # float64, by hand
        layers = unflatten(weights, actor.params)["params"]["head"]
        hidden = np.maximum(observation @ layers["fc1_kernel"] + layers["fc1_bias"], 0)
        logits = hidden @ layers["out_kernel"] + layers["out_bias"]
        mixed = (1 - epsilon) * np.exp(logits) / np.exp(logits).sum() + epsilon / 4
        return mixed * mask / (mixed * mask).sum()

    weights = flat(actor.params)
    numeric = np.zeros_like(weights)
    for k in range(weights.size):
        step = np.zeros_like(weights)
        step[k] = 1e-5
        numeric[k] = (policy(weights + step) @ values - policy(weights - step) @ values) / 2e-5
    batch = {
        "observation": np.tile(observation, (4, 1)),
        "action": np.arange(4, dtype=np.int32),
        "mask": np.tile(mask, (4, 1)),
        "log_prob": np.zeros(4),
        "values": np.tile(values, (4, 1)),
        "target": np.zeros(4),
        "weight": 4 * policy(weights),  # the mean over the four samples is the sum over the actions
    }
    batch = {k: v.astype(np.float32 if v.dtype == np.float64 else v.dtype)[None] for k, v in batch.items()}
    new, metrics = jax.jit(make_update(algo, "actor"))(actor, batch, start())
    analytic = -gradient_of(new, actor)
    assert np.abs(numeric).max() > 1e-2
    close(analytic, numeric, 1e-6)
    close(metrics["actor_grad_norm"], np.linalg.norm(numeric), 1e-6)
    assert np.sign(flat(new.params) - weights) @ numeric > 0  # against the gradient of its loss


def test_clip_ratio() -> None:
    log = np.log
    cases = [  # ratio, advantage, loss, derivative by the log-probability
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),  # too likely already
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),  # too unlikely already
        (0.5, 2.0, -1.0, -1.0),
    ]

    @jax.jit
    @jax.value_and_grad
    def loss_of(x: jax.Array, behaviour: jax.Array, advantage: jax.Array) -> jax.Array:
        return policy_gradient.policy_gradient_loss(x, behaviour, advantage, np.ones(1, np.float32), 0.2)

    for ratio, advantage, loss, derivative in cases:
        value, gradient = loss_of(*np.float32([[-1], [-1 - log(ratio)], [advantage]]))
        close(value, loss, 1e-5)
        close(gradient, [derivative], 1e-5)
    plain = jax.jit(lambda *arguments: policy_gradient.policy_gradient_loss(*arguments, 0.0))
    close(plain(*np.float32([[-1], [9], [2], [1]])), 2.0, 1e-6)


def test_entropy_bonus_is_taken_off_the_loss() -> None:
    batch = actor_batch(small(), np.random.default_rng(1), 12)
    actor = init_params(small()).actor
    plain, bonus = (update(actor, batch, start())[1] for _, update in (updates(), updates(entropy_weight=0.25)))
    logits = logits_of(actor.params, batch["observation"][0])
    masked = np.where(batch["mask"][0], np.exp(np.float64(logits)), 0)
    pi = masked / masked.sum(-1, keepdims=True)
    entropy = -np.where(pi > 0, pi * np.log(np.maximum(pi, 1e-30)), 0).sum(-1) * np.asarray(batch["weight"][0])
    close(plain["policy_entropy"], entropy.mean(), 1e-6)
    close(np.asarray(plain["actor_loss"]) - np.asarray(bonus["actor_loss"]), 0.25 * entropy.mean(), 1e-6)
    assert float(bonus["actor_grad_norm"]) != float(plain["actor_grad_norm"])
    falling = jax.jit(small(entropy_weight=0.4, entropy_final=0.1, entropy_anneal=0.75).entropy_bonus)
    shares = [dataclasses.replace(start(), fraction=jnp.float32(share)) for share in (0.0, 0.375, 0.75, 1.0)]
    close([falling(moment) for moment in shares], [0.4, 0.25, 0.1, 0.1], 1e-6)
    close(jax.jit(small(entropy_weight=0.4).entropy_bonus)(progress(fraction=0.9)), 0.4, 1e-6)


def test_divergence_from_the_policy_that_chose() -> None:
    """Over actions drawn as the behaviour policy draws them, its mean is KL(behaviour || pi)."""
    behaviour, pi = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    kl = (behaviour * np.log(behaviour / pi)).sum()
    divergence = jax.jit(policy_gradient.divergence)
    close(divergence(*np.float32([np.log(pi), np.log(behaviour), 3 * behaviour])), kl, 1e-6)
    close(divergence(*np.float32([np.log(pi), np.log(pi), np.ones(3)])), 0, 1e-7)
    algo, batch = small(), actor_batch(small(), np.random.default_rng(2), 12)
    actor = init_params(algo).actor
    metrics = updates()[1](actor, batch, start())[1]
    logits = np.float64(logits_of(actor.params, batch["observation"][0]))
    epsilon, mask, action = float(epsilon_of(algo, start())), batch["mask"][0], batch["action"][0]
    mixed = ((1 - epsilon) * np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) + epsilon / 4) * mask
    ratio = (mixed / mixed.sum(-1, keepdims=True))[np.arange(12), action] / np.exp(batch["log_prob"][0])
    close(metrics["kl"], np.mean(batch["weight"][0] * (ratio - 1 - np.log(ratio))), 1e-6)


def test_a_policy_that_has_moved_too_far_is_left_alone() -> None:
    """From one and a half times the target on."""
    batch = actor_batch(small(), np.random.default_rng(2), 12)
    actor = init_params(small()).actor
    divergence = float(updates()[1](actor, batch, start())[1]["kl"])
    for share, moves in ((1.01, True), (0.99, False)):
        algo = small(target_kl=share * divergence / 1.5)
        after, metrics = jax.jit(make_update(algo, "actor"))(actor, batch, start())
        assert bool(metrics["actor_moved"]) is moves
        changed = [np.any(np.asarray(a) != b) for a, b in zip(*map(jax.tree.leaves, (after, actor)), strict=True)]
        assert any(changed) is moves


def test_epsilon_schedule() -> None:
    algo, run = small(1, eps_max=0.5, eps_min=0.02, eps_anneal=0.5), 20_000  # missions
    missions = (1, 5_000, 10_000, 20_000)  # the current mission, counted from 1
    horizon = algo.spec.horizon

    def at(missions: int) -> Progress:
        return progress(env_steps=missions * horizon, total_env_steps=run * horizon)

    values = [epsilon_of(algo, at(mission - 1)) for mission in missions]
    close(values, [0.5 - 0.48e-4, 0.26, 0.02, 0.02], 1e-6)
    many = small(50, eps_anneal=0.5)
    assert float(jax.jit(many.epsilon)(at(0))) == float(jax.jit(small(1, eps_anneal=0.5).epsilon)(at(49)))


def test_a_dueling_critic_has_a_mean_of_its_value() -> None:
    algo = small(dueling=True)
    x = np.random.default_rng(1).normal(size=(7, 3)).astype(np.float32)
    both = jax.jit(lambda critic: (algo.networks["critic"].apply(critic, x), make_values(algo)(critic, x)))
    out, values = map(np.asarray, both(init_params(algo).critic.params))
    assert out.shape == (7, 5)
    close(values.mean(-1), out[:, 0], 1e-6)
    close(values[:, 0] - values[:, 1], out[:, 1] - out[:, 2], 1e-6)


# ---------------------------------------------------------------- training steps


def make_batch(algo: Coma) -> tuple[Trajectory, TimeStep]:
    """Made-up rows [T, B] and what follows them."""
    generator, envs = np.random.default_rng(5), algo.layout.num_envs
    lead = (algo.spec.horizon, envs)
    action = generator.integers(0, 4, (*lead, 2)).astype(np.int32)
    mask = generator.random((*lead, 2, 4)) < 0.5
    np.put_along_axis(mask, action[..., None], True, -1)
    extras = {"mask": mask, "log_prob": -generator.random((*lead, 2)).astype(np.float32)}
    last = dataclasses.replace(random_timestep(generator, (envs,), algo.spec), truncated=np.ones(envs, bool))
    return Trajectory(random_timestep(generator, lead, algo.spec), action, extras), last


def compile_learn(algo: Coma) -> Any:
    """The training step in one program."""
    return jax.jit(functools.partial(algo.learn, phase=algo.phases[0]))


def train_steps(
    algo: Coma, steps: int = 1, learn: Any = None, **counters: int
) -> tuple[list[ComaParameters], list[dict[str, Any]]]:
    """Parameters before, and after each of a few training steps on the same data, with their metrics."""
    learn = learn or compile_learn(algo)
    state, rows = AlgoState(init_params(algo), ()), make_batch(algo)
    params, metrics = [jax.tree.map(np.asarray, state.replicated)], []
    for step in range(steps):
        at = progress(**({"learn_calls": step, "episodes": step * algo.layout.num_envs} | counters))
        state, values = learn(state, *rows, jax.random.key(1 + step), at)
        params.append(jax.tree.map(np.asarray, state.replicated))
        metrics.append(jax.tree.map(np.asarray, values))
    return params, metrics


@pytest.fixture(scope="module")
def copying() -> tuple[Any, list[ComaParameters], list[dict[str, Any]]]:
    """A training step that copies every third target and first trains only the critic twice; the results of five."""
    algo = small(target_update_period=3, gamma=0.9, critic_warmup=7)
    learn = compile_learn(algo)
    return learn, *train_steps(algo, 5, learn)


def test_the_target_is_copied_every_few_training_steps(copying: Any) -> None:
    _, params, metrics = copying
    for step in range(5):
        before, after = params[step], params[step + 1]
        expected = before.critic.params if step % 3 == 0 else before.target
        same(after.target, expected)
    assert np.abs(metrics[1]["critic_loss"]).max() > 0
    assert np.any(flat(params[1].target) != flat(params[4].target))


def test_targets_are_built_before_the_copy(copying: Any) -> None:
    learn, (begin, *_), _ = copying
    rows = make_batch(small())
    params = dataclasses.replace(begin, target=jax.tree.map(np.zeros_like, begin.target))
    _, metrics = learn(AlgoState(params, ()), *rows, jax.random.key(1), start())
    reward = np.r_[np.asarray(rows[0].timestep.reward)[1:], np.asarray(rows[1].reward)[None]]
    expected, following = np.zeros_like(reward), np.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        following = expected[t] = reward[t] + 0.9 * 0.8 * following  # values of the old target are 0
    close(metrics["target_mean"], expected.mean(), 1e-5)


def test_the_soft_target_moves_by_tau_in_every_pass() -> None:
    params, _ = train_steps(small(tau=0.25, num_epochs=1))
    close(flat(params[1].target), 0.75 * flat(params[0].target) + 0.25 * flat(params[0].critic.params), 1e-7)
    other = dataclasses.replace(params[0], target=jax.tree.map(np.zeros_like, params[0].target))
    algo = small(tau=0.25, num_epochs=2, critic_lr=1e-12)  # the critic stays, so that both blends are known
    state, _ = compile_learn(algo)(AlgoState(other, ()), *make_batch(algo), jax.random.key(1), start())
    close(flat(state.replicated.target), (1 - 0.75**2) * flat(other.critic.params), 1e-6)


def test_critic_warmup_freezes_the_actor(copying: Any) -> None:
    _, params, metrics = copying
    assert metrics[4]["actor_loss"].shape == metrics[4]["critic_loss"].shape == (4,)  # all passes train both
    assert steps_of(params[5]) == [3 * 4, 5 * 4]
    kernels = {
        name: [getattr(x, name).params["params"]["head"]["out_kernel"] for x in params] for name in ("actor", "critic")
    }
    for step in range(2):
        same(params[step + 1].actor, params[0].actor)
    for step in range(3):
        assert np.any(kernels["critic"][step + 1] != kernels["critic"][step])
    assert np.any(kernels["actor"][3] != kernels["actor"][2])


def test_settings_without_effect_are_named() -> None:
    horizon = small().spec.horizon
    assert small(critic_warmup=9).warnings(10 * horizon) == []
    (sentence,) = small(critic_warmup=10).warnings(10 * horizon)
    assert "critic_warmup 10 leaves the actor untrained in a run of 10 episodes" in sentence
    (sentence,) = small(critic_warmup=0, entropy_weight=0.1, entropy_final=0.01, entropy_anneal=0).warnings(
        10 * horizon
    )
    assert "entropy_final 0.01 has no effect" in sentence
    annealed = {"entropy_weight": 0.1, "entropy_final": 0.01, "entropy_anneal": 0.5}
    assert small(critic_warmup=0, **annealed).warnings(10 * horizon) == []
    (sentence,) = small(critic_warmup=0, memory_size=64).warnings(10 * horizon)
    assert sentence == "memory_size 64 has no effect without memory: set --memory too"
    assert small(critic_warmup=0, memory="gru", memory_size=64).warnings(10 * horizon) == []


def test_learning_rates_fall_to_their_final_share() -> None:
    params, batch = init_params(small()), actor_batch(small(), np.random.default_rng(1), 12)
    (critic_update, actor_update), moved = updates(), {}
    assert small().final_lr_fraction == 0.2
    for fraction in (0.0, 0.5, 1.0):
        actor, _ = actor_update(params.actor, batch, progress(fraction=fraction))
        critic, _ = critic_update(params.critic, batch, progress(fraction=fraction))
        pairs = (actor, params.actor), (critic, params.critic)
        moved[fraction] = [flat(new.params) - flat(old.params) for new, old in pairs]
    for network in range(2):
        assert np.abs(moved[0.0][network]).max() == pytest.approx(1e-2, rel=1e-3)  # Adam's first step: the rate
        close(moved[0.5][network], 0.6 * moved[0.0][network], 1e-7)
        close(moved[1.0][network], 0.2 * moved[0.0][network], 1e-7)


def test_the_gradient_is_clipped_to_a_norm() -> None:
    batch = actor_batch(small(), np.random.default_rng(1), 12)
    norms = []
    clipped = jax.jit(lambda: small(max_grad_norm=0.01).init(jax.random.key(0), None).replicated)()
    for begin, settings in ((init_params(small()), {}), (clipped, {"max_grad_norm": 0.01})):
        new, metrics = updates(**settings)[0](begin.critic, batch, start())
        gradient = gradient_of(new, begin.critic)
        norms.append((float(metrics["critic_grad_norm"]), float(np.sqrt((gradient**2).sum()))))
    assert norms[0][0] == pytest.approx(norms[0][1], rel=1e-5) and norms[0][0] > 0.01
    assert norms[1] == (pytest.approx(norms[0][0], rel=1e-5), pytest.approx(0.01, rel=1e-5))


@pytest.mark.parametrize(("actor_epochs", "actor_updates"), by_day([(0, 6), (1, 2), (3, 6)], [(1, 2)]))
def test_the_last_passes_train_the_actor_too(actor_epochs: int, actor_updates: int) -> None:
    params, metrics = train_steps(small(num_epochs=3, actor_epochs=actor_epochs))
    assert metrics[0]["critic_loss"].shape == (6,) and metrics[0]["actor_loss"].shape == (actor_updates,)
    assert not np.any(metrics[0]["critic_loss"] == 0)
    assert steps_of(params[1]) == [actor_updates, 6]


def steps_of(params: ComaParameters) -> list[int]:
    """How often the actor and the critic were updated, as their optimizers count."""
    states = params.actor.opt_state, params.critic.opt_state
    return [int(next(s.count for s in state if hasattr(s, "count"))) for state in states]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow, id="masked"),
        pytest.param({"normalize_advantage": True, "clip_ratio": 0.3, "entropy_weight": 0.1}, id="scaled"),
    ],
)
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_chunks_give_the_same_gradients(settings: dict[str, Any], shards: int) -> None:
    check_chunks(settings, shards)


def test_chunks_give_the_same_gradients_of_the_original() -> None:
    check_chunks(ORIGINAL, 1)


def check_chunks(settings: dict[str, Any], shards: int) -> None:
    whole = small(layout={"shards": shards}, **settings)
    pieces = small(layout={"shards": shards, "learn_chunk": 4}, **settings)
    params = init_params(whole)
    batch = actor_batch(whole, np.random.default_rng(2), 24)
    batch = {name: x.reshape(shards, 24 // shards, *x.shape[2:]) for name, x in batch.items()}
    outcomes = []
    for algo in (whole, pieces):
        both = jax.jit(
            lambda params, *now, algo=algo: (
                make_update(algo, "critic")(params.critic, *now),
                make_update(algo, "actor")(params.actor, *now),
            )
        )
        (critic, losses), (actor, metrics) = both(params, batch, start())
        gradients = gradient_of(critic, params.critic), gradient_of(actor, params.actor)
        outcomes.append((gradients, losses, metrics))
    jax.tree.map(lambda a, b: close(a, b, 1e-6), *outcomes)
    jaxpr = str(jax.make_jaxpr(make_update(pieces, "critic"))(params.critic, batch, start()))
    assert "length=6" in jaxpr  # 24 samples by 4


def test_a_scaled_advantage_has_unit_deviation() -> None:
    algo, batch = small(normalize_advantage=True), actor_batch(small(), np.random.default_rng(2), 12)
    actor, epsilon = init_params(algo).actor, epsilon_of(algo, start())
    _, metrics = jax.jit(make_update(algo, "actor"))(actor, batch, start())
    weighted = np.float64(metrics["advantage_square"]) * 12 / 10, np.float64(metrics["advantage"]) * 12 / 10
    open_ = np.asarray(batch["weight"][0]) > 0

    @jax.jit
    def advantage_of(actor: Any, sample: dict[str, jax.Array]) -> jax.Array:
        logits = algo.networks["actor"].apply(actor, sample["observation"])
        policy = distributions.apply_action_mask(distributions.epsilon_mix(logits, epsilon), sample["mask"])
        return algo.compute_advantages(sample, policy)

    advantage = np.asarray(advantage_of(actor.params, {name: x[0] for name, x in batch.items()}), np.float64)
    close([np.mean(advantage[open_] ** 2), np.mean(advantage[open_])], weighted, 1e-5)
    scale = np.asarray(jax.jit(algo.batches.deviation)(np.float32(advantage)[None], batch["weight"]))
    assert scale.shape == (1, 12) and np.ptp(scale) == 0
    close(scale[0, 0], np.std(advantage[open_]), 1e-5)


def test_the_example_has_the_advantages_of_gae() -> None:
    """Sums of temporal differences, worked in NumPy from the critic's values of states."""
    path = Path(__file__).parents[1] / "examples" / "coma_gae.py"
    algo = small(kind=runpy.run_path(str(path))["GaeComa"], gamma=0.9, td_lambda=0.7)
    trajectory, last = make_batch(algo)
    params = init_params(algo)
    rows = prepare(algo)(params, trajectory, last, jax.random.key(1), start())
    values = np.asarray(jax.jit(make_values(algo))(params.critic.params, rows["critic_input"][0]))
    assert np.ptp(values, axis=-1).max() == 0 and np.ptp(values) > 0.01
    ours = algo.compute_advantages({"target": rows["target"][0], "values": values}, None)
    steps, envs, agents = trajectory.action.shape
    value = np.float64(values[:, 0]).reshape(envs, steps, agents).swapaxes(0, 1)
    seen = np.asarray(last.observation).reshape(-1, 3)
    following = np.float64(jax.jit(make_values(algo))(params.critic.params, seen)[:, 0]).reshape(envs, agents)
    reward = np.concatenate([trajectory.timestep.reward[1:], last.reward[None]])
    expected, advantage = np.zeros_like(value), 0.0
    for t in reversed(range(steps)):
        advantage = reward[t] + 0.9 * following - value[t] + 0.9 * 0.7 * advantage
        expected[t], following = advantage, value[t]
    close(np.asarray(ours).reshape(envs, steps, agents).swapaxes(0, 1), expected, 1e-5)


# ---------------------------------------------------------------- acting


def close_taken(mask_state: Any, action_mask: jax.Array, chosen: jax.Array, agent: Any) -> jax.Array:
    """Closes what earlier agents chose, unless nothing would be left."""
    closed = jnp.any((jnp.arange(4)[:, None] == chosen[None]) & (jnp.arange(3)[None] < agent), axis=1)
    mask = action_mask[agent] & ~closed
    return jnp.where(jnp.any(mask), mask, action_mask[agent])


CROWD = dataclasses.replace(VECTOR, num_agents=3, next_mask=close_taken)


@pytest.fixture(scope="module")
def draws() -> tuple[Coma, Any, TimeStep, Any, Any]:
    """4,000 copies of three agents, who act at random and greedily."""
    algo, generator, copies = small(spec=CROWD), np.random.default_rng(0), 4_000
    policy = jax.tree.map(lambda x: 3 * x, init_params(algo).actor.params)
    timestep = random_timestep(generator, (copies,), CROWD)
    mask = generator.random((copies, 3, 4)) < 0.5
    mask[..., 1] |= ~mask.any(-1)
    mask[:, 0] = [True, True, False, True]
    observation = np.array(timestep.observation)
    observation[:, 0] = 0.3
    timestep = dataclasses.replace(timestep, action_mask=mask, observation=observation)
    act = jax.jit(lambda keys, mode: algo.act(policy, (), timestep, keys, start(), mode), static_argnums=1)
    keys = jax.random.split(jax.random.key(4), copies)
    acted = [act(keys, mode) for mode in ("explore", "sample", "greedy")]
    return algo, policy, timestep, *jax.tree.map(np.asarray, acted)


def probabilities(algo: Coma, policy: Any, timestep: TimeStep, epsilon: float) -> np.ndarray:
    return np.asarray(mix(algo.networks["actor"], policy, timestep.observation, epsilon), np.float64)


@functools.partial(jax.jit, static_argnums=0)
def mix(net: Any, policy: Any, observation: jax.Array, epsilon: Any) -> jax.Array:
    logits = net.apply(policy, observation.reshape(-1, 3)).reshape(-1, 3, 4)
    return distributions.epsilon_mix(logits, epsilon)


@pytest.mark.parametrize("mode", ["explore", "sample", "greedy"])
def test_masked_actions_are_never_chosen(draws: Any, mode: str) -> None:
    algo, policy, timestep, *acted = draws
    action, _, extras = acted[("explore", "sample", "greedy").index(mode)]
    mixed = probabilities(algo, policy, timestep, float(epsilon_of(algo, start())) if mode == "explore" else 0.0)
    open_, action, fell_back = np.asarray(timestep.action_mask), np.asarray(action), 0
    masks, pi = np.zeros(mixed.shape, bool), np.zeros(mixed.shape)
    for copy in range(len(action)):
        for agent in range(3):
            mask = open_[copy, agent] & ~np.isin(np.arange(4), action[copy, :agent])
            fell_back += not mask.any()
            mask = mask if mask.any() else open_[copy, agent]
            masks[copy, agent] = mask
            pi[copy, agent] = mixed[copy, agent] * mask / (mixed[copy, agent] * mask).sum()
    np.testing.assert_array_equal(extras["mask"], masks)
    assert np.take_along_axis(masks, action[..., None], -1).all()
    chosen = np.take_along_axis(pi, action[..., None], -1)[..., 0]
    np.testing.assert_allclose(extras["log_prob"], np.log(chosen), rtol=0, atol=1e-4)
    if mode == "greedy":
        np.testing.assert_allclose(chosen, pi.max(-1), rtol=1e-5)
    assert fell_back > 50 and action.shape == (4_000, 3) and action.dtype == np.int32


def test_actions_are_drawn_in_proportion(draws: Any) -> None:
    algo, policy, timestep, explored, _, _ = draws
    pi = probabilities(algo, policy, timestep, float(epsilon_of(algo, start())))[0, 0] * [1, 1, 0, 1]
    pi /= pi.sum()  # agent 0 sees the same everywhere
    shares = np.bincount(np.asarray(explored[0])[:, 0], minlength=4) / 4_000
    assert np.all(np.abs(shares - pi) < 4 * np.sqrt(pi * (1 - pi) / 4_000) + 1e-9)
    assert np.ptp(pi[[0, 1, 3]]) > 0.02


def test_copies_act_by_their_own_keys(draws: Any) -> None:
    algo, policy, timestep, explored, _, _ = draws
    some = np.array([5, 17, 1203])
    part = jax.tree.map(lambda x: x[some], timestep)

    @jax.jit
    def act(key: jax.Array) -> Any:
        return algo.act(policy, (), part, jax.random.split(key, 4_000)[some], start(), "explore")

    alone = act(jax.random.key(4))
    same(alone[0], explored[0][some])


def test_without_a_mask_every_action_is_open() -> None:
    algo = small()
    timestep = dataclasses.replace(random_timestep(np.random.default_rng(0), (200,), VECTOR), action_mask=None)
    act = jax.jit(lambda keys: algo.act(init_params(algo).actor.params, (), timestep, keys, start(), "explore"))
    action, _, extras = act(jax.random.split(jax.random.key(0), 200))
    assert extras["mask"].shape == (200, 2, 4) and bool(extras["mask"].all())
    assert set(np.ravel(action)) == {0, 1, 2, 3}


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"actor_lr": 0.0}, "actor_lr must lie between 1e-12 and 10, not 0"),
        ({"clip_ratio": -1.0}, "clip_ratio must lie between 0 and"),
        ({"gamma": 1.5}, "gamma must lie between 0 and 1, not 1.5"),
        ({"actor_epochs": 9}, "actor_epochs 9 exceeds num_epochs 2: lower it"),
        (ORIGINAL | {"clip_ratio": 0.1}, "clip_ratio does not apply to coma_original"),
        (ORIGINAL | {"target_kl": 0.1}, "target_kl does not apply to coma_original"),
        (ORIGINAL | {"advantage": "return"}, "advantage does not apply to coma_original"),
        (ORIGINAL | {"normalize_advantage": True}, "normalize_advantage does not apply to coma_original"),
        (ORIGINAL | {"spec": VECTOR}, "coma_original needs episodes that all have the same length"),
        (
            {"spec": dataclasses.replace(VECTOR, action=Box((2,)))},
            "coma needs discrete actions, 'vector' has continuous",
        ),
        (
            {"spec": dataclasses.replace(VECTOR, critic_input=None)},
            "coma needs a centralised observation, but 'vector' defines no critic_input",
        ),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        small(**settings)


def test_one_sample_has_no_deviation_to_scale_by() -> None:
    """Issue 54: a minibatch of one is refused; where one row of several counts, its advantage stays as it is."""
    with pytest.raises(ValueError, match=r"one sample, .* raise minibatch_size or num_envs, or give --norm"):
        small(normalize_advantage=True, minibatch_size=1)
    assert small(normalize_advantage=True, minibatch_size=2).batches.size == 2
    rng = np.random.default_rng(2)
    batch = actor_batch(small(), rng, 12) | {"weight": np.float32([[12.0] + [0.0] * 11])}
    norms = [
        float(jax.jit(make_update(algo, "actor"))(init_params(algo).actor, batch, start())[1]["actor_grad_norm"])
        for algo in (small(normalize_advantage=True), small())
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[1] > 0


def test_an_episode_brings_as_many_updates_for_any_number_of_environments() -> None:
    for num_envs, shards in ((6, 1), (48, 8), (600, 8)):
        algo = small(num_envs, layout={"shards": shards}, minibatch_size=40)
        assert algo.phases[0].updates == algo.num_epochs * (num_envs * 10 // 40)
        assert algo.batches.size * shards == 40
    lone = small(2, minibatch_size=640)  # fewer transitions than one minibatch
    assert (lone.batches.per_epoch, lone.batches.size) == (1, 20)


def test_minibatches_of_whole_missions() -> None:
    assert small(7).batches.size == 35 and small(8, layout={"shards": 2}).batches.size == 20
    assert small().phases == (Phase("train", 5, 4, restart=True),)


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
