"""Continuous actions: between the environment's box and [-1, 1], in which algorithms act and store."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from envs_jax.base import Array, Box, EnvSpec


@dataclasses.dataclass(frozen=True)
class BoxActions:
    """Actions in a bounded box of floats, n numbers per agent."""

    box: Box

    @classmethod
    def of(cls, spec: EnvSpec, algorithm: str) -> "BoxActions":
        """Return the actions of an environment. Raises ValueError if they are not floats with bounds."""
        box: Any = spec.action
        if not isinstance(box, Box):
            raise ValueError(
                f"{algorithm} needs continuous actions, '{spec.name}' has discrete ones: use an algorithm for these, "
                "such as ppo, ddpg or coma"
            )
        if not (jnp.issubdtype(box.dtype, jnp.floating) and (box.high - box.low) / 2 < math.inf):
            raise ValueError(
                f"{algorithm} needs float actions with bounds, those of '{spec.name}' are {jnp.dtype(box.dtype)} from "
                f"{box.low} to {box.high}: give its action Box both"
            )
        return cls(box)

    @property
    def size(self) -> int:
        """Return n."""
        return math.prod(self.box.shape)

    @property
    def _half_width(self) -> float:
        return (self.box.high - self.box.low) / 2

    @property
    def _unit(self) -> bool:
        return (self.box.low, self.box.high) == (-1.0, 1.0)

    def normalize(self, action: Array) -> Array:
        """Rescale actions [..., A, *box] of the environment to float32[..., A, n] in [-1, 1]."""
        lead = action.shape[: action.ndim - len(self.box.shape)]
        action = action.reshape(*lead, self.size).astype(jnp.float32)
        return action if self._unit else (action - self.box.low) / self._half_width - 1

    def denormalize(self, action: Array) -> Array:
        """Rescale actions [B, A, n] in [-1, 1] to the environment's box, [B, A, *box]."""
        if not self._unit:
            outward = self.box.low + self._half_width * (action + 1)
            action = jnp.clip(outward, self.box.low, self.box.high)  # rounding may exceed the bounds
        return action.reshape(*action.shape[:2], *self.box.shape).astype(self.box.dtype)
