"""Rollouts without learning, of learned and scripted policies with the same code; every metric is a curve."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from envs_jax.base import Array, Discrete, EnvSpec, TimeStep
from envs_jax.batch import BatchedEnvironment, BatchState, EpisodeStatistics, start_statistics, update_statistics, where
from envs_jax.progress import final_progress
from jaxrl.algos.base import Algorithm, Mode
from jaxrl.common.errors import UserError
from jaxrl.common.types import Key, PolicyParams
from jaxrl.rl.data_parallel import AXIS, REPLICATED, SPLIT, compiler_options, largest_divisor, map_chunks, on_mesh
from jaxrl.runtime.program import Program
from jaxrl.runtime.trainer import make_env_keys

STEPS = 1000  # a device holds so many steps of curves at a time
_STEPS_PER_CHECK = 50  # after so many steps, check whether all episodes have ended

# (parameters, carry, batch state, time step, keys[B]) -> (action [B, A, ...], carry)
PolicyOutput = tuple[Array, Any]
PolicyFn = Callable[[PolicyParams, Any, BatchState, TimeStep, Key], PolicyOutput]


def learned_policy(algo: Algorithm, mode: Mode = "greedy") -> PolicyFn:
    """Return the policy of an algorithm, greedy or sampled."""

    def policy(params: PolicyParams, carry: Any, state: BatchState, timestep: TimeStep, keys: Key) -> PolicyOutput:
        action, carry, _ = algo.act(params, carry, timestep, keys, final_progress(), mode)
        return action, carry

    return policy


def scripted_names(env: BatchedEnvironment) -> tuple[str, ...]:
    """Return the environment's baselines, and "random", which every environment has."""
    return tuple(dict.fromkeys(("random", *env.env.baselines)))


def uniform(env: Any, state: Any, timestep: TimeStep, key: Key) -> Array:
    """Act at random in an environment without its own "random": allowed actions agent by agent, or uniform in a box."""
    action = env.spec.action
    agents = env.spec.num_agents
    if not isinstance(action, Discrete):
        shape = (agents, *action.shape)
        if np.isfinite([action.lowest, action.highest]).all():
            low, high = (np.broadcast_to(bound, shape).astype(action.dtype) for bound in action.bounds)
            return jax.random.uniform(key, shape, action.dtype, low, high)
        return jax.random.normal(key, shape, action.dtype)
    if timestep.action_mask is None:
        return jax.random.randint(key, (agents,), 0, action.n, jnp.int32)
    chosen = jnp.zeros(agents, jnp.int32)
    for agent in range(agents):
        mask = env.spec.next_mask(timestep.mask_state, timestep.action_mask, chosen, jnp.int32(agent))
        logits = jnp.where(mask, 0.0, -jnp.inf)
        chosen = chosen.at[agent].set(jax.random.categorical(jax.random.fold_in(key, agent), logits).astype(jnp.int32))
    return chosen


def scripted_policy(env: BatchedEnvironment, name: str) -> PolicyFn:
    """Return one of the policies `scripted_names`."""
    baseline = env.env.baselines.get(name, uniform)

    def policy(params: PolicyParams, carry: Any, state: BatchState, timestep: TimeStep, keys: Key) -> PolicyOutput:
        action = jax.vmap(lambda s, t, k: baseline(env.env, s, t, k))(state.env, timestep, keys)
        return action, carry

    return policy


def switch_policy(env: BatchedEnvironment, policies: Sequence[PolicyFn]) -> PolicyFn:
    """Combine policies into one that acts like `policies[index]`, with parameters (index, its parameters)."""

    def policy(params: PolicyParams, carry: Any, state: BatchState, timestep: TimeStep, keys: Key) -> PolicyOutput:
        index, params = params

        def branch(one: PolicyFn) -> PolicyFn:
            def act(*arguments: Any) -> PolicyOutput:
                action, carry = one(*arguments)
                return action.astype(env.spec.action.dtype), carry

            return act

        return jax.lax.switch(index, [branch(one) for one in policies], params, carry, state, timestep, keys)

    return policy


class Opponent(NamedTuple):
    """A policy without a carry for the other team; `make_view` returns its observations and a key per game."""

    make_view: Callable[[BatchState], tuple[TimeStep, Array]]
    policy: PolicyFn


def both_teams(first: PolicyFn, opponents: Sequence[Opponent]) -> PolicyFn:
    """Return the policy of both teams, actions [B, A + A], for parameters (first team's, (k, opponents')).

    Opponent k plays the other team; for k = number of opponents nobody does, and the actions are 0.
    """

    def policy(params: PolicyParams, carry: Any, state: BatchState, timestep: TimeStep, keys: Key) -> PolicyOutput:
        first_params, (k, opponent_params) = params
        action, carry = first(first_params, carry, state, timestep, keys)

        def branch(opponent: Opponent, params: PolicyParams) -> Callable[[], Array]:
            def act() -> Array:
                view, opponent_keys = opponent.make_view(state)
                return opponent.policy(params, (), state, view, opponent_keys)[0].astype(action.dtype)

            return act

        branches = [branch(opponent, params) for opponent, params in zip(opponents, opponent_params, strict=True)]
        reaction = jax.lax.switch(k, [*branches, lambda: jnp.zeros_like(action)])
        return jnp.concatenate([action, reaction], axis=1), carry

    return policy


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Rolls out `episodes` episodes of one policy, compiled once per policy.

    Episode i starts from the same state for every policy. Its random numbers come from a key that training never uses
    (`held_out_key`), so that only environments that draw from a list repeat states of training.
    """

    env: BatchedEnvironment
    policy: PolicyFn  # see `learned_policy` and `scripted_policy`
    episodes: int  # number over all devices
    mesh: Mesh  # the devices; the largest number of them that divides `episodes` is used
    chunk: int = 0  # maximum number of episodes at a time on a device; 0 = all
    # (parameters, time step [B], int32[B]) -> the policy's carry, as `Algorithm.init_carry`
    init_carry: Callable[[PolicyParams, TimeStep, Array], Any] = lambda params, timestep, indices: ()
    seeds: int = 1  # number of policies, each with its own key and all episodes; the devices share the policies

    @property
    def devices(self) -> int:
        return largest_divisor(self.seeds if self.seeds > 1 else self.episodes, self.mesh.size)

    @property
    def _used_mesh(self) -> Mesh:
        return Mesh(self.mesh.devices[: self.devices], (AXIS,))

    # Only the ends of episodes

    def jit_final_values(self) -> Callable[..., dict[str, Array]]:
        """Jit `final_values`."""
        return jax.jit(self.final_values(), compiler_options=compiler_options())

    def final_values(self) -> Callable[..., dict[str, Array]]:
        """Return (parameters, key, context) -> values at the end of the episodes {name: float32[episodes]}.

        With several tasks, the entry "task" holds the task of each episode, see `split_by_task`. With several seeds the
        first axis of parameters, key and values is the seed. A chunk ends when all its episodes have ended.
        """
        local = self.episodes if self.seeds > 1 else self.episodes // self.devices
        chunks = local // largest_divisor(local, self.chunk) if self.chunk else 1

        def rollout(params: PolicyParams, key: Key, context: Any) -> dict[str, Array]:
            first = 0 if self.seeds > 1 else jax.lax.axis_index(AXIS) * local
            indices = first + jnp.arange(local, dtype=jnp.int32)
            return map_chunks(
                lambda indices: self._see(context, *self._play(params, indices, key, context)[1:]),
                indices,
                chunks,
                out_axes=0,
            )

        in_specs: Any = (REPLICATED, REPLICATED, REPLICATED)
        function: Callable[..., Any] = rollout
        if self.seeds > 1:
            in_specs = (SPLIT, SPLIT, REPLICATED)
            function = jax.vmap(rollout, in_axes=(0, 0, None))
        return on_mesh(function, self._used_mesh, in_specs, SPLIT)

    def _play(self, params: PolicyParams, indices: Array, seed_key: Key, context: Any) -> Any:
        horizon = self.env.spec.horizon
        keys = make_env_keys(seed_key, indices)

        def play_steps(count: int, first: Array, carry: Any) -> Any:
            def take_step(k: Array, carry: Any) -> Any:
                return self._step(params, keys, context, carry, first + k.astype(jnp.uint32))[0]

            return jax.lax.fori_loop(0, count, take_step, carry)

        carry = self._reset(params, indices, seed_key, context)
        if self.env.spec.fixed_horizon:
            lead = self.env.lead_steps
            return play_steps(lead + horizon, jnp.int32(-lead).astype(jnp.uint32), carry)
        count = min(horizon, _STEPS_PER_CHECK)
        _, carry = jax.lax.while_loop(
            lambda loop: (loop[0] < horizon) & ~jnp.all(loop[1][2].done),
            lambda loop: (loop[0] + jnp.uint32(count), play_steps(count, *loop)),
            (jnp.uint32(0), carry),
        )
        return carry

    # Every step

    def curves(self) -> Callable[..., dict[str, np.ndarray]]:
        """Return (parameters, key, context) -> curves {name: float32[T + 1, episodes]}, for a single seed.

        T is as of `_make_trace`; a device holds the curves of one chunk of episodes at a time.
        """
        assert self.seeds == 1
        local = self.episodes // self.devices
        size = largest_divisor(local, self.chunk) if self.chunk else local
        trace = self._make_trace(self._see, size)

        def rollout(params: PolicyParams, key: Key, context: Any) -> dict[str, np.ndarray]:
            firsts = np.arange(0, local, size, dtype=np.int32)
            chunks = [trace(params, key, context, first)[0] for first in firsts]
            longest = max(len(chunk["length"]) for chunk in chunks)

            def join(*parts: np.ndarray) -> np.ndarray:
                parts = tuple(extend(part, longest).reshape(longest, self.devices, size) for part in parts)
                return np.concatenate(parts, axis=2).reshape(longest, self.episodes)

            return jax.tree.map(join, *chunks)

        return rollout

    def record(self) -> Callable[..., tuple[Any, TimeStep, dict[str, np.ndarray], np.ndarray]]:
        """Return (parameters, key, context, index) -> all data of the one episode `index`; `episodes` is 1.

        Returns:
            the environment's states [T + 1, ...], time steps [T + 1, ...], curves [T + 1] and actions [T, A, ...], T as
            of `_make_trace`; rows after an early end are undefined.
        """

        def observe_all(context: Any, state: BatchState, timestep: TimeStep, statistics: EpisodeStatistics) -> Any:
            return state.env, timestep, values(statistics)

        trace = self._make_trace(observe_all, 1, with_actions=True)

        def rollout(params: PolicyParams, key: Key, context: Any, index: Array) -> Any:
            rows, actions = trace(params, key, context, index)
            return jax.tree.map(lambda x: x[:, 0], (*rows, actions))

        return rollout

    def _make_trace(
        self, extract: Callable[..., Any], size: int, with_actions: bool = False
    ) -> Callable[..., tuple[Any, Any]]:
        """Return (parameters, key, context, first) -> `extract` at each step [T + 1, B, ...], and actions [T, B, ...].

        Without `with_actions` there are none. B are `size` episodes of each device, from its `first` on. T is the
        horizon or, if all of them end earlier, a smaller multiple of `STEPS`, the steps that a device holds at a time;
        rows are on the host.
        """
        spec = self.env.spec
        lead = self.env.lead_steps
        local = self.episodes // self.devices
        piece = min(lead + spec.horizon, STEPS)

        def find_indices(first: Array) -> Array:
            return jax.lax.axis_index(AXIS) * local + first + jnp.arange(size, dtype=jnp.int32)

        def begin(params: PolicyParams, key: Key, context: Any, first: Array) -> Any:
            carry = self._reset(params, find_indices(first), key, context)
            return carry, jax.tree.map(lambda x: x[None], extract(context, *carry[1:]))

        def play_piece(params: PolicyParams, key: Key, context: Any, first: Array, carry: Any, t: Array) -> Any:
            keys = make_env_keys(key, find_indices(first))

            def take_step(carry: Any, t: Array) -> tuple[Any, Any]:
                carry, action = self._step(params, keys, context, carry, t)
                return carry, (extract(context, *carry[1:]), action if with_actions else ())

            return jax.lax.scan(take_step, carry, t + jnp.arange(piece, dtype=jnp.uint32))

        common = (REPLICATED,) * 4
        rows_spec = jax.sharding.PartitionSpec(None, AXIS)
        on_devices = on_mesh(begin, self._used_mesh, common, (SPLIT, rows_spec))
        options = compiler_options(once=size * self.devices == 1)
        jitted_begin = jax.jit(on_devices, compiler_options=options)
        on_devices = on_mesh(play_piece, self._used_mesh, (*common, SPLIT, REPLICATED), (SPLIT, rows_spec))
        jitted_piece = jax.jit(on_devices, compiler_options=options)
        programs: list[Program] = []
        place = jax.sharding.NamedSharding(self._used_mesh, SPLIT)

        def compile_both(*arguments: Any) -> None:
            """Compile both programs at the same time, each in its thread."""
            shapes = jax.eval_shape(jitted_begin, *arguments)[0]
            carry = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
            programs.append(Program(lambda: (jitted_begin, *arguments)))
            programs.append(Program(lambda: (jitted_piece, *arguments, carry, np.uint32(0))))
            for program in programs:
                program.start_compiling()

        def trace(*arguments: Any) -> tuple[Any, Any]:
            if not programs:
                compile_both(*arguments)
            run_begin, run_piece = programs
            carry, row = run_begin(*arguments)
            carry = jax.device_put(carry, place)  # XLA replicates arrays without elements
            pieces = [_fetch(row)]
            actions = []
            for t in range(-lead, spec.horizon, piece):
                carry, results = run_piece(*arguments, carry, np.int32(t).astype(np.uint32))
                # cut on the host: on the device each shape would be a program
                rows, more_actions = jax.tree.map(lambda x, left=spec.horizon - t: x[:left], _fetch(results))
                pieces.append(rows)
                actions.append(more_actions)
                if not spec.fixed_horizon and np.asarray(carry[2].done).all():
                    break
            check_host(self.env)
            return tuple(jax.tree.map(lambda *x: _join(*x)[lead:], *parts) for parts in (pieces, actions))

        return trace

    # Both

    def _reset(self, params: PolicyParams, indices: Array, seed_key: Key, context: Any) -> Any:
        """Return the carry before the first step: the policy's carry, states, time steps and statistics."""
        state, timestep = self.env.begin_episodes(make_env_keys(seed_key, indices), context)
        return self.init_carry(params, timestep, indices), state, timestep, start_statistics(timestep)

    def _step(self, params: PolicyParams, keys: Key, context: Any, carry: Any, t: Array) -> tuple[Any, Array]:
        """Return the carry after step t, and the actions; an episode that has ended keeps its final values."""
        policy_carry, state, timestep, statistics = carry
        action, policy_carry = self.policy(params, policy_carry, state, timestep, make_step_keys(keys, t))
        new_state, new_timestep = self.env.step_episodes(state, timestep, action, context)
        new_statistics = update_statistics(self.env.spec, statistics, new_timestep)
        if not self.env.spec.fixed_horizon:
            done = timestep.done | (t >= self.env.spec.horizon)
            new_timestep = where(done, timestep, new_timestep)
            new_statistics = where(done, statistics, new_statistics)
        return (policy_carry, new_state, new_timestep, new_statistics), action

    def _see(
        self, context: Any, state: BatchState, timestep: TimeStep, statistics: EpisodeStatistics
    ) -> dict[str, Array]:
        task = {"task": timestep.task.astype(jnp.float32)} if self.env.spec.num_tasks > 1 else {}
        return values(statistics, self.env.env.count_agents(context)) | task


def check_host(env: BatchedEnvironment) -> None:
    """Raise UserError if environments on the host have failed."""
    if env.failure:
        raise UserError(env.failure)


def _fetch(tree: Any) -> Any:
    """Return NumPy copies of arrays; keys, which NumPy does not have, stay."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), tree)


def _join(*parts: Any) -> Any:
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else jnp.concatenate(parts)


def extend(curve: np.ndarray, length: int) -> np.ndarray:
    """Extend a curve [t, ...] to [length, ...] with its last value."""
    return np.concatenate([curve, np.repeat(curve[-1:], length - len(curve), axis=0)])


def values(statistics: EpisodeStatistics, agents: Array | int | None = None) -> dict[str, Array]:
    """Return the metrics of episodes that would end at this step, leaves float32[B].

    The return is the mean over the first `agents` of the array; None: over all.
    """
    returns = statistics.returns
    if agents is None or isinstance(agents, int):
        mean_return = returns.mean(-1)
    else:  # rounded as the mean of an array of this length
        there = jnp.arange(returns.shape[-1]) < agents
        mean_return = jnp.where(there, returns, 0.0).sum(-1) * (1.0 / jnp.asarray(agents, jnp.float32))
    return {"return": mean_return, "length": statistics.length, **statistics.metrics}


def final_means(spec: EnvSpec, final_values: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the means over episodes of all metrics at their end [episodes], also by task."""
    curves = {name: np.asarray(value)[None] for name, value in final_values.items()}
    return {name: float(np.mean(curve)) for name, curve in split_by_task(spec, curves).items()}


def split_by_task(spec: EnvSpec, curves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace the curve "task" of curves [T + 1, N] by the score of each task, "score/name" [T + 1, its episodes]."""
    names = spec.task_names or tuple(str(index) for index in range(spec.num_tasks))
    result = {name: curve for name, curve in curves.items() if name != "task"}
    if "task" in curves:
        for index, name in enumerate(names):
            chosen = np.asarray(curves["task"])[-1] == index
            if chosen.any():
                result[f"{spec.score}/{name}"] = np.asarray(curves[spec.score])[:, chosen]
    return result


def make_step_keys(keys: Key, t: Array) -> Key:
    """Return the keys key[B] of the policy in step t of episodes with these keys."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, t + jnp.uint32(1 << 20))


def held_out_key(seed: int, stream: str) -> Key:
    """Return the root key of held-out episodes: `stream` "selection" (best checkpoint) or "evaluation" (reported)."""
    return hold_out(jax.random.key(seed), stream)


def hold_out(key: Key, stream: str) -> Key:
    """Return the root key of held-out episodes for the key of a seed; see `held_out_key`."""
    return jax.random.fold_in(key, {"selection": 0x5E1EC7, "evaluation": 0xE7A1}[stream])
