"""python -m jaxrl.doctor [--algo coma --num_envs 4096 ...]: is this machine ready, and will that run fit?

Prints devices, driver and library versions, and whether JAX really uses the GPU. With --algo or --config (and any other
flag of training) the run is compiled, but not started, and its memory is compared with the free memory. The exit code
is 0 if all is well, 1 if a GPU is not used, its memory is taken, its libraries do not suit, or the run does not fit.
"""

import contextlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pynvml
from rich.console import Console
from rich.text import Text

from jaxrl.cli import flags as command_line
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.gpu_checks import (
    Finding,
    GpuMemory,
    check_absent,
    check_environments,
    check_libraries,
    check_memory,
    visible,
)
from jaxrl.cli.process import divide_cores, speed_up_start
from jaxrl.report.console import gibibytes
from jaxrl.report.gpu import nvml
from jaxrl.runtime import memory_plan, run_directory
from jaxrl.runtime.build import build_run
from jaxrl.runtime.checkpoint import SMALL, CheckpointError, Checkpoints
from jaxrl.runtime.compiling import compile_run
from jaxrl.runtime.config import Config, apply_resume_changes
from jaxrl.runtime.load import resolve_config
from jaxrl.runtime.train_state import Position

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
OLDEST_DRIVER = {"cuda13": 580, "cuda12": 525}  # required by the CUDA libraries of the extras, newest first
_JAX_LIMIT = re.compile(r"jax(lib)?\b(\[\w+\])?[^;]*(<|==|~=)")  # a requirement with an upper bound
_MARKS = {"": " ", "good": "+", "hint": "i", "bad": "!"}
_STYLES = {"": "", "good": "green", "hint": "yellow", "bad": "bold red"}


Section = tuple[str, list[Finding]]  # title, lines


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    config = None
    resumed_run = None
    bad = []
    if argv:
        request = command_line.parse(argv, "python -m jaxrl.doctor", __doc__)
        resumed_run = request.resume
        if resumed_run is None:
            config = resolve_config(request.config)
        else:
            config = apply_resume_changes(request.config, request.changes)
        divide_cores(config.run.cpu_devices)
    speed_up_start()
    for section in check(config, resumed_run):
        show(section)
        bad += [finding.value for finding in section[1] if finding.state == "bad"]
    verdict = "not well: " + "; ".join(bad) if bad else "all is well"
    Console(highlight=False).print(Text(verdict, _STYLES["bad" if bad else "good"]), soft_wrap=True)
    return 1 if bad else 0


def check(config: Config | None = None, resumed_run: str | None = None) -> Iterator[Section]:
    """Check the machine, and whether a run with this configuration fits; yield each section when it is known.

    Where JAX has no device, only the machine is checked. Raises UsageError: impossible settings.
    """
    machine = look_at_devices(find_nvidia())
    yield "machine", machine
    if config is not None and machine[-1].name != "JAX":
        yield "memory", look_at_memory(config, resumed_run is not None)
    if resumed_run is not None:
        yield "checkpoint", look_at_checkpoints(resumed_run)


def show(section: Section) -> None:
    """Print a section, in colour for a terminal."""
    title, findings = section
    console = Console(highlight=False)
    width = max(len(finding.name) for finding in findings)
    console.print(Text(title, "bold cyan"))
    for name, value, state in findings:
        console.print(Text.assemble(f"{_MARKS[state]} {name:{width}}  ", (value, _STYLES[state])), soft_wrap=True)


# The machine


class Nvidia(NamedTuple):
    """The NVIDIA GPUs of this machine, whether or not JAX uses them."""

    names: tuple[str, ...]  # one per GPU
    driver: str = ""  # version of the driver, "" if not known
    cuda: str = ""  # newest CUDA version that the driver supports, "" if not known
    memory: tuple[GpuMemory, ...] = ()  # one per GPU, empty if not known


def find_nvidia(devices: Path = Path("/dev")) -> Nvidia | None:
    """Return the GPUs by NVML, else by their device files; None if there is no GPU."""
    with contextlib.suppress(pynvml.NVMLError), nvml():
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        memory = tuple(map(read_memory, handles))
        names = tuple(
            f"{pynvml.nvmlDeviceGetName(handle)} {gibibytes(gpu.total)}"
            for handle, gpu in zip(handles, memory, strict=True)
        )
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return Nvidia(names, driver, f"{cuda // 1000}.{cuda % 1000 // 10}", memory) if names else None
    device_files = tuple(sorted(map(str, devices.glob("nvidia[0-9]*"))))
    return Nvidia(device_files) if device_files else None


def read_memory(handle: Any) -> GpuMemory:
    """Read the memory of a GPU from NVML, without what this process holds. Raises pynvml.NVMLError."""
    info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes = []
    with contextlib.suppress(pynvml.NVMLError):  # not allowed in some containers
        processes = [(row.pid, row.usedGpuMemory) for row in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    held = sum(used or 0 for process, used in processes if process == os.getpid())
    others = tuple((process, used) for process, used in processes if process != os.getpid())
    return GpuMemory(int(info.total), int(info.used) - held, others)


def installed_plugins() -> dict[str, str]:
    """Return {package: version} of JAX's CUDA plugins."""
    return {package.name: package.version for package in importlib.metadata.distributions() if package.name in PLUGINS}


def why_unused(nvidia: Nvidia, plugins: Mapping[str, str], environ: Mapping[str, str], error: str = "") -> str:
    """Return a sentence on why JAX runs on the CPU of a machine with a GPU, and what to do.

    `plugins` are JAX's installed CUDA plugins, `error` is the message of its exception, if any.
    """
    chosen = {name: environ.get(name, "").lower() for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")}
    name, platforms = next(((name, text) for name, text in chosen.items() if text), ("", "gpu"))
    if not any(kind in platforms for kind in ("cuda", "gpu")):
        return f"{name}={platforms} keeps JAX off the GPU: unset it"
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs: unset it, or set it to the number of a GPU"
    extra = advised_extra(nvidia.driver)
    if extra is None:
        oldest = min(OLDEST_DRIVER.values())
        return f"the driver {nvidia.driver} is too old for JAX: install version {oldest} or newer"
    if not plugins:
        return f"JAX is installed without CUDA: pip install -e '.[{extra}]'"
    if len(plugins) > 1:
        return f"{' and '.join(plugins)} cannot work together: uninstall both, then pip install -e '.[{extra}]'"
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


def advised_extra(driver: str) -> str | None:
    """Return the extra of this package that fits a driver version, None for a driver too old."""
    number = driver.split(".")[0]
    if not number.isdecimal():
        return "cuda12"
    return next((extra for extra, oldest in OLDEST_DRIVER.items() if int(number) >= oldest), None)


def look_at_devices(nvidia: Nvidia | None) -> list[Finding]:
    """Check devices and versions, and whether JAX uses the GPU; the last finding is "JAX" if it has no device."""
    findings = []
    if nvidia is not None:
        driver = f"driver {nvidia.driver or 'unknown'}" + (f", CUDA up to {nvidia.cuda}" if nvidia.cuda else "")
        findings.append(Finding("NVIDIA", f"{_count_names(nvidia.names)}; {driver}"))
        indices = visible(range(len(nvidia.memory)), os.environ)
        findings += check_memory({index: nvidia.memory[index] for index in indices}, os.environ)
        findings += check_libraries(importlib.metadata.distributions())
    plugins = installed_plugins()
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX_PLATFORMS names an absent platform
        said = " ".join(str(error).split()) or "JAX finds no device"
        platforms = os.environ.get("JAX_PLATFORMS", "")
        cause = f"{said}, and JAX_PLATFORMS={platforms} allows no other: unset it"
        cause = why_unused(nvidia, plugins, os.environ, said) if nvidia else cause
        return [*findings, Finding("JAX", cause, "bad")]
    platform = devices[0].platform
    count = len(devices)
    memory = gibibytes(memory_plan.free_memory(devices[0], count)) + " may be used" + " on each" * (count > 1)
    cores = f", {os.cpu_count()} cores" if platform == "cpu" else ""
    kinds = _count_names([device.device_kind for device in devices])
    findings.append(Finding("JAX device", f"{kinds} ({platform}{cores}), {memory}"))
    if platform != "cpu":
        findings.append(Finding("accelerator", "JAX uses it", "good"))
        if nvidia is not None and len(nvidia.names) > count:
            idle = f"JAX sees {count} of {len(nvidia.names)} GPUs (CUDA_VISIBLE_DEVICES, or a scheduler's share)"
            findings.append(Finding("accelerator", idle, "hint"))
    elif nvidia is not None:
        findings.append(Finding("accelerator", why_unused(nvidia, plugins, os.environ), "bad"))
    else:
        findings.append(check_absent(plugins))
    all_versions = run_directory.versions() | plugins
    texts = [f"{name} {text}" for name, text in all_versions.items() if name not in ("platform", "backend", "devices")]
    limits = find_jax_limits(importlib.metadata.distributions())
    return [*findings, Finding("versions", ", ".join(texts)), *(Finding("JAX limit", text, "hint") for text in limits)]


def find_jax_limits(packages: Iterable[importlib.metadata.Distribution]) -> list[str]:
    """Return a sentence for each package that forbids newer versions of JAX, by its name."""
    limits = {}
    for package in packages:
        for requirement in package.requires or ():
            bound, _, marker = requirement.partition(";")
            if (
                _JAX_LIMIT.match(bound)
                and "extra" not in marker
                and package.name not in ("jax", "jaxlib", "jaxrl", *PLUGINS)
            ):
                limits[package.name] = (
                    f"{package.name} {package.version} requires {bound.strip()}, which may have replaced a newer JAX "
                    f"(now {importlib.metadata.version('jax')}): for the newest JAX uninstall it, or give it its own "
                    "virtual environment"
                )
    return [limits[name] for name in sorted(limits)]


def _count_names(names: Sequence[str]) -> str:
    """Return names with their counts, such as "2 x H200, 1 x T4"."""
    return ", ".join(f"{list(names).count(name)} x {name}" for name in dict.fromkeys(names))


# The run


def look_at_memory(config: Config, resuming: bool = False) -> list[Finding]:
    """Compile a new or resumed run without running it; check whether it fits. Raises UsageError."""
    run = build_run(config, resuming)
    settings = run.config.run
    about = f"{run.config.algo} on {run.config.env}, {settings.num_envs:,} environments"
    device = f"{run.mesh.size} x {jax.local_devices()[0].device_kind}, {settings.logical_shards} logical shards"
    chunks = (
        f"{settings.rollout_chunk:,} environments rolled out at a time, {settings.learn_chunk:,} samples per gradient"
    )
    findings = [
        Finding("run", f"{about}, {settings.total_env_steps:,} environment steps"),
        *(Finding("run", note, "hint" if note.startswith("warning") else "") for note in run.notes),
        Finding("layout", f"{device}; {chunks}"),
        *check_environments(settings.num_envs, run.mesh.size, jax.default_backend()),
    ]
    print("compiling the run, which takes as long as at its start ...", file=sys.stderr, flush=True)
    try:
        programs = compile_run(run, None, lambda line: findings.append(Finding("program", line)), Position())
        programs.compile()
    except memory_plan.TooLargeError as error:
        return [*findings, Finding("fits", f"no: {error}", "bad")]
    needed = f"{gibibytes(max(programs.needed))} per device, of {gibibytes(run.limit)}"
    return [*findings, Finding("fits", f"yes: it needs {needed}", "good")]


def look_at_checkpoints(run: str) -> list[Finding]:
    """Read a run's newest intact checkpoint. Raises RunError where there is no run."""
    with Checkpoints(run_directory.open_run(run) / run_directory.CHECKPOINTS) as checkpoints:
        if not checkpoints.steps():
            return [Finding("resuming", "there is no checkpoint: the run would begin again", "hint")]
        try:
            step, meta = checkpoints.newest()
        except CheckpointError as error:
            return [Finding("resuming", str(error), "bad")]
    if meta.get(SMALL):
        return [Finding("resuming", f"{run} holds only weights: start a run with --init_from", "bad")]
    if not isinstance(env_steps := meta.get("env_steps"), int):
        return [Finding("resuming", f"the metadata of checkpoint {step:,} does not say how far the run is", "bad")]
    return [Finding("resuming", f"from checkpoint {step:,}, after {env_steps:,} environment steps", "good")]
