"""Snakes: the laws of what is drawn, respawns without the engine's defects, and games from and to lists of cells."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from bench.reference.snakes.segments import from_segments
from envs_jax.batch import BatchState
from envs_jax.snakes import opponents, respawn, rules, segments, spawn
from envs_jax.snakes.board import COLUMN_STEP, ROW_STEP, Board
from envs_jax.snakes.spawn import always_room
from envs_jax.snakes.types import State

DRAWS = 100_000
ENDED = type("Progress", (), {"fraction": jnp.float32(1)})


def assert_uniform(counts, size):
    """Chi-squared of counts over `size` equally likely outcomes: at most five standard deviations above its mean.

    A correct law fails at one in a million draws or fewer, and the draws are the same in every run.
    """
    counts = np.asarray(counts, float)
    assert len(counts) == size
    expected = counts.sum() / size
    assert ((counts - expected) ** 2 / expected).sum() < size - 1 + 5 * (2 * (size - 1)) ** 0.5


def words(*shape):
    return np.random.default_rng(1).integers(0, 2**32, shape, dtype=np.uint32)


@functools.cache
def keys():
    return jax.jit(lambda: jax.random.split(jax.random.key(2), DRAWS))()


def test_a_number_below_a_count_is_exact():
    some = np.r_[0, 1, 2**31, 2**32 - 1, np.random.default_rng(0).integers(0, 2**32, 1000)].astype(np.uint32)
    for count in (1, 3, 200, 800, 2048):
        drawn = jax.jit(spawn.one_of)(some, np.full(len(some), count, np.int32))
        np.testing.assert_array_equal(drawn, (some.astype(np.uint64) * count) >> np.uint64(32))


def test_cells_are_found_by_rank():
    planes = np.random.default_rng(0).integers(0, 2**32, (5, 200), dtype=np.uint32)
    cells = (planes[:, None] >> np.arange(32, dtype=np.uint32)[None, :, None] & 1).reshape(160, 200)
    counts = cells.sum(0)
    for share in (0.0, 0.5, 0.999):
        rank = (share * counts).astype(np.int32)
        row, column = map(np.asarray, jax.jit(spawn.nth_cell)(planes, rank))
        expected = [np.flatnonzero(cells[:, i])[k] for i, k in enumerate(rank)]
        np.testing.assert_array_equal(32 * row + column, expected)


def test_reversals_turn_into_the_other_three_directions():
    drawn = np.asarray(jax.jit(lambda words: spawn.turns(words, 8))(words(2, DRAWS)))
    together = sum(3**i * drawn[i] for i in range(6))
    assert_uniform(np.bincount(together, minlength=729), 729)
    for direction in range(4):
        straight = np.full(DRAWS, direction, np.int32)
        headings = jax.jit(rules.resolve_directions)(straight, straight ^ 1, drawn[direction * 2])
        counts = np.bincount(headings, minlength=4)
        assert counts[direction ^ 1] == 0
        assert_uniform(np.delete(counts, direction ^ 1), 3)


def test_new_beans_are_uniform_without_replacement():
    board = Board(3, 4)
    bodies = [[(0, 0), (0, 1), (0, 2)], [(2, 3), (2, 2), (2, 1)]]
    game = from_segments(board, bodies, [2, 3], [(1, 1)], 3)
    lanes = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[..., None], DRAWS, -1), game)
    beans = np.asarray(jax.jit(lambda game, w: spawn.refill(board, game, w))(lanes, words(3, DRAWS)).beans)
    assert (beans[0] == 32 + 1).all()
    pairs, counts = np.unique(beans[1] * 1024 + beans[2], return_counts=True)
    free = {32 * r + c for r in range(3) for c in range(4)} - {32 + 1, 0, 1, 2, 67, 66, 65}
    assert {p // 1024 for p in pairs} == free
    assert_uniform(counts, len(free) * (len(free) - 1))


def test_snakes_start_uniformly_over_what_earlier_ones_leave():
    board = Board(4, 5)
    game = jax.tree.map(np.asarray, jax.jit(lambda w: spawn.begin(board, w, 2, 1))(words(3, DRAWS)))
    cell = game.tail // 32 * board.width + game.tail % 32
    first, second = np.asarray(cell * 4 + game.direction)
    assert_uniform(np.bincount(first, minlength=80), 80)

    def cover(place):
        (r, c), d = divmod(place // 4, 5), place % 4
        return {((r + k * ROW_STEP[d]) % 4, (c + k * COLUMN_STEP[d]) % 5) for k in range(3)}

    room = np.array([[not cover(one) & cover(two) for two in range(80)] for one in range(80)])
    counts = np.zeros((80, 80))
    np.add.at(counts, (first, second), 1)
    assert not counts[~room].any()
    for lying in (False, True):  # all first snakes up or down leave as many places, so do all left or right
        some = np.arange(80) % 4 // 2 == lying
        assert_uniform(counts[some][room[some]], 40 * (52 if lying else 54))


def test_resets_draw_every_part_on_its_own():
    """The places of the snake and of the bean, by the environment's random words."""
    env = envs_jax.make("snakes", height=3, width=3, snakes=1, beans=1, teams=1, observation="obs26", masks=False)
    state, _ = jax.jit(lambda keys: env.batched().reset(keys, env.context(ENDED)))(keys())
    game = jax.tree.map(np.asarray, state.env.game)
    outcome = (game.tail[:, 0] * 4 + game.direction[:, 0]) * 128 + game.beans[:, 0]
    assert_uniform(np.unique(outcome, return_counts=True)[1], 9 * 4 * 6)


def test_steps_draw_every_part_on_its_own():
    """Two turns and a new bean, of the environment's own random words; a random opponent may turn or not."""
    env = envs_jax.make("snakes_1v1", beans=1, opponent="0", observation="obs26", masks=False)
    bodies = [[(1, 1), (1, 2), (1, 3)], [(4, 5), (4, 4), (4, 3)]]
    game = from_segments(env.board, bodies, [2, 3], [], 1)
    lanes = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], DRAWS, 0), game)
    state, _ = jax.eval_shape(lambda k: env.batched().reset(k, env.context(ENDED)), keys())
    drawn = state.env.level, state.env.plays_second_half, state.episode
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drawn)
    state = BatchState(env=State(keys(), lanes, *zeros[:2]), key=keys(), episode=zeros[2])
    back = jnp.full((DRAWS, 1), 3, jnp.int32)
    state, _ = jax.jit(lambda state: env.batched().step_without_reset(state, back, env.context(ENDED)))(state)
    game = jax.tree.map(np.asarray, state.env.game)
    assert (game.direction[:, 0] != 3).all() and (game.direction[:, 1] != 2).all()
    outcome = (game.direction[:, 0] * 4 + game.direction[:, 1]) * 256 + game.beans[:, 0]
    assert_uniform(np.unique(outcome, return_counts=True)[1], 3 * 3 * (48 - 6))


def test_random_opponents_are_uniform_and_independent():
    bodies = [[(r, 0), (r, 1), (r, 2)] for r in (0, 2, 4)]
    game = jax.tree.map(jnp.asarray, from_segments(Board(6, 8), bodies, [0] * 3, [], 1))
    act = jax.jit(jax.vmap(lambda word: opponents.act(Board(6, 8), game, slice(0, 3), jnp.int32(0), word, (0,))))
    chosen = act(words(DRAWS))
    assert_uniform(np.bincount(np.asarray(chosen) @ [1, 4, 16], minlength=64), 64)


def test_fixed_respawns_are_connected_and_look_ahead():
    board = Board(4, 6)
    rng = np.random.default_rng(3)
    game = from_segments(board, [[]], [0], [], 1)
    free = rng.random((2000, 4, 6)) < 0.45
    body = np.stack([(~free * (1 << np.arange(6))).sum(-1)] * 1, -1).astype(
        np.uint32
    )  # a snake that is everywhere else
    lanes = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[..., None], 2000, -1), game)
    blocked = jnp.asarray(body.transpose(1, 2, 0))
    lanes = dataclasses.replace(lanes, body=blocked)
    came = jax.tree.map(np.asarray, jax.jit(lambda game: respawn.respawn(board, game, True))(lanes))
    assert not came.tail_gap.any()
    assert 0 < (came.length == 3).sum() < 2000
    for i in np.flatnonzero(came.length == 3):
        one = jax.tree.map(lambda x, i=i: x[..., i], came)
        ((head, neck, last),), (direction,), _ = segments.to_segments(board, one)
        assert all(free[i][cell] for cell in (head, neck, last))

        def step(a: Any, b: Any) -> Any:
            return ((a[0] - b[0] + 1) % 4 - 1, (a[1] - b[1] + 1) % 6 - 1)

        assert step(head, neck) == (ROW_STEP[direction], COLUMN_STEP[direction])
        assert np.abs(step(neck, last)).sum() == 1


def test_lists_of_cells_go_in_and_out():
    board = Board(10, 20)
    bodies = [[(0, 19), (0, 0), (0, 1), (1, 1)], [(5, 5), (5, 6), (5, 4)], []]  # the second has its head in the middle
    game = from_segments(board, bodies, [2, 0, 1], [(3, 3), (9, 19)], 5, 17)
    assert game.tail_gap.tolist() == [False, True, False]
    assert segments.to_segments(board, game) == (bodies, [2, 0, 1], [(3, 3), (9, 19)])
    assert game.steps == 17


@pytest.mark.parametrize(
    ("bodies", "beans", "words"),
    [
        ([[(0, 0), (0, 1), (10, 0)]], [], "off the board"),
        ([[(0, 0), (0, 1), (0, 2)]], [(0, 1)], "one cell"),
        ([[(0, 0), (0, 1), (0, 5)]], [], "adjacent"),
        ([[(0, 0), (0, 1), (0, 2)]], [(1, 1), (1, 2), (1, 3)], "keeps 2"),
    ],
)
def test_lists_that_are_no_game(bodies, beans, words):
    with pytest.raises(ValueError, match=words):
        from_segments(Board(10, 20), bodies, [0], beans, 2)


def test_room_for_every_start():
    assert always_room(Board(10, 20), 6)
    assert always_room(Board(3, 4), 3)
    assert always_room(Board(3, 3), 3)
    assert not always_room(Board(3, 3), 4)
    assert not always_room(Board(4, 4), 5)
