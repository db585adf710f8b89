"""What changes no result: an interruption, the number of devices, the length of blocks, one program for all phases.

Two tables, one of interruptions and one of devices; a new algorithm takes part by a row in `TRAINERS`. Rows of one
algorithm share its compiled programs and its undisturbed run.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import by_day
from helpers.off_policy import CASES, assert_close, digest, keys_as_numbers, make_trainer, trainer_of
from helpers.programs import note_compilations
from helpers.tiny import Corridor, PointMass, TinyQ
from helpers.whisper import Whisper

import envs_jax
from jaxrl.algos.coma import Coma
from jaxrl.algos.ppo import Ppo
from jaxrl.rl.data_parallel import make_mesh
from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.trainer import Trainer, TrainState

COMA = {
    "hidden_size": 8, "num_epochs": 2, "minibatch_size": 160, "actor_lr": 1e-2, "critic_lr": 1e-2,
    "normalize_advantage": True, "clip_ratio": 0.2, "dueling": True, "tau": 0.1, "final_lr_fraction": 0.5,
    "entropy_weight": 0.01, "max_grad_norm": 0.5,
}  # fmt: skip
PPO = {
    "rollout_steps": 6, "num_minibatches": 2, "hidden_size": 8, "actor_lr": 3e-3, "critic_lr": 3e-3, "gamma": 0.9,
    "normalize_observation": "always",
}  # fmt: skip
TEAM = Corridor(num_agents=2)


@functools.cache
def make_trials(devices: int = 1) -> Trainer:
    """Two seeds of each of two learning rates."""
    trainer = make_trainer(TinyQ, TEAM, 16)
    return dataclasses.replace(trainer, seeds=2, sweep={"lr": (0.1, 0.3)}, mesh=make_mesh(devices))


# By name: the trainer for a number of devices, of 16 environments in 8 logical shards.
TRAINERS: dict[str, Callable[..., Trainer]] = {
    "q": lambda devices=1: make_trainer(TinyQ, TEAM, 16, devices),
    "q, four trials": make_trials,
    "coma": lambda devices=1: make_trainer(Coma, TEAM, 16, devices, **COMA),
    "coma, coverage": lambda devices=1: make_trainer(
        Coma, envs_jax.make("coverage", q=5, num_agents=2, budget=3), 16, devices, **COMA, egocentric=True
    ),
    "ppo": lambda devices=1: make_trainer(Ppo, TEAM, 16, devices, **PPO),
    "ppo, continuous": lambda devices=1: make_trainer(Ppo, PointMass(num_agents=2, tasks=2), 16, devices, **PPO),
    "ppo, memory": lambda devices=1: make_trainer(Ppo, TEAM, 16, devices, **PPO, memory="lstm", memory_size=4),
    "ppo, messages": lambda devices=1: make_trainer(
        Ppo, Whisper(delay=2), 16, devices, **PPO, message_passing="attention", share_parameters=False
    ),
    # whose targets are due at every second update only, so that the number of an update matters
    "sac": lambda devices=1: trainer_of("sac", devices, target_update_period=2),
    **{case: functools.partial(trainer_of, case) for case in CASES if case != "sac"},
}


LAST_ITERATIONS = 8  # of the last phase: replays are full, and go round


def run_phases(case: str, devices: int = 1, interrupted: str = "", folder: Path = Path()) -> TrainState:
    """A run of all phases, which is `interrupted` half-way through the phase of that name and goes on from the disk."""
    trainer = TRAINERS[case](devices)
    state = trainer.init(trainer.keys(0))
    for phase in trainer.algo.phases:
        iterations = max(phase.iterations or LAST_ITERATIONS, 2)
        block, first = trainer.make_block(phase), iterations // 2
        if phase.name == interrupted:
            state, _ = block(state, jnp.int32(first))
            state = move_to(trainer, state, folder)
            iterations -= first
        state, metrics = block(state, jnp.int32(iterations))
        assert np.all(metrics.iterations == iterations) and np.all(metrics.not_finite == -1)
    return state


def move_to(trainer: Trainer, state: TrainState, folder: Path) -> TrainState:
    """The state as the trainer of another process, or of other devices, finds it on the disk."""
    moved: TrainState
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        _, moved, _ = checkpoints.restore(trainer.shapes())
    return moved


@functools.cache
def undisturbed(case: str, devices: int = 1) -> TrainState:
    return run_phases(case, devices)


# Interruptions

INTERRUPTIONS = [
    ("sac", "random"),
    ("sac", "burst"),
    ("sac", "train"),
    ("coma", "train"),
    *((case, "train") for case in TRAINERS if case not in ("sac", "coma")),
    ("q", "fill"),
]


@pytest.mark.parametrize(("case", "phase"), by_day(INTERRUPTIONS, INTERRUPTIONS[:4]))
def test_an_interruption_changes_no_bit(case: str, phase: str, tmp_path: Path) -> None:
    """Half-way through a phase: parameters, memories, messages under way, replays, episodes, counters and keys."""
    assert digest(run_phases(case, interrupted=phase, folder=tmp_path)) == digest(undisturbed(case))


# Devices

TOLERANCES = {"coma": 1e-4, "coma, coverage": 1e-3, "q": 1e-3, "q, four trials": 1e-5}  # of others 1e-2
DEVICES = [
    ("coma", 8),
    *((case, count) for case in ("coma", "sac modern", "q, four trials") for count in (2, 4)),
    *((case, 8) for case in TRAINERS if case not in ("coma", "q, four trials")),  # of which there are four
]


@pytest.mark.parametrize(("case", "devices"), by_day(DEVICES, DEVICES[:1]))
def test_devices_change_only_the_order_of_sums(case: str, devices: int, tmp_path: Path) -> None:
    """From the start, and from a checkpoint of one device."""
    tolerance = TOLERANCES.get(case, 1e-2)
    one, several = undisturbed(case), undisturbed(case, devices)
    assert_close((one.algo.replicated, one.progress), (several.algo.replicated, several.progress), tolerance)
    ends = []
    for count in (1, devices):
        trainer = TRAINERS[case](count)
        block = trainer.make_block(trainer.algo.phases[-1])
        ends.append(block(move_to(trainer, one, tmp_path / str(count)), jnp.int32(2))[0])
    assert_close(ends[0].algo.replicated, ends[1].algo.replicated, tolerance)


def test_games_are_the_same_bits_on_any_number_of_devices() -> None:
    """Before the first update actions depend only on keys."""
    states = []
    for devices in (1, 8):
        trainer = TRAINERS["q"](devices)
        block = trainer.make_block(trainer.algo.phases[0])
        state, metrics = block(trainer.init(jax.random.key(0)), jnp.int32(12))
        states.append(digest(state))
    assert metrics.episodes["reached"].sum() > 1 and metrics.episodes["episodes"].sum() > 16
    assert states[0] == states[1]


def find_collectives(program: str) -> list[tuple[str, int]]:
    """(operation, elements) of every collective in a compiled program."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
    matches = re.findall(rf"= (.*?) ({names})(?:-start)?\(", program)
    sizes = [(name, re.findall(r"\w+\[([\d,]*)\]", shapes)) for shapes, name in matches]
    return [(name, sum(math.prod(map(int, s.split(","))) if s else 1 for s in shapes)) for name, shapes in sizes]


EXCHANGES = [("coma", 8), ("ddpg expected", 2), ("ddpg published", 2), ("sac modern", 2)]


@pytest.mark.parametrize(("case", "devices"), by_day(EXCHANGES, EXCHANGES[:2]))
def test_devices_exchange_gradients_and_scalars_only(case: str, devices: int) -> None:
    """And a replay is not copied."""
    has_replay = case in CASES
    trainer = trainer_of(case, devices, buffer_size=400_000) if has_replay else TRAINERS[case](devices)
    shapes = trainer.shapes()
    program = trainer.make_block(trainer.algo.phases[-1]).lower(shapes, jnp.int32(1)).compile()
    exchanged = find_collectives(program.as_text())
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes.algo.replicated))
    assert exchanged and {name for name, _ in exchanged} == {"all-reduce"}
    assert max(size for _, size in exchanged) <= parameters + 16
    if has_replay:
        usage = program.memory_analysis()
        buffer_bytes = 400_000 // devices * trainer.algo.row_bytes
        assert usage.alias_size_in_bytes >= buffer_bytes > 4 * usage.temp_size_in_bytes


# Blocks and programs


def test_blocks_of_any_length_compile_once_donate_and_end_in_the_same_bits() -> None:
    trainer = dataclasses.replace(TRAINERS["q"](8))  # no block of it is compiled yet
    fill, train = trainer.algo.phases
    block = trainer.make_block(train)

    def begin() -> TrainState:
        state: TrainState = trainer.make_block(fill)(trainer.init(jax.random.key(0)), jnp.int32(2))[0]
        return state

    parts, rows = begin(), []
    for iterations in (3, 4):
        before, count = parts, jnp.int32(iterations)
        with note_compilations() as compiled:
            parts, metrics = block(parts, count)
        assert len(compiled) == (1 if iterations == 3 else 0)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        assert int(metrics.iterations) == iterations
        rows.append(jax.tree.map(lambda x, n=iterations: x[:n], metrics.learning))
    whole, metrics = block(begin(), jnp.int32(7))
    assert digest(parts) == digest(whole)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)
    assert digest(joined) == digest(jax.tree.map(lambda x: x[:7], metrics.learning))


PROGRAMS = [("sac", 1, 1), ("ddpg expected", 1, 1), ("sac", 2, 1), ("sac", 1, 2)]


@pytest.mark.parametrize(("case", "devices", "seeds"), by_day(PROGRAMS, PROGRAMS[:1]))
def test_one_program_runs_all_phases(case: str, devices: int, seeds: int) -> None:
    """As the programs of the phases do, one after another."""
    trainer = TRAINERS[case](devices)
    trainer = dataclasses.replace(trainer, seeds=seeds) if seeds > 1 else trainer
    shape = (seeds,) if seeds > 1 else ()
    states, metrics = [], []
    for joint in (False, True):
        state = trainer.init(trainer.keys(0))
        for index, phase in enumerate(trainer.algo.phases):
            block = trainer.make_block(None if joint else phase)
            state = dataclasses.replace(
                state, phase=jnp.full(shape, index, jnp.int32), iteration=jnp.zeros(shape, jnp.uint32)
            )
            state, rows = block(state, jnp.int32(phase.iterations or 3))
            if joint and not phase.updates:
                assert not np.any(rows.learning["critic_loss"])
            if joint and not phase.steps:
                assert not np.any(rows.episodes["length"])
        states.append(keys_as_numbers(state))
        metrics.append(rows)
    chex.assert_trees_all_close(*states, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(*metrics, rtol=1e-5, atol=1e-6)
