"""python -m bench.studies.interval_coverage: how often the 95 % intervals of evaluations hold the truth.

Draws evaluations whose truth is known, and counts the intervals that hold it: shares of episodes, differences of
policies on the same episodes, means of 3 and 5 seeds, Elo ratings. "exact" is the share that a sum over the binomial
distribution gives. For comparison, "normal" is the share of normal intervals of the mean (1.96 standard errors) that
hold the truth, and "apart" how often those of two policies do not overlap; "shown" is how often a difference is shown.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import binom

from bench.harness import measure
from jaxrl.cli.entry import exit_on_error
from jaxrl.evaluation.league import elo
from jaxrl.evaluation.statistics import Estimate, estimate_difference, estimate_mean, interval, sign_of

KIND = "interval_coverage"
Array = np.ndarray
Row = dict[str, Any]
RATINGS = np.array([0.0, 100.0, 250.0, -300.0])  # of Elo


def holds(estimate: Estimate, truth: float) -> bool:
    """Whether an interval, with two ends or symmetric, holds the truth."""
    low, high = estimate.get("low"), estimate.get("high")
    if low is None or high is None:
        mean, half = estimate["mean"], estimate["ci95"]
        assert mean is not None and half is not None
        low, high = mean - half, mean + half
    return low - 1e-12 <= truth <= high + 1e-12


def _normal(values: Array) -> tuple[float, float]:
    """Return mean and half of the normal interval."""
    return float(values.mean()), 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5


def measure_shares(random: np.random.Generator, times: int) -> list[Row]:
    """Shares of 50 and 500 episodes."""
    rows = []
    for episodes in (50, 500):
        for truth in (0.5, 0.9, 0.99, 1.0):
            draws = [random.random(episodes) < truth for _ in range(times)]
            normal = [abs(mean - truth) <= half + 1e-12 for mean, half in map(_normal, draws)]
            held = [holds(interval(draw), truth) for draw in draws]
            counts = np.arange(episodes + 1)  # of successes: without drawing, their probabilities
            inside = [holds(interval(np.arange(episodes) < count), truth) for count in counts]
            rows.append(
                {
                    "truth": truth,
                    "episodes": episodes,
                    "held": np.mean(held),
                    "exact": binom.pmf(counts, episodes, truth)[inside].sum(),
                    "normal": np.mean(normal),
                }
            )
    return rows


def _pairs(random: np.random.Generator, kind: str, episodes: int) -> tuple[Array, Array]:
    """Draw the scores of two policies on the same episodes, whose difficulty they share; see PAIRS for the means."""
    start = random.normal(size=episodes)
    if kind == "scores":
        return start + 0.15 + 0.5 * random.normal(size=episodes), start + 0.5 * random.normal(size=episodes)
    if kind == "skewed":
        return start + 0.15 * random.exponential(size=episodes), start
    if kind == "equal":
        return start + 0.5 * random.normal(size=episodes), start + 0.5 * random.normal(size=episodes)
    high, low = (float(share) for share in kind.split(" against "))
    shared, own = random.random(episodes), random.random((2, episodes))
    level = np.where(random.random(episodes) < 0.5, shared, own)  # half of the episodes are decided alike
    return (level[0] < high).astype(float), (level[1] < low).astype(float)


PAIRS = {"scores": 0.15, "skewed": 0.15, "equal": 0.0, "0.5 against 0.5": 0.0, "0.9 against 0.8": 0.1,
         "0.99 against 0.9": 0.09, "1.0 against 1.0": 0.0}  # fmt: skip


def measure_differences(random: np.random.Generator, times: int) -> list[Row]:
    """Differences of two policies on the same episodes."""
    rows = []
    for kind, truth in PAIRS.items():
        for episodes in (10, 50, 500):
            drawn = [_pairs(random, kind, episodes) for _ in range(times)]
            found = [estimate_difference(first, second) for first, second in drawn]
            apart = []
            for first, second in drawn:
                (mean, half), (other, other_half) = _normal(first), _normal(second)
                apart.append(abs(mean - other) > half + other_half)
            rows.append(
                {
                    "pair": kind,
                    "truth": truth,
                    "episodes": episodes,
                    "held": np.mean([holds(one, truth) for one in found]),
                    "shown": np.mean([sign_of(one) != 0 for one in found]),
                    "apart": np.mean(apart),
                }
            )
    return rows


def measure_seeds(random: np.random.Generator, times: int) -> list[Row]:
    """Means of 3 and 5 seeds on the same 200 episodes, and their differences to a scripted policy.

    "held" is the share of intervals that hold the mean over all seeds on these very episodes; of a difference, and in
    "all_episodes", over all seeds and all episodes.
    """
    rows = []
    for seeds in (3, 5):
        for spread, noise in ((1.0, 1.0), (0.1, 1.0)):  # of seeds, of episodes
            held, normal, everywhere, differences = [], [], [], []
            for _ in range(times):
                start = noise * random.normal(size=200)
                scores = (
                    start + spread * random.normal(size=(seeds, 1)) + 0.5 * noise * random.normal(size=(seeds, 200))
                )
                found = interval(scores)
                held.append(holds(found, float(start.mean())))
                everywhere.append(holds(found, 0.0))
                mean, half = _normal(scores.mean(1))
                normal.append(abs(mean - start.mean()) <= half)
                scripted = start + 0.5 * noise * random.normal(size=200)
                differences.append(holds(estimate_difference(scores, scripted), 0.0))
            rows.append({"seeds": seeds, "spread_of_seeds": spread, "spread_of_episodes": noise} | {
                name: np.mean(values)
                for name, values in (("held", held), ("normal", normal), ("all_episodes", everywhere),
                                     ("difference", differences))
            })  # fmt: skip
        for share in (0.9, 1.0):
            held = []
            for _ in range(times):
                each = random.beta(18, 2, seeds) if share < 1 else np.ones(seeds)
                held.append(holds(interval(random.random((seeds, 200)) < each[:, None]), share))
            rows.append({"seeds": seeds, "share": share, "held": np.mean(held)})
        means = random.normal(size=(times, seeds))
        rows.append(
            {"seeds": seeds, "means_only": True, "held": np.mean([holds(estimate_mean(m), 0.0) for m in means])}
        )
    return rows


def measure_ratings(random: np.random.Generator, times: int) -> list[Row]:
    """Elo ratings of four players, with draws, relative to the first."""
    rows = []
    for games in (20, 100, 400):
        held = []
        for _ in range(max(1, times // 10)):
            wins, draws = np.zeros((2, 4, 4))
            for i in range(4):
                for j in range(i):
                    chance = 1 / (1 + 10 ** ((RATINGS[j] - RATINGS[i]) / 400))
                    drawn = 0.5 * min(chance, 1 - chance)
                    shares = [chance - drawn / 2, 1 - chance - drawn / 2, drawn]
                    wins[i, j], wins[j, i], draws[i, j] = random.multinomial(games, shares)
                    draws[j, i] = draws[i, j]
            rating, half = elo(wins, draws, 0, 0.0)
            held.append(np.mean(abs(rating - RATINGS)[1:] <= half[1:]))
        rows.append({"games": games, "held": np.mean(held)})
    return rows


PARTS: dict[str, Callable[[np.random.Generator, int], list[Row]]] = {
    "shares": measure_shares,
    "differences": measure_differences,
    "seeds": measure_seeds,
    "ratings": measure_ratings,
}


def run(times: int, parts: Sequence[str] = tuple(PARTS), seed: int = 0) -> dict[str, list[Row]]:
    """Return the rows of each part, shares of so many draws; of ratings a tenth of them."""
    rows = {name: PARTS[name](np.random.default_rng([seed, list(PARTS).index(name)]), times) for name in parts}
    return {
        name: [{key: round(float(x), 4) if isinstance(x, np.floating) else x for key, x in row.items()} for row in part]
        for name, part in rows.items()
    }


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser(f"python -m bench.studies.{KIND}", __doc__)
    parser.add_argument("--times", default="10000", metavar="N", help="evaluations of each kind (default: 10000)")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")
    parsed = parser.parse_args(list(argv))
    times = measure.parse_int(parsed.times, "--times", 10, 10**7)
    path = measure.output(parsed.out, KIND)
    result = measure.header(f"studies.{KIND}", argv, quick=False)
    result |= {"notes": [], "times": times} | run(times)  # how busy the machine is changes nothing
    for name in PARTS:
        for row in result[name]:
            measure.say(f"{name}: {', '.join(f'{key} {value}' for key, value in row.items())}")
    measure.write(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
