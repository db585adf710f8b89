"""Means and intervals over episodes."""

import math

import numpy as np
from scipy.special import stdtrit


def marks(steps: int) -> list[int]:
    """Return the steps that end a third, two thirds and all of an episode."""
    return sorted({max(1, round(steps * share / 3)) for share in (1, 2, 3)})


def interval(values: np.ndarray) -> dict[str, float]:
    """Return mean, standard deviation, standard error and half of the 95 % interval (normal) of values float[N]."""
    values = np.asarray(values, np.float64)
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    error = deviation / len(values) ** 0.5
    return {"mean": float(values.mean()), "std": deviation, "error": error, "ci95": 1.96 * error}


def summarise(curve: np.ndarray, few: bool = False) -> dict[str, list[float | None]]:
    """Return {"mean", "std", "ci95"} over episodes or, `few`, over seeds at every step of float[T + 1, N].

    The interval of few numbers is Student's, see `interval` for many. Numbers have seven significant digits, and are
    None where JSON cannot represent them.
    """
    rows = [interval(row) for row in curve]
    if few:
        factor = float(stdtrit(curve.shape[1] - 1, 0.975)) / 1.96
        rows = [row | {"ci95": factor * row["ci95"]} for row in rows]
    rounded = lambda number: float(f"{number:.7g}") if math.isfinite(number) else None  # noqa: E731
    return {name: [rounded(row[name]) for row in rows] for name in ("mean", "std", "ci95")}
