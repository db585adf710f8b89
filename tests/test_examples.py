"""The scripts in examples/ run as their first lines say, use public names, and learn."""

import ast
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.off_policy import assert_close, make_trainer, run
from helpers.tiny import Corridor, PointMass

import jaxrl
from jaxrl.cli import train
from jaxrl.rl.data_parallel import DataParallel

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES = {"dqn": 110}  # at most: an algorithm of one's own is to stay short
MARKS = {"ppo_gymnasium": pytest.mark.needs("gymnasium"), "coma_gae": pytest.mark.slow}
SHORT = {
    "coma_gae": {"num_envs": 8, "total_env_steps": 64, "num_agents": 2, "budget": 3, "q": 4, "minibatch_size": 32},
    "dqn": {
        "env": "helpers.tiny:Corridor",
        "total_env_steps": 1_280,
        "hidden_size": 8,
        "batch_size": 8,
        "eval_every": 0,
    },
    "ppo_gymnasium": {"total_env_steps": 2_048, "hidden_size": 8, "eval_every": 0},
}
PROGRAM = """
import json, runpy, sys
import jaxrl

module, changes = sys.argv[1], json.loads(sys.argv[2])
other_env = [changes.pop("env")] if "env" in changes else []
train, evaluate = jaxrl.train, jaxrl.evaluate
jaxrl.train = lambda algo, *env, **settings: train(algo, *(other_env or env), **(settings | changes))
few = {"episodes": 8, "baselines": ["random"]}
jaxrl.evaluate = lambda policy, *env, **settings: evaluate(policy, *env, **(settings | few))
runpy.run_module(module, run_name="__main__")
"""


def load(name: str) -> Any:
    """The module of an example."""
    (path,) = (path for path in EXAMPLES if path.stem == name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def execute(path: Path, folder: Path, settings: dict[str, Any], variables: dict[str, str]) -> Any:
    """Run an example in a process of its own, in a folder, with changed settings of its run."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | variables
    command = [sys.executable, "-c", PROGRAM, f"examples.{path.stem}", json.dumps(settings)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=MARKS.get(path.stem, ()), id=path.stem) for path in EXAMPLES]
)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    """As a user starts it, but shorter, and `dqn` in a smaller environment."""
    quick = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    done = execute(path, tmp_path, SHORT[path.stem], quick)
    assert done.returncode == 0, done.stderr
    assert "episodes: 8;" in done.stdout and "random" in done.stdout
    assert "defined in __main__" not in done.stdout
    assert (tmp_path / "runs" / "latest").is_file()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_uses_public_names_and_changes_no_module(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert len(path.read_text().splitlines()) <= LINES.get(path.stem, 150)
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            names = [] if own else [node.attr]
        else:
            continue
        assert not [name for name in names if name.startswith("_") and not name.startswith("__")], names
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            assert node.value.id not in imported, f"{node.value.id}.{node.attr} is set"


def test_private_names_of_the_base_class_are_not_used() -> None:
    """Of what a subclass calls on itself, it defines the private part."""
    for path in EXAMPLES:
        tree = ast.parse(path.read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        private = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        }
        assert private <= defined, path.stem


def test_dqn_learns_a_corridor() -> None:
    dqn = load("dqn")
    trainer = make_trainer(
        dqn.Dqn, Corridor(), 16, hidden_size=16, batch_size=64, buffer_size=1_000, critic_lr=1e-2, gamma=0.9, tau=0.05
    )
    state, _ = run(trainer, 250)
    params = state.algo.replicated.critic.params
    places = np.eye(5, dtype=np.float32)[:, None]  # [5, 1, 5]
    values = np.asarray(jax.jit(lambda: trainer.algo.outputs("critic", params, places))())  # [1, 5, 1, 2]
    best = values[0, :4, 0]
    assert (best.argmax(-1) == 1).all()  # to the right everywhere
    np.testing.assert_allclose(best[:, 1], 0.9 ** np.arange(3, -1, -1), atol=0.1)  # gamma^(steps to the end - 1)


@pytest.mark.slow
def test_dqn_computes_the_same_on_one_and_eight_devices() -> None:
    dqn = load("dqn")
    settings = {"hidden_size": 8, "batch_size": 16, "buffer_size": 400}
    states = [run(make_trainer(dqn.Dqn, Corridor(num_agents=2), 16, n, **settings), 3)[0] for n in (1, 8)]
    assert_close(states[0].algo.replicated, states[1].algo.replicated, 2e-3)


@pytest.mark.slow
def test_dqn_beats_random_snakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    execute(ROOT / "examples" / "dqn.py", tmp_path, {}, {})
    policy = jaxrl.load(tmp_path / (tmp_path / "runs" / "latest").read_text().strip())
    evaluation = jaxrl.evaluate(policy, episodes=200)
    assert evaluation["win"].mean() > 0.5 > 0.1 > evaluation.baselines["random"]["win"].mean()


def test_fixed_settings_of_an_algorithm_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    """They are no flags of its help, and another value is refused in one sentence."""
    module = load("dqn")
    with pytest.raises(SystemExit):
        train.main(["--algo", "examples.dqn:Dqn", "--env", "helpers.tiny:Corridor", "--help"])
    text = capsys.readouterr().out
    assert "--critic_lr" in text and "--eps_fraction" in text
    for name, value in module.Dqn.fixed_settings.items():
        assert f"--{name} " not in text
        other = value + 1
        words = f"--algo examples.dqn:Dqn --env helpers.tiny:Corridor --num_envs 8 --{name} {other}"
        assert train.main(words.split()) == 2
        error = capsys.readouterr().err
        assert f"{name} is always {value} in Dqn, not {other}: give {value}" in error and error.count("\n") == 1
    fields = {field.name for field in dataclasses.fields(module.Dqn)}
    assert set(module.Dqn.fixed_settings) <= fields


def test_dqn_refuses_numbers_as_actions() -> None:
    with pytest.raises(ValueError, match="dqn needs discrete actions, 'point_mass' has others: use sac"):
        load("dqn").Dqn(PointMass().spec, DataParallel(8))
