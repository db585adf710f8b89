"""Tiny runs of every algorithm, and a script that checks environments and trains them in a process with flags of JAX.

    JAX_DEBUG_NANS=1 python -m helpers.flag_runs NAME ...

prints the names of the environments and runs as they end.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.runtime.build import Run, build_run
from jaxrl.runtime.config import apply_changes
from jaxrl.runtime.presets import base_and_source

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "coverage": {"budget": 2, "q": 28, "num_agents": 2},
    "reach": {"horizon": 6},
    "snakes_1v1": {"max_steps": 4},
    "snakes_3v3": {"max_steps": 4},
}
_TRANSFORMER = {
    "context_length": 4, "embedding_size": 8, "feedforward_size": 8, "num_heads": 2, "num_layers": 1, "hidden_size": 8,
}  # fmt: skip
_REPLAY = {
    "num_envs": 4, "hidden_size": 8, "batch_size": 8, "buffer_size": 64, "env_steps_per_update": 4,
    "total_env_steps": 48,
}  # fmt: skip
_EPISODES = {"num_envs": 4, "hidden_size": 8, "minibatch_size": 4, "total_env_steps": 16}
_ROLLOUT = {
    "num_envs": 4, "rollout_steps": 4, "num_minibatches": 1, "num_epochs": 1, "hidden_size": 8, "depth": 1,
    "total_env_steps": 32,
}  # fmt: skip
# By name: algorithm, environment, settings.
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo": ("ppo", "reach", _ROLLOUT),
    "sac": ("sac", "reach", _REPLAY | {"random_steps": 8}),
    "ppo of a team": ("ppo", "coverage", _ROLLOUT),
    "coma": ("coma", "coverage", _EPISODES),
    "coma_original": ("coma_original", "coverage", _EPISODES),
    "ddpg": ("ddpg", "snakes_3v3", _REPLAY | {"learning_starts": 8}),
    "ddpg by value": ("ddpg", "snakes_1v1", _REPLAY | {"learning_starts": 8, "action_gradient": "expected"}),
    "ddpg in a box": ("ddpg", "reach", _REPLAY | {"random_steps": 8}),
    "bicnet": ("bicnet", "snakes_3v3", _REPLAY),
    "collective": (
        "collective",
        "reach",
        _TRANSFORMER
        | {"num_envs": 4, "random_steps": 16, "learner_steps": 16, "worker_steps": 16, "update_interval": 3}
        | {"env_steps_per_update": 4, "initial_updates": 4, "transformer_updates": 4, "transformer_batch": 8}
        | {"actor_updates": 4, "critic_updates": 4, "batch_size": 8, "updates_per_call": 2},
    ),
    "student": (
        "student",
        "reach",
        _REPLAY | {"random_steps": 8, "teacher_constant_steps": 8, "teacher_until_step": 40}
        | {"resolved_inputs": json.dumps(_TRANSFORMER)},
    ),
}  # fmt: skip


def make_run(name: str) -> Run:
    """The run of this name, built."""
    algo, env, settings = RUNS[name]
    return build_run(
        apply_changes(base_and_source(algo, None, env)[0], {**ENVIRONMENTS[env], **settings, "block_iterations": 2})
    )


def train(name: str) -> None:
    """Two iterations of each phase of a run; raises where one has a value that is not finite."""
    trainer = make_run(name).trainer
    state = trainer.init(jax.random.key(0))
    for phase in trainer.algo.phases:
        state, metrics = trainer.make_block(phase)(state, jnp.int32(min(phase.iterations or 2, 2)))
        if int(metrics.not_finite) >= 0:
            raise FloatingPointError(f"{phase.name}: {trainer.tensor_names(metrics.learning)[int(metrics.not_finite)]}")
        kinds = {str(leaf.dtype) for leaf in jax.tree.leaves((state, metrics))}
        if kinds & {"float64", "int64", "uint64"}:
            raise TypeError(f"{phase.name}: {sorted(kinds)}")
    learned = jax.tree.map(np.asarray, trainer.algo.policy(state.algo))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learned))


if __name__ == "__main__":
    from test_env_contract import SETTINGS

    import envs_jax
    from envs_jax import check_env

    for name in sys.argv[1:]:
        if name in RUNS:
            train(name)
        else:
            check_env(envs_jax.make(name, **SETTINGS[name][0]))
        print(name, flush=True)
