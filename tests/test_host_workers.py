"""`host_workers`: the numbers of one process, errors with their traceback, and no process that outlives its parent."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import host
from helpers.runs import outcome_rows

import envs_jax
from envs_jax import forks
from envs_jax.batch import BatchedEnvironment, batched
from jaxrl.cli import evaluate, train

gymnasium: Any = pytest.importorskip("gymnasium", reason="gymnasium is not installed (extra 'gymnasium')")
pytest.importorskip("pettingzoo")
pytestmark = [pytest.mark.needs("gymnasium", "pettingzoo"), pytest.mark.filterwarnings("ignore")]  # of the packages
host.register()
ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}


def roll(batch: BatchedEnvironment, copies: int, steps: int) -> list[Any]:
    """Return the time steps of random actions from a reset on."""
    spec, rng = batch.spec, np.random.default_rng(0)
    state, timestep = batch.reset(jax.random.split(jax.random.key(0), copies))
    rows, step = [jax.device_get(timestep)], jax.jit(batch.step)
    for _ in range(steps):
        shape = copies, spec.num_agents, *spec.action.shape
        integers = isinstance(spec.action, envs_jax.Discrete)
        action = rng.integers(0, spec.action.n, shape) if integers else rng.uniform(-1, 1, shape)
        state, timestep = step(state, timestep, jnp.asarray(action, spec.action.dtype))
        rows.append(jax.device_get(timestep))
    return rows


@pytest.mark.parametrize(
    ("name", "settings", "workers"),
    [
        ("gymnasium:CartPole-v1", {"horizon": 15}, 2),
        pytest.param("gymnasium:CartPole-v1", {"horizon": 15}, 9, marks=pytest.mark.slow),
        pytest.param("gymnasium:host/Parts-v0", {}, 3, marks=pytest.mark.slow),
        pytest.param("gymnasium:host/Screen-v0", {}, 2, marks=pytest.mark.slow),
        pytest.param("gymnasium:Pendulum-v1", {"horizon": 7}, 2, marks=pytest.mark.slow),
        pytest.param("pettingzoo:helpers.hunt", {}, 2, marks=pytest.mark.slow),
        ("pettingzoo:helpers.host", {}, 3),
    ],
)
def test_the_numbers_of_one_process(name: str, settings: dict[str, Any], workers: int) -> None:
    """Five copies are no equal parts, and no more than five processes start for them."""
    alone = roll(batched(envs_jax.make(name, **settings)), 5, 40)
    batch = batched(envs_jax.make(name, host_workers=workers, **settings))
    rows = roll(batch, 5, 40)
    assert len(multiprocessing.active_children()) == min(workers, 5) and batch.failure is None
    jax.tree.map(np.testing.assert_array_equal, rows, alone)
    assert sum(row.done.sum() for row in rows) > 5
    again = roll(batch, 5, 3)
    jax.tree.map(np.testing.assert_array_equal, again, alone[:4])
    batch.close()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_other_numbers_of_copies_and_of_steps() -> None:
    """A batch that is closed, or called with another number of copies, starts other processes; one copy needs none."""
    batch = batched(envs_jax.make("gymnasium:CartPole-v1", host_workers=2))
    for copies, processes in ((3, 2), (4, 2), (1, 0), (3, 2)):
        rows = roll(batch, copies, 2)
        assert len(multiprocessing.active_children()) == processes
        alone = roll(batched(envs_jax.make("gymnasium:CartPole-v1")), copies, 2)
        jax.tree.map(np.testing.assert_array_equal, rows, alone)
        if copies == 4:
            batch.close()
    batch.close()


# Errors


def test_an_exception_in_a_worker_has_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence is that of one process, which meets the error of the first copy that has it."""
    failures = []
    for workers in (1, 3):
        batch = batched(envs_jax.make("gymnasium:host/Fragile-v0", host_workers=workers))
        roll(batch, 4, 5)
        failures.append(batch.failure)
        printed = capsys.readouterr().err
        if workers == 1:
            assert "in the environment:\nTraceback" in printed and "the rope broke\nand more" in printed
            assert "helpers/host.py" in printed and printed.count("Traceback") == 1
    assert failures[0] == failures[1]
    assert "in step 4 of environment 0 (RuntimeError: the rope broke)" in str(failures[0])
    assert "in a process of host_workers:\nTraceback" in printed and "the rope broke\nand more" in printed
    assert "helpers/host.py" in printed and not multiprocessing.active_children()


def test_what_does_not_fit_its_space_is_named_as_in_one_process() -> None:
    arguments = json.dumps({"last": -1, "size": 3, "thin": 2})
    failures = []
    for workers in (1, 2):
        batch = batched(envs_jax.make("gymnasium:host/Fragile-v0", arguments=arguments, host_workers=workers))
        roll(batch, 3, 3)
        failures.append(batch.failure)
    assert failures[0] == failures[1] and "has the shape (1,), but its space has (3,)" in str(failures[0])


@pytest.mark.parametrize("how", ["killed", "between steps"])
def test_a_worker_that_dies(how: str) -> None:
    batch = batched(envs_jax.make("gymnasium:CartPole-v1", host_workers=2))
    state, timestep = batch.reset(jax.random.split(jax.random.key(0), 4))
    second = max(multiprocessing.active_children(), key=lambda process: process.pid or 0)
    assert second.pid is not None
    os.kill(second.pid, signal.SIGKILL)
    if how == "between steps":
        second.join()
    batch.step(state, timestep, jnp.zeros((4, 1), jnp.int32))
    sentence = "failed on the host (process 2 of 2 of host_workers was killed by SIGKILL): correct it, or use fewer"
    assert sentence in str(batch.failure) and not multiprocessing.active_children()


def test_an_environment_that_cannot_be_sent() -> None:
    lock = threading.Lock()
    if "host/Locked-v0" not in gymnasium.registry:
        gymnasium.register("host/Locked-v0", entry_point=lambda: lock and host.Slow())
    batch = batched(envs_jax.make("gymnasium:host/Locked-v0", host_workers=2))
    roll(batch, 2, 1)
    assert "it cannot be sent to another process: TypeError: cannot pickle" in str(batch.failure)
    assert "use host_workers 1, or register it in a module of its own" in str(batch.failure)


def test_a_process_that_may_not_start_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    batch = batched(envs_jax.make("gymnasium:CartPole-v1", host_workers=2))
    roll(batch, 2, 1)
    sentence = "is a daemonic worker of multiprocessing, which may not start others): use host_workers 1"
    assert sentence in str(batch.failure)


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [(0, "must lie between 1 and 1,024, not 0"), (-2, "not -2"), (1.5, "must be a whole number, not ")],
)
def test_bad_numbers_of_workers(workers: Any, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=sentence):
        envs_jax.make("gymnasium:CartPole-v1", host_workers=workers)
    assert train.main(["--algo", "ppo", "--env", "gymnasium:CartPole-v1", "--host_workers", str(workers)]) == 2
    assert sentence in capsys.readouterr().err


# Runs

PPO = "--algo ppo --env gymnasium:CartPole-v1 --rollout_steps 16 --num_minibatches 2 --hidden_size 8 --num_envs 3"


@pytest.mark.slow
def test_a_run_resumes_with_other_workers(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs whose workers change in opposite directions have the same rows; a change is no other environment."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for first, second in ((1, 2), (2, 1)):
        words = f"{PPO} --logical_shards 1 --total_env_steps 96 --eval_every 96 --eval_episodes 8 --memory_gb 8".split()
        assert train.main([*words, "--host_workers", str(first)]) == 0
        run = Path((tmp_path / "runs" / "latest").read_text().strip())
        assert not multiprocessing.active_children()
        total = ["--total_env_steps", "192", "--host_workers", str(second)]
        assert train.main(["--resume", str(run), *total]) == 0
        assert f"host_workers: {second}\n" in (run / "config.yaml").read_text()
        rows.append(outcome_rows(run))
    assert rows[0] == rows[1] and any("eval/return" in row for row in rows[0])
    capsys.readouterr()
    assert evaluate.main([str(run), "--episodes", "3", "--host_workers", "2", "--policy", "random"]) == 0
    assert not multiprocessing.active_children()
    assert train.main(["--resume", str(run), "--gamma", "0.5"]) == 2
    assert "checkpoint_every, keep_checkpoints, logger, host_workers" in capsys.readouterr().err.replace("\n", " ")


SCRIPT = """
import gymnasium, numpy, sys
print("the script runs", "jax" in sys.modules)

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.place = numpy.zeros(1, numpy.float32)
        return self.place, {}

    def step(self, action):
        assert "jax" not in sys.modules, "a worker imports JAX"
        self.place = self.place + action
        return self.place, 1.0, self.place[0] > 3, False, {}

gymnasium.register("Walk-v0", entry_point="__main__:Walk", max_episode_steps=5)
import envs_jax, jax
batch = envs_jax.batched(envs_jax.make("gymnasium:Walk-v0", host_workers=2))
state, timestep = batch.reset(jax.random.split(jax.random.key(0), 3))
for _ in range(3):
    state, timestep = batch.step(state, timestep, jax.numpy.ones((3, 1), jax.numpy.int32))
print(batch.failure, timestep.observation.ravel())
"""


def test_a_script_without_a_guard_whose_environment_is_in_it(tmp_path: Path) -> None:
    """The main script runs once, its class reaches the workers, and these import no JAX."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    result = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines() == ["the script runs False", "None [3. 3. 3.]"], result.stderr
    assert result.returncode == 0 and result.stderr == ""


# Ends


def workers_of(parent: int) -> list[int]:
    """Return the spawned workers of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes()
            its_parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if its_parent == parent and b"spawn_main" in words:
            found.append(int(path.name))
    return found


def wait_until(condition: Any, seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.05)


TRAIN = f"-m jaxrl.train {PPO} --total_env_steps 100000000 --host_workers 2 --block_iterations 4".split()
PLAY = """
import jax, envs_jax
from helpers import host
from helpers.runs import outcome_rows
host.register()
batch = envs_jax.batched(envs_jax.make("gymnasium:host/Slow-v0", host_workers=2))
state, timestep = batch.reset(jax.random.split(jax.random.key(0), 2))
print("begun", flush=True)
while True:
    state, timestep = batch.step(state, timestep, jax.numpy.ones((2, 1), jax.numpy.int32))
"""


@pytest.mark.parametrize(
    ("number", "group", "command"),
    [
        (signal.SIGKILL, False, ["-c", PLAY]),
        pytest.param(signal.SIGINT, True, TRAIN, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, TRAIN, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, TRAIN, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, False, TRAIN, marks=pytest.mark.slow),
    ],
    ids=["kill -9 in a step", "Ctrl-C", "SIGTERM", "SIGTERM of the group", "kill -9"],
)
def test_no_worker_is_left(number: int, group: bool, command: list[str], tmp_path: Path) -> None:
    """Nor prints one a traceback; after a signal the run ends with a checkpoint, for which the workers still step."""
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        rows = "output" if command[0] == "-c" else "metrics.jsonl"  # which begin when the environments step

        def begun() -> bool:
            assert process.poll() is None, output.read_text()
            return any(path.stat().st_size for path in tmp_path.rglob(rows))

        wait_until(begun, 150, "it does not begin")
        time.sleep(0.5)
        workers = workers_of(process.pid)
        assert len(workers) == 2
        (os.killpg if group else os.kill)(process.pid, number)
        process.wait(60)
        wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 6, "a worker is left")
    finally:
        process.kill()
        process.wait()
    text = output.read_text()
    assert "Traceback" not in text, text
    if number != signal.SIGKILL:
        assert process.returncode == 0 and f"stopped by {signal.Signals(number).name} at iteration" in text
        assert "leaked" not in text and list((tmp_path / "runs").rglob("checkpoints/*"))


def test_threads_that_end_while_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a thread in /proc vanishes with it, in either of two ways."""
    read, errors = Path.read_text, [FileNotFoundError(), ProcessLookupError()]

    def vanish(path: Path, *arguments: Any, **keywords: Any) -> str:
        if errors:
            raise errors.pop()
        return read(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "read_text", vanish)
    assert not forks._has_lost_threads() and not errors


HANGING = """
import sys
from helpers import host
from helpers.runs import outcome_rows
from jaxrl.cli import train
host.register()
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_step_that_never_returns(number: int, tmp_path: Path) -> None:
    flags = "--algo ppo --env gymnasium:host/Slow-v0 --num_envs 2 --rollout_steps 4 --num_minibatches 1"
    flags += " --hidden_size 8 --total_env_steps 16 --eval_every 0"
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, *flags.split()],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert any("in a step" in line for line in process.stdout)
        process.send_signal(number)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(number)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert text.endswith("stopped at once, without a checkpoint\n") and "Traceback" not in text
