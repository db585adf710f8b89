"""The settings of a run, from one flat mapping: `algo`, `env`, and those of run, environment and algorithm.

The mapping comes from a preset, Python or flags (`presets`, `api`, `cli`); with every automatic value written out it is
a run's config.yaml. What follows from the settings is found by `build`.
"""

import dataclasses
import difflib
import math
import os
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal

import yaml

import envs_jax
from envs_jax.settings import (
    LARGEST,
    Bounds,
    check_settings,
    closest,
    exact_value,
    setting,
    short_repr,
)
from envs_jax.stages import on_cpu
from jaxrl import algos
from jaxrl.common.dtypes import Compute, Store
from jaxrl.common.errors import UsageError, list_names, usage_errors
from jaxrl.common.files import expand_home
from jaxrl.common.yaml_files import read_mapping
from jaxrl.integrations.published import hint
from jaxrl.report import loggers

# Default environment of each algorithm.
DEFAULT_ENV = {
    "coma": "coverage", "ddpg": "snakes_3v3", "bicnet": "snakes_3v3", "sac": "reach", "ppo": "reach",
    "collective": "reach", "student": "reach",
}  # fmt: skip
MAX_ENVS = 2**24  # most environments in a run
_COUNT = (0, 1e15)


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Length, size, devices and outputs of a run."""

    # fmt: off
    num_envs: int = setting(0,
        "number of environments stepped in parallel; 0 = what the algorithm's settings imply; more of them use the "
        "device better and need more memory", between=(0, MAX_ENVS))
    envs_per_iteration: int = setting(0,
        "most environments that an iteration takes, in turn, where iterations begin new episodes; many small "
        "iterations learn more than a few large ones, and a CPU computes them as fast; 0 = all", between=(0, MAX_ENVS))
    seed: int = setting(0, "random seed of the run", between=(0, 2**32 - 1))
    num_seeds: int = setting(1,
        "number of seeds trained together in one program: the seed of the run and the next ones; devices share them",
        between=(1, 4096))
    sweep: str = setting("",
        "values of the algorithm's settings to compare in one program, such as actor_lr=1e-4,3e-4; several settings "
        "are separated by spaces, and each combination of their values is trained with each seed")
    total_env_steps: int = setting(0,
        "stop after this many environment steps, summed over all environments and rounded up to whole iterations",
        between=_COUNT)
    total_episodes: int = setting(0,
        "stop after this many episodes, summed over all environments; only where all episodes have the same length: "
        "coverage, reach, snakes", between=_COUNT)
    max_seconds: float = setting(0.0,
        "stop after this many seconds of training in this process; 0 = no limit; schedules do not depend on it",
        between=(0, 1e9))
    schedule_env_steps: int = setting(0,
        "environment steps over which schedules of the algorithm's settings run; 0 = the total of the first start; a "
        "larger number makes them slower", between=_COUNT)
    init_from: str = setting("",
        "source of the initial weights: a run (its best checkpoint, or the one that --checkpoint names), the folder "
        "of a checkpoint, or actor.pth[,critic.pth] of the published snakes trainer; empty = random weights")
    devices: int = setting(0, "number of local devices that share the work; 0 = all", between=(0, 1e6))
    cpu_devices: int = setting(1,
        "number of devices into which the command divides the cores of a CPU, on a single host; 0 = one for each "
        "core, but 1, 2, 4 or 8; the variable JAX_NUM_CPU_DEVICES overrides it", between=(0, 8))
    logical_shards: int = setting(0,
        "number of parts of the batch that are sampled separately, independent of the number of devices; 0 = the "
        "largest of 8, 4, 2, 1 that fits; at most as many devices can share the batch")
    rollout_chunk: int = setting(0,
        "number of environments that a device rolls out at a time in phases that restart them; 0 = chosen by the free "
        "memory; a larger chunk needs more memory", between=(0, MAX_ENVS))
    learn_chunk: int = setting(0,
        "number of samples whose gradient a device computes at a time; the minibatch adds these gradients up; 0 = "
        "chosen by the free memory; a larger chunk needs more memory", between=(0, 1e9))
    compute_dtype: Compute = setting("auto",
        "dtype of matrix products and convolutions; auto = bfloat16 on accelerators, float32 on CPUs")
    rollout_dtype: Store = setting("auto",
        "dtype in which observations with values in [0, 1] are stored; auto = float16")
    memory_gb: float = setting(0.0,
        "memory in GiB that the run may use on each device; 0 = all free memory", between=(0, 1e6))
    block_iterations: int = setting(64,
        "maximum number of iterations in one compiled call; longer calls cost less overhead and report less often",
        between=(1, 10_000))
    log_every: int = setting(0,
        "number of iterations averaged into one row of metrics; 0 = about 10,000 rows for the whole run, with fewer "
        "iterations per row at its beginning", between=(0, 1e9))
    self_play: int = setting(4,
        "maximum number of snapshots of the learner that play where the opponent is 'self', lowered to a divisor of "
        "num_envs; more of them vary the opponents more and need more memory", between=(1, 1000))
    self_play_every: int = setting(256_000,
        "environment steps between two snapshots, summed over all environments and rounded to whole iterations; a new "
        "snapshot replaces the oldest", between=(1, 1e12))
    eval_every: int = setting(0,
        "environment steps between two evaluations that select the best checkpoint, summed over all environments and "
        "rounded to whole iterations; 0 = no evaluations", between=(0, 1e12))
    eval_episodes: int = setting(64,
        "number of episodes of an evaluation that selects the best checkpoint, rounded up to a multiple of 8; more of "
        "them make the choice more reliable and take longer", between=(1, 100_000))
    checkpoint_every: int | str = setting("5min",
        "time between two checkpoints, in minutes, such as 5min, or as a number of iterations, such as 200; one is "
        "always written at the end")
    keep_checkpoints: int = setting(3,
        "number of newest checkpoints to keep, in addition to the best one; more of them need more disk space",
        between=(1, 1_000_000))
    runs: str = setting("runs", "folder in which run directories are made")
    logger: str = setting(loggers.NONE, "service that also gets the metrics: wandb, or none",
        choices=(loggers.NONE, loggers.WANDB))
    # fmt: on

    def __post_init__(self) -> None:
        check_settings(self)
        if self.logical_shards not in (0, 1, 2, 4, 8):
            raise ValueError(f"logical_shards must be 1, 2, 4 or 8 (or 0 = automatic), not {self.logical_shards}")
        if self.seed + self.num_seeds > 2**32:
            raise ValueError(f"seed {self.seed} + num_seeds {self.num_seeds} exceeds 2^32: lower one of them")
        if max(self.checkpoint_iterations, self.checkpoint_seconds) <= 0:
            raise ValueError(
                "checkpoint_every must be a number of minutes, such as 5min, or of iterations, such as 200, not "
                f"{short_repr(self.checkpoint_every)}"
            )

    @property
    def checkpoint_iterations(self) -> int:
        """Iterations between two checkpoints; 0 where minutes are between them."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else 0

    @property
    def checkpoint_seconds(self) -> float:
        """Seconds between two checkpoints; 0 where iterations are between them."""
        minutes = re.fullmatch(r"(\d{1,6}(?:\.\d+)?) ?min", str(self.checkpoint_every))
        return 60 * float(minutes[1]) if minutes else 0.0


# Settings that may change when a run is resumed. Devices change the order in which floats are added; no other of these
# settings changes the result of the next iteration.
# host_workers is a setting of environments: how many processes step them follows the machine, as devices do.
FREE_ON_RESUME = (
    "total_env_steps", "total_episodes", "max_seconds", "devices", "cpu_devices", "memory_gb", "block_iterations",
    "log_every", "eval_every", "eval_episodes", "checkpoint_every", "keep_checkpoints", "logger", "host_workers",
)  # fmt: skip
# Settings in which a run and its checkpoints may differ; rollout_chunk follows the devices, and changes no result.
NOT_COMPARED = (*FREE_ON_RESUME, "rollout_chunk")
TOTALS = ("total_env_steps", "total_episodes")  # alternatives
CPU = "cpu"  # the section of a preset with other values for a CPU


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of one run; `env_settings` and `algo_settings` hold every field of their classes.

    `cpu_settings` are other values that a new run has on a CPU, a preset's section `cpu`.
    """

    algo: str
    env: str
    run: RunSettings
    env_settings: dict[str, Any]
    algo_settings: dict[str, Any]
    cpu_settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.algo, self.env, self.run))  # the dictionaries of settings have no hash

    def flat(self) -> dict[str, Any]:
        """Return the flat mapping, in the order of config.yaml, without `cpu_settings`."""
        head = {"algo": self.algo, "env": self.env}
        return {**head, **dataclasses.asdict(self.run), **self.env_settings, **self.algo_settings}

    def plain(self) -> dict[str, Any]:
        """Return the flat mapping in the types of YAML and JSON."""
        values = self.flat() | ({CPU: _make_plain(self.cpu_settings)} if self.cpu_settings else {})
        return _make_plain(values)

    def with_run(self, **changes: Any) -> "Config":
        """Return a copy with other run settings. Raises UsageError for impossible values."""
        with usage_errors():
            return dataclasses.replace(self, run=dataclasses.replace(self.run, **changes))

    def to_yaml(self) -> str:
        """Return the text of config.yaml, which reproduces the run with `--config`."""
        return yaml.safe_dump(self.plain(), sort_keys=False)

    def make_env(self) -> "envs_jax.Environment":
        """Return the environment. Raises UsageError for impossible settings."""
        with usage_errors():
            return envs_jax.make(self.env, **self.env_settings)


def _make_plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Field:
    """A setting as its dataclass declares it; `section` is "run", "environment" or "algorithm"."""

    name: str
    kind: Any
    default: Any
    section: str
    help: str
    flag: bool  # whether the command line may set it
    between: Bounds | None


def declared_fields(cls: type, section: str) -> dict[str, Field]:
    """Return the settings that a dataclass declares, its own before those of its bases.

    Raises UsageError for one that cannot be a flag.
    """
    order = {name: index for index, name in enumerate(vars(cls).get("__annotations__", ()))}
    kinds = typing.get_type_hints(cls)
    arguments = ("spec", "layout", "custom") if section == "algorithm" else ()
    fixed = _fixed_settings(cls, kinds) if section == "algorithm" else {}
    fields = {
        f.name: Field(
            *(f.name, kinds[f.name], fixed.get(f.name, f.default), section, f.metadata.get("help", "")),
            *(f.metadata.get("flag", True), f.metadata.get("between")),
        )
        for f in sorted(dataclasses.fields(cls), key=lambda f: order.get(f.name, len(order)))
        if f.init and f.name not in arguments
    }
    for field in fields.values():
        if field.default is dataclasses.MISSING:
            raise UsageError(f"the {section} setting '{field.name}' has no default: declare it with setting(...)")
        if not _can_be_flag(field.kind):
            raise UsageError(
                f"the {section} setting '{field.name}' is of type {field.kind}: declare it as bool, int, float, str, "
                "a Literal, or a tuple or a union of them"
            )
    return fields


def _can_be_flag(kind: Any) -> bool:
    """Return whether the command line can set a field of this kind."""
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if origin is tuple:
        parts = parts[:1]
    if origin in (tuple, typing.Union, types.UnionType):
        return all(map(_can_be_flag, parts))
    return kind in (bool, int, float, str) or origin is Literal


def _fixed_settings(cls: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    """Return an algorithm's `fixed_settings` in the types of its fields. Raises UsageError: no such setting."""
    for name in cls.fixed_settings:
        if name not in kinds:
            raise UsageError(f"fixed_settings of {cls.__name__} names {short_repr(name)}: {closest(name, kinds)}")
    with usage_errors():
        return {name: exact_value(name, value, kinds[name]) for name, value in cls.fixed_settings.items()}


def find_fields(name: str, section: str) -> dict[str, Field]:
    """Return the settings of an algorithm or environment by name. Raises UsageError for an unknown one."""
    with usage_errors():
        cls: type = algos.find(name) if section == "algorithm" else envs_jax.base.find(name)
    return declared_fields(cls, section)


def make_schema(algo: str, env: str, with_env: bool = True) -> dict[str, Field]:
    """Return all settings by name; `with_env` includes the environment's, whose package must then be installed.

    Raises UsageError for unknown names and for duplicates.
    """
    algo_fields = find_fields(algo, "algorithm")
    schema = declared_fields(RunSettings, "run")
    for section, fields in (
        ("environment", find_fields(env, "environment") if with_env else {}),
        ("algorithm", algo_fields),
    ):
        for name, field in fields.items():
            if name in schema or name in ("algo", "env", "config", "resume"):
                owner = schema[name].section if name in schema else "run"
                raise UsageError(
                    f"'{algo}' cannot be run on '{env}': the {section} setting '{name}' is already a setting of the "
                    f"{owner}; choose another environment, or rename a setting of your own"
                )
            schema[name] = field
    return schema


def check_value(field: Field, value: Any, where: str) -> Any:
    """Convert a value from YAML, the command line or Python to the field's type, see `exact_value`.

    Words may be paths, in which "~" is replaced. Raises UsageError, which begins with `where`.
    """
    if field.kind is str and isinstance(value, str | os.PathLike):
        value = expand_home(os.fspath(value))
    try:
        return exact_value(field.name, value, field.kind, field.between or (-LARGEST, LARGEST), texts=True)
    except ValueError as error:
        unit = " (a share of the run: 0.1 is a tenth)" if field.help.startswith("share of the run") else ""
        raise UsageError(f"{where}: {error}{unit}") from None


def _is_plain(value: Any) -> bool:
    """Return whether a value has a type that a setting can have."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the settings of a YAML file. Raises UsageError: it cannot be read."""
    loaded = read_mapping(path)
    for name in ("algo", "env"):
        if not isinstance(loaded.get(name, ""), str):
            raise UsageError(f"{path}: {name} must be a name, not {short_repr(loaded[name])}")
    return loaded


def for_this_device(config: Config) -> Config:
    """Return the configuration of a new run on this process's device: preset and environment choose some settings."""
    if on_cpu() and config.cpu_settings:
        config = build({**config.flat(), **config.cpu_settings}, "the preset's values for a CPU")
    env = config.make_env().for_this_device()
    env_settings = {name: getattr(env, name) for name in config.env_settings}
    return dataclasses.replace(config, env_settings=env_settings, cpu_settings={})


def build(values: dict[str, Any], where: str, with_env: bool = True) -> Config:
    """Build a configuration from a flat mapping with at least `algo`; `cpu` may hold other values for a CPU.

    Where `with_env` is false, settings that are neither the run's nor the algorithm's are the environment's and are not
    checked. This is enough to list runs where the environment's package is not installed.

    Raises UsageError.
    """
    algo = values.get("algo")
    if algo is None:
        raise UsageError(f"{where} names no algorithm: add 'algo: NAME', one of {', '.join(algos.ALGORITHMS)}")
    env = find_env_name(values)
    if env is None:
        raise UsageError(f"{where} names no environment for the algorithm '{algo}': add --env")
    schema = make_schema(algo, env, with_env)
    settings = {name: field.default for name, field in schema.items()}
    sections: dict[str, dict[str, Any]] = {"run": {}, "environment": {}, "algorithm": {}}
    for name, value in values.items():
        if name in ("algo", "env", CPU):
            continue
        if name not in schema and not with_env:
            if not _is_plain(value):
                raise UsageError(f"{where}: {name} must be a number, a word or a list, not {short_repr(value)}")
            sections["environment"][name] = value
            continue
        if name not in schema:
            advice = hint(name, algo, "")
            if not advice and (owners := describe_owners(name, algo)):
                raise UsageError(f"{where}: {short_repr(name)} {owners}: leave it out")
            helps = {name: field.help for name, field in schema.items()}
            raise UsageError(f"{where}: unknown setting {short_repr(name)}: {advice or suggestion(name, helps)}")
        settings[name] = check_value(schema[name], value, where)
    for name, field in schema.items():
        sections[field.section][name] = settings[name]
    with usage_errors():
        run = RunSettings(**sections["run"])
    config = Config(algo, env, run, sections["environment"], sections["algorithm"])
    if CPU not in values:
        return config
    changed = build({**config.flat(), **_read_cpu_section(values[CPU], where)}, f"{where}, {CPU}").flat()
    return dataclasses.replace(config, cpu_settings={name: changed[name] for name in values[CPU]})


def _read_cpu_section(section: Any, where: str) -> dict[str, Any]:
    if not isinstance(section, dict) or section.keys() & {"algo", "env", CPU}:
        raise UsageError(f"{where}: {CPU} must hold settings and their values on a CPU, not {short_repr(section)}")
    return section


def apply_changes(config: Config, changes: dict[str, Any], where: str = "the command line") -> Config:
    """Apply the user's changes to a configuration; one kind of total replaces the other. Raises UsageError."""
    values = config.flat()
    has_total = any(changes.get(name) for name in TOTALS)
    if has_total:
        values |= dict.fromkeys(TOTALS, 0)
    cpu = {name: value for name, value in config.cpu_settings.items() if name not in changes}
    if has_total:
        cpu = {name: value for name, value in cpu.items() if name not in TOTALS}
    result = dataclasses.replace(build({**values, **changes}, where), cpu_settings=cpu)
    for name in TOTALS:
        if name in changes and not has_total:
            raise UsageError(f"{where}: {name} must be at least 1, not 0: leave it out to keep what was set before")
    return result


def apply_resume_changes(config: Config, changes: dict[str, Any]) -> Config:
    """Return the configuration of a resumed run. Raises UsageError that names a setting that may not change."""
    for name, value in changes.items():
        if name not in FREE_ON_RESUME and value != config.flat()[name]:
            free = ", ".join(free for free in FREE_ON_RESUME if free in config.flat())
            raise UsageError(
                f"{name} cannot change on resume (the run has {short_repr(config.flat()[name])}, you gave "
                f"{short_repr(value)}): "
                f"start a new run with --init_from, or change only {free}"
            )
    return apply_changes(config, changes)


def describe_owners(name: str, algo: str) -> str:
    """Return "is a setting of ..., not of ..." for a setting that other algorithms or environments have, else ""."""
    fields = {known: find_fields(known, "algorithm").get(name) for known in algos.ALGORITHMS}
    owners = [known for known, field in fields.items() if field is not None and field.flag]
    if owners := [known for known in owners if name not in algos.find(known).fixed_settings]:
        return f"is a setting of {list_names(owners)}, not of '{algo}'"
    owners = [env for env in envs_jax.base.registry if name in find_fields(env, "environment")]
    return f"is a setting of {list_names(owners)}, not of this environment" if owners else ""


def suggestion(word: str, known: dict[str, str]) -> str:
    """Return half a sentence that suggests names for an unknown word; `known` is {name: its explanation}."""
    words = re.split("[-_]+", word[:100].strip("-").lower())
    ending = "_" + "_".join(words)
    meaning = " ".join(words)
    akin = [name for name in known if name.endswith(ending)]
    if len(words) > 1:
        akin += [name for name, text in known.items() if text.startswith(meaning) and name not in akin]
        akin = akin or [name for name, text in known.items() if _explains(name, text, words)]
    if akin:
        return f"did you mean {' or '.join(akin[:4])}?"
    bare = {name.strip("-"): name for name in known}  # all flags begin with dashes
    matches = difflib.get_close_matches(word[:100].strip("-"), list(bare), n=1, cutoff=0.68)
    return f"did you mean '{bare[matches[0]]}'?" if matches else "see --help for all of them"


def _explains(name: str, text: str, words: list[str]) -> bool:
    """Return whether a setting's name holds the first of several words, and its explanation or name the others."""
    parts = re.split("[-_]+", name.strip("-"))
    return words[0] in parts and {*words} <= {*parts, *re.findall(r"\w+", text.lower())}


def find_env_name(values: dict[str, Any]) -> str | None:
    """Return the environment of a flat mapping, or the default one of its algorithm, or of that which it extends.

    Raises UsageError: there is no such algorithm.
    """
    algo = values.get("algo", "")
    if "env" in values or algo in DEFAULT_ENV or ":" not in algo:
        return values.get("env", DEFAULT_ENV.get(algo))
    with usage_errors():
        return next((DEFAULT_ENV[name] for name in algos.find_ancestors(algo) if name in DEFAULT_ENV), None)
