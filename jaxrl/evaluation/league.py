"""Matches between policies: pairings, results with standard errors, and Elo ratings.

A match is many games of one policy (the first) against one player of the other team (the second). Whether a player is
a script of the environment or the policy of a run, it gets observations in its own format and from its own side.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from envs_jax.base import EnvSpec, closest, short_repr
from envs_jax.matches import OUTCOMES, MatchRules
from jaxrl.common.errors import UsageError
from jaxrl.evaluation.policies import LEARNED, PolicySet, no_player
from jaxrl.evaluation.statistics import Estimate, estimate_difference, interval
from jaxrl.runtime.rollouts import Opponent, held_out_key, learned_policy

ELO = 400 / math.log(10)  # a unit of log odds in points of Elo

# Ratings


def elo(wins: np.ndarray, draws: np.ndarray, anchor: int, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return ratings and half-widths of their 95 % intervals, each float64[n], relative to the anchor.

    Bradley and Terry's model by maximum likelihood: i and j share points at odds of 10^((R_i - R_j) / 400), a draw
    being half a point. Each pair that met gets one more game, half won and half lost, so that a player who won every
    game has a finite rating. The intervals come from the variance of the games' points, draws included.

    Args:
        wins: float[n, n], games that i won against j.
        draws: float[n, n], symmetric.
        anchor: the player whose rating is fixed.
        level: the anchor's rating.

    References:
        Bradley and Terry 1952, Biometrika 39; White 1982, Econometrica 50 (the variance).
    """
    wins = wins + 0.5 * ((wins + wins.T + draws) > 0)
    points = wins + draws / 2
    games = points + points.T
    share = points / np.maximum(games, 1)
    spread = games * ((wins + draws / 4) / np.maximum(games, 1) - share**2)
    free = np.arange(len(wins)) != anchor
    strength = np.zeros(len(wins))

    def curvature(weights: np.ndarray) -> np.ndarray:
        return (np.diag(weights.sum(1)) - weights)[np.ix_(free, free)]

    for _ in range(200):
        expected = 1 / (1 + np.exp(strength[None] - strength[:, None]))
        information = curvature(games * expected * (1 - expected))
        step = np.linalg.solve(information, (points - games * expected).sum(1)[free])
        strength[free] += step * min(1.0, 1.0 / np.abs(step).max(initial=1e-300))  # far from the solution, small steps
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    inverse = np.linalg.inv(information)
    deviation = np.zeros(len(wins))
    deviation[free] = np.sqrt(np.diag(inverse @ curvature(spread) @ inverse))
    return level + ELO * strength, 1.96 * ELO * deviation


# Games


def play(
    policy_set: PolicySet,
    matches: Sequence[tuple[str, str]],
    opponents: Mapping[str, PolicySet],
    games: int,
    seed: int,
    chunk: int = 0,
) -> Iterator[tuple[str, str, dict[str, np.ndarray]]]:
    """Play match after match; yield (first, second, {metric: float32[games]} at the end of each game).

    For the learned policies of several seeds yield float32[seeds, games]; against `opponents` the first seed plays.

    Args:
        policy_set: the environment and the first policies.
        matches: pairs of one of its policies and a scripted player of the other team or one of `opponents`.
        opponents: runs that play the other team.
        games, seed: of each match, held out; game i begins in the same state in all of them.
        chunk: see `PolicySet.evaluator`.
    """
    rules = get_match_rules(policy_set)
    others = list(opponents)
    names = list(dict.fromkeys(first for first, _ in matches))
    sides = None if rules.outside is None else [_opponent(other) for other in opponents.values()]
    program = policy_set.evaluator(names, games, chunk, sides).jit_final_values()
    opponent_params = [jax.device_get(other.params) for other in opponents.values()]
    for first, second in matches:
        context = rules.outside if second in opponents else rules.opponents[second]
        per_seed = []
        for seed_policy in policy_set.by_seed() if first in LEARNED and sides is None else [policy_set]:
            params: Any = seed_policy.parameters(names.index(first))
            if sides is not None:
                index = others.index(second) if second in opponents else len(others)
                params = (params, (np.int32(index), opponent_params))
            final_metrics = program(params, held_out_key(seed, "evaluation"), context)
            per_seed.append({metric: np.asarray(values)[:games] for metric, values in final_metrics.items()})
        yield first, second, per_seed[0] if len(per_seed) == 1 else jax.tree.map(lambda *x: np.stack(x), *per_seed)


def _opponent(policy_set: PolicySet) -> Opponent:
    assert policy_set.algo is not None
    env: Any = policy_set.env
    mode = LEARNED[rank_policies(policy_set)[0]]
    return Opponent(env.opponent_view, learned_policy(policy_set.algo, mode))


def get_match_rules(policy_set: PolicySet) -> MatchRules:
    """Return the match rules of an environment that has two teams."""
    rules = policy_set.env.env.match_rules
    assert rules is not None
    return rules


def rank_policies(policy_set: PolicySet) -> list[str]:
    """Return the names of a run's policies, the one that counts in matches first."""
    samples = get_match_rules(policy_set).sampled and not policy_set.greedy
    ranked = ["sampled", "learned"] if samples else ["learned", "sampled"]
    return [name for name in ranked if name in policy_set.policies]


def default_policies(policy_set: PolicySet) -> list[str]:
    """Return the names of the policies that are evaluated by default: all, or some baselines where teams compete."""
    rules = policy_set.env.env.match_rules
    if rules and policy_set.run:
        return [*rank_policies(policy_set), *rules.baselines]
    return list(policy_set.policies)


def apply_match_settings(policy_set: PolicySet) -> PolicySet:
    """Apply the environment's settings for matches, if it has any, except those that the user gave.

    Raises UsageError: nobody plays the other team.
    """
    rules = policy_set.env.env.match_rules
    named = policy_set.named_settings
    settings = {name: value for name, value in rules.settings.items() if name not in named} if rules else {}
    policy_set = policy_set.with_env_settings(settings)
    rules = policy_set.env.env.match_rules
    if rules and not rules.opponents:
        raise no_player(rules)
    return policy_set


def summarise_matches(
    played: Iterable[tuple[str, str, Mapping[str, np.ndarray]]], spec: EnvSpec, metrics: Collection[str]
) -> list[dict[str, Any]]:
    """Summarise matches: {"first", "second", metric: see `statistics.interval`}, and so for "points".

    Points are the share of games won, draws as half.
    """
    summaries = []
    for first, second, final_metrics in played:
        shares = {name: name in OUTCOMES or spec.is_share(name) for name in metrics}
        summary = {name: interval(final_metrics[name], share) for name, share in shares.items()}
        points = estimate_points(final_metrics["win"], final_metrics["draw"])
        summaries.append({"first": first, "second": second, **summary, "points": points})
    return summaries


def estimate_points(win: np.ndarray, draw: np.ndarray) -> Estimate:
    """Return the entries of `interval` for points, 1 for a win and 0.5 for a draw; float[N] or float[S, N], 0 or 1.

    Without draws they are a share. With draws the ends are those of the difference of wins and defeats, halved, or of
    few games Student's, cut to [0, 1].
    """
    if not np.any(draw):
        return interval(win, share=True)
    points = interval(win + 0.5 * draw, share=False)
    margin = estimate_difference(2 * win + draw, 1.0, share=True)  # wins less defeats
    mean, half = points["mean"], points["ci95"]
    if mean is not None and margin["low"] is not None and margin["high"] is not None:
        low, high = (1 + margin["low"]) / 2, (1 + margin["high"]) / 2
        return points | {"ci95": max(mean - low, high - mean), "low": low, "high": high}
    if mean is not None and half is not None:
        return points | {"low": max(mean - half, 0.0), "high": min(mean + half, 1.0)}
    return points


# Leagues


@dataclasses.dataclass(frozen=True)
class League:
    """Runs and scripted players that all play each other."""

    runs: dict[str, PolicySet]  # {name: policy of the run}, in games with the first run's settings
    scripted: tuple[str, ...]  # names of scripted players

    @property
    def players(self) -> tuple[str, ...]:
        return (*self.runs, *self.scripted)

    @property
    def rules(self) -> MatchRules:
        return get_match_rules(next(iter(self.runs.values())))

    @property
    def anchor(self) -> str:
        """The player whose rating is fixed: the environment's choice, or the first run if that is absent."""
        return self.rules.anchor[0] if self.rules.anchor[0] in self.scripted else self.players[0]

    def play(self, games: int, seed: int, chunk: int = 0) -> Iterator[tuple[str, str, dict[str, np.ndarray]]]:
        names = list(self.runs)
        for i, (name, run) in enumerate(self.runs.items()):
            run_policy = rank_policies(run)[0]
            later = {other: self.runs[other] for other in names[i + 1 :]}
            matches = [(run_policy, second) for second in (*later, *self.scripted)]
            if i == 0:
                matches += itertools.combinations(self.scripted, 2)
            for first, second, final_metrics in play(run, matches, later, games, seed, chunk):
                yield name if first == run_policy else first, second, final_metrics

    def ratings(self, matches: Sequence[Mapping[str, Any]], games: int) -> dict[str, dict[str, float]]:
        """Return {player: {"elo", "low", "high", "points"}}, best first; points: share of all games, draws as half."""
        index = {name: k for k, name in enumerate(self.players)}
        wins, draws = np.zeros((2, len(index), len(index)))
        for match in matches:
            i, j = index[match["first"]], index[match["second"]]
            wins[i, j], wins[j, i] = (round(games * match[outcome]["mean"]) for outcome in ("win", "defeat"))
            draws[i, j] = draws[j, i] = round(games * match["draw"]["mean"])
        rating, half = elo(wins, draws, index[self.anchor], self.rules.anchor[1])
        points = (wins + draws / 2).sum(1) / (games * (len(index) - 1))
        rows = zip(self.players, rating, rating - half, rating + half, points, strict=True)
        ordered = sorted(rows, key=lambda row: -row[1])
        return {name: dict(zip(("elo", "low", "high", "points"), row, strict=True)) for name, *row in ordered}


def league(runs: Sequence[PolicySet], scripted: Sequence[str] | None = None, greedy: bool = False) -> League:
    """Build a league of runs, in games with the first run's settings, each with its own observations.

    With `greedy` all runs take their best actions. `scripted` are the other players, by default all of the other team.

    Raises UsageError: runs that cannot play each other.
    """
    first = runs[0]
    for k, run in enumerate(runs):
        _check_meets(run, runs[:k])
    rules = get_match_rules(first)
    overrides = {name: first.settings[name] for name in first.named_settings if name in rules.league}
    settings = {**{name: first.settings[name] for name in rules.game}, **rules.league, **overrides}
    policies = [dataclasses.replace(run.with_env_settings(settings), greedy=greedy) for run in runs]
    rules = get_match_rules(policies[0])
    if rules.outside is None:
        flags = ", ".join(f"--{name} {value}" for name, value in overrides.items())
        raise UsageError(f"runs cannot play each other with {flags}: remove it")
    for name in scripted or ():
        if name not in rules.opponents:
            raise UsageError(f"unknown player {short_repr(name)}: {closest(name, rules.opponents)}")
    names = [str(run.run_name) for run in runs]
    if len(set(names)) < len(names):  # runs of several folders may share a name
        names = [str(run.run) for run in runs]
    if len(set(names)) < len(names):  # checkpoints of one run
        names = [f"{name} checkpoint {run.step}" for name, run in zip(names, runs, strict=True)]
    return League(dict(zip(names, policies, strict=True)), tuple(rules.opponents if scripted is None else scripted))


def _check_meets(run: PolicySet, others: Sequence[PolicySet]) -> None:
    """Raise UsageError unless a run can play the others."""
    assert run.run and run.config and run.algo
    if run.env.env.match_rules is None:
        raise UsageError(
            f"{run.run} was trained on '{run.name}', which does not have two teams: use --against with runs of games "
            "between two teams, such as snakes"
        )
    if run.algo.recurrent:
        raise UsageError(
            f"{run.run} keeps a memory between steps, which --against does not support: leave this run out"
        )
    for other in others:
        assert other.run and other.config
        if (run.run.resolve(), run.step) == (other.run.resolve(), other.step):
            raise UsageError(f"{run.run} is named twice: name each run once")
        games = [
            get_match_rules(one.with_env_settings(one.config.env_settings)).game for one in (run, other) if one.config
        ]
        different = [name for name in {**games[0], **games[1]} if games[0].get(name) != games[1].get(name)]
        if different:
            descriptions = [", ".join(f"{name} {game.get(name)}" for name in different) for game in games]
            raise UsageError(
                f"{run.run} cannot play {other.run}: one was trained with {descriptions[0]}, the other with "
                f"{descriptions[1]}"
            )
