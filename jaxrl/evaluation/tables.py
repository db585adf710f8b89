"""Evaluations as text: tables and sentences of the reports of `jaxrl.evaluation.reports`."""

import math
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxrl.evaluation import league
from jaxrl.evaluation.policies import LEARNED
from jaxrl.report import tables

_UNBOUNDED = 10_000  # columns if the output is not a terminal


def table(report: dict[str, Any], width: int) -> list[Text]:
    """Return lines of one block per metric, one row per policy, one column per step label."""
    steps, at, policies = report["steps"], report["at"], report["policies"]
    titles, rows = [], []
    for step, moment in zip(at, report["moments"], strict=True):
        words = f"step {step} of {steps}"
        titles.append(words if moment == f"step {step}" else f"{words}\n({moment})")
    for metric in next(iter(policies.values())):
        curves = {name: result[metric] for name, result in policies.items()}
        digits = _decimals([curve["mean"][step] for curve in curves.values() for step in at])
        rows.append(tables.Row(label(report, metric)))
        for name, curve in curves.items():
            cells = [_cell(curve["mean"][step], curve["ci95"][step], curve["std"][step], digits) for step in at]
            rows.append(tables.Row(name, cells, "bold cyan" if name == next(iter(LEARNED)) else ""))
    return tables.lines("policy", titles, rows, width)


def label(report: dict[str, Any], metric: str, unit: bool = True) -> str:
    """Return a report's display name of a metric, with or without its unit."""
    name, _, task = metric.partition("/")
    words, comma, of = report.get("labels", {}).get(name, name).partition(", ")
    return words + (f" ({task})" if task else "") + (comma + of if unit else "")


def _decimals(means: list[float | None]) -> int:
    """Return the decimals that show three significant digits of the largest mean."""
    largest = max((abs(mean) for mean in means if mean is not None), default=0.0)
    return min(max(2 - math.floor(math.log10(largest * 0.9999)), 0), 8) if largest else 3


def _cell(mean: float | None, half: float | None, deviation: float | None, digits: int) -> str:
    if mean is None or half is None or deviation is None:
        return "not finite"
    return f"{mean:.{digits}f} ±{half:.{digits}f} ({deviation:.{digits}f})"


def conclusion(report: dict[str, Any]) -> list[str]:
    """Return sentences about the learned policy, or none."""
    found = report["comparison"]
    if found is None:
        return []
    score, own = report["score"], found["policy"]
    called = label(report, score, unit=False)
    final = {name: result[score] for name, result in report["policies"].items()}
    digits = _decimals([curve["mean"][-1] for curve in final.values()])
    words = {name: f"{name} {curve['mean'][-1]:.{digits}f} ±{curve['ci95'][-1]:.{digits}f}"
             for name, curve in final.items()}  # fmt: skip
    good = "smaller" if report["score_mode"] == "min" else "larger"
    if found["disjoint"]:
        verdict = f"do not overlap: {own} is {'better' if found['better'] else 'worse'}"
    else:
        verdict = "overlap: more episodes or more training are needed to distinguish them"
    lines = [
        f"At the end, {called} ({good} is better): {words[own]}, {words['random']}. Their 95 % intervals {verdict}."
    ]
    ways: list[str] = []
    beyond: list[str] = []
    near: list[str] = []
    for name, way in found["way"].items():
        number = words[name].removeprefix(f"{name} ") + (", the best scripted policy" if name == found["best"] else "")
        if way is None or way > 1:
            (near if name in found["near"] else beyond).append(f"{name} ({number})")
        else:
            ways.append(f"{100 * way:.0f} % of the way from random to {name} ({number})")
    if ways:
        lines.append(f"{own} goes {'; '.join(ways)}.")
    if near:
        lines.append(f"{own} is not distinguishable from {', '.join(near)}: the intervals overlap.")
    if beyond and found["better"]:
        lines.append(f"{own} is better than {', '.join(beyond)}.")
    return lines


def show(report: dict[str, Any], title: str) -> None:
    """Print tables and conclusion to stdout: in colour for a terminal, aligned text otherwise.

    Args:
        report: of any function of `jaxrl.evaluation.reports`.
        title: what was evaluated.
    """
    if "ratings" in report:
        _show_league(report)
    elif "matches" in report:
        _show_matches(report, title)
    else:
        _show_curves(report, title)


def _show_curves(report: dict[str, Any], title: str) -> None:
    where = f" in {report['simulator']}" if "simulator" in report else ""
    which = f"episodes, goals of the {report['stream']}" if where else "held-out episodes"
    _print(
        f"{title}{where}: {report['episodes']:,} {which}, seed {report['seed']}",
        "mean ± half of its 95 % interval (standard deviation over episodes), after equal numbers of time steps"
        + (f"; learned policies: over the means of {report['seeds']} seeds" if "seeds" in report else ""),
        lambda width: [table(report, width)],
        conclusion(report),
    )


def _show_matches(report: dict[str, Any], title: str) -> None:
    """Print the matches of policies; the conclusion is about the first."""
    matches = report["matches"]
    _print(
        f"{title}: {report['episodes']:,} held-out games of each pair, seed {report['seed']}",
        f"mean ± standard error; {', '.join(f'{name} {value}' for name, value in report['set'].items())}",
        lambda width: [league.match_table(matches, report["labels"], width)],
        league.conclusions(
            matches, matches[0]["first"], report["score"], report["score_mode"], label(report, report["score"], False)
        ),
    )


def _show_league(report: dict[str, Any]) -> None:
    """Print the tables of a league."""
    _print(
        f"League of {len(report['ratings'])} players, {report['games']:,} games of each pair",
        f"Elo with draws as half a point, {report['anchor']} fixed; below mean ± standard error, for the first player",
        lambda width: league.league_tables(
            report["ratings"], report["matches"], report["score"], report["labels"], width
        ),
        [],
    )


def _print(heading: str, legend: str, shown: Callable[[int], list[list[Text]]], lines: list[str]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        print(heading, legend, *lines_of(shown(_UNBOUNDED)), *([""] if lines else []), *lines, sep="\n")
        return
    console.print(Text(heading, "bold"))
    console.print(Text(legend, "dim"))
    for row in lines_of(shown(console.width)):
        console.print(row, soft_wrap=True)
    for line in lines:
        console.print(Text(line))


def lines_of(blocks: list[list[Text]]) -> list[Text]:
    """Concatenate tables, with an empty line before each."""
    return [line for block in blocks for line in (Text(), *block)]
