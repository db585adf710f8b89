"""A long iteration in pieces of about a second, between which the host shows progress and answers signals.

A block of iterations is one compiled call, which cannot be observed or interrupted; on a CPU thousands of whole
episodes would be a minute without a word. The pieces are the functions of the trainer that a block repeats: `rollout`,
`begin`, `step`, `end`. The state stays intact until the last piece, so that an iteration can be given up at any time.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from envs_jax.base import Array
from jaxrl.algos.base import Algorithm, Learning, Phase, Stage
from jaxrl.report.console import format_duration
from jaxrl.rl.data_parallel import AXIS, REPLICATED, SPLIT, compiler_options, on_mesh
from jaxrl.runtime.not_finite import split_faults
from jaxrl.runtime.program import Program
from jaxrl.runtime.train_state import BlockMetrics, TrainState
from jaxrl.runtime.trainer import Collected, Trainer

# Iterations of at least so many agent transitions are run in pieces.
MIN_TRANSITIONS = 2**14
MIN_TRANSITIONS_ACCELERATOR = 2**20
PIECE_SECONDS = 1.0  # target duration of a piece
SHORT_SECONDS = 5.0  # nothing is said about a shorter iteration
ADVISED_SECONDS = 60.0  # where an iteration takes longer, the user gets advice
ROLLOUT = "rollout"


class StageProgress(NamedTuple):
    """How far an iteration is."""

    activity: str  # what is being done, such as "rolling out"
    done: int  # units of it
    total: int
    unit: str  # such as "episodes"
    seconds_left: float | None  # until the iteration ends; None if not known yet


def can_learn_in_stages(algo: Algorithm) -> bool:
    """Return whether `learn` is the stages of the algorithm, and no method of a subclass that adds to them."""
    return bool(algo.learn_stages) and type(algo).learn is Algorithm.learn


def needs_pieces(algo: Algorithm, phase: Phase, backend: str) -> bool:
    """Return whether iterations of a phase are long enough to be run in pieces."""
    transitions = phase.steps * algo.layout.num_envs * algo.spec.num_agents
    minimum = MIN_TRANSITIONS if backend == "cpu" else MIN_TRANSITIONS_ACCELERATOR
    return bool(phase.updates) and can_learn_in_stages(algo) and transitions >= minimum


def make_programs(trainer: Trainer, phase: Phase) -> dict[str, tuple[Any, ...]]:
    """Return the jitted functions that together are an iteration of a phase, with the shapes of their arguments.

    "buffers": state -> empty buffers of what is collected.
    "rollout": (state, buffers, first chunk, last chunk + 1) -> (buffers, token); buffers are donated.
    "begin": (state, buffers) -> Learning.
    A stage's name: (state, Learning, epoch, first step, last step + 1) -> (Learning, token); `Learning` is donated.
    "end": (state, buffers, Learning) -> (state, BlockMetrics), as a block of one iteration; donates first and last.

    A token is ready when the piece is done.
    """
    token = jnp.int32(0)

    def make_buffers(state: TrainState) -> Collected:
        buffers: Collected = trainer.prepare_rollout(state, phase, trainer.split_key(state)[0])[0]()
        return buffers

    def rollout(state: TrainState, buffers: Collected, start: Array, stop: Array) -> tuple[Collected, Array]:
        roll_out_chunk = trainer.prepare_rollout(state, phase, trainer.split_key(state)[0])[1]
        return jax.lax.fori_loop(start, stop, roll_out_chunk, buffers), stop + token

    def begin(state: TrainState, buffers: Collected) -> Learning:
        return trainer.begin(state, buffers, trainer.split_key(state)[1])

    def step(
        state: TrainState, learning: Learning, epoch: Array, start: Array, stop: Array, stage: str
    ) -> tuple[Learning, Array]:
        return trainer.step(state, learning, stage, epoch, start, stop), stop + token

    def end(state: TrainState, buffers: Collected, learning: Learning) -> tuple[TrainState, BlockMetrics]:
        learned = trainer.algo.end_learning(learning)
        state, metrics, sums = trainer.end(state, phase.steps, phase.updates, buffers, learned)
        not_finite = trainer.find_not_finite(state.algo, metrics)
        metrics, sums = jax.tree.map(lambda x: x.astype(jnp.float32)[None], (metrics, sums))
        episodes, faults = split_faults(sums)
        return state, BlockMetrics(metrics, episodes, not_finite, jnp.int32(1), faults)

    def jit_on_mesh(function: Callable[..., Any], arguments: Any, results: Any, donated: tuple[int, ...]) -> Any:
        on_devices = on_mesh(function, trainer.mesh, arguments, results)
        return jax.jit(on_devices, donate_argnums=donated, compiler_options=compiler_options())

    state_specs = trainer.specs()
    buffer_specs: Any = Collected(PartitionSpec(None, AXIS), SPLIT, SPLIT, SPLIT)
    learning_specs: Any = Learning(SPLIT, SPLIT, REPLICATED)
    counts = REPLICATED, REPLICATED

    jitted_buffers = jit_on_mesh(make_buffers, (state_specs,), buffer_specs, ())
    jitted_rollout = jit_on_mesh(
        rollout, (state_specs, buffer_specs, *counts), (buffer_specs, REPLICATED), donated=(1,)
    )
    jitted_begin = jit_on_mesh(begin, (state_specs, buffer_specs), learning_specs, ())
    jitted_end = jit_on_mesh(
        end, (state_specs, buffer_specs, learning_specs), (state_specs, REPLICATED), donated=(0, 2)
    )

    state = trainer.shapes()
    buffers = trainer.place_shapes(jax.eval_shape(jitted_buffers, state), buffer_specs)
    learning = trainer.place_shapes(jax.eval_shape(jitted_begin, state, buffers), learning_specs)
    count = trainer.place_shapes(jax.ShapeDtypeStruct((), jnp.int32), REPLICATED)
    programs: dict[str, tuple[Any, ...]] = {
        "buffers": (jitted_buffers, state),
        ROLLOUT: (jitted_rollout, state, buffers, count, count),
        "begin": (jitted_begin, state, buffers),
    }
    for name in dict.fromkeys(stage.name for stage in trainer.algo.learn_stages):
        arguments = state_specs, learning_specs, REPLICATED, *counts
        jitted_step = jit_on_mesh(
            functools.partial(step, stage=name), arguments, (learning_specs, REPLICATED), donated=(1,)
        )
        programs[name] = (jitted_step, state, learning, count, count, count)
    programs["end"] = (jitted_end, state, buffers, learning)
    return programs


def describe_duration(seconds: float, num_envs: int) -> str:
    """Return a sentence about how long an iteration takes, and what to do about it if that is long; "" if short."""
    if seconds < SHORT_SECONDS:
        return ""
    text = f"an iteration takes about {format_duration(seconds)} on this device, as measured on a part of it"
    fewer = max(64, 2 ** int(np.log2(max(num_envs * ADVISED_SECONDS / 4 / seconds, 1))))
    if seconds > ADVISED_SECONDS and fewer < num_envs:
        text += f"; with --num_envs {fewer} about {format_duration(seconds * fewer / num_envs)}"
    return text


@dataclasses.dataclass
class Pieces:
    """The compiled pieces of an iteration, and how long each takes here."""

    programs: dict[str, Program]  # see `make_programs`
    algo: Algorithm
    phase: Phase
    chunks: int  # number of them in a rollout
    chunk_envs: int  # episodes, or environments, of a chunk, on all devices
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # per step of each program, as measured last
    _buffers: Any = None

    @property
    def ready(self) -> bool:
        return all(program.ready for program in self.programs.values())

    def start_compiling(self) -> None:
        for program in self.programs.values():
            program.start_compiling()

    def compile(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until all programs are compiled, one after another unless they have begun; see `Program.compile`."""
        for program in self.programs.values():
            program.compile(stop)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What is done piece by piece, in order."""
        return (Stage(ROLLOUT, 0, self.chunks), *self.algo.learn_stages)

    def measure(self, state: TrainState) -> float:
        """Return the seconds of an iteration, from a step of each stage, whose results are dropped."""
        learning = self.programs["begin"].empty_results()
        for stage in {stage.name: stage for stage in self.stages}.values():
            for _ in range(2):  # the first call is slower
                if stage.name == ROLLOUT:
                    self._buffers = self._run_steps(stage, state, self._take_buffers(state), 0, 1)
                else:
                    learning = self._run_steps(stage, state, learning, 0, 1)
        return self._estimate_seconds_left(0, 0)

    def run(
        self, state: TrainState, show: Callable[[StageProgress], None], stop: Callable[[float], bool]
    ) -> tuple[TrainState, BlockMetrics] | None:
        """Run an iteration; return state and metrics, or None if `stop` gave it up. `state` is donated unless it did.

        After each piece `show` gets the progress, and `stop` the seconds left of the iteration.
        """
        buffers = work = self._take_buffers(state)  # work: what the steps of a stage change
        for index, stage in enumerate(self.stages):
            if index == 1:
                began = time.perf_counter()
                buffers = work
                work = jax.block_until_ready(self.programs["begin"](state, work))
                self.seconds["begin"] = time.perf_counter() - began
            start = 0
            while start < stage.steps:
                end = min(stage.steps, start + self._choose_steps(stage))
                work = self._run_steps(stage, state, work, start, end)
                start = end
                seconds_left = self._estimate_seconds_left(index, end)
                show(self._describe_progress(stage, end, seconds_left))
                if stop(seconds_left):
                    self._buffers = buffers if index else work
                    return None
        result: tuple[TrainState, BlockMetrics] = self.programs["end"](state, buffers, work)
        self._buffers = buffers
        return result

    def _take_buffers(self, state: TrainState) -> Any:
        """Return buffers for a rollout, to which they are donated."""
        buffers = self._buffers
        self._buffers = None
        return self.programs["buffers"](state) if buffers is None else buffers

    def _choose_steps(self, stage: Stage) -> int:
        seconds = self.seconds.get(stage.name)
        return max(1, round(PIECE_SECONDS / seconds)) if seconds else 1

    def _run_steps(self, stage: Stage, state: TrainState, work: Any, start: int, end: int) -> Any:
        """Run steps of a stage by the clock; return the buffers, or the `Learning`, that they change."""
        epoch = () if stage.name == ROLLOUT else (np.int32(stage.epoch),)
        began = time.perf_counter()
        work, token = self.programs[stage.name](state, work, *epoch, np.int32(start), np.int32(end))
        token.block_until_ready()
        self.seconds[stage.name] = (time.perf_counter() - began) / (end - start)
        return work

    def _estimate_seconds_left(self, index: int, steps: int) -> float:
        """Return the seconds of what follows `steps` steps of a stage, as far as measured."""
        seconds = sum(self.seconds.get(stage.name, 0.0) * stage.steps for stage in self.stages[index:])
        seconds -= self.seconds.get(self.stages[index].name, 0.0) * steps
        return seconds + (self.seconds.get("begin", 0.0) if index == 0 else 0.0)

    def _describe_progress(self, stage: Stage, steps: int, seconds_left: float) -> StageProgress:
        if stage.name == ROLLOUT:
            unit = "episodes" if self.phase.restart else "environments"
            envs = self.chunk_envs
            return StageProgress("rolling out", steps * envs, stage.steps * envs, unit, seconds_left)
        epochs = self.algo.learn_stages[-1].epoch + 1
        names = {stage.name for stage in self.algo.learn_stages}
        activity = f"training the {stage.name}" if len(names) > 1 else "learning"
        activity += f", epoch {stage.epoch + 1} of {epochs}" if epochs > 1 else ""
        return StageProgress(activity, steps, stage.steps, "minibatches", seconds_left)
