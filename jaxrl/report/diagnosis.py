"""What a machine has, how fast it is, and whether a run fits: checks that return findings, none of which prints."""

import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax

from jaxrl.report import rates, rollout_timing
from jaxrl.report.console import format_si, gibibytes
from jaxrl.report.timing import measure_interleaved
from jaxrl.runtime import build, memory_plan, run_directory
from jaxrl.runtime.config import Config

try:
    import pynvml
except ImportError:  # not on every platform
    pynvml = None

State = Literal["", "good", "hint", "bad"]

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
OLDEST_DRIVER = {"cuda13": 580, "cuda12": 525}  # required by the CUDA libraries of the extras, newest first
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
DEAR_PAGES = 0.35  # of the copy rate; below it, print a hint about newly allocated memory
MOST_FLOWN = 4096  # environments


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        name: what was checked.
        value: what was found, in a few words or a sentence.
        state: "bad" makes the exit code 1.
    """

    name: str
    value: str
    state: State = ""


Section = tuple[str, list[Finding]]  # title, lines


# The machine


@dataclasses.dataclass(frozen=True)
class Nvidia:
    """The NVIDIA GPUs of this machine, whether or not JAX uses them.

    Attributes:
        names: one per GPU.
        driver: version of the driver, "" if not known.
        cuda: newest CUDA version that the driver supports, "" if not known.
    """

    names: tuple[str, ...]
    driver: str = ""
    cuda: str = ""


def find_nvidia() -> Nvidia | None:
    """Return the GPUs by NVML, else nvidia-smi, else device files; None if there is no GPU."""
    return _ask_nvml() or _ask_nvidia_smi() or _look_for_devices()


def _ask_nvml() -> Nvidia | None:
    if pynvml is None:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = tuple(
            f"{_text(pynvml.nvmlDeviceGetName(h))} {gibibytes(pynvml.nvmlDeviceGetMemoryInfo(h).total)}"
            for h in handles
        )
        number = pynvml.nvmlSystemGetCudaDriverVersion()
        cuda = f"{number // 1000}.{number % 1000 // 10}"
        return Nvidia(names, _text(pynvml.nvmlSystemGetDriverVersion()), cuda) if names else None
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _ask_nvidia_smi() -> Nvidia | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines() if "," in line]
    return Nvidia(tuple(row[0] for row in rows), rows[0][1]) if rows else None


def _look_for_devices(folder: Path = Path("/dev")) -> Nvidia | None:
    found = sorted(path.name for path in folder.glob("nvidia[0-9]*"))
    return Nvidia(tuple(f"/dev/{name}" for name in found)) if found else None


def installed_plugins() -> dict[str, str]:
    """Return {package: version} of JAX's CUDA plugins."""
    found = {}
    for package in PLUGINS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def why_unused(nvidia: Nvidia, plugins: Mapping[str, str], environ: Mapping[str, str], error: str = "") -> str:
    """Return a sentence on why JAX runs on the CPU of a machine with a GPU, and what to do.

    Args:
        nvidia: its GPUs.
        plugins: installed CUDA plugins of JAX.
        environ: environment variables.
        error: the message of JAX's exception, if any.
    """
    platforms = environ.get("JAX_PLATFORMS", environ.get("JAX_PLATFORM_NAME", "")).lower()
    if platforms and not any(name in platforms for name in ("cuda", "gpu")):
        return f"JAX_PLATFORMS={platforms} keeps JAX off the GPU: unset it"
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs: unset it, or set it to the number of a GPU"
    extra = advised_extra(nvidia.driver)
    if extra is None:
        oldest = min(OLDEST_DRIVER.values())
        return f"the driver {nvidia.driver} is too old for JAX: install version {oldest} or newer"
    if not plugins:
        return f"JAX is installed without CUDA: pip install -e '.[{extra}]'"
    if len(plugins) > 1:
        return f"{' and '.join(plugins)} exclude each other: uninstall both, then pip install -e '.[{extra}]'"
    name, version = next(iter(plugins.items()))
    ours = importlib.metadata.version("jaxlib")
    if version.split(".")[:2] != ours.split(".")[:2]:
        return f"{name} {version} does not match jaxlib {ours}: pip install --upgrade -e '.[{extra}]'"
    if "cuda13" in name and extra == "cuda12":
        return (
            f"the driver {nvidia.driver} is too old for CUDA 13 (it needs {OLDEST_DRIVER['cuda13']}): pip uninstall "
            f"{name} and pip install -e '.[cuda12]', or update the driver"
        )
    said = f", JAX says: {' '.join(error.split())}" if error else ""
    return (
        f"{name} {version} is installed but does not start{said}: see what JAX_PLATFORMS=cuda python -m jaxrl.doctor "
        "says (another CUDA in LD_LIBRARY_PATH is a usual cause)"
    )


def _unset(said: str) -> str:
    return f"{said}, and JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} allows no other: unset it"


def advised_extra(driver: str) -> str | None:
    """Return the extra of this package that fits a driver version, None for a driver too old."""
    if not driver.split(".")[0].isdecimal():
        return "cuda12"
    number = int(driver.split(".")[0])
    return next((extra for extra, oldest in OLDEST_DRIVER.items() if number >= oldest), None)


def look_at_devices(nvidia: Nvidia | None) -> list[Finding]:
    """Check devices and versions, and whether JAX uses the GPU."""
    findings = []
    if nvidia is not None:
        driver = f"driver {nvidia.driver or 'unknown'}" + (f", CUDA up to {nvidia.cuda}" if nvidia.cuda else "")
        findings.append(Finding("NVIDIA", f"{_counted(nvidia.names)}; {driver}"))
    plugins = installed_plugins()
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX_PLATFORMS names an absent platform
        said = " ".join(str(error).split()) or "JAX finds no device"
        cause = why_unused(nvidia, plugins, os.environ, said) if nvidia else _unset(said)
        return [*findings, Finding("JAX", cause, "bad")]
    platform = devices[0].platform
    names = _counted(tuple(device.device_kind for device in devices))
    memory = f"{gibibytes(memory_plan.free_memory(devices[0], len(devices)))} may be used" + (
        " on each" if len(devices) > 1 else ""
    )
    cores = f", {os.cpu_count()} cores" if platform == "cpu" else ""
    findings.append(Finding("JAX device", f"{names} ({platform}{cores}), {memory}"))
    if platform != "cpu":
        findings.append(Finding("accelerator", "JAX uses it", "good"))
        if nvidia is not None and len(nvidia.names) > len(devices):
            idle = f"JAX sees {len(devices)} of {len(nvidia.names)} GPUs (CUDA_VISIBLE_DEVICES, or a scheduler's share)"
            findings.append(Finding("accelerator", idle, "hint"))
    elif nvidia is not None:
        findings.append(Finding("accelerator", why_unused(nvidia, plugins, os.environ), "bad"))
    else:
        findings.append(Finding("accelerator", "none found: JAX runs on the CPU"))
    known = run_directory.versions()
    known = {name: version for name, version in known.items() if name not in ("platform", "backend", "devices")}
    known |= plugins
    findings.append(Finding("versions", ", ".join(f"{name} {version}" for name, version in known.items())))
    return findings


def _counted(names: Sequence[str]) -> str:
    """ "2 x H200, 1 x T4"."""
    return ", ".join(f"{list(names).count(name)} x {name}" for name in dict.fromkeys(names))


# Speed


def look_at_rates(width: int, quick: bool) -> list[Finding]:
    """Measure the rates of the first device."""
    found = rates.measure(width, quick=quick, rounds=1 if quick else 3)
    findings = [Finding("memory copy", f"{format_si(found.copy)}B/s read and written together")]
    if jax.default_backend() == "cpu" and found.fresh < DEAR_PAGES * found.copy:
        findings.append(Finding("fresh memory", f"{format_si(found.fresh)}B/s{huge_pages()}", "hint"))
    findings += [Finding(f"matmul {name}", f"{format_si(value)}FLOP/s") for name, value in found.matmul.items()]
    findings += [
        Finding(
            "convolution",
            f"{format_si(value)}FLOP/s forward and backward ({found.width} channels, {found.dtype}, method {name})",
        )
        for name, value in found.convolution.items()
    ]
    return findings


def huge_pages() -> str:
    """Return the advice for slow newly allocated memory."""
    asked_for = "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform == "linux" and PAGES.exists() and "[madvise]" in PAGES.read_text() and not asked_for:
        return ", far below the copy rate: huge pages help, start programs with GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    return ", far below the copy rate: let compiled calls take long (--block_seconds)"


def look_at_environment(setup: build.Run, quick: bool) -> list[Finding]:
    """Measure the speed of some copies of the environment under a random policy, without learning."""
    local, env = setup.trainer.layout.local_envs, setup.eval_env
    of_one = rollout_timing.sizes(env)
    number = rollout_timing.together(of_one, local, setup.plan.limit, env.spec.fixed_horizon)
    number = min(number, 2 if quick else MOST_FLOWN)
    name = setup.config.env
    if not number:
        return [Finding("environment", f"{name} was not measured: memory is too small to step it")]
    flight = rollout_timing.EnvTimer(env, number, stages=("policy",))
    timing = measure_interleaved(flight.samplers(), rounds=1 if quick else 3)["policy"]
    size = gibibytes(of_one.state) if of_one.state >= 2**20 else f"{of_one.state:,} bytes"
    return [
        Finding(
            "environment",
            f"{name}: {format_si(number / timing.median)} steps/s, {number:,} at a time, random policy, "
            f"no learning; {size} each; compiled in {flight.compile_seconds['policy']:.1f} s",
        )
    ]


# Memory


def look_at_memory(config: Config, compile_it: bool) -> tuple[list[Finding], build.Run]:
    """Plan the memory of a run and check whether it fits. Raises UsageError for impossible settings."""
    setup = build.unchecked_run(config)
    made, run = setup.plan, setup.config.run
    findings = [Finding("run", f"{setup.config.algo} on {setup.config.env}, {run.num_envs:,} environments, "
                        f"{run.total_env_steps:,} environment steps")]  # fmt: skip
    findings += [Finding("run", note, "hint" if note.startswith("warning") else "") for note in setup.notes]
    cuts = f"{run.rollout_chunk:,} environments rolled out at a time, {run.learn_chunk:,} samples per gradient"
    findings.append(
        Finding(
            "layout",
            f"{setup.mesh.size} x {jax.local_devices()[0].device_kind}, {run.logical_shards} logical shards; {cuts}",
        )
    )
    findings += [Finding(f"  {name}", gibibytes(size)) for name, size in made.parts.items()]
    findings.append(Finding("  together", f"{gibibytes(made.total)} per device, of {gibibytes(made.limit)}"))
    if not made.fits:
        try:
            build.build_run(config)
        except memory_plan.TooLargeError as error:
            return [*findings, Finding("fits", f"no: {error}", "bad")], setup
    largest = made.largest()
    more = f" (up to about --num_envs {largest:,})" if largest > run.num_envs else ""
    findings.append(Finding("fits", f"yes, by the plan{more}", "good"))
    if compile_it:
        findings += _compiled(setup)
    return findings, setup


def _compiled(setup: build.Run) -> list[Finding]:
    """Report the compiler's own figures."""
    lines: list[str] = []
    try:
        programs = build.compile_run(setup, None, lines.append)
    except memory_plan.TooLargeError as error:
        return [*(Finding("compiled", line) for line in lines), Finding("fits", f"no, as compiled: {error}", "bad")]
    peak = f"yes, as compiled: {gibibytes(programs.peak)} per device at most, of {gibibytes(setup.plan.limit)}"
    return [*(Finding("compiled", line) for line in lines), Finding("fits", peak, "good")]


# Everything


def checks(config: Config | None = None, compile_it: bool = False, quick: bool = False) -> Iterator[Section]:
    """Check everything; yield the sections as results arrive, only that of the machine where JAX finds no device.

    Args:
        config: the run to plan and whose environment to measure; None: the machine alone.
        compile_it: whether to compile the run for the exact memory figure.
        quick: a rehearsal, whose measured figures mean nothing.

    Raises:
        UsageError: impossible settings.
    """
    yield "machine", look_at_devices(find_nvidia())
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError):
        return
    if config is not None:
        findings, setup = look_at_memory(config, compile_it)
        yield "memory plan", findings
    width = int(config.algo_settings.get("hidden_size", 256)) if config is not None else 256
    yield "measured rates", look_at_rates(width, quick)
    if config is not None:
        yield "environment", look_at_environment(setup, quick)
