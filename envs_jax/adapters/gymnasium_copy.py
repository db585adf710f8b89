"""One copy of an environment of Gymnasium; without JAX, which workers do not import."""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from envs_jax.adapters.copies import Copy, CopyStep, describe_returned, to_flag, to_number
from envs_jax.adapters.parts import Fault

_INTERFACE = "as Gymnasium has it since version 0.26"


class GymnasiumCopy(Copy):
    """A copy of an environment of Gymnasium."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, seed: int) -> CopyStep:
        result = self.env.reset(seed=seed)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise Fault(
                f"reset returned {describe_returned(result)}",
                f"return the pair (observation, info), {_INTERFACE}, info a dictionary",
            )
        observation, info = result
        return CopyStep((observation,), (info,))

    def step(self, action: np.ndarray) -> CopyStep:
        one = int(action[0]) if action.ndim == 1 and action.dtype == np.int32 else action[0]
        result = self.env.step(one)
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            raise Fault(
                f"step returned {describe_returned(result)}",
                f"return the five values observation, reward, terminated, truncated, info, {_INTERFACE}, info a "
                "dictionary",
            )
        observation, reward, terminated, truncated, info = result
        if type(terminated) is not bool:
            terminated = to_flag(terminated, "terminated")
        if type(truncated) is not bool:
            truncated = to_flag(truncated, "truncated")
        return CopyStep((observation,), (info,), to_number(reward, "the reward"), terminated, truncated)

    def close(self) -> None:
        self.env.close()


def make_copy(module: str, registered: Any, horizon: int, keywords: Mapping[str, Any]) -> Copy:
    """Make a copy of what Gymnasium has registered; a module is imported, as it may register more."""
    gymnasium = importlib.import_module("gymnasium")
    if module:
        importlib.import_module(module)
    env = gymnasium.make(registered, max_episode_steps=horizon, disable_env_checker=True, **keywords)
    # `horizon` cuts here too, and this wrapper fails where a step does not return five values
    return GymnasiumCopy(env.env if type(env) is gymnasium.wrappers.TimeLimit else env)
