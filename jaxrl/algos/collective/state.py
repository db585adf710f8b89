"""What the collective keeps: parameters and optimizers, and what acting remembers."""

import dataclasses
from typing import Any

from envs_jax.base import Array, pytree
from jaxrl.algos.collective.transformer import Window


@pytree
class CollectiveParameters:
    """Parameters and optimizers, the same on every device.

    Attributes:
        workers: {"actor", "critic", "log_alpha"} of all workers, leaves [K, ...].
        encoder: of the transformer.
        actor: of the policy.
        critic: leaves [C, ...].
        encoder_optimizer, actor_optimizer, critic_optimizer: Adam's.
        coded: int32[], rows of the set whose codes are the trained transformer's.
    """

    workers: Any
    encoder: Any
    actor: Any
    critic: Any
    encoder_optimizer: Any
    actor_optimizer: Any
    critic_optimizer: Any
    coded: Array

    def learner(self, network: str) -> tuple[Any, Any]:
        """A network's parameters and the state of its optimizer."""
        return getattr(self, network), getattr(self, f"{network}_optimizer")

    def with_learner(self, network: str, params: Any, opt_state: Any) -> "CollectiveParameters":
        """The same with another network."""
        return dataclasses.replace(self, **{network: params, f"{network}_optimizer": opt_state})


@pytree
class Memory:
    """What acting remembers, leaves [B, ...].

    Attributes:
        window: Window of the last steps.
        action: float32[B, n], the newest one.
        step: int32[B], steps of the episode so far.
        episode: int32[B], a number that tells episodes of an environment apart.
    """

    window: Window
    action: Array
    step: Array
    episode: Array
