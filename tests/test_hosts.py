"""Several hosts: the same bits as one process, one run directory, stops together, and what happens when one is lost."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl.cli import train
from jaxrl.common.errors import UsageError, UserError
from jaxrl.report.writer import read_metrics
from jaxrl.runtime import hosts, memory_plan
from jaxrl.runtime.checkpoint import Checkpoints

ROOT = Path(__file__).parents[1]
COMA = (
    "--algo coma --q 5 --num_agents 2 --budget 2 --hidden_size 4 --num_envs 8 --num_epochs 1 --num_minibatches 1 "
    "--total_episodes 32 --checkpoint_every 2 --eval_every 0 --exact_sharding"
)
DDPG = (
    "--algo ddpg --env snakes_3v3 --max_steps 6 --num_envs 8 --batch_size 8 --buffer_size 512 --learning_starts 8 "
    "--hidden_size 8 "
    "--depth 1 --update_interval 4 --total_env_steps 192 --eval_every 3 --eval_episodes 8 --checkpoint_every 3 "
    "--exact_sharding"
)
TINY = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --block_iterations 4 --exact_sharding"
LONG = f"{TINY} --total_env_steps 100000000 --checkpoint_every 40 --eval_every 0 --block_seconds 0.05 --log_every 4"


class Hosts:
    """Two processes of jaxrl.train with two CPU devices each, on a port of their own."""

    def __init__(self, folder: Path, *argv: str, other: str = "") -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            place = f"--coordinator localhost:{free.getsockname()[1]} --num_hosts 2 --host_index"
        self.logs = [folder / f"host{index}.log" for index in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            words = f"{' '.join(argv)} {other if index else ''} {place} {index}".split()
            environment = os.environ | {
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "2",
                "PJRT_NPROC": "8",  # as many threads as these tests have devices: sums of convolutions depend on it
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
                "JAX_COMPILATION_CACHE_DIR": f"{jax.config.jax_compilation_cache_dir}_{index}",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            with log.open("w") as file:
                command = [sys.executable, "-m", "jaxrl.train", *words]
                process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
            self.processes.append(process)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self, host: int) -> str:
        """Return what a host printed, without the lines of the library that connects them."""
        lines = self.logs[host].read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[Gloo]"))

    def wait(self, condition: Callable[[], Any], seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.text(0) + self.text(1)
            assert any(process.poll() is None for process in self.processes), self.text(0) + self.text(1)
            time.sleep(0.05)

    def ended(self) -> list[int]:
        """The exit codes."""
        return [process.wait(timeout=240) for process in self.processes]

    def trainer(self, host: int) -> int:
        """The process that trains; the one that was started guards it."""
        pid = self.processes[host].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def only_run(runs: Path) -> Path:
    (config,) = runs.glob("*/*/config.yaml")
    return config.parent


def steps(run: Path) -> list[int]:
    return Checkpoints(run / "checkpoints").steps()


def outcome(run: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Digests of all checkpoints, and the metrics that do not depend on time."""
    with Checkpoints(run / "checkpoints") as checkpoints:
        digests = [checkpoints.digest(step) for step in checkpoints.steps()]
    return digests, [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


# Runs


@pytest.mark.long
@pytest.mark.parametrize("flags", [COMA, DDPG], ids=["coma", "ddpg"])
def test_two_hosts_of_two_devices_are_one_of_four_and_resume_on_one(flags: str, tmp_path: Path) -> None:
    assert train.main([*flags.split(), "--devices", "4", "--runs", str(tmp_path / "one")]) == 0
    alone = only_run(tmp_path / "one")
    total = int(flags.partition("--total_")[2].split()[1])
    half = flags.replace(f" {total} ", f" {total // 2} ") + f" --schedule_env_steps {schedule(alone)}"
    with Hosts(tmp_path, half, "--runs two") as pair:
        assert pair.ended() == [0, 0], pair.text(0) + pair.text(1)
        assert "4 x cpu (cpu, 2 hosts)" in pair.text(0) and "finished at iteration" in pair.text(0)
        assert pair.text(1) == ""
    run = only_run(tmp_path / "two")
    assert len(steps(run)) == 1 and len(steps(alone)) == 2
    assert outcome(run)[0] == outcome(alone)[0][:1]
    longer = flags.partition("--total_")[2].split()[0]
    assert train.main(["--resume", str(run), "--devices", "1", f"--total_{longer}", str(total)]) == 0
    assert outcome(run) == outcome(alone)


def schedule(run: Path) -> int:
    return int(re.findall(r"^schedule_env_steps: (\d+)$", (run / "config.yaml").read_text(), re.MULTILINE)[0])


@pytest.mark.long
def test_a_signal_to_one_host_stops_both_at_the_same_iteration_and_two_resume(tmp_path: Path) -> None:
    with Hosts(tmp_path, LONG, "--runs runs") as pair:
        pair.wait(lambda: "run directory: " in pair.text(0))
        run = only_run(tmp_path / "runs")
        pair.wait(lambda: len(read_metrics(run)) > 3)
        pair.processes[1].send_signal(signal.SIGTERM)
        assert pair.ended() == [0, 0], pair.text(0) + pair.text(1)
        assert "stopped by SIGTERM at iteration" in pair.text(0) and pair.text(1) == ""
    stopped = steps(run)[-1]
    assert read_metrics(run)[-1]["iteration"] <= stopped
    to = (stopped + 8) * 32
    with Hosts(tmp_path, f"--resume {run} --total_env_steps {to}") as pair:
        assert pair.ended() == [0, 0], pair.text(0) + pair.text(1)
        assert f"resumed at iteration {stopped:,}" in pair.text(0)
    assert steps(run)[-1] == stopped + 8


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_run_with_a_sentence_and_a_good_checkpoint(lost: int, tmp_path: Path) -> None:
    with Hosts(tmp_path, LONG, "--runs runs") as pair:
        pair.wait(lambda: "run directory: " in pair.text(0))
        run = only_run(tmp_path / "runs")
        pair.wait(lambda: len(steps(run)) > 1)
        os.kill(pair.trainer(lost), signal.SIGKILL)
        assert pair.ended() == [1, 1]
        left, killed = (re.findall("^error: .*", pair.text(host), re.MULTILINE) for host in (1 - lost, lost))
        assert len(left) == len(killed) == 1
        assert "this host has lost the others" in left[0] and "ended by SIGKILL" in killed[0]
        assert all(f"is kept: continue with --resume {run}" in sentence for sentence in (*left, *killed))
        assert "Traceback" not in pair.text(0) + pair.text(1)
    stopped = steps(run)[-1]
    assert f"the last good checkpoint ({stopped:,}) is kept" in left[0]
    assert train.main(["--resume", str(run), "--devices", "1", "--total_env_steps", str((stopped + 8) * 32)]) == 0
    assert steps(run)[-1] == stopped + 8


@pytest.mark.long
def test_hosts_that_disagree_are_refused(tmp_path: Path) -> None:
    with Hosts(tmp_path, f"{TINY} --total_env_steps 320 --runs runs", other="--seed 5") as pair:
        assert pair.ended() == [2, 2]
        for host in range(2):
            assert pair.text(host).startswith("error: the hosts disagree: seed is 0 on host 0 and 5 on host 1;")
            assert pair.text(host).count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_what_host_0_is_refused_all_are_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with Hosts(tmp_path, f"{TINY} --total_env_steps 320 --runs runs") as pair:
        assert pair.ended() == [1, 1]
        assert pair.text(0) == pair.text(1) and "is not a directory); choose another with --runs" in pair.text(0)


# Exchanges


def test_hosts_exchange_values_and_see_one_that_ends() -> None:
    """Three hosts as threads; the second ends after two exchanges."""
    pairs = [Pipe() for _ in range(2)]
    found: dict[int, Any] = {}

    def other(index: int) -> None:
        connection = pairs[index - 1][1]
        found[index] = [hosts.exchange([index, turn], [connection], False) for turn in range(2)]
        connection.close()

    threads = [threading.Thread(target=other, args=(index,)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    own = [pair[0] for pair in pairs]
    found[0] = [hosts.exchange([0, turn], own, True) for turn in range(2)]
    assert found[0] == [[[0, turn], [1, turn], [2, turn]] for turn in range(2)]
    for thread in threads:
        thread.join()
    assert found[1] == found[2] == found[0]
    with pytest.raises(hosts.LostError, match="another host has ended"):
        hosts.exchange([0, 2], own, True)


# Places


SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}  # fmt: skip
ORTE = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher's variables."""
    for name in [*SLURM, *OMPI, *ORTE, "CUDA_VISIBLE_DEVICES"]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("environment", "flags", "place"),
    [
        ({}, (None, None, None), None),
        ({}, ("node1:77", 2, 0), ("node1:77", 2, 0, [])),
        (SLURM, (None, None, None), (None, 4, 3, [1])),  # two processes on each of two nodes: a GPU each
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}, (None, None, None), (None, 4, 3, [1])),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "1"}, (None, None, None), (None, 4, 3, [])),  # bound by SLURM
        (SLURM | {"SLURM_STEP_NUM_NODES": "4"}, (None, None, None), (None, 4, 3, [])),  # one process per node
        (SLURM, (None, 1, None), None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, (None, None, None), None),
        (OMPI | ORTE, (None, None, None), (None, 2, 1, [])),
        (OMPI | ORTE | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (None, None, None), (None, 2, 1, [0])),
        (OMPI, ("node1:77", None, None), ("node1:77", 2, 1, [])),  # Open MPI 5
    ],
)
def test_places(environment: dict[str, str], flags: Any, place: Any, alone: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        alone.setenv(name, value)
    assert hosts.find(*flags) == (place and hosts.ProcessInfo(*place))


@pytest.mark.parametrize(
    ("environment", "flags", "sentence"),
    [
        ({}, ("node1:77", None, None), "--num_hosts N and --host_index I"),
        ({}, (None, 2, 1), "--coordinator HOST:PORT"),
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "abc"},
            (None, None, None),
            "SLURM_STEP_NUM_TASKS must be a number, not 'abc'",
        ),
        (SLURM | {"SLURM_LOCALID": "one"}, (None, None, None), "SLURM_LOCALID must be a number, not 'one'"),
        (OMPI, (None, None, None), "--coordinator HOST:PORT: missing; Open MPI 5"),
        ({}, ("node1:77", 2, 2), "numbers 0 to N - 1"),
        ({}, ("node1:77", -1, 0), "numbers 0 to N - 1"),
        ({}, ("node1", 2, 0), "must be HOST:PORT"),
        ({}, ("node1:77", 1, None), "remove --coordinator and --host_index"),
    ],
)
def test_places_that_do_not_fit(
    environment: dict[str, str], flags: Any, sentence: str, alone: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        alone.setenv(name, value)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        hosts.find(*flags)


@pytest.mark.parametrize(
    ("number", "devices", "shards", "used", "warned"),
    [(2, 2, 8, 4, False), (2, 4, 8, 8, False), (2, 3, 8, 4, True), (2, 8, 8, 8, True), (4, 1, 8, 4, False)],
)
def test_devices_of_several_hosts(
    number: int, devices: int, shards: int, used: int, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: number)
    monkeypatch.setattr(jax, "local_device_count", lambda: devices)
    found, warning = memory_plan.choose_devices(0, 64, shards)
    assert (found, warning is not None) == (used, warned)


@pytest.mark.parametrize(("number", "num_envs", "shards"), [(3, 64, 8), (2, 9, 1), (4, 6, 2)])
def test_hosts_that_cannot_share_the_batch(
    number: int, num_envs: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: number)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    with pytest.raises(UsageError, match=f"{num_envs} environments .* {number} hosts of 1 devices cannot share evenly"):
        memory_plan.choose_devices(0, num_envs, shards)


# The guard


def guarded(code: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    (folder / "guarded_program.py").write_text(f"import os, signal, sys\nfrom pathlib import Path\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    return hosts.supervise("guarded_program", [], lambda run: [40, 80])


@pytest.fixture
def signals() -> Any:
    """The guard takes SIGINT and SIGTERM for good, as it is all that its process does."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_the_guard_passes_on_what_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert guarded("os.write(2, b'a library'); sys.exit(2)", monkeypatch, tmp_path) == 2
    assert capfd.readouterr().err == "a library"


@pytest.mark.usefixtures("signals")
def test_the_guard_tells_of_an_abort_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stack = "F1121 10:00:00.000000 7 client.h:77] Terminating process because the JAX distributed service detected " \
        "fatal errors. absl::Status: UNAVAILABLE: Socket closed\n*** stack trace"  # fmt: skip
    note = "Path(os.environ['JAXRL_SUPERVISED'].partition(':')[2], 'run').write_text('runs/a/0001')"
    with pytest.raises(UserError) as caught:
        guarded(f"{note}; os.write(2, {stack!r}.encode()); os.abort()", monkeypatch, tmp_path)
    assert str(caught.value) == (
        "this host has lost the others (UNAVAILABLE: Socket closed); the last good checkpoint (80) is kept: continue "
        "with --resume runs/a/0001"
    )
    with pytest.raises(UserError, match="ended by SIGKILL; nothing was trained yet: start all hosts again"):
        guarded("os.kill(os.getpid(), signal.SIGKILL)", monkeypatch, tmp_path)
    assert capfd.readouterr().err == ""
