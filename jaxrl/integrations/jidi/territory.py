"""Territory, and directions without dangers, for an agent of the Jidi platform; see `submission`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxrl.integrations.jidi.board import FAR, Board
from jaxrl.integrations.jidi.obs_full import ONE, share

# Everything below is copied into exported agents.

NEAR = 5  # moves


def territory(board: Board, i: int) -> list[list[int]]:
    """Five features of snake i by the direction of the first move.

    Room within FAR moves, territory within NEAR and within FAR moves, opponents and mates that can meet it.
    """
    mates = [k for k in board.others(i) if k < board.half]
    opponents = [k for k in board.others(i) if k >= board.half]
    territories = list(claim_cells(board, i))
    return [
        [share(count, 100) for count in board.count_cells(board.flood(i, FAR)[-1])],
        [share(count, 20) for count in board.count_cells(territories[NEAR - 1])],
        [share(count, 100) for count in board.count_cells(territories[FAR - 1])],
        [ONE * met for met in _meet(board, i, opponents)],
        [ONE * met for met in _meet(board, i, mates)],
    ]


def claim_cells(board: Board, i: int, longer: Sequence[int] = ()) -> Iterator[int]:
    """Yield, for k = 1 .. FAR moves, the cells that snake i reaches before any other, packed by the first direction.

    A cell reached in the same move is nobody's, but these longer snakes leave it to snake i.
    """
    cell_count = board.cell_count
    free = board.free[1]
    heads = {k: board.bit(board.snakes[k][0]) for k in board.others(i) if board.snakes[k]}
    others = board.spread(sum(heads[k] for k in heads if k not in longer)) & free
    owned = board.first_cells(i) & ~board.repeat(others)
    own_cells = board.unite(owned)
    longer_cells = board.spread(sum(heads[k] for k in longer)) & free & ~own_cells
    yield owned
    for free in board.free[2:]:
        reached = board.spread(owned | others << 4 * cell_count | longer_cells << 5 * cell_count)
        others |= reached >> 4 * cell_count & free & ~(own_cells | longer_cells)
        owned |= reached & board.repeat(free & ~(others | longer_cells))
        own_cells = board.unite(owned)
        longer_cells |= reached >> 5 * cell_count & free & ~own_cells
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
    counts = [board.count_cells(cells) for cells in board.flood(i, moves)]
    return [next((k for k, count in enumerate(counts, 1) if count[d] < k), FAR) for d in range(4)]


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
