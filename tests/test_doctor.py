"""The doctor: GPUs that are not used and why, runs that fit or do not, and what it measures."""

import importlib.metadata
import subprocess

import jax
import pytest

from jaxrl.cli import doctor
from jaxrl.report import diagnosis, rates
from jaxrl.report.diagnosis import Finding, Nvidia
from jaxrl.report.timing import Timing, measure_interleaved, seconds_of, stopwatch
from jaxrl.runtime import memory_plan

TINY = [
    "--algo",
    "helpers.tiny:TinyQ",
    "--env",
    "helpers.tiny:Corridor",
    "--total_env_steps",
    "1000",
    "--num_envs",
    "8",
]
H200 = Nvidia(("H200 139.0 GiB",), "570.10", "12.8")
FOUND = rates.Rates(2e9, 1e9, {"float32": 3e9}, {"dense": 4e9}, 16, "float32")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
    """No GPU, no plugin, quick figures, wherever the tests run."""
    monkeypatch.setattr(diagnosis, "find_nvidia", lambda: None)
    monkeypatch.setattr(diagnosis, "installed_plugins", dict)
    monkeypatch.setattr(rates, "measure", lambda *_, **__: FOUND)
    monkeypatch.setattr(doctor, "enable_compilation_cache", lambda: None)
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


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
        (H200, {"jax-cuda12-plugin": "1", "jax-cuda13-plugin": "1"}, {}, "exclude each other"),
        (H200, {"jax-cuda12-plugin": jaxlib()}, {}, "does not start"),
    ],
)
def test_an_unused_gpu_has_a_cause_and_a_remedy(nvidia, plugins, environ, words):
    sentence = diagnosis.why_unused(nvidia, plugins, environ)
    assert words in sentence and "\n" not in sentence


@pytest.mark.long
def test_a_run_with_self_play_is_looked_at(capsys):
    run = "--algo ddpg --env snakes_1v1 --opponent self:1 --observation obs26 --masks false --masking false"
    assert doctor.main([*run.split(), "--num_envs", "16", "--devices", "1", "--quick"]) == 0
    assert "snakes_1v1: " in capsys.readouterr().out


def test_an_unused_gpu_is_not_well(monkeypatch, capsys):
    monkeypatch.setattr(diagnosis, "find_nvidia", lambda: H200)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "1 x H200 139.0 GiB; driver 570.10, CUDA up to 12.8" in out
    assert "! accelerator" in out and "not well: JAX is installed without CUDA" in out


def test_platforms_that_are_not_there(monkeypatch):
    def refuse():
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr(jax, "local_devices", refuse)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    (finding,) = diagnosis.look_at_devices(None)
    assert finding.state == "bad" and "Unknown backend cuda" in finding.value and "unset it" in finding.value
    assert doctor.main([]) == 1


def test_nvidia_smi_stands_in_for_nvml(monkeypatch, tmp_path):
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: f"/bin/{name}")
    answer = subprocess.CompletedProcess([], 0, stdout="NVIDIA H200, 570.10\nNVIDIA H200, 570.10\n")
    monkeypatch.setattr(diagnosis.subprocess, "run", lambda *_, **__: answer)
    assert diagnosis._ask_nvidia_smi() == Nvidia(("NVIDIA H200", "NVIDIA H200"), "570.10")

    def fail(*_, **__):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(diagnosis.subprocess, "run", fail)
    assert diagnosis._ask_nvidia_smi() is None
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    assert diagnosis._look_for_devices(tmp_path) == Nvidia(("/dev/nvidia0",))
    assert diagnosis._look_for_devices(tmp_path / "empty") is None


# The verb


def test_the_machine_alone(capsys):
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "8 x cpu" in out and jax.__version__ in out
    assert "2 GB/s read and written together" in out and "4 GFLOP/s forward and backward (16 channels" in out
    assert "memory plan" not in out and out.endswith("all is well\n")


def test_dear_pages_are_worth_a_hint(monkeypatch, tmp_path):
    pages = tmp_path / "enabled"
    pages.write_text("always [madvise] never\n")
    monkeypatch.setattr(diagnosis, "PAGES", pages)
    monkeypatch.setattr(diagnosis.sys, "platform", "linux")
    assert "GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in diagnosis.huge_pages()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert "--block_seconds" in diagnosis.huge_pages()
    dear = rates.Rates(2e9, 1e8, {}, {}, 16, "float32")
    monkeypatch.setattr(rates, "measure", lambda *_, **__: dear)
    assert [finding.state for finding in diagnosis.look_at_rates(16, quick=True)] == ["", "hint"]


def test_a_run_that_fits(capsys):
    assert doctor.main([*TINY, "--compile", "true", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "helpers.tiny:TinyQ on helpers.tiny:Corridor, 8 environments" in out
    assert "trajectory" in out and "together" in out and "yes, by the plan" in out
    assert "compiled phase 'train'" in out and "yes, as compiled" in out
    assert "steps/s, 1 at a time, random policy" in out


def test_a_run_that_does_not_fit(capsys):
    assert doctor.main([*TINY, "--num_envs", "100000", "--memory_gb", "0.001", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "the largest --num_envs that fits is" in out and "not well" in out


def test_what_the_compiler_needs_beyond_the_plan(monkeypatch):
    config, _, _ = doctor.parse(TINY)
    monkeypatch.setattr(memory_plan, "compiled_bytes", lambda program: 2**60)
    findings, _ = diagnosis.look_at_memory(config, compile_it=True)
    assert findings[-1].state == "bad" and "as compiled" in findings[-1].value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--compile", "true"], "needs a run to compile"),
        (["--compile", "maybe", *TINY], "--compile must be true or false"),
        (["--num_envs", "64"], "--algo NAME"),
        (["--algo", "comma"], "did you mean 'coma'?"),
        ([*TINY, "--num_env", "9"], "did you mean '--num_envs'?"),
        ([*TINY, "--length", "long"], "--length"),
    ],
)
def test_bad_input(argv, words, capsys):
    assert doctor.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error


def test_a_terminal_gets_colours(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    doctor.show(("machine", [Finding("JAX", "off", "bad"), Finding("memory", "on")]))
    out = capsys.readouterr().out
    assert "\x1b[" in out and "off" in out and "! " not in out


# Rates and the stopwatch


def test_rates_are_work_over_time(monkeypatch):
    monkeypatch.undo()
    seconds = {"copy": 0.5, "fresh": 1.0, "float32": 2.0, "bfloat16": 4.0, "dense": 8.0, "patches": 16.0}
    monkeypatch.setattr(rates, "measure_interleaved", lambda *_: {name: Timing((s,)) for name, s in seconds.items()})
    found = rates.measure(16, methods=("dense", "patches"), quick=True)
    assert found.copy == 2 * 4 * 2**18 / 0.5 and found.fresh == found.copy / 2
    assert found.matmul == {"float32": 2 * 64**3 / 2, "bfloat16": 2 * 64**3 / 4}
    product = 2 * 8 * 16 * 16 * 16 * 16  # samples, 4 x 4 outputs, 4 x 4 taps, channels, features
    assert found.convolution == {"dense": 3 * product / 8, "patches": 3 * product / 16}


def test_float32_products_are_not_tf32(monkeypatch):
    """On GPUs, which round to ten bits unless told not to; that rate has a name of its own."""
    monkeypatch.undo()
    asked = {}
    monkeypatch.setattr(rates, "repeated", lambda name, body, carry, least: asked.setdefault(name, (body, carry)))
    monkeypatch.setattr(rates, "measure_interleaved", lambda *_: {n: Timing((1.0,)) for n in (*asked, "copy", "fresh")})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert set(rates.measure(4, methods=("conv",), quick=True).matmul) == {"float32", "tf32", "bfloat16"}
    programs = {name: str(jax.make_jaxpr(body)(carry)) for name, (body, carry) in asked.items() if name != "conv"}
    assert {name: "HIGHEST" in text for name, text in programs.items()} == {
        "float32": True, "tf32": False, "bfloat16": False
    }  # fmt: skip
    assert "f32" in programs["tf32"] and "bf16" not in programs["tf32"]


def test_layers_are_those_of_the_network():
    found = rates.layers(16, 12)
    assert [(layer.side, layer.kernel, layer.channels) for layer in found.values()] == [
        (11, 5, 12),
        (7, 4, 16),
        (4, 4, 16),
    ]
    assert found["conv1"].flop(3) == 2 * (2 * 3 * 49 * 25 * 12 * 16)  # no gradient of the images
    assert found["conv3"].flop(3) == 3 * (2 * 3 * 16 * 16 * 16)


def test_measured_samplers_run(monkeypatch):
    monkeypatch.undo()
    found = rates.measure(4, methods=rates.METHODS, quick=True, rounds=1, least=1e-6)
    assert set(found.convolution) == set(rates.METHODS)
    assert min(found.copy, found.fresh, *found.matmul.values(), *found.convolution.values()) > 0


def test_turns_and_medians():
    calls = []

    def sampler(name, values):
        values = iter(values)

        def sample():
            calls.append(name)
            return {name: next(values)}

        return sample

    found = measure_interleaved([sampler("a", [9.0, 1.0, 2.0, 6.0]), sampler("b", [9.0, 4.0, 4.0, 4.0])], rounds=3)
    assert calls == ["a", "b"] * 4
    assert found["a"].seconds == (1.0, 2.0, 6.0) and found["a"].median == 2.0 and found["a"].spread == 2.5
    assert found["b"].spread == 0.0
    assert found["a"].plain() == {"median": 2.0, "spread": 2.5, "samples": [1.0, 2.0, 6.0]}


def test_a_sample_is_long_enough(monkeypatch):
    clock = iter(float(t) for t in range(100))
    monkeypatch.setattr("jaxrl.report.timing.time.perf_counter", lambda: next(clock))
    calls = []
    watch = stopwatch("a", lambda: calls.append(1), least=4.0)
    assert watch() == {"a": 1.0 / 4}  # one second for four calls
    assert len(calls) == 1 + 4
    assert seconds_of(lambda: None, calls=2) == 0.5
