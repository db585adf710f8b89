"""Algorithms with a replay on several devices: the same bits on any number of them, and what devices exchange."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from helpers.off_policy import OptimisedLayout, digest, run, trainer_of

from jaxrl.runtime.checkpoint import Checkpoints


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        ("ddpg gumbel", (1, 8)),
        ("sac", (1, 8)),
        ("student", (1, 8)),
        pytest.param("ddpg published", (1, 8), marks=pytest.mark.long),
        pytest.param("ddpg bicnet", (1, 8), marks=pytest.mark.long),
        pytest.param("sac modern", (1, 2, 4, 8), marks=pytest.mark.long),
    ],
)
def test_exact_training_has_the_same_bits_on_any_number_of_devices(
    case: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    """From the start, and from a checkpoint of one device, written when the ring has gone round.

    SAC plays no random steps here: its ring is full as soon.
    """
    more: dict[str, Any] = {"kind": OptimisedLayout, "random_steps": 0} if case == "sac" else {}
    begun, ended = [], []
    with Checkpoints(tmp_path) as checkpoints:
        for devices in counts:
            trainer = trainer_of(case, devices, exact=True, **more)
            state, _ = run(trainer, 8)
            assert int(state.algo.sharded.filled[0]) == trainer.algo.rows - 1
            begun.append(digest(state))
            block = trainer.make_block(trainer.algo.phases[-1])
            if devices == 1:
                checkpoints.save(1, state, {})
                checkpoints.wait()
                ended.append(digest(block(state, jnp.int32(2))[0]))
            _, restored, _ = checkpoints.restore(trainer.shapes())
            ended.append(digest(block(restored, jnp.int32(2))[0]))
    for states in (begun, ended):
        assert {name for state in states for name in state if state[name] != states[0][name]} == set()
    assert ended[0] != begun[0]


@pytest.mark.parametrize(
    "case",
    [
        "ddpg gumbel",
        pytest.param("ddpg published", marks=pytest.mark.long),
        pytest.param("sac modern", marks=pytest.mark.long),
    ],
)
def test_devices_exchange_gradients_only_and_the_replay_is_not_copied(case: str) -> None:
    trainer = trainer_of(case, 2, buffer_size=400_000)
    block = trainer.make_block(trainer.algo.phases[-1]).lower(trainer.shapes(), jnp.int32(1)).compile()
    text = block.as_text()
    assert re.search(r"all-reduce", text) and not re.search(r"all-gather|all-to-all|collective-permute", text)
    memory = block.memory_analysis()
    ring = 200_000 * trainer.algo._row_bytes
    assert memory.alias_size_in_bytes >= ring > 4 * memory.temp_size_in_bytes
