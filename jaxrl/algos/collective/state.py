"""The collective's state: parameters and optimizers, and the carry of acting."""

import dataclasses
from typing import Any

from envs_jax.base import Array, pytree
from jaxrl.algos.collective.transformer import Window
from jaxrl.common.types import Params


@pytree
class CollectiveParameters:
    """Parameters and optimizers, the same on every device.

    Attributes:
        workers: {"actor", "critic", "log_alpha"} of all workers, leaves [K, ...].
        encoder: of the transformer.
        actor: of the policy.
        critic: leaves [C, ...].
        encoder_optimizer, actor_optimizer, critic_optimizer: Adam's.
        coded: int32[], rows of the dataset already encoded by the trained transformer.
    """

    workers: Params
    encoder: Params
    actor: Params
    critic: Params
    encoder_optimizer: Any
    actor_optimizer: Any
    critic_optimizer: Any
    coded: Array

    def learner(self, network: str) -> tuple[Params, Any]:
        """Return a network's parameters and optimizer state."""
        return getattr(self, network), getattr(self, f"{network}_optimizer")

    def with_learner(self, network: str, params: Params, opt_state: Any) -> "CollectiveParameters":
        """Return a copy with another network."""
        return dataclasses.replace(self, **{network: params, f"{network}_optimizer": opt_state})


@pytree
class Carry:
    """The carry of acting, leaves [B, ...].

    Attributes:
        window: Window of the last steps.
        action: float32[B, n], the latest.
        step: int32[B], steps of the episode so far.
        episode: int32[B], number of the episode in its environment.
    """

    window: Window
    action: Array
    step: Array
    episode: Array
