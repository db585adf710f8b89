"""Recorded episodes of reach, replayed by the environment, open loop from the reset.

Puck, goal and actions are injected; observations, rewards, successes and targets of the hand are compared. The bounds
come from `bench.parity.metaworld`: three times the deviations of the first implementation; the reward's bound follows
from the hand's.
"""

import functools

import numpy as np

from bench.parity import metaworld as reach_parity
from bench.parity.comparison import Comparison
from bench.parity.records import load

# Of the 39 numbers of an observation. The puck does not move here and jitters in the simulator: up to 0.09 mm, and
# 2.2e-3 in its quaternion. Unused entries hold 0.
_HALF = np.concatenate([[2e-5] * 3, [2e-6], [1e-4] * 3, [2.5e-3] * 4, [0.0] * 7])
OBSERVATION = np.concatenate([_HALF, _HALF, [1e-7] * 3])
TARGET = 8e-8  # m; the record is rounded to 3e-8, an increment to 5e-10, the same while the action is held


def _most(figure: str, unit: str) -> float:
    bound = reach_parity.BOUNDS[figure, unit][1]
    assert bound is not None
    return bound


@functools.cache
def recording(source: str = "recorded") -> reach_parity.Recording:
    """Load all episodes of a source, see `bench.parity.records`. Raises NoRecordError."""
    record = load("reach_episodes", source)
    return reach_parity.Recording(
        policy=record["policy"],
        puck=record["obj_init"],
        goal=record["goal"],
        action=record["action"],
        observation=record["obs"].astype(np.float64),
        tool=record["tcp"].astype(np.float64),
        reward=record["reward"].astype(np.float64),
        success=record["success"],
        contact=np.any(record["contact"], axis=2),
    )


@functools.cache
def replay(source: str) -> dict[str, np.ndarray]:
    """Replay a recording in the environment. Raises NoRecordError."""
    return reach_parity.replay(recording(source))


def compare(source: str) -> Comparison:
    """Compare all episodes, whole or up to the first contact, which the environment lacks. Raises NoRecordError."""
    record = recording(source)
    ours = replay(source)
    comparison = Comparison()
    free = record.free
    expected = record.observation[:, 1:]
    differ = np.linalg.norm(ours["observation"][..., :3] - expected[..., :3], axis=-1)
    hand = _most("hand, before the first contact", "mm")
    comparison.close("hand before the first contact, mm", 1e3 * differ[free], 0.0, hand)
    used = OBSERVATION > 0
    comparison.close(
        "observation before the first contact, of its bounds",
        ours["observation"][free][:, used], expected[free][:, used], 1.0, OBSERVATION[used],
    )  # fmt: skip
    comparison.exact("unused places of the observation", ours["observation"][free][:, ~used], expected[free][:, ~used])
    allowed = np.broadcast_to(1e-3 * hand * reach_parity.steepest(record.goal)[:, None], free.shape)
    comparison.close(
        "reward before the first contact, of its bounds", ours["reward"][free], record.reward[free], 1.0, allowed[free]
    )
    comparison.exact("success", ours["success"], record.success)
    comparison.close(
        "target of the hand, m", ours["target"], load("reach_episodes", source)["mocap_pos"][:, 1:], TARGET
    )
    return comparison
