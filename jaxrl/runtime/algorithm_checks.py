"""What an algorithm returns, checked while it is traced: one sentence instead of an error deep in the loop."""

from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec
from jaxrl.algos.base import AlgoState


def check_results(method: str, results: Any, names: tuple[str, ...]) -> Any:
    """Return what a method of an algorithm returned. Raises ValueError unless it is a tuple with these entries."""
    if not isinstance(results, tuple) or len(results) != len(names):
        description = f"{len(results)} values" if isinstance(results, tuple) else type(results).__name__
        raise ValueError(f"{method} must return {', '.join(names)}, not {description}")
    return results


def check_learned(before: Any, after: Any, metrics: Any) -> None:
    """Raise ValueError unless `learn` returned a state with the same leaves as its argument, and metrics by name."""
    if not isinstance(after, AlgoState):
        raise ValueError(f"learn must return an AlgoState and metrics, not {type(after).__name__} and metrics")
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise ValueError("learn must return metrics as a dictionary {name: float32[] or float32[updates]}")
    structures: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    if structures[0] != structures[1]:
        raise ValueError("learn must return a state of the same structure as its argument")
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if (jnp.shape(new), jnp.result_type(new)) != (old.shape, old.dtype):
            raise ValueError(
                f"learn changed {jax.tree_util.keystr(path).removeprefix('.')} of the state from "
                f"{old.dtype}{list(old.shape)} to {jnp.result_type(new)}{list(jnp.shape(new))}: keep shape and dtype"
            )


def check_action(spec: EnvSpec, action: Array, num_envs: int) -> None:
    """Raise ValueError unless `act` returned what the environment takes."""
    expected_shape, kinds = (num_envs, spec.num_agents, *spec.action.shape), (jnp.integer, jnp.floating)
    same_kind = any(jnp.issubdtype(action.dtype, kind) and jnp.issubdtype(spec.action.dtype, kind) for kind in kinds)
    if action.shape != expected_shape or not same_kind:
        actual, expected = (
            f"{jnp.dtype(dtype).name}{list(shape)}"
            for dtype, shape in ((action.dtype, action.shape), (spec.action.dtype, expected_shape))
        )
        raise ValueError(
            f"act returned actions {actual}, but '{spec.name}' takes {expected} (environments, agents, ...): "
            "return one action for each agent of each environment"
        )
