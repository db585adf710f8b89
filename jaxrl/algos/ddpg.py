"""DDPG for teams (Lillicrap et al. 2016, arXiv 1509.02971), with continuous or discrete actions.

An update (algorithm 1) learns from a batch of stored transitions, with observations o and actions x, in this order:

1. The critics take a step on mean w sum_c (Q_c(o, x) - y)^2, where y = R + gamma^k min_c Q'_c(o', mu'(o')) comes from
   the target networks, and R sums the discounted rewards of k = `n_step` steps, fewer at an episode's end. An episode
   that terminated has no second term.
2. At every `actor_update_period`th update the actor mu takes a step on - mean Q(o, mu(o)) with the new critics, plus
   regularisers.
3. At every `target_update_period`th update the target networks Q' and mu' move towards Q and mu by the share `tau`.

The weight w is 1, and 0 for padding of the batch. `off_policy` says when updates are made. Weights are shared by all
agents; critics are local, unless BiCNet (Peng et al. 2017, arXiv 1703.10069) mixes the agents. Twin critics, delayed
updates and smoothed targets of TD3 (Fujimoto et al. 2018, arXiv 1802.09477) are settings.

Discrete actions are treated as in the 3v3 snakes baseline (jidiai/Competition_3v3snakes) by default: the actor's
softmax vector is the continuous action that critic and replay see, and the environment gets an action drawn from it.
The default settings are the published ones of the snakes baseline, except for `masking`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from envs_jax.base import Array, Discrete, TimeStep, pytree
from envs_jax.progress import Progress, total
from jaxrl.algos.base import RATE, UNIT, AlgoState, Learner, Mode, Trajectory, is_used, setting
from jaxrl.algos.box_actions import BoxActions, draw_actions
from jaxrl.algos.off_policy import OffPolicy, compute_means
from jaxrl.common.shapes import Bool, Float32
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions
from jaxrl.nn.networks import Network, TeamNet

# Layout letters besides T, B, A, S: N samples, C critics, n numbers of an action vector x, m samples of a shard.

# Settings that only discrete actions, and only continuous actions, have.
DISCRETE: tuple[str, ...] = ("entropy_weight", "action_gradient", "eps_start", "eps_decay", "eps_min")
CONTINUOUS: tuple[str, ...] = ("exploration_noise", "target_noise", "target_noise_clip")


def masked_softmax(
    logits: Float32[Array, "*batch n"], mask: Bool[Array, "*batch n"] | None
) -> Float32[Array, "*batch n"]:
    """Softmax over open actions, or over all (arXiv 2006.14171)."""
    return jax.nn.softmax(logits if mask is None else distributions.mask_logits(logits, mask))


@pytree
class DdpgParameters:
    """Parameters and optimizers, the same on every device.

    Attributes:
        actor: Learner.
        critic: Learner of all critics.
        target_actor, target_critic: their slowly updated copies.
        shown: {name: float32[]}, metrics of the actor's last step.
    """

    actor: Learner
    critic: Learner
    target_actor: Params
    target_critic: Params
    shown: Any


@dataclasses.dataclass(frozen=True)
class Ddpg(OffPolicy):
    """Deep deterministic policy gradients with a replay, for discrete actions or continuous ones in a box."""

    gamma: float = setting(0.95, "discount factor per step", between=UNIT)
    tau: float = setting(0.001, "share by which an update moves target networks to the trained ones", between=UNIT)
    actor_lr: float = setting(1e-4, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(1e-4, "learning rate of the critic (Adam)", between=RATE)
    max_grad_norm: float = setting(
        1.0, "clip gradients of each network to this global norm; 0 = never", between=(0, 1e9)
    )
    num_critics: int = setting(
        1, "number of critics; targets use the smallest value (arXiv 1802.09477), the actor the mean", between=(1, 100)
    )
    eps_start: float = setting(0.5, "exploration rate at the start (discrete actions)", between=UNIT)
    eps_decay: float = setting(
        0.99998,
        "multiply the exploration rate by this at each environment step, all environments together",
        between=UNIT,
    )
    eps_min: float = setting(0.0, "lower bound of the exploration rate", between=UNIT)
    exploration_noise: float = setting(
        0.1, "standard deviation of the noise on explored actions (continuous, scaled to [-1, 1])", between=(0, 10)
    )
    target_noise: float = setting(
        0.0, "standard deviation of the noise on target actions (continuous; TD3: 0.2)", between=(0, 10)
    )
    target_noise_clip: float = setting(0.5, "clip the noise on target actions to +/- this (TD3: 0.5)", between=(0, 2))
    action_gradient: Literal["softmax", "expected"] = setting(
        "softmax",
        "for discrete actions. softmax: critics see the softmax vector (published); expected: critics give a value per "
        "action, and the actor maximizes their mean (arXiv 1709.00503)",
    )
    network: Literal["mlp", "bicnet"] = setting(
        "mlp", "mlp: agents do not communicate; bicnet: an LSTM over the agents (arXiv 1703.10069)"
    )
    first_layer: Literal["linear", "relu"] = setting(
        "linear", "linear: no ReLU after the first layer (published); relu: a ReLU there"
    )
    layer_norm: bool = setting(False, "apply layer norm before each ReLU (arXiv 1607.06450)")
    initializer: Literal["torch", "he"] = setting("torch", "torch: PyTorch's default; he: He normal, small last layer")
    entropy_weight: float = setting(
        0.0, "weight of the actor's entropy bonus (discrete actions; arXiv 1602.01783)", between=(0, 1e6)
    )
    logit_weight: float = setting(
        0.0,
        "weight of the actor's mean squared outputs in its loss, which keeps softmax and tanh from saturating",
        between=(0, 1e6),
    )
    masking: bool = setting(
        True,
        "for discrete actions: take only those that the environment's mask allows, if it has one (arXiv 2006.14171); "
        "false: also take closed actions, as the published trainers do",
    )

    compatible_settings: ClassVar[tuple[str, ...]] = ("scale_observation", "first_layer")
    sweepable: ClassVar[tuple[str, ...]] = (
        *OffPolicy.sweepable, "eps_start", "eps_min", "exploration_noise", "entropy_weight", "logit_weight",
    )  # fmt: skip

    def __post_init__(self) -> None:
        kind = "discrete"
        needed = "continuous"
        ignored = CONTINUOUS
        if not self._discrete:
            BoxActions.from_spec(self.spec, "ddpg")
            kind = "continuous"
            needed = "discrete"
            ignored = DISCRETE
        for field in dataclasses.fields(self):
            if field.name in ignored and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} needs {needed} actions, '{self.spec.name}' has {kind} ones: remove it")
        super().__post_init__()

    # One update (algorithm 1)

    def value(self, critic: Params, observation: Array, vector: Array, over_critics: Callable[[Array], Array]) -> Array:
        """Q(o, x) of vectors [N, A, n], `over_critics` of the critics' values float32[C, N, A].

        Critics with a value per action give the expected one, sum_a x(a) Q(o, a), with the gradient of all actions at
        once (Asadi et al. 2017, "Mean Actor-Critic", arXiv 1709.00503, equation 4).
        """
        if not self._expected:
            return over_critics(self.outputs("critic", critic, observation, vector))
        values = over_critics(self.outputs("critic", critic, observation))
        return jnp.sum(jnp.broadcast_to(vector, values.shape) * values, axis=-1)

    def compute_target(self, params: DdpgParameters, sample: dict[str, Array]) -> Array:
        """Return y = R + gamma^k Q'(o', x') (equation 5): x' by the target actor, Q' by the smallest target critic."""
        observation = sample["next_observation"]
        outputs = self.outputs("actor", params.target_actor, observation)
        vector = self.actor_vector(outputs, sample.get("next_mask"))
        if "noise" in sample:  # arXiv 1802.09477, equation 14
            clip = self.target_noise_clip
            vector = jnp.clip(vector + jnp.clip(self.target_noise * sample["noise"], -clip, clip), -1, 1)
        value = self.value(params.target_critic, observation, vector, lambda values: values.min(0))
        return self.n_step_target(sample, value)

    def critic_values(self, critic: Params, sample: dict[str, Array]) -> Array:
        vector = self.stored_vector(sample["action"])
        return self.value(critic, sample["observation"], vector, lambda values: values)

    def actor_loss(self, actor: Params, sample: dict[str, Array], critic: Params) -> tuple[Array, dict[str, Array]]:
        """Return - Q(o, x) of the actor's action x, mean over samples, agents and critics, plus regularisers."""
        outputs = self.outputs("actor", actor, sample["observation"])
        vector = self.actor_vector(outputs, sample.get("mask"))
        value = self.value(critic, sample["observation"], vector, lambda values: values.mean(0))
        used = (sample["weight"] > 0).astype(jnp.float32)[:, None]
        loss = -used * value
        metrics = {}
        if self._discrete:
            metrics["policy_entropy"] = used * distributions.entropy(vector)
        if is_used(self.entropy_weight):
            loss = loss - self.entropy_weight * metrics["policy_entropy"]
        if is_used(self.logit_weight):
            loss = loss + self.logit_weight * used * jnp.mean(jnp.square(outputs), axis=-1)
        return loss.mean(), compute_means(actor_loss=loss, **metrics)

    def update_actor(self, params: DdpgParameters, batch: dict[str, Array], progress: Progress) -> dict[str, Any]:
        loss = functools.partial(self.actor_loss, critic=params.critic.params)
        gradient, (_, metrics) = self.layout.gradient(loss, params.actor.params, batch)  # equation 6
        actor, norm = self.step("actor", params.actor, gradient, progress)
        return {"actor": actor, "shown": metrics | {"actor_grad_norm": norm}}

    # Action vectors

    @property
    def _discrete(self) -> bool:
        return isinstance(self.spec.action, Discrete)

    @property
    def _expected(self) -> bool:
        """Whether critics have a value for each discrete action, and no action as input."""
        return self._discrete and self.action_gradient == "expected"

    @property
    def actions(self) -> BoxActions:
        return BoxActions.from_spec(self.spec, "ddpg")

    def actor_vector(self, outputs: Array, mask: Array | None) -> Array:
        return masked_softmax(outputs, mask) if self._discrete else jnp.tanh(outputs)

    def stored_vector(self, stored: Array) -> Array:
        """Return the vector x float32[N, A, n] of stored actions."""
        return jax.nn.one_hot(stored, self.action_size, dtype=jnp.float32) if self._expected else stored

    # Acting

    @property
    def modes(self) -> tuple[Mode, ...]:  # type: ignore[override]
        """Modes of evaluation; continuous actions are deterministic."""
        return ("greedy", "sample") if self._discrete else ("greedy",)

    def epsilon(self, progress: Progress) -> Array:
        """Return the exploration rate now: eps_start x eps_decay^steps, at least eps_min; or exploration_noise."""
        if not self._discrete:
            return jnp.float32(self.exploration_noise)
        steps = total(progress.env_steps)
        decay = jnp.exp(math.log(self.eps_decay) * steps) if self.eps_decay else (steps == 0).astype(jnp.float32)
        return jnp.maximum(self.eps_start * decay, self.eps_min)

    def schedules(self, progress: Progress) -> dict[str, Array]:
        return {"epsilon": self.epsilon(progress)}

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Explore in training; "sample" draws from the softmax (if any), "greedy" takes the most probable actions."""
        mask = timestep.action_mask if self.respects_masks else None
        vector = self.actor_vector(self.outputs("actor", policy_params, timestep.observation), mask)
        if mode == "greedy":
            action = jnp.argmax(vector, -1).astype(jnp.int32) if self._discrete else self.actions.denormalize(vector)
            return action, carry, ()
        explores = mode == "explore"
        epsilon, random = (self.epsilon(progress), self.acts_randomly(progress)) if explores else (jnp.float32(0), None)
        action, stored = self.explore(vector, mask, keys, epsilon, random)
        return action, carry, {"stored": stored}

    def explore(
        self, vector: Array, mask: Array | None, keys: Key, epsilon: Array, random: Array | None
    ) -> tuple[Array, Array]:
        """Return actions that explore.

        Args:
            vector: the actor's, float32[B, A, n].
            mask: bool[B, A, n], or None if all actions are open.
            keys: key[B].
            epsilon: float32[], exploration rate; of continuous actions the deviation of Gaussian noise.
            random: bool[], all actions are uniform; None if they never are.

        Returns:
            the environment's actions [B, A, ...]; what is stored of them, as in `action_shapes`.
        """

        def add_noise(noise: Array, vector: Array) -> Array:
            return jnp.clip(vector + epsilon * noise, -1, 1)

        if not self._discrete:
            vector = draw_actions(add_noise, keys, random, vector)
            return self.actions.denormalize(vector), vector
        open_ = jnp.ones(vector.shape, bool) if mask is None else mask
        epsilon = epsilon if random is None else jnp.where(random, 1.0, epsilon)
        draw = self._draw_actions if self._expected else self._draw_vectors
        return jax.vmap(draw, in_axes=(0, 0, 0, None))(vector, open_, keys, epsilon)

    def _draw_vectors(self, vector: Array, open_: Array, key: Key, epsilon: Array) -> tuple[Array, Array]:
        """Explore with all agents of ONE environment at once, by vectors of uniform numbers, which are stored."""
        key_coin, key_vector, key_action = jax.random.split(key, 3)
        uniform = jax.random.uniform(key_vector, vector.shape, jnp.float32)
        uniform = jnp.where(open_, jnp.maximum(uniform, 1e-30), 0.0)  # 0 is for closed actions
        vector = jnp.where(jax.random.uniform(key_coin, dtype=jnp.float32) > epsilon, vector, uniform)
        return _draw(key_action, vector), vector

    def _draw_actions(self, vector: Array, open_: Array, key: Key, epsilon: Array) -> tuple[Array, Array]:
        """Explore with each agent of ONE environment by itself; its action is stored."""
        key_action = jax.random.split(key, 3)[2]
        uniform = distributions.apply_action_mask(jnp.ones_like(vector), open_)
        action = _draw(key_action, (1 - epsilon) * vector + epsilon * uniform)
        return action, action.astype(self.action_shapes.dtype)

    @property
    def respects_masks(self) -> bool:
        return self._discrete and self.masking

    # State, networks, and what is stored

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks, or those of `inputs` ({"actor", "critic"}), fresh optimizers, an empty replay."""
        fresh = self.fresh_networks(key, inputs)
        names = ("actor_loss", "actor_grad_norm", *(["policy_entropy"] * self._discrete))
        params = DdpgParameters(
            actor=self.learner("actor", fresh["actor"]),
            critic=self.learner("critic", fresh["critic"]),
            target_actor=jax.tree.map(jnp.copy, fresh["actor"]),
            target_critic=jax.tree.map(jnp.copy, fresh["critic"]),
            shown={name: jnp.float32(0) for name in names},
        )
        return AlgoState(params, self.init_replay())

    @functools.cached_property
    def networks(self) -> dict[str, Network]:
        def standard(part: str, outputs: int) -> TeamNet:
            del part
            return TeamNet(
                outputs, self.hidden_size, self.depth,
                communication=self.network == "bicnet",
                rectify_first=self.first_layer == "relu",
                layer_norm=self.layer_norm,
                initializer=self.initializer,
                dtype=self.layout.compute_dtype,
            )  # fmt: skip

        size = self.action_size
        sizes = {"outputs": size} if self._expected else {"action_inputs": size}
        return {"actor": self.actor_network(standard, size), "critic": self.critic_network(standard, **sizes)}

    @property
    def action_shapes(self) -> Any:
        """Shape of the stored action: the agents' vectors float32[A, n], or their numbers [A]."""
        agents = self.spec.num_agents
        size = self.action_size
        if self._expected:
            return jax.ShapeDtypeStruct((agents,), jnp.uint8 if size <= 256 else jnp.int32)
        return jax.ShapeDtypeStruct((agents, size), jnp.float32)

    def stored_action(self, trajectory: Trajectory) -> Any:
        return trajectory.extras["stored"]

    def noise(self, key: Key, count: int) -> Array | None:
        """Return the noise on target actions [count, A, n], None without any."""
        if self._discrete or not self.target_noise:
            return None
        return jax.random.normal(key, (count, self.spec.num_agents, self.action_size), jnp.float32)


def _draw(key: Key, chances: Array) -> Array:
    """Sample an action int32[A] in proportion to chances [A, n]."""
    noise = distributions.draw_noise(jax.random.split(key, len(chances)), chances.shape[-1])
    return jax.vmap(distributions.sample)(noise, chances)


@dataclasses.dataclass(frozen=True)
class Bicnet(Ddpg):
    """DDPG with networks that communicate between agents (Peng et al. 2017, arXiv 1703.10069)."""

    network: Literal["mlp", "bicnet"] = setting("bicnet", "bicnet: an LSTM over the agents")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network != "bicnet":
            raise ValueError(f"bicnet with the network '{self.network}' is ddpg: use --algo ddpg")
