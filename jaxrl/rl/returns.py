"""Targets computed from a trajectory; time is the first axis."""

import jax

from envs_jax.base import Array
from jaxrl.common.shapes import Float32, assert_equal_shape


def lambda_returns(
    reward_t: Float32[Array, "T *batch"],
    discount_t: Float32[Array, "T *batch"],
    value_t: Float32[Array, "T *batch"],
    lambda_t: Float32[Array, "T *batch"],
) -> Float32[Array, "T *batch"]:
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
    assert_equal_shape([reward_t, discount_t, value_t, lambda_t])

    def backward(target: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, discount, value, lambda_ = row
        target = reward + discount * ((1 - lambda_) * value + lambda_ * target)
        return target, target

    _, targets = jax.lax.scan(backward, value_t[-1], (reward_t, discount_t, value_t, lambda_t), reverse=True)
    return targets
