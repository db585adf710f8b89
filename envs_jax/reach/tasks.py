"""A family of tasks without contacts, with the same observation.

All tasks share the arm, the observation and the draws of puck and goal; they differ in where the tool centre should
be and in how wide the gripper should be open, so that one observation does not identify the task.

To add one, add a `Task` to `TASKS`: a name, a sentence, and what differs from `reach`. Nothing else has to change:
rewards, success, the scripted policy, the settings' help and the tests go through the table. A place must lie inside
x -0.45 .. 0.45, y 0.45 .. 0.95, z 0.05 .. 0.45 m for every draw, 10 cm clear of the puck, and more than 5 cm from
(0, 0.6, 0.15), where the tool centre starts; the tests check this.
"""

import dataclasses
from typing import Literal

from envs_jax.base import closest, short_repr

ALL = "all"
ANY_WIDTH = (0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Task:
    """One task: bring the tool centre to scale * anchor + offset, with the gripper as wide as required.

    Attributes:
        name: its name in settings.
        text: what to do, in a few words.
        anchor: the drawn position that the place derives from.
        scale: per coordinate; (-1, 1, 1) mirrors at the plane x = 0.
        offset: m.
        required_opening: opening of the gripper that counts, from and to; 0 = claws together, 1 = open.
    """

    name: str
    text: str
    anchor: Literal["goal", "puck"] = "goal"
    scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    offset: tuple[float, float, float] = (0.0, 0.0, 0.0)
    required_opening: tuple[float, float] = ANY_WIDTH


TASKS = {
    task.name: task
    for task in (
        Task("reach", "the goal itself"),
        Task("mirrored", "the goal mirrored in x", scale=(-1.0, 1.0, 1.0)),
        Task("above", "15 cm above the goal", offset=(0.0, 0.0, 0.15)),
        Task("closed", "the goal, with the gripper closed", required_opening=(0.0, 0.4)),
        Task("beside", "12 cm to the right of the goal", offset=(0.12, 0.0, 0.0)),
        Task("hover", "25 cm above the puck", anchor="puck", offset=(0.0, 0.0, 0.25)),
    )
}


def parse(text: str) -> tuple[Task, ...]:
    """Parse the tasks of a setting: one name, several with commas between, or "all". Raises ValueError."""
    names = list(TASKS) if text == ALL else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TASKS:
            raise ValueError(f"reach: unknown task {short_repr(name)}: {closest(name, (*TASKS, ALL))}")
    if len(set(names)) < len(names):
        raise ValueError(f"reach: task {short_repr(text)} names a task twice: name each one once")
    return tuple(TASKS[name] for name in names)
