"""Viewer of missions: the team's belief, the true region of interest, agents, their footprints and messages.

In drawings, x is to the right and y upwards, in metres. Colours are distinguishable for colour-blind readers:
blue is believed free, orange is believed of interest, white is observed but unknown, grey was never observed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax import viewing
from envs_jax.coverage import belief, communication, terrain, world
from envs_jax.coverage.types import CoverageConfig
from envs_jax.viewing import INK, SOFT, Drawing, LegendEntry, Panel, Record, Shape, Style
from envs_jax.viewing.drawing import disc, path, rectangle, text, trail

SIDE = 200  # most pixels along a map
AGENTS = (
    "#00795c", "#a01f86", "#6a3fc4", "#8c1d2c", "#00667f", "#5b6400", "#5d6673", "#7a4a00", "#1d4fa0", "#4c2a5e",
    "#2f6b2f", "#9c4a6b",
)  # fmt: skip
ALTITUDES = tuple(int(world.SPACING * (level + 1)) for level in range(world.LEVELS))
DASHES = ((), (1.6, 0.9), (0.25, 0.8))  # for footprints by altitude, m

_ANCHORS = ((0.0, "#235a92"), (0.25, "#86abcf"), (0.5, "#fbfaf7"), (0.75, "#f2a868"), (1.0, "#c04e05"))
_UNSEEN = "#d3d7dc"

STYLES = {
    "free": Style(_ANCHORS[0][1]),
    "unknown": Style(_ANCHORS[2][1], "#8a94a0", 0.1),
    "interest": Style(_ANCHORS[-1][1]),
    "unseen": Style(_UNSEEN),
    "border": Style(stroke="#ffffff", width=0.75),
    "truth": Style(stroke=INK, width=0.3),
    "halo": Style(stroke="#ffffff", width=0.7, opacity=0.75),
    "link": Style(stroke=INK, width=0.22, dash=(0.4, 0.6)),
    "number": Style("#ffffff", size=1.75),
    "failed": Style("#ffffff", INK, 0.28),
    "across": Style(SOFT, size=1.5),
    "up": Style(SOFT, size=1.5, anchor="end"),
}
for _a, _colour in enumerate(AGENTS):
    STYLES |= {f"agent{_a}": Style(_colour, "#ffffff", 0.28), f"path{_a}": Style(stroke=_colour, width=0.42)}
    STYLES |= {f"box{_a}-{_l}": Style(stroke=_colour, width=0.36, dash=dash) for _l, dash in enumerate(DASHES)}


def legend(stretch: float, fails: bool) -> tuple[LegendEntry, ...]:
    """Return the legend; altitudes are `stretch` times the published ones. With `fails` UAVs may fail."""
    heights = [f"{metre * stretch:g}" for metre in ALTITUDES]
    return (
        LegendEntry("believed to be free", "free", "area"),
        LegendEntry("unknown", "unknown", "area"),
        LegendEntry("believed of interest", "interest", "area"),
        LegendEntry("never seen", "unseen", "area"),
        *(LegendEntry(f"footprint seen from {metres} m", f"box0-{level}") for level, metres in enumerate(heights)),
        LegendEntry("border of the true region", "truth"),
        LegendEntry("path", "path0"),
        LegendEntry("message", "link"),
        *([LegendEntry("failed UAV", "failed", "disc")] if fails else []),
    )


@functools.cache
def palette() -> np.ndarray:
    """uint8[256, 3]: entry 0 for cells never observed, 1 to 255 for probabilities from 0 to 1."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    table = LinearSegmentedColormap.from_list("belief", _ANCHORS, N=255)(np.arange(255))[:, :3]
    return np.rint(255 * np.concatenate([[to_rgb(_UNSEEN)], table])).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Data drawn of a mission, K = T + 1 time steps, lengths in metres where the area is 50 m wide."""

    side: float  # edge of the mapped area
    belief: np.ndarray  # uint8[K, s, s], the team's belief as entries of `palette`; axis 0 is x, axis 1 is y
    borders: np.ndarray  # float[M, 2, 2], segments (x, y) to (x, y) around the true region of interest
    positions: np.ndarray  # float[K, A, 3]
    boxes: np.ndarray  # float[K, A, 4], measured footprints: x from, y from, x to, y to
    heard: np.ndarray  # bool[K, A, A], [i, j] = agent i received the message of agent j
    present: np.ndarray  # bool[K, A], agents that fly


def shrink(values: np.ndarray, side: int) -> np.ndarray:
    """float32[s, s]: a square map area-averaged to at most `side` cells along an edge."""
    from PIL import Image

    n = len(values)
    s = -(-n // -(-n // side))
    picture = Image.fromarray(np.ascontiguousarray(values, np.float32))
    return np.asarray(picture.resize((s, s), Image.Resampling.BOX))


def borders(truth: np.ndarray) -> np.ndarray:
    """float[M, 2, 2]: the edges (x, y) to (x, y) of cells at the border of what is true in bool[s, s]."""
    framed = np.pad(truth, 1).astype(np.int8)
    left = np.argwhere(np.diff(framed, axis=0)[:, 1:-1])  # the cells to the right of an edge
    below = np.argwhere(np.diff(framed, axis=1)[1:-1])
    pairs = np.stack([left, left + (0, 1)], axis=1), np.stack([below, below + (1, 0)], axis=1)
    return np.concatenate(pairs).astype(np.float64)


def scene(record: Record) -> Scene:
    """Return the scene of a record, maps reduced to at most SIDE cells along an edge."""
    env: CoverageConfig = record.env  # type: ignore[assignment]
    states = record.states
    n = env.n
    metres = world.cell_size(env.q)
    maps = []
    for k in range(record.steps + 1):
        stored = np.asarray(states.maps.beliefs[k, -1])
        p = shrink(np.asarray(_probability(env, stored)), SIDE)
        seen = shrink((stored != env.storage.unseen).astype(np.float32), SIDE) >= 0.5
        maps.append(np.where(seen, 1 + np.round(np.clip(p, 0.0, 1.0) * 254.0), 0).astype(np.uint8))
    ground, corners = _places(env, jax.tree.map(lambda leaf: leaf[0], states.terrain), states.positions)
    truth = shrink(np.asarray(ground).astype(np.float32), SIDE) >= 0.5
    return Scene(
        side=n * metres,
        belief=np.stack(maps),
        borders=borders(truth) * (n * metres / len(truth)),
        positions=(np.asarray(states.positions) + (0, 0, 1)) * world.SPACING,
        boxes=np.asarray(corners) * metres,
        heard=np.asarray(_heard(env, states.key, states.positions, states.comm_range, states.channel, states.team)),
        present=np.asarray(states.team.present) if env.has_teams else np.ones(states.positions.shape[:2], bool),
    )


@functools.partial(jax.jit, static_argnums=0)  # one program, not one for each operation
def _probability(env: CoverageConfig, stored: Any) -> Any:
    """float[n, n]: probabilities of a map as the environment stores it."""
    return belief.probability(env.storage.log_odds(stored))


@functools.partial(jax.jit, static_argnums=0)
def _places(env: CoverageConfig, ground: Any, positions: Any) -> tuple[Any, Any]:
    """bool[n, n], the true region; int[T, A, 4], the corners of footprints in cells."""
    box = world.clip_footprint(world.footprint(positions, env.q), env.n)
    return terrain.whole(ground, env.n), jnp.stack([box.top, box.left, box.bottom, box.right], axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _heard(env: CoverageConfig, keys: Any, positions: Any, comm_range: Any, channel: Any = (), team: Any = ()) -> Any:
    """bool[T, A, A]: messages received at each time, drawn as the environment draws them."""
    index = jnp.arange(len(positions), dtype=jnp.int32)
    if not channel:
        rates = jnp.full(index.shape, env.failure_rates[0], jnp.float32)
        return jax.vmap(communication.draw_received)(keys, index, positions, comm_range, rates, team)
    sent = index - channel.delay
    at = jnp.maximum(sent, 0)
    links = keys, at, positions[at], comm_range, channel.failure_rate, jax.tree.map(lambda leaf: leaf[at], team)
    received = jax.vmap(communication.draw_received)(*links) & (sent >= 0)[:, None, None]
    return received & team.present[:, :, None] if team else received


def _spread_markers(positions: np.ndarray) -> np.ndarray:
    """float[A, 2]: places of markers at one time: agents above each other side by side."""
    places = positions[:, :2].copy()
    for place in np.unique(places, axis=0):
        here = np.flatnonzero(np.all(positions[:, :2] == place, axis=1))
        places[here, 0] += 2.6 * (np.arange(len(here)) - (len(here) - 1) / 2)
    return places


class CoverageViewer(viewing.Viewer):
    """See `envs_jax.viewing.Viewer`."""

    def drawing(self, record: Record) -> Drawing:
        env: CoverageConfig = record.env  # type: ignore[assignment]
        mission = scene(record)
        stretch = env.stretch
        side = mission.side
        agents = mission.positions.shape[1]
        flip = np.array([1, -1])

        def up(points: np.ndarray) -> np.ndarray:
            return points * flip + (0, side)

        gap = min(0.5, 1.5 / max(agents - 1, 1))  # between paths, so that shared stretches show
        paths = [up(mission.positions[:, a, :2] + gap * (a - (agents - 1) / 2)) for a in range(agents)]
        ticks = [(metre, f"{metre * stretch:g}") for metre in range(0, 50, 10)]
        still = [
            *(text("across", (metre, side + 1.9), words + " m" * (metre == 40)) for metre, words in ticks),
            *(text("up", (-0.6, side - metre + 0.6), words) for metre, words in ticks),
            *(path(style, *map(up, mission.borders)) for style in ("border", "truth")),
            *(
                trail(style, points)
                for a, points in enumerate(paths)
                if mission.present[0, a]
                for style in ("halo", f"path{a}")
            ),
        ]

        def at(step: int) -> list[Shape]:
            places = up(_spread_markers(mission.positions[step]))
            heard = mission.heard[step]
            shapes = [path("link", *(places[pair] for pair in np.argwhere(np.triu(heard | heard.T, 1))))]
            flying = np.flatnonzero(mission.present[step])
            for agent in np.flatnonzero(mission.present[0] & ~mission.present[step]):
                shapes += [
                    disc("failed", 1.35, places[agent]),
                    text("across", places[agent] + (0, 0.5), str(agent + 1)),
                ]
            for agent in flying:
                box = mission.boxes[step, agent]
                level = round(mission.positions[step, agent, 2] / world.SPACING) - 1
                (left, bottom), (right, top) = up(box[:2]), up(box[2:])
                shapes += [rectangle(style, left, top, right, bottom) for style in ("halo", f"box{agent}-{level}")]
            for agent in flying:
                place = places[agent]
                label = text("number", place + (0, 0.62), str(agent + 1))
                shapes += [disc(f"agent{agent}", 1.35, place), label]
            return shapes

        panel = Panel(
            title="",
            box=(-3.0, -2.6, side + 2.6, side + 3.0),  # UAVs at the edge are whole
            still=still,
            steps=[at(step) for step in range(record.steps + 1)],
            images=palette()[mission.belief.swapaxes(1, 2)[:, ::-1]],
            image_box=(0.0, 0.0, side, side),
        )
        return Drawing([panel], STYLES, legend(stretch, env.loss_rate > 0))
