"""Observations, shaped rewards, scripted players and whole steps against records of the engine and of our oracle.

The parts of a step are compared in `test_snakes_rules`; here the environment makes it, with the recorded draws.
"""

import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.snakes import CONFIGURATIONS, LANES, OWN, by_lanes, flat, jit, lane, recorded, stack

import envs_jax
from envs_jax.snakes import env as snakes_env
from envs_jax.snakes import observation, opponents, reward, segments
from envs_jax.snakes.board import Board

SIX = [configuration for configuration in CONFIGURATIONS if configuration[2:4] == (6, 5)]
USED = (1, 2, 3, 4, 5)  # levels of the scripted players
BUILDERS = {"obs26": observation.classic, "obs30": observation.extended_30, "obs35": observation.extended_35}


def tables(configurations):
    """Marks a test to run on every one of these configurations that our own data or the recorded ones have."""
    own = [(configuration, "own") for configuration in configurations if configuration in OWN]
    all_of_them = own + [(configuration, "recorded") for configuration in configurations]
    return pytest.mark.parametrize(("configuration", "source"), all_of_them, ids=lambda x: str(x))


@functools.cache
def players(configuration):
    board, half = Board(*configuration[:2]), configuration[2] // 2
    word = jnp.zeros(LANES, jnp.uint32)
    return jit(lambda games, level: opponents.act(board, games, slice(half, 2 * half), level, word, USED))


@tables([c for c in CONFIGURATIONS if c[2] in (2, 6)])
def test_recorded_choices_of_the_scripted_players(configuration, source):
    _, rows, games, record = recorded(configuration, source)
    half = configuration[2] // 2
    checked = np.zeros_like(record["opp_action"], bool)
    for place, level in enumerate(USED):
        wanted = record["opp_action"][:, place, :half].T
        known = wanted >= 0
        chosen = by_lanes(players(configuration), games, np.full(len(rows), level, np.int32))
        np.testing.assert_array_equal(chosen[known], wanted[known], err_msg=opponents.LEVELS[level])
        checked[:, place, :half] = known.T
    np.testing.assert_array_equal(checked, record["opp_action"] >= 0)  # none is left out
    assert checked.sum() > 100


@pytest.mark.parametrize(
    ("configurations", "source", "number"), [(OWN, "own", 300), (CONFIGURATIONS, "recorded", 5000)], ids=golden.SOURCES
)
def test_no_recorded_row_is_left_out(configurations, source, number):
    record = golden.load("snakes_transitions", source)
    assert sum(len(recorded(c, source)[1]) for c in configurations) == len(record["board_h"]) == number
    rows = np.sort(np.concatenate([recorded(c, source)[1] for c in configurations if c in SIX]))
    five = (record["beans_before"][rows] >= 0).all(1)
    np.testing.assert_array_equal(rows[five], record["obs_row"])
    assert np.isin(np.flatnonzero(record["shaped_valid"]), rows).all()


@functools.cache
def observers(configuration):
    board = Board(*configuration[:2])
    return jit(lambda games: {name: build(board, games, 3) for name, build in BUILDERS.items()})


@tables(SIX)
def test_recorded_observations(configuration, source):
    _, rows, games, _ = recorded(configuration, source)
    record = golden.load("snakes_transitions", source)
    lanes = np.flatnonzero(np.isin(rows, record["obs_row"]))
    places = np.searchsorted(record["obs_row"], rows[lanes])
    for name, columns in by_lanes(observers(configuration), games).items():
        seen = np.stack([np.asarray(x[:, lanes], np.float64) for x in columns], -1).swapaxes(0, 1)
        wanted = record[name][places].astype(np.float64)
        np.testing.assert_allclose(seen, wanted, rtol=1e-6 if name != "obs26" else 0, atol=0, err_msg=name)


@functools.cache
def payers(name):
    return jit(lambda after, engine, hit, code: reward.shaped(name, after, engine, hit, code))


@tables(SIX)
def test_recorded_shaped_rewards(configuration, source):
    board, _, _, record = recorded(configuration, source)

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
            for t in range(len(record["seg_after"]))
        ]
    )
    engine, hit, code = (record[k].T for k in ("reward", "hit", "score_code"))
    valid = record["shaped_valid"] > 0
    for name, key in (("original", "shaped_orig"), ("v1.1", "shaped_v11"), ("plus", "shaped_plus")):
        paid = by_lanes(payers(name), after, engine[:3].astype(np.int32), hit[:3] > 0, code)
        np.testing.assert_allclose(paid.T[valid], record[key][valid], rtol=1e-5, atol=1e-6, err_msg=name)


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


@functools.cache
def advances(configuration):
    height, width, snakes, beans, limit = configuration
    teams = 1 if snakes % 2 else 2
    settings = {"height": height, "width": width, "snakes": snakes, "beans": beans, "max_steps": limit, "teams": teams}
    env = envs_jax.make("snakes", **settings, opponent="outside")

    def advance(games, words, action):
        keys = jax.random.split(jax.random.key(0), LANES)
        before = snakes_env.State(keys, games, jnp.zeros(LANES, jnp.int32), jnp.zeros(LANES, bool))
        after, timestep = env._advance(before, words, action)
        return after.game, timestep

    return jit(advance)


@tables(CONFIGURATIONS)
def test_the_environment_repeats_recorded_steps_with_their_draws(configuration, source):
    board, rows, games, record = recorded(configuration, source)
    _, _, snakes, beans, _ = configuration
    teams = 1 if snakes % 2 else 2
    words = recorded_words(board, record, snakes, beans)
    action = record["action"][:, :snakes].T.astype(np.int32)
    game, timestep = by_lanes(advances(configuration), games, words, action)
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
        assert same.sum() > (100 if source == "recorded" else 20)
        record = golden.load("snakes_transitions", source)
        places = np.searchsorted(record["obs_row"], rows[follows[same] + 1])
        seen = timestep.observation[:3, :, follows[same]].transpose(2, 0, 1)
        np.testing.assert_array_equal(seen, record["obs26"][places])
