"""Games of `envs_jax.snakes` from explicit lists of cells, as in the original game engine; inverse of `to_segments`."""

from collections.abc import Sequence

import numpy as np

from envs_jax.snakes.board import NOWHERE, Board
from envs_jax.snakes.rules import Game
from envs_jax.snakes.segments import Cell, neighbour


def _way(board: Board, start: Cell, end: Cell, steps: int) -> int | None:
    """Return the direction that leads from start to end in so many steps."""
    return next((d for d in range(4) if neighbour(board, start, d, steps) == end), None)


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

    Raises ValueError: cells off the board or taken twice, or a body that no play can reach.
    """
    occupied = [tuple(cell) for snake in (*segments, beans) for cell in snake]
    if any(not (0 <= r < board.height and 0 <= c < board.width) for r, c in occupied):
        raise ValueError(f"snakes: a cell lies off the board of {board.height} rows and {board.width} columns")
    if len(set(occupied)) < len(occupied):
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
        "segment_direction": toward,
        "head": head,
        "tail": tail,
        "length": np.array([len(snake) for snake in segments], np.int32),
        "direction": np.array(directions, np.int32),
        "tail_gap": split,
        "beans": np.array(places, np.int32),
        "steps": np.array(steps, np.int32),
    }
    return Game(**arrays)  # type: ignore[arg-type]
