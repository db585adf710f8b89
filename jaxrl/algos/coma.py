"""COMA: one shared actor, one centralised critic with a value per own action, counterfactual advantages.

Foerster et al. 2018, "Counterfactual Multi-Agent Policy Gradients" (arXiv 1705.08926), in the form that Westheider,
Rückin and Popović 2023 (arXiv 2303.01150) use for multi-UAV mapping; `coma_original` computes what their repository
does. In the order of the paper: losses; settings; a training step with its targets, the critic's update, the
advantage, the actor's update. Networks, acting and sizes come last.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array, Discrete, EnvSpec, TimeStep, pytree
from envs_jax.progress import Progress, total
from jaxrl.algos import team
from jaxrl.algos.base import (
    RATE,
    UNIT,
    Algorithm,
    AlgoState,
    Learner,
    Mode,
    Phase,
    Trajectory,
    is_used,
    next_timesteps,
    setting,
)
from jaxrl.algos.episodes import Minibatches, episodes_for, pick
from jaxrl.common.shapes import Float32, Int32, assert_equal_shape
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, optimizers
from jaxrl.nn.distributions import apply_action_mask, epsilon_mix, select_action_value
from jaxrl.nn.networks import activation_bytes
from jaxrl.nn.packed import Packed
from jaxrl.nn.precision import stored_dtype
from jaxrl.rl import returns

Samples = Float32[Array, "N"]


def critic_loss(
    values: Float32[Array, "N n"], action: Int32[Array, "N"], target: Samples, weight: Samples
) -> Float32[Array, ""]:
    """Mean over samples of (Q(s)[a] - y)^2."""
    assert_equal_shape([action, target, weight])
    return jnp.mean(weight * jnp.square(select_action_value(values, action) - target))


def counterfactual_baseline(values: Float32[Array, "N n"], action_probs: Float32[Array, "N n"]) -> Float32[Array, "N"]:
    """Baseline sum_a pi(a) Q(a) (arXiv 1705.08926, equation 4). The advantage is Q(a) - b."""
    assert_equal_shape([values, action_probs])
    return jnp.sum(action_probs * values, axis=-1)


def policy_gradient_loss(
    log_prob: Samples, behaviour_log_prob: Samples, advantage: Samples, weight: Samples, clip_ratio: float
) -> Float32[Array, ""]:
    """- mean of A log pi(a), or with `clip_ratio` > 0 the clipped surrogate (arXiv 1707.06347, equation 7).

    The ratio is taken to the policy that chose the action.
    """
    assert_equal_shape([log_prob, behaviour_log_prob, advantage, weight])
    if clip_ratio == 0:
        return -jnp.mean(weight * advantage * log_prob)
    ratio = jnp.exp(log_prob - behaviour_log_prob)
    clipped = jnp.clip(ratio, 1 - clip_ratio, 1 + clip_ratio)
    return -jnp.mean(weight * jnp.minimum(ratio * advantage, clipped * advantage))


def divergence(log_prob: Samples, behaviour_log_prob: Samples, weight: Samples) -> Float32[Array, ""]:
    """Divergence of the current policy from the behaviour policy: mean of r - 1 - log r, at least 0, in nats.

    With r = pi(a) / behaviour(a), its expectation is KL(behaviour || pi).
    """
    assert_equal_shape([log_prob, behaviour_log_prob, weight])
    log_ratio = log_prob - behaviour_log_prob
    return jnp.mean(weight * (jnp.expm1(log_ratio) - log_ratio))


def policy_metrics(advantage: Samples, log_prob: Samples, weight: Samples) -> dict[str, Float32[Array, ""]]:
    """Means over samples."""
    assert_equal_shape([advantage, log_prob, weight])
    return {
        "advantage": jnp.mean(weight * advantage),
        "advantage_square": jnp.mean(weight * jnp.square(advantage)),
        "log_prob": jnp.mean(weight * log_prob),
    }


@pytree
class ComaParameters:
    """Parameters and optimizers, the same on every device.

    Attributes:
        actor, critic: Learners.
        target: float32[P], the target critic.
    """

    actor: Learner
    critic: Learner
    target: Array


@dataclasses.dataclass(frozen=True)
class Coma(Algorithm):
    """Counterfactual multi-agent policy gradients on whole episodes."""

    parts: ClassVar[tuple[str, ...]] = ("actor", "critic")
    traced: ClassVar[tuple[str, ...]] = (
        "gamma", "td_lambda", "actor_lr", "critic_lr", "final_lr_fraction", "eps_max", "eps_min", "entropy_weight",
        "entropy_final",
    )  # fmt: skip

    batch_transitions: int = setting(
        3000,
        "agent transitions per training step; sets num_envs, unless given: whole episodes, whose surplus "
        "transitions are dropped in each epoch",
        between=(1, 1e9),
    )
    num_minibatches: int = setting(5, "minibatches per epoch", between=(1, 1e6))
    num_epochs: int = setting(5, "epochs (passes over the data) per training step", between=(1, 10_000))
    actor_epochs: int = setting(0, "epochs that also train the actor (the last ones); 0 = all", between=(0, 10_000))
    gamma: float = setting(0.99, "discount", between=UNIT)
    td_lambda: float = setting(0.8, "lambda of the TD(lambda) targets", between=UNIT)
    actor_lr: float = setting(1e-5, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(1e-4, "learning rate of the critic (Adam)", between=RATE)
    adam_epsilon: float = setting(1e-8, "Adam's epsilon", between=(1e-30, 1))
    max_grad_norm: float = setting(0.0, "clip gradients to this global norm; 0 = never", between=(0, 1e9))
    final_lr_fraction: float = setting(
        1.0, "learning rates fall linearly to this fraction of their initial value at the end of the run", between=UNIT
    )
    target_update_period: int = setting(
        10, "training steps between copies of the critic to the target network", between=(1, 1e9)
    )
    tau: float = setting(
        0.0, "rate of a soft target update per epoch, instead of target_update_period; 0 = hard copies", between=UNIT
    )
    eps_max: float = setting(0.5, "initial exploration (probability of a uniform action)", between=UNIT)
    eps_min: float = setting(0.02, "exploration after eps_anneal episodes", between=UNIT)
    eps_anneal: int = setting(10_000, "episodes over which exploration falls", between=(1, 1e12))
    dueling: bool = setting(False, "critic = value + mean-free action values (arXiv 1511.06581)")
    clip_ratio: float = setting(
        0.0, "clip the importance ratio (PPO, arXiv 1707.06347); 0 = no ratio", between=(0, 1e6)
    )
    target_kl: float = setting(
        0.0,
        "skip actor updates on minibatches whose KL divergence from the acting policy exceeds 1.5 times this (nats), "
        "where implementations of PPO stop; 0 = never",
        between=(0, 1e6),
    )
    entropy_weight: float = setting(
        0.0, "entropy bonus of the masked policy without exploration (arXiv 1602.01783)", between=(0, 1e6)
    )
    entropy_final: float = setting(0.0, "entropy bonus after entropy_anneal episodes", between=(0, 1e6))
    entropy_anneal: int = setting(0, "episodes over which the entropy bonus falls; 0 = constant", between=(0, 1e12))
    critic_warmup: int = setting(0, "training steps at the start that train only the critic", between=(0, 1e9))
    advantage: Literal["critic", "return"] = setting(
        "critic", "critic: Q(a) - baseline (COMA); return: TD(lambda) target - baseline (arXiv 1506.02438)"
    )
    scale_advantage: bool = setting(False, "divide advantages by their standard deviation over the minibatch")
    hidden_size: int = setting(256, "channels of the convolutions and units of the dense layers", between=(1, 2**14))
    depth: int = setting(
        1, "hidden dense layers after the convolutions (or of the whole network for vectors)", between=(0, 100)
    )
    initializer: Literal["torch", "he"] = setting("torch", "torch: PyTorch's default; he: He normal, small last layer")
    convolution: Literal["auto", "conv", "dense", "patches"] = setting(
        "auto", "convolution method: that of the backend, or matrix products (CPU)"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.spec.action, Discrete):
            raise ValueError(f"coma needs discrete actions, '{self.spec.name}' has continuous ones: use another algo")
        if self.spec.critic_input is None or self.spec.critic_input_spec is None:
            raise ValueError(f"coma needs a centralised observation, but '{self.spec.name}' defines no critic_input")
        super().__post_init__()
        if self.actor_epochs > self.num_epochs:
            raise ValueError(f"actor_epochs {self.actor_epochs} exceeds num_epochs {self.num_epochs}: lower it")
        if self.batches.size < 1:
            raise ValueError(
                f"num_minibatches {self.num_minibatches} exceeds the {self.batches.samples} samples of a logical "
                "shard: lower it or raise num_envs"
            )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return one phase: roll out whole episodes, then learn from them and discard them."""
        updates = self.num_epochs * self.num_minibatches
        return (Phase("train", self.spec.horizon, updates, restart=True),)

    # A training step

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: TimeStep | None,
        key: Key,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, dict[str, Array]]:
        """Compute targets, then run epochs over minibatches; the first epochs may train the critic only."""
        assert trajectory is not None and last_timestep is not None
        params, (key_last, key_shuffle) = state.replicated, jax.random.split(key)
        data = self.data(params, trajectory, last_timestep, key_last, progress)
        if self.tau == 0:
            copy = progress.learn_calls[1] % self.target_update_period == 0
            params = dataclasses.replace(params, target=jnp.where(copy, params.critic.params, params.target))
        metrics: dict[str, list[Array]] = {}
        critic_epochs = self.num_epochs - (self.actor_epochs or self.num_epochs)
        for epochs, train_actor in ((range(critic_epochs), False), (range(critic_epochs, self.num_epochs), True)):
            if epochs:

                def one(params: ComaParameters, epoch: Array, train_actor: bool = train_actor) -> Any:
                    return self.epoch(params, data, jax.random.fold_in(key_shuffle, epoch), progress, train_actor)

                params, values = jax.lax.scan(one, params, jnp.array(epochs))
                for name, value in values.items():
                    metrics.setdefault(name, []).append(value.reshape(-1))
        merged = {name: jnp.concatenate(parts) for name, parts in metrics.items()}
        return AlgoState(params, ()), merged | {"target_mean": self.layout.sample_mean(data["target"])}

    def data(
        self, params: ComaParameters, trajectory: Trajectory, last: TimeStep, key: Key, progress: Progress
    ) -> dict[str, Array]:
        """Return all transitions of all agents as leaves [S local, samples, ...], with "target" and "weight"."""
        layout, batches = self.layout, self.batches
        inputs = layout.map_shards(
            lambda rows: jax.vmap(jax.vmap(self._critic_input))(*rows), (trajectory.timestep, trajectory.action), axis=1
        )
        inputs = inputs.astype(stored_dtype(self.spec.critic_input_spec, trajectory.timestep.observation.dtype))
        taken = {"critic_input": batches.flatten(inputs), "action": batches.flatten(trajectory.action)}
        value = layout.apply(
            lambda sample: select_action_value(self.values(params.target, sample["critic_input"]), sample["action"]),
            taken,
        )
        last_value = self.last_value(params, last, key, progress)
        target = self.targets(trajectory, last, batches.unflatten(value), last_value)
        valid = jnp.broadcast_to(~trajectory.timestep.done[..., None], trajectory.action.shape).astype(jnp.float32)
        share = layout.sample_mean(batches.flatten(valid))
        rows = {"observation": trajectory.timestep.observation, **trajectory.extras, "target": target}
        rows["weight"] = valid / jnp.maximum(share, 1e-8)
        return taken | {name: batches.flatten(x) for name, x in rows.items()}

    def last_value(self, params: ComaParameters, last: TimeStep, key: Key, progress: Progress) -> Array:
        """Return the target value float32[B, A] of an action sampled in the time step after the trajectory."""
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, self.layout.env_indices())

        def of_rows(rows: tuple[TimeStep, Array]) -> Array:
            timestep, keys = rows
            action, _, _ = self.act(params.actor.params, (), timestep, keys, progress, "explore")
            inputs = jax.vmap(self._critic_input)(timestep, action)
            values = self.values(params.target, inputs.reshape(-1, *inputs.shape[2:]))
            return select_action_value(values, action.reshape(-1)).reshape(action.shape)

        value = self.layout.apply(of_rows, self.layout.split((last, keys)), per_row=self.spec.num_agents)
        return value.reshape(-1, self.spec.num_agents)

    def targets(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """TD(lambda) targets float32[T, B, A] from target values of the taken actions, [T, B, A] and last [B, A]."""

        def of_envs(rows: tuple[TimeStep, Array]) -> Array:
            following, next_value = rows
            over_agents = lambda x: jnp.broadcast_to(x[..., None], next_value.shape)  # noqa: E731
            discount = self.gamma * over_agents(1.0 - following.terminated.astype(jnp.float32))
            lambda_t = self.td_lambda * over_agents(1.0 - following.done.astype(jnp.float32))
            return returns.lambda_returns(following.reward, discount, next_value, lambda_t)

        next_value = jnp.concatenate([value[1:], last_value[None]])
        return self.layout.map_shards(of_envs, (next_timesteps(trajectory, last), next_value), axis=1)

    def epoch(
        self, params: ComaParameters, data: dict[str, Array], key: Key, progress: Progress, train_actor: bool
    ) -> tuple[ComaParameters, dict[str, Array]]:
        """Train the critic on all minibatches of one shuffle, then the actor on the same minibatches."""
        minibatches = self.batches.shuffled(key)
        if self.tau:
            params = dataclasses.replace(params, target=self.soft_update(params.target, params.critic.params, self.tau))

        def critic_step(critic: Learner, indices: Array) -> tuple[Learner, Any]:
            batch = pick(data, indices, "critic_input", "action", "target", "weight")
            critic, metrics = self.critic_update(critic, batch, progress)
            of_batch = lambda sample: self.values(critic.params, sample["critic_input"])  # noqa: E731
            return critic, (metrics, self.layout.apply(of_batch, batch) if train_actor else ())

        def actor_step(actor: Learner, row: tuple[Array, Array]) -> tuple[Learner, dict[str, Array]]:
            indices, values = row
            batch = pick(data, indices, "observation", "action", "mask", "log_prob", "weight", "target")
            return self.actor_update(actor, batch | {"values": values}, progress)

        critic, (metrics, values) = jax.lax.scan(critic_step, params.critic, minibatches)
        params = dataclasses.replace(params, critic=critic)
        if not train_actor:
            return params, metrics
        actor, of_actor = jax.lax.scan(actor_step, params.actor, (minibatches, values))
        return dataclasses.replace(params, actor=actor), metrics | of_actor

    def critic_update(
        self, critic: Learner, batch: dict[str, Array], progress: Progress
    ) -> tuple[Learner, dict[str, Array]]:
        """Take a gradient step on the critic's loss."""

        def loss(critic: Array, sample: dict[str, Array]) -> tuple[Array, Any]:
            values = self.values(critic, sample["critic_input"])
            return critic_loss(values, sample["action"], sample["target"], sample["weight"]), ()

        gradient, (value, _) = self.layout.gradient(loss, critic.params, batch)
        critic, norm = self.step("critic", critic, gradient, progress)
        return critic, {"critic_loss": value, "critic_grad_norm": norm}

    def actor_update(
        self, actor: Learner, batch: dict[str, Array], progress: Progress
    ) -> tuple[Learner, dict[str, Array]]:
        """Take a gradient step on the policy loss minus the entropy bonus, unless the actor is frozen."""
        if self.scale_advantage:
            batch = batch | {"scale": self._advantage_scale(actor, batch, progress)}

        def loss(actor: Array, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            logits = self.networks["actor"].apply(actor, sample["observation"])
            value, means = self.policy_loss(logits, self.epsilon(progress), sample)
            unmixed = jax.nn.softmax(jnp.where(sample["mask"], logits, -jnp.inf))
            entropy = jnp.mean(sample["weight"] * distributions.entropy(unmixed))
            if is_used(self.entropy_weight) or is_used(self.entropy_final):
                value = value - self.entropy_bonus(progress) * entropy
            return value, means | {"policy_entropy": entropy}

        gradient, (value, means) = self.layout.gradient(loss, actor.params, batch)
        active = total(progress.learn_calls) >= self.critic_warmup if self.critic_warmup else jnp.bool_(True)
        if self.target_kl:
            active &= means["kl"] <= 1.5 * self.target_kl
            means["actor_moved"] = active.astype(jnp.float32)
        actor, norm = self.step("actor", actor, gradient, progress, active)
        return actor, {"actor_loss": value, "actor_grad_norm": norm, **means}

    def policy_loss(self, logits: Array, epsilon: Array, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """Return the policy loss and its metrics; logits [N, n]."""
        action, weight = sample["action"], sample["weight"]
        action_probs = apply_action_mask(epsilon_mix(logits, epsilon), sample["mask"])
        advantage = self.advantages(sample, jax.lax.stop_gradient(action_probs))
        scaled = advantage / sample["scale"] if self.scale_advantage else advantage
        log_prob = jnp.log(jnp.maximum(select_action_value(action_probs, action), 1e-8))
        value = policy_gradient_loss(log_prob, sample["log_prob"], scaled, weight, self.clip_ratio)
        kl = divergence(log_prob, sample["log_prob"], weight)
        return value, policy_metrics(advantage, log_prob, weight) | {"kl": kl}

    def advantages(self, sample: dict[str, Array], action_probs: Array) -> Array:
        """Return the action's value, by the critic or by its return, minus the counterfactual baseline."""
        worth = sample["target"]
        if self.advantage == "critic":
            worth = select_action_value(sample["values"], sample["action"])
        return worth - counterfactual_baseline(sample["values"], action_probs)

    def _advantage_scale(self, actor: Learner, batch: dict[str, Array], progress: Progress) -> Array:
        """Return the standard deviation of the advantages over the whole minibatch, float32[S local, samples]."""

        def advantages(sample: dict[str, Array]) -> Array:
            logits = self.networks["actor"].apply(actor.params, sample["observation"])
            return self.advantages(
                sample, apply_action_mask(epsilon_mix(logits, self.epsilon(progress)), sample["mask"])
            )

        advantage = self.layout.apply(advantages, batch)
        mean = self.layout.sample_mean(batch["weight"] * advantage)
        variance = self.layout.sample_mean(batch["weight"] * jnp.square(advantage - mean))
        return jnp.full_like(advantage, jnp.maximum(jnp.sqrt(variance), 1e-6))

    # Schedules

    def learning_rate(self, part: str, progress: Progress) -> Array:
        """Return the rate of a part's setting, which falls linearly over the run."""
        return getattr(self, f"{part}_lr") * (1.0 - (1.0 - self.final_lr_fraction) * progress.fraction)

    def epsilon(self, progress: Progress) -> Array:
        """Return epsilon of the training step: that of its last episode, counted from 1."""
        episode = total(progress.episodes) + self.layout.num_envs
        return self.eps_max - (self.eps_max - self.eps_min) * jnp.minimum(episode / self.eps_anneal, 1.0)

    def entropy_bonus(self, progress: Progress) -> Array:
        """Return the weight of the entropy bonus after the episodes so far."""
        share = jnp.minimum(total(progress.episodes) / self.entropy_anneal, 1.0) if self.entropy_anneal else 0.0
        return jnp.float32(self.entropy_weight + (self.entropy_final - self.entropy_weight) * share)

    def schedules(self, progress: Progress) -> dict[str, Array]:
        return {"epsilon": self.epsilon(progress)}

    # Acting and networks

    def act(
        self, policy: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Compute the logits of all agents at once, then mask and sample agent after agent (or greedily)."""
        agents = timestep.observation.shape[:2]
        flat = timestep.observation.reshape(-1, *timestep.observation.shape[2:])
        logits = self.networks["actor"].apply(policy, flat).reshape(*agents, -1)
        action_probs = epsilon_mix(logits, self.epsilon(progress) if mode == "explore" else 0.0)
        action, extras = team.sample_sequentially(self.spec, timestep, action_probs, keys, greedy=mode == "greedy")
        return action, carry, extras

    @functools.cached_property
    def networks(self) -> dict[str, Packed]:
        """Return the actor, [N, ...] -> logits float32[N, n], and the critic, -> [N, n], or [N, n + 1] if dueling."""

        def made(part: str, outputs: int, box: Any) -> Packed:
            standard = lambda outputs: self._standard(outputs, box.shape)  # noqa: E731
            return self.make_network(part, outputs, standard, (1, *box.shape))

        actions: Any = self.spec.action
        critic = made("critic", actions.n + self.dueling, self.spec.critic_input_spec)
        return {"actor": made("actor", actions.n, self.spec.observation), "critic": critic}

    def _standard(self, outputs: int, shape: tuple[int, ...]) -> Any:
        sizes = self.hidden_size, self.depth, self.initializer, self.convolution
        return team.network(outputs, shape, *sizes, self.layout.compute_dtype)

    def values(self, critic: Params, critic_input: Array) -> Array:
        """Return Q(s, .) float32[N, n] of critic inputs [N, ...]."""
        out = self.networks["critic"].apply(critic, critic_input)
        if not self.dueling:
            return out
        advantages = out[:, 1:]
        return out[:, :1] + advantages - advantages.mean(-1, keepdims=True)

    def _critic_input(self, timestep: TimeStep, action: Array) -> Array:
        """Return the environment's centralised critic input of one environment, [A, ...]."""
        assert self.spec.critic_input is not None
        return self.spec.critic_input(timestep, action)

    def optimizer(self, part: str) -> optax.GradientTransformation:
        """Return Adam, with clipping where `max_grad_norm` asks for it."""
        del part
        return optimizers.adam(self.adam_epsilon, self.max_grad_norm)

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks, or those of `inputs` ({"actor", "critic"}) with fresh optimizers."""
        fresh = self.fresh_networks(key, inputs)
        actor, critic = (self.learner(part, fresh[part]) for part in ("actor", "critic"))
        return AlgoState(ComaParameters(actor, critic, target=jnp.copy(critic.params)), sharded=())

    # Sizes

    @property
    def batches(self) -> Minibatches:
        """Return the minibatches of a training step."""
        return Minibatches(self.spec, self.layout, self.batch_transitions, self.num_minibatches)

    @classmethod
    def default_num_envs(cls, spec: EnvSpec, settings: dict[str, Any]) -> int:
        """Return the number of whole episodes that a training step needs."""
        return episodes_for(settings.get("batch_transitions", cls.batch_transitions), spec)

    def largest_chunk(self) -> int:
        return self.batches.size

    def sample_bytes(self) -> int:
        """Return the bytes of activations, gradients and convolution patches (matrix-product methods) of one sample."""
        shape: Any = self.networks["critic"].inputs[0][1:]
        return activation_bytes(self._standard(1, shape), shape)

    def data_bytes(self) -> int:
        """Return the bytes of the critic inputs of all transitions, and the shuffled copy of one minibatch."""
        samples, actions = self.batches.samples * self.layout.local_shards, self.spec.action
        assert isinstance(actions, Discrete)
        row = math.prod(self.networks["critic"].inputs[0]) * 2 + 16 * actions.n
        return samples * row + samples // self.num_minibatches * row

    def summary(self) -> list[str]:
        return self.batches.summary(self.num_epochs)
