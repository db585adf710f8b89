"""Territory, and directions without dangers, for an agent of the Jidi platform; see `submission`."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrl.integrations.jidi.board import FAR, Board, count_cells
from jaxrl.integrations.jidi.obs_full import ONE, share

# Everything below is copied into exported agents.

NEAR = 5  # moves


def territory(board: Board, i: int) -> list[list[int]]:
    """Five features of snake i by the direction of the first move.

    Room within FAR moves, territory within NEAR and within FAR moves, opponents and mates that can meet it.
    """
    around = board.around(i)
    mates = [k for k in board.others(i) if k < board.half]
    opponents = [k for k in board.others(i) if k >= board.half]
    room = [count_cells(board.flood(cell, FAR)[-1]) for cell in around]
    territories = list(claim_cells(board, i))
    return [
        [share(count, 100) for count in room],
        [share(count_cells(cells), 20) for cells in territories[NEAR - 1]],
        [share(count_cells(cells), 100) for cells in territories[FAR - 1]],
        [ONE * met for met in _meet(board, i, opponents)],
        [ONE * met for met in _meet(board, i, mates)],
    ]


def claim_cells(board: Board, i: int) -> Iterator[list[int]]:
    """Yield for moves 1 .. FAR the cells that snake i reaches before any other, by the direction of the first move.

    A cell reached in the same move is nobody's.
    """
    heads = sum(board.bit(board.snakes[k][0]) for k in board.others(i) if board.snakes[k])
    others = board.spread(heads) & board.free[1]
    owned = [board.bit(cell) & board.free[1] & ~others for cell in board.around(i)]
    yield owned
    for free in board.free[2:]:
        taken = owned[0] | owned[1] | owned[2] | owned[3]
        others |= board.spread(others) & free & ~taken
        owned = [cells and cells | board.spread(cells) & free & ~others for cells in owned]
        yield owned


def _meet(board: Board, i: int, snakes: list[int]) -> list[bool]:
    """Return whether one of the snakes can enter the cell up, down, left, right of snake i."""
    entered = {cell for k in snakes if board.snakes[k] for cell in board.around(k)}
    return [cell in entered for cell in board.around(i)]


def _survival(board: Board, i: int) -> list[int]:
    """The move in which snake i dies unless another dies before, by the direction of the first move; else FAR.

    It is the first move k in which it has reached fewer than k cells: it does not leave any of them before, if it is
    as long as that.
    """
    moves = min(FAR, len(board.snakes[i]))
    survival = []
    for cell in board.around(i):
        sets = board.flood(cell, moves)
        survival.append(next((k for k, cells in enumerate(sets, 1) if count_cells(cells) < k), FAR))
    return survival


def careful(board: Board, i: int, length: int) -> list[bool]:
    """The open directions of snake i without dangers, each of which closes directions only while others stay open.

    Dangers are: dying sooner than after other directions; a cell that a mate of a lower index can enter; a cell that
    an opponent can enter, for snakes of at least this length.
    """
    is_open = board.open_directions(i)
    if not board.snakes[i]:
        return is_open
    survival = _survival(board, i)
    longest = max(survival[d] for d in range(4) if is_open[d])
    chosen = [d for d in range(4) if is_open[d] and survival[d] == longest]
    dangers = [_meet(board, i, list(range(i)))]
    if len(board.snakes[i]) >= length:
        dangers.append(_meet(board, i, list(range(board.half, len(board.snakes)))))
    for danger in dangers:
        chosen = [d for d in chosen if not danger[d]] or chosen
    return [d in chosen for d in range(4)]
