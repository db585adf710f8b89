"""Start a run in a new directory, or resume one exactly from its newest checkpoint."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl.algos.base import STANDARD, Custom
from jaxrl.common.errors import UsageError
from jaxrl.common.files import is_file
from jaxrl.report import loggers
from jaxrl.report.console import Console
from jaxrl.report.gpu import Monitor
from jaxrl.report.writer import NullWriter, Writer, check_same_run
from jaxrl.runtime import config as configuration
from jaxrl.runtime import hosts, run_directory, spaces, trials
from jaxrl.runtime.build import CompiledRun, Run, build_run, compile_run, fixed_settings
from jaxrl.runtime.checkpoint import CheckpointError, Checkpoints, committed_steps
from jaxrl.runtime.config import Config
from jaxrl.runtime.load import load_inputs, resolve_config, resolve_latest
from jaxrl.runtime.scoring import Scoring
from jaxrl.runtime.session import Session
from jaxrl.runtime.train_state import Position, TrainState

_RESOLVED = (  # settings that a run chooses itself unless they are given
    "num_envs", "logical_shards", "rollout_chunk", "learn_chunk", "compute_dtype", "rollout_dtype",
    "schedule_env_steps",
)  # fmt: skip


class RunOutcome(NamedTuple):
    """The result of a run in this process.

    Attributes:
        directory: of the run.
        sentence: why it ended.
        abandoned: whether something still runs, a block or the compiler, that would delay the end of the process.
    """

    directory: Path
    sentence: str
    abandoned: bool = False


def start(config: Config, log: Console | None = None, custom: Custom = STANDARD, name: str = "") -> RunOutcome:
    """Start a new run in a new directory, which gets the `name` if there is one; `log` replaces the console.

    Raises UserError; nothing is written if the configuration is impossible.
    """
    hosts.call_on_host_0(lambda: run_directory.check_root(config.run.runs))
    hosts.call_on_host_0(lambda: loggers.check(config.run.logger))
    config = resolve_config(resolve_latest(config))
    run = build_run(config, custom=custom)
    inputs = load_inputs(run)
    with log or Console(run.env.spec.label) as console:
        programs = _compile(run, inputs, None, console)
        facts = Scoring.from_spec(run.env.spec).entry() | {run_directory.SPACES: spaces.describe(run.env.spec)}
        arguments = run.config.run.runs, config.algo, config.env, run.env.env.version, facts, name
        with _lock_directory(lambda: run_directory.create(*arguments)) as directory:
            hosts.call_on_host_0(lambda: trials.write_configs(directory, run.config))
            return _train(run, programs, directory, console, lambda session: session.begin(inputs))


def resume_or_start(name: str, config: Config, changes: dict[str, Any]) -> RunOutcome:
    """Resume the run of this name, or start it if there is none, as jobs that are queued again need.

    Args:
        name: the name of its directory among the runs of its algorithm and environment.
        config: the configuration of a new run.
        changes: the settings on the command line; a setting at its automatic value changes nothing.

    Raises:
        UserError: as `start` and `resume` do.
    """
    directory = run_directory.named_directory(config.run.runs, config.algo, config.env, name)
    if not hosts.call_on_host_0(lambda: is_file(directory / run_directory.CONFIG)):
        return start(config, name=name)
    automatic = configuration.RunSettings()
    changes = {key: value for key, value in changes.items() if key not in _RESOLVED or value != getattr(automatic, key)}
    return resume(str(directory), configuration.read_training_run(directory)[1], changes)


def resume(path: str, config: Config, changes: dict[str, Any]) -> RunOutcome:
    """Continue a run exactly from its newest intact checkpoint, or begin it if it has none.

    Raises UserError; the run is unchanged if it cannot be continued with these `changes` of its configuration.
    """
    directory = run_directory.open_run(path)
    if (root := trials.locate(directory)[0]) != directory.absolute():
        raise UsageError(f"{path} is a part of the run {root}, which trains its trials together: resume that one")
    new_config = configuration.apply_resume_changes(config, changes)
    hosts.call_on_host_0(lambda: loggers.check(new_config.run.logger))
    run = build_run(new_config, resuming=True)
    spaces.check_spaces(directory, config.env, run.env.spec)
    with _lock_directory(lambda: directory), Console(run.env.spec.label) as console:
        fresh = not hosts.broadcast(committed_steps(directory / "checkpoints"))
        inputs = load_inputs(run) if fresh else None
        for line in run_directory.other_versions(directory):
            console.say(f"warning: {line}")
        step, meta = (0, None) if fresh else _find_resume_point(directory, run, config, console)
        programs = _compile(run, inputs, meta, console)

        def first_state(session: Session) -> TrainState:
            if fresh:
                for writer in session.writers:
                    if problem := writer.trim(0):
                        console.say(f"warning: {problem}")
                state = session.begin(inputs)
            else:
                state = session.restore(step)
            hosts.call_on_host_0(lambda: trials.write_configs(directory, run.config))
            console.say(
                f"resumed at iteration {session.position.iterations:,}" if not fresh else "started from the beginning"
            )
            return state

        return _train(run, programs, directory, console, first_state)


def _find_resume_point(directory: Path, run: Run, before: Config, console: Console) -> tuple[int, dict[str, Any]]:
    """Return number and metadata of the checkpoint to continue from; `before` is the run's configuration without the
    present changes.

    Raises UserError: no intact checkpoint, one of another configuration, or one beyond the requested total.
    """
    with Checkpoints(directory / "checkpoints", warn=console.say) as checkpoints:
        step, meta = checkpoints.newest()
    folders = [".", *(trial.folder for trial in trials.trials(run.config))]

    def check_metrics() -> None:
        for folder, mark in zip(folders, meta.get("metrics") or [], strict=False):
            check_same_run(directory / folder, mark)

    hosts.call_on_host_0(check_metrics)
    fixed = fixed_settings(run)
    if meta["devices"] != run.mesh.size:
        del fixed["learn_chunk"]  # it follows the number of devices
    for name, value in fixed.items():
        previous = meta["settings"].get(name, value)
        if previous != value:
            raise CheckpointError(
                f"checkpoint {step} of {directory} is from another configuration: {name} was {previous} and is {value} "
                f"in {run_directory.CONFIG}; put the previous value back, or start a new run"
            )
    requested, env_steps = run.config.run.total_env_steps, meta["env_steps"]
    if requested < env_steps and requested != before.run.total_env_steps:
        raise UsageError(
            f"the run has made {env_steps:,} environment steps: ask for more than that, not for {requested:,}"
        )
    return step, meta


@contextmanager
def _lock_directory(find: Callable[[], Path]) -> Iterator[Path]:
    """Lock the run directory that `find` returns; the host that writes calls `find` and locks."""
    with ExitStack() as stack:

        def take() -> str:
            directory = find()
            stack.enter_context(run_directory.lock(directory))
            return str(directory.absolute())

        directory = Path(hosts.call_on_host_0(take))
        hosts.require_visible(directory)
        yield directory


def _compile(run: Run, inputs: Any, meta: dict[str, Any] | None, console: Console) -> CompiledRun:
    """Print what will run, and compile it; `meta` belongs to the checkpoint to continue from, if any."""
    device = jax.local_devices()[0]
    where = f"{device.platform}, {hosts.count_hosts()} hosts" if hosts.count_hosts() > 1 else device.platform
    console.say(
        f"{run.mesh.size} x {device.device_kind} ({where}), {run.trainer.layout.shards} logical shards, "
        f"{run.config.run.compute_dtype} matmuls"
    )
    for line in run.notes:
        console.say(line)
    with console.working("compiling"):
        if meta is None:
            return compile_run(run, inputs, console.say)
        position = Position(**{field.name: meta[field.name] for field in dataclasses.fields(Position)})
        return compile_run(run, inputs, console.say, position, meta["evaluated"])


def _train(
    run: Run,
    programs: CompiledRun,
    directory: Path,
    console: Console,
    first_state: Callable[[Session], TrainState],
) -> RunOutcome:
    console.say(f"run directory: {directory}")
    with ExitStack() as stack:
        writer = stack.enter_context(
            loggers.open_writer(directory, run.config.run.logger, run.config.plain(), console.say)
            if hosts.is_host_0()
            else NullWriter(directory)
        )
        checkpoints = Checkpoints(directory / "checkpoints", run.config.run.keep_checkpoints, console.say)
        stack.enter_context(checkpoints)
        monitor = stack.enter_context(Monitor())
        folders = [trial.folder for trial in trials.trials(run.config)]
        writers = [stack.enter_context(Writer(directory / folder)) for folder in folders] if len(folders) > 1 else []
        session = Session(run, programs, directory, console, writer, checkpoints, monitor, writers)
        sentence = session.train(first_state(session))
    return RunOutcome(directory, sentence, session.abandoned)
