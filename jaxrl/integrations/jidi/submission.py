"""A snakes agent for the Jidi platform, exported by jaxrl. The platform calls `my_controller`.

It needs only Python 3.7 and NumPy; weights and settings are in weights.npz next to this file. Observations and masks
are the same as in jaxrl's envs_jax/snakes, whose modules of the same names explain every value. They are written again
here only because the platform has no JAX and passes lists of cells; jaxrl's tests check that both agree.

The platform does not say where a snake heads: `last_direction` is one step old. Here a snake heads from its second
segment to its head, which is wrong only right after some respawns across the edge of the board: then observation and
masks differ from those of training for one step. Nor does the platform pass the number of steps: see `Clock`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

if "numpy" not in sys.modules:  # which would start threads, and they slow down such small matrices
    for _library in ("OPENBLAS", "OMP", "MKL"):
        os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import numpy as np
from numpy import random  # which NumPy would load at the first call

# the export puts the content of these modules in place of the imports
from jaxrl.integrations.jidi.board import Board
from jaxrl.integrations.jidi.obs_full import obs_full
from jaxrl.integrations.jidi.obs_heading import obs_heading
from jaxrl.integrations.jidi.observation import obs26, obs30, obs35
from jaxrl.integrations.jidi.rollouts import plan
from jaxrl.integrations.jidi.territory import careful
from jaxrl.integrations.numpy_networks import network

LAYOUTS = {"obs26": obs26, "obs30": obs30, "obs35": obs35, "obs_full": obs_full, "obs_heading": obs_heading}


class Clock:
    """Counts the steps of a game, which the platform does not pass; only `obs_heading` and the search use them.

    A game begins where there is no `last_direction`, as after a reset. A step was made where the board is another one
    than at the call before, so it does not matter how many snakes are controlled. Calls must come from one game at a
    time; an agent that is loaded in the middle of a game counts from there.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.cells: Any = None

    def read(self, observation: dict[Any, Any], settings: dict[str, Any]) -> int:
        """Return the number of steps made, at most the length of a game."""
        lists = [observation[k] for k in range(1, settings["snakes"] + 2)]
        cells = [[tuple(cell) for cell in cells] for cells in lists]  # a copy: the platform changes its lists
        if observation.get("last_direction") is None:
            self.steps = 0
        elif cells != self.cells:
            self.steps = min(self.steps + 1, settings["max_steps"])
        self.cells = cells
        return self.steps


class Policy:
    """The content of the weights file: `settings` and the arrays of the actor."""

    def __init__(self, path: str) -> None:
        with np.load(path, allow_pickle=False) as file:
            self.weights = {name: file[name] for name in file.files if name != "settings"}
            self.settings: dict[str, Any] = json.loads(str(file["settings"]))

    def team(self, board: Board) -> np.ndarray:
        """Return float32[A, F], the observation of each snake of the team.

        It is zero for one that could not respawn, except for the order of the actions, if the observation has one.
        """
        see = LAYOUTS[self.settings["observation"]]
        rows = np.zeros((board.half, self.settings["inputs"]), np.float32)
        rows[:, : self.settings["ordered"]] = range(self.settings["ordered"])
        for i in range(board.half):
            if board.snakes[i]:
                rows[i] = see(board, i)
        return rows

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Return float32[A, 4] of observations float32[A, F], without masks.

        If observations begin with an order of the actions, the network does not see it, and its outputs have it.
        """
        ordered = self.settings["ordered"]
        outputs = network(self.weights, self.settings, x[:, ordered:])
        if not ordered:
            return outputs
        logits = np.zeros_like(outputs)
        np.put_along_axis(logits, x[:, :ordered].astype(int), outputs, -1)
        return logits

    def masked_logits(self, board: Board, snakes: list[int]) -> np.ndarray:
        """Return float32[len(snakes), 4], -inf for closed directions of these snakes of the own team."""
        logits = self.logits(self.team(board))[snakes]
        if not self.settings["masking"]:
            return logits
        return np.where([self.mask(board, i) for i in snakes], logits, -np.inf)

    def mask(self, board: Board, i: int) -> list[bool]:
        """Return the directions that snake i may choose, up, down, left, right."""
        length = self.settings["careful_masks"]
        return careful(board, i, length) if length else board.open_directions(i)


class Search:
    """Plans the moves of a team once for all its snakes, see `plan`: the platform asks for one at a time.

    Where mates are controlled by other agents, the plan still counts on its own moves for them.
    """

    def __init__(self) -> None:
        self.situation: Any = None
        self.moves: list[int] = []

    def get_move(self, board: Board) -> int:
        """Return the move of the controlled snake."""
        situation = (board.steps, board.snakes, board.beans)
        if situation != self.situation:
            self.moves = plan(board, POLICY.masked_logits(board, list(range(board.half))).tolist())
            self.situation = situation
        return self.moves[board.controlled]


POLICY = Policy(os.path.join(os.path.dirname(os.path.abspath(__file__)), "weights.npz"))
CLOCK = Clock()
SEARCH = Search()


def my_controller(observation: dict[Any, Any], action_space: Any, is_act_continuous: bool = False) -> list[list[int]]:
    """Return the controlled snake's action in the platform's format: up, down, left, right, one of them 1.

    It is sampled from the softmax by NumPy's global generator, which the platform seeds; or it is the most probable
    one (exported with --greedy), or the one that rollouts choose (--search).
    """
    board = Board.read(observation, POLICY.settings, CLOCK.read(observation, POLICY.settings))
    if POLICY.settings["search"]:
        chosen = SEARCH.get_move(board)
    else:
        logits = POLICY.masked_logits(board, [board.controlled])[0]
        if not POLICY.settings["greedy"]:
            logits = logits + random.gumbel(size=len(logits))  # Gumbel-max: the argmax is a sample from the softmax
        chosen = int(np.argmax(logits))
    return [[int(action == chosen) for action in range(4)]]
