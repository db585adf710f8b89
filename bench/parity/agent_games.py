"""Games of an exported agent by the original rules, in plain NumPy.

The agent is what `python -m jaxrl.export RUN --format jidi --out DIR` wrote; it is called as the Jidi platform calls
it, once per snake and step.
"""

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.reference.snakes import oracle
from bench.reference.snakes.opponents import Policy, play
from jaxrl.common.errors import UsageError

NAMES = ("up", "down", "left", "right")
Controller = Callable[[dict[Any, Any], Any, bool], list[list[int]]]


def load_agent(directory: Path) -> Any:
    """Load the agent's module from a directory or a file, anew at each call. Raises UsageError."""
    path = directory / "submission.py" if directory.is_dir() else directory
    spec = importlib.util.spec_from_file_location("submission", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"{path} does not exist: name a submission.py, or the directory that jaxrl.export wrote")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def observation(
    state: oracle.State, settings: oracle.Settings, snake: int, last_direction: Sequence[int] | None
) -> dict[Any, Any]:
    """Return the platform's observation for a snake's controller; cells are lists, numbered 1 (beans), snake + 2."""
    cells = {k: [list(cell) for cell in body] for k, body in enumerate((state.beans, *state.bodies), 1)}
    return {
        **cells,
        "board_width": settings.width,
        "board_height": settings.height,
        "last_direction": None if last_direction is None else [NAMES[d] for d in last_direction],
        "controlled_snake_index": snake + 2,
    }


def wrap_controller(controller: Controller, seconds: list[float] | None = None) -> Policy:
    """Wrap a platform's controller as a policy of the oracle; `seconds` receives the duration of each call."""
    before: list[int] = []

    def policy(game: oracle.Game, side: int) -> list[int]:
        last = list(before) if game.state.step_count > 1 else None
        before[:] = game.state.directions
        actions = []
        for snake in game.settings.team(side):
            view = observation(game.state, game.settings, snake, last)
            began = time.perf_counter()
            answer = controller(view, None, False)
            if seconds is not None:
                seconds.append(time.perf_counter() - began)
            actions.append(answer[0].index(1))
        return actions

    return policy


def games(
    agent: Policy, opponent: Policy, settings: oracle.Settings, num_games: int, side: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Team scores of the agent and of its opponent, int[number] each; game i has the same start on both sides."""
    scores = []
    for i in range(num_games):
        policies = (agent, opponent) if side == 0 else (opponent, agent)
        scores.append(play(oracle.Game(settings, np.random.default_rng((seed, i))), policies))
    ours, theirs = np.array(scores).T if side == 0 else np.array(scores)[:, ::-1].T
    return ours, theirs
