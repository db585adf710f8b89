"""Evaluations as data: the content of evaluation.json."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs_jax.base import EnvSpec
from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically
from jaxrl.evaluation import league
from jaxrl.evaluation.policies import LEARNED, EvalPolicy
from jaxrl.evaluation.rollouts import by_task, held_out_key
from jaxrl.evaluation.statistics import compare, marks, summarise
from jaxrl.integrations import metaworld
from jaxrl.runtime import run_directory

FORMAT = 1
FILE = "evaluation.json"  # in the run's directory
REAL_FILE = "evaluation_{}.json"  # of a simulator
EPISODES = 200


def rollout(
    subject: EvalPolicy, names: Sequence[str], episodes: int, seed: int, devices: int = 1, chunk: int = 0
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Roll out each policy on held-out episodes 0 .. episodes - 1 of a seed; yield {metric: float32[T + 1, episodes]}.

    With several tasks, the score is also given for each task, see `rollouts.by_task`. For the learned policies of
    several seeds the second axis is the seed: means over the episodes of each.

    Args:
        subject: environment and policies.
        names: some of `subject.policies`.
        episodes: how many.
        seed: of the held-out set.
        devices, chunk: see `EvalPolicy.evaluator`.
    """
    compiled = subject.evaluator(names, episodes, devices, chunk).compiled()

    def curves_of(policy: EvalPolicy, index: int) -> dict[str, np.ndarray]:
        curves = compiled(policy.parameters(index), held_out_key(seed, "evaluation"), subject.context)
        return by_task(subject.env.spec, {name: np.asarray(curve)[:, :episodes] for name, curve in curves.items()})

    for index, name in enumerate(names):
        if name not in LEARNED or subject.seeds == 1:
            yield name, curves_of(subject, index)
            continue
        each = [curves_of(subject.of_seed(k), index) for k in range(subject.seeds)]
        yield name, {metric: np.stack([own[metric].mean(1) for own in each], axis=1) for metric in each[0]}


def evaluate(
    subject: EvalPolicy,
    names: Sequence[str],
    episodes: int = EPISODES,
    seed: int = 0,
    at: Sequence[int] = (),
    devices: int = 1,
    chunk: int = 0,
    say: Callable[[str], None] = lambda sentence: None,
    world: metaworld.Simulator | None = None,
) -> dict[str, Any]:
    """Evaluate all policies; return the content of evaluation.json.

    Args:
        subject: environment and policies.
        names: policies, of `subject.policies`.
        episodes, seed, devices, chunk: see `rollout`.
        at: steps that the table shows, by default those of `statistics.marks`.
        say: receives one sentence per policy.
        world: simulator for the first episodes of its list; by default the environment, on held-out episodes.
    """
    spec = subject.env.spec
    flown = rollout(subject, names, episodes, seed, devices, chunk)
    if world is not None:
        flown = metaworld.rollout(subject, world, names, episodes, seed)
    at = list(at) or marks(spec.horizon)
    policies: dict[str, Any] = {}
    began = time.monotonic()
    for name, curves in flown:
        seconds = time.monotonic() - began
        say(f"{name}: {episodes:,} episodes in {seconds:.1f} s" + ("" if policies else ", compiling included"))
        over_seeds = subject.seeds > 1 and name in LEARNED
        policies[name] = {metric: summarise(curves[metric], over_seeds) for metric in _order(subject, curves)}
        began = time.monotonic()
    return {
        **_head(subject, episodes, seed),
        **({} if world is None else {"simulator": world.description, "stream": world.stream}),
        "at": at,
        "moments": [subject.env.env.step_label(step) for step in at],
        "policies": policies,
        "comparison": compare(policies, spec.score, spec.score_mode),
    }


def play(
    subject: EvalPolicy,
    names: Sequence[str],
    episodes: int = 0,
    seed: int = 0,
    devices: int = 1,
    chunk: int = 0,
    say: Callable[[str], None] = lambda sentence: None,
    at: Sequence[int] = (),
    simulator: str | None = None,
    task: str | None = None,
) -> dict[str, Any]:
    """Play what the environment is for: matches of two teams, or episodes; return the content of evaluation.json.

    Args:
        subject, names, seed, devices, chunk, say, at: see `evaluate`.
        episodes: or games of each match; 0: as many as the environment or the simulator asks for.
        simulator: one of metaworld.SIMULATORS; None: the environment.
        task: the simulator's own task; None: those of the environment.

    Raises:
        UsageError: the simulator is not installed, or cannot play this.
    """
    if subject.env.env.match_rules:
        return play_matches(subject, names, episodes, seed, devices, chunk, say)
    if simulator is None:
        return evaluate(subject, names, episodes or EPISODES, seed, at, devices, chunk, say)
    episodes = episodes or metaworld.EPISODES
    usual_lanes = metaworld.ARMS if simulator == "metaworld" else episodes
    world = metaworld.world_of(simulator, subject, task, min(chunk or usual_lanes, episodes))
    return evaluate(subject, names, episodes, seed, at, devices, chunk, say, world)


def _head(subject: EvalPolicy, episodes: int, seed: int) -> dict[str, Any]:
    """Return the entries about the origin of the numbers, common to all reports."""
    return {
        "format": FORMAT,
        "run": subject.run_name,
        "algo": subject.config.algo if subject.config else None,
        "checkpoint": subject.step,
        "env": subject.name,
        "env_version": subject.env.env.version,
        "env_settings": subject.settings,
        "settings": subject.config.flat() if subject.config else None,
        "versions": run_directory.versions(),
        "seed": seed,
        "stream": "evaluation",
        "episodes": episodes,
        **({"seeds": subject.seeds} if subject.seeds > 1 else {}),
        "score": subject.env.spec.score,
        "score_mode": subject.env.spec.score_mode,
        "labels": labels(subject.env.spec),
        "steps": subject.env.spec.horizon,
    }


def labels(spec: EnvSpec) -> dict[str, str]:
    """Return the display names of the metrics, {metric: "words, unit"}."""
    return {name: spec.label(name) for name in dict.fromkeys([spec.score, *spec.metrics, "return", "length"])}


def play_matches(
    subject: EvalPolicy,
    names: Sequence[str],
    games: int,
    seed: int = 0,
    devices: int = 1,
    chunk: int = 0,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Play all policies against every scripted player of the other team; return the content of evaluation.json.

    Args:
        subject: environment and policies.
        names: policies, of `subject.policies`.
        games: of each match; 0: as many as the environment asks for.
        seed, devices, chunk, say: see `evaluate`.
    """
    rules, spec = subject.env.env.match_rules, subject.env.spec
    assert rules is not None
    games = games or rules.num_games
    matches = [(name, opponent) for name in names for opponent in rules.opponents]
    played = league.play(subject, matches, {}, games, seed, devices, chunk)
    metrics = dict.fromkeys((spec.score, *spec.metrics, "return"))
    return {
        **_head(subject, games, seed),
        "set": {name: subject.settings[name] for name in rules.settings},
        "policies": {},  # curves over the episode: none
        "matches": league.results(played, list(metrics), say),
    }


def play_league(
    wanted: league.League,
    games: int,
    seed: int = 0,
    devices: int = 1,
    chunk: int = 0,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Play all players of a league against each other; return the content of the file of `--against`.

    Args:
        wanted: the league.
        games: of each pair; 0: as many as the environment asks for.
        seed, devices, chunk, say: see `evaluate`.
    """
    games = games or wanted.rules.num_games
    spec = next(iter(wanted.runs.values())).env.spec
    metrics = dict.fromkeys((spec.score, *spec.metrics))  # no returns: reward settings differ between runs
    matches = league.results(wanted.play(games, seed, devices, chunk), list(metrics), say)
    return {
        "format": FORMAT,
        "runs": {name: _head(run, games, seed) for name, run in wanted.runs.items()},
        "games": games,
        "score": spec.score,
        "labels": labels(spec),
        "anchor": wanted.anchor,
        "ratings": wanted.ratings(matches, games),
        "matches": matches,
    }


def _order(subject: EvalPolicy, curves: dict[str, Any]) -> list[str]:
    """Return the metrics, the score first, then that of each task; the length only if episodes differ in it."""
    spec = subject.env.spec
    of_tasks = [name for name in curves if name.startswith(f"{spec.score}/")]
    names = dict.fromkeys([spec.score, *of_tasks, *spec.metrics, "return", "length"])
    return [name for name in names if name in curves and not (name == "length" and spec.fixed_horizon)]


def own_file(subject: EvalPolicy, names: Sequence[str], simulator: str | None = None) -> Path | None:
    """Return the evaluation file of a run, for the usual policies in its own environment; None for anything else.

    Args:
        subject: environment and policies.
        names: policies, of `subject.policies`.
        simulator: where the environment's tasks are played; None: in the environment.
    """
    if subject.run is None or subject.config is None:
        return None
    rules = subject.env.env.match_rules
    own = {**subject.config.env_settings, **(rules.settings if rules else {})}
    file = REAL_FILE.format(simulator) if simulator else FILE
    return subject.run / file if subject.settings == own and set(names) == set(league.usual(subject)) else None


def write(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON. Raises UserError."""
    try:
        write_atomically(path, json.dumps(report, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another file with --json") from None
