"""The GPU kernels, interpreted, against the dense backend: integers bit for bit, real numbers to rounding."""

import jax
import numpy as np
import pytest

import envs_jax
from envs_jax.batch import batched
from envs_jax.coverage import maps, sensor, terrain, world
from envs_jax.coverage.belief import Storage, Weights
from envs_jax.coverage.maps import dense, fixed_point, pallas
from envs_jax.coverage.maps.types import MapConfig, Measurements, empty

UPDATES = 3


def surveys(config, copies, families, recorded):
    """One survey [B] for each update, of agents that jump about at random."""
    agents, n, rng = config.num_agents, config.n, np.random.default_rng(config.cells_per_footprint)
    keys = jax.random.split(jax.random.key(config.cells_per_footprint), copies)
    ground = jax.jit(jax.vmap(lambda key: terrain.draw(key, families, n)))(keys)

    def survey():
        highest = np.array([world.LATTICE, world.LATTICE, world.LEVELS])
        positions = rng.integers(0, highest, (copies, agents, 3), np.int32)
        received = rng.random((copies, agents, agents)) < 0.5
        if recorded:
            source = rng.random((copies, agents, n, n)) < 0.4
        else:
            source = sensor.Noise(rng.integers(0, 2**32, (copies, (agents + 1) // 2, 2), np.uint32))
        return Measurements(ground, positions, received, source)

    return [survey() for _ in range(UPDATES)]


@pytest.mark.parametrize(
    ("q", "agents", "copies", "dtype", "prior", "families", "recorded"),
    [
        (13, 3, 2, "int16", 0.4, terrain.FAMILIES, False),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (6, 3, 2, "int16", 0.5, ("split",), False),
                (13, 2, 2, "float32", 0.4, terrain.FAMILIES, False),
                (13, 2, 2, "int16", 0.4, terrain.FAMILIES, True),
                (57, 2, 1, "int16", 0.5, ("split",), False),
            )
        ),
    ],
)
def test_equals_the_dense_backend(q, agents, copies, dtype, prior, families, recorded):
    weights = Weights((0.1, 1.0), 0.5)
    config = MapConfig(q, agents, Storage(dtype, prior), weights)
    padded = MapConfig(q, agents, Storage(dtype, prior), weights, pallas.tile(config.n))
    n = config.n
    assert padded.shape[0] >= n and padded.shape[1] >= n and padded.shape != (n, n)
    rounds = surveys(config, copies, families, recorded)

    @jax.jit
    def start(ground):
        return [jax.vmap(lambda one, m=m: empty(m, one))(ground) for m in (config, padded)]

    expected, actual = start(rounds[0].terrain)
    real = jax.jit(jax.vmap(fixed_point.real))
    reference = jax.jit(lambda state, survey: dense.update_batch(config, state, survey))
    kernels = jax.jit(lambda state, survey: pallas.update_batch(padded, state, survey))
    for survey in rounds:
        expected, dense_report = reference(expected, survey)
        actual, report = kernels(actual, survey)
        beliefs = np.asarray(actual.beliefs)
        np.testing.assert_array_equal(beliefs[..., :n, :n], expected.beliefs)
        rest = beliefs == padded.storage.unseen
        assert rest[..., n:, :].all() and rest[..., :, n:].all()
        np.testing.assert_array_equal(actual.sums.counts, expected.sums.counts)
        for pair, expected_pair in (
            (actual.sums.weighted, expected.sums.weighted),
            (actual.sums.interest, expected.sums.interest),
            (report.before, dense_report.before),
        ):
            low = np.asarray(pair)[:, 1]
            assert np.all(low >= 0) and np.all(low < 4096)
            values, expected_values = real(pair), real(expected_pair)
            np.testing.assert_allclose(values, expected_values, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(actual.probability, expected.probability, atol=1e-6)
        np.testing.assert_allclose(report.measured, dense_report.measured, atol=1e-6)


def test_the_environment_has_the_backend_and_its_tiles():
    env = envs_jax.make("coverage", q=4, num_agents=2, map_backend="pallas")
    assert all(maps.choose(env.map_backend, env.q, batched) is pallas for batched in (True, False))
    assert env.map_config == MapConfig(4, 2, env.storage, env.weights, pallas.tile(env.n))
    assert env.map_config.shape == (48, 64)


@pytest.mark.long
def test_the_environment_takes_the_backend():
    env = envs_jax.make("coverage", q=4, num_agents=2, map_backend="pallas")
    shapes = jax.eval_shape(env.reset, jax.random.key(0), ())
    state, timestep = jax.jit(lambda keys: batched(env).reset(keys, ()))(jax.random.split(jax.random.key(0), 2))
    for leaf, shape in zip(jax.tree.leaves((state.env, timestep)), jax.tree.leaves(shapes), strict=True):
        assert leaf.shape == (2, *shape.shape) and leaf.dtype == shape.dtype
    assert state.env.maps.beliefs.shape == (2, 3, 48, 64)
    assert np.all(np.asarray(timestep.metrics["coverage"]) > 0)
