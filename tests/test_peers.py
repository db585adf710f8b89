"""bench.peers: workers in other interpreters, their answers as one table, refusals."""

import json
import math
import sys
import types

import jax
import pytest

from bench.peers import __main__ as command
from bench.peers import installs, learners
from bench.peers.environments import open_environment
from bench.peers.installs import Peer
from bench.peers.tasks import Task, Watch

pytestmark = pytest.mark.bench

FAKE = """
import json, sys
print(json.dumps({"peer": "fake", "packages": {"fake": "1.0"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "open" in request and request["copies"] > 2:
        found = {"skipped": "one copy at a time"}
    elif "open" in request:
        found = {"agents": 3, "compile_seconds": 2.0, "bytes_per_copy": 40.0}
    elif "sample" in request:
        found = {"env_steps": 100, "cpu": 0.5, "wall": 1.0}
    elif request["learn"] == "td3":
        sys.exit("no such file")
    else:
        found = {"scores": [], "env_steps_to_score": 50, "updates_per_second": 7.0,
                 "cpu_to_score": 3.0 * request["seed"], "compile_seconds": 1.0}
    print(json.dumps(found), flush=True)
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A peer whose interpreter ignores what it shall run, and answers by itself."""
    (tmp_path / "fake.py").write_text(FAKE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/fake.py"\n')
    python.chmod(0o755)
    peer = Peer(("fake==1.0",), ("game", "board"), ("sac", "td3"), note="a remark")
    monkeypatch.setattr(installs, "PEERS", {"fake": peer})
    return ["--python", f"fake={python}", "--core", "-1", "--out", str(tmp_path / "out.json")]


def test_environments_of_a_worker(fake, tmp_path, capsys):
    """100 steps in half a CPU second are 200 per second; three agents make 600."""
    assert command.main(["environments", "--num_envs", "1,64", "--rounds", "2", *fake]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[2] == "| fake | game | 200 | - | 600 | 40 | 2 |"
    assert table[-3].endswith(" (-: one copy at a time):") and table[-1] == "- fake: fake 1.0, a remark"
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["peers"]["fake"]["packages"] == {"fake": "1.0"}
    row = data["rows"][0]
    assert (row["rate"], row["wall_rate"], row["samples"]) == (200.0, 100.0, [0.005, 0.005])


def test_learners_of_a_worker(fake, tmp_path, capsys):
    """Medians over seeds; a process that ends leaves a row that says why."""
    assert command.main(["learners", "--algos", "sac,td3", "--seeds", "3", *fake]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| sac | fake | 7 | 6 (3, 9) | 1 | 50 | 3 of 3 |"
    assert lines[3] == "| td3 | fake | the process ended with 1: no such file |  |  |  |  |"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("environments --peers brx", "unknown peer 'brx'"),
        ("--make brx", "unknown peer 'brx'"),
        ("environments --python brx=x", "unknown peer 'brx'"),
        ("learners --peers brax", "brax has no virtual environment: make it with python -m bench.peers --make brax"),
        ("learners --python brax=nowhere", "brax=nowhere is neither an interpreter nor a virtual environment"),
        ("learners --algos dqn", "there is no dqn"),
        ("environments --only snake-v1", "there is no environment 'snake-v1'"),
        ("learners --only reach", "--only names environments: learners are chosen with --algos"),
        ("learners --peers numpy --python numpy=PYTHON", "numpy has no learners: leave it out of --peers"),
        ("planes", "say what to measure: environments or learners"),
        ("", "say what to measure: environments or learners"),
    ],
)
def test_refusals(monkeypatch, tmp_path, capsys, words, sentence):
    monkeypatch.setattr(installs, "FOLDER", tmp_path)
    assert command.main(words.replace("PYTHON", sys.executable).split()) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and sentence in error


@pytest.mark.parametrize("name", ["tests.helpers.tiny:Corridor", "tests.helpers.tiny:PointMass"])
def test_a_real_environment(name):
    """The compiled loop makes as many steps as it is asked for, from where it stood."""
    game = open_environment("ours", name, 3, 2**30)
    assert (game.copies, game.facts["bytes_per_copy"] > 0) == (3, True)
    sample = game.sample(1e-3)
    assert sample["env_steps"] == 3 * game.steps and sample["cpu"] > 0


def test_updates_per_second_leave_out_the_start(monkeypatch):
    """Scores after 1, 2, 4 and 8 s: the median of the speeds from the second one on."""
    monkeypatch.setattr(learners, "IMPORTS", {"fake": ()})

    def train(algo, task, seed, watch):
        watch.evaluate(0, 0, None)

    rows = [
        {"env_steps": n, "updates": n, "cpu": cpu, "compile": 0.5, "return": -300.0 + n}
        for n, cpu in ((0, 1.0), (10, 2.0), (30, 4.0), (110, 8.0))
    ]
    clock = types.SimpleNamespace(rows=rows, evaluate=lambda *_: False, reached=rows[-1])
    monkeypatch.setattr(learners, "Clock", lambda task, target: clock)
    monkeypatch.setattr(learners, "LEARNERS", {"fake": train})
    result = learners.learn("fake", "sac", 1, quick=False)
    assert result["updates_per_second"] == pytest.approx(15.0)
    assert result["cpu_to_score"] == 8.0 and math.isclose(result["compile_seconds"], 0.5)
    clock.reached = None
    assert learners.learn("fake", "sac", 1, quick=False)["cpu_to_score"] is None


SHORT = Task("Pendulum-v1", 64, num_envs=4, random_steps=16, hidden_size=8, batch_size=8)


@pytest.mark.parametrize(
    ("peer", "algo"),
    [
        pytest.param(peer, algo, marks=pytest.mark.needs(*(name.partition(".")[0] for name in learners.IMPORTS[peer])))
        for peer, algo in (
            ("ours", "sac"),
            ("ours", "td3"),
            ("ours", "ppo"),
            ("brax", "sac"),
            ("sb3", "td3"),
            ("sbx", "sac"),
        )
    ],
)
@pytest.mark.filterwarnings("ignore")  # their own
def test_learners_make_the_steps_of_a_task(peer, algo):
    """They are watched as often as is asked for, and count an update for each step after the random ones.

    Brax halves the steps after the random ones. SB3 is watched before the updates of the last four steps.
    """
    calls = []
    task = SHORT if algo != "ppo" else Task("CartPole-v1", 2048, num_envs=8, hidden_size=8)
    watch = Watch(task.steps // 2, lambda steps, updates, act: calls.append((steps, updates)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as they expect
        learners.LEARNERS[peer](algo, task, 1, watch)
    first = 16 + 24 if peer == "brax" else task.steps // 2
    assert [steps for steps, _ in calls] == [first, task.steps]
    updates = calls[-1][1]
    assert updates == 2 * 16 if algo == "ppo" else 44 <= updates <= 52  # ours: of the 16th step, too


@pytest.mark.slow
def test_a_real_worker(tmp_path):
    """Our reach in a process of its own, through the command."""
    out = tmp_path / "out.json"
    assert command.main(["environments", "--quick", "--peers", "ours", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["num_envs"] for row in rows} == {1, 2}
    assert all(row["rate"] > 0 for row in rows)
