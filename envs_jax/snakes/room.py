"""Check that a board has room for the start of every snake, wherever the earlier ones were drawn."""

import functools

from envs_jax.snakes.board import DOWN, RIGHT, Board
from envs_jax.snakes.rules import START_LENGTH
from envs_jax.snakes.segments import neighbour

_MOST_TRIED = 1_000_000  # draws of the first snakes that are searched
_MOST_LOST = 14  # straight places of three cells that one snake can take from the later ones


def always_room(board: Board, snakes: int) -> bool:
    """Return whether every draw of the first snakes leaves a later one three free cells in a line.

    False where the search would take too long, as for many snakes on few cells.
    """
    height, width = board

    def line(r: int, c: int, direction: int) -> int:
        """Return three cells in a line as bits."""
        cells = (neighbour(board, (r, c), direction, k) for k in range(START_LENGTH))
        return sum(1 << r * width + c for r, c in cells)

    places = {line(r, c, d) for r in range(height) for c in range(width) for d in (DOWN, RIGHT)}

    @functools.cache
    def has_room(occupied: int, more: int) -> bool:
        if has_room.cache_info().currsize > _MOST_TRIED:
            return False
        remaining = [place for place in places if not place & occupied]
        if not remaining:
            return more == 0
        if more == 0 or _MOST_LOST * (more - 1) < len(remaining):
            return True
        return all(has_room(occupied | place, more - 1) for place in remaining)

    return has_room(0, snakes)
