"""Tables hold every name and every number."""

import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from envs_jax.base import make, registered
from jaxrl.evaluation import tables as evaluation_tables
from jaxrl.evaluation.policies import display_name
from jaxrl.report import tables
from jaxrl.runtime.scoring import Scoring

POLICIES = ("learned", "sampled", "random", "ig_sequential", "lawnmower_5", "lawnmower_10", "lawnmower_15")
PLAYERS = ("random", "level1", "level2", "level3", "level4", "evasion", "territory", "sharing")


def print_plain(capsys: pytest.CaptureFixture[str], *parts: Any) -> list[str]:
    """What is printed where the output is no terminal."""
    tables.print_parts(parts)
    return capsys.readouterr().out.splitlines()


def decimals_of(error: float) -> int:
    """The rounding of the Particle Data Group: two digits of an error up to 35, else one."""
    shown = f"{abs(error):.2e}"
    digits, exponent = int(shown[0] + shown[2:4]), int(shown[5:])
    return max((1 if digits < 355 else 0) - exponent, 0)


def test_each_row_has_the_decimals_of_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    ends = {"learned": (481.2, 3.1, 20.0), "random": (4.3, 0.0211, 0.151), "ig": (0.0123, 0.00046, 0.0012)}
    report = {
        "steps": 1,
        "at": [1],
        "moments": ["step 1"],
        "labels": {},
        "policies": {
            name: {"return": {key: [0.0, value] for key, value in zip(("mean", "ci95", "std"), values, strict=True)}}
            for name, values in ends.items()
        },
    }
    rows = print_plain(capsys, evaluation_tables.make_curve_table(report))[-3:]
    assert [row.split(maxsplit=1)[1] for row in rows] == [
        "481.2 ±3.1 (20.0)", "4.300 ±0.021 (0.151)", "0.0123 ±0.0005 (0.0012)"
    ]  # fmt: skip
    assert len(set(map(len, rows))) == 1  # right-aligned


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (4.3, None, "4.30"), (0.0, None, "0.000"), (480.0, None, "480"),  # nothing known of the error
        (0.0, 0.02, "0.000 ±0.020"), (0.01, 2.5, "0.0 ±2.5"), (31_000.0, 120.0, "31000 ±120"),
        (1.0, 1e-9, "1.0000000 ±0.0000000"),  # single precision
        (None, None, "not finite"),
    ],
)  # fmt: skip
def test_decimals(mean: float | None, half: float | None, text: str) -> None:
    estimate = {"mean": mean, "ci95": half, "std": None}
    assert evaluation_tables.format_estimate(estimate, evaluation_tables.choose_digits([estimate])) == text


def test_ends_that_differ_look_different() -> None:
    near = {"mean": 480.0, "low": 479.96, "high": 480.04}
    assert evaluation_tables._ends(near) == "480.00 [479.96, 480.04]"
    assert evaluation_tables._ends({"mean": 0.2, "low": 0.171, "high": 0.229}) == "0.200 [0.171, 0.229]"


def make_estimates(numbers: Iterator[int], scale: float) -> dict[str, float]:
    return {key: factor * next(numbers) / 997 for key, factor in (("mean", scale), ("std", 1.0), ("ci95", abs(scale)))}


@pytest.mark.parametrize("scale", [1.0, -31_000.0])
@pytest.mark.parametrize("env", registered())
def test_evaluations(env: str, scale: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Every policy and metric of an environment has a row, with mean, interval and deviation at the end."""
    spec = make(env).spec
    numbers = itertools.count(1)
    metrics = dict.fromkeys((spec.score, *spec.metrics, "return", "length"))
    ends = {policy: {metric: make_estimates(numbers, scale) for metric in metrics} for policy in POLICIES}
    curves = {
        policy: {metric: {key: [0.0, value] for key, value in one.items()} for metric, one in ends[policy].items()}
        for policy in POLICIES
    }
    labels = Scoring.from_spec(spec).labels
    report = {"steps": 1, "at": [1], "moments": ["step 1"], "labels": labels, "policies": curves}
    screen = print_plain(capsys, evaluation_tables.make_curve_table(report))
    for metric in metrics:
        label = spec.label(metric)
        assert "_" not in label
        rows = screen[screen.index(label) + 1 :][: len(POLICIES)]
        for policy, row in zip(POLICIES, rows, strict=True):
            mean, deviation, half = ends[policy][metric].values()
            digits = decimals_of(half)
            cell = f"{mean:.{digits}f} ±{half:.{digits}f} ({deviation:.{digits}f})"
            assert row.startswith(f"{display_name(policy)}  ") and row.endswith(f" {cell}")


def test_matches_and_leagues(capsys: pytest.CaptureFixture[str]) -> None:
    """Every pair has a cell of every metric; ratings have their intervals, shares are per cent."""
    spec = make("snakes_3v3").spec
    players = ["ddpg_competition_snakes_3v3/0002", *PLAYERS]
    numbers = itertools.count(1)
    metrics = (spec.score, *evaluation_tables.OUTCOMES)
    matches: list[dict[str, Any]] = [
        {"first": first, "second": second, **{name: make_estimates(numbers, 1.0) for name in metrics}}
        for first, second in itertools.combinations(players, 2)
    ]
    ratings = {
        name: {"elo": 1000.0 + 7 * k, "low": 990.0 + k, "high": 1010.0 + k, "points": 0.1 * k}
        for k, name in enumerate(players)
    }
    report = {"ratings": ratings, "matches": matches, "score": spec.score, "labels": Scoring.from_spec(spec).labels}
    league = print_plain(capsys, *evaluation_tables.make_league_tables(report))
    games = print_plain(capsys, evaluation_tables.make_match_table(report))
    for name, row in ratings.items():
        facts = [name, f"{row['elo']:.0f}", f"{row['low']:.0f}", "to", f"{row['high']:.0f}"]
        assert facts in [line.split()[:5] for line in league]
    for one in matches:
        cells = []
        for name in metrics:
            scale = 100 if name in evaluation_tables.OUTCOMES else 1
            mean, half = scale * one[name]["mean"], scale * one[name]["ci95"]
            digits = decimals_of(half)
            cells.append(f"{mean:.{digits}f} ±{half:.{digits}f}")
            title = spec.label(name) + (", %" if scale == 100 else "")
            assert any(line.startswith(title) and cells[-1] in line for line in games), (title, cells[-1])
        row = ["against", one["second"], *" ".join(cells).split()]
        assert row in [line.split() for line in league]


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets are no markup, and a dollar sign no formula."""
    names = ["[red]run[/red]", "[/]", "$x$", "50%_<b>&^\\", ":smile:"]
    screen = print_plain(capsys, tables.make_table("[b]", names, [tables.Row(name, names) for name in names]), *names)
    assert screen[0].split() == ["[b]", *names] and screen[-len(names) :] == names
    for name, line in zip(names, screen[1:], strict=False):
        assert line.split() == [name, *names]


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_folds_cells_and_cuts_nothing(width: int) -> None:
    titles = ["x" * 30, "y" * 12, "z"]
    rows = [tables.Row("heading"), tables.Row("name of a row", ["1234567890" * 2, "0.5 [0.1, 0.9]", "[b]"])]
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    screen.print(tables.make_table("name", titles, rows))
    text = screen.file.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    expected = "".join(["name", *titles, "heading", "name of a row", *rows[1].cells])
    assert sorted("".join(text.split())) == sorted("".join(expected.split()))
