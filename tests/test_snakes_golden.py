"""Observations, shaped rewards, scripted players and whole steps against records of the engine.

The environment makes the steps, with the recorded draws. (`test_snakes_against_oracle` plays other games.)
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import golden
from helpers.snakes import OPTIONS

from bench.parity import snakes
from bench.parity.comparison import Comparison
from bench.parity.snakes import CONFIGURATIONS, SIX, read_records


def tables(configurations: list[Any]) -> Any:
    """Marks a test to run on these configurations, each a program of its own: by day only on the published board."""
    by_day = {c: () if c == CONFIGURATIONS[-1] else pytest.mark.slow for c in configurations}
    return pytest.mark.parametrize("configuration", [pytest.param(c, marks=m, id=str(c)) for c, m in by_day.items()])


def compare_records(compare: Callable[..., None], configuration: Any) -> Comparison:
    """All figures, which agree."""
    comparison = Comparison()
    with golden.skipping():
        compare(comparison, configuration, "recorded", snakes.programs(configuration, tuple(OPTIONS.items())))
    comparison.check()
    return comparison


@tables([c for c in CONFIGURATIONS if c[2] in (2, 6)])
def test_recorded_choices_of_the_scripted_players(configuration):
    figures = compare_records(snakes.compare_choices, configuration).figures
    assert sum(figure.values for what, figure in figures.items() if what.startswith("choices, ")) > 100


def test_no_recorded_row_is_left_out():
    record = golden.load("snakes_transitions")
    assert sum(len(read_records(c)[1]) for c in CONFIGURATIONS) == len(record["board_h"]) == 5000
    rows = np.sort(np.concatenate([read_records(c)[1] for c in SIX]))
    five = (record["beans_before"][rows] >= 0).all(1)
    np.testing.assert_array_equal(rows[five], record["obs_row"])
    assert np.isin(np.flatnonzero(record["shaped_valid"]), rows).all()


@tables(SIX)
def test_recorded_observations(configuration):
    figures = compare_records(snakes.compare_observations, configuration).figures
    assert set(figures) == {"obs26", "obs30", "obs35"} and figures["obs26"].values > 26 * 3 * 20


@tables(SIX)
def test_recorded_shaped_rewards(configuration):
    assert len(compare_records(snakes.compare_rewards, configuration).figures) == 3


@tables(CONFIGURATIONS)
def test_the_environment_repeats_recorded_steps_with_their_draws(configuration):
    figures = compare_records(snakes.compare_steps, configuration).figures
    if configuration in SIX:
        assert figures["observations after steps"].values > 26 * 3 * 100
