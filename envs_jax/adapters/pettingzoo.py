"""Environments for users of PettingZoo (extra `pettingzoo`): agents that act at once, in dictionaries by name.

Source of the interface: the public repository Farama-Foundation/PettingZoo, version 1.25 and later, MIT licence.
"""

import importlib
from typing import Any

import jax
import numpy as np

from envs_jax.adapters import outward
from envs_jax.base import Box, Environment, TimeStep

pettingzoo: Any = outward.optional("pettingzoo")
_ParallelEnv: Any = pettingzoo.ParallelEnv if pettingzoo else object

ByAgent = dict[str, Any]


class PettingZooParallelEnv(_ParallelEnv):
    """One copy of an environment whose agents are named agent_0, agent_1, ...; an episode ends for all at once.

    `infos` hold the metrics, equal for all agents, and where there are masks "action_mask", int8[n].

    Args:
        env: the environment.
        seed: of the episodes until `reset` gets another one.
        mask_in_observation: make observations {"observation": ..., "action_mask": int8[n]} where there are masks.

    Raises ValueError: PettingZoo is not installed, or observations have several arrays.
    """

    def __init__(self, env: Environment, seed: int = 0, mask_in_observation: bool = False) -> None:
        outward.require("pettingzoo")
        spec = self._spec = outward.checked_spec(env)
        self.metadata = {"name": spec.name, "render_modes": [], "is_parallelizable": True}
        self.render_mode = None  # SuperSuit and the converters of PettingZoo read it
        self.possible_agents = [f"agent_{i}" for i in range(spec.num_agents)]
        self.agents: list[str] = []
        self._copies = outward.Copies(env, 1, seed)
        masks = jax.eval_shape(env.reset, jax.random.key(0))[1].action_mask is not None
        self._mask_in_observation = mask_in_observation and masks
        self.action_spaces = {agent: outward.gymnasium_space(spec.action) for agent in self.possible_agents}
        self.observation_spaces = {agent: self._space() for agent in self.possible_agents}
        if spec.global_state is not None:
            boxes = jax.tree.leaves(spec.global_state)
            size = sum(int(np.prod(box.shape)) for box in boxes)
            self.state_space = outward.gymnasium_space(boxes[0] if spec.global_state is boxes[0] else Box((size,)))

    def _space(self) -> Any:
        space = outward.gymnasium_space(self._spec.observation)
        if not self._mask_in_observation:
            return space
        spaces = importlib.import_module("gymnasium.spaces")
        mask = spaces.Box(0, 1, (getattr(self._spec.action, "n"),), np.int8)  # noqa: B009
        return spaces.Dict({"observation": space, "action_mask": mask})

    def observation_space(self, agent: str) -> Any:
        """Return the observation space of an agent, always the same object."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        """Return the action space of an agent, always the same object."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[ByAgent, dict[str, dict[str, Any]]]:
        """Start the first episode of a seed, or the next; `options` are ignored. Returns observations, infos."""
        timestep = self._copies.reset(seed)
        self.agents = self.possible_agents[:]
        return self._by_agent(timestep)

    def step(self, actions: ByAgent) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, dict[str, dict[str, Any]]]:
        """Step with an action for every agent; returns observations, rewards, terminations, truncations, infos.

        Raises ValueError: the episode has ended or none has begun, or the actions do not fit agents or space.
        """
        if not self.agents:
            raise ValueError("there is no episode to step in: call reset() first")
        if set(actions) != set(self.agents):
            names = ", ".join(map(str, actions)) or "nobody"
            raise ValueError(f"actions must be given for {', '.join(self.agents)}, not for {names}")
        chosen = [outward.checked_actions(self._spec.action, actions[agent], ()) for agent in self.agents]
        timestep = self._copies.step(np.stack(chosen)[None])
        rewards = dict(zip(self.agents, np.asarray(timestep.reward[0]).tolist(), strict=True))
        terminated, truncated = bool(timestep.terminated[0]), bool(timestep.truncated[0])
        ends = dict.fromkeys(self.agents, terminated), dict.fromkeys(self.agents, truncated)
        observations, infos = self._by_agent(timestep)
        if terminated or truncated:
            self.agents = []
        return observations, rewards, *ends, infos

    def state(self) -> np.ndarray:
        """Return the global state: its array, or where it has several all their numbers, float32[size].

        Raises:
            NotImplementedError: the environment has no global state.
            ValueError: no episode has begun.
        """
        if self._spec.global_state is None:
            raise NotImplementedError(f"'{self._spec.name}' has no global state: join the observations of its agents")
        timestep = getattr(self._copies, "timestep", None)
        if timestep is None:
            raise ValueError("there is no episode whose state could be returned: call reset() first")
        leaves = [np.array(leaf[0]) for leaf in jax.tree.leaves(timestep.global_state)]
        if isinstance(self._spec.global_state, Box):
            return leaves[0]
        return np.concatenate([leaf.ravel().astype(np.float32) for leaf in leaves])

    def _by_agent(self, timestep: TimeStep) -> tuple[ByAgent, dict[str, dict[str, Any]]]:
        metrics = {name: float(value[0]) for name, value in timestep.metrics.items()}
        observations: ByAgent = dict(zip(self.possible_agents, outward.rows(timestep.observation), strict=True))
        infos: dict[str, dict[str, Any]] = {agent: dict(metrics) for agent in self.possible_agents}
        if timestep.action_mask is not None:
            masks = outward.rows(timestep.action_mask).astype(np.int8)
            for agent, mask in zip(self.possible_agents, masks, strict=True):
                infos[agent]["action_mask"] = mask
                if self._mask_in_observation:
                    observations[agent] = {"observation": observations[agent], "action_mask": mask}
        return observations, infos
