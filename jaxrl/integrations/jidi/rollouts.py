"""The search of an exported agent at play time: it tries moves in simulated games; see `submission`.

One step of policy improvement by rollouts (Tesauro and Galperin 1996, "On-line Policy Improvement using Monte-Carlo
Search"). After their first moves all snakes of a rollout play as the scripted opponent `territory`, without a network.
"""

from __future__ import annotations

from jaxrl.integrations.jidi.board import FAR, Board, count_cells

# Everything below is copied into exported agents.

ROLLOUT_MOVES = 5
DISCOUNT = 0.95  # per move
POLICY_WEIGHT = 0.5  # points for each nat of the policy's log-probability
NEVER = FAR + 1


def plan(board: Board, log_probabilities: list[list[float]]) -> list[int]:
    """Return the moves of the own team: the policy's best ones, changed for one snake after the other where that pays.

    Args:
        board: from the side of the own team.
        log_probabilities: of the four moves of each own snake, -inf for closed ones.
    """
    others = [choose_move(board, k) for k in range(board.half, len(board.snakes))]

    def value(moves: list[int]) -> float:
        policy = sum(log_probabilities[i][d] for i, d in enumerate(moves))
        return roll_out(board, moves + others) + POLICY_WEIGHT * policy

    chosen = [row.index(max(row)) for row in log_probabilities]
    highest = value(chosen)
    for i in range(board.half):
        for d in range(4):
            is_open = board.snakes[i] and log_probabilities[i][d] > -float("inf")
            if is_open and d != chosen[i]:
                moves = chosen[:i] + [d] + chosen[i + 1 :]
                found = value(moves)
                if found > highest:
                    chosen = moves
                    highest = found
    return chosen


def roll_out(board: Board, moves: list[int]) -> float:
    """The discounted points of the own team minus those of the other, from these moves of all snakes on."""
    snakes = range(len(board.snakes))
    points = 0.0
    for k in range(min(ROLLOUT_MOVES, board.max_steps - board.steps)):
        if k:
            moves = [choose_move(board, i) for i in snakes]
        board, won = board.move(moves)
        points += DISCOUNT**k * (sum(won[: board.half]) - sum(won[board.half :]))
    return points


def choose_move(board: Board, i: int) -> int:
    """The move of snake i as the scripted opponent `territory`.

    It goes to the nearest bean that it reaches before all other snakes, through a territory of at least as many cells
    as its own length (or FAR); if there is none, to the most territory, then room. 0 if it cannot move.
    """
    if not board.snakes[i]:
        return 0
    beans = sum(board.bit(bean) for bean in board.beans)
    enough = min(len(board.snakes[i]), FAR)
    heads = sum(board.bit(board.snakes[k][0]) for k in board.others(i) if board.snakes[k])
    others = board.spread(heads) & board.free[1]
    cells = board.around(i)
    owned = [board.bit(cell) & board.free[1] & ~others for cell in cells]
    nearest = [1 if first & beans else NEVER for first in owned]
    for k in range(2, FAR + 1):
        best = min(nearest)
        if best < NEVER and count_cells(owned[nearest.index(best)]) >= enough:
            break  # no other direction can come before it
        taken = owned[0] | owned[1] | owned[2] | owned[3]
        others |= board.spread(others) & board.free[k] & ~taken
        for d, territory in enumerate(owned):
            if territory:
                owned[d] |= board.spread(territory) & board.free[k] & ~others
                if nearest[d] == NEVER and owned[d] & beans:
                    nearest[d] = k
    sizes = [count_cells(territory) for territory in owned]
    steps, d = min((nearest[d] if sizes[d] >= enough else NEVER, d) for d in range(4))
    if steps < NEVER:
        return d
    room = [count_cells(board.flood(cell, FAR)[-1]) for cell in cells]
    return max(range(4), key=lambda d: (room[d] > 0, sizes[d], room[d]))
