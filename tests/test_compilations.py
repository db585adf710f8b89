"""After the first iteration of a run nothing is compiled but the program of its evaluations."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.cases import by_day
from helpers.runs import resume, run

from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.session import Session

COMA = "--algo coma --num_envs 8 --hidden_size 4 --minibatch_size 32 --eval_every 48"
REPLAY = "--num_envs 8 --hidden_size 8 --batch_size 8 --buffer_size 512 --eval_every 32 --devices 2"
# flags, environment steps of the run and of its continuation; an iteration of COMA has 32
JOBS = {
    "corridor": (f"{COMA} --env helpers.tiny:Corridor --num_agents 2 --horizon 4 --devices 1", 96, 160),
    "coverage": (f"{COMA} --q 2 --budget 3 --devices 1", 96, 160),
    "coverage, 8 devices": (f"{COMA} --q 2 --budget 3 --devices 8", 96, 160),
    "sac": (f"--config sac_quick {REPLAY} --random_steps 64 --horizon 6", 320, 640),
    "ddpg": (f"--config ddpg_quick {REPLAY} --learning_starts 32 --max_steps 6", 320, 640),
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


@pytest.mark.parametrize("job", by_day(JOBS, ["corridor"]))
def test_only_evaluations_are_compiled_later(job: str, tmp_path: Path, compilations: Compilations) -> None:
    jnp.ones(17) * 3  # what is compiled is noted
    assert "multiply" in compilations.names
    flags, total, longer = JOBS[job]
    directory = run(f"{flags} --eval_episodes 8 --checkpoint_every 1 --total_env_steps {total}", tmp_path)
    assert compilations.later == ["evaluate"]
    assert len(Checkpoints(directory / "checkpoints").steps()) == 3  # those that are kept
    jax.clear_caches()
    resume(directory, f"--total_env_steps {longer}")
    assert compilations.later == ["evaluate"]
