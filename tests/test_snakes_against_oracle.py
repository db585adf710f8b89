"""Snakes against the NumPy oracle of bench/snakes: any board, crowded or played positions, both sides, all players."""

import functools
import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.snakes import context, jit
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import envs_jax
from bench.parity.snakes import lane, stack
from bench.reference.snakes import oracle
from bench.reference.snakes.opponents import LEVELS, choose
from bench.reference.snakes.oracle import Settings, State
from bench.reference.snakes.segments import from_segments
from envs_jax.snakes import observation, opponents, respawn, reward, rules, segments, spawn, stale_observation, teams
from envs_jax.snakes.board import Board
from envs_jax.snakes.types import PUBLISHED

BOARDS = [  # height, width, snakes, beans, teams
    (10, 20, 6, 5, 2),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            (4, 4, 3, 8, 1), (3, 3, 2, 3, 2), (12, 3, 4, 6, 2), (3, 3, 1, 1, 1), (3, 24, 4, 2, 2), (5, 7, 6, 5, 2),
            (9, 8, 7, 4, 1), (12, 24, 8, 7, 2),
        )
    ),
]  # fmt: skip
LANES = 24
SCRIPTED = (1, 2, 3, 4, 5)  # indices in LEVELS
SHAPED = tuple(name for name in oracle.REWARDS if name != "score")

few = functools.partial(
    settings, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)


# ---------------------------------------------------------------- positions and actions


def crowd(rule: Settings, rng: np.random.Generator, share: float) -> State:
    """Winding snakes that take about a share of the board, with any directions, and some beans."""
    most = max(3, int(share * rule.height * rule.width / rule.num_snakes))
    for _ in range(1000):
        occupied: set[oracle.Cell] = set()
        bodies = []
        for _ in range(rule.num_snakes):
            body = [(int(rng.integers(rule.height)), int(rng.integers(rule.width)))]
            length = int(rng.integers(3, most + 1))
            while len(body) < length and body[0] not in occupied:
                neighbours = {rule.neighbour(body[-1], d) for d in oracle.DIRECTIONS} - occupied - set(body)
                if not neighbours:
                    break
                body.append(sorted(neighbours)[rng.integers(len(neighbours))])
            if len(body) >= 3:
                bodies.append(body)
                occupied.update(body)
        if len(bodies) == rule.num_snakes:
            break
    else:
        return oracle.reset(rule, rng)
    state = State(bodies, rng.integers(4, size=rule.num_snakes).tolist(), [])
    free = oracle.free_cells(state, rule)
    count = min(len(free), int(rng.integers(rule.num_beans + 1)))
    state.beans = [free[k] for k in rng.choice(len(free), count, replace=False)]
    return state


def wishes(rule: Settings, state: State, rng: np.random.Generator, greed: float) -> list[int]:
    """Actions of all snakes: the straight way to a bean, or anything."""
    random = rng.integers(4, size=rule.num_snakes)
    straight = choose(state, rule, range(rule.num_snakes), 1)
    return np.where(rng.random(rule.num_snakes) < greed, straight, random).tolist()


def events(rule: Settings, before: State, resolved: list[int], after: State, outcome: oracle.Outcome) -> Counter[str]:
    """What a step has shown, so that a comparison can tell what it has met."""
    event_counts: Counter[str] = Counter()
    heads = [rule.neighbour(body[0], d) for body, d in zip(before.bodies, resolved, strict=True)]
    event_counts["contested bean"] = sum(heads.count(bean) > 1 for bean in before.beans)
    event_counts["meal"] = outcome.rewards.count(1)
    event_counts["death"] = sum(outcome.hit)
    event_counts["dear death"] = sum(paid < 0 for paid in outcome.rewards)
    event_counts["several deaths"] = sum(outcome.hit) > 1
    tails = {body[-1] for body in before.bodies}
    event_counts["safe tail"] = sum(head in tails and not died for head, died in zip(heads, outcome.hit, strict=True))
    for i, j in itertools.combinations(range(len(heads)), 2):
        event_counts["swapped heads"] += heads[i] == before.bodies[j][0] and heads[j] == before.bodies[i][0]
    for i in np.flatnonzero(outcome.hit):
        if after.bodies[i]:
            around = [rule.neighbour(after.bodies[i][0], d) for d in oracle.DIRECTIONS]
            event_counts["head in the middle"] += set(after.bodies[i][1:]) < set(around)
            event_counts["into the neck"] += after.bodies[i][1] == around[after.directions[i]]
        else:
            event_counts["no room"] += 1
    return event_counts


# ---------------------------------------------------------------- the rules part by part, all in one program


def columns(parts: list[jax.Array]) -> jax.Array:
    """[A, F, B] float32"""
    return jnp.stack([x.astype(jnp.float32) for x in parts], 1)


@functools.cache
def program(case: tuple[int, ...]) -> Any:
    """Observations and choices in a game, its step, and the rewards, for every side."""
    height, width, snakes, beans, count = case
    board, agents = Board(height, width), snakes // count
    builders = {"26": observation.classic}
    if (snakes, beans, count) == (6, 5, 2):
        builders |= {"30": observation.extended_30, "35": observation.extended_35}

    @jit
    def run(game: Any, action: Any, turns: Any, words: Any, level: Any, code: Any, fixed: Any) -> dict[str, Any]:
        turn = functools.partial(teams.half_turn, half=agents)
        sides = [game] if count == 1 else [game, turn(game)]
        direction = rules.resolve_directions(game.direction, action, turns)
        moved, points, hit, _ = rules.move(board, game, direction)
        candidates = (respawn.respawn(board, moved, way) for way in (True, False))
        respawned = jax.tree.map(lambda a, b: jnp.where(fixed, a, b), *candidates)
        after = spawn.refill(board, respawned, words)
        afters = [after] if count == 1 else [after, turn(after)]
        return {
            "seen": {name: [columns(build(board, g, agents)) for g in sides] for name, build in builders.items()},
            "chosen": [  # by the first snakes of each view; whether they exclude each other's beans
                [
                    opponents.act(board, g, slice(0, agents), level, words[0], SCRIPTED, exclusive)
                    for exclusive in (False, True)
                ]
                for g in sides
            ],
            "direction": direction,
            "after": after,
            "kept": (respawned.beans >= 0).sum(0),
            "reward": points,
            "hit": hit,
            "ended": rules.check_end(board, after, 7),
            "paid": {
                name: [
                    reward.shape_rewards(name, g, *(jnp.roll(x, -s * agents, 0)[:agents] for x in (points, hit)), code)
                    for s, g in enumerate(afters)
                ]
                for name in SHAPED
            },
        }

    return run


def as_state(board: Board, game: Any) -> State:
    bodies, directions, beans = segments.to_segments(board, game)
    return State(bodies, directions, beans, int(game.steps) + 1)


def drop_dead_directions(state: State) -> tuple[Any, ...]:
    """A state without the meaningless directions of snakes off the board."""
    directions = [d if body else None for body, d in zip(state.bodies, state.directions, strict=True)]
    return state.bodies, directions, state.step_count


def check_view(rule: Settings, state: State, out: Any, level: int) -> None:
    for side in range(rule.teams):
        for layout, observations in out["seen"].items():
            expected = oracle.observe(state, rule, layout, side)
            np.testing.assert_allclose(observations[side], expected, rtol=1e-6 if layout != "26" else 0)
        for exclusive, chosen in enumerate(out["chosen"][side]):
            if not all(state.bodies):  # the game is over: nobody moves (here, the dead still claim beans in turn)
                continue
            expected = choose(state, rule, rule.team(side), LEVELS[level], exclusive_beans=bool(exclusive))
            assert chosen.tolist() == expected, (LEVELS[level], exclusive)


def check_step(rule: Settings, before: State, action: list[int], out: Any, after: State, code: int) -> Counter[str]:
    resolved = out["direction"].tolist()
    oracle.check_resolved(resolved, action, before.directions)
    outcome = oracle.advance(before, resolved, rule)
    assert drop_dead_directions(after) == drop_dead_directions(outcome.state)
    assert out["kept"] == len(outcome.state.beans)
    assert after.beans[: out["kept"]] == outcome.state.beans
    oracle.check_new_beans(after.beans[out["kept"] :], outcome.state, rule)
    assert out["reward"].tolist() == outcome.rewards
    assert out["hit"].tolist() == outcome.hit
    assert any(out["ended"]) == outcome.done
    for name, paid in out["paid"].items():
        for side in range(rule.teams):
            team = rule.team(side)
            expected = oracle.shaped_rewards(name, after, outcome.rewards, outcome.hit, code, team)
            np.testing.assert_allclose(paid[side], expected, rtol=1e-6, atol=1e-6, err_msg=name)
    return events(rule, before, resolved, after, outcome)


@pytest.mark.parametrize("case", BOARDS, ids=str)
def test_every_part_equals_the_oracle(case: tuple[int, ...]) -> None:
    height, width, snakes, beans, teams = case
    board, met = Board(height, width), Counter[str]()

    @few(max_examples=8)
    @given(
        seed=st.integers(0, 2**31),
        share=st.sampled_from([0.0, 0.4, 0.8, 0.95]),
        greed=st.sampled_from([0.0, 0.5, 0.9]),
        steps=st.integers(1, 6),
        fixed=st.booleans(),
    )
    def compare(seed: int, share: float, greed: float, steps: int, fixed: bool) -> None:
        rng = np.random.default_rng(seed)
        rule = Settings(height, width, snakes, beans, 7, teams, fixed)
        states = [crowd(rule, rng, share) if share else oracle.reset(rule, rng) for _ in range(LANES)]
        game = stack([from_segments(board, s.bodies, s.directions, s.beans, beans) for s in states])
        alive = [True] * LANES
        for _ in range(steps + 1):
            actions = [wishes(rule, state, rng, greed) for state in states]
            level, code = rng.integers(1, 6, LANES), rng.integers(0, 5, LANES)
            turns, words = rng.integers(0, 3, (snakes, LANES)), rng.integers(0, 2**32, (beans, LANES), np.uint32)
            numbers = (np.array(actions).T, turns, words, level, code)
            out = program(case)(
                game, *(jnp.asarray(x.astype(np.int32) if x is not words else x) for x in numbers), fixed
            )
            game, out = out["after"], jax.tree.map(np.asarray, out)
            for i in np.flatnonzero(alive):
                mine = lane(out, i)
                check_view(rule, states[i], mine, level[i])
                alive[i] = all(states[i].bodies)  # where a respawn has failed the game is over
                if alive[i]:
                    after = as_state(board, mine["after"])
                    met.update(check_step(rule, states[i], actions[i], mine, after, int(code[i])))
                    states[i] = after

    compare()
    required = {"meal", "death", "dear death", "safe tail"}
    if snakes > 1:
        required |= {"contested bean", "several deaths", "swapped heads"}
    if snakes > 3:
        required |= {"head in the middle", "into the neck"}
    assert not [event for event in required if not met[event]], met


# ---------------------------------------------------------------- whole environments

MIXTURE = "1:1,2:1,3:1,4:1,evasion:1"
ENVIRONMENTS: list[Any] = [
    pytest.param({"side": "both", "opponent": MIXTURE, "observation": "obs35", "reward": "plus"},
                 marks=pytest.mark.slow),
    {"height": 4, "width": 6, "snakes": 4, "beans": 3, "opponent": MIXTURE, "side": "both", "exclusive_beans": True,
     "fixed_respawn": True, "stale_observation_bug": True, "reward": "v1.1_fixed"},
    {"height": 3, "width": 4, "snakes": 2, "beans": 2, "opponent": "outside", "reward": "score",
     "time_limit": "truncate"},
    {"height": 3, "width": 5, "snakes": 3, "beans": 4, "teams": 1, "reward": "lives"},
    pytest.param({"height": 4, "width": 6, "snakes": 4, "beans": 3, "opponent": MIXTURE, "side": "both",
                  "exclusive_beans": True, "fixed_respawn": True, "reward": "v1.1_fixed"}, marks=pytest.mark.slow),
    pytest.param({"height": 5, "width": 6, "snakes": 4, "beans": 6, "opponent": MIXTURE, "side": "both",
                  "stale_observation_bug": True, "reward": "original"}, marks=pytest.mark.slow),
    pytest.param({"height": 5, "width": 9, "side": "second", "observation": "obs30", "reward": "v1.1",
                  "time_limit": "truncate"}, marks=pytest.mark.slow),
    pytest.param({"height": 6, "width": 8, "snakes": 2, "opponent": "evasion", "side": "both", "reward": "score"},
                 marks=pytest.mark.slow),
]  # fmt: skip


def check_timestep(env: Any, game: oracle.Game, timestep: Any, side: int) -> None:
    sides = range(2) if env.outside else [side]
    layout = env.observation.removeprefix("obs")
    expected = np.concatenate([game.observe(layout, s) for s in sides])
    np.testing.assert_allclose(timestep.observation, expected, rtol=1e-6)
    ours, other = game.totals, np.zeros_like(game.totals)
    mine, theirs = game.settings.team(side), range(0)
    if game.settings.teams == 2:
        theirs = game.settings.team(1 - side)
        ours, other = game.totals[mine], game.totals[theirs]
    cells = env.beans + sum(map(len, game.state.bodies))
    late = game.state.step_count > env.max_steps and all(game.state.bodies) and cells <= env.height * env.width
    truncated = late and env.time_limit == "truncate"
    assert (timestep.terminated, timestep.truncated) == (game.done and not truncated, truncated)
    if timestep.first:
        np.testing.assert_array_equal(timestep.reward, 0)
        return
    if env.reward == "lives":
        paid = game.rewards - game.hit
    else:
        paid = np.concatenate([game.shaped(env.reward, s) for s in sides])
    np.testing.assert_allclose(timestep.reward, paid, rtol=1e-6, atol=1e-6)
    measured = {
        "score": ours.sum(),
        "deaths": game.hit[mine].sum(),
        "meals": (game.rewards[mine] > 0).sum(),
        "opponent_score": other.sum(),
        "score_difference": ours.sum() - other.sum(),
        "win": ours.sum() > other.sum(),
        "draw": ours.sum() == other.sum(),
        "defeat": ours.sum() < other.sum(),
        "opponent_deaths": game.hit[theirs].sum(),
        "opponent_meals": (game.rewards[theirs] > 0).sum(),
    }
    assert {name: float(measured[name]) for name in env.spec.metrics} == timestep.metrics


@pytest.mark.parametrize("setting", ENVIRONMENTS, ids=lambda setting: "-".join(map(str, setting.values())))
def test_games_equal_those_of_the_oracle(setting: dict[str, Any]) -> None:
    env = envs_jax.make("snakes", max_steps=8, **(PUBLISHED | setting))
    batch, now = env.batched(), context(env)
    reset, play = jit(batch.reset), jit(batch.step_without_reset)
    words_of = jit(jax.vmap(lambda state: spawn.step_words(env.snakes, env.beans, state.key, state.game.steps)))
    rule = Settings(env.height, env.width, env.snakes, env.beans, env.max_steps, env.teams, env.fixed_respawn)

    @few(max_examples=3)
    @given(seed=st.integers(0, 2**31), greed=st.sampled_from([0.3, 0.8]))
    def compare(seed: int, greed: float) -> None:
        rng = np.random.default_rng(seed)
        state, timestep = reset(jax.random.split(jax.random.key(seed), LANES), now)
        starts = jax.tree.map(np.asarray, (state.env.game, state.env.plays_second_half, state.env.level))
        sides, levels = np.asarray(starts[1]).astype(int), starts[2]
        games = []
        for i in range(LANES):
            start = as_state(env.board, jax.tree.map(lambda x, i=i: x[i], starts[0]))
            check_start(rule, start)
            games.append(oracle.Game(rule, state=start))
        for step in range(env.max_steps + 1):
            timesteps = jax.tree.map(np.asarray, timestep)
            for i, game in enumerate(games):
                if game.state.step_count == step + 1:  # else it has ended before
                    check_timestep(env, game, jax.tree.map(lambda x, i=i: x[i], timesteps), sides[i])
            intended = [wishes(rule, game.state, rng, greed) for game in games]
            agents = [
                game.settings.team(sides[i]) if env.scripted else range(env.snakes) for i, game in enumerate(games)
            ]
            action = np.array([[w[k] for k in a] for w, a in zip(intended, agents, strict=True)], np.int32)
            digits = np.asarray(spawn.turns(words_of(state.env)[:, env.beans :].T, env.snakes)).T
            state, timestep = play(state, jnp.asarray(action), now)
            after, ghosts_after = jax.tree.map(np.asarray, (state.env.game, state.env.stale))
            for i, game in enumerate(games):
                if game.done:
                    continue
                if env.scripted:
                    others = rule.team(1 - sides[i])
                    stale = game.ghosts if env.stale_observation_bug else None
                    answers = choose(game.state, rule, others, LEVELS[levels[i]], None, env.exclusive_beans, stale)
                    for k, answer in zip(others, answers, strict=True):
                        intended[i][k] = answer
                reached = as_state(env.board, jax.tree.map(lambda x, i=i: x[i], after))
                resolved = [
                    a if a != d ^ 1 else [w for w in range(4) if w != a][digit]
                    for a, d, digit in zip(intended[i], game.state.directions, digits[i], strict=True)
                ]
                outcome = oracle.advance(game.state, resolved, rule)
                game.step(intended[i], resolved, reached.beans[len(outcome.state.beans) :])
                assert drop_dead_directions(game.state) == drop_dead_directions(reached)
                assert game.state.beans == reached.beans
                if env.stale_observation_bug:
                    assert seen_ghosts(env.board, jax.tree.map(lambda x, i=i: x[i], ghosts_after)) == {
                        k: (cells[0], frozenset(cells)) for k, cells in game.ghosts.items()
                    }

    compare()


def seen_ghosts(board: Any, ghosts: Any) -> dict[int, tuple[tuple[int, int], frozenset[tuple[int, int]]]]:
    """Head and cells of each snake that died, by snake."""
    return {
        int(k): (
            (int(ghosts.head[k]) >> 5, int(ghosts.head[k]) & 31),
            frozenset(
                (r, c) for r in range(board.height) for c in range(board.width) if int(ghosts.body[r, k]) >> c & 1
            ),
        )
        for k in np.flatnonzero(ghosts.died)
    }


def test_a_snake_that_eats_as_it_dies_leaves_its_tail_too() -> None:
    bodies = [[(2, 2), (2, 1), (2, 0)], [(2, 4), (2, 5), (2, 6)], [(6, 6), (6, 7), (6, 8)]]
    rule = Settings(10, 20, 3, 1, 50, 1)
    board, resolved = Board(10, 20), [oracle.RIGHT, oracle.LEFT, oracle.LEFT]  # two heads meet on the bean
    before = jax.tree.map(jnp.asarray, from_segments(board, bodies, resolved, [(2, 3)], 1))

    @jit
    def advance(before: Any, direction: Any) -> Any:
        moved, _, hit, ate = rules.move(board, before, direction)
        return stale_observation.update(board, stale_observation.begin(before), before, moved, ate, hit), ate

    ghosts, ate = advance(before, jnp.asarray(resolved))
    outcome = oracle.advance(State(bodies, resolved, [(2, 3)]), resolved, rule)
    assert outcome.hit == [True, True, False] and [bool(x) for x in ate] == [True, False, False]
    assert seen_ghosts(board, jax.tree.map(np.asarray, ghosts)) == {
        0: ((2, 3), frozenset({(2, 3), (2, 2), (2, 1), (2, 0)})),
        1: ((2, 3), frozenset({(2, 3), (2, 4), (2, 5)})),
    }
    assert {k: set(cells) for k, cells in outcome.fallen.items()} == {
        0: {(2, 3), (2, 2), (2, 1), (2, 0)}, 1: {(2, 3), (2, 4), (2, 5)}
    }  # fmt: skip


def check_start(rule: Settings, start: State) -> None:
    """Straight snakes that look ahead, and all the beans that there is room for."""
    for body, direction in zip(start.bodies, start.directions, strict=True):
        assert len(body) == 3
        assert [rule.neighbour(cell, direction) for cell in body[1:]] == body[:2]
    assert sum(map(len, start.bodies)) == len({cell for body in start.bodies for cell in body})
    oracle.check_new_beans(start.beans, State(start.bodies, start.directions, []), rule)
