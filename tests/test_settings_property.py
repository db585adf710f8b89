"""Every setting of every algorithm, environment and run: the value that was given, or a sentence.

From Python, a YAML file and the command line; nothing else is raised, and no number becomes another one.
"""

import functools
import math
import types
import typing
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import envs_jax
from jaxrl import algos, api
from jaxrl.cli.flags import _parse
from jaxrl.common.errors import UsageError
from jaxrl.common.yaml_files import read_mapping
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.config import Field, RunSettings, build, check_value, declared_fields
from jaxrl.runtime.presets import base_and_source
from jaxrl.runtime.trials import combinations

NUMBERS = [
    0, 1, 2, 7, -1, 2**31, 2**63, 10**20, 10**400, 0.5, 2.0, 0.1, -0.25, 1e-3, 1e18, 1e19, 1e300, math.nan, math.inf,
    -math.inf, np.int32(3), np.int64(2), np.uint8(1), np.uint64(2**63), np.float16(0.5), np.float32(0.1),
    np.float32(2.5), np.float64(2.0), np.float32(math.nan), np.array(2), np.array(0.5), jnp.int32(3), jnp.float32(0.5),
    jnp.float32(0.1), Fraction(1, 2), Decimal("0.5"), Decimal("3"), Decimal("NaN"),
]  # fmt: skip
OTHERS = [
    True, False, np.bool_(True), jnp.bool_(False), None, "", "auto", "word", np.str_("auto"), b"1", 1j, object(), {},
    {"a": 1}, [], [1], [1, 2], (0, 1), [0.5, 0.25], ["a"], [[1]], [None], [True], [math.nan], np.array([1, 2]),
    np.array([0.5]), jnp.array([1, 2]), Path("folder"), np.datetime64(1, "s"),
]  # fmt: skip
TEXTS = [
    "", "0", "1", "7", "-1", "+5", "2.0", "2.5", "1e-3", "1.5e+3", "1e400", "nan", "inf", "-.inf", ".nan", "010",
    "0x10", "0b11", "1:30", "190:20:30.15", "1_000", "true", "no", "None", "null", "~", "auto", "word", "3,4",
    "2026-01-01",
]  # fmt: skip
DIRECT = [1, -1, 10**20, 0.5, np.int64(2), np.float32(0.1), math.nan, math.inf, "", "word", True, None, [1], {}]
DEFAULT_ENV = {"coma": "coverage", "coma_original": "coverage", "ddpg": "snakes_3v3", "bicnet": "snakes_3v3"}


@functools.cache
def spec_of(name: str) -> envs_jax.EnvSpec:
    """The spec of an algorithm's environment."""
    return envs_jax.make(DEFAULT_ENV.get(name, "reach")).spec


def all_fields() -> Iterator[Field]:
    """One field of each kind and bounds: nothing else decides about a value."""
    classes = [(envs_jax.base.find(name), "environment") for name in envs_jax.registered()]
    classes += [(algos.find(name), "algorithm") for name in algos.ALGORITHMS]
    fields = [
        field for cls, section in (*classes, (RunSettings, "run")) for field in declared_fields(cls, section).values()
    ]
    yield from {(str(field.kind), field.between): field for field in fields}.values()


def check_exact(field: Field, value: Any, checked: Any) -> None:
    """The value is of the field's kind, within its bounds, and the one that was given."""
    kind, origin = field.kind, typing.get_origin(field.kind)
    if origin is types.UnionType:
        kinds = [typing.get_origin(part) or part for part in typing.get_args(kind)]
        (kind,) = (part for part in kinds if type(checked) is part)
        origin = kind if kind is tuple else None
    if origin is tuple:
        assert isinstance(checked, tuple) and list(checked) == [pytest.approx(x, rel=1e-15) for x in np.ravel(value)]
        return
    options = typing.get_args(kind) if origin is typing.Literal else ()
    assert any(type(checked) is type(option) and checked == option for option in options) or type(checked) is kind
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(checked, bool | str):
        assert str(checked) == str(plain)
        return
    low, high = field.between or (-math.inf, math.inf)
    assert low <= checked <= high and math.isfinite(checked) and not isinstance(plain, bool)
    exact = Fraction(plain)
    assert Fraction(checked) == (exact if kind is int else Fraction(float(exact))), (field.name, value, checked)


FIELDS = pytest.mark.parametrize(
    "field", list(all_fields()), ids=lambda field: f"{field.name}-{field.kind}-{field.between}"
)


@FIELDS
def test_values_from_python(field: Field) -> None:
    for value in NUMBERS + OTHERS:
        sentence = ""
        try:
            checked = check_value(field, value, "the arguments")
        except UsageError as error:
            sentence = str(error)
        if sentence:
            assert field.name in sentence and "\n" not in sentence
        else:
            check_exact(field, value, checked)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The values of TEXTS in a YAML file."""
    path = tmp_path_factory.mktemp("texts") / "file.yaml"
    path.write_text("\n".join(f"k{index}: {text}" for index, text in enumerate(TEXTS)))
    return dict(zip(TEXTS, read_mapping(path).values(), strict=True))


@FIELDS
def test_words_are_the_same_everywhere(field: Field, written: dict[str, Any]) -> None:
    """A number in a file is read as on the command line and from Python: 010 is ten, 1:30 is none."""

    def read_value(read: Any, *arguments: Any) -> tuple[Any, ...]:
        try:
            value = read(field, *arguments)
        except UsageError:
            return ()
        return (type(value), value)

    for text in TEXTS:
        typed = read_value(_parse, text)
        loaded = read_value(check_value, written[text], "file.yaml")
        if field.kind in (int, float):
            assert typed == loaded == read_value(check_value, text, "the arguments"), text
        assert not typed or not loaded or typed == loaded, text


@pytest.mark.parametrize("name", envs_jax.registered())
def test_environments_made_directly(name: str) -> None:
    for field in declared_fields(envs_jax.base.find(name), "environment").values():
        for value in DIRECT if field.flag else ():  # others the environment fills in
            try:
                env: Any = envs_jax.make(name, **{field.name: value})
            except ValueError:
                continue
            check_exact(field, value, getattr(env, field.name))


@pytest.mark.parametrize(
    ("name", "setting", "value", "expected"),
    [
        ("reach", "horizon", np.int64(50), 50),
        ("reach", "horizon", jnp.int32(50), 50),
        ("reach", "horizon", 5e1, 50),
        ("reach", "horizon", Decimal(50), 50),
        ("reach", "pool_seed", np.uint32(2**32 - 1), 2**32 - 1),
        ("reach", "success_radius", np.float32(0.1), 0.10000000149011612),
        ("reach", "success_radius", jnp.bfloat16(0.125), 0.125),
        ("reach", "success_radius", Fraction(1, 8), 0.125),
        ("reach", "weld", np.str_("v2"), "v2"),
        ("snakes_1v1", "masks", np.bool_(True), True),
        ("coverage", "class_weights", [np.float32(0.5), 1], (0.5, 1.0)),
    ],
    ids=str,
)
def test_environments_take_other_numbers(name: str, setting: str, value: Any, expected: Any) -> None:
    env = envs_jax.make(name, **{setting: value})
    assert env == envs_jax.make(name, **{setting: expected})
    assert type(getattr(env, setting)) is type(expected)


@pytest.mark.parametrize(
    ("name", "setting", "value", "sentence"),
    [
        ("reach", "horizon", True, "horizon must be a whole number, not True"),
        ("reach", "horizon", jnp.float32(0.9), "horizon must be a whole number, not Array"),
        ("reach", "success_radius", 10**400, "success_radius must lie between 0.001 and 0.5, not inf"),
        ("reach", "partially_observable", 1, "partially_observable must be true or false, not 1"),
        ("reach", "weld", 2, "weld must be a word, not 2"),
        ("coverage", "class_weights", (1.0, 2.0, 3.0), "class_weights must be a list of 2 numbers"),
        ("helpers.tiny:Corridor", "length", "3", "length must be a whole number, not '3'"),
    ],
    ids=str,
)
def test_environments_refuse_other_types(name: str, setting: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        envs_jax.make(name, **{setting: value})


def test_environments_refuse_values_of_a_running_program() -> None:
    with pytest.raises(ValueError, match="horizon must be a whole number"):
        jax.jit(lambda x: envs_jax.make("reach", horizon=x).horizon)(5)


@pytest.mark.parametrize("name", list(algos.ALGORITHMS))
def test_algorithms_made_directly(name: str) -> None:
    cls, settings = algos.find(name), base_and_source(name, None, DEFAULT_ENV.get(name, "reach"))[0].algo_settings
    for field in declared_fields(cls, "algorithm").values():
        for value in DIRECT:
            try:
                algo = cls(spec_of(name), DataParallel(8), **{**settings, field.name: value})
            except ValueError:
                continue
            check_exact(field, value, getattr(algo, field.name))


@pytest.mark.parametrize(
    "settings",
    [
        {"gamma": np.float32(0.9), "num_envs": jnp.int32(16), "runs": Path("a/b"), "layer_norm": np.bool_(True)},
        {"n_step": "3", "max_seconds": Decimal("0.5"), "compute_dtype": np.str_("float32"), "seed": 2.0},
    ],
)
def test_a_configuration_survives_its_file(settings: dict[str, Any], tmp_path: Path) -> None:
    config = api._config("sac", "reach", None, settings)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert build(read_mapping(path), "the file") == config
    assert yaml.safe_load(config.to_yaml()) == read_mapping(path)


@pytest.mark.parametrize(
    "sweep", ["gamma=nan", "gamma=", "gamma", "gamma=0.9,x", "n_step=1,2", "gamma=2", "=", "a=b=c"]
)
def test_sweeps_of_odd_values_end_in_a_sentence(sweep: str) -> None:
    def make_algorithms() -> None:
        for values in combinations(api._config("sac", "reach", None, {"sweep": sweep})):
            algos.find("sac")(spec_of("sac"), DataParallel(8), **values)

    with pytest.raises((UsageError, ValueError), match=r"sweep|gamma|n_step"):
        make_algorithms()
