"""The observation `obs_heading`: the board is turned so that the snake heads up, its nearest bean to the right.

Apart from the lengths of its two sides, a torus looks the same after that, so a network need not learn each situation
in eight forms. Columns, whole hundredths as in `obs_full`:

    order      four: the actions that now lead ahead, back, to the left, to the right, see `EnvSpec.action_order`
    upright    100 if the snake moves along a column of the board, else 0
    the columns of `obs_full` except the direction, with rows and columns in the same unit; the columns of `territory`
"""

import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.batch import constant
from envs_jax.snakes import obs_full, territory
from envs_jax.snakes.board import DOWN, LEFT, RIGHT, Board, counting
from envs_jax.snakes.rules import Game

ACTIONS = 4
_CROP = obs_full.PLANES * obs_full.SIDE**2
_PLACES = _CROP + 9  # after direction, blocked neighbours and length: five columns of each bean and each other head


def size(snakes: int, beans: int) -> int:
    """Return the length of an observation of n snakes and K beans."""
    return 1 + obs_full.size(snakes, beans) + territory.COLUMNS


def columns(board: Board, game: Game, agents: int, teams: int, max_steps: int) -> Array:
    """int8[F, A, ...], F as in `size`; zeros for a snake that could not respawn, except for the order."""
    full_columns = obs_full.columns(board, game, agents, teams, square=True)
    values = jnp.concatenate([full_columns, territory.columns(board, game, agents, teams, max_steps)])
    direction = game.direction[:agents]
    alive = game.length[:agents] > 0
    order = counting(ACTIONS, direction).astype(jnp.int8)

    def where(condition: Array, kind: str, values: Array, order: Array) -> tuple[Array, Array]:
        """Transform where the condition bool[A, ...] holds."""
        source, sign = _transformation(game.head.shape[0], len(game.beans), kind)
        changed = values[source] * constant(sign[:, None], direction.shape[1:])
        permutation = source[_CROP : _CROP + 4] - _CROP
        return jnp.where(condition[None], changed, values), jnp.where(condition[None], order[permutation], order)

    sideways = ((direction == LEFT) | (direction == RIGHT)) & alive
    values, order = where(sideways, "transpose", values, order)
    values, order = where(((direction == DOWN) | (direction == RIGHT)) & alive, "rows", values, order)
    values, order = where(values[_PLACES + 1] < 0, "columns", values, order)
    upright = jnp.where(alive & ~sideways, obs_full.ONE, 0).astype(jnp.int8)
    return jnp.concatenate([order, upright[None], values[:_CROP], values[_CROP + 4 :]])


def _transformation(snakes: int, beans: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the source int[F] and sign int8[F] of each column of `obs_full` and `territory` on another board.

    Its rows and columns are exchanged ("transpose"), or its "rows" or "columns" are in reverse.
    """
    count = obs_full.size(snakes, beans) + territory.COLUMNS
    after = _PLACES + 5 * (beans + snakes - 1)
    source = np.arange(count)
    sign = np.ones(count, np.int8)
    crop = source[:_CROP].reshape(obs_full.PLANES, obs_full.SIDE, obs_full.SIDE)
    changed = {"transpose": crop.swapaxes(1, 2), "rows": crop[:, ::-1], "columns": crop[:, :, ::-1]}[kind]
    source[:_CROP] = changed.flatten()
    permutation = np.array({"transpose": (2, 3, 0, 1), "rows": (1, 0, 2, 3), "columns": (0, 1, 3, 2)}[kind])
    for block in (_CROP, _CROP + 4, *range(after, count - 2, 4)):
        source[block : block + 4] = block + permutation
    row = np.arange(_PLACES, after, 5)
    if kind == "transpose":
        source[row], source[row + 1] = row + 1, row
    else:
        sign[row + (kind == "columns")] = -1
    return source, sign
