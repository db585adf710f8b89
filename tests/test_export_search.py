"""The search of exported agents: after the chosen directions walks are longest, by an exhaustive search."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_export import algorithm, draw_body, export_agent, init_params

from bench.parity import agent_games
from bench.reference.snakes import oracle
from envs_jax.base import make
from jaxrl.cli import export
from jaxrl.common.errors import UserError
from jaxrl.integrations.export import formats
from jaxrl.runtime.load import load_policy

SETTINGS = oracle.CONFIGURATIONS["snakes_1v1"]


def draw_states(count: int) -> list[oracle.State]:
    """Boards of 6 x 8 cells with two snakes that fill half of them or more."""
    rng = np.random.default_rng(3)
    states = []
    while len(states) < count:
        free = {(r, c) for r in range(SETTINGS.height) for c in range(SETTINGS.width)}
        bodies = []
        for _ in range(2):
            bodies.append(draw_body(SETTINGS, free, int(rng.integers(12, 19)), rng))
            free -= set(bodies[-1])
        if all(bodies):
            cells = sorted(free)
            beans = [cells[k] for k in rng.choice(len(cells), 3, replace=False)]
            states.append(oracle.State(bodies, [0, 0], beans, 5))
    return states


def leave_times(state: oracle.State) -> dict[oracle.Cell, int]:
    """The move from which on a body's cell can be entered; one later if the snake may eat now."""
    times = {}
    for body in state.bodies:
        hungry = any(SETTINGS.neighbour(body[0], d) in state.beans for d in range(4))
        times.update({cell: k + 1 + hungry for k, cell in enumerate(body[::-1])})
    return times


def longest_walk(times: dict[oracle.Cell, int], own: Any, most: int, path: tuple[oracle.Cell, ...]) -> int:
    """The moves of the longest walk that continues a path, which has made at least one."""
    if len(path) >= most or path[-1] in own:
        return most
    around = [SETTINGS.neighbour(path[-1], d) for d in range(4)]
    ways = [cell for cell in around if cell not in path and times.get(cell, 0) <= len(path) + 1]
    best = len(path)
    for cell in ways:
        best = max(best, longest_walk(times, own, most, (*path, cell)))
        if best == most:
            break
    return best


def test_directions_with_the_longest_walks_stay(tmp_path: Path) -> None:
    """No other direction does: many that careful masks leave open end in walls, others in the snake's own tail."""
    env = make("snakes_1v1", careful_masks=4)
    algo = algorithm(env)
    params = init_params(algo)
    plain, agent = (export_agent(tmp_path / str(search), env, algo, params, search=search) for search in (False, True))
    agent.MOST_CELLS = 10**6
    closed = 0
    for state in draw_states(300):
        observation = agent_games.observation(state, SETTINGS, 0, [0, 0])
        board = agent.Board(observation, agent.POLICY.settings, 4)
        before = plain.POLICY.mask(board, 0)
        body = state.bodies[0]
        walks = [
            longest_walk(leave_times(state), body, len(body) + 2, (SETTINGS.neighbour(body[0], d),)) for d in range(4)
        ]
        longest = max(walks[d] for d in range(4) if before[d])
        after = agent.POLICY.mask(board, 0)
        if sum(before) > 1:
            assert after == [before[d] and walks[d] == longest for d in range(4)], state
        else:
            assert after == before
        closed += after != before
    assert closed > 3


def test_a_search_ends(tmp_path: Path) -> None:
    """Where a walk is not found soon, it is taken to exist: the direction stays open."""
    env = make("snakes_1v1", careful_masks=4)
    algo = algorithm(env)
    agent = export_agent(tmp_path, env, algo, init_params(algo), search=True)
    agent.MOST_CELLS = 0
    for state in draw_states(20):
        board = agent.Board(agent_games.observation(state, SETTINGS, 0, [0, 0]), agent.POLICY.settings, 4)
        assert agent.longest_walks(board, 0, [0, 1, 2, 3]) == [0, 1, 2, 3]


def test_other_formats_have_no_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="search is for agents of the jidi format, not for numpy"):
        formats.export(load_policy("pretrained:snakes"), "numpy", tmp_path, search=True)
    assert export.main(["pretrained:snakes", "--format", "run", "--out", str(tmp_path), "--search"]) == 2
    assert "--search has no effect on --format run" in capsys.readouterr().err
