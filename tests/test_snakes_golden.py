"""Observations, shaped rewards, scripted players and whole steps against records of the engine and of our oracle.

The parts of a step are compared in `test_snakes_rules`; here the environment makes it, with the recorded draws.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import golden
from helpers.snakes import OPTIONS

from bench.parity import snakes
from bench.parity.comparison import Comparison
from bench.parity.snakes import CONFIGURATIONS, OWN, SIX, read_records


def tables(configurations: list[Any]) -> Any:
    """Marks a test to run on every one of these configurations that our own data or the recorded ones have.

    Each is a program of its own; those that only the recorded ones have are for the night.
    """
    from_ours = [(configuration, "own") for configuration in configurations if configuration in OWN]
    all_of_them = from_ours + [
        pytest.param(configuration, "recorded", marks=() if configuration in OWN else pytest.mark.slow)
        for configuration in configurations
    ]
    return pytest.mark.parametrize(("configuration", "source"), all_of_them, ids=lambda x: str(x))


def compare_records(compare: Callable[..., None], configuration: Any, source: str) -> Comparison:
    """All figures, which agree."""
    comparison = Comparison()
    with golden.skipping():
        compare(comparison, configuration, source, snakes.programs(configuration, tuple(OPTIONS.items())))
    comparison.check()
    return comparison


@tables([c for c in CONFIGURATIONS if c[2] in (2, 6)])
def test_recorded_choices_of_the_scripted_players(configuration, source):
    figures = compare_records(snakes.compare_choices, configuration, source).figures
    assert sum(figure.values for what, figure in figures.items() if what.startswith("choices, ")) > 100


@pytest.mark.parametrize(
    ("configurations", "source", "number"), [(OWN, "own", 300), (CONFIGURATIONS, "recorded", 5000)], ids=golden.SOURCES
)
def test_no_recorded_row_is_left_out(configurations, source, number):
    record = golden.load("snakes_transitions", source)
    assert sum(len(read_records(c, source)[1]) for c in configurations) == len(record["board_h"]) == number
    rows = np.sort(np.concatenate([read_records(c, source)[1] for c in configurations if c in SIX]))
    five = (record["beans_before"][rows] >= 0).all(1)
    np.testing.assert_array_equal(rows[five], record["obs_row"])
    assert np.isin(np.flatnonzero(record["shaped_valid"]), rows).all()


@tables(SIX)
def test_recorded_observations(configuration, source):
    figures = compare_records(snakes.compare_observations, configuration, source).figures
    assert set(figures) == {"obs26", "obs30", "obs35"} and figures["obs26"].values > 26 * 3 * 20


@tables(SIX)
def test_recorded_shaped_rewards(configuration, source):
    assert len(compare_records(snakes.compare_rewards, configuration, source).figures) == 3


@tables(CONFIGURATIONS)
def test_the_environment_repeats_recorded_steps_with_their_draws(configuration, source):
    figures = compare_records(snakes.compare_steps, configuration, source).figures
    if configuration in SIX:
        assert figures["observations after steps"].values > 26 * 3 * (100 if source == "recorded" else 20)
