"""The search of exported agents: simulated games follow the rules, and moves change where rollouts are better."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_export import algorithm, draw_states, export_agent, heading, init_params, play_states

from bench.parity import agent_games
from bench.parity.snakes import stack
from bench.reference.snakes import oracle
from bench.reference.snakes.segments import from_segments
from envs_jax.base import make
from envs_jax.snakes import opponents
from jaxrl.cli import export
from jaxrl.common.errors import UserError
from jaxrl.integrations.export import formats
from jaxrl.runtime.load import load_policy

SETTINGS = oracle.CONFIGURATIONS["snakes_3v3"]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Any:
    env = make("snakes_3v3", observation="obs_full", masks=True, careful_masks=10)
    algo = algorithm(env)
    return export_agent(tmp_path_factory.mktemp("agent"), env, algo, init_params(algo), search=True)


def read_board(agent: Any, state: oracle.State, snake: int = 0) -> Any:
    observation = agent_games.observation(state, SETTINGS, snake, state.directions)
    return agent.Board.read(observation, agent.POLICY.settings, state.step_count - 1)


def open_directions(state: oracle.State) -> list[list[int]]:
    """The directions of each snake but backwards, which is where its second segment lies."""
    around = [[SETTINGS.neighbour(body[0], d) for d in range(4)] for body in state.bodies]
    return [[d for d in range(4) if around[k][d] != body[1]] for k, body in enumerate(state.bodies)]


def test_simulated_moves_follow_the_rules(agent: Any) -> None:
    """Bodies, beans and points equal the oracle's before respawns and new beans, in crowded games, too."""
    rng = np.random.default_rng(1)
    crowded = [state for state in draw_states(SETTINGS, 200) if all(state.bodies)]
    deaths = meals = 0
    for state in play_states(SETTINGS, 300) + crowded:
        moves = [int(rng.choice(ways)) for ways in open_directions(state)]
        outcome = oracle.advance(state, moves, SETTINGS)
        after, gained = read_board(agent, state).move(moves)
        assert after.steps == state.step_count
        assert gained == [int(reward) - int(hit) for reward, hit in zip(outcome.rewards, outcome.hit, strict=True)]
        assert [not body for body in after.snakes] == list(outcome.hit)
        for body, hit, cells in zip(after.snakes, outcome.hit, outcome.state.bodies, strict=True):
            assert hit or body == list(cells)
        assert after.beans == outcome.state.beans
        deaths += sum(outcome.hit)
        meals += sum(reward > 0 for reward in outcome.rewards)
        turned = read_board(agent, state, snake=3)
        assert turned.snakes == [*state.bodies[3:], *state.bodies[:3]]
    assert deaths > 100
    assert meals > 50


def test_the_first_of_two_snakes_that_meet_on_a_bean_eats_it(agent: Any) -> None:
    """So the tail of the other one leaves, and a third snake enters its cell."""
    bodies = [[(5, 5), (5, 4), (5, 3)], [(8, 7), (9, 7), (9, 6)], [(0, 2), (0, 1), (0, 0)]]
    bodies += [[(5, 7), (6, 7), (7, 7)], [(2, 2), (2, 1), (2, 0)], [(3, 12), (3, 11), (3, 10)]]
    state = oracle.State(bodies, [oracle.RIGHT] * 6, [(5, 6)], 3)
    after, gained = read_board(agent, state).move([3, 0, 3, 2, 3, 3])
    assert after.snakes[1] == [(7, 7), (8, 7), (9, 7)]
    assert gained == [-1, 0, 0, -1, 0, 0]
    assert not after.beans


def test_the_longest_snake_of_a_rollout_plays_as_the_opponent_territory(agent: Any) -> None:
    """No snake is longer, so none keeps out of its way. At equal lengths all snakes are the longest."""
    env = make("snakes_3v3")
    states = play_states(SETTINGS, 300) + draw_states(SETTINGS, 100)
    games = stack(
        [from_segments(env.board, s.bodies, heading(s, SETTINGS), s.beans, env.beans, s.step_count - 1) for s in states]
    )
    level = opponents.NAMES.index("territory")

    @jax.jit
    def choose(games: Any) -> Any:
        shape = games.steps.shape
        return opponents.act(env.board, games, slice(6), jnp.full(shape, level), jnp.zeros(shape, jnp.uint32), (level,))

    expected = np.asarray(choose(games)).T
    chosen = np.array([[agent.choose_move(read_board(agent, state), i) for i in range(6)] for state in states])
    lengths = np.array([[len(body) for body in state.bodies] for state in states])
    longest = lengths == lengths.max(-1, keepdims=True)
    assert longest.sum() > 500
    np.testing.assert_array_equal(chosen[longest], expected[longest])
    assert len(np.unique(expected[longest])) == 4
    assert np.any(chosen != expected)


def spread_in_sets(state: oracle.State, free: list[set[Any]], i: int, longer: list[int]) -> list[list[set[Any]]]:
    """The cells of snake i by the direction of its first move, after each move, in plain sets of cells."""

    def next_to(cells: set[Any]) -> set[Any]:
        return {SETTINGS.neighbour(cell, d) for cell in cells for d in range(4)}

    head = state.bodies[i][0]
    others = {body[0] for k, body in enumerate(state.bodies) if body and k != i and k not in longer}
    longer_cells = {state.bodies[k][0] for k in longer}
    others = next_to(others) & free[1]
    ways = [{SETTINGS.neighbour(head, d)} & free[1] - others for d in range(4)]
    longer_cells = next_to(longer_cells) & free[1] - others - set().union(*ways)
    rows = [ways]
    for cells in free[2:]:
        others = others | next_to(others) & cells - longer_cells - set().union(*ways)
        ways = [way | next_to(way) & cells - others - longer_cells for way in ways]
        longer_cells = longer_cells | next_to(longer_cells) & cells - others - set().union(*ways)
        rows.append(ways)
    return rows


def test_longer_snakes_leave_cells_that_are_reached_in_the_same_move(agent: Any) -> None:
    met = 0
    for state in (play_states(SETTINGS, 300) + draw_states(SETTINGS, 100))[::20]:
        board = read_board(agent, state)
        cells = [(r, c) for r in range(SETTINGS.height) for c in range(SETTINGS.width)]
        free = [{cell for cell in cells if packed & board.bit(cell)} for packed in board.free]
        for i in (k for k, body in enumerate(state.bodies) if body):
            longer = [k for k, body in enumerate(state.bodies) if len(body) > len(state.bodies[i])]
            expected = spread_in_sets(state, free, i, longer)
            claimed = [board.split(packed) for packed in agent.claim_cells(board, i, longer)]
            assert claimed == [[sum(board.bit(cell) for cell in way) for way in ways] for ways in expected]
            met += expected != spread_in_sets(state, free, i, [])
    assert met > 20


def test_the_shorter_of_two_snakes_goes_to_a_bean_as_far_from_both(agent: Any) -> None:
    bodies = [[(5, 2), (5, 1), (5, 0)], [(5, 8), (5, 9), (5, 10), (5, 11)]]
    bodies += [[(0, c), (0, c + 1), (0, c + 2)] for c in (0, 5, 10, 15)]
    state = oracle.State(bodies, [oracle.RIGHT, *[oracle.LEFT] * 5], [(5, 5)], 3)
    board = read_board(agent, state)
    assert agent.choose_move(board, 0) == oracle.RIGHT
    assert agent.choose_move(board, 1) != oracle.LEFT


def test_a_plan_changes_one_snake_after_the_other(agent: Any) -> None:
    rng = np.random.default_rng(2)
    changed = 0
    for state in play_states(SETTINGS, 150)[::3]:
        board = read_board(agent, state)
        scores = np.log(rng.dirichlet(np.ones(4), 3))
        for i, ways in enumerate(open_directions(state)[:3]):
            scores[i, [d for d in range(4) if d not in ways]] = -np.inf
        opponent_moves = [agent.choose_move(board, k) for k in (3, 4, 5)]

        def estimate(
            moves: list[int], board: Any = board, scores: Any = scores, opponent_moves: Any = opponent_moves
        ) -> float:
            return agent.roll_out(board, moves + opponent_moves) + 0.5 * sum(scores[i, d] for i, d in enumerate(moves))

        best = scores.argmax(-1).tolist()
        expected = list(best)
        for i in range(3):
            ways = [d for d in range(4) if scores[i, d] > -np.inf]
            values = {d: estimate([*expected[:i], d, *expected[i + 1 :]]) for d in ways}
            if max(values.values()) > values[expected[i]]:
                expected[i] = max(values, key=lambda d: values[d])
        assert agent.plan(board, scores.tolist()) == expected
        changed += expected != best
    assert changed > 10


@pytest.mark.parametrize("step", [3, 200])
def test_a_rollout_discounts_points_and_ends_with_the_game(agent: Any, step: int) -> None:
    """Snake 0 eats in the first move and in the third, snake 3 in the second, snake 1 in the last one and after it."""
    bodies = [[(0, 2), (0, 1), (0, 0)], [(2, 2), (2, 1), (2, 0)], [(4, 2), (4, 1), (4, 0)]]
    bodies += [[(7, 2), (7, 1), (7, 0)], [(5, 18), (5, 17), (5, 16)], [(8, 19), (8, 18), (8, 17)]]
    state = oracle.State(bodies, [oracle.RIGHT] * 6, [(0, 3), (0, 5), (7, 4), (2, 10), (2, 11)], step)
    moves = [oracle.RIGHT] * 6
    expected = 1 - 0.9 + 0.9**2 + 0.9**7 if step == 3 else 1
    assert agent.roll_out(read_board(agent, state), moves) == pytest.approx(expected)


def test_the_platform_gets_the_plan(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each snake of a team gets its move of one plan, made once for a situation from the logits of the open moves."""
    plans: list[list[int]] = []

    def plan(board: Any, logits: Any) -> list[int]:
        masks = [agent.POLICY.mask(board, i) for i in range(3)]
        np.testing.assert_array_equal(logits, np.where(masks, agent.POLICY.logits(agent.POLICY.team(board)), -np.inf))
        plans.append([3, 1, len(plans) % 4])
        return plans[-1]

    monkeypatch.setattr(agent, "plan", plan)

    def answer(state: oracle.State, side: int) -> list[int]:
        views = [agent_games.observation(state, SETTINGS, snake, state.directions) for snake in SETTINGS.team(side)]
        return [agent.my_controller(view, None, False)[0].index(1) for view in views]

    states = play_states(SETTINGS, 5)
    for state in states:
        for side in (1, 0):
            assert answer(state, side) == plans[-1]
    assert len(plans) == 10
    answer(dataclasses.replace(states[-1], beans=states[-1].beans[:-1]), 0)
    assert len(plans) == 11
    agent.CLOCK.steps += 1
    answer(dataclasses.replace(states[-1], beans=states[-1].beans[:-1]), 0)
    assert len(plans) == 12
    for beans in (states[0].beans, states[0].beans[:-1]):  # two games begin
        start = dataclasses.replace(states[0], beans=beans)
        agent.my_controller(agent_games.observation(start, SETTINGS, 0, None), None, False)
    assert len(plans) == 14


def test_a_single_snake_without_masks_searches(tmp_path: Path) -> None:
    """It goes for the bean next to its head, which the network does not see."""
    env = make("snakes_1v1", masks=False)
    algo = algorithm(env)
    agent = export_agent(tmp_path, env, algo, jax.tree.map(jnp.zeros_like, init_params(algo)), search=True)
    settings = oracle.CONFIGURATIONS["snakes_1v1"]
    wall = [(3, 2), (2, 2), (1, 2), (0, 2)]
    for beans, move in (([(2, 0)], 1), ([(0, 0)], 0)):
        state = oracle.State([[(1, 0), (1, 7), (1, 6)], wall], [oracle.RIGHT, oracle.DOWN], beans, 3)
        view = agent_games.observation(state, settings, 0, state.directions)
        assert agent.my_controller(view, None, False)[0].index(1) == move


def test_greedy_and_search_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="greedy has no effect on an agent with search"):
        formats.export(load_policy("pretrained:snakes"), "jidi", tmp_path, greedy=True, search=True)


def test_other_formats_have_no_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="search is for agents of the jidi format, not for numpy"):
        formats.export(load_policy("pretrained:snakes"), "numpy", tmp_path, search=True)
    assert export.main(["pretrained:snakes", "--format", "run", "--out", str(tmp_path), "--search"]) == 2
    assert "--search has no effect on --format run" in capsys.readouterr().err
