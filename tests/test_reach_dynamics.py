"""One control period against the oracle, at states all over the place; the oracle against differences of energies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.reference.reach import oracle
from envs_jax.reach import constants, dynamics, folding

LANES = 40  # as in the replay of recorded episodes, so that the arm is compiled once


@functools.cache
def states(seed: int = 0) -> dict[str, np.ndarray]:
    """Joint values around the reset, some of every joint beyond its limits, with targets near the hand."""
    rng = np.random.default_rng(seed)
    start = constants.reset()
    low, high = oracle._column("joint_range").T
    q = start.q + rng.normal(scale=[0.3] * 7 + [0.01] * 2, size=(LANES, 9))
    for lane in range(LANES):  # one joint in the limit, at different depths
        joint, overshoot = lane % 9, rng.choice([-1, 1]) * 10 ** rng.uniform(-5, -2)
        if abs((high if overshoot > 0 else low)[joint] - q[lane, joint]) < 2:
            q[lane, joint] = (high if overshoot > 0 else low)[joint] + overshoot
    v = rng.normal(scale=[1.0] * 7 + [0.01] * 2, size=(LANES, 9))
    target = oracle.frames(q).hand + rng.normal(scale=0.05, size=(LANES, 3))
    return {"q": q, "v": v, "target": target, "grip": rng.uniform(-1.3, 1.3, LANES)}


def period(torque_scale: float, **changes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values = {**states(), **changes}
    arrays = (np.asarray(values[name].T, np.float32) for name in ("q", "v", "target", "grip"))
    q, v = dynamics.control_step(*arrays, np.float32(torque_scale))
    return np.asarray(q).T, np.asarray(v).T


@pytest.mark.parametrize("weld", ["v3", "v2"])
def test_a_period_is_that_of_the_oracle(weld):
    now, scale = states(), constants.torque_scale(weld)
    q, v = now["q"], now["v"]
    violated = 0
    low, high = oracle._column("joint_range").T
    for _ in range(5):
        violated += ((q < low) | (q > high)).sum()
        q, v = oracle.physics_step(q, v, now["target"], now["grip"], scale)
    assert violated > LANES
    found_q, found_v = period(scale)
    np.testing.assert_allclose(found_q, q, atol=2e-5)
    np.testing.assert_allclose(found_v, v, atol=5e-3)


@pytest.mark.parametrize("name", ["q", "v", "target", "grip"])
def test_not_a_number_stays_in_its_lane(name):
    spoilt = states()[name].copy()
    spoilt[17] = np.nan
    others = np.arange(LANES) != 17
    for clean, changed in zip(period(5.0), period(5.0, **{name: spoilt}), strict=True):
        np.testing.assert_array_equal(clean[others], changed[others])
        assert np.isnan(changed[17]).any()


def test_pose_and_skeleton_are_those_of_the_oracle():
    q = states()["q"]
    actual, expected = jax.jit(dynamics.pose)(np.asarray(q.T, np.float32)), oracle.frames(q)
    np.testing.assert_allclose(actual.hand.T, expected.hand, atol=1e-6)
    np.testing.assert_allclose(actual.tool.T, oracle.tool_centre(q), atol=1e-6)
    np.testing.assert_allclose(actual.opening, oracle.opening(q), atol=2e-6)
    points = np.asarray(jax.jit(dynamics.skeleton)(np.asarray(q.T, np.float32)))
    np.testing.assert_allclose(points[:7].transpose(2, 0, 1), expected.origin[:, :7], atol=1e-6)
    np.testing.assert_allclose(points[7:].transpose(0, 2, 1), [expected.hand, oracle.tool_centre(q)], atol=1e-6)


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.3, None]), min_size=3, max_size=3), min_size=2, max_size=2))
@settings(max_examples=50, deadline=None)
def test_folding_leaves_nothing_out(vectors):
    """Entries that are None are arrays."""
    rng = np.random.default_rng(0)
    plain = [[rng.normal() if x is None else x for x in v] for v in vectors]
    mixed = [[np.float64(y) if x is None else x for x, y in zip(v, p, strict=True)] for v, p in
             zip(vectors, plain, strict=True)]  # fmt: skip
    mixed = [[jnp.float32(x) if isinstance(x, np.float64) else x for x in v] for v in mixed]
    np.testing.assert_allclose([float(x) for x in folding.cross(*mixed)], np.cross(*plain), atol=1e-6)
    np.testing.assert_allclose(float(folding.dot(*mixed)), np.dot(*plain), atol=1e-6)
    assert folding.known(folding.mul(0.0, jnp.float32(1)))


# The oracle


def centres(q: np.ndarray) -> np.ndarray:
    """float64[E, 9, 3]: centres of mass."""
    links = oracle.frames(q)
    com = np.array([link["com"] for link in oracle.constants()["links"]])
    return links.origin + np.einsum("elij,lj->eli", links.rotation, com)


def kinetic(q: np.ndarray, v: np.ndarray) -> np.ndarray:
    """float64[E]: from how rotations and centres of mass change along v, by central differences; with the armature."""
    h = 1e-6
    ahead, behind = oracle.frames(q + h * v), oracle.frames(q - h * v)
    speed = (centres(q + h * v) - centres(q - h * v)) / (2 * h)
    turning = (ahead.rotation - behind.rotation) / (2 * h) @ oracle.frames(q).rotation.swapaxes(2, 3)
    spin = np.stack([turning[..., 2, 1], turning[..., 0, 2], turning[..., 1, 0]], axis=-1)
    local = np.einsum("elji,elj->eli", oracle.frames(q).rotation, spin)
    links = oracle.constants()["links"]
    energy = sum(link["mass"] * (speed[:, i] ** 2).sum(-1) / 2 for i, link in enumerate(links))
    energy = energy + sum(
        np.einsum("ei,ij,ej->e", local[:, i], np.array(link["inertia_about_com"]), local[:, i]) / 2
        for i, link in enumerate(links)
    )
    return energy + (oracle._column("armature") * v**2).sum(-1) / 2


def test_the_mass_matrix_of_the_oracle_gives_the_kinetic_energy():
    q, v = states()["q"][:6], states()["v"][:6]
    matrix, _ = oracle.mass_and_bias(q, v)
    np.testing.assert_allclose(np.einsum("ei,eij,ej->e", v, matrix, v) / 2, kinetic(q, v), rtol=1e-6)


def test_the_bias_of_the_oracle_is_lagranges():
    """d/dt (dT/dv) - dT/dq + dV/dq without acceleration, by central differences of the mass matrix and the heights."""
    q, v, h = states()["q"][:6], states()["v"][:6], 1e-6

    def mass(q: Any) -> Any:
        return oracle.mass_and_bias(q, np.zeros_like(q))[0]

    weight = oracle._column("mass") * 9.81
    expected = np.einsum("eij,ej->ei", (mass(q + h * v) - mass(q - h * v)) / (2 * h), v)
    for j in range(9):
        ahead, behind = q.copy(), q.copy()
        ahead[:, j] += h
        behind[:, j] -= h
        change = (mass(ahead) - mass(behind)) / (2 * h)
        expected[:, j] -= np.einsum("ei,eij,ej->e", v, change, v) / 2
        expected[:, j] += ((centres(ahead) - centres(behind))[..., 2] / (2 * h)) @ weight
    np.testing.assert_allclose(oracle.mass_and_bias(q, v)[1], expected, atol=1e-5)
