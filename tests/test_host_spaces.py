"""Values that Gymnasium's spaces do not hold, bounds of bytes, masks in `info`, and the interface (issue 54)."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import host

import envs_jax
from jaxrl.cli import evaluate, train

gymnasium: Any = pytest.importorskip("gymnasium", reason="gymnasium is not installed (extra 'gymnasium')")
pytest.importorskip("pettingzoo")
spaces: Any = gymnasium.spaces
pytestmark = [pytest.mark.needs("gymnasium", "pettingzoo"), pytest.mark.filterwarnings("ignore")]  # of the packages
host.register()
counter = itertools.count()


def register(space: Any, *shown: Any, action: Any = None, limit: int = 50, **replies: Any) -> str:
    """Return the name of a new environment that shows these values, one after the other, and the last one for ever.

    `replies` are what `reset` or `step` return instead, or `infos`, by step.
    """
    infos = replies.get("infos", [{}])

    class Shown(gymnasium.Env):  # type: ignore[misc]
        observation_space, action_space = space, action or spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.t = 0
            return replies.get("reset", (shown[0], infos[0]))

        def step(self, action: Any) -> Any:
            self.t += 1
            now = shown[min(self.t, len(shown) - 1)]
            return replies.get("step", (now, 1.0, False, False, infos[min(self.t, len(infos) - 1)]))

    name = f"host/Shown{next(counter)}-v0"
    gymnasium.register(name, entry_point=Shown, max_episode_steps=limit)
    return f"gymnasium:{name}"


def play(name: str, steps: int = 1, copies: int = 2, **settings: Any) -> tuple[list[Any], str | None]:
    """Return the time steps of all copies, and the failure."""
    batch = envs_jax.make(name, **settings).batched()
    state, timestep = batch.reset(jax.random.split(jax.random.key(0), copies))
    rows = [timestep]
    action = jnp.zeros((copies, 1, *batch.spec.action.shape), batch.spec.action.dtype)
    for _ in range(steps):
        state, timestep = batch.step(state, timestep, action)
        rows.append(timestep)
    return rows, batch.failure


IMAGE = (9, 9, 3)
BYTES = spaces.Box(0, 255, IMAGE, np.uint8)
EACH = spaces.Box(np.uint8([0, 3]), np.uint8([1, 5]), dtype=np.uint8)  # with bounds of its own
FLOATS, DOUBLES = (spaces.Box(-np.inf, np.inf, (2,), dtype) for dtype in (np.float32, np.float64))
ONE = spaces.Box(-9, 9, (1,), np.float32)
# space, a value that fits, one that does not, the number that the sentence names
MISFITS = {
    "floats in an image": (BYTES, np.full(IMAGE, 7), np.full(IMAGE, 0.75), "0.75"),
    "-1 in an image": (BYTES, np.full(IMAGE, 7.0), np.full(IMAGE, -1.0), "-1.0"),
    "NaN in an image": (BYTES, np.zeros(IMAGE, np.uint8), np.full(IMAGE, np.nan), "nan"),
    "2 in planes": (spaces.Box(0, 1, IMAGE, np.uint8), np.ones(IMAGE, bool), np.full(IMAGE, 2, np.uint8), "2"),
    "bounds of each": (EACH, np.uint8([1, 5]), np.uint8([1, 2]), "2"),
    "256 in bytes": (spaces.Box(0, 255, (3,), np.uint8), [0, 1, 255], [0, 1, 256], "256"),
    "half a byte": (spaces.Box(0, 255, (3,), np.uint8), [0.0, 1.0, 255.0], [0, 0.5, 1], "0.5"),
    "int8": (spaces.Box(-5, 5, (2,), np.int8), np.array([-5, 5]), np.array([200, 0]), "200"),
    "int64": (spaces.Box(0, 9, (2,), np.int64), np.array([0, 9]), np.array([0, 10]), "10"),
    "unsigned": (spaces.Box(0, 2**32 - 1, (1,), np.uint32), [2**32 - 1], [-1], "-1"),
    "2 as a bool": (spaces.Box(0, 1, (2,), np.bool_), [0, 1], [0, 2], "2"),
    "discrete": (spaces.Discrete(3), 2, 3, "3"),
    "discrete with a start": (spaces.Discrete(3, start=5), 7, 4, "4"),
    "half an integer": (spaces.Discrete(3), 2.0, 1.5, "1.5"),
    "multi-discrete": (spaces.MultiDiscrete([2, 3]), [1, 2], [1, 3], "3"),
    "multi-discrete with starts": (spaces.MultiDiscrete([2, 3], start=[4, -1]), [5, 1], [3, 0], "3"),
    "multi-discrete of two axes": (spaces.MultiDiscrete([[2, 3], [2, 2]]), [[1, 2], [0, 1]], [[1, 2], [2, 1]], "2"),
    "multi-binary": (spaces.MultiBinary(3), [0, 1, 1], [0, 1, 2], "2"),
    "multi-binary of two axes": (spaces.MultiBinary([1, 2]), [[True, False]], np.array([[0.0, 0.5]]), "0.5"),
    "beyond float32": (FLOATS, np.array([0, 1e38]), np.array([0, 1e39]), "1e+39"),
    "beyond float32, doubles": (DOUBLES, [0.0, 1e38], [0.0, -1e300], "-1e+300"),
    "long integers": (FLOATS, [0, 10**30], [0, 10**40], "1e+40"),
    "integers beyond float64": (spaces.Discrete(3), 2, 10**400, "1.7976931348623157e+308"),
    "complex numbers": (ONE, np.ones(1), np.array([1j]), "not numbers"),
    "nothing": (ONE, np.ones(1), None, "an observation is None, not numbers"),
    "text": (ONE, np.ones(1), ["1"], "is ['1'], not numbers"),
    "ragged": (FLOATS, np.ones(2), [[1], [1, 2]], "not numbers"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_values_that_a_space_does_not_hold(case: str) -> None:
    """After a step, and after a reset; values that fit pass, of any type."""
    space, fits, misfit, number = MISFITS[case]
    rows, failure = play(register(space, fits, fits))
    assert failure is None and not np.isnan(rows[1].reward).any()
    rows, failure = play(register(space, fits, misfit))
    start = "failed on the host in step 1 of environment 0 (an observation "
    words = number if "not numbers" in number else f"holds {number}, outside of "
    assert start in str(failure) and words in str(failure)
    assert np.isnan(rows[1].reward).all() and not np.isnan(rows[0].reward).any()
    _, failure = play(register(space, misfit, misfit), steps=0)
    assert "failed on the host in a reset of environment 0 (an observation " in str(failure) and words in str(failure)


def test_the_sentence_about_a_misfit_names_part_space_copy_and_step() -> None:
    class Late(gymnasium.Env):  # type: ignore[misc]
        """The fourth copy shows 4 in step 3."""

        made = itertools.count()
        observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Tuple((spaces.Discrete(4),))})
        action_space = spaces.Box(-1, 1, (1,))

        def __init__(self) -> None:
            self.number = next(self.made) - 1  # the first one shows its spaces

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.t = 0
            return {"a": np.zeros(2), "b": (0,)}, {}

        def step(self, action: Any) -> Any:
            self.t += 1
            return {"a": np.zeros(2), "b": (4 * (self.t == 3 and self.number == 3),)}, 1.0, False, False, {}

    gymnasium.register("host/Late-v0", entry_point=Late, max_episode_steps=9)
    rows, failure = play("gymnasium:host/Late-v0", steps=4, copies=5)
    assert failure == (
        "'gymnasium:host/Late-v0' failed on the host in step 3 of environment 3 ('b.0' of an observation holds 4, "
        "outside of its space Discrete(4)): return values of the space"
    )
    assert [bool(np.isnan(row.reward).any()) for row in rows] == [False] * 3 + [True] * 2


def test_floats_outside_of_their_bounds_are_no_misfits() -> None:
    """Many environments exceed them a little; infinities and NaN are those of the environment."""
    box = spaces.Box(-1, 1, (3,), np.float32)
    rows, failure = play(register(box, np.array([0.0, 1.5, -np.inf])))
    assert failure is None
    np.testing.assert_array_equal(rows[1].observation[0, 0], np.float32([0, 1.5, -np.inf]))


# Bytes


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Box(0, 255, (9, 10, 2), np.uint8), 200 / 255),
        (spaces.Box(0, 1, (9, 10, 4), np.uint8), 1.0),
        (spaces.Box(0, 1, (4, 9, 10), np.uint8), 1.0),
        (spaces.Box(0, 1, (9, 10), np.uint8), 1.0),
        (spaces.Box(0, 4, (9, 10, 1), np.uint8), 1.0),
        (spaces.Box(0, 0, (9, 10, 1), np.uint8), 0.0),
        (spaces.Box(0, 1, (3, 2), np.uint8), 1.0),  # no image: as it is
        (spaces.Box(0, 7, (3, 2), np.uint8), 7.0),
    ],
)
def test_bytes_are_divided_by_the_bound_of_their_box(space: Any, expected: float) -> None:
    largest = np.minimum(space.high, 200).astype(np.uint8)
    rows, failure = play(register(space, largest))
    assert failure is None
    np.testing.assert_allclose(rows[1].observation, expected, rtol=1e-6)


@pytest.mark.parametrize("channels_first", [False, True])
def test_bounds_that_differ_between_planes(channels_first: bool) -> None:
    """Each number by its own bound: planes of zeros and ones beside planes of bytes."""
    high = np.broadcast_to(np.uint8([1, 255, 3]), (9, 10, 3))
    high = np.moveaxis(high, -1, 0) if channels_first else high
    space = spaces.Box(np.zeros_like(high), high, dtype=np.uint8)
    name = register(spaces.Dict({"number": spaces.Box(-1, 1, ()), "screen": space}), {"number": 0.5, "screen": high})
    rows, failure = play(name)
    assert failure is None
    np.testing.assert_allclose(rows[1].observation[..., 0], 0.5)
    np.testing.assert_allclose(rows[1].observation[..., 1:], 1.0)


# Masks in `info`


def masked(action: Any, *masks: Any, **more: Any) -> str:
    infos = [{} if mask is None else {"action_mask": mask} for mask in masks]
    return register(spaces.Box(-1, 1, (1,)), np.zeros(1, np.float32), action=action, infos=infos, **more)


def test_taxi_plays_only_open_actions() -> None:
    env, twin = envs_jax.make("gymnasium:Taxi-v4" if "Taxi-v4" in gymnasium.registry else "gymnasium:Taxi-v3"), None
    twin = gymnasium.make(env.name)
    state, timestep = env.reset(jax.random.key(1))
    _, info = twin.reset(seed=int(jax.random.bits(jax.random.key(1), dtype=jnp.uint32)) // 2)
    closed = 0
    for t in range(30):
        np.testing.assert_array_equal(timestep.action_mask[0], info["action_mask"])
        closed += int(np.sum(info["action_mask"] == 0))
        action = int(np.flatnonzero(info["action_mask"])[t % info["action_mask"].sum()])
        state, timestep = env.step(state, jnp.array([action], jnp.int32))
        info = twin.step(action)[4]
    assert closed > 30


@pytest.mark.parametrize(
    ("action", "mask", "expected"),
    [
        (spaces.Discrete(3, start=4), [1, 0, 1], [1, 0, 1]),
        (spaces.Discrete(3), np.array([True, False, True]), [1, 0, 1]),
        (spaces.MultiDiscrete([2, 3]), ([1, 0], [1, 1, 0]), [1, 1, 0, 0, 0, 0]),  # as Gymnasium's `sample` takes it
        (spaces.MultiDiscrete([3, 2]), np.array([[1, 0, 1], [0, 1, 0]]), [0, 1, 0, 0, 0, 1]),
        (spaces.MultiDiscrete([2, 2]), np.array([1, 1, 0, 1]), [0, 1, 0, 1]),
        (spaces.MultiDiscrete([2, 3]), [np.array([1, 0]), np.array([1, 1, 0])], [1, 1, 0, 0, 0, 0]),
        (spaces.MultiDiscrete([2, 2]), [np.array([1, 0]), np.array([1, 1])], [1, 1, 0, 0]),
        (spaces.MultiDiscrete([2, 3]), [[1, 0], [1, 1, 0]], [1, 1, 0, 0, 0, 0]),
        (spaces.MultiDiscrete([[1, 2], [2, 1]]), (([1], [0, 1]), ([1, 1], [1])), [0, 0, 1, 1]),
        (spaces.MultiBinary(2), ([1, 1], [1, 0]), [1, 0, 1, 0]),
        (spaces.MultiBinary(2), np.array([1, 2], np.int8), [0, 0, 1, 1]),  # 2: both are open
        (spaces.MultiBinary(3), [0, 2, 1], [0, 1, 0, 1, 0, 0, 0, 0]),
        (spaces.MultiBinary([2, 1]), [[0], [2]], [1, 1, 0, 0]),
    ],
)
def test_masks_of_integers(action: Any, mask: Any, expected: list[int]) -> None:
    rows, failure = play(masked(action, mask))
    assert failure is None
    for row in rows:
        np.testing.assert_array_equal(row.action_mask[:, 0], [expected] * 2)


def test_masks_that_gymnasium_itself_takes() -> None:
    """Its samples are those whose index is open."""
    for space, mask in (
        (spaces.MultiDiscrete([[2, 3], [2, 2]]), (([1, 0], [0, 1, 1]), ([0, 1], [1, 1]))),
        (spaces.MultiBinary(4), np.array([2, 0, 1, 2], np.int8)),
    ):
        arrays = jax.tree.map(np.int8, mask, is_leaf=lambda x: isinstance(x, list))
        space.seed(0)
        drawn = {tuple(space.sample(mask=arrays).ravel().tolist()) for _ in range(60)}
        rows, failure = play(masked(space, arrays))
        assert failure is None
        sizes = space.nvec.ravel() if hasattr(space, "nvec") else [2] * 4
        open_ = np.argwhere(np.asarray(rows[1].action_mask[0, 0]).reshape(sizes))
        assert drawn == set(map(tuple, open_.tolist())) and len(drawn) == 4


def told(mask: Any, shown: Any, action: Any, infos: Any = ({},)) -> str:
    """Return the name of an environment whose observation has a mask."""
    space = spaces.Dict({"a": spaces.Box(-1, 1, (1,)), "action_mask": mask})
    observation = {"a": np.zeros(1, np.float32), "action_mask": shown}
    return register(space, observation, action=action, infos=list(infos))


def bits(*shape: int) -> Any:
    return spaces.Box(0, 1, shape, np.int8)


@pytest.mark.parametrize(
    ("mask", "shown", "action", "expected"),
    [
        (bits(1, 4), [[1, 0, 0, 1]], spaces.Discrete(4), [1, 0, 0, 1]),
        (bits(4, 1), [[1], [0], [0], [1]], spaces.Discrete(4), [1, 0, 0, 1]),
        (spaces.MultiBinary([1, 2]), [[0, 1]], spaces.Discrete(2), [0, 1]),
        (spaces.Box(0, 1, (3,), np.float32), [0.0, 1.0, 1.0], spaces.Discrete(3), [0, 1, 1]),
        (bits(2, 3), [[0, 1, 0], [1, 1, 1]], spaces.MultiDiscrete([2, 3]), [0, 1, 0, 1, 1, 1]),  # joint
        (bits(1, 5), [[0, 1, 0, 1, 1]], spaces.MultiDiscrete([2, 3]), [0, 0, 0, 0, 1, 1]),
        (bits(2, 3), [[0, 1, 1], [1, 0, 0]], spaces.MultiDiscrete([3, 2]), [0, 0, 1, 0, 1, 0]),
        (spaces.Box(0, 1, (9, 9), np.uint8), np.eye(9), spaces.MultiDiscrete([9, 9]), np.eye(9).ravel()),
    ],
)
def test_masks_of_observations(mask: Any, shown: Any, action: Any, expected: Any) -> None:
    rows, failure = play(told(mask, np.asarray(shown, mask.dtype), action))
    assert failure is None and rows[0].observation.shape == (2, 1, 1)
    np.testing.assert_array_equal(rows[1].action_mask[0, 0], expected)


PAIR = spaces.Tuple((bits(2), bits(2)))
# the space and value of the mask, the actions, the refusal
UNUSABLE = {
    "another number": (bits(3), np.ones(3, np.int8), spaces.Discrete(4), r"\(3,\) .* \[4\] values: .*\(4,\)"),
    "one-hot": (spaces.MultiDiscrete([2, 2]), np.zeros(2, int), spaces.Discrete(4), "of the kind MultiDiscrete"),
    "a tuple": (PAIR, (np.int8([1, 0]), np.int8([1, 1])), spaces.Discrete(4), "of several arrays"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_masks_of_observations_that_cannot_be_used(case: str) -> None:
    """They are refused, or those in `info` are taken."""
    mask, shown, action, sentence = UNUSABLE[case]
    with pytest.raises(ValueError, match=f"has an action_mask .*{sentence}"):
        envs_jax.make(told(mask, shown, action))
    rows, failure = play(told(mask, shown, action, [{"action_mask": [0, 1, 0, 0]}]))
    assert failure is None and rows[0].observation.shape == (2, 1, 1)
    np.testing.assert_array_equal(rows[1].action_mask[0, 0], [0, 1, 0, 0])


def test_masks_that_change_from_step_to_step() -> None:
    rows, failure = play(masked(spaces.Discrete(2), [1, 1], [0, 1], [1, 0]), steps=2)
    assert failure is None
    assert [row.action_mask[0, 0].tolist() for row in rows] == [[True, True], [False, True], [True, False]]


def test_a_mask_is_not_needed_where_an_episode_has_ended() -> None:
    rows, failure = play(masked(spaces.Discrete(2), [1, 0], None, limit=1))
    assert failure is None and rows[1].truncated.all() and rows[1].action_mask.all()


@pytest.mark.parametrize(
    ("masks", "sentence"),
    [
        (([1, 1], None), "in step 1 of environment 0 (there is no info['action_mask']): return it after every res"),
        ((None, [1, 1]), "in step 1 of environment 0 (info has an action_mask, but had none after the first reset): "),
        (([1, 1], [1, 1, 1]), "(info['action_mask'] has the shape (3,), but its space has (2,))"),
        (([1, 1], [1, 3]), "(info['action_mask'] holds 3, outside of its space MultiBinary(2,))"),
        (([1, 1], [0.0, -np.inf]), "(info['action_mask'] holds -inf, outside of its space MultiBinary(2,))"),
        (([1, 1], "11"), "(info['action_mask'] is '11', not numbers)"),
    ],
)
def test_masks_that_are_wrong(masks: Any, sentence: str) -> None:
    assert sentence in str(play(masked(spaces.Discrete(2), *masks))[1])


@pytest.mark.parametrize(
    ("action", "masks", "step"),
    [
        (spaces.Discrete(2), ([1, 1], [0, 0]), "step 1"),
        (spaces.Discrete(2), ([0, 0], [1, 1]), "a reset"),
        (spaces.MultiDiscrete([2, 3]), ([1] * 5, [1, 1, 0, 0, 0]), "step 1"),
        (spaces.MultiDiscrete([2, 3]), (np.ones((2, 3)), np.zeros((2, 3))), "step 1"),
    ],
)
def test_a_mask_that_closes_every_action_is_no_open_one(action: Any, masks: Any, step: str) -> None:
    sentence = f"in {step} of environment 0 (an action_mask closes every action of an agent): leave one open"
    assert sentence in str(play(masked(action, *masks))[1])


def test_a_mask_of_another_number_of_actions_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"\(4,\) for actions of \[3\] values: return one of shape \(3,\)"):
        envs_jax.make(masked(spaces.Discrete(3), [1] * 4))


def test_masks_of_boxes_have_no_meaning() -> None:
    rows, failure = play(masked(spaces.Box(-1, 1, (2,)), [1, 1], None))
    assert failure is None and rows[0].action_mask is None


# Actions


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (spaces.Box(2**40, 2**40 + 3, (1,), np.int64), "has integers from 1099511627776 to 1099511627779 as actions"),
        (spaces.Discrete(3, start=2**40), "has integers from 1099511627776 to 1099511627778 as actions"),
        (spaces.MultiDiscrete([2, 3], start=[2**40, -5]), "has integers from -5 to 1099511627777 as actions"),
        (spaces.Box(2**32 - 4, 2**32 - 1, (1,), np.uint32), "has integers from 4294967292 to 4294967295 as actions"),
        (spaces.Discrete(3, start=2**31 - 2), "has integers from 2147483646 to 2147483648 as actions"),
        (spaces.Box(0, 2**64 - 1, (2,), np.uint64), "has integers from 0 to 18446744073709551615 as actions"),
        (spaces.Box(-(2**31), 2**31 - 1, (), np.int32), "has 4,294,967,296 actions, more than the"),
        (spaces.Box(-(2**31), 2**31 - 1, (1,), np.int32), "4,294,967,296 combinations"),
    ],
)
def test_integers_that_int32_does_not_hold(action: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        envs_jax.make(register(spaces.Box(-1, 1, (1,)), np.zeros(1, np.float32), action=action))


@pytest.mark.parametrize(
    ("action", "lowest"),
    [
        (spaces.Discrete(3, start=2**31 - 3), 2**31 - 3),
        (spaces.Box(-(2**31), 2 - 2**31, (1,), np.int64), -(2**31)),
        (spaces.Box(5, 7, (1,), np.uint8), 5),
    ],
)
def test_integers_at_the_ends_of_int32(action: Any, lowest: int) -> None:
    env = envs_jax.make(register(spaces.Box(-1, 1, (1,)), np.zeros(1, np.float32), action=action))
    played = np.asarray(env.to_package_action(jnp.int32([[0], [2]])), np.int64)
    np.testing.assert_array_equal(played.ravel(), [lowest, lowest + 2])


# The interface

BOX, SEEN = spaces.Box(-1, 1, (3,)), np.zeros(3, np.float32)
TWO, FIVE = "return the pair (observation, info)", "return the five values observation, reward, "


@pytest.mark.parametrize(
    ("replies", "sentence"),
    [
        ({"reset": SEEN}, "reset of environment 0 (reset returned an object of type ndarray): return the pair (obs"),
        ({"reset": (SEEN,)}, f"(reset returned 1 values): {TWO}"),
        ({"reset": (SEEN, None)}, f"(reset returned 2 values): {TWO}"),
        ({"reset": None}, f"(reset returned None): {TWO}"),
        ({"step": (SEEN, 0.0, False, {})}, f"in step 1 of environment 0 (step returned 4 values): {FIVE}"),
        ({"step": None}, f"(step returned None): {FIVE}"),
        ({"step": (SEEN, 0.0, False, False, None)}, f"(step returned 5 values): {FIVE}"),
        ({"step": (SEEN, None, False, False, {})}, "(the reward is None, not one number): return a number"),
        ({"step": (SEEN, np.ones(2), False, False, {})}, "(the reward is array([1., 1.]), not one number): return a "),
        ({"step": (SEEN, "1.0", False, False, {})}, "(the reward is '1.0', not one number)"),
        ({"step": (SEEN, 1e39, False, False, {})}, "(the reward is 1e+39, too large for float32)"),
        ({"step": (SEEN, 10**40, False, False, {})}, f"(the reward is 1{'0' * 40}, too large for float32)"),
        ({"step": (SEEN, [10**40], False, False, {})}, "(the reward is 1e+40, too large for float32)"),
        ({"step": (SEEN, -(10**400), False, False, {})}, "too large for float32)"),
        ({"step": (SEEN, [[1], [1, 2]], False, False, {})}, "(the reward is [[1], [1, 2]], not one number)"),
        ({"step": (SEEN, np.nan, False, False, {})}, "in step 1 of environment 0 (the reward is nan"),
        ({"step": (SEEN, -np.inf, False, False, {})}, "(the reward is -inf"),
        (
            {"step": (np.float32([0, np.nan, 0]), 1.0, False, False, {})},
            "in step 1 of environment 0 (an observation holds nan",
        ),
        ({"step": (SEEN, 1.0, "False", False, {})}, "(terminated is 'False', not true or false): return a bool"),
        ({"step": (SEEN, 1.0, False, None, {})}, "(truncated is None, not true or false)"),
        ({"step": (SEEN, 1.0, np.zeros(2, bool), False, {})}, "(terminated is array([False, False]), not true or fal"),
        ({"step": (SEEN, 1.0, 0.5, False, {})}, "(terminated is 0.5, not true or false)"),
    ],
)
def test_what_breaks_the_interface(replies: Any, sentence: str) -> None:
    assert sentence in str(play(register(BOX, SEEN, **replies))[1])


@pytest.mark.parametrize("reward", [1, 10**30, np.int64(1), np.float32(1), np.ones(1), np.array(1.0), True, [1.0]])
def test_numbers_and_flags_of_other_types(reward: Any) -> None:
    rows, failure = play(register(BOX, SEEN, step=(SEEN, reward, np.bool_(False), np.array([1]), {})))
    assert failure is None and rows[1].truncated.all()
    assert (rows[1].reward == np.float32(np.ravel(reward)[0])).all()


@pytest.mark.parametrize("where", ["reset", "step", "import", "make"])
def test_an_environment_that_exits(where: str, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    """SystemExit, and other exceptions that are no `Exception`, end in a sentence; Ctrl-C stays what it is."""
    monkeypatch.chdir(tmp_path)

    class Exits(gymnasium.Env):  # type: ignore[misc]
        observation_space, action_space = BOX, spaces.Box(-1, 1, (1,))
        error: Any = SystemExit(3)

        def __init__(self) -> None:
            self.leave("make")

        def leave(self, here: str) -> None:
            if where == here:
                raise self.error

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.leave("reset")
            return SEEN, {}

        def step(self, action: Any) -> Any:
            self.leave("step")
            return SEEN, 0.0, False, False, {}

    name = f"host/Exits-{where}-v0"
    gymnasium.register(name, entry_point=Exits, max_episode_steps=5)
    env = f"gymnasium:{name}"
    if where == "import":
        (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit('no display')\n")
        monkeypatch.syspath_prepend(tmp_path)
        env = "gymnasium:exits_at_import:X-v0"
    assert evaluate.main(["--env", env, "--episodes", "2", "--policy", "random"]) in (1, 2)
    said = capsys.readouterr().err
    assert "(SystemExit: " in said.splitlines()[-1] and said.count("error:") == 1
    assert said.count("Traceback") == said.count("in the environment:\nTraceback") == (where in ("reset", "step"))
    if where == "step":
        Exits.error = KeyboardInterrupt()
        with pytest.raises(BaseException, match="KeyboardInterrupt"):
            jax.block_until_ready(play(env)[0][1].reward)


def test_a_failure_names_the_checkpoint_that_is_kept(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    """After the third iteration of 16 steps the simulator of two environments breaks."""
    monkeypatch.chdir(tmp_path)
    steps = itertools.count(1)

    class Breaks(gymnasium.Env):  # type: ignore[misc]
        observation_space, action_space = BOX, spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return SEEN, {}

        def step(self, action: Any) -> Any:
            if next(steps) > 2 * 3 * 16:
                raise RuntimeError("the rope broke")
            return SEEN, 0.0, False, False, {}

    gymnasium.register("host/Breaks-v0", entry_point=Breaks, max_episode_steps=5)
    words = (
        "--algo ppo --env gymnasium:host/Breaks-v0 --num_envs 2 --hidden_size 4 --rollout_steps 16 --num_minibatches 2 "
        "--eval_every 0 --total_env_steps 3200 --memory_gb 8 --checkpoint_every 1"
    )
    assert train.main(words.split()) == 1
    run = (tmp_path / "runs" / "latest").read_text().strip()
    said = capsys.readouterr().err.splitlines()[-1]
    assert "(RuntimeError: the rope broke): correct it and start again; the last checkpoint (" in said
    assert said.endswith(f"is kept: continue from it with --resume {run}")


def test_an_action_of_nan_is_not_blamed_on_the_environment() -> None:
    name = register(BOX, SEEN, action=spaces.Box(-1, 1, (1,)), step=(SEEN, np.nan, False, False, {}))
    batch = envs_jax.make(name).batched()
    state, timestep = batch.reset(jax.random.split(jax.random.key(0), 2))
    batch.step(state, timestep, jnp.full((2, 1, 1), jnp.nan, jnp.float32))
    assert batch.failure is None


def test_check_env_names_the_tools_for_environments_on_the_host() -> None:
    env = envs_jax.make(register(BOX, SEEN))
    with pytest.raises(envs_jax.testing.ContractError, match="env_checker"):
        envs_jax.check_env(env)
