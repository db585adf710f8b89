"""The collective's networks, a transformer for task codes, and actor and critics of code and state; and its state.

Layout letters: N samples, D observation dims, s state dims, n action dims, c code dims, C critics.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, pytree
from jaxrl.algos.base import Learner
from jaxrl.algos.collective import transformer
from jaxrl.algos.collective.transformer import TrajectoryTransformer, Window
from jaxrl.algos.sac import split_gaussian
from jaxrl.common.shapes import Float32, assert_equal_shape, assert_shape
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn.networks import MLP


@pytree
class CollectiveParameters:
    """Parameters and optimizers, the same on every device."""

    workers: Params  # {"actor", "critic", "log_alpha"} of all workers, leaves [K, ...]
    # {"encoder", "actor", "critic": Learner}, their params as flax has them; critics' leaves are [C, ...]
    learners: dict[str, Learner]
    coded: Array  # int32[], rows of the dataset already encoded by the trained transformer


@pytree
class Carry:
    """The carry of acting, leaves [B, ...]."""

    window: Window  # the last steps
    action: Array  # float32[B, n], the latest
    step: Array  # int32[B], steps of the episode so far
    episode: Array  # int32[B], number of the episode in its environment


@dataclasses.dataclass(frozen=True)
class Networks:
    """The modules, and functions of their parameters."""

    encoder: TrajectoryTransformer  # a window -> its code and the reconstructed tokens
    actor: MLP  # [code, state] float32[N, c + s] -> mean and raw deviation float32[N, 2 n]
    critic: MLP  # [code, state, action] float32[N, c + s + n] -> float32[N, 1]
    num_critics: int  # C, number of critics
    entries: tuple[int, ...]  # observation entries that form the state; none = all

    def init(self, key: Key) -> dict[str, Params]:
        """Return fresh "encoder", "actor" and "critic", the latter's leaves [C, ...]."""
        key_encoder, key_actor, key_critic = jax.random.split(key, 3)
        sizes = (self.encoder.code, self.encoder.states, self.encoder.actions)
        code, state, action = (jnp.zeros((1, n), jnp.float32) for n in sizes)
        window = jax.tree.map(lambda x: x[0], self.first_window(state))
        inputs = jnp.concatenate([code, state, action], axis=-1)
        return {
            "encoder": self.encoder.init(key_encoder, window),
            "actor": self.actor.init(key_actor, inputs[:, : -self.encoder.actions]),
            "critic": jax.vmap(lambda k: self.critic.init(k, inputs))(jax.random.split(key_critic, self.num_critics)),
        }

    def states(self, observation: Array) -> Array:
        """Return the states float32[..., s] of flat observations [..., D]."""
        observation = observation.astype(jnp.float32)
        return observation[..., np.array(self.entries)] if self.entries else observation

    def first_window(self, state: Array) -> Window:
        """Return the window [N, ...] at an episode's first state float32[N, s]."""
        return transformer.first_window(state, self.encoder.actions, self.encoder.steps)

    def codes(self, encoder: Params, window: Window) -> Array:
        """Return the task codes float32[N, c] of windows [N, ...]."""
        return jax.vmap(lambda one: self.encoder.apply(encoder, one)[0])(window)

    def gaussian(self, actor: Params, code: Array, state: Array) -> tuple[Array, Array]:
        """Mean and log standard deviation before squashing, each float32[N, n], of codes [N, c] and states [N, s]."""
        inputs = jnp.concatenate([code, state], axis=-1)
        return split_gaussian(jnp.asarray(self.actor.apply(actor, inputs)))

    def values(self, critic: Params, code: Array, state: Array, action: Array) -> Array:
        """Q float32[C, N]."""
        inputs = jnp.concatenate([code, state, action], axis=-1)
        return jax.vmap(lambda params: jnp.asarray(self.critic.apply(params, inputs))[:, 0])(critic)

    def action_distribution(
        self, policy_params: PolicyParams, window: Window, zero_code: bool = False
    ) -> tuple[Array, Array]:
        """Return the policy's Gaussian before squashing, mean and log standard deviation, each float32[N, n].

        Args:
            policy_params: {"encoder", "actor"}.
            window: [N, ...].
            zero_code: replace the task code by zeros, as an ablation.
        """
        empty = (len(window.state), self.encoder.code)
        code = jnp.zeros(empty, jnp.float32) if zero_code else self.codes(policy_params["encoder"], window)
        return self.gaussian(policy_params["actor"], code, window.state[:, -1])


def distillation_loss(
    mean: Float32[Array, "N n"],
    log_std: Float32[Array, "N n"],
    mu: Float32[Array, "N n"],
    expert_log_std: Float32[Array, "N n"],
    weight: Float32[Array, "N"],
) -> Float32[Array, ""]:
    """Return the distance of a squashed Gaussian from an expert's, mean over samples and action dims.

    (tanh(mean) - mu)^2 + 0.2 (log_std - expert_log_std)^2 * 2 / max(2, -expert_log_std): errors in log_std count less
    where the expert is nearly deterministic.

    mean, log_std: before squashing; mu: the expert's squashed mean.
    """
    assert_equal_shape([mean, log_std, mu, expert_log_std])
    assert_shape(weight, mean.shape[:-1])
    spread = 2.0 / jnp.maximum(2.0, -expert_log_std)
    error = jnp.square(jnp.tanh(mean) - mu) + 0.2 * spread * jnp.square(log_std - expert_log_std)
    return jnp.mean(weight[:, None] * error)
