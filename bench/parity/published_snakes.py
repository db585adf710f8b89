"""python -m bench.parity.published_snakes: do scripted teams of snakes score here as in the original engine?

The original's figures were measured with the engine of the public repository jidiai/Competition_3v3snakes and the
scripted players of zhizhengzhao/snake: mean team scores, results, deaths and meals per game and team. Here each pair
plays its own games.

Every figure must lie within three standard errors of the difference, plus half a unit of the last published digit:
scores with the published error and ours; shares of games with the binomial error at the pooled share; deaths and
meals, published without errors, with the spread between our games for both sides. Ends with status 1 where one does
not.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.harness import measure
from bench.parity.comparison import DIFFERS
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.process import speed_up_start
from jaxrl.cli.values import add_int, add_seed
from jaxrl.evaluation import policies
from jaxrl.evaluation.reports import rollout

ERRORS = 3.0
SCORES = ("score", "opponent_score")
RESULTS = ("win", "defeat", "draw")
EVENTS = ("deaths", "opponent_deaths", "meals", "opponent_meals")
LINES = (SCORES, RESULTS, EVENTS[:2], EVENTS[2:])  # lines of the table

Games = dict[str, np.ndarray]  # metric: float64[games]


@dataclasses.dataclass(frozen=True)
class Case:
    """Two scripted teams and the figures of the original game."""

    # one, two: levels of the teams, "0" (random) to "4" or "evasion"
    one: str
    two: str
    episodes: int  # number of games of the figures
    score: tuple[tuple[float, float], tuple[float, float]]  # mean team score and its standard error, of each team
    result: tuple[float, float, float]  # per cent of the games that the first team won, lost and drew
    # deaths, meals: of each team, mean per game; meals of snakes that died in the same step are left out
    deaths: tuple[float, float]
    meals: tuple[float, float]

    @property
    def name(self) -> str:
        return f"{_title(self.one)} against {_title(self.two)}"


def _title(level: str) -> str:
    return {"0": "random", "evasion": "evasion"}.get(level, f"level {level}")


CASES = (
    Case("0", "0", 600, ((0.88, 0.04), (0.90, 0.04)), (32.5, 34.7, 32.8), (42.9, 38.8), (11.3, 11.4)),
    Case("0", "1", 300, ((0.79, 0.06), (5.45, 0.26)), (8.0, 81.3, 10.7), (48.2, 55.3), (13.1, 86.6)),
    Case("0", "2", 800, ((0.74, 0.03), (20.34, 0.40)), (0.6, 97.9, 1.5), (59.3, 11.9), (14.7, 94.2)),
    Case("0", "3", 300, ((0.79, 0.06), (12.94, 0.52)), (2.0, 95.0, 3.0), (51.8, 20.2), (14.0, 88.1)),
    Case("0", "4", 300, ((0.81, 0.05), (15.09, 0.61)), (2.7, 94.0, 3.3), (54.1, 18.9), (14.3, 89.7)),
    Case("0", "evasion", 200, ((0.72, 0.07), (15.62, 0.71)), (1.5, 93.5, 5.0), (53.1, 16.9), (14.8, 87.9)),
    Case("2", "2", 300, ((10.24, 0.40), (11.38, 0.43)), (44.0, 51.7, 4.3), (20.4, 20.9), (73.0, 77.1)),
    Case("2", "4", 300, ((11.98, 0.43), (8.61, 0.37)), (63.7, 34.0, 2.3), (19.7, 27.8), (75.2, 72.4)),
    Case("2", "evasion", 200, ((11.36, 0.50), (10.41, 0.52)), (52.0, 42.5, 5.5), (18.1, 24.0), (75.9, 73.2)),
)


def play(case: Case, episodes: int, seed: int) -> Games:
    """Play games of a case in JAX."""
    policy = {"0": "random", "evasion": "evasion"}.get(case.one, f"level{case.one}")
    opponent = policies.load(None, "snakes", {"opponent": case.two})
    ((_, curves),) = rollout(opponent, [policy], episodes, seed)
    return {name: curves[name][-1].astype(np.float64) for name in (*SCORES, *RESULTS, *EVENTS)}


def compare(case: Case, games: Games) -> list[dict[str, Any]]:
    """Return rows of one case, one per metric; shares of games in per cent."""
    rows = []

    def add(metric: str, published: float, error: float, digit: float, factor: float = 1.0) -> None:
        mean = float(games[metric].mean()) * factor
        allowed = ERRORS * error + digit / 2
        rows.append(
            {
                "case": case.name,
                "metric": metric,
                "published": published,
                "found": round(mean, 4),
                "error": round(error, 5),
                "allowed": round(allowed, 4),
                "within": abs(mean - published) <= allowed,
            }
        )

    def ours(metric: str) -> float:
        return float(games[metric].std(ddof=1)) / math.sqrt(len(games[metric]))

    for metric, (mean, error) in zip(SCORES, case.score, strict=True):
        add(metric, mean, math.hypot(error, ours(metric)), 0.01)
    for metric, share in zip(RESULTS, case.result, strict=True):
        count = len(games[metric])
        pooled = (case.episodes * share / 100 + games[metric].sum()) / (case.episodes + count)
        error = math.sqrt(pooled * (1 - pooled) * (1 / case.episodes + 1 / count))
        add(metric, share, 100 * error, 0.1, 100.0)
    for metric, mean in zip(EVENTS, (*case.deaths, *case.meals), strict=True):
        add(metric, mean, ours(metric) * math.sqrt(1 + len(games[metric]) / case.episodes), 0.1)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the text of one case: found (published ± allowed)."""
    by_metric = {row["metric"]: row for row in rows}
    lines = []
    for metrics in LINES:
        group = [by_metric[metric] for metric in metrics]
        cells = [f"{r['found']:.2f} ({r['published']:.2f} ± {r['allowed']:.2f})" for r in group]
        verdict = "agrees" if all(r["within"] for r in group) else "DIFFERS"
        title = rows[0]["case"] if metrics is SCORES else ""
        names = "win, defeat, draw %" if metrics is RESULTS else metrics[0]
        lines.append(f"{title:<26} {names:<18} {'   '.join(f'{cell:<23}' for cell in cells):<75} {verdict}")
    return "\n".join(lines)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    speed_up_start()
    parser = measure.parser("python -m bench.parity.published_snakes", __doc__)
    add_int(parser, "--episodes", 2, 1_000_000, 2000, "play N games per pair (default: 2000)")
    add_seed(parser, "the games")
    parser.add_argument("--out", metavar="FILE", help="write the result to this JSON file")
    parsed = parser.parse_args(list(argv))
    path = measure.output(parsed.out, "published_snakes") if parsed.out else None
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows += compare(case, play(case, parsed.episodes, parsed.seed))
        print(table(rows[-9:]), flush=True)
    result = measure.header("snakes.published", argv, quick=False, module="parity.published_snakes") | {
        "notes": [],  # scores do not depend on how busy the machine is
        "episodes": parsed.episodes,
        "seed": parsed.seed,
        "rows": rows,
    }
    differing = sum(not row["within"] for row in rows)
    print(f"{len(rows) - differing} of {len(rows)} figures agree with the original engine's")
    if path:
        measure.write(result, path)
        print(f"wrote {path}")
    return DIFFERS if differing else 0


if __name__ == "__main__":
    sys.exit(main())
