"""Looking at recorded episodes: the record, what a viewer offers, and a page that plays any record in a browser.

An environment offers a viewer by `Environment.viewer()`. Pictures are PIL images; a page is one HTML text that needs
nothing else, no network either. `page` brings the controls, the figures and the curves; a viewer adds its scene.
"""

import dataclasses
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from envs_jax.base import Environment, TimeStep

INK, GREY = "#1d2733", "#8a94a0"
RATES = (1, 2, 5, 10, 30)  # steps per second that a page offers
_PLAIN = {"random": GREY, "learned": "#0072b2", "sampled": "#56b4e9"}
_OTHERS = ("#d55e00", "#cc79a7", "#009e73", "#e69f00", "#7a5195", "#8c564b")


@dataclasses.dataclass(frozen=True)
class Record:
    """One episode of T steps.

    Attributes:
        env: the environment.
        title: what was recorded, in a few words.
        subtitle: who acted and which episode it was.
        policy: who acted.
        states: the environment's states, leaves [T + 1, ...]; PRNG keys as they are, all else NumPy.
        timesteps: time steps, leaves [T + 1, ...].
        actions: [T, A, ...].
        curves: {metric: float[T + 1]}, "return" too: what the episode would report if it ended there.
        references: {policy: {metric: float[T + 1, 2]}}: mean over many episodes and half of its 95 % interval.
        final_means: {opponent: {policy: {metric: mean at the end of many games}}}, where two teams play.
    """

    env: Environment
    title: str
    subtitle: str
    policy: str
    states: Any
    timesteps: TimeStep
    actions: np.ndarray
    curves: Mapping[str, np.ndarray]
    references: Mapping[str, Mapping[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    final_means: Mapping[str, Mapping[str, Mapping[str, float]]] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> int:
        """T."""
        return len(self.actions)

    @property
    def rewards(self) -> np.ndarray:
        """float[T + 1]: mean reward over agents of the action that led to each time step."""
        return np.asarray(self.timesteps.reward).mean(axis=-1)

    def moment(self, step: int) -> str:
        """The environment's words for a time step."""
        return self.env.moment(step)


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve of an episode, with a label at its end.

    Attributes:
        label: a few words.
        colour: as in HTML, "#rrggbb".
        values: float[T + 1].
    """

    label: str
    colour: str
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Level:
    """A line at one value over the whole episode, with a label at its end: a limit, or what others have at the end."""

    label: str
    colour: str
    value: float


class Viewer(Protocol):
    """Draws records of one environment.

    Attributes:
        rate: time steps per second that a reader can follow.
    """

    rate: int

    def html(self, record: Record) -> str:
        """A page that plays the record: one text without references to anything outside it."""

    def frames(self, record: Record) -> list[Any]:
        """PIL images of equal size, one per time step [T + 1], for an animation."""

    def picture(self, record: Record) -> Any:
        """A PIL image that tells the whole episode."""


def colours(policies: Iterable[str]) -> dict[str, str]:
    """A colour for every policy."""
    others = [name for name in policies if name not in _PLAIN]
    return _PLAIN | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}


def label(policy: str) -> str:
    """How curves of `references` are called."""
    return f"{policy} (mean)"


_LABEL = 12.0  # height of a label's line, points


def plot_metric(
    axes: Any,
    record: Record,
    metric: str,
    step: int | None = None,
    lines: Sequence[Line] | None = None,
    levels: Sequence[Level] = (),
) -> None:
    """A metric over the episode on matplotlib axes: this episode up to `step`, means of `references` with their bands.

    A `step` of -1 leaves the episode pale, without the point where it stands. Labels stand at the right ends of the
    curves, moved apart where they would overlap. `lines`, `levels`: see `page`.
    """
    if lines is None:
        lines = [Line(f"this episode ({record.policy})", INK, np.asarray(record.curves[metric]))]
    steps, colour = np.arange(record.steps + 1), colours(record.references)
    step = record.steps if step is None else step
    ends = []
    for name, curves in record.references.items():
        if metric in curves:
            mean, half = curves[metric][: record.steps + 1].T
            axes.plot(steps, mean, color=colour[name], linewidth=1.6, linestyle=(0, (5, 1.5)), zorder=2)
            axes.fill_between(steps, mean - half, mean + half, color=colour[name], alpha=0.14, linewidth=0)
            ends.append((mean[-1], label(name), colour[name], "normal"))
    for level in levels:
        axes.axhline(level.value, color=level.colour, linewidth=1.2, linestyle=(0, (2, 2)), zorder=2)
        ends.append((level.value, level.label, level.colour, "normal"))
    for line in lines:
        own, ink = line.values, line.colour
        axes.plot(steps, own, color=ink, linewidth=1.2, alpha=0.22, zorder=3)
        axes.plot(steps[: step + 1], own[: step + 1], color=ink, linewidth=2.6, zorder=4, solid_capstyle="round")
        if step >= 0:
            axes.plot(step, own[step], "o", color=ink, markersize=7, zorder=5, clip_on=False)
        ends.append((own[-1], line.label, ink, "bold"))
    axes.margins(x=0.01, y=0.06)
    axes.set_xlim(0, record.steps)
    low, high = axes.get_ylim()
    ends.sort(key=lambda end: end[0])
    gap = max(0.075, _LABEL * axes.figure.dpi / 72 / axes.bbox.height)
    places = spread([float((end[0] - low) / (high - low)) for end in ends], gap)
    places = [max(place, 0.03 + gap * i) for i, place in enumerate(places)]  # above the axis
    for place, (_, text, ink, weight) in zip(places, ends, strict=True):
        axes.annotate(text, (1, place), (7, 0), xycoords="axes fraction", textcoords="offset points", color=ink,
                      weight=weight, va="center", fontsize=9.5)  # fmt: skip
    _make_room(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors="#4a5560", labelsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)


def _make_room(axes: Any) -> None:
    """Make axes narrower where the labels beside them would leave the figure."""
    beyond = max(text.get_window_extent().x1 for text in axes.texts) - axes.figure.bbox.x1
    if beyond > 0:
        box = axes.get_position()
        axes.set_position((box.x0, box.y0, box.width - (beyond + 2) / axes.figure.bbox.width, box.height))


def spread(places: list[float], gap: float) -> list[float]:
    """Sorted places in [0, 1], moved apart as little as needed for gaps of at least `gap`."""
    groups = [[place, 1.0] for place in places]  # centre and members of labels that touch
    merged: list[list[float]] = []
    for group in groups:
        merged.append(group)
        while len(merged) > 1:
            (a, m), (b, n) = merged[-2:]
            if b - a >= gap * (m + n) / 2:
                break
            merged[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    found = []
    for centre, members in merged:
        found += [centre + gap * (i - (members - 1) / 2) for i in range(int(members))]
    return found


def image(figure: Any) -> Any:
    """A matplotlib figure (on an Agg canvas) as a PIL image."""
    from PIL import Image

    figure.canvas.draw()
    return Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3].copy())


def figure(width: float, height: float, dpi: int) -> Any:
    """A matplotlib figure in inches that needs no display and no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(made)
    return made


# The page


def page(
    record: Record,
    scene: str,
    legend: str,
    script: str,
    data: Mapping[str, Any],
    figures: Sequence[str] | None = None,
    lines: Mapping[str, Sequence[Line]] | None = None,
    levels: Mapping[str, Sequence[Level]] | None = None,
    moments: Sequence[str] | None = None,
    rate: int = 2,
) -> str:
    """A page that plays a record.

    Args:
        record: what is played.
        scene: HTML of the scene.
        legend: HTML under the curves; a checkbox `<input type=checkbox data-layer=ID>` shows and hides element ID.
        script: JavaScript that defines `function draw(step, data)`, which makes the scene show a time step.
        data: what `draw` gets, JSON types only.
        figures: names of `record.curves` in the order of their tiles, the one drawn first in front; None: all, the
            score in front.
        lines: {figure: curves drawn in place of the episode's only one}.
        levels: {figure: lines across its chart}.
        moments: words for the time steps [T + 1] in place of the environment's.
        rate: steps per second at first, one of RATES.
    """
    names = [record.env.spec.score, *(name for name in record.curves if name != record.env.spec.score)]
    if record.env.spec.fixed_horizon:
        names = [name for name in names if name != "length"]
    names = list(figures or names)
    colour = colours(record.references)
    shown = {
        "steps": record.steps,
        "moments": list(moments or [record.moment(step) for step in range(record.steps + 1)]),
        "policy": record.policy,
        "curves": {"reward": _list(record.rewards)} | {name: _list(record.curves[name]) for name in names},
        "metric": names[0],
        "labels": {name: record.env.spec.label(name) for name in ("reward", *names)},
        "levels": {name: [vars(level) for level in group] for name, group in (levels or {}).items()},
        "lines": {
            name: [{"name": line.label, "colour": line.colour, "curve": _list(line.values)} for line in group]
            for name, group in (lines or {}).items()
        },
        "references": [
            {
                "name": label(name),
                "colour": colour[name],
                "curves": {metric: [_list(part) for part in curve.T] for metric, curve in curves.items()},
            }
            for name, curves in record.references.items()
        ],
    }
    parts = {
        "TITLE": html.escape(record.title),
        "SUBTITLE": html.escape(record.subtitle),
        "SCENE": scene,
        "LEGEND": legend,
        "SCRIPT": script,
        "RATES": "".join(f'<option value="{r}"{" selected" * (r == rate)}>{r} / s</option>' for r in RATES),
        "DATA": _json({"player": shown, "scene": data}),
    }
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], _PAGE)


def _list(values: Any) -> list[float | None]:
    return [float(f"{x:.6g}") if np.isfinite(x) else None for x in np.asarray(values, np.float64)]


def _json(data: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>@TITLE@</title>
<style>
:root { --ink: #1d2733; --soft: #66717d; --line: #dfe3e8; --paper: #f5f6f8; --card: #fff; --accent: #0072b2;
  --scene: #fafbfc; --tint: 100%; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaef; --soft: #a3adb8; --line: #3a434e; --paper: #12161b;
  --card: #1b2129; --accent: #4aa3dc; --tint: 60%; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, "Segoe UI", sans-serif; }
header { max-width: 1240px; margin: 0 auto; padding: 18px 20px 10px; }
h1 { margin: 0; font-size: 20px; font-weight: 650; letter-spacing: -.01em; overflow-wrap: anywhere; }
header p { margin: 2px 0 0; color: var(--soft); }
main { max-width: 1240px; margin: 0 auto; padding: 0 20px 20px; display: grid; gap: 16px;
  grid-template-columns: minmax(320px, min(62vw, calc(100vh - 190px))) minmax(300px, 1fr); align-items: start; }
@media (max-width: 820px) { main { grid-template-columns: minmax(0, 1fr); } .keys { display: none; } }
@media (max-width: 480px) { header { padding: 14px 12px 8px; } main { padding: 0 8px 12px; gap: 10px; }
  .card { padding: 8px; } }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px; }
.scene > svg, .scene > canvas { display: block; width: 100%; height: auto; }
.bar { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin-top: 10px; }
.bar button { font: inherit; min-width: 38px; height: 36px; padding: 0 8px; border: 1px solid var(--line);
  border-radius: 8px; background: var(--card); color: var(--ink); cursor: pointer; }
.bar button svg { display: block; width: 20px; height: 20px; margin: auto; fill: currentColor; }
.bar button:hover { border-color: var(--accent); }
.bar #play { background: #0072b2; border-color: #0072b2; color: #fff; min-width: 84px; font-weight: 600; }
.bar input { flex: 1; min-width: 90px; accent-color: var(--accent); }
.bar select { font: inherit; height: 36px; border: 1px solid var(--line); border-radius: 8px; background: var(--card);
  color: inherit; }
.now { display: flex; justify-content: space-between; margin-top: 6px; color: var(--soft); font-size: 13px; gap: 12px; }
.now b { color: var(--ink); font-variant-numeric: tabular-nums; }
kbd { border: 1px solid var(--line); border-bottom-width: 2px; border-radius: 4px; padding: 0 4px;
  font: 11px ui-monospace, monospace; background: var(--card); }
.side { display: grid; grid-template-columns: minmax(0, 1fr); gap: 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(118px, 1fr)); gap: 8px; }
.tiles button { font: inherit; text-align: left; background: var(--card); border: 1px solid var(--line); color: inherit;
  border-radius: 10px; padding: 7px 10px; cursor: pointer; }
.tiles button[aria-pressed=true] { border-color: var(--accent); box-shadow: inset 0 0 0 1px var(--accent); }
.tiles span { display: block; font-size: 12px; color: var(--soft); }
.tiles b { font-size: 19px; font-weight: 620; font-variant-numeric: tabular-nums; }
.tiles small { font-size: 12px; color: var(--soft); }
#chart { display: block; width: 100%; height: auto; cursor: pointer; overflow: visible; }
#chart { font-size: 11px; }
@media (max-width: 480px) { #chart { font-size: 14px; } }
#chart text { fill: var(--soft); }
#chart .fill { fill: var(--own); }
@supports (color: color-mix(in srgb, red, blue)) {
  #chart .ink { stroke: color-mix(in srgb, var(--own) var(--tint), #fff); }
  #chart .fill { fill: color-mix(in srgb, var(--own) var(--tint), #fff); }
  .tinted { color: color-mix(in srgb, var(--own) var(--tint), #fff) !important; } }
.legend { font-size: 13px; color: var(--soft); display: grid; gap: 8px; }
.legend label { display: inline-flex; align-items: center; gap: 6px; margin-right: 14px; cursor: pointer; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
</style>
</head>
<body>
<header><h1>@TITLE@</h1><p>@SUBTITLE@</p></header>
<main>
<section class="card scene">
@SCENE@
<div class="bar">
<button id="first" title="start (Home)" aria-label="start">
<svg viewBox="0 0 20 20"><path d="M4 4h2v12H4zM16 4v12L7 10z"/></svg></button>
<button id="back" title="one step back (left arrow)" aria-label="one step back">
<svg viewBox="0 0 20 20"><path d="M14 4v12L5 10z"/></svg></button>
<button id="play" title="play or pause (space)">Play</button>
<button id="next" title="one step on (right arrow)" aria-label="one step on">
<svg viewBox="0 0 20 20"><path d="M6 4v12l9-6z"/></svg></button>
<button id="last" title="end (End)" aria-label="end">
<svg viewBox="0 0 20 20"><path d="M14 4h2v12h-2zM4 4v12l9-6z"/></svg></button>
<input id="slider" type="range" min="0" step="1" value="0" aria-label="time step">
<select id="speed" aria-label="steps per second">@RATES@</select>
</div>
<div class="now"><span><b id="step"></b> <span id="moment"></span></span>
<span class="keys"><kbd>space</kbd> play &nbsp; <kbd>&larr;</kbd> <kbd>&rarr;</kbd> step &nbsp; <kbd>Home</kbd>
<kbd>End</kbd></span></div>
</section>
<section class="side">
<div class="tiles" id="tiles"></div>
<div class="card"><svg id="chart" viewBox="0 0 460 270" role="img" aria-label="curve of the chosen figure"></svg></div>
<div class="card legend">@LEGEND@</div>
</section>
</main>
<script>
"use strict";
const all = @DATA@;
@SCRIPT@
(() => {
  const data = all.player, last = data.steps, byId = id => document.getElementById(id);
  const frame = {left: 46, right: 330, top: 26, bottom: 232};
  let step = 0, timer = null, metric = data.metric;

  const number = x => x === null ? "-" : Math.abs(x) >= 1000 ? x.toFixed(0) : Math.abs(x) >= 10 ? x.toFixed(2)
    : x.toFixed(3);
  const shown = name => data.curves[name].every(Number.isInteger) ? x => x.toFixed(0) : number;
  const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");

  for (const name of Object.keys(data.curves)) {
    const tile = document.createElement("button");
    const [words, unit] = data.labels[name].split(", ");
    tile.innerHTML = `<span>${escaped(words)}</span><b></b>${unit ? ` <small>${escaped(unit)}</small>` : ""}`;
    tile.dataset.name = name;
    tile.onclick = () => { metric = name; show(step); };
    byId("tiles").append(tile);
  }

  function ticks(low, high) {
    const raw = (high - low) / 4, power = 10 ** Math.floor(Math.log10(raw));
    const unit = [1, 2, 5, 10].map(x => x * power).find(x => x >= raw * 0.8), found = [];
    for (let i = Math.ceil(low / unit - 1e-9); i * unit <= high + 1e-9 * unit; i++) found.push(i * unit);
    return [found, Math.max(0, -Math.floor(Math.log10(unit) + 1e-9))];
  }

  function spread(places, gap) {  // places from top to bottom, moved apart
    for (let i = 1; i < places.length; i++) places[i] = Math.max(places[i], places[i - 1] + gap);
    for (let i = places.length - 1; i >= 0; i--)
      places[i] = Math.min(places[i], (i + 1 < places.length ? places[i + 1] : frame.bottom + gap) - gap);
    return places;
  }

  function chart() {
    const own = data.lines[metric] || [{name: "this episode", colour: "var(--ink)", curve: data.curves[metric]}];
    const others = data.references.filter(r => r.curves[metric]);
    const levels = data.levels[metric] || [];
    const values = [...own.flatMap(l => l.curve), ...others.flatMap(r => r.curves[metric][0]),
      ...levels.map(l => l.value)].filter(v => v !== null);
    const names = [...own, ...others, ...levels].map(l => (l.name || l.label).length);
    const size = parseFloat(getComputedStyle(byId("chart")).fontSize), letter = 0.58 * size;
    frame.right = Math.max(200, 450 - letter * Math.max(...names));
    let low = Math.min(...values), high = Math.max(...values);
    if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
    const room = (high - low) * 0.05; low -= room; high += room;
    const x = k => frame.left + (frame.right - frame.left) * (last ? k / last : 0);
    const y = v => frame.bottom - (frame.bottom - frame.top) * (v - low) / (high - low);
    const path = (curve, upto) => curve.slice(0, upto + 1).map((v, k) => v === null ? "" :
      `${k ? "L" : "M"}${x(k).toFixed(1)} ${y(v).toFixed(1)}`).join("");
    let svg = `<text x="${frame.left - 36}" y="14" style="font-weight:600;font-size:1.18em;fill:var(--ink)">` +
      `${escaped(data.labels[metric])}</text>`;
    const [marks, digits] = ticks(low, high);
    for (const v of marks) svg += `<line x1="${frame.left}" x2="${frame.right}" y1="${y(v)}" y2="${y(v)}" ` +
      `stroke="var(--line)"/><text x="${frame.left - 6}" y="${y(v) + 4}" text-anchor="end">${v.toFixed(digits)}</text>`;
    for (const k of [...new Set([0, Math.round(last / 3), Math.round(2 * last / 3), last])])
      svg += `<text x="${x(k)}" y="${frame.bottom + 17}" text-anchor="middle">${k}</text>`;
    svg += `<text x="${(frame.left + frame.right) / 2}" y="${frame.bottom + 33}" text-anchor="middle">step</text>`;
    svg += `<line x1="${x(step)}" x2="${x(step)}" y1="${frame.top}" y2="${frame.bottom}" stroke="var(--soft)" ` +
      `stroke-opacity=".6" stroke-dasharray="2 3"/>`;
    const coloured = colour => `class="ink" style="--own:${colour}" stroke="${colour}"`;
    const ends = [];
    for (const r of others) {
      const curve = r.curves[metric][0].slice(0, last + 1);
      svg += `<path d="${path(curve, last)}" fill="none" ${coloured(r.colour)} stroke-width="1.8" ` +
        `stroke-dasharray="6 3"/>`;
      ends.push([y(curve[curve.length - 1]), r.name, r.colour, 400]);
    }
    for (const l of levels) {
      svg += `<line x1="${frame.left}" x2="${frame.right}" y1="${y(l.value)}" y2="${y(l.value)}" ` +
        `${coloured(l.colour)} stroke-width="1.4" stroke-dasharray="2 2"/>`;
      ends.push([y(l.value), l.label, l.colour, 400]);
    }
    for (const {name, colour, curve} of own) {
      const stroke = `fill="none" ${coloured(colour)}`, end = curve[last];
      svg += `<path d="${path(curve, last)}" ${stroke} stroke-opacity=".2" stroke-width="1.5"/>` +
        `<path d="${path(curve, step)}" ${stroke} stroke-width="2.8" stroke-linejoin="round"/>`;
      if (curve[step] !== null) svg += `<circle cx="${x(step)}" cy="${y(curve[step])}" r="4.5" ` +
        `class="fill" style="--own:${colour}" fill="${colour}"/>`;
      ends.push([end === null ? frame.bottom : y(end), name, colour, 650]);
    }
    ends.sort((a, b) => a[0] - b[0]);
    spread(ends.map(e => e[0]), 1.27 * size).forEach((place, i) => { svg += `<text x="${frame.right + 7}" ` +
      `y="${place + 4}" class="fill" style="--own:${ends[i][2]};font-weight:${ends[i][3]}">` +
      `${escaped(ends[i][1])}</text>`; });
    byId("chart").innerHTML = svg;
  }

  function show(k) {
    step = Math.max(0, Math.min(last, k));
    byId("slider").value = step;
    byId("step").textContent = `step ${step} of ${last}`;
    const words = data.moments[step];
    byId("moment").textContent = !words || words === `step ${step}` ? "" : `\\u00b7 ${words}`;
    for (const tile of byId("tiles").children) {
      tile.querySelector("b").textContent = shown(tile.dataset.name)(data.curves[tile.dataset.name][step]);
      tile.setAttribute("aria-pressed", tile.dataset.name === metric);
    }
    chart();
    draw(step, all.scene);
  }

  function pause() { clearInterval(timer); timer = null; byId("play").textContent = "Play"; }
  function play() {
    if (step >= last) show(0);
    clearInterval(timer);
    byId("play").textContent = "Pause";
    timer = setInterval(() => { show(step + 1); if (step >= last) pause(); }, 1000 / byId("speed").value);
  }
  function go(k) { pause(); show(k); }
  const toggle = () => timer === null ? play() : pause();

  byId("slider").max = last;
  byId("slider").oninput = event => go(+event.target.value);
  byId("first").onclick = () => go(0);
  byId("back").onclick = () => go(step - 1);
  byId("play").onclick = toggle;
  byId("next").onclick = () => go(step + 1);
  byId("last").onclick = () => go(last);
  byId("speed").onchange = () => { if (timer !== null) play(); };
  byId("chart").onclick = event => {
    const box = byId("chart").getBoundingClientRect(), place = (event.clientX - box.left) / box.width * 460;
    go(Math.round((place - frame.left) / (frame.right - frame.left) * last));
  };
  document.onkeydown = event => {
    const own = event.target.tagName;
    if (event.ctrlKey || event.metaKey || event.altKey || own === "SELECT") return;
    if (event.key === " " && (own === "BUTTON" || event.target.type === "checkbox")) return;  // they answer themselves
    const action = {" ": toggle, ArrowLeft: () => go(step - 1), ArrowRight: () => go(step + 1), Home: () => go(0),
      End: () => go(last)}[event.key];
    if (action) { event.preventDefault(); action(); }
  };
  document.onclick = event => {  // after a click by mouse, the space bar plays
    if (event.detail && event.target.closest("button, label")) document.activeElement.blur();
  };
  for (const layer of document.querySelectorAll("input[data-layer]"))
    layer.onchange = () => { byId(layer.dataset.layer).style.display = layer.checked ? "" : "none"; };
  const asked = location.hash.slice(1);  // page.html#7 opens at step 7, page.html#play plays
  show(parseInt(asked) || 0);
  if (asked === "play") play();
})();
</script>
</body>
</html>
"""
