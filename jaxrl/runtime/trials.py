"""Several runs in one program: every combination of swept settings, each with every seed.

Each is a trial. It has a folder inside the run directory, with its metrics and with the configuration that would train
only this trial; checkpoints hold all trials. Folders are named `actor_lr=0.001/seed_3`, without the part that does not
vary. A folder can be named wherever a run can, and means this trial, or all seeds of this combination.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs_jax.base import closest, short_repr
from jaxrl import algos
from jaxrl.common.errors import UsageError
from jaxrl.runtime.config import Config, check_value, declared_fields
from jaxrl.runtime.run_directory import write_config

MAX_TRIALS = 4096  # trials of a run


@dataclasses.dataclass(frozen=True)
class Trial:
    """One of the runs in a program."""

    combination: str  # name of its swept settings, such as "actor_lr=0.001"; "" without a sweep
    folder: str  # its directory inside the run directory, "." for a run of one trial
    config: Config  # makes a run that trains only this trial


def combinations(config: Config) -> list[dict[str, Any]]:
    """Return the swept settings of each combination, [{}] without a sweep.

    Raises UsageError: `sweep` is not a list of settings that can be traced, with several values each.
    """
    if not config.run.sweep:
        return [{}]
    cls = algos.find(config.algo)
    values = {}
    fields = declared_fields(cls, "algorithm")
    known = cls.sweepable
    for word in config.run.sweep.split():
        name, equals, listed = word.partition("=")
        if not equals:
            raise UsageError(f"--sweep {short_repr(word)} has no values: write it as actor_lr=1e-4,3e-4")
        if name in fields and name not in known:
            raise UsageError(f"--sweep cannot vary {name} in one program: choose from {', '.join(known) or 'none'}")
        if name not in known:
            raise UsageError(f"--sweep: unknown setting {short_repr(name)}: {closest(name, known)}")
        if name in values:
            raise UsageError(f"--sweep names {name} twice: list all its values together")
        swept = [check_value(fields[name], value, "--sweep") for value in listed.split(",")]
        if len(set(swept)) < max(len(swept), 2):
            raise UsageError(f"--sweep needs several different values of {name}, not {short_repr(listed)}")
        values[name] = swept
    result = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    if len(result) * config.run.num_seeds > MAX_TRIALS:
        raise UsageError(
            f"{len(result):,} combinations with {config.run.num_seeds} seeds are more than {MAX_TRIALS:,} trials: "
            "use fewer"
        )
    return result


def trials(config: Config) -> list[Trial]:
    """Return the trials of a run, in the order of the first axis of its state."""
    result = []
    for values in combinations(config):
        combination = ",".join(f"{name}={_short(value)}" for name, value in values.items())
        algo_settings = config.algo_settings | values
        single = dataclasses.replace(config, algo_settings=algo_settings).with_run(sweep="", num_seeds=1)
        for seed in range(config.run.seed, config.run.seed + config.run.num_seeds):
            parts = [combination] * bool(combination) + [f"seed_{seed}"] * (config.run.num_seeds > 1)
            result.append(Trial(combination, "/".join(parts) or ".", single.with_run(seed=seed)))
    return result


def describe_failed(failed: Mapping[str, int]) -> str:
    """Return "seed_1 failed at iteration 57" of trials {folder: iteration}, of more than four only the number."""
    if len(failed) > 4:
        return f"{len(failed):,} trials failed, from iteration {min(failed.values()):,} on"
    return ", ".join(f"{name} failed at iteration {iteration:,}" for name, iteration in failed.items())


def _short(value: float) -> str:
    """Return a number's shortest text that is still this number."""
    return text if float(text := f"{value:g}") == value else repr(value)


def write_configs(directory: Path, config: Config) -> None:
    """Write config.yaml of the run, of each trial, and of each combination. Raises RunError."""
    all_trials = trials(config)
    for trial in all_trials:
        folder = directory / trial.folder
        folder.mkdir(parents=True, exist_ok=True)
        if trial.combination and config.run.num_seeds > 1:
            all_seeds = trial.config.with_run(seed=config.run.seed, num_seeds=config.run.num_seeds)
            write_config(folder.parent, all_seeds.to_yaml())
        if len(all_trials) > 1:
            write_config(folder, trial.config.to_yaml())
    write_config(directory, config.to_yaml())
