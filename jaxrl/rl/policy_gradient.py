"""Targets of a trajectory, losses of policy gradients, and the divergence from the policy that acted."""

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from jaxrl.common.shapes import Float32, assert_equal_shape

Samples = Float32[Array, "*batch"]  # transitions of a minibatch; losses are means over them


def lambda_returns(
    reward_t: Float32[Array, "T *batch"],
    discount_t: Float32[Array, "T *batch"],
    value_t: Float32[Array, "T *batch"],
    lambda_t: Float32[Array, "T *batch"],
) -> Float32[Array, "T *batch"]:
    """TD(lambda) targets, y_{t-1} = r_t + d_t [(1 - lambda_t) v_t + lambda_t y_t], with y_T = v_T after the last step.

    Rewards and values are those after each step. d is gamma, or 0 where the episode terminated; lambda is 0 where the
    sequence is cut (Sutton and Barto, Reinforcement Learning, 2nd edition, equation 12.18, in recursive form).
    """
    assert_equal_shape([reward_t, discount_t, value_t, lambda_t])

    def backward(target: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, discount, value, lambda_ = row
        target = reward + discount * ((1 - lambda_) * value + lambda_ * target)
        return target, target

    _, targets = jax.lax.scan(backward, value_t[-1], (reward_t, discount_t, value_t, lambda_t), reverse=True)
    return targets


def clipped_losses(
    log_prob: Samples, behaviour_log_prob: Samples, advantage: Samples, clip_ratio: Array | float
) -> Samples:
    """Return - min(r A, clip(r, 1 - c, 1 + c) A), r = pi(a) / behaviour(a) (arXiv 1707.06347, equation 7)."""
    assert_equal_shape([log_prob, behaviour_log_prob, advantage])
    ratio = jnp.exp(log_prob - behaviour_log_prob)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip_ratio, 1 + clip_ratio) * advantage)


def policy_gradient_loss(
    log_prob: Samples, behaviour_log_prob: Samples, advantage: Samples, weight: Samples, clip_ratio: float
) -> Float32[Array, ""]:
    """Return - mean A log pi(a), or with `clip_ratio` > 0 the clipped surrogate (arXiv 1707.06347, equation 7).

    Its ratio compares the policy with the one that chose the action.
    """
    assert_equal_shape([log_prob, behaviour_log_prob, advantage, weight])
    if clip_ratio == 0:
        return -jnp.mean(weight * advantage * log_prob)
    return jnp.mean(weight * clipped_losses(log_prob, behaviour_log_prob, advantage, clip_ratio))


def divergence(log_prob: Samples, behaviour_log_prob: Samples, weight: Samples) -> Float32[Array, ""]:
    """Return the divergence of the current from the behaviour policy: mean of r - 1 - log r, at least 0, in nats.

    With r = pi(a) / behaviour(a), its expectation is KL(behaviour || pi).
    """
    assert_equal_shape([log_prob, behaviour_log_prob, weight])
    log_ratio = log_prob - behaviour_log_prob
    return jnp.mean(weight * (jnp.expm1(log_ratio) - log_ratio))


def policy_metrics(advantage: Samples, log_prob: Samples, weight: Samples) -> dict[str, Float32[Array, ""]]:
    """Return means over samples."""
    assert_equal_shape([advantage, log_prob, weight])
    return {
        "advantage": jnp.mean(weight * advantage),
        "advantage_square": jnp.mean(weight * jnp.square(advantage)),
        "log_prob": jnp.mean(weight * log_prob),
    }
