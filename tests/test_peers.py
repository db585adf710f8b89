"""bench.peers: workers in other interpreters, their answers as one table, refusals."""

import json
import math
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny import PointMass

from bench.peers import __main__ as command
from bench.peers import environments, installs, learners, libraries
from bench.peers.environments import Measured, Skipped, open_environment
from bench.peers.installs import Peer
from bench.peers.tasks import PENDULUM, Task, Watch
from jaxrl.common.errors import UserError

pytestmark = pytest.mark.long

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


def test_nothing_was_measured(fake, capsys):
    """A call that finds no figure ends with exit code 1 and the first reason."""
    assert command.main(["environments", "--num_envs", "64", *fake]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: nothing was measured: one copy at a time"


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
        ("learners --only reach", "--only names environments: learners are chosen with --algos and --peers"),
        ("planes", "say what to measure: environments or learners"),
        ("", "say what to measure: environments or learners"),
    ],
)
def test_refusals(monkeypatch, tmp_path, capsys, words, sentence):
    monkeypatch.setattr(installs, "FOLDER", tmp_path)
    assert command.main(words.split()) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and sentence in error


def test_make_says_what_pip_says(monkeypatch, tmp_path):
    """Packages come with their versions; a failure is one sentence."""
    calls = []

    def run(words, **_):
        calls.append(words)
        return subprocess.CompletedProcess(words, int("pip" in words), stderr="ERROR: no brax\nmore")

    monkeypatch.setattr(installs, "FOLDER", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UserError, match=r"cannot make .*brax \(ERROR: no brax\)"):
        installs.make("brax")
    assert [words[2] for words in calls] == ["venv", "pip"]
    assert "brax==0.14.2" in calls[1]


@pytest.mark.parametrize("name", ["tests.helpers.tiny:Corridor", "tests.helpers.tiny:PointMass"])
def test_a_real_environment(name):
    """The compiled loop makes as many steps as it is asked for, from where it stood."""
    game = open_environment("ours", name, 3, 2**30)
    assert (game.copies, game.facts["bytes_per_copy"] > 0) == (3, True)
    sample = game.sample(1e-3)
    assert sample["env_steps"] == 3 * game.steps and sample["cpu"] > 0


def test_the_loop_steps():
    """A game that counts its steps and adds up draws: each step has a key of its own."""

    def step(carry, key):
        return carry[0] + 1, carry[1] + jax.random.uniform(key)

    game = environments.compile_game(lambda key: (jnp.int32(0), jnp.float32(0)), step, 1, 1, 2**30)
    game.advance(5)
    count, total = game.advance(7)
    drawn = [
        jax.random.uniform(jax.random.fold_in(jax.random.PRNGKey(n), i)) for n, k in ((1, 5), (2, 7)) for i in range(k)
    ]
    assert int(count) == 12
    np.testing.assert_allclose(total, sum(drawn), rtol=1e-6)


def test_what_is_not_measured():
    with pytest.raises(Skipped, match="one copy at a time"):
        open_environment("numpy", "snakes", 2, 2**30)
    with pytest.raises(Skipped, match="needs about 0 GiB"):
        open_environment("ours", "tests.helpers.tiny:Corridor", 3, 1)


def test_samples_grow_until_they_are_long():
    """Each step takes 1 ms of a clock: 0.7 of 20 ms need at least 14 of them."""
    calls = []

    def advance(steps):
        calls.append(steps)
        end = environments.time.process_time() + steps * 1e-3
        while environments.time.process_time() < end:
            pass

    sample = Measured(advance, copies=4, agents=1).sample(0.02)
    assert calls[0] == 1 and calls[-1] >= 14
    assert sample["env_steps"] == 4 * calls[-1]


def test_clock_stands_still_while_it_scores(monkeypatch):
    """The seconds of scoring do not count, and the score decides when to stop."""

    def slow(name, act):
        end = environments.time.process_time() + 0.2
        while environments.time.process_time() < end:
            pass
        return act

    monkeypatch.setattr(learners, "score_policy", slow)
    clock = learners.Clock(PENDULUM, -200.0)
    monkeypatch.setattr(learners, "EVALUATIONS", 3)
    assert [clock.evaluate(n, n, score) for n, score in enumerate((-300.0, -200.0, -250.0))] == [False, False, True]
    assert [row["return"] for row in clock.rows] == [-300.0, -200.0, -250.0]
    assert clock.reached == clock.rows[1]
    assert clock.rows[2]["cpu"] < 0.1


def test_seconds_of_the_compiler(monkeypatch):
    """Of 5 CPU seconds in 10 s, a compiler that ran for 4 s took 2; then it has all of 3 CPU seconds in 1 s."""
    times = iter([(0.0, 0.0), (5.0, 10.0), (8.0, 11.0), (9.0, 12.0), (9.5, 13.0)])
    monkeypatch.setattr(learners, "_now", lambda: np.array(next(times)))
    monkeypatch.setattr(learners, "score_policy", lambda name, act: 0.0)
    clock = learners.Clock(PENDULUM, -200.0)
    for seconds in (4.0, 1.5):
        clock._listen("/jax/core/compile/backend_compile_duration", seconds)
    clock.evaluate(1, 1, None)
    assert (clock.rows[0]["cpu"], clock.rows[0]["compile"]) == (9.0, 5.0)


def test_score_of_a_constant_policy():
    """Pushing a cart one way ends an episode within ten steps of reward 1; left and right balance longer."""
    pytest.importorskip("gymnasium")

    def always(action):
        return lambda carry, timestep, key: (np.full((len(timestep.observation), 1), action), carry)

    left, right = (learners.score_policy("CartPole-v1", always(action)) for action in (0, 1))
    assert 8 <= left <= 11 and 8 <= right <= 11

    def lean(carry, timestep, key):
        angle = np.asarray(timestep.observation)[:, 0]
        return (angle[:, 2] + angle[:, 3] > 0).astype(int)[:, None], carry

    assert learners.score_policy("CartPole-v1", lean) > 100


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


def test_actions_of_peers_span_the_box():
    """-1, 0 and 1 are the ends and the middle of the environment's own box; what lies outside is clipped."""
    actions = jnp.array([[-1.0, 0.0], [1.0, 3.0]])
    np.testing.assert_array_equal(libraries.to_box(PointMass(box=2.0), actions), [[[-2.0, 0.0]], [[2.0, 2.0]]])


SHORT = Task("Pendulum-v1", 64, num_envs=4, random_steps=16, hidden_size=8, batch_size=8)


@pytest.mark.parametrize(
    ("peer", "algo"),
    [("ours", "sac"), ("ours", "td3"), ("ours", "ppo"), ("brax", "sac"), ("sb3", "td3"), ("sbx", "sac")],
)
@pytest.mark.filterwarnings("ignore")  # their own
def test_learners_make_the_steps_of_a_task(peer, algo):
    """They are watched as often as is asked for, and count an update for each step after the random ones."""
    for name in learners.IMPORTS[peer]:
        pytest.importorskip(name)
    calls = []
    task = SHORT if algo != "ppo" else Task("CartPole-v1", 2048, num_envs=8, hidden_size=8)
    watch = Watch(task.steps // 2, lambda steps, updates, act: calls.append((steps, updates)))
    learners.LEARNERS[peer](algo, task, 1, watch)
    assert [steps for steps, _ in calls] == [task.steps // 2, task.steps]
    updates = calls[-1][1]
    assert updates == 2 * 16 if algo == "ppo" else 64 - 16 <= updates <= 64 - 16 + 4  # ours: of the 16th step, too


@pytest.mark.long
def test_a_real_worker(tmp_path):
    """Our reach in a process of its own, through the command."""
    out = tmp_path / "out.json"
    assert command.main(["environments", "--quick", "--peers", "ours", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["num_envs"] for row in rows} == {1, 2}
    assert all(row["rate"] > 0 for row in rows)
