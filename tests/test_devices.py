"""Algorithms with a replay on several devices: the same results on any number of them, and what devices exchange."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.off_policy import assert_close, digest, run, trainer_of

from jaxrl.runtime.checkpoint import Checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "counts"),
    [
        pytest.param("ddpg expected", (1, 8), marks=pytest.mark.slow),
        ("sac", (1, 8)),
        pytest.param("student", (1, 8), marks=pytest.mark.slow),
        pytest.param("ddpg published", (1, 8), marks=pytest.mark.slow),
        pytest.param("ddpg bicnet", (1, 8), marks=pytest.mark.slow),
        pytest.param("ddpg continuous", (1, 8), marks=pytest.mark.slow),
        pytest.param("sac modern", (1, 2, 4, 8), marks=pytest.mark.slow),
    ],
)
def test_training_computes_the_same_on_any_number_of_devices(
    case: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    """Up to the order of sums, from the start and from a checkpoint of one device, when the ring has gone round.

    SAC and continuous DDPG play no random steps here: their rings are full as soon.
    """
    more: dict[str, Any] = {"random_steps": 0} if case in ("sac", "ddpg continuous") else {}
    initial, ended = [], []
    with Checkpoints(tmp_path) as checkpoints:
        for devices in counts:
            trainer = trainer_of(case, devices, **more)
            state, _ = run(trainer, 8)
            assert int(state.algo.sharded.filled[0]) == trainer.algo.replay_rows - 1
            initial.append(jax.device_get(state.algo.replicated))
            block = trainer.make_block(trainer.algo.phases[-1])
            if devices == 1:
                checkpoints.save(1, state, {})
                checkpoints.wait()
            _, restored, _ = checkpoints.restore(trainer.shapes())
            ended.append(jax.device_get(block(restored, jnp.int32(2))[0].algo.replicated))
    for states in (initial, ended):
        for state in states[1:]:
            assert_close(states[0], state, 1e-2)
    assert digest(ended[0]) != digest(initial[0])


@pytest.mark.parametrize(
    "case",
    [
        "ddpg expected",
        pytest.param("ddpg published", marks=pytest.mark.slow),
        pytest.param("sac modern", marks=pytest.mark.slow),
    ],
)
def test_devices_exchange_gradients_only_and_the_replay_is_not_copied(case: str) -> None:
    trainer = trainer_of(case, 2, buffer_size=400_000)
    block = trainer.make_block(trainer.algo.phases[-1]).lower(trainer.shapes(), jnp.int32(1)).compile()
    text = block.as_text()
    assert re.search(r"all-reduce", text) and not re.search(r"all-gather|all-to-all|collective-permute", text)
    usage = block.memory_analysis()
    buffer_bytes = 200_000 * trainer.algo.row_bytes
    assert usage.alias_size_in_bytes >= buffer_bytes > 4 * usage.temp_size_in_bytes
