"""The loop of a run on the host: call compiled blocks, write metrics, evaluate, answer signals; `Saver` saves.

Nothing here computes training results: checkpoints and metrics.jsonl (except time/) do not depend on when a run was
stopped, killed or resumed, nor on the length of blocks.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from envs_jax.batch import BatchedEnvironment
from jaxrl.algos.base import Phase
from jaxrl.common.errors import UserError
from jaxrl.report.console import Console, format_duration
from jaxrl.report.gpu import Monitor
from jaxrl.report.metrics import MetricAggregator, Throughput
from jaxrl.report.writer import FAILED, Writer
from jaxrl.rl.data_parallel import SPLIT, on_all, shardings
from jaxrl.runtime import hosts
from jaxrl.runtime.build import Run
from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.compiling import CompiledRun
from jaxrl.runtime.memory_plan import TooLargeError
from jaxrl.runtime.not_finite import Failure, faulty_fields, find_failure
from jaxrl.runtime.pieces import Pieces, StageProgress, describe_duration
from jaxrl.runtime.program import Program, StopRequestedError
from jaxrl.runtime.rollouts import final_means
from jaxrl.runtime.saver import Saver
from jaxrl.runtime.signals import StopSignals
from jaxrl.runtime.train_state import BlockMetrics, Position, TrainState
from jaxrl.runtime.trials import describe_failed, trials

BLOCK_SECONDS = 1.0  # target duration of a block
MAX_SEQUENTIAL_FACTOR = 8  # on the length of blocks whose trials run one after another, each copied in and out
MAX_BLOCK_GROWTH = 4  # ratio of successive block lengths: the first blocks are a poor estimate of the speed
PREFETCH_LIMIT_S = 2.0  # longest block behind which the next one is started before its metrics are fetched
GRACE_SECONDS = 10.0  # after a signal: longer blocks are given up
COMPILE_SECONDS = 4.0  # after a signal: the compiler is not waited for any longer
FINISH_SECONDS = 5.0  # after a signal: an iteration in pieces is finished if no more than this is left of it
PROGRESS_SECONDS = 15.0  # between lines about a block that takes long


class _GivenUpError(Exception):
    """A block did not end soon after a signal."""


class Session:
    """One process's part of a run, from its first block to its last checkpoint.

    The caller has locked `directory`. The first writer gets the means over all trials that have not failed; if there
    are several trials, each has one of the other writers. A trial fails where it gives a value that is not finite, or
    its environment an unusable mask: it counts no more, and the others go on.
    """

    def __init__(
        self,
        run: Run,
        programs: CompiledRun,
        directory: Path,
        console: Console,
        writers: Sequence[Writer],
        checkpoints: Checkpoints,
        monitor: Monitor,
    ) -> None:
        self.run = run
        self.programs = programs
        self.directory = directory
        self.console = console
        self.writers = writers
        self.checkpoints = checkpoints
        self.monitor = monitor
        self.settings = run.config.run
        self.phases = run.phases
        self.trials = run.trainer.trials
        self.position = Position()
        self._folders = [trial.folder for trial in trials(run.config)]
        self.saver = Saver(run, checkpoints, self._folders)
        self.lines = self._make_lines([None] * len(writers))
        self.abandoned = False  # whether something still runs that nobody waits for
        self.failed: dict[str, int] = {}  # {folder of a trial: iteration at which it failed}, of several trials
        self._owes_evaluation = False  # whether the restored checkpoint does
        self._previous_seconds = 0.0  # what earlier processes have trained
        self._began: float | None = None
        self._first_iteration = 0  # at which this process began
        self._signals = StopSignals()
        self._has_announced_stop = False  # whether the user was told that a signal has come
        self._abandoned_text = ""  # what a signal ended early
        self._running: tuple[BlockMetrics, Position, int] | None = None  # the block: metrics, start, iterations
        self._phase_block_length = 0  # iterations of the last block; 0 where a phase begins
        self._iteration_seconds: dict[int, float] = {}  # by phase
        self._faulty: list[set[str]] = [set() for _ in range(self.trials)]  # by trial, fields that were not finite
        self._shown: dict[str, Any] = {}  # the console's last data
        self._reported_host_time = False

    # The first state

    def begin(self, inputs: Any) -> TrainState:
        """Return the initial state of a run without a checkpoint; rows of an earlier start are set aside."""
        for writer in self.writers:
            self._warn(writer.trim(0))
        assert self.programs.start is not None
        return self.programs.start(self._place_by_trial(self.run.trainer.keys(self.settings.seed)), inputs)

    def restore(self, meta: Mapping[str, Any]) -> TrainState:
        """Restore the state of the intact checkpoint with this JSON object, and remove everything after it.

        Raises CheckpointError: it is from another configuration.
        """
        self.position = Position.from_meta(meta)
        step = self.position.iterations
        state = self.checkpoints.read(step, self.run.trainer.shapes())
        self.saver.take(meta)
        self.failed = dict(meta["failed"])
        self._previous_seconds = meta["seconds"]
        self.lines = self._make_lines([meta["group"], *meta["trial_groups"]])
        for writer, mark in zip(self.writers, meta["metrics"], strict=True):
            self._warn(writer.trim(step, mark, evaluated=meta["evaluated"] == step))
        if later_steps := [number for number in self.checkpoints.steps() if number > step]:
            listed = ", ".join(map(str, later_steps))
            self.console.say(
                f"checkpoints after iteration {step:,} are deleted, as the run continues from there: {listed}"
            )
        self.checkpoints.discard_after(step)
        is_due = self._is_evaluation_scheduled() or (self.programs.evaluate is not None and meta["finished"])
        self._owes_evaluation = is_due and meta["evaluated"] < step
        return self._cut_episodes(state) if self.run.env.on_host else state

    def _cut_episodes(self, state: TrainState) -> TrainState:
        """Truncate the running episodes, whose environments were on the host and are lost."""
        if not self.run.trainer.keeps_envs:
            return state
        self.console.say(
            "environments on the host cannot be saved: all begin new episodes, so results differ from a run without "
            "the stop"
        )
        ends = state.timestep.terminated, state.timestep.truncated
        truncated = jax.device_put(~np.asarray(ends[0]), ends[1].sharding)
        return dataclasses.replace(state, timestep=dataclasses.replace(state.timestep, truncated=truncated))

    def _make_lines(self, groups: Sequence[Any]) -> list[MetricAggregator]:
        """Return the lines of metrics of each writer; `groups` are the incomplete ones of the process before."""
        total_iterations = sum(self._count_remaining(Position()))
        return [
            MetricAggregator(writer, self.settings.log_every, total_iterations, group)
            for writer, group in zip(self.writers, groups, strict=True)
        ]

    def _warn(self, problem: str) -> None:
        if problem:
            self.console.say(f"warning: {problem}")

    def _place_by_trial(self, tree: Any) -> Any:
        """Place arrays on the devices: by their first axis, the trial, or on all if there is a single trial."""
        mesh = self.run.mesh
        return jax.device_put(tree, shardings(mesh, SPLIT)) if self.trials > 1 else on_all(tree, mesh)

    def _split_trials(self, tree: Any) -> list[Any]:
        """Return the part of each trial; if there are several, the trial is the first axis of every leaf."""
        return [jax.tree.map(lambda x, k=k: x[k], tree) for k in range(self.trials)] if self.trials > 1 else [tree]

    # The loop

    def train(self, state: TrainState) -> str:
        """Call blocks until a limit or a signal; return the sentence that says why training ended.

        Raises:
            NotFiniteError: names the tensor and the update.
            CheckpointError: a checkpoint could not be written.
        """
        self._began = time.monotonic()
        self.saver.start_clock()
        self._first_iteration = self.position.iterations
        self.pace = Throughput(self.trials * self.position.env_steps, self.trials * self.position.updates)
        with self._signals.collect():
            try:
                try:
                    self._make_owed_evaluation(state)
                    while self._find_reason_to_stop() is None:
                        position = self.position
                        state = self._run_block(state)
                        if self.position != position:  # else the iteration was given up
                            self._evaluate_and_save(state)
                except StopRequestedError:  # while something was compiled
                    self.abandoned = True
                self._report_block()
                reason = self._find_reason_to_stop()  # after the last report, which may be of failed trials
                assert reason is not None
                self._report_host_time(0.0)
                self._save_final(state)
            except _GivenUpError:
                self.abandoned = True
                self.checkpoints.wait()
                reason = (
                    f"stopped by {self._signals.names[0]}: the iterations in progress took longer than "
                    f"{GRACE_SECONDS:.0f} s and are lost; continue from iteration {self.saver.saved_iteration or 0:,} "
                    f"with --resume {self.directory}"
                )
        return reason

    def _find_reason_to_stop(self) -> str | None:
        here = f"at iteration {self.position.iterations:,} ({self.position.env_steps:,} environment steps)"
        here += f" in {format_duration(self._count_seconds())}"
        here += f"; {describe_failed(self.failed)}" if self.failed else ""
        if not any(self._count_remaining()):
            return f"finished {here}"
        if received := [name for names in hosts.gather(self._signals.names) for name in names]:
            return f"stopped by {received[0]} {here}{self._abandoned_text}; continue with --resume {self.directory}"
        moved = self.position.iterations > self._first_iteration  # or repeated resuming would make no progress
        limit = self.settings.max_seconds
        if moved and limit and hosts.broadcast(self._elapsed()) >= limit:
            return f"stopped by max_seconds {here}; continue with --resume {self.directory}"
        return None

    def _count_remaining(self, position: Position | None = None) -> list[int]:
        """Return the iterations left of each phase after this position, by default the run's."""
        position = position or self.position
        return position.remaining(self.phases, self.run.trainer.layout.num_envs, self.settings.total_env_steps)

    def _count_seconds(self) -> float:
        return self._previous_seconds + self._elapsed()

    def _elapsed(self) -> float:
        return time.monotonic() - self._began if self._began is not None else 0.0

    def _run_block(self, state: TrainState) -> TrainState:
        """Start the next block, in the next phase if the current one has ended; report the previous block meanwhile."""
        remaining = self._count_remaining()
        index = self.position.phase
        if not remaining[index]:
            index = next(other for other, left in enumerate(remaining) if left)
        phase = self.phases[index]
        block = self.programs.blocks[index]
        assert block is not None
        if not block.ready:
            self._report_block()  # before the compiler is waited for
            with self.pace.pause():
                self._compile(block, f"phase '{phase.name}'", state)
        if index != self.position.phase:  # only now: a signal while it is compiled leaves state and position alike
            state = self._enter_phase(state, index)
        before = self.position
        if isinstance(block, Pieces):
            return self._run_pieces(block, state)
        count = self._choose_block_length(remaining[index])
        expected = count * self._iteration_seconds.get(index, np.inf)
        if GRACE_SECONDS < expected < np.inf and self.saver.saved_iteration != before.iterations:
            self._report_block()
            self._save(state, best=False)  # a signal may give the block up
        state, metrics = block(state, np.int32(count))
        self._report_block()
        self._running = (metrics, before, count)
        self._phase_block_length = count
        self.position = before.after(phase, self.run.trainer.layout.num_envs, count)
        if expected > PREFETCH_LIMIT_S:
            self._report_block()  # a signal must not wait for two such blocks
        return state

    def _enter_phase(self, state: TrainState, index: int) -> TrainState:
        self.position = dataclasses.replace(self.position, phase=index, iteration=0)
        self._phase_block_length = 0
        shape = (self.trials,) if self.trials > 1 else ()
        phase, iteration = self._place_by_trial((np.full(shape, index, np.int32), np.zeros(shape, np.uint32)))
        return dataclasses.replace(state, phase=phase, iteration=iteration)

    def _compile(self, program: Program | Pieces, what: str, state: TrainState) -> None:
        """Wait for a program that is needed now; the clock of training pauses meanwhile.

        Raises:
            StopRequestedError: a signal came meanwhile.
            TooLargeError: the program does not fit; the training so far is saved.
        """
        if program.ready:
            return
        assert self._began is not None
        began = time.monotonic()
        try:
            with self.console.working(f"compiling {what}"):
                program.compile(lambda: self._should_abandon(f"compiling {what}", COMPILE_SECONDS))
        except TooLargeError:
            if self.saver.saved_iteration != self.position.iterations:
                self._save(state, best=False)
            self.checkpoints.wait()
            raise
        self._began += time.monotonic() - began

    def _choose_block_length(self, left: int) -> int:
        """Return the iterations of the next block, which ends at the next evaluation or checkpoint at the latest."""
        limits = [left, self.settings.block_iterations, max(MAX_BLOCK_GROWTH * self._phase_block_length, 1)]
        seconds = self._iteration_seconds.get(self.position.phase)
        factor = 1 if self.run.trainer.vectorized else min(self.trials, MAX_SEQUENTIAL_FACTOR)
        limits.append(max(1, round(BLOCK_SECONDS * factor / seconds)) if seconds else 1)
        for every in (self.run.eval_iterations, self.settings.checkpoint_iterations):
            if every:
                limits.append(every - self.position.iterations % every)
        return int(hosts.broadcast(min(limits)))

    def _run_pieces(self, pieces: Pieces, state: TrainState) -> TrainState:
        """Run an iteration in pieces and report it; return the unchanged state if a signal ended it early."""
        self._report_block()
        before = self.position
        phase = self.phases[self.position.phase]
        last = None
        if not pieces.seconds:
            with self.pace.pause():
                if advice := describe_duration(pieces.measure(state), self.run.trainer.layout.num_envs):
                    self.console.say(advice)

        def show(progress: StageProgress) -> None:
            nonlocal last
            last = progress
            self.console.progress(f"iteration {before.iterations + 1:,}: {progress.activity}", *progress[1:])

        def stop(seconds_left: float) -> bool:
            return bool(self._signals) and seconds_left > FINISH_SECONDS

        if (result := pieces.run(state, show, stop)) is None:
            assert last is not None
            progress = f"{last.activity}, {last.done:,} of {last.total:,} {last.unit}"
            self._abandoned_text = f" (the next one was not finished: {progress})"
            return state
        state, metrics = result
        self._running = metrics, before, 1
        self.position = before.after(phase, self.run.trainer.layout.num_envs)
        self._report_block()
        return state

    # Reports

    def _report_block(self) -> None:
        """Fetch the metrics of the running block, if there is one; check them, write lines, refresh the console."""
        if self._running is None:
            return
        (metrics, position, count), self._running = self._running, None
        fetched: BlockMetrics = self._fetch(metrics)
        self._check_host(self.run.env)
        self._report_host_time(PROGRESS_SECONDS)
        phase = self.phases[position.phase]
        after = position.after(phase, self.run.trainer.layout.num_envs, count)
        failures = self._find_failures(fetched, position, phase)
        seconds = self.pace.mark(self.trials * after.env_steps, self.trials * after.updates)
        self._iteration_seconds[position.phase] = seconds / count
        values = fetched.learning, fetched.episodes
        if self.run.algo.one_program:  # a program for all phases has zeros for what a phase does not do
            values = fetched.learning if phase.updates else {}, fetched.episodes if phase.steps else {}
        for row in range(count):
            previous = position
            position = position.after(phase, self.run.trainer.layout.num_envs)
            for trial, failure in failures.items():
                if failure.row == row:
                    self._end_trial(trial, failure, previous, position)
            self._add_row(jax.tree.map(lambda column, row=row: column[row], values), self._counters(position))
        self._show_block(after, phase)

    def _find_failures(self, fetched: BlockMetrics, before: Position, phase: Phase) -> dict[int, Failure]:
        """Return by trial why it fails in this block, where it does and has not failed before."""
        if np.all(fetched.not_finite < 0) and not any(map(np.any, fetched.faults.values())):
            return {}
        names = self.run.trainer.tensor_names(fetched.learning)
        failures = {}
        for trial in self._going():
            part = fetched.of_trial(trial) if self.trials > 1 else fetched
            self._faulty[trial] |= faulty_fields(part)
            if failure := find_failure(part, names, before, phase, self._faulty[trial]):
                failures[trial] = failure
        return failures

    def _going(self) -> list[int]:
        """Return the trials that have not failed."""
        return [trial for trial, folder in enumerate(self._folders) if folder not in self.failed]

    def _end_trial(self, trial: int, failure: Failure, previous: Position, position: Position) -> None:
        """Note that a trial has failed in the iteration that ends at `position`, after the one at `previous`.

        Raises UserError: it was the last one.
        """
        name = self._folders[trial]
        self.failed[name] = position.iterations
        left = self._going()
        if self.trials > 1:
            self.lines[1 + trial].flush(self._counters(previous), self.pace)
            for writer, number in ((self.writers[0], len(self.failed)), (self.writers[1 + trial], 1)):
                writer.write(position.iterations, {FAILED: number}, position.axis(self.phases))
        if not left:
            self.checkpoints.wait()
            what = f"all {self.trials} trials have failed, {name} as the last one: " if self.trials > 1 else ""
            raise failure.to_error(self.checkpoints.steps(), self.directory, what)
        self.console.say(
            f"warning: {name} failed: {failure.cause}; the other trials go on ({len(left)} of {self.trials})"
        )
        self.saver.compare_only([self._folders[k] for k in left])

    def _add_row(self, values: tuple[dict[str, Any], dict[str, Any]], counters: dict[str, Any]) -> None:
        """Add metrics and sums over episodes of an iteration to the lines of the trials, and their means."""
        going = self._going()
        whole = values
        if self.failed:
            whole = jax.tree.map(lambda x: x[going], values)
        self.lines[0].add(counters, whole[0], jax.tree.map(np.sum, whole[1]), self.pace)
        if self.trials > 1:
            by_trial = self._split_trials(values)
            for trial in going:
                learning, episodes = by_trial[trial]
                self.lines[1 + trial].add(counters, learning, episodes, self.pace)

    def _check_host(self, env: BatchedEnvironment) -> None:
        if env.failure:
            self.checkpoints.wait()
            steps = self.checkpoints.steps()
            kept = ""
            if steps:
                kept = f"; the last checkpoint ({steps[-1]:,}) is kept: continue from it with --resume {self.directory}"
            raise UserError(env.failure + kept)

    def _report_host_time(self, after: float) -> None:
        """Say once, after so many seconds, which share of the time environments on the host take."""
        sentence = self.run.env.describe_time(self._elapsed())
        if sentence and not self._reported_host_time and self._elapsed() >= after:
            self._reported_host_time = True
            self.console.say(f"warning: {sentence}")

    def _fetch(self, tree: Any) -> Any:
        """Fetch arrays when they are ready; signals are handled meanwhile.

        Raises _GivenUpError: they were not ready soon after a signal.
        """
        arrays = jax.tree.leaves(tree)
        began = time.monotonic()
        message_time = began
        while not all(array.is_ready() for array in arrays):
            time.sleep(min(0.02, 0.0002 + 0.01 * (time.monotonic() - began)))
            if time.monotonic() - message_time >= PROGRESS_SECONDS:
                message_time = time.monotonic()
                self.console.say(f"still at work after {format_duration(message_time - began)}, no new metrics yet")
            if self._should_abandon("the current iterations", GRACE_SECONDS):
                raise _GivenUpError
        return hosts.fetch(tree)

    def _should_abandon(self, what: str, seconds: float) -> bool:
        """Return whether `what` is given up because a signal came more than `seconds` ago; announce a signal once."""
        if self._signals and not self._has_announced_stop:
            self._has_announced_stop = True
            self.console.say(
                f"{self._signals.names[0]}: finishing {what} within {seconds:.0f} s, then saving; Ctrl-C (again) stops "
                "at once"
            )
        return self._signals.seconds > seconds and hosts.count_hosts() == 1

    def _counters(self, position: Position) -> dict[str, Any]:
        names = {"iteration": position.iterations, "env_steps": position.env_steps, "updates": position.updates}
        seconds = self._count_seconds()
        return {**names, "phase": position.phase, "step": position.axis(self.phases), "time/seconds": seconds}

    def _show_block(self, position: Position, phase: Phase) -> None:
        episodes = self.lines[0].episodes
        left = self._count_remaining(position)
        # fraction of the phase, as iterations of different phases take different times, or of the seconds available
        fraction = position.iteration / max(position.iteration + left[position.phase], 1)
        several = len(self.phases) > 1
        limit = self.settings.max_seconds
        self._shown = {
            "phase": f"{phase.name} ({position.phase + 1} of {len(self.phases)})" if several else None,
            "fraction": max(fraction, min(self._elapsed() / limit, 1.0) if limit else 0.0),
            "iteration": position.iterations,
            "env_steps": position.env_steps,
            "updates": position.updates,
            "seconds": self._elapsed(),
            **self.pace.rates(),
            "return": episodes.get("return"),
            "environment": {name: value for name, value in episodes.items() if name not in ("return", "length")},
            "losses": self.lines[0].losses,
            **self.monitor.read()._asdict(),
        }
        self.console.block(self._shown)

    # Evaluations and checkpoints

    def _make_owed_evaluation(self, state: TrainState) -> None:
        """Make the evaluation that was due at the restored checkpoint, and that a signal or a kill has ended."""
        if self._owes_evaluation:
            with self.pace.pause():
                best = self._evaluate(state)
                if self.saver.evaluated_iteration == self.position.iterations:
                    self._save(state, best)

    def _is_evaluation_scheduled(self) -> bool:
        return self.programs.evaluate is not None and self.position.iterations % self.run.eval_iterations == 0

    def _evaluate_and_save(self, state: TrainState) -> None:
        """Evaluate the policy and write a checkpoint, if they are due."""
        evaluate = self._is_evaluation_scheduled()
        save = self.saver.is_due(self.position.iterations)
        if (evaluate or save) and any(self._count_remaining()):
            self._report_block()
            with self.pace.pause():
                best = evaluate and self._evaluate(state)
                if save or best:
                    self._save(state, best)

    def _evaluate(self, state: TrainState) -> bool:
        """Score the policy on the selection episodes; return True if it is the best so far, False after a signal."""
        trainer = self.run.trainer
        program = self.programs.evaluate
        assert program is not None
        keys = trainer.keys(self.settings.seed)
        try:
            self._compile(program, "the evaluation", state)
            finals = self._fetch(program(*self._place_by_trial((trainer.policies(state), keys)), state.progress))
            self._check_host(self.run.eval_env)
        except (StopRequestedError, _GivenUpError):
            self.abandoned = True
            return False
        split = self._split_trials(finals)
        by_trial = {trial: final_means(self.run.env.spec, split[trial]) for trial in self._going()}
        every = list(by_trial.values())
        means = {name: float(np.mean([x[name] for x in every if name in x])) for name in every[0]}
        entries_by_writer = [(self.writers[0], means)]
        if self.trials > 1:
            entries_by_writer += [(self.writers[1 + trial], values) for trial, values in by_trial.items()]
        for writer, values in entries_by_writer:
            entries = {"env_steps": self.position.env_steps} | {f"eval/{name}": x for name, x in values.items()}
            writer.write(self.position.iterations, entries, self.position.axis(self.phases))
        self.console.block(self._shown | {"evaluation": means})
        self.saver.evaluated_iteration = self.position.iterations
        scores = {self._folders[trial]: values for trial, values in by_trial.items()}
        return self.saver.replace_best(means, scores, is_last=not any(self._count_remaining()))

    def _save(self, state: TrainState, best: bool) -> None:
        """Save everything that a later process needs except metrics, which are on disk already."""
        self.saver.save(
            state,
            {
                **dataclasses.asdict(self.position),
                "seconds": self._count_seconds(),
                "finished": not any(self._count_remaining()),
                "failed": self.failed,
                "group": self.lines[0].group,
                "trial_groups": [lines.group for lines in self.lines[1:]],
                "metrics": [writer.mark() for writer in self.writers],
            },
            best,
        )

    def _save_final(self, state: TrainState) -> None:
        """Write the last line, evaluation and checkpoint of this process unless they are written already."""
        best = False
        if not any(self._count_remaining()):  # unscheduled, so only at the end of the whole run
            for lines in self.lines:
                lines.flush(self._counters(self.position), self.pace)
            is_scored = self.programs.evaluate is None or self.saver.evaluated_iteration == self.position.iterations
            if not is_scored and not self.abandoned:
                best = self._evaluate(state)
        if best or self.saver.saved_iteration != self.position.iterations:
            self._save(state, best)
        self.checkpoints.wait()
