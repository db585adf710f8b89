"""Viewer of episodes: the arm as lines from two sides, the place to reach, the path of the tool, the distance.

From the side, y runs to the right (away from the base); from behind, x runs to the right; z is up in both. Lengths are
in m, in pages in mm.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from envs_jax import viewing
from envs_jax.reach import dynamics, reward
from envs_jax.reach.types import TARGET_UNIT, Settings
from envs_jax.viewing import GREY, INK, Level, Line, Record

ARM, PATH, POINT, PUCK, SOFT = "#1f5fa8", "#e2522b", "#3d8f2c", "#c8961a", "#4a5560"
PALE = ("#c5d6ea", "#93b4d8", "#5b8cc2")  # the arm at earlier steps, in the picture
HAND, TOOL = 7, 8  # places in the skeleton
PUCK_SIZE = 0.02  # radius and half height, m


_CAPTION = (
    "blue: arm{} · red: path of the tool centre · green: success sphere, ring: goal shown "
    "· yellow: puck · ×: target of the hand"
)


class View(NamedTuple):
    """One side: its name, the coordinate that runs to the right, and the parts of both coordinates that are shown."""

    name: str
    across: int
    left: float
    right: float
    low: float = -0.06
    high: float = 0.94


_LEVELS = (Level(f"success below {100 * reward.RADIUS:.0f} cm", POINT, reward.RADIUS),)
VIEWS = (View("from the side", 1, -0.15, 1.1), View("from behind", 0, -0.55, 0.55))


@dataclasses.dataclass(frozen=True)
class Scene:
    """Data drawn of an episode, K = T + 1 time steps; positions in the world, m.

    Attributes:
        arm: [K, 9, 3], base to last joint, hand, tool centre.
        target: [K, 3], the weld's target for the hand.
        opening: [K], of the gripper.
        point: [3], where the tool centre should be.
        goal: [3], the goal that is shown to the agent.
        puck: [3].
        success: bool[K].
        task: name.
    """

    arm: np.ndarray
    target: np.ndarray
    opening: np.ndarray
    point: np.ndarray
    goal: np.ndarray
    puck: np.ndarray
    success: np.ndarray
    task: str


def scene(record: Record) -> Scene:
    """Return the scene of a record."""
    env: Settings = record.env  # type: ignore[assignment]
    states = record.states
    arm = np.asarray(dynamics.skeleton(jnp.asarray(np.asarray(states.q).T)))
    return Scene(
        arm=np.moveaxis(arm, -1, 0),
        target=np.asarray(states.target) * TARGET_UNIT,
        opening=np.asarray(states.frame)[:, 3],
        point=np.asarray(states.point[0]),
        goal=np.asarray(states.goal[0]),
        puck=np.asarray(states.puck[0]),
        success=np.asarray(record.timesteps.metrics["success"]) > 0,
        task=env.tasks[int(states.task[0])].name,
    )


def step_labels(shown: Scene) -> list[str]:
    """Return labels of the time steps [K]."""
    first = int(np.argmax(shown.success)) if shown.success.any() else None
    words = []
    for k, success in enumerate(shown.success):
        told = ["in the sphere"] if success else []
        if k == first:
            told = ["first success"]
        words.append(" · ".join([*told, f"gripper {100 * shown.opening[k]:.0f} % open"]))
    return words


@dataclasses.dataclass(frozen=True)
class ReachViewer:
    """See `envs_jax.viewing.Viewer`."""

    rate: int = 30

    # Pages

    def html(self, record: Record) -> str:
        """Return a page that draws the arm as vectors."""
        shown = scene(record)
        data = {
            "views": [view.across for view in VIEWS],
            "arm": _millimetres(shown.arm.reshape(len(shown.arm), -1)),
            "target": _millimetres(shown.target),
            "opening": [round(100 * float(x)) for x in shown.opening],
            "success": "".join(str(int(x)) for x in shown.success),
        }
        return viewing.page(
            record,
            _html(shown),
            _LEGEND,
            _SCRIPT,
            data,
            _figures(record),
            levels={"distance": _LEVELS},
            step_labels=step_labels(shown),
            rate=self.rate,
        )

    # Pictures

    def frames(self, record: Record) -> list[Any]:
        """Return one image per time step: both views and the distance so far."""
        shown = scene(record)
        canvas = _Canvas(record, shown, dpi=160)
        return [canvas.draw([(step, ARM)], step).reduce(2) for step in range(record.steps + 1)]

    def picture(self, record: Record) -> Any:
        """Return a picture of the arm at the start, one third, two thirds and the end, with path and distance."""
        shown, steps = scene(record), record.steps
        times = sorted({0, *(max(1, round(steps * share / 3)) for share in (1, 2, 3))})
        colours = (*PALE, ARM)[-len(times) :]
        canvas = _Canvas(record, shown, dpi=300, caption=_CAPTION.format(" (pale: earlier)"))
        return canvas.draw(list(zip(times, colours, strict=True)), steps).reduce(2)


def _figures(record: Record) -> list[str]:
    names = ("distance", "success", "success_at_end", "return")
    return [name for name in names if name in record.curves]


def _millimetres(values: np.ndarray) -> list[Any]:
    return np.round(1000 * values).astype(int).tolist()


class _Canvas:
    """The static parts of a picture, drawn once by matplotlib, and the pixel coordinates of points."""

    def __init__(self, record: Record, shown: Scene, dpi: int, caption: str = _CAPTION.format("")) -> None:
        self._record, self._shown, self._scale = record, shown, dpi / 72
        width, views, chart = 9.6, 3.0, 1.25
        drawn = viewing.figure(width, 0.85 + views + 0.75 + chart + 0.55, dpi)
        height = drawn.get_size_inches()[1]
        text = lambda x, y, words, **more: drawn.text(x / width, 1 - y / height, words, va="center", **more)  # noqa: E731
        text(0.25, 0.27, record.title, fontsize=10.5, color=INK, weight="bold")
        text(0.25, 0.52, record.subtitle, fontsize=8.5, color=SOFT)
        text(width - 0.25, 0.27, f"task {shown.task}", fontsize=10.5, color=POINT, weight="bold", ha="right")
        self._axes, left = [], 0.25
        for view in VIEWS:
            wide = views * (view.right - view.left) / (view.high - view.low)
            axes = drawn.add_axes((left / width, 1 - (0.95 + views) / height, wide / width, views / height))
            _still(axes, view, shown)
            self._axes.append(axes)
            left += wide + 0.3
        text(0.25, 0.95 + views + 0.17, caption, fontsize=8, color=SOFT)
        below = 0.95 + views + 0.6
        chart_axes = drawn.add_axes((0.75 / width, 1 - (below + chart) / height, (width - 3.2) / width, chart / height))
        line = Line(f"this episode ({record.policy})", INK, np.asarray(record.curves["distance"]))
        viewing.plot_metric(chart_axes, record, "distance", -1, [line], _LEVELS)
        chart_axes.set_xlabel("step", fontsize=9, color=SOFT, labelpad=1)
        chart_axes.set_title(record.env.spec.label("distance"), loc="left", fontsize=10, color=INK, weight="bold")
        self._chart = chart_axes
        self._image = viewing.image(drawn)

    def _pixels(self, axes: Any, points: np.ndarray) -> list[tuple[float, float]]:
        """Points [N, 2] in the units of some axes."""
        found = axes.transData.transform(points)
        return [(float(x), self._image.height - float(y)) for x, y in found]

    def draw(self, arms: Sequence[tuple[int, str]], step: int) -> Any:
        """Draw the arm at time steps in colours, and the path and the distance up to `step`."""
        from PIL import ImageDraw

        image, shown, unit = self._image.copy(), self._shown, self._scale
        pen = ImageDraw.Draw(image)

        def dot(place: tuple[float, float], radius: float, colour: str) -> None:
            x, y = place
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)

        for view, axes in zip(VIEWS, self._axes, strict=True):
            plane = [view.across, 2]
            path = self._pixels(axes, shown.arm[: step + 1, TOOL][:, plane])
            for time, colour in arms:
                joints = self._pixels(axes, shown.arm[time][:, plane])
                pen.line(joints[:HAND], fill=colour, width=round(4.5 * unit), joint="curve")
                pen.line(joints[HAND - 1 :], fill=colour, width=round(2.2 * unit), joint="curve")
                for place in joints[:HAND]:
                    dot(place, 3.2 * unit, colour)
                dot(joints[TOOL], 2.2 * unit, PATH)
            if len(path) > 1:
                pen.line(path, fill=PATH, width=round(1.4 * unit), joint="curve")
            ((x, y),) = self._pixels(axes, shown.target[step : step + 1][:, plane])
            for sign in (-1, 1):
                size = 3 * unit
                pen.line((x - size, y - sign * size, x + size, y + sign * size), fill=SOFT, width=round(unit))
        far = np.asarray(self._record.curves["distance"])[: step + 1]
        curve = self._pixels(self._chart, np.stack([np.arange(step + 1), far], axis=-1))
        if step:
            pen.line(curve, fill=INK, width=round(2 * unit), joint="curve")
        dot(curve[-1], 3.2 * unit, INK)
        return image


def _still(axes: Any, view: View, shown: Scene) -> None:
    """Draw the static parts on matplotlib axes."""
    from matplotlib.patches import Circle, Rectangle

    axes.set_xlim(view.left, view.right)
    axes.set_ylim(view.low, view.high)
    axes.set_xticks(())
    axes.set_yticks(())
    for spine in axes.spines.values():
        spine.set_color("#dfe3e8")
    axes.set_facecolor("#fafbfc")
    axes.axhspan(view.low, 0, color="#e3e6ea", linewidth=0)
    axes.axhline(0, color=GREY, linewidth=1)
    across = view.across
    puck = shown.puck[across] - PUCK_SIZE, shown.puck[2] - PUCK_SIZE
    axes.add_patch(Rectangle(puck, 2 * PUCK_SIZE, 2 * PUCK_SIZE, color=PUCK, linewidth=0))
    axes.add_patch(Circle((shown.point[across], shown.point[2]), reward.RADIUS, color=POINT, alpha=0.3, linewidth=0))
    axes.plot(shown.point[across], shown.point[2], "o", color=POINT, markersize=3)
    axes.plot(shown.goal[across], shown.goal[2], "o", markerfacecolor="none", markeredgecolor=POINT, markersize=7)
    axes.set_title(view.name, loc="left", fontsize=10, color=INK, weight="bold")


# The page


def _html(shown: Scene) -> str:
    panels = []
    for view in VIEWS:
        left, width, height = 1000 * view.left, 1000 * (view.right - view.left), 1000 * (view.high - view.low)
        at = lambda place, view=view: f"{1000 * place[view.across]:.1f} {-1000 * place[2]:.1f}"  # noqa: E731
        point, goal, puck = (at(place).split() for place in (shown.point, shown.goal, shown.puck))
        panels.append(
            f'<svg viewBox="{left} {-1000 * view.high} {width} {height}" style="flex:{width}" role="img" '
            f'aria-label="arm {view.name}"><rect x="{left}" y="0" width="{width}" height="60" fill="#e3e6ea"/>'
            f'<text x="{left + 20}" y="{-1000 * view.high + 50}">{view.name}</text>'
            f'<rect x="{float(puck[0]) - 20}" y="{float(puck[1]) - 20}" width="40" height="40" fill="{PUCK}"/>'
            f'<circle cx="{point[0]}" cy="{point[1]}" r="{1000 * reward.RADIUS}" fill="{POINT}" fill-opacity=".3" '
            f'class="sphere"/><circle cx="{point[0]}" cy="{point[1]}" r="7" fill="{POINT}"/>'
            f'<circle cx="{goal[0]}" cy="{goal[1]}" r="14" fill="none" stroke="{POINT}" stroke-width="3"/>'
            '<g class="moving"></g></svg>'
        )
    return f'<style>{_STYLE}</style><div id="views">{"".join(panels)}</div>'


_STYLE = """
#views { display: flex; gap: 8px; }
#views svg { min-width: 0; background: #fafbfc; border: 1px solid var(--line); border-radius: 6px; }
#views text { font: 600 34px system-ui, sans-serif; fill: @ink; }
@media (max-width: 560px) { #views { flex-direction: column; } #views svg { flex: none !important; width: 100%; } }
""".replace("@ink", INK)


def _coloured(colour: str, words: str) -> str:
    return f'<b class="tinted" style="--own:{colour};color:{colour}">{words}</b>'


_LEGEND = f"""<div>{_coloured(ARM, "arm")}, {_coloured(PATH, "path of the tool centre")},
{_coloured(POINT, "success sphere")} (ring: the goal as it is shown to the agent),
{_coloured(PUCK, "puck")}, × target of the hand</div>"""

_SCRIPT = (
    """
function draw(step, s) {
  document.querySelectorAll("#views .moving").forEach((layer, k) => {
    const across = s.views[k], at = (row, i) => `${row[3 * i + across]} ${-row[3 * i + 2]}`, row = s.arm[step];
    const line = (from, to) => Array.from({length: to - from + 1}, (_, i) => at(row, from + i)).join("L");
    const path = s.arm.slice(0, step + 1).map(r => at(r, 8)).join("L");
    const [x, y] = [s.target[step][across], -s.target[step][2]];
    let svg = `<g fill="none" stroke="@arm" stroke-linejoin="round" stroke-linecap="round">` +
      `<path d="M${line(0, 6)}" stroke-width="30"/><path d="M${line(6, 8)}" stroke-width="14"/></g>`;
    for (let i = 0; i < 7; i++) { const [cx, cy] = at(row, i).split(" ");
      svg += `<circle cx="${cx}" cy="${cy}" r="10" fill="#fff" fill-opacity=".8"/>`; }
    svg += `<path d="M${path}" fill="none" stroke="@path" stroke-width="6"/>`;
    const [cx, cy] = at(row, 8).split(" ");
    svg += `<circle cx="${cx}" cy="${cy}" r="11" fill="@path"/>` +
      `<path d="M${x - 14} ${y - 14}l28 28m0 -28l-28 28" stroke="@soft" stroke-width="4"/>`;
    layer.innerHTML = svg;
  });
  for (const sphere of document.querySelectorAll("#views .sphere"))
    sphere.setAttribute("fill-opacity", s.success[step] === "1" ? .65 : .3);
}
""".replace("@arm", ARM)
    .replace("@path", PATH)
    .replace("@soft", SOFT)
)
