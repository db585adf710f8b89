"""Boxes with one bound for all numbers or one for each: what they keep, refuse, and what reads them."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.outward import needs_gymnasium
from helpers.tiny import Corridor

import jaxrl
from envs_jax import Box, Discrete, Environment, EnvSpec, check_env, restart, setting, transition
from envs_jax.adapters import outward
from envs_jax.testing import ContractError, check_types
from jaxrl.algos.box_actions import BoxActions
from jaxrl.integrations import export
from jaxrl.nn.precision import stored_dtype
from jaxrl.rl.replay import storage_dtype
from jaxrl.runtime.rollouts import uniform

LOW, HIGH = np.array([0.0, -1.0, 2.0]), np.array([5.0, 1.0, 2.5])


@dataclasses.dataclass(frozen=True)
class Car(Environment):
    """Shows its last action; measures how far actions lie outside [LOW, HIGH], and how far they spread in it."""

    kind: str = setting("each", "bounds: each number's, or one of those that are refused")

    @property
    def spec(self) -> EnvSpec:
        bounds = {
            "each": (LOW, HIGH),
            "above": (HIGH, LOW),
            "equal": (np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 3.0])),
            "nan": (math.nan, 1.0),
            "one equal": (1.0, 1.0),
            "one above": (1.0, -1.0),
        }
        action = Box((0,), low=-1, high=1) if self.kind == "empty" else Box((3,), jnp.float32, *bounds[self.kind])
        metrics = {"outside": "max", "second": "max"}
        return EnvSpec("car", 1, Box((3,), low=np.minimum(LOW, 0), high=HIGH), action, 3, metrics=metrics)

    def _metrics(self, action: Any) -> dict[str, Any]:
        outside = jnp.maximum(LOW.astype(np.float32) - action, action - HIGH.astype(np.float32)).max()
        return {"outside": outside, "second": action[1]}

    def reset(self, key: Any, context: Any = None) -> Any:
        return jnp.int32(0), restart(jnp.zeros((1, 3)), metrics={"outside": -1.0, "second": -1.0})

    def step(self, t: Any, action: Any, context: Any = None) -> Any:
        metrics = self._metrics(action[0])
        return t + 1, transition(1.0, action, truncated=t >= 2, metrics=metrics)


def test_equal_bounds_are_one_number() -> None:
    box = Box((2, 3), low=np.full((2, 3), -1.5), high=np.float32(2))
    assert (box.low, box.high) == (-1.5, 2.0) and type(box.low) is type(box.high) is float
    assert box == Box((2, 3), low=-1.5, high=2.0) and hash(box) == hash(Box((2, 3), low=-1.5, high=2.0))
    assert Box((3,), jnp.int8, 0, 4).high == 4 and type(Box((3,), jnp.int8, 0, 4).high) is int
    assert type(Box((3,), jnp.int8, 0, np.int8(4)).high) is int


def test_different_bounds_are_kept_and_can_be_hashed() -> None:
    box = Box((3,), low=LOW, high=jnp.asarray(HIGH, jnp.float32))
    assert box == Box((3,), low=LOW.tolist(), high=tuple(HIGH)) and len({box, Box((3,), low=LOW, high=HIGH)}) == 1
    assert box != Box((3,), low=LOW, high=HIGH + 1)
    np.testing.assert_array_equal(box.bounds, [LOW, HIGH])
    assert (box.lowest, box.highest) == (-1.0, 5.0)
    mixed = Box((2, 3), low=-math.inf, high=HIGH)  # broadcast, as NumPy does
    np.testing.assert_array_equal(mixed.bounds, [np.full((2, 3), -np.inf), np.tile(HIGH, (2, 1))])
    assert mixed.lowest == -math.inf and dataclasses.replace(mixed) == mixed
    np.testing.assert_array_equal(Box((), low=-1, high=1).bounds, [-1, 1])


@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [
        ({"low": np.zeros(2)}, "low of a box must be one number, or broadcast to its shape"),
        ({"high": np.zeros((4, 3))}, "high of a box must be one number, or broadcast"),
        ({"low": "x"}, "low of a box must be numbers, not 'x'"),
        ({"low": None}, "low of a box must be numbers, not None"),
        ({"high": [1, [2]]}, "high of a box must be"),
    ],
    ids=str,
)
def test_other_bounds_are_refused(bounds: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Box((3,), **bounds)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("above", "spec.action has a Box with low 5.0 above high 0.0: swap them"),
        ("one above", "spec.action has a Box with low 1.0 above high -1.0: swap them"),
        ("equal", "low = high = 1, which leaves no choice"),
        ("one equal", "low = high = 1, which leaves no choice"),
        ("nan", "a bound that is not a number"),
        ("empty", r"spec.action has a Box of shape \(0,\), which holds no numbers"),
    ],
)
def test_boxes_without_a_choice_are_refused(kind: str, sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        check_types(Car(kind))


def test_the_contract_looks_at_each_number() -> None:
    assert check_env(Car(), random=False) == "ok: car keeps the contract (4 environments, 5 steps)"

    class Lower(Car):
        @property
        def spec(self) -> EnvSpec:  # the second number of an observation may be -1
            return dataclasses.replace(super().spec, observation=Box((3,), low=[0, -0.5, 0], high=HIGH))

    sentence = r"observation\[1\] has values from -0.\d* to .*, outside its Box of -0.5 to 1"
    with pytest.raises(ContractError, match=sentence):
        check_env(Lower(), random=False, steps=20)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)])
def test_actions_between_the_box_and_the_unit_box(shape: tuple[int, ...]) -> None:
    """Against the formula in float64; both ends are reached, none is passed."""
    spec = EnvSpec("x", 2, Box((1,)), Box(shape, low=LOW.reshape(shape), high=HIGH.reshape(shape)), 5)
    box = BoxActions.from_spec(spec, "sac")
    unit = jax.random.uniform(jax.random.key(0), (1000, 2, 3), jnp.float32, -1.0, 1.0).at[0].set(1.0).at[1].set(-1.0)
    played = np.asarray(box.denormalize(unit))
    assert played.shape == (1000, 2, *shape) and played.dtype == np.float32
    flat = played.reshape(1000, 2, 3)
    np.testing.assert_allclose(flat, LOW + (HIGH - LOW) * (np.asarray(unit, np.float64) + 1) / 2, atol=1e-6)
    np.testing.assert_array_equal(flat.max((0, 1)), HIGH)
    np.testing.assert_array_equal(flat.min((0, 1)), LOW)
    np.testing.assert_allclose(box.normalize(jnp.asarray(played)), unit, atol=1e-5)  # 2 / 0.25 roundings of 2.5
    source = Path(export.__file__).with_name("agent.py").read_text(encoding="utf-8")  # it reads its weights at the end
    exec(source.partition("\nPOLICY = ")[0], names := {"__name__": "agent"})
    exported = names["Policy"].__new__(names["Policy"])
    exported.settings = {
        "bounds": (np.asarray(box.box.low).tolist(), np.asarray(box.box.high).tolist()),
        "action_shape": shape,
        "action_dtype": "float32",
    }
    np.testing.assert_allclose(exported._rescale(np.asarray(unit)), played, atol=1e-6)


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (Box((2,), jnp.int32, 0, 3), "but in 'x' they are int32 from 0 to 3: use Discrete"),
        (
            Box((2,), low=[0, -math.inf], high=1),
            "sac needs float actions with bounds, but in 'x' they are float32 from -inf to 1",
        ),
        (Box((2,), low=[0, 1], high=1), "in the action Box of 'x' low is not below high"),
    ],
    ids=str,
)
def test_actions_that_algorithms_cannot_choose(box: Box, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        BoxActions.from_spec(EnvSpec("x", 1, Box((1,)), box, 5), "sac")


def test_readers_of_bounds() -> None:
    each = Box((3,), low=LOW, high=HIGH)
    half = jnp.dtype("float16")
    assert stored_dtype(each, half) == jnp.float32
    assert stored_dtype(Box((2,), low=[0, 0.5], high=[0.5, 1]), half) == half
    assert stored_dtype(Box((2,), low=[0, -0.5], high=1), half) == jnp.float32
    assert storage_dtype(Box((2,), jnp.int32, [0, -3], [127, 5])) == jnp.int8
    assert storage_dtype(Box((2,), jnp.int32, [0, 0], [128, 5])) == jnp.uint8
    assert storage_dtype(Box((2,), jnp.int32, [0, 0], [70000, 5])) == jnp.int32
    _, timestep = Car().reset(jax.random.key(0))
    keys = jax.random.split(jax.random.key(0), 4000)
    by_policy = jax.vmap(lambda key: uniform(Car(), None, timestep, key)[0])(keys)
    for drawn in map(np.asarray, (by_policy, jax.vmap(each.sample)(keys))):
        assert (drawn >= LOW).all() and (drawn <= HIGH).all()
        np.testing.assert_allclose(drawn.mean(0), (LOW + HIGH) / 2, atol=0.1)
    assert each.contains(HIGH.astype(np.float32)) and not each.contains(np.array([0, 1.5, 2], np.float32))
    half_open = np.asarray(jax.vmap(Box((2,), low=[0, 1], high=[1, math.inf]).sample)(keys))
    assert (half_open >= [0, 1]).all() and (half_open[:, 0] <= 1).all()


@needs_gymnasium
def test_spaces_of_gymnasium() -> None:
    from gymnasium import spaces

    space = outward.gymnasium_space(Box((3,), low=LOW, high=HIGH))
    assert space == spaces.Box(LOW.astype(np.float32), HIGH.astype(np.float32), dtype=np.float32)
    assert outward.gymnasium_space(Box((2,), jnp.int8, [0, 1], 4)) == spaces.Box(
        np.int8([0, 1]), np.int8([4, 4]), dtype=np.int8
    )


def test_training_plays_within_the_bounds_of_each_number(tmp_path: Path) -> None:
    """The second number takes both halves of its range, which is neither the first's nor [-1, 1] scaled by it."""
    sizes = {"num_envs": 8, "rollout_steps": 8, "num_minibatches": 1, "num_epochs": 1, "hidden_size": 8, "depth": 1}
    run = jaxrl.train("ppo", Car(), total_env_steps=64, runs=str(tmp_path), **sizes)
    assert np.nanmax(run.metrics["rollout/outside"]) <= 0
    assert 0.2 < np.nanmax(run.metrics["rollout/second"]) <= 1


def test_a_number_is_no_observation() -> None:
    class Number(Corridor):
        @property
        def spec(self) -> EnvSpec:
            return dataclasses.replace(super().spec, observation=Discrete(4))

    sentence = r"Discrete\(n=4\), but only actions may be Discrete: return the number one-hot"
    with pytest.raises(ContractError, match=sentence):
        check_types(Number())
    with pytest.raises(ValueError, match=sentence):
        outward.checked_spec(Number())
