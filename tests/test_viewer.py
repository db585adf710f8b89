"""What the coverage viewer draws, against geometry and beliefs computed another way; what all viewers share."""

import dataclasses
import functools
import itertools
import json
import math
import re
import types
from typing import Any

import jax
import matplotlib.text
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs_jax import viewing
from envs_jax.base import make
from envs_jax.coverage import viewer
from envs_jax.viewing import pictures
from jaxrl.evaluation import records
from jaxrl.evaluation.policies import load

pytestmark = pytest.mark.slow

Q, AGENTS = 4, 3


def play(env: str, policy: str, episode: int, **settings) -> viewing.Record:
    return records.record(load(None, env, dict(make(env, **settings).__dict__)), policy, episode, 0)


@functools.cache
def mission() -> viewing.Record:
    return play("coverage", "random", 2, q=Q, budget=4, num_agents=AGENTS, communication_range=15.0)


@pytest.fixture(scope="module")
def record() -> viewing.Record:
    return mission()


@pytest.fixture(scope="module")
def scene(record) -> viewer.Scene:
    return viewer.scene(record)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7).flatmap(lambda n: st.lists(st.booleans(), min_size=n * n, max_size=n * n)))
def test_borders_are_the_edges_of_the_region(cells):
    side = math.isqrt(len(cells))
    truth = np.array(cells).reshape(side, side)
    borders = viewer.borders(truth)
    unit_edges = set()
    for (x0, y0), (x1, y1) in borders:
        assert (x0 == x1) != (y0 == y1)
        length = int(abs(x1 - x0) + abs(y1 - y0))
        for i in range(length):
            low = (min(x0, x1) + (i if y0 == y1 else 0), min(y0, y1) + (i if x0 == x1 else 0))
            unit_edges.add((*low, "h" if y0 == y1 else "v"))
    expected = set()

    def inside(x: Any, y: Any) -> Any:
        return 0 <= x < side and 0 <= y < side and bool(truth[x, y])

    for x in range(side + 1):
        for y in range(side + 1):
            if inside(x - 1, y) != inside(x, y):
                expected.add((x, y, "v"))
            if inside(x, y - 1) != inside(x, y):
                expected.add((x, y, "h"))
    assert unit_edges == expected


def test_geometry_in_metres(record, scene):
    cell = 10 * math.tan(math.pi / 6) / Q
    assert scene.side == pytest.approx(math.floor(50 / cell) * cell)
    lattice = np.asarray(record.states.positions)
    np.testing.assert_allclose(scene.positions[..., :2], lattice[..., :2] * 5.0)
    np.testing.assert_allclose(scene.positions[..., 2], (lattice[..., 2] + 1) * 5.0)
    for box, (x, y, z) in zip(scene.boxes.reshape(-1, 4), scene.positions.reshape(-1, 3), strict=True):
        half = z * math.tan(math.pi / 6)  # of what a camera of 60 degrees sees
        expected = np.clip([x - half, y - half, x + half, y + half], 0, scene.side - cell)
        np.testing.assert_allclose(box, expected, atol=1.01 * cell)


def test_belief_and_what_was_never_seen(record, scene):
    """Cells inside any footprint so far are seen; the belief is the sigmoid of the stored log-odds."""
    n = round(scene.side / (10 * math.tan(math.pi / 6) / Q))
    cell = scene.side / n
    centre = (np.arange(n) + 0.5) * cell
    for k in range(record.steps + 1):
        measured = np.zeros((n, n), bool)
        for x0, y0, x1, y1 in scene.boxes[: k + 1].reshape(-1, 4):
            measured |= ((centre > x0) & (centre < x1))[:, None] & ((centre > y0) & (centre < y1))[None]
        np.testing.assert_array_equal(scene.belief[k] > 0, measured)
        stored = np.asarray(record.states.maps.beliefs[k, -1], np.float64)
        p = 1 / (1 + np.exp(-stored / 1350.7805))
        drawn = (scene.belief[k].astype(float) - 1) / 254
        np.testing.assert_allclose(drawn[measured], p[measured], atol=0.5 / 254 + 1e-5)


def test_lost_messages_are_those_of_the_environment():
    env = make("coverage", q=2, num_agents=4, communication_range=100.0, failure_rate=0.5)
    steps = 4
    states = types.SimpleNamespace(
        key=jax.random.split(jax.random.key(9), steps),
        positions=np.ones((steps, 4, 3), np.int32) * np.arange(4, dtype=np.int32)[None, :, None] % 3,
        comm_range=np.full(steps, 100.0, np.float32),
    )
    lost = 0
    heard = viewer._heard(env, states.key, states.positions, states.comm_range)

    @jax.jit
    def draw(key, t, position):
        return env._draw(types.SimpleNamespace(key=key, t=t, comm_range=np.float32(100.0)), position)[0]

    for k in range(steps):
        expected = draw(states.key[k], np.int32(k - 1), states.positions[k])
        np.testing.assert_array_equal(heard[k], expected)
        lost += np.sum(~np.asarray(expected))
    assert lost > 0


def test_failed_uavs_are_marked_where_they_failed():
    record = play("coverage", "random", 3, q=2, budget=5, num_agents=4, loss_rate=0.3)
    present = np.asarray(record.states.team.present)
    assert present[0].all() and not present[-1].all()
    steps = record.env.viewer().drawing(record).panels[0].steps
    for shapes, flying in zip(steps, present, strict=True):
        marks = [shape for shape in shapes if shape.style == "failed"]
        assert (
            len(marks) == (~flying).sum() and sum(shape.style.startswith("agent") for shape in shapes) == flying.sum()
        )


# Pages and figures of every environment


PLAYED = {
    "coverage": mission,
    "snakes_3v3": lambda: play("snakes_3v3", "random", 0, max_steps=5, opponent="2"),
    "reach": lambda: play("reach", "scripted", 0, horizon=8),
}


@pytest.fixture(scope="module", params=PLAYED)
def any_record(request) -> viewing.Record:
    """A few steps of each, with mean curves of policies and of games by hand; the names are as long as they come."""
    env, one = request.param, PLAYED[request.param]()
    means = {name: np.full((one.steps + 1, 2), 0.3) for name in one.curves}
    return dataclasses.replace(
        one,
        title=f"{env}: run ddpg_competition_{env}/0001, checkpoint 123456",
        policy="ig_sequential",
        references={} if env == "snakes_3v3" else {"random": means, "lawnmower_15": means, "ig_sequential": means},
        final_means={"level2": {"sampled": dict.fromkeys(one.curves, 4.5), "random": dict.fromkeys(one.curves, 1.0)}},
    )


def test_charts_of_pages_hold_all_curves(any_record):
    """Of this episode and of other policies, by name, with labels, units and a style; and the limit of success."""
    page = any_record.env.viewer().html(any_record)
    data = json.loads(re.search(r"^const data = (.*);$", page, re.MULTILINE)[1])
    spec = any_record.env.spec
    words = {name: {shape[3] for shape in chart if shape[0] == "text"} for name, chart in data["charts"].items()}
    assert data["labels"] == {name: spec.label(name) for name in words}
    assert all(spec.label(name) in words[name] for name in words)
    others = any_record.references or ["sampled"]
    assert {f"{name} (mean)" for name in others} <= words[data["metric"]]
    assert ("success below 5 cm" in words[data["metric"]]) == (spec.name == "reach")
    shapes = itertools.chain(*data["charts"].values(), *(panel["still"] for panel in data["panels"]))
    moving = itertools.chain(*(step for panel in data["panels"] for step in panel["steps"]))
    styles = {shape[1] for shape in itertools.chain(shapes, moving)}
    assert all(f".drawn .{style} {{" in page for style in styles)


def test_figures_have_a_legend_and_cut_no_label(any_record, monkeypatch):
    """Every text of every figure lies within it; the legend says what colours and signs mean."""
    drawn_labels = []

    def look(figure):
        texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text()]
        boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
        page = figure.bbox
        for words, box in boxes:
            assert box.x0 >= page.x0 - 1 and box.x1 <= page.x1 + 1, (words, box)
            assert box.y0 >= page.y0 - 1 and box.y1 <= page.y1 + 1, (words, box)
        drawn_labels.append([words for words, _ in boxes])
        return image(figure)

    image = pictures.image
    monkeypatch.setattr(pictures, "image", look)
    viewer_ = any_record.env.viewer()
    frames = viewer_.frames(any_record)
    viewer_.picture(any_record)
    legend = {
        "coverage": ["believed of interest", "never seen", "footprint seen from 15 m", "message", "random (mean)"],
        "snakes": ["chosen by a learner", "bean", "died here, paler with time", "random (mean)"],
        "reach": ["path of the tool centre", "success sphere", "success below 5 cm", "random (mean)"],
    }[any_record.env.spec.name]
    for words in drawn_labels:
        assert all(any(sign in text for text in words) for sign in legend)
    assert len(frames) == any_record.steps + 1 == len(drawn_labels) - 1 and len({frame.size for frame in frames}) == 1
