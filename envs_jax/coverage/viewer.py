"""Viewer of missions: the team's belief, the true region of interest, agents, their footprints and messages.

In pictures, x is to the right and y upwards, in metres. Colours are distinguishable for colour-blind readers:
blue is believed free, orange is believed of interest, white is observed but unknown, grey was never observed.
"""

import base64
import dataclasses
import functools
import io
import textwrap
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax import viewing
from envs_jax.coverage import belief, communication, terrain, world
from envs_jax.coverage.types import Settings
from envs_jax.viewing import GREY, INK, Record

SIDE = 200  # most pixels along a map in a page
AGENTS = ("#16202b", "#00795c", "#a01f86", "#6a3fc4", "#8c1d2c", "#00667f", "#5b6400", "#5d6673")
DASHES = ("", "1.6 .9", ".25 .8")  # of footprints by altitude, in metres; "" = solid
ALTITUDES = tuple(int(world.SPACING * (level + 1)) for level in range(world.LEVELS))

_ANCHORS = ((0.0, "#235a92"), (0.25, "#86abcf"), (0.5, "#fbfaf7"), (0.75, "#f2a868"), (1.0, "#c04e05"))
_UNSEEN = "#d3d7dc"


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], np.float64)


@functools.cache
def palette() -> np.ndarray:
    """uint8[256, 3]: entry 0 for cells never observed, 1 to 255 for probabilities from 0 to 1."""
    p = np.linspace(0.0, 1.0, 255)
    places = [place for place, _ in _ANCHORS]
    table = np.stack([np.interp(p, places, [_rgb(colour)[i] for _, colour in _ANCHORS]) for i in range(3)], axis=-1)
    return np.concatenate([_rgb(_UNSEEN)[None], table]).round().astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Data drawn of a mission, K = T + 1 time steps, lengths in metres.

    Attributes:
        side: edge of the mapped area.
        belief: uint8[K, s, s], the team's belief as entries of `palette`; axis 0 is x, axis 1 is y.
        borders: float[M, 2, 2], segments (x, y) to (x, y) around the true region of interest.
        positions: float[K, A, 3].
        boxes: float[K, A, 4], measured footprints: x from, y from, x to, y to.
        heard: bool[K, A, A], [i, j] = agent i received the message of agent j.
    """

    side: float
    belief: np.ndarray
    borders: np.ndarray
    positions: np.ndarray
    boxes: np.ndarray
    heard: np.ndarray


def shrink(values: np.ndarray, side: int) -> np.ndarray:
    """float32[s, s]: a square map area-averaged to at most `side` cells along an edge."""
    from PIL import Image

    n = len(values)
    s = -(-n // -(-n // side))
    picture = Image.fromarray(np.ascontiguousarray(values, np.float32))
    return np.asarray(picture.resize((s, s), Image.Resampling.BOX))


def borders(truth: np.ndarray) -> np.ndarray:
    """float[M, 2, 2]: the edges in cells of what is true in bool[s, s], also along the map's own; runs are joined."""
    found = []
    framed = np.pad(truth, 1).astype(np.int8)
    for axis in (0, 1):
        changed = np.diff(framed, axis=axis) != 0
        changed = changed[:, 1:-1] if axis == 0 else changed.T[:, 1:-1]
        for line, row in enumerate(changed):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
            for low, high in edges.reshape(-1, 2):
                ends = np.array([[line, low], [line, high]], np.float64)
                found.append(ends if axis == 0 else ends[:, ::-1])
    return np.stack(found) if found else np.zeros((0, 2, 2))


def scene(record: Record, side: int = SIDE) -> Scene:
    """Return the scene of a record, maps reduced to at most `side` cells along an edge."""
    env: Settings = record.env  # type: ignore[assignment]
    states, n, metres = record.states, env.n, world.cell_size(env.q)
    maps = []
    for k in range(record.steps + 1):
        stored = np.asarray(states.maps.beliefs[k, -1])
        p = shrink(np.asarray(belief.probability(env.storage.log_odds(jnp.asarray(stored)))), side)
        seen = shrink((stored != env.storage.unseen).astype(np.float32), side) >= 0.5
        maps.append(np.where(seen, 1 + np.round(np.clip(p, 0.0, 1.0) * 254.0), 0).astype(np.uint8))
    ground, box = _laid_out(env, jax.tree.map(lambda leaf: leaf[0], states.terrain), states.positions)
    truth = shrink(np.asarray(ground).astype(np.float32), side) >= 0.5
    corners = np.stack([np.asarray(edge) for edge in (box.top, box.left, box.bottom, box.right)], axis=-1)
    return Scene(
        side=n * metres,
        belief=np.stack(maps),
        borders=borders(truth) * (n * metres / len(truth)),
        positions=(np.asarray(states.positions) + (0, 0, 1)) * world.SPACING,
        boxes=corners * metres,
        heard=np.asarray(_heard(env, states.key, states.positions, states.reach)),
    )


@functools.partial(jax.jit, static_argnums=0)
def _laid_out(env: Settings, ground: terrain.Terrain, positions: Any) -> tuple[Any, world.Box]:
    """Return the whole region of interest bool[n, n], and footprints at positions int32[T, A, 3]."""
    return terrain.whole(ground, env.n), world.clip_footprint(world.footprint(positions, env.q), env.n)


@functools.partial(jax.jit, static_argnums=0)
def _heard(env: Settings, keys: Any, positions: Any, reach: Any) -> Any:
    """bool[T, A, A]: messages received at each time, drawn as the environment draws them."""

    def at(k: Any, key: Any, positions: Any, reach: Any) -> Any:
        links = communication.delivered(key, k, env.num_agents, env.failure_rate)
        return communication.received(positions, reach, links)

    return jax.vmap(at)(jnp.arange(len(positions)), keys, positions, reach)


def _beside(positions: np.ndarray) -> np.ndarray:
    """float[A, 2]: places of markers at one time: agents above each other side by side."""
    places = positions[:, :2].copy()
    for place in np.unique(places, axis=0):
        here = np.flatnonzero(np.all(positions[:, :2] == place, axis=1))
        places[here, 0] += 2.6 * (np.arange(len(here)) - (len(here) - 1) / 2)
    return places


def _path(agent: int, number: int, positions: np.ndarray) -> np.ndarray:
    """float[K, 2]: horizontal path, shifted a little, so that shared stretches show."""
    return positions[:, agent, :2] + min(0.5, 1.5 / max(number - 1, 1)) * (agent - (number - 1) / 2)


@dataclasses.dataclass(frozen=True)
class CoverageViewer:
    """See `envs_jax.viewing.Viewer`."""

    rate: int = 2

    # Pages

    def html(self, record: Record) -> str:
        """A page with the belief as one small PNG per step and everything else as vectors."""
        shown = scene(record)
        agents = shown.positions.shape[1]
        up = lambda values: [[round(float(x), 2), round(shown.side - float(y), 2)] for x, y in values]  # noqa: E731
        data = {
            "agents": agents,
            "colours": AGENTS[:agents],
            "dashes": DASHES,
            "levels": np.rint(shown.positions[..., 2] / world.SPACING - 1).astype(int).tolist(),
            "marks": [up(_beside(places)) for places in shown.positions],
            "paths": [up(_path(agent, agents, shown.positions)) for agent in range(agents)],
            "boxes": [
                [[*up([[x0, y1]])[0], round(x1 - x0, 2), round(y1 - y0, 2)] for x0, y0, x1, y1 in boxes]
                for boxes in shown.boxes.tolist()
            ],
            "links": [np.argwhere(np.triu(heard | heard.T, 1)).tolist() for heard in shown.heard],
        }
        return viewing.page(record, self._svg(shown), self._legend(), _SCRIPT, data)

    def _svg(self, shown: Scene) -> str:
        side, border = shown.side, []
        images = "".join(
            f'<image class="belief" width="{side:.3f}" height="{side:.3f}" preserveAspectRatio="none" '
            f'style="display:none;image-rendering:pixelated" href="{_data_uri(cells)}"/>'
            for cells in shown.belief
        )
        for (x0, y0), (x1, y1) in shown.borders:
            border.append(f"M{x0:.2f} {side - y0:.2f}L{x1:.2f} {side - y1:.2f}")
        path = "".join(border)
        marks = "".join(
            f'<text x="{metre}" y="{side + 2.2:.2f}" text-anchor="middle">{metre}</text>'
            f'<text x="-0.8" y="{side - metre + 0.6:.2f}" text-anchor="end">{metre}</text>'
            for metre in range(0, 50, 10)
        )
        return (
            f'<svg id="map" viewBox="-4.4 -1.4 56 {side + 5.6:.2f}" role="img" aria-label="map of the mission">'
            "<style>#map .ticks text{font-size:1.5px;fill:var(--soft)}"
            "#map .agent text{font-size:1.75px;font-weight:700;fill:#fff;text-anchor:middle}</style>"
            f'<g class="ticks">{marks}<text x="{side / 2:.2f}" y="{side + 3.8:.2f}" text-anchor="middle">x in m</text>'
            f'<text transform="translate(-3.2 {side / 2:.2f}) rotate(-90)" text-anchor="middle">y in m</text></g>'
            f'{images}<rect width="{side:.3f}" height="{side:.3f}" fill="none" stroke="#9aa4af" stroke-width=".15"/>'
            f'<g id="truth" fill="none" stroke-linecap="square"><path d="{path}" stroke="#fff" '
            f'stroke-width=".75"/><path d="{path}" stroke="{INK}" stroke-width=".3"/></g>'
            '<g id="paths" fill="none" stroke-linejoin="round" stroke-linecap="round"></g><g id="links"></g>'
            '<g id="boxes" fill="none"></g><g id="agents"></g></svg>'
        )

    def _legend(self) -> str:
        shades = ", ".join(f"{colour} {place:.0%}" for place, colour in _ANCHORS)
        layer = '<label><input type="checkbox" checked data-layer="{}">{}</label>'
        layers = "".join(
            layer.format(*names)
            for names in (("truth", "true region"), ("boxes", "footprints"), ("paths", "paths"), ("links", "messages"))
        )
        samples = "".join(
            '<span style="display:inline-flex;gap:6px;align-items:center;margin-right:14px"><svg width="34" height="8" '
            f'viewBox="0 0 6.8 1.6"><path d="M0 .8H6.8" stroke="currentColor" stroke-width=".45" '
            f'stroke-dasharray="{dash}"/></svg>from {altitude} m</span>'
            for dash, altitude in zip(DASHES, ALTITUDES, strict=True)
        )
        return (
            f'<div style="display:flex;gap:8px;align-items:center;flex-wrap:wrap"><span>believed to be free</span>'
            f'<span style="flex:1;min-width:80px;height:12px;border-radius:3px;background:linear-gradient(90deg, '
            f'{shades})"></span><span>of interest</span><span style="width:14px;height:12px;border-radius:3px;'
            f'background:{_UNSEEN}"></span><span>never seen</span></div><div>footprints: {samples}</div>'
            f"<div>{layers}</div>"
        )

    # Pictures

    def frames(self, record: Record) -> list[Any]:
        """Return one image per time step: the map, and the curve of the score beside it."""
        shown, spec = scene(record, side=400), record.env.spec
        width, height, below = 9.6, 5.7, 0.7  # of the picture and of the key under it, inches
        up = lambda y: (below + y * (height - below)) / height  # noqa: E731
        images = []
        for step in range(record.steps + 1):
            drawn = viewing.figure(width, height, dpi=100)
            self._map(drawn.add_axes((0.055, up(0.1), 0.43, 0.43 * width / height)), shown, step, size=1.0)
            chart = drawn.add_axes((0.56, up(0.16), 0.27, 0.46 * (height - below) / height))
            viewing.plot_metric(chart, record, spec.score, step)
            chart.set_xlabel("step", color="#4a5560", fontsize=9)
            chart.set_title(spec.label(spec.score), loc="left", fontsize=10, color=INK, weight="bold")
            x = 0.56
            title = "\n".join(textwrap.wrap(record.title, 50))
            drawn.text(x, up(0.945), title, fontsize=10, color=INK, weight="bold", va="top")
            drawn.text(x, up(0.845), record.subtitle, fontsize=9, color="#4a5560", va="top")
            words = f"step {step} of {record.steps} · {record.step_label(step)}"
            drawn.text(x, up(0.765), words, fontsize=10, color="#4a5560")
            values = "   ".join(_told(record, name, step) for name in (spec.score, "f1", "return"))
            drawn.text(x, up(0.715), values, fontsize=9, color=INK)
            self._key_rows(drawn, below / height)
            images.append(viewing.image(drawn))
        return images

    def picture(self, record: Record) -> Any:
        """Return a picture of four maps, from the start to the end, above the curve of the score."""
        shown, spec, steps = scene(record, side=400), record.env.spec, record.steps
        steps_shown = [0, *(max(1, round(steps * share / 3)) for share in (1, 2, 3))]
        width, height = 13.0, 7.5
        drawn = viewing.figure(width, height, dpi=150)
        drawn.text(0.035, 0.966, record.title, fontsize=14, weight="bold", color=INK, va="center")
        drawn.text(0.035, 0.932, record.subtitle, fontsize=10.5, color="#4a5560", va="center")
        edge = 0.222
        for place, (step, name) in enumerate(zip(steps_shown, ("start", "a third", "two thirds", "end"), strict=True)):
            axes = drawn.add_axes((0.035 + place * 0.2415, 0.452, edge, edge * width / height))
            self._map(axes, shown, step, size=0.9, ticks=place == 0)
            axes.set_title(name, loc="left", fontsize=12, weight="bold", color=INK, pad=22)
            note = f"{record.step_label(step)} · {_told(record, spec.score, step)}"
            axes.text(0, 1.022, note, transform=axes.transAxes, fontsize=9, color="#4a5560")
        chart = drawn.add_axes((0.062, 0.085, 0.50, 0.29))
        viewing.plot_metric(chart, record, spec.score)
        chart.set_ylabel(spec.label(spec.score), color=INK, fontsize=10.5)
        chart.set_xlabel("step", color="#4a5560", fontsize=9.5)
        for step in steps_shown:
            chart.axvline(step, color="#b9c1ca", linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
        self._key(drawn.add_axes((0.745, 0.06, 0.235, 0.31)))
        return viewing.image(drawn)

    def _map(self, axes: Any, shown: Scene, step: int, size: float, ticks: bool = True) -> None:
        """Draw one time step on matplotlib axes; `size` scales lines and markers."""
        from matplotlib.collections import LineCollection
        from matplotlib.patches import Rectangle
        from matplotlib.patheffects import withStroke

        side, agents = shown.side, shown.positions.shape[1]
        colours = palette()[shown.belief[step]].swapaxes(0, 1)
        axes.imshow(colours, origin="lower", extent=(0, side, 0, side), interpolation="nearest")
        axes.add_collection(
            LineCollection(list(shown.borders), colors="white", linewidths=3.2 * size, zorder=2.6, clip_on=False)
        )
        axes.add_collection(
            LineCollection(list(shown.borders), colors=INK, linewidths=1.5 * size, zorder=2.7, clip_on=False)
        )
        places = _beside(shown.positions[step])
        for i, j in np.argwhere(np.triu(shown.heard[step] | shown.heard[step].T, 1)):
            axes.plot(*places[[i, j]].T, color=INK, linewidth=1.1 * size, linestyle=(0, (1, 1.6)), zorder=3)
        for agent in range(agents):
            colour, level = AGENTS[agent], round(shown.positions[step, agent, 2] / world.SPACING) - 1
            halo = [withStroke(linewidth=3.4 * size, foreground="white")]
            path = _path(agent, agents, shown.positions)[: step + 1]
            if step:
                axes.plot(*path.T, color=colour, linewidth=1.7 * size, zorder=4, path_effects=halo,
                          solid_joinstyle="round")  # fmt: skip
                axes.plot(*path[:-1].T, ".", color=colour, markersize=5 * size, zorder=4)
            x0, y0, x1, y1 = shown.boxes[step, agent]
            axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=colour, linewidth=1.5 * size,
                                     linestyle=_dash(level), path_effects=halo, zorder=5))  # fmt: skip
        for agent, place in enumerate(places):
            axes.plot(*place, "o", color=AGENTS[agent], markersize=13.5 * size, markeredgecolor="white",
                      markeredgewidth=1.5 * size, zorder=6, clip_on=False)  # fmt: skip
            axes.text(*place, str(agent + 1), color="white", fontsize=8.2 * size, weight="bold", ha="center",
                      va="center_baseline", zorder=7)  # fmt: skip
        axes.set_xlim(0, side)
        axes.set_ylim(0, side)
        marks: Sequence[int] = range(0, 50, 10) if ticks else ()
        axes.set_xticks(marks)
        axes.set_yticks(marks)
        axes.tick_params(colors="#66717d", labelsize=8, length=2.5)
        axes.spines[:].set_color("#9aa4af")

    def _key_rows(self, drawn: Any, height: float) -> None:
        """Draw the legend of colours and lines in two rows at the foot of a figure."""
        from matplotlib.lines import Line2D

        shades = (_ANCHORS[0][1], _ANCHORS[2][1], _ANCHORS[-1][1], _UNSEEN)
        cells = [
            Line2D(
                (), (), color=shade, marker="s", linestyle="", markersize=8, markeredgewidth=0.5, markeredgecolor=GREY
            )
            for shade in shades
        ]
        border = Line2D((), (), color=INK, linewidth=1.5)
        path = Line2D((), (), color=AGENTS[1], linewidth=1.7, marker=".", markersize=5)
        seen = [Line2D((), (), color=INK, linewidth=1.5, linestyle=_dash(level)) for level in range(len(ALTITUDES))]
        message = Line2D((), (), color=INK, linewidth=1.1, linestyle=(0, (1, 1.6)))
        words = ("believed to be free", "unknown", "believed of interest", "never seen", "border of the true region")
        rows = (
            ([*cells, border], words),
            ([*seen, path, message], [*(f"footprint seen from {metre} m" for metre in ALTITUDES), "path", "message"]),
        )
        for place, (signs, names) in zip((0.72, 0.3), rows, strict=True):
            drawn.legend(signs, names, loc="center left", bbox_to_anchor=(0.045, place * height), ncols=len(signs),
                         frameon=False, borderaxespad=0, borderpad=0, handletextpad=0.5, columnspacing=1.5,
                         handlelength=2.2, fontsize=8.5, labelcolor="#4a5560")  # fmt: skip

    def _key(self, axes: Any) -> None:
        """Draw the legend of colours and lines."""
        axes.axis("off")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.imshow(palette()[None, 1:], extent=(0.0, 0.72, 0.80, 0.90), aspect="auto")
        axes.imshow(palette()[None, :1], extent=(0.80, 1.0, 0.80, 0.90), aspect="auto")
        words = {"size": 9, "color": "#4a5560"}
        for x, text, align in ((0.0, "free", "left"), (0.36, "unknown", "center"),
                               (0.72, "of interest", "right"), (0.90, "never seen", "center")):  # fmt: skip
            axes.text(x, 0.73, text, ha=align, va="center", **words)
        for level, altitude in enumerate(ALTITUDES):
            y = 0.56 - 0.12 * level
            axes.plot((0, 0.13), (y, y), color=INK, linewidth=1.5, linestyle=_dash(level))
            axes.text(0.17, y, f"seen from {altitude} m", va="center", **words)
        axes.plot((0.56, 0.69), (0.56, 0.56), color=INK, linewidth=1.2)
        axes.text(0.73, 0.56, "true region", va="center", **words)
        axes.plot((0.56, 0.69), (0.44, 0.44), color=INK, linewidth=1.1, linestyle=(0, (1, 1.6)))
        axes.text(0.73, 0.44, "message", va="center", **words)
        axes.plot((0.56, 0.66), (0.32, 0.32), ".-", color=AGENTS[1], linewidth=1.7, markersize=5)
        axes.plot(0.675, 0.32, "o", color=AGENTS[1], markersize=9, markeredgecolor="white")
        axes.text(0.73, 0.32, "path", va="center", **words)


def _told(record: Record, metric: str, step: int) -> str:
    """Return a metric at a time step in words."""
    words, _, unit = record.env.spec.label(metric).partition(", ")
    return f"{words} {record.curves[metric][step]:.3f} {unit}".rstrip()


def _dash(level: int) -> Any:
    return ("-", (0, (5, 2)), (0, (1, 1.4)))[level]


def _data_uri(cells: np.ndarray) -> str:
    """A palette PNG of uint8[s, s] cells, x to the right and y upwards, as a data URI."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(cells.T[::-1]), mode="P")
    picture.putpalette(palette().tobytes())
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


_SCRIPT = """
const layer = id => document.getElementById(id);
function draw(step, scene) {
  document.querySelectorAll("#map .belief").forEach((image, k) => { image.style.display = k === step ? "" : "none"; });
  const agents = [...Array(scene.agents).keys()];
  if (!layer("agents").childElementCount) layer("agents").innerHTML = agents.map(a => `<g class="agent">` +
    `<circle r="1.35" fill="${scene.colours[a]}" stroke="#fff" stroke-width=".28"/><text y=".62">${a + 1}</text></g>`
    ).join("");
  agents.forEach(a => { const [x, y] = scene.marks[step][a];
    layer("agents").children[a].setAttribute("transform", `translate(${x} ${y})`); });
  layer("paths").innerHTML = agents.map(a => {
    const points = scene.paths[a].slice(0, step + 1), line = points.map(p => p.join(" ")).join(" ");
    return `<polyline points="${line}" stroke="#fff" stroke-width=".75"/>` +
      `<polyline points="${line}" stroke="${scene.colours[a]}" stroke-width=".42"/>` +
      points.slice(0, -1).map(([x, y]) => `<circle cx="${x}" cy="${y}" r=".45" fill="${scene.colours[a]}"/>`).join("");
  }).join("");
  layer("boxes").innerHTML = agents.map(a => { const [x, y, w, h] = scene.boxes[step][a];
    const box = `<rect x="${x}" y="${y}" width="${w}" height="${h}"`;
    return `${box} stroke="#fff" stroke-width=".6" stroke-opacity=".75"/>${box} stroke="${scene.colours[a]}" ` +
      `stroke-width=".36" stroke-dasharray="${scene.dashes[scene.levels[step][a]]}" stroke-linecap="round"/>`;
  }).join("");
  layer("links").innerHTML = scene.links[step].map(([i, j]) => {
    const p = scene.marks[step][i], q = scene.marks[step][j];
    return `<line x1="${p[0]}" y1="${p[1]}" x2="${q[0]}" y2="${q[1]}" stroke="#1d2733" stroke-width=".22" ` +
      `stroke-dasharray=".4 .6"/>`; }).join("");
}
"""
