"""Environments for users of Gymnasium (extra `gymnasium`): one copy, or many that are stepped as one JAX program.

`gymnasium.make_vec("envs_jax.adapters.gymnasium:jaxrl/reach-v1", num_envs=8)` makes registered environments by name.

Source of the interface: the public repository Farama-Foundation/Gymnasium, versions 1.1 and later, MIT licence.
"""

from typing import Any, ClassVar

import numpy as np

from envs_jax.adapters import outward
from envs_jax.base import Environment, TimeStep, find, make, registered, short_repr

gymnasium: Any = outward.optional("gymnasium")
_Env: Any = gymnasium.Env if gymnasium else object
_VectorEnv: Any = gymnasium.vector.VectorEnv if gymnasium else object


class GymnasiumEnv(_Env):
    """One copy of an environment with one agent.

    Args:
        env: the environment.
        seed: of the episodes until `reset` gets another one.

    Raises ValueError: Gymnasium is not installed, the environment has several agents or observations of several arrays.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, env: Environment, seed: int = 0) -> None:
        outward.require("gymnasium")
        self._spec = outward.checked_spec(env)
        outward.check_single_agent(self._spec, "use envs_jax.adapters.pettingzoo.PettingZooParallelEnv")
        self.observation_space = outward.gymnasium_space(self._spec.observation)
        self.action_space = outward.gymnasium_space(self._spec.action)
        self._copies = outward.Copies(env, 1, seed)
        self._playing = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start the first episode of a seed, or the next episode; `options` are ignored.

        Returns:
            observation of the space's shape; info: {metric: float}, and "action_mask" int8[n] where there are masks.
        """
        super().reset(seed=seed)
        timestep = self._copies.reset(seed)
        self._playing = True
        return outward.rows(timestep.observation)[0], _info(timestep)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Return observation, reward, terminated, truncated, info; see `reset`.

        Raises:
            ValueError: the action does not fit the space.
            gymnasium.error.ResetNeeded: the episode has ended or none has begun.
        """
        if not self._playing:
            raise gymnasium.error.ResetNeeded("there is no episode to step in: call reset() first")
        timestep = self._copies.step(outward.checked_actions(self._spec.action, action, ())[None, None])
        observation = outward.rows(timestep.observation)[0]
        reward = float(timestep.reward[0, 0])
        terminated, truncated = bool(timestep.terminated[0]), bool(timestep.truncated[0])
        self._playing = not (terminated or truncated)
        return observation, reward, terminated, truncated, _info(timestep)


def _info(timestep: TimeStep) -> dict[str, Any]:
    info: dict[str, Any] = {name: float(value[0]) for name, value in timestep.metrics.items()}
    if timestep.action_mask is not None:
        info["action_mask"] = outward.rows(timestep.action_mask)[0].astype(np.int8)
    return info


class GymnasiumVectorEnv(_VectorEnv):
    """Copies of an environment, stepped by one compiled program; NumPy arrays in and out, each of them new.

    A step that ends an episode returns its last observation. The next step ignores the action of that row, resets it
    and returns reward 0 (`AutoresetMode.NEXT_STEP`). Row i depends only on the seed and i.

    Args:
        env: the environment.
        num_envs: rows of the arrays, B.
        seed: of the episodes until `reset` gets another one.
        flatten_agents: make a row of every agent of a team, so that there are num_envs / agents copies; agents of one
            copy are side by side and share its end and its metrics.

    Raises ValueError: Gymnasium is not installed, `num_envs` does not fit, the environment is a team and
    `flatten_agents` is not set, or observations have several arrays.
    """

    def __init__(self, env: Environment, num_envs: int, seed: int = 0, flatten_agents: bool = False) -> None:
        outward.require("gymnasium")
        spec = self._spec = outward.checked_spec(env)
        if not flatten_agents:
            instead = "pass flatten_agents=True, or use envs_jax.adapters.pettingzoo.PettingZooParallelEnv"
            outward.check_single_agent(spec, instead)
        agents = spec.num_agents
        batch_space = gymnasium.vector.utils.batch_space
        if not isinstance(num_envs, int | np.integer) or num_envs < 1 or num_envs % agents:
            fitting = "at least 1" if agents == 1 else f"a multiple of {agents}, the agents of '{spec.name}'"
            raise ValueError(f"num_envs must be a whole number, {fitting}, not {short_repr(num_envs)}")
        self.num_envs = int(num_envs)
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP, "render_modes": []}
        self.single_observation_space = outward.gymnasium_space(spec.observation)
        self.single_action_space = outward.gymnasium_space(spec.action)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._copies: outward.Copies | None = outward.Copies(env, self.num_envs // agents, seed)
        self._playing = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start the first episode of a seed in every row, or the next episode; `options` are ignored.

        Returns:
            observations [B, ...]; infos: {metric: float32[B]}, "action_mask" int8[B, n] where there are masks, and
            for each of these "_name" bool[B], true everywhere.
        """
        super().reset(seed=seed)
        timestep = self._open().reset(seed)
        self._playing = True
        return outward.rows(timestep.observation), self._infos(timestep)

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every row with actions [B, ...].

        Returns:
            observations [B, ...], rewards float64[B], terminated bool[B], truncated bool[B], infos; see `reset`.

        Raises:
            ValueError: the actions do not fit the space.
            gymnasium.error.ResetNeeded: no episode has begun.
        """
        copies = self._open()
        if not self._playing:
            raise gymnasium.error.ResetNeeded("there is no episode to step in: call reset() first")
        action = outward.checked_actions(self._spec.action, actions, (self.num_envs,))
        timestep = copies.step(action.reshape(-1, self._spec.num_agents, *self._spec.action.shape))
        reward = outward.rows(timestep.reward).astype(np.float64)  # as Gymnasium's own vector environments return
        ends = self._per_row(timestep.terminated), self._per_row(timestep.truncated)
        return outward.rows(timestep.observation), reward, *ends, self._infos(timestep)

    def close_extras(self, **kwargs: Any) -> None:
        """Let go of the arrays."""
        self._copies = None

    def _open(self) -> outward.Copies:
        if self._copies is None:
            raise gymnasium.error.ClosedEnvironmentError("this environment has been closed: make another one")
        return self._copies

    def _per_row(self, values: Any) -> np.ndarray:
        return np.repeat(np.asarray(values), self._spec.num_agents)

    def _infos(self, timestep: TimeStep) -> dict[str, Any]:
        infos = {name: self._per_row(value) for name, value in timestep.metrics.items()}
        if timestep.action_mask is not None:
            infos["action_mask"] = outward.rows(timestep.action_mask).astype(np.int8)
        return infos | {f"_{name}": np.ones(self.num_envs, bool) for name in infos}


def make_env(name: str, seed: int = 0, **settings: Any) -> GymnasiumEnv:
    """Make one copy by the name and settings of `envs_jax.make`, for `gymnasium.make`."""
    return GymnasiumEnv(make(name, **settings), seed)


def make_vector_env(name: str, num_envs: int = 1, seed: int = 0, **settings: Any) -> GymnasiumVectorEnv:
    """Make copies by the name and settings of `envs_jax.make`, for `gymnasium.make_vec`."""
    flatten_agents = settings.pop("flatten_agents", False)
    return GymnasiumVectorEnv(make(name, **settings), num_envs, seed, flatten_agents)


for _name in registered() if gymnasium else ():
    gymnasium.register(
        f"jaxrl/{_name}-v{find(_name).version}",
        entry_point=f"{__name__}:make_env",
        vector_entry_point=f"{__name__}:make_vector_env",
        kwargs={"name": _name},
    )
