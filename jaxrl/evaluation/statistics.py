"""Means and intervals over episodes, and the comparison of policies by them."""

import math
from typing import Any

import numpy as np
from scipy.special import stdtrit

from jaxrl.evaluation.policies import LEARNED
from jaxrl.evaluation.rollouts import interval


def marks(steps: int) -> list[int]:
    """Return the steps that end a third, two thirds and all of an episode."""
    return sorted({max(1, round(steps * share / 3)) for share in (1, 2, 3)})


def summarise(curve: np.ndarray, few: bool = False) -> dict[str, list[float | None]]:
    """Return {"mean", "std", "ci95"} over episodes or, `few`, over seeds at every step of float[T + 1, N].

    The interval of few numbers is Student's, see `interval` for many.
    """
    rows = [interval(np.asarray(row, np.float64)) for row in curve]
    if few:
        factor = float(stdtrit(curve.shape[1] - 1, 0.975)) / 1.96
        rows = [row | {"ci95": factor * row["ci95"]} for row in rows]
    return {name: [rounded(row[name]) for row in rows] for name in ("mean", "std", "ci95")}


def rounded(number: float) -> float | None:
    """Round to seven significant digits; None for numbers that JSON cannot represent."""
    return float(f"{number:.7g}") if math.isfinite(number) else None


def compare(policies: dict[str, Any], score: str, mode: str) -> dict[str, Any] | None:
    """Compare the learned policy with the others at the end of the episode; None without it or "random".

    Returns:
        policy: the compared policy; better: whether its mean score is better than random's; disjoint: whether the
        95 % intervals do not overlap; way: {scripted policy: (learned - random) / (scripted - random) in the score,
        None where random is as good}; near: the scripted policies whose intervals overlap with the
        learned policy's; best: the scripted policy with the best score.
    """
    own = next((name for name in LEARNED if name in policies), None)
    if own is None or "random" not in policies:
        return None
    mean, half = ({name: result[score][key][-1] for name, result in policies.items()}
                  for key in ("mean", "ci95"))  # fmt: skip
    if any(value is None for value in (*mean.values(), *half.values())):
        return None
    sign = -1.0 if mode == "min" else 1.0
    gain = {name: sign * (value - mean["random"]) for name, value in mean.items()}
    others = [name for name in policies if name not in (*LEARNED, "random")]
    return {
        "policy": own,
        "better": gain[own] > 0,
        "disjoint": abs(gain[own]) > half[own] + half["random"],
        "way": {name: rounded(gain[own] / gain[name]) if gain[name] > 0 else None for name in others},
        "near": [name for name in others if abs(gain[own] - gain[name]) <= half[own] + half[name]],
        "best": max(others, key=lambda name: gain[name]) if others else None,
    }
