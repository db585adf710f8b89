"""The observation `obs_full` for an agent of the Jidi platform; see `submission`."""

from __future__ import annotations

import numpy as np

from jaxrl.integrations.jidi.board import MOVES, Board

# Everything below is copied into exported agents.

# As in envs_jax/snakes/obs_full.py, where STEPS is MOVES.
RADIUS = 3
REACH = 5
STEPS = 10
ONE = 100
UPRIGHT = [0, 1, 2, 3]  # the frame of the board itself


def obs_full(board: Board, i: int) -> list[float]:
    """A crop around the head of snake i, then features of the snake, its moves, beans, other snakes and room."""
    heading = [ONE * side for side in board.heading(i)]
    rows = max(1, board.height // 2)
    columns = max(1, board.width // 2)
    return [*crop(board, i, UPRIGHT), *heading, *features(board, i, UPRIGHT, rows, columns)]


# A frame consists of the four directions of the board that lead up, down, left and right in the snake's view.


def crop(board: Board, i: int, frame: list[int]) -> list[float]:
    """The cells around the head of snake i: bodies, heads of the own team, heads of the other, beans."""
    head = board.snakes[i][0]
    down = MOVES[frame[1]]
    right = MOVES[frame[3]]
    across = np.arange(-RADIUS, RADIUS + 1)
    along = across[:, None]
    rows = (head[0] + along * down[0] + across * right[0]) % board.height
    columns = (head[1] + along * down[1] + across * right[1]) % board.width
    return _planes(board)[:, rows, columns].ravel().tolist()


def features(board: Board, i: int, frame: list[int], rows: int, columns: int) -> list[int]:
    """Return `obs_full` after crop and direction, in hundredths; offsets in shares of so many rows and columns."""
    blocked = board.blocked(i)
    beans = _bean_features(board, i, frame, rows, columns)
    others = [x for k in board.others(i) for x in _other(board, i, k, frame, rows, columns)]
    room = board.count_cells(board.flood(i, STEPS, REACH)[-1])
    room_shares = [share(room[d], most) for most in (20, 100) for d in frame]
    return [*(ONE * blocked[d] for d in frame), share(len(board.snakes[i]), 20), *beans, *others, *room_shares]


def share(value: float, most: int) -> int:
    """`value` in hundredths of `most`, clipped to -100 .. 100; rounded in float32 as in training."""
    hundredths = np.float32(value) * np.float32(ONE / most)
    return max(-ONE, min(ONE, round(float(hundredths))))


def turn(offset: tuple[int, int], frame: list[int]) -> tuple[int, int]:
    """Rows and columns of an offset in a frame."""
    down = MOVES[frame[1]]
    right = MOVES[frame[3]]
    return offset[0] * down[0] + offset[1] * down[1], offset[0] * right[0] + offset[1] * right[1]


def count_steps(offset: tuple[int, int]) -> int:
    """Steps of an offset."""
    return abs(offset[0]) + abs(offset[1])


def _planes(board: Board) -> np.ndarray:
    """[4, height, width]: moves until a cell is free, heads of the own team, heads of the other, beans."""
    planes = np.zeros((4, board.height, board.width))
    for cell, moves in board.occupied.items():
        planes[0][cell] = min(moves, REACH + 1) * ONE // (REACH + 1)
    for k, body in enumerate(board.snakes):
        if body:
            planes[1 if k < board.half else 2][body[0]] = ONE
    for bean in board.beans:
        planes[3][bean] = ONE
    return planes


def _other(board: Board, i: int, k: int, frame: list[int], rows: int, columns: int) -> list[int]:
    """Rows, columns and steps to the head of snake k, its length, mate or opponent."""
    if not board.snakes[k]:
        return [0] * 5
    offset = board.difference(board.snakes[k][0], board.snakes[i][0])
    length = share(len(board.snakes[k]), 20)
    return [*_place(offset, frame, rows, columns), length, ONE if k < board.half else -ONE]


def _place(offset: tuple[int, int], frame: list[int], rows: int, columns: int) -> list[int]:
    down, right = turn(offset, frame)
    return [share(down, rows), share(right, columns), share(count_steps(offset), rows + columns)]


def _bean_features(board: Board, i: int, frame: list[int], rows: int, columns: int) -> list[int]:
    """Five numbers for each bean, nearest by steps first: rows, columns, steps, lead over all others, over mates."""
    most = rows + columns
    beans = []
    for bean in board.beans:
        offsets = [board.difference(bean, body[0]) if body else (rows, columns) for body in board.snakes]
        steps = [count_steps(offset) for offset in offsets]
        leads = []
        for group in (len(steps), board.half):
            opponent = min([step for k, step in enumerate(steps[:group]) if k != i], default=most)
            leads.append(max(-4, min(4, min(opponent, most) - steps[i])) * ONE // 4)
        beans.append((steps[i], [*_place(offsets[i], frame, rows, columns), *leads]))
    beans.sort(key=lambda bean: bean[0])  # stable: ties stay in list order
    return [x for _, values in beans for x in values] + [0] * 5 * (board.max_beans - len(beans))
