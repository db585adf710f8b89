"""Soft actor-critic for continuous actions: a squashed Gaussian, twin critics, a learned temperature for each task.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), in the form of the worker of
the distilled Meta-World pipeline: one temperature per task (as in multi-task SAC, Yu et al. 2019, arXiv 1910.10897),
random steps and a burst of updates at the start, actor and target steps every so many updates. Agents share all
parameters; each agent's critic sees its own observation and action only. Losses first, then the algorithm.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array, Box, TimeStep, pytree
from envs_jax.progress import Progress, total
from jaxrl.algos.base import AlgoState, Mode, Phase, Trajectory, setting
from jaxrl.algos.off_policy import OffPolicy, means, smallest
from jaxrl.common.shapes import Float32, assert_shape
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, networks, optimizers

# Layout letters besides T, B, A, S: N samples, C critics, n action dims, K tasks, m samples of a shard.


def soft_value(
    values: Float32[Array, "C N A"], log_prob: Float32[Array, "N A"], alpha: Float32[Array, "N"]
) -> Float32[Array, "N A"]:
    """Smallest critic's Q(s, a), less alpha log pi(a | s) (arXiv 1812.05905, equation 3)."""
    assert_shape(values, (None, *log_prob.shape))
    assert_shape(alpha, log_prob.shape[:-1])
    return smallest(values) - alpha[:, None] * log_prob


def actor_losses(
    values: Float32[Array, "C N A"],
    log_prob: Float32[Array, "N A"],
    alpha: Float32[Array, "N"],
    used: Float32[Array, "N"],
) -> Float32[Array, "N A"]:
    """Alpha log pi - min Q, whose mean is the loss (arXiv 1812.05905, equation 9); `used` is 0 for ignored samples."""
    assert_shape(used, log_prob.shape[:-1])
    return -used[:, None] * soft_value(values, log_prob, alpha)


def temperature_losses(
    log_alpha: Float32[Array, "N"], log_prob: Float32[Array, "N A"], target_entropy: float, used: Float32[Array, "N"]
) -> Float32[Array, "N A"]:
    """Alpha (- log pi - H), whose mean is the loss: it raises alpha where the entropy is below H.

    Equation 18 of arXiv 1812.05905.
    """
    assert_shape([log_alpha, used], log_prob.shape[:-1])
    return used[:, None] * jnp.exp(log_alpha)[:, None] * (-log_prob - target_entropy)


@pytree
class SacParameters:
    """Parameters and optimizers, the same on every device; leaves of critics are [C, ...], of optimizers [P].

    Attributes:
        actor, critic, target_critic: of the networks.
        log_alpha: float32[K], logarithm of each task's temperature.
        actor_optimizer, critic_optimizer, alpha_optimizer: Adam's.
        shown: {name: float32[]}, metrics of the actor's last step.
    """

    actor: Params
    critic: Params
    target_critic: Params
    log_alpha: Array
    actor_optimizer: Any
    critic_optimizer: Any
    alpha_optimizer: Any
    shown: Any


@dataclasses.dataclass(frozen=True)
class Sac(OffPolicy):
    """Soft actor-critic with a replay, for continuous actions in a box."""

    compatible_settings: ClassVar[tuple[str, ...]] = ("scale_observation", "log_std_min", "log_std_max")

    batch_size: int = setting(512, "transitions per update; each holds all agents", between=(1, 2**24))
    buffer_size: int = setting(
        140_000, "capacity of the replay buffer in environment steps, all environments together", between=(1, 1e12)
    )
    alpha_lr: float = setting(1e-4, "learning rate of the temperatures (Adam); 0 = constant", between=(0, 10))
    initial_alpha: float = setting(1.0, "initial temperature of every task", between=(1e-30, 1e9))
    target_entropy: float = setting(0.0, "target entropy of an agent's policy; 0 = minus the number of action dims")
    actor_update_period: int = setting(
        1, "critic updates per update of the actor and the temperatures", between=(1, 1e9)
    )
    target_update_period: int = setting(1, "critic updates per update of the target networks", between=(1, 1e9))
    random_steps: int = setting(
        0,
        "environment steps (all environments together) with random actions; then all updates due for them, each "
        "of which also updates the actor, the temperatures and the target networks",
        between=(0, 2**24 - 1),
    )
    critic_loss_limit: float = setting(
        1e8, "a critic loss above this counts as infinite and ends the run; 0 = never", between=(0, 1e30)
    )
    initializer: Literal["torch", "he", "xavier"] = setting(
        "xavier", "xavier: Glorot uniform; he: He normal, small last layer; torch: PyTorch's default"
    )
    layer_norm: bool = setting(False, "layer norm before each ReLU of the critics (arXiv 2302.02948)")
    log_std_min: float = setting(
        -20.0, "smallest logarithm of the policy's standard deviation before squashing", between=(-50, 50)
    )
    log_std_max: float = setting(
        2.0, "largest logarithm of the policy's standard deviation before squashing", between=(-50, 50)
    )

    parts: ClassVar[tuple[str, ...]] = ("actor", "critic", "alpha")
    metric_names: ClassVar[tuple[str, ...]] = (
        *("critic_loss", "critic_grad_norm", "actor_loss", "actor_grad_norm", "target_mean", "q_mean"),
        *("policy_entropy", "alpha"),
    )

    def __post_init__(self) -> None:
        spec = self.spec
        if not isinstance(spec.action, Box):
            raise ValueError(
                f"sac needs continuous actions, '{spec.name}' has discrete ones: use an algorithm for these, such as "
                "ddpg or coma"
            )
        if not (jnp.issubdtype(spec.action.dtype, jnp.floating) and self._half_width < math.inf):
            raise ValueError(
                f"sac needs float actions with bounds, those of '{spec.name}' are {jnp.dtype(spec.action.dtype)} from "
                f"{spec.action.low} to {spec.action.high}: give its action Box both"
            )
        super().__post_init__()
        if not self.log_std_min < self.log_std_max:
            raise ValueError(f"log_std_min {self.log_std_min} must lie below log_std_max {self.log_std_max}")

    # Phases

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Random steps and the updates due after them, if any; then collect and learn."""
        phases = super().phases
        if not self.random_steps:
            return phases
        calls = self._random_calls
        random = Phase("random", self.update_interval, 0, iterations=calls)
        return (random, Phase("burst", 0, self.updates, iterations=calls), phases[-1])

    @property
    def _random_calls(self) -> int:
        """Return the calls of `learn` in the random phase, which lasts at least until a batch can be sampled."""
        if not self.random_steps:
            return 0
        return max(-(-self.random_steps // (self.update_interval * self.layout.num_envs)), self._fill_calls)

    @property
    def _steps_before(self) -> int:
        """Return the environment steps of phases before SAC's."""
        return 0

    # Replay contents

    @property
    def _box(self) -> Box:
        assert isinstance(self.spec.action, Box)
        return self.spec.action

    @property
    def _half_width(self) -> float:
        """Return half the width of the action box; internally, actions lie in [-1, 1]."""
        return (self._box.high - self._box.low) / 2

    @property
    def _actions(self) -> int:
        return math.prod(self._box.shape)

    @property
    def _observation_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        task = jax.ShapeDtypeStruct((), jnp.uint8 if self.spec.num_tasks <= 256 else jnp.int32)
        return super()._observation_spec | ({"task": task} if self.spec.num_tasks > 1 else {})

    def _observations(self, timestep: TimeStep) -> dict[str, Array]:
        return super()._observations(timestep) | ({"task": timestep.task} if self.spec.num_tasks > 1 else {})

    @property
    def _action_spec(self) -> Any:
        """Return the shape of stored actions, which lie in [-1, 1]."""
        return jax.ShapeDtypeStruct((self.spec.num_agents, self._actions), jnp.float32)

    def _stored_actions(self, trajectory: Trajectory) -> Any:
        return self._normalize_action(trajectory.action)

    def _normalize_action(self, action: Array) -> Array:
        """Rescale actions [..., A, *box] of the environment to float32[..., A, n] in [-1, 1]."""
        lead = action.shape[: action.ndim - len(self._box.shape)]
        action = action.reshape(*lead, self._actions).astype(jnp.float32)
        return action if self._unit else (action - self._box.low) / self._half_width - 1

    @property
    def _unit(self) -> bool:
        return (self._box.low, self._box.high) == (-1.0, 1.0)

    def _noise(self, key: Key, number: int) -> Array:
        """Return normal noise [number, 2, A, n] for the target's actions and for the actor's."""
        return jax.random.normal(key, (number, 2, self.spec.num_agents, self._actions))

    # Networks

    @property
    def actor_net(self) -> Any:
        """Return the actor: observations [N, A, ...] -> mean and raw deviation float32[N, A, 2 n]."""
        return self.make_network("actor", 2 * self._actions, lambda outputs: self._team(outputs, False))

    @property
    def critic_net(self) -> Any:
        return self.make_network("critic", 1, lambda outputs: self._team(outputs, self.layer_norm))

    def _team(self, outputs: int, layer_norm: bool) -> networks.TeamNet:
        return networks.TeamNet(
            outputs,
            self.hidden_size,
            self.depth,
            layer_norm=layer_norm,
            initializer=self.initializer,
            dtype=self.layout.compute_dtype,
        )

    def gaussian(self, actor: Params, observation: Array) -> tuple[Array, Array]:
        """Mean and log standard deviation before squashing, each float32[N, A, n], of observations [N, A, ...]."""
        mean, raw = jnp.split(self.actor_net.apply(actor, self._flat(observation)), 2, axis=-1)
        half = (self.log_std_max - self.log_std_min) / 2
        return mean, self.log_std_min + half * (jnp.tanh(raw) + 1)

    # Protocol

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks and temperatures, or those of `inputs`, fresh optimizers, an empty replay."""
        if inputs is None:
            log_alpha = jnp.full(self.spec.num_tasks, math.log(self.initial_alpha), jnp.float32)
            inputs = self._networks(key) | {"log_alpha": log_alpha}
        actor, critic, log_alpha = inputs["actor"], inputs["critic"], inputs["log_alpha"]
        params = SacParameters(
            actor=actor,
            critic=critic,
            target_critic=jax.tree.map(jnp.copy, critic),
            log_alpha=log_alpha,
            actor_optimizer=self.optimizer_of("actor").init(optimizers.ravel(actor)),
            critic_optimizer=self.optimizer_of("critic").init(optimizers.ravel(critic)),
            alpha_optimizer=self.optimizer_of("alpha").init(log_alpha),
            shown={name: jnp.float32(0) for name in ("actor_loss", "actor_grad_norm", "policy_entropy")},
        )
        return AlgoState(params, self._empty_replay())

    def weights(self, state: AlgoState) -> Params:
        """Return the networks and temperatures for `init(inputs=...)`."""
        return {name: getattr(state.replicated, name) for name in ("actor", "critic", "log_alpha")}

    def policy(self, state: AlgoState) -> PolicyParams:
        """Return the actor's parameters."""
        return state.replicated.actor

    def act(
        self, policy: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Sample actions from the policy, uniform ones in the random phase; "greedy" takes tanh(mean)."""
        mean, log_std = self.gaussian(policy, timestep.observation)
        if mode == "greedy":
            return self._denormalize_action(jnp.tanh(mean)), carry, ()
        random = None
        if mode == "explore" and self.random_steps:
            per_call = self.update_interval * self.layout.num_envs
            random = total(progress.env_steps) < self._steps_before + self._random_calls * per_call

        def one(mean: Array, log_std: Array, key: Key) -> Array:
            key_noise, key_random = jax.random.split(key)
            action, _ = distributions.squashed_normal(mean, log_std, jax.random.normal(key_noise, mean.shape))
            if random is None:
                return action
            return jnp.where(random, jax.random.uniform(key_random, mean.shape, minval=-1.0, maxval=1.0), action)

        return self._denormalize_action(jax.vmap(one)(mean, log_std, keys)), carry, ()

    def _denormalize_action(self, action: Array) -> Array:
        """Rescale actions [B, A, n] in [-1, 1] to the environment's box, [B, A, ...]."""
        if not self._unit:
            outward = self._box.low + self._half_width * (action + 1)
            action = jnp.clip(outward, self._box.low, self._box.high)  # rounding may exceed the bounds
        return action.reshape(*action.shape[:2], *self._box.shape).astype(self._box.dtype)

    # Updates

    def optimizer(self, name: str) -> optax.GradientTransformation:
        """Return the optimizer of "actor", "critic" (one vector [P] each) or "alpha" (log alpha [K], never clipped)."""
        return optimizers.adam(self.adam_epsilon) if name == "alpha" else super().optimizer(name)

    def update(
        self, params: SacParameters, batch: dict[str, Array], number: Array | None = None, rates: Array | float = 1.0
    ) -> tuple[SacParameters, dict[str, Array], Array | None]:
        """Update the critics; actor and temperatures on one fresh sample when `number` is due; targets likewise."""
        number = jnp.uint32(0) if number is None else number
        critic, metrics, error = self._critic_step(params, batch, rates)
        if self.target_update_period > 1:
            due = number % self.target_update_period == 0
            critic["target_critic"] = jnp.where(due, critic["target_critic"], params.target_critic)
        params = dataclasses.replace(params, **critic)
        if self.actor_update_period > 1:
            params = jax.lax.cond(
                number % self.actor_update_period == 0, lambda: self._actor_step(params, batch, rates), lambda: params
            )
        else:
            params = self._actor_step(params, batch, rates)
        loss, limit = metrics["critic_loss"], self.critic_loss_limit or math.inf
        metrics["critic_loss"] = jnp.where(loss > limit, jnp.inf, loss)  # the loop stops at a non-finite metric
        metrics["alpha"] = self.layout.deterministic(lambda x: jnp.exp(x).mean())(params.log_alpha)
        return params, metrics | params.shown, error

    def _actor_step(self, params: SacParameters, batch: dict[str, Array], rates: Array | float) -> SacParameters:
        """Take one step on actor and temperatures against the critics in the packed `params`."""
        critic = self.tree("critic", params.critic)

        def losses(learned: Any, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            mean, log_std = self.gaussian(self.tree("actor", learned["actor"]), sample["observation"])
            action, log_prob = distributions.squashed_normal(mean, log_std, sample["noise"][:, 1])
            values = self.values(critic, sample["observation"], action)
            used = (sample["weight"] > 0).astype(jnp.float32)
            log_alpha = self._of_task(learned["log_alpha"], sample)
            alpha, fixed = jax.lax.stop_gradient((jnp.exp(log_alpha), log_prob))
            of_actor = actor_losses(values, log_prob, alpha, used)
            of_alpha = temperature_losses(log_alpha, fixed, self._target_entropy, used)
            found = means(actor_loss=of_actor, policy_entropy=-used[:, None] * log_prob)
            return of_actor.mean() + of_alpha.mean(), found

        learned = {"actor": params.actor, "log_alpha": params.log_alpha}
        gradient, (_, found) = self.layout.gradient(losses, learned, batch)

        def step(params: SacParameters, gradient: Any, rates: Array) -> Any:
            actor, _, actor_optimizer, norm = self._step(
                "actor",
                gradient["actor"],
                params.actor,
                None,
                params.actor_optimizer,
                jnp.float32(self.actor_lr) * rates,
            )
            log_alpha, alpha_optimizer = optimizers.apply_gradients(
                self.optimizer_of("alpha"), gradient["log_alpha"], params.log_alpha, params.alpha_optimizer,
                self.learning_rate_of("alpha", self.alpha_lr * rates),
            )  # fmt: skip
            return actor, actor_optimizer, log_alpha, alpha_optimizer, norm

        actor, actor_optimizer, log_alpha, alpha_optimizer, norm = self.layout.deterministic(step)(
            params, gradient, jnp.float32(rates)
        )
        return dataclasses.replace(
            params,
            actor=actor,
            actor_optimizer=actor_optimizer,
            log_alpha=log_alpha,
            alpha_optimizer=alpha_optimizer,
            shown=found | {"actor_grad_norm": norm},
        )

    @property
    def _target_entropy(self) -> float:
        return self.target_entropy or -float(self._actions)

    def _of_task(self, log_alpha: Array, sample: dict[str, Array]) -> Array:
        """Select from float32[K] the entry of each sample's task, float32[N]."""
        rows = jnp.broadcast_to(log_alpha[None], (len(sample["weight"]), self.spec.num_tasks))
        return (
            distributions.select_action_value(rows, sample["task"].astype(jnp.int32))
            if self.spec.num_tasks > 1
            else rows[:, 0]
        )

    def _target(self, params: SacParameters, sample: dict[str, Array]) -> Array:
        """R + gamma^k V' with the soft value V' of an action sampled from the policy after the window."""
        observation = sample["next_observation"]
        mean, log_std = self.gaussian(params.actor, observation)
        action, log_prob = distributions.squashed_normal(mean, log_std, sample["noise"][:, 0])
        alpha = jnp.exp(self._of_task(params.log_alpha, sample))
        values = self.values(params.target_critic, observation, action)
        return self._returns(sample, soft_value(values, log_prob, alpha))

    def _taken_values(self, critic: Params, sample: dict[str, Array]) -> Array:
        return self.values(critic, sample["observation"], sample["action"])
