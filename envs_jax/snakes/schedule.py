"""Schedules of the learner's opponents over training: mixtures of scripted players and when they change.

2                        level 2 always
0:1,2:3                  each episode draws its player: a quarter level 0, three quarters level 2
0@0 1@0.1 2:1,evasion:1@0.5    mixtures, each from a share of training on; the shares rise from 0
linear, exponential, curriculum     the published schedules: level 0 first, level 4 last
curriculum evasion@0.8         the same, until another mixture takes over
self:3,2:1               "self" is played from outside, by snapshots of the learner: see `Snakes.opponent_view`
outside                  no player: the actions of both teams come from outside
"""

import dataclasses
import itertools
import math

import jax.numpy as jnp

from envs_jax.base import Array, closest, short_repr
from envs_jax.snakes.opponents import NAMES

OUTSIDE = "outside"
PLAYERS = (*NAMES, "self")
SELF = PLAYERS.index("self")
PUBLISHED = {  # share of training from which each level plays, zhizhengzhao/snake
    "linear": (0.0, 0.25, 0.5, 0.75, 1.0),
    "exponential": tuple((k / 4) ** (2 / 3) for k in range(5)),
    "curriculum": (0.0, 0.1, 0.3, 0.6, 0.85),
}

_LARGEST = 1e9  # the largest weight or share


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Mixtures over PLAYERS (probabilities) and the share of training from which each holds."""

    shares: tuple[float, ...]
    mixtures: tuple[tuple[float, ...], ...]

    @property
    def used(self) -> tuple[int, ...]:
        """Players that ever play."""
        return tuple(k for k in range(len(PLAYERS)) if any(mixture[k] > 0 for mixture in self.mixtures))

    def at(self, fraction: Array) -> Array:
        """float32[players]: the mixture at a share of training."""
        mixture = jnp.asarray(self.mixtures[0], jnp.float32)
        for share, later in zip(self.shares[1:], self.mixtures[1:], strict=True):
            mixture = jnp.where(fraction >= share, jnp.asarray(later, jnp.float32), mixture)
        return mixture


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= _LARGEST:
        raise ValueError(
            f"snakes: {short_repr(text)} in the opponent {short_repr(whole)} is not a number from 0 to {_LARGEST:g}"
        )
    return value


def _mixture(text: str, whole: str) -> tuple[float, ...]:
    weights = [0.0] * len(PLAYERS)
    for part in text.split(","):
        name, _, weight = part.partition(":")
        if name not in PLAYERS:
            known = (*PLAYERS, *PUBLISHED, OUTSIDE)
            raise ValueError(
                f"snakes: unknown player {short_repr(name)} in the opponent {short_repr(whole)}: {closest(name, known)}"
            )
        weights[PLAYERS.index(name)] += _number(weight, whole) if weight else 1.0
    if not sum(weights) > 0.0:
        raise ValueError(
            f"snakes: all weights of {short_repr(text)} in the opponent {short_repr(whole)} are 0; make one of them "
            f"positive"
        )
    return tuple(weight / sum(weights) for weight in weights)


def parse(text: str) -> Schedule:
    """Parse a schedule, see the module; for "outside" an unused one.

    Raises ValueError: the text does not parse, or its shares of training do not rise from 0 to at most 1.
    """
    if text == OUTSIDE:
        return parse("0")
    name, _, later = text.partition(" ")
    if name in PUBLISHED:
        until = min((_number(part.partition("@")[2] or "0", text) for part in later.split()), default=math.inf)
        levels = " ".join(f"{NAMES[k]}@{share!r}" for k, share in enumerate(PUBLISHED[name]) if k == 0 or share < until)
        return parse(f"{levels} {later}")
    parts = [part.partition("@") for part in text.split()]
    if not parts:
        raise ValueError(f"snakes: the opponent is empty; choose from {', '.join((*PLAYERS, *PUBLISHED, OUTSIDE))}")
    shares = tuple(_number(share, text) if at else 0.0 for _, at, share in parts)
    if shares[0] != 0.0 or shares[-1] > 1.0 or any(a >= b for a, b in itertools.pairwise(shares)):
        raise ValueError(
            f"snakes: the shares of training in the opponent {short_repr(text)} are {short_repr(shares)}; they must "
            "begin with 0, increase from part to part, and not exceed 1"
        )
    return Schedule(shares, tuple(_mixture(mixture, text) for mixture, _, _ in parts))
