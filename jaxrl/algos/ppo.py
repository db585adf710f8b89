"""PPO: clipped policy gradients with generalised advantages, a few epochs over every rollout; IPPO and MAPPO for teams.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), with the advantages of Schulman et
al. 2016 (GAE, arXiv 1506.02438). Agents share the actor. An agent's critic sees its own observation (IPPO) or the
environment's centralised view (MAPPO, Yu et al. 2022, arXiv 2103.01955). An iteration collects a rollout from every
environment and then learns in this order:

1. The critic V gives the advantages A_t = delta_t + d_t l_t A_{t+1} with delta_t = r_t + d_t V(s_{t+1}) - V(s_t), and
   the targets y = A + V(s): `prepare`. d_t is gamma, or 0 where the episode terminated; l_t is lambda, or 0 where it
   ended. With `normalize_value` the critic learns y less its running mean, over its running deviation, both including
   this rollout. With `normalize_advantage` A gets mean 0 and deviation 1.
2. Each epoch takes, on every minibatch, one step of the actor and of the critic at once: `actor_loss`, `critic_loss`.
   The actor's loss is -mean w (min(q A, clip(q, 1 - c, 1 + c) A) + b H), the critic's mean w (V(s) - y)^2 / 2, with q =
   pi(a) / pi_old(a), the policy's entropy H, b the `entropy_weight` and c the `clip_ratio`.
3. With `normalize_observation` the statistics of the inputs then include this rollout: `finish`.

The weight w is 0 where an episode has ended, as the action on its last observation is ignored, and for absent agents;
elsewhere it is constant, and its mean over a rollout is 1. With `memory` the actor and the critic are recurrent; with
`message_passing` the actor also hears other agents; without `share_parameters` each type of agent has networks of its
own; with `egocentric` networks see views turned to their agent. With a `risk_level` below 1 the critic learns quantiles
of the return, and advantages look at the mean of its worst share: `quantiles`. `on_policy` has the epochs and
minibatches, `team_policy` the networks. Minibatches have rows of L steps of K agents, both 1 unless networks need whole
teams or whole rollouts: see `minibatches`. This file goes on in this order: settings, advantages, losses, acting,
networks and their inputs, sizes.

Layout letters: T time, B environments, A agents, S logical shards, R rows of a logical shard, N rows, L steps and K
agents of a row, n actions of an agent or numbers of its action.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from envs_jax.base import SMALLEST_IMAGE, Array, Box, Discrete, EnvSpec, TimeStep, pytree
from envs_jax.progress import Progress
from jaxrl.algos.base import RATE, UNIT, AlgoState, Learner, Mode, Trajectory, setting
from jaxrl.algos.box_actions import BoxActions
from jaxrl.algos.on_policy import Arrays, OnPolicy, Prepared, check_egocentric
from jaxrl.algos.targets import lambda_targets, quantile_targets
from jaxrl.algos.team_actions import sample_sequentially
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, optimizers
from jaxrl.nn.team_policy import TeamNetwork
from jaxrl.rl.data_parallel import largest_divisor
from jaxrl.rl.policy_gradient import clipped_losses, divergence
from jaxrl.rl.quantiles import quantile_losses, tail_advantages
from jaxrl.rl.running_statistics import INPUT_LIMIT, Statistics, normalize_inputs, start, update_statistics

if TYPE_CHECKING:
    import optax

MIN_LOGIT = -69.0  # lower bound of logits when sampling, relative to the largest
INITIAL_STD = 0.6  # initial standard deviation of continuous actions in [-1, 1]


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
class Ppo(OnPolicy):
    """Proximal policy optimisation for discrete actions and for boxes, with one actor for all agents."""

    updates: ClassVar[Mapping[str, tuple[str, ...]]] = {"update": ("actor", "critic")}
    stores_carry: ClassVar[bool] = True
    acting_settings: ClassVar[dict[str, Any]] = {"num_minibatches": 1, "normalize_advantage": False}
    memory_parts: ClassVar[tuple[str, ...]] = ("actor", "critic")
    compatible_settings: ClassVar[tuple[str, ...]] = (
        "normalize_observation", "normalize_value", *OnPolicy.compatible_settings,
    )  # fmt: skip
    sweepable: ClassVar[tuple[str, ...]] = (
        "gamma", "td_lambda", "clip_ratio", "entropy_weight", "actor_lr", "critic_lr", "final_lr_fraction",
    )  # fmt: skip

    rollout_steps: int = setting(
        128, "steps of every environment per iteration; the next iteration continues the episodes; 0 = one whole new "
        "episode of each environment (where all episodes have the same length)", between=(0, 100_000),
    )  # fmt: skip
    num_minibatches: int = setting(8, "minibatches per epoch; a larger number makes them smaller", between=(1, 1e6))
    num_epochs: int = setting(4, "epochs (passes over the rollout) per iteration", between=(1, 10_000))
    gamma: float = setting(0.99, "discount factor per step", between=UNIT)
    td_lambda: float = setting(
        0.95, "lambda of the advantages (GAE, arXiv 1506.02438); 1 = returns, 0 = one step", between=UNIT
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
        1.0,
        "maximise the mean of this share of the returns, the worst ones (CVaR); 1 = of all returns",
        between=(1e-3, 1),
    )
    risk_quantiles: int = setting(32, "quantiles of the returns that the critic learns, where risk_level is below 1",
                                  between=(2, 10_000))  # fmt: skip
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
        if self.egocentric:
            check_egocentric(self.spec, central=self.critic_view == "central", local="--critic local, or ")
            if not self._discrete:
                raise ValueError(
                    f"egocentric views are for discrete actions, '{self.spec.name}' has continuous ones: use "
                    "--egocentric false"
                )
            if self._normalizes_inputs:
                raise ValueError(
                    "egocentric views are made from observations as they are, not normalised ones: use "
                    "--normalize_observation never, or --egocentric false"
                )
        super().__post_init__()
        if self.quantiles and self.risk_level * self.quantiles < 1 - 1e-6:
            raise ValueError(
                f"risk_level {self.risk_level:g} covers less than one of the {self.quantiles} quantiles: use "
                f"--risk_quantiles {math.ceil(1 / self.risk_level)} or more"
            )
        rows = self.batches.rows_per_shard
        count = self.num_minibatches
        if self.recurrent and rows % count:
            raise ValueError(
                f"num_minibatches {count} does not divide the {rows} environments of a logical shard, whose "
                f"rollouts stay whole: use {largest_divisor(rows, count)}, or change num_envs"
            )
        if self.batches.size < 1:
            kind = "samples" if self.batches.row_samples == 1 else "rows (steps of a whole team)"
            raise ValueError(
                f"num_minibatches {count} exceeds the {rows} {kind} of a logical shard: lower it, or raise num_envs or "
                "rollout_steps"
            )
        if self.normalize_advantage and self.most_samples < 2:
            raise ValueError(
                "a rollout holds only one sample, whose advantage is 0 after normalize_advantage, so the actor would "
                "not learn: raise num_envs or rollout_steps, or give --normalize_advantage false"
            )

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        """Return num_envs or, where minibatches hold whole rollouts, the environments of one."""
        if not cls.keeps_rollouts(spec, settings):
            return num_envs
        return max(num_envs // int(settings.get("num_minibatches", cls.num_minibatches)), 1)

    # Advantages

    def prepare(
        self, state: AlgoState, trajectory: Trajectory, last: TimeStep, key: Key, progress: Progress
    ) -> Prepared:
        """Return all transitions with advantages and targets (algorithm 1), and the critic's next carry."""
        del progress
        params = state.replicated
        layout = self.layout
        batches = self.batches
        rows = self.cut_rollout(trajectory) | self.cut_inputs(trajectory.timestep) | {"critic_carry": state.sharded}
        value, last_value, next_carry = self.compute_values(params, rows, last)
        rollout = trajectory, last, batches.join(value), last_value
        if self.quantiles:
            key = jax.random.fold_in(key, self.num_epochs)  # shuffles have the keys 0 to num_epochs - 1
            target = batches.cut(quantile_targets(layout, key, *rollout, self.gamma, self.td_lambda))
            advantage = tail_advantages(value, target, self.risk_level)
            mean_error = (target - value).mean(-1)
            mean_target = target.mean(-1)
        else:
            advantage = batches.cut(self.compute_advantages(*rollout))
            target = advantage + value
            mean_error = advantage
            mean_target = target
        weight = rows["weight"]
        error, spread = (batches.deviation(x, weight).ravel()[0] for x in (mean_error, mean_target))
        metrics = {
            "target_mean": layout.sample_mean(weight * mean_target),
            "explained_variance": 1 - (error / spread) ** 2,
        }
        if self.normalize_value:
            statistics = update_statistics(params.statistics, {"value": mean_target}, weight, layout)
            target = statistics["value"].normalize(target)
            params = dataclasses.replace(params, statistics=statistics)
        if self.normalize_advantage:
            mean = layout.sample_mean(weight * advantage)
            advantage = (advantage - mean) / batches.deviation(advantage, weight)
        return Prepared(params, rows | {"advantage": advantage, "target": target}, metrics, next_carry)

    def compute_advantages(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """Return A [T, B, A]: the TD(lambda) target less the value (equations 11, 12), see `lambda_targets`."""
        return lambda_targets(trajectory, last, value, last_value, self.gamma, self.td_lambda) - value

    def compute_values(self, params: PpoParameters, rows: Arrays, last: TimeStep) -> tuple[Array, Array, Any]:
        """Return V of rows, [S local, R, L, K], V [B, A] after step T, and the critic's next carry, [S local, R, ...].

        With a risk level V holds quantiles on a further axis. Values are in units of the reward.
        """

        def compute_value(rows: Arrays) -> tuple[Array, Any]:
            value, carry = self.values(params.critic.params, params, rows)
            return params.statistics["value"].denormalize(value) if self.normalize_value else value, carry

        def apply(rows: Arrays, row_samples: int) -> tuple[Array, Any]:
            inputs = {name: rows[name] for name in (self.critic_view, "situation", "critic_carry")}
            value: tuple[Array, Any] = self.layout.apply(compute_value, inputs, row_samples)
            return value

        value, next_carry = apply(rows, self.batches.row_samples)
        last_step = jax.tree.map(lambda x: x[None], last)
        situation = self.batches.cut_teams(self.situation(last_step))
        last_rows = self.cut_inputs(last_step) | {"situation": situation, "critic_carry": next_carry}
        last_value, _ = apply(last_rows, self.batches.row_agents)
        return value, self.batches.join(last_value)[0], next_carry

    # Losses

    def actor_loss(
        self, actor: Params, params: PpoParameters, minibatch: Arrays, progress: Progress
    ) -> tuple[Array, Arrays]:
        """Return the clipped surrogate with the entropy bonus (equation 9), and metrics."""
        del progress
        log_prob, entropy = self.log_prob(self.actor_outputs(actor, params, minibatch), minibatch)
        old_log_prob = minibatch["log_prob"]
        weight = minibatch["weight"]
        surrogate = clipped_losses(log_prob, old_log_prob, minibatch["advantage"], self.clip_ratio)
        actor_loss = jnp.mean(weight * surrogate)
        mean_entropy = jnp.mean(weight * entropy)
        clipped = (jnp.abs(jnp.exp(log_prob - old_log_prob) - 1) > self.clip_ratio).astype(jnp.float32)
        return actor_loss - self.entropy_weight * mean_entropy, {
            "actor_loss": actor_loss,
            "policy_entropy": mean_entropy,
            "kl": divergence(log_prob, old_log_prob, weight),
            "clip_fraction": jnp.mean(weight * clipped),
        }

    def critic_loss(
        self, critic: Params, params: PpoParameters, minibatch: Arrays, progress: Progress
    ) -> tuple[Array, Arrays]:
        """Return the mean of w (V(s) - y)^2 / 2, or of the losses of quantiles."""
        del progress
        value, _ = self.values(critic, params, minibatch)
        target = minibatch["target"]
        losses = quantile_losses(value, target) if self.quantiles else 0.5 * jnp.square(value - target)
        return jnp.mean(minibatch["weight"] * losses), {}

    def finish(self, params: PpoParameters, data: Arrays) -> PpoParameters:
        """Update the statistics of inputs last: all updates must see inputs as the policy that acted has seen them."""
        views = {"actor": data["observation"], "critic": data[self.critic_view]}
        statistics = update_statistics(params.statistics, views, data["weight"], self.layout)
        return dataclasses.replace(params, statistics=statistics)

    # Acting

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Select actions [B, A, ...]; continuous ones are clipped to their box.

        Extras are "log_prob" float32[B, A]; for discrete actions "mask" bool[B, A, n], for continuous ones "action"
        float32[B, A, n], the samples before clipping to [-1, 1].
        """
        greedy = mode == "greedy"
        seen = normalize_inputs("actor", policy_params["statistics"], timestep.observation)
        outputs, carry = self.run_actor(policy_params["actor"], seen, timestep, carry)
        if self._discrete:
            mask = True if timestep.action_mask is None else timestep.action_mask
            logits = outputs - jnp.where(mask, outputs, -jnp.inf).max(-1, keepdims=True)
            probs = jnp.exp(jnp.clip(logits, MIN_LOGIT, 0.0))  # above 0, so that an action can always be sampled
            scores = outputs if greedy else None
            action, extras = sample_sequentially(self.spec, timestep, probs, keys, scores)
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
    def networks(self) -> dict[str, TeamNetwork]:  # type: ignore[override]
        """The actor, with logits or means and logarithms of deviations, and the critic, with one value."""

        def make(part: str, outputs: int) -> TeamNetwork:
            shape = self.view_shapes[part]
            image = len(shape) == 3 and min(shape[:2]) >= SMALLEST_IMAGE
            deviation = None if self._discrete or part == "critic" else INITIAL_STD
            return self.make_team_network(part, outputs, shape, image, deviation, per_action=part == "actor")

        action = self.spec.action
        actor_outputs = action.n if isinstance(action, Discrete) else 2 * math.prod(action.shape)
        return {"actor": make("actor", actor_outputs), "critic": make("critic", self.quantiles or 1)}

    @property
    def view_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of one agent's input, by part."""
        local = self.spec.observation.shape
        central = local
        if self.critic_view == "central" and self.spec.critic_input_spec is not None:
            central = self.spec.critic_input_spec.shape
        elif self.critic_view == "central":
            central = (math.prod(local) + math.prod(self.spec.global_state.shape),)
        return {"actor": local, "critic": central}

    @property
    def quantiles(self) -> int:
        """Quantiles of a state, K; 0 where the critic learns the mean of returns."""
        return self.risk_quantiles if self.risk_level < 1 else 0

    @property
    def critic_view(self) -> str:
        """What the critic sees, "observation" or "central"; "auto" is central for teams and global states."""
        auto = self.critic == "auto" and self._has_view
        auto = auto and (self.spec.num_agents > 1 or self.spec.global_state is not None)
        return "central" if self.critic == "central" or auto else "observation"

    @property
    def _has_view(self) -> bool:
        return self.spec.critic_input_spec is not None or isinstance(self.spec.global_state, Box)

    def cut_inputs(self, timestep: TimeStep) -> Arrays:
        """Return the rows of what the critic sees, by the name of its view, of time steps [T, B, ...]."""
        views = timestep.observation
        if self.critic_view == "central":
            views = jax.vmap(jax.vmap(functools.partial(central_input, self.spec)))(timestep)
        return {self.critic_view: self.batches.cut(views)}

    def actor_outputs(self, actor: Params, params: PpoParameters, rows: Arrays) -> Array:
        """Return the actor's outputs float32[N, L, K, ...] of rows."""
        seen = normalize_inputs("actor", params.statistics, rows["observation"])
        return self.networks["actor"].apply_team(actor, seen, rows["situation"], rows["carry"])[0]

    def values(self, critic: Params, params: PpoParameters, rows: Arrays) -> tuple[Array, Any]:
        """Return values float32[N, L, K], or their quantiles on a further axis, and the next carry."""
        seen = normalize_inputs("critic", params.statistics, rows[self.critic_view])
        values, carry = self.networks["critic"].apply_team(critic, seen, rows["situation"], rows["critic_carry"])
        return values if self.quantiles else values[..., 0], carry

    def fresh_statistics(self) -> Statistics:
        """Return statistics of no inputs and no targets, of those that are in use."""
        shapes: dict[str, tuple[int, ...]] = {"value": ()} if self.normalize_value else {}
        if self._normalizes_inputs:
            shapes |= self.view_shapes
        return {name: start(shape) for name, shape in shapes.items()}

    @property
    def _normalizes_inputs(self) -> bool:
        box = self.spec.observation
        needs_scaling = len(box.shape) == 1 and max(-box.lowest, box.highest) > INPUT_LIMIT
        return {"always": True, "never": False, "auto": needs_scaling}[self.normalize_observation]

    # State and sizes

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks and statistics, or those of `inputs`, with fresh optimizers and an empty memory."""
        actor, critic = (self.learner(*fresh) for fresh in self.fresh_networks(key, inputs).items())
        statistics = self.fresh_statistics() if inputs is None else inputs["statistics"]
        return AlgoState(PpoParameters(actor, critic, statistics), self.start_carry("critic"))

    def weights(self, state: AlgoState) -> Params:
        return super().weights(state) | {"statistics": state.replicated.statistics}

    def policy(self, state: AlgoState) -> PolicyParams:
        """Return the actor, and the statistics of its inputs where they are in use."""
        actor_statistics = {name: x for name, x in state.replicated.statistics.items() if name == "actor"}
        return {"actor": super().policy(state), "statistics": actor_statistics}

    def optimizer(self, part: str) -> "optax.GradientTransformation":
        """Return Adam with the epsilon of most implementations."""
        return optimizers.adam(1e-5, self.max_grad_norm)

    @property
    def steps(self) -> int:
        """Steps of a rollout, T."""
        return self.rollout_steps or self.spec.horizon

    @property
    def restarts(self) -> bool:
        return self.rollout_steps == 0

    def split_rows(self, rows: int, row_samples: int) -> tuple[int, int]:
        del row_samples
        return self.num_minibatches, rows // self.num_minibatches

    @property
    def most_samples(self) -> int:
        """Agent transitions of a rollout that count at most: the row after an episode's end does not."""
        ends = 0 if self.rollout_steps == 0 else self.steps // (self.spec.horizon + 1)
        return self.layout.num_envs * self.spec.num_agents * (self.steps - ends)

    def summary(self) -> list[str]:
        view = "the centralised view" if self.critic_view == "central" else "what its agent observes"
        return [
            f"An iteration collects {self.steps} steps of {self.layout.num_envs} environments and trains for "
            f"{self.num_epochs} epochs of {self.num_minibatches} minibatches of "
            f"{self.gradient_samples * self.layout.shards:,} samples; a critic sees {view}."
        ]


def central_input(spec: EnvSpec, step: TimeStep) -> Array:
    """Return the centralised view [A, ...] of a state, from a time step of one environment.

    The actions in `critic_input` are unknown: -1 if they are discrete, else 0. A global state is appended to the
    agent's own observation.
    """
    if spec.critic_input is not None:
        unknown = -1 if isinstance(spec.action, Discrete) else 0
        return spec.critic_input(step, jnp.full((spec.num_agents, *spec.action.shape), unknown, spec.action.dtype))
    local = step.observation.reshape(spec.num_agents, -1).astype(jnp.float32)
    shared = jnp.broadcast_to(step.global_state.reshape(1, -1), (spec.num_agents, step.global_state.size))
    return jnp.concatenate([local, shared.astype(jnp.float32)], axis=-1)
