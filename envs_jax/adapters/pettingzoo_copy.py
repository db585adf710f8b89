"""One copy of a team of PettingZoo; without JAX, which workers do not import."""

import importlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from envs_jax.adapters.copies import Copy, CopyStep, describe_returned, to_flag, to_number
from envs_jax.adapters.errors import UnfitError
from envs_jax.adapters.parts import Fault

_INTERFACE = "as PettingZoo's parallel environments do"
_STEP = "observations, rewards, terminations, truncations, infos"


class PettingZooCopy(Copy):
    """A copy of an environment of PettingZoo.

    Args:
        env: the environment.
        complete: refuse steps after which some agents go on and others do not.
    """

    def __init__(self, env: Any, complete: bool = False) -> None:
        self.env, self.complete = env, complete
        self.agents = tuple(env.possible_agents)
        self._present: frozenset[Any] = frozenset()
        self._over: frozenset[Any] = frozenset()  # agents that had a flag and are still named in env.agents

    def reset(self, seed: int) -> CopyStep:
        result = self.env.reset(seed=seed)
        if not _are_dictionaries(result, 2):
            fix = f"return the pair (observations, infos), dictionaries by agent, {_INTERFACE}"
            raise Fault(f"reset returned {describe_returned(result)}", fix)
        self._present, self._over = self._find_named(), frozenset()
        if not self._present:
            raise Fault("env.agents is empty after a reset", "list the agents that act first")
        if self.complete and len(self._present) < len(self.agents):
            raise self._incomplete(self._present)
        observations, infos = result
        return self._make_step(self._present, observations, infos, self._present)

    def step(self, action: Any) -> CopyStep:
        plain = [one.item() if one.ndim == 0 and one.dtype == np.int32 else one for one in action]
        named = self._find_named()
        result = self.env.step({agent: one for agent, one in zip(self.agents, plain, strict=True) if agent in named})
        if not _are_dictionaries(result, 5):
            fix = f"return the five dictionaries {_STEP}, by agent, {_INTERFACE}"
            raise Fault(f"step returned {describe_returned(result)}", fix)
        observations, rewards, terminations, truncations, infos = result
        terminated, truncated = _flagged(terminations, "terminations"), _flagged(truncations, "truncations")
        acted, cut = self._present, (truncated - terminated) & self._present
        now_named = self._find_named()
        self._over = (self._over | terminated | truncated) & now_named
        self._present = present = now_named - self._over
        ended = not present
        if self.complete and len(cut if ended and cut else present) not in (0, len(self.agents)):
            raise self._incomplete(present or cut)
        step = self._make_step(acted, observations, infos, cut if ended else present, cut)
        reward = [to_number(rewards.get(agent, 0.0), "a reward") if agent in acted else 0.0 for agent in self.agents]
        return step._replace(reward=reward, terminated=ended and not cut, truncated=ended and bool(cut))

    def close(self) -> None:
        self.env.close()

    def _find_named(self) -> frozenset[Any]:
        """Return the agents in env.agents. Raises Fault: one has no spaces."""
        named = frozenset(self.env.agents)
        if unknown := named - set(self.agents):
            raise Fault(f"{min(map(str, unknown))!r} is in env.agents", "name it in possible_agents, too")
        return named

    def _make_step(
        self,
        acted: frozenset[Any],
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
        present: frozenset[Any],
        cut: frozenset[Any] = frozenset(),
    ) -> CopyStep:
        """Return a step without rewards and ends; who neither acted nor acts next has no observation."""
        shown: list[Any] = []
        for agent in self.agents:
            shown.append(observations.get(agent) if agent in acted or agent in present else None)
            if shown[-1] is None and (agent in present or agent in cut):
                why = "is in env.agents" if agent in present else "was truncated"
                raise Fault(f"there is no observation of {agent!r}, which {why}", "return one")
        their_infos = [infos.get(agent, {}) if agent in acted or agent in present else {} for agent in self.agents]
        if not all(isinstance(info, Mapping) for info in their_infos):
            raise Fault("an entry of infos is not a dictionary", "return one for each agent")
        flags = [[agent in agents for agent in self.agents] for agents in (present, cut - present)]
        return CopyStep(shown, their_infos, present=flags[0], cut=flags[1])

    def _incomplete(self, agents: Collection[Any]) -> Fault:
        apart = next(agent for agent in self.agents if agent not in agents)
        return Fault(
            f"{apart!r} enters, leaves or ends apart from the others",
            "choose complete_team false, with ppo or coma",
        )


def _are_dictionaries(result: Any, count: int) -> bool:
    is_sequence = isinstance(result, tuple | list) and len(result) == count
    return is_sequence and all(isinstance(one, Mapping) for one in result)


def _flagged(flags: Mapping[Any, Any], name: str) -> frozenset[Any]:
    return frozenset(agent for agent, flag in flags.items() if to_flag(flag, f"one of {name}"))


def make_copy(name: str, keywords: Mapping[str, Any], complete: bool) -> Copy:
    """Make a team of a module; see `PettingZooCopy`. Raises UnfitError: its agents do not act at once."""
    module = importlib.import_module(name)
    if not hasattr(module, "parallel_env"):
        raise UnfitError(
            "has no parallel_env, and jaxrl trains only agents that act at the same time: choose another environment"
        )
    return PettingZooCopy(module.parallel_env(**keywords), complete)
