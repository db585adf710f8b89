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

The weight w is 0 after an episode's end, and 1 on average. With `memory` the actor and the critic are recurrent; with
`message_passing` the actor also hears other agents; without `share_parameters` each type of agent has networks of its
own: see `team` and `segments`. With a `risk_level` below 1 the critic learns quantiles of the return, and advantages
look at the mean of its worst share: `quantiles`. The file goes on in this order: settings, advantages and losses, the
iteration, acting, networks and their inputs, sizes.

Layout letters: T time, B environments, A agents, N samples, n actions of an agent or numbers of its action.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import SMALLEST_IMAGE, Array, Box, Discrete, EnvSpec, TimeStep, pytree
from envs_jax.progress import Progress
from jaxrl.algos import on_policy
from jaxrl.algos.base import RATE, UNIT, AlgoState, Learner, Learning, Mode, Phase, Stage, Trajectory, setting
from jaxrl.algos.box_actions import BoxActions
from jaxrl.algos.on_policy import Minibatches, lambda_targets, pick, quantile_targets
from jaxrl.algos.segments import Segments
from jaxrl.algos.team import Situation, TeamAlgorithm
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, optimizers
from jaxrl.nn.networks import Network
from jaxrl.nn.recurrent import Carry
from jaxrl.rl.data_parallel import jit_inline, largest_divisor
from jaxrl.rl.policy_gradient import clipped_losses, divergence
from jaxrl.rl.quantiles import quantile_losses, tail_advantages
from jaxrl.rl.running_statistics import INPUT_LIMIT, Statistics, normalize_inputs, start, update_statistics

Arrays = dict[str, Array]
MIN_LOGIT = -69.0  # of an action when sampling, relative to the largest logit


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
class Ppo(TeamAlgorithm):
    """Proximal policy optimisation for discrete actions and for boxes, with one actor for all agents."""

    parts: ClassVar[tuple[str, ...]] = ("actor", "critic")
    stores_carry: ClassVar[bool] = True
    weighs_agents: ClassVar[bool] = True
    acting_settings: ClassVar[dict[str, Any]] = {"num_minibatches": 1, "normalize_advantage": False}
    memory_parts: ClassVar[tuple[str, ...]] = ("actor", "critic")
    compatible_settings: ClassVar[tuple[str, ...]] = (
        "normalize_observation", "normalize_value", *TeamAlgorithm.compatible_settings,
    )  # fmt: skip
    sweepable: ClassVar[tuple[str, ...]] = (
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
    risk_level: float = setting(
        1.0, "share of returns, the worst ones, whose mean is maximised (CVaR); 1 = all of them", between=(1e-3, 1)
    )
    risk_quantiles: int = setting(32, "quantiles of the returns that the critic learns, where risk_level is below 1",
                                  between=(2, 10_000))  # fmt: skip
    initial_std: float = setting(0.6, "initial deviation of continuous actions, scaled to [-1, 1]", between=(1e-6, 1e3))
    initializer: Literal["torch", "he", "xavier", "orthogonal"] = setting(
        "orthogonal", "orthogonal, he: with a small last layer; torch: PyTorch's default; xavier: uniform"
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
        if self.quantiles and self.risk_level * self.quantiles < 1 - 1e-6:
            raise ValueError(
                f"risk_level {self.risk_level:g} is less than one of {self.quantiles} quantiles: use --risk_quantiles "
                f"{math.ceil(1 / self.risk_level)} or more"
            )
        samples, count = self.batches.samples, self.num_minibatches
        if self.recurrent and samples % count:
            raise ValueError(
                f"num_minibatches {count} does not divide the {samples} environments of a logical shard, whose "
                f"rollouts stay whole: use {largest_divisor(samples, count)}, or change num_envs"
            )
        if self.batches.size < 1:
            raise ValueError(
                f"num_minibatches {count} exceeds the {samples} samples of a logical shard: lower it, or raise num_envs"
                " or rollout_steps"
            )
        if self.normalize_advantage and self.most_samples < 2:
            raise ValueError(
                "a rollout holds one sample, whose advantage would be 0 after normalize_advantage, so that the actor "
                "would never move: raise num_envs or rollout_steps, or give --normalize_advantage false"
            )

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        """Return num_envs or, where minibatches hold whole rollouts, the environments of one."""
        if not cls.keeps_rollouts(spec, settings):
            return num_envs
        return max(num_envs // int(settings.get("num_minibatches", cls.num_minibatches)), 1)

    # Advantages and losses

    def compute_advantages(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """Return A [T, B, A]: the TD(lambda) target less the value (equations 11, 12), see `lambda_targets`."""
        return lambda_targets(trajectory, last, value, last_value, self.gamma, self.gae_lambda) - value

    advantages = compute_advantages  # the former name, for programs that use it

    def update(self, params: PpoParameters, batch: Arrays, progress: Progress) -> tuple[PpoParameters, Arrays]:
        """Take a step on the actor and one on the critic (equation 9), which share no parameters."""

        def losses(learned: tuple[Params, Params], sample: Arrays) -> tuple[Array, Arrays]:
            outputs, value, sample = self.apply_networks(learned, params.statistics, sample)
            log_prob, entropy = self.log_prob(outputs, sample)
            old_log_prob, weight = sample["log_prob"], sample["weight"]
            actor_losses = clipped_losses(log_prob, old_log_prob, sample["advantage"], self.clip_ratio)
            actor_loss = jnp.mean(weight * actor_losses)
            target, square = sample["target"], 0.5 * jnp.square(value - sample["target"])
            critic_loss = jnp.mean(weight * (quantile_losses(value, target) if self.quantiles else square))
            clipped = (jnp.abs(jnp.exp(log_prob - old_log_prob) - 1) > self.clip_ratio).astype(jnp.float32)
            means = {"actor_loss": actor_loss, "critic_loss": critic_loss, "policy_entropy": jnp.mean(weight * entropy)}
            means |= {"kl": divergence(log_prob, old_log_prob, weight), "clip_fraction": jnp.mean(weight * clipped)}
            return actor_loss + critic_loss - self.entropy_weight * means["policy_entropy"], means

        learned = params.actor.params, params.critic.params
        gradient, (_, metrics) = self.layout.gradient(losses, learned, batch, self.batches.row_samples)
        actor, actor_norm = self.step("actor", params.actor, gradient[0], progress)
        critic, critic_norm = self.step("critic", params.critic, gradient[1], progress)
        metrics |= {"actor_grad_norm": actor_norm, "critic_grad_norm": critic_norm}
        return dataclasses.replace(params, actor=actor, critic=critic), metrics

    @functools.cached_property
    def traced_update(self) -> Callable[..., Any]:
        """Return `update`, traced once for the shapes of its metrics and for its call."""
        return jit_inline(self.update)

    # An iteration

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return one phase: roll out, then learn from the rollout and discard it."""
        return (Phase("train", self.steps, self.num_epochs * self.num_minibatches, restart=self.rollout_steps == 0),)

    def compute_values(
        self, params: PpoParameters, rows: Arrays, trajectory: Trajectory, last: TimeStep, carry: Carry
    ) -> tuple[Array, Array, Carry]:
        """Return V [T, B, A] of `rows`, the inputs of all samples, V [B, A] after step T, and the critic's next carry.

        With a risk level V holds K quantiles on a further axis. `carry` is what the critic's memory had before row 0,
        leaves [S local, B / S, A, H].
        """
        layout, batches = self.layout, self.batches

        def denormalize(value: Array) -> Array:  # to units of the reward
            return params.statistics["value"].denormalize(value) if self.normalize_value else value

        def compute_value(rows: Arrays) -> Array:
            return denormalize(self.value(params.critic.params, params.statistics, rows))

        def compute_team_values(*row: Any) -> tuple[Array, Carry]:
            value, carry = self.team_outputs("critic", params.critic.params, params.statistics, *row)
            return denormalize(value if self.quantiles else value[..., 0]), carry

        last_step = jax.tree.map(lambda x: x[None], last)
        if isinstance(batches, Segments):
            views = batches.unflatten(rows[self.view])
            value, carry = batches.unroll(compute_team_values, views, self.situation(trajectory.timestep), carry)
            views = self.inputs(last_step)[self.view]
            last_value, _ = batches.unroll(compute_team_values, views, self.situation(last_step), carry)
            return value, last_value[0], carry
        value = batches.unflatten(layout.apply(compute_value, rows))
        last_rows = batches.flatten_all(**self.inputs(last_step))
        return value, batches.unflatten(layout.apply(compute_value, last_rows))[0], carry

    def compute_transitions(
        self, params: PpoParameters, trajectory: Trajectory, last: TimeStep, carry: Carry, key: Key
    ) -> tuple[PpoParameters, Arrays, Arrays, Carry]:
        """Return parameters with new statistics of targets, all transitions, metrics, and the critic's next carry.

        Transitions are leaves [S local, samples, ...], or of rows of `segments`.
        """
        layout, batches = self.layout, self.batches
        weight = batches.flatten(batches.sample_weights(trajectory))
        transitions: dict[str, Any] = batches.flatten_all(**self.inputs(trajectory.timestep))
        value, last_value, next_carry = self.compute_values(params, transitions, trajectory, last, carry)
        ends = trajectory, last, value, last_value
        if self.quantiles:
            key = jax.random.fold_in(key, self.num_epochs)  # those below shuffle
            rows = batches.flatten_all(
                value=value, target=quantile_targets(layout, key, *ends, self.gamma, self.gae_lambda)
            )
            target, advantage = rows["target"], tail_advantages(rows["value"], rows["target"], self.risk_level)
            mean_target, mean_error = target.mean(-1), (target - rows["value"]).mean(-1)
        else:
            advantage = batches.flatten(self.compute_advantages(*ends))
            target = mean_target = advantage + batches.flatten(value)
            mean_error = advantage  # y - V
        error, spread = (batches.deviation(x, weight)[0, 0] for x in (mean_error, mean_target))
        metrics = {"target_mean": layout.sample_mean(weight * mean_target)}
        metrics["explained_variance"] = 1 - (error / spread) ** 2
        if self.normalize_value:
            statistics = update_statistics(params.statistics, {"value": mean_target}, weight, layout)
            target = statistics["value"].normalize(target)
            params = dataclasses.replace(params, statistics=statistics)
        if self.normalize_advantage:
            mean = layout.sample_mean(weight * advantage)
            advantage = (advantage - mean) / batches.deviation(advantage, weight)
        acting = batches.flatten_all(**({"action": trajectory.action} | trajectory.extras))
        transitions |= acting | {"advantage": advantage, "target": target, "weight": weight}
        if isinstance(batches, Segments):
            situation = self.situation(trajectory.timestep)
            transitions = batches.cut_samples(transitions, trajectory, situation) | {"critic_carry": carry}
        return params, transitions, metrics, next_carry

    @property
    def learn_stages(self) -> tuple[Stage, ...]:
        """Return one stage for each epoch, whose steps are minibatches."""
        return tuple(Stage("update", epoch, self.num_minibatches) for epoch in range(self.num_epochs))

    def begin_learning(
        self, state: AlgoState, trajectory: Trajectory, last_timestep: TimeStep, key: Key, progress: Progress
    ) -> Learning:
        """Compute advantages and targets (algorithm 1), and shuffle the transitions for each epoch."""
        params, data, data_metrics, carry = self.compute_transitions(
            state.replicated, trajectory, last_timestep, state.sharded, key
        )
        order = self.batches.shuffle(jax.random.split(key, self.num_epochs))
        batch = jax.eval_shape(lambda: pick(data, order[:, 0, 0], *data))
        metrics = self.batches.empty_metrics(self.traced_update, params, batch, progress, epochs=self.num_epochs)
        return Learning(data | {"order": order}, carry, (params, metrics, data_metrics))

    def learn_step(self, learning: Learning, stage: str, epoch: Array, index: Array, progress: Progress) -> Learning:
        """Update on minibatch `index`."""
        del stage
        data, (params, metrics, data_metrics) = learning.data, learning.replicated
        batch = pick(data, data["order"][:, epoch, index], *(name for name in data if name != "order"))
        params, update_metrics = self.traced_update(params, batch, progress)
        row = epoch * self.num_minibatches + index
        metrics = {name: rows.at[row].set(update_metrics[name]) for name, rows in metrics.items()}
        return Learning(data, learning.sharded, (params, metrics, data_metrics))

    def end_learning(self, learning: Learning) -> tuple[AlgoState, Arrays]:
        """Update the statistics of inputs last: all updates must see inputs as the policy that acted has seen them."""
        data, (params, metrics, data_metrics) = learning.data, learning.replicated
        views = {"actor": data["observation"], "critic": data[self.view]}
        statistics = update_statistics(params.statistics, views, data["weight"], self.layout)
        return AlgoState(dataclasses.replace(params, statistics=statistics), learning.sharded), metrics | data_metrics

    # Acting

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Select actions [B, A, ...]; continuous ones are clipped to their box.

        Extras are "log_prob" float32[B, A]; for discrete actions "mask" bool[B, A, n], for continuous ones "action"
        float32[B, A, n], the samples before clipping to [-1, 1].
        """
        observation, greedy = timestep.observation, mode == "greedy"
        actor, statistics = policy_params["actor"], policy_params["statistics"]
        if self.learns_by_team:
            situation = self.situation(jax.tree.map(lambda x: x[:, None], timestep))
            outputs, carry = self.team_outputs("actor", actor, statistics, observation[:, None], situation, carry)
            outputs = outputs[:, 0]
        else:
            outputs = self.actor_outputs(actor, statistics, observation.reshape(-1, *observation.shape[2:]))
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

        def make(part: str, outputs: int) -> Network:
            shape = self.view_shapes[part]
            image = len(shape) == 3 and min(shape[:2]) >= SMALLEST_IMAGE
            deviation = None if self._discrete or part == "critic" else self.initial_std
            return self.make_team_network(part, outputs, shape, shape if image else (math.prod(shape),), deviation)

        action = self.spec.action
        actor_outputs = action.n if isinstance(action, Discrete) else 2 * math.prod(action.shape)
        return {"actor": make("actor", actor_outputs), "critic": make("critic", self.quantiles or 1)}

    @property
    def view_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of one agent's input of each network."""
        local = self.spec.observation.shape
        central = local
        if self.view == "central" and self.spec.critic_input_spec is not None:
            central = self.spec.critic_input_spec.shape
        elif self.view == "central":
            central = (math.prod(local) + math.prod(self.spec.global_state.shape),)
        return {"actor": local, "critic": central}

    @property
    def quantiles(self) -> int:
        """Return K, 0 where the critic learns the mean of returns."""
        return self.risk_quantiles if self.risk_level < 1 else 0

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
        """Return the inputs of actor and critic, {"observation" and, if in use, "central": [T, B, A, ...]}."""
        inputs = {"observation": timestep.observation}
        if self.view == "observation":
            return inputs
        central_input = functools.partial(on_policy.central_input, self.spec)
        return inputs | {"central": jax.vmap(jax.vmap(central_input))(timestep)}

    def actor_outputs(self, actor: Params, statistics: Statistics, observation: Array) -> Array:
        """Return the actor's outputs float32[N, ...] of observations [N, ...]."""
        return self.networks["actor"].apply(actor, normalize_inputs("actor", statistics, observation))

    def value(self, critic: Params, statistics: Statistics, sample: Arrays) -> Array:
        """Return values float32[N] of `inputs` [N, ...], or quantiles [N, K], normalised if the critic learns these."""
        values = self.networks["critic"].apply(critic, normalize_inputs("critic", statistics, sample[self.view]))
        return values if self.quantiles else values[:, 0]

    def team_outputs(
        self, part: str, params: Params, statistics: Statistics, views: Array, situation: Situation, carry: Carry
    ) -> tuple[Array, Carry]:
        """Return outputs and the next carry of a network for inputs [N, T, A, ...], see `run_network`."""
        flat = normalize_inputs(part, statistics, views.reshape(-1, *views.shape[3:]))
        return self.run_network(part, params, flat.reshape(views.shape), situation, carry)

    def apply_networks(
        self, learned: tuple[Params, Params], statistics: Statistics, sample: dict[str, Any]
    ) -> tuple[Array, Array, Arrays]:
        """Return the actor's outputs [N, n], values [N] and samples [N, ...], also of rows of `segments`."""
        (actor, critic), observation = learned, sample["observation"]
        if not self.learns_by_team:
            outputs = self.actor_outputs(actor, statistics, observation)
            return outputs, self.value(critic, statistics, sample), sample
        situation, view = sample["situation"], sample[self.view]
        outputs, _ = self.team_outputs("actor", actor, statistics, observation, situation, sample["carry"])
        value, _ = self.team_outputs("critic", critic, statistics, view, situation, sample["critic_carry"])
        outputs, value = (x.reshape(-1, x.shape[-1]) for x in (outputs, value))
        return outputs, value if self.quantiles else value[:, 0], self.flatten_rows(sample)

    def fresh_statistics(self) -> Statistics:
        """Return statistics of no inputs and no targets, of those that are in use."""
        box = self.spec.observation
        needs_scaling = len(box.shape) == 1 and max(-box.lowest, box.highest) > INPUT_LIMIT
        enabled = {"always": True, "never": False, "auto": needs_scaling}[self.normalize_observation]
        shapes: dict[str, tuple[int, ...]] = {"value": ()} if self.normalize_value else {}
        if enabled:
            shapes |= self.view_shapes
        return {name: start(shape) for name, shape in shapes.items()}

    # State and sizes

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks and statistics, or those of `inputs`, with fresh optimizers and an empty memory."""
        actor, critic = (self.learner(*fresh) for fresh in self.fresh_networks(key, inputs).items())
        statistics = self.fresh_statistics() if inputs is None else inputs["statistics"]
        return AlgoState(PpoParameters(actor, critic, statistics), self.team_carry("critic"))

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
    def most_samples(self) -> int:
        """Return how many samples of a rollout count at most: the row after an episode's end does not."""
        ends = 0 if self.rollout_steps == 0 else self.steps // (self.spec.horizon + 1)
        return self.layout.num_envs * self.spec.num_agents * (self.steps - ends)

    @property
    def batches(self) -> Minibatches:
        """Return the minibatches of a rollout, see `segments` for those of teams."""
        agents, count, row = self.spec.num_agents, self.num_minibatches, self.row_samples(self.steps)
        rows = self.layout.num_envs // self.layout.shards * self.steps * agents // row
        return (Segments if self.learns_by_team else Minibatches)(self.layout, agents, rows, count, rows // count, row)

    @property
    def gradient_samples(self) -> int:
        return self.batches.size * self.batches.row_samples

    def summary(self) -> list[str]:
        view = "the centralised view" if self.view == "central" else "what its agent observes"
        return [
            f"An iteration collects {self.steps} steps of {self.layout.num_envs} environments and trains for "
            f"{self.num_epochs} epochs of {self.num_minibatches} minibatches of "
            f"{self.gradient_samples * self.layout.shards:,} samples; a critic sees {view}."
        ]
