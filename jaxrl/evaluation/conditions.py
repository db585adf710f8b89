"""One evaluation under several conditions, which are settings of the environment: the same episodes in each of them."""

import csv
import dataclasses
import io
import itertools
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envs_jax.settings import kinds_of
from jaxrl.common.errors import UsageError
from jaxrl.common.yaml_files import read_mapping
from jaxrl.evaluation import reports
from jaxrl.evaluation.policies import LEARNED, PolicySet, announce, display_name
from jaxrl.evaluation.statistics import finite, interquartile_mean, interval, tail_mean

_EMPTY_STEPS = 500_000  # for absent agents; more take longer than to compile another program
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
) -> list[Outcome]:
    """Return the outcome of each policy in each condition, on held-out episodes of the same keys.

    Conditions whose environments can be joined are played by one program.

    Raises UsageError: a condition that the environment does not know, or that the run's policy does not fit.
    """
    changed = []
    kinds = kinds_of(type(policy_set.env.env))
    for condition in conditions:  # all of them are checked before any is played
        for key, value in condition.settings.items():
            if typing.get_origin(kinds.get(key)) is tuple and not isinstance(value, list):
                raise UsageError(
                    f"condition '{condition.name}': one value of {key} is a list, and a list means several values: "
                    f"write it in two pairs of brackets, such as {key}: [[{value}]]"
                )
        try:
            changed.append(policy_set.with_env_settings(condition.settings))
        except UsageError as error:
            hint = " (which is [[]] in this file)" if "empty list" in str(error) else ""
            raise UsageError(f"condition '{condition.name}': {error}{hint}") from None
    outcomes: dict[int, list[Outcome]] = {}
    plays = sum(policy_set.seeds if name in LEARNED else 1 for name in names)
    for group in _group(changed, plays * episodes):
        play = reports.make_rollout(group.policy_set, names, episodes, seed, chunk)
        for number, (index, context) in enumerate(group.contexts.items()):
            what = f"{conditions[index].name}: {episodes:,} episodes"
            known = {"return", "length", *changed[index].env.spec.metrics}  # other members may have more
            outcomes[index] = [
                Outcome(
                    conditions[index].name, name, {m: curve[-1] for m, curve in curves.items() if _base(m) in known}
                )
                for name, curves in announce(play(context), what, say, compiled=number > 0)
            ]
    return [outcome for index in range(len(conditions)) for outcome in outcomes[index]]


def _base(metric: str) -> str:
    """Return the name of a metric without the task, see `rollouts.split_by_task`."""
    return metric.partition("/")[0]


class _Group(NamedTuple):
    """Conditions that one program plays."""

    policy_set: PolicySet
    contexts: dict[int, Any]  # {index of the condition: the environment's context in it}


def _group(policy_sets: Sequence[PolicySet], episodes: int) -> list[_Group]:
    """Return groups of the conditions in which these are the policies, each as large as one program plays fast.

    `episodes` is how many of each condition are played.
    """
    all_members: list[list[int]] = []
    for index in range(len(policy_sets)):
        for members in all_members:
            chosen = [policy_sets[member] for member in (*members, index)]
            if _empty_steps(chosen) * episodes <= _EMPTY_STEPS and _join(chosen):
                members.append(index)
                break
        else:
            all_members.append([index])
    groups = []
    for members in all_members:
        first = policy_sets[members[0]]
        contexts = [policy_sets[members[0]].context]
        if len(members) > 1 and (joined := _join([policy_sets[member] for member in members])):
            env, contexts = joined
            first = first.with_env_settings(
                {field.name: getattr(env, field.name) for field in dataclasses.fields(env) if field.init}
            )
        groups.append(_Group(first, dict(zip(members, contexts, strict=True))))
    return groups


def _empty_steps(policy_sets: Sequence[PolicySet]) -> int:
    """Return the steps of agents that are not there, if the longest array of agents plays an episode of each."""
    specs = [policy_set.env.spec for policy_set in policy_sets]
    longest = max(spec.num_agents for spec in specs)
    return sum((longest - spec.num_agents) * spec.horizon for spec in specs)


def _join(policy_sets: Sequence[PolicySet]) -> tuple[Any, list[Any]] | None:
    """Return the environment that plays all conditions, and its contexts; None if their policies do not take it."""
    first, *others = policy_sets
    joined: tuple[Any, list[Any]] | None = first.env.env.join([other.env.env for other in others])
    if joined and joined[0].spec.absent_agents and first.algo and not first.algo.weighs_agents:
        return None
    return joined


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
            with np.errstate(invalid="ignore"):  # scores may be infinite
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
