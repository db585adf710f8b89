"""The training loop on the devices: iterations of (collect T steps, learn), a block of them in one compiled call.

Nothing here depends on the algorithm or environment, nor touches files. The block runs inside one `shard_map` over the
mesh: each device steps its own environments, and the algorithm calls the collectives of `DataParallel`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from envs_jax.base import Array, EnvSpec
from envs_jax.batch import BatchedEnvironment, finished_episodes, start_statistics, update_statistics
from envs_jax.progress import Progress, add, start, total
from jaxrl.algos.base import Algorithm, AlgoState, Phase, Trajectory
from jaxrl.common.types import Key, PolicyParams
from jaxrl.nn import precision
from jaxrl.rl.data_parallel import (
    AXIS,
    REPLICATED,
    SPLIT,
    DataParallel,
    compiler_options,
    map_chunks,
    on_mesh,
    shardings,
    trace_once,
)
from jaxrl.runtime.not_finite import count_faults, find_first, split_faults
from jaxrl.runtime.self_play import SelfPlay
from jaxrl.runtime.train_state import BlockMetrics, TrainState


def make_env_key(key: Key, index: Array) -> Key:
    """Return the root key of environment `index` in a run."""
    return jax.random.fold_in(jax.random.fold_in(key, 0), index)


def make_env_keys(key: Key, indices: Array) -> Key:
    """Return the root keys key[B] of the environments, or held-out episodes, `indices` [B]."""
    return jax.vmap(make_env_key, in_axes=(None, 0))(key, indices)


def make_iteration_key(key: Key, iteration: Array) -> Key:
    """Return the key of iteration `iteration` in a run."""
    return jax.random.fold_in(jax.random.fold_in(key, 1), iteration)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Makes the initial state and the compiled blocks of a run.

    A trial is one combination with one seed. With several trials the first axis of every leaf of the state is the
    trial, and the devices share it; `layout` then describes one trial on one device.
    """

    env: BatchedEnvironment
    algo: Algorithm
    layout: DataParallel  # of the batch on the devices
    mesh: Mesh
    block: int  # K, maximum iterations of one compiled call
    rollout_chunk: int  # environments rolled out at a time on a device, in phases that restart them; 0 = all
    storage_dtype: Any  # dtype of stored observations that lie in [0, 1]
    total_env_steps: int  # denominator of `Progress.fraction`; schedules do not change when a run is extended
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
        """Return whether any environment state is kept between iterations."""
        return any(phase.steps and not phase.restart for phase in self.algo.phases)

    def specs(self) -> TrainState:
        """Return the PartitionSpecs of the state, a prefix tree."""
        if self.trials > 1:
            return TrainState(*[SPLIT] * len(dataclasses.fields(TrainState)))
        split: Any = SPLIT if self.keeps_envs else ()
        specs = TrainState(*[REPLICATED] * len(dataclasses.fields(TrainState)))
        algo = AlgoState(replicated=REPLICATED, sharded=SPLIT)
        return dataclasses.replace(specs, algo=algo, carry=split, env=split, timestep=split, statistics=split)

    def keys(self, seed: int, make: Callable[[Any], Key] = jax.random.key) -> Key:
        """Return the run's key[], or key[trials]: for each combination, the keys of this seed and the next ones."""
        if self.trials == 1:
            return make(seed)
        seeds = np.arange(seed, seed + self.seeds, dtype=np.uint32)
        return jax.vmap(make)(np.tile(seeds, self.trials // self.seeds))

    # The initial state

    def init(self, key: Key, inputs: Any = None) -> TrainState:
        """Return a fresh state on the mesh for key[], or key[trials]; `inputs` as in `Algorithm.init`."""
        return self.make_init()(key, inputs)

    def make_init(self) -> Callable[..., Any]:
        """Jit (key, inputs) -> state."""
        return jax.jit(self._init_on_mesh, compiler_options=compiler_options(once=True))

    def shapes(self, inputs: Any = None) -> TrainState:
        """Return ShapeDtypeStructs of the state with their shardings; allocates nothing."""
        shapes: TrainState = self.place_shapes(jax.eval_shape(self._init_on_mesh, self.keys(0), inputs), self.specs())
        return shapes

    def place_shapes(self, shapes: Any, specs: Any) -> Any:
        """Return ShapeDtypeStructs with the shardings of a prefix tree of PartitionSpecs."""

        def place(sharding: Any, tree: Any) -> Any:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

        return jax.tree.map(place, shardings(self.mesh, specs), shapes)

    @functools.cached_property
    def _init_on_mesh(self) -> Callable[..., Any]:
        """Return `_init` on the mesh, traced once for each structure of inputs."""
        if self.trials == 1:
            return trace_once(on_mesh(self._init, self.mesh, (REPLICATED, REPLICATED), self.specs()))

        def init_trials(keys: Key, inputs: Any) -> TrainState:
            indices = jax.lax.axis_index(AXIS) * len(keys) + jnp.arange(len(keys), dtype=jnp.int32)
            values = {name: jnp.repeat(jnp.float32(swept), self.seeds) for name, swept in self.sweep.items()}
            settings = {name: value[indices] for name, value in values.items()}
            return jax.vmap(self._init, in_axes=(0, None, 0))(keys, inputs, settings)

        return trace_once(on_mesh(init_trials, self.mesh, (SPLIT, REPLICATED), self.specs()))

    def _init(self, key: Key, inputs: Any, settings: Any = None) -> TrainState:
        key_algo, key_run = jax.random.split(key)
        settings, progress = settings or {}, start(max(self.total_env_steps, 1))
        algo = self.algo.with_traced(settings).init(key_algo, inputs)
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

    def collect(self, state: TrainState, phase: Phase, key: Key) -> Any:
        """Roll out this device's environments for an iteration, in chunks.

        Returns:
            Trajectory [T, B, ...], the time steps [B] after it, what the state keeps, and sums over ended episodes.
        """
        return map_chunks(*self.rollout_arguments(state, phase, key))

    def rollout_arguments(self, state: TrainState, phase: Phase, key: Key) -> tuple[Any, ...]:
        """Return the arguments with which `map_chunks` computes `collect`."""
        spec, policy, context = self.env.spec, self.algo.policy(state.algo), self._context(state.progress, state.pool)
        whole_episodes = phase.restart and spec.fixed_horizon and phase.steps <= spec.horizon
        starts_inside = whole_episodes and self.env.starts_in_step  # in the loop's first step, which is dropped

        def collect_chunk(batch: Any) -> Any:
            indices, *loop = batch
            if phase.restart:
                begin = self.env.ended if starts_inside else self.env.reset
                env, timestep = begin(make_env_keys(state.key, indices), context, state.iterations)
                loop = [self.algo.init_carry(policy, timestep, indices), env, timestep, start_statistics(timestep)]

            def take_step(loop: Any, t: Array) -> tuple[Any, tuple[Trajectory, Any]]:
                carry, env, timestep, statistics = loop
                keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(key, t), indices)
                results = self.algo.act(policy, carry, timestep, keys, state.progress, "explore")
                action, carry, extras = _check_results("act", results, ("action", "carry", "extras"))
                _check_action(spec, action, len(indices))
                row = Trajectory(precision.store(spec, timestep, self.storage_dtype), action, extras)
                if whole_episodes and not starts_inside:
                    env, timestep = self.env.step_without_reset(env, action, context)
                else:
                    env, timestep = self.env.step(env, timestep, action, context)
                statistics = update_statistics(spec, statistics, timestep)
                # one array of sums: XLA would compile a few kernels for each of them
                sums = ravel_pytree(finished_episodes(statistics, timestep))[0]
                return (carry, env, timestep, statistics), (row, sums)

            steps = jnp.arange(-int(starts_inside), phase.steps, dtype=jnp.int32).astype(jnp.uint32)
            env_carry, (trajectory, sums) = jax.lax.scan(take_step, tuple(loop), steps)
            if starts_inside:
                trajectory = jax.tree.map(lambda x: x[1:], trajectory)
            if self.algo.stores_carry:
                trajectory = dataclasses.replace(trajectory, carry=jax.tree.map(lambda x: x[None], loop[0]))
            *_, last_timestep, last_statistics = env_carry
            _, unpack = ravel_pytree(finished_episodes(last_statistics, last_timestep))
            episode_sums = jax.tree.map(lambda x: x[None], unpack(sums.sum(0)))
            episode_sums |= {name: count[None] for name, count in count_faults(trajectory, env_carry[2]).items()}
            return trajectory, env_carry[2], () if phase.restart else env_carry, episode_sums

        env_carry = ((), (), (), ()) if phase.restart else (state.carry, state.env, state.timestep, state.statistics)
        return collect_chunk, (self.layout.env_indices(), *env_carry), self.chunks(), (1, 0, 0, 0)

    def chunks(self) -> int:
        envs = self.layout.local_envs
        return envs // self.rollout_chunk if 0 < self.rollout_chunk < envs else 1

    def _run_iteration(self, state: TrainState, phase: Phase) -> tuple[TrainState, dict[str, Array], dict[str, Array]]:
        """Collect, then learn, with the settings of the state."""
        trial = dataclasses.replace(self, algo=self.algo.with_traced(state.settings))
        key_act, key_learn = jax.random.split(make_iteration_key(state.key, state.iterations))
        trajectory = last = None
        env_carry = episode_sums = ()
        if phase.steps:
            trajectory, last, env_carry, episode_sums = trial.collect(state, phase, key_act)
        results = trial.algo.learn(state.algo, trajectory, last, key_learn, state.progress, phase)
        algo, learning = _check_results("learn", results, ("state", "metrics"))
        return trial.end_iteration(state, phase.steps, phase.updates, algo, learning, env_carry, episode_sums)

    def _run_any_phase(self, state: TrainState) -> tuple[TrainState, dict[str, Array], dict[str, Array]]:
        """Collect, learn, or both, as the phase of the state does; metrics of what it does not do are 0.

        Requires `Algorithm.learns_in_parts`.
        """
        trial, phases = dataclasses.replace(self, algo=self.algo.with_traced(state.settings)), self.algo.phases
        whole, only_steps = phases[-1], dataclasses.replace(phases[-1], updates=0)
        steps = jnp.asarray([phase.steps for phase in phases], jnp.int32)[state.phase]
        updates = jnp.asarray([phase.updates for phase in phases], jnp.int32)[state.phase]
        key_act, key_learn = jax.random.split(make_iteration_key(state.key, state.iterations))
        env_steps = add(state.progress.env_steps, steps * self.layout.num_envs)
        progress = dataclasses.replace(state.progress, env_steps=env_steps)

        def collect(algo: AlgoState, env_carry: Any) -> Any:
            names = ("carry", "env", "timestep", "statistics")
            before = dataclasses.replace(state, algo=algo, **dict(zip(names, env_carry, strict=True)))
            trajectory, last, env_carry, episode_sums = trial.collect(before, whole, key_act)
            algo, _ = trial.algo.learn(algo, trajectory, last, key_learn, state.progress, only_steps)
            return algo, env_carry, episode_sums

        def learn(algo: AlgoState) -> Any:
            return trial.algo.learn(algo, None, None, key_learn, progress, whole)

        env_carry = state.carry, state.env, state.timestep, state.statistics
        algo, env_carry, episode_sums = _call_if(steps > 0, collect, state.algo, env_carry)
        algo, learning = _call_if(updates > 0, learn, algo)
        return trial.end_iteration(state, steps, updates, algo, learning, env_carry, episode_sums)

    def end_iteration(
        self,
        state: TrainState,
        steps: Array | int,
        updates: Array | int,
        algo: AlgoState,
        learning: dict[str, Array],
        env_carry: Any,
        episode_sums: Any,
    ) -> tuple[TrainState, dict[str, Array], dict[str, Array]]:
        """Return the state after an iteration, the metrics of learning, and sums over its ended episodes and faults."""
        _check_learned(state.algo, algo, learning)
        progress, layout = state.progress, self.layout
        if env_carry:
            carry, env, timestep, statistics = env_carry
            state = dataclasses.replace(state, carry=carry, env=env, timestep=timestep, statistics=statistics)
        episodes = layout.sum(episode_sums) if episode_sums else {}
        if not isinstance(updates, int) or updates:  # in a program for all phases the session drops them
            learning = learning | self.algo.schedules(progress)
        env_steps = add(progress.env_steps, steps * layout.num_envs)
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

        Without `phase` it is the one of the state; see `Algorithm.learns_in_parts`.
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
        """Run up to K iterations of this device's trials."""
        if self.trials > 1 and not self.vectorized:
            return self._run_trials_in_turn(state, iterations, phase)
        return self._run_iterations(state, iterations, phase, stops=self.trials == 1)

    def _run_iterations(
        self, state: TrainState, iterations: Array, phase: Phase | None, stops: bool
    ) -> tuple[TrainState, BlockMetrics]:
        """Run up to K iterations.

        A single run `stops` after the first one whose `learn` reports a value that is not finite; everything else that
        must stay finite is checked once, after the last iteration. Trials go on, and are checked after each iteration,
        so that it depends on nothing else where one fails.
        """
        run_iteration = functools.partial(self._run_iteration, phase=phase) if phase else self._run_any_phase
        iterate = trace_once(self._for_each_trial(run_iteration))
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
                first = jnp.where(first < 0, find_not_finite(state.algo, unpack(row)[0]), first)
                is_good = first < 0
            return state, rows.at[index].set(row), index + 1, good + is_good.astype(jnp.int32), first

        def goes_on(loop: Any) -> Array:
            return (loop[2] < iterations) & (loop[2] == loop[3]) if stops else loop[2] < iterations

        find_not_finite = jax.vmap(self.find_not_finite) if self.trials > 1 else self.find_not_finite
        rows, zeros = jnp.zeros((self.block, *empty.shape), empty.dtype), jnp.zeros(state.key.shape, jnp.int32)
        start = state, rows, jnp.int32(0), zeros, zeros - 1
        state, rows, count, good, not_finite = jax.lax.while_loop(goes_on, run, start)
        if stops:
            not_finite = find_not_finite(state.algo, unpack(rows[count - 1])[0])
        count = jnp.minimum(good + 1, count)
        learning, episodes = jax.vmap(unpack)(rows)
        episodes, faults = split_faults(episodes)
        return state, BlockMetrics(learning, episodes, not_finite, count, faults)

    def _for_each_trial(self, function: Callable[[TrainState], Any]) -> Callable[[TrainState], Any]:
        """Apply a function of one trial's state to all trials of this device.

        Counters are equal in all trials. They have no axis of trials inside, so that conditions on them stay branches.
        """
        if self.trials == 1:
            return function

        def call(state: TrainState) -> Any:
            names = ("progress", "phase", "iteration", "iterations")
            counters = jax.tree.map(lambda x: x[0], {name: getattr(state, name) for name in names})

            def call_for_one(trial_state: TrainState) -> Any:
                progress = dataclasses.replace(counters["progress"], episodes=trial_state.progress.episodes)
                return function(dataclasses.replace(trial_state, **counters | {"progress": progress}))

            return jax.vmap(call_for_one)(state)

        return call

    def _run_trials_in_turn(
        self, state: TrainState, iterations: Array, phase: Phase | None
    ) -> tuple[TrainState, BlockMetrics]:
        """Run the blocks of this device's trials one after another."""
        single = dataclasses.replace(self, seeds=1, sweep={})

        def run_trial(k: Array, results: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
            trial_state = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, k, keepdims=False), results[0])
            new = single._run_iterations(trial_state, iterations, phase, stops=False)
            return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, k, 0), results, new)

        trials = len(state.key)
        first_trial = jax.tree.map(lambda x: x[0], state)
        shapes = jax.eval_shape(
            lambda state: single._run_iterations(state, iterations, phase, stops=False)[1], first_trial
        )
        empty = jax.tree.map(lambda x: jnp.zeros((trials, *x.shape), x.dtype), shapes)
        state, metrics = jax.lax.fori_loop(np.int32(0), np.int32(trials), run_trial, (state, empty))
        rows = {name: getattr(metrics, name) for name in ("learning", "episodes", "faults")}
        by_iteration = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), rows)
        return state, dataclasses.replace(metrics, **by_iteration)

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
        """Return a pure function of a key that runs this many `iterations` of each phase in one program.

        Returns:
            key[] -> (the policy's parameters, {phase: {metric: float32[iterations] or float32[iterations, updates]}}).
            Metrics of episodes are means over those that ended in an iteration, NaN where none did.
        """

        def run_iteration(state: TrainState, _: None, phase: Phase) -> tuple[TrainState, dict[str, Array]]:
            state, learning, sums = self._run_iteration(state, phase)
            sums = split_faults(sums)[0]
            episodes = {name: value / sums["episodes"] for name, value in sums.items() if name != "episodes"}
            episode_count = {"episodes": sums["episodes"]} if sums else {}
            return state, learning | episodes | episode_count

        def whole(key: Key) -> Any:
            state, metrics = self._init(key, None), {}
            for index, (phase, count) in enumerate(zip(self.algo.phases, iterations, strict=True)):
                if count:
                    state = dataclasses.replace(state, phase=jnp.int32(index), iteration=jnp.uint32(0))
                    step = functools.partial(run_iteration, phase=phase)
                    state, metrics[phase.name] = jax.lax.scan(step, state, None, length=count)
            return self.algo.policy(state.algo), metrics

        return on_mesh(whole, self.mesh, (REPLICATED,), REPLICATED)


def _call_if(condition: Array, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), or where the condition is false the arguments and zeros for its other results.

    A loop of one turn or none: unlike a branch it changes arrays in place.
    """
    call = trace_once(function)
    others = jax.eval_shape(call, *arguments)[len(arguments) :]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), others)

    def run(_: Array, results: Any) -> Any:
        return tuple(call(*results[: len(arguments)]))

    return jax.lax.fori_loop(np.int32(0), condition.astype(jnp.int32), run, (*arguments, *zeros))


# What an algorithm returns, checked while it is traced: one sentence instead of an error deep in the loop


def _check_results(method: str, results: Any, names: tuple[str, ...]) -> Any:
    """Return what a method of an algorithm returned. Raises ValueError unless it is a tuple with these entries."""
    if not isinstance(results, tuple) or len(results) != len(names):
        description = f"{len(results)} values" if isinstance(results, tuple) else type(results).__name__
        raise ValueError(f"{method} must return {', '.join(names)}, not {description}")
    return results


def _check_learned(before: Any, after: Any, metrics: Any) -> None:
    """Raise ValueError unless `learn` returned a state with the same leaves as its argument, and metrics by name."""
    if not isinstance(after, AlgoState):
        raise ValueError(f"learn must return an AlgoState and metrics, not {type(after).__name__} and metrics")
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise ValueError("learn must return metrics as a dictionary {name: float32[] or float32[updates]}")
    structures: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    if structures[0] != structures[1]:
        raise ValueError("learn must return a state of the same structure as its argument")
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if (jnp.shape(new), jnp.result_type(new)) != (old.shape, old.dtype):
            raise ValueError(
                f"learn changed {jax.tree_util.keystr(path).removeprefix('.')} of the state from "
                f"{old.dtype}{list(old.shape)} to {jnp.result_type(new)}{list(jnp.shape(new))}: keep shape and dtype"
            )


def _check_action(spec: EnvSpec, action: Array, num_envs: int) -> None:
    """Raise ValueError unless `act` returned what the environment takes."""
    expected_shape, kinds = (num_envs, spec.num_agents, *spec.action.shape), (jnp.integer, jnp.floating)
    same_kind = any(jnp.issubdtype(action.dtype, kind) and jnp.issubdtype(spec.action.dtype, kind) for kind in kinds)
    if action.shape != expected_shape or not same_kind:
        actual, expected = (
            f"{jnp.dtype(dtype).name}{list(shape)}"
            for dtype, shape in ((action.dtype, action.shape), (spec.action.dtype, expected_shape))
        )
        raise ValueError(
            f"act returned actions {actual}, but '{spec.name}' takes {expected} (environments, agents, ...): "
            "return one action for each agent of each environment"
        )
