"""The host's side of a run: call compiled blocks, write metrics and checkpoints, stop in order, resume.

Nothing here computes anything about training. What stands in a checkpoint and in metrics.jsonl (but for time/) does
not depend on when a run was stopped, killed or resumed, nor on how many iterations a block had.
"""

import dataclasses
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

from envs_jax.batch import BatchedEnvironment
from jaxrl import algos
from jaxrl.algos.base import Algorithm, AlgoState, Phase, Source
from jaxrl.common.errors import UsageError, UserError, usage_errors
from jaxrl.evaluation.rollouts import by_task, held_out_key
from jaxrl.integrations import torch_weights
from jaxrl.report.console import Console, duration, gibibytes
from jaxrl.report.gpu import Monitor
from jaxrl.report.metrics import Lines, Pace
from jaxrl.report.peak import Peak
from jaxrl.report.profile import record, table
from jaxrl.report.writer import Nowhere, Writer
from jaxrl.runtime import config as configuration
from jaxrl.runtime import expert_dataset, hosts, run_directory, variants
from jaxrl.runtime.build import Programs, Setup, assemble, compile_programs, prepare
from jaxrl.runtime.checkpoint import CheckpointError, Checkpoints, sealed_steps
from jaxrl.runtime.config import FREE_ON_RESUME, Config, read_run
from jaxrl.runtime.data_parallel import on_all
from jaxrl.runtime.position import Position
from jaxrl.runtime.trainer import BlockMetrics, TrainState

SELECTION = "selection"
_FRESH = 0xF2E54  # stream of the networks for which the files of `--init_from` have no weights
GROWTH = 4  # a block is at most so many times as long as the one before: the first ones say little about their pace
PROFILED = (3, 0.1)  # blocks of a phase before the one of which a trace is kept, and about how many seconds it may take
COMPARABLE = 2**30  # of a plan of fewer bytes nothing is told: it drowns in what the process needs besides


class NotFiniteError(UserError):
    """A loss or a parameter is no longer finite."""


class _Pending(NamedTuple):
    """A block under way."""

    metrics: BlockMetrics
    before: Position
    number: int


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Collects the names of SIGINT and SIGTERM instead of dying; a second SIGINT ends the process at once."""
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            # An orderly exit would wait for the device. What is on disk is whole at any moment.
            show_cursor = "\033[?25h" if sys.stderr.isatty() else ""
            print(f"{show_cursor}stopped at once, without a checkpoint", file=sys.stderr, flush=True)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        received.append(signal.Signals(number).name)

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class Session:
    """One process's share of a run, from its first block to its last checkpoint.

    Args:
        setup: the run's.
        programs: compiled for it.
        directory: the run directory, locked by the caller.
        console, writer, checkpoints, monitor: where reports go, and where they come from.
        profile: whether to keep a trace of one block that learns.
    """

    def __init__(
        self,
        setup: Setup,
        programs: Programs,
        directory: Path,
        console: Console,
        writer: Writer,
        checkpoints: Checkpoints,
        monitor: Monitor,
        profile: bool = False,
    ) -> None:
        self.setup, self.programs, self.directory = setup, programs, directory
        self.console, self.writer, self.checkpoints, self.monitor = console, writer, checkpoints, monitor
        self.run, self.algo, self.phases = setup.config.run, setup.algo, setup.algo.phases
        self.position = Position()
        self.lines = Lines(writer, self.run.log_every)
        self.best: float | None = None  # score of the best checkpoint, what breaks ties with it, and its number
        self.best_ties: list[float] = []
        self.best_step: int | None = None
        self.evaluated = 0  # iteration of the last evaluation
        self._former_seconds = 0.0  # of training in former processes
        self._began: float | None = None
        self._began_at = 0
        self._saved: tuple[int | None, float] = (None, 0.0)  # number of the last checkpoint, and when
        self._pending: _Pending | None = None
        self._received: list[str] = []
        self._iteration_seconds: dict[int, float] = {}  # by phase
        self._last_number = 0
        self._blocks = 0  # of the phase, in this process
        self._profile = profile
        self._shown: dict[str, Any] = {}  # what the console was given last

    # Beginning

    def begin(self, inputs: Any) -> TrainState:
        """The state of a run that has not done anything yet."""
        assert self.programs.start is not None
        return self.programs.start(jax.random.key(self.run.seed), inputs)

    def restore(self, step: int) -> TrainState:
        """The state in a checkpoint that is intact; everything behind it is removed.

        Raises:
            CheckpointError: it is from another configuration.
        """
        step, state, meta = self.checkpoints.restore(self.setup.trainer.shapes(), step, intact=True)
        self.position = Position.of(state)
        self.best, self.best_step, self.evaluated = meta["best"], meta["best_step"], meta["evaluated"]
        self.best_ties = meta.get("best_ties", [])
        self._former_seconds = meta["seconds"]
        self.lines = Lines(self.writer, self.run.log_every, meta["group"])
        self.writer.trim(step, self.position.axis(self.phases))
        if hosts.writes() and self.writer.rows < meta.get("rows", 0):
            self.console.say(
                f"warning: metrics.jsonl holds {self.writer.rows:,} of the {meta['rows']:,} rows that were written up "
                f"to iteration {step:,}: the others are lost, the run goes on without them"
            )
        if behind := [number for number in self.checkpoints.steps() if number > step]:
            listed = ", ".join(map(str, behind))
            self.console.say(
                f"checkpoints behind iteration {step:,} are deleted, as the run goes on from there: {listed}"
            )
        self.checkpoints.discard_after(step)
        if self.best_step == step != self.checkpoints.best_step():  # killed between the checkpoint and its copy
            self._save(state, best=True)
        self._saved = (step, time.monotonic())
        return state

    # The loop

    @property
    def seconds(self) -> float:
        """Of training, former processes included."""
        return self._former_seconds + self._elapsed()

    def _elapsed(self) -> float:
        return time.monotonic() - self._began if self._began is not None else 0.0

    def _remaining(self) -> list[int]:
        return self.position.remaining(self.phases, self.setup.trainer.layout.num_envs, self.run.total_env_steps)

    def train(self, state: TrainState) -> str:
        """Call blocks until a limit or a signal; returns the sentence that says why it ended.

        Raises:
            NotFiniteError: naming the tensor and the update.
            CheckpointError: a checkpoint could not be written.
        """
        self._began, self._began_at = time.monotonic(), self.position.iterations
        self._saved = (self._saved[0], self._began)
        self.pace = Pace(self.position.env_steps, self.position.updates)
        with _signals() as self._received:
            while (reason := self._reason_to_stop()) is None:
                state = self._advance(state)
                evaluate, save = self._evaluation_due(), self._checkpoint_due()
                if (evaluate or save) and any(self._remaining()):
                    self._report()
                    with self.pace.pause():
                        best = evaluate and self._evaluate(state)
                        if save or best:
                            self._save(state, best)
            self._report()
            if self._profile:
                self.console.say(f"warning: no profile: no phase that learns had more than {PROFILED[0]} blocks")
            self._end(state)
        return reason

    def _reason_to_stop(self) -> str | None:
        done = f"at iteration {self.position.iterations:,} ({self.position.env_steps:,} environment steps)"
        done += f" in {duration(self.seconds)}"
        if not any(self._remaining()):
            return f"finished {done}"
        received = [name for names in hosts.gather(self._received) for name in names]
        if received:
            return f"stopped by {received[0]} {done}; go on with --resume {self.directory}"
        moved = self.position.iterations > self._began_at  # or a run that is resumed again and again would stand still
        if moved and self.run.max_seconds and hosts.first(self._elapsed()) >= self.run.max_seconds:
            return f"stopped by max_seconds {done}; go on with --resume {self.directory}"
        return None

    def _advance(self, state: TrainState) -> TrainState:
        """Start the next block, in the next phase where one has ended, and report the block before meanwhile."""
        remaining = self._remaining()
        if not remaining[self.position.phase]:
            state = self._enter_phase(state, next(index for index, left in enumerate(remaining) if left))
        before, phase = self.position, self.phases[self.position.phase]
        profiled = self._profile and bool(phase.updates) and self._blocks >= PROFILED[0]
        number = self._block_length(remaining[before.phase], PROFILED[1] if profiled else self.run.block_seconds)
        block = self.programs.blocks[before.phase]
        assert block is not None
        if profiled:
            self._report()  # so that the trace holds nothing else
            state, metrics = self._traced(block, state, number)
        else:
            state, metrics = block(state, np.int32(number))
            self._report()
        self._pending, self._last_number = _Pending(metrics, before, number), number
        self._blocks += 1
        self.position = before.after(phase, self.setup.trainer.layout.num_envs, number)
        return state

    def _traced(self, block: Any, state: TrainState, number: int) -> tuple[TrainState, BlockMetrics]:
        """A block of which host 0 keeps a trace; where that fails, training goes on."""
        self._profile = False
        if not hosts.writes():
            return block(state, np.int32(number))
        began, folder = time.monotonic(), self.directory / "profile"
        ended, found = record(lambda: block(state, np.int32(number)), folder, block.as_text())
        self.pace.leave_out(time.monotonic() - began - found.seconds)
        if found.operations:
            first, last = self.position.iterations + 1, self.position.iterations + number
            span = f"iterations {first:,} to {last:,}" if number > 1 else f"iteration {first:,}"
            self.console.say(f"profile of {span}, {1e3 * found.seconds:,.1f} ms, in {folder}:")
            self.console.say(table(found.operations).rstrip())
        if found.problem:
            self.console.say(f"warning: no profile: {found.problem}")
        return ended

    def _enter_phase(self, state: TrainState, index: int) -> TrainState:
        self.position = dataclasses.replace(self.position, phase=index, iteration=0)
        self._last_number = self._blocks = 0
        phase, iteration = on_all((np.int32(index), np.uint32(0)), self.setup.mesh)
        return dataclasses.replace(state, phase=phase, iteration=iteration)

    def _block_length(self, left: int, about: float) -> int:
        """Iterations of the next block: `about` so many seconds, never across an evaluation or a checkpoint."""
        limits = [left, self.run.block_iterations, max(GROWTH * self._last_number, 1)]
        seconds = self._iteration_seconds.get(self.position.phase)
        limits.append(max(1, round(about / seconds)) if seconds else 1)
        for every in (self.run.eval_every, self.run.checkpoint_every):
            if every:
                limits.append(every - self.position.iterations % every)
        return int(hosts.first(min(limits)))

    def _end(self, state: TrainState) -> None:
        """The last line, evaluation and checkpoint of this process, as far as they are missing."""
        best = False
        if not any(self._remaining()):  # what is out of turn must not stand where a run was only interrupted
            self.lines.flush(self._counters(self.position), self.pace)
            if self.programs.evaluate is not None and self.evaluated != self.position.iterations:
                best = self._evaluate(state)
        if best or self._saved[0] != self.position.iterations:
            self._save(state, best)
        self.checkpoints.wait()

    # Checkpoints and evaluations

    def _evaluation_due(self) -> bool:
        return self.programs.evaluate is not None and self.position.iterations % self.run.eval_every == 0

    def _checkpoint_due(self) -> bool:
        every = self.run.checkpoint_every
        overdue = time.monotonic() - self._saved[1] >= 60 * self.run.checkpoint_minutes
        return hosts.first(overdue) or bool(every and self.position.iterations % every == 0)

    def _save(self, state: TrainState, best: bool) -> None:
        """Everything that a later process needs; the metrics up to here are on disk already."""
        meta = {
            **dataclasses.asdict(self.position),
            "seconds": self.seconds,
            "best": self.best,
            "best_ties": self.best_ties,
            "best_step": self.best_step,
            "evaluated": self.evaluated,
            "group": self.lines.group,
            "rows": self.writer.rows,
            "devices": self.setup.mesh.size,
            "settings": _fixed_settings(self.setup),
        }
        self.checkpoints.save(self.position.iterations, state, meta, best=best)
        self._saved = (self.position.iterations, time.monotonic())

    # Reports

    def _wait_for(self, tree: Any) -> Any:
        """Fetch arrays; signals are handled while the device is busy."""
        arrays, began, announced = jax.tree.leaves(tree), time.monotonic(), bool(self._received)
        while not all(array.is_ready() for array in arrays):
            time.sleep(min(0.02, 0.0002 + 0.01 * (time.monotonic() - began)))
            if self._received and not announced:
                announced = True
                self.console.say(
                    f"{self._received[0]}: the work under way is finished, then saved; Ctrl-C (again) stops at once"
                )
        return hosts.fetched(tree)

    def _counters(self, position: Position) -> dict[str, int]:
        names = {"iteration": position.iterations, "env_steps": position.env_steps, "updates": position.updates}
        return {**names, "phase": position.phase, "step": position.axis(self.phases)}

    def _report(self) -> None:
        """Fetch the metrics of the block under way, if any: check them, write lines, refresh the console."""
        if self._pending is None:
            return
        (metrics, position, number), self._pending = self._pending, None
        fetched: BlockMetrics = self._wait_for(metrics)
        phase, bad = self.phases[position.phase], int(fetched.not_finite)
        before, ended = position, position.after(phase, self.setup.trainer.layout.num_envs, number)
        self._iteration_seconds[position.phase] = self.pace.mark(ended.env_steps, ended.updates) / number
        for row in range(number if bad < 0 else int(fetched.done) - 1):
            position = position.after(phase, self.setup.trainer.layout.num_envs)
            learning, episodes = jax.tree.map(lambda values, row=row: values[row], (fetched.learning, fetched.episodes))
            self.lines.add(self._counters(position), learning, episodes, self.pace)
        if bad >= 0:
            self._raise_not_finite(fetched, before, phase)
        self._refresh(ended, phase)

    def _refresh(self, position: Position, phase: Phase) -> None:
        environment = {name: value for name, value in self.lines.episodes.items() if name not in ("return", "length")}
        left = position.remaining(self.phases, self.setup.trainer.layout.num_envs, self.run.total_env_steps)
        # of the phase, as iterations of different phases take different times, or of the seconds that there are
        done = position.iteration / max(position.iteration + left[position.phase], 1)
        several = len(self.phases) > 1
        self._shown = {
            "phase": f"{phase.name} ({position.phase + 1} of {len(self.phases)})" if several else None,
            "fraction": max(done, min(self._elapsed() / self.run.max_seconds, 1.0) if self.run.max_seconds else 0.0),
            "iteration": position.iterations,
            "env_steps": position.env_steps,
            "updates": position.updates,
            **self.pace.rates(),
            "return": self.lines.episodes.get("return"),
            "environment": environment,
            "losses": self.lines.losses,
            **self.monitor.read()._asdict(),
        }  # fmt: skip
        self.console.block(self._shown)

    def _evaluate(self, state: TrainState) -> bool:
        """Score the policy on the selection episodes; True if it is the best so far.

        Of equal scores the better of `EnvSpec.tie_breakers` counts; of policies equal in these, too, the first one, but
        for the run's last, which stays if it is as good.
        """
        assert self.programs.evaluate is not None
        spec = self.setup.env.spec
        context = self.setup.eval_env.context(state.progress)
        key = held_out_key(self.run.seed, SELECTION)
        key, context = on_all((key, context), self.setup.mesh)
        curves = by_task(spec, self._wait_for(self.programs.evaluate(self.algo.policy(state.algo), key, context)))
        values = {name: float(np.mean(curve[-1])) for name, curve in curves.items()}
        step = self.position.axis(self.phases)
        self.writer.write(self.position.iterations, {f"eval/{name}": value for name, value in values.items()}, step)
        self.console.block(self._shown | {"evaluation": values})
        self.evaluated = self.position.iterations
        score, ties = values[spec.score], [values[name] for name in spec.tie_breakers]
        if not np.isfinite(score):
            return False
        if self.best is not None:
            sign = -1 if spec.score_mode == "min" else 1
            former = [sign * self.best, *self.best_ties]
            found = [sign * score, *ties][: len(former)]  # a run that began before there were tie breakers has none
            if found < former or (found == former and any(self._remaining())):
                return False
        self.best, self.best_ties, self.best_step = score, ties, self.position.iterations
        return True

    def _raise_not_finite(self, fetched: BlockMetrics, before: Position, phase: Phase) -> None:
        row = int(fetched.done) - 1
        name = self.setup.trainer.tensor_names(phase)[int(fetched.not_finite)]
        at = f"iteration {before.iterations + row + 1:,}"  # for parameters: of the check behind the block
        first = [
            int(np.argmax(~np.isfinite(values[row])))
            for values in fetched.learning.values()
            if np.ndim(values[row]) == 1 and not np.all(np.isfinite(values[row]))
        ]
        if first:
            at = f"update {before.updates + row * phase.updates + min(first) + 1:,} ({at})"
        self.checkpoints.wait()
        steps = self.checkpoints.steps()
        kept = f"the last good checkpoint ({steps[-1]:,}) is kept" if steps else "there was no checkpoint yet"
        remedy = "lower the learning rate" + (f" in a new run with --init_from {self.directory}" if steps else "")
        raise NotFiniteError(f"{name} is not finite at {at}; {kept}: {remedy}")


# Verbs


class Ended(NamedTuple):
    """How a run ended in this process; `memory` is empty where there is nothing to say."""

    directory: Path
    sentence: str
    memory: str


def start(config: Config, profile: bool = False) -> Ended:
    """A new run in a new directory; `profile`: whether to keep a trace of a block.

    Raises:
        UserError: a sentence; nothing was written if the run cannot be what the configuration asks for.
    """
    hosts.on_first(lambda: run_directory.check_root(config.run.runs))
    config = with_sources(_without_latest(config))
    setup = prepare(config)
    inputs = load_inputs(setup)
    with Console(_title(setup), label=setup.env.spec.label) as console:
        setup, facts = _fastest(config, setup, console)
        programs = _compile(setup, inputs, None, console)
        place = setup.config.run.runs, config.algo, config.env, setup.env.env.version, facts
        with _held(lambda: run_directory.create(*place)) as directory:
            hosts.on_first(lambda: run_directory.write_config(directory, setup.config.to_yaml()))
            return _train(setup, programs, directory, console, lambda session: session.begin(inputs), profile)


def resume(run: str, config: Config, changes: dict[str, Any], profile: bool = False) -> Ended:
    """Continue a run exactly where its newest intact checkpoint stands, or begin it if it has none.

    Args:
        run: the run directory.
        config: its configuration.
        changes: settings that are to change.
        profile: whether to keep a trace of a block.

    Raises:
        UserError: a sentence; the run is as it was if it cannot be continued.
    """
    directory = run_directory.open_run(run)
    setup = prepare(configuration.resumed(config, changes), resuming=True)
    with _held(lambda: directory), Console(_title(setup), label=setup.env.spec.label) as console:
        fresh = not hosts.first(sealed_steps(directory / "checkpoints"))
        inputs = load_inputs(setup) if fresh else None
        for line in run_directory.other_versions(directory):
            console.say(f"warning: {line}")
        found = None if fresh else _resumable(directory, setup, config, console)
        programs = _compile(setup, inputs, found and found.meta, console)

        def first_state(session: Session) -> TrainState:
            if found is None:
                session.writer.trim(0)
                state = session.begin(inputs)
            else:
                state = session.restore(found.step)
            hosts.on_first(lambda: run_directory.write_config(directory, setup.config.to_yaml()))
            console.say(f"resumed at iteration {session.position.iterations:,}" if not fresh else "begun anew")
            return state

        return _train(setup, programs, directory, console, first_state, profile)


class _Found(NamedTuple):
    """The number of a checkpoint, and what was written beside its state."""

    step: int
    meta: dict[str, Any]


def _resumable(directory: Path, setup: Setup, before: Config, console: Console) -> _Found:
    """The checkpoint that a run goes on from; `before` is its configuration without what changes now.

    Raises:
        UserError: there is no intact checkpoint, it is from another configuration, or has gone further than asked for.
    """
    with Checkpoints(directory / "checkpoints", warn=console.say) as checkpoints:
        step, meta = checkpoints.newest()
    fixed = _fixed_settings(setup)
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
        raise UsageError(f"the run has made {made:,} environment steps: ask for more than these, not for {asked:,}")
    return _Found(step, meta)


def _fixed_settings(setup: Setup) -> dict[str, Any]:
    """The settings that must not change within a run, as JSON gives them back."""
    free = (*FREE_ON_RESUME, "rollout_chunk")  # which follows the number of devices, and changes no result
    fixed = {name: value for name, value in setup.config.plain().items() if name not in free}
    return dict(json.loads(json.dumps(fixed)))


@contextmanager
def _held(find: Callable[[], Path]) -> Iterator[Path]:
    """The run directory that `find` makes or finds, locked; the host that writes does both."""
    with ExitStack() as stack:

        def take() -> str:
            directory = find()
            stack.enter_context(run_directory.lock(directory))
            return str(directory.absolute())

        directory = Path(hosts.on_first(take))
        hosts.require_visible(directory)
        hosts.remember(directory)
        yield directory


def _title(setup: Setup) -> str:
    return f"{setup.config.algo} on {setup.config.env}"


def _fastest(config: Config, setup: Setup, console: Console) -> tuple[Setup, dict[str, Any]]:
    """The setup with the variant of the environment that is fastest here, and what versions.json says of the choice.

    The variant stands among the settings of the run from then on: a run that is resumed does not choose again.
    """
    if not setup.env.env.variants():
        return setup, {}
    with console.working("comparing variants of the environment"):
        found = hosts.on_first(lambda: variants.choose(config, setup.trainer.layout.local_envs, console.say))
    config = dataclasses.replace(config, env_settings={**config.env_settings, **found["settings"]})
    return prepare(config), {"variant": found}


def _compile(setup: Setup, inputs: Any, meta: dict[str, Any] | None, console: Console) -> Programs:
    """Say what will run, and compile it; `meta` is that of the checkpoint where it goes on, if it does."""
    device = jax.local_devices()[0]
    where = f"{device.platform}, {hosts.number()} hosts" if hosts.number() > 1 else device.platform
    console.say(
        f"{setup.mesh.size} x {device.device_kind} ({where}), {setup.trainer.layout.shards} logical shards, "
        f"{setup.config.run.compute_dtype} matmuls"
    )
    for line in (*setup.notes, *setup.plan.lines()):
        console.say(line)
    with console.working("compiling"):
        if meta is None:
            return compile_programs(setup, inputs, console.say)
        position = Position(**{field.name: meta[field.name] for field in dataclasses.fields(Position)})
        return compile_programs(setup, inputs, console.say, position, meta["evaluated"])


def _train(
    setup: Setup,
    programs: Programs,
    directory: Path,
    console: Console,
    first_state: Callable[[Session], TrainState],
    profile: bool,
) -> Ended:
    peak = Peak()
    console.say(f"run directory: {directory}")
    with ExitStack() as stack:
        writer = stack.enter_context(Writer(directory) if hosts.writes() else Nowhere(directory))
        checkpoints = Checkpoints(directory / "checkpoints", setup.config.run.keep_checkpoints, console.say)
        stack.enter_context(checkpoints)
        monitor = stack.enter_context(Monitor())
        session = Session(setup, programs, directory, console, writer, checkpoints, monitor, profile)
        if hosts.writes() and writer.note:
            console.say(writer.note)
        sentence = session.train(first_state(session))
    # The devices of a CPU share its memory, and only their sum can be measured.
    sharing = len(setup.mesh.local_devices) if jax.default_backend() == "cpu" else 1
    held, planned = peak.read(), programs.peak * sharing
    what = "memory grew by up to" if jax.default_backend() == "cpu" else "peak memory"
    memory = f"{what} {gibibytes(held)}, planned {gibibytes(planned)} ({held / max(planned, 1) - 1:+.0%})"
    return Ended(directory, sentence, memory if planned > COMPARABLE else "")


# Policies of runs


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A policy read from a run, and all weights of its algorithm (`Algorithm.weights`)."""

    config: Config
    env: BatchedEnvironment
    algo: Algorithm
    params: Any
    weights: Any
    step: int


def _read(directory: Path, setup: Setup, best: bool) -> tuple[AlgoState, int]:
    """The replicated state in a run's best checkpoint (if wanted, there and intact), else in its newest."""
    shapes = _unplaced(setup.trainer.shapes().algo.replicated)
    with Checkpoints(directory / "checkpoints") as checkpoints:
        use_best = best and checkpoints.best_step() is not None
        try:
            step, replicated, _ = checkpoints.restore_subtree(shapes, "algo.replicated", best=use_best)
        except CheckpointError as error:
            if not use_best:
                raise
            print(f"warning: the best checkpoint is left out, the newest is used: {error}", file=sys.stderr)
            step, replicated, _ = checkpoints.restore_subtree(shapes, "algo.replicated")
    return AlgoState(replicated, ()), step


def _unplaced(shapes: Any) -> Any:
    """Shapes wherever they are read, not on the mesh."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)


def _anywhere(tree: Any) -> Any:
    """Copies of arrays that may be used on any device."""
    return jax.device_put(jax.tree.map(np.asarray, tree))


def load_policy(run: str | Path, best: bool = True) -> Loaded:
    """The policy of a run: its best checkpoint, or its newest.

    Raises:
        UserError: not a run directory, a damaged checkpoint, or one of another configuration.
    """
    directory, config = read_run(run)
    setup = assemble(config.with_run(devices=1), resuming=True)
    state, step = _read(directory, setup, best)
    params, weights = _anywhere((setup.algo.policy(state), setup.algo.weights(state)))
    return Loaded(config, setup.env, setup.algo, params, weights, step)


def load_state(run: str | Path) -> tuple[Algorithm, AlgoState, int]:
    """The algorithm of a run and all of its state in the newest checkpoint, data included, and that one's number.

    Raises:
        UserError: not a run directory, a damaged checkpoint, or one of another configuration.
    """
    directory, config = read_run(run)
    setup = assemble(config.with_run(devices=1), resuming=True)
    with Checkpoints(directory / "checkpoints") as checkpoints:
        step, state, _ = checkpoints.restore_subtree(_unplaced(setup.trainer.shapes().algo), "algo")
    return setup.algo, _anywhere(state), step


def with_sources(config: Config) -> Config:
    """The configuration of a new run, with what follows from the runs that its settings name.

    Raises:
        UserError: not run directories, or runs that do not fit.
    """
    cls = algos.find(config.algo)
    named = (*cls.sources, *cls.recordings)
    if not named:
        return config
    if config.run.init_from:
        raise UsageError(f"'{config.algo}' begins with what --{named[0]} names: leave --init_from out")

    def source(run: str) -> Source:
        other = assemble(read_run(run)[1].with_run(devices=1), resuming=True)
        return Source(run, other.algo, other.config.algo_settings)

    found = {name: tuple(map(source, _named(config, name))) for name in cls.sources}
    recorded = _recordings(cls, config)
    with usage_errors():
        settings = cls.adopt(config.make_env().spec, config.algo_settings, found, recorded)
    return dataclasses.replace(config, algo_settings=settings)


def _without_latest(config: Config) -> Config:
    """With the run itself wherever a setting names `runs/latest`, which soon means this run."""
    follow = lambda name: str(run_directory.follow_latest(name))  # noqa: E731
    sources = {name: ",".join(map(follow, _named(config, name))) for name in algos.find(config.algo).sources}
    config = dataclasses.replace(config, algo_settings={**config.algo_settings, **sources})
    return config.with_run(init_from=follow(config.run.init_from)) if config.run.init_from else config


def _named(config: Config, setting: str) -> list[str]:
    """The runs or files that a setting names."""
    return [name.strip() for name in config.algo_settings[setting].split(",") if name.strip()]


def _recordings(cls: type[Algorithm], config: Config) -> dict[str, dict[str, Any]]:
    """The labelled sets that settings name, each setting's as one. Raises LabelledSetError."""
    named = {setting: _named(config, setting) for setting in cls.recordings}
    return {setting: vars(expert_dataset.read_all(paths)) for setting, paths in named.items() if paths}


def load_inputs(setup: Setup) -> Any:
    """What `Algorithm.init` takes as inputs: weights of the runs that the settings name, or of `init_from`, or None.

    Raises:
        UserError: not run directories, damaged checkpoints, or networks that do not fit.
    """
    config = setup.config
    if setup.algo.sources or setup.algo.recordings:
        weights = {name: tuple(map(_weights_of, _named(config, name))) for name in setup.algo.sources}
        recorded = _recordings(type(setup.algo), config)
        return weights | {name: setup.algo.arrange(recording) for name, recording in recorded.items()}
    return load_weights(config.run.init_from, setup) if config.run.init_from else None


def _weights_of(run: str) -> Any:
    """Weights of a run of an earlier stage. Raises UserError where its phases have an end that it has not reached."""
    directory, config = read_run(run)
    setup = assemble(config.with_run(devices=1), resuming=True)
    lengths = [phase.iterations for phase in setup.algo.phases]
    ends = None not in lengths
    state, step = _read(directory, setup, best=not ends)
    if ends and step < sum(length or 0 for length in lengths):
        raise UserError(f"{run} has not gone through all its phases yet: finish it first, with --resume {run}")
    return _anywhere(setup.algo.weights(state))


def load_weights(run: str, setup: Setup) -> Any:
    """What `Algorithm.init` takes as inputs, from another run of the same algorithm or from files of PyTorch.

    Raises:
        UserError: another algorithm, networks of another shape, or files that cannot be read.
    """
    if run.endswith(torch_weights.SUFFIX):
        key = jax.random.fold_in(jax.random.key(setup.config.run.seed), _FRESH)
        return _anywhere(torch_weights.load(run, setup.algo, key))
    directory, config = read_run(run)
    if config.algo != setup.config.algo:
        raise UsageError(f"{run} was trained with '{config.algo}', not '{setup.config.algo}': its weights do not fit")
    other = assemble(config.with_run(devices=1), resuming=True)
    shapes_of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    wanted, found = (jax.eval_shape(s.algo.weights, s.trainer.shapes().algo) for s in (setup, other))
    here, there = setup.config.flat(), config.flat()
    sections: tuple[Iterable[str], ...] = (setup.algo.meaning,)
    if other_shapes := shapes_of(wanted) != shapes_of(found):
        sections = (["env"], setup.config.env_settings, setup.config.algo_settings)
    odd = next(filter(None, ([name for name in names if here[name] != there[name]] for names in sections)), [])
    if odd:
        told = [", ".join(f"{name} {flat[name]}" for name in odd) for flat in (there, here)]
        raise UsageError(f"the networks of {run} do not fit: they were made with {told[0]}; here {told[1]}")
    if other_shapes:
        raise UsageError(f"the networks of {run} do not fit: another version of '{config.algo}' made them")
    state, _ = _read(directory, other, best=True)
    return _anywhere(other.algo.weights(state))
