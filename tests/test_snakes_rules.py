"""Snakes rules: the recorded steps of the original engine, its respawns and its resolved directions."""

import jax
import numpy as np
import pytest
from helpers import golden
from helpers.snakes import jit

from bench.parity.snakes import CONFIGURATIONS, OWN, flat, lane, read_records
from envs_jax.snakes import respawn, rules, segments, spawn


# All configurations are played through the environment in test_snakes_golden.py.
@pytest.mark.parametrize(
    "configuration", [pytest.param(c, marks=() if c in OWN else pytest.mark.slow, id=str(c)) for c in CONFIGURATIONS]
)
def test_recorded_steps_are_reproduced(configuration):
    with golden.skipping():
        board, rows, games, record = read_records(configuration)
    snakes, beans, limit = configuration[2:]

    @jit
    def core(game, direction, words):
        moved, reward, hit, _ = rules.move(board, game, direction)
        respawned = respawn.respawn(board, moved)
        filled = spawn.refill(board, respawned, words)
        return respawned, filled, reward, hit, rules.check_end(board, filled, limit)

    direction = record["resolved"][:, :snakes].T.astype(np.int32)
    words = np.random.default_rng(0).integers(0, 2**32, (beans, len(rows)), dtype=np.uint32)
    respawned, filled, reward, hit, (stuck, late) = core(games, direction, words)
    np.testing.assert_array_equal(np.asarray(reward).T, record["reward"][:, :snakes])
    np.testing.assert_array_equal(np.asarray(hit).T, record["hit"][:, :snakes])
    np.testing.assert_array_equal(np.asarray(stuck | late), record["done"])
    np.testing.assert_array_equal(np.asarray(respawned.steps) + 1, record["step_after"])
    np.testing.assert_array_equal(np.asarray(respawned.length).T, record["len_after"][:, :snakes])
    respawned, filled = (jax.tree.map(np.asarray, x) for x in (respawned, filled))
    for t in range(len(rows)):
        bodies, directions, left = segments.to_segments(board, lane(respawned, t))
        for i, body in enumerate(bodies):
            expected = record["seg_after"][t, i]
            assert flat(board, body) == expected[expected >= 0].tolist(), (t, i)
            assert not body or directions[i] == record["dir_after"][t, i], (t, i)
        after = record["beans_after"][t]
        bean_count = record["n_beans_kept"][t]
        assert flat(board, left) == after[:bean_count].tolist(), t
        _, _, full = segments.to_segments(board, lane(filled, t))
        assert len(full) == (after >= 0).sum(), t
        assert full[: len(left)] == left
        occupied = {cell for body in bodies for cell in body}
        assert len(set(full)) == len(full) and not occupied & set(full), t


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_recorded_directions_are_resolved(configuration):
    with golden.skipping():
        _, _, games, record = read_records(configuration)
    snakes = configuration[2]
    action, direction = record["action"][:, :snakes].T.astype(np.int32), np.asarray(games.direction)
    expected = record["resolved"][:, :snakes].T
    resolve = jax.jit(rules.resolve_directions)
    resolved = np.stack([resolve(direction, action, np.full_like(action, k)) for k in range(3)])
    reversal = action == direction ^ 1
    assert (resolved == expected).any(0).all()
    assert (resolved == expected).all(0)[~reversal].all()
    assert (np.diff(np.sort(resolved, 0)[:, reversal], axis=0) > 0).all()  # three different directions
    assert (resolved != action)[:, reversal].all()
