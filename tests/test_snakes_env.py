"""Snakes as an environment: settings, schedules, the observation of our own; oracles play whole games elsewhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.snakes import context

import envs_jax
from bench.reference.snakes import opponents
from bench.reference.snakes.segments import from_segments
from envs_jax.batch import batched
from envs_jax.snakes import obs_full, schedule, teams
from envs_jax.snakes.board import Board


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"height": 2}, "height must lie between 3 and 64, not 2"),
        ({"snakes": 5}, "teams 1"),
        ({"teams": 3}, "teams must lie between 1 and 2, not 3"),
        ({"height": 3, "width": 4, "snakes": 4}, "no room"),
        ({"height": 4, "width": 4, "beans": 5, "observation": "obs30", "snakes": 2}, "obs_full"),
        ({"beans": 4, "observation": "obs35"}, "6 snakes and 5 beans"),
        ({"side": "third"}, "unknown side"),
        ({"observation": "obs_ful"}, "did you mean 'obs_full'"),
        ({"opponent": "5"}, "unknown player '5'"),
        ({"opponent": ""}, "empty"),
        ({"opponent": "0:x"}, "not a number"),
        ({"opponent": "0:0,2:0"}, "positive"),
        ({"opponent": "0@0 2@0.5 1@0.3"}, "increase from part to part"),
        ({"opponent": "0@0.5"}, "begin with 0"),
    ],
)
def test_impossible_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        envs_jax.make("snakes", **settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", {0.0: {"2": 1}, 1.0: {"2": 1}}),
        ("0:1,evasion:3", {0.5: {"0": 0.25, "evasion": 0.75}}),
        ("self:3,4:1", {0.5: {"4": 0.25, "self": 0.75}}),
        ("0 1@0.25 2:1,3:1@0.5", {0.2: {"0": 1}, 0.25: {"1": 1}, 0.9: {"2": 0.5, "3": 0.5}}),
    ],
)
def test_schedules(text, expected):
    for fraction, mixture in expected.items():
        weights = [mixture.get(player, 0) for player in schedule.PLAYERS]
        np.testing.assert_allclose(schedule.parse(text).at(jnp.float32(fraction)), weights)


@pytest.mark.parametrize("name", ["linear", "exponential", "curriculum"])
def test_published_schedules(name):
    for game in (1, 9, 10, 20, 39, 40, 45, 62, 64, 70, 82, 83, 86, 99, 100):
        expected = opponents.scheduled_level(name, game, 100)
        assert int(jnp.argmax(schedule.parse(name).at(jnp.float32(game / 100)))) == expected, game


def test_levels_are_drawn_as_the_mixture_says():
    env = envs_jax.make("snakes_1v1", opponent="0:1,2:2,evasion:1", side="both", observation="obs26", masks=False)
    keys = jax.random.split(jax.random.key(3), 4000)
    state, _ = jax.jit(lambda keys: batched(env).reset(keys, context(env)))(keys)
    shares = np.bincount(np.asarray(state.env.level), minlength=6) / 4000
    np.testing.assert_allclose(shares, [0.25, 0, 0.5, 0, 0, 0.25], atol=0.03)
    assert abs(np.asarray(state.env.plays_second_half).mean() - 0.5) < 0.03


def test_the_seat_only_renames_snakes():
    """The second side sees a game as the first does the game with exchanged halves."""
    first, second = (envs_jax.make("snakes", side=side) for side in ("first", "second"))
    state, _ = jax.jit(first.reset)(jax.random.key(0), context(first))
    turned = dataclasses.replace(state, game=teams.half_turn(state.game, 3), plays_second_half=jnp.bool_(True))
    views = teams.learner_view(first, state), teams.learner_view(second, turned)
    for a, b in zip(*map(jax.tree.leaves, views), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.any(state.game.head != turned.game.head)


# The observation of our own

BOARD = Board(6, 8)


@functools.partial(jax.jit, static_argnums=(1, 2))
def see(game, agents, teams):
    return obs_full.columns(BOARD, game, agents, teams)


open_directions = jax.jit(lambda game: obs_full.open_directions(BOARD, game, 1)[0])
room = jax.jit(lambda game: obs_full.reachable_cells(BOARD, game, 2, obs_full.leaving(BOARD, game)))


def _see(bodies, directions, beans, agents=1, teams=2):
    game = jax.tree.map(jnp.asarray, from_segments(BOARD, bodies, directions, beans, 3))
    columns = np.asarray(see(game, agents, teams))
    size = obs_full.size(len(bodies), 3)
    assert len(columns) == size
    shape = obs_full.PLANES, obs_full.SIDE, obs_full.SIDE
    return columns[: np.prod(shape)].reshape(*shape, agents), columns[np.prod(shape) :]


def test_the_full_observation_by_hand():
    bodies = [[(0, 0), (0, 1), (0, 2), (1, 2)], [(5, 0), (5, 7), (4, 7)]]
    crop, rest = _see(bodies, [2, 3], [(1, 0), (3, 4)])
    body, mates, opponents, bean = crop[..., 0]
    expected = np.zeros((7, 7), int)
    expected[3, 3], expected[3, 4], expected[3, 5], expected[4, 5] = 83, 66, 50, 33  # it may eat at (1, 0)
    expected[2, 3], expected[2, 2], expected[1, 2] = 50, 33, 16
    np.testing.assert_array_equal(body, expected)
    assert mates[3, 3] == 100 and mates.sum() == 100
    assert opponents[2, 3] == 100 and opponents.sum() == 100
    assert bean[4, 3] == 100 and bean.astype(int).sum() == 100  # (3, 4) is 4 columns away
    direction, blocked, length, beans, other, _ = np.split(rest[:, 0], [4, 8, 9, 24, 29])
    assert direction.tolist() == [0, 0, 100, 0]
    assert blocked.tolist() == [100, 0, 0, 100]
    assert length == [20]
    assert beans.tolist() == [33, 0, 14, 25, 100, 100, 100, 100, -25, 0] + [0] * 5
    assert other.tolist() == [-33, 0, 14, 15, -100]


def test_the_full_observation_does_not_depend_on_where_the_board_begins():
    rng = np.random.default_rng(0)
    bodies = [
        [(0, 0), (0, 1), (0, 2), (1, 2)],
        [(5, 0), (5, 7), (4, 7)],
        [(2, 4), (2, 3), (3, 3)],
        [(4, 4), (4, 3), (4, 2)],
    ]
    beans, directions = [(1, 0), (3, 4)], [2, 3, 3, 3]
    pieces = np.concatenate([x.reshape(-1, 2) for x in _see(bodies, directions, beans, 2)])
    for _ in range(5):
        r, c = rng.integers(6), rng.integers(8)
        moved = [[((a + r) % 6, (b + c) % 8) for a, b in cells] for cells in (*bodies, beans)]
        again = np.concatenate([x.reshape(-1, 2) for x in _see(moved[:-1], directions, moved[-1], 2)])
        np.testing.assert_array_equal(pieces[: 4 * 49], again[: 4 * 49])
        half = np.isin(np.abs(again), 100)  # at half the board both signs mean the same way
        np.testing.assert_array_equal(np.where(half, 0, pieces), np.where(half, 0, again))


def _cells_behind(bodies, start, hungry):
    """How many cells of BOARD the moves from `start` on come to, found cell by cell."""
    leaves = {cell: len(body) - j + (i in hungry) for i, body in enumerate(bodies) for j, cell in enumerate(body)}
    leaves = {cell: k if k <= obs_full.REACH else 99 for cell, k in leaves.items()}
    come = {start} if leaves.get(start, 0) <= 1 else set()
    for k in range(2, obs_full.MOVES + 1):
        beside = {((r + dr) % 6, (c + dc) % 8) for r, c in come for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        come |= {cell for cell in beside if leaves.get(cell, 0) <= k}
    return len(come)


@pytest.mark.parametrize(("bean", "hungry"), [((5, 5), ()), ((3, 2), (0, 1)), ((4, 3), (1,))])
def test_room_is_what_moves_come_to(bean, hungry):
    bodies = [
        [(2, 2), (2, 3), (2, 4), (1, 4), (0, 4), (0, 3), (0, 2), (0, 1), (1, 1), (2, 1), (3, 1)],
        [(3, 3), (3, 4), (3, 5), (3, 6)],
    ]
    game = jax.tree.map(jnp.asarray, from_segments(BOARD, bodies, [2, 2], [bean], 3))
    rooms = np.asarray(room(game))
    for agent, (r, c) in enumerate(body[0] for body in bodies):
        beside = [((r + dr) % 6, (c + dc) % 8) for dr, dc in ((-1, 0), (1, 0), (0, -1), (0, 1))]
        assert rooms[:, agent].tolist() == [_cells_behind(bodies, cell, hungry) for cell in beside]
    assert rooms[2, 0] == 0 < rooms[0, 0]
    room_values = see(game, 2, 2)[-8:]
    np.testing.assert_array_equal(room_values[:4], np.minimum(rooms * 5, 100))
    np.testing.assert_array_equal(room_values[4:], np.minimum(rooms, 100))


OPEN_DIRECTIONS = {  # of the first snake: bodies, directions, bean, open: up, down, left, right
    "free": ([[(0, 0), (0, 1), (0, 2)], [(3, 3), (4, 3), (5, 3)]], [2, 0], (3, 5), [True, True, True, False]),
    "a body": ([[(0, 0), (0, 1), (0, 2)], [(5, 0), (5, 7), (4, 7)]], [2, 3], (3, 5), [False, True, True, False]),
    "a tail": ([[(0, 0), (0, 1), (0, 2)], [(2, 1), (2, 0), (1, 0)]], [2, 3], (3, 5), [True, True, True, False]),
    "it may stay": ([[(0, 0), (0, 1), (0, 2)], [(2, 1), (2, 0), (1, 0)]], [2, 3], (2, 2), [True, False, True, False]),
    "or a trap": (
        [[(0, 0), (0, 1), (0, 2)], [(4, 0), (5, 0), (5, 7), (0, 7), (1, 7), (1, 0)]],
        [2, 0],
        (3, 0),
        [False, True, False, False],
    ),
    "own tail": ([[(0, 0), (0, 1), (1, 1), (1, 0)], [(3, 3), (4, 3), (4, 4)]], [2, 0], (5, 0), [True] * 3 + [False]),
    "after a respawn": (
        [[(0, 0), (0, 1), (0, 2)], [(3, 3), (4, 3), (5, 3)]],
        [0, 0],
        (3, 5),
        [True, False, True, False],
    ),
    "no way out": (
        [[(0, 0), (0, 1), (0, 2)], [(2, 0), (1, 0), (1, 7), (0, 7), (5, 7), (5, 0), (5, 1)]],
        [2, 1],
        (3, 5),
        [True] * 3 + [False],
    ),
}


@pytest.mark.parametrize(("bodies", "directions", "bean", "expected"), OPEN_DIRECTIONS.values(), ids=OPEN_DIRECTIONS)
def test_open_directions_by_hand(bodies, directions, bean, expected):
    game = jax.tree.map(jnp.asarray, from_segments(BOARD, bodies, directions, [bean], 3))
    np.testing.assert_array_equal(open_directions(game), expected)


def test_opponents_are_stale_in_training_alone() -> None:
    env = envs_jax.make("snakes", stale_observation_bug=True, opponent="1", eval_opponent="2")
    judged = env.for_evaluation()
    assert env.stale_observation_bug and not judged.stale_observation_bug and judged.opponent == "2"
    assert env.match_rules.settings["stale_observation_bug"] is False
    for bug in (False, True):
        rules = envs_jax.make("snakes", stale_observation_bug=bug).match_rules
        assert rules.league["stale_observation_bug"] is False
    assert "stale_observation_bug" not in envs_jax.make("snakes").match_rules.settings
