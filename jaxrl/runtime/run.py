"""Start a run in a new directory, or resume one exactly from its newest checkpoint; `Session` then trains it."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jaxrl.algos.base import STANDARD, Custom
from jaxrl.common.errors import UsageError
from jaxrl.common.files import is_file
from jaxrl.report import loggers
from jaxrl.report.console import Console
from jaxrl.report.gpu import Monitor
from jaxrl.report.writer import NullWriter, Writer, check_same_run, describe_lost_rows
from jaxrl.runtime import config as configuration
from jaxrl.runtime import hosts, run_directory, saved_run, trials
from jaxrl.runtime.build import Run, build_run, fixed_settings
from jaxrl.runtime.checkpoint import SMALL, Checkpoints
from jaxrl.runtime.compiling import CompiledRun, compile_run
from jaxrl.runtime.config import Config
from jaxrl.runtime.load import load_inputs, resolve_config, resolve_latest
from jaxrl.runtime.scoring import Scoring
from jaxrl.runtime.session import Session
from jaxrl.runtime.train_state import Position

_RESOLVED = (  # settings that a run chooses itself unless they are given
    "num_envs", "logical_shards", "rollout_chunk", "learn_chunk", "compute_dtype", "rollout_dtype",
    "schedule_env_steps",
)  # fmt: skip


class RunOutcome(NamedTuple):
    """The result of a run in this process."""

    directory: Path  # where the run is
    sentence: str  # why it ended
    # whether something still runs, a block or the compiler, that would delay the end of the process
    abandoned: bool = False
    failed: Mapping[str, int] = MappingProxyType({})  # {folder of a trial: iteration at which it failed}


def start(
    config: Config, log: Console | None = None, custom: Custom = STANDARD, name: str = "", source: str = ""
) -> RunOutcome:
    """Start a new run in a new directory, which gets the `name` if there is one; `log` replaces the console.

    `source` is a line for the user that says which preset the configuration is from.

    Raises UserError; nothing is written if the configuration is impossible.
    """
    hosts.call_on_host_0(lambda: run_directory.check_root(config.run.runs))
    hosts.call_on_host_0(lambda: loggers.check(config.run.logger))
    config = resolve_config(resolve_latest(config))
    run = build_run(config, custom=custom)
    inputs = load_inputs(run)
    with log or Console(run.env.spec.label) as console:
        if source:
            console.say(source)
        programs = _compile(run, inputs, None, console)
        spec = run.env.spec
        facts = Scoring.from_spec(spec).entry() | {run_directory.SPACES: run_directory.describe_spaces(spec)}
        arguments = run.config.run.runs, config.algo, config.env, run.env.env.version, facts, name
        with _lock_directory(lambda: run_directory.create(*arguments)) as (directory, folder):
            hosts.call_on_host_0(lambda: trials.write_configs(directory, run.config))
            checkpoints = _open_checkpoints(directory, run, console)
            return _train(run, programs, directory, folder, console, checkpoints, inputs)


def resume_or_start(name: str, config: Config, changes: dict[str, Any], source: str = "") -> RunOutcome:
    """Resume the run of this name, or start it if there is none, as jobs that are queued again need.

    `config` and its `source` are of a new run, as in `start`; `changes` are the settings on the command line, of which
    automatic values change nothing.

    Raises UserError: as `start` and `resume` do.
    """
    directory = run_directory.named_directory(config.run.runs, config.algo, config.env, name)
    if not hosts.call_on_host_0(lambda: is_file(directory / run_directory.CONFIG)):
        return start(config, name=name, source=source)
    automatic = configuration.RunSettings()
    changes = {key: value for key, value in changes.items() if key not in _RESOLVED or value != getattr(automatic, key)}
    return resume(str(directory), saved_run.read_training_run(directory)[1], changes)


def resume(path: str, config: Config, changes: dict[str, Any]) -> RunOutcome:
    """Continue a run exactly from its newest intact checkpoint, or begin it if it has none.

    Raises UserError; the run is unchanged if it cannot be continued with these `changes` of its configuration.
    """
    directory = run_directory.open_run(path)
    if directory.parent == run_directory.PRETRAINED:  # the package's files are not to be locked
        raise UsageError(f"{path} holds only weights, which cannot be resumed: start a run with --init_from")
    if not saved_run.is_run(directory) and (root := saved_run.locate(directory)[0]) != directory.absolute():
        raise UsageError(f"{path} is one trial of the run {root}, which trains its trials together: resume that run")
    run_directory.require_writable_path(directory)
    new_config = configuration.apply_resume_changes(config, changes)
    hosts.call_on_host_0(lambda: loggers.check(new_config.run.logger))
    run = build_run(new_config, resuming=True)
    run_directory.check_spaces(directory, config.env, run.env.spec)
    with _lock_directory(lambda: directory) as (_, folder), Console(run.env.spec.label) as console:
        for line in run_directory.other_versions(directory):
            console.say(f"warning: {line}")
        meta: dict[str, Any] | None = None
        inputs = None
        checkpoints = _open_checkpoints(directory, run, console)
        if hosts.broadcast(checkpoints.steps()):
            meta = _find_resume_point(directory, run, config, checkpoints)
        else:
            inputs = load_inputs(run)
        if meta is not None and _is_finished(run, meta):
            if lost := describe_lost_rows(directory, meta["metrics"][0], Position.from_meta(meta).iterations):
                console.say(f"warning: {lost}")
            if changes:
                console.say(
                    f"warning: nothing is left to train, so these settings have no effect: {', '.join(changes)}"
                )
            return RunOutcome(directory, _describe_finished(meta))
        if (schedule := run.config.run.schedule_env_steps) < run.config.run.total_env_steps:
            console.say(f"schedules, such as learning rates, end after {schedule:,} environment steps as before")
        programs = _compile(run, inputs, meta, console)
        return _train(run, programs, directory, folder, console, checkpoints, inputs, meta)


@contextmanager
def _lock_directory(find: Callable[[], Path]) -> Iterator[tuple[Path, os.stat_result | None]]:
    """Lock the run directory that `find` returns, and tell which folder it is; host 0 calls `find` and locks."""
    with ExitStack() as stack:

        def find_and_lock() -> str:
            directory = find()
            stack.enter_context(run_directory.lock(directory))
            return str(directory.absolute())

        directory = Path(hosts.call_on_host_0(find_and_lock))
        hosts.require_visible(directory)
        yield directory, run_directory.stat_folder(directory)


def _open_checkpoints(directory: Path, run: Run, console: Console) -> Checkpoints:
    return Checkpoints(directory / run_directory.CHECKPOINTS, run.config.run.keep_checkpoints, console.say)


def _find_resume_point(directory: Path, run: Run, before: Config, checkpoints: Checkpoints) -> dict[str, Any]:
    """Return the metadata of the checkpoint to continue from; `before` is the configuration without changes.

    Raises UserError: no intact checkpoint, one of another configuration, or one beyond the requested total.
    """
    step, meta = checkpoints.newest()
    if meta.get(SMALL):
        raise UsageError(f"{directory} holds only weights, which cannot be resumed: start a run with --init_from")
    folders = [trial.folder for trial in trials.trials(run.config)]
    saved_run.check_meta(meta, step, directory, len(run.phases), folders)

    def check_metrics() -> None:
        for folder, mark in zip([".", *folders], meta["metrics"], strict=False):
            check_same_run(directory / folder, mark)

    hosts.call_on_host_0(check_metrics)
    saved_run.check_resume_settings(fixed_settings(run), meta, step, run.mesh.size, directory)
    requested = run.config.run.total_env_steps
    env_steps = meta["env_steps"]
    if requested < env_steps and requested != before.run.total_env_steps:
        raise UsageError(
            f"the run has made {env_steps:,} environment steps, and a total of {requested:,} is less: "
            "raise --total_env_steps (or --total_episodes) above that"
        )
    return meta


def _is_finished(run: Run, meta: dict[str, Any]) -> bool:
    """Return whether a checkpoint with this metadata leaves neither iterations nor the last evaluation to do."""
    position = Position.from_meta(meta)
    settings = run.config.run
    left = position.remaining(run.phases, run.trainer.layout.num_envs, settings.total_env_steps)
    return not any(left) and (not settings.eval_every or meta["evaluated"] == position.iterations)


def _describe_finished(meta: dict[str, Any]) -> str:
    """Return the sentence for a run that has reached its total; it names a total that goes on."""
    iterations = Position.from_meta(meta).iterations
    env_steps = meta["env_steps"]
    failed = f"; {trials.describe_failed(meta['failed'])}" if meta["failed"] else ""
    return (
        f"finished at iteration {iterations:,} ({env_steps:,} environment steps){failed}: nothing is left to do; to "
        f"train longer, raise the total, for example --total_env_steps {2 * env_steps}"
    )


def _compile(run: Run, inputs: Any, meta: dict[str, Any] | None, console: Console) -> CompiledRun:
    """Print what will run, and compile it; `meta` belongs to the checkpoint to continue from, if any."""
    device = jax.local_devices()[0]
    count = hosts.count_hosts()
    where = f"{device.platform}, {count} hosts" if count > 1 else device.platform
    console.say(
        f"{run.mesh.size} x {device.device_kind} ({where}), {run.trainer.layout.shards} logical shards, "
        f"{run.config.run.compute_dtype} matmuls"
    )
    for line in run.notes:
        console.say(line)
    with console.working("compiling"):
        if meta is None:
            return compile_run(run, inputs, console.say)
        return compile_run(run, inputs, console.say, Position.from_meta(meta), meta["evaluated"])


def _train(
    run: Run,
    programs: CompiledRun,
    directory: Path,
    folder: os.stat_result | None,
    console: Console,
    checkpoints: Checkpoints,
    inputs: Any,
    meta: dict[str, Any] | None = None,
) -> RunOutcome:
    """Train from the checkpoint with this metadata, or from the beginning with `inputs`; `directory` was `folder`."""
    console.say(f"run directory: {directory}")
    hosts.call_on_host_0(lambda: run_directory.require_same_folder(directory, folder))
    settings = run.config.run
    folders = [trial.folder for trial in trials.trials(run.config)]
    with ExitStack() as stack:
        writer: Writer = NullWriter(directory)
        if hosts.is_host_0():
            writer = loggers.open_writer(directory, settings.logger, run.config.plain(), console.say)
        writers = [writer, *(Writer(directory / folder) for folder in folders if len(folders) > 1)]
        for entered in writers:
            stack.enter_context(entered)
        stack.enter_context(checkpoints)
        monitor = stack.enter_context(Monitor())
        for env in (run.env, run.eval_env):
            stack.enter_context(closing(env))
        session = Session(run, programs, directory, console, writers, checkpoints, monitor)
        state = session.begin(inputs) if meta is None else session.restore(meta)
        if run.resuming:
            hosts.call_on_host_0(lambda: trials.write_configs(directory, run.config))
            again = "started from the beginning" if meta is None else f"resumed at iteration {meta['iterations']:,}"
            console.say(again)
        sentence = session.train(state)
    return RunOutcome(directory, sentence, session.abandoned, session.failed)
