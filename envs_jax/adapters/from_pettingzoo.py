"""Teams of PettingZoo that act at once: `--env pettingzoo:sisl.pursuit_v5`, `pettingzoo:mpe2.simple_spread_v3`.

The name is a module with a `parallel_env`, of PettingZoo or of another package. Extra: pettingzoo. An agent that leaves
before the others sees zeros and gets no reward. An episode ends when no agent is left: truncated if the last step
truncated an agent, else terminated.
"""

import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs_jax.adapters.common import UnfitError, package
from envs_jax.adapters.host import Copy, HostAdapter


class PettingZooCopy(Copy):
    """A copy of an environment of PettingZoo."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.agents = tuple(env.possible_agents)

    def reset(self, seed: int) -> Sequence[Any]:
        return self._in_order(self.env.reset(seed=seed)[0])

    def step(self, action: Any) -> tuple[Sequence[Any], Any, bool, bool]:
        plain = [one.item() if one.ndim == 0 and one.dtype == np.int32 else one for one in action]
        chosen = dict(zip(self.agents, plain, strict=True))
        acting = tuple(self.env.agents)
        results = self.env.step({agent: chosen[agent] for agent in acting})
        observations, rewards, terminations, truncations, _ = results
        ended = all(terminations.get(agent) or truncations.get(agent) for agent in acting)
        truncated = any(truncations.get(agent) for agent in acting)
        reward = [rewards.get(agent, 0.0) for agent in self.agents]
        return self._in_order(observations), reward, ended and not truncated, ended and truncated

    def _in_order(self, by_agent: dict[str, Any]) -> Sequence[Any]:
        return [by_agent.get(agent) for agent in self.agents]


@dataclasses.dataclass(frozen=True)
class FromPettingZoo(HostAdapter):
    """A team of PettingZoo."""

    library = "pettingzoo"

    @classmethod
    def names(cls) -> Sequence[str]:
        """Return the modules of PettingZoo itself, none of which is imported."""
        families = package("pettingzoo", cls.library).__path__
        return tuple(
            f"{family.name}.{module.name}"
            for family in pkgutil.iter_modules(families)
            if family.ispkg
            for module in pkgutil.iter_modules([f"{family.module_finder.path}/{family.name}"])  # type: ignore[union-attr]
            if not module.ispkg and module.name.rpartition("_v")[2].isdigit()
        )

    @classmethod
    def is_known(cls, name: str) -> bool:
        if name in cls.names():
            return True
        try:
            return all(part.isidentifier() for part in name.split(".")) and importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of a package in which it would be
            return False

    def package_spaces(self) -> dict[Any, tuple[Any, Any]]:
        env = self._make()
        spaces = {agent: (env.observation_space(agent), env.action_space(agent)) for agent in env.possible_agents}
        env.close()
        return spaces

    def make_copy(self) -> Copy:
        return PettingZooCopy(self._make())

    def _make(self) -> Any:
        name = f"pettingzoo.{self.name}" if self.name in self.names() else self.name
        module = importlib.import_module(name)
        if not hasattr(module, "parallel_env"):
            raise UnfitError("has no parallel_env: only agents that act at once can be trained here")
        return module.parallel_env(**self.keywords)
