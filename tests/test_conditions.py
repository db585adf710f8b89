"""Evaluations under several conditions: the same missions, every episode in the table, tails by hand."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import jaxrl.cli.evaluate
from jaxrl.common.errors import UsageError
from jaxrl.evaluation import conditions, policies, tables
from jaxrl.evaluation.conditions import Condition, Outcome, read_conditions
from jaxrl.evaluation.statistics import interquartile_mean, tail_mean

FILE = """
plain: {}
lossy: {failure_rate: [0.0, 1.0]}
crossed: {failure_rate: [0.0, 0.5], communication_range: [5.0, 25.0]}
"""


def test_values_that_are_lists(tmp_path: Path) -> None:
    """The conditions of a run that draws its delays: other lists, and numbers."""
    file = tmp_path / "conditions.yaml"
    file.write_text("drawn: {delay: [[1, 2], [3]]}\nfixed: {delay: [0, 1]}\none: {delay: 2}")
    policy_set = policies.load(None, "coverage", {"q": 3, "budget": 4, "delay": (0, 3)})
    envs = [policy_set.with_env_settings(condition.settings).env.env for condition in read_conditions(file)]
    assert [env.delay for env in envs] == [(1, 2), (3,), 0, 1, 2]


def test_lists_of_a_condition_are_crossed(tmp_path: Path) -> None:
    file = tmp_path / "conditions.yaml"
    file.write_text(FILE)
    read = read_conditions(file)
    assert [condition.name for condition in read] == [
        "plain", "lossy: failure_rate 0.0", "lossy: failure_rate 1.0",
        *(f"crossed: failure_rate {rate}, communication_range {far}" for rate in (0.0, 0.5) for far in (5.0, 25.0)),
    ]  # fmt: skip
    assert read[0] == Condition("plain", {})
    assert read[-1].settings == {"failure_rate": 0.5, "communication_range": 25.0}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Conditions that are the same give the same episodes; the table and the report follow from the CSV."""
    file, table, report = (tmp_path / name for name in ("conditions.yaml", "episodes.csv", "report.json"))
    file.write_text("plain: {}\nlossy: {failure_rate: 0.0}\n")
    flags = "--env coverage --q 3 --num_agents 2 --budget 3 --policy lawnmower,random --episodes 30 --bound 0.8"
    files = ["--conditions", str(file), "--csv", str(table), "--json", str(report)]
    assert jaxrl.cli.evaluate.main([*flags.split(), *files]) == 0
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert len(rows) == 2 * 2 * 30
    entropy: dict[tuple[str, str], np.ndarray] = {}
    for row in rows:
        key = row["condition"], row["policy"]
        entropy[key] = np.append(entropy.get(key, ()), float(row["entropy"]))
    np.testing.assert_array_equal(entropy["plain", "lawnmower"], entropy["lossy", "lawnmower"])
    np.testing.assert_array_equal(entropy["plain", "random"], entropy["lossy", "random"])
    written = json.loads(report.read_text())
    for (condition, policy), values in entropy.items():
        score = written["conditions"][condition]["policies"][policy]["entropy"]
        assert score["mean"] == pytest.approx(values.mean(), rel=1e-6)
        assert score["median"] == pytest.approx(np.median(values), rel=1e-6)
        assert score["tail"] == pytest.approx(np.sort(values)[-3:].mean(), rel=1e-6)  # the worst 3 of 30: the largest
        assert score["failed"] == pytest.approx((values > 0.8).mean())
    output = capsys.readouterr().out
    assert "lossy" in output and "worse than" in output


def test_scores_by_task_and_scores_that_are_not_finite() -> None:
    """A task has a part of the episodes; a mission without a score has failed, and JSON has no NaN."""
    policy_set = policies.load(None, "coverage", {"q": 3, "budget": 2})
    entropy = np.array([0.2, np.nan, 0.9, np.inf])
    ends = {"entropy": entropy, "entropy/left": entropy[:1], "entropy/right": entropy[1:]}
    outcomes = [Outcome("plain", "random", ends)]
    rows = list(csv.DictReader(io.StringIO(conditions.to_csv(outcomes))))
    assert list(rows[0]) == ["condition", "policy", "seed", "episode", "entropy"]
    np.testing.assert_array_equal([float(row["entropy"]) for row in rows], entropy)
    report = conditions.summarise(policy_set, [Condition("plain", {})], outcomes, 4, 0, bound=0.5)
    json.dumps(report, allow_nan=False)
    score = report["conditions"]["plain"]["policies"]["random"]["entropy"]
    assert score["failed"] == 0.75 and score["mean"] is score["median"] is score["tail"] is score["quantile"] is None
    assert "not finite" in str(list(tables.make_condition_table(report).columns[2].cells))


def test_all_conditions_are_checked_before_one_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    policy_set = policies.load(None, "coverage", {"q": 3, "budget": 2})
    monkeypatch.setattr(conditions.reports, "make_rollout", lambda *arguments: pytest.fail("played"))
    wrong = [Condition("a", {}), Condition("b", {"budget": 0})]
    with pytest.raises(UsageError, match="condition 'b'"):
        conditions.rollout(policy_set, wrong, ["random"], 2)
    with pytest.raises(UsageError, match=r"failure_rate is an empty list; give one value.*\(which is \[\[\]\] in"):
        conditions.rollout(policy_set, [Condition("a", {"failure_rate": []})], ["random"], 2)


def test_tails_by_hand() -> None:
    values = np.array([3.0, 1.0, 2.0, 10.0, 4.0])
    assert tail_mean(values, 0.2, largest=True) == 10 and tail_mean(values, 0.2, largest=False) == 1
    assert tail_mean(values, 0.5, largest=True) == pytest.approx((10 + 4 + 0.5 * 3) / 2.5)
    assert tail_mean(values, 0.1, largest=True) == 10  # less than one value
    assert tail_mean(values, 1.0, largest=True) == pytest.approx(values.mean())
    np.testing.assert_allclose(tail_mean(np.stack([values, -values]), 0.4, largest=False), [1.5, -7])
    normal = np.random.default_rng(0).normal(size=400_000)
    expected = stats.norm.pdf(stats.norm.ppf(0.1)) / 0.1  # the closed form of the normal distribution
    assert tail_mean(normal, 0.1, largest=True) == pytest.approx(expected, abs=0.01)


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -100.0])) == pytest.approx(3.5)
