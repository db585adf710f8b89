"""bench.studies.interval_coverage: intervals hold the truth as often as they say, and simulation and sums agree."""

import json

import numpy as np
import pytest

from bench.harness import measure
from bench.studies import interval_coverage as study

pytestmark = pytest.mark.long  # of benchmarks, not of the product


def check(rows: dict, times: int) -> None:
    """Shares that hold the truth, within four standard errors of the bounds."""
    error = 4 * (0.95 * 0.05 / times) ** 0.5
    for row in rows["shares"]:
        assert abs(row["held"] - row["exact"]) < error, row
        assert row["exact"] > 0.91 and (row["exact"] < 0.975 or row["truth"] == 1), row  # Wilson's, of whole numbers
    for row in rows["differences"]:
        assert row["held"] > (0.90 if row["pair"] == "skewed" else 0.94) - error, row  # Student's of an exponential
        if row["pair"] in ("scores", "equal"):
            assert row["held"] < 0.96 + error, row
        if row["truth"] == 0:
            assert row["shown"] < 0.06 + error, row
    for row in rows["seeds"]:
        assert row["held"] > (0.89 if "share" in row else 0.94) - error, row
        assert row.get("difference", 0.95) > 0.93 - error, row
        if "normal" in row:
            assert row["normal"] < 0.91 < row["held"], row
    for row in rows["ratings"]:
        assert 0.92 < row["held"] < 0.98, row


def test_intervals_hold_the_truth() -> None:
    check(study.run(200) | {"ratings": []}, 200)


@pytest.mark.long
def test_intervals_hold_the_truth_often() -> None:
    check(study.run(4000, seed=1), 4000)


def test_the_figures_are_those_of_the_study() -> None:
    result = json.loads((measure.RESULTS / "interval_coverage.json").read_text())
    check(result, result["times"])
    again = study.run(200, ["shares"])["shares"]
    for row, old in zip(again, result["shares"], strict=True):
        assert row["exact"] == old["exact"] and np.isclose(row["held"], old["held"], atol=0.08)
