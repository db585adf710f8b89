"""Reward, the reduction of an entropy of the team map by an update, and metrics that do not depend on it.

    relative:  u = sum w(p') (H(p) - H(p')) / sum w(p') H(p),   r = scale u + offset       (shared by all agents)
    absolute:  u = mean over cells of w(p') (H(p) - H(p')),     r = 10 u - 0.17            (reported only)
    region:    u = loss of the metric "entropy",                r = scale u + offset       (ours: knows the true region)

p before and p' after the update; numerator and denominator both use the weight w of the map after the update.
"""

import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.coverage.belief import Storage, Weights, probability
from envs_jax.coverage.maps.fixed_point import real, to_fixed_point, total
from envs_jax.coverage.maps.types import Sums
from envs_jax.coverage.world import SPACING

ABSOLUTE_SCALE = 10.0
ABSOLUTE_OFFSET = -0.17


def relative(before: Array, after: Array, scale: float, offset: float) -> Array:
    """float32[]: the training reward from the sums of w(p') H(p) and w(p') H(p') (int32[2], see `fixed_point`).

    It is `offset` where no entropy is left.
    """
    uncertain = real(before)
    has_entropy = uncertain > 0.0
    share = jnp.where(has_entropy, real(before - after) / jnp.where(has_entropy, uncertain, 1.0), 0.0)
    return scale * share + offset


def region(before: Array, after: Array, interest: Array, scale: float, offset: float) -> Array:
    """float32[]: the reward from the sums of H over class-1 cells before and after (int32[2]), of `interest` cells."""
    return scale * real(before - after) / jnp.maximum(interest, 1).astype(jnp.float32) + offset


def absolute(before: Array, after: Array, n: int, weights: Weights) -> Array:
    """float32[]: the absolute form, on maps of n x n cells."""
    return (ABSOLUTE_SCALE * weights.largest / (n * n)) * real(before - after) + ABSOLUTE_OFFSET


def metrics(sums: Sums, interest: Array, n: int) -> dict[str, Array]:
    """Return metrics float32[] of the team map.

    Args:
        sums: of the team map.
        interest: int32[], number of cells whose true class is 1.
        n: side of the map in cells.

    Returns:
        entropy: mean entropy in bits over class-1 cells, 1 at first (with prior 0.5).
        f1: F1 score of the prediction "class 1 where p > 0.5 + 1e-4"; 0 at first.
        coverage: share of cells observed at least once.
        roi_coverage: share of class-1 cells observed at least once.
    """
    predicted, right, seen, seen_interest = (sums.counts[i].astype(jnp.float32) for i in range(4))
    positive = jnp.maximum(interest, 1).astype(jnp.float32)
    return {
        "entropy": real(sums.interest) / positive,
        "f1": 2.0 * right / jnp.maximum(predicted + interest.astype(jnp.float32), 1.0),
        "coverage": seen / (n * n),
        "roi_coverage": seen_interest / positive,
    }


MISSION_METRICS = {
    "rmse": "RMSE of the team's map",
    "path_length": "path of the team, m",
    "measurements": "measurements of the team",
}
"""Labels of the metrics of a mission that cost a pass over the map, or that training need not know."""


def rmse(storage: Storage, belief: Array, truth: Array) -> Array:
    """float32[]: root mean square error of the probabilities of a stored map [n, n] against the classes bool[n, n].

    Squares are rounded to 5e-7, so that their sum does not depend on its order.
    """
    error = probability(storage.log_odds(belief)) - truth.astype(jnp.float32)
    return jnp.sqrt(real(total(to_fixed_point(error * error).reshape(-1))) / truth.size)


def path_length(before: Array, after: Array, stretch: float) -> Array:
    """float32[], m: path of all agents together from lattice positions int32[A, 3] to the next ones, in straight lines.

    `stretch` is `CoverageConfig.stretch`.
    """
    moves = (after - before).astype(jnp.float32)
    lengths = jnp.sqrt(jnp.sum(moves * moves, axis=-1))
    return jnp.float32(SPACING * stretch) * jnp.sum(lengths)
