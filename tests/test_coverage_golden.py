"""Coverage against recorded missions of the public repository: recorded moves, readings and messages go in, beliefs,
observations, critic states, rewards, masks and metrics must come out. (`test_coverage_against_oracle` flies others.)"""

import functools

import jax
import numpy as np
import pytest
from helpers import golden
from helpers.cases import by_day
from helpers.coverage import sequential_masks

from bench.parity import coverage
from bench.parity.coverage import environment, lattice
from envs_jax.coverage import actions, communication, starts, terrain, world

MISSIONS = golden.COVERAGE_MISSIONS


# Each is a program of its own: m00 has the published resolution; by day the live oracle flies other teams.
@pytest.mark.parametrize("name", by_day(MISSIONS, ["m00"]))
def test_replay_float32(name):
    with golden.skipping():
        coverage.compare(name, "float32").check()


@pytest.mark.parametrize("name", by_day(["m00", "m03", "m06", "m09"], ["m00"]))
def test_replay_int16(name):
    with golden.skipping():
        coverage.compare(name, "int16").check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int16", "float32"])
@pytest.mark.parametrize("name", MISSIONS)
def test_replay_in_interpreted_kernels(name, dtype):
    with golden.skipping():
        coverage.compare(name, dtype, map_backend="pallas").check()


@functools.partial(jax.jit, static_argnums=2)
def masks(positions, chosen, num_actions):
    boundary = actions.boundary_mask(positions, num_actions)
    moved = actions.move(positions, chosen, num_actions)
    return sequential_masks(positions, boundary, chosen, num_actions), moved


@pytest.mark.parametrize("name", MISSIONS)
def test_recorded_masks(name):
    record = golden.coverage_mission(name)
    num_actions = record.config["num_actions"]

    for t in range(record.steps):
        mask, moved = masks(lattice(record["positions"][t]), record["action"][t].astype(np.int32), num_actions)
        np.testing.assert_array_equal(mask, record["mask"][t].astype(bool))
        np.testing.assert_array_equal(moved, lattice(record["positions"][t + 1]))


received = jax.jit(communication.find_received)


@pytest.mark.parametrize("name", MISSIONS)
def test_recorded_messages(name):
    record = golden.coverage_mission(name)
    comm_range = np.float32(record["comm_range"])
    lossless = record.config["failure"] == 0
    for t in range(record.steps):
        heard = received(lattice(record["positions"][t]), comm_range)
        recorded = record["comm"][t].astype(bool)
        if lossless:
            np.testing.assert_array_equal(heard, recorded)
        else:
            assert not np.any(recorded & ~np.asarray(heard))


@functools.cache
def collision_masks(num_actions):
    return jax.jit(jax.vmap(functools.partial(actions.collision_mask, num_actions=num_actions)))


@pytest.mark.parametrize("num_actions", [4, 6, 27])
def test_mask_table(num_actions):
    tables = golden.load("coverage_missions")
    positions, others = tables[f"mask{num_actions}_own"], tables[f"mask{num_actions}_others"]
    moved = np.all(others >= 0, axis=-1) & np.all(others[..., 2:] >= 5, axis=-1)
    positions, others = lattice(positions), lattice(others)
    boundary = jax.jit(actions.boundary_mask, static_argnums=1)(positions, num_actions)
    np.testing.assert_array_equal(boundary, tables[f"mask{num_actions}_boundary"].astype(bool))
    final = collision_masks(num_actions)(positions, others, moved, boundary)
    expected = tables[f"mask{num_actions}_final"].astype(bool)
    crashed = ~expected.any(-1)  # the original cannot go on there; the boundary mask is used instead
    assert crashed.any()
    np.testing.assert_array_equal(final, np.where(crashed[:, None], np.asarray(boundary), expected))


@functools.partial(jax.jit, static_argnums=1)
def footprints(positions, q):
    box = world.footprint(positions, q)
    return box, world.clip_footprint(box, world.map_side(q))


@pytest.mark.parametrize("q", [57, 28, 11, 7, 6, 5])
def test_footprint_table(q):
    table = golden.load("coverage_missions")[f"tab_footprint_px{q}"]
    g = np.arange(world.LATTICE)
    positions = np.stack(np.broadcast_arrays(g[None, :], g[None, :], np.arange(3)[:, None]), axis=-1).astype(np.int32)
    box, clipped = jax.tree.map(np.asarray, footprints(positions, q))
    ours = np.stack([box.top, box.bottom, clipped.top, clipped.bottom], axis=-1)
    np.testing.assert_array_equal(ours, table)
    np.testing.assert_array_equal(np.stack([box.left, box.right, clipped.left, clipped.right], axis=-1), table)


def test_resize_table():
    tables = golden.load("coverage_missions")
    names = [name for name in tables if name.startswith("tab_resize_")]
    assert len(names) >= 15
    for name in names:
        n = int(name.removeprefix("tab_resize_"))
        np.testing.assert_allclose(world.area_matrix(n), tables[name], atol=1e-7, err_msg=name)


@functools.partial(jax.jit, static_argnums=2)
def half_plane(side, percent, n):
    return terrain.whole(terrain.split(side, percent, n), n)


@pytest.mark.parametrize("q", [57, 7])
def test_terrain_table(q):
    table = golden.load("coverage_missions")[f"tab_truth_bounds_px{q}"]
    n = world.map_side(q)
    for side in range(4):
        for index in range(31):
            cells = np.zeros((n, n), bool)
            top, bottom, left, right = table[side, index]
            cells[top:bottom, left:right] = True
            np.testing.assert_array_equal(half_plane(np.int32(side), np.int32(30 + index), n), cells)


def test_missions_of_the_original():
    tables = golden.load("coverage_missions")
    mission = np.arange(starts.MISSIONS, dtype=np.int32)

    @jax.jit
    def draw_missions(mission):
        return jax.vmap(starts.original_split)(mission), jax.vmap(lambda m: starts.original(m, 8))(mission)

    (side, percent), positions = draw_missions(mission)
    np.testing.assert_array_equal(np.stack([side, percent], axis=-1), tables["tab_episode_truth"])
    np.testing.assert_array_equal(
        positions, lattice(tables["tab_episode_start_seed3"].reshape(-1, 3)).reshape(-1, 8, 3)
    )


def test_reset_flies_the_mission_of_the_original():
    record = golden.coverage_mission("m03")
    env = environment(record, start="original")

    @jax.jit
    def draw(key):  # what a reset begins with
        state = env._draw_mission(key)
        return state, terrain.whole(state.terrain, record.n)

    state, cells = draw(jax.random.key(record.config["episode"]))
    np.testing.assert_array_equal(state.positions, lattice(record["positions"][0]))
    np.testing.assert_array_equal(cells, record.truth)
