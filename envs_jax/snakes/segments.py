"""Games as explicit lists of cells, as in the original game engine. NumPy, one game at a time."""

import numpy as np

from envs_jax.snakes.board import COLUMN_STEP, NOWHERE, ROW_STEP, Board
from envs_jax.snakes.rules import Game

Cell = tuple[int, int]


def neighbour(board: Board, cell: Cell, direction: int, steps: int = 1) -> Cell:
    """Return the cell so many steps away in a direction."""
    r = cell[0] + steps * ROW_STEP[direction]
    c = cell[1] + steps * COLUMN_STEP[direction]
    return r % board.height, c % board.width


def to_segments(board: Board, game: Game) -> tuple[list[list[Cell]], list[int], list[Cell]]:
    """(cells of each snake, head first; stored directions; cells of the beans) of one game without batch axis."""
    segment_direction = np.asarray(game.segment_direction)
    tail = np.asarray(game.tail)
    length = np.asarray(game.length)
    tail_gap = np.asarray(game.tail_gap)
    snakes = []
    for i, count in enumerate(length):
        cells: list[Cell] = []
        cell = (int(tail[i]) >> 5, int(tail[i]) & 31)
        for k in range(int(count)):
            cells.append(cell)
            low, high = (int(segment_direction[cell[0], plane]) >> cell[1] & 1 for plane in (0, 1))
            cell = neighbour(board, cell, low + 2 * high, 2 if tail_gap[i] and k == 0 else 1)
        snakes.append(cells[::-1])
    beans = [(int(bean) >> 5, int(bean) & 31) for bean in np.asarray(game.beans) if bean != NOWHERE]
    return snakes, [int(d) for d in np.asarray(game.direction)], beans
