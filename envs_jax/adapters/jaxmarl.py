"""Environments of JaxMARL (github.com/FLAIROx/JaxMARL): `--env jaxmarl:MPE_simple_spread_v3`. Extra: jaxmarl.

Its agents are the agent axis in the order of `env.agents`. `step_env` is played, without the reset of `step`. Its
`done` is true at real ends and at the time limit: a twin without a limit says which ends are real, and `horizon` steps
truncate.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.adapters.adapter import DEFAULT_HORIZON, Adapter, PackageStep
from envs_jax.adapters.common import ActionMap, UnfitError, describe_team, package, read_largest_byte
from envs_jax.base import Array, Box, Discrete, closest, setting, short_repr

_NEVER = 10**9  # steps
# Classes that compare their steps with `max_steps` before they count the present one: episodes last one step more.
_EXTRA_STEP = {"SimpleMPE", "SMAX"}
_MASKS = ("get_avail_actions", "get_legal_moves")


@dataclasses.dataclass(frozen=True)
class JaxMarl(Adapter):
    """An environment of JaxMARL."""

    map: str = setting(
        "", "play this scenario of SMAX, such as 3m, or layout of Overcooked; empty = the package's default"
    )

    library = "jaxmarl"

    @classmethod
    def names(cls) -> Sequence[str]:
        return tuple(package("jaxmarl", cls.library).registered_envs)

    @classmethod
    def limit(cls) -> int:
        env = package("jaxmarl", cls.library).make(cls.name)
        return int(env.max_steps) + _extra_steps(env) if hasattr(env, "max_steps") else DEFAULT_HORIZON

    def package_env(self) -> tuple[Any, Any]:
        """Return JaxMARL's environment, and its twin without a time limit."""
        make = package("jaxmarl", self.library).make
        options = self._map_options()
        env = make(self.name, **options)
        endless = make(self.name, **options)
        if hasattr(env, "auto_reset"):
            raise UnfitError("resets itself inside, which hides the last observation: use an environment of brax")
        if hasattr(env, "num_inner_steps"):
            raise UnfitError("counts its time limit as an end and resets inside a step: choose another environment")
        for one, limit in ((env, self.horizon - _extra_steps(env)), (endless, _NEVER)):
            for part in _parts(one):
                if "max_steps" in vars(part):
                    part.max_steps = limit
        return env, endless

    def _map_options(self) -> dict[str, Any]:
        """Return the arguments of the package that choose the map. Raises UnfitError: no maps, or no such map."""
        if not self.map:
            return {}
        if "SMAX" in self.name:
            option = "scenario"
            module = "smax.smax_env"
            table = "MAP_NAME_TO_SCENARIO"
        elif self.name in ("overcooked", "overcooked_v2"):
            option = "layout"
            module = self.name
            table = f"{self.name}_layouts"
        else:
            raise UnfitError("has no maps: leave out --map")
        maps = getattr(package(f"jaxmarl.environments.{module}", self.library), table)
        if self.map not in maps:
            raise UnfitError(f"has no map {short_repr(self.map)}: {closest(self.map, tuple(maps))}")
        return {option: maps[self.map]}

    def agent_action(self) -> tuple[Discrete | Box, ActionMap]:
        return describe_team(list(self.agent_spaces().values()))

    def agent_spaces(self) -> Mapping[str, Any]:
        env, _ = self.env
        return {agent: env.action_space(agent) for agent in env.agents}

    def largest_byte(self, agent: int, name: str) -> Any:
        env, _ = self.env
        space = env.observation_space(env.agents[agent]) if hasattr(env, "observation_space") else None
        return read_largest_byte(space, name)

    def package_reset(self, key: Array) -> tuple[Any, PackageStep]:
        env, _ = self.env
        observations, inner = env.reset(key)
        return inner, self._to_package_step(inner, observations)

    def package_step(self, inner: Any, action: Any, key: Array) -> tuple[Any, PackageStep]:
        env, endless = self.env
        actions = dict(zip(env.agents, action, strict=True))
        observations, after, rewards, _, _ = env.step_env(key, inner, actions)
        *_, done, _ = endless.step_env(key, inner, actions)  # equal parts of both are compiled once
        reward = jnp.stack([jnp.asarray(rewards[agent]).astype(jnp.float32) for agent in env.agents])
        return after, self._to_package_step(after, observations)._replace(reward=reward, terminated=done["__all__"])

    def _to_package_step(self, inner: Any, observations: Any) -> PackageStep:
        env, _ = self.env
        if not isinstance(observations, Mapping) or any(agent not in observations for agent in env.agents):
            raise UnfitError("gives no observation for each agent by name: choose another environment")
        state = env.get_world_state(inner) if hasattr(env, "get_world_state") else None
        output = PackageStep([observations[agent] for agent in env.agents])
        return output._replace(action_mask=self._mask(inner), global_state=None if state is None else _flat(state))

    def _mask(self, inner: Any) -> Any:
        """Return which actions are open, see `PackageStep.action_mask`; None where the environment does not say."""
        env, _ = self.env
        if not isinstance(self.agent_action()[0], Discrete):
            return None
        for name in _MASKS:
            if not hasattr(env, name):
                continue
            try:
                masks = getattr(env, name)(inner)
            except NotImplementedError:  # raised by the base class
                continue
            rows = [jnp.asarray(masks[agent]) for agent in env.agents]
            return jnp.stack(rows) if len({row.shape for row in rows}) == 1 else rows
        return None


def _parts(env: Any) -> tuple[Any, Any]:
    """Return an environment, and the one inside it: scripted opponents wrap SMAX."""
    return env, getattr(env, "_env", env)


def _extra_steps(env: Any) -> int:
    """Return the steps that an episode lasts longer than `max_steps`, see `_EXTRA_STEP`."""
    return int(any(base.__name__ in _EXTRA_STEP for part in _parts(env) for base in type(part).__mro__))


def _flat(state: Any) -> Array:
    """Return one vector of a pytree of arrays."""
    return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(state)])
