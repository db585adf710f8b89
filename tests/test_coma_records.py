"""`coma_original` against a training step that was recorded with dmar-bonn/ipp-marl, and its tables of targets."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from helpers import golden
from helpers.coma import close, gradient_of, make_update, make_values, prepare, progress, unflatten

from bench.parity.learner import image_spec
from envs_jax import TimeStep
from envs_jax.progress import Progress
from jaxrl.algos.base import Trajectory
from jaxrl.algos.coma_original import ComaOriginal, OriginalParameters, ipp_marl_targets
from jaxrl.nn import distributions
from jaxrl.rl.data_parallel import DataParallel

TD, VALUE, NORM = 1e-6, 4e-7, 2e-5  # tolerances; 4e-7, 1.5e-7 and 1e-5 were seen between two float32 systems
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


def test_weights_and_epsilon_of_the_records(recorded: Recorded) -> None:
    """Exploration is as in the last mission of the training step."""
    params = recorded.params
    networks = {"actor": params.actor.params, "critic": params.critic.params, "target": params.first_target}
    for label, tree in networks.items():
        for row, tensor in to_torch(tree).items():
            close([tensor.sum(), (tensor**2).sum()], recorded.arrays[f"{label}_param_summary_init"][row], 1e-9)
    close(recorded.algo.epsilon(recorded.progress), recorded.arrays["eps"], 1e-7)


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


def test_recorded_targets(recorded: Recorded) -> None:
    close(recorded.data["target"][0].reshape(-1, AGENTS), recorded.arrays["td_target"], TD)
    np.testing.assert_array_equal(recorded.data["weight"], 1.0)


@pytest.mark.parametrize(("source", "cases"), [("own", 1), ("recorded", 4)])
def test_recorded_target_tables(source: str, cases: int) -> None:
    arrays = golden.load("coverage_missions", source)
    compute_targets = jax.jit(ipp_marl_targets, static_argnums=(3, 4, 5))
    for case in range(cases):
        names = ("gamma_lambda", "reward", "done", "q", "target", "return")
        table = {name: arrays[f"td{case}_{name}"] for name in names}
        gamma, lambda_ = (float(x) for x in table["gamma_lambda"])
        reward, done, q = np.float32(table["reward"]), table["done"].astype(bool), np.float32(table["q"])
        target, full = compute_targets(reward, done, q, gamma, lambda_, len(reward))
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


def test_recorded_parameters_after_five_adam_steps(recorded: Recorded) -> None:
    for name in ("actor", "critic"):
        for row, tensor in to_torch(getattr(recorded.training["params"], name).params).items():
            close(tensor.ravel()[:6], recorded.arrays[f"{name}_param_heads_after"][row], VALUE)
            summary = [tensor.sum(), (tensor**2).sum()]
            close(summary, recorded.arrays[f"{name}_param_summary_after"][row], VALUE + 1e-9 * tensor.size)
