"""Reach as an environment: settings, draws, tasks, observations, rewards by hand, scripted policies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.reference.reach import oracle
from envs_jax import make
from envs_jax.base import Box
from envs_jax.batch import batched
from envs_jax.reach import baselines, constants, dynamics, goals, observation, reward, tasks
from envs_jax.reach.env import _move_target
from envs_jax.reach.types import MOST_STEPS, PARTS, TARGET_UNIT

LANES = 40  # as in the replay of recorded episodes, so that the arm is compiled once


@functools.cache
def programs(env):
    """Two programs of LANES episodes: their start, with the tasks that a key draws, and a step."""

    @jax.jit
    def start(key):
        puck, goal, task = jax.vmap(env._draw)(jax.random.split(key, LANES))
        return env.begin(puck.T, goal.T, task)

    return start, jax.jit(env.advance)


def begin(env, seed: int = 0):
    return programs(env)[0](jax.random.key(seed))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"task": "reech"}, "reach: unknown task 'reech': did you mean 'reach'?"),
        ({"task": "reach,reach"}, "names a task twice"),
        ({"horizon": 501}, "horizon must lie between 1 and 500, not 501"),
        ({"goals": "pol"}, "unknown goals 'pol': did you mean 'pool'?"),
        ({"reward": "v3"}, "unknown reward 'v3'"),
        ({"success_radius": 0.0}, "success_radius must lie between 0.001 and 0.5"),
    ],
)
def test_impossible_settings_are_sentences(changed, sentence):
    with pytest.raises(ValueError) as caught:
        make("reach", **changed)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_spec():
    spec = make("reach", task="reach, above", horizon=500).spec
    assert (spec.num_agents, spec.horizon, spec.fixed_horizon, spec.score) == (1, 500, True, "success")
    assert spec.action == Box((4,), jnp.float32, -1.0, 1.0) and spec.observation.shape == (39,)
    assert spec.num_tasks == 2 and spec.task_names == ("reach", "above")
    assert spec.compatible_settings == {"weld": "v3", "reward": "v2", "partially_observable": False}
    assert make("reach_family").spec.num_tasks == len(tasks.TASKS) >= 4


# Draws


fresh = jax.jit(lambda key: jax.vmap(goals.fresh)(jax.random.split(key, 64)))


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_fresh_pairs_lie_in_their_boxes_and_apart(seed):
    rows = np.asarray(fresh(jax.random.key(seed)))
    check_pairs(rows)
    assert len(np.unique(rows, axis=0)) == 64  # a single number may well be drawn twice


def check_pairs(rows):
    boxes = np.array([(-0.1, 0.1), (0.6, 0.7), (0.02, 0.02), (-0.1, 0.1), (0.8, 0.9), (0.05, 0.3)])
    assert (rows >= boxes[:, 0] - 1e-6).all() and (rows <= boxes[:, 1] + 1e-6).all()
    assert (np.hypot(*(rows[:, :2] - rows[:, 3:5]).T) >= 0.15 - 1e-6).all()


def test_the_pool_has_fifty_pairs_and_a_seed():
    pool = goals.pool(3)
    assert pool.shape == (50, 6) and len(np.unique(pool[:, 0])) == 50
    check_pairs(pool)
    assert not np.isclose(pool, goals.pool(4))[:, 0].any()


def test_keys_go_through_the_pool():
    """key(m) selects member m % 50; hashed keys reach all members, about equally often."""
    member = jax.jit(lambda key: goals.from_pool(key, 0))
    in_turn = [member(jax.random.key(m)) for m in (0, 7, 57)]
    np.testing.assert_allclose(in_turn, goals.pool(0)[[0, 7, 7]], atol=1e-6)
    rows = np.asarray(jax.jit(jax.vmap(member))(jax.random.split(jax.random.key(1), 5000)))
    _, counts = np.unique(rows[:, 0], return_counts=True)
    assert len(counts) == 50 and counts.min() > 60 and counts.max() < 150


# Tasks


def test_goals_in_order_are_the_pool_in_turn_each_for_all_tasks() -> None:
    """Episodes behind one another, as a step that restarts numbers them; where an environment begins is drawn."""
    reset = jax.jit(batched(make("reach", task="reach,hover,above", goals="order")).reset)
    keys = jax.random.split(jax.random.key(0), LANES)
    starts = [reset(keys, (), np.uint32(0))[0]]
    for _ in range(8):
        starts.append(reset(keys, (), starts[-1].episode + np.uint32(1))[0])
    puck, goal, task = (np.stack([getattr(start.env, name) for start in starts]) for name in ("puck", "goal", "task"))
    pool = goals.pool(0)
    places = np.concatenate([puck, goal], axis=-1)
    pair = np.argmin(np.abs(places[:, :, None] - pool[None, None]).sum(-1), axis=-1)
    np.testing.assert_allclose(places, pool[pair], atol=1e-6)
    index = 3 * pair + task
    assert (np.diff(index, axis=0) % (3 * len(pool)) == 1).all()
    assert len(set(index[0].tolist())) > LANES // 2  # they begin in different places


def place_of(task, puck, goal):
    """float64[..., 3]: where the tool centre should be, for positions [..., 3]."""
    return np.array(task.scale) * (goal if task.anchor == "goal" else puck) + np.array(task.offset)


@pytest.mark.parametrize("task", tasks.TASKS.values(), ids=lambda task: task.name)
def test_places_can_be_reached_and_are_not_where_episodes_begin(task):
    rng = np.random.default_rng(0)
    corners = np.array(np.meshgrid(*goals.PUCK, *goals.GOAL)).reshape(6, -1).T
    rows = np.concatenate([corners, rng.uniform(*np.concatenate([goals.PUCK, goals.GOAL]).T, (1000, 6))])
    rows = rows[np.hypot(*(rows[:, :2] - rows[:, 3:5]).T) >= goals.MIN_DISTANCE]
    place = place_of(task, rows[:, :3], rows[:, 3:])
    assert (place >= (-0.45, 0.45, 0.05)).all() and (place <= (0.45, 0.95, 0.45 + 1e-9)).all()
    assert (np.linalg.norm(place - (0, 0.6, 0.15), axis=1) > reward.RADIUS).all()
    assert (np.linalg.norm(place - rows[:, :3], axis=1) > 0.1).all()
    assert 0 <= task.required_opening[0] < task.required_opening[1] <= 1


def test_the_observation_does_not_tell_the_task():
    env = make("reach_family")
    puck, goal = (np.tile(np.float32(x)[:, None], (1, 6)) for x in ((0.0, 0.65, 0.02), (0.05, 0.85, 0.1)))
    _, timestep = jax.jit(env.begin)(puck, goal, np.arange(6, dtype=np.int32))
    observation = np.asarray(timestep.observation[0])
    assert (observation == observation[:, :1]).all()
    assert len(np.unique(np.asarray(timestep.metrics["distance"]))) >= 5  # "closed" has the place of "reach"


def test_points_are_those_of_the_tasks():
    env = make("reach_family", goals="uniform")
    state, timestep = jax.tree.map(np.asarray, begin(env))
    for lane in range(LANES):
        task = env.tasks[int(state.task[lane])]
        place = place_of(task, np.asarray(state.puck[:, lane]), np.asarray(state.goal[:, lane]))
        np.testing.assert_allclose(state.tool_goal[:, lane], place, atol=1e-6)
        np.testing.assert_allclose(state.required_opening[:, lane], task.required_opening, atol=1e-6)
    assert set(np.asarray(state.task)) == set(range(len(env.tasks)))
    np.testing.assert_array_equal(timestep.task, state.task)


# Observations


def test_hidden_goals_are_zeros():
    masked_view, open_view = (
        np.asarray(begin(make("reach", partially_observable=hidden))[1].observation)[0] for hidden in (True, False)
    )
    np.testing.assert_array_equal(masked_view[:36], open_view[:36])
    assert (masked_view[36:] == 0).all() and (open_view[37:] != 0).all()


def test_hand_positions_are_clipped_in_the_observation_only():
    frame = np.tile(np.float32([0.6, 0.2, 0.9, *[0.5] * 15])[:, None], (1, 3))
    frame[0] = 0.525, 0.5251, -0.6
    observed = np.asarray(jax.jit(observation.observe)(frame, -frame, np.ones((3, 3), np.float32)))
    np.testing.assert_allclose(observed[:3].T, [(0.525, 0.348, 0.7), (0.525, 0.348, 0.7), (-0.525, 0.348, 0.7)])
    np.testing.assert_allclose(observed[18], [-0.525, -0.525, 0.525])
    np.testing.assert_allclose(observed[19:21, 0], [0.348, -0.0525], rtol=1e-6)
    assert (observed[3:18] == 0.5).all() and (observed[21:36] == -0.5).all() and (observed[36:] == 1).all()


@pytest.mark.parametrize(
    ("weld", "kind", "tolerance"), [("v3", "v2", 1e-4), pytest.param("v2", "v1", 0.05, marks=pytest.mark.slow)]
)
def test_steps_are_those_of_the_oracle(weld, kind, tolerance):
    """Observations, rewards of up to 10 and about 1,000, and targets; actions beyond the box are clipped."""
    env = make("reach", weld=weld, reward=kind)
    state, timestep = begin(env)
    arms = oracle.Arms(*(np.asarray(x.T, np.float64) for x in (state.puck, state.goal)), weld=weld, reward=kind)
    rng = np.random.default_rng(0)
    for _ in range(12):
        np.testing.assert_allclose(timestep.observation[0].T, arms.observe(), atol=1e-5)
        action = rng.uniform(-1.5, 1.5, (LANES, 4)).astype(np.float32)
        paid, success = arms.step(action)
        state, timestep = jax.tree.map(np.asarray, programs(env)[1](state, action.T[None]))
        np.testing.assert_allclose(timestep.reward[0], paid, atol=tolerance)
        np.testing.assert_array_equal(timestep.metrics["success"] > 0, success)
        target = state.mocap_target + state.mocap_target_part / PARTS  # a part of a unit is kept from step to step
        np.testing.assert_allclose(target.T * TARGET_UNIT, arms.target, atol=1e-9)
        assert not timestep.terminated.any() and not timestep.truncated.any()


def moves(kind: str) -> np.ndarray:
    """float32[500, 3, n] in [-1, 1]: held, drawn or small actions, which no recorded episode has."""
    rng = np.random.default_rng(1)
    if kind == "held":
        return np.tile(np.linspace(-0.099, 0.099, 199, dtype=np.float32), (MOST_STEPS, 3, 1))
    drawn = rng.uniform(-1, 1, (MOST_STEPS, 3, 199)).astype(np.float32)
    return drawn if kind == "drawn" else drawn * np.float32(1e-3)


@pytest.mark.parametrize("kind", ["held", "drawn", "small"])
def test_the_target_sums_without_rounding_error(kind: str) -> None:
    """As Meta-World sums: 0.01 * action in float32, added in float64, clipped to its box; over a longest episode."""
    actions, table = moves(kind), constants.data()
    low, high = (np.array(table[name])[:, None] for name in ("mocap_low", "mocap_high"))
    start = constants.reset().target
    expected = np.tile(start[:, None], actions.shape[2])
    units = np.round(expected / TARGET_UNIT).astype(np.int32)

    def one(carry, action):
        carry = _move_target(*carry, action)
        return carry, carry

    _, (target, part) = jax.jit(lambda *x: jax.lax.scan(one, *x))((units, np.zeros_like(units)), actions)
    targets = np.asarray(target, np.float64) * TARGET_UNIT + np.asarray(part, np.float64) * TARGET_UNIT / PARTS
    most = 0.0
    for row, action in zip(targets, actions, strict=True):
        expected = np.clip(expected + (np.float32(0.01) * action).astype(np.float64), low, high)
        most = max(most, np.abs(row - expected).max())
    assert most < 3e-9  # of which 5e-10 is the rounding of the start and of the bounds to TARGET_UNIT
    assert (np.asarray(part) >= 0).all() and (np.asarray(part) < PARTS).all()


@pytest.mark.parametrize(
    ("weld", "turn"),
    [
        ("v3", (-0.00010047584420498049, 0.00016430406140618956, -9.370336688335146e-08, 0.9999999814543855)),
        pytest.param(
            "v2",
            (-0.0004857138762612134, 6.4128537251215e-05, 5.706958881891731e-07, 0.9999998799846105),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_first_observation_shows_the_puck_as_that_weld_leaves_it(weld: str, turn: tuple[float, ...]) -> None:
    """Quaternions measured in MuJoCo 3.3.0 with torque scale 5 and 1, after the reset of Meta-World 3.1.1."""
    env = make("reach", weld=weld)
    state, timestep = begin(env)
    puck = np.asarray(timestep.observation[0, 7:11]).T
    np.testing.assert_allclose(puck, np.tile(turn, (LANES, 1)), atol=1e-9, rtol=1e-7)
    _, after = programs(env)[1](state, np.zeros((1, 4, LANES), np.float32))
    np.testing.assert_array_equal(after.observation[0, 7:11, 0], [0, 0, 0, 1])
    np.testing.assert_allclose(after.observation[0, 25:29, 0], turn, atol=1e-9, rtol=1e-7)


# Rewards


def test_rewards_by_hand():
    point = np.float32([0.3, 1.0, 0.2])  # 0.5 m from the nominal hand
    start = dataclasses.replace(constants.reset(), tool_before=np.array([0.3, 1.0, 0.6]))
    pay = jax.jit(lambda kind, far: reward.compute_reward(kind, far, point, start), static_argnums=0)
    for far, paid in ((0.0, 10.0), (0.05, 10.0), (0.55, 1.0), (0.3, 10 / 3.25)):
        assert float(pay("v2", np.float32(far))) == pytest.approx(paid, rel=1e-5)
    e = np.exp(-1.0)
    assert float(pay("v1", np.float32(0.1))) == pytest.approx(300 + 1000 * (e + e**10), rel=1e-5)
    assert float(pay("v1", np.float32(2.0))) == 0.0


def test_a_gripper_that_should_be_closed():
    width = np.float32([0.0, 0.4])
    amiss = jax.jit(reward.outside)(np.float32([0.3, 0.4, 0.65, 0.9]), width[:, None])
    np.testing.assert_allclose(amiss, [0, 0, 0.25, 0.5], atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(lambda x: reward.tail(x / reward.MARGIN))(amiss), [1, 1, 1 / 3.25, 0.1], rtol=1e-5
    )


def test_success_by_hand():
    """Tool centres 4.5 and 5.5 cm from the point, with the open gripper of the start, and at the start itself."""
    env = make("reach", task="closed")
    state, _ = begin(env)
    pose = jax.jit(dynamics.pose)(state.q)
    show = jax.jit(lambda state: env.show(state, state.frame, pose).metrics["success"])
    for far, wide, steps, reached in ((0.045, 1.0, 1, 1), (0.055, 1.0, 1, 0), (0.045, 0.4, 1, 0), (0.045, 1.0, 0, 0)):
        point = np.asarray(pose.tool) + np.float32([far, 0.0, 0.0])[:, None]
        width = np.float32([[0.0] * LANES, [wide] * LANES])
        moved = dataclasses.replace(state, tool_goal=point, required_opening=width, t=np.full(LANES, steps, np.int32))
        np.testing.assert_array_equal(show(moved), np.full(LANES, reached), err_msg=f"{far} m, {wide}, step {steps}")


@pytest.mark.parametrize(("kind", "radius"), [("sparse", 0.05), ("sparse", 0.02), ("v2", 0.02)])
def test_success_and_reward_follow_the_radius(kind, radius):
    """Tool centres up to 6 cm from the point: against the distances and the formula of the oracle, in float64."""
    env = make("reach", reward=kind, success_radius=radius)
    state, timestep = begin(env)
    assert not np.asarray(timestep.reward).any()
    pose = jax.jit(dynamics.pose)(state.q)
    point = np.asarray(pose.tool) + np.random.default_rng(0).uniform(-0.035, 0.035, (3, LANES)).astype(np.float32)
    moved = dataclasses.replace(state, tool_goal=point, t=np.ones(LANES, np.int32))
    after = jax.tree.map(np.asarray, jax.jit(lambda state: env.show(state, state.frame, pose))(moved))
    tool = oracle.tool_centre(np.asarray(state.q.T, np.float64))
    close_enough = np.linalg.norm(tool - point.T, axis=1) <= radius
    assert 0 < close_enough.sum() < LANES
    np.testing.assert_array_equal(after.metrics["success"] > 0, close_enough)
    paid = close_enough if kind == "sparse" else oracle.reward_v2(tool, point.T, radius)
    np.testing.assert_allclose(after.reward[0], paid, atol=1e-4)


def test_policies_of_the_default_reward_may_guide_where_it_is_sparse():
    assert make("reach", reward="sparse").spec.compatible_settings == make("reach").spec.compatible_settings
    assert make("reach", reward="v1").spec.compatible_settings != make("reach").spec.compatible_settings


# Scripted policies


@functools.cache
def scripted_run():
    """{task index: successes of its lanes}, and the metrics at the end, of 250 steps in the family."""
    env = make("reach_family", horizon=250)
    state, timestep = begin(env, seed=2)
    assert (np.asarray(timestep.reward) == 0).all() and timestep.first.all()
    act = jax.vmap(functools.partial(baselines.scripted, env), in_axes=(-1, None, None), out_axes=-1)
    step = jax.jit(lambda state: env.advance(state, act(state, (), ())))
    reached, total = np.zeros(LANES, bool), np.zeros(LANES)
    for _ in range(250):
        state, timestep = step(state)
        reached |= np.asarray(timestep.metrics["success"]) > 0
        total += np.asarray(timestep.reward)[0]
    return np.asarray(state.task), reached, total, jax.device_get(timestep)


def test_the_scripted_policy_solves_every_task():
    task, reached, total, last = scripted_run()
    assert set(task) == set(range(len(tasks.TASKS))) and reached.all()
    assert (total > 1000).all() and last.truncated.all() and not last.terminated.any()
    assert last.metrics["success_at_end"].mean() > 0.9
