"""A team of PettingZoo with two types of agents, made up for tests of its adapter."""

from typing import Any, ClassVar

import numpy as np

try:
    from gymnasium import spaces
except ImportError:  # the tests are skipped
    spaces = None  # type: ignore[assignment]


class Hunt:
    """Hunters see (step, 1) and choose two integers (a, b); the prey sees the step and chooses one, with a mask.

    Rewards: hunters 10 a + b, the prey minus its action. The prey's action 1 is closed in odd steps. It leaves after
    two steps, and the episode is truncated after three.
    """

    possible_agents: ClassVar[list[str]] = ["hunter_0", "prey_0", "hunter_1"]

    def __init__(self, boxes: bool = False, images: bool = False) -> None:
        size = (9, 9, 1) if images else (1,)
        prey = {"observation": spaces.Box(-9, 9, size, np.float32), "action_mask": spaces.Box(0, 1, (3,), np.int8)}
        self._seen = {"hunter": spaces.Box(-9, 9, (2,), np.float32), "prey": spaces.Dict(prey)}
        self._acts = {"hunter": spaces.MultiDiscrete([2, 2]), "prey": spaces.Discrete(3)}
        if boxes:
            self._acts = {name: spaces.Box(-1, 1, (len(name),), np.float32) for name in self._acts}

    def observation_space(self, agent: str) -> Any:
        return self._seen[agent[:-2]]

    def action_space(self, agent: str) -> Any:
        return self._acts[agent[:-2]]

    def close(self) -> None:
        pass

    def _observe(self) -> dict[str, Any]:
        prey = {"observation": np.array([self.t]), "action_mask": np.array([1, (self.t + 1) % 2, 1], np.int8)}
        return {agent: prey if agent == "prey_0" else np.array([self.t, 1]) for agent in self.agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        return self._observe(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents)
        assert all(type(actions[agent]) is int for agent in actions if agent == "prey_0")
        self.t += 1
        observations = self._observe()
        rewards = {agent: -1.0 * x if agent == "prey_0" else 10.0 * x[0] + x[1] for agent, x in actions.items()}
        terminated = {agent: agent == "prey_0" and self.t == 2 for agent in self.agents}
        truncated = dict.fromkeys(self.agents, self.t == 3)
        self.agents = [agent for agent in self.agents if not (terminated[agent] or truncated[agent])]
        return observations, rewards, terminated, truncated, {}


def parallel_env(**keywords: Any) -> Hunt:
    """Return the team, as modules of PettingZoo do."""
    return Hunt(**keywords)
