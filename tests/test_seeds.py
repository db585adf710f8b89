"""--num_seeds and --sweep: every trial equals a run of its own; devices share trials; resume, tables, refusals."""

import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.off_policy import CASES, make_trainer, trainer_of
from helpers.runs import outcome_rows, resume, run
from helpers.tiny import Corridor

import jaxrl
import jaxrl.cli.evaluate
import jaxrl.cli.train
from jaxrl.algos.coma import Coma
from jaxrl.algos.ppo import Ppo
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UsageError
from jaxrl.runtime.build import build_run
from jaxrl.runtime.trainer import Trainer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --checkpoint_every 8 --log_every 3 "
    "--eval_every 320 --eval_episodes 8 --schedule_env_steps 1280"
)


def train_run(flags: str, folder: Path) -> Path:
    """The directory of a run."""
    return run(f"{FLAGS} {flags}", folder)


def close(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(actual) == len(expected) > 0
    for row, other_row in zip(actual, expected, strict=True):
        assert set(row) == set(other_row)
        for name, value in row.items():
            assert value == pytest.approx(other_row[name], rel=1e-4, abs=1e-6), name


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the seeds 4, 5 and 6 on one device."""
    return train_run("--seed 4 --num_seeds 3 --devices 1 --total_env_steps 1280", tmp_path_factory.mktemp("three"))


def test_every_seed_is_the_run_of_that_seed(three: Path, tmp_path: Path) -> None:
    singles = [train_run(f"--seed {seed} --devices 1 --total_env_steps 1280", tmp_path) for seed in (4, 5, 6)]
    for seed, single in zip((4, 5, 6), singles, strict=True):
        close(outcome_rows(three / f"seed_{seed}"), outcome_rows(single))
        last = jaxrl.load(three / f"seed_{seed}", best=False).params, jaxrl.load(single, best=False).params
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *last)
    first, second = (jaxrl.load(three / f"seed_{seed}", best=False).params for seed in (4, 5))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(jaxrl.load(three, best=False).params, first)


def test_the_runs_own_metrics_are_means_over_seeds(three: Path) -> None:
    mean_rows, seeds = outcome_rows(three), [outcome_rows(three / f"seed_{seed}") for seed in (4, 5, 6)]
    for index, row in enumerate(mean_rows):
        each = [seed_rows[index] for seed_rows in seeds]
        for name in row:
            if name.startswith(("train/", "eval/")):
                assert row[name] == pytest.approx(np.mean([seed_rows[name] for seed_rows in each]), rel=1e-6)
        if "episodes" in row:
            assert row["episodes"] == sum(seed_rows["episodes"] for seed_rows in each)


def test_devices_that_do_not_divide_the_seeds() -> None:
    for seeds, devices in ((3, 3), (4, 4), (6, 6), (16, 8)):
        flags = f"{FLAGS} --total_env_steps 640 --num_seeds {seeds}"
        run = build_run(parse(flags.split()).config)
        assert run.mesh.size == devices and run.trainer.layout.devices == 1
    assert build_run(parse(f"{FLAGS} --total_env_steps 640 --num_seeds 5 --devices 4".split()).config).mesh.size == 1


def test_tables_show_means_over_seeds(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = three / "own.json"
    arguments = ["--episodes", "16", "--policy", "learned,random", "--last", "--json", str(file)]
    assert jaxrl.cli.evaluate.main([str(three), *arguments]) == 0
    assert "learned policies: over the means of 3 seeds" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["seeds"] == 3
    means, lengths = [], []
    for seed in (4, 5, 6):
        assert jaxrl.cli.evaluate.main([str(three / f"seed_{seed}"), *arguments]) == 0
        single = json.loads(file.read_text())
        assert "seeds" not in single
        means.append(single["policies"]["learned"]["return"]["mean"][-1])
        lengths.append(single["policies"]["learned"]["length"]["mean"][-1])
        assert single["policies"]["random"] == report["policies"]["random"]
    learned = report["policies"]["learned"]
    assert learned["return"]["mean"][-1] == pytest.approx(np.mean(means), rel=1e-5)
    assert learned["length"]["mean"][-1] == pytest.approx(np.mean(lengths), rel=1e-5)
    student = 4.3026527  # of two degrees of freedom, 97.5 %
    half = student * np.std(lengths, ddof=1) / 3**0.5
    assert learned["length"]["ci95"][-1] == (pytest.approx(half, abs=1e-6) if half > 0 else None)  # equal: unknown
    assert "low" not in learned["return"]  # no share, though each return is 0 or 1: nobody has declared it
    capsys.readouterr()


def check_trials(several: Trainer, singles: list[Trainer], seeds: tuple[int, int]) -> None:
    """Both trials learn in all phases what trainers of one trial do with these seeds."""
    both = several.init(several.keys(0))
    alone = [single.init(jax.random.key(seed)) for single, seed in zip(singles, seeds, strict=True)]
    for phase in several.algo.phases:
        iterations = jnp.int32(min(phase.iterations or 3, 3))
        both, metrics = several.make_block(phase)(both, iterations)
        assert np.all(np.asarray(metrics.not_finite) == -1)
        for index, single in enumerate(singles):
            alone[index], expected = single.make_block(phase)(alone[index], iterations)
            for name, learned in expected.learning.items():
                actual = np.asarray(metrics.learning[name])[:, index]
                np.testing.assert_allclose(actual, learned, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_algorithms_learn_in_each_seed_what_they_do_alone(case: str) -> None:
    single = trainer_of(case)
    check_trials(dataclasses.replace(single, seeds=2), [single, single], (0, 1))


def test_a_seed_that_is_not_finite_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = FLAGS.replace("helpers.tiny:TinyQ", "test_session:Study") + " --breaks_at 5 --num_seeds 2 --devices 1"
    assert jaxrl.cli.train.main(f"{flags} --total_env_steps 1280 --runs {tmp_path}".split()) == 1
    assert "loss is not finite at update" in capsys.readouterr().err


def test_seeds_that_a_run_has_not(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jaxrl.cli.evaluate.main([str(three / "seed_7")]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert jaxrl.cli.train.main(["--resume", str(three / "seed_4")]) == 2
    assert f"is one trial of the run {three}" in capsys.readouterr().err


# Sweeps


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two learning rates and two discounts, with two seeds each."""
    folder = tmp_path_factory.mktemp("sweep")
    words = f"{FLAGS} --seed 4 --num_seeds 2 --devices 1 --total_env_steps 1280 --runs {folder} --sweep".split()
    assert jaxrl.cli.train.main([*words, "lr=0.1,0.3 gamma=0.5,0.9"]) == 0
    return Path((folder / "latest").read_text().strip())


@pytest.mark.parametrize(("lr", "gamma", "seed"), [(0.1, 0.9, 4), (0.3, 0.5, 5)])
def test_every_trial_is_the_run_with_its_settings(
    sweep: Path, lr: float, gamma: float, seed: int, tmp_path: Path
) -> None:
    flags = f"--seed {seed} --devices 1 --total_env_steps 1280 --lr {lr} --gamma {gamma}"
    single, trial = train_run(flags, tmp_path), sweep / f"lr={lr},gamma={gamma}" / f"seed_{seed}"
    close(outcome_rows(trial), outcome_rows(single))
    actual, expected = (jaxrl.load(run, best=False) for run in (trial, single))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), actual.params, expected.params)
    assert actual.config.algo_settings == expected.config.algo_settings
    assert (actual.config.run.seed, actual.config.run.sweep, actual.config.run.num_seeds) == (seed, "", 1)


def test_the_table_of_a_sweep(sweep: Path) -> None:
    """Means and Student's intervals over the seeds of each combination, of what each trial's own metrics say."""
    trials = json.loads((sweep / "trials.json").read_text())
    assert (sweep / "trials.png").read_bytes().startswith(b"\x89PNG")
    assert trials["seeds"] == 2 and trials["of"] == "selection episodes"
    assert list(trials["combinations"]) == [f"lr={lr},gamma={gamma}" for lr in (0.1, 0.3) for gamma in (0.5, 0.9)]
    for name, curve in trials["combinations"].items():
        scores = [
            [row["eval/return"] for row in outcome_rows(sweep / name / f"seed_{seed}") if "eval/return" in row]
            for seed in (4, 5)
        ]
        assert curve["env_steps"] == [320, 640, 960, 1280]
        np.testing.assert_allclose(curve["mean"], np.mean(scores, axis=0), rtol=1e-6)
        student = 12.7062047  # of one degree of freedom, 97.5 %
        half = student * np.std(scores, axis=0, ddof=1) / 2**0.5
        shown = [half if half is not None else 0.0 for half in curve["ci95"]]  # None where all seeds are equal
        np.testing.assert_allclose(shown, half, rtol=1e-5, atol=1e-6)
    with (sweep / "trials.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    expected = [(lr, gamma, seed) for lr in ("0.1", "0.3") for gamma in ("0.5", "0.9") for seed in ("4", "5")]
    assert [(row["lr"], row["gamma"], row["seed"]) for row in table] == expected
    for row in table:
        trial = outcome_rows(sweep / f"lr={row['lr']},gamma={row['gamma']}" / f"seed_{row['seed']}")
        evaluated = [line for line in trial if "eval/return" in line]
        assert [line["env_steps"] for line in evaluated] == [320, 640, 960, 1280] and row["env_steps"] == "1280"
        assert float(row["return at the end"]) == evaluated[-1]["eval/return"]
        assert float(row["best return"]) == max(line["eval/return"] for line in evaluated)


def test_looking_at_a_sweep(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"is a sweep: name one of its combinations, .*lr=0\.3,gamma=0\.9"):
        jaxrl.load(sweep)
    file = tmp_path / "found.json"
    arguments = ["--episodes", "16", "--policy", "learned,random", "--last", "--json", str(file)]
    assert jaxrl.cli.evaluate.main([str(sweep / "lr=0.1,gamma=0.9"), *arguments]) == 0
    assert json.loads(file.read_text())["seeds"] == 2
    assert jaxrl.cli.evaluate.main([str(sweep)]) == 2
    assert "is a sweep" in capsys.readouterr().err


def test_a_resumed_sweep_is_exact(tmp_path: Path) -> None:
    flags = "--sweep lr=0.1,0.3 --num_seeds 2 --devices 1 --total_env_steps"
    whole, part = train_run(f"{flags} 1280", tmp_path), train_run(f"{flags} 960", tmp_path)
    resume(part, "--total_env_steps 1280")
    trials = [f"lr={lr}/seed_{seed}" for lr in (0.1, 0.3) for seed in (0, 1)]
    for name in ("", "lr=0.1", "lr=0.3", *trials):
        assert outcome_rows(part / name) == outcome_rows(whole / name) and len(outcome_rows(whole / name)) > 15
    for name in trials:
        params = (jaxrl.load(run / name, best=False).params for run in (part, whole))
        jax.tree.map(np.testing.assert_array_equal, *params)
    assert (part / "trials.json").read_text() == (whole / "trials.json").read_text()


def test_a_sweep_that_is_killed(tmp_path: Path) -> None:
    """Kills, a flipped byte, other numbers of devices, in processes of their own: all trials end in the same bits."""
    flags = f"{FLAGS} --total_env_steps 28800 --block_iterations 8 --num_seeds 2 --sweep lr=0.05,0.1".split()
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "scripts.kill_and_resume", "--kills", "4", "--only", "kills,devices,damage"]
    done = subprocess.run(
        [*command, "--", *flags], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill  4" in done.stdout and "all equal" in done.stdout


def test_from_python_a_sweep_returns_its_best_policy(tmp_path: Path) -> None:
    algo, env = "helpers.tiny:TinyQ", "helpers.tiny:Corridor"
    settings = {"num_envs": 8, "total_env_steps": 640, "eval_every": 320, "eval_episodes": 8, "devices": 1}
    result = jaxrl.train(algo, env, sweep="lr=0.0,0.3", runs=str(tmp_path), **settings)
    combinations = json.loads((result.directory / "trials.json").read_text())["combinations"]
    assert combinations["lr=0"]["mean"][-1] < combinations["lr=0.3"]["mean"][-1]
    assert result.policy.config.algo_settings["lr"] == 0.3
    with pytest.raises(UsageError, match="leave out sweep"):
        jaxrl.make_train(algo, env, sweep="lr=0.0,0.3", **settings)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num_seeds 0", "num_seeds must lie between 1 and 4,096"),
        ("--num_seeds 2 --seed 4294967295", "exceeds 2^32: lower one of them"),
        ("--num_seeds 2 --devices 99", "--devices 99, but there are only"),
        ("lr", "'lr' has no values: write it as actor_lr=1e-4,3e-4"),
        ("lr=0.1", "needs several different values of lr, not '0.1'"),
        ("lr=0.1,0.1", "needs several different values of lr"),
        ("lr=0.1,x", "--sweep: lr must be a number, not 'x'"),
        ("gamma=0.1,11", "gamma must lie between 0 and 1"),
        ("lr=0.1,0.2 lr=0.3,0.4", "names lr twice"),
        ("capacity=32,64", "cannot vary capacity in one program: choose from gamma, lr"),
        ("gama=0.1,0.2", "unknown setting 'gama': did you mean 'gamma'?"),
        ("gamma=" + ",".join(f"{k / 5000}" for k in range(4097)), "more than 4,096 trials"),
    ],
)
def test_trials_that_are_refused(flags: str, sentence: str) -> None:
    """Of flags, and of values of --sweep."""
    words = flags.split() if flags.startswith("--") else ["--sweep", flags]
    with pytest.raises(UsageError, match=re.escape(sentence)):
        build_run(parse([*FLAGS.split(), "--total_env_steps", "640", *words]).config)


SWEPT = {
    "sac modern": {"alpha_lr": (1e-2, 3e-2), "gamma": (0.8, 0.9), "target_entropy": (-3.0, 0.0)},
    "ddpg expected": {
        "entropy_weight": (0.0, 0.1),
        "logit_weight": (1e-3, 0.0),
        "eps_start": (0.1, 0.5),
        "tau": (0.05, 0.2),
    },
    "ddpg continuous": {"exploration_noise": (0.1, 0.3), "critic_lr": (3e-3, 1e-3)},
    "coma": {
        "gamma": (0.9, 0.99), "td_lambda": (0.5, 0.9), "actor_lr": (1e-3, 1e-2), "final_lr_fraction": (0.1, 1.0),
        "eps_max": (0.5, 0.1), "eps_min": (0.1, 0.02), "entropy_weight": (0.0, 0.1), "entropy_final": (0.0, 0.01),
    },
    "ppo": {
        "gamma": (0.9, 0.99), "td_lambda": (0.5, 0.9), "clip_ratio": (0.1, 0.3), "actor_lr": (1e-3, 1e-2),
        "critic_lr": (1e-2, 1e-3), "final_lr_fraction": (0.1, 1.0), "entropy_weight": (0.0, 0.1),
    },
}  # fmt: skip


@pytest.mark.parametrize("vectorized", [True, False])
@pytest.mark.parametrize("case", SWEPT)
def test_traced_settings_are_those_of_the_field(case: str, vectorized: bool) -> None:
    """A trial with traced settings learns what the algorithm does that was made with these settings."""
    values = SWEPT[case]
    if case == "coma":
        sizes = {"minibatch_size": 80, "hidden_size": 8, "num_epochs": 2}
        single = make_trainer(Coma, Corridor(num_agents=2), 8, **sizes)
    elif case == "ppo":
        single = make_trainer(Ppo, Corridor(num_agents=2), 8, rollout_steps=10, num_minibatches=2, hidden_size=8)
    else:
        single = trainer_of(case)
    singles = [
        dataclasses.replace(
            single, algo=dataclasses.replace(single.algo, **{name: pair[index] for name, pair in values.items()})
        )
        for index in (0, 1)
    ]
    check_trials(dataclasses.replace(single, sweep=values, vectorized=vectorized), singles, (0, 0))
