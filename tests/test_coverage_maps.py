"""Coverage's maps: storage, sums, resizing, terrain, noise, and the agreement of the backends."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.coverage import batch, make

from bench.reference.coverage import oracle
from envs_jax.batch import batched
from envs_jax.coverage import belief, sensor, terrain, world
from envs_jax.coverage.maps import dense, fixed_point
from envs_jax.coverage.maps import windows as windows_backend
from envs_jax.coverage.maps.types import Measurements


def number(pair):
    """Value of a sum in fixed point, as a Python integer array."""
    pair = np.asarray(pair)
    return pair[..., 0].astype(np.int64) * 4096 + pair[..., 1]


@pytest.mark.parametrize(
    "settings",
    [
        {"q": 5},
        pytest.param(
            {"q": 4, "num_agents": 2, "belief_dtype": "float32", "prior": 0.4, "communication_range": 100.0},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"q": 5, "num_agents": 3, "terrain": "field", "class_weights": (0.25, 2.0), "communication_range": 0.0},
            marks=pytest.mark.slow,
        ),
        pytest.param({"q": 11, "num_agents": 3, "num_actions": 27}, marks=pytest.mark.slow),
        pytest.param(
            {"q": 4, "num_agents": 3, "delay": (1, 2), "failure_rate": 0.2, "communication_range": 100.0},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_backends_agree(settings):
    """In equal missions, stored beliefs and counts agree bit for bit, and what is read from them to 2e-6."""
    envs = [make(map_backend=name, **{"budget": 9, **settings}) for name in ("dense", "windows")]
    env, windows = envs
    storage, n = env.storage, env.n
    up, down = (4, 22) if env.num_actions == 27 else (0, 5)
    draw, _, move = batch(env)
    measurements = [batch(env)[1] for env in envs]
    initial = draw(jax.random.split(jax.random.key(2), 6))
    runs = [measure(initial, initial.positions) for measure in measurements]
    some_overflow, rng = False, np.random.default_rng(0)
    for t in range(10):
        (a, ts_a), (b, ts_b) = runs
        np.testing.assert_array_equal(a.maps.beliefs, b.maps.beliefs)
        np.testing.assert_array_equal(a.maps.sums.counts, b.maps.sums.counts)
        for field in ("weighted", "interest"):  # the last bit of an entropy may differ between programs
            difference = number(getattr(a.maps.sums, field)) - number(getattr(b.maps.sums, field))
            assert np.abs(difference).max() <= n
        np.testing.assert_allclose(ts_a.reward, ts_b.reward, atol=2e-6)
        np.testing.assert_allclose(ts_a.observation, ts_b.observation, atol=2e-6)
        np.testing.assert_allclose(ts_a.global_state["maps"], ts_b.global_state["maps"], atol=2e-6)
        outside = np.asarray(beyond_limit(storage, b.maps.beliefs))
        np.testing.assert_array_equal(b.maps.overflow.cells, outside)
        some_overflow |= bool(outside.any())
        # four copies fly up and down in place, so that cells become certain, the others wherever it is open
        mask = np.asarray(ts_a.action_mask)
        action = np.argmax(np.where(mask, rng.random(mask.shape), -1), -1).astype(np.int32)
        action[:4] = np.array([up, down, up, down])[(t + np.arange(4)) % 2][:, None]
        positions = move(a.positions, action)
        runs = [measure(state, positions) for measure, (state, _) in zip(measurements, runs, strict=True)]
    assert some_overflow
    anew = jax.vmap(lambda m: world.resize(windows_backend._overflow(windows.map_config, m.beliefs)))
    maps = runs[1][0].maps
    np.testing.assert_allclose(jax.jit(anew)(maps), maps.overflow.probability, atol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def beyond_limit(storage, beliefs):
    return jnp.any(jnp.abs(storage.value(beliefs).astype(jnp.float32)) > float(storage.limit), axis=(2, 3))


def test_windows_change_maps_in_place():
    """By what agents measure, and by messages that arrive later."""
    env = make(q=20, map_backend="windows", num_agents=2, delay=2)
    state = jax.eval_shape(jax.vmap(env._draw_mission), jax.random.split(jax.random.key(0), 8))
    program = jax.jit(batched(env)._advance, donate_argnums=0).lower(state, state.positions).compile()
    beliefs = state.maps.beliefs
    assert program.memory_analysis().temp_size_in_bytes < beliefs.size * beliefs.dtype.itemsize / 2


THRESHOLDS = (belief.KNOWN, belief.PREDICTED, 1.0 - belief.KNOWN)


def above(storage, values):
    """{threshold: which values lie above it}, in one program."""
    above_by_threshold = _above(storage, values)
    return {threshold: np.asarray(flags) for threshold, flags in zip(THRESHOLDS, above_by_threshold, strict=True)}


@functools.partial(jax.jit, static_argnums=0)
def _above(storage, values):
    return [storage.above(values, threshold) for threshold in THRESHOLDS]


def test_steps_of_int16_keep_cells_on_their_side():
    """Sums of evidence, and such sums after a clip, count as in exact arithmetic."""
    storage = belief.Storage("int16", 0.5)
    steps = np.abs(storage.gains[1].astype(int))
    counts = np.array(list(itertools.product(range(-3, 4), range(-10, 11), range(-15, 16))))
    for start, coded in ((0.0, 0), (belief.CLIP, int(storage.limit)), (-belief.CLIP, -int(storage.limit))):
        exact = start + counts @ np.array(sensor.EVIDENCE)
        stored = coded + counts @ steps
        near_zero = np.abs(exact) < 0.05
        flags = above(storage, stored.astype(np.int16))
        for threshold in THRESHOLDS:
            bound = belief.logit(threshold)
            certain = np.abs(exact[near_zero] - bound) > 2e-4
            np.testing.assert_array_equal(flags[threshold][near_zero][certain], (exact[near_zero] > bound)[certain])


@pytest.mark.parametrize("name", ["int16", "float32"])
@pytest.mark.parametrize("prior", [1e-4, 0.375, 0.5, 0.9])
def test_storage(name, prior):
    storage = belief.Storage(name, prior)
    farthest = belief.CLIP + max(sensor.EVIDENCE) + abs(belief.logit(prior))  # of all log-odds
    assert farthest * storage.unit < -float(storage.unseen)
    assert np.all(storage.gains != 0)
    exact = np.array([[-e - belief.logit(prior), e - belief.logit(prior)] for e in sensor.EVIDENCE]).T
    np.testing.assert_allclose(storage.gains / storage.unit, exact, atol=1e-3 if name == "int16" else 1e-6)
    cells = np.array([storage.unseen, storage.start, storage.limit], storage.dtype)

    @jax.jit
    def read(cells):
        p = belief.probability(storage.log_odds(cells))
        return p, belief.entropy(p), storage.entropy(cells)

    p, entropy, stored = read(cells)
    np.testing.assert_allclose(p, [prior, prior, 1.0 - belief.P_MIN], atol=1e-4 if name == "int16" else 1e-6)
    np.testing.assert_allclose(stored, entropy, atol=1e-3 if name == "int16" else 1e-5)


def test_entropy_of_log_odds():
    log_odds = np.linspace(-14, 14, 2001).astype(np.float32)
    p = np.clip(1.0 / (1.0 + np.exp(-log_odds.astype(np.float64))), 1e-4, 1.0 - 1e-4)
    exact = -p * np.log2(p) - (1 - p) * np.log2(1 - p)
    np.testing.assert_allclose(jax.jit(belief.entropy_of_log_odds)(log_odds), exact, atol=5e-7)


def test_sums_in_fixed_point():
    rng = np.random.default_rng(0)
    values = rng.integers(-(2**21), 2**21, 4321 * 12).astype(np.int32)
    pair, real = jax.jit(lambda values: (pair := fixed_point.total(values), fixed_point.real(pair)))(values)
    pair = np.asarray(pair)
    assert int(number(pair)) == int(values.astype(np.int64).sum())
    assert 0 <= int(pair[1]) < 4096
    assert float(real) == pytest.approx(values.astype(np.int64).sum() / 2**21, rel=1e-6)
    side = 1697  # prime: no rows of equal length
    pair = jax.jit(lambda: fixed_point.total(jnp.full((side**2,), 2**21 - 1, jnp.int32)))()
    assert int(number(pair)) == side**2 * (2**21 - 1)
    uniform = jax.jit(fixed_point.uniform_total)
    for value, count in ((2**21, 1732**2), (2**21 - 1, 493**2), (1, 0), (12345, 1)):
        pair = uniform(np.int32(value), np.int32(count))
        assert int(number(pair)) == value * count
    flags = rng.random((4, 1800)) < np.array([[0.1], [0.5], [0.9], [1.0]])
    counts = jax.jit(lambda *flags: fixed_point.count_flags(fixed_point.pack_flags(*flags)))(*flags)
    np.testing.assert_array_equal(counts, flags.sum(1))


@pytest.mark.parametrize("n", [4, 10, 12, 43, 60, 95])
def test_resize(n):
    values = np.random.default_rng(n).random((2, n, n)).astype(np.float32)
    matrix = world.area_matrix(n)
    np.testing.assert_allclose(matrix, oracle.area_matrix(n), atol=1e-12)
    expected = np.einsum("dr,brc,ec->bde", matrix, values.astype(np.float64) ** 2, matrix)
    np.testing.assert_allclose(jax.jit(lambda v: world.resize(v, jnp.square))(values), expected, atol=1e-6)
    if n >= 11:
        low, high = np.int32([0, 3, n // 2]), np.int32([n, 3, n - 1])
        shares = [matrix[:, a:b].sum(1) for a, b in zip(low, high, strict=True)]
        ours = jax.jit(world.interval_share, static_argnums=2)(low, high, n)
        np.testing.assert_allclose(ours, shares, atol=1e-6)


@pytest.mark.parametrize("n", [4, 11, 20, 45, 60, 170])
def test_resize_of_maps_that_are_computed_row_by_row(n):
    values = jax.random.normal(jax.random.key(n), (3, n, n))
    whole = jax.jit(world.resize)(values)
    by_rows = jax.jit(lambda values: world.resize_rows(lambda rows: jnp.take(values, rows, axis=1), n))(values)
    np.testing.assert_allclose(by_rows, whole, atol=1e-6)


def test_readings_resized_as_on_accelerators_are_those_on_cpus(monkeypatch):
    env = make(q=7, map_backend="dense")

    def measure_both(key):
        state = env._draw_mission(key)
        received, source, *_ = env._draw(state, state.positions)
        return dense.resize_readings(env.map_config, Measurements(state.terrain, state.positions, received, source))

    keys = jax.random.split(jax.random.key(0), 8)
    on_cpus = jax.jit(jax.vmap(measure_both))(keys)
    monkeypatch.setattr(dense, "on_cpu", lambda: False)
    elsewhere = jax.jit(jax.vmap(lambda key: measure_both(key)))(keys)
    assert np.abs(on_cpus).max() > 0.1
    np.testing.assert_allclose(elsewhere, on_cpus, atol=1e-6)


def test_footprints_are_those_of_the_oracle():
    widths = 2, 5, 6, 7, 11, 28, 57
    positions = np.stack(np.meshgrid(*map(np.arange, (11, 11, 3)), indexing="ij"), axis=-1).reshape(-1, 3)
    boxes = jax.jit(lambda positions: [world.footprint(positions, q) for q in widths])(np.int32(positions))
    for q, box in zip(widths, boxes, strict=True):
        for whole, expected in (
            (box, oracle.footprint_full),
            (world.clip_footprint(box, world.map_side(q)), oracle.footprint),
        ):
            ours = np.stack([whole.top, whole.bottom, whole.left, whole.right], axis=-1)
            np.testing.assert_array_equal(ours, [expected(5 * (place + [0, 0, 1]), q) for place in positions])


# Terrain


@pytest.mark.parametrize(
    ("family", "expected", "percentages"),
    [
        ("split", oracle.split_terrain, (45,)),
        ("corner", oracle.corner_terrain, (60, 71)),
        ("band", oracle.band_terrain, (22, 70)),
        ("diagonal", oracle.diagonal_terrain, (47,)),
        ("four", oracle.four_terrain, (33,)),
    ],
)
def test_families_of_terrain(family, expected, percentages):
    n = 43
    first, second = (*map(np.int32, percentages), np.int32(0))[:2]

    @jax.jit
    def drawn(side):
        rows, columns, invert = terrain._describe(family, side, first, second, n)
        ground = terrain._finish(rows, columns, invert, (), n)
        return terrain.whole(ground, n), ground.count

    for side in range(4):
        cells, count = drawn(np.int32(side))
        np.testing.assert_array_equal(cells, expected(n, side, *percentages))
        assert int(count) == np.sum(cells)


ROWS = np.arange(5, 15, dtype=np.int32)[:, None]
COLUMNS = np.arange(20, 43, dtype=np.int32)[None, :]


def test_drawn_terrain():
    n = 43
    every = {oracle.split_terrain(n, side, percent).tobytes() for side in range(4) for percent in range(30, 61)}
    keys = jax.random.split(jax.random.key(0), 400)
    rectangles = tuple(name for name in terrain.FAMILIES if name != "field")
    for families in (("split",), rectangles, terrain.FAMILIES):
        draw = jax.jit(jax.vmap(lambda key, families=families: terrain.draw(key, families, n)))
        grounds = draw(keys)
        cells = np.asarray(jax.jit(jax.vmap(lambda ground: terrain.whole(ground, n)))(grounds))
        np.testing.assert_array_equal(cells.sum((1, 2)), grounds.count)
        share = cells.mean((1, 2))
        assert share.min() > 0.0 and share.max() < 1.0
        if families == ("split",):
            assert share.min() >= 0.27 and share.max() <= 0.6
            drawn = {cell.tobytes() for cell in cells}
            assert drawn <= every and len(drawn) > 0.8 * len(every)
        part = jax.jit(jax.vmap(lambda ground: terrain.truth(ground, ROWS, COLUMNS)))(grounds)
        np.testing.assert_array_equal(part, cells[:, 5:15, 20:43])


def test_random_fields_are_smooth():
    n = 43

    @jax.jit
    def there_and_back(key):
        cells = terrain._random_field(key, n)
        return cells, terrain.unpack(terrain.pack(cells), n)

    cells, unpacked = map(np.asarray, there_and_back(jax.random.key(3)))
    changes = np.mean(cells[1:] != cells[:-1])
    assert 0.1 < cells.mean() < 0.9 and changes < 0.15
    np.testing.assert_array_equal(unpacked, cells)


# Noise


@jax.jit
def _misread(key, index, level, cells):
    noise = sensor.noise(key, index, 4)
    return jax.vmap(lambda agent: sensor.wrong(noise, agent, level, cells))(jnp.arange(4, dtype=jnp.int32))


def misread(key, index, level, cells):
    """bool[4, cells]: which readings of four agents are wrong."""
    return np.asarray(_misread(key, np.int32(index), np.int32(level), cells))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_readings_are_wrong_as_often_as_they_should(level):
    cells = np.arange(200_000, dtype=np.int32)
    wrong = misread(jax.random.key(1), 3, level, cells)
    error = sensor.ERROR[level]
    spread = np.sqrt(error * (1 - error) / wrong.shape[1])
    assert np.all(np.abs(wrong.mean(1) - error) < 4.5 * spread)


def test_noise_is_independent():
    cells = np.arange(60 * 60, dtype=np.int32)
    level, error = 2, sensor.ERROR[2]
    runs = np.stack(
        [np.stack([misread(jax.random.key(m), k, level, cells) for k in range(4)]) for m in range(8)]
    ).astype(float)  # [mission, k, agent, cell]
    standard = (runs - error) / np.sqrt(error * (1 - error))

    def correlation(a, b):
        return float(np.mean(a * b)) * np.sqrt(a.size)  # standard normal if independent

    pairs = {
        "agents": (standard[:, :, 0], standard[:, :, 1]),
        "agents of other hashes": (standard[:, :, 0], standard[:, :, 2]),
        "times": (standard[:, 0], standard[:, 1]),
        "missions": (standard[0], standard[1]),
        "next column": (standard[..., :-1], standard[..., 1:]),
        "next row": (standard[..., :-60], standard[..., 60:]),
        "next cell of another agent": (standard[:, :, 0, :-1], standard[:, :, 1, 1:]),
    }
    for name, pair in pairs.items():
        assert abs(correlation(*pair)) < 4.5, name


def test_bits_of_the_noise_are_uniform():
    """Chi-squared over 64 bins of each half of the hash, for consecutive cells and for consecutive missions."""

    @jax.jit
    def both(key, other):
        noise = sensor.noise(key, jnp.int32(0), 2)
        consecutive = sensor.draw(noise.seeds[0, 0], noise.seeds[0, 1], jnp.arange(2**17, dtype=jnp.int32))
        keys = jax.random.split(other, 2**13)
        seeds = jax.vmap(lambda key: sensor.noise(key, jnp.int32(2), 2).seeds[0])(keys)
        return consecutive, jax.vmap(lambda s: sensor.draw(s[0], s[1], jnp.int32(17)))(seeds)

    for bits in map(np.asarray, both(jax.random.key(7), jax.random.key(0))):
        for half in (bits & 0xFFFF, bits >> 16):
            counts = np.bincount(half >> 10, minlength=64)
            statistic = np.sum((counts - counts.mean()) ** 2) / counts.mean()
            assert 25 < statistic < 120  # 63 degrees of freedom
