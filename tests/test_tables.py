"""Tables fit a terminal, and no name and no number is ever cut."""

import io
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from envs_jax.base import make, registered
from jaxrl.evaluation import statistics
from jaxrl.evaluation import tables as evaluation_tables
from jaxrl.evaluation.policies import display_name
from jaxrl.report import tables
from jaxrl.runtime.scoring import Scoring

POLICIES = ("learned", "sampled", "random", "ig_sequential", "lawnmower_5", "lawnmower_10", "lawnmower_15")
PLAYERS = ("random", "level1", "level2", "level3", "level4", "evasion", "territory")


def on_screen(lines: list[Any], width: int) -> list[str]:
    """What a terminal of this width shows."""
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    for line in lines:
        screen.print(line, soft_wrap=True)
    return screen.file.getvalue().splitlines()


def curves(env: str, scale: float) -> dict[str, Any]:
    """A report of an environment with the longest names, and the numbers of its cells."""
    spec = make(env).spec
    at = statistics.marks(spec.horizon)
    numbers = itertools.count(1)
    metrics = (spec.score, *spec.metrics, "return", "length")
    made = {
        policy: {
            metric: {name: [scale * next(numbers) / 997] * (spec.horizon + 1) for name in ("mean", "std", "ci95")}
            for metric in metrics
        }
        for policy in POLICIES
    }
    moments = [make(env).step_label(step) for step in at]
    return {"steps": spec.horizon, "at": at, "moments": moments, "labels": Scoring.of(spec).labels, "policies": made}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("scale", [1.0, -31_000.0])
@pytest.mark.parametrize("env", registered())
def test_evaluations(env: str, scale: float, width: int) -> None:
    report = curves(env, scale)
    screen = on_screen(evaluation_tables.table(report, width), width)
    assert max(map(len, screen)) <= width
    for policy in POLICIES:
        assert any(line.startswith(f"{display_name(policy)}  ") for line in screen)
    for metric in report["policies"]["learned"]:
        rows = {name: result[metric] for name, result in report["policies"].items()}
        assert make(env).spec.label(metric) in screen and "_" not in make(env).spec.label(metric)
        digits = evaluation_tables._decimals([rows[name]["mean"][-1] for name in POLICIES])
        for name in POLICIES:
            mean, half, deviation = (rows[name][key][-1] for key in ("mean", "ci95", "std"))
            cell = f"{mean:.{digits}f} ±{half:.{digits}f} ({deviation:.{digits}f})"
            assert any(line.startswith(display_name(name)) and line.endswith(cell) for line in screen), cell


def match(first: str, second: str, number: float, names: tuple[str, ...]) -> dict[str, Any]:
    values = {"mean": number / 977, "std": 1.0, "error": number / 9_770, "ci95": number / 4_000}
    return {"first": first, "second": second} | {
        name: {key: value + place for key, value in values.items()} for place, name in enumerate(names)
    }


@pytest.mark.parametrize("width", [80, 120])
def test_matches(width: int) -> None:
    spec = make("snakes_3v3").spec
    numbers = itertools.count(1)
    names = tuple(dict.fromkeys((spec.score, *spec.metrics, "return")))
    matches = [match(a, b, 100.0 * next(numbers), names) for a in POLICIES[:3] for b in PLAYERS]
    screen = on_screen(
        evaluation_tables.match_table({"matches": matches, "labels": Scoring.of(spec).labels}, width), width
    )
    assert max(map(len, screen)) <= width
    whole = "\n".join(screen)
    for one in matches:
        assert display_name(one["first"]) in screen and one["second"] in whole.split()
        for name in names:
            share = 100 if name in evaluation_tables.OUTCOMES else 1
            digits = 1 if name in evaluation_tables.OUTCOMES else 2
            cell = f"{share * one[name]['mean']:.{digits}f} ±{share * one[name]['ci95']:.{digits}f}"
            title = spec.label(name) + (", %" if name in evaluation_tables.OUTCOMES else "")
            assert any(line.startswith(title) and cell in line for line in screen), (title, cell)


@pytest.mark.parametrize("width", [80, 120])
def test_leagues(width: int) -> None:
    spec = make("snakes_3v3").spec
    players = ["ddpg_snakes_3v3/0001", "ddpg_competition_snakes_3v3/0002", *PLAYERS]
    numbers = itertools.count(1)
    names = (spec.score, *evaluation_tables.OUTCOMES)
    matches = [match(a, b, 100.0 * next(numbers), names) for a, b in itertools.combinations(players, 2)]
    ratings = {
        name: {"elo": 1000.0 + 7 * k, "low": 990.0 + k, "high": 1010.0 + k, "points": 0.1 * k}
        for k, name in enumerate(players)
    }
    report = {"ratings": ratings, "matches": matches, "score": spec.score, "labels": Scoring.of(spec).labels}
    standings, results = evaluation_tables.league_tables(report, width)
    screen = on_screen([*standings, *results], width)
    assert max(map(len, screen)) <= width
    for name, row in ratings.items():
        assert f"{name} {row['elo']:.0f} {row['low']:.0f} to {row['high']:.0f}" in [
            " ".join(x.split()[:5]) for x in screen
        ]
    for one in matches:
        start = f"against {one['second']}"
        cells = [evaluation_tables._end(one, name) for name in names]
        rows = [line for line in screen if line.startswith(f"{start}  ")]
        assert all(any(f"  {cell}" in line for line in rows) for cell in cells)
    assert all(name in screen for name in players[:-1])  # headings of their matches


@given(
    st.integers(1, 150),
    st.lists(st.text("ab ", min_size=1, max_size=40), min_size=1, max_size=6),
    st.lists(st.text("xyz", min_size=1, max_size=60), min_size=1, max_size=8),
)
def test_nothing_is_cut_however_narrow(width: int, names: list[str], titles: list[str]) -> None:
    """Every title and cell stands once; a line longer than the screen holds a name and one cell."""
    rows = [tables.Row(name, [f"{i}.{k}" for k in range(len(titles))]) for i, name in enumerate(names)]
    shown = [line.plain for line in tables.lines("name", titles, rows, width)]
    left = max(len("name"), *map(len, names))
    for line in shown:
        assert len(line) <= width or len(line[left:].split()) == 1
    words = [word for line in shown for word in line[left:].split()]
    assert sorted(words) == sorted([*titles, *(cell for row in rows for cell in row.cells)])
    assert np.all([any(line.startswith(name.rstrip()) for line in shown) for name in names])


def test_columns_go_side_by_side_where_they_fit() -> None:
    rows = [tables.Row("heading"), tables.Row("row", ["1234567", "1234567", "1234567"])]
    # "row" and the gaps of two columns take 3 + 2 * (2 + 7) = 21, of three 30
    for width, blocks in ((30, 1), (29, 2), (21, 2), (20, 3)):
        shown = [line.plain for line in tables.lines("", ["a", "b", "c"], rows, width)]
        assert shown.count("heading") == blocks, width
