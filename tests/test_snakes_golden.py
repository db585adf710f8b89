"""Observations, shaped rewards, scripted players and whole steps against the recorded ones of the original code.

The parts of a step are compared in `test_snakes_rules`; here the environment makes it, with the recorded draws.
"""

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.snakes import CONFIGURATIONS, flat, jit, lane, recorded, stack

import envs_jax
from envs_jax.snakes import env as snakes_env
from envs_jax.snakes import observation, opponents, reward, segments

SIX = [configuration for configuration in CONFIGURATIONS if configuration[2:4] == (6, 5)]


@pytest.mark.parametrize("configuration", [c for c in CONFIGURATIONS if c[2] in (2, 6)], ids=str)
def test_recorded_choices_of_the_scripted_players(configuration):
    board, rows, games, record = recorded(configuration)
    half = configuration[2] // 2
    word = jnp.zeros(len(rows), jnp.uint32)
    used = (1, 2, 3, 4, 5)

    @jit
    def act(level):
        return opponents.act(board, games, slice(half, 2 * half), level, word, used)

    checked = np.zeros_like(record["opp_action"], bool)
    for place, level in enumerate(used):
        wanted = record["opp_action"][:, place, :half].T
        known = wanted >= 0
        chosen = np.asarray(act(jnp.full(len(rows), level, jnp.int32)))
        np.testing.assert_array_equal(chosen[known], wanted[known], err_msg=opponents.LEVELS[level])
        checked[:, place, :half] = known.T
    np.testing.assert_array_equal(checked, record["opp_action"] >= 0)  # none is left out
    assert checked.sum() > 100


def test_no_recorded_row_is_left_out():
    record = golden.load("snakes_transitions")
    assert sum(len(recorded(c)[1]) for c in CONFIGURATIONS) == len(record["board_h"]) == 5000
    rows = np.sort(np.concatenate([recorded(c)[1] for c in SIX]))
    five = (record["beans_before"][rows] >= 0).all(1)
    np.testing.assert_array_equal(rows[five], record["obs_row"])
    assert np.isin(np.flatnonzero(record["shaped_valid"]), rows).all()


@pytest.mark.parametrize("configuration", SIX, ids=str)
def test_recorded_observations(configuration):
    board, rows, games, _ = recorded(configuration)
    record = golden.load("snakes_transitions")
    lanes = np.flatnonzero(np.isin(rows, record["obs_row"]))
    places = np.searchsorted(record["obs_row"], rows[lanes])
    games = jax.tree.map(lambda x: x[..., lanes], games)
    builders = {"obs26": observation.classic, "obs30": observation.extended_30, "obs35": observation.extended_35}
    for name, build in builders.items():
        columns = jit(lambda games, build=build: build(board, games, 3))(games)
        seen = np.stack([np.asarray(x, np.float64) for x in columns], -1).swapaxes(0, 1)
        wanted = record[name][places].astype(np.float64)
        np.testing.assert_allclose(seen, wanted, rtol=1e-6 if name != "obs26" else 0, atol=0, err_msg=name)


@pytest.mark.parametrize("configuration", SIX, ids=str)
def test_recorded_shaped_rewards(configuration):
    board, _, _, record = recorded(configuration)
    valid = np.flatnonzero(record["shaped_valid"])

    def cells(flat):
        return [divmod(int(x), board.width) for x in flat if x >= 0]

    after = stack(
        [
            segments.from_segments(
                board,
                [cells(snake) for snake in record["seg_after"][t]],
                record["dir_after"][t],
                cells(record["beans_after"][t]),
                5,
            )
            for t in valid
        ]
    )
    engine, hit, code = (record[k][valid].T for k in ("reward", "hit", "score_code"))
    for name, key in (("original", "shaped_orig"), ("v1.1", "shaped_v11"), ("plus", "shaped_plus")):
        paid = reward.shaped(name, after, jnp.asarray(engine, jnp.int32)[:3], jnp.asarray(hit > 0)[:3], code)
        np.testing.assert_allclose(np.asarray(paid).T, record[key][valid], rtol=1e-5, atol=1e-6, err_msg=name)


def words_for(drawn, count):
    """uint32 words from which `draws.one_of` draws these numbers below a count."""
    return ((2 * drawn.astype(np.uint64) + 1) * 2**31 // count).astype(np.uint32)


def recorded_words(board, record, snakes, beans):
    """uint32[K + turns + 1, T]: the random words of a step that lead to the recorded directions and new beans."""
    opposite = record["dir_before"] ^ 1
    digits = np.where(record["action"] == opposite, record["resolved"] - (record["resolved"] >= opposite), 0)
    number = (digits[:, :snakes] * 3 ** np.arange(5, 5 - snakes, -1)).sum(1)
    turns = words_for(number, 3**6)
    words = np.zeros((beans + 2, len(turns)), np.uint32)
    words[beans] = turns
    for t, cells in enumerate(record["beans_after"]):
        taken = {*record["seg_after"][t].flat, *cells[: record["n_beans_kept"][t]]}
        free = [cell for cell in range(board.cells) if cell not in taken]
        for k in range(record["n_beans_kept"][t], (cells >= 0).sum()):
            words[k, t] = words_for(np.int64(free.index(cells[k])), len(free))
            free.remove(cells[k])
    return words


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_the_environment_repeats_recorded_steps_with_their_draws(configuration):
    board, rows, games, record = recorded(configuration)
    height, width, snakes, beans, limit = configuration
    teams = 1 if snakes % 2 else 2
    settings = {"height": height, "width": width, "snakes": snakes, "beans": beans, "max_steps": limit, "teams": teams}
    env = envs_jax.make("snakes", **settings, opponent="outside")
    keys = jax.random.split(jax.random.key(0), len(rows))
    before = snakes_env.State(keys, games, jnp.zeros(len(rows), jnp.int32), jnp.zeros(len(rows), bool))
    words = jnp.asarray(recorded_words(board, record, snakes, beans))
    action = jnp.asarray(record["action"][:, :snakes].T, jnp.int32)
    after, timestep = jit(env._advance)(before, words, action)
    game = jax.tree.map(np.asarray, after.game)
    np.testing.assert_array_equal(timestep.terminated, record["done"])
    np.testing.assert_array_equal(game.steps + 1, record["step_after"])
    np.testing.assert_array_equal(game.length.T, record["len_after"][:, :snakes])
    alive = game.length.T > 0
    np.testing.assert_array_equal(game.direction.T[alive], record["dir_after"][:, :snakes][alive])
    for t in range(len(rows)):
        bodies, _, left = segments.to_segments(board, lane(game, t))
        assert [flat(board, body) for body in bodies] == [
            cells[cells >= 0].tolist() for cells in record["seg_after"][t, :snakes]
        ], t
        cells = record["beans_after"][t]
        assert flat(board, left) == cells[cells >= 0].tolist(), t
    own = slice(0, snakes // teams)
    np.testing.assert_array_equal(timestep.metrics["deaths"], record["hit"][:, own].sum(1))
    np.testing.assert_array_equal(timestep.metrics["meals"], (record["reward"][:, own] > 0).sum(1))
    if configuration in SIX:  # the next recorded state, where it follows from this one
        follows = np.flatnonzero((np.diff(rows) == 1) & (record["step_before"][1:] == record["step_after"][:-1]))
        same = (record["seg_after"][follows] == record["seg_before"][follows + 1]).all((1, 2))
        same &= (record["beans_after"][follows] == record["beans_before"][follows + 1]).all(1)
        same &= (record["beans_before"][follows + 1] >= 0).all(1)
        assert same.sum() > 100
        places = np.searchsorted(golden.load("snakes_transitions")["obs_row"], rows[follows[same] + 1])
        seen = np.asarray(timestep.observation)[:3, :, follows[same]].transpose(2, 0, 1)
        np.testing.assert_array_equal(seen, golden.load("snakes_transitions")["obs26"][places])
