"""Functions that the templates of bench.tables call: reading claims and figures, and filters that format them."""

import dataclasses
import functools
import json
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.claims import result
from bench.claims.claim import Claim, Figure, read_claims
from bench.harness import measure
from bench.peers import tables as peers
from jaxrl.evaluation.statistics import estimate_mean
from jaxrl.report.console import format_si

RESULTS: Path = measure.RESULTS
_CITED = Path(__file__).with_name("cited.yaml")
read_all_claims = functools.cache(read_claims)  # once, not for every figure: the file takes a while
RECORDED = r"\*"  # behind what bench.claims has not measured with all seeds

KNOWN = {  # environments of other libraries by their names in known_cpu.json
    "pendulum": "gymnax:Pendulum-v1",
    "double_pendulum": "brax:inverted_double_pendulum",
    "hopper": "brax:hopper",
    "spread": "jaxmarl:MPE_simple_spread_v3",
    "knapsack": "jumanji:Knapsack-v1",
    "cartpole_balance": "playground:CartpoleBalance",
    "smax_3m": "jaxmarl:HeuristicEnemySMAX",
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """A claim as tables show it: what `bench.claims` has measured, or else what was recorded before."""

    claim: Claim
    rows: Sequence[Mapping[str, Any]]  # of its result; none where not all seeds have been run

    def cite(self, text: str) -> str:
        """Text that links to the result, or with a mark where there is none."""
        return f"[{text}](bench/results/claims/{self.claim.name}.json)" if self.rows else text + RECORDED

    @property
    def command(self) -> str:
        """The flags of training."""
        return self.claim.train[-1]

    @property
    def seeds(self) -> int:
        return len(self.rows or self.claim.seeds)

    @property
    def minutes(self) -> float:
        """Minutes of a core for a seed; of a GPU in that tier."""
        clock = "training_seconds" if self.claim.tier == "gpu" else "training_cpu_seconds"
        return statistics.fmean(row[clock] for row in self.rows) / 60 if self.rows else self.claim.cost

    def values(self, name: str) -> list[Any]:
        """The values of a figure, of each seed where they are known."""
        return [row["figures"][name] for row in self.rows] or list(self._find(name).expected)

    def mean(self, name: str) -> float:
        return statistics.fmean(self.values(name))

    def show(self, name: str, spec: str = ".3f", scale: float = 1, unit: str = "") -> str:
        """The mean of a figure over the seeds."""
        if None in self.values(name):
            return "never"
        return f"{scale * self.mean(name):{spec}}{unit}"

    def percent(self, name: str) -> str:
        return self.show(name, ".3g", 100, " %")

    def interval(self, name: str) -> str:
        """Mean and half of the 95 % interval over the seeds."""
        over_seeds = len(self.rows) > 1  # else as recorded, over episodes where nothing is trained
        half = estimate_mean(np.array(self.values(name)))["ci95"] if over_seeds else self._find(name).ci95
        return self.show(name) if half is None else f"{self.show(name)} ± {half:.3f}"

    def _find(self, name: str) -> Figure:
        return next(figure for figure in self.claim.figures if figure.name == name)


def claim(name: str) -> Figures:
    """Return a claim with its result, once that has all seeds: a single one does not replace several."""
    chosen = read_all_claims()[name]
    measured = result.read(chosen)
    rows = measured["rows"] if measured else ()
    return Figures(chosen, rows if len(rows) >= len(chosen.seeds) else ())


def read(name: str) -> Any:
    """Read bench/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


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


def _over_seeds(means: list[float]) -> str:
    if not means:
        return ""
    estimate = estimate_mean(np.array(means))
    half = estimate["ci95"]
    text = f"{estimate['mean']:.4g}"
    return text if half is None else f"{text} ± {float(f'{half:.2g}'):g}"  # 150, not 1.5e+02


def form(value: float, spec: str, scale: float = 1) -> str:
    """Return a number times a scale, in a format of Python."""
    return f"{scale * value:{spec}}"


def wrapped(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters, without breaks in code."""
    code = re.sub("`[^`]*`", lambda match: match[0].replace(" ", "\0"), " ".join(text.split()))
    return textwrap.fill(code, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


FILTERS: dict[str, Callable[..., Any]] = {function.__name__: function for function in (form, format_si, wrapped)}
GLOBALS: dict[str, Any] = {
    "claim": claim,
    "read": read,
    "known_table": known_table,
    "peers_table": peers.rows,
    "cited": yaml.safe_load(_CITED.read_text()),
}
