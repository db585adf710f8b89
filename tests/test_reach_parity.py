"""`bench.parity.metaworld`: its table, its errors; and a short episode in Meta-World where it is."""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from bench.parity import metaworld as reach_parity
from envs_jax.reach import reward


def invent_recording(episodes: int = 2, steps: int = 10) -> reach_parity.Recording:
    rng = np.random.default_rng(0)
    return reach_parity.Recording(
        policy=np.array(["scripted", "random"]),
        puck=np.full((episodes, 3), 0.1),
        goal=np.full((episodes, 3), 0.2),
        action=rng.uniform(-1, 1, (episodes, steps, 4)).astype(np.float32),
        observation=rng.normal(size=(episodes, steps + 1, 39)),
        tool=rng.normal(size=(episodes, steps + 1, 3)),
        reward=rng.uniform(0, 10, (episodes, steps)),
        success=rng.random((episodes, steps)) < 0.3,
        contact=np.zeros((episodes, steps), bool),
    )


def test_the_table_finds_differences_and_forgives_them_behind_contacts():
    record = invent_recording()
    same = {"observation": record.observation[:, 1:], "reward": record.reward, "success": record.success}
    assert all(row["holds"] and row["most"] == 0 for row in reach_parity.compare(record, same))
    moved = same["observation"].copy()
    moved[1, 6, 2] += 3e-5  # 0.03 mm
    rows = reach_parity.compare(record, same | {"observation": moved})
    assert [row["holds"] for row in rows] == [False, True, True, True, True]
    assert rows[0]["most"] == pytest.approx(0.03) and rows[0]["mean"] == pytest.approx(0.03 / 20)
    contact = record.contact.copy()
    contact[1, 6] = True
    touched = dataclasses.replace(record, contact=contact)
    assert touched.free.sum() == 16
    rows = reach_parity.compare(touched, same | {"observation": moved, "success": ~record.success})
    assert [row["holds"] for row in rows] == [True, True, True, True, False] and rows[4]["most"] == 20
    spoilt = same["reward"].copy()
    spoilt[0, 0] = np.nan
    assert [row["holds"] for row in reach_parity.compare(record, same | {"reward": spoilt})][2:4] == [False, False]


def test_the_bound_of_the_reward_follows_from_that_of_the_hand():
    """Nowhere is the reward steeper, and in one place it is as steep."""
    goal = np.array([[0.1, 0.85, 0.2], [0.0, 0.63, 0.2]])
    span = np.linalg.norm(goal - reach_parity.START, axis=-1)
    far = np.linspace(0.0, 0.7, 200_001)
    paid = [10.0 / (1 + 9 * np.maximum((far - 0.05) / one, 0.0) ** 2) for one in span]
    slope = [np.abs(np.diff(values) / np.diff(far)).max() for values in paid]
    np.testing.assert_allclose(slope, reach_parity.steepest(goal), rtol=2e-3)
    assert np.all(slope <= reach_parity.steepest(goal))
    moved = np.asarray(reward.compute_reward("v2", jnp.float32(0.3), jnp.asarray(goal.T, jnp.float32), None))
    np.testing.assert_allclose(moved, [np.interp(0.3, far, values) for values in paid], rtol=1e-5)  # the same formula


def test_errors_are_sentences(capsys, monkeypatch):
    assert reach_parity.main(["--policies", "scripted,rand"]) == 2
    assert "unknown policy 'rand': did you mean 'random'?" in capsys.readouterr().err
    assert reach_parity.main(["--episodes", "0"]) == 2
    assert "--episodes" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "metaworld", None)
    assert reach_parity.main(["--episodes", "1"]) == 2
    assert "install the extra 'real'" in capsys.readouterr().err


@pytest.mark.needs("metaworld")
@pytest.mark.filterwarnings("ignore")
def test_a_short_episode_in_the_real_simulator():
    record = reach_parity.play(2, ("scripted", "random"), seed=5, steps=30)
    assert not record.contact.any()
    assert all(row["holds"] for row in reach_parity.compare(record, reach_parity.replay(record)))
