"""Means of episodes and of seeds, differences of policies on the same episodes, and their 95 % intervals.

- A share is a metric that is 0 or 1 in each episode, see `EnvSpec.is_share`: Wilson's interval, which has a width even
  where all episodes end alike.
- Other values, and means of seeds: Student's interval of the mean; where all of them are equal nothing is known of it.
- Policies are compared episode by episode, see `estimate_difference`.

Arrays are float[N] of N episodes, or float[S, N] of S seeds that play the same N episodes; one seed is as none.

References:
    Wilson 1927, JASA 22; Satterthwaite 1946, Biometrics Bulletin 2; McNemar 1947, Psychometrika 12; Bonett and Price
    2012, J. Educ. Behav. Stat. 37.
"""

import functools
import math

import numpy as np

# scipy is slow to import, and pictures need none of it: functions import it.

LEVEL = 0.95
_QUANTILE = (1 + LEVEL) / 2
# With fewer episodes, differences of one sign in all of them are no evidence: a sign test has p = 2 / 2^5 = 0.06 of 5.
MIN_EPISODES = 6

Estimate = dict[str, float | None]  # None: not finite, or not known from so few values


def marks(steps: int) -> list[int]:
    """Return the steps that end a third, two thirds and all of an episode."""
    return sorted({max(1, round(steps * share / 3)) for share in (1, 2, 3)})


def estimate_mean(values: np.ndarray) -> Estimate:
    """Return "mean", "std", standard "error", and "ci95", half of Student's 95 % interval, of values float[N].

    One value has no "std", "error" and "ci95": they are None. Equal values have no "ci95". Where a value is not finite
    all are None.
    """
    values = np.asarray(values, np.float64)
    if not np.isfinite(values).all():
        return dict.fromkeys(("mean", "std", "error", "ci95"))
    count = len(values)
    deviation = float(values.std(ddof=1)) if count > 1 else math.nan
    error = deviation / count**0.5
    half = _student_quantile(count - 1) * error if np.ptp(values) else math.nan
    estimate = {"mean": float(values.mean()), "std": deviation, "error": error, "ci95": half}
    return {name: finite(value) for name, value in estimate.items()}


def interval(values: np.ndarray, share: bool | None = None) -> Estimate:
    """Return the entries of `estimate_mean` for episodes, or over the means of seeds; a share also has "low", "high".

    These are the ends of its interval: Wilson's over episodes; over seeds Student's, cut to [0, 1], and at least
    Wilson's of all their episodes. Its "ci95" is the distance from the mean to the farther end.

    Args:
        values: float[N], or float[S, N].
        share: whether the values are a share; None where nobody has declared it: if all are 0 or 1.
    """
    values = _merge_seed(values)
    share = _looks_like_share(values) if share is None else share
    with np.errstate(invalid="ignore"):  # values may be infinite
        estimate = estimate_mean(values if values.ndim == 1 else values.mean(1))
    if estimate["mean"] is None or not share:
        return estimate
    mean, half = float(values.mean()), estimate["ci95"]
    low, high = _wilson(round(values.sum()), values.size)
    if values.ndim == 2 and half is not None:
        low, high = min(low, max(mean - half, 0.0)), max(high, min(mean + half, 1.0))
    return estimate | {"ci95": max(mean - low, high - mean), "low": low, "high": high}


def summarise(curve: np.ndarray, share: bool | None = None) -> dict[str, list[float | None]]:
    """Return {"mean", "std", "ci95"}, of a share also {"low", "high"}, at every step of a curve; see `interval`.

    Numbers have seven significant digits.

    Args:
        curve: float[T + 1, N], or float[T + 1, S, N].
        share: whether the values are a share, see `interval`.
    """
    share = _looks_like_share(curve) if share is None else share
    rows = [interval(row, share) for row in curve]
    names = ("mean", "std", "ci95", *(("low", "high") if share else ()))
    return {name: [_round(row.get(name)) for row in rows] for name in names}


def estimate_difference(first: np.ndarray, second: np.ndarray | float = 0.0, share: bool | None = None) -> Estimate:
    """Return the "mean" of first - second on the same episodes, and "low" and "high", the ends of its 95 % interval.

    The interval is Student's. With seeds the variances over the seeds (means of the episodes) and over the episodes
    (means of the seeds) add up, with Satterthwaite's degrees of freedom; it is at least Student's over the seeds.

    Student's knows nothing of what was not seen. Where all differences are -u, 0 or u (of shares and rare events, or
    where all are equal), the interval is at least Bonett and Price's of the episodes (means of the seeds), which counts
    one more episode of difference u and one of -u. A share of one seed has Bonett and Price's alone, which holds 0
    unless McNemar's exact test excludes it. Fewer than `MIN_EPISODES` have no ends. Nor have values of no share that
    are all equal: nothing says what a difference of them would be.

    Args:
        first: float[N], or float[S, N].
        second: float[N], float[S, N] of the same seeds, or a number.
        share: whether both are shares, so that no difference is below -1 or above 1; None as in `interval`.
    """
    share = _looks_like_share(first) and _looks_like_share(np.asarray(second)) if share is None else share
    with np.errstate(invalid="ignore"):  # values may be infinite
        differences = _merge_seed(np.asarray(first, np.float64) - second)
    if not np.isfinite(differences).all():
        return {"mean": None, "low": None, "high": None}
    mean = float(differences.mean())
    count = differences.shape[-1]
    if count < MIN_EPISODES or not (share or differences.any()):
        return {"mean": mean, "low": None, "high": None}
    unit = 1.0 if share else float(np.abs(differences).max())
    low, high = _student(differences)
    if share and differences.ndim == 1:
        low, high = _bonett_price(differences, unit)
    elif share or low == high or np.isin(differences, (-unit, 0, unit)).all():
        least = _bonett_price(differences, unit)
        low, high = min(low, least[0]), max(high, least[1])
    if share:
        low, high = max(low, -1.0), min(high, 1.0)
    return {"mean": mean, "low": low, "high": high}


def _looks_like_share(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0, 1)).all())


def _merge_seed(values: np.ndarray) -> np.ndarray:
    """Return float64[N] of one seed's float[1, N], other values as they are."""
    values = np.asarray(values, np.float64)
    return values[0] if values.ndim == 2 and len(values) == 1 else values


def _student(differences: np.ndarray) -> tuple[float, float]:
    """Return the ends of Student's interval of differences float64[N] or [S, N], see `estimate_difference`."""
    parts = [differences] if differences.ndim == 1 else [differences.mean(axis) for axis in (0, 1)]
    variances = np.array([np.var(part, ddof=1) / len(part) for part in parts])
    mean = float(differences.mean())
    total = float(variances.sum())
    if total == 0:
        return mean, mean
    fractions = variances / total
    freedom = np.array([len(part) - 1 for part in parts])
    half = _student_quantile(1 / (fractions**2 / freedom).sum()) * total**0.5
    over_seeds = _student_quantile(freedom[-1]) * variances[-1] ** 0.5
    half = float(max(half, over_seeds))
    return mean - half, mean + half


def _student_quantile(freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, _QUANTILE))


def _bonett_price(differences: np.ndarray, unit: float) -> tuple[float, float]:
    """Return the ends of Bonett and Price's interval of differences float64[N] or [S, N] from -unit to unit."""
    from scipy.special import ndtri

    by_episode = differences if differences.ndim == 1 else differences.mean(0)
    padded = np.append(by_episode, (unit, -unit))
    center, half = float(padded.mean()), float(ndtri(_QUANTILE) * padded.std()) / len(padded) ** 0.5
    low, high = center - half, center + half
    if differences.ndim == 1 and not _differ(int((differences > 0).sum()), int((differences != 0).sum())):
        low, high = min(low, 0.0), max(high, 0.0)
    return low, high


def tail_mean(values: np.ndarray, share: float, largest: bool) -> np.ndarray:
    """Return the mean of the largest or smallest share of the values along the last axis: float[...] of float[..., N].

    This is the conditional value at risk at the level `share`; a value that the share cuts counts in part (Rockafellar
    and Uryasev 2002, J. Banking and Finance 26).
    """
    ordered = np.sort(np.asarray(values, np.float64), axis=-1)
    ordered = ordered[..., ::-1] if largest else ordered
    count = share * ordered.shape[-1]
    weights = np.clip(count - np.arange(ordered.shape[-1]), 0.0, 1.0)
    return ordered @ weights / count


def interquartile_mean(values: np.ndarray) -> float:
    """Return the mean of float[S] without its lowest and highest quarter (Agarwal et al. 2021, arXiv 2108.13264)."""
    from scipy.stats import trim_mean

    return float(trim_mean(values, 0.25))


def find_sign(difference: Estimate) -> int:
    """Return 1 or -1 if the interval of a difference is above or below 0, and 0 if it does not show which."""
    low, high = difference["low"], difference["high"]
    if low is None or high is None:
        return 0
    return int(low > 0) - int(high < 0)


@functools.cache
def _wilson(successes: int, trials: int) -> tuple[float, float]:
    from scipy.stats import binomtest

    ends = binomtest(successes, trials).proportion_ci(LEVEL, "wilson")
    return float(ends.low), float(ends.high)


@functools.cache
def _differ(wins: int, decided: int) -> bool:
    """Whether so many wins in so many games that were not drawn show at the level who is better."""
    from scipy.stats import binomtest

    return decided > 0 and bool(binomtest(wins, decided).pvalue < 1 - LEVEL)


def finite(number: float | np.floating) -> float | None:
    """Return a number, None for NaN and infinities, which JSON does not have."""
    number = float(number)
    return number if math.isfinite(number) else None


def _round(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.7g}")
