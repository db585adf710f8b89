"""Checks of an environment's spec, without stepping it."""

from collections.abc import Callable
from typing import Any, NoReturn, get_args

import jax

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
        number = getattr(spec, field)
        if not (isinstance(number, int) and number >= 1):
            fail(f"spec.{field} is {number!r}: it must be a Python int of at least 1")
    if not (isinstance(spec.action, Box) or (isinstance(spec.action, Discrete) and spec.action.n >= 1)):
        fail(f"spec.action is {spec.action!r}: describe ONE agent's action by Discrete(n), n >= 1, or by a Box")
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
    taken = set(spec.metrics) & {"return", "length", "episodes"}
    if taken:
        fail(f"spec.metrics has '{taken.pop()}', which every environment already has: choose another name")
    if spec.score not in {*spec.metrics, "return"}:
        fail(f"spec.score is '{spec.score}': name one of spec.metrics, or 'return'")
    for name in spec.tie_breakers:
        if name != "return" and name not in spec.metrics:
            fail(f"spec.tie_breakers names '{name}', which is no metric: choose from {', '.join(spec.metrics)}, return")
    if spec.score_mode not in ("min", "max"):
        fail(f"spec.score_mode is {spec.score_mode!r}: choose 'min' or 'max'")
    return spec


def check_box(fail: Callable[[str], NoReturn], field: str, box: Any) -> None:
    """Call `fail` with a sentence unless a leaf of a spec is a Box with ordered bounds."""
    if not isinstance(box, Box):
        fail(f"spec.{field} holds {box!r}: every leaf must be a Box")
    if not box.low <= box.high:
        fail(f"spec.{field} has a Box with low {box.low} above high {box.high}: swap them")
