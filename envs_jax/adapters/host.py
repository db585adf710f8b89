"""Environments that run on the host: one callback from the compiled program steps all copies at once.

A callback (`jax.experimental.io_callback`) cannot be undone, so the program counts the calls in its state: each call
needs the number that the one before returned, which orders them, and a state that is stepped a second time is noticed.

Errors on the host are not raised in the callback, where JAX would print its traceback: they become the `failure` of the
batch, and from then on rewards are NaN and all episodes over.
"""

import dataclasses
import functools
import importlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from envs_jax.adapters.adapter import Adapter, PackageStep, to_metric
from envs_jax.adapters.common import (
    ActionMap,
    AdapterError,
    describe_error,
    describe_team,
    join_mask,
    quiet,
)
from envs_jax.adapters.copies import COMBINE, Copy, CopyArrays, InfoKey, Layout
from envs_jax.adapters.parts import MASK, Fault, Group, Spaces, choose_mask, describe_parts
from envs_jax.base import Array, Box, Discrete, Reduction, TimeStep, closest, pytree, setting, short_repr
from envs_jax.batch import BatchedEnvironment, BatchState

NO_SEED = -1
_CLOSE_SECONDS = 0.5  # that closing waits for a step


class HostStep(NamedTuple):
    """Arrays of one call for all copies."""

    calls: Any  # int32[], number of this call
    parts: list[dict[str, Any]]  # {name: [B, agents of the group, ...]} of the observations, for each group
    reward: Any  # float32[B, A]
    # terminated, truncated: bool[B]
    terminated: Any
    truncated: Any
    # present, cut: bool[B, A], see `TimeStep`; () where all agents are always present
    present: Any = ()
    cut: Any = ()
    metrics: Any = ()  # float32[B, K] of `HostAdapter.metric_keys`; () where there are none


@pytree
class HostState:
    """State of an environment on the host: int32[], the number of calls that led to it, equal in all copies."""

    calls: Array


class HostVector:
    """The copies of an environment on the host, and their last arrays; copies are made when all are started."""

    def __init__(self, env: "HostAdapter") -> None:
        self.env = env
        self.failure: str | None = None
        self.seconds, self.steps = 0.0, 0  # spent on steps of copies, and their number
        self._calls, self._lock = 0, threading.Lock()
        self._allocate(0)

    def _allocate(self, size: int) -> None:
        self.arrays = CopyArrays(self.env.layout, size)
        self._size, self._started = size, False
        self._copies: list[Copy] = []

    def advance(self, calls: Any, seeds: Any, action: Any) -> HostStep:
        """Restart copies that have a seed, and step the others; a copy whose episode has ended keeps its last arrays.

        Args:
            calls: int32[], of the state that is stepped; ignored where all copies are restarted.
            seeds: int32[B], of the episodes that begin, NO_SEED in the other copies.
            action: [B, A, ...] of the package, or a list of [B, ...], one for each agent.
        """
        began = time.perf_counter()
        seeds, action = np.asarray(seeds), jax.tree.map(np.asarray, action)
        with self._lock:
            if len(seeds) != self._size:
                self._allocate(len(seeds))
            if self.failure is None:
                self._try_to_advance(int(calls), seeds, action)
            arrays = self.arrays
            if self.failure is not None:
                arrays.reward[:], arrays.terminated[:], arrays.truncated[:] = np.nan, True, False
            self._calls = (self._calls + 1) % 2**31
            step = HostStep(
                calls=np.int32(self._calls),
                parts=arrays.encode(),
                reward=arrays.reward.copy(),
                terminated=arrays.terminated.copy(),
                truncated=arrays.truncated.copy(),
                present=arrays.present.copy() if arrays.agents_leave else (),
                cut=arrays.cut.copy() if arrays.agents_leave else (),
                metrics=arrays.metrics.astype(np.float32) if self.env.metric_keys else (),
            )
            self.seconds += time.perf_counter() - began
            return step

    def _try_to_advance(self, calls: int, seeds: np.ndarray, action: Any) -> None:
        restart = seeds != NO_SEED
        name, whole = self.env.full_name, bool(restart.all())
        if not whole and (calls != self._calls or not self._started):
            self.failure = (
                f"'{name}' runs on the host, where a state can be stepped only once: step the state that the last call "
                "returned"
            )
            return
        moving = ~restart & ~self.arrays.terminated & ~self.arrays.truncated
        try:
            if whole:
                self.start(seeds)
            else:
                self.move(restart, moving, seeds, action)
            self.arrays.check(restart | moving)
            self.arrays.check_finite(restart | (moving & _find_finite(action, len(seeds))))
        except KeyboardInterrupt:
            raise
        except Fault as fault:
            if fault.copy is not None:
                self.arrays.moved = fault.copy, self.arrays.lengths[fault.copy]
            self.failure = f"'{name}' failed on the host{self._where()} ({fault.what}): {fault.fix}"
        except BaseException as error:  # SystemExit too, which would end the program without a word
            print(f"in the environment:\n{traceback.format_exc()}", end="", file=sys.stderr, flush=True)
            what = f"failed on the host{self._where()} ({describe_error(error)})"
            self.failure = f"'{name}' {what}: correct it and start again"
        self._started = True
        self.steps += int(moving.sum())

    def _where(self) -> str:
        if self.arrays.moved is None:
            return ""
        copy, step = self.arrays.moved
        return f" in step {step} of environment {copy}" if step else f" in a reset of environment {copy}"

    def start(self, seeds: np.ndarray) -> None:
        if not self._copies:
            maker = self.env.maker
            self._copies = [maker() for _ in seeds]
        self.move(np.ones(len(seeds), np.bool_), np.zeros(len(seeds), np.bool_), seeds, np.zeros(0))

    def move(self, restart: np.ndarray, moving: np.ndarray, seeds: np.ndarray, action: Any) -> None:
        """Restart copies, and step those that are `moving`."""
        self.arrays.move(self._copies, restart, moving, seeds, action)

    def close(self) -> None:
        """End processes that step copies; the next start makes new ones."""


def _find_finite(action: Any, copies: int) -> np.ndarray:
    """Return bool[B], whether the actions of each copy are finite; those of a policy that diverged are not."""
    finite = np.ones(copies, np.bool_)
    for array in jax.tree.leaves(action):
        finite &= np.isfinite(array).reshape(copies, -1).all(-1)
    return finite


class WorkerVector(HostVector):
    """Copies that are shared out among processes; see `workers`."""

    workers: Any = None

    def _allocate(self, size: int) -> None:
        self._end()
        super()._allocate(size)

    def start(self, seeds: np.ndarray) -> None:
        adapter: Any = self.env
        count = min(adapter.host_workers, len(seeds))
        if self.workers is None and count > 1:
            began = time.perf_counter()
            workers = importlib.import_module("envs_jax.adapters.workers")  # Gymnasium, an extra
            self.workers = workers.Workers(self.env.maker, self.env.layout, self.arrays, count)
            self.seconds -= time.perf_counter() - began  # which are no steps
        if self.workers is None:
            super().start(seeds)
        else:
            every = np.ones(len(seeds), np.bool_)
            self.move(every, ~every, seeds, np.zeros(len(seeds)))

    def move(self, restart: np.ndarray, moving: np.ndarray, seeds: np.ndarray, action: Any) -> None:
        if self.workers is None:
            super().move(restart, moving, seeds, action)
            return
        try:
            self.workers.move(restart, moving, seeds, action)
        except BaseException:
            self._end()  # this batch has failed for good
            raise

    def close(self) -> None:
        if self._lock.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._end()
            finally:
                self._lock.release()
        elif (workers := self.workers) is not None:  # a step lasts
            workers.kill()

    def _end(self) -> None:
        if self.workers is not None:
            self.workers.close()
            self.workers, self._started = None, False


class AgentSpaces(NamedTuple):
    """Spaces of one agent."""

    observation: Any
    action: Any
    mask: tuple[int, ...] | None = None  # shape of the "action_mask" in its `info`, None where it has none


@dataclasses.dataclass(frozen=True)
class HostAdapter(Adapter):
    """Base class of environments on the host. A subclass defines what raises NotImplementedError here, and `names`."""

    arguments: str = setting("", 'arguments of the environment as JSON, such as {"continuous": true}')
    info_keys: str = setting(
        "",
        "report these numbers of info as metrics, such as is_success,x_position:max; without :max, their last value in "
        "an episode",
    )

    def package_spaces(self) -> dict[Any, AgentSpaces]:
        """Return the spaces of each agent by its name."""
        raise NotImplementedError

    @property
    def maker(self) -> Callable[[], Copy]:
        """A function that makes a copy, here or, pickled, in another process."""
        raise NotImplementedError

    @property
    def layout(self) -> Layout:
        return Layout(self.spaces, self.agents_leave, self.horizon, self.metric_keys)

    def make_vector(self) -> HostVector:
        """Return the copies of a batch, none of which is started."""
        return HostVector(self)

    @property
    def spaces(self) -> Spaces:
        spaces: Spaces = self.env
        return spaces

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments by name. Raises AdapterError: no JSON object."""
        try:
            keywords = json.loads(self.arguments or "{}")
        except ValueError:
            keywords = None
        if not isinstance(keywords, dict):
            raise AdapterError(
                f'arguments must be a JSON object, such as {{"continuous": true}}, not {short_repr(self.arguments)}'
            )
        return keywords

    @property
    def agents_leave(self) -> bool:
        """Whether agents may be absent, see `EnvSpec.absent_agents`."""
        return False

    @functools.cached_property
    def metric_keys(self) -> tuple[InfoKey, ...]:
        """The numbers that `info_keys` names. Raises AdapterError."""
        keys: list[InfoKey] = []
        words = [word.strip() for word in self.info_keys.split(",")]
        if self.info_keys and not any(words):
            raise AdapterError(f"info_keys {short_repr(self.info_keys)} names nothing: leave it out")
        for word in filter(None, words):
            key, colon, how = (one.strip() for one in word.rpartition(":"))
            keys.append(InfoKey(key, how) if colon else InfoKey(how, "last"))
            if not keys[-1].key:
                raise AdapterError(
                    f"info_keys has {short_repr(word)}, which names no number: write its name before the colon"
                )
            if keys[-1].how not in COMBINE:
                raise AdapterError(f"info_keys has {short_repr(word)}: {closest(how, COMBINE)} after the colon")
        names = [to_metric(key.key) for key in keys]
        for name in names:
            if name in ("return", "length", "episodes"):
                raise AdapterError(f"info_keys has {short_repr(name)}, which is always reported: leave it out")
            if names.count(name) > 1:
                raise AdapterError(f"info_keys has {short_repr(name)} twice: leave one of them out")
        return tuple(keys)

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        return {to_metric(key.key): key.reduction for key in self.metric_keys}

    def package_env(self) -> Spaces:
        by_name, members = self.package_spaces(), []
        distinct: list[AgentSpaces] = []
        for spaces in by_name.values():
            if spaces not in distinct:
                distinct.append(spaces)
            members.append(distinct.index(spaces))
        groups = []
        for index, (observation, action, mask) in enumerate(distinct):
            agents = tuple(agent for agent, group in enumerate(members) if group == index)
            parts = choose_mask(tuple(describe_parts(observation)), action, mask)
            groups.append(Group(agents, parts, action))
        return Spaces(tuple(groups), {name: spaces.action for name, spaces in by_name.items()})

    def agent_action(self) -> tuple[Discrete | Box, ActionMap]:
        return describe_team(list(self.spaces.actions.values()))

    def agent_spaces(self) -> Mapping[Any, Any]:
        return self.spaces.actions

    def package_reset(self, key: Array) -> tuple[Any, PackageStep]:
        """Return a step of zeros, of which only the shapes matter."""
        flags = jnp.zeros(self.spaces.agents, jnp.bool_) if self.agents_leave else ()
        parts = [group.make_arrays(jnp.zeros) for group in self.spaces.groups]
        metrics = jnp.zeros(len(self.metric_keys), jnp.float32)
        return (), self._to_package_step(HostStep(0, parts, 0.0, False, False, flags, flags, metrics))

    def largest_byte(self, agent: int, name: str) -> Any:
        group = next(group for group in self.spaces.groups if agent in group.agents)
        return next(part.limit for part in group.parts if part.name == name)

    def _to_package_step(self, step: HostStep) -> PackageStep:
        """Return a step of one copy from its arrays."""
        groups, parts = self.spaces.groups, step.parts
        observations: list[Any] = [None] * self.spaces.agents
        masks: list[Any] = [None] * self.spaces.agents
        has_mask = any(group.mask for group in groups)
        for group, arrays in zip(groups, parts, strict=True):
            seen = {name: array for name, array in arrays.items() if group.mask is None or name != MASK}
            for row, agent in enumerate(group.agents):
                observations[agent] = {name: array[row] for name, array in seen.items()}
                if has_mask:
                    masks[agent] = join_mask(arrays[MASK][row] if group.mask else group.all_open, group.action)
        return PackageStep(
            observations,
            step.reward,
            step.terminated,
            step.truncated,
            action_mask=masks if has_mask else None,
            metrics={key.key: step.metrics[k] for k, key in enumerate(self.metric_keys)},
            present=step.present,
            cut=step.cut,
        )

    def to_timestep(self, step: HostStep, first: Array) -> TimeStep:
        """Return the time step of one copy."""
        timestep = self._timestep(self._to_package_step(step), jnp.int32(0))  # the host counts the steps
        return dataclasses.replace(timestep, first=first)

    def batched(self) -> "HostBatch":
        return HostBatch(self)

    def reset(self, key: Array, context: Any = None) -> tuple[HostState, TimeStep]:
        """Start the one copy that `reset` and `step` of equal environments share."""
        return _first(_single(self).start_episodes(key[None]))

    def step(self, state: HostState, action: Array, context: Any = None) -> tuple[HostState, TimeStep]:
        return _first(_single(self).advance(state.calls, jnp.full(1, NO_SEED, jnp.int32), action[None]))


@dataclasses.dataclass(frozen=True)
class CopyAdapter(HostAdapter):
    """Base class of environments that step one copy at a time, in this process or in several."""

    host_workers: int = setting(
        1,
        "number of processes that step the environments, as many again for evaluations; more of them help where a step "
        "takes long",
        between=(1, 1024),
    )

    def make_vector(self) -> HostVector:
        return HostVector(self) if self.host_workers == 1 else WorkerVector(self)


@functools.cache
def _single(env: HostAdapter) -> "HostBatch":
    return HostBatch(env)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


class HostBatch(BatchedEnvironment):
    """Copies on the host, of this object only: those of training and of evaluation never meet.

    `step` restarts ended copies in the same call in which the others step. Each episode is seeded from its key.
    """

    on_host = True
    __eq__, __hash__ = object.__eq__, object.__hash__

    @functools.cached_property
    def vector(self) -> HostVector:
        adapter: Any = self.env
        vector: HostVector = adapter.make_vector()
        return vector

    @property
    def failure(self) -> str | None:
        return self.vector.failure

    def close(self) -> None:
        self.vector.close()

    def describe_time(self, seconds: float) -> str | None:
        """Return a sentence about the share of `seconds` in which the host stepped; None before the first step."""
        vector = self.vector
        if not vector.steps or seconds <= 0:
            return None
        share, rate = min(vector.seconds / seconds, 1), vector.steps / vector.seconds
        return f"'{self.spec.name}' steps on the host, which took {share:.0%} of the time ({rate:,.0f} steps/s there)"

    def _start(self, keys: Array, episode: Array, context: Any) -> tuple[BatchState, TimeStep]:
        env, timestep = self.start_episodes(jax.vmap(jax.random.fold_in)(keys, episode))
        return BatchState(env=env, key=keys, episode=episode), timestep

    def step_without_reset(self, state: BatchState, action: Array, context: Any) -> tuple[BatchState, TimeStep]:
        env, timestep = self.advance(state.env.calls[0], jnp.full(len(action), NO_SEED, jnp.int32), action)
        return dataclasses.replace(state, env=env), timestep

    def step(
        self, state: BatchState, previous: TimeStep, action: Array, context: Any = None
    ) -> tuple[BatchState, TimeStep]:
        episode = state.episode + previous.done.astype(jnp.uint32)
        seeds = make_seeds(jax.vmap(jax.random.fold_in)(state.key, episode))
        seeds = jnp.where(previous.done, seeds, jnp.int32(NO_SEED))
        env, timestep = self.advance(state.env.calls[0], seeds, action)
        return BatchState(env=env, key=state.key, episode=episode), timestep

    def start_episodes(self, keys: Array) -> tuple[HostState, TimeStep]:
        """Start an episode from key[B] in all copies."""
        action, count = self.spec.action, len(keys)
        actions = jnp.zeros((count, self.spec.num_agents, *action.shape), action.dtype)
        return self.advance(jnp.int32(0), make_seeds(keys), actions)

    def advance(self, calls: Array, seeds: Array, action: Array) -> tuple[HostState, TimeStep]:
        """Call the host; see `HostVector.advance`. Actions are of the spec; results have the axis [B]."""
        env, count = self.env, len(seeds)
        assert isinstance(env, HostAdapter)
        shape, agents = jax.ShapeDtypeStruct, env.spaces.agents
        flags = shape((count, agents), jnp.bool_) if env.agents_leave else ()
        shapes = HostStep(
            calls=shape((), jnp.int32),
            parts=[group.make_arrays(shape, count) for group in env.spaces.groups],
            reward=shape((count, agents), jnp.float32),
            terminated=shape((count,), jnp.bool_),
            truncated=shape((count,), jnp.bool_),
            present=flags,
            cut=flags,
            metrics=shape((count, len(env.metric_keys)), jnp.float32) if env.metric_keys else (),
        )
        axes = HostStep(None, 0, 0, 0, 0, 0, 0, 0)  # type: ignore[arg-type]
        with quiet():
            step = io_callback(self.vector.advance, shapes, calls, seeds, env.to_package_action(action))
            timestep = jax.vmap(env.to_timestep, in_axes=(axes, 0))(step, seeds != NO_SEED)
        return HostState(jnp.broadcast_to(step.calls, (count,))), timestep


def make_seeds(keys: Array) -> Array:
    """Return the seeds int32[B] of the episodes with these keys [B], none of which is negative."""
    bits = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(keys)
    return (bits >> jnp.uint32(1)).astype(jnp.int32)
