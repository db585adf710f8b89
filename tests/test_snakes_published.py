"""The comparison with the original engine's published figures: how it judges, and a few games of every pair."""

import json

import numpy as np
import pytest

from bench.parity import published_snakes
from bench.parity.comparison import DIFFERS

CASE = published_snakes.Case("0", "2", 800, ((0.74, 0.03), (20.34, 0.40)), (0.6, 97.9, 1.5), (59.3, 11.9), (14.7, 94.2))


def games(**shifted):
    """2,000 games with the published means and plausible spreads; `shifted` is added to a metric of every game."""
    means = dict(zip(published_snakes.EVENTS, (*CASE.deaths, *CASE.meals), strict=True))
    means |= {name: mean for name, (mean, _) in zip(published_snakes.SCORES, CASE.score, strict=True)}
    spread = np.tile([-4.0, 4.0], 1000)
    results = {n: np.arange(2000) < 20 * share for n, share in zip(published_snakes.RESULTS, CASE.result, strict=True)}
    values = {name: mean + spread for name, mean in means.items()} | {n: x.astype(float) for n, x in results.items()}
    return {name: x + shifted.get(name, 0.0) for name, x in values.items()}


def differing(**shifted):
    return {row["metric"] for row in published_snakes.compare(CASE, games(**shifted)) if not row["within"]}


def test_figures_within_three_errors_agree():
    """Errors by hand: our own is 4 / sqrt(2000) = 0.0894; the table's rounding allows half a unit of its last digit."""
    assert not differing()
    score = 3 * np.hypot(0.03, 0.0894) + 0.005  # published error and ours
    assert not differing(score=score - 0.002)
    assert differing(score=score + 0.002) == {"score"}
    deaths = 3 * 4 * np.sqrt(1 / 2000 + 1 / 800) + 0.05  # our spread serves for both
    assert not differing(deaths=deaths - 0.01)
    assert differing(deaths=deaths + 0.01) == {"deaths"}
    wins = 3 * np.sqrt(0.006 * 0.994 * (1 / 2000 + 1 / 800))  # a binomial error, here of the published share
    assert not differing(win=0.8 * wins)
    assert differing(win=2 * wins) == {"win"}


def test_the_verdict(monkeypatch, tmp_path, capsys):
    """It goes to the exit code and the file."""
    monkeypatch.setattr(published_snakes, "CASES", (CASE,))
    monkeypatch.setattr(published_snakes, "play", lambda case, episodes, seed: games(meals=9.0))
    out = tmp_path / "published.json"
    assert published_snakes.main(["--episodes", "2000", "--out", str(out)]) == DIFFERS
    assert "8 of 9 figures agree" in capsys.readouterr().out
    assert [row["metric"] for row in json.loads(out.read_text())["rows"] if not row["within"]] == ["meals"]


@pytest.mark.slow
@pytest.mark.parametrize("case", published_snakes.CASES, ids=lambda case: case.name)
def test_scores_of_the_original_engine(case):
    rows = published_snakes.compare(case, published_snakes.play(case, 2000, 0))
    assert [row for row in rows if not row["within"]] == []
