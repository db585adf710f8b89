"""The board as an agent of the Jidi platform sees it; see `submission`."""

from __future__ import annotations

from typing import Any

# Everything below is copied into exported agents.

MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # actions: up, down, left, right
MOST_SETS = 6  # packed into one integer: one for each direction, and two for other snakes
FAR = 20  # moves ahead that sets of free cells are known for: FAR of envs_jax/snakes/territory.py


class Board:
    """The game from the side of the controlled snake's team: its own snakes come first.

    A set of cells is an integer with one bit per cell, row by row. Up to MOST_SETS sets can be packed into
    one integer, set k at bit k x `cell_count`: one for each direction, and two more that `claim_cells` needs.

    Attributes:
        height, width: rows and columns.
        steps, max_steps: steps made, and steps of a whole game.
        max_beans: most beans at a time.
        cell_count: cells of the board, and bits of a set.
        beans: cells (row, column) in the platform's order.
        snakes: cells of each snake, head first; none for a snake that could not respawn.
        half: number of snakes of a team.
        controlled: which of them is controlled.
        occupied: the cells of bodies, and after how many moves they are free, one later where the snake may eat
            because a bean lies next to its head.
        free: for k = 0 .. FAR the set of the cells that are free after k moves.
    """

    def __init__(
        self,
        snakes: list[list[tuple[int, int]]],
        beans: list[tuple[int, int]],
        steps: int,
        controlled: int,
        rules: tuple[int, int, int, int],
    ) -> None:
        self._rules = rules
        self.height, self.width, self.max_beans, self.max_steps = rules
        self.snakes = snakes
        self.beans = beans
        self.steps = steps
        self.controlled = controlled
        self.half = len(snakes) // 2
        self.occupied = {}
        for body in snakes:
            hungry = any(self.neighbour(cell, move) in beans for cell in body[:1] for move in MOVES)
            self.occupied.update({cell: k + hungry for k, cell in enumerate(reversed(body), 1)})
        self.cell_count = self.height * self.width
        starts = [1 << k * self.cell_count for k in range(MOST_SETS)]
        self._direction_starts = sum(starts[:4])
        row = (1 << self.width) - 1
        column = sum(1 << r * self.width for r in range(self.height))
        edges = (row, row << self.cell_count - self.width, column, column << self.width - 1)
        self._edges = [edge * sum(starts) for edge in edges]
        self._not_edges = [(1 << MOST_SETS * self.cell_count) - 1 ^ edge for edge in self._edges]
        self.free = self._find_free()

    @classmethod
    def read(cls, observation: dict[Any, Any], settings: dict[str, Any], steps: int) -> Board:
        """Read the platform's observation of a game after this many steps."""
        bodies = [[(int(r), int(c)) for r, c in observation[k + 2]] for k in range(settings["snakes"])]
        beans = [(int(r), int(c)) for r, c in observation[1]]
        half = len(bodies) // 2
        side, controlled = divmod(observation["controlled_snake_index"] - 2, half)
        snakes = bodies[half:] + bodies[:half] if side else bodies
        rules = observation["board_height"], observation["board_width"], settings["beans"], settings["max_steps"]
        return cls(snakes, beans, steps, controlled, rules)

    def _find_free(self) -> list[int]:
        leaving = [0] * (FAR + 1)
        free = (1 << self.cell_count) - 1
        for cell, moves in self.occupied.items():
            free ^= self.bit(cell)
            if moves <= FAR:
                leaving[moves] |= self.bit(cell)
        sets = []
        for cells in leaving:
            free |= cells
            sets.append(free)
        return sets

    def move(self, directions: list[int]) -> tuple[Board, list[int]]:
        """The board after a move of all snakes, and what each gains: 1 for a bean, 2 - length for a death.

        A death costs one more than in the game's score, so that it has a price at length 3, too. Nothing is drawn:
        snakes that die stay away, no new beans appear, and a move backwards is a death. Of snakes that meet on a bean
        the first here eats it; on the second side the game has another order.
        """
        heads = [self.around(k)[d] if self.snakes[k] else None for k, d in enumerate(directions)]
        ate = [head in self.beans and heads.index(head) == k for k, head in enumerate(heads)]
        without_tails = [body if ate[k] else body[:-1] for k, body in enumerate(self.snakes)]
        cells = {cell for body in without_tails for cell in body}
        snakes: list[list[tuple[int, int]]] = [[] for _ in heads]
        gained = [0] * len(heads)
        for k, head in enumerate(heads):
            if head is not None:
                dies = head in cells or heads.count(head) > 1
                snakes[k] = [] if dies else [head, *without_tails[k]]
                gained[k] = (2 if dies else len(snakes[k])) - len(self.snakes[k])
        beans = [bean for bean in self.beans if bean not in heads]
        return Board(snakes, beans, self.steps + 1, self.controlled, self._rules), gained

    # Cells

    def neighbour(self, cell: tuple[int, int], move: tuple[int, int]) -> tuple[int, int]:
        """The neighbour of a cell on the torus."""
        return (cell[0] + move[0]) % self.height, (cell[1] + move[1]) % self.width

    def difference(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the short way from b to a."""
        return _wrap_offset(a[0] - b[0], self.height), _wrap_offset(a[1] - b[1], self.width)

    # Sets of cells

    def bit(self, cell: tuple[int, int]) -> int:
        """The set of one cell."""
        return 1 << cell[0] * self.width + cell[1]

    def repeat(self, cells: int) -> int:
        """The same set for each direction, packed."""
        return cells * self._direction_starts

    def split(self, packed: int) -> list[int]:
        """The packed sets of the four directions."""
        return [packed >> d * self.cell_count & (1 << self.cell_count) - 1 for d in range(4)]

    def unite(self, packed: int) -> int:
        """The union of the packed sets of the four directions, in the lowest `cell_count` bits; ignore the others."""
        cell_count = self.cell_count
        return packed | packed >> cell_count | packed >> 2 * cell_count | packed >> 3 * cell_count

    def count_cells(self, packed: int) -> list[int]:
        """The number of cells for each direction."""
        return [bin(cells).count("1") for cells in self.split(packed)]

    def spread(self, cells: int) -> int:
        """The cells of a set and all their neighbours, of packed sets for each."""
        width = self.width
        wrap = self.cell_count - width
        top, bottom, left, right = self._edges
        not_top, not_bottom, not_left, not_right = self._not_edges
        up = (cells & not_top) >> width | (cells & top) << wrap
        down = (cells & not_bottom) << width | (cells & bottom) >> wrap
        to_left = (cells & not_left) >> 1 | (cells & left) << width - 1
        to_right = (cells & not_right) << 1 | (cells & right) >> width - 1
        return cells | up | down | to_left | to_right

    # Snakes

    def others(self, i: int) -> list[int]:
        """All snakes but i."""
        return [k for k in range(len(self.snakes)) if k != i]

    def around(self, i: int) -> list[tuple[int, int]]:
        """The cells up, down, left, right of the head of snake i."""
        return [self.neighbour(self.snakes[i][0], move) for move in MOVES]

    def first_cells(self, i: int) -> int:
        """The cells around the head of snake i that are free after a move, packed by direction."""
        cells = sum(self.bit(cell) << d * self.cell_count for d, cell in enumerate(self.around(i)))
        return cells & self.repeat(self.free[1])

    def flood(self, i: int, moves: int, foresight: int = FAR) -> list[int]:
        """The cells that snake i reaches in k moves, packed by the direction of the first: for each k = 1 .. `moves`.

        What is not free after `foresight` moves stays.
        """
        sets = [self.first_cells(i)]
        for k in range(2, moves + 1):
            sets.append(self.spread(sets[-1]) & self.repeat(self.free[min(k, foresight)]))
        return sets

    def heading(self, i: int) -> list[bool]:
        """Return whether snake i heads up, down, left, right."""
        moved = self.difference(self.snakes[i][0], self.snakes[i][1])
        return [moved == move for move in MOVES]

    def blocked(self, i: int) -> list[bool]:
        """Return whether a body lies up, down, left, right of snake i, ignoring tails that surely move (its own)."""
        return [cell != self.snakes[i][-1] and self.occupied.get(cell, 0) > 1 for cell in self.around(i)]

    def open_directions(self, i: int) -> list[bool]:
        """Directions neither backwards nor blocked; if none is left, towards tails; else all but backwards."""
        if not self.snakes[i]:
            return [True] * 4
        heading = self.heading(i)
        blocked = self.blocked(i)
        tails = [body[-1] for body in self.snakes if body]
        onward = [not heading[d ^ 1] for d in range(4)]
        free = [onward[d] and not blocked[d] for d in range(4)]
        risky = [onward[d] and cell in tails for d, cell in enumerate(self.around(i))]
        return next(choice for choice in (free, risky, onward) if any(choice))


def _wrap_offset(x: int, size: int) -> int:
    """Wrap an offset to the shorter way around a torus of `size` cells; exactly half keeps its sign."""
    if abs(x) <= size // 2:
        return x
    return x - size if x > 0 else x + size
