"""The training loop on the devices: iterations of (roll out T steps, learn), a block of them in one compiled call.

An iteration is `rollout`, `Algorithm.learn` and `end`. A block repeats it in one program, `make_train_fn` runs one
block for each phase, and several trials run a block each. `pieces` calls `rollout`, `begin`, `step` (many times) and
`end` one by one from the host; `begin` and `step` are what `learn` consists of. Nothing here depends on the algorithm
or environment, nor touches files. Everything runs inside a `shard_map` over the mesh: each device steps its own
environments, and the algorithm calls the collectives of `DataParallel`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from envs_jax.base import Array
from envs_jax.batch import BatchedEnvironment, finished_episodes, start_statistics, update_statistics
from envs_jax.progress import Progress, add, start, total
from jaxrl.algos.base import Algorithm, AlgoState, Learning, Phase, Trajectory
from jaxrl.common.types import Key, PolicyParams
from jaxrl.nn import precision
from jaxrl.rl.data_parallel import (
    AXIS,
    REPLICATED,
    SPLIT,
    DataParallel,
    compiler_options,
    jit_inline,
    map_chunks,
    on_mesh,
    prepare_chunks,
    shardings,
)
from jaxrl.runtime.algorithm_checks import check_action, check_learned, check_results
from jaxrl.runtime.not_finite import count_faults, find_first, split_faults
from jaxrl.runtime.self_play import SelfPlay
from jaxrl.runtime.train_state import BlockMetrics, TrainState


def make_env_key(key: Key, index: Array) -> Key:
    """Return the root key of environment `index` in a run."""
    return jax.random.fold_in(jax.random.fold_in(key, 0), index)


def make_env_keys(key: Key, indices: Array) -> Key:
    """Return the root keys key[B] of the environments, or held-out episodes, `indices` [B]."""
    return jax.vmap(make_env_key, in_axes=(None, 0))(key, indices)


class Collected(NamedTuple):
    """The results of a rollout on this device; empty where a phase takes no steps."""

    trajectory: Any = None  # Trajectory [T, B, ...]
    last_timestep: Any = None  # TimeStep [B, ...] after it
    # (carry, BatchState, TimeStep, EpisodeStatistics) with which the next rollout goes on, () where phases restart
    env_carry: Any = ()
    episode_sums: Any = ()  # {name: float32[chunks]} of ended episodes and of `count_faults`


Metrics = dict[str, Array]


_ENV_AXES = Collected(1, 0, 0, 0)  # the axis of environments in each part of `Collected`


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Makes the initial state and the compiled blocks of a run.

    A trial is one combination with one seed. With several trials the first axis of every leaf of the state is the
    trial, and the devices share it; `layout` then describes one trial on one device.
    """

    env: BatchedEnvironment
    algo: Algorithm
    layout: DataParallel  # how the batch lies on the devices
    mesh: Mesh
    block: int  # K, maximum iterations of one compiled call
    rollout_chunk: int  # environments rolled out at a time on a device, in phases that restart them; 0 = all
    storage_dtype: Any  # dtype of stored observations that lie in [0, 1]
    total_env_steps: int  # denominator of `Progress.fraction`; schedules do not change when a run is extended
    turns: int = 1  # iterations until each environment has had its turn, in phases that restart them
    seeds: int = 1  # the run's seed and the next ones, trained in one program
    # {setting of the algorithm: its values, one for each combination}; each is trained with all seeds
    sweep: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    # whether a device trains its trials at once. Otherwise they run one after another within a block, which is faster
    # on CPUs, where batched matrix products are slow, and for whole episodes of convolutions, one trial of which fills
    # a GPU.
    vectorized: bool = True

    @property
    def trials(self) -> int:
        return self.seeds * len(next(iter(self.sweep.values()), [0]))

    @property
    def keeps_envs(self) -> bool:
        """Whether any environment state is kept between iterations."""
        return any(phase.steps and not phase.restart for phase in self.algo.phases)

    def specs(self) -> TrainState:
        """Return the PartitionSpecs of the state, a prefix tree."""
        if self.trials > 1:
            return TrainState(*[SPLIT] * len(dataclasses.fields(TrainState)))
        split: Any = SPLIT if self.keeps_envs else ()
        specs = TrainState(*[REPLICATED] * len(dataclasses.fields(TrainState)))
        algo = AlgoState(replicated=REPLICATED, sharded=SPLIT)
        return dataclasses.replace(specs, algo=algo, carry=split, env=split, timestep=split, statistics=split)

    def keys(self, seed: int) -> Key:
        """Return the run's key[], or key[trials]: for each combination, the keys of this seed and the next ones."""
        if self.trials == 1:
            return jax.random.key(seed)
        seeds = np.arange(seed, seed + self.seeds, dtype=np.uint32)
        return jax.vmap(jax.random.key)(np.tile(seeds, self.trials // self.seeds))

    # The initial state

    def init(self, key: Key, inputs: Any = None) -> TrainState:
        """Return a fresh state on the mesh for key[], or key[trials]; `inputs` as in `Algorithm.init`."""
        return self.make_init()(key, inputs)

    def make_init(self) -> Callable[..., Any]:
        """Jit (key, inputs) -> state."""
        return jax.jit(self._init_on_mesh, compiler_options=compiler_options(once=True))

    def shapes(self, inputs: Any = None) -> TrainState:
        """Return ShapeDtypeStructs of the state with their shardings; allocates nothing."""
        shapes: TrainState = self.place_shapes(
            jax.eval_shape(self._init_on_mesh, self.key_shapes(), inputs), self.specs()
        )
        return shapes

    def key_shapes(self) -> Any:
        """Return the shapes of `self.keys`, placed as `make_init` takes them: its trace then serves `shapes`, too."""
        spec = SPLIT if self.trials > 1 else REPLICATED
        return self.place_shapes(self.keys(0), spec)

    def place_shapes(self, shapes: Any, specs: Any) -> Any:
        """Return ShapeDtypeStructs with the shardings of a prefix tree of PartitionSpecs."""

        def place(sharding: Any, tree: Any) -> Any:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

        return jax.tree.map(place, shardings(self.mesh, specs), shapes)

    @functools.cached_property
    def _init_on_mesh(self) -> Callable[..., Any]:
        """(key, inputs) -> TrainState on the mesh, traced once for each structure of inputs."""
        if self.trials == 1:
            return jit_inline(on_mesh(self._init, self.mesh, (REPLICATED, REPLICATED), self.specs()))

        def init_trials(keys: Key, inputs: Any) -> TrainState:
            indices = jax.lax.axis_index(AXIS) * len(keys) + jnp.arange(len(keys), dtype=jnp.int32)
            values = {name: jnp.repeat(jnp.float32(swept), self.seeds) for name, swept in self.sweep.items()}
            settings = {name: value[indices] for name, value in values.items()}
            return jax.vmap(self._init, in_axes=(0, None, 0))(keys, inputs, settings)

        return jit_inline(on_mesh(init_trials, self.mesh, (SPLIT, REPLICATED), self.specs()))

    def _init(self, key: Key, inputs: Any, settings: Any = None) -> TrainState:
        key_algo, key_run = jax.random.split(key)
        settings = settings or {}
        progress = start(max(self.total_env_steps, 1))
        algo = self.algo.with_sweep_values(settings).init(key_algo, inputs)
        if not isinstance(algo, AlgoState):
            raise ValueError(f"init must return an AlgoState(replicated, sharded), not {type(algo).__name__}")
        env_carry: Any = ((), (), (), ())
        policy = self.algo.policy(algo)
        pool = self.env.init_pool(policy) if isinstance(self.env, SelfPlay) else ()
        if self.keeps_envs:
            indices = self.layout.env_indices()
            env, timestep = self.env.reset(make_env_keys(key_run, indices), self._context(progress, pool))
            env_carry = self.algo.init_carry(policy, timestep, indices), env, timestep, start_statistics(timestep)
        carry, env, timestep, statistics = env_carry
        counters = jnp.int32(0), jnp.uint32(0), jnp.uint32(0)
        return TrainState(algo, carry, env, timestep, statistics, key_run, pool, progress, *counters, settings)

    def _context(self, progress: Progress, pool: Any) -> Any:
        return self.env.context(progress, pool) if isinstance(self.env, SelfPlay) else self.env.context(progress)

    # One iteration

    def policies(self, state: TrainState) -> PolicyParams:
        """Return the policy's parameters, of all trials if there are several."""
        return (jax.vmap(self.algo.policy) if self.trials > 1 else self.algo.policy)(state.algo)

    def iterate(self, state: TrainState, phase: Phase | None) -> tuple[TrainState, Metrics, Metrics]:
        """Run one iteration of a phase, with the settings of the state.

        Without `phase` it is the one of the state, see `Algorithm.one_program`.

        Returns:
            the state, the metrics of learning, and sums over the episodes and faults of the iteration.
        """
        trial = dataclasses.replace(self, algo=self.algo.with_sweep_values(state.settings))
        if phase is None:
            return trial._iterate_any_phase(state)
        key_act, key_learn = trial.split_key(state)
        collected = trial.rollout(state, phase, key_act)
        learned = trial._learn(state, phase, collected, key_learn)
        return trial.end(state, phase.steps, phase.updates, collected, learned)

    def _iterate_any_phase(self, state: TrainState) -> tuple[TrainState, Metrics, Metrics]:
        """Run an iteration that steps, learns, or both, as the phase of the state does.

        It consists of an iteration that only steps and one that only learns; metrics of what is left out are 0.
        """
        phases = self.algo.phases
        steps = jnp.asarray([phase.steps for phase in phases], jnp.int32)[state.phase]
        updates = jnp.asarray([phase.updates for phase in phases], jnp.int32)[state.phase]
        only_steps = dataclasses.replace(phases[-1], updates=0)
        only_updates = dataclasses.replace(phases[-1], steps=0)
        key_act, key_learn = self.split_key(state)

        def play(algo: AlgoState, env_carry: Any) -> Any:
            before = _with_env_carry(dataclasses.replace(state, algo=algo), env_carry)
            collected = self.rollout(before, only_steps, key_act)
            algo, _ = self._learn(before, only_steps, collected, key_learn)
            return algo, collected.env_carry, collected.episode_sums

        def learn(algo: AlgoState) -> Any:
            env_steps = add(state.progress.env_steps, steps * self.layout.num_envs)
            progress = dataclasses.replace(state.progress, env_steps=env_steps)
            before = dataclasses.replace(state, algo=algo, progress=progress)
            return self._learn(before, only_updates, Collected(), key_learn)

        env_carry = state.carry, state.env, state.timestep, state.statistics
        algo, env_carry, episode_sums = _call_if(steps > 0, play, state.algo, env_carry)
        learned = _call_if(updates > 0, learn, algo)
        collected = Collected(env_carry=env_carry, episode_sums=episode_sums)
        return self.end(state, steps, updates, collected, learned)

    def split_key(self, state: TrainState) -> Key:
        """Return the keys of acting and of learning in this iteration, key[2]."""
        return jax.random.split(jax.random.fold_in(jax.random.fold_in(state.key, 1), state.iterations))

    def rollout(self, state: TrainState, phase: Phase, key: Key) -> Collected:
        """Roll out this device's environments for an iteration, chunk by chunk."""
        return map_chunks(*self._chunks_to_roll_out(state, phase, key)) if phase.steps else Collected()

    def prepare_rollout(
        self, state: TrainState, phase: Phase, key: Key
    ) -> tuple[Callable[[], Any], Callable[[Array, Any], Any]]:
        """Return () -> empty buffers of what `rollout` returns, and (index of a chunk, buffers) -> buffers."""
        return prepare_chunks(*self._chunks_to_roll_out(state, phase, key))

    def _chunks_to_roll_out(self, state: TrainState, phase: Phase, key: Key) -> tuple[Any, ...]:
        """Return the arguments with which `map_chunks` computes `rollout`."""
        spec = self.env.spec
        policy = self.algo.policy(state.algo)
        context = self._context(state.progress, state.pool)
        whole_episodes = phase.restart and spec.fixed_horizon and phase.steps <= spec.horizon
        begin_envs = self.env.begin_episodes if whole_episodes else self.env.reset
        step_envs: Callable[..., Any] = self.env.step_episodes if whole_episodes else self.env.step
        lead_steps = self.env.lead_steps if whole_episodes else 0

        def collect_chunk(batch: Any) -> Collected:
            indices, *loop = batch
            if phase.restart:
                turn = (state.iterations % self.turns).astype(jnp.int32)
                env_keys = make_env_keys(state.key, indices + turn * self.layout.num_envs)
                env, timestep = begin_envs(env_keys, context, state.iterations)
                loop = [self.algo.init_carry(policy, timestep, indices), env, timestep, start_statistics(timestep)]

            def take_step(loop: Any, t: Array) -> tuple[Any, tuple[Trajectory, Any]]:
                carry, env, timestep, statistics = loop
                keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(key, t), indices)
                results = self.algo.act(policy, carry, timestep, keys, state.progress, "explore")
                action, carry, extras = check_results("act", results, ("action", "carry", "extras"))
                check_action(spec, action, len(indices))
                row = Trajectory(precision.store(spec, timestep, self.storage_dtype), action, extras)
                env, timestep = step_envs(env, timestep, action, context)
                statistics = update_statistics(spec, statistics, timestep)
                # one array of sums: XLA would compile a few kernels for each of them
                sums = ravel_pytree(finished_episodes(statistics, timestep))[0]
                return (carry, env, timestep, statistics), (row, sums)

            steps = jnp.arange(-lead_steps, phase.steps, dtype=jnp.int32).astype(jnp.uint32)
            env_carry, (trajectory, sums) = jax.lax.scan(take_step, tuple(loop), steps)
            if lead_steps:
                trajectory = jax.tree.map(lambda x: x[lead_steps:], trajectory)
            if self.algo.stores_carry:
                trajectory = dataclasses.replace(trajectory, carry=jax.tree.map(lambda x: x[None], loop[0]))
            *_, last_timestep, last_statistics = env_carry
            _, unpack = ravel_pytree(finished_episodes(last_statistics, last_timestep))
            episode_sums = jax.tree.map(lambda x: x[None], unpack(sums.sum(0)))
            episode_sums |= {name: count[None] for name, count in count_faults(trajectory, last_timestep).items()}
            return Collected(trajectory, last_timestep, () if phase.restart else env_carry, episode_sums)

        env_carry = ((), (), (), ()) if phase.restart else (state.carry, state.env, state.timestep, state.statistics)
        return collect_chunk, (self.layout.env_indices(), *env_carry), self.chunks(), _ENV_AXES

    def chunks(self) -> int:
        envs = self.layout.local_envs
        return envs // self.rollout_chunk if 0 < self.rollout_chunk < envs else 1

    def _learn(self, state: TrainState, phase: Phase, collected: Collected, key: Key) -> tuple[AlgoState, Metrics]:
        """Return what `Algorithm.learn` returns for a rollout, checked."""
        trajectory, last_timestep, *_ = collected
        results = self.algo.learn(state.algo, trajectory, last_timestep, key, state.progress, phase)
        learned: tuple[AlgoState, Metrics] = check_results("learn", results, ("state", "metrics"))
        return learned

    def begin(self, state: TrainState, collected: Collected, key: Key) -> Learning:
        """Return what the steps of learning work on. For `pieces`."""
        return self.algo.begin_learning(state.algo, collected.trajectory, collected.last_timestep, key, state.progress)

    def step(
        self, state: TrainState, learning: Learning, stage: str, epoch: Array, start: Array, stop: Array
    ) -> Learning:
        """Take the steps `start` to `stop` - 1 of a stage. For `pieces`."""
        return self.algo.run_steps(learning, stage, epoch, start, stop, state.progress)

    def end(
        self,
        state: TrainState,
        steps: Array | int,
        updates: Array | int,
        collected: Collected,
        learned: tuple[AlgoState, Metrics],
    ) -> tuple[TrainState, Metrics, Metrics]:
        """Advance the counters; return as `iterate`.

        Args:
            state: before the iteration.
            steps, updates: of the iteration.
            collected: the results of `rollout`.
            learned: as `Algorithm.learn` returns it.
        """
        algo, learning = learned
        check_learned(state.algo, algo, learning)
        progress = state.progress
        state = _with_env_carry(state, collected.env_carry)
        episodes = self.layout.sum(collected.episode_sums) if collected.episode_sums else {}
        if not isinstance(updates, int) or updates:  # in a program for all phases the session drops them
            learning = learning | self.algo.schedules(progress)
        env_steps = add(progress.env_steps, steps * self.layout.num_envs)
        episode_count = episodes["episodes"].astype(jnp.uint32) if episodes else jnp.uint32(0)
        progress = Progress(
            env_steps=env_steps,
            vector_steps=add(progress.vector_steps, steps),
            updates=add(progress.updates, updates),
            learn_calls=add(progress.learn_calls, 1),
            episodes=add(progress.episodes, episode_count),
            fraction=jnp.minimum(total(env_steps) / jnp.float32(max(self.total_env_steps, 1)), 1.0),
            total_env_steps=jnp.float32(max(self.total_env_steps, 1)),
        )
        pool = state.pool
        if isinstance(self.env, SelfPlay):
            pool = self.env.update_pool(pool, self.algo.policy(algo), progress)
        state = dataclasses.replace(
            state,
            algo=algo,
            pool=pool,
            progress=progress,
            iteration=state.iteration + jnp.uint32(1),
            iterations=state.iterations + jnp.uint32(1),
        )
        return state, learning, episodes

    # A block

    def make_block(self, phase: Phase | None) -> Callable[..., Any]:
        """Jit (state, iterations int32[]) -> (state, metrics) of a phase; the state is donated.

        Without `phase` it is the one of the state; see `Algorithm.one_program`.
        """
        metrics: Any = REPLICATED
        if self.trials > 1:
            by_trial: Any = PartitionSpec(None, AXIS)
            split: Any = SPLIT
            metrics = BlockMetrics(by_trial, by_trial, not_finite=split, iterations=split, faults=by_trial)
        run_block = functools.partial(self._run_block, phase=phase)
        function = on_mesh(run_block, self.mesh, (self.specs(), REPLICATED), (self.specs(), metrics))
        return jax.jit(function, donate_argnums=0, compiler_options=compiler_options())

    def _run_block(self, state: TrainState, iterations: Array, phase: Phase | None) -> tuple[TrainState, BlockMetrics]:
        """Run up to K iterations of each of this device's trials."""
        if self.trials == 1:
            return self._repeat(state, iterations, phase, self.block, stops=True)
        single = dataclasses.replace(self, seeds=1, sweep={})
        run_trial = functools.partial(
            single._repeat, iterations=iterations, phase=phase, max_iterations=self.block, stops=False
        )
        state, metrics = (_run_at_once if self.vectorized else _run_in_turn)(run_trial, state)
        rows = metrics.learning, metrics.episodes, metrics.faults
        learning, episodes, faults = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), rows)
        return state, dataclasses.replace(metrics, learning=learning, episodes=episodes, faults=faults)

    def _repeat(
        self, state: TrainState, iterations: Array, phase: Phase | None, max_iterations: int, stops: bool
    ) -> tuple[TrainState, BlockMetrics]:
        """Run so many iterations of one trial; metrics have a row for each of `max_iterations`.

        A single run `stops` after the first one whose `learn` reports a value that is not finite; everything else that
        must stay finite is checked once, after the last iteration. Trials go on, and are checked after each iteration,
        so that it depends on nothing else where one fails.
        """
        iterate = jit_inline(functools.partial(self.iterate, phase=phase))
        _, *shapes = jax.eval_shape(iterate, state)
        empty, unpack = ravel_pytree(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tuple(shapes)))

        def pack(metrics: Any) -> Array:
            return ravel_pytree(jax.tree.map(lambda x: x.astype(jnp.float32), metrics))[0]

        def run(loop: Any) -> Any:
            state, rows, index, good, first = loop  # iterations so far, those before the first bad one, its tensor
            state, *metrics = iterate(state)
            # one write and one check, not one for each metric
            row, learning = jax.lax.optimization_barrier((pack(tuple(metrics)), pack(metrics[0])))
            if stops:
                is_good = jnp.all(jnp.isfinite(learning))
            else:
                first = jnp.where(first < 0, self.find_not_finite(state.algo, unpack(row)[0]), first)
                is_good = first < 0
            return state, rows.at[index].set(row), index + 1, good + is_good.astype(jnp.int32), first

        def goes_on(loop: Any) -> Array:
            return (loop[2] < iterations) & (loop[2] == loop[3]) if stops else loop[2] < iterations

        rows = jnp.zeros((max_iterations, *empty.shape), empty.dtype)
        start = state, rows, jnp.int32(0), jnp.int32(0), jnp.int32(-1)
        state, rows, count, good, not_finite = jax.lax.while_loop(goes_on, run, start)
        if stops:
            not_finite = self.find_not_finite(state.algo, unpack(rows[count - 1])[0])
        count = jnp.minimum(good + 1, count)
        learning, episodes = jax.vmap(unpack)(rows)
        episodes, faults = split_faults(episodes)
        return state, BlockMetrics(learning, episodes, not_finite, count, faults)

    def find_not_finite(self, algo: AlgoState, learning: dict[str, Array]) -> Array:
        """Return int32[], the index of the first tensor with a value that is not finite, -1 if all are finite."""
        return find_first(list(self.tensors_to_check(algo, learning).values()))

    def tensors_to_check(self, algo: AlgoState, learning: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors that must stay finite, by name: metrics of `learn` by their name, then parameters."""
        floats = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(algo.replicated):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                floats[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
        return {**dict(sorted(learning.items())), **floats}

    def tensor_names(self, learning: dict[str, Any]) -> list[str]:
        """Return the names indexed by `BlockMetrics.not_finite`; `learning` is of the same block."""
        return list(self.tensors_to_check(self.shapes().algo, learning))

    # A whole run

    def make_train_fn(self, iterations: Sequence[int]) -> Callable[[Key], Any]:
        """Return a pure function of a key that runs a block of this many `iterations` for each phase.

        Returns:
            key[] -> (the policy's parameters, {phase: {metric: float32[iterations] or float32[iterations, updates]}}).
            Metrics of episodes are means over those that ended in an iteration, NaN where none did.
        """

        def whole(key: Key) -> Any:
            state = self._init(key, None)
            metrics = {}
            for index, (phase, count) in enumerate(zip(self.algo.phases, iterations, strict=True)):
                if count:
                    state = dataclasses.replace(state, phase=jnp.int32(index), iteration=jnp.uint32(0))
                    state, rows = self._repeat(state, jnp.int32(count), phase, count, stops=False)
                    sums = rows.episodes
                    means = {name: value / sums["episodes"] for name, value in sums.items() if name != "episodes"}
                    episode_count = {"episodes": sums["episodes"]} if sums else {}
                    metrics[phase.name] = rows.learning | means | episode_count
            return self.algo.policy(state.algo), metrics

        return on_mesh(whole, self.mesh, (REPLICATED,), REPLICATED)


def _with_env_carry(state: TrainState, env_carry: Any) -> TrainState:
    """Return the state with the environments of `Collected.env_carry`, unchanged if that is empty."""
    if not env_carry:
        return state
    carry, env, timestep, statistics = env_carry
    return dataclasses.replace(state, carry=carry, env=env, timestep=timestep, statistics=statistics)


RunTrial = Callable[[TrainState], tuple[TrainState, BlockMetrics]]


def _run_at_once(run_trial: RunTrial, state: TrainState) -> tuple[TrainState, BlockMetrics]:
    """Run all trials of a state together.

    Counters are equal in all trials. They have no axis of trials inside, so that conditions on them stay branches.
    """
    names = ("progress", "phase", "iteration", "iterations")
    counters = jax.tree.map(lambda x: x[0], {name: getattr(state, name) for name in names})

    def run_one(trial_state: TrainState) -> tuple[TrainState, BlockMetrics]:
        progress = dataclasses.replace(counters["progress"], episodes=trial_state.progress.episodes)
        return run_trial(dataclasses.replace(trial_state, **counters | {"progress": progress}))

    results: tuple[TrainState, BlockMetrics] = jax.vmap(run_one)(state)
    return results


def _run_in_turn(run_trial: RunTrial, state: TrainState) -> tuple[TrainState, BlockMetrics]:
    """Run all trials of a state one after another."""
    run_trial = jit_inline(run_trial)
    trials = len(state.key)
    shapes = jax.eval_shape(run_trial, jax.tree.map(lambda x: x[0], state))[1]
    metrics = jax.tree.map(lambda x: jnp.zeros((trials, *x.shape), x.dtype), shapes)

    def run_next(k: Array, results: tuple[TrainState, BlockMetrics]) -> tuple[TrainState, BlockMetrics]:
        trial_state = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, k, keepdims=False), results[0])
        new = run_trial(trial_state)
        both: tuple[TrainState, BlockMetrics]
        both = jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, k, 0), results, new)
        return both

    return jax.lax.fori_loop(np.int32(0), np.int32(trials), run_next, (state, metrics))


def _call_if(condition: Array, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), or where the condition is false the arguments and zeros for its other results.

    A loop of one turn or none: unlike a branch it changes arrays in place.
    """
    call = jit_inline(function)
    others = jax.eval_shape(call, *arguments)[len(arguments) :]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), others)

    def run(_: Array, results: Any) -> Any:
        return tuple(call(*results[: len(arguments)]))

    return jax.lax.fori_loop(np.int32(0), condition.astype(jnp.int32), run, (*arguments, *zeros))
