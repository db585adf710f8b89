"""A trial of --num_seeds or --sweep that is no longer finite: it is named and counts no more, and the others go on."""

import contextlib
import csv
import dataclasses
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import outcome, outcome_rows, resume, run, shared_programs
from helpers.tiny import Corridor, CorridorState, TinyQ

import jaxrl
import jaxrl.cli.evaluate
import jaxrl.cli.export
import jaxrl.cli.runs
import jaxrl.cli.train
from envs_jax import TimeStep, setting
from envs_jax.progress import total
from jaxrl.algos.base import AlgoState, Phase
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UserError
from jaxrl.report.writer import read_metrics
from jaxrl.runtime.build import build_run
from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.load import load_policies
from jaxrl.runtime.not_finite import find_failure
from jaxrl.runtime.train_state import BlockMetrics, Position


@dataclasses.dataclass(frozen=True)
class Breaks(TinyQ):
    """TinyQ whose second loss, or whose weights, are not a number from an iteration on."""

    loss_at: float = setting(0.0, "iteration of the loss; 0 = never")
    weights_at: float = setting(0.0, "iteration of the weights; 0 = never")

    sweepable: ClassVar[tuple[str, ...]] = (*TinyQ.sweepable, "loss_at", "weights_at")

    def learn(
        self, state: AlgoState, trajectory: Any, last_timestep: Any, key: Any, progress: Any, phase: Phase
    ) -> tuple[AlgoState, dict[str, Any]]:
        state, metrics = super().learn(state, trajectory, last_timestep, key, progress, phase)
        if phase.updates:
            iteration = total(progress.learn_calls).astype(jnp.float32) + 1

            def is_due(at: Any) -> Any:
                return (jnp.float32(at) > 0) & (iteration >= jnp.float32(at))

            metrics["loss"] = metrics["loss"].at[1].set(jnp.where(is_due(self.loss_at), jnp.nan, metrics["loss"][1]))
            weights = jnp.where(is_due(self.weights_at), jnp.nan, state.replicated["weights"])
            state = AlgoState(state.replicated | {"weights": weights}, state.sharded)
        return state, metrics


@dataclasses.dataclass(frozen=True)
class RareCorridor(Corridor):
    """In a few episodes of a thousand a reward is NaN, or a mask closes every action."""

    rate: float = setting(0.0, "share of the episodes")
    closes: bool = setting(False, "close the mask instead of the reward")

    def step(self, state: CorridorState, action: Any, context: Any = None) -> tuple[CorridorState, TimeStep]:
        state, timestep = super().step(state, action, context)
        bad = jax.random.uniform(state.key) < self.rate
        if self.closes:
            is_open = ~bad | timestep.done
            return state, dataclasses.replace(timestep, action_mask=timestep.action_mask & is_open)
        return state, dataclasses.replace(timestep, reward=jnp.where(bad, jnp.nan, timestep.reward))


SETTINGS = {
    "num_envs": 8, "devices": 1, "checkpoint_every": 8, "log_every": 1, "eval_every": 320, "eval_episodes": 8,
    "schedule_env_steps": 1280, "total_env_steps": 1280,
}  # fmt: skip
FLAGS = "--algo test_failed_trials:Breaks --env helpers.tiny:Corridor "
FLAGS += " ".join(f"--{name} {value}" for name, value in SETTINGS.items())
RARE = FLAGS.replace("helpers.tiny:Corridor", "test_failed_trials:RareCorridor") + " --num_seeds 3 --rate 0.001"


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    with shared_programs():
        yield


def sweep(values: str, folder: Path, more: str = "") -> Path:
    return run(f"{FLAGS} {more} --sweep {values}", folder)


def newest_meta(directory: Path) -> dict[str, Any]:
    with Checkpoints(directory / "checkpoints") as checkpoints:
        return checkpoints.newest()[1]


def params(folder: Path) -> Any:
    return jaxrl.load(folder, best=False).params


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three trials, of which none breaks within the 40 iterations."""
    return sweep("weights_at=0,500,1000", tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def said() -> io.StringIO:
    """Return the console output of `broken`."""
    return io.StringIO()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, said: io.StringIO) -> Path:
    """The same as `whole`, but the second one breaks in iteration 21."""
    with contextlib.redirect_stdout(said):
        return sweep("weights_at=0,21,1000", tmp_path_factory.mktemp("broken"))


def test_the_other_trials_are_what_they_are_without_it(whole: Path, broken: Path) -> None:
    for name in ("weights_at=0", "weights_at=1000"):
        assert outcome_rows(broken / name) == outcome_rows(whole / name)
        np.testing.assert_array_equal(params(broken / name), params(whole / name))
    failed = outcome_rows(broken / "weights_at=21")
    until = [row for row in outcome_rows(whole / "weights_at=500") if row["iteration"] <= 20]
    assert failed == [*until, {"iteration": 21, "step": 672, "failed": 1}]


def test_means_are_over_the_trials_that_go_on(whole: Path, broken: Path) -> None:
    alive = [read_metrics(broken / name) for name in ("weights_at=0", "weights_at=1000")]
    rows = read_metrics(broken)
    assert [row for row in outcome_rows(broken) if row["iteration"] <= 20] == [
        row for row in outcome_rows(whole) if row["iteration"] <= 20
    ]
    for metric in ("train/loss", "eval/return"):
        of_run = {row["iteration"]: row[metric] for row in rows if row["iteration"] > 20 and metric in row}
        of_trials = [{row["iteration"]: row[metric] for row in each if metric in row} for each in alive]
        assert len(of_run) == (20 if metric == "train/loss" else 2)
        for iteration, value in of_run.items():
            assert value == pytest.approx(np.mean([each[iteration] for each in of_trials]), rel=1e-6)
    episodes = [row["episodes"] for row in rows if row["iteration"] == 30 and "episodes" in row]
    assert episodes == [
        sum(row["episodes"] for each in alive for row in each if row["iteration"] == 30 and "episodes" in row)
    ]
    assert [(row["iteration"], row["failed"]) for row in rows if "failed" in row] == [(21, 1)]


def test_the_best_score_is_of_the_trials_that_go_on(broken: Path) -> None:
    best = Checkpoints(broken / "checkpoints").best_step()
    scores = [
        next(
            row["eval/return"]
            for row in read_metrics(broken / name)
            if row["iteration"] == best and "eval/return" in row
        )
        for name in ("weights_at=0", "weights_at=1000")
    ]
    assert newest_meta(broken)["best"] == pytest.approx(np.mean(scores))
    assert newest_meta(broken)["failed"] == {"weights_at=21": 21}


def test_it_is_named_and_marked(broken: Path, said: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(said.getvalue().split())
    assert "warning: weights_at=21 failed: weights is not finite" in words
    assert "; the other trials go on (2 of 3)" in words
    assert "weights_at=21 failed (seed 0 failed at iteration 21: left out)" in words
    assert "finished at iteration 40" in words and "; weights_at=21 failed at iteration 21" in words
    with (broken / "trials.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    columns = [(row["weights_at"], row["failed at iteration"], bool(row["return at the end"])) for row in table]
    assert columns == [("0", "", True), ("21", "21", False), ("1000", "", True)]
    for path, sentence in (
        (broken, "weights_at=21 failed at iteration 21; its score is of the other trials"),
        (broken / "weights_at=21", "weights_at=21 failed at iteration 21"),
    ):
        assert jaxrl.cli.runs.main([str(path)]) == 0
        listed = " ".join(capsys.readouterr().out.split())
        assert sentence in listed and "(1 failed)" in listed
    assert " failed finished " in listed  # in place of a score
    resume(broken)
    assert "weights_at=21 failed at iteration 21: nothing is left to do" in capsys.readouterr().out


@pytest.mark.parametrize("iterations", [20, pytest.param(30, marks=pytest.mark.slow)])  # before it breaks, and after
def test_a_resumed_run_does_not_find_it_again(iterations: int, broken: Path, tmp_path: Path, capsys: Any) -> None:
    directory = sweep("weights_at=0,21,1000", tmp_path, f"--total_env_steps {32 * iterations}")
    capsys.readouterr()
    resume(directory, "--total_env_steps 1280")
    assert ("warning: weights_at=21 failed" in capsys.readouterr().out) == (iterations == 20)
    assert outcome(directory) == outcome(broken)
    for name in ("weights_at=0", "weights_at=21", "weights_at=1000"):
        assert outcome_rows(directory / name) == outcome_rows(broken / name)


def test_all_trials_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{FLAGS} --sweep weights_at=30,22,23 --runs {tmp_path}".split()
    assert jaxrl.cli.train.main(words) == 1
    printed = capsys.readouterr()
    assert "all 3 trials have failed, weights_at=30 as the last one: weights is not finite" in printed.err
    assert "the last good checkpoint (24) is kept: lower the learning rate in a new run" in printed.err
    (directory,) = (tmp_path / "test_failed_trials-Breaks_helpers.tiny-Corridor").glob("0001")
    assert jaxrl.cli.train.main(["--resume", str(directory)]) == 1
    assert "all 3 trials have failed, weights_at=30" in capsys.readouterr().err
    assert [row["iteration"] for row in read_metrics(directory / "weights_at=22") if "failed" in row] == [22]


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds; the environment gives one of them NaN."""
    return run(RARE, tmp_path_factory.mktemp("rare"))


def test_a_seed_whose_environment_fails(rare: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    failed = newest_meta(rare)["failed"]
    assert len(failed) == 1, failed
    (name,) = failed
    file = tmp_path / "scores.json"
    assert jaxrl.cli.evaluate.main([str(rare), "--episodes", "8", "--last", "--json", str(file)]) == 0
    assert f"warning: {name} failed at iteration {failed[name]}" in capsys.readouterr().err
    assert json.loads(file.read_text())["seeds"] == 2
    with pytest.raises(
        UserError, match=rf"every trial of .*{name} has failed \({name} failed at iteration .* name ano"
    ):
        jaxrl.load(rare / name, best=False)
    alive = next(f"seed_{seed}" for seed in range(3) if f"seed_{seed}" != name)
    np.testing.assert_array_equal(params(rare), params(rare / alive))


def test_the_seed_of_the_weights_is_written_where_the_first_one_has_failed(rare: Path, tmp_path: Path) -> None:
    assert list(newest_meta(rare)["failed"]) == ["seed_0"]
    policies = load_policies(rare, best=False)
    for seed, policy in zip((1, 2), policies, strict=True):
        assert policy.config == jaxrl.load(rare / f"seed_{seed}", best=False).config
        assert policy.config is not None and policy.config.run.seed == seed
    assert jaxrl.cli.export.main([str(rare), "--format", "run", "--out", str(tmp_path / "small"), "--last"]) == 0
    written = jaxrl.load(tmp_path / "small")
    assert written.config.run.seed == 1
    np.testing.assert_array_equal(written.params, params(rare / "seed_1"))


def test_a_best_checkpoint_from_before_a_seed_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the run only the other seeds are played; the seed itself, and the checkpoint by its number, can be."""
    directory = sweep("weights_at=0,21", tmp_path, "--num_seeds 2")
    best = Checkpoints(directory / "checkpoints").best_step()
    assert best is not None and best < 21, best
    capsys.readouterr()
    config = (directory / "weights_at=21" / "config.yaml").read_text()
    assert "num_seeds: 2" in config
    with pytest.raises(UserError, match=r"every trial of .*weights_at=21 has failed"):
        jaxrl.load(directory / "weights_at=21")
    for policy in (
        jaxrl.load(directory / "weights_at=21" / "seed_1"),
        jaxrl.load(directory / "weights_at=21", checkpoint=best),
    ):
        assert policy.step == best and np.isfinite(policy.params).all()
    assert jaxrl.load(directory / "weights_at=0").step == best
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_a_seed_whose_mask_closes_every_action(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(f"{RARE} --closes true", tmp_path)
    failed = newest_meta(directory)["failed"]
    said = " ".join(capsys.readouterr().out.split())
    ((name, iteration), *_) = failed.items()
    assert said.count(" failed: the environment's action_mask") == len(failed) < 3
    assert all(f"{each} failed at iteration {at}" in said.partition("finished at")[2] for each, at in failed.items())
    assert (
        f"{name} failed: the environment's action_mask closes every action of an agent, at iteration {iteration}"
        in said
    )
    assert "the other trials go on (2 of 3)" in said


def test_the_result_in_python(tmp_path: Path) -> None:
    trials = "weights_at=22,0,1000"
    result = jaxrl.train(Breaks, Corridor(), progress=False, sweep=trials, runs=str(tmp_path), **SETTINGS)
    assert result.failed == {"weights_at=22": 22} and "weights_at=22 failed at iteration 22" in result.reason
    assert np.isfinite(result.policy.params).all()
    assert result.policy.config.algo_settings["weights_at"] == 0.0


@pytest.mark.parametrize("setting", ["loss_at", pytest.param("weights_at", marks=pytest.mark.slow)])
def test_where_a_trial_fails_does_not_depend_on_blocks(setting: str) -> None:
    """Trials at once and in turn, in one block and in several, stop counting in the same iteration."""
    trainer = build_run(parse([*FLAGS.split(), "--sweep", f"{setting}=0,5,7"]).config).trainer
    fill, train = trainer.algo.phases
    found = []
    for vectorized, lengths in itertools.product((False, True), ([8], [3, 2, 3])):
        one = dataclasses.replace(trainer, vectorized=vectorized)
        if len(lengths) == 1:
            filling, block = one.make_block(fill), one.make_block(train)
        state, _ = filling(one.init(one.keys(0)), jnp.int32(2))
        before, failed = 2, {}
        for length in lengths:
            state, metrics = block(state, jnp.int32(length))
            assert np.all(np.asarray(state.iterations) == before + length)
            for trial in range(3):
                if metrics.not_finite[trial] >= 0:
                    name = one.tensor_names(metrics.learning)[int(metrics.not_finite[trial])]
                    failed.setdefault(trial, (before + int(metrics.iterations[trial]), name))
                else:
                    assert metrics.iterations[trial] == length
            before += length
        found.append(failed)
    name = "loss" if setting == "loss_at" else "weights"
    assert found == [{1: (5, name), 2: (7, name)}] * 4


def test_a_failure_is_of_its_own_trial() -> None:
    """By hand: trial 0 is fine, the mask of trial 1 closes before its loss breaks, trial 2 breaks."""
    loss = np.ones((4, 3, 2), np.float32)
    loss[3, 1, 0] = loss[1, 2, 1] = np.nan
    masks = np.zeros((4, 3), np.float32)
    masks[2, 1] = masks[3, 2] = 1  # of trial 2 after it has failed
    fetched = BlockMetrics({"loss": loss}, {}, np.array([-1, 0, 0]), np.array([4, 4, 2]), {"action_mask": masks})
    before, phase = Position(iterations=10, updates=20), Phase("train", 1, 2)
    failures = [find_failure(fetched.of_trial(trial), ["loss"], before, phase) for trial in range(3)]
    assert failures[0] is None
    assert failures[1] is not None and failures[1].row == 2 and "at iteration 13 or shortly before" in failures[1].cause
    assert failures[2] is not None and failures[2].row == 1
    assert failures[2].cause == "loss is not finite at update 24 (iteration 12)"
