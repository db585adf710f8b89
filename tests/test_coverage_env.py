"""Coverage as an environment: its settings, batches, rewards and messages, and what must hold in every mission."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.coverage import fly, make, wander
from helpers.off_policy import digest
from helpers.programs import get_programs

import envs_jax
from bench.parity.coverage import advance, critic, launch
from envs_jax.batch import batched
from envs_jax.coverage import communication, maps, reward, terrain, world
from envs_jax.progress import start


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_agents": 0}, "num_agents"),
        ({"num_agents": 13}, "between 1 and 12"),
        ({"budget": 0}, "budget"),
        ({"q": 1}, "q must lie between 2 and 200, not 1"),
        ({"num_actions": 9}, "4, 6 or 27"),
        ({"communication_range": -1.0}, "communication_range must lie between 0"),
        ({"failure_rate": 1.5}, "failure_rate must lie between 0 and 1"),
        ({"prior": 1.0}, "prior"),
        ({"class_weights": (-1.0, 1.0)}, "class_weights must lie between 0"),
        ({"terrain": "splitt"}, "did you mean 'split'"),
        ({"start": "corner"}, "did you mean 'corners'"),
        ({"map_backend": "window"}, "did you mean 'windows'"),
    ],
)
def test_impossible_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        make(**settings)


USUAL = make(failure_rate=0.2)  # what most tests fly, so that it is compiled once
COPIES = 300


def test_a_mission_from_start_to_end():
    env = USUAL
    steps_seen = fly(env, jax.random.key(4))
    for t, (state, timestep) in enumerate(steps_seen):
        assert int(state.t) == t
        assert bool(timestep.first) == (t == 0)
        assert bool(timestep.terminated) == (t == 5) and not bool(timestep.truncated)
        np.testing.assert_allclose(timestep.observation[..., 0], max(0.0, (4 - t) / 4), atol=1e-6)
        assert np.all(np.asarray(timestep.reward) == np.asarray(timestep.reward)[0])
        observation = np.asarray(timestep.observation)
        assert observation.min() >= 0.0 and observation.max() <= 1.0
        assert np.asarray(timestep.global_state["maps"]).max() <= 1.0
    assert np.all(np.asarray(steps_seen[0][1].reward) == 0.0)
    coverage = [float(timestep.metrics["coverage"]) for _, timestep in steps_seen]
    assert all(a <= b for a, b in itertools.pairwise(coverage))
    assert 0.0 < coverage[0] < coverage[-1] < 1.0


def test_reward_timing_shifts_by_one():
    settings = {"failure_rate": 0.2}
    aligned, original = (
        [float(timestep.reward[0]) for _, timestep in replay(env, *surveys(env, 3, 6))]
        for env in (make(**settings), make(reward_timing="original", **settings))
    )
    assert original[2:] == aligned[1:-1]
    assert original[0] == 0.0 and original[1] != 0.0


def test_the_reward_of_the_region_is_what_the_score_loses():
    steps_seen = fly(make(reward="region", reward_scale=10.0, reward_offset=0.25), jax.random.key(2))
    entropy = [float(timestep.metrics["entropy"]) for _, timestep in steps_seen]
    rewards = [float(timestep.reward[0]) for _, timestep in steps_seen]
    assert rewards[0] == 0.0
    np.testing.assert_allclose(rewards[1:], 0.25 - 10 * np.diff(entropy), atol=1e-5)
    assert entropy[-1] < entropy[0] - 0.01


def test_a_fusion_that_changes_nothing_earns_the_offset():
    env = make(num_agents=2, num_actions=4)
    start = np.int32([[5, 5, 0]] * 2)
    readings = np.ones((2, env.n, env.n), bool)

    @jax.jit
    def rewards_of(key):  # certain cells cannot become more certain
        state = env.begin(key, terrain.split(jnp.int32(0), jnp.int32(45), env.n), start, jnp.float32(25))
        return jax.lax.scan(
            lambda state, _: env.observe_and_fuse(state, start, jnp.ones((2, 2), jnp.bool_), readings), state, length=6
        )[1].reward[:, 0]

    rewards = np.asarray(rewards_of(jax.random.key(0)))
    assert rewards[1] > -0.5
    assert rewards[-1] == -0.5
    zero = np.zeros(2, np.int32)
    assert float(jax.jit(lambda: reward.relative(jnp.asarray(zero), jnp.asarray(zero), 22.0, -0.5))()) == -0.5


def test_cells_never_seen_keep_the_prior():
    env = make(prior=0.3, num_agents=2, belief_dtype="float32")
    steps_seen = wander(env, jax.random.key(1))
    touched = np.zeros((env.n, env.n), bool)

    @jax.jit
    def read(state):
        box = world.clip_footprint(world.footprint(state.positions, env.q), env.n)
        return box, env.storage.log_odds(state.maps.beliefs)

    for state, timestep in steps_seen:
        box, log_odds = jax.tree.map(np.asarray, read(state))
        for i in range(2):
            touched[int(box.top[i]) : int(box.bottom[i]), int(box.left[i]) : int(box.right[i])] = True
        unseen = np.asarray(state.maps.beliefs)[-1] == env.storage.unseen
        np.testing.assert_array_equal(unseen, ~touched)
        assert float(timestep.metrics["coverage"]) == pytest.approx(touched.mean())
        assert np.all(log_odds[-1][unseen] == np.float32(np.log(0.3 / 0.7)))


def surveys(env, seed, steps, transpose=False):
    """Random poses and readings [k] of a mission, axes of everything exchanged if `transpose`."""
    rng = np.random.default_rng(seed)
    poses = rng.integers(0, (11, 11, 3), (steps, env.num_agents, 3)).astype(np.int32)
    readings = rng.random((steps, env.num_agents, env.n, env.n)) < 0.5
    if transpose:
        poses, readings = poses[..., [1, 0, 2]], readings.swapaxes(-1, -2)
    return np.ascontiguousarray(poses), np.ascontiguousarray(readings)


heard = jax.jit(communication.find_received)
split = jax.jit(terrain.split, static_argnums=2)


def replay(env, poses, readings, side=0, comm_range=25.0):
    ground = split(np.int32(side), np.int32(40), env.n)
    state = launch(env)(jax.random.key(0), ground, poses[0], np.float32(comm_range))
    steps_seen = []
    for k in range(len(poses)):
        state, timestep = advance(env)(state, poses[k], heard(poses[k], np.float32(comm_range)), readings[k])
        steps_seen.append(jax.tree.map(np.asarray, (state.maps.beliefs, timestep)))
    return steps_seen


def test_exchanging_the_axes_exchanges_them_in_the_results():
    env = USUAL
    plain = replay(env, *surveys(env, 0, 5), side=0)
    turned = replay(env, *surveys(env, 0, 5, transpose=True), side=2)
    for (belief, a), (belief_turned, b) in zip(plain, turned, strict=True):
        np.testing.assert_array_equal(belief.swapaxes(-1, -2), belief_turned)
        np.testing.assert_allclose(a.observation.swapaxes(1, 2), b.observation, atol=1e-6)
        np.testing.assert_allclose(a.global_state["maps"].swapaxes(0, 1), b.global_state["maps"], atol=1e-6)
        np.testing.assert_allclose(a.reward, b.reward, atol=1e-6)
        for name in a.metrics:
            np.testing.assert_allclose(a.metrics[name], b.metrics[name], atol=1e-6)


def test_unlimited_range_gives_everyone_the_belief_of_the_team():
    env = USUAL
    poses, readings = surveys(env, 1, 8)
    for k, (beliefs, _) in enumerate(replay(env, poses, readings, comm_range=100.0)):
        local, team = beliefs[:-1], beliefs[-1:]
        if k < 2:  # nothing is clipped yet
            np.testing.assert_array_equal(local, np.broadcast_to(team, local.shape))
        certain = np.abs(team.astype(np.int32)) > 9000
        np.testing.assert_array_equal(
            np.where(certain, 0, local), np.where(certain, 0, np.broadcast_to(team, local.shape))
        )


def test_range_zero_leaves_own_measurements():
    env, alone = USUAL, make(num_agents=1)
    poses, readings = surveys(env, 2, 4)
    poses[:, :, 0] = [1, 4, 7, 9]  # never in one place
    together = replay(env, poses, readings, comm_range=0.0)
    for i in range(4):
        single = replay(alone, poses[:, i : i + 1], readings[:, i : i + 1], comm_range=0.0)
        for (beliefs, a), (single_beliefs, b) in zip(together, single, strict=True):
            np.testing.assert_array_equal(beliefs[i], single_beliefs[0])
            np.testing.assert_allclose(a.observation[i, ..., 3:6], b.observation[0, ..., 3:6], atol=1e-6)


def test_messages_fail_independently():
    message_keys = np.arange(300, dtype=np.int32)
    draws = np.asarray(
        jax.jit(jax.vmap(lambda i: communication.draw_delivered(jax.random.key(0), i, 4, 0.3)))(message_keys)
    )
    off = ~np.eye(4, dtype=bool)
    assert draws[:, off].mean() == pytest.approx(0.7, abs=0.03)
    assert not np.array_equal(draws, draws.swapaxes(1, 2))  # one-way failures
    positions = np.int32([[0, 0, 2], [0, 0, 2], [1, 0, 2], [10, 10, 0]])
    none = heard(positions, np.float32(25.0), np.zeros((4, 4), bool))
    np.testing.assert_array_equal(none, [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    all_ = heard(positions, np.float32(5.0))
    np.testing.assert_array_equal(all_, [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1]])


def test_critic_input():
    _, timestep = fly(USUAL, jax.random.key(3), steps=1)[-1]
    action = np.int32([5, 0, 2, 3])
    see = critic(6)
    critic_inputs = np.asarray(see(timestep, action))
    assert critic_inputs.shape == (4, 11, 11, 12)
    positions = np.asarray(timestep.mask_state)
    assert len(np.unique(positions[:, :2], axis=0)) == 4  # else one would hide another
    for i in range(4):
        plane, heights = np.zeros((11, 11)), np.zeros((11, 11))
        for j in range(4):
            heights[positions[j, 0], positions[j, 1]] = (positions[j, 2] + 1) / 3
            if j != i:
                plane[positions[j, 0], positions[j, 1]] = (action[j] + 1) / 6
        np.testing.assert_allclose(critic_inputs[i, ..., 11], plane, atol=1e-6)
        np.testing.assert_allclose(critic_inputs[i, ..., 7], heights, atol=1e-6)
        np.testing.assert_array_equal(critic_inputs[i, ..., :7], timestep.observation[i])
    np.testing.assert_array_equal(jax.jit(USUAL.spec.critic_input)(timestep, action), critic_inputs)
    half = jax.tree.map(lambda x: x.astype(jnp.float16) if x.dtype == jnp.float32 else x, timestep)
    assert jax.eval_shape(see, half, action).dtype == jnp.float16


@pytest.mark.parametrize(("backend", "copies"), [("auto", COPIES), pytest.param("windows", 12, marks=pytest.mark.slow)])
def test_a_copy_alone_equals_the_copy_in_a_batch(backend, copies):
    programs = get_programs(dataclasses.replace(USUAL, map_backend=backend))
    keys = jax.random.split(jax.random.key(11), copies)
    states, timesteps = programs.reset_batch(keys, ())
    history = [(states.env, timesteps)]
    actions_ = np.random.default_rng(1).integers(0, 6, (3, copies, 4), np.int32)
    for action in actions_:
        states, timesteps = programs.step_batch(states, timesteps, action, ())
        history.append((states.env, timesteps))
    history = jax.tree.map(_numbers, history)
    for i in (0, copies // 2, copies - 1):
        state, timestep = programs.reset(jax.random.fold_in(keys[i], 0), ())
        for t, many in enumerate(history):
            if t:
                state, timestep = programs.step(state, actions_[t - 1, i], ())
            alone = [_numbers(leaf) for leaf in jax.tree.leaves((state, timestep))]
            for a, b in zip(alone, jax.tree.leaves(many), strict=True):
                if np.issubdtype(a.dtype, np.floating):
                    np.testing.assert_allclose(a, b[i], atol=1e-6, rtol=1e-6)
                else:
                    np.testing.assert_array_equal(a, b[i])


def _numbers(leaf):
    """A leaf in NumPy, keys as their numbers."""
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def test_episodes_of_a_batch_follow_each_other():
    programs = get_programs(USUAL)
    keys = jax.random.split(jax.random.key(0), COPIES)
    state, timestep = programs.reset_batch(keys, ())
    firsts, starts = [], []
    for _ in range(13):
        state, timestep = programs.step_batch(state, timestep, np.zeros((COPIES, 4), np.int32), ())
        firsts.append(bool(np.asarray(timestep.first)[0]))
        starts.append(np.asarray(state.env.maps.sums.counts))
    assert firsts == [False] * 5 + [True] + [False] * 5 + [True, False]
    again, _ = programs.reset(jax.random.fold_in(keys[1], 1), ())
    np.testing.assert_array_equal(again.maps.sums.counts, starts[5][1])


def test_field_uses_packed_bits():
    env = make(q=5, terrain="field")
    state, _ = jax.eval_shape(env.reset, jax.random.key(0), ())
    assert state.terrain.bits.dtype == jnp.uint8 and state.terrain.bits.shape == (-(-env.n // 8), env.n)
    assert make(terrain="mixed").spec.num_agents == 4


def test_bytes_of_the_state():
    env = envs_jax.make("coverage", q=57)
    shapes = jax.eval_shape(env.reset, jax.random.key(0), ())[0]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes) if leaf.dtype.name != "key<fry>")
    assert size < 5 * 493 * 493 * 2 + 8192
    assert maps.choose("dense", 57, True) is not maps.choose("windows", 57, True)


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"delay": (0, 1), "failure_rate": (0.3,), "channel_ramp": 0.5}],
)
def test_a_step_after_an_end_starts_what_reset_does(settings: Any) -> None:
    """Bit for bit, from the end of a mission and from nothing: both are compiled as one."""
    batch = batched(envs_jax.make("coverage", q=2, budget=2, num_agents=2, **settings))
    keys, context = jax.random.split(jax.random.key(4), 3), batch.context(start())
    step, action = jax.jit(batch.step), np.zeros((3, 2), np.int32)
    reset = jax.jit(batch.reset)
    expected = reset(keys, context, np.uint32(5))
    state, timestep = step(*batch.begin_episodes(keys, context, 5), action, context)
    for _ in range(batch.spec.horizon):
        assert digest((state, timestep)) == digest(expected)
        for _ in range(batch.spec.horizon):
            assert not timestep.done.any()
            state, timestep = step(state, timestep, action, context)
        assert timestep.done.all()
        expected = reset(keys, context, state.episode[0] + np.uint32(1))
        state, timestep = step(state, timestep, action, context)
