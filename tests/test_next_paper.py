"""The study of the next paper: what is trained and evaluated again, and what is not, without training anything."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bench.studies import next_paper
from jaxrl.common.yaml_files import read_mapping

PLAN = read_mapping(next_paper.PLAN)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that the study runs; they write what the real ones would."""
    calls: list[list[str]] = []

    class Done:
        returncode = 0

    def run(command: list[str], **_: Any) -> Done:
        calls.append(command)
        if "--resume" in command:
            return Done()
        if "--runs" in command:
            (Path(command[command.index("--runs") + 1]) / "ppo_coverage" / "0001").mkdir(parents=True)
            return Done()
        names = command[command.index("--policy") + 1].replace("greedy", "learned").split(",")
        score = {name: {"mean": 0.5, "tail": 0.6, "ci95": 0.1} for name in next_paper.METRICS}
        report = {name: {"policies": dict.fromkeys(names, score)} for name in PLAN["conditions"]}
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"conditions": report}))
        return Done()

    monkeypatch.setattr(next_paper.subprocess, "run", run)
    monkeypatch.setattr(next_paper, "plot", lambda result: Figure((1, 1)))
    monkeypatch.setattr(next_paper, "describe", lambda run: {"parameters": 7, "decision_ms": 1.0})
    entropies = {name: np.linspace(0, 1, 12).reshape(2, 6) for name in PLAN["conditions"]}
    monkeypatch.setattr(next_paper, "read_missions", lambda folder, missions: entropies)
    return calls


def study(tmp_path: Path, methods: str, *flags: str) -> int:
    out = ("--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "result.json"), "--seeds", "2")
    return next_paper.main(["--methods", methods, *out, *flags])


def test_finished_runs_are_neither_trained_nor_evaluated_again(commands: list[list[str]], tmp_path: Path) -> None:
    assert study(tmp_path, "mappo,ippo") == 0
    assert [command[2] for command in commands] == ["jaxrl.train", "jaxrl.evaluate"] * 2
    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result["methods"]) == ["mappo", "ig", "random", "ippo"]
    assert study(tmp_path, "mappo,ippo") == 0 and len(commands) == 4
    assert study(tmp_path, "ippo") == 0  # whose baselines have not been evaluated
    assert [command[2] for command in commands[4:]] == ["jaxrl.evaluate"]
    assert list(json.loads((tmp_path / "result.json").read_text())["methods"]) == ["ippo", "ig", "random"]


def test_methods_are_added_to_a_result(commands: list[list[str]], tmp_path: Path, capfd: Any) -> None:
    assert study(tmp_path, "mappo") == 0
    assert study(tmp_path, "ippo", "--add") == 0
    assert commands[-1][commands[-1].index("--policy") + 1] == "greedy"  # baselines are there
    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result["methods"]) == ["mappo", "ig", "random", "ippo"] and set(result["settings"]) == {"mappo", "ippo"}
    assert study(tmp_path, "coma", "--add", "--missions", "640") == 2
    assert "--add: the result has other training missions" in capfd.readouterr().err
    assert next_paper.main(["--add"]) == 2 and "--out FILE" in capfd.readouterr().err


def test_runs_of_other_settings_are_refused(commands: list[list[str]], tmp_path: Path, capfd: Any) -> None:
    assert study(tmp_path, "mappo") == 0
    for flags in (("--missions", "640"), ("--seeds", "3"), ("--set", "q=9")):
        assert study(tmp_path, "mappo", *flags) == 1
        assert "mappo was trained with other settings: choose another folder" in capfd.readouterr().err
    assert len(commands) == 2


def test_an_interrupted_run_goes_on(commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        returncode = 1

    real = next_paper.subprocess.run
    monkeypatch.setattr(next_paper.subprocess, "run", lambda command, **_: real(command) and Failed())
    assert study(tmp_path, "mappo") == 1
    monkeypatch.setattr(next_paper.subprocess, "run", real)
    assert study(tmp_path, "mappo") == 0
    assert [command[2] for command in commands] == ["jaxrl.train", "jaxrl.train", "jaxrl.evaluate"]
    assert commands[1][3:] == ["--resume", str(tmp_path / "runs" / "mappo" / "ppo_coverage" / "0001")]
    assert json.loads((tmp_path / "runs" / "mappo" / "training.json").read_text())["finished"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("q=abc", "--set: q must be a whole number, not 'abc'"),
        ("nope=1", "--set: unknown setting 'nope'"),
        ("budget=2", "with a delay of 3 steps no message arrives in a mission of 3 steps"),
    ],
)
def test_impossible_changes_are_refused_before_anything_runs(
    change: str, sentence: str, commands: list[list[str]], tmp_path: Path, capfd: Any
) -> None:
    assert study(tmp_path, "mappo", "--set", change) == 2
    assert sentence in capfd.readouterr().err
    assert not commands and not (tmp_path / "runs").exists()


def test_curves_begin_at_no_delay_and_a_team_of_four() -> None:
    score = {name: {"entropy": {"mean": k / 100}} for k, name in enumerate(PLAN["conditions"])}
    result = {"conditions": list(score), "methods": {"risk": {"seconds": 1, "conditions": score}}}
    drop, delay, team = (axis.lines[0] for axis in next_paper.plot(result).axes)
    assert list(drop.get_xdata()) == [0.0, 0.1, 0.3, 0.5] and list(drop.get_ydata()) == [0.0, 0.01, 0.02, 0.03]
    assert list(delay.get_xdata()) == [0, 1, 3, 5] and list(delay.get_ydata()) == [0.0, 0.04, 0.05, 0.06]
    assert list(team.get_xdata()) == [2, 4, 6, 8, 12] and team.get_ydata()[1] == 0.0


def test_missions_are_compared_in_pairs(tmp_path: Path) -> None:
    entropy = {
        ("drop 0.0", 0): [0.3, 0.5],
        ("drop 0.0", 1): [0.4, 0.8],
        ("delay 5", 0): [0.6, 0.8],
        ("delay 5", 1): [0.6, 0.4],
        ("team 12", 0): [0.1, 0.1],
        ("team 12", 1): [0.1, 0.1],
    }
    lines = ["condition,policy,seed,episode,entropy"]
    for (condition, seed), values in entropy.items():
        for episode, value in reversed(list(enumerate(values))):
            lines += [f"{condition},greedy,{seed},{episode},{value}", f"{condition},ig,{seed},{episode},9"]
    (tmp_path / "conditions_2.csv").write_text("\n".join(lines) + "\n")
    entropies = next_paper.read_missions(tmp_path, 2)
    np.testing.assert_array_equal(entropies["drop 0.0"], [[0.3, 0.5], [0.4, 0.8]])
    reference = {"drop 0.0": np.array([[0.2, 0.3], [0.4, 0.8]]), "delay 5": entropies["delay 5"]}
    reference["team 12"] = entropies["team 12"]
    compared = next_paper.compare(entropies, reference)
    difference = compared["differences"]["drop 0.0"]
    assert difference["mean"] == pytest.approx(0.075)  # of 0.05 and 0.1 on the two missions
    assert difference["effect"] == pytest.approx(0.075 / np.std([0.05, 0.1], ddof=1))
    assert compared["differences"]["delay 5"]["effect"] == 0.0
    assert compared["gap"] == pytest.approx(0.6 - 0.5)  # without the other team


def test_ablations_change_one_thing() -> None:
    base = next_paper.method_settings(PLAN, "risk")
    assert base["risk_level"] == 0.3 and base["q"] == 7 and base["memory"] == "gru"
    for name, changes in PLAN["ablations"].items():
        settings = next_paper.method_settings(PLAN, name)
        assert {key for key in settings if settings[key] != base.get(key)} == set(changes) and len(changes) == 1
