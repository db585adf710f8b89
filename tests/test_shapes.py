"""Shapes of the pure functions: an axis too many is an error and does not broadcast."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from beartype import beartype

from jaxrl.algos import coma_original, ddpg, sac, student
from jaxrl.algos.collective.networks import distillation_loss
from jaxrl.nn import distributions
from jaxrl.rl import policy_gradient, replay

N, A, C, K = 5, 2, 3, 4  # samples, agents, critics, actions or their dims
floats, booleans = jnp.ones, functools.partial(jnp.ones, dtype=bool)
integers, ends = functools.partial(jnp.zeros, dtype=jnp.int32), functools.partial(jnp.zeros, dtype=jnp.uint8)
key, one, row, rows = jax.random.key(0), floats(()), floats(N), floats((N, K))
team, values = floats((N, A)), floats((C, N, A))
Cases = list[tuple[Callable[..., Any], tuple[Any, ...]]]

# Functions with annotated shapes: arguments that fit.
ANNOTATED: Cases = [
    (policy_gradient.lambda_returns, (row, row, row, row)),
    (coma_original.ipp_marl_targets, (row, booleans(N), row, 0.9, 0.8, 3)),
    (replay.n_step_return, (team, ends(N), 0.9)),
    (distributions.apply_action_mask, (rows, booleans((N, K)))),
    (distributions.sample, (floats(K), floats(K))),
    (distributions.select_action_value, (rows, integers(N))),
    (distributions.squashed_normal, (rows, rows, rows)),
    (policy_gradient.policy_gradient_loss, (row, row, row, row, 0.2)),
    (policy_gradient.divergence, (row, row, row)),
    (policy_gradient.policy_metrics, (row, row, row)),
    (coma_original.original_actor_loss, (rows, one, booleans((N, K)), rows, integers(N), row)),
    (ddpg.masked_softmax, (rows, booleans((N, K)))),
    (sac.soft_value, (values, team, row)),
    (student.agreement, (rows, rows, rows)),
    (student.teacher_weight_schedule, (one, 1.0, 2.0)),
    (distillation_loss, (rows, rows, rows, rows, row)),
]
# Functions of an array with any leading axes.
FREE: Cases = [(distributions.epsilon_mix, (rows, one)), (distributions.entropy, (rows,))]

T, S, E = 2, 2, 3  # steps, logical shards, environments of a shard
SHAPE = jax.ShapeDtypeStruct((A, K), jnp.float32)
buffer = replay.create(SHAPE, SHAPE, agents=A, shards=S, rows=4, envs=E)
shard = jax.tree.map(lambda x: x[0], buffer)
new_row = (floats((T + 1, S * E, A, K)), floats((T, S * E, A, K)), floats((T + 1, S * E, A)), ends((T + 1, S * E)))
zero = integers(())

# Functions with shapes in words, and with a free argument, which is given here.
OTHERS: Cases = [
    (replay.ends, (booleans(N), booleans(N))),
    (functools.partial(replay.write, buffer), new_row),
    (replay.sample_uniform, (key, ends((4, E)), zero, zero, 5, 1)),
    (functools.partial(replay.gather, shard, n_step=2), (integers(N),)),
    (functools.partial(replay.gather_window, floats((4, E)), steps=2), (integers(N),)),
    (functools.partial(distributions.epsilon_mix, rows), (one,)),
]


def widen(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments with one axis too many, for each array among them."""
    places = [i for i, x in enumerate(arguments) if isinstance(x, jax.Array) and x is not key]
    return [(*arguments[:i], arguments[i][..., None], *arguments[i + 1 :]) for i in places]


def each(cases: Cases) -> pytest.MarkDecorator:
    names = [getattr(getattr(function, "func", function), "__name__", "") for function, _ in cases]
    return pytest.mark.parametrize(("function", "arguments"), cases, ids=names)


checked = functools.partial(jaxtyping.jaxtyped, typechecker=beartype)


def trace(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    jax.eval_shape(lambda: function(*arguments))


@each(ANNOTATED + FREE)
def test_annotations_are_true(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    trace(checked(function), arguments)


@each(ANNOTATED)
def test_annotations_refuse_an_axis_too_many(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for wrong in widen(arguments):
        with pytest.raises(jaxtyping.TypeCheckError):
            trace(checked(function), wrong)


@each(ANNOTATED + OTHERS)
def test_an_axis_too_many_does_not_broadcast(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    trace(function, arguments)
    for wrong in widen(arguments):
        with jax.numpy_rank_promotion("allow"), pytest.raises(AssertionError):  # JAX's default, unlike in tests
            trace(function, wrong)
