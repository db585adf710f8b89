"""After the first iteration of a run nothing is compiled but the program of its evaluations."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxrl
from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.session import Session
from tests.helpers.runs import resume, run

COMA = "--algo coma --q 2 --budget 3 --num_envs 8 --hidden_size 4 --minibatch_size 32 --eval_every 48 --eval_episodes 8"
SHORT = {"num_envs": 8, "hidden_size": 8, "batch_size": 8, "buffer_size": 512, "eval_every": 32, "eval_episodes": 8}
OFF_POLICY: dict[str, dict[str, Any]] = {
    "sac_quick": SHORT | {"random_steps": 64, "horizon": 6},
    "ddpg_quick": SHORT | {"learning_starts": 32, "max_steps": 6},
}


class Compilations(logging.Handler):
    """Names of the functions that are compiled, or read from JAX's cache; `later`: while a run trains, after its first
    iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.later: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if match := re.match(r"Finished XLA compilation of jit\((.*)\) in", record.getMessage()):
            self.names.append(match[1])


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilations]:
    noted = Compilations()
    train, run_block = Session.train, Session._run_block
    began: list[int] = []

    def train_and_note(self: Session, state: Any) -> str:
        began.clear()
        reason = train(self, state)
        noted.later = noted.names[began[0] :]
        return reason

    def run_block_and_note(self: Session, state: Any) -> Any:
        state = run_block(self, state)
        began.append(len(noted.names))
        return state

    monkeypatch.setattr(Session, "train", train_and_note)
    monkeypatch.setattr(Session, "_run_block", run_block_and_note)
    logger = logging.getLogger("jax._src.dispatch")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(noted)
    jax.config.update("jax_log_compiles", True)
    jax.clear_caches()  # other tests have compiled the small functions that would be noticed here
    yield noted
    jax.config.update("jax_log_compiles", False)
    logger.removeHandler(noted)


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_the_main_job(devices: int, tmp_path: Path, compilations: Compilations) -> None:
    jnp.ones(17) * 3  # what is compiled is noted
    assert "multiply" in compilations.names
    flags = f"--devices {devices} --checkpoint_every 1"
    directory = run(f"{COMA} {flags} --total_episodes 24", tmp_path)
    assert compilations.later == ["evaluate"]
    assert Checkpoints(directory / "checkpoints").steps() == [1, 2, 3]
    jax.clear_caches()
    resume(directory, "--total_episodes 40")
    assert compilations.later == ["evaluate"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sac_quick", "ddpg_quick"])
def test_runs_with_a_replay(preset: str, tmp_path: Path, compilations: Compilations) -> None:
    """They have several phases."""
    settings = OFF_POLICY[preset] | {"devices": 2, "checkpoint_every": 1, "runs": str(tmp_path)}
    finished = jaxrl.train(preset.partition("_")[0], preset=preset, total_env_steps=320, progress=False, **settings)
    assert compilations.later == ["evaluate"]
    jax.clear_caches()
    resume(finished.directory, "--total_env_steps 640")
    assert compilations.later == ["evaluate"]
