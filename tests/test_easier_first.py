"""Training that begins in an easier environment, and environments that take turns."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.runs import outcome, resume, run

import jaxrl
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UsageError
from jaxrl.report.writer import read_metrics
from jaxrl.runtime import build as build_module
from jaxrl.runtime import config as configuration
from jaxrl.runtime.build import Run, build_run
from jaxrl.runtime.presets import base_and_source

ITERATION = 6  # environment steps
SMALL = (
    "--algo coma --env coverage --num_agents 2 --budget 2 --num_envs 2 --hidden_size 8 --minibatch_size 4 "
    "--egocentric false --critic_warmup 0 --eval_every 0 --devices 1 --log_every 1"
)
WHOLE = f"--total_env_steps {4 * ITERATION} --schedule_env_steps {4 * ITERATION}"


def build(flags: str) -> Run:
    return build_run(parse(f"{flags} --total_env_steps 96".split()).config)


def test_all_of_it_on_small_maps_is_training_on_small_maps(tmp_path: Path) -> None:
    first = run(f"{SMALL} --q 9 --small_maps_first 1 --total_env_steps {2 * ITERATION}", tmp_path / "first")
    small = run(f"{SMALL} --q 7 --total_env_steps {2 * ITERATION}", tmp_path / "small")
    assert outcome(first) == outcome(small)


def test_large_maps_follow_and_resuming_is_exact(tmp_path: Path) -> None:
    """Stopped on small maps, at the change, and on large maps."""
    flags = f"{SMALL} --q 9 --small_maps_first 0.5"
    whole = run(f"{flags} {WHOLE}", tmp_path / "whole")
    assert [row["phase"] for row in read_metrics(whole)] == [0, 0, 1, 1]
    parts = run(f"{flags} {WHOLE} --total_env_steps {ITERATION}", tmp_path / "parts")
    for iterations in (2, 3, 4):
        resume(parts, f"--total_env_steps {iterations * ITERATION}")
    assert outcome(parts) == outcome(whole)
    assert jaxrl.load(whole).env.small_maps_first == 0.5


def test_maps_that_are_small_already_have_no_first_stage() -> None:
    assert build(f"{SMALL} --q 7 --small_maps_first 0.5").first_trainer is None


def roll_out(built: Run, iteration: int) -> Any:
    """The time steps [T, B, ...] of an iteration of the initial policy."""
    trainer = built.trainer
    state = trainer.init(trainer.keys(0))
    (phase,) = trainer.algo.phases

    @jax.jit
    def collect(state: Any) -> Any:
        return trainer.rollout(state, phase, trainer.split_key(state)[0]).trajectory.timestep

    return collect(dataclasses.replace(state, iterations=jax.numpy.uint32(iteration)))


@pytest.mark.parametrize("iteration", [0, 1, 2, 5])
def test_environments_take_turns(iteration: int) -> None:
    """An iteration has the episodes that these environments have when all are rolled out together."""
    flags = f"{SMALL} --q 3 --num_envs 6"
    every, third = (
        jax.tree.map(np.asarray, roll_out(build(flags + more), iteration).global_state)
        for more in ("", " --envs_per_iteration 2")
    )
    first = iteration % 3 * 2
    for whole, part in zip(jax.tree.leaves(every), jax.tree.leaves(third), strict=True):
        np.testing.assert_array_equal(whole[0, first : first + 2], part[0])


def test_it_says_that_environments_take_turns() -> None:
    built = build(f"{SMALL} --num_envs 6 --envs_per_iteration 3")
    assert built.notes[0] == "An iteration takes 3 of the 6 environments, in turn."
    assert built.config.run.num_envs == 6 and built.trainer.layout.num_envs == 3
    assert build(f"{SMALL} --num_envs 6 --envs_per_iteration 8").trainer.turns == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num_envs 127 --envs_per_iteration 64", "127 environments have no equal parts .* use --num_envs 128"),
        ("--algo ppo --env reach --num_envs 8 --envs_per_iteration 4", "'ppo' goes on with the same .* take turns"),
        ("--algo ppo --env coverage --rollout_steps 3 --small_maps_first 0.5", "cannot begin with small maps: choose"),
    ],
)
def test_impossible_combinations_are_refused(flags: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build(flags if "--algo" in flags else f"{SMALL} {flags}")


def test_one_function_has_one_environment() -> None:
    with pytest.raises(UsageError, match="training begins with small maps: leave that out"):
        jaxrl.make_train("coma", "coverage", total_episodes=640, q=9, small_maps_first=0.5)


PRESET = """
algo: coma
env: coverage
num_envs: 6
total_episodes: 60
gamma: 0.9
cpu: {envs_per_iteration: 2, total_episodes: 30, gamma: 0.8, q: 3}
"""


def configure(tmp_path: Path, flags: str = "", preset: str = PRESET) -> configuration.Config:
    (tmp_path / "own.yaml").write_text(preset)
    return parse(f"--config {tmp_path / 'own.yaml'} --devices 1 {flags}".split()).config


def test_a_preset_has_other_values_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In new runs, and where the user gives none."""
    config = configure(tmp_path)
    built = build_run(config)
    assert built.notes[1] == "On a CPU this preset has envs_per_iteration 2, total_episodes 30, gamma 0.8, q 3."
    assert built.trainer.layout.num_envs == 2 and built.config.run.total_env_steps == 30 * 15
    assert (built.algo.gamma, built.env.env.q) == (0.8, 3) and not built.config.cpu_settings
    given = build_run(configure(tmp_path, "--gamma 0.7 --total_env_steps 180"))
    assert given.notes[1] == "On a CPU this preset has envs_per_iteration 2, q 3."
    assert given.algo.gamma == 0.7 and given.config.run.total_env_steps == 180
    assert build_run(config, resuming=True).algo.gamma == 0.9
    monkeypatch.setattr(configuration, "on_cpu", lambda: False)
    monkeypatch.setattr(build_module, "on_cpu", lambda: False)
    elsewhere = build_run(config)
    assert elsewhere.trainer.layout.num_envs == 6 and elsewhere.config.run.total_env_steps == 60 * 15
    assert (elsewhere.algo.gamma, elsewhere.env.env.q) == (0.9, 57)
    assert not any("preset" in note for note in elsewhere.notes)
    assert "cpu:" in config.to_yaml() and "cpu:" not in elsewhere.config.to_yaml()  # a CPU may read that run


def test_values_for_a_cpu_follow_a_preset_to_another_environment(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(PRESET)
    config, _ = base_and_source(None, str(own), "reach")
    assert config.cpu_settings == {"envs_per_iteration": 2, "total_episodes": 30, "gamma": 0.8}


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("{gama: 0.9}", "own.yaml, cpu: unknown setting 'gama': did you mean 'gamma'"),
        ("{gamma: 2.0}", "own.yaml, cpu: gamma must lie between 0 and 1, not 2"),
        ("{algo: ppo}", "own.yaml: cpu must hold settings and their values on a CPU"),
        ("[gamma]", "own.yaml: cpu must hold settings and their values on a CPU"),
    ],
)
def test_a_section_for_a_cpu_is_checked(section: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        configure(tmp_path, preset=f"algo: coma\nenv: coverage\ncpu: {section}\n")
