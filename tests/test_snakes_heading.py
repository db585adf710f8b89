"""obs_heading, careful masks, the reward duel and the opponent territory, against searches cell by cell and by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from bench.reference.snakes.segments import from_segments
from envs_jax.snakes import obs_full, obs_heading, opponents, reward, rules, territory
from envs_jax.snakes.board import Board

BOARD = Board(6, 8)
BODIES = [
    [(2, 2), (2, 3), (2, 4), (1, 4), (0, 4), (0, 3), (0, 2), (0, 1), (1, 1), (2, 1), (3, 1)],
    [(4, 6), (4, 5), (3, 5), (3, 4)],
    [(5, 1), (5, 2), (5, 3)],
    [(1, 6), (0, 6), (0, 7)],
]
DIRECTIONS = [1, 3, 2, 1]
BEANS = [(3, 6), (5, 7), (4, 2)]
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))
MOST = 200


def game_of(bodies=BODIES, directions=DIRECTIONS, beans=BEANS):
    return jax.tree.map(jnp.asarray, from_segments(BOARD, bodies, directions, beans, 3))


@functools.partial(jax.jit, static_argnums=1)
def columns(game, agents):
    return obs_heading.columns(BOARD, game, agents, 2, MOST), territory.columns(BOARD, game, agents, 2, MOST)


@functools.partial(jax.jit, static_argnums=(1, 2))
def careful(game, agents, length):
    return territory.careful(BOARD, game, agents, obs_full.open_directions(BOARD, game, agents), length)


def around(cell):
    return [((cell[0] + r) % BOARD.height, (cell[1] + c) % BOARD.width) for r, c in STEPS]


def floods(bodies, beans, snake, moves):
    """Room and territory by direction after each of the moves, two lists of four sets for each, found cell by cell."""
    late = [any(cell in beans for cell in around(body[0])) for body in bodies]
    leaves = {cell: len(body) - j + late[i] for i, body in enumerate(bodies) for j, cell in enumerate(body)}
    room, mine = [{cell} for cell in around(bodies[snake][0])], [{cell} for cell in around(bodies[snake][0])]
    others = {body[0] for i, body in enumerate(bodies) if i != snake}
    reached = []
    for k in range(1, moves + 1):

        def grown(cells, k=k):
            return {cell for cell in cells.union(*map(around, cells)) if leaves.get(cell, 0) <= k}

        if k == 1:
            others = grown(others)
            room = [{cell for cell in cells if leaves.get(cell, 0) <= 1} for cells in room]
            mine = [cells - others for cells in room]
        else:
            others = others | (grown(others) - set().union(*mine))
            room = [grown(cells) for cells in room]
            mine = [cells | (grown(cells) - others) for cells in mine]
        reached.append((room, mine))
    return reached


def hundredths(sets, most):
    return np.minimum(np.round(np.array(list(map(len, sets))) * 100 / most), 100).tolist()


def test_territory_is_what_a_snake_reaches_first():
    for beans in (BEANS, [(0, 0), (3, 2), (5, 5)]):
        values = np.asarray(columns(game_of(beans=beans), 2)[1])
        for snake in range(2):
            reached = floods(BODIES, beans, snake, territory.FAR)
            room, near, far, opponents, mates, rest = np.split(values[:, snake], [4, 8, 12, 16, 20])
            assert room.tolist() == hundredths(reached[-1][0], 100)
            assert near.tolist() == hundredths(reached[territory.NEAR - 1][1], 20)
            assert far.tolist() == hundredths(reached[-1][1], 100)
            assert len(set(room.tolist())) > 1 and near.tolist() != far.tolist()
            for flags, others in ((mates, {1 - snake}), (opponents, {2, 3})):
                met = [any(cell in around(BODIES[j][0]) for j in others) for cell in around(BODIES[snake][0])]
                assert flags.tolist() == [100 * x for x in met]
            lead = sum(map(len, BODIES[:2])) - sum(map(len, BODIES[2:]))
            assert rest.tolist() == [100, 2 * lead]


def claim(bodies, beans, snake):
    """The direction of the opponent `territory`: the best of four by what it must prefer, in this order."""
    reached = floods(bodies, beans, snake, 20)

    def rank(d):
        meals = [k for k, (_, mine) in enumerate(reached) if mine[d] & set(beans)]
        if meals and len(reached[-1][1][d]) >= min(20, len(bodies[snake])):
            return 0, meals[0], d
        return 1, -len(reached[-1][1][d]), -len(reached[-1][0][d]), d

    return min((d for d in range(4) if reached[-1][0][d]), key=rank, default=0)


def test_the_opponent_territory_takes_beans_that_it_reaches_first():
    rng = np.random.default_rng(0)
    games, expected = [], []
    for _ in range(60):
        bodies = [body[:: rng.choice([1, -1])] for body in BODIES]
        free = sorted({(r, c) for r in range(6) for c in range(8)} - set().union(*bodies))
        beans = [free[k] for k in rng.choice(len(free), rng.integers(4), replace=False)]
        games.append(from_segments(BOARD, bodies, DIRECTIONS, beans, 3))
        expected.append([claim(bodies, beans, snake) for snake in range(2, 4)])
    game, level = jax.tree.map(lambda *x: jnp.asarray(np.stack(x, -1)), *games), opponents.NAMES.index("territory")
    levels, word = jnp.full(len(games), level), jnp.zeros(len(games), jnp.uint32)
    chosen = jax.jit(lambda game: opponents.act(BOARD, game, slice(2, 4), levels, word, (level,)))(game)
    np.testing.assert_array_equal(np.asarray(chosen).T, expected)
    assert len(np.unique(expected)) == 4


def move_cell(cell, kind):
    return (-cell[0] % 6, cell[1]) if kind == "rows" else (cell[0], -cell[1] % 8)


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_mirrored_games_look_the_same(kind):
    """With the nearest bean to the side, a game and its mirror image differ only in the order of the actions."""
    flip = {"rows": [1, 0, 2, 3], "columns": [0, 1, 3, 2]}[kind]
    bodies = [[move_cell(cell, kind) for cell in body] for body in BODIES]
    beans = [(2, 0), (5, 6), (1, 3)]  # (row, column) differences from both heads without ties and halves of the board
    one = np.asarray(columns(game_of(beans=beans), 2)[0])
    other = game_of(bodies, [flip[d] for d in DIRECTIONS], [move_cell(bean, kind) for bean in beans])
    two = np.asarray(columns(other, 2)[0])
    np.testing.assert_array_equal(two[:4], np.array(flip)[one[:4]])
    half = np.isin(np.abs(one), 100) & np.isin(np.abs(two), 100)  # at half the board both signs mean the same way
    np.testing.assert_array_equal(np.where(half, 0, one)[4:], np.where(half, 0, two)[4:])
    assert (np.abs(one[4:]) % 100 > 0).sum() > 50


def test_turned_games_look_the_same_but_for_the_sides():
    """On a square board a game and its transpose differ only in the order of the actions and in the flag."""
    board = Board(8, 8)
    beans = [(2, 0), (5, 6), (1, 3)]

    def swap(cells: Any) -> Any:
        return [(c, r) for r, c in cells]

    see = jax.jit(lambda game: obs_heading.columns(board, game, 2, 2, MOST))

    def game_of(*game: Any) -> Any:
        return jax.tree.map(jnp.asarray, from_segments(board, *game, 3))

    one = np.asarray(see(game_of(BODIES, DIRECTIONS, beans)))
    two = np.asarray(see(game_of([swap(body) for body in BODIES], [d ^ 2 for d in DIRECTIONS], swap(beans))))
    np.testing.assert_array_equal(two[:4], one[:4] ^ 2)
    assert one[4].tolist() == [100, 0] and two[4].tolist() == [0, 100]
    np.testing.assert_array_equal(one[5:], two[5:])


def test_the_order_of_actions_leads_ahead_back_left_right():
    for direction, ahead in enumerate(([0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 1, 0], [3, 2, 0, 1])):
        r, c = STEPS[direction]
        body = [((3 - k * r) % 6, (3 - k * c) % 8) for k in range(3)]
        game = game_of([body, [(0, 0), (0, 1), (0, 2)]], [direction, 2], [((3 + r) % 6, (3 + c) % 8)])
        order = np.asarray(columns(game, 1)[0])[:4, 0].tolist()
        assert order in (ahead, [*ahead[:2], ahead[3], ahead[2]])  # its nearest bean ahead: either side may be right
        assert np.asarray(columns(game, 1)[0])[5 + obs_full.SIDE * 2 + 3, 0] == 0  # nothing in the cell ahead


def test_a_snake_sees_its_nearest_bean_to_the_right():
    first = 5 + obs_full.PLANES * obs_full.SIDE**2 + 5
    for bean in [(1, 0), (3, 5), (0, 1), (4, 3)]:
        for direction in range(4):
            r, c = STEPS[direction]
            body = [((2 - k * r) % 6, (2 - k * c) % 8) for k in range(3)]
            game = game_of([body, [(5, 5), (5, 6), (5, 7)]], [direction, 2], [bean])
            assert np.asarray(columns(game, 1)[0])[first + 1, 0] >= 0


@pytest.mark.slow
def test_careful_masks_by_hand():
    pocket = [(1, 1), (0, 1), (0, 2), (0, 3), (1, 3), (1, 4), (1, 5)]  # around (1, 2), which its owner's head may enter
    trap = [[(2, 2), (3, 2), (4, 2), (5, 2)], [(4, 7), (4, 6), (4, 5)], [(5, 6), (5, 5), (5, 4)], pocket]
    game = game_of(trap, [0, 3, 3, 1], [(3, 7)])
    assert np.asarray(obs_full.open_directions(BOARD, game, 1))[0].tolist() == [True, False, True, True]
    assert np.asarray(territory.survival(BOARD, game, 1))[:, 0].tolist() == [2, 1, territory.FAR, territory.FAR]
    assert np.asarray(careful(game, 1, 99))[0].tolist() == [False, False, True, True]
    assert np.asarray(careful(game, 1, 4))[0].tolist() == [False, False, False, True]
    free = [[(2, 2), (3, 2), (4, 2)], [(2, 4), (3, 4), (4, 4)], [(5, 6), (4, 6), (3, 6)], [(0, 2), (5, 2), (5, 3)]]
    game = game_of(free, [0, 0, 1, 1], [(4, 0)])
    assert np.asarray(careful(game, 2, 99)).tolist() == [[True, False, True, True], [True, False, False, True]]
    assert np.asarray(careful(game, 2, 3)).tolist() == [[False, False, True, True], [True, False, False, True]]


@pytest.mark.slow
def test_masks_close_nothing_where_all_is_dangerous():
    rng = np.random.default_rng(0)
    env = envs_jax.make("snakes", height=6, width=8, snakes=4, masks=True, careful_masks=3, observation="obs_heading")
    step = jax.jit(env.step)
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    plain = jax.jit(lambda game: obs_full.open_directions(env.board, game, 2))
    closed = 0
    for _ in range(60):
        mask, open_ = np.asarray(timestep.action_mask), np.asarray(plain(state.game))
        assert mask.any(1).all() and (mask <= open_).all()
        closed += (mask < open_).sum()
        action = [rng.choice(np.flatnonzero(row)) for row in mask]
        state, timestep = step(state, jnp.asarray(action, jnp.int32))
    assert closed > 10


def test_a_duel_pays_what_opponents_lose():
    length = jnp.array([5, 3, 8, 4])
    hit = jnp.array([True, False, True, True])
    collisions = np.zeros((4, 4), bool)
    collisions[0, 2] = collisions[2, 0] = True  # head to head: 5 points and 2
    collisions[1, 3] = True  # the last one ran into the second one: 1 point
    collisions[3, 2] = True  # a mate is worth nothing
    assert reward.opponent_losses(jnp.asarray(collisions), hit, length).tolist() == [5, 1, 2, 0]


def test_lost_points_count_by_the_weight():
    """A meal, a death at length 7 in which an opponent lost 2 points, one at length 3, one of only an opponent."""
    points, hit, caused = jnp.array([1, -4, 0, 0]), jnp.array([False, True, True, False]), jnp.array([0, 2, 0, 5])
    assert reward.lives(points, hit, caused, 1.0).tolist() == [1, -3, -1, 5]
    assert reward.lives(points, hit, caused, 2.5).tolist() == [1, -9, -1, 5]


def test_collisions_are_the_cells_that_kill():
    bodies = [
        [(2, 2), (3, 2), (4, 2)],
        [(0, 5), (0, 6), (0, 7)],
        [(2, 4), (3, 4), (4, 4)],
        [(1, 0), (1, 1), (1, 2), (1, 3)],
    ]
    game = game_of(bodies, [0, 2, 0, 2], [(5, 5)])

    @jax.jit
    def collide(direction):
        _, _, hit, ate = rules.move(BOARD, game, direction)
        return rules.collisions(BOARD, game, direction, ate), hit

    actual, hit = collide(np.int32([3, 2, 2, 2]))  # the first and the third meet at (2, 3)
    assert np.argwhere(actual).tolist() == [[0, 2], [2, 0]] and hit.tolist() == [True, False, True, False]
    actual, _ = collide(np.int32([0, 2, 2, 2]))  # the first runs into the last one's body at (1, 2)
    assert np.argwhere(actual).tolist() == [[3, 0]]


@pytest.mark.slow
def test_a_game_pays_its_duels():
    """Apart from its score and deaths, a team gets the points that the other team loses by deaths in the same step."""
    env = envs_jax.make("snakes", reward="duel", opponent="1", max_steps=100)

    def one(key):
        def step(state, k):
            action = jax.random.randint(jax.random.fold_in(key, k), (3,), 0, 4, jnp.int32)
            state, timestep = env.step(state, action)
            return state, (timestep.reward.sum(), timestep.metrics)

        return jax.lax.scan(step, env.reset(key)[0], jnp.arange(100))[1]

    paid, metrics = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 8))
    scores, other, meals = (np.asarray(metrics[name]) for name in ("score", "opponent_score", "opponent_meals"))
    more = np.asarray(paid) - np.diff(scores, prepend=0) + np.asarray(metrics["deaths"])
    lost = meals - np.diff(other, prepend=0)
    assert (more >= 0).all() and (more <= lost).all() and more.max() > 0 and (more == np.round(more)).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"snakes": 5, "teams": 1, "reward": "duel"}, "are for 2 teams"),
        ({"snakes": 5, "teams": 1, "careful_masks": 5, "masks": True}, "are for 2 teams"),
        ({"careful_masks": 5, "masks": False}, "add masks true"),
        ({"loss_weight": 2.0, "reward": "score"}, "is for the rewards lives and duel"),
    ],
)
def test_settings_without_effect_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        envs_jax.make("snakes", **settings)
