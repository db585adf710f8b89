"""Checks of a GPU's memory and libraries for `jaxrl.doctor`: pure functions of what was read, each with its remedy."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxrl.report.console import gibibytes

PREALLOCATED = 0.75  # share of a GPU's memory that JAX takes at its start by default
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the newer name first
BASE_LOAD = 0.05  # share of the memory that the driver may hold without a process
FEW_ENVIRONMENTS = 1024  # per device; below it, snakes and reach leave most of an H200 idle
_CUDA_USERS = ("torch", "jax-cuda")  # beginnings of the names of packages that bring CUDA libraries


class Finding(NamedTuple):
    """A line of the report: what was checked, and the result; "bad" makes the exit code 1."""

    name: str
    value: str
    state: Literal["", "good", "hint", "bad"] = ""


class GpuMemory(NamedTuple):
    """Memory of a GPU before this process uses it, in bytes."""

    total: int
    used: int
    processes: tuple[tuple[int, int | None], ...] = ()  # (process id, bytes, None if the driver does not say)


def read_share(environ: Mapping[str, str]) -> float | None:
    """Return the share of a GPU's memory that JAX takes at its start, None if it takes memory when it needs it.

    Raises ValueError, with a sentence: the variables contradict each other, or are no share.
    """
    chosen = [name for name in FRACTIONS if environ.get(name)]
    if len(chosen) == 2:
        raise ValueError(f"{' and '.join(chosen)} are both set, and JAX does not start: unset the second one")
    share = PREALLOCATED
    if chosen:
        text = environ[chosen[0]]
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise ValueError(f"{chosen[0]}={text} is not a share of the memory: use a number such as .40")
    by_need = environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") in ("false", "False", "0")
    return None if by_need or environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform" else share


def check_memory(gpus: Mapping[int, GpuMemory], environ: Mapping[str, str]) -> list[Finding]:
    """Check how much memory JAX takes of these GPUs, by their numbers, and whether other processes leave that much."""
    try:
        share = read_share(environ)
    except ValueError as error:
        return [Finding("memory", str(error), "bad")]
    if share is None:
        findings = [Finding("memory", "JAX takes a GPU's memory when it needs it, which may fragment it")]
    else:
        text = (
            f"JAX takes {share:.0%} of a GPU's memory at its start and keeps it; to share the GPU set "
            f"{FRACTIONS[0]}=.40, or XLA_PYTHON_CLIENT_PREALLOCATE=false"
        )
        findings = [Finding("memory", text)]
    return findings + [
        finding for index, gpu in gpus.items() if (finding := _check_others(index, gpu, share)) is not None
    ]


def _check_others(index: int, gpu: GpuMemory, share: float | None) -> Finding | None:
    """Return what other processes hold of a GPU, None if they hold nothing."""
    if not gpu.processes and gpu.used <= BASE_LOAD * gpu.total:
        return None
    free = gpu.total - gpu.used
    holders = ", ".join(
        f"process {process}" + (f" {gibibytes(held)}" if held is not None else "") for process, held in gpu.processes
    )
    text = f"others hold {gibibytes(gpu.used)} of its {gibibytes(gpu.total)} ({holders or 'of another container'})"
    fitting = math.floor(90 * free / gpu.total) / 100  # a tenth is left for what is not in JAX's pool
    other = "another GPU (CUDA_VISIBLE_DEVICES)"
    if share is not None and share * gpu.total > free:
        advice = f"set {FRACTIONS[0]}={fitting:.2f}, or take {other}" if fitting >= 0.05 else f"take {other}"
        text += f", and JAX asks for {gibibytes(share * gpu.total)}: {advice}"
        return Finding(f"GPU {index}", text, "bad")
    return Finding(f"GPU {index}", f"{text}: both get slower; {other} may be free", "hint")


def visible(indices: Iterable[int], environ: Mapping[str, str]) -> list[int]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves; all where it is unset or gives no numbers."""
    names = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if not all(name.isdecimal() for name in names):
        return list(indices)
    return [index for index in indices if str(index) in names]


def check_libraries(packages: Iterable[Any]) -> list[Finding]:
    """Check that NVIDIA's libraries in this environment suit PyTorch and JAX's plugins, which share them.

    `packages` have a name, a version and requirements (requires), as `importlib.metadata.distributions`. A library that
    is not installed is left out: it may come from the system.
    """
    installed = {canonicalize_name(package.name): package for package in packages if package.name}
    findings = []
    for name, package in sorted(installed.items()):
        if not name.startswith(_CUDA_USERS):
            continue
        unmet = []
        for text in package.requires or ():
            required = Requirement(text)
            library = installed.get(canonicalize_name(required.name))
            used = required.marker is None or required.marker.evaluate({"extra": "with-cuda"})
            if not used or library is None or not required.name.startswith("nvidia-"):
                continue
            if not required.specifier.contains(library.version, prereleases=True):
                unmet.append(f"{required.name}{required.specifier} ({library.version} is here)")
        if unmet:
            text = (
                f"{name} {package.version} asks for {', '.join(unmet)}: another package replaced them; give PyTorch "
                "and JAX a virtual environment each"
            )
            findings.append(Finding("libraries", text, "bad" if name.startswith("jax") else "hint"))
    return findings


def check_absent(plugins: Iterable[str]) -> Finding:
    """Return what it means that this machine has no NVIDIA GPU, with these CUDA plugins of JAX installed."""
    names = " and ".join(sorted(plugins))
    if not names:
        return Finding("accelerator", "none found: JAX runs on the CPU")
    text = (
        f"JAX runs on the CPU: {names} is installed, but there is no NVIDIA GPU (does nvidia-smi list one? A container "
        "needs --gpus all)"
    )
    return Finding("accelerator", text, "hint")


def check_environments(num_envs: int, devices: int, platform: str) -> list[Finding]:
    """Check that a run has enough environments to keep its devices busy; a CPU always has."""
    if platform == "cpu" or num_envs >= FEW_ENVIRONMENTS * devices:
        return []
    text = (
        f"{num_envs:,} environments leave {'a device' if devices == 1 else f'{devices} devices'} of this kind mostly "
        f"idle: try --num_envs {4 * FEW_ENVIRONMENTS * devices}"
    )
    return [Finding("environments", text, "hint")]
