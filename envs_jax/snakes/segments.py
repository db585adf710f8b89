"""Games from and to explicit lists of cells, as in the original game engine. NumPy, one game at a time."""

from collections.abc import Sequence

import numpy as np

from envs_jax.snakes.board import COLUMN_STEP, NOWHERE, ROW_STEP, Board
from envs_jax.snakes.rules import Game

Cell = tuple[int, int]


def _beside(board: Board, cell: Cell, direction: int, steps: int = 1) -> Cell:
    r, c = cell[0] + steps * ROW_STEP[direction], cell[1] + steps * COLUMN_STEP[direction]
    return r % board.height, c % board.width


def _way(board: Board, start: Cell, end: Cell, steps: int) -> int | None:
    """Return the direction that leads from start to end in so many steps."""
    return next((d for d in range(4) if _beside(board, start, d, steps) == end), None)


def from_segments(
    board: Board,
    segments: Sequence[Sequence[Cell]],
    directions: Sequence[int],
    beans: Sequence[Cell],
    max_beans: int,
    steps: int = 0,
) -> Game:
    """Return a game (NumPy arrays, no batch axis) from lists of cells (row, column).

    Args:
        board: its size.
        segments: cells of each snake, head first.
        directions: stored direction of each snake.
        beans: cells of the beans in their order.
        max_beans: K, places for beans.
        steps: steps made.

    Raises:
        ValueError: cells off the board or taken twice, or a body that no play can reach.
    """
    taken = [tuple(cell) for snake in (*segments, beans) for cell in snake]
    if any(not (0 <= r < board.height and 0 <= c < board.width) for r, c in taken):
        raise ValueError(f"snakes: a cell lies off the board of {board.height} rows and {board.width} columns")
    if len(set(taken)) < len(taken):
        raise ValueError("snakes: two snakes or beans lie on one cell; give every cell once")
    if len(beans) > max_beans:
        raise ValueError(f"snakes: {len(beans)} beans are given, but the board keeps {max_beans}")
    n = len(segments)
    body = np.zeros((board.height, n), np.uint32)
    toward = np.zeros((board.height, 2), np.uint32)
    head, tail = np.zeros((2, n), np.int32)
    split = np.zeros(n, bool)
    for i, snake in enumerate(segments):
        if not snake:
            continue
        cells = [(int(r), int(c)) for r, c in snake]
        head[i], tail[i] = (32 * r + c for r, c in (cells[0], cells[-1]))
        for r, c in cells:
            body[r, i] |= np.uint32(1 << c)
        for k in range(1, len(cells)):
            (r, c), ahead = cells[k], cells[k - 1]
            way = _way(board, (r, c), ahead, 1)
            if way is None and k == len(cells) - 1:
                way, split[i] = _way(board, (r, c), ahead, 2), True
            if way is None:
                raise ValueError(f"snakes: cells {k - 1} and {k} of snake {i} are not adjacent")
            for plane in (0, 1):
                toward[r, plane] |= np.uint32((way >> plane & 1) << c)
    places = [32 * r + c for r, c in beans] + [NOWHERE] * (max_beans - len(beans))
    arrays = {
        "body": body,
        "toward": toward,
        "head": head,
        "tail": tail,
        "length": np.array([len(snake) for snake in segments], np.int32),
        "direction": np.array(directions, np.int32),
        "split": split,
        "beans": np.array(places, np.int32),
        "steps": np.array(steps, np.int32),
    }
    return Game(**arrays)  # type: ignore[arg-type]


def to_segments(board: Board, game: Game) -> tuple[list[list[Cell]], list[int], list[Cell]]:
    """(cells of each snake, head first; stored directions; cells of the beans) of one game without batch axis."""
    toward, tail = np.asarray(game.toward), np.asarray(game.tail)
    length, split = np.asarray(game.length), np.asarray(game.split)
    snakes = []
    for i, count in enumerate(length):
        cells: list[Cell] = []
        cell = (int(tail[i]) >> 5, int(tail[i]) & 31)
        for k in range(int(count)):
            cells.append(cell)
            low, high = (int(toward[cell[0], plane]) >> cell[1] & 1 for plane in (0, 1))
            cell = _beside(board, cell, low + 2 * high, 2 if split[i] and k == 0 else 1)
        snakes.append(cells[::-1])
    beans = [(int(bean) >> 5, int(bean) & 31) for bean in np.asarray(game.beans) if bean != NOWHERE]
    return snakes, [int(d) for d in np.asarray(game.direction)], beans
