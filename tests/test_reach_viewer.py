"""What the reach viewer draws, against the oracle's arm and the environment's own figures."""

import json
import re

import numpy as np
import pytest

from bench.reference.reach import oracle
from envs_jax import viewing
from envs_jax.base import make
from envs_jax.reach import viewer
from jaxrl.evaluation import records
from jaxrl.evaluation.policies import load


@pytest.fixture(scope="module")
def record() -> viewing.Record:
    """Episode 3 of the scripted policy, on a mirrored goal: long enough to come near it."""
    made = make("reach", task="mirrored", horizon=60)
    return records.record(load(None, "reach", dict(made.__dict__)), "scripted", 3, 0)


@pytest.fixture(scope="module")
def scene(record) -> viewer.Scene:
    return viewer.scene(record)


def test_the_arm_is_the_oracles(record, scene):
    q = np.asarray(record.states.q, np.float64)
    frames = oracle.frames(q)
    np.testing.assert_allclose(scene.arm[:, :7], frames.origin[:, :7], atol=1e-6)
    np.testing.assert_allclose(scene.arm[:, viewer.HAND], frames.hand, atol=1e-6)
    np.testing.assert_allclose(scene.arm[:, viewer.TOOL], oracle.tool_centre(q), atol=1e-6)
    np.testing.assert_allclose(scene.opening, oracle.opening(q), atol=2e-6)


def test_the_place_is_the_tasks_and_the_goal_is_the_one_shown(record, scene):
    assert scene.task == "mirrored"
    np.testing.assert_allclose(scene.goal, record.timesteps.observation[0, 0, 36:], atol=1e-7)
    np.testing.assert_allclose(scene.point, scene.goal * [-1, 1, 1], atol=1e-7)
    far = np.linalg.norm(scene.arm[:, viewer.TOOL] - scene.point, axis=1)
    np.testing.assert_allclose(record.curves["distance"], far, atol=2e-6)
    np.testing.assert_array_equal(scene.success[1:], far[1:] <= 0.05)


def test_moments_name_the_first_success(scene):
    words = viewer.step_labels(scene)
    told = [k for k, text in enumerate(words) if text.startswith("first success")]
    assert told == ([int(np.argmax(scene.success))] if scene.success.any() else [])
    assert words[0] == "gripper 100 % open"


def test_the_page_holds_every_time_step(record, scene):
    page = viewer.ReachViewer().html(record)
    assert not re.search(
        r"(https?:)?//\w|<(link|iframe|script [^>]*src)|@import|fetch\(|XMLHttpRequest|url\((?!#)", page
    )
    data = json.loads(re.search(r"^const all = (.*);$", page, re.MULTILINE)[1])
    shown = np.array(data["scene"]["arm"]).reshape(61, 9, 3)
    np.testing.assert_allclose(shown / 1000, scene.arm, atol=5.1e-4)
    assert data["scene"]["success"] == "".join("01"[int(x)] for x in scene.success)
    assert data["player"]["metric"] == "distance"
    for view in viewer.VIEWS:
        place = f'cx="{1000 * scene.point[view.across]:.1f}" cy="{-1000 * scene.point[2]:.1f}"'
        assert place in page


def test_pictures(record, scene):
    """The tool is drawn where the view's scale puts it; one frame per time step."""
    made = viewer.ReachViewer()
    frames = made.frames(record)
    assert len(frames) == 61 and len({frame.size for frame in frames}) == 1
    canvas = viewer._Canvas(record, scene, dpi=160)
    red = [int(viewer.PATH[k : k + 2], 16) for k in (1, 3, 5)]
    for view, axes in zip(viewer.VIEWS, canvas._axes, strict=True):
        ((x, y),) = canvas._pixels(axes, scene.arm[60:, viewer.TOOL][:, [view.across, 2]])
        assert np.abs(np.asarray(frames[60])[round(y / 2), round(x / 2)].astype(int) - red).max() < 60
    assert made.picture(record).width == 1440
