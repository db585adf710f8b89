"""Evaluations as text: tables and sentences of the reports of `jaxrl.evaluation.reports`."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from envs_jax.matches import OUTCOMES
from jaxrl.evaluation.policies import LEARNED, display_name
from jaxrl.evaluation.statistics import MIN_EPISODES, find_sign
from jaxrl.report import tables
from jaxrl.runtime.scoring import find_label

POINTS = "points"  # share of games won, draws as half
_COLUMNS = 4  # metrics in one table of conditions
INTERVALS = "mean ± half of its 95 % interval, of a share [both ends]"


def show(report: dict[str, Any], title: str) -> None:
    """Print the tables and the conclusion of a report to stdout, in colour on a terminal."""
    sentences: list[str] = []
    if "conditions" in report:
        heading = f"{title}: {len(report['conditions'])} conditions, {report['episodes']:,} held-out episodes of each"
        legend = f"{INTERVALS}; seed {report['seed']}{_seeds_text(report)}"
        blocks = [make_condition_table(report), *make_metric_tables(report)]
    elif "ratings" in report:
        heading = f"League of {len(report['ratings'])} players, {report['games']:,} games of each pair"
        fixed = f"Elo with draws as half a point, {report['anchor']} fixed"
        actions = ", ".join(dict.fromkeys(report["actions"].values()))
        legend = f"{fixed}; below {INTERVALS}, for the first player; actions {actions}"
        blocks = make_league_tables(report)
    elif "matches" in report:
        heading = f"{title}: {report['episodes']:,} held-out games of each pair, seed {report['seed']}"
        settings = ", ".join(f"{name} {value}" for name, value in report["set"].items())
        legend = f"{INTERVALS}; {settings}{_seeds_text(report)}"
        blocks = [make_match_table(report)]
        sentences = verdict(report)
    else:
        where = f" in {report['simulator']}" if "simulator" in report else ""
        which = f"episodes, goals of the {report['stream']}" if where else "held-out episodes"
        heading = f"{title}{where}: {report['episodes']:,} {which}, seed {report['seed']}"
        legend = f"{INTERVALS} (standard deviation), after equal numbers of steps{_seeds_text(report)}"
        blocks = [make_curve_table(report)]
        sentences = conclusion(report)
    spaced = [part for block in blocks for part in (Text(), block)]
    tables.print_parts([Text(heading, "bold"), Text(legend, "dim"), *spaced, *([""] if sentences else []), *sentences])


def _seeds_text(report: dict[str, Any]) -> str:
    return f"; learned policies: over the means of {report['seeds']} seeds" if "seeds" in report else ""


def get_label(report: dict[str, Any], metric: str, unit: bool = True) -> str:
    """Return a report's display name of a metric, with or without its unit."""
    return find_label(metric, report.get("labels", {}), unit)


# Curves over the episode


def make_curve_table(report: dict[str, Any]) -> Table:
    """Return one block of rows per metric, one row per policy, one column per step label."""
    steps = report["steps"]
    at = report["at"]
    policies = report["policies"]
    titles = []
    rows = []
    for step, moment in zip(at, report["moments"], strict=True):
        words = f"step {step} of {steps}"
        titles.append(words if moment == f"step {step}" else f"{words}\n({moment})")
    for metric in next(iter(policies.values())):
        curves = {name: result[metric] for name, result in policies.items()}
        rows.append(tables.Row(get_label(report, metric)))
        for name, curve in curves.items():
            estimates = [{key: values[step] for key, values in curve.items()} for step in at]
            digits = choose_digits(estimates)
            rows.append(_policy_row(name, [format_estimate(estimate, digits) for estimate in estimates]))
    return tables.make_table("policy", titles, rows)


def make_condition_table(report: dict[str, Any]) -> Table:
    """Return one block of rows per condition, one row per policy: the score and its worst tenth, at the end."""
    score = report["score"]
    worst = f"{100 * report['worst']:.0f} %"
    titles = [get_label(report, score), "median", f"worst {worst},\nfrom", f"worst {worst},\nmean"]
    keys = ["median", "quantile", "tail"]
    if report["bound"] is not None:
        titles.append(f"worse than\n{report['bound']:g}, %")
    rows = []
    for condition, played in report["conditions"].items():
        scores = {policy: metrics[score] for policy, metrics in played["policies"].items()}
        rows.append(tables.Row(condition))
        for policy, values in scores.items():
            digits = choose_digits([values])
            ends = ("not finite" if values[key] is None else f"{values[key]:.{digits}f}" for key in keys)
            cells = [format_estimate({**values, "std": None}, digits), *ends]
            cells += [] if report["bound"] is None else [f"{100 * values['failed']:.1f}"]
            rows.append(_policy_row(policy, cells))
    return tables.make_table("policy", titles, rows)


def make_metric_tables(report: dict[str, Any]) -> list[Table]:
    """Return tables of all metrics but the score, at the end: rows as in `make_condition_table`, some metrics each."""
    all_rows = [row for played in report["conditions"].values() for row in played["policies"].values()]
    metrics = [metric for metric in dict.fromkeys(itertools.chain(*all_rows)) if metric != report["score"]]

    def make_table(names: Sequence[str]) -> Table:
        rows = []
        for condition, played in report["conditions"].items():
            rows.append(tables.Row(condition))
            for policy, values in played["policies"].items():
                estimates = [{**values[name], "std": None} if name in values else None for name in names]
                cells = ["" if one is None else format_estimate(one, choose_digits([one])) for one in estimates]
                rows.append(_policy_row(policy, cells))
        return tables.make_table("policy", [get_label(report, name) for name in names], rows)

    return [make_table(names) for names in [metrics[i : i + _COLUMNS] for i in range(0, len(metrics), _COLUMNS)]]


def _policy_row(policy: str, cells: Sequence[str]) -> tables.Row:
    return tables.Row(display_name(policy), cells, "bold cyan" if policy == next(iter(LEARNED)) else "")


def _decimals(means: Iterable[float | None]) -> int:
    """Return the decimals that show three significant digits of the largest mean."""
    largest = max((abs(mean) for mean in means if mean is not None), default=0.0)
    return min(max(2 - math.floor(math.log10(largest * 0.9999)), 0), 8) if largest else 3


def choose_digits(estimates: Iterable[Mapping[str, float | None]], scale: float = 1) -> int:
    """Return the decimals of a row: the smallest of its errors has two digits up to 35, else one.

    That is the rounding of the Particle Data Group. Rows without errors show three significant digits of the largest
    mean; no row shows more than four digits more.
    """
    estimates = list(estimates)
    means = [scale * mean for row in estimates if (mean := row["mean"]) is not None]
    halves = [scale * half for row in estimates if (half := row["ci95"])]
    if not halves:
        return _decimals(means)
    return min(max(-math.floor(math.log10(min(halves) / 3.55)), 0), _decimals(means) + 4)


def format_estimate(values: Mapping[str, float | None], digits: int, scale: float = 1) -> str:
    """Return "mean ±half (deviation)", or "mean [low, high]" of a share; what is not known is left out."""
    if values["mean"] is None:
        return "not finite"
    ends = "low" in values and values["low"] is not None
    form = "{mean} [{low}, {high}]" if ends else "{mean}" if values["ci95"] is None else "{mean} ±{ci95}"
    form += " ({std})" if values.get("std") is not None and not ends else ""
    return form.format_map({name: f"{scale * value:.{digits}f}" for name, value in values.items() if value is not None})


def conclusion(report: dict[str, Any]) -> list[str]:
    """Return sentences that compare the run's first policy with the others, at the end of the same episodes.

    Which one is better follows from the 95 % intervals of the differences. Empty without a policy of a run.
    """
    verbs = {1: "is better than", -1: "is worse than", 0: "is not shown to differ from"}
    clauses: dict[int, list[str]] = {sign: [] for sign in verbs}
    for difference in report.get("differences", ()):
        if difference["mean"] is None:
            return []
        sign = _better(difference, report)
        name = display_name(difference["second"])
        by = f"by {_ends(difference, absolute=True)}" if sign else f"(difference {_ends(difference)})"
        clauses[sign].append(f"{name} {by}")
    first = display_name(next((difference["first"] for difference in report.get("differences", ())), ""))
    lines = [
        f"On the same episodes {first} {verbs[sign]} {'; '.join(texts)}." for sign, texts in clauses.items() if texts
    ]
    if lines:
        better = "smaller" if report["score_mode"] == "min" else "larger"
        lines.insert(0, f"At the end, by {get_label(report, report['score'], unit=False)} (the {better}, the better):")
    if clauses[0]:
        few = report["episodes"] < MIN_EPISODES
        lines[-1] += f" {MIN_EPISODES} episodes are the fewest that can." if few else " More episodes may show more."
    return lines


def _better(difference: dict[str, Any], report: dict[str, Any]) -> int:
    """Return 1 if the first policy is better, -1 if the second is, 0 if the interval does not show which."""
    return find_sign(difference) * (-1 if report["score_mode"] == "min" else 1)


def _ends(estimate: dict[str, Any], absolute: bool = False) -> str:
    """Return "mean [low, high]", without the sign if `absolute`."""
    values = [estimate[key] for key in ("mean", "low", "high") if estimate[key] is not None]
    if absolute and values[0] < 0:
        values = [-values[0], -values[2], -values[1]]
    digits = _decimals(values)
    if len(values) == 3 and values[2] > values[1]:  # ends that differ look different
        digits = max(digits, choose_digits([{"mean": values[0], "ci95": (values[2] - values[1]) / 2}]))
    mean, *ends = (f"{value:.{digits}f}" for value in values)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


# Matches


def make_match_table(report: dict[str, Any]) -> Table:
    """Return one block of rows per first policy, one row per metric, one column per player of the other team."""
    rows = []
    seconds = list(dict.fromkeys(match["second"] for match in report["matches"]))
    for first in dict.fromkeys(match["first"] for match in report["matches"]):
        policy_matches = {match["second"]: match for match in report["matches"] if match["first"] == first}
        rows.append(tables.Row(display_name(first)))
        for metric in (name for name in next(iter(policy_matches.values())) if name not in ("first", "second")):
            cells = [_end(policy_matches[second], metric) if second in policy_matches else "" for second in seconds]
            rows.append(tables.Row(_title(report, metric), cells))
    return tables.make_table("policy", [f"against\n{second}" for second in seconds], rows)


def make_league_tables(report: dict[str, Any]) -> list[Table]:
    """Return the ranking, and a table with one row per match."""
    standings = []
    results = []
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
        tables.make_table("player", ("Elo", "95 % interval", "points, %"), standings),
        tables.make_table("match", titles, results),
    ]


def _title(report: dict[str, Any], metric: str) -> str:
    if metric == POINTS:
        return "share of the points, %"
    return get_label(report, metric) + (", %" if metric in OUTCOMES else "")


def _end(match: dict[str, Any], metric: str) -> str:
    scale = 100 if metric in (*OUTCOMES, POINTS) else 1
    return format_estimate({**match[metric], "std": None}, choose_digits([match[metric]], scale), scale)


def verdict(report: dict[str, Any]) -> list[str]:
    """Return a sentence on the opponents that the first policy beats, by 95 % intervals of its mean score."""
    policy = report["matches"][0]["first"]
    score = report["score"]
    verbs = {1: "beats", -1: "loses to", 0: "is not shown to beat or lose to"}
    opponents: dict[int, list[str]] = {sign: [] for sign in verbs}
    for margin in report.get("margins", ()):
        if margin["first"] == policy:
            opponents[_better(margin, report)].append(margin["second"])
    clauses = "; ".join(f"{verbs[sign]} {', '.join(players)}" for sign, players in opponents.items() if players)
    sentence = f"By the 95 % interval of its {get_label(report, score, unit=False)}, {display_name(policy)} {clauses}."
    return [sentence] if clauses else []
