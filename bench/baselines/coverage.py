"""The entry of the mapping environment in `bench.baselines`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.baselines import Entry, require
from bench.reference.coverage import baselines, torch_learner
from bench.reference.coverage.oracle import Mission, Settings
from envs_jax.base import EnvSpec

_EXPLORATION = 0.1
_PUBLISHED = {  # the only values that the PyTorch learner is timed with
    "depth": 1, "stride": 1, "egocentric": False, "initializer": "torch", "dueling": False, "advantage": "critic",
    "normalize_advantage": False, "clip_ratio": 0.0, "target_kl": 0.0, "entropy_weight": 0.0, "actor_epochs": 0,
    "critic_warmup": 0, "max_grad_norm": 0.0, "final_lr_fraction": 1.0,
}  # fmt: skip


def settings(env: dict[str, Any]) -> Settings:
    """Convert the environment's settings to the oracle's, except the settings of map storage and backends.

    Raises ValueError: a setting that it does not know, or a value.
    """
    if (timing := env.get("reward_timing", "aligned")) != "aligned":
        raise ValueError(f"the NumPy baseline knows no reward_timing '{timing}': use 'aligned'")
    names = {field.name for field in dataclasses.fields(Settings)}
    return Settings(**{name: value for name, value in env.items() if name in names})


class NumpyMission:
    """One mission at a time on the oracle."""

    name = "NumPy"
    notes: Sequence[str] = ()

    def __init__(self, env: dict[str, Any], policy: str, seed: int) -> None:
        self._settings = settings(env)
        self._rng = np.random.default_rng(seed)
        self._policy = baselines.make_policy(policy, self._settings)
        self._mission: Mission

    def reset(self) -> None:
        self._mission = Mission(self._settings, self._rng)

    def act(self) -> np.ndarray:
        """Actions [N]."""
        return self._policy(self._mission)

    def observe(self, action: np.ndarray) -> None:
        self._mission.critic_state(action, self._mission.observe())

    def step(self, action: np.ndarray) -> bool:
        return self._mission.step(action)[1]

    def measure(self) -> Mapping[str, float]:
        return self._mission.metrics()


class TorchMissions:
    """PyTorch COMA on missions run one after another."""

    def __init__(self, env: dict[str, Any], algo: dict[str, Any], seed: int, device: str = "cpu") -> None:
        require(algo, _PUBLISHED, "the PyTorch learner is the published one", "use --config coma_published")
        same = ("hidden_size", "actor_lr", "critic_lr", "gamma", "num_epochs", "target_update_period")
        self._settings = settings(env)
        self._learner = torch_learner.TorchComa(
            self._settings.num_agents,
            self._settings.num_actions,
            lam=algo["td_lambda"],
            seed=seed,
            device=device,
            tau=algo["tau"] or None,
            **{name: algo[name] for name in same},
        )
        self._rng = np.random.default_rng(seed)
        self._minibatch_size = algo["minibatch_size"]
        self._batch: Any = None
        self.threads = self._learner.torch.get_num_threads()

    def collect(self, episodes: int, copies: int = 1) -> int:
        """Roll out missions with the actor, and keep copies of each."""
        batch, _ = torch_learner.collect(self._learner, self._settings, self._rng, episodes, _EXPLORATION)
        arrays = {name: np.concatenate([rows] * copies) for name, rows in batch.items() if name != "eps"}
        self._batch = {**arrays, "eps": batch["eps"]}
        transitions = copies * episodes * self._settings.steps * self._settings.num_agents
        self._learner.num_minibatches = max(1, transitions // self._minibatch_size)
        return episodes * self._settings.steps

    def learn(self) -> None:
        self._learner.train_step(self._batch)


def shorten(spec: EnvSpec, algo: dict[str, Any], samples: int) -> tuple[int, dict[str, Any]]:
    """Shorten a training step to one pass of one minibatch, on whole missions."""
    per_mission = spec.num_agents * spec.horizon
    return max(1, samples // per_mission), {"num_epochs": 1, "minibatch_size": 10**9, "actor_epochs": 0}


ENTRY = Entry(
    algo="coma",
    policy="random",
    cases={"q = 57": {"q": 57}, "q = 7": {"q": 7}},
    baseline=NumpyMission,
    learner=TorchMissions,
    shorten=shorten,
)
