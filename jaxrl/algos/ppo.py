"""PPO: clipped policy gradients with generalised advantages, a few epochs over every rollout; IPPO and MAPPO for teams.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), with the advantages of Schulman et
al. 2016 (GAE, arXiv 1506.02438). Agents share the actor. An agent's critic sees its own observation (IPPO) or the
environment's centralised view (MAPPO, Yu et al. 2022, arXiv 2103.01955). An iteration collects a rollout from every
environment and then learns in this order:

1. The critic V gives the advantages A_t = delta_t + d_t l A_{t+1} with delta_t = r_t + d_t V(s') - V(s), the discount
   d and lambda l, and the targets y = A + V(s): `compute_transitions`. With `normalize_value` the critic learns y less
   its running mean, over its running deviation, both including this rollout. With `normalize_advantage` A gets mean 0
   and deviation 1.
2. Each epoch takes, on every minibatch, one step of the actor and of the critic at once: `update`. Their losses are
   - mean w (min(r A, clip(r, 1 - c, 1 + c) A) + b H) and mean w (V(s) - y)^2 / 2, with the ratio r of the
   probabilities of the action now and when it was taken, the entropy H, its weight b and the clip range c.
3. With `normalize_observation` the statistics of the inputs then include this rollout: `end_learning`.

The weight w is 0 after an episode's end, and 1 on average. The file goes on in this order: settings, advantages and
losses, the iteration, acting, sizes. Networks are in `actor_critic`, minibatches in `episodes`.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array, TimeStep, pytree
from envs_jax.progress import Progress
from jaxrl.algos import base
from jaxrl.algos.actor_critic import ActorCritic, Arrays, Statistics, check_spec, update_statistics
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
from jaxrl.algos.episodes import Minibatches, pick
from jaxrl.common.shapes import Float32
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import optimizers
from jaxrl.nn.networks import Network
from jaxrl.rl import returns
from jaxrl.rl.policy_gradient import clipped_losses, divergence


def generalised_advantages(
    reward_t: Float32[Array, "T *batch"],
    discount_t: Float32[Array, "T *batch"],
    lambda_t: Float32[Array, "T *batch"],
    value_tm1: Float32[Array, "T *batch"],
    value_t: Float32[Array, "T *batch"],
) -> Float32[Array, "T *batch"]:
    """A_{t-1} = delta_t + d_t lambda_t A_t with delta_t = r_t + d_t v_t - v_{t-1} (arXiv 1707.06347, equations 11, 12).

    That is the TD(lambda) target less the value. `discount_t` is 0 where the episode terminated, `lambda_t` where it
    ended or was cut.
    """
    return returns.lambda_returns(reward_t, discount_t, value_t, lambda_t) - value_tm1


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
        check_spec(self.spec, "ppo", self.critic)
        if self.rollout_steps == 0 and not self.spec.fixed_horizon:
            raise ValueError(
                f"rollout_steps 0 needs episodes of one length, and in '{self.spec.name}' they may end earlier: give a "
                "number, such as 128"
            )
        super().__post_init__()
        self.batches.check(self.num_epochs, actor_epochs=0)

    # Advantages and losses

    def compute_advantages(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """Return `generalised_advantages` [T, B, A] of values [T, B, A] and the value after them [B, A].

        A truncated episode bootstraps from the value of its last observation, which has a row of its own.
        """

        def over_agents(x: Array) -> Array:
            return jnp.broadcast_to(x.astype(jnp.float32)[..., None], value.shape)

        next_steps = base.next_timesteps(trajectory, last)
        next_value = jnp.concatenate([value[1:], last_value[None]])
        discount = self.gamma * over_agents(~next_steps.terminated)
        lambda_t = self.gae_lambda * over_agents(~next_steps.done)
        return generalised_advantages(next_steps.reward, discount, lambda_t, value, next_value)

    advantages = compute_advantages  # the former name, for programs that use it

    def update(self, params: PpoParameters, batch: Arrays, progress: Progress) -> tuple[PpoParameters, Arrays]:
        """Take a step on the actor and one on the critic (equation 9), which share no parameters."""

        def losses(learned: tuple[Params, Params], sample: Arrays) -> tuple[Array, Arrays]:
            actor, critic = learned
            outputs = self.nets.outputs(actor, params.statistics, sample["observation"])
            log_prob, entropy = self.nets.log_prob(outputs, sample)
            value = self.nets.value(critic, params.statistics, sample)
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
        transitions = batches.flatten_all(**self.nets.inputs(trajectory.timestep, layout))

        def compute_value(rows: Arrays) -> Array:  # in units of the reward
            value = self.nets.value(params.critic.params, params.statistics, rows)
            return params.statistics["value"].denormalize(value) if self.normalize_value else value

        value = batches.unflatten(layout.apply(compute_value, transitions))
        last_inputs = batches.flatten_all(**self.nets.inputs(jax.tree.map(lambda x: x[None], last), layout))
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
        views = {"actor": data["observation"], "critic": data[self.nets.view]}
        statistics = update_statistics(params.statistics, views, data["weight"], self.layout)
        return AlgoState(dataclasses.replace(params, statistics=statistics), ()), metrics | data_metrics

    # Acting

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        action, extras = self.nets.act(policy_params, timestep, keys, greedy=mode == "greedy")
        return action, carry, extras

    # State, networks and sizes

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks and statistics, or those of `inputs`, with fresh optimizers."""
        actor, critic = (self.learner(*fresh) for fresh in self.fresh_networks(key, inputs).items())
        fresh = self.nets.statistics(self.normalize_observation, self.normalize_value)
        return AlgoState(PpoParameters(actor, critic, fresh if inputs is None else inputs["statistics"]), ())

    def weights(self, state: AlgoState) -> Params:
        return super().weights(state) | {"statistics": state.replicated.statistics}

    def policy(self, state: AlgoState) -> PolicyParams:
        """Return the actor, and the statistics of its inputs where they are in use."""
        actor_statistics = {name: x for name, x in state.replicated.statistics.items() if name == "actor"}
        return {"actor": super().policy(state), "statistics": actor_statistics}

    @functools.cached_property
    def nets(self) -> ActorCritic:
        sizes = self.hidden_size, self.depth, self.initializer, self.stride, self.convolution, self.layout.compute_dtype
        return ActorCritic.make(self.spec, self.make_network, self.critic, self.initial_std, *sizes)

    @property
    def networks(self) -> dict[str, Network]:
        return {"actor": self.nets.actor, "critic": self.nets.critic}

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
        spec = dataclasses.replace(self.spec, horizon=self.steps)
        return Minibatches.from_count(spec, self.layout, self.num_minibatches)

    @property
    def gradient_samples(self) -> int:
        return self.batches.size

    def summary(self) -> list[str]:
        view = "the centralised view" if self.nets.view == "central" else "what its agent observes"
        return [
            f"An iteration collects {self.steps} steps of {self.layout.num_envs} environments and trains for "
            f"{self.num_epochs} epochs of {self.num_minibatches} minibatches of "
            f"{self.batches.size * self.layout.shards:,} samples; a critic sees {view}."
        ]
