"""The collective's state: parameters and optimizers, and the carry of acting."""

from envs_jax.base import Array, pytree
from jaxrl.algos.base import Learner
from jaxrl.algos.collective.transformer import Window
from jaxrl.common.types import Params


@pytree
class CollectiveParameters:
    """Parameters and optimizers, the same on every device.

    Attributes:
        workers: {"actor", "critic", "log_alpha"} of all workers, leaves [K, ...].
        learners: {"encoder", "actor", "critic": Learner}, their params as flax has them; critics' leaves are [C, ...].
        coded: int32[], rows of the dataset already encoded by the trained transformer.
    """

    workers: Params
    learners: dict[str, Learner]
    coded: Array


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
