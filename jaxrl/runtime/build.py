"""From a configuration to a run: check it and resolve sizes.

No large array is allocated and no file is written here: that is for `Session`.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from envs_jax.base import Environment, EnvSpec, FirstStage
from envs_jax.batch import BatchedEnvironment, batched
from envs_jax.stages import on_cpu
from envs_jax.testing import ContractError, check_types
from jaxrl import algos
from jaxrl.algos.base import STANDARD, Algorithm, Custom, Phase
from jaxrl.common.errors import UsageError, usage_errors
from jaxrl.common.jax_flags import check_flags
from jaxrl.nn import precision
from jaxrl.rl.data_parallel import DataParallel, largest_divisor, logical_shards, make_mesh
from jaxrl.runtime import hosts, memory_plan
from jaxrl.runtime.config import NOT_COMPARED, Config, RunSettings, for_this_device
from jaxrl.runtime.devices import choose_devices, choose_trial_devices
from jaxrl.runtime.self_play import SelfPlay
from jaxrl.runtime.train_state import Position
from jaxrl.runtime.trainer import Trainer
from jaxrl.runtime.trials import combinations


@dataclasses.dataclass(frozen=True)
class Run:
    """A run built from its configuration."""

    config: Config  # with every automatic value written out, as in config.yaml
    env: BatchedEnvironment
    algo: Algorithm
    trainer: Trainer
    phases: tuple[Phase, ...]  # the algorithm's, after that of an easier environment if there is one
    first_trainer: Trainer | None  # of the phase in that environment
    mesh: Mesh
    limit: int  # bytes that it may use on a device
    notes: list[str]  # sentences for the user
    resuming: bool  # whether it continues a run, whose settings are fixed

    @functools.cached_property
    def eval_env(self) -> BatchedEnvironment:
        return batched(self.env.env.for_evaluation())

    @property
    def trainers(self) -> tuple[Trainer, ...]:
        """The trainer of each phase."""
        first = (self.first_trainer,) if self.first_trainer else ()
        return (*first, *(self.trainer for _ in self.algo.phases))

    @property
    def eval_iterations(self) -> int:
        """Iterations between two evaluations, 0 = never: `eval_every` counts environment steps."""
        return iterations_for(self.config.run.eval_every, self.algo)

    @property
    def eval_episodes(self) -> int:
        """Episodes of an evaluation, equal on 1, 2, 4 and 8 devices."""
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
    chosen = config.cpu_settings if on_cpu() and not resuming else {}
    config = config if resuming else for_this_device(config)
    settings = config.run
    env = batched(config.make_env())
    _check_environment(env.env)
    if env.on_host:
        settings = _settings_on_host(settings, env.spec.name)
    with usage_errors():
        layout = _layout(config, env.spec)
        warning = None
        combined = combinations(config)
        trials = settings.num_seeds * len(combined)
        if env.on_host and trials > 1:
            raise UsageError(
                f"'{env.spec.name}' runs on the host, where one run trains one policy: start a run for each seed, "
                "without num_seeds and sweep"
            )
        if trials > 1:
            devices = choose_trial_devices(settings.devices, trials)
        else:
            devices, warning = choose_devices(settings.devices, layout.num_envs, layout.shards)
            layout = dataclasses.replace(layout, devices=devices)
        mesh = make_mesh(devices)
        algo = _make_algorithm(config, env.spec, layout, custom)
        for values in filter(None, combined):  # to check them
            _make_algorithm(config, env.spec, layout, custom, values)
        free = memory_plan.free_memory(jax.local_devices()[0], devices // hosts.count_hosts())
        limit = int(settings.memory_gb * memory_plan.GIB) if settings.memory_gb else min(hosts.gather(free))
        rollout_chunk, learn_chunk, forward_chunk = memory_plan.choose_chunks(
            settings, env, algo, mesh, limit / max(trials // devices, 1), resuming
        )
        algo = algo.with_chunks(learn_chunk, forward_chunk)
        _check_phases(config.algo, algo.phases)
        num_envs = _count_envs(config, env.spec)
        if layout.num_envs < num_envs and not all(phase.restart for phase in algo.phases):
            raise UsageError(
                f"'{config.algo}' goes on with the same environments from one iteration to the next, so they cannot "
                "take turns: leave out envs_per_iteration"
            )
        total = _total_env_steps(settings, algo)
        stage = env.env.first_stage()
        phases = _add_first_stage(config.algo, algo, stage, settings.schedule_env_steps or total)
    storage_dtype = precision.rollout_dtype(settings.rollout_dtype)
    resolved = config.with_run(
        num_envs=num_envs,
        logical_shards=layout.shards,
        rollout_chunk=rollout_chunk,
        learn_chunk=learn_chunk,
        total_env_steps=total,
        total_episodes=0,
        schedule_env_steps=settings.schedule_env_steps or total,
        compute_dtype=jnp.dtype(layout.compute_dtype).name,
        rollout_dtype=storage_dtype.name,
    )
    trainer = Trainer(
        env=_with_self_play(env, algo, settings),
        algo=algo,
        layout=algo.layout,
        mesh=mesh,
        block=settings.block_iterations,
        rollout_chunk=rollout_chunk,
        storage_dtype=storage_dtype,
        total_env_steps=resolved.run.schedule_env_steps,
        turns=num_envs // layout.num_envs,
        seeds=settings.num_seeds,
        sweep={name: tuple(values[name] for values in combined) for name in combined[0]},
        vectorized=jax.default_backend() != "cpu" and not any(phase.restart for phase in algo.phases),
    )
    incomplete = _warn_of_incomplete_phases(phases, layout.num_envs, total)
    warnings = (warning, warn_of_short_episodes(algo, total), incomplete, *algo.warnings(total))
    notes = [*algo.summary(), *(f"warning: {line}" for line in warnings if line)]
    if chosen:
        notes.insert(0, f"On a CPU this preset has {', '.join(f'{name} {chosen[name]}' for name in chosen)}.")
    if trainer.turns > 1:
        notes.insert(0, f"An iteration takes {layout.num_envs:,} of the {num_envs:,} environments, in turn.")
    first_trainer = dataclasses.replace(trainer, env=batched(stage.env)) if stage else None
    return Run(resolved, env, algo, trainer, phases, first_trainer, mesh, limit, notes, resuming)


def build_algorithm(config: Config, custom: Custom = STANDARD) -> Algorithm:
    """Return the algorithm of a run on a single device, from which policies and weights come. Raises UsageError."""
    with usage_errors():
        spec = config.make_env().spec
        return _make_algorithm(config, spec, _layout(config, spec), custom)


def count_phases(config: Config, algo: Algorithm) -> int:
    """Return how many phases a run has: the algorithm's, and one before them if training begins elsewhere."""
    return len(algo.phases) + (config.make_env().first_stage() is not None)


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
        raise UsageError(f"'{env}' runs on the host, which serves only one device: use --devices 1 and one host")
    return dataclasses.replace(settings, devices=1)


def _layout(config: Config, spec: EnvSpec) -> DataParallel:
    """Return the layout on one device, without learn_chunk. Raises UsageError."""
    settings = config.run
    cls = algos.find(config.algo)
    num_envs = _count_envs_in_turn(settings, _count_envs(config, spec))
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


def _count_envs(config: Config, spec: EnvSpec) -> int:
    return config.run.num_envs or algos.find(config.algo).default_num_envs(spec, config.algo_settings)


def _count_envs_in_turn(settings: RunSettings, num_envs: int) -> int:
    """Return how many of the environments an iteration rolls out. Raises UsageError: they have no equal parts."""
    most = settings.envs_per_iteration or num_envs
    chosen = largest_divisor(num_envs, most)
    if chosen < min(num_envs, most) / 2:
        raise UsageError(
            f"{num_envs} environments have no equal parts of about {most}, envs_per_iteration, that take turns: "
            f"use --num_envs {-(-num_envs // most) * most}, or --envs_per_iteration 0"
        )
    return chosen


def _add_first_stage(name: str, algo: Algorithm, stage: FirstStage | None, total: int) -> tuple[Phase, ...]:
    """Return the phases of an algorithm, with one before them if training begins in an easier environment.

    Raises UsageError: the algorithm cannot change environments.
    """
    phases = algo.phases
    if stage is None:
        return phases
    if len(phases) > 1 or not phases[0].restart:
        raise UsageError(
            f"'{name}' goes on with the same environments from one iteration to the next, so training cannot begin "
            f"with {stage.name}: choose an algorithm that begins new episodes in each iteration, such as coma"
        )
    (phase,) = phases
    iterations = round(stage.share * total / (phase.steps * algo.layout.num_envs))
    return (dataclasses.replace(phase, name=stage.name, iterations=iterations), phase)


def _make_algorithm(
    config: Config, spec: EnvSpec, layout: DataParallel, custom: Custom, changes: Mapping[str, Any] | None = None
) -> Algorithm:
    """Return the algorithm, some of whose settings `changes` replaces. Raises ValueError: impossible settings."""
    return algos.find(config.algo)(spec, layout, custom=custom, **{**config.algo_settings, **(changes or {})})


def _with_self_play(env: BatchedEnvironment, algo: Algorithm, settings: RunSettings) -> BatchedEnvironment:
    """Return the environment, with the run's snapshots as the other team if requested. Raises UsageError."""
    if not getattr(env.env, "accepts_opponent_actions", False):
        return env
    games = algo.layout.num_envs // algo.layout.shards
    snapshots = largest_divisor(games, settings.self_play)
    if any(phase.restart for phase in algo.phases):
        raise UsageError(
            "the opponent 'self' needs an algorithm whose games continue from one iteration to the next: choose "
            "scripted players, such as --opponent 2"
        )
    if algo.recurrent:
        raise UsageError(
            "the opponent 'self' needs a policy without memory between steps: choose scripted players, such as "
            "--opponent 2"
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
    each = total // algo.layout.num_envs
    horizon = algo.spec.horizon
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
