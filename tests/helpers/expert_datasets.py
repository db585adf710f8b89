"""A made-up expert dataset."""

from typing import Any

import numpy as np

from jaxrl.integrations.expert_dataset import ExpertDataset

TASKS, EPISODES, STEPS, NUMBERS, ACTIONS = 2, 5, 4, 3, 2


def make_set(**changes: Any) -> ExpertDataset:
    """Five episodes of four steps for each of two tasks."""
    rng, rows = np.random.default_rng(0), TASKS * EPISODES * STEPS

    def normal(*shape: Any) -> Any:
        return rng.normal(size=(rows, *shape)).astype(np.float32)

    step = np.tile(np.arange(STEPS, dtype=np.int32), TASKS * EPISODES)
    observation, last = normal(NUMBERS), normal(NUMBERS)
    then = np.where((step == STEPS - 1)[:, None], last, np.roll(observation, -1, axis=0))
    fields = {
        "environment": "arm", "task_names": ("push", "pull"), "step": step, "terminated": step == STEPS - 1,
        "task": np.repeat(np.arange(TASKS, dtype=np.int32), EPISODES * STEPS), "observation": observation,
        "action": np.tanh(normal(ACTIONS)), "reward": normal(), "next_observation": then,
        "mu": np.tanh(normal(ACTIONS)), "log_std": normal(ACTIONS), "value": normal(),
    }  # fmt: skip
    return ExpertDataset(**fields | changes)
