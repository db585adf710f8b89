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

from envs_jax.base import Array, Box, Discrete, EnvSpec, TimeStep, pytree
from envs_jax.progress import Progress, total
from jaxrl.algos import team
from jaxrl.algos.base import RATE, UNIT, Algorithm, AlgoState, Mode, Phase, Trajectory, next_timesteps, setting
from jaxrl.algos.episodes import Minibatches, episodes_for, pick
from jaxrl.algos.team import ActorCritic
from jaxrl.common.shapes import Float32, Int32, assert_equal_shape
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, optimizers
from jaxrl.nn.networks import activation_bytes
from jaxrl.nn.precision import stored_dtype
from jaxrl.rl import returns

Samples = Float32[Array, "N"]


def critic_loss(
    values: Float32[Array, "N n"], action: Int32[Array, "N"], target: Samples, weight: Samples
) -> Float32[Array, ""]:
    """Mean over samples of (Q(s)[a] - y)^2."""
    assert_equal_shape([action, target, weight])
    return jnp.mean(weight * jnp.square(distributions.select_action_value(values, action) - target))


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
    """Parameters and optimizers, the same on every device."""

    actor: Params
    critic: Params
    target: Params
    actor_optimizer: Any
    critic_optimizer: Any


@dataclasses.dataclass(frozen=True)
class Coma(Algorithm):
    """Counterfactual multi-agent policy gradients on whole episodes."""

    parts: ClassVar[tuple[str, ...]] = ("actor", "critic")

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
        """Compute targets, then run epochs over minibatches, critic first; the first may train the critic only."""
        assert trajectory is not None and last_timestep is not None
        params = state.replicated
        key_last, key_shuffle = jax.random.split(key)
        data = self._data(params, trajectory, last_timestep, key_last, progress)
        if self.tau == 0:
            training_step = progress.learn_calls[1]
            copy = training_step % self.target_update_period == 0
            target = jax.tree.map(lambda new, old: jnp.where(copy, new, old), params.critic, params.target)
            params = dataclasses.replace(params, target=target)
        metrics: list[dict[str, Array]] = []
        actor_epochs = self.actor_epochs or self.num_epochs
        critic_passes = self.num_epochs - actor_epochs
        for first, number, train_actor in ((0, critic_passes, False), (critic_passes, actor_epochs, True)):
            if number:

                def one_pass(params: ComaParameters, index: Array, train_actor: bool = train_actor) -> Any:
                    return self._pass(params, data, jax.random.fold_in(key_shuffle, index), progress, train_actor)

                params, values = jax.lax.scan(one_pass, params, first + jnp.arange(number))
                metrics.append({name: value.reshape(-1) for name, value in values.items()})
        merged = {name: jnp.concatenate([part[name] for part in metrics if name in part]) for name in metrics[-1]}
        merged["epsilon"] = self.layout.deterministic(self.epsilon)(progress)
        merged["target_mean"] = self.layout.sample_mean(data["target"])
        return AlgoState(params, state.sharded), merged

    def _data(
        self, params: ComaParameters, trajectory: Trajectory, last: TimeStep, key: Key, progress: Progress
    ) -> dict[str, Array]:
        """Return all transitions of all agents as leaves [S local, samples, ...], targets included."""
        layout, batches, target_critic = self.layout, self.batches, params.target
        over_batch = jax.vmap(jax.vmap(self._critic_input))
        seen = (trajectory.timestep, trajectory.action)
        critic_input = layout.map_shards(lambda rows: over_batch(*rows), seen, axis=1)
        critic_input = critic_input.astype(stored_dtype(self._critic_box, trajectory.timestep.observation.dtype))

        def value_of(sample: dict[str, Array]) -> Array:
            return distributions.select_action_value(
                self.networks.values(target_critic, sample["critic_input"]), sample["action"]
            )

        flat = {"critic_input": batches.flatten(critic_input), "action": batches.flatten(trajectory.action)}
        value = batches.unflatten(layout.apply(value_of, flat))
        target = self._targets(trajectory, last, value, self._last_value(params, last, key, progress))
        valid = jnp.broadcast_to(~trajectory.timestep.done[..., None], trajectory.action.shape).astype(jnp.float32)
        share = layout.sample_mean(batches.flatten(valid))
        rows = {"observation": trajectory.timestep.observation, **trajectory.extras, "target": target}
        rows["weight"] = valid / jnp.maximum(share, 1e-8)
        return flat | {name: batches.flatten(x) for name, x in rows.items()}

    def _last_value(self, params: ComaParameters, last: TimeStep, key: Key, progress: Progress) -> Array:
        """Return the target value float32[B, A] of an action sampled in the time step after the trajectory."""
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, self.layout.env_indices())

        def of_rows(rows: tuple[TimeStep, Array]) -> Array:
            timestep, keys = rows
            action, _, _ = self.act(params.actor, (), timestep, keys, progress, "explore")
            critic_input = jax.vmap(self._critic_input)(timestep, action)
            values = self.networks.values(params.target, critic_input.reshape(-1, *critic_input.shape[2:]))
            return distributions.select_action_value(values, action.reshape(-1)).reshape(action.shape)

        value = self.layout.apply(of_rows, self.layout.split((last, keys)), per_row=self.spec.num_agents)
        return value.reshape(-1, self.spec.num_agents)

    def _targets(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """TD(lambda) targets float32[T, B, A] from target values of the taken actions, [T, B, A] and last [B, A]."""
        following = next_timesteps(trajectory, last)
        next_value = jnp.concatenate([value[1:], last_value[None]])
        over_batch = lambda function: jax.vmap(jax.vmap(function, 1, 1), 1, 1)  # noqa: E731

        def of_envs(rows: tuple[TimeStep, Array]) -> Array:
            following, next_value = rows
            over_agents = lambda x: jnp.broadcast_to(x[..., None], next_value.shape)  # noqa: E731
            discount = self.gamma * over_agents(1.0 - following.terminated.astype(jnp.float32))
            lambda_t = self.td_lambda * over_agents(1.0 - following.done.astype(jnp.float32))
            return over_batch(returns.lambda_returns)(following.reward, discount, next_value, lambda_t)

        return self.layout.map_shards(of_envs, (following, next_value), axis=1)

    def _pass(
        self, params: ComaParameters, data: dict[str, Array], key: Key, progress: Progress, train_actor: bool
    ) -> tuple[ComaParameters, dict[str, Array]]:
        """Train the critic on all minibatches of one shuffle, then the actor on the same minibatches."""
        order = self.batches.shuffled(key)
        if self.tau:
            blend = lambda old, new: (1 - self.tau) * old + self.tau * new  # noqa: E731
            blended = self.layout.deterministic(lambda old, new: jax.tree.map(blend, old, new))(
                params.target, params.critic
            )
            params = dataclasses.replace(params, target=blended)

        def critic_step(params: ComaParameters, indices: Array) -> tuple[ComaParameters, Any]:
            batch = pick(data, indices, "critic_input", "action", "target", "weight")
            params, loss, norm = self._critic_update(params, batch, progress)
            metrics = {"critic_loss": loss, "critic_grad_norm": norm}
            if not train_actor:
                return params, (metrics, ())
            values = self.layout.apply(lambda s: self.networks.values(params.critic, s["critic_input"]), batch)
            return params, (metrics, values)

        def actor_step(params: ComaParameters, row: tuple[Array, Array]) -> tuple[ComaParameters, Any]:
            indices, values = row
            names = ("observation", "action", "mask", "log_prob", "weight", "target")
            batch = pick(data, indices, *names) | {"values": values}
            return self._actor_update(params, batch, progress)

        params, (metrics, values) = jax.lax.scan(critic_step, params, order)
        if train_actor:
            params, actor_metrics = jax.lax.scan(actor_step, params, (order, values))
            metrics = metrics | actor_metrics
        return params, metrics

    def _critic_update(
        self, params: ComaParameters, batch: dict[str, Array], progress: Progress
    ) -> tuple[ComaParameters, Array, Array]:
        """Take a gradient step on the critic; return its loss and gradient norm too."""

        def loss(critic: Params, sample: dict[str, Array]) -> tuple[Array, Any]:
            values = self.networks.values(critic, sample["critic_input"])
            return critic_loss(values, sample["action"], sample["target"], sample["weight"]), ()

        gradient, (value, _) = self.layout.gradient(loss, params.critic, batch)
        critic, optimizer, norm = self._step_of(
            "critic", gradient, params.critic, params.critic_optimizer, jnp.bool_(True), progress
        )
        return dataclasses.replace(params, critic=critic, critic_optimizer=optimizer), value, norm

    def _advantage(self, sample: dict[str, Array], action_probs: Array) -> Array:
        """Return the action's value, by the critic or by its return, minus the counterfactual baseline."""
        worth = sample["target"]
        if self.advantage == "critic":
            worth = distributions.select_action_value(sample["values"], sample["action"])
        return worth - counterfactual_baseline(sample["values"], action_probs)

    def _advantage_scale(self, params: ComaParameters, batch: dict[str, Array], epsilon: Array) -> Array:
        """Return the standard deviation of the advantages over the whole minibatch, float32[S local, samples]."""

        def advantages(sample: dict[str, Array]) -> Array:
            logits = self.networks.actor.apply(params.actor, sample["observation"])
            action_probs = distributions.apply_action_mask(distributions.epsilon_mix(logits, epsilon), sample["mask"])
            return self._advantage(sample, action_probs)

        advantage = self.layout.apply(advantages, batch)
        mean = self.layout.sample_mean(batch["weight"] * advantage)
        variance = self.layout.sample_mean(batch["weight"] * jnp.square(advantage - mean))
        return jnp.full_like(advantage, jnp.maximum(jnp.sqrt(variance), 1e-6))

    def _policy_loss(self, logits: Array, epsilon: Array, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """Return the policy loss and its metrics; logits [N, n]."""
        action, weight = sample["action"], sample["weight"]
        action_probs = distributions.apply_action_mask(distributions.epsilon_mix(logits, epsilon), sample["mask"])
        advantage = self._advantage(sample, jax.lax.stop_gradient(action_probs))
        scaled = advantage / sample["scale"] if self.scale_advantage else advantage
        log_prob = jnp.log(jnp.maximum(distributions.select_action_value(action_probs, action), 1e-8))
        value = policy_gradient_loss(log_prob, sample["log_prob"], scaled, weight, self.clip_ratio)
        kl = divergence(log_prob, sample["log_prob"], weight)
        return value, policy_metrics(advantage, log_prob, weight) | {"kl": kl}

    def _actor_update(
        self, params: ComaParameters, batch: dict[str, Array], progress: Progress
    ) -> tuple[ComaParameters, dict[str, Array]]:
        """Take a gradient step on the policy loss minus the entropy bonus, unless the actor is frozen."""
        epsilon, bonus = self.layout.deterministic(lambda p: (self.epsilon(p), self.entropy_bonus(p)))(progress)
        if self.scale_advantage:
            batch = batch | {"scale": self._advantage_scale(params, batch, epsilon)}

        def loss(actor: Params, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            logits = self.networks.actor.apply(actor, sample["observation"])
            value, means = self._policy_loss(logits, epsilon, sample)
            unmixed = jax.nn.softmax(jnp.where(sample["mask"], logits, -jnp.inf))
            entropy = jnp.mean(sample["weight"] * distributions.entropy(unmixed))
            if self.entropy_weight or self.entropy_final:
                value = value - bonus * entropy
            return value, means | {"policy_entropy": entropy}

        gradient, (value, means) = self.layout.gradient(loss, params.actor, batch)
        active = total(progress.learn_calls) >= self.critic_warmup
        if self.target_kl:
            active &= means["kl"] <= 1.5 * self.target_kl
            means["actor_moved"] = active.astype(jnp.float32)
        actor, optimizer, norm = self._step_of(
            "actor", gradient, params.actor, params.actor_optimizer, active, progress
        )
        metrics = {"actor_loss": value, "actor_grad_norm": norm, **means}
        return dataclasses.replace(params, actor=actor, actor_optimizer=optimizer), metrics

    def _step_of(
        self, name: str, gradient: Any, params: Params, state: Any, active: Array, progress: Progress
    ) -> tuple[Params, Any, Array]:
        """Take one step at the learning rate of `progress`, none where not `active`; return the gradient norm too."""
        rate = getattr(self, f"{name}_lr")

        def step(gradient: Any, params: Params, state: Any) -> tuple[Params, Any, Array]:
            decayed = rate * (1.0 - (1.0 - self.final_lr_fraction) * progress.fraction)
            new = optimizers.apply_gradients(
                self.optimizer_of(name), gradient, params, state, self.learning_rate_of(name, decayed)
            )
            kept = jax.tree.map(lambda new, old: jnp.where(active, new, old), new, (params, state))
            return *kept, optimizers.norm(gradient)

        return self.layout.deterministic(step)(gradient, params, state)

    # Acting

    def policy(self, state: AlgoState) -> PolicyParams:
        """The actor's parameters."""
        return state.replicated.actor

    def epsilon(self, progress: Progress) -> Array:
        """Return epsilon of the training step: that of its last episode, counted from 1."""
        mission = total(progress.episodes) + self.layout.num_envs
        return self.eps_max - (self.eps_max - self.eps_min) * jnp.minimum(mission / self.eps_anneal, 1.0)

    def entropy_bonus(self, progress: Progress) -> Array:
        """Return the weight of the entropy bonus after the episodes so far."""
        share = jnp.minimum(total(progress.episodes) / self.entropy_anneal, 1.0) if self.entropy_anneal else 0.0
        return jnp.float32(self.entropy_weight + (self.entropy_final - self.entropy_weight) * share)

    def act(
        self, policy: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Compute the logits of all agents at once, then mask and sample agent after agent (or greedily)."""
        agents = timestep.observation.shape[:2]
        flat = timestep.observation.reshape(-1, *timestep.observation.shape[2:])
        logits = self.networks.actor.apply(policy, flat).reshape(*agents, self._actions)
        action_probs = distributions.epsilon_mix(logits, self.epsilon(progress) if mode == "explore" else 0.0)
        action, extras = team.sample_sequentially(self.spec, timestep, action_probs, keys, greedy=mode == "greedy")
        return action, carry, extras

    # Networks

    def _network(self, outputs: int, shape: tuple[int, ...]) -> Any:
        sizes = self.hidden_size, self.depth, self.initializer, self.convolution
        return team.network(outputs, shape, *sizes, self.layout.compute_dtype)

    @functools.cached_property
    def networks(self) -> ActorCritic:
        """Return the actor and critic, and the function of the critic's values."""
        seen, outputs = self.spec.observation.shape, self._actions + self.dueling
        actor = self.make_network("actor", self._actions, lambda n: self._network(n, seen))
        critic = self.make_network("critic", outputs, lambda n: self._network(n, self._critic_box.shape))
        return ActorCritic(actor, critic, self.dueling)

    def optimizer(self, name: str) -> optax.GradientTransformation:
        """Return the optimizer of "actor" or "critic"."""
        del name
        return optimizers.adam(self.adam_epsilon, self.max_grad_norm)

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks, or those of `inputs` ({"actor", "critic"}) with fresh optimizers."""
        key_actor, key_critic = jax.random.split(key)
        actor = self.networks.actor.init(key_actor, jnp.zeros((1, *self.spec.observation.shape)))
        critic = self.networks.critic.init(key_critic, jnp.zeros((1, *self._critic_box.shape)))
        if inputs is not None:
            actor, critic = inputs["actor"], inputs["critic"]
        params = ComaParameters(
            actor=actor,
            critic=critic,
            target=jax.tree.map(jnp.copy, critic),
            actor_optimizer=self.optimizer_of("actor").init(actor),
            critic_optimizer=self.optimizer_of("critic").init(critic),
        )
        return AlgoState(params, sharded=())

    def weights(self, state: AlgoState) -> Params:
        """Return the networks for `init(inputs=...)`."""
        return {"actor": state.replicated.actor, "critic": state.replicated.critic}

    # Sizes

    @property
    def _actions(self) -> int:
        assert isinstance(self.spec.action, Discrete)
        return self.spec.action.n

    @property
    def _critic_box(self) -> Box:
        assert self.spec.critic_input_spec is not None
        return self.spec.critic_input_spec

    def _critic_input(self, timestep: TimeStep, action: Array) -> Array:
        """Return the environment's centralised critic input of one environment, [A, ...]."""
        assert self.spec.critic_input is not None
        return self.spec.critic_input(timestep, action)

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
        return activation_bytes(self._network(1, self._critic_box.shape), self._critic_box.shape)

    def data_bytes(self) -> int:
        """Return the bytes of the critic inputs of all transitions, and the shuffled copy of one minibatch."""
        samples = self.batches.samples * self.layout.local_shards
        row = math.prod(self._critic_box.shape) * 2 + 16 * self._actions
        return samples * row + samples // self.num_minibatches * row

    def summary(self) -> list[str]:
        return self.batches.summary(self.num_epochs)
