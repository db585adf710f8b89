"""Masks of moves by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.coverage import actions


@pytest.mark.parametrize(("num_actions", "open_ones"), [(6, [5]), (4, [2, 3])])
def test_the_last_open_action_of_six_stays_open(num_actions: int, open_ones: list[int]) -> None:
    """In a corner at the highest altitude two neighbours close the moves along both sides, a third one the way down.

    Of four actions none is left then, and all that the boundary allows are open again.
    """
    position = jnp.array([0, 0, 2], jnp.int32)
    earlier = jnp.array([[1, 0, 2], [0, 1, 2], [0, 0, 1]], jnp.int32)

    @jax.jit
    def masks(moved: jax.Array) -> tuple[jax.Array, jax.Array]:
        boundary = actions.boundary_mask(position[None], num_actions)[0]
        return boundary, actions.collision_mask(position, earlier, moved, boundary, num_actions)

    boundary, mask = masks(jnp.ones(3, bool))
    sides = [k for k, move in enumerate(actions.MOVES[num_actions]) if tuple(move[:2]) in ((1, 0), (0, 1))]
    np.testing.assert_array_equal(np.flatnonzero(boundary), sides + [5] * (num_actions == 6))
    np.testing.assert_array_equal(np.flatnonzero(mask), open_ones)
    one = masks(jnp.array([True, False, False]))[1]  # who has not moved yet closes nothing
    lost = [k for k, move in enumerate(actions.MOVES[num_actions]) if tuple(move[:2]) == (1, 0)]
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(boundary) & ~np.asarray(one)), lost)
