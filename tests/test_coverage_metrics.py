"""Metrics of missions for reports: error of the map, path length and measurements, by hand."""

import csv
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.cases import by_day
from helpers.coverage import begin, make, proceed, wander
from helpers.programs import get_programs

import jaxrl.cli.evaluate
from envs_jax.coverage import reward, terrain

STEP = 1350.7805  # of int16 maps, per unit of log-odds
ROUTE = {"num_agents": 4, "num_actions": 27, "budget": 2, "start": "corners", "mission_metrics": True}


@pytest.mark.parametrize(
    "settings",
    [
        {"belief_dtype": "int16"},
        pytest.param({"belief_dtype": "float32", "prior": 0.3, "terrain": "mixed"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_error_of_the_map(settings: dict[str, Any]) -> None:
    env = make(mission_metrics=True, **settings)
    errors = []
    for state, timestep in wander(env, jax.random.key(8)):
        stored = np.asarray(state.maps.beliefs)[-1].astype(np.float64)
        if env.belief_dtype == "int16":
            odds = np.where(stored == -32768, 0.0, stored / STEP)
        else:
            odds = np.where(stored == -64, np.log(0.3 / 0.7), stored)
        truth = np.asarray(terrain.whole(state.terrain, env.n)).astype(np.float64)
        errors.append(float(timestep.metrics["rmse"]))
        assert errors[-1] == pytest.approx(np.sqrt(np.mean((1 / (1 + np.exp(-odds)) - truth) ** 2)), abs=2e-6)
    assert errors[-1] < errors[0]


def test_an_error_without_a_measurement_is_a_half() -> None:
    env = make()
    belief = np.full((env.n, env.n), -32768, np.int16)
    assert float(reward.rmse(env.storage, belief, np.arange(env.n**2).reshape(belief.shape) % 3 == 0)) == 0.5
    certain = np.where(np.eye(env.n) > 0, np.int16(12441), np.int16(-12441))
    assert float(reward.rmse(env.storage, certain, np.eye(env.n) > 0)) == pytest.approx(0.0, abs=5e-4)


@pytest.mark.parametrize("area", by_day([50.0, 120.0], [120.0]))
def test_paths_and_measurements_of_a_scripted_mission(area: float) -> None:
    """Along x; along x and y; along x and y and down; the last agent stays, for up is outside."""
    env = make(**ROUTE, area=area)
    up, level, down = 0, 9, 18  # the first actions of these layers; in a layer 3 x steps of 3 y steps each
    action = np.array([level + 7, level + 8, down + 8, up + 4], np.int32)
    state, timestep = begin(env, jax.random.key(0))
    paths, counts = [float(timestep.metrics["path_length"])], [float(timestep.metrics["measurements"])]
    for _ in range(env.steps):
        state, timestep = proceed(env, state, action)
        paths.append(float(timestep.metrics["path_length"]))
        counts.append(float(timestep.metrics["measurements"]))
    # after two steps agent 1, from x = 40 m, is at a border and agent 2 in the lowest corner, where moves are cut
    five = 5 * area / 50
    expected = [0, five * (1 + np.sqrt(2) + np.sqrt(3)), five * (1 + np.sqrt(2) + np.sqrt(3)), five * (1 + 1 + 0)]
    np.testing.assert_allclose(paths, expected, rtol=1e-6)
    assert counts == [4, 4, 4, 4]
    assert env.spec.metrics["path_length"] == env.spec.metrics["measurements"] == "sum"


def test_absent_agents_neither_fly_nor_measure() -> None:
    env = make(num_agents=3, loss_rate=0.25, budget=6, mission_metrics=True)
    programs, rng = get_programs(env), np.random.default_rng(0)
    state, timestep = programs.reset(jax.random.key(3), ())
    gone = 0
    for _ in range(env.steps):
        mask = np.asarray(timestep.action_mask)
        action = np.argmax(np.where(mask, rng.random(mask.shape), -1), -1).astype(np.int32)
        state, timestep = programs.step(state, action, ())
        flying = int(np.sum(state.team.present))
        gone += 3 - flying
        assert float(timestep.metrics["path_length"]) == 5 * flying  # six actions: 5 m each
        assert float(timestep.metrics["measurements"]) == flying
    assert gone > 3


def test_nothing_more_is_reported_by_default() -> None:
    assert not set(reward.MISSION_METRICS) & set(make().spec.metrics)


@pytest.mark.slow
def test_reports_show_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conditions, table = tmp_path / "conditions.yaml", tmp_path / "episodes.csv"
    conditions.write_text("plain: {}\nlossy: {failure_rate: 0.5, channel_metrics: true}\n")
    flags = "--env coverage --q 3 --num_agents 2 --budget 3 --policy random --episodes 10 --mission_metrics true"
    assert jaxrl.cli.evaluate.main([*flags.split(), "--conditions", str(conditions), "--csv", str(table)]) == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 20
    for row in rows:
        assert float(row["measurements"]) == 2 * 5 and float(row["path_length"]) == 2 * 4 * 5
        assert 0 < float(row["rmse"]) < 0.6
        assert (row["attempts"] == "") == (row["condition"] == "plain")
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if "random" in line]
    assert "RMSE of the" in output and re.search(r"\nrandom +40\.0 ", output) and " 10.00\n" in output
    assert len(lines) > 4 and "attempts" in output
