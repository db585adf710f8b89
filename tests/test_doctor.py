"""The doctor: GPUs that are not used and why, and runs that fit or do not."""

import importlib.metadata
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pynvml
import pytest

from jaxrl.cli import doctor
from jaxrl.cli import flags as command_line
from jaxrl.cli.doctor import Nvidia
from jaxrl.cli.flags import parse
from jaxrl.cli.gpu_checks import (
    GpuMemory,
    check_absent,
    check_environments,
    check_libraries,
    check_memory,
    read_share,
    visible,
)
from jaxrl.runtime.build import build_run
from jaxrl.runtime.checkpoint import Checkpoints

TINY = [
    "--algo", "helpers.tiny:TinyQ", "--env", "helpers.tiny:Corridor", "--total_env_steps", "1000", "--num_envs", "8",
]  # fmt: skip
GIB = 2**30
H200 = Nvidia(("H200 139.0 GiB",), "570.10", "12.8")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
    """No GPU and no plugin, wherever the tests run."""
    monkeypatch.setattr(doctor, "find_nvidia", lambda: None)
    monkeypatch.setattr(doctor, "installed_plugins", dict)
    monkeypatch.setattr(doctor, "speed_up_start", lambda: None)
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def package(name, version, *requires):
    return SimpleNamespace(name=name, version=version, requires=requires or None)


def test_packages_that_lower_jax_are_named():
    limits = ('jax<0.12,>=0.6; python_version < "3.14"', 'jax<0.12,>=0.8; python_version >= "3.14"')
    packages = [
        package("zoo", "1.0", *limits, "jaxopt<1"),
        package("arm", "1.0", "numpy<3", "jaxlib==0.11"),
        package("free", "1.0", "jax>=0.6", 'jax<0.5; extra == "old"', "jaxtyping<1"),
        package("jax", "1.0", "jaxlib<=0.11"),
        package("jaxrl", "1.0", "jax>=0.10,<0.13"),
        package("bare", "1.0"),
    ]
    arm, zoo = doctor.find_jax_limits(packages)
    assert arm.startswith("arm 1.0 requires jaxlib==0.11,") and zoo.startswith("zoo 1.0 requires jax<0.12,>=0.")
    assert f"now {importlib.metadata.version('jax')}" in zoo


# A GPU that is not used


def jaxlib():
    return importlib.metadata.version("jaxlib")


@pytest.mark.parametrize(
    ("nvidia", "plugins", "environ", "words"),
    [
        (H200, {}, {}, "pip install -e '.[cuda12]'"),
        (Nvidia(("H200",), "580.65"), {}, {}, "pip install -e '.[cuda13]'"),
        (Nvidia(("/dev/nvidia0",)), {}, {}, "pip install -e '.[cuda12]'"),
        (Nvidia(("K80",), "470.82"), {}, {}, "too old for JAX: install version 525"),
        (H200, {"jax-cuda12-plugin": jaxlib()}, {"JAX_PLATFORMS": "cpu"}, "unset it"),
        (H200, {"jax-cuda12-plugin": jaxlib()}, {"CUDA_VISIBLE_DEVICES": ""}, "hides all GPUs"),
        (H200, {"jax-cuda12-plugin": "0.1.0"}, {}, "does not match jaxlib"),
        (H200, {"jax-cuda13-plugin": jaxlib()}, {}, "too old for CUDA 13"),
        (H200, {"jax-cuda12-plugin": "1", "jax-cuda13-plugin": "1"}, {}, "cannot work together"),
        (H200, {"jax-cuda12-plugin": jaxlib()}, {}, "does not start"),
    ],
)
def test_an_unused_gpu_has_a_cause_and_a_remedy(nvidia, plugins, environ, words):
    sentence = doctor.why_unused(nvidia, plugins, environ)
    assert words in sentence and "\n" not in sentence


FULL = GpuMemory(139 * GIB, 120 * GIB, ((41, 120 * GIB),))


@pytest.mark.parametrize(
    ("nvidia", "facts"),
    [
        (H200, ["1 x H200 139.0 GiB; driver 570.10, CUDA up to 12.8", "! accelerator", "installed without CUDA"]),
        (H200._replace(memory=(FULL,)), ["! GPU 0", "process 41 120.0 GiB"]),
    ],
)
def test_a_machine_that_is_not_well(nvidia, facts, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "find_nvidia", lambda: nvidia)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "not well: " in out and all(fact in out for fact in facts)


def test_platforms_that_are_not_there(monkeypatch):
    def refuse():
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr(jax, "local_devices", refuse)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    (finding,) = doctor.look_at_devices(None)
    assert finding.state == "bad" and "Unknown backend cuda" in finding.value and "unset it" in finding.value
    assert doctor.main([]) == 1


def test_gpus_by_nvml_or_by_their_device_files(monkeypatch, tmp_path):
    monkeypatch.undo()

    def absent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    assert doctor.find_nvidia(tmp_path) == Nvidia((str(tmp_path / "nvidia0"),))
    assert doctor.find_nvidia(tmp_path / "empty") is None
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetHandleByIndex": 7,
        "nvmlDeviceGetName": "H200",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=139 * GIB, used=11 * GIB),
        "nvmlDeviceGetComputeRunningProcesses": [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB),
            SimpleNamespace(pid=7, usedGpuMemory=None),
        ],
        "nvmlSystemGetCudaDriverVersion": 12080,
        "nvmlSystemGetDriverVersion": "570.10",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    memory = GpuMemory(139 * GIB, 10 * GIB, ((7, None),))  # without this process
    assert doctor.find_nvidia(tmp_path) == Nvidia(("H200 139.0 GiB",) * 2, "570.10", "12.8", (memory, memory))

    def refuse(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert doctor.read_memory(7) == GpuMemory(139 * GIB, 11 * GIB)


# A GPU that is used, and its memory and libraries


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, 0.75),
        ({"XLA_CLIENT_MEM_FRACTION": ".40"}, 0.4),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".25"}, 0.25),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, None),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, 0.75),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_CLIENT_MEM_FRACTION": ".40"}, None),
    ],
)
def test_the_share_of_memory_that_jax_takes(environ, share):
    assert read_share(environ) == share


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"XLA_CLIENT_MEM_FRACTION": ".4", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, "unset the second one"),
        ({"XLA_CLIENT_MEM_FRACTION": "40"}, "XLA_CLIENT_MEM_FRACTION=40 is not a share"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "much"}, "a number such as .40"),
    ],
)
def test_shares_that_jax_would_refuse(environ, words):
    (finding,) = check_memory({0: GpuMemory(80 * GIB, 0)}, environ)
    assert finding.state == "bad" and words in finding.value


@pytest.mark.parametrize(
    ("gpu", "environ", "state", "words"),
    [
        (GpuMemory(80 * GIB, 60 * GIB, ((12, 60 * GIB),)), {}, "bad", "process 12 60.0 GiB"),
        (GpuMemory(80 * GIB, 60 * GIB), {}, "bad", "of another container"),
        (GpuMemory(80 * GIB, 60 * GIB, ((12, None),)), {}, "bad", "set XLA_CLIENT_MEM_FRACTION=0.22"),
        (GpuMemory(80 * GIB, 79 * GIB, ((12, None),)), {}, "bad", "take another GPU (CUDA_VISIBLE_DEVICES)"),
        (GpuMemory(80 * GIB, 60 * GIB), {"XLA_CLIENT_MEM_FRACTION": ".22"}, "hint", "both get slower"),
        (GpuMemory(80 * GIB, 60 * GIB), {"XLA_PYTHON_CLIENT_PREALLOCATE": "0"}, "hint", "both get slower"),
        (GpuMemory(80 * GIB, 1 * GIB, ((12, GIB),)), {}, "hint", "process 12 1.0 GiB"),
        (GpuMemory(80 * GIB, 1 * GIB), {}, None, ""),
    ],
)
def test_other_processes_on_a_gpu(gpu, environ, state, words):
    general, *rest = check_memory({3: gpu}, environ)
    assert general.state == "" and "JAX takes" in general.value
    assert [finding.state for finding in rest] == ([] if state is None else [state])
    assert all(finding.name == "GPU 3" and words in finding.value for finding in rest)


def test_the_advised_share_fits():
    """The variable that the sentence names ends the complaint, however much memory is free."""
    for used in range(10, 76, 5):
        gpu = GpuMemory(80 * GIB, used * GIB)
        _, finding = check_memory({0: gpu}, {})
        if finding.state == "bad":
            share = finding.value.split("XLA_CLIENT_MEM_FRACTION=")[1].split(",")[0]
            assert float(share) * gpu.total < gpu.total - gpu.used
            assert check_memory({0: gpu}, {"XLA_CLIENT_MEM_FRACTION": share})[1].state == "hint"
        else:
            assert 0.75 * gpu.total <= gpu.total - gpu.used


def test_gpus_that_are_hidden_are_not_judged():
    assert visible(range(3), {}) == [0, 1, 2]
    assert visible(range(3), {"CUDA_VISIBLE_DEVICES": "2, 0"}) == [0, 2]
    assert visible(range(3), {"CUDA_VISIBLE_DEVICES": "GPU-1f2e"}) == [0, 1, 2]


def test_cuda_libraries_that_pytorch_and_jax_share():
    plugin = package(
        "jax_cuda12_plugin",
        "0.12.0",
        'nvidia-cudnn-cu12<10.0,>=9.10; sys_platform == "linux" and extra == "with-cuda"',
        'nvidia-cublas-cu12>=12.1; extra == "with-cuda"',
        "jax-cuda12-pjrt==0.11",
    )
    torch = package("torch", "2.9.0", 'nvidia-cudnn-cu12==9.1.0; platform_system == "Linux"', "nvidia-nccl-cu12==2.1")
    cublas = package("nvidia-cublas-cu12", "12.9")
    assert check_libraries([plugin, torch, cublas, package("nvidia-cudnn-cu13", "1.0")]) == []
    (finding,) = check_libraries([plugin, torch, cublas, package("nvidia_cudnn_cu12", "9.1.0")])
    assert finding.state == "bad" and finding.value.startswith("jax-cuda12-plugin 0.12.0 asks for nvidia-cudnn-cu12")
    assert "(9.1.0 is here)" in finding.value and "virtual environment" in finding.value
    (finding,) = check_libraries([plugin, torch, cublas, package("nvidia-cudnn-cu12", "9.28.0.42")])
    assert finding.state == "hint" and finding.value.startswith("torch 2.9.0 asks for nvidia-cudnn-cu12==9.1.0 (9.28")
    assert check_libraries([package("torch", "2.9.0+cpu", "filelock")]) == []


def test_a_plugin_without_a_gpu():
    assert check_absent([]).state == ""
    finding = check_absent(["jax-cuda12-plugin"])
    assert finding.state == "hint" and "jax-cuda12-plugin" in finding.value and "--gpus all" in finding.value


@pytest.mark.parametrize(
    ("num_envs", "devices", "platform", "words"),
    [
        (64, 1, "gpu", "try --num_envs 4096"),
        (4096, 8, "gpu", "8 devices of this kind mostly idle: try --num_envs 32768"),
        (1024, 1, "gpu", None),
        (64, 1, "cpu", None),
    ],
)
def test_too_few_environments_for_a_device(num_envs, devices, platform, words):
    findings = check_environments(num_envs, devices, platform)
    assert [words in finding.value and finding.state == "hint" for finding in findings] == ([True] if words else [])


# The verb


def test_the_machine_alone(capsys):
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "8 x cpu" in out and jax.__version__ in out
    assert "fits" not in out and out.endswith("all is well\n")


def test_a_run_that_fits(capsys):
    assert doctor.main(TINY) == 0
    out = capsys.readouterr().out
    assert "helpers.tiny:TinyQ on helpers.tiny:Corridor, 8 environments" in out
    assert "compiled phase 'train'" in out and "yes: it needs" in out and "all is well" in out


def test_a_run_that_does_not_fit(capsys):
    assert doctor.main([*TINY, "--num_envs", "100000", "--memory_gb", "0.001"]) == 1
    out = capsys.readouterr().out
    assert "lower --num_envs from 100000 to about" in out and "not well" in out


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_number_of_devices(tmp_path, monkeypatch, capsys):
    """What is checked is the resumed run: chunks that no longer divide are lowered, as in training."""
    config = parse([*TINY, "--devices", "2", "--num_envs", "24", "--logical_shards", "8"]).config
    config = build_run(config).config.with_run(devices=8)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(config.to_yaml())
    monkeypatch.setattr(command_line, "parse", lambda *_: SimpleNamespace(resume=run, config=config, changes={}))
    assert doctor.main(["--resume", str(run)]) == 0
    out = capsys.readouterr().out
    assert "3 environments rolled out at a time" in out and "there is no checkpoint: the run would begin again" in out
    with Checkpoints(run / "checkpoints") as checkpoints:
        checkpoints.save(7, jnp.zeros(1), {"env_steps": 56})
    assert doctor.main(["--resume", str(run)]) == 0
    assert "from checkpoint 7, after 56 environment steps" in capsys.readouterr().out
    for file in (run / "checkpoints").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert doctor.main(["--resume", str(run)]) == 1
    assert "no intact checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["--num_envs", "64"], "--algo NAME"), ([*TINY, "--num_env", "9"], "did you mean '--num_envs'?")],
)
def test_bad_input(argv, words, capsys):
    assert doctor.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error
