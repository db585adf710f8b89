"""Recorded steps of snakes, replayed by the environment.

Boards, actions and random draws are injected; the boards after the step, observations, rewards and the actions of the
scripted players are compared.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import envs_jax
from bench.parity.comparison import Comparison
from bench.parity.records import load
from bench.reference.snakes.segments import from_segments
from envs_jax.snakes import observation, opponents, reward, segments
from envs_jax.snakes.board import Board
from envs_jax.snakes.types import PUBLISHED, State

Configuration = tuple[int, int, int, int, int]  # height, width, snakes, beans, longest game
CONFIGURATIONS: list[Configuration] = [
    (3, 3, 2, 1, 50), (3, 4, 3, 2, 50), (5, 5, 3, 2, 50), (5, 11, 6, 5, 200), (6, 8, 2, 5, 50), (8, 8, 6, 5, 200),
    (10, 20, 5, 5, 200), (10, 20, 6, 5, 200),
]  # fmt: skip
OWN: list[Configuration] = [(3, 4, 3, 2, 50), (6, 8, 2, 5, 50), (10, 20, 6, 5, 200)]  # our own data
SIX = [
    configuration for configuration in CONFIGURATIONS if configuration[2:4] == (6, 5)
]  # boards of the learning agents
LANES = 100  # in a program; all tables of steps have whole hundreds
USED = (1, 2, 3, 4, 5)  # levels of the scripted players
BUILDERS = {"obs26": observation.classic, "obs30": observation.extended_30, "obs35": observation.extended_35}
PAID = {"original": "shaped_orig", "v1.1": "shaped_v11", "plus": "shaped_plus"}  # {reward: its name in the records}
OBSERVATION, REWARD = 1e-6, 1e-5  # relative; divisions and one square root


def stack(games: Sequence[Any]) -> Any:
    """Stack games on a last axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves, -1), *games)


def lane(game: Any, i: int) -> Any:
    """Return one of the games, NumPy."""
    return jax.tree.map(lambda x: np.asarray(x)[..., i], game)


def by_lanes(program: Any, *arguments: Any) -> Any:
    """Call a compiled program on batches of a hundred (NumPy results), so that all tables of steps share it."""
    arguments = jax.tree.map(np.asarray, arguments)
    lanes = {x.shape[-1] for x in jax.tree.leaves(arguments)}.pop()
    assert lanes % LANES == 0
    parts = [program(*jax.tree.map(lambda x: x[..., k : k + LANES], arguments)) for k in range(0, lanes, LANES)]  # noqa: B023
    return jax.tree.map(lambda *x: np.concatenate(x, axis=-1), *parts)


@functools.lru_cache
def read_records(
    configuration: Configuration, source: str = "recorded"
) -> tuple[Board, np.ndarray, Any, dict[str, np.ndarray]]:
    """(board, rows, games before, arrays of these rows) of a configuration. Raises NoRecordError."""
    record = load("snakes_transitions", source)
    names = ("board_h", "board_w", "n_snakes", "n_beans", "max_step")
    rows = np.flatnonzero(np.all([record[k] == v for k, v in zip(names, configuration, strict=True)], axis=0))
    assert len(rows)
    height, width, snakes, beans, _ = configuration
    board = Board(height, width)
    per_step = {k: v[rows] for k, v in record.items() if len(v) == len(record["board_h"])}

    games = [
        from_segments(
            board,
            [_cells(board, per_step["seg_before"][t, i]) for i in range(snakes)],
            per_step["dir_before"][t, :snakes].tolist(),
            _cells(board, per_step["beans_before"][t]),
            beans,
            int(per_step["step_before"][t]) - 1,
        )
        for t in range(len(rows))
    ]
    return board, rows, stack(games), per_step


def flat(board: Board, cells: Any) -> list[int]:
    """Return flat cells of (row, column)."""
    return [r * board.width + c for r, c in cells]


def words_for(drawn: Any, count: int) -> Any:
    """Return uint32 words from which `draws.one_of` draws these numbers below a count."""
    return ((2 * drawn.astype(np.uint64) + 1) * 2**31 // count).astype(np.uint32)


def recorded_words(board: Board, record: dict[str, np.ndarray], snakes: int, beans: int) -> np.ndarray:
    """uint32[K + turns + 1, T]: the random words of a step that lead to the recorded directions and new beans."""
    opposite = record["dir_before"] ^ 1
    digits = np.where(record["action"] == opposite, record["resolved"] - (record["resolved"] >= opposite), 0)
    code = (digits[:, :snakes] * 3 ** np.arange(5, 5 - snakes, -1)).sum(1)
    turns = words_for(code, 3**6)
    words = np.zeros((beans + 2, len(turns)), np.uint32)
    words[beans] = turns
    for t, cells in enumerate(record["beans_after"]):
        occupied = {*record["seg_after"][t].flat, *cells[: record["n_beans_kept"][t]]}
        free = [cell for cell in range(board.cells) if cell not in occupied]
        for k in range(record["n_beans_kept"][t], (cells >= 0).sum()):
            words[k, t] = words_for(np.int64(free.index(cells[k])), len(free))
            free.remove(cells[k])
    return words


class Programs:
    """The programs of one configuration, compiled when they are first called.

    Args:
        configuration: of the board.
        options: of the compiler.
    """

    def __init__(self, configuration: Configuration, options: dict[str, Any] | None = None) -> None:
        height, width, snakes, beans, limit = configuration
        board = Board(height, width)
        half = snakes // 2
        compiled = functools.partial(jax.jit, compiler_options=options)
        word = jnp.zeros(LANES, jnp.uint32)
        no_keys = jax.random.split(jax.random.key(0), LANES)
        settings = {"height": height, "width": width, "snakes": snakes, "beans": beans, "max_steps": limit}
        env: Any = envs_jax.make("snakes", **PUBLISHED, **settings, teams=teams(configuration), opponent="outside")

        def choose(games: Any, level: Any) -> Any:
            return opponents.act(board, games, slice(half, 2 * half), level, word, USED)

        def advance(games: Any, words: Any, action: Any) -> Any:
            before = State(no_keys, games, jnp.zeros(LANES, jnp.int32), jnp.zeros(LANES, bool))
            after, timestep = env._advance(before, words, action)
            return after.game, timestep

        def pay(after: Any, scores: Any, hit: Any, code: Any) -> Any:
            return {name: reward.shape_rewards(name, after, scores, hit, code) for name in PAID}

        self.choose = compiled(choose)
        self.advance = compiled(advance)
        self.pay = compiled(pay)
        self.observe = compiled(lambda games: {name: build(board, games, 3) for name, build in BUILDERS.items()})


@functools.cache
def programs(configuration: Configuration, options: tuple[tuple[str, Any], ...] = ()) -> Programs:
    """Return the `Programs` of a configuration, cached."""
    return Programs(configuration, dict(options) or None)


def teams(configuration: Configuration) -> int:
    """Return the number of teams: one where the number of snakes is odd, else two."""
    return 1 if configuration[2] % 2 else 2


def compare_choices(comparison: Comparison, configuration: Configuration, source: str, programs: Programs) -> None:
    """Compare actions of the scripted players of the second team."""
    _, rows, games, record = read_records(configuration, source)
    half = configuration[2] // 2
    checked = np.zeros_like(record["opp_action"], bool)
    for place, level in enumerate(USED):
        expected = record["opp_action"][:, place, :half].T
        recorded_here = expected >= 0
        chosen = by_lanes(programs.choose, games, np.full(len(rows), level, np.int32))
        comparison.exact(f"choices, {opponents.NAMES[level]}", chosen[recorded_here], expected[recorded_here])
        checked[:, place, :half] = recorded_here.T
    comparison.exact("choices that are recorded", checked, record["opp_action"] >= 0)  # none is left out


def compare_observations(comparison: Comparison, configuration: Configuration, source: str, programs: Programs) -> None:
    """Compare observations of the first team before each step with all beans on the board."""
    _, rows, games, _ = read_records(configuration, source)
    record = load("snakes_transitions", source)
    lanes = np.flatnonzero(np.isin(rows, record["obs_row"]))
    places = np.searchsorted(record["obs_row"], rows[lanes])
    for name, columns in by_lanes(programs.observe, games).items():
        ours = np.stack([np.asarray(x[:, lanes], np.float64) for x in columns], -1).swapaxes(0, 1)
        expected = record[name][places].astype(np.float64)
        if name == "obs26":  # whole numbers
            comparison.exact(name, ours, expected)
        else:
            comparison.close(name, ours, expected, OBSERVATION, np.maximum(np.abs(expected), 1e-30))


def compare_rewards(comparison: Comparison, configuration: Configuration, source: str, programs: Programs) -> None:
    """Compare shaped rewards of the first team."""
    board, _, _, record = read_records(configuration, source)
    after = stack(
        [
            from_segments(
                board,
                [_cells(board, snake) for snake in record["seg_after"][t]],
                record["dir_after"][t].tolist(),
                _cells(board, record["beans_after"][t]),
                5,
            )
            for t in range(len(record["seg_after"]))
        ]
    )
    scores, hit, code = (record[k].T for k in ("reward", "hit", "score_code"))
    valid = record["shaped_valid"] > 0
    paid = by_lanes(programs.pay, after, scores[:3].astype(np.int32), hit[:3] > 0, code)
    for name, key in PAID.items():
        expected = record[key][valid]
        comparison.close(f"reward {name}", paid[name].T[valid], expected, REWARD, np.abs(expected) + 0.1)


def compare_steps(comparison: Comparison, configuration: Configuration, source: str, programs: Programs) -> None:
    """Compare whole steps of the environment with the recorded draws."""
    board, rows, games, record = read_records(configuration, source)
    _, _, snakes, beans, _ = configuration
    words = recorded_words(board, record, snakes, beans)
    action = record["action"][:, :snakes].T.astype(np.int32)
    game, timestep = by_lanes(programs.advance, games, words, action)
    comparison.exact("end", timestep.terminated, record["done"])
    comparison.exact("steps", game.steps + 1, record["step_after"])
    comparison.exact("lengths", game.length.T, record["len_after"][:, :snakes])
    alive = game.length.T > 0
    comparison.exact("directions", game.direction.T[alive], record["dir_after"][:, :snakes][alive])
    for t in range(len(rows)):
        bodies, _, left = segments.to_segments(board, lane(game, t))
        wanted_cells = [*record["seg_after"][t, :snakes], record["beans_after"][t]]
        for body, expected in zip([*bodies, left], wanted_cells, strict=True):
            ours = [*flat(board, body), *[-1] * len(expected)]  # unused places hold -1
            comparison.exact("bodies and beans", ours[: len(expected)], expected)
    first_team = slice(0, snakes // teams(configuration))
    comparison.exact("deaths", timestep.metrics["deaths"], record["hit"][:, first_team].sum(1))
    comparison.exact("meals", timestep.metrics["meals"], (record["reward"][:, first_team] > 0).sum(1))
    if configuration in SIX:  # the next recorded state, where it follows from this one
        follows = np.flatnonzero((np.diff(rows) == 1) & (record["step_before"][1:] == record["step_after"][:-1]))
        same = (record["seg_after"][follows] == record["seg_before"][follows + 1]).all((1, 2))
        same &= (record["beans_after"][follows] == record["beans_before"][follows + 1]).all(1)
        same &= (record["beans_before"][follows + 1] >= 0).all(1)
        table = load("snakes_transitions", source)
        places = np.searchsorted(table["obs_row"], rows[follows[same] + 1])
        ours = timestep.observation[:3, :, follows[same]].transpose(2, 0, 1)
        comparison.exact("observations after steps", ours, table["obs26"][places])


def compare(configuration: Configuration, source: str) -> Comparison:
    """Compare all records of a configuration. Raises NoRecordError."""
    comparison = Comparison()
    compiled = programs(configuration)
    compare_steps(comparison, configuration, source, compiled)
    if configuration[2] in (2, 6):
        compare_choices(comparison, configuration, source, compiled)
    if configuration in SIX:
        compare_observations(comparison, configuration, source, compiled)
        compare_rewards(comparison, configuration, source, compiled)
    return comparison


def _cells(board: Board, places: Any) -> list[tuple[int, int]]:
    """(row, column) of flat cells; unused places hold -1."""
    return [divmod(int(x), board.width) for x in places if x >= 0]
