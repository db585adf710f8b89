"""Parameters of tests, of which most run at night only."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def by_day(cases: Iterable[Any], day: Collection[Any]) -> list[Any]:
    """Return the cases as parameters: those in `day` run in every run of the tests, others have the mark `slow`."""
    cases = list(cases)
    assert set(day) <= set(cases), "a case by day is not among the cases"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in day else pytest.mark.slow)
        for case in cases
    ]
