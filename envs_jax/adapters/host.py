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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from envs_jax.adapters.adapter import Adapter, PackageStep
from envs_jax.adapters.common import (
    ActionMap,
    AdapterError,
    UnfitError,
    describe_error,
    describe_team,
    integer_counts,
    join_mask,
    quiet,
)
from envs_jax.base import SMALLEST_IMAGE, Array, Box, Discrete, TimeStep, pytree, setting, short_repr
from envs_jax.batch import BatchedEnvironment, BatchState

NO_SEED = -1
MASK = "action_mask"  # the part of an observation that says which actions are open, by PettingZoo's convention


class Part(NamedTuple):
    """An array of an observation."""

    path: tuple[Any, ...]  # keys and indices that lead to it
    # shape, dtype: of the array that `encode` returns
    shape: tuple[int, ...]
    dtype: Any
    encode: Callable[[Any], Any]  # a value of the space, or values [B, ...] -> the array, or arrays [B, ...]

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    def read(self, observation: Any) -> Any:
        return self.encode(functools.reduce(lambda value, key: value[key], self.path, observation))


def describe_parts(space: Any, path: tuple[Any, ...] = ()) -> Iterator[Part]:
    """Yield the arrays of a space of Gymnasium: integers become one-hot, images channels-last, other numbers float32.

    Raises UnfitError: a space that is no array, such as Text, Graph and Sequence.
    """
    spaces, kind = importlib.import_module("gymnasium.spaces"), type(space).__name__
    if isinstance(space, spaces.Dict | spaces.Tuple):
        entries = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, entry in entries:
            yield from describe_parts(entry, (*path, key))
    elif isinstance(space, spaces.Box):
        yield _describe_box(path, space.shape, np.dtype(space.dtype))
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        counts = integer_counts(space)
        assert counts is not None
        sizes, start = [int(count) for count in counts.flat], np.asarray(space.start).reshape(-1)
        integers = space.shape

        def encode(value: Any) -> np.ndarray:
            values = np.asarray(value)
            values = values.reshape(*values.shape[: values.ndim - len(integers)], len(sizes))
            columns = [values[..., k, None] - start[k] == np.arange(size) for k, size in enumerate(sizes)]
            return np.concatenate(columns, axis=-1)

        yield Part(path, (sum(sizes),), np.bool_, encode)
    elif isinstance(space, spaces.MultiBinary):
        yield Part(path, tuple(space.shape), np.bool_, np.asarray)
    else:
        part = f" in '{'.'.join(map(str, path))}'" if path else ""
        raise UnfitError(f"has observations of the kind {kind}{part}: only arrays of a fixed shape can be learned from")


def _describe_box(path: tuple[Any, ...], shape: tuple[int, ...], dtype: np.dtype) -> Part:
    """Return the part of a box; bytes stay bytes in images, of which single planes and channels-first are known."""
    if dtype != np.uint8:
        return Part(path, shape, np.bool_ if dtype == np.bool_ else np.float32, np.asarray)
    if len(shape) == 2 and min(shape) >= SMALLEST_IMAGE:
        return Part(path, (*shape, 1), np.uint8, lambda value: np.asarray(value)[..., None])
    if len(shape) == 3 and shape[0] < SMALLEST_IMAGE <= min(shape[1:]):
        return Part(path, (*shape[1:], shape[0]), np.uint8, lambda value: np.moveaxis(value, -3, -1))
    image = len(shape) == 3 and min(shape[:2]) >= SMALLEST_IMAGE
    return Part(path, shape, np.uint8 if image else np.float32, np.asarray)


class Group(NamedTuple):
    """Agents with equal spaces, and what one of them sees and does."""

    agents: tuple[int, ...]
    parts: tuple[Part, ...]
    action: Any  # space of Gymnasium

    def make_arrays(self, make: Callable[..., Any], *lead: int) -> dict[str, Any]:
        """Return `make(shape, dtype)` for each part by name, shapes [*lead, agents of the group, ...]."""
        return {part.name: make((*lead, len(self.agents), *part.shape), part.dtype) for part in self.parts}

    @property
    def mask(self) -> Part | None:
        """Return the part that says which actions are open, if there is one."""
        counts = integer_counts(self.action)
        masks = [part for part in self.parts if part.path == (MASK,)]
        return masks[0] if masks and counts is not None and masks[0].shape == (int(counts.sum()),) else None

    @property
    def all_open(self) -> np.ndarray:
        """Return the mask of an agent that may do everything, for actions that are integers."""
        counts = integer_counts(self.action)
        assert counts is not None
        return np.ones([int(count) for count in counts.flat], np.bool_)


class Spaces(NamedTuple):
    """The groups of a team's agents, and the spaces of actions by the names of the agents."""

    groups: tuple[Group, ...]
    actions: Mapping[Any, Any]

    @property
    def agents(self) -> int:
        return len(self.actions)


class HostStep(NamedTuple):
    """Arrays of one call for all copies."""

    calls: Any  # int32[], number of this call
    parts: list[dict[str, Any]]  # {name: [B, agents of the group, ...]} of the observations, for each group
    reward: Any  # float32[B, A]
    # terminated, truncated: bool[B]
    terminated: Any
    truncated: Any


@pytree
class HostState:
    """State of an environment on the host: int32[], the number of calls that led to it, equal in all copies."""

    calls: Array


class Copy:
    """A copy of an environment on the host. Observations are one for each agent, None where it no longer plays."""

    def reset(self, seed: int) -> Sequence[Any]:
        raise NotImplementedError

    def step(self, action: Any) -> tuple[Sequence[Any], Any, bool, bool]:
        """Step; return observations, rewards [A], terminated, truncated.

        Args:
            action: actions of the package [A, ...], or a list with one for each agent where they differ.
        """
        raise NotImplementedError


class HostVector:
    """The copies of an environment on the host, and their last arrays; copies are made when all are started."""

    def __init__(self, env: "HostAdapter") -> None:
        self.env = env
        self.failure: str | None = None
        self.seconds, self.steps = 0.0, 0  # spent on steps of copies, and their number
        self._calls, self._lock = 0, threading.Lock()
        self._allocate(0)
        self._moved: int | None = None  # the copy that steps now

    def _allocate(self, size: int) -> None:
        spaces = self.env.spaces
        self._size, self._started, self._groups = size, False, spaces.groups
        self._copies: list[Copy] = []
        self._parts = [group.make_arrays(np.zeros, size) for group in spaces.groups]
        self._reward, self._lengths = np.zeros((size, spaces.agents), np.float32), np.zeros(size, np.int64)
        self._terminated, self._truncated = np.zeros(size, np.bool_), np.zeros(size, np.bool_)

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
            if self.failure is not None:
                self._reward[:], self._terminated[:], self._truncated[:] = np.nan, True, False
            self._calls = (self._calls + 1) % 2**31
            parts = jax.tree.map(np.copy, self._parts)
            ends = self._terminated.copy(), self._truncated.copy()
            self.seconds += time.perf_counter() - began
            return HostStep(np.int32(self._calls), parts, self._reward.copy(), *ends)

    def _try_to_advance(self, calls: int, seeds: np.ndarray, action: Any) -> None:
        restart = seeds != NO_SEED
        name, whole = self.env.full_name, bool(restart.all())
        if not whole and (calls != self._calls or not self._started):
            self.failure = (
                f"'{name}' runs on the host, where a state can be stepped only once: step the state that the last call "
                "returned"
            )
            return
        moving = ~restart & ~self._terminated & ~self._truncated
        try:
            if whole:
                self.start(seeds)
            else:
                self.move(restart, moving, seeds, action)
        except Exception as error:
            where = "" if self._moved is None else f" in step {self._lengths[self._moved] + 1} of copy {self._moved}"
            self.failure = f"'{name}' failed on the host{where} ({describe_error(error)}): correct it and start again"
        self._started = True
        self.steps += int(moving.sum())

    def start(self, seeds: np.ndarray) -> None:
        if not self._copies:
            self._copies = [self.env.make_copy() for _ in seeds]
        self.move(np.ones(len(seeds), np.bool_), np.zeros(len(seeds), np.bool_), seeds, np.zeros(0))

    def move(self, restart: np.ndarray, moving: np.ndarray, seeds: np.ndarray, action: Any) -> None:
        """Restart copies, and step those that are `moving`."""
        self._reward[:] = 0
        for i in np.flatnonzero(restart).tolist():
            self._lengths[i], self._terminated[i], self._truncated[i] = 0, False, False
            self._write(i, self._copies[i].reset(int(seeds[i])))
        for i in np.flatnonzero(moving).tolist():
            self._moved = i
            chosen = [one[i] for one in action] if isinstance(action, list) else action[i]
            observations, self._reward[i], terminated, truncated = self._copies[i].step(chosen)
            self._lengths[i] += 1
            self._terminated[i] = terminated
            self._truncated[i] = truncated or self._lengths[i] >= self.env.horizon
            self._write(i, observations)
        self._moved = None

    def _write(self, i: int, observations: Sequence[Any]) -> None:
        for group, arrays in zip(self._groups, self._parts, strict=True):
            for part in group.parts:
                rows = arrays[part.name][i]
                for row, agent in enumerate(group.agents):
                    observation = observations[agent]
                    values = 0 if observation is None else part.read(observation)
                    if observation is not None and np.size(values) != rows[row].size:  # NumPy would repeat one number
                        name = f"'{part.name}' of an observation" if part.name else "an observation"
                        raise ValueError(
                            f"{name} has the shape {np.shape(values)} and not {part.shape}, as in the space"
                        )
                    rows[row] = values


@dataclasses.dataclass(frozen=True)
class HostAdapter(Adapter):
    """Base class of environments on the host. A subclass defines what raises NotImplementedError here, and `names`."""

    arguments: str = setting("", 'arguments of the environment as JSON, such as {"continuous": true}')

    def package_spaces(self) -> dict[Any, tuple[Any, Any]]:
        """Return the spaces of each agent's observations and actions by its name."""
        raise NotImplementedError

    def make_copy(self) -> Copy:
        raise NotImplementedError

    def make_vector(self) -> HostVector:
        """Return the copies of a batch, none of which is started."""
        return HostVector(self)

    @property
    def spaces(self) -> Spaces:
        spaces: Spaces = self.env
        return spaces

    @property
    def keywords(self) -> dict[str, Any]:
        """Return the arguments. Raises AdapterError: no JSON object."""
        try:
            keywords = json.loads(self.arguments or "{}")
        except ValueError:
            keywords = None
        if not isinstance(keywords, dict):
            raise AdapterError(
                f'arguments must be a JSON object, such as {{"continuous": true}}, not {short_repr(self.arguments)}'
            )
        return keywords

    def package_env(self) -> Spaces:
        by_name, members = self.package_spaces(), []
        distinct: list[tuple[Any, Any]] = []
        for spaces in by_name.values():
            if spaces not in distinct:
                distinct.append(spaces)
            members.append(distinct.index(spaces))
        groups = []
        for index, (observation, action) in enumerate(distinct):
            agents = tuple(agent for agent, group in enumerate(members) if group == index)
            groups.append(Group(agents, tuple(describe_parts(observation)), action))
        return Spaces(tuple(groups), {name: action for name, (_, action) in by_name.items()})

    def agent_action(self) -> tuple[Discrete | Box, ActionMap]:
        return describe_team(list(self.spaces.actions.values()))

    def agent_spaces(self) -> Mapping[Any, Any]:
        return self.spaces.actions

    def package_reset(self, key: Array) -> tuple[Any, PackageStep]:
        """Return a step of zeros, of which only the shapes matter."""
        return (), self._to_package_step([group.make_arrays(jnp.zeros) for group in self.spaces.groups])

    def _to_package_step(self, parts: list[dict[str, Array]], *outcome: Any) -> PackageStep:
        """Return a step of one copy from the arrays of its groups, [agents of the group, ...]."""
        groups = self.spaces.groups
        observations: list[Any] = [None] * self.spaces.agents
        masks: list[Any] = [None] * self.spaces.agents
        has_mask = any(group.mask for group in groups)
        for group, arrays in zip(groups, parts, strict=True):
            seen = {name: array for name, array in arrays.items() if group.mask is None or name != MASK}
            for row, agent in enumerate(group.agents):
                observations[agent] = {name: array[row] for name, array in seen.items()}
                if has_mask:
                    masks[agent] = join_mask(arrays[MASK][row] if group.mask else group.all_open, group.action)
        return PackageStep(observations, *outcome)._replace(action_mask=masks if has_mask else None)

    def to_timestep(self, step: HostStep, first: Array) -> TimeStep:
        """Return the time step of one copy."""
        output = self._to_package_step(step.parts, step.reward, step.terminated, step.truncated)
        return dataclasses.replace(self._timestep(output, jnp.int32(0)), first=first)  # the host counts the steps

    def batched(self) -> "HostBatch":
        return HostBatch(self)

    def reset(self, key: Array, context: Any = None) -> tuple[HostState, TimeStep]:
        """Start the one copy that `reset` and `step` of equal environments share."""
        return _first(_single(self).start_episodes(key[None]))

    def step(self, state: HostState, action: Array, context: Any = None) -> tuple[HostState, TimeStep]:
        return _first(_single(self).advance(state.calls, jnp.full(1, NO_SEED, jnp.int32), action[None]))


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
        shape = jax.ShapeDtypeStruct
        shapes = HostStep(
            calls=shape((), jnp.int32),
            parts=[group.make_arrays(shape, count) for group in env.spaces.groups],
            reward=shape((count, env.spaces.agents), jnp.float32),
            terminated=shape((count,), jnp.bool_),
            truncated=shape((count,), jnp.bool_),
        )
        axes = HostStep(None, 0, 0, 0, 0)  # type: ignore[arg-type]
        with quiet():
            step = io_callback(self.vector.advance, shapes, calls, seeds, env.to_package_action(action))
            timestep = jax.vmap(env.to_timestep, in_axes=(axes, 0))(step, seeds != NO_SEED)
        return HostState(jnp.broadcast_to(step.calls, (count,))), timestep


def make_seeds(keys: Array) -> Array:
    """Return the seeds int32[B] of the episodes with these keys [B], none of which is negative."""
    bits = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(keys)
    return (bits >> jnp.uint32(1)).astype(jnp.int32)
