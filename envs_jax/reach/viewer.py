"""Viewer of episodes: the arm as lines from two sides, the place to reach, the path of the tool, the distance.

From the side, y runs to the right (away from the base); from behind, x runs to the right; z is up in both. Lengths are
in m, in drawings in mm.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from envs_jax import viewing
from envs_jax.reach import dynamics
from envs_jax.reach.types import TARGET_UNIT, ReachConfig
from envs_jax.viewing import GREY, SOFT, Drawing, LegendEntry, Line, Panel, Record, Shape, Style
from envs_jax.viewing.drawing import disc, path, rectangle, trail

ARM, PATH, POINT, PUCK = "#1f5fa8", "#e2522b", "#3d8f2c", "#c8961a"
HAND, TOOL = 7, 8  # places in the skeleton
PUCK_SIZE = 0.02  # radius and half height, m
METRICS = ("distance", "success", "success_at_end", "return")


class View(NamedTuple):
    """One side: its name, the coordinate that runs to the right, and the parts of both coordinates that are shown."""

    name: str
    across: int
    left: float
    right: float
    low: float = -0.06
    high: float = 0.94

    def flat(self, places: Any) -> np.ndarray:
        """float[..., 2]: places [..., 3] in m as (x, y) of the drawing."""
        return 1000 * np.stack([np.asarray(places)[..., self.across], -np.asarray(places)[..., 2]], axis=-1)


VIEWS = (View("from the side", 1, -0.15, 1.1), View("from behind", 0, -0.55, 0.55))

STYLES = {
    "ground": Style("#e3e6ea", GREY, 2),
    "puck": Style(PUCK),
    "sphere": Style(POINT, opacity=0.3),
    "reached": Style(POINT, opacity=0.65),
    "point": Style(POINT),
    "goal": Style(stroke=POINT, width=3),
    "arm": Style(stroke=ARM, width=30),
    "hand": Style(stroke=ARM, width=14),
    "joint": Style("#ffffff", opacity=0.8),
    "path": Style(stroke=PATH, width=6),
    "tool": Style(PATH),
    "target": Style(stroke=SOFT, width=4),
}

LEGEND = (
    LegendEntry("arm", "arm"),
    LegendEntry("path of the tool centre", "path"),
    LegendEntry("success sphere", "sphere", "disc"),
    LegendEntry("goal as the agent observes it", "goal", "disc"),
    LegendEntry("puck", "puck", "area"),
    LegendEntry("target of the hand", "target"),
)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Data drawn of an episode, K = T + 1 time steps; positions in the world, m."""

    arm: np.ndarray  # [K, 9, 3], base to last joint, hand, tool centre
    target: np.ndarray  # [K, 3], the weld's target for the hand
    opening: np.ndarray  # [K], of the gripper
    point: np.ndarray  # [3], where the tool centre should be
    goal: np.ndarray  # [3], the goal that is shown to the agent
    puck: np.ndarray  # [3]
    success: np.ndarray  # bool[K]
    radius: float  # within which it is a success, m
    task: str  # its name


def scene(record: Record) -> Scene:
    """Return the scene of a record."""
    env: ReachConfig = record.env  # type: ignore[assignment]
    states = record.states
    arm = np.asarray(dynamics.skeleton(jnp.asarray(np.asarray(states.q).T)))
    return Scene(
        arm=np.moveaxis(arm, -1, 0),
        target=np.asarray(states.mocap_target) * TARGET_UNIT,
        opening=np.asarray(states.frame)[:, 3],
        point=np.asarray(states.tool_goal[0]),
        goal=np.asarray(states.goal[0]),
        puck=np.asarray(states.puck[0]),
        success=np.asarray(record.timesteps.metrics["success"]) > 0,
        radius=env.success_radius,
        task=env.tasks[int(states.task[0])].name,
    )


def step_labels(episode: Scene) -> list[str]:
    """Return labels of the time steps [K]."""
    first = int(np.argmax(episode.success)) if episode.success.any() else None
    words = []
    for k, success in enumerate(episode.success):
        labels = ["first success" if k == first else "in the sphere"] if success else []
        words.append(" · ".join([*labels, f"gripper {100 * episode.opening[k]:.0f} % open"]))
    return words


class ReachViewer(viewing.Viewer):
    """See `envs_jax.viewing.Viewer`."""

    rate = 30

    def drawing(self, record: Record) -> Drawing:
        episode = scene(record)
        return Drawing(
            panels=[_panel(view, episode) for view in VIEWS],
            styles=STYLES,
            legend=[LegendEntry(f"task {episode.task}", "point", "disc"), *LEGEND],
            metrics=[name for name in METRICS if name in record.curves],
            step_labels=step_labels(episode),
            lines={"distance": (Line(f"success below {100 * episode.radius:g} cm", POINT, episode.radius),)},
        )


def _panel(view: View, episode: Scene) -> Panel:
    left, right, low, high = (1000 * bound for bound in view[2:])
    arms, (x, y), size = view.flat(episode.arm), view.flat(episode.puck), 1000 * PUCK_SIZE
    point = view.flat(episode.point)
    goal = view.flat(episode.goal)
    still = [
        rectangle("ground", left - 9, 0, right + 9, 9 - low),
        rectangle("puck", x - size, y - size, x + size, y + size),
        disc("goal", 14, goal),
        disc("point", 7, point),
        trail("path", arms[:, TOOL]),
    ]

    def at(k: int) -> list[Shape]:
        arm, (x, y) = arms[k], view.flat(episode.target[k])
        return [
            disc("reached" if episode.success[k] else "sphere", 1000 * episode.radius, point),
            path("arm", arm[:HAND]),
            path("hand", arm[HAND - 1 :]),
            disc("joint", 10, *arm[:HAND]),
            disc("tool", 11, arm[TOOL]),
            path("target", *([(x - 14, y - side), (x + 14, y + side)] for side in (-14, 14))),
        ]

    return Panel(view.name, (left, -high, right, -low), still, [at(k) for k in range(len(arms))])
