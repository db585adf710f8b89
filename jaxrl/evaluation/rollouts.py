"""Rollouts without learning: learned and scripted policies through the same code, every metric as a curve."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from envs_jax.base import Array, Discrete, EnvSpec, TimeStep
from envs_jax.batch import BatchedEnvironment, BatchState, EpisodeStatistics, start_statistics, update_statistics, where
from envs_jax.progress import ended
from jaxrl.algos.base import Algorithm, Mode
from jaxrl.common.types import Key, PolicyParams
from jaxrl.runtime.data_parallel import AXIS, REPLICATED, SPLIT, graphs, largest_divisor, map_chunks, on_mesh
from jaxrl.runtime.trainer import key_of_env

# (parameters, carry, batch state, time step, keys[B]) -> (action [B, A, ...], carry)
Acted = tuple[Array, Any]
Policy = Callable[[PolicyParams, Any, BatchState, TimeStep, Key], Acted]


def learned(algo: Algorithm, mode: Mode = "greedy") -> Policy:
    """Return the policy of an algorithm, greedy or sampled."""

    def policy(params: PolicyParams, memory: Any, state: BatchState, timestep: TimeStep, keys: Key) -> Acted:
        action, memory, _ = algo.act(params, memory, timestep, keys, ended(), mode)
        return action, memory

    return policy


def scripted_names(env: BatchedEnvironment) -> tuple[str, ...]:
    """Return the environment's baselines, and "random", which every environment has."""
    return tuple(dict.fromkeys(("random", *env.env.baselines)))


def uniform(env: Any, state: Any, timestep: TimeStep, key: Key) -> Array:
    """Act at random in an environment without its own "random": allowed actions agent by agent, or uniform in a box."""
    action, agents = env.spec.action, env.spec.num_agents
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


def scripted(env: BatchedEnvironment, name: str) -> Policy:
    """Return one of the policies `scripted_names`."""
    baseline = env.env.baselines.get(name, uniform)

    def policy(params: PolicyParams, memory: Any, state: BatchState, timestep: TimeStep, keys: Key) -> Acted:
        action = jax.vmap(lambda s, t, k: baseline(env.env, s, t, k))(state.env, timestep, keys)
        return action, memory

    return policy


def switch_policy(env: BatchedEnvironment, policies: Sequence[Policy]) -> Policy:
    """Combine policies into one that acts like `policies[index]`, with parameters (index, its parameters)."""

    def policy(params: PolicyParams, memory: Any, state: BatchState, timestep: TimeStep, keys: Key) -> Acted:
        index, params = params

        def branch(one: Policy) -> Policy:
            def act(*arguments: Any) -> Acted:
                action, memory = one(*arguments)
                return action.astype(env.spec.action.dtype), memory

            return act

        return jax.lax.switch(index, [branch(one) for one in policies], params, memory, state, timestep, keys)

    return policy


class Opponent(NamedTuple):
    """A policy without a carry for the other team: its observations, with a key per game, and its action function."""

    see: Callable[[BatchState], tuple[TimeStep, Array]]
    policy: Policy


def both_teams(first: Policy, opponents: Sequence[Opponent]) -> Policy:
    """Return the policy of both teams, actions [B, A + A], for parameters (first team's, (k, opponents')).

    Opponent k plays the other team; for k = number of opponents nobody does, and the actions are 0.
    """

    def policy(params: PolicyParams, memory: Any, state: BatchState, timestep: TimeStep, keys: Key) -> Acted:
        own, (k, others) = params
        action, memory = first(own, memory, state, timestep, keys)

        def branch(opponent: Opponent, params: PolicyParams) -> Callable[[], Array]:
            def act() -> Array:
                seen, opponent_keys = opponent.see(state)
                return opponent.policy(params, (), state, seen, opponent_keys)[0].astype(action.dtype)

            return act

        branches = [branch(opponent, params) for opponent, params in zip(opponents, others, strict=True)]
        reaction = jax.lax.switch(k, [*branches, lambda: jnp.zeros_like(action)])
        return jnp.concatenate([action, reaction], axis=1), memory

    return policy


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Rolls out `episodes` episodes of one policy, compiled once per policy.

    Episode i starts from the same state for every policy, and from one that training does not visit unless the
    environment draws from a list: its randomness comes from a separate key (`held_out_key`, one for each held-out
    set).

    Attributes:
        env: the batched environment.
        policy: see `learned` and `scripted`.
        init_carry: (parameters, time step [B], int32[B]) -> the policy's carry, as `Algorithm.init_carry`.
        seeds: policies, each with a key of its own; the devices share them, and each rolls out all episodes of its own.
        episodes: number over all devices.
        chunk: most episodes at a time on a device; 0 = all.
        mesh: the devices; as many are used as divide `episodes`.
    """

    env: BatchedEnvironment
    policy: Policy
    episodes: int
    mesh: Mesh
    chunk: int = 0
    init_carry: Callable[[PolicyParams, TimeStep, Array], Any] = lambda params, timestep, indices: ()
    seeds: int = 1

    def _rollout(
        self, params: PolicyParams, indices: Array, seed_key: Key, context: Any, see: Callable[..., Any]
    ) -> tuple[Any, Array]:
        """Return `see` (state, time step, statistics) at all time steps [T + 1, B, ...]; actions [T, B, A, ...]."""
        spec = self.env.spec
        keys = jax.vmap(key_of_env, in_axes=(None, 0))(seed_key, indices)
        state, timestep = self.env.reset(keys, context)
        statistics = start_statistics(timestep)
        memory = self.init_carry(params, timestep, indices)

        def one_step(carry: Any, t: Array) -> tuple[Any, Any]:
            memory, state, timestep, statistics = carry
            action, memory = self.policy(params, memory, state, timestep, keys_of_step(keys, t))
            new_state, new_timestep = self.env.step_without_reset(state, action, context)
            new_statistics = update_statistics(spec, statistics, new_timestep)
            done = timestep.done
            if not spec.fixed_horizon:  # an episode that has ended keeps its final state
                new_timestep = where(done, timestep, new_timestep)
                new_statistics = where(done, statistics, new_statistics)
            seen = see(new_state, new_timestep, new_statistics)
            return (memory, new_state, new_timestep, new_statistics), (seen, action)

        carry = (memory, state, timestep, statistics)
        _, (rows, actions) = jax.lax.scan(one_step, carry, jnp.arange(spec.horizon, dtype=jnp.uint32))
        first = see(state, timestep, statistics)
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rows), actions

    @property
    def devices(self) -> int:
        """Return the number of devices that share the episodes, or the seeds."""
        return largest_divisor(self.seeds if self.seeds > 1 else self.episodes, self.mesh.size)

    def compiled(self, final: bool = False) -> Callable[..., dict[str, Array]]:
        """Jit of (parameters, key, context) -> curves {name: float32[T + 1, episodes]}, or final values [episodes].

        With several tasks, the curve "task" holds the task of each episode, see `by_task`. With several seeds
        parameters, key and curves have the seed as their first axis.
        """
        local = self.episodes if self.seeds > 1 else self.episodes // self.devices
        chunks = local // largest_divisor(local, self.chunk) if self.chunk else 1
        mesh = Mesh(self.mesh.devices[: self.devices], (AXIS,))

        def see(state: BatchState, timestep: TimeStep, statistics: EpisodeStatistics) -> dict[str, Array]:
            task = {"task": timestep.task.astype(jnp.float32)} if self.env.spec.num_tasks > 1 else {}
            return values(statistics) | task

        def rollout(params: PolicyParams, key: Key, context: Any) -> dict[str, Array]:
            first = 0 if self.seeds > 1 else jax.lax.axis_index(AXIS) * local
            indices = first + jnp.arange(local, dtype=jnp.int32)

            def part(indices: Array) -> dict[str, Array]:
                curves = self._rollout(params, indices, key, context, see)[0]
                return {name: curve[-1] for name, curve in curves.items()} if final else curves

            return map_chunks(part, indices, chunks, out_axes=0 if final else 1)

        if self.seeds > 1:
            each = jax.vmap(rollout, in_axes=(0, 0, None))
            function = on_mesh(each, mesh, (SPLIT, SPLIT, REPLICATED), SPLIT)
        else:
            split_episodes = SPLIT if final else jax.sharding.PartitionSpec(None, AXIS)
            function = on_mesh(rollout, mesh, (REPLICATED, REPLICATED, REPLICATED), split_episodes)
        return jax.jit(function, compiler_options=graphs())

    def record(self) -> Callable[..., tuple[Any, TimeStep, dict[str, Array], Array]]:
        """Jit of (parameters, key, context, index) -> all data of episode `index`, rolled out alone.

        Returns:
            the environment's states [T + 1, ...], time steps [T + 1, ...], curves as of `compiled` [T + 1] and
            actions [T, A, ...]; rows after an early end are undefined.
        """

        def see(state: BatchState, timestep: TimeStep, statistics: EpisodeStatistics) -> Any:
            return state.env, timestep, values(statistics)

        def rollout(params: PolicyParams, key: Key, context: Any, index: Array) -> Any:
            with jax.default_matmul_precision("highest"):  # as in `on_mesh`: float32 means float32
                seen, actions = self._rollout(params, jnp.reshape(index, (1,)), key, context, see)
            return jax.tree.map(lambda x: x[:, 0], (*seen, actions))

        return jax.jit(rollout, compiler_options=graphs())


def values(statistics: EpisodeStatistics) -> dict[str, Array]:
    """Return the metrics of episodes that would end at this step, leaves float32[B]."""
    return {"return": statistics.returns.mean(-1), "length": statistics.length, **statistics.metrics}


def final_means(spec: EnvSpec, curves: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the means over episodes at their end, of all metrics, also by task."""
    return {name: float(np.mean(curve[-1])) for name, curve in by_task(spec, curves).items()}


def by_task(spec: EnvSpec, curves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace the curve "task" of curves [T + 1, N] by the score of each task's episodes, "score/name" [T + 1, n]."""
    names = spec.task_names or tuple(str(index) for index in range(spec.num_tasks))
    found = {name: curve for name, curve in curves.items() if name != "task"}
    if "task" in curves:
        for index, name in enumerate(names):
            chosen = np.asarray(curves["task"])[-1] == index
            if chosen.any():
                found[f"{spec.score}/{name}"] = np.asarray(curves[spec.score])[:, chosen]
    return found


def announced(rollouts: Iterable[tuple[Any, ...]], what: str, say: Callable[[str], None]) -> Iterator[tuple[Any, ...]]:
    """Yield (name, ..., result) as they are rolled out; say for each how long it took."""
    began, note = time.monotonic(), ", compiling included"
    for *names, result in rollouts:
        say(f"{' against '.join(names)}: {what} in {time.monotonic() - began:.1f} s{note}")
        yield *names, result
        began, note = time.monotonic(), ""


def keys_of_step(keys: Key, t: Array) -> Key:
    """Return the keys key[B] of the policy in step t of episodes with these keys."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, t + jnp.uint32(1 << 20))


def held_out_key(seed: int, stream: str) -> Key:
    """Return the root key of held-out episodes: `stream` "selection" (best checkpoint) or "evaluation" (reported)."""
    return jax.random.fold_in(jax.random.key(seed), {"selection": 0x5E1EC7, "evaluation": 0xE7A1}[stream])
