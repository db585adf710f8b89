"""DDPG for teams with discrete actions, as in the 3v3 snakes baseline, with BiCNet and modern options.

Lillicrap et al. 2016, "Continuous control with deep reinforcement learning" (arXiv 1509.02971), in the form of
jidiai/Competition_3v3snakes: the softmax vector of the actor is the continuous action that critic and replay see, the
environment gets an action drawn from it. Weights are shared by all agents; critics are local, unless BiCNet (Peng et
al. 2017, arXiv 1703.10069) mixes the agents. Defaults are the published settings. Losses first, then the algorithm.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from envs_jax.base import Array, Discrete, TimeStep, independent_mask, pytree
from envs_jax.progress import Progress, total
from jaxrl.algos.base import RATE, UNIT, AlgoState, Mode, Phase, Trajectory, setting
from jaxrl.algos.off_policy import OffPolicy, means
from jaxrl.common.shapes import Bool, Float32, assert_equal_shape
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, networks, optimizers

# Layout letters besides T, B, A, S: N samples, C critics, n actions, m samples of one logical shard.


def expected_value(policy: Float32[Array, "*batch n"], values: Float32[Array, "*batch n"]) -> Float32[Array, "*batch"]:
    """Sum over actions of pi(a) Q(a); its gradient by pi is that of all actions at once.

    References:
        Asadi et al. 2017, "Mean Actor-Critic", arXiv 1709.00503, equation 4.
    """
    assert_equal_shape([policy, values])
    return jnp.sum(policy * values, axis=-1)


def masked_softmax(
    logits: Float32[Array, "*batch n"], mask: Bool[Array, "*batch n"] | None
) -> Float32[Array, "*batch n"]:
    """Softmax over open actions, or over all (arXiv 2006.14171)."""
    if mask is None:
        return jax.nn.softmax(logits)
    assert_equal_shape([logits, mask])
    return jax.nn.softmax(jnp.where(mask, logits, -1e9))


def relaxed_one_hot(
    logits: Float32[Array, "*batch n"], noise: Float32[Array, "*batch n"], temperature: float
) -> Float32[Array, "*batch n"]:
    """softmax((logits + Gumbel noise) / temperature): a differentiable relaxation of a sampled action.

    References:
        Jang et al. 2017, arXiv 1611.01144, equation 2; Maddison et al. 2017, arXiv 1611.00712.
    """
    assert_equal_shape([logits, noise])
    return jax.nn.softmax((logits + noise) / temperature)


@pytree
class DdpgParameters:
    """Parameters and optimizers, the same on every device; leaves of critics are [C, ...], of optimizers [P]."""

    actor: Params
    critic: Params
    target_actor: Params
    target_critic: Params
    actor_optimizer: Any
    critic_optimizer: Any


@dataclasses.dataclass(frozen=True)
class Ddpg(OffPolicy):
    """Deep deterministic policy gradients with a replay, for discrete actions."""

    compatible_settings: ClassVar[tuple[str, ...]] = ("scale_observation", "first_layer")

    gamma: float = setting(0.95, "discount", between=UNIT)
    tau: float = setting(0.001, "rate of the soft update of the target networks", between=UNIT)
    actor_lr: float = setting(1e-4, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(1e-4, "learning rate of the critic (Adam)", between=RATE)
    max_grad_norm: float = setting(
        1.0, "clip gradients of each network to this global norm; 0 = never", between=(0, 1e9)
    )
    num_critics: int = setting(
        1, "number of critics; targets use the smallest value (arXiv 1802.09477), the actor the mean", between=(1, 100)
    )
    eps_start: float = setting(0.5, "initial exploration rate", between=UNIT)
    eps_decay: float = setting(
        0.99998, "factor on the exploration rate per step of the batch of environments", between=UNIT
    )
    eps_min: float = setting(0.0, "smallest exploration rate", between=UNIT)
    eps_spread: float = setting(
        0.0,
        "spread the exploration rates of environments from eps to eps^(1 + eps_spread) (arXiv 1803.00933)",
        between=(0, 1e3),
    )
    action_gradient: Literal["softmax", "gumbel", "expected"] = setting(
        "softmax",
        "softmax: critics see the softmax vector (published); gumbel: one-hot actions, relaxed for the actor "
        "(arXiv 1611.01144); expected: a value per action, the actor maximizes their mean (arXiv 1709.00503)",
    )
    temperature: float = setting(1.0, "temperature of relaxed Gumbel actions", between=(1e-6, 1e6))
    network: Literal["mlp", "bicnet"] = setting("mlp", "bicnet: an LSTM over the agents (arXiv 1703.10069)")
    first_layer: Literal["linear", "relu"] = setting("linear", "linear: no ReLU after the first layer (published)")
    layer_norm: bool = setting(False, "layer norm before each ReLU (arXiv 1607.06450)")
    initializer: Literal["torch", "he"] = setting("torch", "torch: PyTorch's default; he: He normal, small last layer")
    entropy_weight: float = setting(0.0, "entropy bonus of the actor (arXiv 1602.01783)", between=(0, 1e6))
    logit_weight: float = setting(
        0.0, "penalty on the actor's squared logits, which keeps the softmax from saturating", between=(0, 1e6)
    )
    masking: bool = setting(False, "take only actions that the environment's mask allows (arXiv 2006.14171)")

    network_names: ClassVar[tuple[str, ...]] = ("actor", "critic", "target_actor", "target_critic")
    metric_names: ClassVar[tuple[str, ...]] = (
        *("critic_loss", "critic_grad_norm", "actor_loss", "actor_grad_norm", "target_mean", "q_mean"),
        "policy_entropy",
    )

    def __post_init__(self) -> None:
        spec = self.spec
        if not isinstance(spec.action, Discrete):
            raise ValueError(f"ddpg needs discrete actions, '{spec.name}' has continuous ones: use --algo sac")
        if self.masking and spec.next_mask is not independent_mask:
            raise ValueError(
                f"masking needs masks that do not depend on other agents' actions, unlike '{spec.name}'s: give "
                "--masking false"
            )
        super().__post_init__()

    # Replay contents

    @property
    def _actions(self) -> int:
        assert isinstance(self.spec.action, Discrete)
        return self.spec.action.n

    @property
    def _observation_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        mask = jax.ShapeDtypeStruct((self.spec.num_agents, self._actions), jnp.bool_)
        return super()._observation_spec | ({"mask": mask} if self.masking else {})

    def _observations(self, timestep: TimeStep) -> dict[str, Array]:
        mask = self._mask(timestep)
        return super()._observations(timestep) | ({} if mask is None else {"mask": mask})

    @property
    def _action_spec(self) -> jax.ShapeDtypeStruct:
        """Return the shape of a stored action: the vector that critics take as input, or the action."""
        if self.action_gradient == "softmax":
            return jax.ShapeDtypeStruct((self.spec.num_agents, self._actions), jnp.float32)
        return jax.ShapeDtypeStruct((self.spec.num_agents,), jnp.uint8 if self._actions <= 256 else jnp.int32)

    def _stored_actions(self, trajectory: Trajectory) -> Array:
        return trajectory.extras["vector"] if self.action_gradient == "softmax" else trajectory.action

    def _noise(self, key: Key, number: int) -> Array | None:
        """Return Gumbel noise [number, 2, A, n] for the target's actions and for the actor's."""
        if self.action_gradient != "gumbel":
            return None
        return jax.random.gumbel(key, (number, 2, self.spec.num_agents, self._actions))

    @property
    def _layers(self) -> int:
        return self.depth + 8 * (self.network == "bicnet")

    # Networks

    def _team(self, outputs: int) -> networks.TeamNet:
        return networks.TeamNet(
            outputs,
            self.hidden_size,
            self.depth,
            communication=self.network == "bicnet",
            rectify_first=self.first_layer == "relu",
            layer_norm=self.layer_norm,
            initializer=self.initializer,
            dtype=self.layout.compute_dtype,
        )

    @property
    def actor_net(self) -> Any:
        """Return the actor: observations [N, A, ...] -> logits float32[N, A, n]."""
        return self.make_network("actor", self._actions, self._team)

    @property
    def critic_net(self) -> Any:
        """Return the critic: inputs [N, A, ...] -> float32[N, A, 1], or [N, A, n] with a value per action."""
        return self.make_network("critic", self._actions if self.action_gradient == "expected" else 1, self._team)

    @property
    def _critics_see_actions(self) -> bool:
        return self.action_gradient != "expected"

    def logits(self, actor: Params, observation: Array) -> Array:
        """Return logits float32[N, A, n] of observations [N, A, ...]."""
        return self.actor_net.apply(actor, self._flat(observation))

    # Protocol

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks, or those of `inputs` ({"actor", "critic"}), fresh optimizers, an empty replay."""
        networks = self._networks(key) if inputs is None else inputs
        actor, critic = networks["actor"], networks["critic"]
        params = DdpgParameters(
            actor=actor,
            critic=critic,
            target_actor=jax.tree.map(jnp.copy, actor),
            target_critic=jax.tree.map(jnp.copy, critic),
            actor_optimizer=self.optimizer_of("actor").init(optimizers.ravel(actor)),
            critic_optimizer=self.optimizer_of("critic").init(optimizers.ravel(critic)),
        )
        return AlgoState(params, self._empty_replay())

    def weights(self, state: AlgoState) -> Params:
        """Return the networks for `init(inputs=...)`."""
        return {"actor": state.replicated.actor, "critic": state.replicated.critic}

    def policy(self, state: AlgoState) -> PolicyParams:
        """Return the actor's parameters."""
        return state.replicated.actor

    def epsilon(self, progress: Progress) -> Array:
        """Return epsilon at the current step: eps_start x eps_decay^steps, at least eps_min."""
        steps = total(progress.vector_steps)
        decay = jnp.exp(math.log(self.eps_decay) * steps) if self.eps_decay else (steps == 0).astype(jnp.float32)
        return jnp.maximum(self.eps_start * decay, self.eps_min)

    def init_carry(self, policy: PolicyParams, timestep: TimeStep, indices: Array) -> Any:
        """Return the exploration exponent of each environment, float32[B], or () where all share one epsilon."""
        if not self.eps_spread:
            return ()
        return 1 + self.eps_spread * indices.astype(jnp.float32) / max(self.layout.num_envs - 1, 1)

    def act(
        self, policy: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Sample actions from the softmax, in training with exploration; "greedy" takes the most probable ones.

        With "softmax" an environment explores with all its agents at once, by a vector of uniform numbers, which is
        stored. Otherwise every agent mixes in uniform actions independently.
        """
        mask = self._mask(timestep)
        vector = masked_softmax(self.logits(policy, timestep.observation), mask)
        if mode == "greedy":
            return jnp.argmax(vector, axis=-1).astype(jnp.int32), carry, ()
        published = self.action_gradient == "softmax"
        epsilon = jnp.zeros(len(keys))
        if mode == "explore":
            epsilon = self.epsilon(progress) ** (carry if self.eps_spread else jnp.ones(len(keys)))
        open_ = jnp.ones(vector.shape, bool) if mask is None else mask

        def one(vector: Array, open_: Array, key: Key, epsilon: Array) -> tuple[Array, Array]:
            key_coin, key_vector, key_action = jax.random.split(key, 3)
            if published:
                random = jnp.where(open_, jax.random.uniform(key_vector, vector.shape), 0.0)
                vector = jnp.where(jax.random.uniform(key_coin) > epsilon, vector, random)
                chances = vector
            else:
                chances = (1 - epsilon) * vector + epsilon * distributions.apply_action_mask(
                    jnp.ones_like(vector), open_
                )
            action = jax.vmap(distributions.sample)(jax.random.split(key_action, len(vector)), chances)
            return action, vector

        action, vector = jax.vmap(one)(vector, open_, keys, epsilon)
        return action, carry, {"vector": vector} if published else ()

    def _mask(self, timestep: TimeStep) -> Array | None:
        if not self.masking:
            return None
        if timestep.action_mask is None:
            raise ValueError(f"'{self.spec.name}' gives no action masks with these settings: give --masking false")
        return timestep.action_mask

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: TimeStep | None,
        key: Key,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, dict[str, Array]]:
        """Store the trajectory, then run the updates of the phase; report epsilon too."""
        state, metrics = super().learn(state, trajectory, last_timestep, key, progress, phase)
        if metrics:
            metrics["epsilon"] = self.layout.deterministic(self.epsilon)(progress)
        return state, metrics

    # Update

    def update(
        self, params: DdpgParameters, batch: dict[str, Array], number: Array | None = None, rates: Array | float = 1.0
    ) -> tuple[DdpgParameters, dict[str, Array], Array | None]:
        """Update critic, then actor, each with its target network."""
        del number
        critic, metrics, error = self._critic_step(params, batch, rates)
        improved = self.tree("critic", critic["critic"])

        def of_actor(actor: Array, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            return self._actor_loss(self.tree("actor", actor), improved, sample)

        gradient, (_, found) = self.layout.gradient(of_actor, params.actor, batch)
        actor, target_actor, actor_optimizer, norm = self.layout.deterministic(functools.partial(self._step, "actor"))(
            gradient, params.actor, params.target_actor, params.actor_optimizer, jnp.float32(self.actor_lr) * rates
        )
        metrics |= {"actor_grad_norm": norm, **found}
        new = DdpgParameters(actor, target_actor=target_actor, actor_optimizer=actor_optimizer, **critic)
        return new, metrics, error

    def _target(self, params: DdpgParameters, sample: dict[str, Array]) -> Array:
        """R + gamma^k V' by the target networks, float32[N, A]; V' is the value of the target policy's action."""
        observation, mask = sample["next_observation"], sample.get("next_mask")
        logits = self.logits(params.target_actor, observation)
        policy = masked_softmax(logits, mask)
        if self.action_gradient == "expected":
            value = expected_value(policy, self.values(params.target_critic, observation).min(0))
        else:
            if self.action_gradient == "gumbel":
                open_logits = logits if mask is None else jnp.where(mask, logits, -1e9)
                drawn = jnp.argmax(open_logits + sample["noise"][:, 0], axis=-1)
                policy = jax.nn.one_hot(drawn, self._actions, dtype=jnp.float32)
            value = self.values(params.target_critic, observation, policy).min(0)
        return self._returns(sample, value)

    def _taken_values(self, critic: Params, sample: dict[str, Array]) -> Array:
        answer = sample["action"]
        if self.action_gradient == "expected":
            values = self.values(critic, sample["observation"])
            chosen = jnp.broadcast_to(answer.astype(jnp.int32)[None], values.shape[:-1])
            return distributions.select_action_value(values, chosen)
        if self.action_gradient == "gumbel":
            answer = jax.nn.one_hot(answer, self._actions, dtype=jnp.float32)
        return self.values(critic, sample["observation"], answer)

    def _actor_loss(self, actor: Params, critic: Params, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """- mean over samples, agents and critics of the value of the actor's action, plus regularisers."""
        observation, mask = sample["observation"], sample.get("mask")
        logits = self.logits(actor, observation)
        policy = masked_softmax(logits, mask)
        if self.action_gradient == "expected":
            value = expected_value(policy, self.values(critic, observation).mean(0))
        else:
            vector = policy
            if self.action_gradient == "gumbel":
                open_logits = logits if mask is None else jnp.where(mask, logits, -1e9)
                vector = relaxed_one_hot(open_logits, sample["noise"][:, 1], self.temperature)
            value = self.values(critic, observation, vector).mean(0)
        used = (sample["weight"] > 0).astype(jnp.float32)[:, None]
        entropy = used * distributions.entropy(policy)
        loss = -used * value
        if self.entropy_weight:
            loss = loss - self.entropy_weight * entropy
        if self.logit_weight:
            loss = loss + self.logit_weight * used * jnp.mean(jnp.square(logits), axis=-1)
        return loss.mean(), means(actor_loss=loss, policy_entropy=entropy)


@dataclasses.dataclass(frozen=True)
class Bicnet(Ddpg):
    """DDPG with networks that communicate between agents (Peng et al. 2017, arXiv 1703.10069)."""

    network: Literal["mlp", "bicnet"] = setting("bicnet", "bicnet: an LSTM over the agents")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network != "bicnet":
            raise ValueError(f"bicnet with the network '{self.network}' is ddpg: use --algo ddpg")
