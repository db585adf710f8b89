"""The compiled functions of a run, each of which is checked to fit into memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos.base import Phase
from jaxrl.common.errors import list_names, usage_errors
from jaxrl.report.console import gibibytes
from jaxrl.rl.data_parallel import REPLICATED, SPLIT, compiler_options
from jaxrl.runtime import hosts, memory_plan
from jaxrl.runtime.build import Run
from jaxrl.runtime.pieces import Pieces, make_programs, needs_pieces
from jaxrl.runtime.program import Program
from jaxrl.runtime.rollouts import Evaluator, hold_out, learned_policy
from jaxrl.runtime.train_state import Position
from jaxrl.runtime.trainer import Trainer

# (state, iterations) -> (state, metrics), or `Pieces` where an iteration takes long
Block = Program | Pieces


@dataclasses.dataclass(frozen=True)
class CompiledRun:
    """The functions of a run, each compiled when it is called first, if not before."""

    start: Program | None  # (key, inputs) -> TrainState, for a new run
    blocks: list[Block | None]  # one per phase, None for a phase that is already complete
    evaluate: Program | None  # (policy, key of the seed, progress) -> metrics, None if no evaluation will come
    needed: list[int]  # peak bytes of each compiled function on a device while a checkpoint is written

    def compile(self, *programs: Block | None, at_once: bool = True) -> None:
        """Compile these programs, or all if none is named; `at_once` in threads. Raises memory_plan.TooLargeError."""
        chosen = [one for one in programs or (*self.blocks, self.evaluate, self.start) if one is not None]
        for program in chosen if at_once else ():
            program.start_compiling()
        for program in chosen:
            program.compile()


def compile_run(
    run: Run, inputs: Any, say: Callable[[str], None], position: Position | None = None, evaluated: int = 0
) -> CompiledRun:
    """Compile the programs that the rest of a run needs; check that its state and then each program fits into memory.

    On a CPU only the start and the phases up to the first that learns are compiled here, and the others when they are
    needed. GPUs can run out of memory: there all programs are compiled here. Compilers run in parallel (on a GPU they
    take turns to time kernels), but on several hosts in the same order, one after another.

    Args:
        run, inputs: the run, and what `Algorithm.init` takes.
        say: receives a sentence with seconds and bytes for each program.
        position, evaluated: where the run continues (None for a new one), and the iteration of its last evaluation.

    Raises UsageError: algorithm and environment do not go together; TooLargeError: the run does not fit.
    """
    compiler = RunCompiler(run, say)
    settings = run.config.run
    phases = run.phases
    current = position or Position()
    remaining = current.remaining(phases, run.trainer.layout.num_envs, settings.total_env_steps)
    blocks = compiler.make_blocks(remaining)
    will_evaluate = settings.eval_every and (any(remaining) or evaluated != current.iterations)
    evaluate = compiler.make_evaluation() if will_evaluate else None
    start = compiler.make_start(inputs) if position is None else None
    compiled = CompiledRun(start, blocks, evaluate, compiler.needed)
    if jax.default_backend() != "cpu" or hosts.count_hosts() > 1:
        compiled.compile(at_once=hosts.count_hosts() == 1)
    else:
        first = next((k for k, phase in enumerate(phases) if phase.updates and blocks[k]), len(blocks))
        compiled.compile(start, *blocks[: first + 1])
    return compiled


class RunCompiler:
    """Makes the programs of a run. Raises UsageError, and TooLargeError if even its state does not fit."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self.run = run
        self.trainer = run.trainer
        self.say = say
        self.needed: list[int] = []  # see `CompiledRun`
        with usage_errors(traced=True):
            self.state = run.trainer.shapes()
        self.state_bytes = memory_plan.local_size(self.state)
        self._check_size(self.state_bytes)

    def make_blocks(self, remaining: list[int]) -> list[Block | None]:
        """Return a block for each phase that has iterations left."""
        phases = self.run.phases
        if self.run.algo.one_program and len(phases) > 1 and jax.default_backend() == "cpu":
            # as fast as a program for each phase, and compiled once; not tried on GPUs
            names = list_names([f"'{phase.name}'" for phase in phases])
            joint = self._make_block(f"the phases {names}", None, self.trainer)
            return [joint if left else None for left in remaining]
        return [
            self._make_phase(phase, trainer) if left else None
            for phase, trainer, left in zip(phases, self.run.trainers, remaining, strict=True)
        ]

    def make_start(self, inputs: Any) -> Program:
        return self._make_program("the start", lambda: (self.trainer.make_init(), self.trainer.key_shapes(), inputs))

    def make_evaluation(self) -> Program:
        return self._make_program("the evaluation", self._jit_evaluation, self.state_bytes)

    def _make_phase(self, phase: Phase, trainer: Trainer) -> Block:
        # hosts would choose different pieces; steps on the host cannot be dropped, as pieces that are measured are
        single = self.trainer.trials == 1 and hosts.count_hosts() == 1 and not self.run.env.on_host
        if single and needs_pieces(self.run.algo, phase, jax.default_backend()):
            return self._make_pieces(phase, trainer)
        return self._make_block(f"phase '{phase.name}'", phase, trainer)

    def _make_block(self, what: str, phase: Phase | None, trainer: Trainer) -> Program:
        count = self.trainer.place_shapes(jax.ShapeDtypeStruct((), jnp.int32), REPLICATED)
        return self._make_program(what, lambda: (trainer.make_block(phase), self.state, count))

    def _make_program(self, what: str, make: Callable[[], tuple[Any, ...]], other_bytes: int = 0) -> Program:
        """Return a program of `make`, as in `Program`; `other_bytes` are in memory while it runs."""

        def report(executable: Any, seconds: float) -> None:
            self.needed.append(self._check_size(memory_plan.compiled_bytes(executable) + other_bytes))
            self._say_compiled(what, seconds)

        return Program(make, report)

    def _make_pieces(self, phase: Phase, trainer: Trainer) -> Pieces:
        functions = make_programs(trainer, phase)
        buffer_bytes = memory_plan.local_size(functions["begin"][2])
        stage_names = {stage.name for stage in self.run.algo.learn_stages}
        sizes: list[int] = []
        seconds_of_pieces: list[float] = []

        def make_piece(name: str) -> Program:
            def report(executable: Any, seconds: float) -> None:
                other_bytes = buffer_bytes if name in stage_names else 0
                sizes.append(self._check_size(memory_plan.compiled_bytes(executable) + other_bytes))
                seconds_of_pieces.append(seconds)
                if len(sizes) == len(functions):
                    self.needed.append(max(sizes))
                    self._say_compiled(f"phase '{phase.name}'", max(seconds_of_pieces))

            return Program(lambda: functions[name], report)

        programs = {name: make_piece(name) for name in functions}
        chunks = self.trainer.chunks()
        return Pieces(programs, self.run.algo, phase, chunks, self.trainer.layout.num_envs // chunks)

    def _check_size(self, size: int) -> int:
        run = self.run
        return memory_plan.check_fits(size, run.limit, self.state, run.config, run.algo, run.resuming)

    def _say_compiled(self, what: str, seconds: float) -> None:
        self.say(f"compiled {what} in {seconds:.1f} s; it needs {gibibytes(self.needed[-1])} per device")

    @property
    def _trial_spec(self) -> Any:
        return SPLIT if self.trainer.trials > 1 else REPLICATED

    def _jit_evaluation(self) -> tuple[Any, ...]:
        """Return the jitted evaluation, and the shapes of its arguments."""
        run = self.run
        trainer = self.trainer
        rules = run.env.env.match_rules
        # As many episodes at a time as in training or, where environments go on, as fit.
        chunk = trainer.rollout_chunk
        devices = trainer.mesh.size if trainer.trials > 1 else 1
        state_bytes = memory_plan.size((self.state.env, self.state.timestep))
        if env_bytes := state_bytes // trainer.layout.num_envs // devices:
            chunk = max(chunk, memory_plan.most_environments(run.limit, env_bytes))
        evaluator = Evaluator(
            run.eval_env,
            learned_policy(run.algo, "sample" if rules and rules.sampled else "greedy"),
            run.eval_episodes,
            run.mesh,
            chunk,
            run.algo.init_carry,
            trainer.trials,
        )
        policies = trainer.place_shapes(jax.eval_shape(trainer.policies, self.state), self._trial_spec)
        final_values = evaluator.final_values()

        def evaluate(policies: Any, key: Any, progress: Any) -> Any:
            # here, as operations outside of the program would be compiled one by one
            if trainer.trials > 1:
                held_out = jax.vmap(lambda one: hold_out(one, "selection"))(key)
                progress = jax.tree.map(lambda x: x[0], progress)
            else:
                held_out = hold_out(key, "selection")
            return final_values(policies, held_out, run.eval_env.context(progress))

        function = jax.jit(evaluate, compiler_options=compiler_options())
        return function, policies, self.trainer.key_shapes(), self.state.progress
