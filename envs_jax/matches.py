"""Who plays whom where two teams meet, and how a match is scored.

A match is a number of games of one policy against one opponent. The metrics "win", "draw" and "defeat" (0 or 1) of
`EnvSpec.metrics` tell how a game stands; `EnvSpec.score` at the end of games tells by how much.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class MatchRules:
    """How policies of an environment meet opponents.

    Where `outside` is set, the batched environment has `opponent_view(state)`, what the other team sees with a key for
    each game, and its `play` takes that team's actions behind the learner's.

    Attributes:
        game: {setting: value}: what two policies must have been trained with alike to play one another.
        settings: {setting: value}: how matches against scripted opponents are set, where the user names nothing else.
        league: the same for matches that policies play among themselves, too.
        opponents: {baseline: context}: the scripted opponents, and the context in which the other team is theirs.
        outside: the context in which the other team's actions come from outside; None where they cannot.
        baselines: the baselines that a policy is compared with.
        anchor: the baseline whose rating is fixed, and that rating.
        num_games: how many a match has unless the user says.
        sampled: the policy that counts samples its actions, and does not take the most probable one.
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
