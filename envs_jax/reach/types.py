"""State and settings of an arm, shared by the environment, its scripted policies and its viewer."""

import dataclasses

from envs_jax.base import Array, Environment, check_settings, pytree, setting, take_exactly
from envs_jax.reach import constants, reward, tasks

MOST_STEPS = 500
TARGET_UNIT = 2.0**-30  # m
PARTS = 128  # in a unit of the target, and of the moves that add up to it


@pytree
class State:
    """State of one arm.

    Attributes:
        t: int32[], steps made.
        task: int32[], index in the tasks of the setting.
        puck, goal: float32[3], m.
        tool_goal: float32[3], where the tool centre should be, m.
        required_opening: float32[2], openings of the gripper that count, from and to.
        mocap_target: int32[3], the weld's target for the hand, in TARGET_UNIT, rounded down.
        mocap_target_part: int32[3], what it is beyond that, in TARGET_UNIT / PARTS: 0 to PARTS - 1.
        q, v: float32[9], joint values and speeds: seven hinges (rad), right and left finger (m).
        frame: float32[18], the frame that the next observation shows as the one before.
    """

    t: Array
    task: Array
    puck: Array
    goal: Array
    tool_goal: Array
    required_opening: Array
    mocap_target: Array
    mocap_target_part: Array
    q: Array
    v: Array
    frame: Array


@dataclasses.dataclass(frozen=True)
class ReachConfig(Environment):
    """Settings of an arm's task, and values derived from them. Raises ValueError: impossible settings."""

    task: str = setting(
        "reach", f"set this task: {', '.join(tasks.TASKS)}, several separated by commas (one drawn per episode), or all"
    )
    horizon: int = setting(400, "end an episode after this many steps, at most 500", between=(1, MOST_STEPS))
    goals: str = setting(
        "uniform",
        "take puck and goal from: uniform (a fresh pair in every episode), pool (drawn from 50 pairs, as published) or "
        "order (the pool in order, from a drawn pair on, every pair for all tasks; a single environment draws)",
        choices=("pool", "order", "uniform"),
    )
    pool_seed: int = setting(0, "draw the pool of 50 pairs with this seed", between=(0, 2**32 - 1))
    success_radius: float = setting(
        reward.RADIUS, "count a distance up to this as success, m; up to it, reward v2 is 10", between=(0.001, 0.5)
    )
    reward: str = setting(
        "v2",
        "pay reward v2 (0 to 10 per step), v1 (thousands) or sparse (1 in each step of success, else 0)",
        choices=reward.NAMES,
    )
    weld: str = setting(
        "v3",
        "turn the hand to its target as strongly as Meta-World v3, or the older v2",
        choices=tuple(constants.WELDS),
    )
    partially_observable: bool = setting(False, "hide the goal from the observation")

    def __post_init__(self) -> None:
        take_exactly(self)
        tasks.parse(self.task)
        check_settings(self)

    # Derived values

    @property
    def tasks(self) -> tuple[tasks.Task, ...]:
        """The tasks that episodes may set."""
        return tasks.parse(self.task)
