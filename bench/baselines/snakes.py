"""The entry of the snakes environments in `bench.baselines`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.baselines import Entry
from bench.reference.snakes import opponents as oracle_opponents
from bench.reference.snakes.oracle import LAYOUTS, REWARDS, Game, Settings
from envs_jax.base import closest
from envs_jax.snakes import opponents, schedule

_SAME = {"height": "height", "width": "width", "snakes": "num_snakes", "beans": "num_beans", "max_steps": "max_step"}
_SAME |= {"teams": "teams", "fixed_respawn": "fixed_respawn"}
_POLICIES: dict[str, int | str] = {
    "random": 0, "level1": 1, "level2": 2, "level3": 3, "level4": 4, "evasion": oracle_opponents.EVASION,
}  # fmt: skip


def _known(name: str, value: str, values: tuple[str, ...]) -> str:
    if value not in values:
        raise ValueError(f"the NumPy baseline has no {name} '{value}': use one of {', '.join(values)}")
    return value


class Match:
    """One game after another between the learner's snakes and scripted ones, on the oracle.

    Args:
        env: settings of the JAX environment.
        rng: of all draws.

    Raises ValueError: a setting that the oracle does not know.
    """

    def __init__(self, env: dict[str, Any], rng: np.random.Generator) -> None:
        self.settings = Settings(**{ours: env[theirs] for theirs, ours in _SAME.items()})
        self.layout = _known("observation", env["observation"], tuple(f"obs{x}" for x in LAYOUTS)).removeprefix("obs")
        self._reward = _known("reward", env["reward"], REWARDS)
        self._rng = rng
        self._sides = env["side"]
        self._exclusive = env["exclusive_beans"]
        self._stale = env["stale_observation_bug"]
        outside = self.settings.teams == 1 or env["opponent"] == schedule.OUTSIDE
        drawn = None if outside else schedule.parse(env["opponent"])
        if drawn is not None and len(drawn.mixtures) > 1:
            raise ValueError(f"the NumPy baseline has no schedules such as '{env['opponent']}': name one mixture")
        self._chances = None if drawn is None else drawn.mixtures[0]
        if self._chances is not None and any(self._chances[len(_POLICIES) :]):
            raise ValueError(f"the NumPy baseline has no opponent '{env['opponent']}': use levels 0 to 4 or evasion")
        self.reset()

    def reset(self) -> None:
        """Start a new game; its side and its opponent are drawn by the settings."""
        self.game = Game(self.settings, self._rng)
        second = {"first": False, "second": True}.get(self._sides, self._rng.random() < 0.5)
        first, other = (1, 0) if second and self.settings.teams == 2 else (0, 1)
        scripted = self._chances is not None
        self.sides = (first,) if scripted or self.settings.teams == 1 else (first, other)
        self._level: int | str | None = None
        if self._chances is not None:
            level = opponents.NAMES[self._rng.choice(len(self._chances), p=self._chances)]
            self._level = level if level == oracle_opponents.EVASION else int(level)

    def act(self, level: int | str) -> np.ndarray:
        """[A] actions of scripted players in the learner's place."""
        return np.concatenate([self._choose(level, side) for side in self.sides])

    def observe(self) -> np.ndarray:
        """[A, D] float32."""
        return np.concatenate([self.game.observe(self.layout, side) for side in self.sides])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, bool]:
        """Step with the learner's actions [A]; return rewards [A] and whether the game is over."""
        side_actions = dict(zip(self.sides, np.split(action, len(self.sides)), strict=True))
        for side in range(self.settings.teams):
            if side not in side_actions:
                assert self._level is not None
                side_actions[side] = self._choose(self._level, side, self._stale)
        _, done = self.game.step(np.concatenate([side_actions[side] for side in sorted(side_actions)]))
        return np.concatenate([self.game.shaped(self._reward, side) for side in self.sides]), done

    def _choose(self, level: int | str, side: int, stale: bool = False) -> np.ndarray:
        return np.array(oracle_opponents.scripted(level, self._exclusive, stale)(self.game, side))


class NumpyGames:
    """One game at a time on the oracle."""

    name = "NumPy"
    notes: Sequence[str] = ()

    def __init__(self, env: dict[str, Any], policy: str, seed: int) -> None:
        if policy not in _POLICIES:
            raise ValueError(f"the NumPy baseline has no policy '{policy}': {closest(policy, _POLICIES)}")
        self._match = Match(env, np.random.default_rng(seed))
        self._level = _POLICIES[policy]

    def reset(self) -> None:
        self._match.reset()

    def act(self) -> np.ndarray:
        """Actions [A]."""
        return self._match.act(self._level)

    def observe(self, action: np.ndarray) -> None:
        """Make observations of the learner's snakes; critics have no other input."""
        self._match.observe()

    def step(self, action: np.ndarray) -> bool:
        """Let scripted opponents choose, move all, make rewards."""
        return self._match.step(action)[1]

    def measure(self) -> Mapping[str, float]:
        teams = self._match.game.totals.reshape(self._match.settings.teams, -1).sum(axis=1)
        side = self._match.sides[0]
        return {"score": float(teams[side])} | ({"opponent_score": float(teams[1 - side])} if len(teams) == 2 else {})


ENTRY = Entry(policy="random", baseline=NumpyGames)
