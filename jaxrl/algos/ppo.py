"""PPO: clipped policy gradients with generalised advantages, a few epochs over every rollout; IPPO and MAPPO for teams.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), with the advantages of Schulman et
al. 2016 (GAE, arXiv 1506.02438). Agents share the actor. An agent's critic sees its own observation (IPPO) or the
environment's centralised view (MAPPO, Yu et al. 2022, arXiv 2103.01955). An iteration collects a rollout from every
environment and then learns in this order:

1. The critic V gives the advantages A_t = delta_t + d_t l A_{t+1} with delta_t = r_t + d_t V(s') - V(s), the discount
   d and lambda l, and the targets y = A + V(s): `compute_transitions`. With `normalize_value` the critic learns y less
   its running mean, over its running deviation, both including this rollout. With `normalize_advantage` A gets mean 0
   and deviation 1.
2. Each epoch takes, on every minibatch, one step of the actor and of the critic at once: `update`. The actor's loss is
   -mean w (min(r A, clip(r, 1 - c, 1 + c) A) + b H), the critic's mean w (V(s) - y)^2 / 2, with the ratio r of the
   probabilities of the action now and when it was taken, the entropy H, its weight b and the clip range c.
3. With `normalize_observation` the statistics of the inputs then include this rollout: `end_learning`.

The weight w is 0 after an episode's end, and 1 on average. The file goes on in this order: settings, advantages and
losses, the iteration, acting, networks and their inputs, sizes. Minibatches are in `on_policy`.

Layout letters: T time, B environments, A agents, N samples, n actions of an agent or numbers of its action.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import SMALLEST_IMAGE, Array, Box, Discrete, TimeStep, pytree
from envs_jax.progress import Progress
from jaxrl.algos import on_policy
from jaxrl.algos.base import (
    RATE,
    UNIT,
    Algorithm,
    AlgoState,
    Learner,
    Learning,
    Mode,
    Phase,
    Stage,
    Trajectory,
    setting,
)
from jaxrl.algos.box_actions import BoxActions
from jaxrl.algos.on_policy import Minibatches, lambda_targets, pick
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, optimizers
from jaxrl.nn.networks import GaussianOutputs, Network
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.policy_gradient import clipped_losses, divergence
from jaxrl.rl.running_statistics import RunningStatistics, start

Arrays = dict[str, Array]
Statistics = dict[str, RunningStatistics]
MIN_LOGIT = -69.0  # of an action when sampling, relative to the largest logit
INPUT_LIMIT = 10.0  # normalised inputs lie in +/- this


@pytree
class PpoParameters:
    """Parameters and optimizers, the same on every device.

    Attributes:
        actor, critic: Learners.
        statistics: {"actor", "critic": of their inputs; "value": of targets}, RunningStatistics of those in use.
    """

    actor: Learner
    critic: Learner
    statistics: Statistics


@dataclasses.dataclass(frozen=True)
class Ppo(Algorithm):
    """Proximal policy optimisation for discrete actions and for boxes, with one actor for all agents."""

    parts: ClassVar[tuple[str, ...]] = ("actor", "critic")
    weighs_agents: ClassVar[bool] = True
    compatible_settings: ClassVar[tuple[str, ...]] = ("normalize_observation", "normalize_value")
    traced: ClassVar[tuple[str, ...]] = (
        "gamma", "gae_lambda", "clip_ratio", "entropy_weight", "actor_lr", "critic_lr", "final_lr_fraction",
    )  # fmt: skip

    rollout_steps: int = setting(
        128, "steps of every environment per iteration, which go on where the last ones ended; 0 = a whole new episode "
        "of each environment, for episodes that all have the same length", between=(0, 100_000),
    )  # fmt: skip
    num_minibatches: int = setting(8, "minibatches per epoch; more are smaller", between=(1, 1e6))
    num_epochs: int = setting(4, "epochs (passes over the rollout) per iteration", between=(1, 10_000))
    gamma: float = setting(0.99, "discount factor per step", between=UNIT)
    gae_lambda: float = setting(
        0.95, "lambda of the advantages (arXiv 1506.02438); 1 = returns, 0 = one step", between=UNIT
    )
    clip_ratio: float = setting(0.2, "clip the probability ratio to 1 +/- this", between=(1e-6, 1e6))
    entropy_weight: float = setting(0.0, "weight of the entropy bonus", between=(0, 1e6))
    actor_lr: float = setting(3e-4, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(1e-3, "learning rate of the critic (Adam)", between=RATE)
    final_lr_fraction: float = setting(0.1, "learning rates fall linearly to this fraction at the end", between=UNIT)
    max_grad_norm: float = setting(0.5, "clip gradients of each network to this norm; 0 = never", between=(0, 1e9))
    normalize_advantage: bool = setting(True, "shift and scale a rollout's advantages to mean 0 and deviation 1")
    normalize_observation: Literal["auto", "always", "never"] = setting(
        "auto",
        "normalise each number of an observation by its running mean and deviation; auto = for vectors whose bounds "
        "are missing or exceed 10",
    )
    normalize_value: bool = setting(True, "the critic learns targets scaled by their running mean and deviation")
    critic: Literal["auto", "local", "central"] = setting(
        "auto", "local: an agent's critic sees its observation (IPPO); central: it sees the environment's centralised "
        "view (MAPPO); auto = central for teams and with a global state, if the environment has such a view"
    )  # fmt: skip
    initial_std: float = setting(0.6, "initial deviation of continuous actions, scaled to [-1, 1]", between=(1e-6, 1e3))
    hidden_size: int = setting(128, "channels of the convolutions and units of the dense layers", between=(1, 2**14))
    depth: int = setting(2, "number of hidden dense layers; images pass convolutions first", between=(0, 100))
    initializer: Literal["torch", "he", "xavier", "orthogonal"] = setting(
        "orthogonal", "orthogonal, he: with a small last layer; torch: PyTorch's default; xavier: uniform"
    )
    stride: int = setting(
        1, "stride of the first convolution, pixels; 2 takes a fifth of the arithmetic", between=(1, 100)
    )
    convolution: Literal["auto", "conv", "dense", "patches"] = setting(
        "auto", "how convolutions are computed; auto = the fastest way on the backend"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.spec.observation, Box):
            raise ValueError(
                f"ppo needs one array per agent as observation, '{self.spec.name}' has several: concatenate them"
            )
        if not self._discrete:
            BoxActions.from_spec(self.spec, "ppo")
        if self.critic == "central" and not self._has_view:
            raise ValueError(
                f"critic central needs a critic_input or a single array as global_state, '{self.spec.name}' has "
                "neither: use --critic local"
            )
        if self.rollout_steps == 0 and not self.spec.fixed_horizon:
            raise ValueError(
                f"rollout_steps 0 needs episodes of one length, and in '{self.spec.name}' they may end earlier: give a "
                "number, such as 128"
            )
        super().__post_init__()
        if self.batches.size < 1:
            raise ValueError(
                f"num_minibatches {self.num_minibatches} exceeds the {self.batches.samples} samples of a logical "
                "shard: lower it, or raise num_envs"
            )

    # Advantages and losses

    def compute_advantages(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """Return A [T, B, A]: the TD(lambda) target less the value (equations 11, 12), see `lambda_targets`."""
        return lambda_targets(trajectory, last, value, last_value, self.gamma, self.gae_lambda) - value

    advantages = compute_advantages  # the former name, for programs that use it

    def update(self, params: PpoParameters, batch: Arrays, progress: Progress) -> tuple[PpoParameters, Arrays]:
        """Take a step on the actor and one on the critic (equation 9), which share no parameters."""

        def losses(learned: tuple[Params, Params], sample: Arrays) -> tuple[Array, Arrays]:
            actor, critic = learned
            outputs = self.actor_outputs(actor, params.statistics, sample["observation"])
            log_prob, entropy = self.log_prob(outputs, sample)
            value = self.value(critic, params.statistics, sample)
            old_log_prob, weight = sample["log_prob"], sample["weight"]
            actor_losses = clipped_losses(log_prob, old_log_prob, sample["advantage"], self.clip_ratio)
            actor_loss = jnp.mean(weight * actor_losses)
            critic_loss = jnp.mean(weight * 0.5 * jnp.square(value - sample["target"]))
            clipped = (jnp.abs(jnp.exp(log_prob - old_log_prob) - 1) > self.clip_ratio).astype(jnp.float32)
            means = {"actor_loss": actor_loss, "critic_loss": critic_loss, "policy_entropy": jnp.mean(weight * entropy)}
            means |= {"kl": divergence(log_prob, old_log_prob, weight), "clip_fraction": jnp.mean(weight * clipped)}
            return actor_loss + critic_loss - self.entropy_weight * means["policy_entropy"], means

        learned = params.actor.params, params.critic.params
        (actor_gradient, critic_gradient), (_, metrics) = self.layout.gradient(losses, learned, batch)
        actor, actor_norm = self.step("actor", params.actor, actor_gradient, progress)
        critic, critic_norm = self.step("critic", params.critic, critic_gradient, progress)
        metrics |= {"actor_grad_norm": actor_norm, "critic_grad_norm": critic_norm}
        return dataclasses.replace(params, actor=actor, critic=critic), metrics

    # An iteration

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return one phase: roll out, then learn from the rollout and discard it."""
        return (Phase("train", self.steps, self.num_epochs * self.num_minibatches, restart=self.rollout_steps == 0),)

    def compute_transitions(
        self, params: PpoParameters, trajectory: Trajectory, last: TimeStep
    ) -> tuple[PpoParameters, Arrays, Arrays]:
        """Return parameters with new statistics of targets, all transitions [S local, samples, ...], and metrics."""
        layout, batches = self.layout, self.batches
        weight = batches.flatten(batches.sample_weights(trajectory))
        transitions = batches.flatten_all(**self.inputs(trajectory.timestep))

        def compute_value(rows: Arrays) -> Array:  # in units of the reward
            value = self.value(params.critic.params, params.statistics, rows)
            return params.statistics["value"].denormalize(value) if self.normalize_value else value

        value = batches.unflatten(layout.apply(compute_value, transitions))
        last_inputs = batches.flatten_all(**self.inputs(jax.tree.map(lambda x: x[None], last)))
        last_value = layout.apply(compute_value, last_inputs).reshape(-1, self.spec.num_agents)
        advantage = batches.flatten(self.compute_advantages(trajectory, last, value, last_value))
        target = advantage + batches.flatten(value)
        error, spread = (batches.deviation(x, weight)[0, 0] for x in (advantage, target))  # the advantage is y - V
        metrics = {"target_mean": layout.sample_mean(weight * target), "explained_variance": 1 - (error / spread) ** 2}
        if self.normalize_value:
            statistics = update_statistics(params.statistics, {"value": target}, weight, layout)
            target = statistics["value"].normalize(target)
            params = dataclasses.replace(params, statistics=statistics)
        if self.normalize_advantage:
            mean = layout.sample_mean(weight * advantage)
            advantage = (advantage - mean) / batches.deviation(advantage, weight)
        acting = batches.flatten_all(**({"action": trajectory.action} | trajectory.extras))
        transitions |= acting | {"advantage": advantage, "target": target, "weight": weight}
        return params, transitions, metrics

    @property
    def learn_stages(self) -> tuple[Stage, ...]:
        """Return one stage for each epoch, whose steps are minibatches."""
        return tuple(Stage("update", epoch, self.num_minibatches) for epoch in range(self.num_epochs))

    def begin_learning(
        self, state: AlgoState, trajectory: Trajectory, last_timestep: TimeStep, key: Key, progress: Progress
    ) -> Learning:
        """Compute advantages and targets (algorithm 1), and shuffle the transitions for each epoch."""
        params, data, data_metrics = self.compute_transitions(state.replicated, trajectory, last_timestep)
        order = self.batches.shuffle(jax.random.split(key, self.num_epochs))
        batch = jax.eval_shape(lambda: pick(data, order[:, 0, 0], *data))
        metrics = self.batches.empty_metrics(self.update, params, batch, progress, epochs=self.num_epochs)
        return Learning(data | {"order": order}, (), (params, metrics, data_metrics))

    def learn_step(self, learning: Learning, stage: str, epoch: Array, index: Array, progress: Progress) -> Learning:
        """Update on minibatch `index`."""
        del stage
        data, (params, metrics, data_metrics) = learning.data, learning.replicated
        batch = pick(data, data["order"][:, epoch, index], *(name for name in data if name != "order"))
        params, update_metrics = self.update(params, batch, progress)
        row = epoch * self.num_minibatches + index
        metrics = {name: rows.at[row].set(update_metrics[name]) for name, rows in metrics.items()}
        return Learning(data, (), (params, metrics, data_metrics))

    def end_learning(self, learning: Learning) -> tuple[AlgoState, Arrays]:
        """Update the statistics of inputs last: all updates must see inputs as the policy that acted has seen them."""
        data, (params, metrics, data_metrics) = learning.data, learning.replicated
        views = {"actor": data["observation"], "critic": data[self.view]}
        statistics = update_statistics(params.statistics, views, data["weight"], self.layout)
        return AlgoState(dataclasses.replace(params, statistics=statistics), ()), metrics | data_metrics

    # Acting

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Select actions [B, A, ...]; continuous ones are clipped to their box.

        Extras are "log_prob" float32[B, A]; for discrete actions "mask" bool[B, A, n], for continuous ones "action"
        float32[B, A, n], the samples before clipping to [-1, 1].
        """
        observation, greedy = timestep.observation, mode == "greedy"
        flat = observation.reshape(-1, *observation.shape[2:])
        outputs = self.actor_outputs(policy_params["actor"], policy_params["statistics"], flat)
        outputs = outputs.reshape(*observation.shape[:2], -1)
        if self._discrete:
            mask = True if timestep.action_mask is None else timestep.action_mask
            logits = outputs - jnp.where(mask, outputs, -jnp.inf).max(-1, keepdims=True)
            probs = jnp.exp(jnp.clip(logits, MIN_LOGIT, 0.0))  # above 0, so that an action can always be sampled
            scores = outputs if greedy else None
            action, extras = on_policy.sample_sequentially(self.spec, timestep, probs, keys, scores)
            return action, carry, extras | {"log_prob": self.log_prob(outputs, {"action": action} | extras)[0]}
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        noise = jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:], jnp.float32))(keys)
        sample = {"action": mean if greedy else mean + jnp.exp(log_std) * noise}
        action = BoxActions.from_spec(self.spec, "ppo").denormalize(jnp.clip(sample["action"], -1.0, 1.0))
        return action, carry, sample | {"log_prob": self.log_prob(outputs, sample)[0]}

    def log_prob(self, outputs: Array, sample: Arrays) -> tuple[Array, Array]:
        """Return log-probabilities of actions float32[...], and the policy's entropy, of outputs [..., n].

        Discrete actions come with their "mask"; continuous ones are samples before clipping.
        """
        if not self._discrete:
            mean, log_std = jnp.split(outputs, 2, axis=-1)
            log_prob = distributions.normal_log_prob(mean, log_std, sample["action"])
            return log_prob, distributions.normal_entropy(log_std)
        log_probs = jax.nn.log_softmax(distributions.mask_logits(outputs, sample["mask"]))
        log_prob = distributions.select_action_value(log_probs, sample["action"])
        return log_prob, distributions.entropy(jnp.exp(log_probs))

    @property
    def _discrete(self) -> bool:
        return isinstance(self.spec.action, Discrete)

    # Networks and their inputs

    @functools.cached_property
    def networks(self) -> dict[str, Network]:
        """Return the actor, with logits or means and logarithms of deviations, and the critic, with one value."""
        spec, actor_shape = self.spec, self.spec.observation.shape
        critic_shape = actor_shape
        if self.view == "central" and spec.critic_input_spec is not None:
            critic_shape = spec.critic_input_spec.shape
        elif self.view == "central":
            critic_shape = (math.prod(actor_shape) + math.prod(spec.global_state.shape),)
        sizes = self.hidden_size, self.depth, self.initializer, self.stride, self.convolution, self.layout.compute_dtype

        def standard(outputs: int, shape: tuple[int, ...]) -> Any:
            image = len(shape) == 3 and min(shape[:2]) >= SMALLEST_IMAGE
            return on_policy.make_network(outputs, shape if image else (math.prod(shape),), *sizes)

        def actor(outputs: int) -> Any:
            if self._discrete:
                return standard(outputs, actor_shape)
            return GaussianOutputs(standard(outputs // 2, actor_shape), outputs // 2, self.initial_std)

        action = spec.action
        actor_outputs = action.n if isinstance(action, Discrete) else 2 * math.prod(action.shape)
        return {
            "actor": self.make_network("actor", actor_outputs, actor, (1, *actor_shape)),
            "critic": self.make_network(
                "critic", 1, lambda outputs: standard(outputs, critic_shape), (1, *critic_shape)
            ),
        }

    @property
    def view(self) -> str:
        """Return what the critic sees, "observation" or "central"; "auto" is central for teams and global states."""
        auto = self.critic == "auto" and self._has_view
        auto = auto and (self.spec.num_agents > 1 or self.spec.global_state is not None)
        return "central" if self.critic == "central" or auto else "observation"

    @property
    def _has_view(self) -> bool:
        return self.spec.critic_input_spec is not None or isinstance(self.spec.global_state, Box)

    def inputs(self, timestep: TimeStep) -> Arrays:
        """Return the inputs of actor and critic, {"observation" and, if in use, "central": [T, B, A, ...]}.

        The critic gives the value of a state: other agents' actions in `critic_input` are set to 0. A global state is
        appended to the agent's own observation.
        """
        spec, inputs = self.spec, {"observation": timestep.observation}
        if self.view == "observation":
            return inputs

        def central_input(step: TimeStep) -> Array:
            if spec.critic_input is not None:
                return spec.critic_input(step, jnp.zeros((spec.num_agents, *spec.action.shape), spec.action.dtype))
            local = step.observation.reshape(spec.num_agents, -1).astype(jnp.float32)
            shared = jnp.broadcast_to(step.global_state.reshape(1, -1), (spec.num_agents, step.global_state.size))
            return jnp.concatenate([local, shared.astype(jnp.float32)], axis=-1)

        return inputs | {"central": jax.vmap(jax.vmap(central_input))(timestep)}

    def actor_outputs(self, actor: Params, statistics: Statistics, observation: Array) -> Array:
        """Return the actor's outputs float32[N, ...] of observations [N, ...]."""
        return self.networks["actor"].apply(actor, _normalize("actor", statistics, observation))

    def value(self, critic: Params, statistics: Statistics, sample: Arrays) -> Array:
        """Return values float32[N] of `inputs` [N, ...], normalised ones if the critic learns these."""
        return self.networks["critic"].apply(critic, _normalize("critic", statistics, sample[self.view]))[:, 0]

    def fresh_statistics(self) -> Statistics:
        """Return statistics of no inputs and no targets, of those that are in use."""
        box = self.spec.observation
        needs_scaling = len(box.shape) == 1 and max(-box.lowest, box.highest) > INPUT_LIMIT
        enabled = {"always": True, "never": False, "auto": needs_scaling}[self.normalize_observation]
        shapes = {name: network.inputs[0][1:] for name, network in self.networks.items()} if enabled else {}
        return {
            name: start(shape) for name, shape in (shapes | ({"value": ()} if self.normalize_value else {})).items()
        }

    # State and sizes

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks and statistics, or those of `inputs`, with fresh optimizers."""
        actor, critic = (self.learner(*fresh) for fresh in self.fresh_networks(key, inputs).items())
        statistics = self.fresh_statistics() if inputs is None else inputs["statistics"]
        return AlgoState(PpoParameters(actor, critic, statistics), ())

    def weights(self, state: AlgoState) -> Params:
        return super().weights(state) | {"statistics": state.replicated.statistics}

    def policy(self, state: AlgoState) -> PolicyParams:
        """Return the actor, and the statistics of its inputs where they are in use."""
        actor_statistics = {name: x for name, x in state.replicated.statistics.items() if name == "actor"}
        return {"actor": super().policy(state), "statistics": actor_statistics}

    def optimizer(self, part: str) -> optax.GradientTransformation:
        """Return Adam with the epsilon of most implementations."""
        return optimizers.adam(1e-5, self.max_grad_norm)

    @property
    def steps(self) -> int:
        """Return T, the steps of a rollout."""
        return self.rollout_steps or self.spec.horizon

    @property
    def batches(self) -> Minibatches:
        """Return the minibatches of a rollout."""
        samples, count = (
            self.layout.num_envs // self.layout.shards * self.steps * self.spec.num_agents,
            self.num_minibatches,
        )
        return Minibatches(self.layout, self.spec.num_agents, samples, count, samples // count)

    @property
    def gradient_samples(self) -> int:
        return self.batches.size

    def summary(self) -> list[str]:
        view = "the centralised view" if self.view == "central" else "what its agent observes"
        return [
            f"An iteration collects {self.steps} steps of {self.layout.num_envs} environments and trains for "
            f"{self.num_epochs} epochs of {self.num_minibatches} minibatches of "
            f"{self.batches.size * self.layout.shards:,} samples; a critic sees {view}."
        ]


def update_statistics(statistics: Statistics, samples: Arrays, weight: Array, layout: DataParallel) -> Statistics:
    """Add samples [S local, m, ...] with weights float32[S local, m] to the statistics that are in use.

    Samples of weight 0 are not counted. Weights must have a mean of 1 over all samples.
    """
    weighted_mean = jax.vmap(lambda x: layout.sample_mean(weight * x), in_axes=-1)
    share_counted = layout.sample_mean((weight > 0).astype(jnp.float32))
    updated, count = dict(statistics), share_counted * (weight.shape[1] * layout.shards)
    for name, values in samples.items():
        if name in updated:
            rows, shape = values.reshape(*weight.shape, -1).astype(jnp.float32), updated[name].mean.shape
            mean = weighted_mean(rows)
            variance = weighted_mean(jnp.square(rows - mean[None, None])).reshape(shape)
            updated[name] = updated[name].merge(mean.reshape(shape), variance, count)
    return updated


def _normalize(name: str, statistics: Statistics, inputs: Array) -> Array:
    """Return inputs float32[N, ...], normalised where there are statistics of them."""
    inputs = inputs.astype(jnp.float32)
    return jnp.clip(statistics[name].normalize(inputs), -INPUT_LIMIT, INPUT_LIMIT) if name in statistics else inputs
