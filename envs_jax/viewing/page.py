"""A page that plays any record in a browser: controls, figures and curves around a scene."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs_jax.viewing.record import Level, Line, Record, colours, label

RATES = (1, 2, 5, 10, 30)  # steps per second that a page offers


def page(
    record: Record,
    scene: str,
    legend: str,
    script: str,
    data: Mapping[str, Any],
    figures: Sequence[str] | None = None,
    lines: Mapping[str, Sequence[Line]] | None = None,
    levels: Mapping[str, Sequence[Level]] | None = None,
    step_labels: Sequence[str] | None = None,
    rate: int = 2,
) -> str:
    """Return the HTML of a page that plays a record.

    Args:
        record: the episode.
        scene: HTML of the scene.
        legend: HTML under the curves; a checkbox `<input type=checkbox data-layer=ID>` shows and hides element ID.
        script: JavaScript that defines `function draw(step, data)`, which updates the scene to a time step.
        data: argument of `draw`, JSON types only.
        figures: names of `record.curves` in the order of their tiles, the one drawn first in front; None: all, the
            score in front.
        lines: {figure: curves drawn in place of the episode's only one}.
        levels: {figure: lines across its chart}.
        step_labels: words for the time steps [T + 1] in place of the environment's.
        rate: steps per second at first, one of RATES.
    """
    names = [record.env.spec.score, *(name for name in record.curves if name != record.env.spec.score)]
    if record.env.spec.fixed_horizon:
        names = [name for name in names if name != "length"]
    names = list(figures or names)
    colour = colours(record.references)
    shown = {
        "steps": record.steps,
        "step_labels": list(step_labels or [record.step_label(step) for step in range(record.steps + 1)]),
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
    """Return JSON escaped for a script element."""
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
<button id="next" title="one step forward (right arrow)" aria-label="one step forward">
<svg viewBox="0 0 20 20"><path d="M6 4v12l9-6z"/></svg></button>
<button id="last" title="end (End)" aria-label="end">
<svg viewBox="0 0 20 20"><path d="M14 4h2v12h-2zM4 4v12l9-6z"/></svg></button>
<input id="slider" type="range" min="0" step="1" value="0" aria-label="time step">
<select id="speed" aria-label="steps per second">@RATES@</select>
</div>
<div class="now"><span><b id="step"></b> <span id="step-label"></span></span>
<span class="keys"><kbd>space</kbd> play &nbsp; <kbd>&larr;</kbd> <kbd>&rarr;</kbd> step &nbsp; <kbd>Home</kbd>
<kbd>End</kbd></span></div>
</section>
<section class="side">
<div class="tiles" id="tiles"></div>
<div class="card"><svg id="chart" viewBox="0 0 460 270" role="img" aria-label="curve of the chosen metric"></svg></div>
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
    const words = data.step_labels[step];
    byId("step-label").textContent = !words || words === `step ${step}` ? "" : `\\u00b7 ${words}`;
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
