"""Tuned settings: the fastest measured values on a kind of device, for the automatic values of new runs.

Tables are JSON files {job: {setting: value}}: one is part of the package, `bench.gpu` writes others. A job is an
algorithm in an environment, with networks and environments of one size, on one kind of device; see `job`.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import short_repr
from envs_jax.batch import BatchedEnvironment
from jaxrl.algos.base import Algorithm
from jaxrl.common.errors import UsageError
from jaxrl.common.files import cache_root
from jaxrl.report.cache import Warn, cache_folder, read_measured, write_measured
from jaxrl.runtime import memory_plan
from jaxrl.runtime.config import Config

FILE = "tuned.json"
PACKAGED = Path(__file__).with_name(FILE)
AUTO = "auto"  # of `--compiler_options`


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Settings measured to be fastest; the defaults where nothing was measured.

    Attributes:
        rollout_chunk, learn_chunk, compiler_options: see `RunSettings`.
    """

    rollout_chunk: int = 0
    learn_chunk: int = 0
    compiler_options: str = ""


def files() -> list[Path]:
    """Return the tables, later ones taking precedence."""
    return list(dict.fromkeys((PACKAGED, cache_root() / FILE, cache_folder() / FILE)))


def device_kind() -> str:
    """Return the name of this process's device."""
    return jax.local_devices()[0].device_kind


def job(config: Config, env: BatchedEnvironment, algo: Algorithm, kind: str | None = None) -> str:
    """Return the name of a job: equal names need equal memory for each environment and each sample."""
    sizes = f"{memory_plan.rollout_env_bytes(env)} bytes an environment, {algo.memory.sample_bytes} a sample"
    return f"{config.algo} on {config.env}, {sizes}, on {kind or device_kind()}"


def find(config: Config, env: BatchedEnvironment, algo: Algorithm, warn: Warn) -> Tuned:
    """Return what was measured for a job on this process's device; invalid values are dropped."""
    tables = [read_measured(file, warn) for file in files()]
    if not any(tables):
        return Tuned()
    name = job(config, env, algo)
    given: dict[str, Any] = {}
    for table in tables:
        given |= table[name] if isinstance(table.get(name), dict) else {}
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Tuned)}
    values = {name: given[name] for name, kind in kinds.items() if type(given.get(name)) is kind}
    try:
        parse_options(values.get("compiler_options", ""))
    except UsageError:
        del values["compiler_options"]
    return Tuned(**values)


def record(job: str, entry: dict[str, Any], file: Path, warn: Warn) -> None:
    """Add settings of a job to the table in a file."""
    former = read_measured(file, lambda _: None).get(job)
    write_measured(file, {job: (former if isinstance(former, dict) else {}) | entry}, warn)


# Options of the compiler


def parse_options(text: str) -> dict[str, str | bool]:
    """Parse "name=value name=value" into XLA's options. Raises UsageError."""
    options: dict[str, str | bool] = {}
    for word in text.split():
        name, sign, value = word.removeprefix("--").partition("=")
        if not name or not sign:
            raise UsageError(
                f"compiler_options: {short_repr(word)} is not an option: write name=value, separated by spaces"
            )
        options[name] = {"true": True, "false": False}.get(value, value)
    return options


def write_options(options: dict[str, str | bool]) -> str:
    """Return the text that `parse_options` reads."""
    return " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()
    )


@functools.cache  # a small compilation
def refusal(name: str, value: str | bool) -> str:
    """Return why this machine's compiler rejects an option; "" if it accepts it."""
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(jnp.float32(0)).compile()
    except TypeError:
        return f"{short_repr(str(value))} is of the wrong kind"
    except RuntimeError as error:
        return str(error).splitlines()[0].rpartition("INVALID_ARGUMENT: ")[2]
    return ""


def known_options(text: str) -> tuple[str, list[str]]:
    """Return the options that this machine's compiler accepts, and sentences about the others. Raises UsageError."""
    taken, refused = {}, []
    for name, value in parse_options(text).items():
        if why := refusal(name, value):
            refused.append(f"the compiler option {name} cannot be used here ({why})")
        else:
            taken[name] = value
    return write_options(taken), refused
