"""From a configuration to a run: resolve sizes, compile programs, check memory.

No large array is allocated and no file is written here: that is for `Session`.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from envs_jax.base import Environment, EnvSpec
from envs_jax.batch import BatchedEnvironment, batched
from envs_jax.progress import start as start_progress
from envs_jax.testing import ContractError, check_types
from jaxrl import algos
from jaxrl.algos.base import STANDARD, Algorithm, Custom, Phase
from jaxrl.common.errors import UsageError, list_names, usage_errors
from jaxrl.common.jax_flags import check_flags
from jaxrl.nn import precision
from jaxrl.report.console import gibibytes
from jaxrl.rl.data_parallel import REPLICATED, SPLIT, DataParallel, largest_divisor, logical_shards, make_mesh
from jaxrl.runtime import hosts, memory_plan
from jaxrl.runtime.config import NOT_COMPARED, Config, RunSettings, for_this_device
from jaxrl.runtime.pieces import Pieces, make_programs, needs_pieces
from jaxrl.runtime.program import Program
from jaxrl.runtime.rollouts import Evaluator, learned_policy
from jaxrl.runtime.self_play import SelfPlay
from jaxrl.runtime.train_state import Position, TrainState
from jaxrl.runtime.trainer import Trainer
from jaxrl.runtime.trials import combinations


@dataclasses.dataclass(frozen=True)
class Run:
    """A run built from its configuration."""

    config: Config  # with every automatic value written out, as in config.yaml
    env: BatchedEnvironment
    algo: Algorithm
    trainer: Trainer
    mesh: Mesh
    limit: int  # bytes that it may use on a device
    notes: list[str]  # sentences for the user
    resuming: bool  # whether it continues a run, whose settings are fixed

    @functools.cached_property
    def eval_env(self) -> BatchedEnvironment:
        return batched(self.env.env.for_evaluation())

    @property
    def eval_iterations(self) -> int:
        """Iterations between two evaluations, 0 = never: `eval_every` counts environment steps."""
        return iterations_for(self.config.run.eval_every, self.algo)

    @property
    def eval_episodes(self) -> int:
        """Return the number of episodes of an evaluation, equal on 1, 2, 4 and 8 devices."""
        multiple = math.lcm(8, self.mesh.size)
        return -(-self.config.run.eval_episodes // multiple) * multiple


def fixed_settings(run: Run) -> dict[str, Any]:
    """Return the settings that must not change within a run, as JSON returns them."""
    fixed = {name: value for name, value in run.config.plain().items() if name not in NOT_COMPARED}
    return dict(json.loads(json.dumps(fixed)))


def iterations_for(env_steps: int, algo: Algorithm) -> int:
    """Convert environment steps to the nearest number of iterations of the phase with most steps, at least 1; 0 to 0.

    Iterations without environment steps count, too, so that phases that only learn are evaluated.
    """
    steps = max(phase.steps for phase in algo.phases) * algo.layout.num_envs
    return max(1, round(env_steps / max(steps, 1))) if env_steps else 0


def build_run(config: Config, resuming: bool = False, custom: Custom = STANDARD) -> Run:
    """Resolve sizes and choose chunks by the free memory; `compile_run` checks that the run fits. Raises UsageError."""
    check_flags("training")
    config = config if resuming else for_this_device(config)
    settings, env = config.run, batched(config.make_env())
    _check_environment(env.env)
    if env.on_host:
        settings = _settings_on_host(settings, env.spec.name)
    with usage_errors():
        layout, warning = _layout(config, env.spec), None
        combined = combinations(config)
        for values in combined:  # to check them
            _make_algorithm(config, env.spec, layout, custom, values)
        trials = settings.num_seeds * len(combined)
        if env.on_host and trials > 1:
            raise UsageError(
                f"'{env.spec.name}' runs on the host, which steps the environments of one policy: start a run for each "
                "seed, without num_seeds and sweep"
            )
        if trials > 1:
            devices = _choose_trial_devices(settings, trials)
        else:
            devices, warning = choose_devices(settings.devices, layout.num_envs, layout.shards)
            layout = dataclasses.replace(layout, devices=devices)
        free = memory_plan.free_memory(jax.local_devices()[0], devices // hosts.count_hosts())
        limit = int(settings.memory_gb * memory_plan.GIB) if settings.memory_gb else min(hosts.gather(free))
        algo = _make_algorithm(config, env.spec, layout, custom)
        rollout_chunk, learn_chunk = memory_plan.choose_chunks(
            settings, env, algo, limit / max(trials // devices, 1), resuming
        )
        algo = _make_algorithm(config, env.spec, dataclasses.replace(layout, learn_chunk=learn_chunk), custom)
        _check_phases(config.algo, algo.phases)
        total = _total_env_steps(settings, algo)
    storage_dtype = precision.rollout_dtype(settings.rollout_dtype)
    resolved = config.with_run(
        num_envs=layout.num_envs,
        logical_shards=layout.shards,
        rollout_chunk=rollout_chunk,
        learn_chunk=learn_chunk,
        total_env_steps=total,
        total_episodes=0,
        schedule_env_steps=settings.schedule_env_steps or total,
        compute_dtype=jnp.dtype(layout.compute_dtype).name,
        rollout_dtype=storage_dtype.name,
    )
    mesh = make_mesh(devices)
    trainer = Trainer(
        env=_with_self_play(env, algo, settings),
        algo=algo,
        layout=algo.layout,
        mesh=mesh,
        block=settings.block_iterations,
        rollout_chunk=rollout_chunk,
        storage_dtype=storage_dtype,
        total_env_steps=resolved.run.schedule_env_steps,
        seeds=settings.num_seeds,
        sweep={name: tuple(values[name] for values in combined) for name in combined[0]},
        vectorized=jax.default_backend() != "cpu" and not any(phase.restart for phase in algo.phases),
    )
    incomplete = _warn_of_incomplete_phases(algo.phases, layout.num_envs, total)
    warnings = (warning, warn_of_short_episodes(algo, total), incomplete, *algo.warnings(total))
    notes = [*algo.summary(), *(f"warning: {line}" for line in warnings if line)]
    return Run(resolved, env, algo, trainer, mesh, limit, notes, resuming)


def build_algorithm(config: Config, custom: Custom = STANDARD) -> Algorithm:
    """Return the algorithm of a run on a single device, from which policies and weights come. Raises UsageError."""
    with usage_errors():
        spec = config.make_env().spec
        return _make_algorithm(config, spec, _layout(config, spec), custom)


def _check_environment(env: Environment) -> None:
    """Raise UsageError with the sentence of `check_env` if a user's environment breaks the contract of types.

    The package's own environments are checked by its tests.
    """
    if type(env).__module__.partition(".")[0] == "envs_jax":
        return
    try:
        check_types(env)
    except ContractError as error:
        raise UsageError(str(error)) from None


def _settings_on_host(settings: RunSettings, env: str) -> RunSettings:
    """Return the settings with one device, to which the host gives its steps. Raises UsageError: more are requested."""
    if settings.devices > 1 or hosts.count_hosts() > 1:
        raise UsageError(
            f"'{env}' runs on the host, which steps the environments of one device: use --devices 1, and one host"
        )
    return dataclasses.replace(settings, devices=1)


def _choose_trial_devices(settings: RunSettings, trials: int) -> int:
    if hosts.count_hosts() > 1:
        raise UsageError("num_seeds and sweep need a single host: start one run for each host, each with its own seeds")
    return largest_divisor(trials, _count_local_devices(settings.devices))


def _count_local_devices(requested: int) -> int:
    """Return the number of devices of a host to use, all if 0 are requested. Raises UsageError: there are fewer."""
    present = jax.local_device_count()
    if requested > present:
        raise UsageError(f"--devices {requested}, but there are only {present}: choose {present} or fewer")
    return requested or present


def _layout(config: Config, spec: EnvSpec) -> DataParallel:
    """Return the layout on one device, without learn_chunk. Raises UsageError."""
    settings, cls = config.run, algos.find(config.algo)
    num_envs = settings.num_envs or cls.default_num_envs(spec, config.algo_settings)
    batch = cls.batch(spec, config.algo_settings, num_envs)
    shards = settings.logical_shards or logical_shards(num_envs, batch)
    fitting = largest_divisor(math.gcd(num_envs, batch, 8), shards)
    if num_envs % shards:
        raise UsageError(
            f"num_envs {num_envs} is not divisible by logical_shards {shards}: use {-(-num_envs // shards) * shards}, "
            f"or --logical_shards {fitting}"
        )
    if batch % shards:
        raise UsageError(
            f"logical_shards {shards} does not divide {batch}, the number of samples that '{config.algo}' with these "
            f"settings draws at once: use --logical_shards {fitting}"
        )
    dtype = precision.compute_dtype(settings.compute_dtype, jax.default_backend())
    return DataParallel(num_envs, shards, compute_dtype=dtype)


def _make_algorithm(
    config: Config, spec: EnvSpec, layout: DataParallel, custom: Custom, changes: Mapping[str, Any] | None = None
) -> Algorithm:
    """Return the algorithm, some of whose settings `changes` replaces. Raises ValueError: impossible settings."""
    return algos.find(config.algo)(spec, layout, custom=custom, **{**config.algo_settings, **(changes or {})})


def choose_devices(requested: int, num_envs: int, shards: int) -> tuple[int, str | None]:
    """Return the number of devices to use, equal on every host, and a warning if some are left out.

    `requested` is the number of devices on every host, 0 for all; `num_envs` and `shards` are of the whole run.

    Raises UsageError: more requested than there are, or a requested number that cannot share the batch.
    """
    local, host_count = _count_local_devices(requested), jax.process_count()
    used = max((d for d in range(1, local + 1) if shards % (d * host_count) == 0), default=0)
    if used == local:
        return used * host_count, None
    fitting = -(-num_envs // 8) * 8
    remedy = "a minibatch that 8 divides and no --logical_shards" if fitting == num_envs else f"--num_envs {fitting}"
    devices = f"{local} devices" if host_count == 1 else f"{host_count} hosts of {local} devices"
    cut = f"{num_envs} environments are cut into {shards} logical shards, which {devices} cannot share evenly"
    if not used:
        others = f", or {remedy} with 2, 4 or 8 hosts" if shards < 8 else ""
        raise UsageError(f"{cut}: start {_power_of_two(min(host_count, shards))} of them{others}")
    if requested:
        raise UsageError(f"{cut}: use --devices {used}, or {remedy} with 1, 2, 4 or 8 devices")
    better = _power_of_two(min(local, 8 // host_count))
    advice = f"; {remedy} would let {better} be used" if better > used else ""
    on_each = " on each" if host_count > 1 else ""
    return used * host_count, f"{cut}: only {used} of them are used{on_each}{advice}"


def _power_of_two(limit: int) -> int:
    """Return the largest power of two that is at most `limit`."""
    return 1 << (limit.bit_length() - 1)


def _with_self_play(env: BatchedEnvironment, algo: Algorithm, settings: RunSettings) -> BatchedEnvironment:
    """Return the environment, with the run's snapshots as the other team if requested. Raises UsageError."""
    if not getattr(env.env, "accepts_opponent_actions", False):
        return env
    games = algo.layout.num_envs // algo.layout.shards
    snapshots = largest_divisor(games, settings.self_play)
    if any(phase.restart for phase in algo.phases):
        raise UsageError(
            "the opponent 'self' needs an algorithm whose environments go on from iteration to iteration: choose "
            "scripted players, such as --opponent 2"
        )
    if algo.recurrent:
        raise UsageError(
            "the opponent 'self' needs a policy without a carry: choose scripted ones, such as --opponent 2"
        )
    return SelfPlay(env.env, env, algo, games // snapshots, snapshots, iterations_for(settings.self_play_every, algo))


def _check_phases(name: str, phases: tuple[Phase, ...]) -> None:
    if not any(phase.steps or phase.updates for phase in phases):
        raise UsageError(f"algorithm '{name}' has no phase that steps the environment or learns: give one `steps`")
    for phase in phases:
        if not phase.steps and phase.iterations is None:
            raise UsageError(f"phase '{phase.name}' of algorithm '{name}' would never end: give it `iterations`")


def _total_env_steps(settings: RunSettings, algo: Algorithm) -> int:
    """Return the total of the run, or the sum of all phases if all are finite and the user gives no total."""
    spec = algo.spec
    if settings.total_env_steps and settings.total_episodes:
        raise UsageError("total_env_steps and total_episodes both limit the run: give one of them")
    if settings.total_episodes:
        restarted = all(phase.restart or not phase.steps for phase in algo.phases)
        steps = settings.total_episodes * (spec.horizon + (not restarted))  # else each reset is a step, too
        if not (spec.fixed_horizon or spec.full_length):
            raise UsageError(
                f"episodes of '{spec.name}' differ in length: use --total_env_steps, at most {steps:,} for "
                f"{settings.total_episodes:,} episodes"
            )
        return steps
    if not settings.total_env_steps:
        lengths = [phase.steps * (phase.iterations or 0) for phase in algo.phases if phase.steps]
        if all(lengths):
            return sum(lengths) * algo.layout.num_envs
        raise UsageError("say how long to train: --total_env_steps N or --total_episodes N")
    return settings.total_env_steps


def warn_of_short_episodes(algo: Algorithm, total: int) -> str | None:
    """Return a warning if no environment can finish an episode, so that the end of episodes is never trained on."""
    each, horizon = total // algo.layout.num_envs, algo.spec.horizon
    if each >= horizon or any(phase.restart for phase in algo.phases):
        return None
    ratio = ", and --env_steps_per_update as many times," if hasattr(algo, "env_steps_per_update") else ""
    return (
        f"{total:,} environment steps are {each:,} of each of {algo.layout.num_envs:,} environments, less than an "
        f"episode of {horizon:,}: raise --total_env_steps{ratio} or lower --num_envs"
    )


def _warn_of_incomplete_phases(phases: tuple[Phase, ...], num_envs: int, total: int) -> str | None:
    """Return a warning if the total of environment steps ends before all phases are complete."""
    possible = Position().remaining(phases, num_envs, total)
    requested = [1 if phase.iterations is None else phase.iterations for phase in phases]
    cut = [phase.name for phase, count, limit in zip(phases, requested, possible, strict=True) if limit < count]
    if not cut:
        return None
    needed = f"{sum(count * phase.steps * num_envs for phase, count in zip(phases, requested, strict=True)):,}"
    if any(phase.iterations is None for phase in phases):
        needed += " or more"
    return (
        f"{total:,} environment steps are too few for the phase '{cut[0]}': raise --total_env_steps "
        f"(all phases take {needed}), or shorten phases"
    )


@dataclasses.dataclass(frozen=True)
class CompiledRun:
    """The functions of a run, each compiled when it is called first, if not before."""

    start: Program | None  # (key, inputs) -> TrainState, for a new run
    # (state, iterations) -> (state, metrics), or `Pieces` where an iteration takes long, one per phase; None for a
    # phase that is already complete
    blocks: list[Program | Pieces | None]
    evaluate: Program | None  # (policy, key, context) -> metrics, None if no evaluation will come; see `Evaluator`
    needed: list[int]  # peak bytes of each compiled function on a device while a checkpoint is written

    def compile(self, *programs: Program | Pieces | None, at_once: bool = True) -> None:
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

    On a CPU only the start and the phases up to the first that learns are compiled here, in parallel, and the others
    when they are needed. GPUs can run out of memory, and hosts must compile in the same order: in both cases all
    programs are compiled here.

    Args:
        run, inputs: the run, and what `Algorithm.init` takes.
        say: receives a sentence with seconds and bytes for each program.
        position, evaluated: where the run continues (None for a new one), and the iteration of its last evaluation.

    Raises UsageError: algorithm and environment do not go together; TooLargeError: the run does not fit.
    """
    trainer, settings, algo = run.trainer, run.config.run, run.algo
    with usage_errors(traced=True):
        shapes = trainer.shapes()
    state_bytes = memory_plan.local_size(shapes)
    needed: list[int] = []

    def check_size(size: int) -> int:
        return memory_plan.check_fits(size, run.limit, shapes, run.config, algo, run.resuming)

    def make_program(what: str, make: Callable[[], tuple[Any, ...]], other_bytes: int = 0) -> Program:
        def report(executable: Any, seconds: float) -> None:
            needed.append(check_size(memory_plan.compiled_bytes(executable) + other_bytes))
            say(f"compiled {what} in {seconds:.1f} s; it needs {gibibytes(needed[-1])} per device")

        return Program(make, report)

    def make_block(phase: Phase) -> Program | Pieces:
        # hosts would choose different pieces; steps on the host cannot be dropped, as pieces that are measured are
        single = trainer.trials == 1 and hosts.count_hosts() == 1 and not run.env.on_host
        if single and needs_pieces(algo, phase, jax.default_backend()):
            return make_pieces(phase)
        return make_program(f"phase '{phase.name}'", lambda: (trainer.make_block(phase), shapes, count))

    def make_pieces(phase: Phase) -> Pieces:
        functions, longest, sizes = make_programs(trainer, phase), [0.0], [0]
        buffer_bytes = memory_plan.local_size(functions["begin"][2])
        stage_names = {stage.name for stage in algo.learn_stages}

        def make_piece(name: str) -> Program:
            def report(executable: Any, seconds: float) -> None:
                other_bytes = buffer_bytes if name in stage_names else 0
                sizes.append(check_size(memory_plan.compiled_bytes(executable) + other_bytes))
                longest.append(seconds)
                if name == "end":  # the last one
                    needed.append(max(sizes))
                    peak = gibibytes(needed[-1])
                    say(f"compiled phase '{phase.name}' in {max(longest):.1f} s; it needs {peak} per device")

            return Program(lambda: functions[name], report)

        envs = trainer.layout.num_envs // trainer.chunks()
        return Pieces({name: make_piece(name) for name in functions}, algo, phase, trainer.chunks(), envs)

    check_size(state_bytes)
    count = trainer.place_shapes(jax.ShapeDtypeStruct((), jnp.int32), REPLICATED)
    current = position or Position()
    remaining = current.remaining(algo.phases, trainer.layout.num_envs, settings.total_env_steps)
    keys = trainer.place_shapes(jax.eval_shape(lambda: trainer.keys(0)), SPLIT if trainer.trials > 1 else REPLICATED)
    if algo.learns_in_parts and len(algo.phases) > 1 and jax.default_backend() == "cpu":
        # as fast as a program for each phase, and compiled once; not tried on GPUs
        names = list_names([f"'{phase.name}'" for phase in algo.phases])
        joint = make_program(f"the phases {names}", lambda: (trainer.make_block(None), shapes, count))
        blocks: list[Program | Pieces | None] = [joint if left else None for left in remaining]
    else:
        blocks = [make_block(phase) if left else None for phase, left in zip(algo.phases, remaining, strict=True)]
    evaluate = start = None
    if settings.eval_every and (any(remaining) or evaluated != current.iterations):
        evaluate = make_program("the evaluation", lambda: _make_evaluation(run, shapes, keys), state_bytes)
    if position is None:
        start = make_program("the start", lambda: (trainer.make_init(), keys, inputs))
    compiled = CompiledRun(start, blocks, evaluate, needed)
    if jax.default_backend() != "cpu" or hosts.count_hosts() > 1:
        compiled.compile(at_once=False)
    else:
        first = next((k for k, phase in enumerate(algo.phases) if phase.updates and blocks[k]), len(blocks))
        compiled.compile(start, *blocks[: first + 1])
    return compiled


def _make_evaluation(run: Run, shapes: TrainState, keys: Any) -> tuple[Any, ...]:
    """Return the jitted evaluation of a run, and the shapes of its arguments."""
    trainer, rules = run.trainer, run.env.env.match_rules
    # As many episodes at a time as in training or, where environments go on, as fit.
    chunk, devices = trainer.rollout_chunk, trainer.mesh.size if trainer.trials > 1 else 1
    if env_bytes := memory_plan.size((shapes.env, shapes.timestep)) // trainer.layout.num_envs // devices:
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
    policies = jax.eval_shape(trainer.policies, shapes)
    policies = trainer.place_shapes(policies, SPLIT if trainer.trials > 1 else REPLICATED)
    context = jax.eval_shape(run.eval_env.context, jax.eval_shape(start_progress))
    return evaluator.jit_final_values(), policies, keys, trainer.place_shapes(context, REPLICATED)
