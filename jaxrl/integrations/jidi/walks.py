"""The search of an exported agent at play time: walks that a snake can make; see `submission`."""

from __future__ import annotations

from jaxrl.integrations.jidi.board import MOVES, Board

# Everything below is copied into exported agents.

MOST_CELLS = 300  # tried per direction; a walk that takes more to find is taken to exist


def longest_walks(board: Board, i: int, directions: list[int]) -> list[int]:
    """Return the directions after which snake i has the longest walk.

    A walk visits no cell twice and enters cells only when bodies have left them; other snakes stay where they are but
    for their tails. It is as long as the snake and two more moves if it comes to a cell that the snake's own tail has
    left, as the snake can follow its tail from there on.
    """
    if len(directions) < 2:
        return directions
    own = set(board.snakes[i])
    most = max(len(own) + 2, 12)
    lengths = {d: _Walk(board, own, most).longest(board.around(i)[d]) for d in directions}
    return [d for d in directions if lengths[d] == max(lengths.values())]


class _Walk:
    """A depth-first search, first to cells with few ways on."""

    def __init__(self, board: Board, own: set[tuple[int, int]], most: int) -> None:
        self.board = board
        self.own = own
        self.most = most
        self.path: set[tuple[int, int]] = set()
        self.tried = 0
        self.best = 0

    def longest(self, cell: tuple[int, int]) -> int:
        """Return the length of the longest walk that begins with this open cell, at most `most`."""
        self._extend(cell, 1)
        return self.best

    def _is_free(self, cell: tuple[int, int], move: int) -> bool:
        return self.board.occupied.get(cell, 0) <= move

    def _ways_on(self, cell: tuple[int, int], move: int) -> list[tuple[int, int]]:
        cells = [self.board.neighbour(cell, step) for step in MOVES]
        return [onward for onward in cells if onward not in self.path and self._is_free(onward, move)]

    def _extend(self, cell: tuple[int, int], move: int) -> bool:
        """Enter a cell in a move; whether the search is over."""
        self.tried += 1
        self.best = max(self.best, move)
        if move >= self.most or cell in self.own or self.tried > MOST_CELLS:
            self.best = self.most
            return True
        self.path.add(cell)
        onward = sorted(self._ways_on(cell, move + 1), key=lambda way: len(self._ways_on(way, move + 2)))
        if any(self._extend(way, move + 1) for way in onward):
            return True
        self.path.remove(cell)
        return False
