"""The host's side of a run: compile, call blocks, write metrics and checkpoints, stop in order, resume.

Nothing here computes anything about training; it only calls compiled blocks and looks at what they report.
"""

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from envs_jax.batch import BatchedEnvironment, batched
from jaxrl import algos, plan, precision, run_directory
from jaxrl import config as configuration
from jaxrl.algos.base import Algorithm, Phase
from jaxrl.checkpoint import Checkpoints
from jaxrl.config import Config
from jaxrl.errors import UsageError, UserError
from jaxrl.evaluation import Evaluator, held_out_key, learned
from jaxrl.files import write_atomically
from jaxrl.parallel import REPLICATED, Layout, logical_shards, make_mesh, shardings
from jaxrl.report.console import Console, duration
from jaxrl.report.gpu import Monitor
from jaxrl.report.writer import Writer
from jaxrl.trainer import BlockMetrics, Trainer, TrainState

SELECTION = "selection"


class NotFiniteError(UserError):
    """A loss or a parameter is no longer finite."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """A configuration made real: everything resolved, nothing allocated.

    Attributes:
        config: with every automatic value written out, as in config.yaml.
        env, algo, trainer, mesh: see their classes.
        plan: memory needed, from shapes.
        notes: sentences for the user.
    """

    config: Config
    env: BatchedEnvironment
    algo: Algorithm
    trainer: Trainer
    mesh: Mesh
    plan: plan.Plan
    notes: list[str]


def prepare(config: Config) -> Setup:
    """Resolve sizes, choose chunks by the memory plan and check it.

    Raises:
        UsageError: impossible settings.
        plan.TooLargeError: the run does not fit.
    """
    run, env = config.run, batched(config.make_env())
    spec = env.spec
    try:
        cls = algos.find(config.algo)
        num_envs = run.num_envs or cls.default_num_envs(spec, config.algo_settings)
        shards = run.logical_shards or logical_shards(num_envs, cls.batch(spec, config.algo_settings, num_envs))
        if num_envs % shards:
            raise UsageError(
                f"num_envs {num_envs} is not divisible by logical_shards {shards}: use "
                f"{-(-num_envs // shards) * shards}"
            )
        devices, warning = plan.choose_devices(run.devices, num_envs, shards)
        dtype = precision.compute_dtype(run.compute_dtype, jax.default_backend())
        layout = Layout(num_envs, shards, devices, run.exact_sharding, compute_dtype=dtype)
        make = lambda layout: cls(spec, layout, **config.algo_settings)  # noqa: E731
        limit = int(run.memory_gb * plan.GIB) or plan.free_memory(jax.local_devices()[0])
        chunks = plan.choose_chunks(env, make, layout, run.rollout_chunk, run.learn_chunk, limit)
        layout = dataclasses.replace(layout, learn_chunk=chunks.learn)
        algo = make(layout)
        phases = algo.phases
    except ValueError as error:
        raise UsageError(str(error)) from None
    total = _total_env_steps(run, spec)
    schedule = run.schedule_env_steps or total
    mesh = make_mesh(devices)
    trainer = Trainer(
        env,
        algo,
        layout,
        mesh,
        run.block_iterations,
        chunks.rollout,
        precision.rollout_dtype(run.rollout_dtype),
        schedule,
    )
    resolved = config.with_run(
        num_envs=num_envs,
        logical_shards=shards,
        rollout_chunk=chunks.rollout,
        learn_chunk=chunks.learn,
        total_env_steps=total,
        total_episodes=0,
        schedule_env_steps=schedule,
        compute_dtype=dtype.name,
        rollout_dtype=precision.rollout_dtype(run.rollout_dtype).name,
    )
    if not any(phase.steps for phase in phases):
        raise UsageError(f"algorithm '{config.algo}' has no phase that steps the environment")
    made = plan.make_plan(trainer, limit)
    made.check()
    notes = [*algo.summary(), *([f"warning: {warning}"] if warning else [])]
    return Setup(resolved, env, algo, trainer, mesh, made, notes)


def _total_env_steps(run: configuration.RunSettings, spec: Any) -> int:
    if run.total_env_steps and run.total_episodes:
        raise UsageError("total_env_steps and total_episodes both limit the run: give one of them")
    if run.total_episodes:
        if not spec.fixed_horizon:
            raise UsageError(f"episodes of '{spec.name}' differ in length: use --total_env_steps")
        return run.total_episodes * spec.horizon
    if not run.total_env_steps:
        raise UsageError("say how long to train: --total_env_steps N or --total_episodes N")
    return run.total_env_steps


@dataclasses.dataclass
class Position:
    """Where the host believes the run to be; checked against the state's own counters at every save."""

    phase: int = 0
    iteration: int = 0  # in the phase
    iterations: int = 0  # in all phases
    env_steps: int = 0
    updates: int = 0

    def advance(self, phase: Phase, num_envs: int, number: int = 1) -> None:
        self.iteration += number
        self.iterations += number
        self.env_steps += number * phase.steps * num_envs
        self.updates += number * phase.updates


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Collects the names of SIGINT and SIGTERM instead of dying; a second SIGINT interrupts at once."""
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class Session:
    """One process's share of a run, from compiling to the last checkpoint."""

    def __init__(self, setup: Setup, directory: Path, console: Console) -> None:
        self.setup, self.directory, self.console = setup, directory, console
        self.run, self.algo, self.trainer = setup.config.run, setup.algo, setup.trainer
        self.phases = setup.algo.phases
        self.position = Position()
        self.best: float | None = None
        self.trained_seconds = 0.0
        self.compile_seconds: dict[str, float] = {}
        self._blocks: dict[int, Any] = {}
        self._group: list[dict[str, Any]] = []
        self._seconds_per_iteration = 0.0
        self._marks: list[tuple[float, int, int]] = []
        self.peak_plan = 0

    # Compiling

    def compile(self, state_shapes: TrainState) -> None:
        """Compile every phase's block (and the evaluation) ahead of time and check their memory."""
        iterations = jax.ShapeDtypeStruct((), jnp.int32, sharding=shardings(self.setup.mesh, REPLICATED))
        for index, phase in enumerate(self.phases):
            began = time.monotonic()
            self._blocks[index] = self.trainer.make_block(phase).lower(state_shapes, iterations).compile()
            self.compile_seconds[phase.name] = time.monotonic() - began
            needed = plan.compiled_bytes(self._blocks[index])
            self.peak_plan = max(self.peak_plan, needed)
            self.console.say(
                f"compiled phase '{phase.name}' in {self.compile_seconds[phase.name]:.1f} s; "
                f"it needs {needed / plan.GIB:.2f} GiB per device"
            )
            self.setup.plan.check(needed)
        if self.run.eval_every:
            began = time.monotonic()
            episodes = -(-self.run.eval_episodes // self.setup.mesh.size) * self.setup.mesh.size
            evaluator = Evaluator(self.setup.env, learned(self.algo), episodes, self.setup.mesh,
                                  self.run.rollout_chunk, self.algo.init_actor)  # fmt: skip
            policy = jax.eval_shape(self.algo.policy, state_shapes.algo)
            self._evaluate: Callable[..., Any] = evaluator.compiled()
            context = jax.eval_shape(self.setup.env.context, state_shapes.progress)
            key = jax.eval_shape(lambda: jax.random.key(0))
            compiled = self._evaluate.lower(policy, key, context).compile()  # type: ignore[attr-defined]
            self.setup.plan.check(plan.compiled_bytes(compiled))
            self.console.say(f"compiled the evaluation in {time.monotonic() - began:.1f} s")

    # The loop

    def train(self, state: TrainState, writer: Writer, checkpoints: Checkpoints, monitor: Monitor) -> str:
        """Call blocks until a limit or a signal; returns the sentence that says why it ended.

        Raises:
            NotFiniteError: naming the tensor and the update.
            CheckpointError: a checkpoint could not be written.
        """
        began = saved = time.monotonic()
        pending: tuple[BlockMetrics, Position, int] | None = None
        self._marks = [(began, self.position.env_steps, self.position.updates)]
        with _signals() as received:
            while True:
                reason = self._reason_to_stop(received, time.monotonic() - began)
                if reason is not None and self._on_grid():
                    break
                phase = self.phases[self.position.phase]
                number = self._block_length(phase)
                before = dataclasses.replace(self.position)
                state, metrics = self._blocks[self.position.phase](state, jnp.int32(number))
                self.position.advance(phase, self.trainer.layout.num_envs, number)
                if pending is not None:
                    self._report(*pending, writer, monitor)
                pending = (metrics, before, number)
                if phase.iterations is not None and self.position.iteration >= phase.iterations:
                    state = self._next_phase(state)
                due = self._checkpoint_due(time.monotonic() - saved)
                evaluate = self.run.eval_every and self.position.iterations % self.run.eval_every == 0
                if (due or evaluate) and self._on_grid():
                    self._report(*pending, writer, monitor)
                    pending = None
                    best = bool(evaluate) and self._evaluate_now(state, writer)
                    if due or best:
                        self._save(state, checkpoints, best)
                        saved = time.monotonic()
            if pending is not None:
                self._report(*pending, writer, monitor)
            self._flush(writer)
            self.trained_seconds += time.monotonic() - began
            if self.position.iterations not in checkpoints.steps():
                self._save(state, checkpoints, False)
            checkpoints.wait()
        return reason

    def _on_grid(self) -> bool:
        """Whether no line of metrics is half collected here (or the run is over)."""
        return self.position.iterations % self.run.log_every == 0 or self._iterations_left() == 0

    def _iterations_left(self) -> int:
        """Iterations until the phase or the run ends."""
        phase = self.phases[self.position.phase]
        if phase.iterations is not None:
            return max(phase.iterations - self.position.iteration, 0)
        missing = self.run.total_env_steps - self.position.env_steps
        per_iteration = phase.steps * self.trainer.layout.num_envs
        return max(-(-missing // per_iteration), 0)

    def _block_length(self, phase: Phase) -> int:
        """Iterations of the next block: about `block_seconds`, never across a line, an evaluation, a checkpoint."""
        limits = [self._iterations_left(), self.run.block_iterations]
        if self._seconds_per_iteration > 0:
            limits.append(max(1, round(self.run.block_seconds / self._seconds_per_iteration)))
        else:
            limits.append(1)
        for every in (self.run.log_every, self.run.eval_every, self.run.checkpoint_every):
            if every > 1:
                limits.append(every - self.position.iterations % every)
            elif every == 1 and every != self.run.log_every:
                limits.append(1)
        return max(1, min(limits))

    def _reason_to_stop(self, received: list[str], seconds: float) -> str | None:
        done = self._iterations_left() == 0 and self.phases[self.position.phase].iterations is None
        last = self.position.phase == len(self.phases) - 1
        if done or (last and self._iterations_left() == 0):
            return f"finished: {self.position.env_steps:,} environment steps"
        if received:
            return f"stopped by {received[0]} after {self.position.env_steps:,} environment steps"
        if self.run.max_seconds and seconds >= self.run.max_seconds:
            return f"stopped by max_seconds after {self.position.env_steps:,} environment steps"
        return None

    def _next_phase(self, state: TrainState) -> TrainState:
        if self.position.phase + 1 < len(self.phases):
            self.position.phase += 1
            self.position.iteration = 0
            placed = shardings(self.setup.mesh, REPLICATED)
            phase, iteration = jnp.int32(self.position.phase), jnp.uint32(0)
            state = dataclasses.replace(
                state, phase=jax.device_put(phase, placed), iteration=jax.device_put(iteration, placed)
            )
        return state

    def _checkpoint_due(self, seconds: float) -> bool:
        every = self.run.checkpoint_every
        return bool(every and self.position.iterations % every == 0) or seconds >= 60 * self.run.checkpoint_minutes

    def _save(self, state: TrainState, checkpoints: Checkpoints, best: bool) -> None:
        meta = {**dataclasses.asdict(self.position), "best": self.best, "seconds": self.trained_seconds}
        checkpoints.save(self.position.iterations, state, meta, best=best)

    # Reports

    def _report(self, metrics: BlockMetrics, before: Position, number: int, writer: Writer, monitor: Monitor) -> None:
        """Fetch a block's metrics, check them, write one line per `log_every` iterations, refresh the console."""
        fetched: BlockMetrics = jax.device_get(metrics)
        now, phase = time.monotonic(), self.phases[before.phase]
        if int(fetched.not_finite) >= 0:
            self._raise_not_finite(fetched, before, phase)
        after = dataclasses.replace(before)
        for row in range(number):
            after.advance(phase, self.trainer.layout.num_envs)
            self._group.append({
                "learning": {name: float(np.mean(value[row])) for name, value in fetched.learning.items()},
                "episodes": {name: float(value[row]) for name, value in fetched.episodes.items()},
            })  # fmt: skip
            if after.iterations % self.run.log_every == 0:
                self._line(writer, after, phase)
        self._marks.append((now, after.env_steps, after.updates))
        recent = now - self._marks[-2][0]
        if len(self._marks) > 2:  # the first block pays for start-up
            self._seconds_per_iteration = recent / number
        self._marks = self._marks[-21:]
        self._refresh(after, phase, monitor)

    def _rates(self) -> tuple[float, float]:
        """Environment steps and updates per second over the last blocks."""
        (began, steps, updates), (now, steps_now, updates_now) = self._marks[0], self._marks[-1]
        seconds = max(now - began, 1e-9)
        return (steps_now - steps) / seconds, (updates_now - updates) / seconds

    def _line(self, writer: Writer, after: Position, phase: Phase) -> None:
        """One line: means over the group; what is measured in time stands under time/ and differs from run to run."""
        group, self._group = self._group, []
        learning = {f"train/{n}": float(np.mean([g["learning"][n] for g in group])) for n in group[0]["learning"]}
        sums = {n: sum(g["episodes"][n] for g in group) for n in group[0]["episodes"]}
        ended = sums.pop("episodes", 0.0)
        episodes = {f"episode/{name}": value / ended for name, value in sums.items()} if ended else {}
        steps_rate, updates_rate = self._rates()
        self._shown = {"learning": learning, "episodes": episodes}
        writer.write(
            after.iterations,
            {
                "env_steps": after.env_steps, "updates": after.updates, "phase": after.phase, "episodes": ended,
                **episodes, **learning,
                "time/unix": time.time(), "time/env_steps_per_second": steps_rate,
                "time/updates_per_second": updates_rate,
            },
        )  # fmt: skip

    def _flush(self, writer: Writer) -> None:
        if self._group:
            self._line(writer, self.position, self.phases[self.position.phase])

    def _refresh(self, after: Position, phase: Phase, monitor: Monitor, evaluation: Any = None) -> None:
        shown = getattr(self, "_shown", {"learning": {}, "episodes": {}})
        steps_rate, updates_rate = self._rates()
        episodes = {name.removeprefix("episode/"): value for name, value in shown["episodes"].items()}
        info = {
            "fraction": min(after.env_steps / self.run.total_env_steps, 1.0),
            "iteration": after.iterations,
            "env_steps": after.env_steps,
            "env_steps_per_second": steps_rate,
            "updates": after.updates,
            "updates_per_second": updates_rate,
            "return": episodes.pop("return", None),
            "environment": {name: value for name, value in episodes.items() if name != "length"},
            "losses": {n.removeprefix("train/"): v for n, v in shown["learning"].items() if n.endswith("loss")},
            "note": phase.name if len(self.phases) > 1 else None,
            **monitor.read()._asdict(),
        }
        self.console.block(info)

    def _evaluate_now(self, state: TrainState, writer: Writer) -> bool:
        """Score the policy on the selection episodes; True if it is the best so far."""
        spec = self.setup.env.spec
        key = held_out_key(self.run.seed, SELECTION)
        context = self.setup.env.context(state.progress)
        curves = jax.device_get(self._evaluate(self.algo.policy(state.algo), key, context))
        values = {f"eval/{name}": float(np.mean(curve[-1])) for name, curve in curves.items()}
        score = values[f"eval/{spec.score}"]
        better = self.best is None or (score < self.best if spec.score_mode == "min" else score > self.best)
        if better:
            self.best = score
        writer.write(self.position.iterations, values)
        self.console.block({"evaluation": {name.removeprefix("eval/"): v for name, v in values.items()},
                            "iteration": self.position.iterations})  # fmt: skip
        return better

    def _raise_not_finite(self, fetched: BlockMetrics, before: Position, phase: Phase) -> None:
        row = int(fetched.done) - 1
        name = self.trainer.tensor_names(phase)[int(fetched.not_finite)]
        update = before.updates + row * phase.updates
        span = f"updates {update + 1} to {update + phase.updates}"
        bad = [
            int(np.argmax(~np.isfinite(values[row]))) for values in fetched.learning.values()
            if np.ndim(values[row]) == 1 and not np.all(np.isfinite(values[row]))
        ]  # fmt: skip
        if bad:
            span = f"update {update + min(bad) + 1}"
        raise NotFiniteError(
            f"{name} is not finite at {span} (iteration {before.iterations + row + 1}): the last good checkpoint is kept; "
            "start from it with --init_from and a lower learning rate"
        )


def start(config: Config, init_from: str | None = None, argv_note: str = "") -> tuple[Path, str]:
    """A new run in a new directory. Returns the directory and the sentence that says how it ended."""
    setup = prepare(config)
    inputs = load_weights(init_from, setup) if init_from else None
    directory = run_directory.create(setup.config.run.runs, config.algo, config.env)
    write_atomically(directory / run_directory.CONFIG, setup.config.to_yaml())
    return directory, _go(setup, directory, inputs, resume=False)


def resume(run: str, config: Config, changes: dict[str, Any]) -> tuple[Path, str]:
    """Continue a run exactly where its newest intact checkpoint stands."""
    directory = run_directory.open_run(run)
    setup = prepare(configuration.resumed(config, changes))
    return directory, _go(setup, directory, None, resume=True)


def _go(setup: Setup, directory: Path, inputs: Any, resume: bool) -> str:
    run = setup.config.run
    title = f"{setup.config.algo} on {setup.config.env}"
    with (
        run_directory.lock(directory),
        Console(title) as console,
        Writer(directory) as writer,
        Checkpoints(directory / "checkpoints", run.keep_checkpoints, console.say) as checkpoints,
        Monitor() as monitor,
    ):
        console.say(f"run directory: {directory}")
        device = jax.local_devices()[0]
        console.say(f"{setup.mesh.size} x {device.device_kind} ({device.platform}), "
                    f"{setup.trainer.layout.shards} logical shards, {setup.config.run.compute_dtype} matmuls")  # fmt: skip
        for line in (*setup.notes, *setup.plan.lines()):
            console.say(line)
        session = Session(setup, directory, console)
        session.compile(setup.trainer.shapes())
        if resume:
            step, state, meta = checkpoints.restore(setup.trainer.shapes())
            names = [field.name for field in dataclasses.fields(Position)]
            session.position = Position(**{name: meta[name] for name in names})
            session.best, session.trained_seconds = meta["best"], meta["seconds"]
            checkpoints.discard_after(step)
            writer.trim(step)
            write_atomically(directory / run_directory.CONFIG, setup.config.to_yaml())
            console.say(f"resumed at iteration {step:,} ({session.position.env_steps:,} environment steps)")
        else:
            state = setup.trainer.init(jax.random.key(run.seed), inputs)
        sentence = session.train(state, writer, checkpoints, monitor)
        peak = monitor.read().memory
        console.say(
            f"memory at the end {peak / plan.GIB:.2f} GiB, compiled peak {session.peak_plan / plan.GIB:.2f} GiB"
        )
    return sentence + (f" in {duration(session.trained_seconds)}" if session.trained_seconds else "")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A policy read from a run."""

    config: Config
    env: BatchedEnvironment
    algo: Algorithm
    params: Any
    step: int


def _read_config(run: str | Path) -> tuple[Path, Config]:
    directory = run_directory.open_run(run)
    path = directory / run_directory.CONFIG
    return directory, configuration.build(configuration.read_yaml(path), str(path))


def _read_part(setup: Setup, directory: Path, part: Callable[[Any], Any], best: bool) -> tuple[Any, int]:
    """`part` (of AlgoState) of a run's checkpoint, the best one if there is one and it is asked for."""
    shapes = setup.trainer.shapes().algo.replicated
    with Checkpoints(directory / "checkpoints") as checkpoints:
        use_best = best and checkpoints.best_step() is not None
        step, replicated, _ = checkpoints.restore_subtree(shapes, "algo.replicated", best=use_best)
    from jaxrl.algos.base import AlgoState

    return part(AlgoState(replicated, ())), step


def load_policy(run: str | Path, best: bool = True) -> Loaded:
    """The policy of a run: its best checkpoint, or its newest.

    Raises:
        UserError: not a run directory, a damaged checkpoint, or one of another configuration.
    """
    directory, config = _read_config(run)
    setup = prepare(config.with_run(devices=1, memory_gb=1e6))
    params, step = _read_part(setup, directory, setup.algo.policy, best)
    return Loaded(config, setup.env, setup.algo, params, step)


def load_weights(run: str, setup: Setup) -> Any:
    """What `Algorithm.init` takes as inputs, from another run of the same algorithm.

    Raises:
        UsageError: another algorithm, or networks of another shape.
    """
    directory, config = _read_config(run)
    if config.algo != setup.config.algo:
        raise UsageError(f"{run} was trained with '{config.algo}', not '{setup.config.algo}': its weights do not fit")
    other = prepare(config.with_run(devices=1, memory_gb=1e6))
    weights, _ = _read_part(other, directory, other.algo.weights, best=True)
    wanted = jax.eval_shape(lambda: setup.algo.weights(setup.algo.init(jax.random.key(0), None)))
    found = jax.eval_shape(lambda: weights)
    if jax.tree.map(lambda x: (x.shape, x.dtype), wanted) != jax.tree.map(lambda x: (x.shape, x.dtype), found):
        raise UsageError(
            f"the networks of {run} have other shapes: give the same observation, width and depth settings"
        )
    return weights
