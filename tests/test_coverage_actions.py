"""Masks of moves against the oracle, for agents anywhere."""

import functools

import jax
import numpy as np
import pytest

from bench.reference.coverage import oracle
from envs_jax.coverage import actions


@pytest.mark.parametrize("num_actions", [4, 6, 27])
def test_masks_are_those_of_the_oracle(num_actions: int) -> None:
    """Crowded around the agent, so that often no action is left: then all that the boundary allows are open again."""
    rng = np.random.default_rng(0)
    positions = rng.integers(0, (11, 11, 3), (500, 3))
    others = np.clip(positions[:, None] + rng.integers(-1, 2, (500, 12, 3)), 0, (10, 10, 2))
    moved = rng.random((500, 12)) < rng.random((500, 1))
    boundary = jax.jit(actions.boundary_mask, static_argnums=1)(np.int32(positions), num_actions)
    collide = jax.jit(jax.vmap(functools.partial(actions.collision_mask, num_actions=num_actions)))
    final = collide(np.int32(positions), np.int32(others), moved, boundary)
    stuck = 0
    for i, position in enumerate(5 * (positions + [0, 0, 1])):
        expected = oracle.boundary_mask(position, num_actions)
        np.testing.assert_array_equal(boundary[i], expected)
        left = oracle.collision_mask(expected, position, 5 * (others[i, moved[i]] + [0, 0, 1]))
        stuck += not left.any()
        np.testing.assert_array_equal(final[i], left if left.any() else expected)
    assert stuck > 0
