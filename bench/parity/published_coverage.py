"""python -m bench.parity.published_coverage: do scripted policies score in JAX what they score in the original system?

The original's scores (q = 57, 50 missions each; mean and standard deviation of map entropy and F1 after a third, two
thirds and all of the measurements) were obtained with the classes of the public repository dmar-bonn/ipp-marl. Here
each policy runs held-out missions of the same distribution. A mean must lie within three standard errors of the
difference; F1 may differ by another 0.02, because the original lets rounding decide cells of contradicting readings.
Ends with status 1 where one does not.
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

MISSIONS = 50  # per published figure
ERRORS = 3.0
TIES = 0.02


@dataclasses.dataclass(frozen=True)
class Case:
    """A policy and its score in the original system."""

    policy: str  # name of the scripted policy
    settings: dict[str, Any]  # the environment's
    at: tuple[int, int, int]  # the steps after which `entropy` and `f1` were taken
    entropy: tuple[tuple[float, float], ...]  # mean and standard deviation after each of these steps
    f1: tuple[tuple[float, float], ...]  # likewise

    @property
    def name(self) -> str:
        return ", ".join([self.policy, *(f"{name} {value}" for name, value in self.settings.items())])


_FIFTEEN, _SIXTEEN = (4, 9, 14), (5, 10, 15)  # measurements counted from 0; random and lawn-mower end one earlier


def _lawnmower(policy: str, start: str, entropy: Any, f1: Any) -> Case:
    return Case(policy, {"num_agents": 8, "start": start}, _FIFTEEN, entropy, f1)


def _greedy(start: str, comm_range: float, entropy: Any, f1: Any) -> Case:
    return Case("ig", {"start": start, "communication_range": comm_range}, _SIXTEEN, entropy, f1)


CASES = (
    Case("random", {"start": "original"}, _FIFTEEN,
         ((0.920, 0.047), (0.842, 0.083), (0.775, 0.115)), ((0.386, 0.169), (0.480, 0.188), (0.540, 0.193))),
    _lawnmower("lawnmower_5", "paths_5",
               ((0.855, 0.081), (0.645, 0.033), (0.592, 0.042)), ((0.245, 0.129), (0.525, 0.036), (0.580, 0.044))),
    _lawnmower("lawnmower", "paths_10",
               ((0.813, 0.086), (0.598, 0.028), (0.506, 0.031)), ((0.375, 0.149), (0.661, 0.030), (0.721, 0.033))),
    _lawnmower("lawnmower_15", "paths_15",
               ((0.852, 0.062), (0.687, 0.023), (0.593, 0.026)), ((0.450, 0.148), (0.696, 0.036), (0.747, 0.034))),
    _greedy("original", 25.0,
            ((0.848, 0.072), (0.716, 0.090), (0.557, 0.085)), ((0.449, 0.178), (0.592, 0.160), (0.725, 0.101))),
    _greedy("original", 0.0,
            ((0.845, 0.077), (0.704, 0.110), (0.550, 0.105)), ((0.432, 0.181), (0.574, 0.186), (0.699, 0.127))),
    _greedy("original", 100.0,
            ((0.846, 0.072), (0.708, 0.092), (0.543, 0.082)), ((0.448, 0.177), (0.598, 0.159), (0.736, 0.086))),
    Case("random", {"start": "corners"}, _FIFTEEN,
         ((0.882, 0.026), (0.792, 0.045), (0.725, 0.057)), ((0.538, 0.044), (0.605, 0.045), (0.652, 0.048))),
    _greedy("corners", 25.0,
            ((0.822, 0.029), (0.679, 0.055), (0.523, 0.062)), ((0.550, 0.045), (0.677, 0.039), (0.765, 0.026))),
    _greedy("corners", 0.0,
            ((0.820, 0.028), (0.682, 0.066), (0.542, 0.093)), ((0.551, 0.043), (0.661, 0.047), (0.732, 0.045))),
    _greedy("corners", 100.0,
            ((0.821, 0.028), (0.682, 0.058), (0.535, 0.052)), ((0.550, 0.043), (0.672, 0.043), (0.764, 0.029))),
)  # fmt: skip


def compare(case: Case, curves: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return rows of one case from curves {metric: float32[T + 1, missions]}."""
    rows = []
    for metric, ties, published in (("entropy", 0.0, case.entropy), ("f1", TIES, case.f1)):
        for step, (mean, deviation) in zip(case.at, published, strict=True):
            values = curves[metric][step].astype(np.float64)
            error = math.sqrt(deviation**2 / MISSIONS + values.var(ddof=1) / len(values))
            rows.append(
                {
                    "case": case.name,
                    "metric": metric,
                    "measurements": step + 1,
                    "published": {"mean": mean, "std": deviation},
                    "found": {"mean": round(float(values.mean()), 5), "std": round(float(values.std(ddof=1)), 5)},
                    "allowed": round(ERRORS * error + ties, 5),
                    "within": bool(abs(values.mean() - mean) <= ERRORS * error + ties),
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return text, one line per case and metric."""
    lines = []
    for start in range(0, len(rows), 3):
        three = rows[start : start + 3]
        cells = [f"{r['found']['mean']:.3f} ({r['published']['mean']:.3f} ± {r['allowed']:.3f})" for r in three]
        verdict = "" if all(r["within"] for r in three) else "  DIFFERS"
        lines.append(f"{three[0]['case']:<52} {three[0]['metric']:<8} {'   '.join(cells)}{verdict}")
    return "\n".join(lines)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    speed_up_start()
    parser = measure.parser("python -m bench.parity.published_coverage", __doc__)
    add_int(parser, "--episodes", 2, 1_000_000, 200, "play N missions per policy (default: 200)")
    add_seed(parser, "the missions")
    parser.add_argument("--out", metavar="FILE", help="write the result to this JSON file")
    parsed = parser.parse_args(list(argv))
    path = measure.output(parsed.out, "published_coverage") if parsed.out else None
    rows: list[dict[str, Any]] = []
    for case in CASES:
        evaluated = policies.load(None, "coverage", case.settings)
        for _, curves in rollout(evaluated, [case.policy], parsed.episodes, parsed.seed):
            rows += compare(case, curves)
        print(table(rows[-6:]), flush=True)
    result = measure.header("coverage.published", argv, quick=False, module="parity.published_coverage") | {
        "notes": [],  # scores do not depend on how busy the machine is
        "episodes": parsed.episodes,
        "seed": parsed.seed,
        "rows": rows,
    }
    differing = sum(not row["within"] for row in rows)
    print(f"{len(rows) - differing} of {len(rows)} means agree with the original's")
    if path:
        measure.write(result, path)
        print(f"wrote {path}")
    return DIFFERS if differing else 0


if __name__ == "__main__":
    sys.exit(main())
