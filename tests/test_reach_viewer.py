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

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def record() -> viewing.Record:
    """Episode 3 of the scripted policy, on a mirrored goal: long enough to come near it."""
    env = make("reach", task="mirrored", horizon=60)
    return records.record(load(None, "reach", dict(env.__dict__)), "scripted", 3, 0)


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


def test_the_page_holds_every_time_step(record, scene):
    page = viewer.ReachViewer().html(record)
    assert not re.search(
        r"(https?:)?//\w|<(link|iframe|script [^>]*src)|@import|fetch\(|XMLHttpRequest|url\((?!#)", page
    )
    data = json.loads(re.search(r"^const data = (.*);$", page, re.MULTILINE)[1])
    assert data["metric"] == "distance" and len(page) < 2**20
    for view, panel in zip(viewer.VIEWS, data["panels"], strict=True):
        still = {style: parts for _, style, parts, _ in panel["still"]}
        flat = np.stack([scene.arm[..., view.across], -scene.arm[..., 2]], axis=-1)
        point = 1000 * np.array([scene.point[view.across], -scene.point[2]])
        np.testing.assert_allclose(still["point"], [point], atol=0.01)
        np.testing.assert_allclose(np.reshape(still["path"], (-1, 2)) / 1000, flat[:, viewer.TOOL], atol=1e-5)
        for k, shapes in enumerate(panel["steps"]):
            parts_by_style = {style: parts for _, style, parts, _ in shapes}
            np.testing.assert_allclose(
                np.reshape(parts_by_style["arm"], (-1, 2)) / 1000, flat[k, : viewer.HAND], atol=1e-5
            )
            assert ("reached" in parts_by_style) == bool(scene.success[k])


def test_pictures(record):
    """One frame per time step, in which the arm moves."""
    arm_viewer = viewer.ReachViewer()
    frames = arm_viewer.frames(record)
    assert len(frames) == 61 and len({frame.size for frame in frames}) == 1
    blue = [int(viewer.ARM[k : k + 2], 16) for k in (1, 3, 5)]
    first, last = (np.abs(np.asarray(frame).astype(int) - blue).max(-1) < 40 for frame in (frames[0], frames[60]))
    assert min(first.sum(), last.sum()) > 500 and (first ^ last).sum() > 200
    assert arm_viewer.picture(record).width > 1500
