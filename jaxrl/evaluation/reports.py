"""Evaluations as data: the content of evaluation.json."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs_jax.base import EnvSpec
from jaxrl.evaluation import league, simulator
from jaxrl.evaluation.policies import LEARNED, PolicySet, announce, display_name
from jaxrl.evaluation.statistics import estimate_difference, marks, summarise
from jaxrl.runtime import run_directory
from jaxrl.runtime.rollouts import extend, held_out_key, split_by_task
from jaxrl.runtime.scoring import Scoring

FORMAT = 1
FILE = "evaluation.json"  # in the run's directory
REAL_FILE = "evaluation_{}.json"  # for the name of a simulator
EPISODES = 200

Say = Callable[[str], None]  # receives one sentence per policy or match


def rollout(
    policy_set: PolicySet, names: Sequence[str], episodes: int, seed: int, chunk: int = 0
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Roll out each policy on held-out episodes 0 .. episodes - 1 of a seed; yield {metric: float32[T + 1, episodes]}.

    T is as in `Evaluator.curves`; `names` are some of `policy_set.policies`, `chunk` is as in `PolicySet.evaluator`.
    With several tasks there is also the score for each task, see `rollouts.split_by_task`. Where a run has several
    seeds, the curves of its policies have the seed as their second axis: float32[T + 1, seeds, episodes].
    """
    yield from make_rollout(policy_set, names, episodes, seed, chunk)(policy_set.context)


def make_rollout(
    policy_set: PolicySet, names: Sequence[str], episodes: int, seed: int, chunk: int = 0
) -> Callable[[Any], Iterator[tuple[str, dict[str, np.ndarray]]]]:
    """Return `rollout` as a function of the environment's context: one program, compiled when it is first needed."""
    play = policy_set.evaluator(names, episodes, chunk).curves()

    def play_curves(policy: PolicySet, index: int, context: Any) -> dict[str, np.ndarray]:
        curves = play(policy.parameters(index), held_out_key(seed, "evaluation"), context)
        curves = {name: np.asarray(curve)[:, :episodes] for name, curve in curves.items()}
        return split_by_task(policy_set.env.spec, curves)

    def rollout_in(context: Any) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        with contextlib.closing(policy_set.env):
            for index, name in enumerate(names):
                if name in LEARNED and policy_set.seeds > 1:
                    by_seed = [play_curves(policy, index, context) for policy in policy_set.by_seed()]
                    longest = max(len(curves["length"]) for curves in by_seed)
                    yield name, {m: np.stack([extend(one[m], longest) for one in by_seed], axis=1) for m in by_seed[0]}
                else:
                    yield name, play_curves(policy_set, index, context)

    return rollout_in


def evaluate(
    policy_set: PolicySet,
    names: Sequence[str],
    episodes: int = EPISODES,
    seed: int = 0,
    chunk: int = 0,
    say: Say = lambda sentence: None,
    world: simulator.Simulator | None = None,
) -> dict[str, Any]:
    """Evaluate all policies as `rollout` does; return the content of evaluation.json.

    `say` receives one sentence per policy. In a simulator `world` the first episodes of its list are played.
    """
    spec = policy_set.env.spec
    if world is None:
        rollouts = rollout(policy_set, names, episodes, seed, chunk)
    else:
        policy_set = dataclasses.replace(policy_set, seed_params=())  # a simulator plays the first seed
        rollouts = simulator.rollout(policy_set, world, names, episodes, seed)
    all_curves: dict[str, dict[str, np.ndarray]] = dict(announce(rollouts, f"{episodes:,} episodes", say))
    longest = max(len(curves[spec.score]) for curves in all_curves.values())  # after its end an episode does not change
    policies: dict[str, dict[str, Any]] = {name: {} for name in names}
    for metric in _order(spec, all_curves[names[0]]):
        for name, curves in all_curves.items():
            policies[name][metric] = summarise(extend(curves[metric], longest), spec.is_share(metric))
    at = marks(longest - 1)
    return {
        **head(policy_set, episodes, seed),
        "steps": longest - 1,
        **({} if world is None else {"simulator": world.description, "stream": world.stream}),
        "at": at,
        "moments": [policy_set.env.env.step_label(step) for step in at],
        "policies": policies,
        "differences": list(compare(spec, {name: curves[spec.score][-1] for name, curves in all_curves.items()})),
    }


def compare(spec: EnvSpec, scores: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Yield the difference between the run's first policy and every other one, on the same episodes.

    Entries are "first" and "second", the names, and what `estimate_difference` returns.

    Args:
        spec: of the environment, which says what its score is.
        scores: {policy: float[N], or float[S, N]}, at the end of the episodes; see `statistics`.
    """
    first = next((name for name in LEARNED if name in scores), "")
    for second in [name for name in scores if first and name != first]:
        difference = estimate_difference(scores[first], scores[second], spec.is_share(spec.score))
        yield {"first": first, "second": second, **difference}


def play_matches(
    policy_set: PolicySet,
    names: Sequence[str],
    games: int,
    seed: int = 0,
    chunk: int = 0,
    say: Say = lambda sentence: None,
) -> dict[str, Any]:
    """Play all policies against every scripted player of the other team; return the content of evaluation.json.

    `games` is their number in each match, 0 for as many as the environment asks for.
    """
    rules = league.get_match_rules(policy_set)
    spec = policy_set.env.spec
    games = games or rules.num_games
    matches = [(name, opponent) for name in names for opponent in rules.opponents]
    played = list(announce(league.play(policy_set, matches, {}, games, seed, chunk), f"{games:,} games", say))
    # Game i begins in the same state in all matches: the run's policies are compared by their means over the opponents.
    score_of = {(first, second): ended[spec.score] for first, second, ended in played}
    learned = [name for name in names if name in LEARNED]
    means = {name: np.mean([score_of[name, opponent] for opponent in rules.opponents], axis=0) for name in learned}
    share = spec.is_share(spec.score)
    margins = [{"first": a, "second": b, **estimate_difference(x, share=share)} for (a, b), x in score_of.items()]
    return {
        **head(policy_set, games, seed),
        "set": {name: policy_set.settings[name] for name in rules.settings},
        "policies": {},  # curves over the episode: none
        "matches": league.summarise_matches(played, spec, dict.fromkeys((spec.score, *spec.metrics, "return"))),
        "margins": margins,
        "differences": list(compare(spec, means)),
    }


def play_league(
    players: league.League, games: int, seed: int = 0, chunk: int = 0, say: Say = lambda sentence: None
) -> dict[str, Any]:
    """Play all players of a league against each other; return the content of the file of `--against`.

    `games` is their number for each pair, 0 for as many as the environment asks for.
    """
    games = games or players.rules.num_games
    spec = next(iter(players.runs.values())).env.spec
    metrics = dict.fromkeys((spec.score, *spec.metrics))  # no returns: reward settings differ between runs
    played = announce(players.play(games, seed, chunk), f"{games:,} games", say)
    matches = league.summarise_matches(played, spec, metrics)
    return {
        "format": FORMAT,
        "runs": {name: head(run, games, seed) for name, run in players.runs.items()},
        "games": games,
        "actions": {name: display_name(league.rank_policies(run)[0]) for name, run in players.runs.items()},
        "score": spec.score,
        "labels": Scoring.from_spec(spec).labels,
        "anchor": players.anchor,
        "ratings": players.ratings(matches, games),
        "matches": matches,
    }


def head(policy_set: PolicySet, episodes: int, seed: int) -> dict[str, Any]:
    """Return the entries that say where the numbers come from, common to all reports."""
    return {
        "format": FORMAT,
        "run": policy_set.run_name,
        "algo": policy_set.config.algo if policy_set.config else None,
        "checkpoint": policy_set.step,
        "env": policy_set.name,
        "env_version": policy_set.env.env.version,
        "env_settings": policy_set.settings,
        "settings": policy_set.config.flat() if policy_set.config else None,
        "versions": run_directory.versions(),
        "seed": seed,
        "stream": "evaluation",
        "episodes": episodes,
        **({"seeds": policy_set.seeds} if policy_set.seeds > 1 else {}),
        "score": policy_set.env.spec.score,
        "score_mode": policy_set.env.spec.score_mode,
        "labels": Scoring.from_spec(policy_set.env.spec).labels,
        "steps": policy_set.env.spec.horizon,
    }


def _order(spec: EnvSpec, curves: dict[str, Any]) -> list[str]:
    """Return the metrics: the score, each task's score, then the rest; the length only if episodes differ in it."""
    task_scores = [name for name in curves if name.startswith(f"{spec.score}/")]
    names = dict.fromkeys([spec.score, *task_scores, *spec.metrics, "return", "length"])
    return [name for name in names if name in curves and not (name == "length" and spec.fixed_horizon)]


def evaluation_file(policy_set: PolicySet, names: Sequence[str], simulator: str | None = None) -> Path | None:
    """Return the evaluation file of a run, for the usual policies in its own environment; None for anything else.

    `simulator` is where the environment's tasks are played, None for the environment itself.
    """
    if policy_set.run is None or policy_set.config is None or policy_set.run.parent == run_directory.PRETRAINED:
        return None
    rules = policy_set.env.env.match_rules
    default_settings = {**policy_set.config.env_settings, **(rules.settings if rules else {})}
    default_names = set(league.default_policies(policy_set))
    if policy_set.settings != default_settings or set(names) != default_names:
        return None
    return policy_set.run / (REAL_FILE.format(simulator) if simulator else FILE)
