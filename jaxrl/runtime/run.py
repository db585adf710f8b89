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


class Ended(NamedTuple):
    """The result of a run in this process.

    Attributes:
        directory: of the run.
        sentence: why it ended.
        abandoned: whether something still runs, a block or the compiler, that would delay the end of the process.
    """

    directory: Path
    sentence: str
    abandoned: bool = False


def start(config: Config, log: Console | None = None, custom: Custom = STANDARD, name: str = "") -> Ended:
    """Start a new run in a new directory, that of the `name` if any, with a console unless `log` replaces it.

    Raises UserError; nothing is written if the configuration is impossible.
    """
    hosts.on_first(lambda: run_directory.check_root(config.run.runs))
    hosts.on_first(lambda: loggers.check(config.run.logger))
    config = resolve_config(resolve_latest(config))
    setup = build_run(config, custom=custom)
    inputs = load_inputs(setup)
    with log or Console(setup.env.spec.label) as console:
        programs = _compile(setup, inputs, None, console)
        facts = Scoring.of(setup.env.spec).entry() | {run_directory.SPACES: spaces.describe(setup.env.spec)}
        place = setup.config.run.runs, config.algo, config.env, setup.env.env.version, facts, name
        with _held(lambda: run_directory.create(*place)) as directory:
            hosts.on_first(lambda: trials.write_configs(directory, setup.config))
            return _train(setup, programs, directory, console, lambda session: session.begin(inputs))


def resume_or_start(name: str, config: Config, changes: dict[str, Any]) -> Ended:
    """Resume the run of this name, or start it where there is none: for jobs that are queued again.

    Args:
        name: its directory among the runs of its algorithm and environment.
        config: of a new run.
        changes: the settings of the command line among them. Those that are left to the run may stay so.

    Raises:
        UserError: as `start` and `resume` do.
    """
    directory = run_directory.named(config.run.runs, config.algo, config.env, name)
    if not hosts.on_first(lambda: is_file(directory / run_directory.CONFIG)):
        return start(config, name=name)
    automatic = configuration.RunSettings()
    changes = {key: value for key, value in changes.items() if key not in _RESOLVED or value != getattr(automatic, key)}
    return resume(str(directory), configuration.read_training_run(directory)[1], changes)


def resume(run: str, config: Config, changes: dict[str, Any]) -> Ended:
    """Continue a run exactly from its newest intact checkpoint, or begin it if it has none.

    Raises UserError; the run is unchanged if it cannot be continued with these `changes` of its configuration.
    """
    directory = run_directory.open_run(run)
    if (root := trials.locate(directory)[0]) != directory.absolute():
        raise UsageError(f"{run} is a part of the run {root}, which trains its trials together: resume that one")
    resumed = configuration.resumed(config, changes)
    hosts.on_first(lambda: loggers.check(resumed.run.logger))
    setup = build_run(resumed, resuming=True)
    spaces.check_spaces(directory, config.env, setup.env.spec)
    with _held(lambda: directory), Console(setup.env.spec.label) as console:
        fresh = not hosts.first(committed_steps(directory / "checkpoints"))
        inputs = load_inputs(setup) if fresh else None
        for line in run_directory.other_versions(directory):
            console.say(f"warning: {line}")
        step, meta = (0, None) if fresh else _resumable(directory, setup, config, console)
        programs = _compile(setup, inputs, meta, console)

        def first_state(session: Session) -> TrainState:
            if fresh:
                for writer in session.writers:
                    if problem := writer.trim(0):
                        console.say(f"warning: {problem}")
                state = session.begin(inputs)
            else:
                state = session.restore(step)
            hosts.on_first(lambda: trials.write_configs(directory, setup.config))
            console.say(
                f"resumed at iteration {session.position.iterations:,}" if not fresh else "started from the beginning"
            )
            return state

        return _train(setup, programs, directory, console, first_state)


def _resumable(directory: Path, setup: Run, before: Config, console: Console) -> tuple[int, dict[str, Any]]:
    """Return number and metadata of the checkpoint to continue from; `before` is the run's configuration without the
    present changes.

    Raises UserError: no intact checkpoint, one of another configuration, or one beyond the requested total.
    """
    with Checkpoints(directory / "checkpoints", warn=console.say) as checkpoints:
        step, meta = checkpoints.newest()
    folders = [".", *(trial.folder for trial in trials.trials(setup.config))]

    def check_metrics() -> None:
        for folder, mark in zip(folders, meta.get("metrics") or [], strict=False):
            check_same_run(directory / folder, mark)

    hosts.on_first(check_metrics)
    fixed = fixed_settings(setup)
    if meta["devices"] != setup.mesh.size:
        del fixed["learn_chunk"]  # it follows the number of devices
    for name, value in fixed.items():
        former = meta["settings"].get(name, value)
        if former != value:
            raise CheckpointError(
                f"checkpoint {step} of {directory} is from another configuration: {name} was {former} and is {value} "
                f"in {run_directory.CONFIG}; put the former value back, or start a new run"
            )
    asked, made = setup.config.run.total_env_steps, meta["env_steps"]
    if asked < made and asked != before.run.total_env_steps:
        raise UsageError(f"the run has made {made:,} environment steps: ask for more than that, not for {asked:,}")
    return step, meta


@contextmanager
def _held(find: Callable[[], Path]) -> Iterator[Path]:
    """Lock the run directory that `find` makes or finds; the host that writes does both."""
    with ExitStack() as stack:

        def take() -> str:
            directory = find()
            stack.enter_context(run_directory.lock(directory))
            return str(directory.absolute())

        directory = Path(hosts.on_first(take))
        hosts.require_visible(directory)
        yield directory


def _compile(setup: Run, inputs: Any, meta: dict[str, Any] | None, console: Console) -> CompiledRun:
    """Print what will run, and compile it; `meta` belongs to the checkpoint to continue from, if any."""
    device = jax.local_devices()[0]
    where = f"{device.platform}, {hosts.number()} hosts" if hosts.number() > 1 else device.platform
    console.say(
        f"{setup.mesh.size} x {device.device_kind} ({where}), {setup.trainer.layout.shards} logical shards, "
        f"{setup.config.run.compute_dtype} matmuls"
    )
    for line in setup.notes:
        console.say(line)
    with console.working("compiling"):
        if meta is None:
            return compile_run(setup, inputs, console.say)
        position = Position(**{field.name: meta[field.name] for field in dataclasses.fields(Position)})
        return compile_run(setup, inputs, console.say, position, meta["evaluated"])


def _train(
    setup: Run,
    programs: CompiledRun,
    directory: Path,
    console: Console,
    first_state: Callable[[Session], TrainState],
) -> Ended:
    console.say(f"run directory: {directory}")
    with ExitStack() as stack:
        writer = stack.enter_context(
            loggers.open_writer(directory, setup.config.run.logger, setup.config.plain(), console.say)
            if hosts.writes()
            else NullWriter(directory)
        )
        checkpoints = Checkpoints(directory / "checkpoints", setup.config.run.keep_checkpoints, console.say)
        stack.enter_context(checkpoints)
        monitor = stack.enter_context(Monitor())
        found = trials.trials(setup.config)
        writers = [stack.enter_context(Writer(directory / trial.folder)) for trial in found] if len(found) > 1 else []
        session = Session(setup, programs, directory, console, writer, checkpoints, monitor, writers)
        sentence = session.train(first_state(session))
    return Ended(directory, sentence, session.abandoned)
