"""Environments of Gymnasium and a team of PettingZoo, which run on the host, for tests of their adapters."""

import dataclasses
import time
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

import envs_jax
from envs_jax.base import pytree

try:
    import gymnasium
    from gymnasium import spaces
except ImportError:  # the tests are skipped
    gymnasium = spaces = None  # type: ignore[assignment]

_Env: Any = gymnasium.Env if gymnasium else object
LIMIT = 6  # steps


class Parts(_Env):
    """Observations of all kinds; the action is three integers, the second of which begins at 5.

    `other` adds an entry with a space that cannot be learned from.
    """

    played: ClassVar[list[tuple[int, ...]]] = []

    def __init__(self, other: str = "") -> None:
        entries: dict[str, Any] = {
            "box": spaces.Box(-1, 1, (2, 2), np.float64),
            "two": spaces.Tuple((spaces.Discrete(3, start=-1), spaces.MultiBinary(2))),
            "counts": spaces.MultiDiscrete([2, 3], start=[0, 1]),
        }
        unfit = {"text": spaces.Text(3), "sequence": spaces.Sequence(spaces.Discrete(2))}
        if other in unfit:
            entries["other"] = unfit[other]
        self.observation_space = spaces.Dict(entries)
        self.action_space = spaces.MultiDiscrete([9] * 6 if other == "many" else [2, 3, 4], dtype=np.int64)
        if other != "many":
            self.action_space = spaces.MultiDiscrete([2, 3, 4], start=[0, 5, 0])

    def _observe(self) -> dict[str, Any]:
        t = self.t
        return {
            "box": np.full((2, 2), t / 10),
            "two": (t % 3 - 1, np.array([t % 2, 1], np.int8)),
            "counts": np.array([t % 2, 1 + t % 3]),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.played.append(tuple(int(x) for x in action))
        self.t += 1
        return self._observe(), 1.0, False, False, {}


def flat_parts(t: int) -> list[float]:
    """Return what an agent sees of `Parts` after t steps: parts by name, integers one-hot."""
    counts = [t % 2 == 0, t % 2 == 1, *(t % 3 == k for k in range(3))]
    return [*[t / 10] * 4, *counts, *(t % 3 == k for k in range(3)), t % 2, 1]


class Screen(_Env):
    """Images of bytes, planes first."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (2, 9, 10), np.uint8)
        self.action_space = spaces.Discrete(2)

    def _observe(self) -> np.ndarray:
        return np.arange(180, dtype=np.uint8).reshape(2, 9, 10) + np.uint8(self.t)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._observe(), float(action), False, False, {}


class Fragile(_Env):
    """A walk that raises an error in step `last` of an episode; from step `thin` on it shows only one number."""

    def __init__(self, last: int = 4, size: int = 1, thin: int = 1000) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = spaces.Box(-1, 1, (size,), np.float32)
        self.last, self.thin = last, thin

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.place = 0, self.np_random.normal(size=self.action_space.shape).astype(np.float32)
        return self.place, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == self.last:
            raise RuntimeError("the rope broke\nand more")
        self.place = self.place + action
        observation = self.place[:1] if self.t >= self.thin else self.place
        return observation, float(-np.square(self.place).sum()), False, False, {}


class Slow(_Env):
    """An environment whose step says that it has begun, and takes ten minutes."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Discrete(2), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        print("in a step", flush=True)
        time.sleep(600)
        return 1, 0.0, False, False, {}


class Line(_Env):
    """A walk from 0 to 3 or -3, in which nothing is random; `JaxLine` is the same in JAX."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.t = 0
        return np.array([0, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.place, self.t = self.place + 2 * action - 1, self.t + 1
        observation = np.array([self.place, self.t], np.float32)
        return observation, 1 + self.place / 4, abs(self.place) >= 3, False, {}


@pytree
class LineState:
    """place, t: int32[]."""

    place: Any
    t: Any


@dataclasses.dataclass(frozen=True)
class JaxLine(envs_jax.Environment):
    """`Line` in JAX."""

    @property
    def spec(self) -> envs_jax.EnvSpec:
        return envs_jax.EnvSpec("line", 1, envs_jax.Box((2,)), envs_jax.Discrete(2), LIMIT)

    def reset(self, key: Any, context: Any = None) -> Any:
        return LineState(jnp.int32(0), jnp.int32(0)), envs_jax.restart(jnp.zeros((1, 2), jnp.float32))

    def step(self, state: Any, action: Any, context: Any = None) -> Any:
        place, t = state.place + 2 * action[0] - 1, state.t + 1
        observation = jnp.stack([place, t]).astype(jnp.float32)[None]
        over = jnp.abs(place) >= 3
        reward = 1 + place.astype(jnp.float32) / 4
        return LineState(place, t), envs_jax.transition(reward, observation, over, ~over & (t >= LIMIT))


def register() -> None:
    """Make the environments known to Gymnasium."""
    for name, kind in (("Parts", Parts), ("Screen", Screen), ("Fragile", Fragile), ("Line", Line), ("Slow", Slow)):
        if f"host/{name}-v0" not in gymnasium.registry:
            gymnasium.register(f"host/{name}-v0", entry_point=kind, max_episode_steps=LIMIT)


class Pair:
    """Two agents of PettingZoo, with masks; `left` leaves after two steps, and the episode ends after four.

    `ends`: how it ends for `right`, terminated or truncated.
    """

    possible_agents: ClassVar[list[str]] = ["left", "right"]

    def __init__(self, ends: str = "terminated") -> None:
        self.ends = ends
        mask = spaces.Box(0, 1, (3,), np.int8)
        self._space = spaces.Dict({"observation": spaces.Box(-9, 9, (2,), np.float32), "action_mask": mask})

    def observation_space(self, agent: str) -> Any:
        return self._space

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def close(self) -> None:
        pass

    def _observe(self) -> dict[str, Any]:
        mask = np.array([1, self.t % 2, 1], np.int8)
        return {
            agent: {"observation": np.array([self.t, self.possible_agents.index(agent)]), "action_mask": mask}
            for agent in self.agents
        }

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        return self._observe(), {}

    def step(self, actions: dict[str, int]) -> Any:
        assert set(actions) == set(self.agents)
        self.t += 1
        observations = self._observe()
        rewards = {agent: float(action) for agent, action in actions.items()}
        terminated = {agent: agent == "left" and self.t == 2 for agent in self.agents}
        truncated = dict.fromkeys(self.agents, False)
        if self.t == 4:
            (terminated if self.ends == "terminated" else truncated)["right"] = True
        self.agents = [agent for agent in self.agents if not (terminated[agent] or truncated[agent])]
        return observations, rewards, terminated, truncated, {}


def parallel_env(**keywords: Any) -> Pair:
    """Return the team, as modules of PettingZoo do."""
    return Pair(**keywords)
