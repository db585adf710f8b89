"""Functions that the templates of bench.tables call: reading figures, and filters that format them.

Filters of numbers take one or several; several are joined by commas.
"""

import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.harness import measure
from bench.peers import tables as peers
from bench.studies.learning import first_at
from jaxrl.evaluation.statistics import estimate_mean
from jaxrl.report.console import format_si

RESULTS: Path = measure.RESULTS
_CITED = Path(__file__).with_name("cited.yaml")

Entry = Mapping[str, Any]  # "mean", "ci95", "std" of a score: numbers, or curves over the episode

MISSION_STEPS = 15  # in the published missions
KNOWN = {  # environments of other libraries by their names in known_cpu.json
    "pendulum": "gymnax:Pendulum-v1",
    "double_pendulum": "brax:inverted_double_pendulum",
    "hopper": "brax:hopper",
    "spread": "jaxmarl:MPE_simple_spread_v3",
    "knapsack": "jumanji:Knapsack-v1",
    "cartpole_balance": "playground:CartpoleBalance",
    "smax_3m": "jaxmarl:HeuristicEnemySMAX",
}


def read(name: str) -> Any:
    """Read bench/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def form(values: float | Iterable[float], spec: str, scale: float = 1) -> str:
    """Return numbers times a scale, in a format of Python."""
    return ", ".join(f"{scale * value:{spec}}" for value in _several(values))


def percent(shares: float | Iterable[float]) -> str:
    """Return shares as percentages of three digits, without the sign."""
    return form(shares, ".3g", 100)


def thousands(numbers: float | Iterable[float]) -> str:
    """Return numbers in thousands: "154, 138 k"."""
    return form(numbers, ".0f", 1e-3) + " k"


def seed_minutes(stages: Mapping[str, Any]) -> float:
    """Return the CPU minutes of all stages of one seed."""
    return sum(float(stage["cpu_seconds"]) for stage in stages.values()) / 60


def minutes_to(runs: Iterable[Mapping[str, Any]], entropy: float) -> str:
    """Return the minutes after which selection evaluations of each run first reach an entropy: "5.8, 6.1"."""
    firsts = [next((point for point in run["selection"] if point["entropy"] <= entropy), None) for run in runs]
    return ", ".join("stopped before" if first is None else f"{first['seconds'] / 60:.1f}" for first in firsts)


def known_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table, one row for each task and learner: means and 95 % intervals over seeds."""
    head = ["environment", "learner", "seeds", "steps", "updates", "return, greedy", "sampled"]
    head += ["CPU seconds", "compiling"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["learner"]), []).append(row)
    for (task, learner), runs in sorted(groups.items(), key=lambda item: (list(KNOWN).index(item[0][0]), item[0][1])):
        first = runs[0]
        cells = [KNOWN[task], learner, str(len(runs))]
        cells += [f"{first[key]:,}" if first[key] else "" for key in ("env_steps", "updates")]
        cells += [_over_seeds([row[mode]["mean"] for row in runs if mode in row]) for mode in ("greedy", "sampled")]
        for share in ([1.0] * len(runs), [row["compile_share"] for row in runs]):
            seconds = [part * row["cpu_seconds"] for part, row in zip(share, runs, strict=True)]
            cells.append(f"{statistics.median(seconds):.0f}" if first["updates"] else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def known_return(rows: Sequence[dict[str, Any]], task: str, learner: str) -> str:
    """Return the greedy return of a learner on a task, mean and 95 % interval over seeds, or nothing."""
    return _over_seeds([row["greedy"]["mean"] for row in rows if (row["task"], row["learner"]) == (task, learner)])


def _over_seeds(means: list[float]) -> str:
    if not means:
        return ""
    estimate = estimate_mean(np.array(means))
    half = estimate["ci95"]
    text = f"{estimate['mean']:.4g}"
    return text if half is None else f"{text} ± {float(f'{half:.2g}'):g}"  # 150, not 1.5e+02


def between(values: Iterable[float], spec: str, scale: float = 1) -> str:
    """Return "1 to 3", the range of values, or one number where both ends look the same."""
    values = list(values)
    low, high = (form(end, spec, scale) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def mean_range(values: Iterable[float], spec: str, scale: float = 1, unit: str = "") -> str:
    """Return "2 (1 to 3)", mean and range, or only the mean where both ends look the same."""
    values = list(values)
    mean = form(statistics.fmean(values), spec, scale) + unit
    ends = between(values, spec, scale)
    return f"{mean} ({ends})" if " to " in ends else mean


def interval(entries: Entry | Iterable[Entry], spec: str = ".3f", scale: float = 1, deviation: bool = False) -> str:
    """Return mean and half of the 95 % interval at the end of curves, or [both ends] of a share.

    With `deviation` the standard deviation follows, but not for shares.
    """
    cells = []
    for entry in [entries] if isinstance(entries, Mapping) else entries:
        last = {key: value[-1] if isinstance(value, list) else value for key, value in entry.items()}
        mean = form(last["mean"], spec, scale)
        if last["ci95"] is None:
            cells.append(mean)
        elif "low" in last:
            cells.append(f"{mean} [{form([last['low'], last['high']], spec, scale)}]")
        else:
            cells.append(f"{mean} ± {form(last['ci95'], spec, scale)}")
            cells[-1] += f" ({form(last['std'], spec, scale)})" if deviation else ""
    return ", ".join(cells)


def seconds_to(study: Entry, score: float) -> list[float]:
    """Return the seconds of training after which the curves of a learning study first reach a score, if they do."""
    points = [first_at(curve, score, study.get("score_mode", "max")) for curve in study["curves"]]
    return [point["seconds"] for point in points if point]


def missions_to(curve: Sequence[dict[str, Any]], score: float) -> str:
    """Return the missions of coverage after which a curve of the entropy first reaches a score, or "never"."""
    point = first_at(curve, score, "min")
    return f"{point['env_steps'] // MISSION_STEPS:,}" if point else "never"


def first_above(curve: Entry, score: float) -> str:
    """Return the environment steps after which the mean of a sweep's curve first reaches a score, or "never"."""
    steps = [at for at, mean in zip(curve["env_steps"], curve["mean"], strict=True) if mean >= score]
    return thousands(steps[0]) if steps else "never"


def scores(variant: Entry, column: str) -> list[float]:
    """Return a column of an ablation for one variant, by seed."""
    return [trial["scores"][column] for trial in variant["seeds"].values()]


def wrapped(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters, without breaks in code."""
    code = re.sub("`[^`]*`", lambda match: match[0].replace(" ", "\0"), " ".join(text.split()))
    return textwrap.fill(code, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def link(text: str, name: str) -> str:
    """Return a link to bench/results/NAME.json."""
    return f"[{text}](bench/results/{name}.json)"


def within(rows: Iterable[Entry]) -> str:
    """Return "all 66", or "64 of 66" where two are not as near as is allowed."""
    held = [row["within"] for row in rows]
    return f"all {len(held)}" if all(held) else f"{sum(held)} of {len(held)}"


def _several(values: float | Iterable[float]) -> list[float]:
    return [values] if isinstance(values, int | float) else list(values)


FILTERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(form, percent, thousands, between, mean_range, interval, format_si),
        *(seed_minutes, missions_to, minutes_to, seconds_to, first_above, scores, within, wrapped),
    )
}
FILTERS["mean"] = statistics.fmean
GLOBALS: dict[str, Any] = {
    "read": read,
    "link": link,
    "known_table": known_table,
    "known_names": KNOWN,
    "known_return": known_return,
    "peers_table": peers.rows,
    "cited": yaml.safe_load(_CITED.read_text()),
}
