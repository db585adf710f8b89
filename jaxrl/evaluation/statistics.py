"""Means and intervals over episodes."""

import math

import numpy as np
from scipy.special import stdtrit


def marks(steps: int) -> list[int]:
    """Return the steps that end a third, two thirds and all of an episode."""
    return sorted({max(1, round(steps * share / 3)) for share in (1, 2, 3)})


def interval(values: np.ndarray, few: bool = False) -> dict[str, float]:
    """Return mean, standard deviation, standard error and half of the 95 % interval of values float[N].

    The interval is normal, that of `few` values Student's.
    """
    values = np.asarray(values, np.float64)
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    error = deviation / len(values) ** 0.5
    factor = float(stdtrit(len(values) - 1, 0.975)) if few else 1.96
    return {"mean": float(values.mean()), "std": deviation, "error": error, "ci95": factor * error}


def summarise(curve: np.ndarray, few: bool = False) -> dict[str, list[float | None]]:
    """Return {"mean", "std", "ci95"} over episodes or, `few`, over seeds at every step of float[T + 1, N].

    See `interval`. Numbers have seven significant digits, and are None where JSON cannot represent them.
    """
    rows = [interval(row, few) for row in curve]
    rounded = lambda number: float(f"{number:.7g}") if math.isfinite(number) else None  # noqa: E731
    return {name: [rounded(row[name]) for row in rows] for name in ("mean", "std", "ci95")}
