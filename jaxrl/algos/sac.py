"""Soft actor-critic for continuous actions: a squashed Gaussian, twin critics, a learned temperature for each task.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), with a temperature for each
task (as in multi-task SAC, Yu et al. 2019, arXiv 1910.10897). An update learns from a batch of stored transitions,
with states s and actions a, in this order:

1. The critics take a step on mean w sum_c (Q_c(s, a) - y)^2, where y = R + gamma^k (min_c Q'_c(s', a') - alpha log
   pi(a' | s')), with the target critics Q' and a' sampled from the policy pi now. R sums the discounted rewards of
   k = `n_step` steps, fewer at an episode's end. An episode that terminated has no second term.
2. At every `actor_update_period`th update the actor takes a step on mean w (alpha log pi(a | s) - min_c Q_c(s, a)),
   with a sampled from pi and the new critics, and log alpha a step on mean w alpha (-log pi(a | s) - H), where H is the
   entropy to which the policy is steered; both losses use alpha from before the step.
3. At every `target_update_period`th update the target critics move towards the critics by the share `tau`.

The weight w is 1, and 0 for the rare sample whose draws all hit the end of an episode; means still divide by the whole
batch. Batches are drawn within each logical shard. `off_policy` says when updates are made; a run may begin with
random steps and a burst of updates. Agents share all parameters; a critic sees only an agent's own observation and
action.

Unlike the paper: the logarithm of the temperature is optimised; tanh maps the actor's outputs to the range of the log
standard deviation, where the paper's code clips (argator18's collective-learning pipeline, see `collective`, does the
same); n-step returns are not corrected for older policies; log-probabilities and entropies refer to actions in [-1, 1].
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from envs_jax.base import Array, TimeStep, pytree
from envs_jax.progress import Progress
from jaxrl.algos.base import AlgoState, Learner, Mode, Trajectory, setting
from jaxrl.algos.box_actions import BoxActions, draw_actions
from jaxrl.algos.off_policy import OffPolicy, compute_means
from jaxrl.common.shapes import Float32, assert_shape
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, optimizers
from jaxrl.nn.networks import Network, TeamNet

if TYPE_CHECKING:
    import optax

# Layout letters besides T, B, A, S: N samples, C critics, n action dims, K tasks, m samples of a shard.

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0  # before squashing
LOSS_LIMIT = 1e8  # a critic loss above this is reported as infinite, which ends the run


def soft_value(
    values: Float32[Array, "C N A"], log_prob: Float32[Array, "N A"], alpha: Float32[Array, "N"]
) -> Float32[Array, "N A"]:
    """Minimum over critics of Q(s, a), minus alpha log pi(a | s) (arXiv 1812.05905, equation 3 and section 5).

    The gradient goes to the first of the smallest critics. (The gradient of `values.min(0)` compares values with the
    minimum and divides by the number of matches: this is zero by zero where the compiler recomputes the values with
    different rounding.)
    """
    assert_shape(values, (None, *log_prob.shape))
    assert_shape(alpha, log_prob.shape[:-1])
    index = jax.lax.stop_gradient(values).argmin(0).astype(jnp.int32)
    critic = jax.lax.broadcasted_iota(index.dtype, values.shape, 0)
    return jnp.sum(jnp.where(critic == index[None], values, 0), axis=0) - alpha[:, None] * log_prob


def split_gaussian(outputs: Array) -> tuple[Array, Array]:
    """Return mean and log standard deviation before squashing, each [..., n], of an actor's outputs [..., 2 n]."""
    mean, raw = jnp.split(outputs, 2, axis=-1)
    return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) / 2 * (jnp.tanh(raw) + 1)


@pytree
class SacParameters:
    """Parameters and optimizers, the same on every device.

    Attributes:
        actor: Learner.
        critic: Learner of all critics.
        target_critic: their slowly updated copy.
        alpha: Learner of float32[K], the logarithm of each task's temperature.
        shown: {name: float32[]}, metrics of the actor's last step.
    """

    actor: Learner
    critic: Learner
    target_critic: Params
    alpha: Learner
    shown: Any


@dataclasses.dataclass(frozen=True)
class Sac(OffPolicy):
    """Soft actor-critic with a replay, for continuous actions in a box."""

    batch_size: int = setting(512, "transitions per update; each holds all agents", between=(1, 2**24))
    buffer_size: int = setting(
        140_000, "capacity of the replay buffer in environment steps, all environments together", between=(1, 1e12)
    )
    alpha_lr: float = setting(1e-4, "learning rate of the temperatures (Adam); 0 = constant", between=(0, 10))
    initial_alpha: float = setting(1.0, "initial temperature of every task", between=(1e-30, 1e9))
    target_entropy: float = setting(
        0.0, "entropy to which temperatures steer an agent's policy, nats; 0 = minus the number of action dims"
    )
    actor_update_period: int = setting(
        1, "critic updates per update of the actor and the temperatures", between=(1, 1e9)
    )
    layer_norm: bool = setting(False, "apply layer norm before each ReLU of the critics (arXiv 2302.02948)")

    parts: ClassVar[tuple[str, ...]] = ("actor", "critic", "alpha")
    sweepable: ClassVar[tuple[str, ...]] = (*OffPolicy.sweepable, "alpha_lr", "target_entropy")

    def __post_init__(self) -> None:
        BoxActions.from_spec(self.spec, "sac")
        super().__post_init__()
        if "alpha" in self.custom.networks:
            raise ValueError("networks: 'alpha' is a number for each task, not a network: leave it out")

    # One update

    def compute_target(self, params: SacParameters, sample: dict[str, Array]) -> Array:
        """Return y = R + gamma^k (1 - terminated) V' (equations 2, 3, 5), without gradient.

        R sums the discounted rewards of k = n_step steps, fewer at an episode's end; truncated episodes bootstrap. V'
        is the soft value of an action sampled in the state after them. Entropies of actions in between are left out.
        """
        mean, log_std = self.gaussian(params.actor.params, sample["next_observation"])
        action, log_prob = distributions.squashed_normal(mean, log_std, sample["noise"][:, 0])
        values = self.outputs("critic", params.target_critic, sample["next_observation"], action)
        value = soft_value(values, log_prob, jnp.exp(self.select_task(params.alpha.params, sample)))
        return self.n_step_target(sample, value)

    def critic_values(self, critic: Params, sample: dict[str, Array]) -> Array:
        return self.outputs("critic", critic, sample["observation"], sample["action"])

    def update(
        self, params: SacParameters, batch: dict[str, Array], update_index: Array, progress: Progress
    ) -> tuple[SacParameters, dict[str, Array]]:
        """Update critics, actor, temperatures and targets; a critic loss above `LOSS_LIMIT` becomes infinite."""
        params, metrics = super().update(params, batch, update_index, progress)
        loss = metrics["critic_loss"]
        metrics["critic_loss"] = jnp.where(loss > LOSS_LIMIT, jnp.inf, loss)  # the loop stops at a non-finite metric
        return params, metrics | {"alpha": jnp.exp(params.alpha.params).mean()}

    def update_actor(self, params: SacParameters, batch: dict[str, Array], progress: Progress) -> dict[str, Any]:
        """Take one step of the actor and one of the temperatures; their losses share no parameters."""

        def losses(learned: tuple[Params, Array], sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            mean, log_std = self.gaussian(learned[0], sample["observation"])
            action, log_prob = distributions.squashed_normal(mean, log_std, sample["noise"][:, 1])
            values = self.outputs("critic", params.critic.params, sample["observation"], action)
            used = (sample["weight"] > 0).astype(jnp.float32)  # 0 for padding
            log_alpha = self.select_task(learned[1], sample)
            alpha, fixed_log_prob = jax.lax.stop_gradient((jnp.exp(log_alpha), log_prob))
            actor_loss = -used[:, None] * soft_value(values, log_prob, alpha)  # equation 9
            # equation 18: raises alpha where the entropy is below its target
            alpha_loss = used[:, None] * jnp.exp(log_alpha)[:, None] * (-fixed_log_prob - self.entropy_target)
            metrics = compute_means(actor_loss=actor_loss, policy_entropy=-used[:, None] * log_prob)
            return actor_loss.mean() + alpha_loss.mean(), metrics

        learned = params.actor.params, params.alpha.params
        (actor_gradient, alpha_gradient), (_, metrics) = self.layout.gradient(losses, learned, batch)  # equation 10
        actor, norm = self.step("actor", params.actor, actor_gradient, progress)
        alpha, _ = self.step("alpha", params.alpha, alpha_gradient, progress)
        return {"actor": actor, "alpha": alpha, "shown": metrics | {"actor_grad_norm": norm}}

    @property
    def entropy_target(self) -> Array | float:
        """H, nats; by default minus the number of action dims."""
        setting_value: Any = self.target_entropy
        default = -float(self.action_size)
        if isinstance(setting_value, Array):  # in a sweep
            return jnp.where(setting_value == 0, default, setting_value)
        return setting_value or default

    def select_task(self, log_alpha: Array, sample: dict[str, Array]) -> Array:
        """Return the entry of each sample's task in float32[K], float32[N]."""
        log_alphas = jnp.broadcast_to(log_alpha[None], (len(sample["weight"]), self.spec.num_tasks))
        if self.spec.num_tasks == 1:
            return log_alphas[:, 0]
        return distributions.select_action_value(log_alphas, sample["task"].astype(jnp.int32))

    # Acting

    def gaussian(self, actor: Params, observation: Array) -> tuple[Array, Array]:
        """Mean and log standard deviation before squashing, each float32[N, A, n], of observations [N, A, ...]."""
        return split_gaussian(self.outputs("actor", actor, observation))

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Sample actions from the policy, uniform ones in the random phase; "greedy" takes tanh(mean)."""
        mean, log_std = self.gaussian(policy_params, timestep.observation)
        if mode == "greedy":
            return self.actions.denormalize(jnp.tanh(mean)), carry, ()
        random = self.acts_randomly(progress) if mode == "explore" else None

        def sample_action(noise: Array, mean: Array, log_std: Array) -> Array:
            return distributions.squashed_normal(mean, log_std, noise)[0]

        action = draw_actions(sample_action, keys, random, mean, log_std)
        return self.actions.denormalize(action), carry, ()

    # State

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks and temperatures, or those of `inputs`, fresh optimizers, an empty replay."""
        fresh = self.fresh_networks(key, inputs)
        log_alpha = jnp.full(self.spec.num_tasks, math.log(self.initial_alpha), jnp.float32)
        params = SacParameters(
            actor=self.learner("actor", fresh["actor"]),
            critic=self.learner("critic", fresh["critic"]),
            target_critic=jax.tree.map(jnp.copy, fresh["critic"]),
            alpha=self.learner("alpha", log_alpha if inputs is None else inputs["log_alpha"]),
            shown={name: jnp.float32(0) for name in ("actor_loss", "actor_grad_norm", "policy_entropy")},
        )
        return AlgoState(params, self.init_replay())

    def weights(self, state: AlgoState) -> Params:
        return super().weights(state) | {"log_alpha": state.replicated.alpha.params}

    # Networks, and what is stored

    @property
    def actions(self) -> BoxActions:
        return BoxActions.from_spec(self.spec, "sac")

    @functools.cached_property
    def networks(self) -> dict[str, Network]:
        def standard(part: str, outputs: int) -> TeamNet:
            return TeamNet(
                outputs,
                self.hidden_size,
                self.depth,
                layer_norm=self.layer_norm and part == "critic",
                initializer="xavier",
                dtype=self.layout.compute_dtype,
            )

        return {
            "actor": self.actor_network(standard, 2 * self.action_size),
            "critic": self.critic_network(standard, action_inputs=self.action_size),
        }

    def optimizer(self, part: str) -> "optax.GradientTransformation":
        """Return Adam; gradients of temperatures are never clipped."""
        return optimizers.adam(max_grad_norm=0.0 if part == "alpha" else self.max_grad_norm)

    @property
    def observation_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of observations, and of tasks if there are several."""
        tasks = self.spec.num_tasks
        shapes = super().observation_shapes
        task = jax.ShapeDtypeStruct((), jnp.uint8 if tasks <= 256 else jnp.int32)
        return shapes | {"task": task} if tasks > 1 else shapes

    def stored_observation(self, timestep: TimeStep) -> dict[str, Array]:
        rows = super().stored_observation(timestep)
        return rows | {"task": timestep.task} if self.spec.num_tasks > 1 else rows

    @property
    def action_shapes(self) -> Any:
        """Shape of actions in [-1, 1], float32[A, n]."""
        return jax.ShapeDtypeStruct((self.spec.num_agents, self.action_size), jnp.float32)

    def stored_action(self, trajectory: Trajectory) -> Any:
        return self.actions.normalize(trajectory.action)

    def noise(self, key: Key, count: int) -> Array | None:
        """Return noise float32[count, 2, A, n], for targets and for the actor."""
        return jax.random.normal(key, (count, 2, self.spec.num_agents, self.action_size), jnp.float32)
