"""A worker of `bench.studies.recurrent_ppo`: trains once with one library, and prints its figures as a line of JSON.

Arguments: the library, the settings as JSON, the seed, and for PureJaxRL the folder of its scripts. It runs in
environments with other versions of JAX, and therefore imports neither bench nor, at the top, jaxrl.
"""

import importlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np

Train = Callable[[Any], tuple[Any, Any]]  # key -> mean return, number of episodes [updates] that ended in an update
# Modules that PureJaxRL's wrappers import, for other environments
UNUSED = ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "gymnax", "distrax")


def build_jaxrl(settings: dict[str, Any]) -> Train:
    """Return a whole run of our PPO with a GRU."""
    whole = importlib.import_module("jaxrl").make_train(
        "ppo",
        f"gymnax:{settings['env']}",
        num_envs=settings["num_envs"],
        rollout_steps=settings["rollout_steps"],
        total_env_steps=settings["env_steps"],
        num_minibatches=settings["minibatches"],
        num_epochs=settings["epochs"],
        actor_lr=settings["learning_rate"],
        critic_lr=settings["learning_rate"],
        final_lr_fraction=0.0,
        gamma=settings["gamma"],
        td_lambda=settings["gae_lambda"],
        clip_ratio=settings["clip_ratio"],
        entropy_weight=settings["entropy_weight"],
        max_grad_norm=settings["max_grad_norm"],
        memory="gru",
        memory_size=128,
        hidden_size=128,
        depth=1,
    )

    def train(key: Any) -> tuple[Any, Any]:
        metrics = whole(jax.random.wrap_key_data(key))[1]["train"]
        return metrics["return"], metrics["episodes"]

    return train


def build_purejaxrl(settings: dict[str, Any], folder: str) -> Train:
    """Return a whole run of `ppo_rnn.py` in the folder; its sizes, 128 units, are in its code."""
    sys.modules.update({name: mock.MagicMock() for name in UNUSED})
    sys.path.insert(0, folder)
    whole = importlib.import_module("ppo_rnn").make_train({
        "ENV_NAME": settings["env"],
        "NUM_ENVS": settings["num_envs"],
        "NUM_STEPS": settings["rollout_steps"],
        "TOTAL_TIMESTEPS": settings["env_steps"],
        "NUM_MINIBATCHES": settings["minibatches"],
        "UPDATE_EPOCHS": settings["epochs"],
        "LR": settings["learning_rate"],
        "ANNEAL_LR": True,
        "GAMMA": settings["gamma"],
        "GAE_LAMBDA": settings["gae_lambda"],
        "CLIP_EPS": settings["clip_ratio"],
        "ENT_COEF": settings["entropy_weight"],
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": settings["max_grad_norm"],
        "DEBUG": False,
    })  # fmt: skip

    def train(key: Any) -> tuple[Any, Any]:
        metrics = whole(key)["metric"]
        ended = metrics["returned_episode"]
        episodes = ended.sum((1, 2))
        return (metrics["returned_episode_returns"] * ended).sum((1, 2)) / episodes, episodes

    return train


def measure(train: Train, seed: int) -> dict[str, Any]:
    """Return CPU seconds of building and compiling, and of running, and the returns and episodes of each update."""
    key = jax.random.PRNGKey(seed)
    began = time.process_time()
    program = jax.jit(train).lower(key).compile()
    compiled = time.process_time()
    returns, episodes = jax.block_until_ready(program(key))
    ran = time.process_time()
    spent = {"compile_cpu_seconds": compiled - began, "run_cpu_seconds": ran - compiled}
    return spent | {"returns": np.asarray(returns).tolist(), "episodes": np.asarray(episodes).tolist()}


def main() -> None:
    """Train with the library of the command line."""
    library, settings, seed, *folder = sys.argv[1:]
    builders: dict[str, Callable[..., Train]] = {"jaxrl": build_jaxrl, "purejaxrl": build_purejaxrl}
    figures = measure(builders[library](json.loads(settings), *folder), int(seed))
    installed = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in PACKAGES if name in installed}
    print(json.dumps(figures | {"versions": versions}))


if __name__ == "__main__":
    main()
