"""Every preset trains at its own sizes of networks and minibatches; only its run is short, and has few environments."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.runs import run

from jaxrl import algos
from jaxrl.algos.off_policy import OffPolicy
from jaxrl.cli.flags import parse
from jaxrl.report.writer import read_metrics
from jaxrl.runtime.presets import presets

pytestmark = pytest.mark.slow

ENVS = 8
COMMON = "--devices 1 --eval_every 0"
# One episode of each environment in each phase that collects, and one call of `learn` in each that learns.
COLLECTIVE = (
    f"{COMMON} --num_envs {ENVS} --random_steps 1 --learner_steps 1 --worker_steps 1 --updates_per_call 2 "
    "--initial_updates 2 --transformer_updates 2 --actor_updates 2 --critic_updates 2"
)


def shorten(preset: str) -> str:
    """Flags with which a run of a preset ends after its first iterations that learn."""
    config = parse(["--config", preset]).config
    settings = config.plain()
    envs = min(settings["num_envs"], ENVS)
    if not issubclass(algos.find(config.algo), OffPolicy):
        rollout = settings.get("rollout_steps") or settings.get("horizon") or config.make_env().spec.horizon
        return f"{COMMON} --num_envs {envs} --total_env_steps {envs * rollout}"
    batch = settings["batch_size"]
    start = "--random_steps" if settings["random_steps"] else "--learning_starts"
    capacity = 4 * batch + 100 * envs
    return (
        f"{COMMON} --num_envs {envs} {start} {batch} --buffer_size {capacity} "
        f"--total_env_steps {batch + 4 * max(envs, int(settings['env_steps_per_update']))}"
    )


def check_metrics(directory: Path, algo: str) -> None:
    """Every network has learned, and every metric of learning is a number: what is not finite is None in its row."""
    rows: list[dict[str, Any]] = [row for row in read_metrics(directory) if row.get("updates")]
    assert rows
    learned = {name: [row[name] for row in rows if name in row] for row in rows for name in row if "loss" in name}
    assert learned
    for name, values in learned.items():
        assert None not in values and np.isfinite(values).all(), name


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of sac, one for each task of the collectives."""
    folder = tmp_path_factory.mktemp("workers")
    tasks = ("reach", "above", "hover", "mirrored", "closed")
    return {task: run(f"--config sac {shorten('sac')} --task {task}", folder) for task in tasks}


def train_collective(preset: str, workers: dict[str, Path], folder: Path, flags: str = "") -> Path:
    tasks = parse(["--config", preset]).config.plain()["task"].split(",")
    names = ",".join(str(workers[task]) for task in tasks)
    return run(f"--config {preset} {COLLECTIVE} --workers {names} {flags}", folder)


@pytest.fixture(scope="module")
def teacher(workers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_collective("collective", workers, tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize("preset", presets())
def test_a_preset_trains(preset: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    algo = parse(["--config", preset]).config.algo
    if algo == "collective":
        directory = train_collective(preset, request.getfixturevalue("workers"), tmp_path)
    elif algo == "student":
        directory = run(f"--config {preset} {shorten(preset)} --teacher {request.getfixturevalue('teacher')}", tmp_path)
    else:
        env = "" if parse(["--config", preset]).config.env else "--env reach"
        directory = run(f"--config {preset} {env} {shorten(preset)}", tmp_path)
    check_metrics(directory, algo)
