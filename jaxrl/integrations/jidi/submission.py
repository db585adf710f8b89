"""A snakes agent for the Jidi platform, exported by jaxrl. The platform calls `my_controller`.

It needs only Python 3.7 and NumPy; weights and settings are in weights.npz next to this file. Observations and masks
are the same as in jaxrl's envs_jax/snakes, where observation.py and obs_full.py explain every value. They are written
again here only because the platform has no JAX and passes lists of cells; jaxrl's tests check that both agree.

The platform does not say where a snake heads: `last_direction` is one step old. Here a snake heads from its second
segment to its head, which is wrong only right after some respawns across the edge of the board.
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

from jaxrl.integrations.numpy_networks import network  # copied in its place by the export

MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # actions: up, down, left, right
RADIUS, REACH, STEPS, ONE = 3, 5, 10, 100  # RADIUS, REACH, MOVES and ONE of obs_full.py


class Board:
    """The game from the side of the controlled snake's team: its own snakes come first.

    Attributes:
        height, width: rows and columns.
        beans: cells (row, column) in the platform's order.
        snakes: cells of each snake, head first; none for a snake that could not respawn.
        half: number of snakes of a team.
        controlled: which of them is controlled.
        occupied: the cells of bodies, and after how many moves they are free, one later where the snake may eat
            because a bean lies next to its head; REACH + 1 for longer.
    """

    def __init__(self, observation: dict[Any, Any], settings: dict[str, Any]) -> None:
        self.height = observation["board_height"]
        self.width = observation["board_width"]
        self.max_beans = settings["beans"]
        self.beans = [(int(r), int(c)) for r, c in observation[1]]
        snakes = [[(int(r), int(c)) for r, c in observation[k + 2]] for k in range(settings["snakes"])]
        self.half = len(snakes) // 2
        side, self.controlled = divmod(observation["controlled_snake_index"] - 2, self.half)
        self.snakes = snakes[self.half :] + snakes[: self.half] if side else snakes
        last = REACH + 1
        self.occupied = {}
        for body in snakes:
            hungry = any(self.neighbour(cell, move) in self.beans for cell in body[:1] for move in MOVES)
            self.occupied.update({cell: min(k + hungry, last) for k, cell in enumerate(reversed(body), 1)})

    def neighbour(self, cell: tuple[int, int], move: tuple[int, int]) -> tuple[int, int]:
        """The neighbour of a cell on the torus."""
        return (cell[0] + move[0]) % self.height, (cell[1] + move[1]) % self.width

    def difference(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the short way from b to a."""
        return _wrap_offset(a[0] - b[0], self.height), _wrap_offset(a[1] - b[1], self.width)

    def others(self, i: int) -> list[int]:
        """All snakes but i."""
        return [k for k in range(len(self.snakes)) if k != i]

    def heading(self, i: int) -> list[bool]:
        """Return whether snake i heads up, down, left, right."""
        moved = self.difference(self.snakes[i][0], self.snakes[i][1])
        return [moved == move for move in MOVES]

    def blocked(self, i: int) -> list[bool]:
        """Return whether a body lies up, down, left, right of snake i, ignoring tails that surely move (its own)."""
        return [cell != self.snakes[i][-1] and self.occupied.get(cell, 0) > 1 for cell in self._around(i)]

    def _around(self, i: int) -> list[tuple[int, int]]:
        return [self.neighbour(self.snakes[i][0], move) for move in MOVES]

    def open_directions(self, i: int) -> list[bool]:
        """Directions neither backwards nor blocked; if none is left, towards tails; else all but backwards."""
        if not self.snakes[i]:
            return [True] * 4
        heading = self.heading(i)
        blocked = self.blocked(i)
        tails = [body[-1] for body in self.snakes if body]
        onward = [not heading[d ^ 1] for d in range(4)]
        free = [onward[d] and not blocked[d] for d in range(4)]
        risky = [onward[d] and cell in tails for d, cell in enumerate(self._around(i))]
        return next(choice for choice in (free, risky, onward) if any(choice))


def _wrap_offset(x: int, size: int) -> int:
    """Wrap an offset to the shorter way around a torus of `size` cells; exactly half keeps its sign."""
    if abs(x) <= size // 2:
        return x
    return x - size if x > 0 else x + size


# Observations of snake i, lists of numbers


def obs26(board: Board, i: int) -> list[float]:
    """26 values, for the default numbers of snakes and beans."""
    return [*_place_and_codes(board, i), *_beans(board), *_heads(board, board.others(i))]


def obs30(board: Board, i: int) -> list[float]:
    """30 values."""
    others = board.others(i)[:2]
    threats = [_threat(board, i, k) / 3 for k in others]
    nearest = _nearest_beans(board, i, 2 * board.width)
    return [*_place_and_codes(board, i), *nearest, *threats, *_beans(board), 0, 0, *_heads(board, others)]


def obs35(board: Board, i: int) -> list[float]:
    """35 values."""
    length = len(board.snakes[i])
    nearest = _nearest_beans(board, i, 0)
    threats = [_threat(board, i, k) / length for k in (3, 4)]
    return [*obs26(board, i)[:16], *nearest, length / 20, *_heads(board, board.others(i)), *threats]


def _place_and_codes(board: Board, i: int) -> list[float]:
    """Own head; contents of the cells up, down, left and right: 0 nothing, 1 a bean, k + 2 snake k."""
    head = board.snakes[i][0]
    codes = dict.fromkeys(board.beans, 1)
    for k, body in enumerate(board.snakes):
        codes.update(dict.fromkeys(body, k + 2))
    return [*head, *(codes.get(board.neighbour(head, move), 0) for move in MOVES)]


def _beans(board: Board) -> list[int]:
    missing = board.max_beans - len(board.beans)
    return [x for bean in board.beans for x in bean] + [0, 0] * missing


def _heads(board: Board, snakes: list[int]) -> list[float]:
    return [x for k in snakes for x in (board.snakes[k][0] if board.snakes[k] else (0, 0))]


def _nearest_beans(board: Board, i: int, missing: float) -> list[float]:
    """Columns, rows and distance to the two nearest beans, ties in list order."""
    offsets = [board.difference(bean, board.snakes[i][0]) for bean in board.beans]
    offsets.sort(key=lambda way: way[0] ** 2 + way[1] ** 2)
    nearest = [(columns, rows, np.hypot(rows, columns)) for rows, columns in offsets[:2]]
    return [x for bean in [*nearest, (0, 0, missing), (0, 0, missing)][:2] for x in bean]


def _threat(board: Board, i: int, k: int) -> float:
    """Length of snake k over the distance of the heads."""
    if not board.snakes[k]:
        return 0.0
    return len(board.snakes[k]) / (np.hypot(*board.difference(board.snakes[k][0], board.snakes[i][0])) + 1e-8 + 1)


def obs_full(board: Board, i: int) -> list[float]:
    """A crop around the head, then features of the snake, its moves, beans, other snakes and room; in hundredths."""
    head = board.snakes[i][0]
    around = np.arange(-RADIUS, RADIUS + 1)
    crop = _planes(board)[:, ((head[0] + around) % board.height)[:, None], (head[1] + around) % board.width]
    sides = [ONE * side for side in (*board.heading(i), *board.blocked(i))]
    others = [x for k in board.others(i) for x in _other(board, i, k)]
    cells = _room(board, i)
    room = [_share(count, most) for most in (20, 100) for count in cells]
    length = _share(len(board.snakes[i]), 20)
    return [*crop.ravel(), *sides, length, *_bean_features(board, i), *others, *room]


def _planes(board: Board) -> np.ndarray:
    """[4, height, width]: moves until a cell is free, heads of the own team, heads of the other, beans."""
    planes = np.zeros((4, board.height, board.width))
    for cell, moves in board.occupied.items():
        planes[0][cell] = moves * ONE // (REACH + 1)
    for k, body in enumerate(board.snakes):
        if body:
            planes[1 if k < board.half else 2][body[0]] = ONE
    for bean in board.beans:
        planes[3][bean] = ONE
    return planes


def _share(value: float, most: int) -> int:
    """`value` in hundredths of `most`, clipped to -100 .. 100."""
    return max(-ONE, min(ONE, round(value * ONE / most)))


def _halves(board: Board) -> tuple[int, int]:
    return max(1, board.height // 2), max(1, board.width // 2)


def _other(board: Board, i: int, k: int) -> list[int]:
    """Rows, columns and steps to the head of snake k, its length, mate or opponent."""
    if not board.snakes[k]:
        return [0] * 5
    rows, columns = board.difference(board.snakes[k][0], board.snakes[i][0])
    half_h, half_w = _halves(board)
    offset = [_share(rows, half_h), _share(columns, half_w), _share(abs(rows) + abs(columns), half_h + half_w)]
    return [*offset, _share(len(board.snakes[k]), 20), ONE if k < board.half else -ONE]


def _bean_features(board: Board, i: int) -> list[int]:
    """Five numbers for each bean, nearest by steps first: rows, columns, steps, lead over all others, over mates."""
    half_h, half_w = _halves(board)
    most = half_h + half_w
    beans = []
    for bean in board.beans:
        offsets = [board.difference(bean, body[0]) if body else (half_h, half_w) for body in board.snakes]
        steps = [abs(rows) + abs(columns) for rows, columns in offsets]
        leads = []
        for group in (len(steps), board.half):
            opponent = min([step for k, step in enumerate(steps[:group]) if k != i], default=most)
            leads.append(max(-4, min(4, min(opponent, most) - steps[i])) * ONE // 4)
        offset = [_share(offsets[i][0], half_h), _share(offsets[i][1], half_w), _share(steps[i], most)]
        beans.append((steps[i], [*offset, *leads]))
    beans.sort(key=lambda bean: bean[0])  # stable: ties stay in list order
    return [x for _, values in beans for x in values] + [0] * 5 * (board.max_beans - len(beans))


def _room(board: Board, i: int) -> list[int]:
    """Count the cells that snake i can reach in 1 to STEPS moves, for each first move up, down, left, right.

    A set of cells is an integer with one bit per cell, row by row.
    """
    width = board.width
    size = board.height * board.width
    first = sum(1 << r * width for r in range(board.height))  # columns
    last = first << width - 1
    leaving = [0] * (REACH + 2)  # bodies' cells by the number of moves until they are free
    for (r, c), moves in board.occupied.items():
        leaving[moves] |= 1 << r * width + c
    free = [(1 << size) - 1 - sum(leaving[min(k, REACH) + 1 :]) for k in range(1, STEPS + 1)]
    counts = []
    for move in MOVES:
        r, c = board.neighbour(board.snakes[i][0], move)
        cells = (1 << r * width + c) & free[0]
        for now in free[1:]:
            rows = cells << width | cells >> size - width | cells >> width | cells << size - width
            right = (cells & ~last) << 1 | (cells & last) >> width - 1
            left = (cells & ~first) >> 1 | (cells & first) << width - 1
            cells = (cells | rows | right | left) & now
        counts.append(bin(cells).count("1"))
    return counts


LAYOUTS = {"obs26": obs26, "obs30": obs30, "obs35": obs35, "obs_full": obs_full}


# The network


class Policy:
    """The content of the weights file: `settings` and the arrays of the actor."""

    def __init__(self, path: str) -> None:
        with np.load(path, allow_pickle=False) as file:
            self.weights = {name: file[name] for name in file.files if name != "settings"}
            self.settings: dict[str, Any] = json.loads(str(file["settings"]))

    def team(self, board: Board) -> np.ndarray:
        """Return float32[A, F], the observation of each snake of the team; zeros for one that could not respawn."""
        see = LAYOUTS[self.settings["observation"]]
        rows = np.zeros((board.half, self.settings["inputs"]), np.float32)
        for i in range(board.half):
            if board.snakes[i]:
                rows[i] = see(board, i)
        return rows

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Return float32[A, 4] of observations float32[A, F], without masks."""
        return network(self.weights, self.settings, x)


POLICY = Policy(os.path.join(os.path.dirname(os.path.abspath(__file__)), "weights.npz"))


def my_controller(observation: dict[Any, Any], action_space: Any, is_act_continuous: bool = False) -> list[list[int]]:
    """Return the controlled snake's action in the platform's format: up, down, left, right, one of them 1.

    It is sampled from the softmax by NumPy's global generator, which the platform seeds, or (exported with --greedy)
    it is the most probable one.
    """
    board = Board(observation, POLICY.settings)
    logits = POLICY.logits(POLICY.team(board))[board.controlled]
    if POLICY.settings["masking"]:
        logits = np.where(board.open_directions(board.controlled), logits, -np.inf)
    if not POLICY.settings["greedy"]:
        logits = logits + random.gumbel(size=len(logits))  # Gumbel-max: the argmax is a sample from the softmax
    chosen = int(np.argmax(logits))
    return [[int(action == chosen) for action in range(len(logits))]]
