"""The GPU kernels, interpreted, against the dense backend: integers bit for bit, real numbers to rounding."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers.cases import by_day

import envs_jax
from envs_jax.batch import batched
from envs_jax.coverage import maps, sensor, terrain, world
from envs_jax.coverage.belief import Storage, Weights
from envs_jax.coverage.maps import dense, fixed_point, pallas, tiles
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
            pytest.param(*case, marks=pytest.mark.slow)
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
        tiling = padded.tiling
        missing = [(0, 0), (0, 0), (0, beliefs.shape[2] - n), (0, beliefs.shape[3] - n)]
        cells = np.pad(np.abs(padded.storage.value(np.asarray(expected.beliefs))), missing)
        beyond = cells.reshape(copies, agents + 1, tiling.down, tiling.rows, tiling.across, tiling.columns)
        np.testing.assert_array_equal(actual.tiles.beyond, beyond.max((3, 5)) > padded.storage.limit)
        for pair, expected_pair in (
            (actual.sums.weighted, expected.sums.weighted),
            (actual.sums.interest, expected.sums.interest),
            (report.before, dense_report.before),
        ):
            low = np.asarray(pair)[:, 1]
            assert np.all(low >= 0) and np.all(low < 4096)
            if dtype == "int16":  # entropies come from the same table
                np.testing.assert_array_equal(pair, expected_pair)
            values, expected_values = real(pair), real(expected_pair)
            np.testing.assert_allclose(values, expected_values, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(actual.probability, expected.probability, atol=1e-6)
        np.testing.assert_allclose(report.measured, dense_report.measured, atol=1e-6)


def test_the_environment_has_the_backend_and_its_tiles():
    env = envs_jax.make("coverage", q=4, num_agents=2, map_backend="pallas")
    assert all(maps.choose(env.map_backend, env.q, batched) is pallas for batched in (True, False))
    assert env.map_config == MapConfig(4, 2, env.storage, env.weights, pallas.tile(env.n))
    assert env.map_config.shape == (40, 64)


@pytest.mark.parametrize(("near", "far"), by_day([(0, 10), (10, 0)], [(0, 10)]))
def test_a_message_clips_cells_far_from_all_footprints(near, far):
    """Agent 0 measures one place until its cells lie beyond the clip, flies away, and then hears agent 1."""
    config = MapConfig(9, 2, Storage("int16", 0.5), Weights((0.1, 1.0), 0.5))
    padded = dataclasses.replace(config, tile=pallas.tile(config.n))
    rng = np.random.default_rng(0)
    ground = jax.jit(lambda key: jax.tree.map(lambda x: x[None], terrain.draw(key, ("split",), config.n)))(
        jax.random.key(0)
    )
    place, elsewhere, other = [near, near, 0], [far, far, 0], [far, near, 0]
    survey = [([place, other], False)] * 7 + [([elsewhere, other], True)]
    states = [jax.jit(jax.vmap(functools.partial(empty, one)))(ground) for one in (config, padded)]
    updates = [
        jax.jit(functools.partial(dense.update_batch, config)),
        jax.jit(functools.partial(pallas.update_batch, padded)),
    ]
    for positions, hears in survey:
        before = states[1].tiles.beyond
        source = sensor.Noise(rng.integers(0, 2**32, (1, 1, 2), np.uint32))
        received = np.full((1, 2, 2), hears)
        measurements = Measurements(ground, np.array([positions], np.int32), received, source)
        states = [update(state, measurements)[0] for update, state in zip(updates, states, strict=True)]
    assert np.any(before[0, 0])
    assert not np.any(states[1].tiles.beyond[0, 0])
    np.testing.assert_array_equal(states[1].beliefs[..., : config.n, : config.n], states[0].beliefs)


@pytest.mark.parametrize("q", [1, 4, 57, 110, 120, 200])
def test_tiles_are_few_enough_for_counts_of_one_byte(q):
    n = world.map_side(q)
    rows, columns = pallas.tile(n)
    assert -(-n // rows) <= 127
    assert all(side & (side - 1) == 0 for side in (rows, columns))


@pytest.mark.parametrize(
    ("n", "rows", "columns"), [(493, 8, 32), (493, 16, 128), (60, 8, 32), (34, 8, 64), (17, 8, 32)]
)
def test_sums_by_tile_are_those_of_the_area_matrix(n, rows, columns):
    tiling = tiles.Tiling(n, rows, columns)
    resized = tiling.resize(tiling.start(1, 0.25).blocks)
    np.testing.assert_allclose(resized, np.full((1, 11, 11), 0.25), rtol=1e-6)
    cell = np.zeros((n, n))
    cell[n // 3, n - 2] = 1.0
    expected = world.area_matrix(n) @ cell @ world.area_matrix(n).T
    blocks = np.zeros((tiling.down, tiling.row_spans, tiling.across, tiling.column_spans), np.float32)
    row, column = n // 3 // rows, (n - 2) // columns
    for r in range(tiling.row_spans):
        for c in range(tiling.column_spans):
            down = tiling.share(tiling.first_block(row * rows) + r, n // 3)
            across = tiling.share(tiling.first_block(column * columns) + c, n - 2)
            blocks[row, r, column, c] = down * across
    resized = tiling.resize(blocks.reshape(tiling.down * tiling.row_spans, -1))
    np.testing.assert_allclose(resized, expected, atol=1e-7)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("ground") / "ground.npy"
    np.save(path, np.random.default_rng(5).random((9, 14)))
    return str(path)


@pytest.mark.parametrize(
    ("settings", "missions"),
    [
        ({"delay": (0, 2), "failure_rate": 0.3}, 3),
        ({"delay": 1, "belief_dtype": "float32"}, 3),
        ({"num_agents": 12, "team_sizes": (2, 5, 12), "loss_rate": 0.2}, 4),
        ({"num_agents": 5, "team_sizes": (2, 5), "delay": (0, 3), "loss_rate": 0.3}, 4),
        ({"terrain": "file"}, 2),
        ({"terrain": "file", "delay": 2, "num_agents": 3, "belief_dtype": "float32"}, 2),
        ({"terrain": "mixed"}, 6),
        ({"prior": 0.4, "reward": "region"}, 6),
    ],
    ids=str,
)
@pytest.mark.slow
def test_missions_equal_those_of_dense_maps(settings, missions, file):
    """Whole missions: tiles that no footprint meets, late clips, delays, teams of 2 to 12, failures, files."""
    settings = {"q": 9, "budget": 7, "communication_range": 25.0} | settings
    if settings.get("terrain") == "file":
        settings["terrain"] = file
    played = []
    for backend in ("dense", "pallas"):
        env = batched(envs_jax.make("coverage", map_backend=backend, **settings))
        state, timestep = jax.jit(lambda keys, env=env: env.reset(keys, ()))(
            jax.random.split(jax.random.key(3), missions)
        )
        step = jax.jit(lambda state, timestep, action, env=env: env.step(state, timestep, action, ()))
        rows, rng = [], np.random.default_rng(0)
        for _ in range(8):  # and the start of the next mission
            rows.append(jax.device_get((timestep, state.env.maps)))
            scores = np.where(timestep.action_mask, rng.random(timestep.action_mask.shape), -1)
            state, timestep = step(state, timestep, scores.argmax(-1).astype(np.int32))
        played.append(rows)
    for (expected, expected_maps), (actual, actual_maps) in zip(*played, strict=True):
        n = expected_maps.beliefs.shape[-1]
        np.testing.assert_array_equal(actual_maps.beliefs[..., :n, :n], expected_maps.beliefs)
        np.testing.assert_array_equal(actual_maps.sums.counts, expected_maps.sums.counts)
        np.testing.assert_allclose(actual_maps.probability, expected_maps.probability, atol=1e-6)
        for name in ("reward", "observation", "global_state"):
            pairs = zip(*(jax.tree.leaves(getattr(one, name)) for one in (actual, expected)), strict=True)
            for value, expected_value in pairs:
                np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-5)
