"""Opponent pools: past policies of a run kept in the training state to play against; () for most environments."""

from typing import Any

from envs_jax.batch import BatchedEnvironment
from envs_jax.progress import Progress
from jaxrl.common.types import PolicyParams


class PoolEnvironment(BatchedEnvironment):
    """A batched environment that keeps a pool and reads it from its context."""

    def init_pool(self, policy_params: PolicyParams) -> Any:
        """Return the pool at the start: a pytree that is the same on all devices."""
        raise NotImplementedError

    def update_pool(self, pool: Any, policy_params: PolicyParams, progress: Progress) -> Any:
        """Return the pool after an iteration."""
        raise NotImplementedError

    def context(self, progress: Progress, pool: Any = ()) -> Any:
        """Return the context of `reset` and `step`, of which the pool is a part."""
        raise NotImplementedError


def init(env: BatchedEnvironment, policy_params: PolicyParams) -> Any:
    """Return the pool at the start, () where the environment keeps none."""
    return env.init_pool(policy_params) if isinstance(env, PoolEnvironment) else ()


def update(env: BatchedEnvironment, pool: Any, policy_params: PolicyParams, progress: Progress) -> Any:
    """Return the pool after an iteration."""
    return env.update_pool(pool, policy_params, progress) if isinstance(env, PoolEnvironment) else pool


def context(env: BatchedEnvironment, progress: Progress, pool: Any) -> Any:
    """Return the environment's context, with the pool where it keeps one."""
    return env.context(progress, pool) if isinstance(env, PoolEnvironment) else env.context(progress)
