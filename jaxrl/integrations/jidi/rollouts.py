"""The search of an exported agent at play time: it tries moves in simulated games; see `submission`."""

from __future__ import annotations

from jaxrl.integrations.jidi.board import FAR, Board
from jaxrl.integrations.jidi.territory import claim_cells

# Everything below is copied into exported agents.

ROLLOUT_MOVES = 8
DISCOUNT = 0.9  # per move
POLICY_WEIGHT = 0.5  # points for each nat of the policy's log-probability
NEVER = FAR + 1  # for a bean that is not reached


def plan(board: Board, logits: list[list[float]]) -> list[int]:
    """Return the moves of the own team: the policy's best ones, changed for one snake after the other where that pays.

    One step of policy improvement by rollouts (Tesauro and Galperin 1996, "On-line Policy Improvement using
    Monte-Carlo Search"). After the first moves all snakes of a rollout play by `choose_move`.

    Args:
        board: from the side of the own team.
        logits: for each own snake one number per move, -inf for closed ones.
    """
    opponent_moves = [choose_move(board, k) for k in range(board.half, len(board.snakes))]

    def estimate(moves: list[int]) -> float:
        policy = sum(logits[i][d] for i, d in enumerate(moves))
        return roll_out(board, moves + opponent_moves) + POLICY_WEIGHT * policy

    chosen = [row.index(max(row)) for row in logits]
    best_value = estimate(chosen)
    for i in range(board.half):
        best = chosen[i]
        for d in range(4):
            if board.snakes[i] and d != best and logits[i][d] > -float("inf"):
                moves = chosen[:i] + [d] + chosen[i + 1 :]
                value = estimate(moves)
                if value > best_value:
                    chosen = moves
                    best_value = value
    return chosen


def roll_out(board: Board, moves: list[int]) -> float:
    """The own team's discounted points minus the other team's, in a rollout that begins with these moves."""
    indices = range(len(board.snakes))
    points = 0.0
    for k in range(min(ROLLOUT_MOVES, board.max_steps - board.steps)):
        if k:
            moves = [choose_move(board, i) for i in indices]
        board, gained = board.move(moves)
        points += DISCOUNT**k * (sum(gained[: board.half]) - sum(gained[board.half :]))
    return points


def choose_move(board: Board, i: int) -> int:
    """The move of snake i in a rollout: as the scripted opponent `territory`, but longer snakes keep out of its way.

    It goes to the nearest bean that it reaches before all other snakes, or in the same move as longer ones, which lose
    more where heads meet, through a territory of at least as many cells as its own length (at most FAR); if there is
    none, to the most territory, then room.
    """
    if not board.snakes[i]:
        return 0
    beans = board.repeat(sum(board.bit(bean) for bean in board.beans))
    enough = min(len(board.snakes[i]), FAR)
    nearest = [NEVER] * 4
    longer = [k for k in board.others(i) if len(board.snakes[k]) > len(board.snakes[i])]
    for k, owned in enumerate(claim_cells(board, i, longer), 1):
        if owned & beans:
            for d, reached in enumerate(board.split(owned & beans)):
                if nearest[d] == NEVER and reached:
                    nearest[d] = k
            if board.count_cells(owned)[nearest.index(min(nearest))] >= enough:
                break  # no other direction can come before it
    sizes = board.count_cells(owned)
    moves, d = min((nearest[d] if sizes[d] >= enough else NEVER, d) for d in range(4))
    if moves < NEVER:
        return d
    room = board.count_cells(board.flood(i, FAR)[-1])
    return max(range(4), key=lambda d: (sizes[d], room[d]))
