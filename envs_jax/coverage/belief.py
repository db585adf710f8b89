"""Belief of a cell: log-odds of class 1, how they are stored, and what is read from them.

    L <- clip(L, -CLIP, CLIP) + ln(m / (1 - m)) - ln(prior / (1 - prior))

where m is 1 - e after a reading "class 1" and e otherwise. The clip precedes the addition, so a stored value may exceed
it until the next update.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.coverage.sensor import EVIDENCE
from envs_jax.stages import on_cpu

P_MIN = 1e-4  # probabilities are clipped to [P_MIN, 1 - P_MIN]
KNOWN = 0.501  # above it a cell counts as class 1; below 1 - KNOWN as class 0; otherwise as unknown
PREDICTED = 0.5 + 1e-4  # above it a cell is predicted as class 1 (contradicting readings leave a tie, which is not)

FIXED_POINT = 1350.7805
"""Steps of int16 log-odds per unit. The evidence of the three altitudes and CLIP are 6207, 1378, 690 and 12441 steps,
with errors below 0.014 steps (1e-5) each, and sums of them stay on the right side of the thresholds KNOWN and
PREDICTED."""


def logit(p: float) -> float:
    """ln(p / (1 - p))."""
    return math.log(p / (1.0 - p))


CLIP = logit(1.0 - P_MIN)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Importance of a cell by its believed class."""

    classes: tuple[float, float]  # class 0, class 1
    unknown: float  # a cell that is neither

    @property
    def largest(self) -> float:
        return max(*self.classes, self.unknown)

    @property
    def relative(self) -> "Weights":
        """The weights in units of the largest."""
        unit = self.largest or 1.0
        return Weights((self.classes[0] / unit, self.classes[1] / unit), self.unknown / unit)

    def pick(self, above: Array, below: Array) -> Array:
        """float32: weight of cells that count as class 1 (`above`), class 0 (`below`) or unknown."""
        zero, one = (jnp.float32(value) for value in self.classes)
        return jnp.where(above, one, jnp.where(below, zero, jnp.float32(self.unknown)))


def entropy(p: Array) -> Array:
    """Entropy in bits of probabilities, clipped to [P_MIN, 1 - P_MIN] first."""
    p = clip_probability(p)
    return -p * jnp.log2(p) - (1.0 - p) * jnp.log2(1.0 - p)


def clip_probability(p: Array) -> Array:
    """Clip to [P_MIN, 1 - P_MIN]."""
    return jnp.clip(p, jnp.float32(P_MIN), jnp.float32(1.0 - P_MIN))


def probability(log_odds: Array) -> Array:
    """1 / (1 + exp(-L))."""
    return 1.0 / (1.0 + jnp.exp(-log_odds))


def entropy_of_log_odds(log_odds: Array) -> Array:
    """`entropy` of the probability with these log-odds."""
    size = jnp.minimum(jnp.abs(log_odds), jnp.float32(CLIP))
    odds = jnp.exp(-size)  # the less likely class has these
    return (jnp.log(1.0 + odds) + size * odds / (1.0 + odds)) * jnp.float32(1.0 / math.log(2.0))


@functools.cache
def _entropy_table(limit: int) -> np.ndarray:
    """float32[limit + 1]: entropy of cells that store 0, 1, ..., limit (or minus that) as int16."""
    p = 1.0 / (1.0 + np.exp(np.minimum(np.arange(limit + 1) / FIXED_POINT, CLIP)))
    return (-p * np.log2(p) - (1.0 - p) * np.log2(1.0 - p)).astype(np.float32)


_ENTROPY_BITS = 27  # the other 5 bits of a float32 in [2^-15, 2) are as in 2^-15; entropies are at least 1.4e-3
_WORD_FLAGS = ("above", "below", "predicted", "seen")  # in the bits above them, see `Storage.word`


def read_word(word: Array) -> tuple[Array, dict[str, Array]]:
    """Entropy float32 and flags bool of cells from `Storage.word`."""
    bits = (word & (2**_ENTROPY_BITS - 1)) | np.float32(2.0**-15).view(np.int32)
    flags = {name: (word >> (_ENTROPY_BITS + i)) & 1 == 1 for i, name in enumerate(_WORD_FLAGS)}
    return jax.lax.bitcast_convert_type(bits, jnp.float32), flags


@functools.cache
def _word_table(storage: "Storage") -> np.ndarray:
    """int32[65536]: words of all cells stored as int16, lowest first."""
    cells = np.arange(-(2**15), 2**15, dtype=np.int16)
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.jit(storage._word)(cells))  # one program, not one for each operation


@dataclasses.dataclass(frozen=True)
class Storage:
    """Representation of log-odds in a map.

    "float32" keeps them as they are. "int16" counts steps of 1 / FIXED_POINT; updates are sums of integers, so that
    contradicting readings cancel exactly. A cell that was never observed holds the value `unseen`, which no update can
    reach for priors from P_MIN to 1 - P_MIN. All constants are in storage units.
    """

    name: str
    prior: float

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.name)

    @property
    def unit(self) -> float:
        """Storage units per unit of log-odds."""
        return FIXED_POINT if self.name == "int16" else 1.0

    def encode(self, log_odds: float) -> Any:
        """Convert a constant to storage units."""
        value = log_odds * self.unit
        return self.dtype.type(round(value) if self.name == "int16" else value)

    @property
    def unseen(self) -> Any:
        return self.dtype.type(-32768 if self.name == "int16" else -64.0)

    @property
    def limit(self) -> Any:
        """Bound of the clip."""
        return self.encode(CLIP)

    @property
    def unbounded(self) -> Any:
        """A bound that clips nothing."""
        return self.dtype.type(32767 if self.name == "int16" else math.inf)

    @property
    def start(self) -> Any:
        """Stored value of the prior."""
        return self.encode(logit(self.prior))

    @property
    def start_probability(self) -> float:
        """Probability of a cell that stores the prior, which int16 rounds."""
        return 1.0 / (1.0 + math.exp(-float(self.start) / self.unit))

    @functools.cached_property
    def gains(self) -> np.ndarray:
        """dtype[2, 3]: the summands of a reading "class 0" and "class 1" at each altitude.

        Never 0, so that it can mark the cells of a footprint: a reading that has no information at this prior adds the
        smallest value that differs from 0.
        """
        offset = logit(self.prior)
        exact = [[self.encode(sign * value - offset) for value in EVIDENCE] for sign in (-1, 1)]
        smallest = self.dtype.type(1 if self.name == "int16" else 1e-30)
        return np.where(np.array(exact) == 0, smallest, np.array(exact))

    def value(self, stored: Array) -> Array:
        """Replace `unseen` by the prior's value."""
        return jnp.where(stored == self.unseen, self.start, stored)

    def clip(self, value: Array, bound: Any = None) -> Array:
        """Clip before an update; a `bound` of `unbounded` does not clip."""
        bound = self.limit if bound is None else bound
        return jnp.maximum(jnp.minimum(value, bound), -bound)

    def fuse(self, value: Array, gain: Array, bound: Any = None) -> Array:
        """Return the values of cells after a reading that adds `gain`, one of `gains`: the update at the top.

        A gain of 0 only clips, a `bound` of `unbounded` does not clip. All map backends fuse by this method.
        """
        return self.clip(value, bound) + gain

    def growth(self, stored: Array, gain: Array, gains: np.ndarray) -> Array:
        """float32: change of the probability of clipped cells by `fuse`; a gain is 0 or one of the two `gains`."""
        odds = jnp.exp(-self.log_odds(self.clip(self.value(stored))))  # class 0 has these
        factors = [jnp.float32(math.exp(-float(one) / self.unit)) for one in gains]
        bound = math.exp(float(self.limit) / self.unit)
        new = jnp.clip(odds * jnp.where(gain == gains[1], factors[1], factors[0]), 1.0 / bound, bound)
        return jnp.where(gain != 0, (odds - new) / ((1.0 + odds) * (1.0 + new)), jnp.float32(0.0))

    def log_odds(self, stored: Array) -> Array:
        """float32 log-odds of stored cells, observed or not."""
        value = self.value(stored).astype(jnp.float32)
        return value if self.unit == 1.0 else value * jnp.float32(1.0 / self.unit)

    def entropy(self, stored: Array) -> Array:
        """float32: `entropy_of_log_odds` of stored cells.

        On CPUs it is read from a table where possible, which takes a third of the time.
        """
        if self.name != "int16" or not on_cpu():
            return entropy_of_log_odds(self.log_odds(stored))
        size = jnp.minimum(jnp.abs(self.value(stored)), self.limit).astype(jnp.int32)
        return jnp.asarray(_entropy_table(int(self.limit))).at[size].get(mode="promise_in_bounds")

    def above(self, stored: Array, p: float) -> Array:
        """bool: cells whose probability exceeds p."""
        bound = logit(p) * self.unit
        return self.value(stored) > self.dtype.type(math.floor(bound) if self.name == "int16" else bound)

    def below(self, stored: Array, p: float) -> Array:
        """bool: cells whose probability is less than p."""
        bound = logit(p) * self.unit
        return self.value(stored) < self.dtype.type(math.ceil(bound) if self.name == "int16" else bound)

    def weight(self, stored: Array, weights: Weights) -> Array:
        """float32: weight of stored cells."""
        return weights.pick(self.above(stored, KNOWN), self.below(stored, 1.0 - KNOWN))

    def word(self, stored: Array) -> Array:
        """int32: entropy and flags of cells in one word, for `read_word`; of int16 it is read from a table."""
        if self.name != "int16":
            return self._word(stored)
        return jnp.asarray(_word_table(self)).at[stored.astype(jnp.int32) + 2**15].get(mode="promise_in_bounds")

    def _word(self, stored: Array) -> Array:
        known = self.above(stored, KNOWN), self.below(stored, 1.0 - KNOWN)
        flags = (*known, self.above(stored, PREDICTED), stored != self.unseen)
        word = jax.lax.bitcast_convert_type(self.entropy(stored), jnp.int32) & (2**_ENTROPY_BITS - 1)
        return functools.reduce(
            jnp.bitwise_or, (flag.astype(jnp.int32) << (_ENTROPY_BITS + i) for i, flag in enumerate(flags)), word
        )
