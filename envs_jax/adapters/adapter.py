"""Base class of adapters: environments of other JAX libraries as environments of this one.

`--env library:Name` names one of them. An adapter bypasses the library's own auto-reset, so that the true last
observation of an episode survives, and distinguishes termination from truncation.

Agents of a team may differ: observations are padded with zeros to the largest, and where numbers of actions differ, a
mask closes those that an agent does not have.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.adapters.common import (
    ActionMap,
    Joined,
    call_package,
    count_actions,
    name_type,
    number_types,
    quiet,
    space_key,
    strong,
)
from envs_jax.base import (
    Array,
    Box,
    Discrete,
    Environment,
    EnvSpec,
    Reduction,
    TimeStep,
    check_settings,
    closest,
    make,
    pytree,
    setting,
    short_repr,
    take_exactly,
    transition,
    with_default,
)
from envs_jax.critic_input import with_critic_input

DEFAULT_HORIZON = 1000  # where an environment has no limit


class PackageStep(NamedTuple):
    """Data of a package after a reset or a step."""

    observations: Sequence[Any]  # the package's pytree of each agent
    reward: Any = 0.0  # [A], or one number for all
    # terminated, truncated: bool[]
    terminated: Any = False
    truncated: Any = False
    action_mask: Any = None  # [A, n], or a list of [n of the agent], 0 where an action is closed; or None
    global_state: Any = None  # [F], or None
    metrics: Any = None  # {name: number}
    # present, cut: bool[A], see `TimeStep`; () where all agents are always present
    present: Any = ()
    cut: Any = ()


class Team(NamedTuple):
    """Differences between the agents of an environment."""

    observation: Box  # Box of the largest observation
    # see `EnvSpec.agent_types`; agents of one type have equal observations, actions, and names but for a number
    types: tuple[int, ...]
    action_counts: tuple[int, ...]  # number of actions of each agent, () where it is the same
    # {metric: agents of a type}, {} where observations and actions of all agents are equal
    returns: Mapping[str, list[int]]


@pytree
class State:
    """State of an adapted environment."""

    inner: Any  # the package's own state
    key: Array  # key[], from which each step of the episode draws its own
    t: Array  # int32[], steps made


@dataclasses.dataclass(frozen=True)
class Adapter(Environment):
    """Base class of environments of other libraries. A subclass defines what raises NotImplementedError here.

    Each name has its own class, see `class_of`, so that `env` in a configuration names the environment completely and
    the defaults of its settings are the package's.
    """

    horizon: int = setting(DEFAULT_HORIZON, "cut an episode (truncate it) after this many steps", between=(1, 10**9))
    observe: str = setting(
        "", "show agents only these parts of the observation, names separated by commas; empty = all, as one array"
    )

    library: ClassVar[str] = ""
    name: ClassVar[str] = ""  # in the library
    unseen: ClassVar[tuple[str, ...]] = ()  # parts of an observation that agents never see

    @classmethod
    def names(cls) -> Sequence[str]:
        """Return the names that the package knows."""
        raise NotImplementedError

    @classmethod
    def is_known(cls, name: str) -> bool:
        """Return whether there is an environment of this name."""
        return name in cls.names()

    @classmethod
    def limit(cls) -> int:
        """Return the package's own limit of steps."""
        return DEFAULT_HORIZON

    def package_env(self) -> Any:
        """Return the package's environment, without auto-reset. Called once for equal settings."""
        raise NotImplementedError

    def agent_action(self) -> tuple[Discrete | Box, ActionMap]:
        """Return the actions of one agent, and how they become the package's; see `describe_actions`."""
        raise NotImplementedError

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """How a metric's values become the episode's, by name; "sum" for others."""
        return {}

    def agent_spaces(self) -> Mapping[Any, Any]:
        """Return the package's spaces of actions by the names of the agents; {} where agents have no names."""
        return {}

    def largest_byte(self, agent: int, name: str) -> Any:
        """Return the largest value of an image of bytes, `name` of an agent's observation; see `read_largest_byte`."""
        return 255.0

    def package_reset(self, key: Array) -> tuple[Any, PackageStep]:
        """Start an episode; key uint32[2]."""
        raise NotImplementedError

    def package_step(self, inner: Any, action: Array, key: Array) -> tuple[Any, PackageStep]:
        """Step; actions [A, ...] of the package, or a list where agents' actions differ; key uint32[2]."""
        raise NotImplementedError

    @classmethod
    def class_of(cls, name: str) -> type[Environment]:
        """Return the class of one environment. Raises ValueError: no such name, or the package is missing."""
        adapter: Any = cls
        return _class_of(adapter, name)

    def __post_init__(self) -> None:
        take_exactly(self)
        check_settings(self)
        self.spec  # noqa: B018  refuses what cannot be adapted

    def __reduce__(self) -> Any:  # pickle cannot import a class that was built at run time
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(make, self.full_name, **settings), ()

    @property
    def full_name(self) -> str:
        return f"{self.library}:{self.name}"

    @property
    def env(self) -> Any:
        return _package_env(self)

    @property
    def spec(self) -> EnvSpec:
        return _spec(self)

    def to_package_action(self, action: Array) -> Any:
        """Return actions [..., A, ...] of the spec as the package's, a list of each agent's where they differ."""
        with quiet():
            return _actions(self)[1](action)

    def reset(self, key: Array, context: Any = None) -> tuple[Any, TimeStep]:
        key_reset, key_steps = jax.random.split(key)
        with quiet():
            inner, output = self.package_reset(jax.random.key_data(key_reset))
            state = State(strong(inner), key_steps, jnp.int32(0))
            return state, dataclasses.replace(self._timestep(output, state.t), first=jnp.bool_(True))

    def step(self, state: Any, action: Array, context: Any = None) -> tuple[Any, TimeStep]:
        with quiet():
            key = jax.random.key_data(jax.random.fold_in(state.key, state.t))
            inner, output = self.package_step(state.inner, self.to_package_action(action), key)
            state = State(strong(inner), state.key, state.t + 1)
            return state, self._timestep(output, state.t)

    def make_joined(self, output: PackageStep) -> list[Joined]:
        """Return how each agent's observation becomes one array."""
        return [
            Joined.from_observation(
                self.full_name, one, self.observe, self.unseen, functools.partial(_largest_byte, self, agent)
            )
            for agent, one in enumerate(output.observations)
        ]

    def _timestep(self, output: PackageStep, t: Array) -> TimeStep:
        team = _team(self)
        joined = self.make_joined(output)
        mask = _open_actions(output.action_mask, team.action_counts)
        terminated = jnp.asarray(output.terminated).astype(bool)
        truncated = jnp.asarray(output.truncated).astype(bool) | (t >= self.horizon)
        state = () if output.global_state is None else jnp.asarray(output.global_state).astype(jnp.float32)
        arrays = [join(observation) for join, observation in zip(joined, output.observations, strict=True)]
        if len(set(joined)) > 1:
            arrays = [jnp.pad(x, (0, team.observation.shape[0] - len(x))) for x in arrays]
        metrics = {to_metric(name): value for name, value in (output.metrics or {}).items()}
        for name, agents in team.returns.items():
            metrics[name] = jnp.mean(jnp.broadcast_to(output.reward, (len(arrays),))[np.array(agents)])
        return transition(
            output.reward,
            jnp.stack(arrays),
            terminated,
            truncated & ~terminated,
            action_mask=mask,
            metrics=metrics,
            global_state=state,
            present=output.present,
            cut=output.cut,
        )


def _open_actions(mask: Any, counts: tuple[int, ...]) -> Array | None:
    """Return the mask bool[A, n] of a package's mask; see `PackageStep.action_mask` and `Team.action_counts`.

    After its end an episode may have no open action: then all that an agent has are open.
    """
    if not counts:
        if mask is None:
            return None
        mask = (jnp.stack(mask) if isinstance(mask, list) else jnp.asarray(mask)) > 0
        return mask | ~jnp.any(mask, axis=-1, keepdims=True)
    exists = np.arange(max(counts)) < np.array(counts)[:, None]
    if mask is None:
        return jnp.asarray(exists)
    rows = [jnp.asarray(row)[:count] > 0 for row, count in zip(mask, counts, strict=True)]
    padded = jnp.stack([jnp.pad(row, (0, max(counts) - len(row))) for row in rows])
    return jnp.where(jnp.any(padded, axis=-1, keepdims=True), padded, exists)


def to_metric(name: str) -> str:
    """Return the name of a metric for a package's name."""
    return name.replace("/", "_")  # a slash separates a metric from a task's name


@functools.cache
def _class_of(cls: Any, name: str) -> type[Environment]:
    if not cls.is_known(name):
        raise ValueError(f"unknown environment {short_repr(f'{cls.library}:{name}')}: {closest(name, cls.names())}")
    named = type(name, (cls,), {"name": name})
    limit = call_package(f"{cls.library}:{name}", named.limit)  # type: ignore[attr-defined]
    horizon = "horizon", int, with_default(cls, "horizon", limit)
    result: Any = dataclasses.make_dataclass(name, [horizon], bases=(named,), frozen=True)
    result.__module__, result.__qualname__, result.__doc__ = cls.library, name, cls.__doc__  # what `find` takes
    return result


@functools.cache
def _package_env(env: Adapter) -> Any:
    with jax.ensure_compile_time_eval():  # also where a program is being traced, whose values must not be kept
        return call_package(env.full_name, env.package_env)


@functools.cache
def _actions(env: Adapter) -> tuple[Discrete | Box, ActionMap]:
    with jax.ensure_compile_time_eval():
        return call_package(env.full_name, env.agent_action)


@functools.cache
def _largest_byte(env: Adapter, agent: int, name: str) -> Any:
    with jax.ensure_compile_time_eval(), quiet():
        return env.largest_byte(agent, name)


@functools.cache
def _first_step(env: Adapter) -> PackageStep:
    """Return the shapes of a package's first step."""
    output: PackageStep = call_package(
        env.full_name, lambda: jax.eval_shape(lambda: env.package_reset(jax.random.key_data(jax.random.key(0)))[1])
    )
    return output


@functools.cache
def _team(env: Adapter) -> Team:
    with jax.ensure_compile_time_eval():
        by_name = call_package(env.full_name, env.agent_spaces)
        keys = [space_key(space) for space in by_name.values()]
    joined = env.make_joined(_first_step(env))
    full_names = list(by_name) or list(range(len(joined)))
    names = [name_type(agent) for agent in full_names]
    spaces = list(zip(keys or names, joined, strict=True))
    types = number_types(list(zip(names, spaces, strict=True)))
    returns = {}
    if len(set(spaces)) > 1:
        for number in range(max(types) + 1):
            agents = [agent for agent, its_type in enumerate(types) if its_type == number]
            name = names[agents[0]]
            if not name or names.count(name) > len(agents):  # no name of one type
                name = full_names[agents[0]]
            returns[to_metric(f"return_{name}")] = agents
    counts = count_actions(list(by_name.values()))
    return Team(Joined.largest_box(env.full_name, joined), types, counts, returns)


@functools.cache
def _spec(env: Adapter) -> EnvSpec:
    action, _ = _actions(env)
    output = _first_step(env)
    team = _team(env)
    state = output.global_state
    names = list(map(to_metric, output.metrics or {}))
    for name in names:
        if name in team.returns:
            raise ValueError(
                f"'{env.full_name}' already has a metric '{name}' for its agents: leave that name out of info_keys"
            )
    spec = EnvSpec(
        name=env.full_name,
        num_agents=len(output.observations),
        observation=team.observation,
        action=action,
        horizon=env.horizon,
        metrics={name: env.reductions.get(name, "sum") for name in (*names, *team.returns)},
        labels={name: name.replace("return_", "return of ", 1) for name in team.returns},
        agent_types=team.types,
        absent_agents=bool(jax.tree.leaves(output.present)),
        global_state=None if state is None else Box(state.shape),
    )
    return with_critic_input(spec)
