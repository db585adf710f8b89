"""How DDPG's actor outputs become actions: what critics see, what is stored, how training explores.

Inside DDPG an action is a vector x of n numbers per agent. `Softmax` and `Expected` make one of the n discrete actions
of it, `Continuous` a point of the environment's box.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, Discrete, EnvSpec, independent_mask
from jaxrl.algos.box_actions import BoxActions
from jaxrl.common.shapes import Bool, Float32
from jaxrl.common.types import Key
from jaxrl.nn import distributions

# Settings that only discrete actions, and only continuous actions, have.
DISCRETE: tuple[str, ...] = ("entropy_weight", "action_gradient", "eps_start", "eps_decay", "eps_min")
CONTINUOUS: tuple[str, ...] = ("exploration_noise", "target_noise", "target_noise_clip")


def check_action_settings(settings: Any, spec: EnvSpec) -> None:
    """Raise ValueError for settings that do not fit the environment's actions, and for actions without bounds."""
    kind, needed, ignored = "discrete", "continuous", CONTINUOUS
    if not isinstance(spec.action, Discrete):
        _ = BoxActions.from_spec(spec, "ddpg")
        kind, needed, ignored = "continuous", "discrete", DISCRETE
    for field in dataclasses.fields(settings):
        if field.name in ignored and getattr(settings, field.name) != field.default:
            raise ValueError(f"{field.name} needs {needed} actions, '{spec.name}' has {kind} ones: remove it")
    if settings.heeds_masks and spec.next_mask is not independent_mask:
        raise ValueError(
            f"ddpg needs masks that do not depend on other agents' actions, unlike '{spec.name}'s: use coma or ppo, or "
            "give --masking false, which plays closed actions, too"
        )


def masked_softmax(
    logits: Float32[Array, "*batch n"], mask: Bool[Array, "*batch n"] | None
) -> Float32[Array, "*batch n"]:
    """Softmax over open actions, or over all (arXiv 2006.14171)."""
    return jax.nn.softmax(_open(logits, mask))


def _open(logits: Array, mask: Array | None) -> Array:
    return logits if mask is None else distributions.mask_logits(logits, mask)


def _draw(key: Key, chances: Array) -> Array:
    """Sample an action int32[A] in proportion to chances [A, n]."""
    return jax.vmap(distributions.sample)(jax.random.split(key, len(chances)), chances)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Discrete actions; the softmax vector is the action that critics and replay see (published snakes baseline).

    An environment explores with all its agents at once, by vectors of uniform numbers, which are stored.

    Attributes:
        spec: of the environment.
    """

    spec: EnvSpec

    @property
    def size(self) -> int:
        """Return n, the numbers of an action vector."""
        assert isinstance(self.spec.action, Discrete)
        return self.spec.action.n

    @property
    def critic_sizes(self) -> tuple[int, int]:
        """Return the action inputs of critics per agent, and their outputs."""
        return self.size, 1

    @property
    def rows(self) -> jax.ShapeDtypeStruct:
        """Return the shape of a stored action."""
        return jax.ShapeDtypeStruct((self.spec.num_agents, self.size), jnp.float32)

    def noise(self, key: Key, count: int) -> Array | None:
        """Return random numbers for the targets' actions, [number, A, n], or None."""
        del key, count
        return None

    def actor_vector(self, outputs: Array, mask: Array | None) -> Array:
        """Return the actor's vector x of outputs [..., n]."""
        return masked_softmax(outputs, mask)

    def target_vector(self, outputs: Array, mask: Array | None, noise: Array | None) -> Array:
        """Return the vector x for the critics' targets; noise [N, A, n]."""
        del noise
        return self.actor_vector(outputs, mask)

    def stored_vector(self, stored: Array) -> Array:
        """Return the vector x float32[N, A, n] of stored actions."""
        return stored

    def greedy(self, vector: Array) -> Array:
        """Return the environment's actions [B, A, ...] of the actor's vectors [B, A, n]."""
        return jnp.argmax(vector, axis=-1).astype(jnp.int32)

    def sample(
        self, vector: Array, mask: Array | None, keys: Key, epsilon: Array, random: Array | None
    ) -> tuple[Array, Array]:
        """Return actions that explore.

        Args:
            vector: the actor's, float32[B, A, n].
            mask: bool[B, A, n], or None if all actions are open.
            keys: key[B].
            epsilon: float32[], exploration rate.
            random: bool[], all actions are uniform; None if they never are.

        Returns:
            the environment's actions [B, A, ...]; what is stored of them, as in `rows`.
        """
        open_ = jnp.ones(vector.shape, bool) if mask is None else mask
        epsilon = epsilon if random is None else jnp.where(random, 1.0, epsilon)
        return jax.vmap(self._one, in_axes=(0, 0, 0, None))(vector, open_, keys, epsilon)

    def _one(self, vector: Array, open_: Array, key: Key, epsilon: Array) -> tuple[Array, Array]:
        key_coin, key_vector, key_action = jax.random.split(key, 3)
        uniform = jax.random.uniform(key_vector, vector.shape, jnp.float32)
        uniform = jnp.where(open_, jnp.maximum(uniform, 1e-30), 0.0)  # 0 is for closed actions
        vector = jnp.where(jax.random.uniform(key_coin, dtype=jnp.float32) > epsilon, vector, uniform)
        return _draw(key_action, vector), vector


@dataclasses.dataclass(frozen=True)
class Expected(Softmax):
    """Discrete actions; critics have a value per action, whose mean under the policy the actor maximizes.

    Asadi et al. 2017, "Mean Actor-Critic" (arXiv 1709.00503). Every agent explores by itself.
    """

    @property
    def critic_sizes(self) -> tuple[int, int]:
        return 0, self.size

    @property
    def rows(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.spec.num_agents,), jnp.uint8 if self.size <= 256 else jnp.int32)

    def stored_vector(self, stored: Array) -> Array:
        return jax.nn.one_hot(stored, self.size, dtype=jnp.float32)

    def _one(self, vector: Array, open_: Array, key: Key, epsilon: Array) -> tuple[Array, Array]:
        key_action = jax.random.split(key, 3)[2]
        uniform = distributions.apply_action_mask(jnp.ones_like(vector), open_)
        action = _draw(key_action, (1 - epsilon) * vector + epsilon * uniform)
        return action, action.astype(self.rows.dtype)


@dataclasses.dataclass(frozen=True)
class Continuous(Softmax):
    """Continuous actions: x = tanh of the outputs; epsilon is the standard deviation of Gaussian exploration.

    Attributes:
        target_deviation, target_clip: of the noise on target actions, and its largest size (Fujimoto et al. 2018,
            arXiv 1802.09477, equation 14).
    """

    target_deviation: float = 0.0
    target_clip: float = 0.5

    @property
    def _actions(self) -> BoxActions:
        return BoxActions.from_spec(self.spec, "ddpg")

    @property
    def size(self) -> int:
        return self._actions.size

    def noise(self, key: Key, count: int) -> Array | None:
        shape = (count, self.spec.num_agents, self.size)
        return jax.random.normal(key, shape, jnp.float32) if self.target_deviation else None

    def actor_vector(self, outputs: Array, mask: Array | None) -> Array:
        del mask
        return jnp.tanh(outputs)

    def target_vector(self, outputs: Array, mask: Array | None, noise: Array | None) -> Array:
        action = self.actor_vector(outputs, mask)
        if noise is None:
            return action
        return jnp.clip(action + jnp.clip(self.target_deviation * noise, -self.target_clip, self.target_clip), -1, 1)

    def greedy(self, vector: Array) -> Array:
        return self._actions.denormalize(vector)

    def sample(
        self, vector: Array, mask: Array | None, keys: Key, epsilon: Array, random: Array | None
    ) -> tuple[Array, Array]:
        del mask

        def sample_action(vector: Array, key: Key) -> Array:
            key_noise, key_random = jax.random.split(key)
            action = jnp.clip(vector + epsilon * jax.random.normal(key_noise, vector.shape, jnp.float32), -1, 1)
            if random is None:
                return action
            return jnp.where(random, jax.random.uniform(key_random, vector.shape, jnp.float32, -1.0, 1.0), action)

        vector = jax.vmap(sample_action)(vector, keys)
        return self._actions.denormalize(vector), vector
