"""Actions and observations as an environment's own package has them, for policies that act outside of jaxrl.

Algorithms choose from `EnvSpec.action`. An adapter may have made this of a space of its package: several integers are
one number here, and integers may begin at another number than 0.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.adapters.adapter import Adapter
from envs_jax.adapters.common import Joined, count_actions, quiet
from envs_jax.adapters.host import HostAdapter
from envs_jax.base import Array, Box, Discrete, Environment


@dataclasses.dataclass(frozen=True, eq=False)
class ActionUnits:
    """How the actions of a spec become the environment's own.

    Attributes:
        env: the environment.
        tables: the environment's integers by the number of the action, int32[n, ...], one table for each agent, or one
            for all; () where both are the same.
        counts: how many actions each agent has, () where it is the same number, or a box.
        agents: the environment's names of the agents, () where they have none.
    """

    env: Environment
    tables: tuple[np.ndarray, ...] = ()
    counts: tuple[int, ...] = ()
    agents: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, env: Environment) -> "ActionUnits":
        spec = env.spec
        if not isinstance(env, Adapter):
            return cls(env)
        spaces = env.agent_spaces()
        agents = tuple(map(str, spaces))
        counts = count_actions(list(spaces.values()))
        if not isinstance(spec.action, Discrete):
            return cls(env, agents=agents)
        numbers = np.arange(spec.action.n, dtype=np.int32)
        actions = env.to_package_action(jnp.asarray(np.tile(numbers[:, None], (1, spec.num_agents))))
        by_agent = actions if isinstance(actions, list) else [actions[:, agent] for agent in range(spec.num_agents)]
        tables = [np.asarray(table, np.int32) for table in by_agent]
        tables = [table[:count] for table, count in zip(tables, counts or [len(numbers)] * len(tables), strict=True)]
        if all(np.array_equal(table, numbers[: len(table)]) for table in tables):
            tables = []
        elif all(np.array_equal(table, tables[0]) for table in tables):
            tables = tables[:1]
        return cls(env, tuple(tables), counts, agents)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of an export's actions: "action", or where their shapes differ one for each agent."""
        if len({table.shape[1:] for table in self.tables}) <= 1:
            return ("action",)
        return tuple(f"action.{agent}" for agent in self.agents)

    def convert(self, action: Array) -> list[Array]:
        """Return actions [A, ...] of the spec as the environment's, one array [A, ...], or [...] of each agent."""
        if isinstance(self.env, Adapter) and isinstance(self.env.spec.action, Box):
            return [self.env.to_package_action(action)]
        if not self.tables:
            return [action]
        if len(self.tables) == 1:
            return [jnp.take(self.tables[0], action, axis=0, mode="clip")]
        chosen = [jnp.take(table, action[agent], axis=0, mode="clip") for agent, table in enumerate(self.tables)]
        return [jnp.stack(chosen)] if len(self.names) == 1 else chosen

    def bounds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the lowest and highest action of each of `names`, arrays that broadcast to the action's shape."""
        action = self.env.spec.action
        if isinstance(action, Box) and not isinstance(self.env, Adapter):
            return [action.bounds]
        if isinstance(action, Box):
            corners = [np.broadcast_to(bound, (1, *action.shape)).astype(action.dtype) for bound in action.bounds]
            low, high = (np.asarray(self.convert(jnp.asarray(corner))[0], np.float64)[0] for corner in corners)
            return [(low, high)]
        if not self.tables:
            return [(np.array(0), np.array(self.counts or action.n) - 1)]
        ends = [(table.min(0), table.max(0)) for table in self.tables]
        if len(self.names) > 1 or len(ends) == 1:
            return ends
        low, high = (np.stack(side) for side in zip(*ends, strict=True))
        return [(low, high)]


def describe_bounds(env: Environment) -> dict[str, dict[str, Any]]:
    """Return {name: {"low", "high"}} of observations and actions for JSON, None where there is no bound.

    A bound is one number for all, or lists that broadcast to the shape of an agent's observation, or of the actions.
    """
    units = ActionUnits.from_env(env)
    boxes = env.spec.observation
    leaves = jax.tree_util.tree_leaves_with_path({"observation": boxes}, is_leaf=lambda x: isinstance(x, Box))
    bounds = {jax.tree_util.keystr(path, simple=True, separator="."): box.bounds for path, box in leaves}
    bounds |= dict(zip(units.names, units.bounds(), strict=True))
    return {name: {"low": _plain(low), "high": _plain(high)} for name, (low, high) in bounds.items()}


def _plain(bound: np.ndarray) -> Any:
    """Return a bound for JSON: one number where all are equal, None for an infinite one."""

    def replace_infinite(values: Any) -> Any:
        if isinstance(values, list):
            return list(map(replace_infinite, values))
        return values if math.isfinite(values) else None

    is_one = bound.size > 0 and (bound == bound.flat[0]).all()
    return replace_infinite(bound.flat[0].item() if is_one else bound.tolist())


def describe_environment(env: Environment) -> dict[str, Any]:
    """Return what a caller has to know about the environment of another package, {} for any other one.

    "agents" are its names of the agents in order; "observation_parts" says how their observations are made of its own.
    """
    if not isinstance(env, Adapter):
        return {}
    with quiet():
        step = jax.eval_shape(lambda: env.package_reset(jax.random.key_data(jax.random.key(0)))[1])
        joined = env.make_joined(step)
        ones = [jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), one) for one in step.observations]
        units = [np.asarray(join(one)) for join, one in zip(joined, ones, strict=True)]
    agents = list(ActionUnits.from_env(env).agents)
    spaces = [None] * len(joined)
    if isinstance(env, HostAdapter):
        spaces = [one.observation for one in env.package_spaces().values()]
    kinds: dict[Any, dict[str, Any]] = {}
    for agent, (join, unit, space) in enumerate(zip(joined, units, spaces, strict=True)):
        parts = _describe_parts(join, unit, dict(_leaf_spaces(space)) if space is not None else {})
        kind = kinds.setdefault(json.dumps(parts), {"agents": [], "parts": parts})
        kind["agents"].append(agents[agent] if agents else agent)
    return {"agents": agents, "observation_parts": list(kinds.values())}


def _describe_parts(join: Joined, unit: np.ndarray, spaces: dict[str, Any]) -> list[dict[str, Any]]:
    """Describe the parts of one agent's observation; `unit` is what becomes of an observation of ones."""
    rows = []
    begin = 0
    for name, shape in join.parts:
        size = (shape[2] if shape else 1) if join.image else math.prod(shape)
        value = unit[..., begin].flat[0] if join.image else unit[begin]
        place = {"channels" if join.image else "numbers": [begin, begin + size]}
        space = spaces.get(name)
        row = {"part": name} if name else {}
        row |= {} if space is None else {"space": _describe_space(space)}
        rows.append(row | {"shape": list(shape), "encoding": _describe_encoding(space, shape, 1 / value)} | place)
        begin += size
    return rows


def _describe_encoding(space: Any, shape: tuple[int, ...], divisor: float) -> str:
    """Return how the numbers of a space of Gymnasium, or of a part of another package (None), become an array."""
    if hasattr(space, "n") and not getattr(space, "shape", ()):
        return f"one-hot, the first is {space.start}"
    if hasattr(space, "nvec"):
        return "each integer one-hot, one after the other"
    words = [] if divisor == 1 else [f"divided by {divisor:g}"]
    if space is not None and tuple(space.shape) != shape:
        words.append("channels last")
    return ", ".join(words) or "as it is"


def _describe_space(space: Any) -> str:
    name = type(space).__name__
    return f"Box{list(space.shape)} of {np.dtype(space.dtype).name}" if name == "Box" else str(space)


def _leaf_spaces(space: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the spaces of arrays in a space of Gymnasium, with the names of `Joined.parts`."""
    entries = getattr(space, "spaces", None)
    if entries is None:
        yield ".".join(path), space
        return
    for key, entry in entries.items() if isinstance(entries, Mapping) else enumerate(entries):
        yield from _leaf_spaces(entry, (*path, str(key)))
