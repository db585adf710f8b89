"""The published observations for an agent of the Jidi platform; see `submission`. Lists of numbers of snake i."""

from __future__ import annotations

import numpy as np

from jaxrl.integrations.jidi.board import MOVES, Board

# Everything below is copied into exported agents.


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
