"""Targets computed from a trajectory, each a function of ONE sequence over time; callers vmap."""

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from jaxrl.common.shapes import Bool, Float32, assert_equal_shape, assert_rank


def lambda_returns(
    reward_t: Float32[Array, "T"],
    discount_t: Float32[Array, "T"],
    value_t: Float32[Array, "T"],
    lambda_t: Float32[Array, "T"],
) -> Float32[Array, "T"]:
    """TD(lambda) targets, y_{t-1} = r_t + d_t [(1 - lambda_t) v_t + lambda_t y_t], with y_T = v_T after the last step.

    Args:
        reward_t: reward after each step.
        discount_t: gamma, or 0 where the episode terminated.
        value_t: value of the state after each step.
        lambda_t: lambda, or 0 where the sequence is cut (a truncated episode).

    Returns:
        target of each step.

    References:
        Sutton and Barto, Reinforcement Learning, 2nd edition, equation 12.18, in recursive form.
    """
    assert_rank(reward_t, 1)
    assert_equal_shape([reward_t, discount_t, value_t, lambda_t])

    def backward(target: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, discount, value, lambda_ = row
        target = reward + discount * ((1 - lambda_) * value + lambda_ * target)
        return target, target

    _, targets = jax.lax.scan(backward, value_t[-1], (reward_t, discount_t, value_t, lambda_t), reverse=True)
    return targets


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
        gamma: discount.
        lambda_: mixing of n-step returns.
        longest: steps of the longest episode.

    Returns:
        targets, discounted returns.
    """
    assert_rank(reward_t, 1)
    assert_equal_shape([reward_t, done_t, value_tm1])
    steps = reward_t.shape[0]
    t = jnp.arange(steps)
    end = jnp.flip(jax.lax.cummin(jnp.flip(jnp.where(done_t, t, steps - 1))))  # e, last index of each episode
    length = end - t + 1  # M
    started_behind_end = jnp.concatenate([jnp.zeros(1, bool), done_t[:-1]])

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
    (target, _, full), _ = jax.lax.scan(add, (zeros, zeros, zeros), jnp.arange(1, longest + 1))
    target = target + jnp.where(end < steps - 1, power(lambda_, length + 1) * full, 0.0)
    target = (1 - lambda_) * target
    return jnp.where(started_behind_end, 0.0, target), jnp.where(started_behind_end, 0.0, full)
