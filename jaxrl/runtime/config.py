"""Settings of a run: defaults of the dataclasses < a YAML preset < flags.

A configuration is one flat mapping: `algo`, `env`, the fields of `RunSettings`, those of the environment's class
and those of the algorithm's class. The same mapping, fully resolved, is written to a run's config.yaml.
"""

import contextlib
import dataclasses
import difflib
import math
import os
import re
import typing
from pathlib import Path
from typing import Any

import yaml

import envs_jax
from envs_jax.settings import check_bounds, check_settings, exact_value, kind_name, setting, short_repr
from jaxrl import algos
from jaxrl.common.dtypes import Compute, Store
from jaxrl.common.errors import UsageError, usage_errors
from jaxrl.common.files import expand_home
from jaxrl.common.yaml_files import read_mapping
from jaxrl.report import loggers
from jaxrl.runtime.declared import Field, fields_of, find_fields
from jaxrl.runtime.published import hint
from jaxrl.runtime.run_directory import CONFIG, check_version, open_run
from jaxrl.runtime.spaces import check_spaces

# Default environment of each algorithm.
DEFAULT_ENV = {
    "coma": "coverage", "ddpg": "snakes_3v3", "bicnet": "snakes_3v3", "sac": "reach", "ppo": "reach",
    "collective": "reach", "student": "reach",
}  # fmt: skip
MAX_ENVS = 2**24  # environments of a run
_COUNT = (0, 1e15)


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Length, size, devices and outputs of a run."""

    num_envs: int = setting(
        0, "number of parallel environments; 0 = what the algorithm's settings imply", between=(0, MAX_ENVS)
    )
    seed: int = setting(0, "random seed", between=(0, 2**32 - 1))
    num_seeds: int = setting(
        1, "runs in one program, with this seed and the next ones; devices share the seeds", between=(1, 4096)
    )
    sweep: str = setting(
        "",
        "values of settings of the algorithm that are compared in one program, such as actor_lr=1e-4,3e-4; several "
        "settings, separated by spaces, in all combinations; each with all seeds",
    )
    total_env_steps: int = setting(
        0, "stop after this many environment steps (all environments together), in whole iterations", between=_COUNT
    )
    total_episodes: int = setting(
        0, "stop after this many episodes, where all have one length: coverage, reach, snakes", between=_COUNT
    )
    max_seconds: float = setting(
        0.0, "stop after this many seconds of training (of each process); does not change schedules", between=(0, 1e9)
    )
    schedule_env_steps: int = setting(
        0, "environment steps over which schedules run; 0 = the total of the first start", between=_COUNT
    )
    init_from: str = setting(
        "",
        "initial weights: a run (its best checkpoint, or that of --checkpoint), the folder of a checkpoint, or "
        "actor.pth[,critic.pth] of the published snakes trainer; empty = random",
    )
    devices: int = setting(0, "local devices to use; 0 = all", between=(0, 1e6))
    cpu_devices: int = setting(
        1, "devices that the cores of a CPU are divided into, by this command on a single host; 0 = one for each core, "
        "but 1, 2, 4 or 8 (JAX_NUM_CPU_DEVICES counts more)", between=(0, 8),
    )  # fmt: skip
    logical_shards: int = setting(
        0, "parts of the batch that are sampled separately; 0 = the largest of 8, 4, 2, 1 that fits"
    )
    rollout_chunk: int = setting(
        0, "environments rolled out at a time in phases that restart them; 0 = by the free memory",
        between=(0, MAX_ENVS),
    )  # fmt: skip
    learn_chunk: int = setting(
        0, "samples per gradient evaluation, accumulated over the minibatch; 0 = by the free memory",
        between=(0, 1e9),
    )  # fmt: skip
    compute_dtype: Compute = setting("auto", "dtype of matmuls and convolutions; auto = bfloat16 on accelerators")
    rollout_dtype: Store = setting("auto", "dtype of stored observations in [0, 1]; auto = float16")
    memory_gb: float = setting(0.0, "memory limit per device in GiB; 0 = all free memory", between=(0, 1e6))
    block_iterations: int = setting(64, "maximum number of iterations per compiled call", between=(1, 10_000))
    block_seconds: float = setting(1.0, "target duration of a compiled call in seconds", between=(1e-3, 1e6))
    log_every: int = setting(
        0, "iterations per row of metrics, which are averaged; 0 = as many as make some 10,000 rows of the whole run, "
        "fewer at its beginning", between=(0, 1e9),
    )  # fmt: skip
    self_play: int = setting(
        4,
        "maximum number of learner snapshots that play where the opponent is 'self'; divides the number of games",
        between=(1, 1000),
    )
    self_play_every: int = setting(
        256_000,
        "environment steps (all environments together) between snapshots, in whole iterations; a new one replaces the "
        "oldest",
        between=(1, 1e12),
    )
    eval_every: int = setting(
        0,
        "environment steps (all environments together) between evaluations that select the best checkpoint, in whole "
        "iterations; 0 = never",
        between=(0, 1e12),
    )
    eval_episodes: int = setting(
        64, "episodes per selection evaluation, rounded up to a multiple of 8", between=(1, 100_000)
    )
    checkpoint_every: int = setting(
        0, "iterations between checkpoints; 0 = by checkpoint_minutes alone", between=(0, 1e9)
    )
    checkpoint_minutes: float = setting(
        5.0, "minutes between checkpoints; one is always written at the end", between=(1e-6, 1e6)
    )
    keep_checkpoints: int = setting(
        3, "newest checkpoints to keep, in addition to the best one", between=(1, 1_000_000)
    )
    runs: str = setting("runs", "folder of the run directories")
    logger: str = setting("none", "a further writer of metrics: wandb")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.logical_shards not in (0, 1, 2, 4, 8):
            raise ValueError(f"logical_shards must be 1, 2, 4 or 8 (or 0 = automatic), not {self.logical_shards}")
        if self.seed + self.num_seeds > 2**32:
            raise ValueError(f"seed {self.seed} + num_seeds {self.num_seeds} exceeds 2^32: lower one of them")
        loggers.check_name(self.logger)


# Settings that may change when a run is resumed. Devices change the order of sums of floats; none of the others changes
# the result of the next iteration.
FREE_ON_RESUME = (
    "total_env_steps", "total_episodes", "max_seconds", "devices", "cpu_devices", "memory_gb", "block_iterations",
    "block_seconds", "log_every", "eval_every", "eval_episodes", "checkpoint_every", "checkpoint_minutes",
    "keep_checkpoints", "logger",
)  # fmt: skip
TOTALS = ("total_env_steps", "total_episodes")  # alternatives


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of one run; `env_settings` and `algo_settings` hold every field of their classes."""

    algo: str
    env: str
    run: RunSettings
    env_settings: dict[str, Any]
    algo_settings: dict[str, Any]

    def __hash__(self) -> int:
        return hash((self.algo, self.env, self.run))  # the dictionaries of settings have no hash

    def flat(self) -> dict[str, Any]:
        """Return the flat mapping, in the order of config.yaml."""
        head = {"algo": self.algo, "env": self.env}
        return {**head, **dataclasses.asdict(self.run), **self.env_settings, **self.algo_settings}

    def plain(self) -> dict[str, Any]:
        """Return the flat mapping in the types of YAML and JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.flat().items()}

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


def schema_of(algo: str, env: str, with_env: bool = True) -> dict[str, Field]:
    """Return all settings by name, `with_env` those of the environment, too, whose package must then be installed.

    Raises UsageError for unknown names and for duplicates.
    """
    algo_fields = find_fields(algo, "algorithm")
    schema = fields_of(RunSettings, "run")
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

    Numbers may be text, as YAML 1.1 reads 1e-3 as a word, and words may be paths. Raises UsageError.
    """
    kind, converted = field.kind, value
    if typing.get_origin(kind) is tuple:
        parts = value.tolist() if getattr(value, "ndim", 0) == 1 else value
        if isinstance(parts, list | tuple):
            kinds = typing.get_args(kind)
            kinds = kinds[:1] * len(parts) if kinds[1:] == (Ellipsis,) else kinds
            if len(kinds) == len(parts):
                fields = [dataclasses.replace(field, kind=inner) for inner in kinds]
                return tuple(check_value(inner, part, where) for inner, part in zip(fields, parts, strict=True))
    elif kind in (int, float) and isinstance(value, str) and (number := _number(value)) is not None:
        converted = number
    elif kind is str and isinstance(value, str | os.PathLike):
        converted = expand_home(os.fspath(value))
    try:
        exact = exact_value(field.name, converted, kind)
        finite = kind is not float or math.isfinite(exact)
    except ValueError as error:
        if kind not in (int, float):
            raise UsageError(f"{where}: {error}") from None
        finite = False
    if not finite:
        raise UsageError(f"{where}: {field.name} must be {kind_name(kind)}, not {short_repr(value)}")
    if kind in (int, float):
        try:
            check_bounds(field.name, exact, field.between)
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
    return exact


def _number(value: Any) -> int | float | None:
    if isinstance(value, int | float):
        return value if abs(value) < math.inf else None
    if isinstance(value, str) and "_" in value and not re.fullmatch(r"[+-]?\d{1,3}(_\d{3})+(\.\d*)?", value):
        return None  # Python takes 8_0 for 80
    for convert in (int, float):
        with contextlib.suppress(ValueError, TypeError):
            number = convert(value)
            return number if abs(number) < math.inf else None
    return None


def _is_plain(value: Any) -> bool:
    """Return whether a value can be that of a setting."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


# Settings of older runs that are gone, each with the only value with which a run is the same without it; None: any
_GONE = {
    "exact_sharding": None, "compiler_options": None, "imitation_updates": None, "imitation_batch": None,
    "imitation_episodes": 0, "eps_spread": 0, "value_clip": 0, "target_kl": 0,
}  # fmt: skip


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the settings of a YAML file, without those that are gone. Raises UsageError where it cannot be read."""
    loaded = {
        name: value
        for name, value in read_mapping(path, "configuration").items()
        if name not in _GONE or _GONE[name] not in (None, value)
    }
    for name in ("algo", "env"):
        if not isinstance(loaded.get(name, ""), str):
            raise UsageError(f"{path}: {name} must be a name, not {short_repr(loaded[name])}")
    return loaded


def read_run(run: str | Path) -> tuple[Path, Config]:
    """Return a run's directory and its configuration for using its policies on this machine.

    Raises:
        RunError: no such run, or its environment has changed since.
        UsageError: its config.yaml is damaged.
    """
    directory, config = read_training_run(run)
    check_spaces(directory, config.env, config.make_env().spec)
    return directory, for_this_device(config)


def for_this_device(config: Config) -> Config:
    """Return the configuration with the settings of `Environment.for_this_device`."""
    env = config.make_env().for_this_device()
    return dataclasses.replace(config, env_settings={name: getattr(env, name) for name in config.env_settings})


def read_training_run(run: str | Path) -> tuple[Path, Config]:
    """Return a run's directory and its configuration for training. Raises RunError, UsageError."""
    directory = open_run(run)
    path = directory / CONFIG
    config = build(convert_old(read_yaml(path)), str(path))
    check_version(directory, config.env, envs_jax.base.find(config.env).version)
    return directory, config


def convert_old(values: dict[str, Any]) -> dict[str, Any]:
    """Convert the settings of an older run to counts of environment steps, without the loggers that are gone.

    Algorithms with a replay had `updates_per_step`, counted `eps_decay` in steps of the batch, and evaluations and
    snapshots in iterations. Older runs of PPO look like new ones:
    resumed, they are evaluated after every iteration. Older runs of COMA have settings that are gone, and are refused.
    """
    if isinstance(written := values.get("logger"), str) and "mlflow" in written:
        values = values | {"logger": loggers.WANDB if loggers.WANDB in written else loggers.NONE}
    algo = values.get("algo")
    envs, updates, interval, decay = (
        _number(values.get(name)) for name in ("num_envs", "updates_per_step", "update_interval", "eps_decay")
    )
    if not isinstance(algo, str) or not envs or not updates:
        return values
    if "env_steps_per_update" not in find_fields(algo, "algorithm"):
        return values
    converted = {name: value for name, value in values.items() if name != "updates_per_step"}
    converted["env_steps_per_update"] = envs / updates
    if decay is not None and decay > 0:
        converted["eps_decay"] = decay ** (1 / envs)
    for name in ("eval_every", "self_play_every"):
        if iterations := _number(values.get(name)):
            converted[name] = iterations * envs * (interval or 1)
    return converted


def build(values: dict[str, Any], where: str, with_env: bool = True) -> Config:
    """Build a configuration from a flat mapping with at least `algo`.

    Without the environment (`with_env`), settings that are neither the run's nor the algorithm's are its own, as they
    stand: enough to list runs, also where the environment's package is not installed.

    Raises UsageError.
    """
    algo = values.get("algo")
    if algo is None:
        raise UsageError(f"{where} names no algorithm: add 'algo: NAME', one of {', '.join(algos.ALGORITHMS)}")
    env = env_of(values)
    if env is None:
        raise UsageError(f"{where} names no environment for the algorithm '{algo}': add --env")
    schema = schema_of(algo, env, with_env)
    settings = {name: field.default for name, field in schema.items()}
    sections: dict[str, dict[str, Any]] = {"run": {}, "environment": {}, "algorithm": {}}
    for name, value in values.items():
        if name in ("algo", "env"):
            continue
        if name not in schema and not with_env:
            if not _is_plain(value):
                raise UsageError(f"{where}: {name} must be a number, a word or a list, not {short_repr(value)}")
            sections["environment"][name] = value
            continue
        if name not in schema:
            helps = {name: field.help for name, field in schema.items()}
            raise UsageError(
                f"{where}: unknown setting {short_repr(name)}: {hint(name, algo, '') or suggestion(name, helps)}"
            )
        settings[name] = check_value(schema[name], value, where)
    for name, field in schema.items():
        sections[field.section][name] = settings[name]
    with usage_errors():
        run = RunSettings(**sections["run"])
    return Config(algo, env, run, sections["environment"], sections["algorithm"])


def apply_changes(config: Config, changes: dict[str, Any], where: str = "the command line") -> Config:
    """Apply the user's changes to a configuration; one kind of total replaces the other. Raises UsageError."""
    values = config.flat()
    if any(changes.get(name) for name in TOTALS):
        values |= dict.fromkeys(TOTALS, 0)
    result = build({**values, **changes}, where)
    for name in TOTALS:
        if name in changes and not getattr(result.run, name):
            raise UsageError(f"{where}: {name} must be at least 1, not 0: leave it out to keep what was set before")
    return result


def apply_resume_changes(config: Config, changes: dict[str, Any]) -> Config:
    """Return the configuration of a resumed run. Raises UsageError that names a setting that may not change."""
    for name, value in changes.items():
        if name not in FREE_ON_RESUME and value != config.flat()[name]:
            raise UsageError(
                f"{name} cannot change on resume (the run has {short_repr(config.flat()[name])}, you gave "
                f"{short_repr(value)}): "
                f"start a new run with --init_from, or change only {', '.join(FREE_ON_RESUME)}"
            )
    return apply_changes(config, changes)


def suggestion(word: str, known: dict[str, str]) -> str:
    """Return half a sentence that suggests known names for an unknown one.

    Args:
        word: the unknown name.
        known: {name: its explanation}.
    """
    words = re.split("[-_]+", word[:100].strip("-").lower())
    ending, meaning = "_" + "_".join(words), " ".join(words)
    akin = [name for name in known if name.endswith(ending)]
    if len(words) > 1:
        akin += [name for name, text in known.items() if text.startswith(meaning) and name not in akin]
    if akin:
        return f"did you mean {' or '.join(akin[:4])}?"
    bare = {name.strip("-"): name for name in known}  # dashes are alike in all flags
    matches = difflib.get_close_matches(word[:100].strip("-"), list(bare), n=1, cutoff=0.5)
    return f"did you mean '{bare[matches[0]]}'?" if matches else "see --help for all of them"


def env_of(values: dict[str, Any]) -> str | None:
    """Return the environment of a flat mapping, or the default one of its algorithm."""
    return values.get("env", DEFAULT_ENV.get(values.get("algo", "")))
