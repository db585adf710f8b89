"""What cannot be meant is refused by `Policy` and by exported agents in one sentence, never cast."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.exported import load_agent
from helpers.tiny import Corridor, PointMass, TinyQ

from envs_jax import Box, Discrete, EnvSpec, TimeStep, make, restart
from envs_jax.base import Environment
from jaxrl.algos.ppo import Ppo
from jaxrl.algos.sac import Sac
from jaxrl.integrations.export.formats import export
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.policy import Policy

BOX = {
    "bytes": Box((2, 2), jnp.uint8, 0, 255),
    "each": Box((2,), low=[-1, 0], high=[1, 100]),
    "flag": Box((1,), jnp.bool_),
    "half": Box((1,), low=0),
    "open": Box((3,)),
}


@dataclasses.dataclass(frozen=True)
class Mixed(Environment):
    """Observations of several kinds."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("mixed", 1, BOX, Discrete(2), 3)

    def reset(self, key: Any, context: Any = None) -> Any:
        zeros = {name: jnp.zeros((1, *box.shape), box.dtype) for name, box in BOX.items()}
        return jnp.int32(0), restart(zeros)


@dataclasses.dataclass(frozen=True)
class Sum(TinyQ):
    """Remembers the sum of what it saw, and shows in its action whether numbers arrive as they were given."""

    @property
    def recurrent(self) -> bool:
        return True

    def init_carry(self, policy: Any, timestep: TimeStep, indices: Any) -> Any:
        return {"sum": jnp.zeros(len(indices)), "count": jnp.zeros(len(indices), jnp.int32)}

    def act(self, policy: Any, carry: Any, timestep: TimeStep, *rest: Any) -> Any:
        leaves = jax.tree.leaves(timestep.observation)
        total = sum(leaf.astype(jnp.float32).reshape(len(leaf), -1).sum(-1) for leaf in leaves)
        carry = {"sum": jnp.where(timestep.first, 0, carry["sum"]) + total, "count": carry["count"] + 1}
        return jnp.zeros((len(total), 1), jnp.int32), carry, ()


POLICY = Policy(Mixed(), Sum(Mixed().spec, DataParallel(1)), ())
GOOD: dict[str, Any] = {
    "bytes": np.array([[[0, 255], [7, 1]]], np.uint8),
    "each": np.array([[-1.0, 100.0]], np.float32),
    "flag": np.array([[True]]),
    "half": np.array([[1e30]], np.float32),
    "open": np.array([[-3e38, 0.5, 2.0]], np.float32),
}


def observe(part: str, value: Any) -> dict[str, Any]:
    """Return an observation of zeros but for one part."""
    zeros: dict[str, Any] = {name: np.zeros_like(x) for name, x in GOOD.items()}
    return zeros | {part: value}


@pytest.mark.parametrize(
    ("part", "value", "total"),
    [
        ("bytes", np.array([[[1, 2], [3, 250]]], np.int64), 256),
        ("bytes", np.array([[[1, 2], [3, 250]]], np.float64), 256),
        ("bytes", np.ones((1, 2, 2), bool), 4),
        ("each", np.array([[-2.9, 199]]), 196.1),  # not further away than the box is wide
        ("each", np.array([[1, 100]], np.int8), 101),
        ("flag", np.array([[1]]), 1),
        ("half", np.array([[-0.9]]), -0.9),
        ("open", np.array([[1e30, 0, 0]], np.float64), 1e30),
        ("open", jnp.array([[2, 0, 0]], jnp.bfloat16), 2),
    ],
)
def test_other_dtypes_with_the_same_meaning_are_taken(part: str, value: Any, total: float) -> None:
    observation = observe(part, value)
    for given in (observation, jax.tree.map(lambda x: x[None], observation)):
        _, carry = POLICY(given)
        np.testing.assert_allclose(carry["sum"], [total], rtol=1e-6)


@pytest.mark.parametrize(
    ("part", "value", "sentence"),
    [
        (
            "bytes",
            np.full((1, 2, 2), 256),
            "observations bytes of 'mixed' hold 256, outside of their box of 0 to 255: ",
        ),
        ("bytes", np.full((1, 2, 2), -1), "hold -1, outside of their box of 0 to 255: give them in the units"),
        ("bytes", np.full((1, 2, 2), 0.5), "must be whole numbers (uint8), not 0.5: give them in the units of"),
        ("bytes", np.full((1, 2, 2), np.nan), "hold NaN: find out which step made them"),
        ("bytes", np.full((1, 2, 2), np.inf), "hold inf, which is not finite"),
        ("each", np.array([[0.0, 201]]), "observations each of 'mixed' hold 201, outside of their box of 0 to 100"),
        ("each", np.array([[-3.5, 0]]), "hold -3.5, outside of their box of -1 to 1"),
        ("flag", np.array([[2]]), "hold 2, outside of their box of 0 to 1"),
        ("half", np.array([[-5.0]]), "hold -5, outside of their box of 0 to inf"),
        ("open", np.array([[0, np.inf, 0]]), "hold inf, which is not finite in float32"),
        ("open", np.array([[0, -np.inf, 0]], np.float16), "hold -inf, which is not finite in float32"),
        ("open", np.array([[0, 1e300, 0]]), r"hold 1e+300, which is not finite in float32"),
        ("open", np.array([[0, np.nan, 0]]), "observations open of 'mixed' hold NaN: find out which step made them"),
        ("open", np.array([[0, 1j, 0]]), "must be arrays of real numbers, not of complex128"),
        ("open", jnp.array([[0, 1j, 0]]), "must be arrays of real numbers, not of complex64"),
        ("open", np.array([["a", "b", "c"]]), "must be arrays of real numbers, not of <U1"),
        ("open", np.array([[0, None, 0]]), "must be arrays of real numbers, not of object"),
        ("open", np.array([[0, 1, 2]], "M8[s]"), "must be arrays of real numbers, not of datetime64[s]"),
        ("open", jax.random.split(jax.random.key(0), 3)[None], "must be arrays of real numbers, not of key<fry>"),
    ],
)
def test_observations_that_cannot_be_meant(part: str, value: Any, sentence: str) -> None:
    observation = observe(part, value)
    for given in (observation, jax.tree.map(lambda x: x[None], observation)):
        with pytest.raises(ValueError) as caught:
            POLICY(given)
        assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_nested_lists_are_arrays() -> None:
    lists = {name: value.tolist() for name, value in GOOD.items()}
    np.testing.assert_array_equal(POLICY(lists)[1]["sum"], POLICY(GOOD)[1]["sum"])
    both = jax.tree.map(lambda value: [value, value], GOOD)
    np.testing.assert_array_equal(
        POLICY(both)[1]["sum"], POLICY(jax.tree.map(np.stack, both, is_leaf=is_list))[1]["sum"]
    )
    with pytest.raises(ValueError, match="observations each of 'mixed' hold 201, outside of their box"):
        POLICY(lists | {"each": [[0, 201]]})
    with pytest.raises(ValueError, match="observations open of 'mixed' must be arrays of real numbers, not of <U1"):
        POLICY(lists | {"open": [["a", "b", "c"]]})
    traced = jax.jit(lambda x: POLICY(lists | {"half": [[x]]})[1]["sum"])
    np.testing.assert_allclose(traced(1e30), POLICY(GOOD)[1]["sum"])


def is_list(value: Any) -> bool:
    return isinstance(value, list)


def test_lists_that_are_parts_of_the_observation() -> None:
    class Pair(Mixed):
        @property
        def spec(self) -> EnvSpec:
            return dataclasses.replace(super().spec, observation=[BOX["each"], BOX["open"]])

        def reset(self, key: Any, context: Any = None) -> Any:
            return jnp.int32(0), restart([jnp.zeros((1, 2)), jnp.zeros((1, 3))])

    policy = Policy(Pair(), Sum(Pair().spec, DataParallel(1)), ())
    np.testing.assert_allclose(policy([np.ones((1, 2)), np.ones((1, 3))])[1]["sum"], [5])


def test_refused_shapes_are_cut() -> None:
    with pytest.raises(ValueError, match="'mixed' have the shapes") as caught:
        POLICY(tuple(range(1000)))
    assert len(str(caught.value)) < 400


def test_ragged_lists_and_missing_parts() -> None:
    with pytest.raises(ValueError, match="each of 'mixed' must be arrays of numbers, or nested lists of equal lengths"):
        POLICY(GOOD | {"each": [[1.0], [1.0, 2.0]]})
    with pytest.raises(ValueError, match="or nested lists of equal lengths"):
        POLICY(GOOD | {"each": [[jnp.float32(1)], [1.0, 2.0]]})
    with pytest.raises(ValueError, match="'mixed' have the shapes"):
        POLICY({name: value for name, value in GOOD.items() if name != "flag"})
    with pytest.raises(ValueError, match="'mixed' have the shapes"):
        POLICY(np.zeros((1, 3)))


def test_a_time_step_of_the_environment_is_taken_as_it_is() -> None:
    """As in training, which does not look at the box; but not if it is not finite."""
    _, timestep = POLICY.env.reset(jax.random.key(0))
    wide = dataclasses.replace(timestep, observation=observe("each", jnp.array([[5.0, 0.0]])))
    np.testing.assert_allclose(POLICY(wide)[1]["sum"], [5])
    with pytest.raises(ValueError, match="observations open of 'mixed' hold inf, which is not finite"):
        POLICY(dataclasses.replace(timestep, observation=observe("open", jnp.array([[jnp.inf, 0, 0]]))))


def test_unknown_values_are_not_looked_at() -> None:
    acts = jax.jit(lambda x: POLICY(observe("each", x))[1]["sum"])
    np.testing.assert_allclose(acts(np.array([[50.0, 0.0]])), [50])


def test_carries_that_cannot_be_meant() -> None:
    batch = jax.tree.map(lambda x: np.stack([x, x]), observe("each", np.array([[1.0, 2.0]], np.float32)))
    _, carry = POLICY(batch)
    again = {"sum": np.array([1, 2], np.float64), "count": np.array([1, 2], np.int64)}  # as read from a file
    np.testing.assert_allclose(POLICY(batch, carry=again)[1]["sum"], [4, 5])
    for value in (jnp.nan, jnp.inf, -jnp.inf):
        lost = carry | {"sum": carry["sum"].at[1].set(value)}
        np.testing.assert_allclose(POLICY(batch, carry=lost, first=[0, 1])[1]["sum"], [6, 3])
        for first in (False, [True, False]):
            with pytest.raises(ValueError, match="carry holds NaN or infinity: give what the last call returned, or N"):
                POLICY(batch, carry=lost, first=first)
    for wrong in (
        carry | {"sum": np.zeros(2, np.complex64)},
        carry | {"sum": np.array(["a", "b"])},
        carry | {"count": carry["sum"]},
        carry | {"sum": carry["count"]},
        carry | {"sum": carry["sum"][:1]},
        carry | {"more": carry["sum"]},
        (),
        3,
    ):
        with pytest.raises(ValueError, match="carry must be what the last call returned for 2 observations"):
            POLICY(batch, carry=wrong)
    for flags in ([True], [True, False, True], "x", 0.5, None, 2, -1, [0, 2], jnp.array([0, 2])):
        with pytest.raises(ValueError, match=r"first must be True, False or bool\[2\]"):
            POLICY(batch, first=flags)


def export_agent(folder: Path, env: Any, algo: Any, **settings: Any) -> Any:
    """Return `act` of the exported agent of fresh networks."""
    algorithm = algo(env.spec, DataParallel(1), hidden_size=4, depth=1, **settings)
    params = jax.jit(lambda: algorithm.policy(algorithm.init(jax.random.key(0), None)))()
    export(Policy(env, algorithm, params), "numpy", folder)
    return load_agent(folder).act


def test_the_exported_agent_refuses_too(tmp_path: Path) -> None:
    act = export_agent(tmp_path, PointMass(), Sac, batch_size=8, buffer_size=64)
    assert act(np.zeros((2, 1, 3), np.float32)).shape == (2, 1, 2)
    for value, sentence in (
        (np.nan, "observations hold nan: give finite numbers in the units of training, from -21 to 21"),
        (-np.inf, "observations hold -inf: give finite numbers"),
        (100, "observations hold 100: give finite numbers in the units of training"),
        (1j, "observations must be arrays of real numbers, not of complex128"),
        ("a", "observations must be arrays of real numbers, not of <U1"),
    ):
        with pytest.raises(ValueError) as caught:
            act(np.full((2, 1, 3), value))
        assert sentence in str(caught.value)


def test_the_exported_agent_with_a_memory_refuses_too(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_minibatches": 1, "memory": "gru", "memory_size": 4}
    act = export_agent(tmp_path, Corridor(num_agents=2), Ppo, **settings)
    given = np.zeros((3, 2, 5)), np.ones((3, 2, 2), bool)
    _, carry = act(*given)
    for value in (np.nan, np.inf, -np.inf):
        carry["hidden1"][1] = value
        with pytest.raises(ValueError, match="carry holds NaN or infinity: give what the last call returned, or None"):
            act(*given, carry=carry)
    for flags in (2, -1, 0.5, "x", None, [0, 2, 0], [True, False], [[True], [False], [True]]):
        with pytest.raises(ValueError, match=r"first must be True, False or bool\[3\]"):
            act(*given, first=flags)
    for flags in ([0, 1, 0], [False, True, False]):
        assert act(*given, carry=carry, first=flags)[0].shape == (3, 2)


@pytest.mark.slow
def test_the_exported_agent_of_whole_numbers(tmp_path: Path) -> None:
    env = make("snakes_1v1")
    act = export_agent(tmp_path, env, Ppo, num_minibatches=1)
    assert jnp.issubdtype(env.spec.observation.dtype, jnp.integer)
    mask = np.ones((env.spec.num_agents, env.spec.action.n), bool)
    shape = (env.spec.num_agents, *env.spec.observation.shape)
    assert act(np.ones(shape), mask).shape == (env.spec.num_agents,)
    for value, sentence in ((0.5, "must be whole numbers, in the units of training: do not scale"), (300, "hold 300")):
        with pytest.raises(ValueError, match=sentence):
            act(np.full(shape, value), mask)
