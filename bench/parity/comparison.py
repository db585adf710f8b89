"""Comparisons that do not stop at the first difference: counts of values and differences, deviations, bounds."""

import dataclasses
from typing import Any

import numpy as np

DIFFERS = 3  # exit code of a comparison that found differences: errors have 1, wrong usage 2


@dataclasses.dataclass
class Figure:
    """Result of one comparison."""

    values: int = 0  # number of values
    differ: int = 0  # number of values further from their reference than allowed
    deviation: float = 0.0  # the largest, in units of the bound's scale; 0 where values must be equal
    bound: float = 0.0  # largest allowed deviation; 0 where values must be equal

    def __str__(self) -> str:
        text = f"{self.values:,} values, {self.differ:,} differ"
        return text if not self.bound else f"{text}, by {self.deviation:.1e} at most, allowed {self.bound:.1e}"


class Comparison:
    """Figures by name; comparing more under the same name adds to them."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}  # {name: Figure}

    def exact(self, what: str, actual: Any, expected: Any) -> None:
        """Compare values that must be equal."""
        actual, expected = np.broadcast_arrays(actual, expected)
        figure = self.figures.setdefault(what, Figure())
        figure.values += actual.size
        figure.differ += int(np.sum(actual != expected))

    def close(self, what: str, actual: Any, expected: Any, bound: float, scale: Any = 1.0) -> None:
        """Compare numbers that may differ by `bound` times `scale` (a number, or one for each value)."""
        actual, expected = np.broadcast_arrays(np.asarray(actual, np.float64), np.asarray(expected, np.float64))
        deviation = np.abs(actual - expected) / scale
        figure = self.figures.setdefault(what, Figure(bound=bound))
        figure.values += actual.size
        figure.differ += int(np.sum(~(deviation <= bound)))  # NaN differs
        figure.deviation = float(np.max(deviation, initial=figure.deviation))

    def direction(self, what: str, actual: np.ndarray, expected: np.ndarray, bound: float) -> None:
        """Compare vectors, whose difference may have `bound` times the length of the reference."""
        length = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        self.close(what, length, 0.0, bound)
        self.figures[what].values += actual.size - 1

    @property
    def agrees(self) -> bool:
        """Whether something was compared and nothing differs."""
        return bool(self.figures) and not any(figure.differ for figure in self.figures.values())

    def check(self) -> None:
        """Raise AssertionError with all figures unless everything agrees."""
        if not self.agrees:
            raise AssertionError("; ".join(f"{what}: {figure}" for what, figure in self.figures.items()) or "nothing")

    def rows(self, name: str) -> list[list[Any]]:
        """Return rows of a table, [name, agreement, figures]."""
        return [[f"{name}: {what}", figure.differ == 0, f"({figure})"] for what, figure in self.figures.items()]
