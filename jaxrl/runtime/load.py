"""Policies and weights of earlier runs: for evaluation, for `--init_from`, and for algorithms that start from runs.

It reads checkpoints and builds no run; `api` and `evaluation` turn policies into results.
"""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl import algos
from jaxrl.algos.base import STANDARD, Algorithm, AlgoState, Custom, Learner
from jaxrl.algos.multi_stage import MultiStage, UpstreamRun
from jaxrl.common.errors import UsageError, UserError, usage_errors
from jaxrl.common.files import is_file
from jaxrl.integrations import expert_dataset
from jaxrl.report.console import lend_handler
from jaxrl.runtime import hosts, run_directory
from jaxrl.runtime.build import Run, build_algorithm, count_phases
from jaxrl.runtime.checkpoint import SMALL, CheckpointError, Checkpoints
from jaxrl.runtime.config import Config
from jaxrl.runtime.digests import digest_arrays
from jaxrl.runtime.policy import Policy
from jaxrl.runtime.saved_run import check_meta, locate, read_run
from jaxrl.runtime.trials import describe_failed, trials
from jaxrl.runtime.weight_shapes import find_causes, has_effect, state_shapes, weight_shapes

_FRESH = 0xF2E54  # random stream of the networks without weights in the files of `--init_from`


def load_policy(run: str | Path, best: bool = True, custom: Custom = STANDARD, checkpoint: int | None = None) -> Policy:
    """Return the policy of the first seed of a run, or of the trial that is named; see `load_policies`."""
    return load_policies(run, best, custom, checkpoint)[0]


def load_policies(
    run: str | Path, best: bool = True, custom: Custom = STANDARD, checkpoint: int | None = None
) -> list[Policy]:
    """Return the policy of each seed of a run, or of one of its folders of trials; `best` checkpoint or newest.

    `custom` holds the user-defined networks of the training. `checkpoint` is the number of another checkpoint; its
    folder may also be named instead of the run.

    Raises UserError: not a run directory, a sweep, a damaged checkpoint, or one of another configuration.
    """
    saved = _open_run(run, checkpoint, custom)
    env, (states, step) = saved.config.make_env(), _read_states(saved, best)
    return [
        Policy(env, saved.algo, _anywhere(saved.algo.policy(state)), step, saved.config.with_run(seed=seed))
        for seed, state in states.items()
    ]


def load_all_weights(run: str | Path, best: bool = True, checkpoint: int | None = None) -> Any:
    """Return `Algorithm.weights` of the first seed of a run, which include critics; see `load_policies`."""
    return _read_weights(_open_run(run, checkpoint), best)


def write_small_run(run: str | Path, out: Path, best: bool = True, checkpoint: int | None = None) -> list[Path]:
    """Write a run directory whose only checkpoint holds the weights of a run, without optimizers, replay and games.

    It can be named wherever a run can, but for `--resume`. Of several seeds the first is written. Returns its files.

    Raises UserError: as `load_policies`, or `out` holds files already or cannot be written.
    """
    saved = _open_run(run, checkpoint)
    if is_file(out / run_directory.CONFIG):
        raise UsageError(f"{out} holds a run already: choose another folder with --out")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} holds files already, and a run needs a folder of its own: choose another with --out")
    if obstacle := run_directory.find_obstacle(out):
        raise UsageError(f"no run can be written to {out}, where {obstacle}: choose another folder with --out")
    states, step = _read_states(saved, best)
    seed, state = next(iter(states.items()))
    root = locate(saved.directory)[0]
    with lend_handler(), Checkpoints(root / run_directory.CHECKPOINTS) as checkpoints:
        meta = checkpoints.restore((), step, prefix="algo.replicated")[2]
    settings = saved.config.with_run(seed=seed, init_from="", runs="runs")
    try:
        out.mkdir(parents=True, exist_ok=True)
        run_directory.write_versions(out, run_directory.read_versions(root))
        with lend_handler(), Checkpoints(out / run_directory.CHECKPOINTS) as checkpoints:
            checkpoints.save(step, {"algo": state}, {**meta, "settings": settings.flat(), SMALL: True}, best=True)
        for file in out.rglob("commit_success.txt"):  # orbax's, which name the folder that was written
            file.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error.strerror}): choose another folder with --out") from None
    run_directory.write_config(out, settings.to_yaml())  # last, because it makes the folder a run
    return sorted(path for path in out.rglob("*") if path.is_file())


class _SavedRun(NamedTuple):
    """A run, or trials of it, and the checkpoint to read."""

    directory: Path  # where the run is, or the trials are
    config: Config  # the first trial as a run of its own
    algo: Algorithm  # for one trial, on a single device
    checkpoint: int | None  # its number, None for the best or newest


def _open_run(name: str | Path, checkpoint: int | None = None, custom: Custom = STANDARD) -> _SavedRun:
    """Find a run by its directory, or by the folder of a checkpoint or of trials.

    Raises UserError: there is no such run, or it is a sweep, of which one combination must be named.
    """
    run, checkpoint = run_directory.choose_checkpoint(name, checkpoint)
    directory, config = read_run(run)
    if config.run.sweep:
        names = " or ".join(dict.fromkeys(str(directory / trial.combination) for trial in trials(config)))
        raise UsageError(f"{run} is a sweep: name one of its combinations, {names}")
    config = config.with_run(devices=1, num_seeds=1)
    return _SavedRun(directory, config, build_algorithm(config, custom), checkpoint)


def _read_weights(saved: _SavedRun, best: bool) -> Any:
    states, _ = _read_states(saved, best)
    return _anywhere(saved.algo.weights(next(iter(states.values()))))


def _read_states(saved: _SavedRun, best: bool) -> tuple[dict[int, AlgoState], int]:
    """Return each trial's state without optimizers by its seed, and the number of the checkpoint that it is from.

    It is the checkpoint that was named, else the best one if `best` and intact, else the newest. Trials that had failed
    by then are left out; of several trials also those that have failed since, unless the checkpoint was named.

    Raises UserError: all of them have failed.
    """
    shapes = _without_optimizers(state_shapes(saved.algo).replicated)
    root, config, indices = locate(saved.directory)
    all_trials = trials(config)
    count = len(all_trials)
    if count > 1:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), shapes)
    with lend_handler(), Checkpoints(root / run_directory.CHECKPOINTS) as checkpoints:
        use_best = saved.checkpoint is None and best and checkpoints.best_step() is not None
        try:
            checkpoint = checkpoints.restore(shapes, saved.checkpoint, prefix="algo.replicated", best=use_best)
        except CheckpointError as error:
            if not use_best:
                raise
            checkpoint = checkpoints.restore(shapes, prefix="algo.replicated")
            print(f"warning: the best checkpoint cannot be used, the newest is used instead: {error}", file=sys.stderr)
        step, replicated, meta = checkpoint
        if count == 1:
            return {saved.config.run.seed: AlgoState(replicated, ())}, step
        folders = [trial.folder for trial in all_trials]
        check_meta(meta, step, root, count_phases(saved.config, saved.algo), folders)
        failed = meta["failed"]
        if saved.checkpoint is None and len(indices) > 1 and step != checkpoints.steps()[-1]:
            newest, newest_meta = checkpoints.newest()
            check_meta(newest_meta, newest, root, count_phases(saved.config, saved.algo), folders)
            failed = newest_meta["failed"] | failed
    lost = {k: failed[all_trials[k].folder] for k in indices if all_trials[k].folder in failed}
    described = describe_failed({all_trials[k].folder: iteration for k, iteration in lost.items()})
    if len(lost) == len(indices):
        raise UserError(
            f"every trial of {saved.directory} has failed ({described}): name another run, or an earlier checkpoint if "
            "there is one"
        )
    if lost:
        print(f"warning: {described}, and is left out", file=sys.stderr)
    states = {
        all_trials[k].config.run.seed: AlgoState(jax.tree.map(lambda x, k=k: x[k], replicated), ())
        for k in indices
        if k not in lost
    }
    return states, step


def _without_optimizers(tree: Any) -> Any:
    """Drop the optimizers' states: policies and weights do not need them, so users need not pass their optimizers."""

    def drop(x: Any) -> Any:
        return Learner(x.params, ()) if isinstance(x, Learner) else x

    return jax.tree.map(drop, tree, is_leaf=lambda x: isinstance(x, Learner))


def _anywhere(tree: Any) -> Any:
    """Return copies of arrays that are not committed to a device."""
    return jax.device_put(jax.tree.map(np.asarray, tree))


# What a new run starts from


def resolve_config(config: Config) -> Config:
    """Return the configuration of a new run, with settings taken from the runs that it starts from.

    Raises UserError: not run directories, or runs that are not compatible.
    """
    cls = algos.find(config.algo)
    if not issubclass(cls, MultiStage):
        return config
    if config.run.init_from:
        names = (*cls.sources, *cls.recordings)
        raise UsageError(f"'{config.algo}' starts from --{names[0]}: remove --init_from")

    def describe_run(run: str) -> UpstreamRun:
        other = _open_run(run)
        return UpstreamRun(run, other.algo, other.config.algo_settings)

    upstream_runs = {name: tuple(map(describe_run, named_runs(config, name))) for name in cls.sources}
    recordings = load_recordings(cls, config)
    with usage_errors():
        settings = cls.resolve_inputs(config.make_env().spec, config.algo_settings, upstream_runs, recordings)
    return dataclasses.replace(config, algo_settings=settings)


def resolve_latest(config: Config) -> Config:
    """Replace `runs/latest` in settings by the run that it names now, because it will soon name the new run."""

    def follow(name: str) -> str:
        run, checkpoint = run_directory.split_checkpoint(name)
        if checkpoint is None:
            return str(run_directory.follow_latest(name))
        return str(run_directory.checkpoint_folder(run, checkpoint))

    cls = algos.find(config.algo)
    names = cls.sources if issubclass(cls, MultiStage) else ()
    sources = {name: ",".join(map(follow, named_runs(config, name))) for name in names}
    config = dataclasses.replace(config, algo_settings={**config.algo_settings, **sources})
    return config.with_run(init_from=follow(config.run.init_from)) if config.run.init_from else config


def named_runs(config: Config, setting: str) -> list[str]:
    """Return the runs or files that a setting names."""
    return [name.strip() for name in config.algo_settings[setting].split(",") if name.strip()]


def load_recordings(cls: type[MultiStage], config: Config) -> dict[str, dict[str, Any]]:
    """Return the expert datasets that settings name, concatenated per setting. Raises ExpertDatasetError."""
    paths_by_setting = {setting: named_runs(config, setting) for setting in cls.recordings}
    return {setting: vars(expert_dataset.read_all(paths)) for setting, paths in paths_by_setting.items() if paths}


def load_inputs(run: Run) -> Any:
    """Return the `inputs` of `Algorithm.init`: weights of the runs named by settings or by `init_from`, or None.

    Raises UserError: not run directories, damaged checkpoints, networks that do not fit, or hosts that read others.
    """
    inputs = _read_inputs(run)
    if inputs is not None and hosts.count_hosts() > 1:
        hosts.require_same({"what the run starts from": digest_arrays(inputs)})
    return inputs


def _read_inputs(run: Run) -> Any:
    config = run.config
    if isinstance(run.algo, MultiStage):
        weights = {name: tuple(map(_read_final_weights, named_runs(config, name))) for name in run.algo.sources}
        recordings = load_recordings(type(run.algo), config)
        return weights | {name: run.algo.to_dataset(recording) for name, recording in recordings.items()}
    return load_weights(config.run.init_from, run) if config.run.init_from else None


def _read_final_weights(name: str) -> Any:
    """Return the weights of a run of an earlier stage, or of its checkpoint. Raises UserError: it is not finished."""
    saved = _open_run(name)
    lengths = [phase.iterations for phase in saved.algo.phases]
    ends = None not in lengths
    states, step = _read_states(saved, best=not ends)
    if ends and step < sum(length or 0 for length in lengths):
        run = saved.directory
        raise UserError(f"{run} has not finished all its phases: finish it first, with --resume {run}")
    return _anywhere(saved.algo.weights(next(iter(states.values()))))


def load_weights(name: str, run: Run) -> Any:
    """Return the `inputs` of a run's `Algorithm.init` from a run or checkpoint of its algorithm, or PyTorch files.

    Raises UserError: another algorithm, networks of another shape, or files that cannot be read.
    """
    if name.endswith(".pth"):  # torch_weights needs networks of its own
        from jaxrl.integrations import torch_weights

        key = jax.random.fold_in(jax.random.key(run.config.run.seed), _FRESH)
        return _anywhere(torch_weights.load(name, run.algo, key))
    saved = _open_run(name)
    custom = Custom(run.algo.custom.networks)
    if saved.config.algo != run.config.algo:
        raise UsageError(
            f"{name} was trained with '{saved.config.algo}', not '{run.config.algo}': its weights do not match"
        )
    if custom.networks:
        with contextlib.suppress(UserError):  # its settings do not go with these networks, as is found below
            saved = saved._replace(algo=build_algorithm(saved.config, custom))
    _check_weights(name, run, saved)
    return _read_weights(saved, best=True)


def _check_weights(name: str, run: Run, saved: _SavedRun) -> None:
    """Raise UsageError, with the settings to change, if the weights of a saved run do not fit a run."""
    here, there = run.config, saved.config
    flat, saved_flat = here.flat(), there.flat()
    names = [
        setting
        for setting in run.algo.compatible_settings
        if flat[setting] != saved_flat[setting] and (has_effect(setting, flat) or has_effect(setting, saved_flat))
    ]
    other_shapes = weight_shapes(build_algorithm(here, run.algo.custom)) != weight_shapes(saved.algo)
    needed = names
    if other_shapes:
        causes, all_causes = find_causes(here, there, run.algo.custom)
        names, needed = causes or names, all_causes or names
    if names:
        built = [", ".join(f"{setting} {values[setting]}" for setting in names) for values in (saved_flat, flat)]
        remedy = " ".join(f"--{setting} {_word(saved_flat[setting])}" for setting in needed)
        raise UsageError(
            f"the networks of {name} do not match: they were built with {built[0]}, but this run has {built[1]}: give "
            f"{remedy}, or leave out init_from"
        )
    if other_shapes:
        cause = "with other networks=" if run.algo.custom.networks else f"by another version of '{there.algo}'"
        raise UsageError(
            f"the networks of {name} do not match: they were built {cause}; use the same here, or leave out init_from"
        )


def _word(value: Any) -> str:
    """Return a setting's value as the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
