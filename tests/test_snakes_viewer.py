"""What the snakes viewer draws, against the bits of the state, the NumPy oracle and the environment's own figures."""

import dataclasses
import itertools
import json
import operator
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.reference.snakes import oracle
from envs_jax import viewing
from envs_jax.base import make
from envs_jax.snakes import scene as scenes
from envs_jax.snakes import viewer
from envs_jax.snakes.board import Board
from envs_jax.viewing import pictures
from jaxrl.evaluation import records
from jaxrl.evaluation.policies import load

pytestmark = pytest.mark.long

GAMES = {  # name: (settings, policy, episode)
    "second side": ({"height": 4, "width": 5, "snakes": 4, "beans": 2, "side": "second", "opponent": "0:1,1:1",
                     "stale_observation_bug": True}, "level1", 1),
    "outside": ({"height": 5, "width": 6, "opponent": "outside", "side": "both"}, "random", 0),
    "stale observation": ({"height": 5, "width": 6, "snakes": 4, "opponent": "2",
                           "stale_observation_bug": True}, "random", 0),
    "one team": ({"height": 3, "width": 4, "snakes": 3, "beans": 1, "teams": 1}, "random", 0),
}  # fmt: skip
AT_NIGHT = {"outside", "stale opponents"}


def play(settings: dict, policy: str, episode: int) -> viewing.Record:
    made = make("snakes_1v1", max_steps=30, **settings)
    return records.record(load(None, "snakes_1v1", dict(made.__dict__)), policy, episode, 0)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.long if name in AT_NIGHT else ()) for name in GAMES],
)
def record(request) -> viewing.Record:
    return play(*GAMES[request.param])


@pytest.fixture(scope="module")
def scene(record) -> scenes.Scene:
    return scenes.scene(record)


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
        ways = [oracle.DIRECTIONS if died[i] else (scene.directions[k + 1, i],) for i in range(env.snakes)]
        outcomes = (oracle.advance(state, way, rules) for way in itertools.product(*ways))
        found = [outcome for outcome in outcomes if outcome.hit == died.tolist() and outcome.state.bodies == after]
        assert found, f"no step leads from time step {k} to the next"
        assert scene.ate[k + 1].tolist() == [reward == 1 for reward in found[0].rewards]
    for side, metric in zip(scene.sides, ("meals", "opponent_meals"), strict=False):
        eaten = scene.ate[:, list(side.snakes)].sum(-1)
        np.testing.assert_array_equal(eaten[missed == 0], metrics[metric][missed == 0])


def test_scores_of_the_sides_are_those_that_are_reported(record, scene):
    for side, name in zip(scene.sides, ("score", "opponent_score"), strict=False):
        np.testing.assert_array_equal(side.score, record.curves[name])
    if record.env.teams == 1:
        assert [line.label for line in scene.lines] == ["snake 1", "snake 2", "snake 3"]
        np.testing.assert_array_equal(sum(line.values for line in scene.lines), record.curves["score"])


def test_choices_are_what_the_learners_did(record, scene):
    """A learner's choice is the direction it takes, unless it points straight back; the others have none."""
    learners = {i for side in scene.sides[: 1 if record.env.scripted else 2] for i in side.snakes}
    deaths = record.timesteps.metrics["deaths"] + record.timesteps.metrics.get("opponent_deaths", 0)
    for k in np.flatnonzero(scene.died[1:].sum(-1) == deaths[1:]):
        for i in range(record.env.snakes):
            choice = scene.chosen[k, i]
            assert (choice >= 0) == (i in learners)
            if i in learners and choice != scene.directions[k, i] ^ 1 and not scene.died[k + 1, i]:
                assert choice == scene.directions[k + 1, i]
    assert (scene.chosen[-1] == scenes.NOBODY).all()


def test_sides_and_colours(record, scene):
    n = record.env.snakes
    assert sorted(i for side in scene.sides for i in side.snakes) == list(range(n))
    assert len(set(scene.colours)) == n
    if record.env.teams == 2:
        warmth = [int(colour[1:3], 16) - int(colour[5:7], 16) for colour in scene.colours]  # red less blue
        assert all(warmth[i] < 0 for i in scene.sides[0].snakes) and all(warmth[i] > 0 for i in scene.sides[1].snakes)
        second = bool(record.states.second[0])
        assert scene.sides[0].snakes == tuple(range(n // 2, n) if second else range(n // 2))
    if record.env.scripted:
        level = ("random", "level1", "level2")[int(record.states.level[0])]
        assert [side.player for side in scene.sides] == [record.policy, level]
        assert [side.numbers for side in scene.sides] == ["snakes 3-4", "snakes 1-2"][:: -1 if not second else 1]
    labels = [line.label for line in scene.lines]
    assert len(set(labels)) == len(labels)


def test_page_holds_every_body(record, scene):
    page = viewer.SnakesViewer().html(record)
    assert len(page) < 2**18
    assert not re.search(
        r"(https?:)?//\w|<(link|iframe|script [^>]*src)|@import|fetch\(|XMLHttpRequest|url\((?!#)", page
    )
    data = json.loads(re.search(r"^const data = (.*);$", page, re.MULTILINE)[1])
    for k, shapes in enumerate(data["panels"][0]["steps"]):
        found = {style: [[y - 0.5, x - 0.5] for x, y in parts] for kind, style, parts, _ in shapes if kind == "disc"}
        assert found["bean"] == [list(cell) for cell in scene.beans[k]]
        bodies = [body for body in scene.bodies[k] if body]
        assert found["spine"] == [list(cell) for body in bodies for cell in body[1:]]
        for i, body in enumerate(scene.bodies[k]):
            assert (f"head{i}" in found) == bool(body) and (not body or found[f"head{i}"] == [list(body[0])])
        choices = sum(len(parts) for _, style, parts, _ in shapes if style in ("choice", "back"))
        assert choices == sum(bool(body) and c >= 0 for body, c in zip(scene.bodies[k], scene.chosen[k], strict=True))
    words = [shape[3] for shape in data["charts"]["score"] if shape[0] == "text"]
    assert {line.label for line in scene.lines} <= set(words)


def test_cells_of_a_board_have_the_colours_of_their_snakes(record, scene, monkeypatch):
    """A point beside the middle of each cell, where neither spine nor number is drawn; nobody died lately."""
    still = dataclasses.replace(scene, died=np.zeros_like(scene.died), chosen=np.full_like(scene.chosen, -1))
    monkeypatch.setattr(viewer, "scene", lambda record: still)
    (panel,), styles = (drawing := viewer.SnakesViewer().drawing(record)).panels, drawing.styles
    height, width = scene.board
    for k in (0, record.steps // 2, record.steps):
        drawn = Figure(figsize=(0.4 * width, 0.4 * height), dpi=100)  # 40 pixels a cell
        canvas, axes = FigureCanvasAgg(drawn), drawn.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        for shape in (*panel.still, *panel.steps[k]):
            pictures._draw(axes, shape, styles[shape.style], k, 28.8)
        canvas.draw()
        pixels = np.asarray(pictures.image(drawn)).astype(int)
        wanted = {(r, c): viewer.FIELDS[(r + c) % 2] for r in range(height) for c in range(width)}
        wanted |= dict.fromkeys(scene.beans[k], viewer.BEAN)
        wanted |= {cell: scene.colours[i] for i, body in enumerate(scene.bodies[k]) for cell in body[1:]}
        for (r, c), colour in wanted.items():
            if not any(body and body[0] == (r, c) for body in scene.bodies[k]):
                found = pixels[40 * r + 20, 40 * c + 25]
                assert np.abs(found - [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).max() <= 3, (k, r, c)


def test_a_game_that_ends_early_with_a_snake_that_found_no_room(record):
    """The game cut off behind three steps, the cells of the first snake taken away: every format shows it."""
    cut = operator.itemgetter(slice(4))
    states = jax.tree.map(cut, record.states)
    body, length = states.game.body.copy(), states.game.length.copy()
    body[3, :, 0], length[3, 0] = 0, 0
    states = dataclasses.replace(states, game=dataclasses.replace(states.game, body=body, length=length))
    short = dataclasses.replace(
        record,
        states=states,
        timesteps=jax.tree.map(cut, record.timesteps),
        actions=record.actions[:3],
        curves={name: cut(curve) for name, curve in record.curves.items()},
    )
    shown, made = scenes.scene(short), viewer.SnakesViewer()
    assert shown.bodies[3][0] == [] and all(shown.bodies[3][1:])
    frames = made.frames(short)
    assert len(frames) == 4 and len({frame.size for frame in frames}) == 1
    assert made.picture(short).width > 1500
    assert '"steps":3' in made.html(short)


def test_games_of_self_play_are_drawn_against_the_opponents_of_evaluations():
    made = make("snakes_1v1", opponent="self:1,0:1", eval_opponent="4")
    subject = load(None, "snakes_1v1", dict(made.__dict__))
    assert records.with_opponents(subject).settings["opponent"] == "4"
    asked = dataclasses.replace(subject, given=frozenset({"opponent"}))
    assert records.with_opponents(asked) is asked  # which is refused in words


def test_games_of_a_run_are_drawn_against_opponents_that_see_the_game():
    made = make("snakes_1v1", opponent="2", stale_observation_bug=True)
    subject = load(None, "snakes_1v1", dict(made.__dict__))
    assert records.with_opponents(subject) is subject
    of_run = dataclasses.replace(subject, run=Path("0001"))
    assert records.with_opponents(of_run).settings["stale_observation_bug"] is False


def test_events_in_words(scene):
    ate, died = np.zeros((2, 4, 3), bool)
    ate[1, 0] = died[1, 1] = died[1, 2] = ate[2, 1] = True
    words = scenes.events(dataclasses.replace(scene, bodies=scene.bodies[:4], ate=ate, died=died))
    assert words == ["", "1 eats, 2 and 3 die", "2 eats", ""]


@given(st.integers(3, 6), st.integers(3, 6), st.integers(0, 35), st.lists(st.integers(0, 3), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_strokes_lead_over_the_edge(height, width, start, ways):
    """The parts of a body's lines on the board are as long as its steps, and pass through its cells alone."""
    body = [(start // 6 % height, start % 6 % width)]
    for way in ways:
        body.append(((body[-1][0] + (-1, 1, 0, 0)[way]) % height, (body[-1][1] + (0, 0, -1, 1)[way]) % width))
    lines = viewer.strokes(Board(height, width), body)
    parts = np.array([pair for line in lines for pair in itertools.pairwise(line)])
    clipped = np.clip(parts, 0, (width, height))
    assert np.abs(clipped[:, 1] - clipped[:, 0]).sum() == len(body) - 1  # halves on both sides of the edge
    assert (np.abs(parts[:, 1] - parts[:, 0]).sum(-1) == 1).all()
    ends = {(int(y), int(x)) for line in lines for x, y in line if 0 < x < width and 0 < y < height}
    assert ends == set(body)


def test_cells_apart_are_not_joined():
    lines = viewer.strokes(Board(10, 20), [(0, 0), (1, 0), (9, 0)])
    assert [[tuple(point) for point in line] for line in lines] == [[(0.5, 0.5), (0.5, 1.5)], [(0.4, 9.5), (0.6, 9.5)]]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_families_go_from_dark_to_light(count):
    colours = scenes.family(scenes.COOL, count)
    brightness = [int(colour[3:5], 16) for colour in colours]
    assert len(colours) == count and brightness == sorted(set(brightness))
    assert (colours[0], colours[-1]) == (scenes.COOL[0], scenes.COOL[-1]) or count == 1
