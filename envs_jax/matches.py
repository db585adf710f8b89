"""Rules and scoring of matches between two teams.

A match is a number of games of one policy against one opponent. The metrics OUTCOMES of `EnvSpec.metrics`, 0 or 1 and
one of them 1, are the result of a game, `EnvSpec.score` at its end the margin.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

OUTCOMES = ("win", "draw", "defeat")


@dataclasses.dataclass(frozen=True)
class MatchRules:
    """Rules of matches between policies of an environment.

    Where `outside` is set, the batched environment has `opponent_view(state)`, the other team's observation and a key
    for each game, and its `play` takes that team's actions after the learner's.

    Attributes:
        game: {setting: value}: the settings that two policies must share to play each other.
        settings: {setting: value}: defaults of matches against scripted opponents.
        league: the same for leagues, where policies also play each other.
        opponents: {baseline: context}: the scripted opponents, and the context in which the other team is theirs.
        outside: the context in which the other team's actions come from outside; None where they cannot.
        baselines: baselines to compare a policy with.
        anchor: the baseline whose rating is fixed, and that rating.
        num_games: default number of games of a match.
        sampled: policies are scored with sampled actions, not with the most probable one.
    """

    game: Mapping[str, Any]
    settings: Mapping[str, Any]
    league: Mapping[str, Any]
    opponents: Mapping[str, Any]
    outside: Any
    baselines: tuple[str, ...]
    anchor: tuple[str, float]
    num_games: int = 1000
    sampled: bool = False
