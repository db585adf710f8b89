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
from jaxrl.runtime import config as configuration
from jaxrl.runtime.build import Run, build_run

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
        for more in ("", " --cpu_envs_per_iteration 2")
    )
    first = iteration % 3 * 2
    for whole, part in zip(jax.tree.leaves(every), jax.tree.leaves(third), strict=True):
        np.testing.assert_array_equal(whole[0, first : first + 2], part[0])


def test_it_says_that_environments_take_turns() -> None:
    built = build(f"{SMALL} --num_envs 6 --cpu_envs_per_iteration 3")
    assert built.notes[0] == "An iteration takes 3 of the 6 environments, in turn."
    assert built.config.run.num_envs == 6 and built.trainer.layout.num_envs == 3
    assert build(f"{SMALL} --num_envs 6 --cpu_envs_per_iteration 8").trainer.turns == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num_envs 127 --cpu_envs_per_iteration 64", "127 environments have no equal parts .* use --num_envs 128"),
        ("--algo ppo --env reach --num_envs 8 --cpu_envs_per_iteration 4", "'ppo' goes on with the same .* take turns"),
        ("--algo ppo --env coverage --rollout_steps 3 --small_maps_first 0.5", "cannot begin with small maps: choose"),
    ],
)
def test_impossible_combinations_are_refused(flags: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build(flags if "--algo" in flags else f"{SMALL} {flags}")


def test_one_function_has_one_environment() -> None:
    with pytest.raises(UsageError, match="training begins with small maps: leave that out"):
        jaxrl.make_train("coma", "coverage", total_episodes=640, q=9, small_maps_first=0.5)


def test_accelerators_take_all_environments_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In new runs; a run that began on a CPU goes on as it was."""
    flags = f"{SMALL} --num_envs 6 --cpu_envs_per_iteration 2 --total_env_steps 96"
    config = parse(flags.split()).config
    monkeypatch.setattr(configuration, "on_cpu", lambda: False)
    assert build_run(config).trainer.layout.num_envs == 6
    assert build_run(config, resuming=True).trainer.layout.num_envs == 2
