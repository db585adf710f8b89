"""`envs_jax.make` takes the values of settings exactly, or refuses them with a ValueError in one sentence."""

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny import Corridor

import envs_jax
from envs_jax.settings import exact_settings, exact_value, take_exactly

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


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int | None, None, None),
        (int | None, np.int8(3), 3),
        (float | str, "auto", "auto"),
        (float | str, 1, 1.0),
        (tuple[int, ...], [1, np.int64(2)], (1, 2)),
        (tuple[int, ...], (), ()),
        (Literal["a", 1], "a", "a"),
        (Literal["a", 1], np.int32(1), 1),
        (Any, [1], [1]),
        (list[int], [1], [1]),
    ],
    ids=str,
)
def test_kinds(kind: Any, value: Any, expected: Any) -> None:
    actual = exact_value("x", value, kind)
    assert actual == expected and type(actual) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "sentence"),
    [
        (int | None, "x", "x must be a whole number or None, not 'x'"),
        (Literal["abc", "def"], "abd", "x is 'abd': did you mean 'abc'?"),
        (Literal[0, 1], True, "x is True: choose from: 0, 1"),
        (tuple[int, ...], [1.5], "x must be a whole number, not 1.5"),
        (tuple[int, ...], "12", "x must be a list of numbers, not '12'"),
    ],
    ids=str,
)
def test_refusals_of_kinds(kind: Any, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        exact_value("x", value, kind)


def test_kinds_that_only_a_function_knows() -> None:
    """Annotations as words, one of which cannot be resolved: the plain ones still count."""

    @dataclasses.dataclass(frozen=True)
    class Odd:
        size: "int" = 1
        what: "Unknown" = None  # type: ignore[name-defined]  # noqa: F821

        def __post_init__(self) -> None:
            take_exactly(self)

    assert exact_settings(Odd, {"size": np.int64(2), "what": "it"}) == {"size": 2, "what": "it"}
    with pytest.raises(ValueError, match="size must be a whole number"):
        Odd(size="2")  # type: ignore[arg-type]
