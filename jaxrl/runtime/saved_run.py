"""Reading run directories: config.yaml must hold the settings with which the checkpoints were trained.

Their metadata has a digest, config.yaml has none: one changed character there would mean another environment. Settings
that may change when a run is resumed are not compared.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import envs_jax
from jaxrl.runtime import manifest
from jaxrl.runtime.checkpoint import CheckpointError, committed_steps
from jaxrl.runtime.config import NOT_COMPARED, Config, build, for_this_device, read_yaml
from jaxrl.runtime.manifest import is_count
from jaxrl.runtime.run_directory import (
    CHECKPOINTS,
    CONFIG,
    VERSIONS,
    check_spaces,
    check_version,
    checkpoint_folder,
    open_run,
    read_run_id,
)
from jaxrl.runtime.train_state import Position
from jaxrl.runtime.trials import trials

_FREE = (*NOT_COMPARED, "learn_chunk")  # which changes no result on the same devices only


def read_run(run: str | Path) -> tuple[Path, Config]:
    """Return a run's directory and its configuration, with which its policies can be used on this machine.

    Raises:
        RunError: no such run, or its environment has changed since.
        CheckpointError: its config.yaml is not the one with which its checkpoints were trained.
        UsageError: its config.yaml is damaged.
    """
    directory, config = read_training_run(run)
    check_spaces(directory, config.env, config.make_env().spec)
    return directory, for_this_device(config)


def read_training_run(run: str | Path) -> tuple[Path, Config]:
    """Return a run's directory and its configuration for training. Raises RunError, CheckpointError, UsageError."""
    directory = open_run(run)
    config = read_config(directory)
    check_version(directory, config.env, envs_jax.base.find(config.env).version)
    return directory, config


def read_config(directory: Path, with_env: bool = True) -> Config:
    """Return the configuration of a run directory, or of one of its folders of trials; for `with_env` see `build`.

    Raises CheckpointError, UsageError: it is damaged.
    """
    root, root_config, indices = locate(directory, with_env)
    if root == directory.absolute():
        return root_config
    config = _read_root(directory, with_env)
    expected = trials(root_config)[indices[0]].config
    if len(indices) > 1:
        expected = expected.with_run(seed=root_config.run.seed, num_seeds=root_config.run.num_seeds)
    require_same_settings(config.plain(), expected.plain(), f"{directory} does not fit the run {root}")
    return config


def locate(directory: Path, with_env: bool = True) -> tuple[Path, Config, Sequence[int]]:
    """Return the run of a run directory or folder of trials, its configuration and the indices of these trials.

    Raises CheckpointError, UsageError: the configuration is damaged.
    """
    directory = directory.absolute()
    for root in reversed(directory.parents[:2]):  # the folder of a combination has a configuration, too
        if (root / CONFIG).is_file() and is_run(root):
            config = _read_root(root, with_env)
            name = directory.relative_to(root).as_posix()
            if indices := [k for k, trial in enumerate(trials(config)) if name in (trial.folder, trial.combination)]:
                return root, config, indices
    config = _read_root(directory, with_env)
    return directory, config, range(len(trials(config)))


def is_run(directory: Path) -> bool:
    """Return whether a folder with a configuration is a run: it may be of a trial, or somebody's own above the runs."""
    return (directory / CHECKPOINTS).is_dir() or (directory / VERSIONS).is_file()


def _read_root(directory: Path, with_env: bool) -> Config:
    """Return the configuration in a directory, compared with the checkpoints that are there."""
    path = directory / CONFIG
    config = build(read_yaml(path), str(path), with_env)
    if (newest := _read_newest(directory)) is not None:
        step, meta = newest
        require_same_settings(config.plain(), meta.get("settings", {}), _describe_checkpoint(step, directory))
    return config


def _describe_checkpoint(step: int, directory: Path) -> str:
    return f"checkpoint {step} of {directory} is from another configuration"


def _read_newest(directory: Path) -> tuple[int, dict[str, Any]] | None:
    """Return number and metadata of the newest own checkpoint whose metadata are intact, None if there is none."""
    run_id = read_run_id(directory)
    for step in reversed(committed_steps(directory / CHECKPOINTS)):
        folder = checkpoint_folder(directory, step)
        try:
            stored, meta = manifest.read_both(folder)
        except ValueError:  # damaged, or deleted by a training run since it was listed
            continue
        if not (stored.run and run_id and stored.run != run_id):
            return step, meta
    return None


def require_same_settings(
    settings: Mapping[str, Any], previous: Any, problem: str, free: Sequence[str] = _FREE
) -> None:
    """Raise CheckpointError that begins with `problem` and names the first setting that differs from `previous`."""
    if not isinstance(previous, Mapping):
        raise CheckpointError(f"{problem}: its {manifest.META} holds no settings; use another checkpoint")
    for name, value in json.loads(json.dumps(settings)).items():
        if name not in free and name in previous and json.loads(json.dumps(previous[name])) != value:
            raise CheckpointError(
                f"{problem}: {name} was {previous[name]} and is {value} in {CONFIG}; put the previous value back, or "
                "start a new run"
            )


def check_resume_settings(
    settings: Mapping[str, Any], meta: Mapping[str, Any], step: int, devices: int, directory: Path
) -> None:
    """Raise CheckpointError if a run with these settings cannot continue from a checkpoint on these devices."""
    free = _FREE if meta["devices"] != devices else NOT_COMPARED
    require_same_settings(settings, meta["settings"], _describe_checkpoint(step, directory), free)


def check_meta(meta: Mapping[str, Any], step: int, directory: Path, phases: int, folders: Sequence[str]) -> None:
    """Raise CheckpointError if the metadata of checkpoint `step` are not what a run writes.

    `phases` is the number of phases of the run, `folders` has one folder for each trial.
    """
    lines = len(folders) if len(folders) > 1 else 0  # files of metrics besides the whole run's
    position = dict.fromkeys(Position.__dataclass_fields__, is_count)
    forms: dict[str, Callable[[Any], bool]] = {
        **position,
        "seconds": lambda value: _is_number(value) and math.isfinite(value) and value >= 0,
        "best": lambda value: value is None or _is_number(value),
        "best_ties": lambda value: _is_list_of(value, _is_number),
        "best_trials": lambda value: _is_mapping_of(value, folders, lambda each: _is_list_of(each, _is_number)),
        "failed": lambda value: _is_mapping_of(value, folders, is_count) and len(value) < len(folders),
        "evaluated": is_count,
        "finished": lambda value: isinstance(value, bool),
        "group": _is_group,
        "trial_groups": lambda value: _is_list_of(value, _is_group) and len(value) == lines,
        "metrics": lambda value: _is_list_of(value, _is_mark) and len(value) == 1 + lines,
        "devices": is_count,
        "settings": lambda value: isinstance(value, dict),
    }
    wrong = [name for name, fits in forms.items() if name not in meta or not fits(meta[name])]
    if not wrong and not _fits_all(meta["best_trials"], set(folders) - set(meta["failed"])):
        wrong = ["best_trials"]
    if not wrong and meta["phase"] >= phases:
        wrong = ["phase"]
    if not wrong and meta["iterations"] != step:
        wrong = ["iterations"]
    if wrong:
        raise CheckpointError(
            f"checkpoint {step} of {directory} cannot be used: the entry '{wrong[0]}' of its {manifest.META} is absent "
            "or not what a run writes; use another checkpoint"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > 1e300


def _is_list_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_mapping_of(value: Any, names: Collection[str], fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(name in names and fits(each) for name, each in value.items())


def _fits_all(best_trials: Mapping[str, Any], folders: Collection[str]) -> bool:
    """Return whether the scores are there of all trials that go on, each with the same number of tie breakers."""
    lengths = {len(scores) for scores in best_trials.values()}
    return not best_trials or (len(lengths) == 1 and 0 not in lengths and all(name in best_trials for name in folders))


def _is_group(value: Any) -> bool:
    """Return whether a value is `MetricAggregator.group`."""
    if not isinstance(value, dict) or not value:
        return value == {}
    learning = value.get("learning")
    episodes = value.get("episodes")
    if set(value) != {"learning", "episodes"} or not isinstance(learning, dict) or not isinstance(episodes, dict):
        return False
    sums = learning.values()
    if not all(_is_list_of(each, _is_number) and len(each) == 2 and each[1] > 0 for each in sums):
        return False
    return all(map(_is_number, episodes.values()))


def _is_mark(value: Any) -> bool:
    """Return whether a value is what `Writer.mark` returns on host 0."""
    return isinstance(value, dict) and is_count(value.get("bytes")) and isinstance(value.get("first"), str)
