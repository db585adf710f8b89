"""Jittable reinforcement-learning environments: pure functions from (state, action) to (state, timestep)."""

import importlib
from typing import TYPE_CHECKING, Any

from envs_jax.settings import ADAPTERS, register, registered, setting

if TYPE_CHECKING:
    from envs_jax.base import (
        Array,
        Box,
        Discrete,
        Environment,
        EnvSpec,
        TimeStep,
        make,
        pytree,
        restart,
        termination,
        transition,
        truncation,
    )
    from envs_jax.batch import batched
    from envs_jax.progress import Progress
    from envs_jax.testing import check_env

__all__ = [
    "Array", "Box", "Discrete", "EnvSpec", "Environment", "Progress", "TimeStep", "batched", "check_env", "make",
    "pytree", "register", "registered", "restart", "setting", "termination", "transition", "truncation",
]  # fmt: skip

_MODULES = {"batched": "batch", "Progress": "progress", "check_env": "testing"}  # for all others: base


def __getattr__(name: str) -> Any:
    """Import what needs JAX on first access, so that commands start quickly."""
    if name in ("base", "batch", "progress", "testing"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'base')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register("coverage", "envs_jax.coverage.env:Coverage")
register("reach", "envs_jax.reach.env:Reach")
register("reach_family", "envs_jax.reach.env:ReachFamily")
register("snakes", "envs_jax.snakes.env:Snakes")
register("snakes_3v3", "envs_jax.snakes.env:Snakes")
register("snakes_1v1", "envs_jax.snakes.env:Snakes1v1")
register("snakes_2p", "envs_jax.snakes.env:Snakes2p")
register("snakes_5p", "envs_jax.snakes.env:Snakes5p")

ADAPTERS["brax"] = "envs_jax.adapters.brax:Brax"
ADAPTERS["envpool"] = "envs_jax.adapters.from_envpool:FromEnvPool"
ADAPTERS["gymnasium"] = "envs_jax.adapters.from_gymnasium:FromGymnasium"
ADAPTERS["gymnax"] = "envs_jax.adapters.gymnax:Gymnax"
ADAPTERS["jaxmarl"] = "envs_jax.adapters.jaxmarl:JaxMarl"
ADAPTERS["jumanji"] = "envs_jax.adapters.jumanji:Jumanji"
ADAPTERS["pettingzoo"] = "envs_jax.adapters.from_pettingzoo:FromPettingZoo"
ADAPTERS["playground"] = "envs_jax.adapters.brax:Playground"
