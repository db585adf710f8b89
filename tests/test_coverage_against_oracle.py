"""Coverage against the NumPy oracle of bench/coverage: any setting, any terrain, any moves, one mission at a time."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from helpers.coverage import sequential_masks
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import envs_jax
from bench.parity.coverage import critic, probability
from bench.reference.coverage import baselines as oracle_baselines
from bench.reference.coverage import oracle
from envs_jax.coverage import actions, baselines, communication, terrain

SPACING = 5

rules = st.fixed_dictionaries(
    {
        "q": st.integers(2, 8),
        "num_agents": st.integers(1, 8),
        "num_actions": st.sampled_from([4, 6, 27]),
        "budget": st.integers(1, 6),
        "prior": st.sampled_from([0.5, 0.5, 0.2, 0.7]),
        "class_weights": st.sampled_from([(0.0, 1.0), (0.0, 1.0), (0.5, 2.0), (1.0, 0.0)]),
        "unknown_weight": st.sampled_from([0.5, 0.0, 1.0]),
        "reward_scale": st.sampled_from([22.0, 3.0]),
        "reward_offset": st.sampled_from([-0.5, 0.25]),
        "communication_range": st.sampled_from([0.0, 5.0, 12.3, 25.0, 100.0]),
        "failure_rate": st.sampled_from([0.0, 0.4]),
        "terrain": st.sampled_from(oracle.TERRAINS),
        "start": st.sampled_from(["uniform", "uniform", "corners"]),
    }
).filter(lambda rule: rule["start"] == "uniform" or rule["num_agents"] <= 4)


def lattice(metres: np.ndarray) -> np.ndarray:
    return (metres // SPACING - np.array([0, 0, 1])).astype(np.int32)


pack = jax.jit(terrain.pack)


def any_terrain(truth: np.ndarray) -> terrain.Terrain:
    nothing = np.zeros((2, 2), np.int32)
    return terrain.Terrain(nothing, nothing, np.array(False), pack(truth), np.array(truth.sum(), np.int32))


def readings(mission: oracle.Mission) -> np.ndarray:
    """bool[A, n, n]: what every agent of the oracle read, in its place."""
    maps = np.zeros((len(mission.measurements), mission.n, mission.n), bool)
    for image, measurement in zip(maps, mission.measurements, strict=True):
        top, bottom, left, right = measurement.box
        image[top:bottom, left:right] = measurement.reading
    return maps


def check_moment(env: Any, mission: oracle.Mission, state: Any, timestep: Any, next_action: np.ndarray) -> None:
    """Beliefs, what agents and critic see, and metrics at one time."""
    belief = probability(env, np.asarray(state.maps.beliefs))
    np.testing.assert_allclose(belief[:-1], mission.local_beliefs, atol=5e-5)
    np.testing.assert_allclose(belief[-1], mission.global_belief, atol=5e-5)
    scale = max(1.0, *mission.settings.class_weights)
    view = np.maximum(mission.observe(), 0.0)  # the share of the budget left, where nobody acts any more
    np.testing.assert_allclose(timestep.observation, view, atol=1e-5 * scale)
    critic_sees = critic(env.num_actions)(timestep, np.asarray(next_action, np.int32))
    np.testing.assert_allclose(critic_sees, mission.critic_state(next_action, view), atol=1e-5 * scale)
    expected = mission.metrics()
    for name in ("entropy", "coverage", "roi_coverage"):
        np.testing.assert_allclose(timestep.metrics[name], expected[name], atol=2e-6, err_msg=name)
    np.testing.assert_allclose(timestep.metrics["f1"], expected["f1"], atol=1.0 / max(1, mission.truth.sum()))


def rewards_of(mission: oracle.Mission) -> tuple[float, float]:
    """The reward of training and the absolute one, for the last measurements."""
    before, after, rule = mission.previous_global_belief, mission.global_belief, mission.settings
    weight = oracle.class_weight(after, rule.class_weights, rule.unknown_weight)
    absolute = oracle.utilities(oracle.entropy(before), oracle.entropy(after), weight)[1]
    return oracle.reward(before, after, rule), 10.0 * absolute - 0.17


def check_greedy(scores: Any, mission: oracle.Mission) -> None:
    """Gains of the greedy policy, and its scores, which are discounted where agents contest a place."""
    masks = oracle_baselines.greedy_masks(mission)
    gains = oracle_baselines.raw_gains(mission, masks)
    targets = mission.positions[:, None] + oracle.MOVES[mission.settings.num_actions]
    expected = oracle_baselines.discount(oracle_baselines.normalise(gains), masks, targets)
    np.testing.assert_allclose(scores[0], gains, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(scores[1], expected, rtol=1e-4, atol=1e-6)


received = jax.jit(communication.find_received)

few = functools.partial(  # a failing case compiles anew at every attempt to shrink it
    settings, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)


# Two settings that reach most rules between them; all others are for the night.
LOSSY = {
    "q": 5, "num_agents": 4, "num_actions": 27, "budget": 6, "prior": 0.2, "class_weights": (0.5, 2.0),
    "unknown_weight": 1.0, "reward_scale": 3.0, "reward_offset": 0.25, "communication_range": 12.3, "failure_rate": 0.4,
    "terrain": "field", "start": "corners",
}  # fmt: skip
LOSSLESS = {
    "q": 7, "num_agents": 5, "num_actions": 6, "budget": 6, "prior": 0.5, "class_weights": (0.0, 1.0),
    "unknown_weight": 0.5, "reward_scale": 22.0, "reward_offset": -0.5, "communication_range": 25.0,
    "failure_rate": 0.0, "terrain": "split", "start": "uniform",
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "rule", "timing"),
    [
        pytest.param("dense", LOSSY, "aligned", id="dense-lossy"),
        pytest.param("dense", LOSSLESS, "original", id="dense-lossless"),
        pytest.param("windows", LOSSY, "aligned", id="windows-lossy"),
        pytest.param("windows", LOSSLESS, "original", id="windows-lossless", marks=pytest.mark.slow),
    ],
)
def test_missions_equal_those_of_the_oracle(backend: str, rule: dict[str, Any], timing: str) -> None:
    check_mission(backend, rule, 1, timing)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dense", "windows"])
@few(max_examples=16)
@given(rule=rules, seed=st.integers(0, 2**31))
def test_more_missions_equal_those_of_the_oracle(backend: str, rule: dict[str, Any], seed: int) -> None:
    check_mission(backend, rule, seed)


def check_mission(backend: str, rule: dict[str, Any], seed: int, timing: str = "aligned") -> None:
    mission = oracle.Mission(oracle.Settings(**rule), np.random.default_rng(seed))
    # its map comes from the oracle, cell by cell
    settings = rule | {"terrain": "field", "belief_dtype": "float32", "map_backend": backend, "reward_timing": timing}
    env = envs_jax.make("coverage", **settings)
    assert (env.n, env.steps) == (mission.n, mission.settings.steps)
    advance = jax.jit(env.observe_and_fuse)
    greedy = jax.jit(functools.partial(baselines.ig_scores, env, communication=True))
    ground, comm_range = any_terrain(mission.truth), np.float32(rule["communication_range"])
    state = jax.jit(env.begin)(jax.random.key(0), ground, lattice(mission.positions), comm_range)
    state, timestep = advance(state, state.positions, mission.received, readings(mission))
    assert np.all(np.asarray(timestep.reward) == 0.0)
    earned = rewards_of(mission)
    while True:
        heard = received(lattice(mission.positions), comm_range)
        assert np.all(np.asarray(heard) | ~mission.received)
        if rule["failure_rate"] == 0.0:
            np.testing.assert_array_equal(heard, mission.received)
        chosen, masks = mission.act(lambda _, mask: int(mission.rng.choice(np.flatnonzero(mask))))
        check_moment(env, mission, state, timestep, chosen)
        if backend == "dense":  # the greedy policy reads the same maps of both
            check_greedy(greedy(state, timestep), mission)
        assert bool(timestep.terminated) == mission.done
        if mission.done:
            break
        actual_masks, moved = masks_of(state.positions, np.asarray(chosen, np.int32), rule["num_actions"])
        np.testing.assert_array_equal(actual_masks, masks)
        mission.step(chosen)
        before, earned = earned, rewards_of(mission)
        reward, absolute = earned if timing == "aligned" else before  # the original system pays one step later
        np.testing.assert_array_equal(moved, lattice(mission.positions))
        state, timestep = advance(state, moved, mission.received, readings(mission))
        tolerance = 1e-5 * max(1.0, rule["reward_scale"] / 22.0)
        np.testing.assert_allclose(timestep.reward, reward, atol=tolerance)
        np.testing.assert_allclose(timestep.metrics["return_abs"], absolute, atol=2e-5)


@functools.partial(jax.jit, static_argnums=2)
def masks_of(positions: jax.Array, chosen: jax.Array, num_actions: int) -> tuple[jax.Array, jax.Array]:
    boundary = actions.boundary_mask(positions, num_actions)
    masks = sequential_masks(positions, boundary, chosen, num_actions)
    return masks, actions.move(positions, chosen, num_actions)
