"""One evaluation under several conditions, which are settings of the environment: the same episodes in each of them."""

import csv
import dataclasses
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.common.errors import UsageError
from jaxrl.common.yaml_files import read_mapping
from jaxrl.evaluation import reports
from jaxrl.evaluation.policies import PolicySet, announce, display_name
from jaxrl.evaluation.statistics import finite, interquartile_mean, interval, tail_mean

WORST = 0.1  # share of the episodes that "quantile" and "tail" of a score look at


@dataclasses.dataclass(frozen=True)
class Condition:
    """Settings of the environment that differ from the run's."""

    name: str
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one policy in one condition."""

    condition: str
    policy: str
    ends: dict[str, np.ndarray]  # {metric: float[N], or float[S, N] of S seeds}, at the ends of N episodes


def read_conditions(path: Path) -> list[Condition]:
    """Read a YAML file {name: {setting: value, or a list of values}}; lists of one condition are crossed.

    Raises UsageError: the file cannot be read, or holds something else.
    """
    conditions = []
    for name, settings in read_mapping(path).items():
        if not isinstance(settings, dict):
            raise UsageError(
                f"{path}: condition '{name}' must be a mapping of the environment's settings to values, {{}} for the "
                "run's own settings"
            )
        varied = {key: values for key, values in settings.items() if isinstance(values, list)}
        if empty := [key for key, values in varied.items() if not values]:
            raise UsageError(
                f"{path}: condition '{name}' has no values for {empty[0]}: name at least one, or write [[]] where an "
                "empty list is the value"
            )
        for values in itertools.product(*varied.values()):
            chosen = dict(zip(varied, values, strict=True))
            label = ", ".join(f"{key} {value}" for key, value in chosen.items() if len(varied[key]) > 1)
            conditions.append(Condition(f"{name}: {label}" if label else name, settings | chosen))
    names = [condition.name for condition in conditions]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UsageError(f"{path} holds the condition '{twice[0]}' twice: remove one of the values or names")
    if not conditions:
        raise UsageError(f"{path} holds no condition: write some, such as 'lossy: {{failure_rate: [0.1, 0.3]}}'")
    return conditions


def rollout(
    policy_set: PolicySet,
    conditions: Sequence[Condition],
    names: Sequence[str],
    episodes: int,
    seed: int = 0,
    chunk: int = 0,
    say: reports.Say = lambda sentence: None,
) -> Iterator[Outcome]:
    """Yield the outcome of each policy in each condition, on held-out episodes of the same keys.

    Raises UsageError: a condition that the environment does not know, or that the run's policy does not fit.
    """
    changed = []
    for condition in conditions:  # all of them are checked before any is played
        for key, value in condition.settings.items():
            if isinstance(getattr(policy_set.env.env, key, None), tuple) and not isinstance(value, list):
                raise UsageError(
                    f"condition '{condition.name}': {key} is a list itself, and a list of values is crossed: write it "
                    f"in two pairs of brackets, such as {key}: [[{value}]]"
                )
        try:
            changed.append(policy_set.with_env_settings(condition.settings))
        except UsageError as error:
            hint = " (which is [[]] in this file)" if "empty list" in str(error) else ""
            raise UsageError(f"condition '{condition.name}': {error}{hint}") from None
    for condition, policies in zip(conditions, changed, strict=True):
        played = reports.rollout(policies, names, episodes, seed, chunk)
        for name, curves in announce(played, f"{condition.name}: {episodes:,} episodes", say):
            yield Outcome(condition.name, name, {metric: curve[-1] for metric, curve in curves.items()})


def summarise(
    policy_set: PolicySet,
    conditions: Sequence[Condition],
    outcomes: Sequence[Outcome],
    episodes: int,
    seed: int,
    bound: float | None = None,
) -> dict[str, Any]:
    """Return a report of outcomes: the heads of evaluation.json, and for each condition its policies and differences.

    Each metric has the entries of `interval`, "median", and with several seeds "iqm", the interquartile mean of their
    means. The score also has "quantile", which the worst tenth of the episodes does not reach, "tail", their mean (the
    conditional value at risk), and with a `bound` "failed", the share of episodes whose score is worse than it; with
    several seeds these are means over the seeds. What is not finite is None.
    """
    spec = policy_set.env.spec
    worse_is_larger = spec.score_mode == "min"
    report: dict[str, Any] = {}
    for condition in conditions:
        played = {outcome.policy: outcome.ends for outcome in outcomes if outcome.condition == condition.name}
        policies: dict[str, dict[str, Any]] = {}
        for name, ends in played.items():
            policies[name] = {metric: _describe(values, spec.is_share(metric)) for metric, values in ends.items()}
            score = np.asarray(ends[spec.score], np.float64)
            level = 1 - WORST if worse_is_larger else WORST
            with np.errstate(invalid="ignore"):  # of infinite scores
                policies[name][spec.score] |= {
                    "quantile": finite(np.quantile(score, level, axis=-1).mean()),
                    "tail": finite(np.mean(tail_mean(score, WORST, worse_is_larger))),
                }
            if bound is not None:
                met = score <= bound if worse_is_larger else score >= bound
                policies[name][spec.score]["failed"] = float((~met).mean())  # a score that is NaN has failed
        differences = list(reports.compare(spec, {name: ends[spec.score] for name, ends in played.items()}))
        report[condition.name] = {"set": condition.settings, "policies": policies, "differences": differences}
    return {**reports.head(policy_set, episodes, seed), "bound": bound, "worst": WORST, "conditions": report}


def _describe(values: np.ndarray, share: bool) -> dict[str, Any]:
    values = np.asarray(values, np.float64)
    seeds = {"iqm": finite(interquartile_mean(values.mean(-1)))} if values.ndim > 1 else {}
    return {**interval(values, share), "median": finite(np.median(values)), **seeds}


def to_csv(outcomes: Sequence[Outcome]) -> str:
    """Return a table with one row per condition, policy, seed and episode, and one column per metric.

    Scores by task, whose episodes are a part of all, are left out: the score of each episode is there.
    """
    names = dict.fromkeys(metric for outcome in outcomes for metric in outcome.ends)
    metrics = [name for name in names if "/" not in name]  # see `rollouts.split_by_task`
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["condition", "policy", "seed", "episode", *metrics])
    for outcome in outcomes:
        rows = {name: np.atleast_2d(outcome.ends[name]) for name in metrics if name in outcome.ends}
        seeds, episodes = next(iter(rows.values())).shape
        for seed, episode in itertools.product(range(seeds), range(episodes)):
            values = [float(rows[metric][seed, episode]) if metric in rows else "" for metric in metrics]
            writer.writerow([outcome.condition, display_name(outcome.policy), seed, episode, *values])
    return text.getvalue()
