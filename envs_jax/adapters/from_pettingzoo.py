"""Teams of PettingZoo that act at once: `--env pettingzoo:sisl.pursuit_v5`, `pettingzoo:mpe2.simple_spread_v3`.

The name is a module with a `parallel_env`, of PettingZoo or of another package. Extra: pettingzoo.

Agents in `env.agents` after a reset or a step act next, and are present; as in PettingZoo's own tests, an agent with a
flag is over for the episode even if it stays there. The others see zeros and get no reward. The episode ends when
nobody acts next: truncated if an agent of the last step was only truncated, else terminated. Each agent's own end
decides its target:

- terminated, also if truncated too, or gone without a flag: nothing follows;
- only truncated: the value of its last observation follows, whether or not others go on.
"""

import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from envs_jax.adapters.common import package
from envs_jax.adapters.copies import Copy, find_masks
from envs_jax.adapters.host import AgentSpaces, CopyAdapter
from envs_jax.adapters.pettingzoo_copy import make_copy
from envs_jax.base import setting


@dataclasses.dataclass(frozen=True)
class FromPettingZoo(CopyAdapter):
    """A team of PettingZoo."""

    complete_team: bool = setting(
        False, "refuse agents that enter, leave or end apart from the others, which only ppo and coma can learn from"
    )

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
        except ModuleNotFoundError:  # the package in which it would be is missing
            return False

    @property
    def agents_leave(self) -> bool:
        return not self.complete_team and self.spaces.agents > 1

    def package_spaces(self) -> dict[Any, AgentSpaces]:
        one: Any = self.maker()
        env = one.env
        agents = list(env.possible_agents)
        pairs = [(env.observation_space(agent), env.action_space(agent)) for agent in agents]
        masks = find_masks(one, [action for _, action in pairs])
        env.close()
        spaces = {}
        for agent, pair in zip(agents, pairs, strict=True):  # who enters later has the mask of its like
            known = (mask for mask, other in zip(masks, pairs, strict=True) if mask is not None and other == pair)
            spaces[agent] = AgentSpaces(*pair, next(known, None))
        return spaces

    @property
    def maker(self) -> Callable[[], Copy]:
        module = f"pettingzoo.{self.name}" if self.name in self.names() else self.name
        return functools.partial(make_copy, module, self.keywords, self.complete_team)
