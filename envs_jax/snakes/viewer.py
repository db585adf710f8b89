"""Viewer of games: the board, the learners' actions, meals, deaths and scores.

The learner's team is drawn in cool colours, the other in warm ones; where every snake plays for itself, each has its
own hue. Snakes are counted from 1. A body is thick at the head and thin at the tail, one dot per cell; the eyes
point in the stored direction. Pictures measure in cells: x = column to the right, y = row downwards.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs_jax import viewing
from envs_jax.snakes.board import COLUMN_STEP, ROW_STEP, Board
from envs_jax.snakes.scene import NOBODY, Scene, breadth, events, links, scene
from envs_jax.snakes.segments import Cell
from envs_jax.viewing import GREY, INK, Line, Record

BEAN, SOFT = "#3d8f2c", "#4a5560"
FIELDS = ("#f3f5f7", "#e9edf1")
FADING = (0.45, 0.28, 0.15)  # opacity of a snake that died one, two, three steps ago
_STEPS = np.stack([ROW_STEP, COLUMN_STEP], axis=-1)  # by direction


@dataclasses.dataclass(frozen=True)
class SnakesViewer:
    """See `envs_jax.viewing.Viewer`."""

    rate: int = 10

    # Pages

    def html(self, record: Record) -> str:
        """Return a page that draws the game as vectors; bodies are stored as the trails of their heads."""
        shown = scene(record)
        flat = lambda cells: [r * shown.board.width + c for r, c in cells]  # noqa: E731
        trails, ends = _trails(shown)
        data = {
            "height": shown.board.height,
            "width": shown.board.width,
            "colours": shown.colours,
            "trails": [flat(trail) for trail in trails],
            "ends": ends.T.tolist(),
            "lengths": shown.lengths.T.tolist(),
            "longest": int(shown.lengths.max()),
            "directions": ["".join(map(str, row)) for row in shown.directions],
            "chosen": ["".join("-" if a == NOBODY else str(a) for a in row) for row in shown.chosen],
            "beans": [flat(beans) for beans in shown.beans],
            "dead": [[[i, flat(body)] for i, body in dead] for dead in shown.dead],
            "fading": FADING,
            "sides": [
                {
                    "label": f"{s.player} · {s.numbers}",
                    "colour": s.colour,
                    "snakes": s.snakes,
                    "score": s.score.tolist(),
                }
                for s in shown.sides
            ],
        }
        names = ("score", "opponent_score", "score_difference", "return", "meals", "deaths", "opponent_meals",
                 "opponent_deaths")  # fmt: skip
        figures = [name for name in names if name in record.curves]
        lines: dict[str, list[Line]] = {name: shown.lines for name in figures if name.endswith("score")}
        levels = {name: shown.levels(record, name) for name in figures}
        board = self._html(shown.board)
        legend = _LEGEND + (_LEVELS if any(levels.values()) else "")
        return viewing.page(record, board, legend, _SCRIPT, data, figures, lines, levels, events(shown), self.rate)

    def _html(self, board: Board) -> str:
        height, width = board
        side = max(height, width)  # a board higher than wide does not fill the width of the page
        fields = "".join(f"M{c} {r}h1v1h-1z" for r in range(height) for c in range(width) if (r + c) % 2)
        return (
            f"<style>{_STYLE}</style>"
            '<div id="sides"></div>'
            f'<svg id="board" viewBox="{(width - side) / 2 - 0.15} -0.15 {side + 0.3} {height + 0.3}" role="img" '
            f'aria-label="board of the game"><clipPath id="edge"><rect width="{width}" height="{height}"/></clipPath>'
            f'<rect width="{width}" height="{height}" fill="{FIELDS[0]}"/><path d="{fields}" fill="{FIELDS[1]}"/>'
            '<g clip-path="url(#edge)"><g id="ghosts"></g><g id="beans"></g><g id="snakes"></g><g id="choices"></g>'
            '<g id="deaths"></g></g>'
            f'<rect width="{width}" height="{height}" fill="none" stroke="#9aa4af" stroke-width=".08" '
            'stroke-dasharray=".5 .25"/></svg><div id="lengths"></div>'
        )

    # Pictures

    def frames(self, record: Record) -> list[Any]:
        """Return one image per time step: the board, and the curves of the scores and the lengths beside it."""
        shown = scene(record)
        labels = events(shown)
        height, width = shown.board
        n, cell = len(shown.colours), min(6.0 / width, 4.8 / height, 0.6)
        top, chart_height, bars = 0.95, 1.5, 0.19 * n
        whole = top + max(height * cell, chart_height + 0.75 + bars) + 0.8
        most = shown.lengths.max()
        images = []
        for step in range(record.steps + 1):
            drawn = viewing.figure(9.6, whole, dpi=100)
            self._heading(drawn, record, shown, step)
            left = 0.25 + (6.0 - width * cell) / 2
            self._board(_axes(drawn, left, top, width * cell, height * cell), 72 * cell, shown, step)
            below = top + height * cell + 0.23
            words = f"step {step} of {record.steps}" + (f" · {labels[step]}" if labels[step] else "")
            _text(drawn, left, below, words, fontsize=9.5, color=SOFT, va="center")
            chart = _axes(drawn, 6.75, top + 0.05, 1.85, chart_height)
            self._curves(chart, record, shown, step)
            axes = _axes(drawn, 6.75, top + chart_height + 0.72, 2.2, bars)
            self._bars(axes, shown, step, most)
            self._key(_axes(drawn, 0.25, whole - 0.38, 8.6, 0.3))
            images.append(viewing.image(drawn))
        return images

    def picture(self, record: Record) -> Any:
        """Return four boards, start to end, beside the curves of the scores and the lives of the snakes."""
        shown = scene(record)
        height, width = shown.board
        n, steps = len(shown.colours), record.steps
        across = 4 if height > 1.5 * width else 2  # boards in a row
        box = 8.6 / across - 0.15
        cell = min(box / width, 4.6 / height if across == 4 else 3.4 / height, 0.7)
        top, pitch, chart_height, between = 1.38, height * cell + 0.45, 1.75, 0.82
        inner = max(4 // across * pitch - 0.45, chart_height + between + 0.26 * n)
        drawn = viewing.figure(13.0, top + inner + 0.72, dpi=150)
        self._heading(drawn, record, shown, steps, large=True)
        self._key(_axes(drawn, 0.35, top + inner + 0.22, 8.6, 0.3))
        steps_shown = [0, *(max(1, round(steps * share / 3)) for share in (1, 2, 3))]
        for place, (step, name) in enumerate(zip(steps_shown, ("start", "a third", "two thirds", "end"), strict=True)):
            left = 0.35 + (box - width * cell) / 2 + (place % across) * (box + 0.3)
            above = top + (place // across) * pitch
            self._board(_axes(drawn, left, above, width * cell, height * cell), 72 * cell, shown, step)
            _text(drawn, left, above - 0.13, f"{name} · step {step}", fontsize=11, color=INK, weight="bold",
                  va="center")  # fmt: skip
        chart = _axes(drawn, 9.65, top, 2.35, chart_height)
        self._curves(chart, record, shown, steps)
        strip = _axes(drawn, 9.65, top + chart_height + between, 2.35, inner - chart_height - between)
        self._lives(strip, shown)
        for axes in (chart, strip):
            for step in steps_shown:
                axes.axvline(step, color="#b9c1ca", linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
        return viewing.image(drawn)

    def _heading(self, drawn: Any, record: Record, shown: Scene, step: int, large: bool = False) -> None:
        """Draw title, players, and the scores of the sides at a time step."""
        scale = 1.35 if large else 1.0
        left = 0.35 if large else 0.25
        _text(drawn, left, 0.27 * scale, record.title, fontsize=10.5 * scale, color=INK, weight="bold", va="center")
        _text(drawn, left, 0.50 * scale, record.subtitle, fontsize=8.5 * scale, color=SOFT, va="center")
        right = drawn.get_size_inches()[0] - left
        for side, above in zip(shown.sides, (0.27, 0.56), strict=False):
            _text(drawn, right, above * scale, str(side.score[step]), fontsize=15 * scale, color=side.colour,
                  weight="bold", va="center_baseline", ha="right")  # fmt: skip
            words = f"{side.player} · {side.numbers}"
            _text(drawn, right - 0.47 * scale, above * scale, words, fontsize=10.5 * scale, color=side.colour,
                  va="center_baseline", ha="right")  # fmt: skip

    def _curves(self, axes: Any, record: Record, shown: Scene, step: int) -> None:
        viewing.plot_metric(axes, record, "score", step, shown.lines, shown.levels(record, "score"))
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_title(record.env.spec.label("score"), loc="left", fontsize=10, color=INK, weight="bold")
        axes.set_xlabel("step", color=SOFT, fontsize=9)

    def _bars(self, axes: Any, shown: Scene, step: int, most: int) -> None:
        """Draw the lengths at a time step."""
        lengths = shown.lengths[step]
        order = [i for side in shown.sides for i in side.snakes]
        axes.axis("off")
        axes.set_xlim(0, most * 1.12)
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.barh(range(len(order)), lengths[order], height=0.68, color=[shown.colours[i] for i in order])
        for place, i in enumerate(order):
            axes.text(-0.02 * most, place, str(i + 1), fontsize=8.5, weight="bold", color=shown.colours[i], ha="right",
                      va="center_baseline")  # fmt: skip
            axes.text(lengths[i] + 0.02 * most, place, str(lengths[i]), fontsize=8.5, color=SOFT, va="center_baseline")
        axes.set_title("length, cells", loc="left", fontsize=10, color=INK, weight="bold", pad=3)

    def _lives(self, axes: Any, shown: Scene) -> None:
        """Draw for every snake a band as wide as it is long, and a cross where it died."""
        from matplotlib.patheffects import withStroke

        lengths, steps = shown.lengths, np.arange(len(shown.bodies))
        order = [i for side in shown.sides for i in side.snakes]
        for place, i in enumerate(order):
            half = 0.46 * lengths[:, i] / lengths.max()
            axes.fill_between(
                steps, place - half, place + half, step="mid", color=shown.colours[i], linewidth=0, zorder=2
            )
            deaths = np.flatnonzero(shown.died[:, i])
            axes.plot(deaths, np.full(len(deaths), place), "x", color=INK, markersize=5, markeredgewidth=1.3, zorder=3,
                      path_effects=[withStroke(linewidth=2.6, foreground="white")])  # fmt: skip
            axes.text(1.02, place, f"snake {i + 1}", transform=axes.get_yaxis_transform(), fontsize=9.5,
                      color=shown.colours[i], weight="bold", va="center")  # fmt: skip
        axes.set_xlim(0, len(steps) - 1)
        axes.set_ylim(len(order) - 0.45, -0.55)
        axes.set_yticks(())
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GREY)
        axes.tick_params(colors=SOFT, labelsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title("lengths, and × deaths", loc="left", fontsize=10, color=INK, weight="bold")
        axes.set_xlabel("step", color=SOFT, fontsize=9)

    def _key(self, axes: Any) -> None:
        """Draw the legend of a board in a row; the axes are measured in inches."""
        axes.axis("off")
        axes.set_xlim(0, 8.6)
        axes.set_ylim(-0.15, 0.15)
        axes.scatter(0.07, 0, s=60, c=[INK], marker=">", linewidths=0)
        axes.scatter(1.92, 0, s=55, c=["white"], marker=">", edgecolors=[INK], linewidths=1.1)
        axes.scatter(5.53, 0, s=75, c=[BEAN], linewidths=0)
        axes.scatter(6.29, 0, s=55, c=[INK], marker="x", linewidths=2, alpha=2 * FADING[0])
        words = ("chosen by a learner", "chosen straight back: one of the others is drawn", "bean",
                 "died here, paler with time")  # fmt: skip
        for x, text in zip((0.2, 2.05, 5.66, 6.43), words, strict=True):
            axes.text(x, 0, text, fontsize=9.5, color=SOFT, va="center_baseline")

    def _board(self, axes: Any, cell: float, shown: Scene, step: int) -> None:
        """Draw one time step on matplotlib axes whose cells are `cell` points wide."""
        from matplotlib.collections import LineCollection
        from matplotlib.colors import ListedColormap, to_rgb

        height, width = shown.board
        rows, columns = np.mgrid[:height, :width]
        axes.imshow((rows + columns) % 2, cmap=ListedColormap(FIELDS), vmin=0, vmax=1, interpolation="nearest",
                    aspect="auto")  # fmt: skip

        def dots(points: Sequence[tuple[Any, float, Any]], zorder: float, marker: str = "o", **more: Any) -> None:
            """Draw points (cell, size, colour) in one layer."""
            if points:
                y, x = np.array([point for point, _, _ in points], np.float64).T
                areas = (np.array([size for _, size, _ in points]) * cell) ** 2
                more = {"linewidths": 0} | more
                axes.scatter(x, y, s=areas, c=[colour for _, _, colour in points], marker=marker, zorder=zorder, **more)

        def bodies(layer: Sequence[tuple[list[Cell], Any]], zorder: float) -> None:
            """Draw bodies (cells, colour) in one layer."""
            lines = [(a, b, breadth(k, len(cells)), colour) for cells, colour in layer
                     for k, a, b in links(shown.board, cells)]  # fmt: skip
            axes.add_collection(
                LineCollection([(a, b) for a, b, _, _ in lines], linewidths=[broad * cell for _, _, broad, _ in lines],
                               colors=[colour for _, _, _, colour in lines], capstyle="butt", zorder=zorder)
            )  # fmt: skip
            dots([(place, breadth(k, len(cells)), colour) for cells, colour in layer for k, place in enumerate(cells)],
                 zorder)  # fmt: skip

        for age, alpha in reversed(list(enumerate(FADING))):
            if step > age and shown.dead[step - age]:
                pale = [tuple(1 - alpha * (1 - np.array(to_rgb(colour)))) for colour in shown.colours]
                dead = [(cells, pale[i]) for i, cells in shown.dead[step - age]]
                bodies(dead, 1.5 - 0.1 * age)
                dots(
                    [(cells[0], 0.5, INK) for cells, _ in dead],
                    1.7 if age else 7,
                    "x",
                    linewidths=0.09 * cell,
                    alpha=2 * alpha,
                )
        dots([(bean, 0.56, BEAN) for bean in shown.beans[step]], 2)
        dots([((r - 0.09, c - 0.09), 0.14, "#ffffffb0") for r, c in shown.beans[step]], 2.1)

        alive = [i for i, cells in enumerate(shown.bodies[step]) if cells]
        heads = {i: np.array(shown.bodies[step][i][0]) for i in alive}
        ahead = {i: _STEPS[shown.directions[step, i]] for i in alive}
        bodies([(shown.bodies[step][i], shown.colours[i]) for i in alive], 3)
        dots([(place, 0.13, "#ffffffa0") for i in alive for place in shown.bodies[step][i][1:]], 3.1)
        dots([(heads[i], 0.94, shown.colours[i]) for i in alive], 4)
        eyes = [(heads[i] + 0.27 * ahead[i] + side * ahead[i][::-1], ahead[i]) for i in alive for side in (-0.25, 0.25)]
        dots([(eye, 0.27, "white") for eye, _ in eyes], 5)
        dots([(eye + 0.045 * way, 0.14, INK) for eye, way in eyes], 5.1)
        for i in alive:
            r, c = heads[i] - 0.13 * ahead[i]
            axes.text(c, r, str(i + 1), fontsize=0.44 * cell, color="white", weight="bold", ha="center",
                      va="center_baseline", zorder=6)  # fmt: skip
            choice = shown.chosen[step, i]
            if choice != NOBODY:
                place = (heads[i] + _STEPS[choice]) % (height, width) - 0.28 * _STEPS[choice]
                fill, edge = ("white", INK) if choice == shown.directions[step, i] ^ 1 else (INK, "white")
                dots([(place, 0.30, fill)], 6, "^v<>"[choice], edgecolors=edge, linewidths=0.04 * cell)
        axes.set_xlim(-0.5, width - 0.5)
        axes.set_ylim(height - 0.5, -0.5)
        axes.set_xticks(())
        axes.set_yticks(())
        axes.spines[:].set(color="#9aa4af", linestyle=(0, (5, 2.5)), linewidth=1.1)


def _trails(shown: Scene) -> tuple[list[list[Cell]], np.ndarray]:
    """For every snake the cells that its head passed, [n], and where its head is in them plus 1, int[K, n].

    A new life begins with its cells from tail to head; so the last cells up to the head are the body at any time step.
    """
    trails: list[list[Cell]] = [[] for _ in shown.colours]
    ends = np.zeros(shown.died.shape, int)
    for k, bodies in enumerate(shown.bodies):
        for i, body in enumerate(bodies):
            trails[i] += body[::-1] if k == 0 or shown.died[k, i] else body[:1]
            ends[k, i] = len(trails[i])
    return trails, ends


def _axes(drawn: Any, left: float, top: float, width: float, height: float) -> Any:
    """Axes in inches from the figure's top left corner."""
    w, h = drawn.get_size_inches()
    return drawn.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))


def _text(drawn: Any, left: float, top: float, text: str, **style: Any) -> None:
    """Text in inches from the figure's top left corner."""
    w, h = drawn.get_size_inches()
    drawn.text(left / w, 1 - top / h, text, **style)


_STYLE = """
#sides { display: flex; justify-content: space-between; gap: 16px; margin: 0 2px 8px; font-weight: 600; }
#sides b { font-size: 24px; line-height: 1; margin-right: 8px; font-variant-numeric: tabular-nums; }
#sides div:nth-child(2) { display: flex; flex-direction: row-reverse; }
#sides div:nth-child(2) b { margin: 0 0 0 8px; }
#sides div { display: flex; align-items: baseline; }
#lengths { display: grid; grid-template-columns: 1fr 1fr; gap: 3px 18px; margin-top: 10px; font-size: 13px;
  grid-auto-flow: column; }
#lengths div { display: grid; grid-template-columns: 20px 1fr 22px 16px; align-items: center; gap: 6px; }
#lengths i { font-style: normal; font-weight: 700; font-size: 11px; color: #fff; border-radius: 50%; width: 20px;
  height: 20px; line-height: 20px; text-align: center; }
#lengths s { display: block; height: 9px; border-radius: 5px; }
#lengths u { text-decoration: none; text-align: right; font-variant-numeric: tabular-nums; color: var(--soft); }
#board text { font: 700 .46px system-ui, sans-serif; fill: #fff; text-anchor: middle; }
"""

_LEGEND = f"""<div>Snakes are thick at the head and thin at the tail; the eyes look in the stored direction. The board
has no border: a snake that leaves on one side comes in on the other.</div>
<div><svg width="14" height="14" viewBox="-1 -1 2 2"><path d="M0 -.8L.8 .6H-.8z" fill="currentColor"/></svg> what a
learner chooses (hollow: straight back, where the rules draw one of the other three directions)
&nbsp; <svg width="14" height="14" viewBox="-1 -1 2 2"><circle r=".7" fill="{BEAN}"/></svg> bean
&nbsp; <svg width="14" height="14" viewBox="-1 -1 2 2"><path d="M-.6 -.6L.6 .6M.6 -.6L-.6 .6" stroke="currentColor"
stroke-width=".35"/></svg> where a snake died</div>
<div><label><input type="checkbox" checked data-layer="choices">choices</label><label><input type="checkbox" checked
data-layer="deaths">deaths</label><label><input type="checkbox" checked data-layer="ghosts">the dead</label></div>"""

_LEVELS = "<div>Dotted lines: means of policies at the end of many games against this opponent.</div>"

_SCRIPT = """
const layer = id => document.getElementById(id);
const STEPS = [[-1, 0], [1, 0], [0, -1], [0, 1]], INK = "@ink", BEAN = "@bean";

function bodyAt(s, i, step) {  // flat cells, head first
  const end = s.ends[i][step];
  return s.trails[i].slice(end - s.lengths[i][step], end).reverse();
}

function shape(s, cells, colour, spine) {  // middles of cells are at (column + .5, row + .5)
  const at = cell => [Math.floor(cell / s.width), cell % s.width];
  const breadth = k => .8 - .4 * k / Math.max(cells.length - 1, 2);
  let svg = "";
  const stroke = (k, r0, c0, r1, c1) => { svg += `<path d="M${c0 + .5} ${r0 + .5}L${c1 + .5} ${r1 + .5}" ` +
    `stroke="${colour}" stroke-width="${breadth(k).toFixed(3)}"/>`; };
  for (let k = cells.length - 1; k >= 0; k--) {
    const [r, c] = at(cells[k]);
    if (k) for (const [dr, dc] of STEPS) {
      const [R, C] = at(cells[k - 1]);
      if ((r + dr + s.height) % s.height !== R || (c + dc + s.width) % s.width !== C) continue;
      stroke(k, r, c, r + dr, c + dc);
      if (r + dr !== R || c + dc !== C) stroke(k, R - dr, C - dc, R, C);
    }
    svg += `<circle cx="${c + .5}" cy="${r + .5}" r="${(breadth(k) / 2).toFixed(3)}" fill="${colour}"/>`;
  }
  if (spine) for (const cell of cells.slice(1)) { const [r, c] = at(cell);
    svg += `<circle cx="${c + .5}" cy="${r + .5}" r=".065" fill="#fff" fill-opacity=".63"/>`; }
  return svg;
}

function head(s, i, cell, way) {
  const turn = [-90, 90, 180, 0][way], r = Math.floor(cell / s.width) + .5, c = cell % s.width + .5;
  const [dr, dc] = STEPS[way], eyes = [-.25, .25].map(y => `<circle cx=".27" cy="${y}" r=".135" fill="#fff"/>` +
    `<circle cx=".315" cy="${y}" r=".07" fill="${INK}"/>`).join("");
  return `<g transform="translate(${c} ${r})"><circle r=".47" fill="${s.colours[i]}"/>` +
    `<g transform="rotate(${turn})">${eyes}</g><text x="${-.13 * dc}" y="${-.13 * dr + .16}">${i + 1}</text></g>`;
}

function table(s) {
  layer("sides").innerHTML = s.sides.map(side => `<div class="tinted" ` +
    `style="--own:${side.colour};color:${side.colour}"><b></b><span></span></div>`).join("");
  s.sides.forEach((side, k) => { layer("sides").children[k].lastChild.textContent = side.label; });
  const order = s.sides.flatMap(side => side.snakes);
  layer("lengths").style.gridTemplateRows = `repeat(${Math.ceil(order.length / 2)}, auto)`;
  layer("lengths").innerHTML = order.map(i => `<div data-snake="${i}"><i style="background:${s.colours[i]}">${i + 1}` +
    `</i><s style="background:${s.colours[i]}"></s><u></u><span></span></div>`).join("");
}

function draw(step, s) {
  if (!layer("lengths").childElementCount) table(s);
  const snakes = [...s.colours.keys()];
  s.sides.forEach((side, k) => { layer("sides").children[k].firstChild.textContent = side.score[step]; });
  for (const row of layer("lengths").children) {
    const i = +row.dataset.snake, choice = s.chosen[step][i], reverse = (choice ^ 1) === +s.directions[step][i];
    row.children[1].style.width = `${100 * s.lengths[i][step] / s.longest}%`;
    row.children[2].textContent = s.lengths[i][step];
    row.children[3].textContent = choice === "-" ? "" : "\\u2191\\u2193\\u2190\\u2192"[choice];
    row.children[3].style.opacity = reverse ? .4 : 1;
  }
  const cross = (cell, opacity) => { const r = Math.floor(cell / s.width) + .5, c = cell % s.width + .5;
    return `<path d="M${c - .25} ${r - .25}l.5 .5m0 -.5l-.5 .5" stroke="${INK}" stroke-width=".1" ` +
      `opacity="${opacity}"/>`; };
  let ghosts = "", deaths = "";
  for (let age = Math.min(s.fading.length, step) - 1; age >= 0; age--) for (const [i, cells] of s.dead[step - age]) {
    ghosts += `<g opacity="${s.fading[age]}">${shape(s, cells, s.colours[i], false)}</g>`;
    if (age) ghosts += cross(cells[0], 2 * s.fading[age]);  // older ones lie below the living
    else deaths += cross(cells[0], 2 * s.fading[age]);
  }
  layer("ghosts").innerHTML = ghosts;
  layer("deaths").innerHTML = deaths;
  layer("beans").innerHTML = s.beans[step].map(cell => { const r = Math.floor(cell / s.width) + .5,
    c = cell % s.width + .5; return `<circle cx="${c}" cy="${r}" r=".28" fill="${BEAN}"/>` +
    `<circle cx="${c - .09}" cy="${r - .09}" r=".07" fill="#fff" fill-opacity=".7"/>`; }).join("");
  const bodies = snakes.map(i => bodyAt(s, i, step));
  layer("snakes").innerHTML = snakes.map(i => bodies[i].length ? shape(s, bodies[i], s.colours[i], true) +
    head(s, i, bodies[i][0], +s.directions[step][i]) : "").join("");
  layer("choices").innerHTML = snakes.map(i => {
    const choice = s.chosen[step][i];
    if (choice === "-" || !bodies[i].length) return "";
    const [dr, dc] = STEPS[choice], cell = bodies[i][0], hollow = (choice ^ 1) === +s.directions[step][i];
    const r = (Math.floor(cell / s.width) + dr + s.height) % s.height, c = (cell % s.width + dc + s.width) % s.width;
    return `<path d="M.16 0L-.12 .16V-.16z" transform="translate(${c + .5 - .28 * dc} ${r + .5 - .28 * dr}) ` +
      `rotate(${[-90, 90, 180, 0][choice]})" fill="${hollow ? "#fff" : INK}" stroke="${hollow ? INK : "#fff"}" ` +
      `stroke-width=".045"/>`; }).join("");
}
""".replace("@ink", INK).replace("@bean", BEAN)
