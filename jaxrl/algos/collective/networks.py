"""The collective's networks: a transformer that makes task codes, an actor and critics of code and state.

Layout letters: N samples, D numbers of an observation, s of a state, n of an action, c of a code, C critics.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from jaxrl.algos.collective import transformer
from jaxrl.algos.collective.transformer import TrajectoryTransformer, Window
from jaxrl.nn.networks import MLP


@dataclasses.dataclass(frozen=True)
class Networks:
    """The modules, and what they compute of their parameters.

    Attributes:
        encoder: a window -> its code and what its tokens were.
        actor: [code, state] float32[N, c + s] -> mean and raw deviation float32[N, 2 n].
        critic: [code, state, action] float32[N, c + s + n] -> float32[N, 1].
        critics: C.
        entries: of an observation that make the state; none = all.
        log_std: between which bounds log standard deviations lie.
    """

    encoder: TrajectoryTransformer
    actor: MLP
    critic: MLP
    critics: int
    entries: tuple[int, ...]
    log_std: tuple[float, float]

    def init(self, key: Array) -> dict[str, Any]:
        """Fresh "encoder", "actor" and "critic", the latter's leaves [C, ...]."""
        key_encoder, key_actor, key_critic = jax.random.split(key, 3)
        sizes = (self.encoder.code, self.encoder.states, self.encoder.actions)
        code, state, action = (jnp.zeros((1, n)) for n in sizes)
        window = jax.tree.map(lambda x: x[0], self.first_window(state))
        inputs = jnp.concatenate([code, state, action], axis=-1)
        return {
            "encoder": self.encoder.init(key_encoder, window),
            "actor": self.actor.init(key_actor, inputs[:, : -self.encoder.actions]),
            "critic": jax.vmap(lambda k: self.critic.init(k, inputs))(jax.random.split(key_critic, self.critics)),
        }

    def states(self, observation: Array) -> Array:
        """float32[..., s] of flat observations [..., D]."""
        observation = observation.astype(jnp.float32)
        return observation[..., np.array(self.entries)] if self.entries else observation

    def first_window(self, state: Array) -> Window:
        """The window [N, ...] at an episode's first state float32[N, s]."""
        return transformer.first_window(state, self.encoder.actions, self.encoder.steps)

    def codes(self, encoder: Any, window: Window) -> Array:
        """Task codes float32[N, c] of windows [N, ...]."""
        return jax.vmap(lambda one: self.encoder.apply(encoder, one)[0])(window)

    def gaussian(self, actor: Any, code: Array, state: Array) -> tuple[Array, Array]:
        """Mean and log standard deviation before squashing, each float32[N, n], of codes [N, c] and states [N, s]."""
        inputs = jnp.concatenate([code, state], axis=-1)
        mean, raw = jnp.split(jnp.asarray(self.actor.apply(actor, inputs)), 2, axis=-1)
        low, high = self.log_std
        return mean, low + (high - low) / 2 * (jnp.tanh(raw) + 1)

    def values(self, critic: Any, code: Array, state: Array, action: Array) -> Array:
        """Q float32[C, N]."""
        inputs = jnp.concatenate([code, state, action], axis=-1)
        return jax.vmap(lambda params: jnp.asarray(self.critic.apply(params, inputs))[:, 0])(critic)

    def answer(self, policy: Any, window: Window, zero_code: bool = False) -> tuple[Array, Array]:
        """The policy's Gaussian before squashing, mean and log standard deviation, each float32[N, n].

        Args:
            policy: {"encoder", "actor"}.
            window: [N, ...].
            zero_code: zeros take the place of the task code, to see what it is worth.
        """
        empty = (len(window.state), self.encoder.code)
        code = jnp.zeros(empty) if zero_code else self.codes(policy["encoder"], window)
        return self.gaussian(policy["actor"], code, window.state[:, -1])
