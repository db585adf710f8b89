"""Checks of an environment's spec, without stepping it."""

import math
from collections.abc import Callable
from typing import Any, NoReturn, get_args

import jax
import numpy as np

from envs_jax.base import Box, Discrete, Environment, EnvSpec, Reduction
from envs_jax.testing.trees import is_box


class ContractError(AssertionError):
    """An environment breaks the contract; the message is one sentence."""


def check_spec(env: Environment) -> EnvSpec:
    """Return the spec of an environment. Raises ContractError where it contradicts itself."""
    spec = env.spec
    name = type(env).__name__

    def fail(sentence: str) -> NoReturn:
        raise ContractError(f"{name}: {sentence}")

    if not isinstance(spec, EnvSpec):
        fail(f"spec is a {type(spec).__name__}: make it a property that returns an envs_jax.EnvSpec")
    if not (isinstance(spec.name, str) and spec.name):
        fail(f"spec.name is {spec.name!r}: give the environment a name")
    for field in ("num_agents", "horizon", "num_tasks"):
        count = getattr(spec, field)
        if not (isinstance(count, int) and count >= 1):
            fail(f"spec.{field} is {count!r}: it must be a Python int of at least 1")
    discrete = isinstance(spec.action, Discrete) and isinstance(spec.action.n, int) and spec.action.n >= 1
    if not (isinstance(spec.action, Box) or discrete):
        fail(f"spec.action is {spec.action!r}: describe ONE agent's action by Discrete(n), n >= 1, or by a Box")
    if not (isinstance(spec.max_link_age, int) and spec.max_link_age >= 0):
        fail(f"spec.max_link_age is {spec.max_link_age!r}: it must be a Python int of at least 0, in steps")
    if spec.max_link_age and not spec.links:
        fail(f"spec.max_link_age is {spec.max_link_age}, but spec.links is False: set it, or leave the age out")
    if spec.agent_types and len(spec.agent_types) != spec.num_agents:
        fail(
            f"spec.agent_types has {len(spec.agent_types)} entries for {spec.num_agents} agents: name the type of each "
            "agent, or leave it () where every agent is a type of its own"
        )
    if wrong := [kind for kind in spec.agent_types if not (isinstance(kind, int) and kind >= 0)]:
        fail(f"spec.agent_types holds {wrong[0]!r}: number the types by Python ints from 0")
    if isinstance(spec.action, Box):
        check_box(fail, "action", spec.action)
        low, high = spec.action.bounds
        if (low == high).any():
            bound = low.flat[np.argmax(low == high)]
            fail(f"spec.action has a Box with low = high = {bound:g}, which leaves no choice: leave that number out")
    for field, boxes in (("observation", spec.observation), ("global_state", spec.global_state)):
        if field == "observation" and not jax.tree.leaves(boxes, is_leaf=is_box):
            fail("spec.observation is empty: describe ONE agent's observation by a Box or a pytree of boxes")
        for box in jax.tree.leaves(boxes, is_leaf=is_box):
            check_box(fail, field, box)
    if (spec.critic_input is None) != (spec.critic_input_spec is None):
        fail("spec.critic_input and spec.critic_input_spec belong together: give both or neither")
    if spec.critic_input_spec is not None:
        check_box(fail, "critic_input_spec", spec.critic_input_spec)
    for metric, reduction in spec.metrics.items():
        if reduction not in get_args(Reduction):
            fail(f"spec.metrics['{metric}'] is {reduction!r}: choose one of {', '.join(get_args(Reduction))}")
    reserved = set(spec.metrics) & {"return", "length", "episodes"}
    if reserved:
        fail(f"spec.metrics has '{reserved.pop()}', which every environment already has: choose another name")
    shares: Any = spec.shares
    if not isinstance(shares, tuple | list):
        fail(f"spec.shares is {shares!r}: name the metrics in a tuple, such as ('win',)")
    for name in shares:
        if spec.metrics.get(name, "sum") == "sum":
            chosen = [metric for metric, reduction in spec.metrics.items() if reduction != "sum"]
            fail(
                f"spec.shares names '{name}', which is not a metric that is 0 or 1 in each episode: choose from "
                f"{', '.join(chosen) or 'none'}, reduced by last, max or any"
            )
    if spec.score not in {*spec.metrics, "return"}:
        fail(f"spec.score is '{spec.score}': name one of spec.metrics, or 'return'")
    for name in spec.tie_breakers:
        if name != "return" and name not in spec.metrics:
            fail(
                f"spec.tie_breakers names '{name}', which is not a metric: choose from {', '.join(spec.metrics)}, "
                "return"
            )
    if spec.score_mode not in ("min", "max"):
        fail(f"spec.score_mode is {spec.score_mode!r}: choose 'min' or 'max'")
    return spec


def check_box(fail: Callable[[str], NoReturn], field: str, box: Any) -> None:
    """Call `fail` with a sentence unless a leaf of a spec is a Box with ordered bounds."""
    if isinstance(box, Discrete):
        fail(
            f"spec.{field} is or holds {box!r}, but only actions may be Discrete: return the number one-hot, "
            f"Box(({box.n},), low=0, high=1), or as Box((1,), jnp.int32, 0, {box.n - 1})"
        )
    if not isinstance(box, Box):
        fail(f"spec.{field} holds {box!r}: every leaf must be a Box")
    if not math.prod(box.shape):
        fail(f"spec.{field} has a Box of shape {box.shape}, which holds no numbers: leave it out, or give it one")
    low, high = box.bounds
    if np.isnan(low).any() or np.isnan(high).any():
        fail(f"spec.{field} has a Box with a bound that is not a number: give -inf or inf where there is none")
    if (low > high).any():
        index = np.argmax(low > high)
        fail(f"spec.{field} has a Box with low {low.flat[index]} above high {high.flat[index]}: swap them")
