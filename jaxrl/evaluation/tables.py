"""Evaluations as text: tables and sentences of the reports of `jaxrl.evaluation.reports`."""

import math
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxrl.evaluation.policies import LEARNED
from jaxrl.evaluation.scoring import label_of
from jaxrl.report import tables

OUTCOMES = ("win", "draw", "defeat")
POINTS = "points"  # share of games won, draws as half
_UNBOUNDED = 10_000  # columns if the output is not a terminal


def show(report: dict[str, Any], title: str) -> None:
    """Print tables and conclusion of a report of `jaxrl.evaluation.reports` to stdout, in colour for a terminal."""
    console = Console(highlight=False)
    width = console.width if console.is_terminal else _UNBOUNDED
    sentences: list[str] = []
    if "ratings" in report:
        heading = f"League of {len(report['ratings'])} players, {report['games']:,} games of each pair"
        fixed = f"Elo with draws as half a point, {report['anchor']} fixed"
        legend = f"{fixed}; below mean ± half of its 95 % interval, for the first player; " + (
            f"actions {', '.join(dict.fromkeys(report['actions'].values()))}"
        )
        blocks = league_tables(report, width)
    elif "matches" in report:
        heading = f"{title}: {report['episodes']:,} held-out games of each pair, seed {report['seed']}"
        legend = (
            f"mean ± half of its 95 % interval; {', '.join(f'{name} {value}' for name, value in report['set'].items())}"
        )
        legend += _of_seeds(report)
        blocks, sentences = [match_table(report, width)], verdict(report)
    else:
        where = f" in {report['simulator']}" if "simulator" in report else ""
        which = f"episodes, goals of the {report['stream']}" if where else "held-out episodes"
        heading = f"{title}{where}: {report['episodes']:,} {which}, seed {report['seed']}"
        legend = "mean ± half of its 95 % interval (standard deviation over episodes), after equal numbers of steps"
        legend += _of_seeds(report)
        blocks, sentences = [table(report, width)], conclusion(report)
    lines = [Text(heading, "bold"), Text(legend, "dim")]
    for block in [*blocks, [Text(sentence) for sentence in sentences]]:
        lines += [Text(), *block] if block else []
    for line in lines:
        console.print(line, soft_wrap=True)


def _of_seeds(report: dict[str, Any]) -> str:
    return f"; learned policies: over the means of {report['seeds']} seeds" if "seeds" in report else ""


def label(report: dict[str, Any], metric: str, unit: bool = True) -> str:
    """Return a report's display name of a metric, with or without its unit."""
    return label_of(metric, report.get("labels", {}), unit)


# Curves over the episode


def table(report: dict[str, Any], width: int) -> list[Text]:
    """Return lines of one block per metric, one row per policy, one column per step label."""
    steps, at, policies = report["steps"], report["at"], report["policies"]
    titles, rows = [], []
    for step, moment in zip(at, report["moments"], strict=True):
        words = f"step {step} of {steps}"
        titles.append(words if moment == f"step {step}" else f"{words}\n({moment})")
    for metric in next(iter(policies.values())):
        curves = {name: result[metric] for name, result in policies.items()}
        digits = _decimals(curve["mean"][step] for curve in curves.values() for step in at)
        rows.append(tables.Row(label(report, metric)))
        for name, curve in curves.items():
            cells = [_cell({key: values[step] for key, values in curve.items()}, digits) for step in at]
            rows.append(tables.Row(name, cells, "bold cyan" if name == next(iter(LEARNED)) else ""))
    return tables.lines("policy", titles, rows, width)


def _decimals(means: Iterable[float | None]) -> int:
    """Return the decimals that show three significant digits of the largest mean."""
    largest = max((abs(mean) for mean in means if mean is not None), default=0.0)
    return min(max(2 - math.floor(math.log10(largest * 0.9999)), 0), 8) if largest else 3


def _cell(values: dict[str, float | None], digits: int) -> str:
    if None in values.values():
        return "not finite"
    return "{mean:.{d}f} ±{ci95:.{d}f} ({std:.{d}f})".format(**values, d=digits)


def conclusion(report: dict[str, Any]) -> list[str]:
    """Return sentences that compare the learned policy with the others at the end of the episode, by 95 % intervals.

    Empty without a learned policy or "random". The way of a policy is its gain in score over random.
    """
    score, smaller = report["score"], report["score_mode"] == "min"
    final = {name: result[score] for name, result in report["policies"].items()}
    own = next((name for name in LEARNED if name in final), None)
    mean, half = ({name: curve[key][-1] for name, curve in final.items()} for key in ("mean", "ci95"))
    if own is None or "random" not in final or None in (*mean.values(), *half.values()):
        return []
    digits = _decimals(mean.values())
    number = {name: f"{mean[name]:.{digits}f} ±{half[name]:.{digits}f}" for name in final}
    gain = {name: (mean["random"] - value) if smaller else (value - mean["random"]) for name, value in mean.items()}
    apart = {name: abs(gain[own] - gain[name]) > half[own] + half[name] for name in final}
    if apart["random"]:
        overlap = f"do not overlap: {own} is {'better' if gain[own] > 0 else 'worse'}"
    else:
        overlap = "overlap: more episodes or more training are needed to distinguish them"
    called = f"{label(report, score, unit=False)} ({'smaller' if smaller else 'larger'} is better)"
    lines = [f"At the end, {called}: {own} {number[own]}, random {number['random']}. Their 95 % intervals {overlap}."]
    others = [name for name in final if name not in (*LEARNED, "random")]
    best = max(others, key=lambda name: gain[name], default="")
    ways: list[str] = []
    near: list[str] = []
    beyond: list[str] = []
    for name in others:
        told = f"{name} ({number[name]}{', the best scripted policy' if name == best else ''})"
        if gain[name] > 0 and gain[own] <= gain[name]:
            ways.append(f"{100 * gain[own] / gain[name]:.0f} % of the way from random to {told}")
        else:
            (beyond if apart[name] else near).append(told)
    if ways:
        lines.append(f"{own} goes {'; '.join(ways)}.")
    if near:
        lines.append(f"{own} is not distinguishable from {', '.join(near)}: the intervals overlap.")
    if beyond and gain[own] > 0:
        lines.append(f"{own} is better than {', '.join(beyond)}.")
    return lines


# Matches


def match_table(report: dict[str, Any], width: int) -> list[Text]:
    """Return lines of one block per first policy, one row per metric, one column per player of the other team."""
    rows = []
    seconds = list(dict.fromkeys(match["second"] for match in report["matches"]))
    for first in dict.fromkeys(match["first"] for match in report["matches"]):
        own = {match["second"]: match for match in report["matches"] if match["first"] == first}
        rows.append(tables.Row(first))
        for metric in (name for name in next(iter(own.values())) if name not in ("first", "second")):
            cells = [_end(own[second], metric) if second in own else "" for second in seconds]
            rows.append(tables.Row(_title(report, metric), cells))
    return tables.lines("policy", [f"against\n{second}" for second in seconds], rows, width)


def league_tables(report: dict[str, Any], width: int) -> list[list[Text]]:
    """Return the lines of the ranking, and of one row per match."""
    standings, results = [], []
    for name, row in report["ratings"].items():
        between = f"{row['low']:.0f} to {row['high']:.0f}" if row["low"] < row["high"] else "fixed"
        standings.append(tables.Row(name, (f"{row['elo']:.0f}", between, f"{100 * row['points']:.1f}")))
    metrics = (report["score"], *OUTCOMES)
    for name in report["ratings"]:
        matches = [match for match in report["matches"] if match["first"] == name]
        results += [tables.Row(name)] if matches else []
        for match in matches:
            results.append(tables.Row(f"against {match['second']}", [_end(match, metric) for metric in metrics]))
    titles = [_title(report, metric).replace(", ", ",\n") for metric in metrics]
    return [
        tables.lines("player", ("Elo", "95 % interval", "points, %"), standings, width),
        tables.lines("match", titles, results, width),
    ]


def _title(report: dict[str, Any], metric: str) -> str:
    if metric == POINTS:
        return "share of the points, %"
    return label(report, metric) + (", %" if metric in OUTCOMES else "")


def _end(match: dict[str, Any], metric: str) -> str:
    share, digits = (100, 1) if metric in (*OUTCOMES, POINTS) else (1, 2)
    return f"{share * match[metric]['mean']:.{digits}f} ±{share * match[metric]['ci95']:.{digits}f}"


def verdict(report: dict[str, Any]) -> list[str]:
    """Return a sentence on the opponents the first policy beats, by 95 % intervals of its mean score."""
    policy, score, sign = report["matches"][0]["first"], report["score"], -1 if report["score_mode"] == "min" else 1
    found: dict[str, list[str]] = {"beats": [], "loses to": [], "is not distinguishable from": []}
    for match in report["matches"]:
        if match["first"] == policy:
            gain, half = sign * match[score]["mean"], match[score]["ci95"]
            verb = "is not distinguishable from" if abs(gain) <= half else "beats" if gain > 0 else "loses to"
            found[verb].append(match["second"])
    told = "; ".join(f"{verb} {', '.join(players)}" for verb, players in found.items() if players)
    return [f"By the 95 % interval of its {label(report, score, unit=False)}, {policy} {told}."]
