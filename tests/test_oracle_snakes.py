"""The oracle of the snakes game against the recorded transitions, and a few of its rules by hand."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import golden

from bench.reference.snakes import oracle
from bench.reference.snakes.opponents import EVASION, choose
from bench.reference.snakes.oracle import DOWN, LEFT, RIGHT, UP, Cell, Game, Settings, State

BOARD = Settings()
FAR = [(9, 19), (9, 17), (9, 15), (9, 13), (9, 11)]  # beans out of the way


# ---------------------------------------------------------------- recorded transitions


@functools.lru_cache(maxsize=1)
def record() -> dict[str, list[Any]]:
    """The arrays as nested lists of Python numbers."""
    return {name: array.tolist() for name, array in golden.load("snakes_transitions").items()}


def recorded_settings(row: int) -> Settings:
    height, width, snakes, beans, max_step = (
        record()[name][row] for name in ("board_h", "board_w", "n_snakes", "n_beans", "max_step")
    )
    return Settings(height, width, snakes, beans, max_step, teams=1 if snakes % 2 else 2)


def recorded_cells(flat: list[int], settings: Settings) -> list[Cell]:
    return [divmod(cell, settings.width) for cell in flat if cell >= 0]


def recorded_state(row: int, when: str) -> State:
    """The state "before" or "after" a recorded step."""
    settings, arrays = recorded_settings(row), record()
    n = settings.num_snakes
    bodies = [recorded_cells(cells, settings) for cells in arrays[f"seg_{when}"][row][:n]]
    assert [len(body) for body in bodies] == arrays[f"len_{when}"][row][:n]
    beans = recorded_cells(arrays[f"beans_{when}"][row], settings)
    return State(bodies, arrays[f"dir_{when}"][row][:n], beans, arrays[f"step_{when}"][row])


def recorded_rows(every: int = 1) -> range:
    return range(0, len(record()["board_h"]), every)


def without_directions_of_the_dead(state: State) -> State:
    """A snake that could not respawn has no meaningful direction."""
    return replace(
        state, directions=[d if body else -1 for d, body in zip(state.directions, state.bodies, strict=True)]
    )


def test_every_recorded_transition() -> None:
    arrays = record()
    assert len(recorded_rows()) == 5000
    for row in recorded_rows():
        settings, after = recorded_settings(row), recorded_state(row, "after")
        n, beans_left = settings.num_snakes, arrays["n_beans_kept"][row]
        game = Game(settings, state=recorded_state(row, "before"))
        resolved, new_beans = arrays["resolved"][row][:n], after.beans[beans_left:]
        outcome = oracle.advance(game.state, resolved, settings)
        assert outcome.state.beans == after.beans[:beans_left], row
        rewards, done = game.step(arrays["action"][row][:n], resolved, new_beans)  # checks the draws
        assert without_directions_of_the_dead(game.state) == without_directions_of_the_dead(after), row
        assert rewards.tolist() == arrays["reward"][row][:n], row
        assert game.hit.tolist() == arrays["hit"][row][:n], row
        assert done == arrays["done"][row], row


@pytest.mark.parametrize(("place", "level"), list(enumerate([1, 2, 3, 4, EVASION])))
def test_recorded_choices_of_the_scripted_players(place: int, level: int | str) -> None:
    compared = 0
    for row in recorded_rows(5):
        expected = [action for action in record()["opp_action"][row][place] if action >= 0]
        settings = recorded_settings(row)
        if expected:
            state = recorded_state(row, "before")
            assert choose(state, settings, settings.team(1), level) == expected, row
            compared += len(expected)
    assert compared > 2_000


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_recorded_observations(layout: str) -> None:
    expected = golden.load("snakes_transitions")[f"obs{layout}"]
    rows = record()["obs_row"]
    assert len(rows) == len(expected) == 3696
    actual = np.stack([oracle.observe(recorded_state(row, "before"), recorded_settings(row), layout) for row in rows])
    assert actual.dtype == np.float32
    if layout == "26":
        np.testing.assert_array_equal(actual, expected)
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("variant", "name"), [("original", "orig"), ("v1.1", "v11"), ("plus", "plus")])
def test_recorded_shaped_rewards(variant: str, name: str) -> None:
    valid = [row for row in recorded_rows(5) if record()["shaped_valid"][row]]
    assert len(valid) > 600
    for row in valid:
        actual = oracle.shaped_rewards(
            variant,
            recorded_state(row, "after"),
            record()["reward"][row],
            record()["hit"][row],
            record()["score_code"][row],
            range(3),
        )
        np.testing.assert_allclose(actual, record()[f"shaped_{name}"][row], rtol=1e-6, err_msg=str(row))


# ---------------------------------------------------------------- moves, meals, collisions


def line(*cells: Cell, towards: int) -> tuple[list[Cell], int]:
    return list(cells), towards


def start_game(*snakes: tuple[list[Cell], int], beans: list[Cell] = FAR) -> Game:
    bodies, directions = map(list, zip(*snakes, strict=True))
    settings = replace(BOARD, num_snakes=len(snakes), teams=1)
    return Game(settings, np.random.default_rng(0), State(bodies, directions, list(beans)))


EASTWARDS = line((5, 5), (5, 4), (5, 3), towards=RIGHT)


def test_a_tail_that_moves_away_makes_room() -> None:
    game = start_game(EASTWARDS, line((3, 6), (4, 6), (5, 6), towards=UP))
    game.step([RIGHT, UP])
    assert game.hit.tolist() == [False, False]
    assert game.state.bodies[0] == [(5, 6), (5, 5), (5, 4)]


def test_a_tail_stays_when_its_snake_eats() -> None:
    game = start_game(EASTWARDS, line((4, 6), (4, 7), (5, 7), (5, 6), towards=LEFT), beans=[(4, 5), *FAR[:4]])
    game.step([RIGHT, LEFT])
    assert game.hit.tolist() == [True, False] and game.rewards.tolist() == [0, 1]
    assert game.state.bodies == [[(0, 1), (0, 0), (1, 0)], [(4, 5), (4, 6), (4, 7), (5, 7), (5, 6)]]
    assert game.state.beans[:4] == FAR[:4] and len(game.state.beans) == 5


def test_a_contested_bean_kills_both_and_is_gone() -> None:
    long = line((5, 5), (5, 4), (5, 3), (5, 2), (5, 1), towards=RIGHT)
    game = start_game(long, line((5, 7), (5, 8), (5, 9), towards=LEFT), beans=[(5, 6), *FAR[:4]])
    outcome = oracle.advance(game.state, [RIGHT, LEFT], game.settings)
    assert outcome.hit == [True, True] and outcome.rewards == [-2, 0]
    assert outcome.state.beans == FAR[:4]
    assert outcome.state.bodies == [[(0, 1), (0, 0), (1, 0)], [(0, 3), (0, 2), (1, 2)]]


def test_snakes_that_swap_heads_both_die() -> None:
    game = start_game(EASTWARDS, line((5, 6), (5, 7), (5, 8), towards=LEFT))
    game.step([RIGHT, LEFT])
    assert game.hit.all() and game.rewards.tolist() == [0, 0]


# ---------------------------------------------------------------- respawns

RESPAWNS = [  # free cells (None: all but the second entry), body, direction
    (None, [], [(0, 1), (0, 0), (1, 0)], RIGHT),
    (None, [(0, 1)], [(0, 0), (1, 0), (9, 0)], UP),
    (None, [(0, 1), (1, 0)], [(9, 0), (0, 0), (0, 19)], DOWN),
    ([(4, 7), (4, 8), (4, 9)], [], [(4, 7), (4, 8), (4, 9)], LEFT),
    ([(4, 19), (4, 0), (4, 1)], [], [(4, 0), (4, 1), (4, 19)], LEFT),
    ([(9, 3), (0, 3), (1, 3)], [], [(0, 3), (1, 3), (9, 3)], UP),
    ([(4, 7), (4, 8), (5, 8)], [], [(4, 7), (4, 8), (5, 8)], LEFT),
    ([(3, 19), (3, 0), (4, 0)], [], [(4, 0), (3, 0), (3, 19)], DOWN),
]


@pytest.mark.parametrize(("free", "blocked", "body", "direction"), RESPAWNS)
def test_respawns_by_hand(free: list[Cell] | None, blocked: list[Cell], body: list[Cell], direction: int) -> None:
    occupied = set(blocked) if free is None else set(BOARD.cells()) - set(free)
    assert oracle.respawn(occupied, BOARD) == (body, direction)


# ---------------------------------------------------------------- observations and rewards


def test_shaped_rewards_by_hand() -> None:
    state = State([[(0, 0)], [(0, 4)], [(3, 8)], [(5, 5)]], [UP] * 4, [(3, 4), (9, 9)])
    rewards, hit = [1, -2, 0, 0], [False, True, True, False]
    plain = [5.0, 3.0, 4.0, 5.0**0.5]
    expected = {
        "original": [-5 + 20, -5 - 3 - 10, -5 - 4, -5 - plain[3]],
        "plus": [15.15, -18 + 0.1 / 4, -9 + 0.1 / 5 + 0.1, -5 - plain[3] + 0.1 / (1 + plain[3]) + 0.1],
        "v1.1": [-30 + 30 - 50, -30 + 0.1, -30 - 50, -30 - 50],
        "v1.1_fixed": [-30 + 30 + 0.1, -30 - 50, -30 - 50, -30 + 0.1],
        "score": [1, -2, 0, 0],
    }
    assert set(expected) == set(oracle.REWARDS)
    for variant, values in expected.items():
        np.testing.assert_allclose(oracle.shaped_rewards(variant, state, rewards, hit, 4, range(4)), values)
    state.beans = []
    assert oracle.shaped_rewards("original", state, rewards, hit, 0, [2]) == [0.0]


# ---------------------------------------------------------------- scripted players


def test_stale_players_see_snakes_where_they_first_died() -> None:
    wall = line((2, 2), (1, 2), (0, 2), (9, 2), (8, 2), towards=DOWN)
    game = start_game(EASTWARDS, line((4, 6), (5, 6), (6, 6), (7, 6), towards=UP), wall)
    game.step([RIGHT, UP, DOWN])
    assert game.state.bodies[0][0] == (0, 1) and game.ghosts == {0: [(5, 6), (5, 5), (5, 4)]}
    assert choose(game.state, game.settings, [0], 2) == [UP]  # across the edge
    assert choose(game.state, game.settings, [0], 2, ghosts=game.ghosts) == [RIGHT]  # the only way out of there
    bean = replace(game.state, beans=[(5, 5)])
    assert choose(bean, game.settings, [0], 2, ghosts=game.ghosts) == [LEFT]  # beans hide ghosts
    game.step([RIGHT, UP, DOWN])
    assert game.hit[0] and game.ghosts == {0: [(5, 6), (5, 5), (5, 4)]}  # of the first death
