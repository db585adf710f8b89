"""`--init_from`: where weights do not fit, the sentence names the settings that are the cause, and no others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

import jaxrl
from jaxrl.algos.base import Custom
from jaxrl.common.errors import UsageError, UserError
from jaxrl.runtime import load as loading
from jaxrl.runtime.build import build_algorithm, build_run
from jaxrl.runtime.config import Config, apply_changes
from jaxrl.runtime.presets import base_and_source

# Settings that never change shapes differ in all of these runs.
LEARNING: dict[str, Any] = {"actor_lr": 1e-3, "critic_lr": 2e-3, "gamma": 0.9}
PPO: dict[str, Any] = {
    "algo": "ppo", "env": "helpers.whisper:Whisper", "num_envs": 8, "hidden_size": 8, "rollout_steps": 4,
    "num_minibatches": 8, "depth": 1, "total_env_steps": 32,
}  # fmt: skip
COMA: dict[str, Any] = {
    "algo": "coma", "env": "coverage", "q": 2, "num_agents": 2, "budget": 2, "hidden_size": 8, "num_envs": 8,
    "minibatch_size": 6, "total_env_steps": 32, "advantage": "return",
}  # fmt: skip
SAC: dict[str, Any] = {
    "algo": "sac", "env": "helpers.tiny:PointMass", "hidden_size": 8, "depth": 1, "batch_size": 8, "buffer_size": 256,
    "num_envs": 8, "total_env_steps": 64, "random_steps": 64,
}  # fmt: skip
DDPG: dict[str, Any] = {
    "algo": "ddpg", "env": "snakes_1v1", "hidden_size": 8, "batch_size": 8, "buffer_size": 256, "num_envs": 8,
    "total_env_steps": 64, "learning_starts": 0, "random_steps": 0,
}  # fmt: skip
TEAM: dict[str, Any] = {"message_passing": "attention", "num_minibatches": 1, "message_heads": 2}
RISK: dict[str, Any] = {"risk_level": 0.5}
GRU: dict[str, Any] = {"memory": "gru", "num_minibatches": 1}

# base, its changes there, its changes here, the settings to name
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "messages": (PPO, TEAM, {}, ("message_passing",)),
    "layers of messages": (PPO, TEAM | {"message_layers": 1}, TEAM, ("message_layers",)),
    "heads and size": (PPO, TEAM, TEAM | {"message_heads": 3, "hidden_size": 9}, ("hidden_size", "message_heads")),
    "memory": (PPO, GRU, {}, ("memory",)),
    "size of the memory": (PPO, GRU | {"memory_size": 4}, GRU | {"memory_size": 6}, ("memory_size",)),
    "memory of two layers": (PPO, GRU | {"memory_layers": 2}, {}, ("memory",)),
    "another memory": (PPO, GRU, GRU | {"memory": "lstm"}, ("memory",)),
    "parameters": (PPO, {"share_parameters": False, "num_minibatches": 2}, {}, ("share_parameters",)),
    "hidden size and layers": (PPO, {"depth": 2, "hidden_size": 12}, {}, ("depth", "hidden_size")),
    "quantiles": (PPO, RISK | {"risk_quantiles": 4}, RISK | {"risk_quantiles": 8}, ("risk_quantiles",)),
    "statistics": (PPO, {"normalize_observation": "always"}, {"normalize_observation": "never"},
                   ("normalize_observation",)),
    "cues": (PPO, {"cues": 4}, {}, ("cues",)),
    "an environment and a size": (PPO, {}, {"env": "helpers.tiny:Corridor", "hidden_size": 4, "num_minibatches": 1},
                                  ("env", "hidden_size")),
    "coma's view": (COMA, {"egocentric": True}, {"egocentric": False}, ("egocentric",)),
    "coma's stride": (COMA, {"stride": 2}, {"stride": 1}, ("stride",)),
    "coma's messages": (COMA, {"message_passing": "attention", "message_heads": 2}, {}, ("message_passing",)),
    "coma's actions": (COMA, {"num_actions": 4}, {"num_actions": 6}, ("num_actions",)),
    "sac's room": (SAC, {"dimensions": 3}, {}, ("dimensions",)),
    "ddpg's observation": (DDPG, {"observation": "obs_full"}, {"observation": "obs26"}, ("observation",)),
    "ddpg's network": (DDPG, {"network": "bicnet"}, {"network": "mlp"}, ("network",)),
    "ddpg's scale": (DDPG, {"scale_observation": True}, {"scale_observation": False}, ("scale_observation",)),
    "ddpg's norms": (DDPG, {"layer_norm": True, "first_layer": "relu"}, {"layer_norm": False, "first_layer": "linear"},
                     ("layer_norm",)),
    "ddpg's critics": (DDPG, {"num_critics": 2}, {"num_critics": 3}, ("num_critics",)),
}  # fmt: skip


def configure(base: dict[str, Any], changes: dict[str, Any]) -> Config:
    settings = base | changes
    config, _ = base_and_source(settings.pop("algo"), None, settings.pop("env"))
    return apply_changes(config, settings)


def refuse(base: dict[str, Any], there: dict[str, Any], here: dict[str, Any]) -> str:
    """Return the sentence about weights of a run with the changes `there` for one with the changes `here`."""
    config, saved = configure(base, here), configure(base, there | LEARNING)
    run: Any = SimpleNamespace(config=config, algo=build_algorithm(config))
    with pytest.raises(UsageError) as caught:
        loading._check_weights("RUN", run, loading._SavedRun(Path("RUN"), saved, build_algorithm(saved), None))
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_named(case: str) -> None:
    base, there, here, names = CASES[case]
    sentence = refuse(base, there, here)
    saved, present = configure(base, there | LEARNING).flat(), configure(base, here).flat()
    built, _, rest = sentence.partition(", but this run has ")
    found, _, remedy = rest.partition(": give ")
    assert built.startswith("the networks of RUN do not match: they were built with ")
    assert sorted(built.partition("built with ")[2].split(", ")) == sorted(f"{name} {saved[name]}" for name in names)
    assert sorted(found.split(", ")) == sorted(f"{name} {present[name]}" for name in names)
    flags = remedy.removesuffix(", or leave out init_from").split(" ")
    more = {"memory of two layers": ["--memory_layers"], "ddpg's norms": ["--first_layer"]}.get(case, [])
    assert sorted(flags[::2]) == sorted([*(f"--{name}" for name in names), *more]) and "\n" not in sentence


def test_a_setting_of_a_feature_that_is_off_is_no_cause(tmp_path: Path) -> None:
    """Heads without messages change nothing."""
    config, saved = configure(PPO, {"message_heads": 2}), configure(PPO, LEARNING)
    run: Any = SimpleNamespace(config=config, algo=build_algorithm(config))
    loading._check_weights("RUN", run, loading._SavedRun(tmp_path, saved, build_algorithm(saved), None))


class Plain(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(self.outputs)(nn.tanh(nn.Dense(5)(x)))


class Wide(Plain):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(self.outputs)(nn.tanh(nn.Dense(7)(x)))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a network of one's own."""
    settings = {name: value for name, value in SAC.items() if name not in ("algo", "env")}
    runs = str(tmp_path_factory.mktemp("own"))
    return jaxrl.train("sac", SAC["env"], networks={"actor": Plain}, runs=runs, progress=False, **settings).directory


def test_networks_of_ones_own(own: Path) -> None:
    """The same networks take the weights; with others the sentence names networks=."""

    def load(networks: dict[str, Any], **changes: Any) -> Any:
        run = build_run(configure(SAC, {"init_from": str(own)} | changes), custom=Custom(networks))
        return loading.load_weights(str(own), run)

    weights = load({"actor": Plain})
    trained = jaxrl.load(own, networks={"actor": Plain}).params
    for leaf in jax.tree.leaves(trained):
        assert any(np.array_equal(leaf, other) for other in jax.tree.leaves(weights))
    with pytest.raises(UserError, match="networks="):
        load({"actor": Wide})
    with pytest.raises(UserError, match="networks="):
        load({})
    with pytest.raises(UsageError, match="built with hidden_size 8, but this run has hidden_size 12: give"):
        load({"actor": Plain}, hidden_size=12)  # of the critics
