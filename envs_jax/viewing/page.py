"""A page that plays any record in a browser: controls, tiles and curves around a drawing."""

import base64
import html
import io
import json
import re

import numpy as np

from envs_jax.viewing.charts import chart
from envs_jax.viewing.drawing import Drawing, Panel, Sign, Style
from envs_jax.viewing.record import Record

RATES = (1, 2, 5, 10, 30)  # steps per second that a page offers


def page(record: Record, drawing: Drawing, rate: int = 2) -> str:
    """Return the HTML of a page that plays a record; `rate`: steps per second at first, one of RATES."""
    spec, curves = record.env.spec, {"reward": record.rewards, **record.curves}
    names = list(drawing.metrics) or [spec.score, *(name for name in record.curves if name != spec.score)]
    if spec.fixed_horizon:
        names = [name for name in names if name != "length"]
    styles, charts = dict(drawing.styles), {}
    for name in ("reward", *names):
        panel, looks = chart(record, name, drawing.lines.get(name, ()))
        charts[name] = panel.still
        styles |= looks
    data = {
        "steps": record.steps,
        "step_labels": list(drawing.step_labels or map(record.env.step_label, range(record.steps + 1))),
        "metric": names[0],
        "labels": {name: spec.label(name) for name in charts},
        "curves": {name: [float(f"{x:.6g}") if np.isfinite(x) else None for x in curves[name]] for name in charts},
        "charts": charts,
        "panels": [{"still": panel.still, "steps": panel.steps} for panel in drawing.panels],
    }
    parts = {
        "TITLE": html.escape(record.title),
        "SUBTITLE": html.escape(record.subtitle),
        "STYLES": "\n".join(f".drawn .{name} {{ {style.css} }}" for name, style in styles.items()),
        "SCENE": "".join(_svg(panel) for panel in drawing.panels),
        "LEGEND": "".join(_sample(sign, styles[sign.style]) for sign in drawing.legend),
        "RATES": "".join(f'<option value="{r}"{" selected" * (r == rate)}>{r} / s</option>' for r in RATES),
        "DATA": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], _PAGE)


def _svg(panel: Panel) -> str:
    """Return a panel with its images; its shapes are added to the last element, step by step."""
    from PIL import Image

    (left, top, _, _), (width, height), (x0, y0, x1, y1) = panel.box, panel.size, panel.image_box
    images = ""
    for image in panel.images:
        Image.fromarray(image).save(buffer := io.BytesIO(), "PNG", optimize=True)
        images += f'<image x="{x0}" y="{y0}" width="{x1 - x0}" height="{y1 - y0}" preserveAspectRatio="none" '
        images += f'href="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"/>'
    title = f"<figcaption>{html.escape(panel.title)}</figcaption>" if panel.title else ""
    return (
        f'<figure style="flex:{width / height:.4f}">{title}<svg class="drawn" viewBox="{left} {top} {width} {height}" '
        f'role="img" aria-label="{html.escape(panel.title or "scene")}">{images}<g></g></svg></figure>'
    )


def _sample(sign: Sign, style: Style) -> str:
    element = {
        "path": 'path d="M2 5H26"',
        "area": 'rect x="9" width="10" height="10"',
        "disc": 'circle cx="14" cy="5" r="4"',
    }
    look = style.scaled(2.0 if sign.kind == "path" else 1.0).css
    words = html.escape(sign.words)
    return f'<span><svg viewBox="0 0 28 10"><{element[sign.kind]} style="{look}"/></svg>{words}</span>'


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
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaef; --soft: #a3adb8; --line: #3a434e; --paper: #12161b;
  --card: #1b2129; --accent: #4aa3dc; } }
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
#views { display: flex; gap: 8px; }
#views figure { margin: 0; min-width: 0; }
#views figcaption { font-size: 13px; color: var(--soft); }
.drawn { display: block; width: 100%; height: auto; background: #fafbfc; border: 1px solid var(--line); }
.drawn image { image-rendering: pixelated; }
.drawn path { stroke-linecap: round; stroke-linejoin: round; }
.drawn text { font-family: system-ui, sans-serif; font-weight: 650; }
@media (max-width: 560px) { #views { flex-direction: column; } }
@STYLES@
#chart { cursor: pointer; }
.legend { font-size: 13px; color: var(--soft); display: flex; flex-wrap: wrap; gap: 4px 16px; }
.legend span { display: inline-flex; align-items: center; gap: 6px; }
.legend svg { width: 28px; height: 10px; background: #fafbfc; overflow: visible; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
</style>
</head>
<body>
<header><h1>@TITLE@</h1><p>@SUBTITLE@</p></header>
<main>
<section class="card">
<div id="views">@SCENE@</div>
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
<div class="card">
<svg id="chart" class="drawn" viewBox="0 0 460 270" role="img" aria-label="curve of the chosen metric"></svg></div>
<div class="card legend">@LEGEND@</div>
</section>
</main>
<script>
"use strict";
const data = @DATA@;
(() => {
  const last = data.steps, byId = id => document.getElementById(id);
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

  function markup([kind, style, parts, value]) {
    const tag = name => `<${name} class="${style}"`;
    if (kind === "disc") return parts.map(([x, y]) => `${tag("circle")} cx="${x}" cy="${y}" r="${value}"/>`).join("");
    if (kind === "text") return `${tag("text")} x="${parts[0][0]}" y="${parts[0][1]}">${escaped(value)}</text>`;
    if (kind === "marker")
      return `${tag("circle")} cx="${parts[0][2 * step]}" cy="${parts[0][2 * step + 1]}" r="${value}"/>`;
    const lines = kind === "trail" ? [parts[0].slice(0, 2 * step + 2)] : parts;
    return `${tag("path")} d="${lines.map(line => "M" + line + (kind === "area" ? "Z" : "")).join("")}"/>`;
  }

  function draw() {
    document.querySelectorAll("#views svg").forEach((svg, k) => {
      svg.querySelectorAll("image").forEach((image, i) => { image.style.display = i === step ? "" : "none"; });
      svg.lastChild.innerHTML = [...data.panels[k].still, ...data.panels[k].steps[step]].map(markup).join("");
    });
    byId("chart").innerHTML = data.charts[metric].map(markup).join("");
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
    draw();
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
    const axis = byId("chart").querySelector(".axis").getBoundingClientRect();
    go(Math.round((event.clientX - axis.left) / axis.width * last));
  };
  document.onkeydown = event => {
    const own = event.target.tagName;
    if (event.ctrlKey || event.metaKey || event.altKey || own === "SELECT") return;
    if (event.key === " " && own === "BUTTON") return;  // it answers itself
    const action = {" ": toggle, ArrowLeft: () => go(step - 1), ArrowRight: () => go(step + 1), Home: () => go(0),
      End: () => go(last)}[event.key];
    if (action) { event.preventDefault(); action(); }
  };
  document.onclick = event => {  // after a click by mouse, the space bar plays
    if (event.detail && event.target.closest("button")) document.activeElement.blur();
  };
  const asked = location.hash.slice(1);  // page.html#7 opens at step 7, page.html#play plays
  show(parseInt(asked) || 0);
  if (asked === "play") play();
})();
</script>
</body>
</html>
"""
