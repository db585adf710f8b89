"""The observation `obs_heading` for an agent of the Jidi platform; see `submission`."""

from __future__ import annotations

from jaxrl.integrations.jidi.board import Board
from jaxrl.integrations.jidi.obs_full import ONE, count_steps, crop, features, share, turn
from jaxrl.integrations.jidi.territory import territory

# Everything below is copied into exported agents.

START_LENGTH = 3


def obs_heading(board: Board, i: int) -> list[float]:
    """`obs_full` and territory of snake i, which heads up, its nearest bean to the right.

    The four directions that lead ahead, back, to the left and to the right come first.
    """
    frame = _find_frame(board, i)
    half = max(1, board.height // 2, board.width // 2)
    scores = [max(0, len(body) - START_LENGTH) for body in board.snakes]
    lead = sum(scores[: board.half]) - sum(scores[board.half :])
    return [
        *frame,
        ONE * (frame[0] < 2),  # it moves along a column
        *crop(board, i, frame),
        *features(board, i, frame, half, half),
        *(values[d] for values in territory(board, i) for d in frame),
        share(board.max_steps - board.steps, board.max_steps),
        share(lead, 50),
    ]


def _find_frame(board: Board, i: int) -> list[int]:
    ahead = board.heading(i).index(True)
    frame = [ahead, ahead ^ 1, *((2, 3) if ahead < 2 else (0, 1))]
    offsets = [board.difference(bean, board.snakes[i][0]) for bean in board.beans]
    if offsets and turn(min(offsets, key=count_steps), frame)[1] < 0:
        frame[2], frame[3] = frame[3], frame[2]
    return frame
