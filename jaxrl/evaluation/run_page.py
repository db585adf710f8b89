"""A page with the curves of runs, over environment steps and over minutes, that any browser shows without a network."""

import html
import json
import re
from collections.abc import Sequence
from typing import Any

from jaxrl.common.errors import UserError
from jaxrl.evaluation import run_tables
from jaxrl.evaluation.run_summary import RunSummary, Series, mean_curve, metrics_of, series
from jaxrl.report.console import format_si
from jaxrl.report.tables import Row

_GROUPS = {"eval": "selection episodes", "rollout": "training episodes", "train": "learning", "time": "speed"}


def page(runs: Sequence[RunSummary]) -> str:
    """Return the HTML. Raises UserError if no run has any metrics."""
    all_series = series(runs)
    metrics = [found for name in metrics_of(all_series) if (found := _metric(name, all_series, runs)) is not None]
    if not metrics:
        raise UserError(f"{', '.join(run.name for run in runs)}: no metrics yet, nothing can be drawn")
    wanted = {f"{group}/{run.scoring.score}" for run in runs for group in ("eval", "rollout")}
    data = {
        "series": [_name(one) for one in all_series],
        "metrics": metrics,
        "first": next((k for k, metric in enumerate(metrics) if metric["name"] in wanted), 0),
    }
    heads = ["run", "seeds", "env steps", "minutes", "score", "state"]
    cells = [(str(run.config.run.num_seeds), format_si(run.env_steps), run_tables.minutes(run), run_tables.score(run),
              run.state) for run in runs]  # fmt: skip
    names = [run.name for run in runs]
    settings = run_tables.setting_rows(runs)
    parts = {
        "TITLE": html.escape(names[0] if len(names) == 1 else f"{len(names)} runs"),
        "RUNS": _table(heads, [Row(name, row) for name, row in zip(names, cells, strict=True)]),
        "NOTES": "".join(f"<p>{html.escape(line)}</p>" for line in run_tables.legend(runs, best=False)),
        "SETTINGS": _table(["setting", *names], settings) if settings else "<p>All settings are equal.</p>",
        "DATA": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], _PAGE)


def _name(one: Series) -> str:
    """Return the entry of a series in the legend."""
    others = f" and {len(one.runs) - 1} more" if len(one.runs) > 1 else ""
    return f"{one.name}{others}" + (f", mean of {len(one.seeds)} seeds" if len(one.seeds) > 1 else "")


def _metric(name: str, all_series: Sequence[Series], runs: Sequence[RunSummary]) -> dict[str, Any] | None:
    """Return the curves of a metric with its label; None if no series has any."""
    steps, minutes = ([_short(mean_curve(one, name, over)) for one in all_series] for over in (False, True))
    if not any(steps):
        return None
    group, _, own = name.partition("/")
    scoring = next((run.scoring for run in runs if own.partition("/")[0] in run.scoring.labels), runs[0].scoring)
    words = scoring.label(own) if group in ("eval", "rollout") else own.replace("_", " ")
    label = f"{words} ({_GROUPS[group]})" if group in _GROUPS else name
    return {"name": name, "label": label, "steps": steps, "minutes": minutes}


def _short(curve: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a curve with six significant digits."""
    if curve is None:
        return None
    return {key: [None if x is None else float(f"{x:.6g}") for x in values] for key, values in curve.items()}


def _table(heads: Sequence[str], rows: Sequence[Row]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", [row.name, *row.cells]) for row in rows)
    return f"<table><thead>{line('th', heads)}</thead><tbody>{body}</tbody></table>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>@TITLE@</title>
<style>
:root { --ink: #1d2733; --soft: #66717d; --line: #dfe3e8; --paper: #f5f6f8; --card: #fff; color-scheme: light dark;
  --c0: #0072b2; --c1: #d55e00; --c2: #00815c; --c3: #b0478a; --c4: #8a6d00; --c5: #3a86c8; --c6: #555f6b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaef; --soft: #a3adb8; --line: #3a434e; --paper: #12161b;
  --card: #1b2129; --c0: #56b4e9; --c1: #ff9a4d; --c2: #2fc79a; --c3: #e39ac6; --c4: #f0e442; --c5: #9db8ff;
  --c6: #c5ccd4; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 18px 20px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, "Segoe UI", sans-serif; }
h1 { margin: 0 0 10px; font-size: 20px; overflow-wrap: anywhere; }
h2 { margin: 18px 0 6px; font-size: 16px; }
p { margin: 4px 0; color: var(--soft); font-size: 13px; }
select { font: inherit; height: 36px; max-width: 100%; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); color: inherit; }
.charts { display: grid; gap: 12px; margin: 12px 0;
  grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px; overflow-x: auto; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--soft); }
.grid { fill: none; stroke: var(--line); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.band { stroke: none; opacity: .18; }
#legend span { display: inline-flex; align-items: center; gap: 6px; margin: 2px 18px 2px 0; font-size: 14px;
  overflow-wrap: anywhere; }
#legend svg { width: 26px; flex: none; }
#legend b { font-variant-numeric: tabular-nums; font-weight: 620; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 3px 14px 3px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
</style>
</head>
<body>
<h1>@TITLE@</h1>
<label>Metric: <select id="metric"></select></label>
<div class="charts">
<div class="card">
<svg id="steps" viewBox="0 0 560 330" role="img" aria-label="curves over environment steps"></svg></div>
<div class="card">
<svg id="minutes" viewBox="0 0 560 330" role="img" aria-label="curves over minutes of training"></svg></div>
</div>
<div class="card" id="legend"></div>
<p>Lines are means over parts of a run, or single evaluations; bands are Student's 95 % intervals over seeds. Values are
those at the end, or under the pointer.</p>
<h2>Runs</h2>
<div class="card">@RUNS@</div>
@NOTES@
<h2>Settings that differ</h2>
<div class="card">@SETTINGS@</div>
<script>
"use strict";
const data = @DATA@;
(() => {
  const [left, right, top, bottom] = [58, 548, 26, 290], byId = id => document.getElementById(id);
  const titles = {steps: "environment steps", minutes: "minutes of training"};
  let shown = null;

  const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  function number(x) {
    if (x === null || x === undefined) return "-";
    const [size, unit] = [[1e9, " G"], [1e6, " M"], [1e4, " k"], [0, ""]].find(([size]) => Math.abs(x) >= size);
    return +(x / (size === 1e4 ? 1e3 : size || 1)).toPrecision(4) + unit;
  }
  const stroke = k => `stroke="var(--c${k % 7})" stroke-dasharray="${["", "7 4", "2 3"][Math.floor(k / 7) % 3]}"`;

  function ticks(low, high) {
    const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find(f => f * power >= raw * 0.999) * power, found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
    return found;
  }

  function scale(curves) {  // wide bands of few seeds are cut, so that the lines stay readable
    const drawn = curves.filter(Boolean), finite = list => list.filter(x => x !== null && Number.isFinite(x));
    const x = drawn.flatMap(c => c.x), means = finite(drawn.flatMap(c => c.mean));
    let [low, high] = [Math.min(...means), Math.max(...means)];
    const room = (high - low) / 2 || Math.abs(high) / 10 || 1;
    const half = (c, i) => c.ci95 ? c.ci95[i] : 0;
    const ends = sign => finite(drawn.flatMap(c => c.mean.map((m, i) => m === null ? m : m + sign * half(c, i))));
    low = Math.max(low - room, Math.min(...ends(-1)));
    high = Math.min(high + room, Math.max(...ends(1)));
    if (!(high > low)) [low, high] = [low - room, high + room];
    const [from, to] = [Math.min(0, ...x), Math.max(...x, 1e-9)], margin = (high - low) * 0.04;
    [low, high] = [low - margin, high + margin];
    const limit = y => Math.max(top - 50, Math.min(bottom + 50, y));
    return {from, to, low, high, x: v => left + (v - from) / (to - from) * (right - left),
      y: v => limit(bottom - (v - low) / (high - low) * (bottom - top))};
  }

  function draw(axis) {
    const curves = shown[axis], svg = byId(axis);
    if (!curves.some(Boolean)) { svg.innerHTML = `<text x="${left}" y="16">no times in these metrics</text>`; return; }
    const s = scale(curves), at = (x, y) => s.x(x).toFixed(1) + " " + s.y(y).toFixed(1);
    let out = `<clipPath id="in-${axis}"><path d="M${left} ${top}H${right}V${bottom}H${left}Z"/></clipPath>`;
    for (const y of ticks(s.low, s.high))
      out += `<path class="grid" d="M${left} ${s.y(y)}H${right}"/><text x="${left - 6}" y="${s.y(y) + 4}"
        text-anchor="end">${number(y)}</text>`;
    for (const x of ticks(s.from, s.to))
      out += `<path class="grid" d="M${s.x(x)} ${bottom}v5"/><text x="${s.x(x)}" y="${bottom + 19}"
        text-anchor="middle">${number(x)}</text>`;
    out += `<text x="${left}" y="14">${escaped(shown.label)}</text><text x="${(left + right) / 2}" y="326"
      text-anchor="middle">${titles[axis]}</text><g clip-path="url(#in-${axis})">`;
    curves.forEach((c, k) => {
      if (!c) return;
      const points = c.x.map((x, i) => [x, c.mean[i], c.ci95 ? c.ci95[i] : null]);
      const wide = points.filter(([, m, h]) => m !== null && h !== null);
      if (wide.length)
        out += `<path class="band" fill="var(--c${k % 7})" d="M${wide.map(([x, m, h]) => at(x, m + h)).join("L")}L${
          wide.reverse().map(([x, m, h]) => at(x, m - h)).join("L")}Z"/>`;
      let pen = "M", line = "";
      for (const [x, m] of points) { line += m === null ? "" : pen + at(x, m); pen = m === null ? "M" : "L"; }
      out += `<path class="curve" ${stroke(k)} d="${line}"/>`;
      const only = points.filter(([, m]) => m !== null);
      if (only.length === 1)
        out += `<circle cx="${s.x(only[0][0])}" cy="${s.y(only[0][1])}" r="3" fill="var(--c${k % 7})"/>`;
    });
    svg.innerHTML = out + `</g><path class="grid" d="M${left} ${top}V${bottom}H${right}"/><path class="pointer grid"/>`;
    svg.onpointermove = event => {
      const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) / box.width * 560;
      const x = s.from + (px - left) / (right - left) * (s.to - s.from);
      if (x < s.from || x > s.to) return svg.onpointerleave();
      svg.querySelector(".pointer").setAttribute("d", `M${px} ${top}V${bottom}`);
      legend(axis, x);
    };
    svg.onpointerleave = () => { svg.querySelector(".pointer").setAttribute("d", ""); legend(axis, Infinity); };
  }

  function legend(axis, x) {  // values at the last point up to x
    byId("legend").innerHTML = data.series.map((name, k) => {
      if (!shown.steps[k]) return "";
      const c = shown[axis][k], past = c ? c.x.filter(v => v <= x).length : 0, i = past - 1;
      const half = past && c.ci95 && c.ci95[i] !== null ? ` \\u00b1${number(+c.ci95[i].toPrecision(2))}` : "";
      return `<span><svg viewBox="0 0 26 8"><path class="curve" ${stroke(k)} d="M0 4H26"/></svg>${escaped(name)}
        <b>${past ? number(c.mean[i]) + half : "-"}</b></span>`;
    }).join("");
  }

  function show(k) {
    shown = data.metrics[k];
    for (const axis of ["steps", "minutes"]) draw(axis);
    legend("steps", Infinity);
  }

  byId("metric").innerHTML = data.metrics.map((m, k) => `<option value="${k}">${escaped(m.label)}</option>`).join("");
  byId("metric").value = data.first;
  byId("metric").onchange = event => show(+event.target.value);
  show(data.first);
})();
</script>
</body>
</html>
"""
