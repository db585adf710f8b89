"""Several hosts: the same bits as one process, one run directory, stops together, and what happens when one is lost."""

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.off_policy import assert_close

import jaxrl
from jaxrl.cli import train
from jaxrl.common.errors import UsageError, UserError
from jaxrl.report.writer import read_metrics
from jaxrl.runtime import config as configuration
from jaxrl.runtime import hosts
from jaxrl.runtime.checkpoint import committed_steps
from jaxrl.runtime.devices import choose_devices
from jaxrl.runtime.digests import digest_arrays, digest_code, digest_files

ROOT = Path(__file__).parents[1]
COMA = (
    "--algo coma --q 5 --num_agents 2 --budget 2 --hidden_size 4 --num_envs 8 --num_epochs 1 "
    "--total_episodes 32 --checkpoint_every 2 --eval_every 0"
)
DDPG = (
    "--algo ddpg --env snakes_3v3 --max_steps 6 --num_envs 8 --batch_size 8 --buffer_size 512 --learning_starts 8 "
    "--hidden_size 8 --depth 1 --env_steps_per_update 8 --update_interval 4 --total_env_steps 192 --eval_every 96 "
    "--eval_episodes 8 --checkpoint_every 3"
)
TINY = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --block_iterations 4"
LONG = f"{TINY} --total_env_steps 100000000 --checkpoint_every 40 --eval_every 0 --block_iterations 8 --log_every 4"


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


class Hosts:
    """Two processes of jaxrl.train with two CPU devices each, on a port of their own."""

    def __init__(self, folder: Path, *argv: str, other: str = "", launcher: str = "") -> None:
        port = free_port()
        self.logs = [folder / f"host{index}.log" for index in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            place = f"--coordinator localhost:{port} --num_hosts 2 --host_index {index}"
            words = f"{' '.join(argv)} {other if index else ''} {'' if launcher else place}".split()
            torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
            torchrun |= {"RANK": str(index), "LOCAL_RANK": str(index), "MASTER_PORT": str(port - 1)}
            numbers = f"localhost:{port}", "2", str(index)
            variables = {"": {}, "torchrun": torchrun, "jax": dict(zip(JAX, numbers, strict=True))}[launcher]
            variables |= {
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
                process = subprocess.Popen(command, cwd=folder, env=os.environ | variables, stdout=file, stderr=file)
            self.processes.append(process)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self, host: int) -> str:
        """Return what a host printed, without the line that it waits and the connecting library's lines."""
        lines = self.logs[host].read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith(("[Gloo]", "waiting for 2 hosts at ")))

    def wait(self, condition: Callable[[], Any], seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.text(0) + self.text(1)
            assert any(process.poll() is None for process in self.processes), self.text(0) + self.text(1)
            time.sleep(0.05)

    def exit_codes(self) -> list[int]:
        """The exit codes."""
        return [process.wait(timeout=240) for process in self.processes]


def only_run(runs: Path) -> Path:
    (config,) = runs.glob("*/*/config.yaml")
    return config.parent


def steps(run: Path) -> list[int]:
    return committed_steps(run / "checkpoints")


# Runs


@pytest.mark.slow
@pytest.mark.parametrize("flags", [COMA, DDPG], ids=["coma", "ddpg"])
def test_two_hosts_of_two_devices_are_one_of_four_and_resume_on_one(flags: str, tmp_path: Path) -> None:
    assert train.main([*flags.split(), "--devices", "4", "--runs", str(tmp_path / "one")]) == 0
    alone = only_run(tmp_path / "one")
    total = int(flags.partition("--total_")[2].split()[1])
    half = flags.replace(f" {total} ", f" {total // 2} ") + f" --schedule_env_steps {schedule(alone)}"
    with Hosts(tmp_path, half, "--runs two") as pair:
        assert pair.exit_codes() == [0, 0], pair.text(0) + pair.text(1)
        assert "4 x cpu (cpu, 2 hosts)" in pair.text(0) and "finished at iteration" in pair.text(0)
        assert pair.text(1) == ""
    run = only_run(tmp_path / "two")
    assert len(steps(run)) == 1 and len(steps(alone)) == 2
    longer = flags.partition("--total_")[2].split()[0]
    assert train.main(["--resume", str(run), "--devices", "1", f"--total_{longer}", str(total)]) == 0
    assert [row["env_steps"] for row in read_metrics(run)] == [row["env_steps"] for row in read_metrics(alone)]
    assert_close(*(jaxrl.load(str(each)).params for each in (run, alone)), 2e-3)  # sums over hosts are in another order


def schedule(run: Path) -> int:
    return int(re.findall(r"^schedule_env_steps: (\d+)$", (run / "config.yaml").read_text(), re.MULTILINE)[0])


@pytest.mark.slow
def test_a_signal_to_one_host_stops_both_at_the_same_iteration_and_two_resume(tmp_path: Path) -> None:
    with Hosts(tmp_path, LONG, "--runs runs") as pair:
        pair.wait(lambda: "run directory: " in pair.text(0))
        run = only_run(tmp_path / "runs")
        pair.wait(lambda: len(read_metrics(run)) > 3)
        pair.processes[1].send_signal(signal.SIGTERM)
        assert pair.exit_codes() == [0, 0], pair.text(0) + pair.text(1)
        assert "stopped by SIGTERM at iteration" in pair.text(0) and pair.text(1) == ""
    stopped = steps(run)[-1]
    assert read_metrics(run)[-1]["iteration"] <= stopped
    to = (stopped + 8) * 32
    with Hosts(tmp_path, f"--resume {run} --total_env_steps {to}") as pair:
        assert pair.exit_codes() == [0, 0], pair.text(0) + pair.text(1)
        assert f"resumed at iteration {stopped:,}" in pair.text(0)
    assert steps(run)[-1] == stopped + 8


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "jax"])
def test_processes_of_a_launcher_are_one_run(launcher: str, tmp_path: Path) -> None:
    """Those of torchrun, and those with the variables of `jax.distributed.initialize` (issue 54)."""
    with Hosts(tmp_path, *TINY.split(), "--total_env_steps", "256", "--runs", str(tmp_path), launcher=launcher) as both:
        assert both.exit_codes() == [0, 0], both.text(0) + both.text(1)
    assert "2 hosts" in both.text(0) and steps(only_run(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_run_with_a_good_checkpoint(lost: int, tmp_path: Path) -> None:
    with Hosts(tmp_path, LONG, "--runs runs") as pair:
        pair.wait(lambda: "run directory: " in pair.text(0))
        run = only_run(tmp_path / "runs")
        pair.wait(lambda: len(steps(run)) > 1)
        pair.processes[lost].kill()
        began = time.monotonic()
        codes = pair.exit_codes()
        assert time.monotonic() - began < 2 * hosts.HEARTBEAT_TIMEOUT_S
        assert codes[lost] == -signal.SIGKILL
        text = pair.text(1 - lost)
        if codes[1 - lost] == 1:
            assert re.findall("^error: .*", text, re.MULTILINE) == [
                f"error: another host has ended: start all of them again with --resume {run}"
            ]
            assert "Traceback" not in text
        else:  # JAX was quicker: host 0 is its coordinator
            assert lost == 0 and codes[1] == -signal.SIGABRT and "another task died" in text
    stopped = steps(run)[-1]
    assert train.main(["--resume", str(run), "--devices", "1", "--total_env_steps", str((stopped + 8) * 32)]) == 0
    assert steps(run)[-1] == stopped + 8


@pytest.mark.slow
def test_hosts_that_disagree_are_refused(tmp_path: Path) -> None:
    with Hosts(tmp_path, f"{TINY} --total_env_steps 320 --runs runs", other="--seed 5") as pair:
        assert pair.exit_codes() == [2, 2]
        for host in range(2):
            assert pair.text(host).startswith("error: the hosts disagree: seed is 0 on host 0 and 5 on host 1;")
            assert pair.text(host).count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_what_host_0_is_refused_all_are_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with Hosts(tmp_path, f"{TINY} --total_env_steps 320 --runs runs") as pair:
        assert pair.exit_codes() == [1, 1]
        assert pair.text(0) == pair.text(1) and "is not a directory); choose another with --runs" in pair.text(0)


# Start and exchanges, without training


def start(
    folder: Path, *flags: str, code: str = "from jaxrl.cli.train import main; sys.exit(main())", root: Path = ROOT
) -> subprocess.Popen[str]:
    paths = f"{root}{os.pathsep}{ROOT / 'tests'}"
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-u", "-c", f"import sys; {code}", *TINY.split(), "--runs", "runs", *flags]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_host_that_waits_says_so_and_heeds_signals_and_its_time_out(tmp_path: Path) -> None:
    place = "--num_hosts", "2", "--coordinator", f"localhost:{free_port()}"
    late = start(tmp_path, *place, "--host_index", "0", "--host_timeout", "1")
    stopped = start(tmp_path, *place, "--host_index", "1", "--host_timeout", "60")
    assert late.stdout and stopped.stdout
    waiting = f"waiting for 2 hosts at {place[-1]} (at most 60 s; --host_timeout changes it) ...\n"
    assert stopped.stdout.readline() == waiting
    stopped.send_signal(signal.SIGINT)
    assert stopped.communicate(timeout=30)[0] == "stopped by SIGINT, before anything was saved\n"
    assert stopped.returncode == 128 + signal.SIGINT
    first, last = late.communicate(timeout=30)[0].splitlines()
    assert first.startswith("waiting for 2 hosts") and late.returncode == 1
    assert last.startswith(f"error: not all hosts came to {place[-1]} within 1 s: start the same command on every host")
    assert not (tmp_path / "runs").exists()


def test_hosts_with_other_code_are_refused(tmp_path: Path) -> None:
    """Issue 54: a bug fix that only one host has, in the same version of the package."""
    for name in ("jaxrl", "envs_jax", "configs"):
        shutil.copytree(ROOT / name, tmp_path / "other" / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / "jaxrl" / "algos" / "ppo.py").open("a") as file:
        file.write("# fixed\n")
    place = "--total_env_steps", "320", "--num_hosts", "2", "--coordinator", f"localhost:{free_port()}", "--host_index"
    pair = [start(tmp_path, *place, str(host), root=(ROOT, tmp_path / "other")[host]) for host in range(2)]
    sentence = (
        r"error: the hosts disagree: code of jaxrl is (\w{12}) on host 0 and (\w{12}) on host 1; start all of them"
    )
    for process in pair:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 2 and "Traceback" not in output, output
        ours, theirs = re.findall(sentence, output)[0]
        assert ours != theirs
    assert not (tmp_path / "runs").exists()


def test_digests_of_the_users_own_modules_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules beside an environment, and the weights that a setting names; not installed packages, nor notes."""
    (tmp_path / "own_rules.py").write_text("GRAVITY = 9.81\n")
    (tmp_path / "own_game.py").write_text("import numpy\nfrom own_rules import GRAVITY\n")
    (tmp_path / "notes.txt").write_text("one")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_game", "own_rules"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    config = configuration.Config("ppo", "own_game:Game", configuration.RunSettings(), {}, {})
    settings = {"init_from": f"{tmp_path}/notes.txt,runs/latest", "seed": 1, "runs": str(tmp_path)}
    before, files = digest_code(config), digest_files(settings)
    assert {"code of jaxrl", "code of envs_jax", "code of own_game", "code of own_rules"} <= before.keys()
    assert not before.keys() & {"code of numpy", "code of jax", "code of json", "code of __main__"}
    assert list(files) == [f"the file {tmp_path}/notes.txt of init_from"]
    (tmp_path / "own_rules.py").write_text("GRAVITY = 9.82\n")
    (tmp_path / "notes.txt").write_text("two")
    after = digest_code(config)
    assert [name for name in before if before[name] != after[name]] == ["code of own_rules"]
    assert digest_files(settings) != files


def test_digests_of_lists_of_files_and_of_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    files = digest_files({"demos": f"{tmp_path}/one, {tmp_path}/two ,"})
    assert list(files) == [f"the file {tmp_path}/one of demos", f"the file {tmp_path}/two of demos"]
    unreadable = "/proc/self/mem"  # also for root
    with pytest.raises(UsageError, match=f"^{unreadable} cannot be read .*: make it readable on every host$"):
        digest_files({"init_from": unreadable})


def test_digests_of_arrays() -> None:
    """Other numbers, types and places are told apart."""
    trees = [{"a": np.arange(4.0)}, {"b": np.arange(4.0)}, {"a": np.arange(4.0) + 1e-9}, {"a": np.zeros(4)}]
    trees += [{"a": np.zeros(4, np.int64)}, {"a": np.zeros((2, 2))}, {"a": np.zeros(2), "b": np.zeros(2)}]
    assert len({digest_arrays(tree) for tree in trees}) == len(trees)
    assert digest_arrays({"a": jax.numpy.arange(3)}) == digest_arrays({"a": np.arange(3, dtype=np.int32)})


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        place = hosts.ProcessInfo(f"localhost:{port}", 2, 0, [])
        with pytest.raises(UserError, match=f"port {port} cannot be used .*: choose another with --coordinator"):
            hosts._connect(place, 1)


EXCHANGE = """
import json, time
from jaxrl.common.errors import UsageError, UserError
from jaxrl.runtime import hosts

def refuse():
    raise UsageError("no")

place = hosts.ProcessInfo(sys.argv[-1], 2, int(sys.argv[-2]), [])
with hosts.join(place, 60):
    exchanged = [hosts.gather([turn, hosts.global_state.process_id]) for turn in range(3)]
    exchanged += [hosts.broadcast(hosts.global_state.process_id), hosts.call_on_host_0(lambda: hosts.is_host_0())]
    try:
        hosts.call_on_host_0(refuse)
    except Exception as error:
        exchanged.append([str(error), error.exit_code])
    sys.stderr.write(json.dumps(exchanged))
    time.sleep(2 * hosts.global_state.process_id)  # one that ends later is waited for
"""


def test_hosts_exchange_values_and_end_together(tmp_path: Path) -> None:
    address = f"localhost:{free_port()}"
    pair = [start(tmp_path, str(index), address, code=EXCHANGE) for index in range(2)]
    exchanged = [[[turn, 0], [turn, 1]] for turn in range(3)] + [0, True, ["no", 2]]
    for process in pair:
        output = process.communicate(timeout=60)[0]
        assert json.loads(output.splitlines()[-1]) == exchanged
        assert process.returncode == 0, output


@pytest.mark.slow
def test_a_host_that_does_not_know_the_others_is_refused(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    process = start(tmp_path, "--num_hosts", "2")
    _, refusal = process.communicate(timeout=60)[0].splitlines()
    assert refusal.startswith("error: JAX finds no other hosts (") and process.returncode == 2


# Places


SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip
TORCHRUN = {
    "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OTHERS = ("PMI_SIZE", "PMI_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK")
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}  # fmt: skip

JAX = {"JAX_COORDINATOR_ADDRESS": "node1:77", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
NO_FLAGS = (None, None, None)  # coordinator, number of hosts, index


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher's variables."""
    for name in [*SLURM, *OMPI, *TORCHRUN, *OTHERS, *JAX, "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS"]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("environment", "flags", "place"),
    [
        ({}, NO_FLAGS, None),
        ({}, ("node1:77", 2, 0), ("node1:77", 2, 0, [])),
        (SLURM, NO_FLAGS, (None, None, None, None)),  # two processes on each of two nodes: JAX gives a GPU
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}, NO_FLAGS, (None, None, None, None)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "1"}, NO_FLAGS, (None, None, None, [])),  # bound by SLURM
        (SLURM | {"SLURM_STEP_NUM_NODES": "4"}, NO_FLAGS, (None, None, None, [])),  # one process per node
        (SLURM | {"SLURM_STEP_NUM_NODES": "4", "JAX_LOCAL_DEVICE_IDS": "1"}, NO_FLAGS, (None,) * 4),
        (SLURM, (None, 1, None), None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, NO_FLAGS, None),
        (OMPI, NO_FLAGS, (None, None, None, [])),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, NO_FLAGS, (None, None, None, None)),
        (OMPI, ("node1:77", None, None), ("node1:77", None, None, [])),  # Open MPI 5
        (TORCHRUN, NO_FLAGS, ("node1:29501", 4, 3, [1])),  # the GPU of its local number
        (TORCHRUN | {"MASTER_PORT": "65535"}, NO_FLAGS, ("node1:1", 4, 3, [1])),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "1"}, NO_FLAGS, ("node1:29501", 4, 3, [])),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, NO_FLAGS, ("node1:29501", 4, 3, [])),  # one per machine: all
        (TORCHRUN | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, NO_FLAGS, ("node1:29501", 4, 3, None)),
        (TORCHRUN | SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, NO_FLAGS, ("node1:29501", 4, 3, [1])),  # inside srun
        (SLURM | {"WORLD_SIZE": "4", "MASTER_ADDR": "n1"}, NO_FLAGS, (None, None, None, None)),  # of a script
        (TORCHRUN, (None, 1, None), None),
        (TORCHRUN, ("node2:77", 2, 0), ("node2:77", 2, 0, [])),
        (SLURM | {"PMI_SIZE": "4", "PMI_RANK": "3"}, NO_FLAGS, (None, None, None, None)),  # srun --mpi=pmi2
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, ("node1:77", 2, 1), ("node1:77", 2, 1, [])),
        (JAX, NO_FLAGS, ("node1:77", 2, 1, [])),
        (JAX | {"JAX_LOCAL_DEVICE_IDS": "0"}, NO_FLAGS, ("node1:77", 2, 1, None)),
        (JAX, ("node2:88", 4, 0), ("node2:88", 4, 0, [])),  # flags come first
        (JAX, (None, 2, None), ("node1:77", 2, 1, [])),
        (JAX, (None, 1, None), None),
        (JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, NO_FLAGS, None),
        (TORCHRUN | {"JAX_NUM_PROCESSES": "1"}, NO_FLAGS, ("node1:29501", 4, 3, [1])),
        (dict.fromkeys(JAX, ""), NO_FLAGS, None),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "n1:7"}, NO_FLAGS, ("n1:7", None, None, None)),  # SLURM has both
    ],
)
def test_places(environment: dict[str, str], flags: Any, place: Any, alone: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        alone.setenv(name, value)
    assert hosts.find(*flags) == (place and hosts.ProcessInfo(*place))


@pytest.mark.parametrize(
    ("environment", "flags", "sentence"),
    [
        ({}, ("node1:77", 2, 2), "the hosts from 0 to N - 1"),
        ({}, ("node1", 2, 0), "must be HOST:PORT"),
        ({}, ("node1:77", 1, None), "remove --coordinator and --host_index"),
        ({"PMI_SIZE": "2"}, NO_FLAGS, "--coordinator HOST:PORT --num_hosts 2 --host_index $PMI_RANK"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, NO_FLAGS, "--host_index $MV2_COMM_WORLD_RANK"),
        ({"WORLD_SIZE": "2"}, NO_FLAGS, "WORLD_SIZE says that 2 processes were started"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "2"}, NO_FLAGS, "--num_hosts 2"),  # mpirun in sbatch
        (TORCHRUN | {"RANK": ""}, NO_FLAGS, "--num_hosts 4"),
        (
            {"JAX_COORDINATOR_ADDRESS": "n1:7"},
            NO_FLAGS,
            "is set, but not JAX_NUM_PROCESSES and JAX_PROCESS_ID: set all",
        ),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, NO_FLAGS, "are set, but not JAX_COORDINATOR_ADDRESS: set"),
        (TORCHRUN | {"JAX_PROCESS_ID": "0"}, NO_FLAGS, "JAX_PROCESS_ID is set, but not"),
        (JAX | {"JAX_NUM_PROCESSES": "two"}, NO_FLAGS, "JAX_NUM_PROCESSES must be a whole number, 0 or more"),
        (JAX | {"JAX_NUM_PROCESSES": "0"}, NO_FLAGS, "JAX_NUM_PROCESSES must be at least 1, not 0"),
        (JAX | {"JAX_PROCESS_ID": "-1"}, NO_FLAGS, "JAX_PROCESS_ID must be a whole number, 0 or more, not"),
        (JAX | {"JAX_PROCESS_ID": "2"}, NO_FLAGS, "the hosts from 0 to N - 1 with JAX_PROCESS_ID"),
        (JAX | {"JAX_NUM_PROCESSES": "1"}, NO_FLAGS, "there is no host 1 of 1"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "node1"}, NO_FLAGS, "JAX_COORDINATOR_ADDRESS must be HOST:PORT"),
    ],
)
def test_places_that_do_not_fit(environment: dict[str, str], flags: Any, sentence: str, alone: Any) -> None:
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
    actual, warning = choose_devices(0, 64, shards)
    assert (actual, warning is not None) == (used, warned)


@pytest.mark.parametrize(("number", "num_envs", "shards"), [(3, 64, 8), (2, 9, 1), (4, 6, 2)])
def test_hosts_that_cannot_share_the_batch(number: int, num_envs: int, shards: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: number)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    with pytest.raises(UsageError, match=f"{num_envs} environments .* {number} hosts of 1 devices cannot share evenly"):
        choose_devices(0, num_envs, shards)
