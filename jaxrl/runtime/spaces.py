"""Descriptions of an environment's spaces, stored in versions.json, so that an error can name what has changed."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from envs_jax.base import Box, Discrete, EnvSpec
from jaxrl.runtime.run_directory import SPACES, RunError, read_versions


def describe(spec: EnvSpec) -> dict[str, str]:
    """Return {"agents", "observation", "action", "global_state": shapes and dtypes, such as "float32[4]"}."""

    def describe_one(space: Any) -> str:
        if isinstance(space, Discrete):
            return f"Discrete({space.n})"
        return f"{np.dtype(space.dtype).name}{list(space.shape)}"

    def describe_all(tree: Any) -> str:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Box))
        return ", ".join(f"{jax.tree_util.keystr(path)} {describe_one(box)}".strip() for path, box in leaves)

    return {
        "agents": str(spec.num_agents),
        "observation": describe_all(spec.observation),
        "action": describe_one(spec.action),
        "global_state": describe_all(spec.global_state),
    }


def check_spaces(run: Path, env: str, spec: EnvSpec) -> None:
    """Raise RunError if observations or actions of a run's environment have changed since it began."""
    spaces = describe(spec)
    stored = {**spaces, **read_versions(run).get(SPACES, {})}
    if changes := [f"{name} was {stored[name]} and is {now}" for name, now in spaces.items() if stored[name] != now]:
        raise RunError(
            f"the environment '{env}' has changed since {run} was trained: {', '.join(changes)}; use its previous "
            "code, or train again"
        )
