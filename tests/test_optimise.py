"""Adam's arithmetic, and optimizers of one's own in the place of it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.off_policy import CASES

from jaxrl.algos.base import Algorithm
from jaxrl.algos.collective.algorithm import Collective
from jaxrl.nn import optimizers
from jaxrl.rl.data_parallel import DataParallel


def test_adam_in_float32_is_adam() -> None:
    """Against float64, from the first step on; with 1 - beta^t taken in float32 the second one is off by 6e-6."""
    random = np.random.default_rng(0)
    gradients = [(10.0 ** random.uniform(-6, 2, 40) * random.choice([-1, 1], 40)).astype(np.float32) for _ in range(30)]
    adam = optimizers.adam(1e-8)
    state, step = adam.init(jnp.zeros(40)), jax.jit(adam.update)
    mu, nu = np.zeros(40), np.zeros(40)
    for t, gradient in enumerate(gradients, 1):
        mu, nu = 0.9 * mu + 0.1 * gradient, 0.999 * nu + 0.001 * gradient.astype(np.float64) ** 2
        expected = -(mu / (1 - 0.9**t)) / (np.sqrt(nu / (1 - 0.999**t)) + 1e-8)
        actual, state = step(jnp.asarray(gradient), state)
        np.testing.assert_allclose(actual, expected, rtol=5e-7, atol=2e-7 * np.abs(expected).max())


def with_sgd(algorithm: type[Algorithm]) -> Any:
    """The algorithm with plain gradient descent, as the tutorial in docs/tutorials replaces the optimizer."""

    @dataclasses.dataclass(frozen=True)
    class WithSgd(algorithm):
        def optimizer(self, part: str) -> optax.GradientTransformation:
            return optax.sgd(1.0)

    return WithSgd


def test_a_collective_takes_another_optimiser_whose_steps_shrink() -> None:
    algo = with_sgd(Collective)(CASES["student"].env.spec, DataParallel(1), context_length=4, final_lr_fraction=0.5)
    transformer, *_ = algo.stages
    last, optimizer, gradient = transformer.updates, algo.chain("encoder"), np.float32([3.0, -4.0])
    state, update = optimizer.init(gradient), jax.jit(optimizer.update)
    for step_count in (0, last // 2, last, last + 7):
        at = optax.tree_utils.tree_set(state, count=np.int32(step_count))
        with jax.numpy_dtype_promotion("standard"):  # as in `Algorithm.step`
            step, _ = update(gradient, at)
        np.testing.assert_allclose(step, -gradient * (1 - 0.5 * min(step_count / last, 1.0)), rtol=1e-6)
