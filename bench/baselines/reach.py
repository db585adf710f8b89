"""The entry of reach in `bench.baselines`: one arm at a time, in Meta-World where it is installed, else in NumPy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.baselines import Entry, require
from bench.parity.metaworld import actor
from bench.reference.reach import oracle
from envs_jax.adapters import metaworld
from envs_jax.base import closest
from envs_jax.reach import baselines, goals


class OracleArm:
    """The oracle, with one arm."""

    name = "NumPy"

    def __init__(self, env: dict[str, Any]) -> None:
        published = {"task": "reach", "partially_observable": False}
        require(env, published, "the NumPy baseline is the plain task", "leave that setting out")
        self._rules = {"weld": env["weld"], "reward": env["reward"]}
        self._arms: oracle.Arms

    def reset(self, puck: np.ndarray, goal: np.ndarray) -> None:
        """Start with puck and goal [3]."""
        self._arms = oracle.Arms(puck[None], goal[None], **self._rules)

    def observe(self) -> np.ndarray:
        """[39]"""
        return self._arms.observe()[0]

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        """Step with an action float32[4]; return reward and success."""
        reward, success = self._arms.step(action[None])
        return float(reward[0]), bool(success[0])


class RealArm:
    """Meta-World's reach-v3, whose steps include the observation. Raises ValueError where it is not installed."""

    name = "Meta-World"

    def __init__(self, env: dict[str, Any]) -> None:
        published = {"task": "reach", "weld": "v3", "reward": "v2", "partially_observable": False}
        require(env, published, "Meta-World, the baseline, has the plain task", "leave that setting out")
        self._arm = metaworld.Arm(metaworld.REACH)

    def reset(self, puck: np.ndarray, goal: np.ndarray) -> None:
        """Start with puck and goal [3]."""
        self._arm.reset(np.append(puck, goal))

    def observe(self) -> np.ndarray:
        """[39]"""
        return self._arm.observation

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        """Step with an action float32[4]; return reward and success."""
        _, reward, success = self._arm.step(action)
        return reward, success


class Episodes:
    """One episode after another with one arm.

    Args:
        env: settings of the JAX environment.
        rng: of all draws.

    Attributes:
        arm: the arm.
        goal: float64[3] of this episode.
        success: of the last step.
        notes: remarks on the figures.

    Raises ValueError: a setting that the arm lacks.
    """

    def __init__(self, env: dict[str, Any], rng: np.random.Generator) -> None:
        self.arm: OracleArm | RealArm
        self.notes: Sequence[str] = ()
        try:
            metaworld.packages()
        except ValueError as missing:
            self.arm = OracleArm(env)
            self.notes = (f"baseline is the NumPy oracle: {missing}",)
        else:
            self.arm = RealArm(env)
        self._rng = rng
        self._horizon = env["horizon"]
        self._pool = goals.pool(env["pool_seed"]) if env["goals"] == "pool" else None
        self.reset()

    def reset(self) -> None:
        """Start a new episode; puck and goal are drawn by the settings."""
        pool = goals.pool(int(self._rng.integers(2**31))) if self._pool is None else self._pool
        row = pool[self._rng.integers(len(pool))]
        self.goal = row[3:]
        self.success = False
        self._t = 0
        self.arm.reset(row[:3], self.goal)

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        """Step with an action float32[4]; return the reward, and whether the episode is over."""
        reward, self.success = self.arm.step(action)
        self._t += 1
        return reward, self._t >= self._horizon


class OneArm:
    """One arm under a scripted policy."""

    def __init__(self, env: dict[str, Any], policy: str, seed: int) -> None:
        if policy not in baselines.BASELINES:
            raise ValueError(f"the baseline has no policy '{policy}': {closest(policy, baselines.BASELINES)}")
        self._rng = np.random.default_rng(seed)
        self._policy = policy
        self._episodes = Episodes(env, self._rng)
        self.name = self._episodes.arm.name
        self.notes = self._episodes.notes
        self.reset()

    def reset(self) -> None:
        self._episodes.reset()
        self._act = actor(self._policy, self._episodes.goal, self._rng)
        self._hand = self._episodes.arm.observe()[:3]

    def act(self) -> np.ndarray:
        """float32[4]"""
        return self._act(self._hand)

    def observe(self, action: np.ndarray) -> None:
        """Make the observation; critics have no other input."""
        self._hand = self._episodes.arm.observe()[:3]

    def step(self, action: np.ndarray) -> bool:
        return self._episodes.step(action)[1]

    def measure(self) -> Mapping[str, float]:
        """Return whether the tool centre is at the goal."""
        return {"success": float(self._episodes.success)}


ENTRY = Entry(policy="scripted", baseline=OneArm)
