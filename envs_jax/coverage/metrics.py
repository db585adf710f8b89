"""Metrics of the team's map, independent of the reward."""

import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.coverage.maps.fixed_point import real
from envs_jax.coverage.maps.types import Sums


def measure(sums: Sums, interest: Array, n: int) -> dict[str, Array]:
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
