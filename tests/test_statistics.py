"""Means, shares, differences and their intervals: against published examples, SciPy and simulation."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from envs_jax.base import Box, Discrete, EnvSpec
from jaxrl.evaluation import reports
from jaxrl.evaluation.statistics import estimate_difference, estimate_mean, find_sign, interval, summarise

SPEC = EnvSpec("known", 1, Box((1,)), Discrete(2), 5, metrics={"won": "any"})


def zeros_and_ones(ones: int, number: int) -> np.ndarray:
    return np.arange(number) < ones


def ends(estimate: dict) -> tuple[float, float]:
    return estimate["low"], estimate["high"]


# Means and shares


@pytest.mark.parametrize(
    ("ones", "number", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_shares_have_wilson_intervals(ones, number, low, high):
    """The four examples of Newcombe 1998, Statistics in Medicine 17, Wilson's method without correction."""
    estimate = interval(zeros_and_ones(ones, number), share=True)
    assert ends(estimate) == pytest.approx((low, high), abs=5e-5)
    assert estimate["mean"] == pytest.approx(ones / number)
    assert estimate["ci95"] == pytest.approx(max(estimate["mean"] - low, high - estimate["mean"]), abs=1e-4)


def test_other_values_have_student_intervals():
    values = np.array([5.1, 4.9, 6.2, 5.7, 5.5, 5.1])
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    estimate = interval(values, share=False)
    assert (estimate["mean"] - estimate["ci95"], estimate["mean"] + estimate["ci95"]) == pytest.approx((low, high))
    assert estimate["error"] == pytest.approx(stats.sem(values)) and "low" not in estimate
    assert estimate_mean(values) == estimate


def test_one_value_has_no_interval():
    assert interval(np.array([1.2]), share=False) == {"mean": 1.2, "std": None, "error": None, "ci95": None}
    assert ends(interval(np.array([1.0]), share=True)) == pytest.approx(
        (1 / (1 + 1.959964**2), 1.0)
    )  # Wilson's: 1 of 1
    assert interval(np.array([1.0]), share=False)["ci95"] is None


def test_equal_values_have_no_student_interval():
    """Ten games without a death do not show that there are none in other games."""
    for value in (0.0, 1.0, 0.1, 1 / 3):
        for values in (np.full(10, value), np.full((3, 10), value), np.full((1, 10), value)):
            estimate = interval(values, share=False)
            assert estimate["mean"] == pytest.approx(value) and estimate["ci95"] is None and "low" not in estimate


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("values", [[0.5, np.inf], [np.nan, 1.0], [np.inf, -np.inf], [[1.0, np.nan], [1.0, 1.0]]])
def test_values_that_are_not_finite(values, share):
    estimate = interval(np.array(values), share)
    assert estimate["mean"] is estimate["ci95"] is None
    curve = np.stack([np.ones_like(values), values])
    assert summarise(curve, share)["mean"] == [1, None]
    number = np.resize(np.array(values), (2, 20))
    for difference in (estimate_difference(number, 0.0, share), estimate_difference(number[0], number[1], share)):
        assert difference == {"mean": None, "low": None, "high": None}


def test_summaries_of_curves():
    reached = np.array([[0, 0, 0], [0, 1, 0], [1, 1, 1]], float)
    summary = summarise(reached, share=True)
    assert set(summary) == {"mean", "std", "ci95", "low", "high"}
    assert (summary["low"][2], summary["high"][0]) == pytest.approx(
        (0.438503, 0.561497), abs=1e-6
    )  # of 3 of 3, of 0 of 3
    returns = summarise(reached, share=False)  # such as of one apple at most
    assert set(returns) == {"mean", "std", "ci95"}
    assert returns["ci95"] == [None, pytest.approx(stats.t.ppf(0.975, 2) / 3), None]


def test_one_seed_is_as_its_episodes():
    values = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    for share in (True, False):
        assert interval(values[None], share) == interval(values, share)
        for other in (0.0, 1 - values, (1 - values)[None]):
            assert estimate_difference(values[None], other, share) == estimate_difference(values, other, share)


def test_seeds_have_student_intervals_of_their_means():
    values = np.array([[1.0, 3.0, 2.0, 4.0], [2.0, 2.0, 5.0, 7.0], [0.0, 1.0, 1.0, 2.0]])
    means = np.array([2.5, 4.0, 1.0])
    low, high = stats.ttest_1samp(means, 0.0).confidence_interval(0.95)
    estimate = interval(values, share=False)
    assert estimate["mean"] - estimate["ci95"] == pytest.approx(low) and estimate["mean"] + estimate[
        "ci95"
    ] == pytest.approx(high)
    assert summarise(values[None], share=False)["ci95"] == [pytest.approx(estimate["ci95"])]


def test_shares_of_seeds_lie_between_0_and_1():
    """Student's interval of 60, 90 and 100 % would end at 136 %; of three times 100 % it would have no width."""
    seeds = np.stack([zeros_and_ones(ones, 20) for ones in (12, 18, 20)])
    half = stats.t.ppf(0.975, 2) * np.std([0.6, 0.9, 1.0], ddof=1) / 3**0.5
    assert ends(interval(seeds, share=True)) == pytest.approx((0.5 / 0.6 - half, 1.0))
    assert ends(interval(1.0 - seeds, share=True)) == pytest.approx((0.0, 0.5 / 3 + half))
    assert ends(interval(np.ones((3, 20)), share=True)) == pytest.approx((1 / (1 + 1.959964**2 / 60), 1.0))  # 60 of 60


# Differences


def test_differences_are_paired():
    """Starts differ much and policies little: Student's interval of the differences, as of SciPy's paired test."""
    random = np.random.default_rng(0)
    start = random.normal(0, 1, 200)
    first, second = start + 0.15 + random.normal(0, 0.1, 200), start + random.normal(0, 0.1, 200)
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
    difference = estimate_difference(first, second)
    assert ends(difference) == pytest.approx((expected.low, expected.high)) and find_sign(difference) == 1
    assert find_sign(estimate_difference(second, first)) == -1
    assert stats.ttest_ind(first, second).pvalue > 0.05  # what the starts hide


def test_differences_of_shares():
    """The example of Fagerland, Lydersen and Laake 2014, Statistics in Medicine 33: 21 children before and after.

    Bonett and Price's interval is -0.508 to -0.013, and the exact test has p = 0.070: no difference is shown.
    """
    first = zeros_and_ones(2, 21)  # 1 both, 1 only before
    second = np.r_[1, 0, np.ones(7), np.zeros(12)]  # 7 only after
    difference = estimate_difference(first, second, share=True)
    assert difference["mean"] == pytest.approx(-6 / 21) and ends(difference) == pytest.approx((-0.508, 0.0), abs=6e-4)
    difference = estimate_difference(np.tile(first, 2), np.tile(second, 2), share=True)  # (2 + 1) / 44 - (14 + 1) / 44
    half = 1.959964 * np.sqrt((18 / 44 - (12 / 44) ** 2) / 44)
    assert ends(difference) == pytest.approx((-12 / 44 - half, -12 / 44 + half)) and find_sign(difference) == -1


@pytest.mark.parametrize("number", [6, 20, 200])
def test_as_many_wins_count_as_in_the_exact_test(number):
    """A difference is shown where McNemar's exact test shows one, and in one direction from six wins on."""
    for losses in range(4):
        for wins in range(min(number - losses, 15) + 1):
            differences = np.r_[np.ones(wins), -np.ones(losses), np.zeros(number - wins - losses)]
            exact = wins + losses > 0 and stats.binomtest(wins, wins + losses).pvalue < 0.05
            for share in (True, False):
                sign = find_sign(estimate_difference(differences, share=share))
                assert abs(sign) <= exact and (sign == exact or losses > 0), (wins, losses)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_few_episodes_show_nothing(number):
    for first in (np.ones(number), np.full(number, 1.2), np.arange(number) + 7.0, np.ones((3, number))):
        difference = estimate_difference(first, np.zeros(number), share=bool(np.all(first == 1)))
        assert find_sign(difference) == 0 and ends(difference) == (None, None)
    assert find_sign(estimate_difference(np.ones(6), np.zeros(6))) == 1


def test_differences_of_seeds():
    """Variances over seeds and over 50 episodes add up, as for two samples in Welch's test; at least those of seeds."""
    random = np.random.default_rng(1)
    baseline = random.normal(0, 1, 50)
    for seeds, seed_spread, episode_spread in ((3, 0.01, 1.0), (2, 0.001, 1.0), (3, 1.0, 0.1), (2, 0.3, 1.0)):
        policy = 0.5 + seed_spread * random.normal(0, 1, (seeds, 1)) + episode_spread * random.normal(0, 1, 50)
        difference = estimate_difference(policy, baseline)
        seed_means, episode_means = ((policy - baseline).mean(axis) for axis in (1, 0))
        welch = stats.ttest_ind(seed_means, episode_means, equal_var=False).confidence_interval(0.95)
        student = stats.ttest_1samp(seed_means, 0.0).confidence_interval(0.95)
        half = max(welch.high - welch.low, student.high - student.low) / 2
        assert (half > (welch.high - welch.low) / 2) == (seed_spread >= 0.3)
        assert ends(difference) == pytest.approx((seed_means.mean() - half, seed_means.mean() + half))
    shares = np.stack([zeros_and_ones(ones, 20) for ones in (12, 18, 20)])
    low, high = ends(estimate_difference(shares, np.zeros(20), share=True))
    assert low < 0.5 and high == 1  # no share differs by more
    assert ends(estimate_difference(shares, np.zeros(20), share=False))[1] > 1  # a count may


def bonett_price(differences: np.ndarray, unit: float = 1.0) -> tuple[float, float]:
    """Equation 10 of Bonett and Price 2012, by counts of the two kinds of difference in N episodes."""
    up, down, number = np.sum(differences > 0), np.sum(differences < 0), len(differences) + 2
    ups, downs = (up + 1) / number, (down + 1) / number
    half = 1.959964 * np.sqrt((ups + downs - (ups - downs) ** 2) / number)
    return unit * (ups - downs - half), unit * (ups - downs + half)


def test_what_was_not_seen_has_a_width():
    """Twelve games that both won, as one seed or as seeds of six, do not show that there is no difference."""
    won = np.ones(12)
    assert ends(estimate_difference(won, won, share=True)) == pytest.approx(bonett_price(won - won), abs=1e-6)
    for share in (True, None):  # declared, or by the values
        for seeds in (2, 5):
            same = estimate_difference(np.ones((seeds, 6)), np.ones(6), share)
            assert ends(same) == pytest.approx(bonett_price(np.zeros(6)), abs=1e-6) and same["mean"] == 0
    for value in (1.0, 1e-4):  # of no share: equal values do not say what a difference would be
        equal = estimate_difference(np.full((2, 6), value), np.full(6, value), share=False)
        assert equal == {"mean": 0.0, "low": None, "high": None}
    low, high = ends(estimate_difference(np.ones((2, 6)), np.zeros(6), share=True))
    assert low == pytest.approx(bonett_price(np.ones(6))[0], abs=1e-6) and high == 1


@pytest.mark.parametrize("unit", [1.0, 0.25, 480.0])
def test_equal_differences_have_a_width_of_their_size(unit):
    """Two policies without randomness: one is better by the same in all episodes."""
    for differences in (np.full(20, unit), np.full((3, 20), unit)):
        low, high = ends(estimate_difference(differences, share=False))
        assert (low, high) == pytest.approx(bonett_price(np.ones(20), unit)) and 0 < low < unit < high
    rare = np.r_[np.zeros(19), unit]  # in one of 20 episodes: Student's has this episode, and no other
    low, high = ends(estimate_difference(rare, share=False))
    student = stats.ttest_1samp(rare, 0.0).confidence_interval(0.95)
    assert low == pytest.approx(min(student.low, bonett_price(rare, unit)[0])) and low < 0
    assert high == pytest.approx(max(student.high, bonett_price(rare, unit)[1]))


def cover(seeds: int, episodes: int, difference: float, spread: bool, runs: int = 300) -> float:
    """How often the interval holds the true difference of success, 0.7 - difference and 0.7 or 1 - difference and 1.

    With `spread` the success of a seed is uniform, up to `difference` from its mean; where that is 0, up to 0.2.
    """
    random, covered = np.random.default_rng(seeds * episodes), 0
    for run in range(runs):
        best = (0.7, 1.0)[run % 2]
        width = min(best - difference, 1 - best + difference, difference or 0.2) if spread else 0.0
        chance = best - difference + width * random.uniform(-1, 1, (seeds, 1))
        policy, other = random.random((seeds, episodes)) < chance, random.random(episodes) < best
        low, high = ends(estimate_difference(policy, other * 1.0, share=True))
        covered += low - 1e-9 <= -difference <= high + 1e-9
    return covered / runs


@pytest.mark.parametrize("seeds", [1, 2, 3, 5])
@pytest.mark.parametrize("difference", [0.0, 0.02, 0.3])
def test_differences_of_shares_hold_the_truth(seeds, difference):
    """At least in 93 % of all cases where seeds are alike; 300 of them have a standard error of 1.3 %."""
    for episodes in (6, 20, 100, 1000):
        assert cover(seeds, episodes, difference, spread=False) > 0.93, episodes


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("difference", [0.0, 0.02, 0.3])
def test_seeds_that_differ_fall_a_little_short(seeds, difference):
    """At least in 88 % of all cases, also where the seeds make the difference; few seeds do not show their spread."""
    for episodes in (6, 20, 100, 1000):
        assert cover(seeds, episodes, difference, spread=True) > (0.93 if episodes == 6 else 0.88), episodes


def test_policies_are_compared_with_the_first_of_the_run():
    start = np.linspace(0, 1, 40)
    noise = 0.02 * np.cos(np.arange(40))
    scores = {
        "random": start + 1, "learned": start + 0.2 + noise, "sampled": start + 0.1, "ig": start, "bad": start + 2,
    }  # fmt: skip
    by_policy = {entry["second"]: entry for entry in reports.compare(SPEC, scores)}
    assert list(by_policy) == ["random", "sampled", "ig", "bad"] and {e["first"] for e in by_policy.values()} == {
        "learned"
    }
    assert by_policy["random"]["mean"] == pytest.approx(-0.8 + noise.mean())
    assert list(reports.compare(SPEC, {"random": start, "ig": start})) == []
    won = dataclasses.replace(SPEC, score="won")
    (same,) = reports.compare(won, {"learned": np.ones((2, 6)), "random": np.ones(6)})
    assert ends(same) == pytest.approx(bonett_price(np.zeros(6)), abs=1e-6)
    (worse,) = reports.compare(won, {"learned": np.zeros((2, 20)), "random": np.ones(20)})
    assert worse["low"] == -1
