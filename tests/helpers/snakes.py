"""Games of snakes for tests: recorded ones of the original engine, many side by side, and contexts of training."""

import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.snakes import segments
from envs_jax.snakes.board import Board

CONFIGURATIONS = [
    (3, 3, 2, 1, 50),
    (3, 4, 3, 2, 50),
    (5, 5, 3, 2, 50),
    (5, 11, 6, 5, 200),
    (6, 8, 2, 5, 50),
    (8, 8, 6, 5, 200),
    (10, 20, 5, 5, 200),
    (10, 20, 6, 5, 200),
]
OWN = [(3, 4, 3, 2, 50), (6, 8, 2, 5, 50), (10, 20, 6, 5, 200)]  # of our own data
LANES = 100  # of a program; all tables of steps have whole hundreds

# Compiling takes longer than playing here, so the compiler is told not to optimise.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def stack(games):
    """Games side by side on a last axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves, -1), *games)


def lane(game, i):
    return jax.tree.map(lambda x: np.asarray(x)[..., i], game)


def by_lanes(program, *arguments):
    """Results of a compiled program, NumPy, a hundred lanes at a time: all tables of steps share the program."""
    arguments = jax.tree.map(np.asarray, arguments)
    lanes = {x.shape[-1] for x in jax.tree.leaves(arguments)}.pop()
    assert lanes % LANES == 0
    parts = [program(*jax.tree.map(lambda x: x[..., k : k + LANES], arguments)) for k in range(0, lanes, LANES)]  # noqa: B023
    return jax.tree.map(lambda *x: np.concatenate(x, axis=-1), *parts)


@functools.lru_cache
def recorded(configuration, source="recorded"):
    """(board, rows, games before, arrays of these rows) of a recorded configuration, or of one in our own data."""
    record = golden.load("snakes_transitions", source)
    names = ("board_h", "board_w", "n_snakes", "n_beans", "max_step")
    rows = np.flatnonzero(np.all([record[k] == v for k, v in zip(names, configuration, strict=True)], axis=0))
    assert len(rows)
    height, width, snakes, beans, _ = configuration
    board = Board(height, width)
    per_step = {k: v[rows] for k, v in record.items() if len(v) == len(record["board_h"])}

    def cells(flat):
        return [divmod(int(x), width) for x in flat if x >= 0]

    games = [
        segments.from_segments(
            board,
            [cells(per_step["seg_before"][t, i]) for i in range(snakes)],
            per_step["dir_before"][t, :snakes],
            cells(per_step["beans_before"][t]),
            beans,
            int(per_step["step_before"][t]) - 1,
        )
        for t in range(len(rows))
    ]
    return board, rows, stack(games), per_step


def flat(board, cells):
    return [r * board.width + c for r, c in cells]


def context(env, fraction=0.0):
    """The environment's context at a fraction of training."""
    return env.context(type("Progress", (), {"fraction": jnp.float32(fraction)}))
