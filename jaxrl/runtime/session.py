"""The host side of a run: call compiled blocks, write metrics and checkpoints, handle signals.

Nothing here computes training results. The content of checkpoints and of metrics.jsonl (except time/) does
not depend on when a run was stopped, killed or resumed, nor on the length of blocks.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.algos.base import Phase
from jaxrl.report.console import Console, format_duration
from jaxrl.report.gpu import Monitor
from jaxrl.report.metrics import MetricAggregator, Throughput
from jaxrl.report.writer import Writer
from jaxrl.rl.data_parallel import SPLIT, on_all, shardings
from jaxrl.runtime import hosts
from jaxrl.runtime.build import CompiledRun, Run, fixed_settings
from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.memory_plan import TooLargeError
from jaxrl.runtime.not_finite import faulty_fields, not_finite_error
from jaxrl.runtime.pieces import Pieces, StageProgress, announcement
from jaxrl.runtime.program import Program, StopRequestedError
from jaxrl.runtime.rollouts import final_means, held_out_key
from jaxrl.runtime.signals import StopSignals
from jaxrl.runtime.train_state import BlockMetrics, Position, TrainState

SELECTION = "selection"
IN_TURN = 8  # largest factor on the length of blocks whose trials run one after another, each copied in and out
GROWTH = 4  # largest ratio of successive block lengths: the first blocks are a poor estimate of the speed
AHEAD_SECONDS = 2.0  # longest block behind which the next one is started before its metrics are fetched
GRACE_SECONDS = 10.0  # after a signal: longer blocks are given up
COMPILE_SECONDS = 4.0  # after a signal: the compiler is not waited for any longer
FINISH_SECONDS = 5.0  # after a signal: an iteration in pieces is finished if no more than this is left of it
PROGRESS_SECONDS = 15.0  # between lines about a block that takes long


class _GivenUpError(Exception):
    """A block did not end soon after a signal."""


class Session:
    """One process's part of a run, from its first block to its last checkpoint.

    The caller has locked `directory`. If there are several trials, each has a trial writer, and `writer` gets the means
    over them.
    """

    def __init__(
        self,
        run: Run,
        programs: CompiledRun,
        directory: Path,
        console: Console,
        writer: Writer,
        checkpoints: Checkpoints,
        monitor: Monitor,
        trial_writers: Sequence[Writer] = (),
    ) -> None:
        self.run, self.programs, self.directory = run, programs, directory
        self.console, self.writer, self.checkpoints, self.monitor = console, writer, checkpoints, monitor
        self.settings, self.algo, self.phases = run.config.run, run.algo, run.algo.phases
        self.position = Position()
        self.trials = run.trainer.trials
        self.trial_writers = trial_writers
        self.writers = (writer, *trial_writers)
        self._restart_lines()
        self.best: float | None = None  # score of the best checkpoint, its tie breakers, and its number
        self.best_ties: list[float] = []
        self.best_step: int | None = None
        self.evaluated = 0  # iteration of the last evaluation
        self._previous_seconds = 0.0  # of training in earlier processes
        self._began: float | None = None
        self._began_at = 0
        self._saved: tuple[int | None, float] = (None, 0.0)  # number of the last checkpoint, and when
        self._pending: tuple[BlockMetrics, Position, int] | None = None  # the running block, before it, iterations
        self._signals = StopSignals()
        self._has_announced_stop = False  # after a signal
        self._iteration_seconds: dict[int, float] = {}  # by phase
        self._last_number = 0  # of the last block
        # of each trial, fields in which its environments gave values that are not finite
        self._faulty: list[set[str]] = [set() for _ in range(self.trials)]
        self._given_up = ""  # what a signal ended early
        self.abandoned = False  # whether something still runs that nobody waits for
        self._last_block: dict[str, Any] = {}  # the console's last data

    # Beginning

    def _restart_lines(self, groups: Sequence[Any] = ()) -> None:
        """Begin the lines of metrics, with the incomplete lines of the process that this one resumes."""
        groups = groups or [None] * len(self.writers)
        total_iterations = sum(self._remaining(Position()))
        self.lines, *self.trial_lines = (
            MetricAggregator(writer, self.settings.log_every, total_iterations, group)
            for writer, group in zip(self.writers, groups, strict=True)
        )

    def begin(self, inputs: Any) -> TrainState:
        """Return the initial state of a new run."""
        assert self.programs.start is not None
        return self.programs.start(self._place_by_trial(self.run.trainer.keys(self.settings.seed)), inputs)

    def _place_by_trial(self, tree: Any) -> Any:
        """Place arrays on the devices: by their first axis, the trial, or on all if there is a single trial."""
        mesh = self.run.mesh
        return jax.device_put(tree, shardings(mesh, SPLIT)) if self.trials > 1 else on_all(tree, mesh)

    def _split_trials(self, tree: Any) -> list[Any]:
        """Return the part of each trial; if there are several, the trial is the first axis of every leaf."""
        return [jax.tree.map(lambda x, k=k: x[k], tree) for k in range(self.trials)] if self.trials > 1 else [tree]

    def restore(self, step: int) -> TrainState:
        """Restore the state of an intact checkpoint and remove everything after it.

        Raises CheckpointError: it is from another configuration.
        """
        step, state, meta = self.checkpoints.restore(self.run.trainer.shapes(), step, intact=True)
        self.position = Position.from_state(state)
        self.best, self.best_step, self.evaluated = meta["best"], meta["best_step"], meta["evaluated"]
        self.best_ties = meta.get("best_ties", [])
        self._previous_seconds = meta["seconds"]
        self._restart_lines([meta["group"], *meta.get("trial_groups", [])])
        for writer, mark in zip(self.writers, meta.get("metrics") or [None] * len(self.writers), strict=True):
            if problem := writer.trim(step, mark):
                self.console.say(f"warning: {problem}")
        if later_steps := [number for number in self.checkpoints.steps() if number > step]:
            listed = ", ".join(map(str, later_steps))
            self.console.say(
                f"checkpoints after iteration {step:,} are deleted, as the run continues from there: {listed}"
            )
        self.checkpoints.discard_after(step)
        self._saved = (step, time.monotonic())
        return state

    # The loop

    @property
    def seconds(self) -> float:
        """Return the seconds of training, earlier processes included."""
        return self._previous_seconds + self._elapsed()

    def _elapsed(self) -> float:
        return time.monotonic() - self._began if self._began is not None else 0.0

    def _remaining(self, position: Position | None = None) -> list[int]:
        """Return the iterations left of each phase after this position, by default the run's."""
        position = position or self.position
        return position.remaining(self.phases, self.run.trainer.layout.num_envs, self.settings.total_env_steps)

    def train(self, state: TrainState) -> str:
        """Call blocks until a limit or a signal; return the sentence that says why training ended.

        Raises:
            NotFiniteError: names the tensor and the update.
            CheckpointError: a checkpoint could not be written.
        """
        self._began, self._began_at = time.monotonic(), self.position.iterations
        self._saved = (self._saved[0], self._began)
        self.pace = Throughput(self.trials * self.position.env_steps, self.trials * self.position.updates)
        with self._signals.collect():
            try:
                reason = self._train(state)
            except _GivenUpError:
                self.abandoned = True
                self.checkpoints.wait()
                name, saved = self._signals.names[0], self._saved[0] or 0
                reason = (
                    f"stopped by {name}: the running block took longer than {GRACE_SECONDS:.0f} s and was given up; "
                    f"continue from iteration {saved:,} with --resume {self.directory}"
                )
        return reason

    def _train(self, state: TrainState) -> str:
        """Train until a limit or a signal, while the caller collects signals."""
        try:
            while (reason := self._reason_to_stop()) is None:
                position = self.position
                state = self._advance(state)
                if self.position != position:  # else the iteration was given up
                    self._evaluate_and_save(state)
        except StopRequestedError:  # while something was compiled
            self.abandoned, reason = True, self._reason_to_stop()
            assert reason is not None
        self._report()
        self._end(state)
        return reason

    def _evaluate_and_save(self, state: TrainState) -> None:
        """Evaluate the policy and write a checkpoint, if they are due."""
        every = self.run.eval_iterations
        evaluate = self.programs.evaluate is not None and self.position.iterations % every == 0
        save = self._checkpoint_due()
        if (evaluate or save) and any(self._remaining()):
            self._report()
            with self.pace.pause():
                best = evaluate and self._evaluate_unless_stopped(state)
                if save or best:
                    self._save(state, best)

    def _evaluate_unless_stopped(self, state: TrainState) -> bool:
        """Evaluate, see `_evaluate`; return False if a signal ended it early."""
        try:
            return self._evaluate(state)
        except (StopRequestedError, _GivenUpError):
            self.abandoned = True
            return False

    def _reason_to_stop(self) -> str | None:
        done = f"at iteration {self.position.iterations:,} ({self.position.env_steps:,} environment steps)"
        done += f" in {format_duration(self.seconds)}"
        if not any(self._remaining()):
            return f"finished {done}"
        received = [name for names in hosts.gather(self._signals.names) for name in names]
        if received:
            return f"stopped by {received[0]} {done}{self._given_up}; continue with --resume {self.directory}"
        moved = self.position.iterations > self._began_at  # or a run resumed repeatedly would make no progress
        if moved and self.settings.max_seconds and hosts.first(self._elapsed()) >= self.settings.max_seconds:
            return f"stopped by max_seconds {done}; continue with --resume {self.directory}"
        return None

    def _advance(self, state: TrainState) -> TrainState:
        """Start the next block, in the next phase if the current one has ended; report the previous block meanwhile."""
        remaining = self._remaining()
        if not remaining[self.position.phase]:
            state = self._enter_phase(state, next(index for index, left in enumerate(remaining) if left))
        before, phase = self.position, self.phases[self.position.phase]
        block = self._get_block(phase, state)
        if isinstance(block, Pieces):
            return self._advance_in_pieces(block, state)
        count = self._block_length(remaining[before.phase])
        expected = count * self._iteration_seconds.get(before.phase, np.inf)
        if GRACE_SECONDS < expected < np.inf and self._saved[0] != before.iterations:
            self._report()
            self._save(state, best=False)  # a signal may give the block up
        state, metrics = block(state, np.int32(count))
        self._report()
        self._pending, self._last_number = (metrics, before, count), count
        self.position = before.after(phase, self.run.trainer.layout.num_envs, count)
        if expected > AHEAD_SECONDS:
            self._report()  # a signal must not wait for two such blocks
        return state

    def _advance_in_pieces(self, pieces: Pieces, state: TrainState) -> TrainState:
        """Run an iteration in pieces and report it; return the unchanged state if a signal ended it early."""
        self._report()
        before, phase, last = self.position, self.phases[self.position.phase], None
        if not pieces.seconds:
            with self.pace.pause():
                self.console.say(announcement(pieces.measure(state), self.run.trainer.layout.num_envs))

        def show(progress: StageProgress) -> None:
            nonlocal last
            last = progress
            self.console.progress(f"iteration {before.iterations + 1:,}: {progress.activity}", *progress[1:])

        def give_up(seconds_left: float) -> bool:
            return bool(self._signals) and seconds_left > FINISH_SECONDS

        result = pieces.run(state, show, give_up)
        if result is None:
            assert last is not None
            self._given_up = (
                f" (the next one was given up: {last.activity}, {last.done:,} of {last.total:,} {last.unit})"
            )
            return state
        state, metrics = result
        self._pending = metrics, before, 1
        self.position = before.after(phase, self.run.trainer.layout.num_envs)
        self._report()
        return state

    def _get_block(self, phase: Phase, state: TrainState) -> Program | Pieces:
        block = self.programs.blocks[self.position.phase]
        if block is None or not block.ready:
            self._report()  # what has run is shown before the compiler is waited for
        with self.pace.pause():
            return self._finish_compiling(block, f"phase '{phase.name}'", state)

    def _finish_compiling(self, program: Program | Pieces | None, what: str, state: TrainState) -> Any:
        """Compile a program that the session needs now, if it is not ready; the clock of training pauses meanwhile.

        Raises TooLargeError: it does not fit; the training so far is saved.
        """
        assert program is not None
        if not program.ready:
            assert self._began is not None
            began = time.monotonic()
            try:
                with self.console.working(f"compiling {what}"):
                    program.finish(lambda: self._stops(f"compiling {what}", COMPILE_SECONDS))
            except TooLargeError:
                if self._saved[0] != self.position.iterations:
                    self._save(state, best=False)
                self.checkpoints.wait()
                raise
            self._began += time.monotonic() - began
        return program

    def _enter_phase(self, state: TrainState, index: int) -> TrainState:
        self.position = dataclasses.replace(self.position, phase=index, iteration=0)
        self._last_number = 0
        shape = (self.trials,) if self.trials > 1 else ()
        phase, iteration = self._place_by_trial((np.full(shape, index, np.int32), np.zeros(shape, np.uint32)))
        return dataclasses.replace(state, phase=phase, iteration=iteration)

    def _block_length(self, left: int) -> int:
        """Return the iterations of the next block, which ends at the next evaluation or checkpoint at the latest."""
        limits = [left, self.settings.block_iterations, max(GROWTH * self._last_number, 1)]
        seconds = self._iteration_seconds.get(self.position.phase)
        target = self.settings.block_seconds * (1 if self.run.trainer.vectorized else min(self.trials, IN_TURN))
        limits.append(max(1, round(target / seconds)) if seconds else 1)
        for every in (self.run.eval_iterations, self.settings.checkpoint_every):
            if every:
                limits.append(every - self.position.iterations % every)
        return int(hosts.first(min(limits)))

    def _end(self, state: TrainState) -> None:
        """Write the last line, evaluation and checkpoint of this process unless they are written already."""
        best = False
        if not any(self._remaining()):  # unscheduled, so only at the end of the whole run
            for lines in (self.lines, *self.trial_lines):
                lines.flush(self._counters(self.position), self.pace)
            unscored = self.programs.evaluate is not None and self.evaluated != self.position.iterations
            if unscored and not self.abandoned:
                best = self._evaluate_unless_stopped(state)
        if best or self._saved[0] != self.position.iterations:
            self._save(state, best)
        self.checkpoints.wait()

    # Checkpoints and evaluations

    def _checkpoint_due(self) -> bool:
        every = self.settings.checkpoint_every
        overdue = time.monotonic() - self._saved[1] >= 60 * self.settings.checkpoint_minutes
        return hosts.first(overdue) or bool(every and self.position.iterations % every == 0)

    def _save(self, state: TrainState, best: bool) -> None:
        """Save everything that a later process needs except metrics, which are on disk already."""
        meta = {
            **dataclasses.asdict(self.position),
            "seconds": self.seconds,
            "finished": not any(self._remaining()),
            "best": self.best,
            "best_ties": self.best_ties,
            "best_step": self.best_step,
            "evaluated": self.evaluated,
            "group": self.lines.group,
            "trial_groups": [lines.group for lines in self.trial_lines],
            "metrics": [writer.mark() for writer in self.writers],
            "devices": self.run.mesh.size,
            "settings": fixed_settings(self.run),
        }
        self.checkpoints.save(self.position.iterations, state, meta, best=best)
        self._saved = (self.position.iterations, time.monotonic())

    # Reports

    def _wait_for(self, tree: Any) -> Any:
        """Fetch arrays when they are ready; signals are handled meanwhile.

        Raises _GivenUpError: they were not ready soon after a signal.
        """
        arrays, began = jax.tree.leaves(tree), time.monotonic()
        message_time = began
        while not all(array.is_ready() for array in arrays):
            time.sleep(min(0.02, 0.0002 + 0.01 * (time.monotonic() - began)))
            if time.monotonic() - message_time >= PROGRESS_SECONDS:
                message_time = time.monotonic()
                self.console.say(f"at work for {format_duration(message_time - began)}, without figures so far")
            if self._stops("the current block", GRACE_SECONDS):
                raise _GivenUpError
        return hosts.fetch(tree)

    def _stops(self, what: str, seconds: float) -> bool:
        """Return whether `what` is given up because a signal came more than `seconds` ago; announce a signal once."""
        if self._signals and not self._has_announced_stop:
            self._has_announced_stop = True
            self.console.say(
                f"{self._signals.names[0]}: finishing {what} within {seconds:.0f} s, then saving; Ctrl-C (again) stops "
                "at once"
            )
        return self._signals.seconds > seconds and hosts.number() == 1

    def _counters(self, position: Position) -> dict[str, Any]:
        names = {"iteration": position.iterations, "env_steps": position.env_steps, "updates": position.updates}
        return {**names, "phase": position.phase, "step": position.axis(self.phases), "time/seconds": self.seconds}

    def _report(self) -> None:
        """Fetch the metrics of the running block, if there is one; check them, write lines, refresh the console."""
        if self._pending is None:
            return
        (metrics, position, count), self._pending = self._pending, None
        fetched: BlockMetrics = self._wait_for(metrics)
        for trial, fields in enumerate(self._faulty):
            fields |= faulty_fields(fetched, trial)
        trial = 0
        if self.trials > 1:  # the first value that is not finite, if there is one
            trial = int(np.argmin(np.where(fetched.not_finite >= 0, fetched.done, np.iinfo(np.int32).max)))
            fetched = dataclasses.replace(fetched, not_finite=fetched.not_finite[trial], done=fetched.done[trial])
        phase, bad = self.phases[position.phase], int(fetched.not_finite)
        before, after = position, position.after(phase, self.run.trainer.layout.num_envs, count)
        seconds = self.pace.mark(self.trials * after.env_steps, self.trials * after.updates)
        self._iteration_seconds[position.phase] = seconds / count
        for row in range(count if bad < 0 else int(fetched.done) - 1):
            position = position.after(phase, self.run.trainer.layout.num_envs)
            learning, episodes = jax.tree.map(lambda values, row=row: values[row], (fetched.learning, fetched.episodes))
            counters = self._counters(position)
            self.lines.add(counters, learning, jax.tree.map(np.sum, episodes), self.pace)
            by_trial = self._split_trials((learning, episodes))
            for lines, (trial_learning, sums) in zip(self.trial_lines, by_trial, strict=False):
                lines.add(counters, trial_learning, sums, self.pace)
        if bad >= 0:
            self.checkpoints.wait()
            names, steps, several = self.run.trainer.tensor_names(phase), self.checkpoints.steps(), self.trials > 1
            raise not_finite_error(fetched, several, names, before, phase, steps, self.directory, self._faulty[trial])
        self._refresh(after, phase)

    def _refresh(self, position: Position, phase: Phase) -> None:
        environment = {name: value for name, value in self.lines.episodes.items() if name not in ("return", "length")}
        left = self._remaining(position)
        # fraction of the phase, as iterations of different phases take different times, or of the seconds available
        done = position.iteration / max(position.iteration + left[position.phase], 1)
        several, limit = len(self.phases) > 1, self.settings.max_seconds
        self._last_block = {
            "phase": f"{phase.name} ({position.phase + 1} of {len(self.phases)})" if several else None,
            "fraction": max(done, min(self._elapsed() / limit, 1.0) if limit else 0.0),
            "iteration": position.iterations,
            "env_steps": position.env_steps,
            "updates": position.updates, "seconds": self._elapsed(),
            **self.pace.rates(),
            "return": self.lines.episodes.get("return"),
            "environment": environment,
            "losses": self.lines.losses,
            **self.monitor.read()._asdict(),
        }  # fmt: skip
        self.console.block(self._last_block)

    def _evaluate(self, state: TrainState) -> bool:
        """Score the policy on the selection episodes; return True if it is the best so far.

        Equal scores are decided by `EnvSpec.tie_breakers`; if these are equal, too, the first policy stays, except
        that the run's last one replaces it.
        """
        spec, trainer = self.run.env.spec, self.run.trainer
        keys = trainer.keys(self.settings.seed, lambda seed: held_out_key(seed, SELECTION))
        context = on_all(self.run.eval_env.context(self._split_trials(state.progress)[0]), self.run.mesh)
        evaluate = self._finish_compiling(self.programs.evaluate, "the evaluation", state)
        metrics_by_trial = self._wait_for(evaluate(*self._place_by_trial((trainer.policies(state), keys)), context))
        scores = [final_means(spec, metrics) for metrics in self._split_trials(metrics_by_trial)]
        values = {name: float(np.mean([means[name] for means in scores if name in means])) for name in scores[0]}
        for writer, means in zip(self.writers, (values, *scores), strict=False):
            entries = {"env_steps": self.position.env_steps} | {f"eval/{name}": value for name, value in means.items()}
            writer.write(self.position.iterations, entries, self.position.axis(self.phases))
        self.console.block(self._last_block | {"evaluation": values})
        self.evaluated = self.position.iterations
        score, ties = values[spec.score], [values[name] for name in spec.tie_breakers]
        if not np.isfinite(score):
            return False
        if self.best is not None:
            sign = -1 if spec.score_mode == "min" else 1
            best = [sign * self.best, *self.best_ties]
            current = [sign * score, *ties][: len(best)]  # older runs have no tie breakers
            if current < best or (current == best and any(self._remaining())):
                return False
        self.best, self.best_ties, self.best_step = score, ties, self.position.iterations
        return True
