"""The opponent sharing: whose cells and beans are whose, against a search cell by cell, and its moves by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from test_export import draw_body

from bench.parity.snakes import stack
from bench.reference.snakes import oracle
from bench.reference.snakes.segments import from_segments
from envs_jax.snakes import opponents, sharing
from envs_jax.snakes.board import Board

SETTINGS = oracle.CONFIGURATIONS["snakes_1v1"]
BOARD = Board(6, 8)
SHARING = opponents.NAMES.index("sharing")


def draw_states(count):
    """Boards of 6 x 8 cells with two snakes that fill half of them or more."""
    rng = np.random.default_rng(3)
    states = []
    while len(states) < count:
        free = set(SETTINGS.cells())
        bodies = []
        for _ in range(2):
            bodies.append(draw_body(SETTINGS, free, int(rng.integers(12, 19)), rng))
            free -= set(bodies[-1])
        if all(bodies):
            cells = sorted(free)
            beans = [cells[k] for k in rng.choice(len(cells), 3, replace=False)]
            states.append(oracle.State(bodies, [0, 0], beans, 5))
    return states


@functools.partial(jax.jit, static_argnums=1)
def share(game, snakes):
    return sharing.share(BOARD, game, slice(snakes))


def search(state):
    """Moves in which snakes come to beans and behind their own tails, by direction; found cell by cell."""
    bodies = state.bodies
    around = [[SETTINGS.neighbour(body[0], d) for d in range(4)] for body in bodies]
    late = [any(cell in state.beans for cell in cells) for cells in around]
    leaves = {cell: (k + 1 + late[i], i) for i, body in enumerate(bodies) for k, cell in enumerate(body[::-1])}
    taken, fronts = set(), [{body[0]} for body in bodies]
    ways = [[set() for _ in range(4)] for _ in bodies]
    bean = np.full((4, len(state.beans), len(bodies)), sharing.NEVER)
    tail = np.full((4, len(bodies)), sharing.NEVER)
    for k in range(1, sharing.FAR + 1):
        reached = []
        for i, front in enumerate(fronts):
            cells = {SETTINGS.neighbour(cell, d) for cell in front for d in range(4)} - taken
            reached.append({c for c in cells if c not in leaves or leaves[c][0] < k or leaves[c] == (k, i)})
        shortest = {}
        for i, cells in enumerate(reached):
            for cell in cells:
                shortest[cell] = min(shortest.get(cell, 99), len(bodies[i]))
        fronts = [{c for c in cells if shortest[c] == len(bodies[i])} for i, cells in enumerate(reached)]
        taken |= set(shortest)
        for i, d in np.ndindex(len(bodies), 4):
            spread = {SETTINGS.neighbour(cell, e) for cell in ways[i][d] for e in range(4)} if k > 1 else {around[i][d]}
            ways[i][d] = spread & fronts[i]
            for cell in ways[i][d]:
                for b, place in enumerate(state.beans):
                    bean[d, b, i] = min(bean[d, b, i], k if cell == place else sharing.NEVER)
                tail[d, i] = min(tail[d, i], k if leaves.get(cell, (0, -1))[1] == i else sharing.NEVER)
    return bean, tail


def test_cells_belong_to_the_first_or_the_shortest():
    states = draw_states(60)
    games = stack([from_segments(BOARD, s.bodies, [0, 0], s.beans, 3, 0) for s in states])
    found = share(jax.tree.map(jnp.asarray, games), 2)
    beans, tails = np.moveaxis(found.bean, -1, 0), np.moveaxis(found.tail, -1, 0)
    for state, bean, tail in zip(states, beans, tails, strict=True):
        expected = search(state)
        np.testing.assert_array_equal(bean[:, : len(state.beans)], expected[0], err_msg=str(state))
        np.testing.assert_array_equal(tail, expected[1], err_msg=str(state))
    assert (tails < sharing.NEVER).any(1).mean() > 0.2 and (beans < sharing.NEVER).any(1).mean() > 0.2


def test_the_nearest_pairs_of_snakes_and_beans_go_together():
    rng = np.random.default_rng(0)
    for beans, snakes in ((5, 3), (2, 3), (5, 1)):
        moves = rng.integers(1, 8, (beans, snakes, 100))
        moves[rng.random(moves.shape) < 0.4] = sharing.NEVER
        chosen = np.asarray(jax.jit(sharing.assign)(jnp.asarray(moves, jnp.int32)))
        for game in range(100):
            expected = [beans] * snakes
            for b, i in sorted(np.ndindex(beans, snakes), key=lambda pair: moves[*pair, game]):
                if moves[b, i, game] < sharing.NEVER and expected[i] == beans and b not in expected:
                    expected[i] = b
            assert chosen[:, game].tolist() == expected


def act(bodies, beans, snakes=1):
    game = jax.tree.map(jnp.asarray, from_segments(Board(10, 20), bodies, [3] * len(bodies), beans, 5, 0))
    act = jax.jit(lambda game: opponents.act(Board(10, 20), game, slice(snakes), SHARING, jnp.uint32(0), (SHARING,)))
    return act(game).tolist()


def test_moves_by_hand():
    row = [(4, c) for c in range(9, 0, -1)]  # heads right
    assert act([row, [(0, 0), (0, 19), (0, 18)]], [(4, 12)]) == [3]
    assert act([row, [(4, 14), (5, 14), (6, 14)]], [(4, 12)]) != [3]  # the other one is nearer
    mates = [
        [(2, 5), (2, 4), (2, 3)],
        [(6, 5), (6, 4), (6, 3)],
        [(9, 19), (9, 18), (9, 17)],
        [(9, 15), (9, 14), (9, 13)],
    ]
    assert act(mates, [(3, 5), (4, 5)], 2) == [1, 0]  # each has its own
    ring = [(r, 3) for r in range(2, 7)] + [(7, c) for c in range(3, 10)] + [(r, 10) for r in range(7, 1, -1)]
    long = [*ring, *[(1, c) for c in range(10, 3, -1)]]  # 25 cells around, the head below the tail
    assert act([long, [(9, 19), (9, 18), (9, 17)]], [(2, 1)]) == [0]  # after its tail
    assert act([long[:15], [(9, 19), (9, 18), (9, 17)]], [(2, 1)]) == [2]  # to the bean
