"""COMA as the public repository dmar-bonn/ipp-marl computes it, with its bugs, for comparison.

Differences from `coma`:

* the target critic is never updated (`OriginalParameters.first_target`);
* targets are not TD(lambda): see `ipp_marl_targets`;
* the actor's loss uses the log-probability before masking, each sample weighted by its number of allowed actions.

The published reward and starts are settings of the environment: --reward_timing original --start original.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec, TimeStep, pytree
from jaxrl.algos.base import AlgoState, Trajectory, next_timesteps
from jaxrl.algos.coma import Coma, ComaParameters
from jaxrl.algos.on_policy import Arrays
from jaxrl.common.shapes import Bool, Float32, Int32, assert_equal_shape, assert_rank
from jaxrl.common.types import Key, Params
from jaxrl.nn import distributions
from jaxrl.rl.policy_gradient import Samples, policy_metrics


def original_actor_loss(
    logits: Float32[Array, "*batch n"],
    epsilon: Float32[Array, ""],
    mask: Bool[Array, "*batch n"],
    values: Float32[Array, "*batch n"],
    action: Int32[Array, "*batch"],
    weight: Samples,
) -> tuple[Float32[Array, ""], Samples, Samples]:
    """Return the loss, its advantage and its log-probability."""
    assert_equal_shape([logits, mask, values])
    assert_equal_shape([action, weight])
    mixed = distributions.epsilon_mix(logits, epsilon)
    mask = mask.astype(jnp.float32)
    allowed = mixed * mask
    action_probs = jnp.maximum(allowed / jnp.maximum(allowed.sum(-1, keepdims=True), 1e-5), 1e-5)
    advantage = distributions.select_action_value(values, action) - jnp.sum(action_probs * values * mask, axis=-1)
    advantage = jax.lax.stop_gradient(advantage)
    log_prob = jnp.log(distributions.select_action_value(mixed, action))
    return -jnp.mean(weight * advantage * log_prob * mask.mean(-1)), advantage, log_prob


def ipp_marl_targets(
    reward_t: Float32[Array, "K"],
    done_t: Bool[Array, "K"],
    value_tm1: Float32[Array, "K"],
    gamma: float,
    lambda_: float,
    longest: int,
) -> tuple[Float32[Array, "K"], Float32[Array, "K"]]:
    """Return the targets that dmar-bonn/ipp-marl computes for one agent's row of episodes, for comparison.

    They differ from TD(lambda): the first step of every episode but the first gets 0, the full return enters with
    the wrong weight, and the last bootstrap of an episode reads the next episode's first state.

    Args:
        reward_t: reward after each step; several whole episodes in a row.
        done_t: the episode ended with this step.
        value_tm1: target network's value of the action taken in each state.
        gamma, lambda_: discount, and mixing of n-step returns.
        longest: steps of the longest episode.

    Returns:
        targets; discounted returns, for comparison only.
    """
    assert_rank(reward_t, 1)
    assert_equal_shape([reward_t, done_t, value_tm1])
    steps = reward_t.shape[0]
    t = jnp.arange(steps, dtype=jnp.int32)
    end = jnp.flip(jax.lax.cummin(jnp.flip(jnp.where(done_t, t, steps - 1))))  # e, last index of each episode
    length = end - t + 1  # M, the steps from t to the end of its episode
    starts_later_episode = jnp.concatenate([jnp.zeros(1, bool), done_t[:-1]])

    def power(base: float, exponent: Array) -> Array:
        return jnp.float32(base) ** exponent.astype(jnp.float32)

    def add(sums: tuple[Array, Array, Array], m: Array) -> tuple[tuple[Array, Array, Array], None]:
        target, partial, full = sums  # partial: G_m of every t, undefined where m > M
        partial = partial + power(gamma, m - 1) * reward_t[jnp.minimum(t + m - 1, steps - 1)]
        later = jnp.minimum(t + m, steps - 1)
        bootstrap = jnp.where((t + m < steps - 1) & ~done_t[later], power(gamma, m) * value_tm1[later], 0.0)
        target = target + jnp.where(m <= length, power(lambda_, m - 1) * (partial + bootstrap), 0.0)
        return (target, partial, jnp.where(m == length, partial, full)), None

    zeros = jnp.zeros(steps, jnp.float32)
    (target, _, full), _ = jax.lax.scan(add, (zeros, zeros, zeros), jnp.arange(1, longest + 1, dtype=jnp.int32))
    target = target + jnp.where(end < steps - 1, power(lambda_, length + 1) * full, 0.0)
    target = (1 - lambda_) * target
    return jnp.where(starts_later_episode, 0.0, target), jnp.where(starts_later_episode, 0.0, full)


@pytree
class OriginalParameters(ComaParameters):
    """COMA's parameters, and the critic as it was initialised, from which targets bootstrap as in the repository.

    Nothing reads `target`.
    """

    first_target: Params


@dataclasses.dataclass(frozen=True)
class ComaOriginal(Coma):
    """COMA with the targets and the actor's loss of the public repository."""

    fixed_settings: ClassVar[Mapping[str, Any]] = {
        "clip_ratio": 0, "target_kl": 0, "tau": 0, "advantage": "critic", "normalize_advantage": False,
        "memory": "none", "message_passing": "none", "share_parameters": True,
    }  # fmt: skip

    def __post_init__(self) -> None:
        for name, neutral in self.fixed_settings.items():  # before `Algorithm` does, with advice
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"{name} does not apply to coma_original, which keeps the loss of the original repository: remove "
                    "it, or use coma"
                )
        super().__post_init__()
        if self.layout.shards > 1:
            raise ValueError("coma_original uses all episodes of a training step at once: use --logical_shards 1")
        if not self.spec.fixed_horizon:
            raise ValueError(
                f"coma_original needs episodes that all have the same length, and in '{self.spec.name}' they may end "
                "earlier: use coma"
            )

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        """Return 1, which makes one logical shard: targets need all episodes in one row."""
        return 1

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return COMA's state, with a further copy of the critic."""
        params = super().init(key, inputs).replicated
        first_target = jax.tree.map(jnp.copy, params.critic.params)
        return AlgoState(OriginalParameters(**vars(params), first_target=first_target), ())

    def target_critic(self, params: ComaParameters) -> Params:
        """Return the first critic."""
        assert isinstance(params, OriginalParameters)
        return params.first_target

    def compute_targets(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """Return the original's sums over each agent's episodes in one row, episode after episode."""
        del last_value
        steps = self.spec.horizon

        def row(x: Array) -> Array:
            """[T, B, ...] -> [B x T, ...]."""
            return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])

        next_steps = next_timesteps(trajectory, last)

        def agent_targets(reward: Array, value: Array) -> Array:
            return ipp_marl_targets(reward, row(next_steps.done), value, self.gamma, self.td_lambda, steps)[0]

        targets = jax.vmap(agent_targets, in_axes=1, out_axes=1)(row(next_steps.reward), row(value))
        return jnp.swapaxes(targets.reshape(-1, steps, value.shape[2]), 0, 1)

    def policy_loss(self, logits: Array, epsilon: Array, minibatch: Arrays) -> tuple[Array, Arrays]:
        """Return the original's loss; its log-probability is not the sampled policy's, so there is no "kl"."""
        samples = (minibatch[name] for name in ("mask", "values", "action", "weight"))
        loss, advantage, log_prob = original_actor_loss(logits, epsilon, *samples)
        return loss, policy_metrics(advantage, log_prob, minibatch["weight"])
