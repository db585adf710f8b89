"""Adam's arithmetic, and optimizers of one's own in the place of it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import by_day
from helpers.off_policy import CASES, at_step
from helpers.tiny import Corridor

from envs_jax import Box
from jaxrl.algos.base import Algorithm
from jaxrl.algos.collective.algorithm import Collective
from jaxrl.algos.coma import Coma
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


def test_gradients_are_clipped_to_a_norm() -> None:
    adam = optimizers.adam(max_grad_norm=1.0)
    _, state = jax.jit(adam.update)(jnp.array([3.0, 4.0]), adam.init(jnp.zeros(2)))
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, "mu"), [0.06, 0.08], rtol=1e-6)


def with_sgd(algorithm: type[Algorithm]) -> Any:
    """The algorithm with plain gradient descent, as the tutorial in docs/tutorials replaces the optimizer."""

    @dataclasses.dataclass(frozen=True)
    class WithSgd(algorithm):
        def optimizer(self, part: str) -> optax.GradientTransformation:
            return optax.sgd(1.0)

    return WithSgd


def tree_norm(a: Any, b: Any) -> float:
    """Euclidean distance of two trees."""
    return float(
        np.sqrt(sum(np.square(np.asarray(x) - y).sum() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)))
    )


@pytest.mark.parametrize("case", by_day(["ddpg expected", "sac"], ["ddpg expected"]))
def test_off_policy_algorithms_take_another_optimizer(case: str) -> None:
    """A step of gradient descent is as long as the gradient times the network's own rate; targets follow by tau."""
    algorithm, env, settings, _ = CASES[case]
    settings = settings | {"actor_lr": 1e-3, "critic_lr": 1e-2, "max_grad_norm": 0.0, "n_step": 1, "tau": 0.05}
    algo = with_sgd(algorithm)(env.spec, DataParallel(1), **settings)
    params = jax.jit(lambda: algo.init(jax.random.key(0), None).replicated)()
    names = [name for name in ("target_actor", "target_critic") if hasattr(params, name)]
    targets = {name: jax.tree.map(lambda x: 0.5 * x, getattr(params, name)) for name in names}
    params = dataclasses.replace(params, **targets)
    batch: dict[str, Any] = {"weight": np.ones((1, 4), np.float32), "reward": np.ones((1, 4, 1, 2), np.float32)}
    batch["end"] = np.zeros((1, 4, 1), np.uint8)
    for name, shape in algo.observation_shapes.items():
        batch |= {prefix + name: np.zeros((1, 4, *shape.shape), shape.dtype) for prefix in ("", "next_")}
    batch["observation"] = np.random.default_rng(1).random(batch["observation"].shape, np.float32)
    batch["action"] = np.zeros((1, 4, *algo.action_shapes.shape), algo.action_shapes.dtype)
    noise = jax.eval_shape(lambda: algo.noise(jax.random.key(0), 4))
    if noise is not None:
        batch["noise"] = jnp.full((1, *noise.shape), 0.3)
    new, metrics = jax.jit(algo.update)(params, batch, jnp.uint32(0), at_step(0))
    for name, rate in (("actor", 1e-3), ("critic", 1e-2)):
        gradient = float(metrics[f"{name}_grad_norm"])
        assert (
            tree_norm(getattr(new, name).params, getattr(params, name).params)
            == pytest.approx(rate * gradient, rel=1e-3)
            != 0
        )
    for name, old in targets.items():
        online = getattr(new, name.removeprefix("target_")).params
        blend = jax.tree.map(lambda old, x: 0.95 * old + 0.05 * x, old, online)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), getattr(new, name), blend)


def test_coma_takes_another_optimizer() -> None:
    spec = dataclasses.replace(Corridor().spec, critic_input_spec=Box((3,)), critic_input=lambda *_: None)
    algo = with_sgd(Coma)(spec, DataParallel(1), actor_lr=1e-3, critic_lr=1e-2)
    weights, gradient = jnp.array([1.0, 2.0]), jnp.array([3.0, -4.0])
    for name, rate in (("actor", 1e-3), ("critic", 1e-2)):
        new, norm = jax.jit(functools.partial(algo.step, name))(algo.learner(name, weights), gradient, at_step(0))
        np.testing.assert_allclose(new.params, weights - rate * gradient, rtol=1e-6)
        assert float(norm) == 5.0


def test_a_collective_takes_another_optimiser_whose_steps_shrink() -> None:
    algo = with_sgd(Collective)(CASES["student"].env.spec, DataParallel(1), context_length=4, final_lr_fraction=0.5)
    last, optimizer, gradient = algo.count_updates("encoder"), algo.chain("encoder"), np.float32([3.0, -4.0])
    state, update = optimizer.init(gradient), jax.jit(optimizer.update)
    for step_count in (0, last // 2, last, last + 7):
        at = optax.tree_utils.tree_set(state, count=np.int32(step_count))
        with jax.numpy_dtype_promotion("standard"):  # as in `Algorithm.step`
            step, _ = update(gradient, at)
        np.testing.assert_allclose(step, -gradient * (1 - 0.5 * min(step_count / last, 1.0)), rtol=1e-6)
