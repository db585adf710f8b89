"""`envs_jax.make` takes the values of settings exactly, or refuses them with a ValueError in one sentence."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny import Corridor

import envs_jax

REFUSED = [
    ("reach", "horizon", "50", "horizon must be a whole number, not '50'"),
    ("reach", "horizon", True, "horizon must be a whole number, not True"),
    ("reach", "horizon", math.nan, "horizon must be a whole number, not nan"),
    ("reach", "horizon", np.float32(50.5), "horizon must be a whole number, not np.float32"),
    ("reach", "horizon", jnp.float32(0.9), "horizon must be a whole number, not Array"),
    ("reach", "success_radius", 10**400, "success_radius must lie between 0.001 and 0.5, not inf"),
    ("reach", "partially_observable", 1, "partially_observable must be true or false, not 1"),
    ("reach", "weld", 2, "weld must be a word, not 2"),
    ("coverage", "num_agents", Decimal("2.5"), "num_agents must be a whole number, not Decimal"),
    ("coverage", "class_weights", (1.0, 2.0, 3.0), "class_weights must be a list of 2 numbers"),
    ("coverage", "class_weights", 1.0, "class_weights must be a list of 2 numbers, not 1.0"),
    ("snakes_1v1", "masks", "false", "masks must be true or false, not 'false'"),
    (f"{Corridor.__module__}:Corridor", "length", "3", "length must be a whole number, not '3'"),
]


@pytest.mark.parametrize(("name", "setting", "value", "sentence"), REFUSED, ids=str)
def test_other_types_are_refused(name: str, setting: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        envs_jax.make(name, **{setting: value})


@pytest.mark.parametrize(
    ("name", "setting", "value", "expected"),
    [
        ("reach", "horizon", np.int64(50), 50),
        ("reach", "horizon", jnp.int32(50), 50),
        ("reach", "horizon", 5e1, 50),
        ("reach", "horizon", Decimal(50), 50),
        ("reach", "pool_seed", np.uint32(2**32 - 1), 2**32 - 1),
        ("reach", "success_radius", np.float32(0.1), 0.10000000149011612),
        ("reach", "success_radius", jnp.float32(0.1), 0.10000000149011612),
        ("reach", "success_radius", jnp.bfloat16(0.125), 0.125),
        ("reach", "success_radius", Fraction(1, 8), 0.125),
        ("reach", "weld", np.str_("v2"), "v2"),
        ("snakes_1v1", "masks", np.bool_(True), True),
        ("coverage", "class_weights", [np.float32(0.5), 1], (0.5, 1.0)),
    ],
    ids=str,
)
def test_scalars_of_the_right_kind_are_taken_exactly(name: str, setting: str, value: Any, expected: Any) -> None:
    actual = getattr(envs_jax.make(name, **{setting: value}), setting)
    assert actual == expected and type(actual) is type(expected)
    assert envs_jax.make(name, **{setting: value}) == envs_jax.make(name, **{setting: expected})


def test_values_of_a_running_program_are_refused() -> None:
    with pytest.raises(ValueError, match="horizon must be a whole number"):
        jax.jit(lambda x: envs_jax.make("reach", horizon=x).horizon)(5)
