"""Means, shares, differences and their intervals: against published examples, SciPy and simulation."""

import numpy as np
import pytest
from scipy import stats

from jaxrl.evaluation import reports
from jaxrl.evaluation.statistics import estimate_difference, estimate_mean, find_sign, interval, is_share, summarise


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
    estimate = interval(zeros_and_ones(ones, number))
    assert ends(estimate) == pytest.approx((low, high), abs=5e-5)
    assert estimate["mean"] == pytest.approx(ones / number)
    assert estimate["ci95"] == pytest.approx(max(estimate["mean"] - low, high - estimate["mean"]), abs=1e-4)


def test_other_values_have_student_intervals():
    values = np.array([5.1, 4.9, 6.2, 5.7, 5.5, 5.1])
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    estimate = interval(values)
    assert (estimate["mean"] - estimate["ci95"], estimate["mean"] + estimate["ci95"]) == pytest.approx((low, high))
    assert estimate["error"] == pytest.approx(stats.sem(values)) and "low" not in estimate
    assert estimate_mean(values) == estimate


def test_one_value_has_no_interval():
    assert interval(np.array([1.2])) == {"mean": 1.2, "std": None, "error": None, "ci95": None}
    assert ends(interval(np.array([1.0]))) == pytest.approx((1 / (1 + 1.959964**2), 1.0))  # Wilson's of 1 of 1
    assert interval(np.array([1.0]), share=False)["ci95"] is None
    assert interval(np.array([0.5, np.inf]))["mean"] is None


def test_a_metric_is_a_share_if_it_is_0_or_1_at_all_steps():
    reached = np.array([[0, 0, 0], [0, 1, 0], [1, 1, 1]], float)
    summary = summarise(reached)
    assert is_share(reached) and set(summary) == {"mean", "std", "ci95", "low", "high"}
    assert (summary["low"][2], summary["high"][0]) == pytest.approx(
        (0.438503, 0.561497), abs=1e-6
    )  # of 3 of 3, of 0 of 3
    returns = reached * 0.5
    assert not is_share(returns) and set(summarise(returns)) == {"mean", "std", "ci95"}
    assert summarise(returns)["ci95"][0] == 0  # all episodes begin with a return of 0


def test_seeds_have_student_intervals_of_their_means():
    values = np.array([[1.0, 3.0, 2.0, 4.0], [2.0, 2.0, 5.0, 7.0], [0.0, 1.0, 1.0, 2.0]])
    means = np.array([2.5, 4.0, 1.0])
    low, high = stats.ttest_1samp(means, 0.0).confidence_interval(0.95)
    estimate = interval(values)
    assert estimate["mean"] - estimate["ci95"] == pytest.approx(low) and estimate["mean"] + estimate[
        "ci95"
    ] == pytest.approx(high)
    assert summarise(values[None])["ci95"] == [pytest.approx(estimate["ci95"])]


def test_shares_of_seeds_lie_between_0_and_1():
    """Student's interval of 60, 90 and 100 % would end at 136 %; of three times 100 % it would have no width."""
    seeds = np.stack([zeros_and_ones(ones, 20) for ones in (12, 18, 20)])
    half = stats.t.ppf(0.975, 2) * np.std([0.6, 0.9, 1.0], ddof=1) / 3**0.5
    assert ends(interval(seeds)) == pytest.approx((0.5 / 0.6 - half, 1.0))
    assert ends(interval(1.0 - seeds)) == pytest.approx((0.0, 0.5 / 3 + half))
    assert ends(interval(np.ones((3, 20)))) == pytest.approx((1 / (1 + 1.959964**2 / 60), 1.0))  # 60 of 60


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
    difference = estimate_difference(first, second)
    assert difference["mean"] == pytest.approx(-6 / 21) and ends(difference) == pytest.approx((-0.508, 0.0), abs=6e-4)
    difference = estimate_difference(np.tile(first, 2), np.tile(second, 2))  # (2 + 1) / 44 - (14 + 1) / 44
    half = 1.959964 * np.sqrt((18 / 44 - (12 / 44) ** 2) / 44)
    assert ends(difference) == pytest.approx((-12 / 44 - half, -12 / 44 + half)) and find_sign(difference) == -1


@pytest.mark.parametrize("number", [6, 20, 200])
def test_as_many_wins_count_as_in_the_exact_test(number):
    """A difference is shown where McNemar's exact test shows one, and in one direction from six wins on."""
    for losses in range(4):
        for wins in range(min(number - losses, 15) + 1):
            differences = np.r_[np.ones(wins), -np.ones(losses), np.zeros(number - wins - losses)]
            exact = wins + losses > 0 and stats.binomtest(wins, wins + losses).pvalue < 0.05
            sign = find_sign(estimate_difference(differences))
            assert abs(sign) <= exact and (sign == exact or losses > 0), (wins, losses)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_few_episodes_show_nothing(number):
    for first in (np.ones(number), np.full(number, 1.2), np.arange(number) + 7.0):
        difference = estimate_difference(first, np.zeros(number))
        assert find_sign(difference) == 0 and ends(difference) == (None, None)
    assert find_sign(estimate_difference(np.ones(6), np.zeros(6))) == 1


def test_differences_of_seeds():
    """Variances over three seeds and over 50 episodes add up, as for two samples in Welch's test."""
    random = np.random.default_rng(1)
    baseline = random.normal(0, 1, 50)
    for seed_spread, episode_spread in ((1.0, 0.1), (0.01, 1.0)):
        policy = 0.5 + seed_spread * random.normal(0, 1, (3, 1)) + episode_spread * random.normal(0, 1, 50)
        difference = estimate_difference(policy, baseline)
        seed_means, episode_means = ((policy - baseline).mean(axis) for axis in (1, 0))
        welch = stats.ttest_ind(seed_means, episode_means, equal_var=False).confidence_interval(0.95)
        half = (welch.high - welch.low) / 2
        assert ends(difference) == pytest.approx((seed_means.mean() - half, seed_means.mean() + half))
    assert ends(estimate_difference(policy, policy)) == (0, 0)  # both of the same seeds
    shares = np.stack([zeros_and_ones(ones, 20) for ones in (12, 18, 20)])
    low, high = ends(estimate_difference(shares, np.zeros(20)))
    assert low < 0.5 and high == 1  # no share differs by more


def test_policies_are_compared_with_the_first_of_the_run():
    start = np.linspace(0, 1, 40)
    noise = 0.02 * np.cos(np.arange(40))
    scores = {
        "random": start + 1, "learned": start + 0.2 + noise, "sampled": start + 0.1, "ig": start, "bad": start + 2,
    }  # fmt: skip
    by_policy = {entry["second"]: entry for entry in reports.compare(scores)}
    assert list(by_policy) == ["random", "sampled", "ig", "bad"] and {e["first"] for e in by_policy.values()} == {
        "learned"
    }
    assert by_policy["random"]["mean"] == pytest.approx(-0.8 + noise.mean())
    assert list(reports.compare({"random": start, "ig": start})) == []
