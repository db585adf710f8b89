"""Shared parts of the adapters for users of other libraries: optional packages, spaces, copies stepped from Python."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Box, Discrete, Environment, EnvSpec, TimeStep, check_bounds, short_repr
from envs_jax.batch import batched
from envs_jax.forks import check_process

LARGEST_SEED = 2**32 - 1


def optional(module: str) -> Any:
    """Return a module, or None where its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def require(package: str) -> None:
    """Raise ValueError unless a package is installed; the extra that installs it has its name."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"{package} is not installed ({error}): install the extra '{package}', pip install -e '.[{package}]'"
        ) from None


def checked_spec(env: Any) -> EnvSpec:
    """Return the spec of an environment.

    Raises ValueError where observations are not one array for each agent, or agents may be absent.
    """
    if not isinstance(env, Environment):
        raise ValueError(f"env must be an environment, such as envs_jax.make('reach'), not {short_repr(env)}")
    spec = env.spec
    if isinstance(spec.observation, Discrete):
        raise ValueError(
            f"an observation of '{spec.name}' is {spec.observation}, but only actions may be Discrete: return the "
            f"number one-hot, Box(({spec.observation.n},), low=0, high=1)"
        )
    if not isinstance(spec.observation, Box):
        raise ValueError(
            f"an observation of '{spec.name}' is a {type(spec.observation).__name__} of several arrays: "
            "make an environment whose observation is one array"
        )
    if not isinstance(spec.action, Box | Discrete):
        raise ValueError(
            f"an action of '{spec.name}' is a {type(spec.action).__name__}: describe ONE agent's action by Discrete(n) "
            "or by a Box"
        )
    if spec.absent_agents:
        raise ValueError(
            f"agents of '{spec.name}' may be absent, which this interface cannot express: make an environment whose "
            "team is always complete (coverage: without team_sizes and loss_rate; pettingzoo: with complete_team)"
        )
    return spec


def check_single_agent(spec: EnvSpec, instead: str) -> None:
    """Raise ValueError for a team; `instead` says what to do."""
    if spec.num_agents > 1:
        raise ValueError(f"'{spec.name}' has {spec.num_agents} agents, this adapter steps one: {instead}")


def numpy_dtype(space: Box) -> np.dtype:
    """Return the dtype of a box, float32 for one that NumPy does not have (bfloat16)."""
    dtype = np.dtype(space.dtype)
    return np.dtype(np.float32) if dtype.kind == "V" else dtype


def gymnasium_space(space: Any) -> Any:
    """Return the `gymnasium.spaces` space of a Box or Discrete."""
    spaces = importlib.import_module("gymnasium.spaces")
    if isinstance(space, Discrete):
        return spaces.Discrete(space.n)
    dtype = numpy_dtype(space)
    low, high = (np.array(bound, dtype) if isinstance(bound, tuple) else bound for bound in (space.low, space.high))
    return spaces.Box(low, high, space.shape, dtype)


def checked_actions(space: Discrete | Box, value: Any, leading: tuple[int, ...]) -> np.ndarray:
    """Return actions as an array [*leading, ...] of the environment's dtype.

    Raises ValueError: wrong shape or type, or integers outside the space.
    """
    action = np.asarray(value)
    shape = (*leading, *space.shape)
    discrete = isinstance(space, Discrete)
    if action.shape != shape or action.dtype.kind not in ("iu" if discrete else "iuf"):
        numbers = "integers" if discrete else "numbers"
        raise ValueError(f"actions must be {numbers} of shape {shape}, not {action.dtype} of shape {action.shape}")
    if isinstance(space, Discrete) and (action.min() < 0 or action.max() >= space.n):
        raise ValueError(f"actions must lie between 0 and {space.n - 1}, not {short_repr(action.tolist())}")
    return action.astype(np.dtype(space.dtype))


def rows(values: Array) -> np.ndarray:
    """Return values [B, A, ...] as a new NumPy array [B * A, ...], agents of one copy side by side."""
    return np.array(values).reshape(-1, *values.shape[2:])


class Copies:
    """Copies of an environment stepped from Python, with next-step auto-reset as in `envs_jax.batch`.

    Copy i starts from fold_in(key(seed), i), whatever the number of copies. The functions of equal environments are
    compiled once. Time steps have leaves [B, ...].
    """

    def __init__(self, env: Environment, count: int, seed: int) -> None:
        check_process(
            "environments",
            "gymnasium.vector.AsyncVectorEnv(..., context='spawn'), or gymnasium.make_vec(..., "
            "vector_kwargs={'context': 'spawn'})), or step all environments in one process with "
            "envs_jax.adapters.gymnasium.GymnasiumVectorEnv",
        )
        self._reset, self._step = _programs(env)
        self._number = count
        self._seed(seed)

    def _seed(self, seed: int) -> None:
        check_bounds("seed", seed, (0, LARGEST_SEED))
        root = jax.random.key(np.uint32(seed))
        self._keys = jax.vmap(jax.random.fold_in, (None, 0))(root, jnp.arange(self._number, dtype=jnp.uint32))
        self._episode: Any = np.zeros(self._number, np.uint32)
        self._state: Any = None

    def reset(self, seed: int | None = None) -> TimeStep:
        """Start the first episode of a seed, or the next one of every copy. Raises ValueError for an invalid seed."""
        if seed is not None:
            self._seed(seed)
        elif self._state is not None:
            self._episode = self._state.episode + jnp.uint32(1)
        self._state, self.timestep = self._reset(self._keys, self._episode)
        return self.timestep

    def step(self, action: np.ndarray) -> TimeStep:
        """Step every copy with actions [B, A, ...]; the call after the end of a copy's episode resets that copy."""
        self._state, self.timestep = self._step(self._state, self.timestep, action)
        return self.timestep


def _programs(env: Environment) -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        hash(env)
    except TypeError:  # a setting such as a list: compiled for this object only
        return _compile.__wrapped__(env)
    return _compile(env)


@functools.lru_cache(maxsize=32)
def _compile(env: Environment) -> tuple[Callable[..., Any], Callable[..., Any]]:
    batch = batched(env)
    dtype = numpy_dtype(env.spec.observation)

    def cast_observation(result: tuple[Any, TimeStep]) -> tuple[Any, TimeStep]:
        state, timestep = result
        return state, dataclasses.replace(timestep, observation=timestep.observation.astype(dtype))

    return (
        jax.jit(lambda keys, episode: cast_observation(batch.reset(keys, episode=episode))),
        jax.jit(lambda state, previous, action: cast_observation(batch.step(state, previous, action))),
    )
