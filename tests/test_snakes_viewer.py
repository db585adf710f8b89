"""What the snakes viewer draws, against the bits of the state, the NumPy oracle and the environment's own figures."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from bench.reference.snakes import oracle
from envs_jax import viewing
from envs_jax.base import make
from envs_jax.snakes import viewer
from jaxrl.evaluation import policies, records
from jaxrl.evaluation.policies import load

pytestmark = pytest.mark.slow

GAMES = {  # name: (settings, policy, episode)
    "second side": ({"height": 4, "width": 5, "snakes": 4, "beans": 2, "side": "second", "opponent": "0:1,1:1",
                     "stale_observation_bug": True}, "level1", 1),
    "outside": ({"height": 5, "width": 6, "opponent": "outside", "side": "both"}, "random", 0),
    "stale observation": ({"height": 5, "width": 6, "snakes": 4, "opponent": "2",
                           "stale_observation_bug": True}, "random", 0),
    "one team": ({"height": 3, "width": 4, "snakes": 3, "beans": 1, "teams": 1}, "random", 0),
}  # fmt: skip


def play(settings: dict, policy: str, episode: int) -> viewing.Record:
    env = make("snakes_1v1", max_steps=30, **settings)
    return records.record(load(None, "snakes_1v1", dict(env.__dict__)), policy, episode, 0)


@pytest.fixture(scope="module", params=GAMES)
def record(request) -> viewing.Record:
    return play(*GAMES[request.param])


@pytest.fixture(scope="module")
def scene(record) -> viewer.Scene:
    return viewer.scene(record)


def test_bodies_and_beans_are_those_of_the_state(record, scene):
    """Bit c of word r of snake i is the cell (r, c); heads, tails and beans are places 32 r + c."""
    game = record.states.game
    for k, bodies in enumerate(scene.bodies):
        for i, body in enumerate(bodies):
            bits = {(r, c) for r, word in enumerate(game.body[k, :, i]) for c in range(32) if word >> c & 1}
            assert set(body) == bits and len(body) == game.length[k, i]
            if body:
                assert [32 * r + c for r, c in (body[0], body[-1])] == [game.head[k, i], game.tail[k, i]]
        assert [32 * r + c for r, c in scene.beans[k]] == [bean for bean in game.beans[k] if bean >= 0]


def test_deaths_and_meals_are_possible_in_the_oracle_and_counted_by_the_environment(record, scene):
    """For some directions of those that died, the oracle kills just them and goes on alike.

    On such small boards, one in ten comes back just where it would have gone: such a death is not drawn.
    """
    env, metrics = record.env, record.timesteps.metrics
    rules = oracle.Settings(env.height, env.width, env.snakes, env.beans, env.max_steps, env.teams)
    counted = metrics["deaths"] + metrics.get("opponent_deaths", 0)
    missed = counted - scene.died.sum(-1)
    assert scene.died.any() and not scene.died[0].any()
    assert missed.min() == 0 and missed.sum() <= 0.15 * counted.sum()
    for k in np.flatnonzero(missed[1:] == 0):
        died, after = scene.died[k + 1], scene.bodies[k + 1]
        state = oracle.State(scene.bodies[k], scene.directions[k].tolist(), scene.beans[k], int(k) + 1)
        choices = [oracle.DIRECTIONS if died[i] else (scene.directions[k + 1, i],) for i in range(env.snakes)]
        outcomes = (oracle.advance(state, way, rules) for way in itertools.product(*choices))
        matching = [outcome for outcome in outcomes if outcome.hit == died.tolist() and outcome.state.bodies == after]
        assert matching, f"no step leads from time step {k} to the next"
        assert scene.ate[k + 1].tolist() == [reward == 1 for reward in matching[0].rewards]
    for side, metric in zip(scene.sides, ("meals", "opponent_meals"), strict=False):
        eaten = scene.ate[:, list(side.snakes)].sum(-1)
        np.testing.assert_array_equal(eaten[missed == 0], metrics[metric][missed == 0])


def test_page_holds_every_body(record, scene):
    page = viewer.SnakesViewer().html(record)
    assert len(page) < 2**18
    assert not re.search(
        r"(https?:)?//\w|<(link|iframe|script [^>]*src)|@import|fetch\(|XMLHttpRequest|url\((?!#)", page
    )
    data = json.loads(re.search(r"^const data = (.*);$", page, re.MULTILINE)[1])
    for k, shapes in enumerate(data["panels"][0]["steps"]):
        parts_by_style = {
            style: [[y - 0.5, x - 0.5] for x, y in parts] for kind, style, parts, _ in shapes if kind == "disc"
        }
        assert parts_by_style["bean"] == [list(cell) for cell in scene.beans[k]]
        bodies = [body for body in scene.bodies[k] if body]
        assert parts_by_style["spine"] == [list(cell) for body in bodies for cell in body[1:]]
        for i, body in enumerate(scene.bodies[k]):
            assert (f"head{i}" in parts_by_style) == bool(body) and (
                not body or parts_by_style[f"head{i}"] == [list(body[0])]
            )
        choices = sum(len(parts) for _, style, parts, _ in shapes if style in ("choice", "back"))
        assert choices == sum(bool(body) and c >= 0 for body, c in zip(scene.bodies[k], scene.chosen[k], strict=True))
    words = [shape[3] for shape in data["charts"]["score"] if shape[0] == "text"]
    assert {line.label for line in scene.lines} <= set(words)


def test_games_of_self_play_are_drawn_against_the_opponents_of_evaluations():
    env = make("snakes_1v1", opponent="self:1,0:1", eval_opponent="4")
    evaluated = load(None, "snakes_1v1", dict(env.__dict__))
    assert policies.with_opponents(evaluated).settings["opponent"] == "4"
    with_opponent = dataclasses.replace(evaluated, named_settings=frozenset({"opponent"}))
    assert policies.with_opponents(with_opponent) is with_opponent  # which is refused in words
