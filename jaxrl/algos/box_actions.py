"""Continuous actions: from the environment's box to [-1, 1], the range in which algorithms act, and back."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Box, EnvSpec
from jaxrl.common.types import Key


@dataclasses.dataclass(frozen=True)
class BoxActions:
    """Actions in a bounded box of floats, n numbers per agent."""

    box: Box

    @classmethod
    def from_spec(cls, spec: EnvSpec, algorithm: str) -> "BoxActions":
        """Return the actions of an environment. Raises ValueError if they are not floats with bounds."""
        box: Any = spec.action
        if not isinstance(box, Box):
            raise ValueError(
                f"{algorithm} needs continuous actions, '{spec.name}' has discrete ones: use an algorithm for these, "
                "such as ppo, ddpg or coma"
            )
        if not jnp.issubdtype(box.dtype, jnp.floating):
            raise ValueError(
                f"{algorithm} needs float actions, but in '{spec.name}' they are {jnp.dtype(box.dtype)} from "
                f"{box.lowest:g} to {box.highest:g}: use Discrete(n) for a choice of n, or make the Box float32 "
                "and round in the environment"
            )
        low, high = box.bounds
        if not np.isfinite([low, high]).all():
            raise ValueError(
                f"{algorithm} needs float actions with bounds, but in '{spec.name}' they are {jnp.dtype(box.dtype)} "
                f"from {box.lowest:g} to {box.highest:g}: give its action Box low and high"
            )
        if not (low < high).all():
            raise ValueError(
                f"in the action Box of '{spec.name}' low is not below high, which leaves {algorithm} nothing to "
                "choose: raise high"
            )
        return cls(box)

    @property
    def size(self) -> int:
        """Numbers of an agent's action, n."""
        return math.prod(self.box.shape)

    @property
    def _unit(self) -> bool:
        return (self.box.low, self.box.high) == (-1.0, 1.0)

    def _range(self, axes: int) -> tuple[Any, Any, Any]:
        """Low, high and half their distance: numbers, or float32[1, ..., n] (`axes` axes) where they differ."""
        low, high = self.box.bounds
        if not isinstance(self.box.low, tuple) and not isinstance(self.box.high, tuple):
            return self.box.low, self.box.high, (self.box.high - self.box.low) / 2
        shape = (*(1,) * (axes - 1), self.size)
        low, high, half = (x.astype(np.float32).reshape(shape) for x in (low, high, (high - low) / 2))
        return low, high, half

    def normalize(self, action: Array) -> Array:
        """Rescale actions [..., A, *box] of the environment to float32[..., A, n] in [-1, 1]."""
        lead = action.shape[: action.ndim - len(self.box.shape)]
        action = action.reshape(*lead, self.size).astype(jnp.float32)
        low, _, half = self._range(action.ndim)
        return action if self._unit else (action - low) / half - 1

    def denormalize(self, action: Array) -> Array:
        """Rescale actions [B, A, n] in [-1, 1] to the environment's box, [B, A, *box]."""
        if not self._unit:
            low, high, half = self._range(action.ndim)
            action = jnp.clip(low + half * (action + 1), low, high)  # rounding may exceed the bounds
        return action.reshape(*action.shape[:2], *self.box.shape).astype(self.box.dtype)


def draw_actions(draw: Callable[..., Array], keys: Key, random: Array | None, *rows: Array) -> Array:
    """Draw actions in [-1, 1], float32[B, A, n].

    Args:
        draw: (noise, *row) -> actions of one environment [A, n]; the noise [A, n] is standard normal.
        keys: key[B].
        random: bool[], draw all actions uniformly instead; None if they never are.
        rows: what `draw` works on, each [B, A, n].
    """

    def draw_one(key: Key, *row: Array) -> Array:
        key_noise, key_random = jax.random.split(key)
        shape = row[0].shape
        action = draw(jax.random.normal(key_noise, shape, jnp.float32), *row)
        if random is None:
            return action
        return jnp.where(random, jax.random.uniform(key_random, shape, jnp.float32, -1.0, 1.0), action)

    return jax.vmap(draw_one)(keys, *rows)
