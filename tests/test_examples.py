"""The scripts in examples/ run as their first lines say, use public names, and learn."""

import ast
import dataclasses
import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.tiny import Corridor, PointMass

import jaxrl
from examples.dqn import Dqn
from jaxrl.cli import train
from jaxrl.rl.data_parallel import DataParallel

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "examples").glob("*.py"))}
LINES = {"dqn": 110}  # at most: an algorithm of one's own is to stay short
MARKS = {"ppo_gymnasium": pytest.mark.needs("gymnasium"), "coma_gae": pytest.mark.slow}
SHORT: dict[str, dict[str, Any]] = {
    "coma_gae": {"num_envs": 8, "total_env_steps": 64, "num_agents": 2, "budget": 3, "q": 4, "minibatch_size": 32},
    "dqn": {
        "num_envs": 16, "total_env_steps": 4_000, "hidden_size": 16, "batch_size": 64, "buffer_size": 1_000,
        "critic_lr": 1e-2, "gamma": 0.9, "tau": 0.05, "env_steps_per_update": 16.0,
    },
    "ppo_gymnasium": {"total_env_steps": 2_048, "hidden_size": 8},
}  # fmt: skip


def start(name: str, env: Any = None, **changes: Any) -> jaxrl.Result:
    """Run an example as a user does, with other settings, and perhaps another environment, of its run."""
    train, evaluate = jaxrl.train, jaxrl.evaluate

    def train_shorter(algo: Any, *names: Any, **settings: Any) -> jaxrl.Result:
        return train(algo, *([env] if env else names), **(settings | changes))

    def evaluate_less(policy: Any, **settings: Any) -> Any:
        return evaluate(policy, **(settings | {"episodes": 8, "baselines": ["random"]}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxrl, "train", train_shorter)
        patch.setattr(jaxrl, "evaluate", evaluate_less)
        return runpy.run_path(str(EXAMPLES[name]), run_name="__main__")["result"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in EXAMPLES])
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Dqn learns values of a corridor that are known: gamma^(steps to the end - 1) for steps to the right."""
    monkeypatch.chdir(tmp_path)
    env = Corridor if name == "dqn" else None
    result = start(name, env, devices=1, eval_every=0, **SHORT[name])
    printed = capsys.readouterr().out
    assert "episodes: 8;" in printed and "random" in printed
    assert "defined in __main__" not in printed
    if name == "dqn":
        policy = result.policy
        places = np.eye(5, dtype=np.float32)[:, None]  # [5, 1, 5]
        values = jax.jit(policy.algo.outputs, static_argnums=0)("critic", policy.params, places)  # [1, 5, 1, 2]
        best = np.asarray(values)[0, :4, 0]
        assert (best.argmax(-1) == 1).all()
        np.testing.assert_allclose(best[:, 1], 0.9 ** np.arange(3, -1, -1), atol=0.1)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_uses_public_names_and_changes_no_module(name: str) -> None:
    """Private names are those that the example itself defines."""
    text = EXAMPLES[name].read_text()
    assert len(text.splitlines()) <= LINES.get(name, 150)
    nodes = list(ast.walk(ast.parse(text)))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    sources = [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    parts = [part for path in (*sources, *(alias.name for alias in aliases)) for part in path.split(".")]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert not set(filter(is_private, parts))
    assert set(filter(is_private, (node.attr for node in attributes))) <= defined
    imported = {(alias.asname or alias.name).split(".")[0] for alias in aliases}
    changed = {ast.unparse(node.value) for node in attributes if isinstance(node.ctx, ast.Store)}
    assert not changed & imported


@pytest.mark.slow
def test_dqn_beats_random_snakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = start("dqn").policy
    evaluation = jaxrl.evaluate(policy, episodes=200)
    assert evaluation["win"].mean() > 0.5 > 0.1 > evaluation.baselines["random"]["win"].mean()


def test_fixed_settings_of_an_algorithm_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    """They are no flags of its help, and another value is refused in one sentence."""
    words = ["--algo", "examples.dqn:Dqn", "--env", "helpers.tiny:Corridor"]
    with pytest.raises(SystemExit):
        train.main([*words, "--help"])
    text = capsys.readouterr().out
    assert "--critic_lr" in text and "--eps_fraction" in text
    for name, value in Dqn.fixed_settings.items():
        assert f"--{name} " not in text
        other = value + 1
        assert train.main([*words, "--num_envs", "8", f"--{name}", str(other)]) == 2
        error = capsys.readouterr().err
        assert f"{name} is always {value} in Dqn, not {other}: give {value}" in error and error.count("\n") == 1
    assert set(Dqn.fixed_settings) <= {field.name for field in dataclasses.fields(Dqn)}


def test_dqn_refuses_numbers_as_actions() -> None:
    with pytest.raises(ValueError, match="dqn needs discrete actions, 'point_mass' has others: use sac"):
        Dqn(PointMass().spec, DataParallel(8))
