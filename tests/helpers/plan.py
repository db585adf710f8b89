"""A team of PettingZoo that does what a test has planned, for tests of its adapter."""

from typing import Any, ClassVar, NamedTuple

import numpy as np

try:
    from gymnasium import spaces
except ImportError:  # the tests are skipped
    spaces = None  # type: ignore[assignment]

AGENTS = ["a_0", "b_0"]
NOBODY: frozenset[str] = frozenset()


class Row(NamedTuple):
    """One step: who is in env.agents after it, and who has flags."""

    agents: Any
    terminated: Any = NOBODY
    truncated: Any = NOBODY


class Plan:
    """Agents `t` steps after a reset see t + 1; each that acts gets the reward t."""

    possible_agents: ClassVar[list[str]] = AGENTS
    rows: ClassVar[list[Row]] = []  # the first is the reset
    acted: ClassVar[list[set[str]]] = []  # who got an action, by step
    returns: ClassVar[dict[str, Any]] = {}  # what takes the place of the results of reset and step, by name
    unseen: ClassVar[frozenset[str]] = NOBODY  # agents without an observation
    masks: ClassVar[list[Any]] = []  # `infos` of each step; none where it is empty

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-99, 99, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def close(self) -> None:
        pass

    def _infos(self) -> Any:
        masks = self.masks[self.t] if self.masks else {}
        return {agent: {"action_mask": np.array(mask, np.int8)} for agent, mask in masks.items()}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents = 0, list(self.rows[0].agents) if self.rows else list(AGENTS)
        self.acted.clear()
        seen = {agent: np.ones(1, np.float32) for agent in self.agents}
        return self.returns.get("reset", (seen, self._infos()))

    def step(self, actions: dict[str, int]) -> Any:
        self.t += 1
        self.acted.append(set(actions))
        row = self.rows[self.t]
        self.agents = list(row.agents)
        shown = (set(actions) | set(row.agents)) - self.unseen
        seen = {agent: np.full(1, self.t + 1, np.float32) for agent in shown}
        rewards = dict.fromkeys(AGENTS, float(self.t))  # also of those that did not act
        flags = [{agent: agent in names for agent in AGENTS} for names in (row.terminated, row.truncated)]
        return self.returns.get("step", (seen, rewards, *flags, self._infos()))


def parallel_env() -> Plan:
    """Return the team, as modules of PettingZoo do."""
    return Plan()
