"""An iteration in pieces computes what a block of one iteration does, and can be given up."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import by_day
from helpers.off_policy import Compiled, keys_as_numbers
from helpers.tiny import Corridor

from envs_jax.batch import batched
from jaxrl.algos.base import Algorithm, AlgoState, Phase
from jaxrl.algos.coma import Coma
from jaxrl.algos.ppo import Ppo
from jaxrl.rl.data_parallel import DataParallel, make_mesh
from jaxrl.runtime import pieces as in_pieces
from jaxrl.runtime.not_finite import find_failure
from jaxrl.runtime.pieces import Pieces, StageProgress
from jaxrl.runtime.program import Program
from jaxrl.runtime.train_state import BlockMetrics, Position
from jaxrl.runtime.trainer import Trainer

ENVS, AGENTS, HORIZON = 8, 2, 10
COMA = {"minibatch_size": 40, "num_epochs": 3, "actor_epochs": 2, "tau": 0.1, "hidden_size": 8}
CASES: dict[str, tuple[type[Algorithm], dict[str, Any], int]] = {
    "coma": (Coma, COMA, 1),
    "coma on two devices": (Coma, COMA, 2),
    "ppo": (Ppo, {"rollout_steps": 6, "num_minibatches": 2, "num_epochs": 2, "hidden_size": 8}, 1),
    "coma with a memory": (Coma, COMA | {"memory": "gru", "memory_size": 8, "normalize_advantage": True}, 1),
    "ppo with a memory on two devices": (
        Ppo,
        {"rollout_steps": 6, "num_minibatches": 2, "num_epochs": 2, "hidden_size": 8, "memory": "lstm"},
        2,
    ),
}


@functools.cache  # tests of a case share its programs
def make_trainer(case: str) -> Trainer:
    algo, settings, devices = CASES[case]
    env, layout = Corridor(num_agents=AGENTS), DataParallel(ENVS, shards=2, devices=devices)
    algorithm, chunk = algo(env.spec, layout, **settings), 2 if algo is Coma else 0
    return Compiled(batched(env), algorithm, layout, make_mesh(devices), 4, chunk, jnp.dtype("float16"), 1000)


@functools.cache
def make_pieces(case: str) -> Pieces:
    trainer = make_trainer(case)
    (phase,) = trainer.algo.phases
    functions = in_pieces.make_programs(trainer, phase)
    programs = {name: Program(lambda function=functions[name]: function, lambda *_: None) for name in functions}
    return Pieces(programs, trainer.algo, phase, trainer.chunks(), ENVS // trainer.chunks())


SHARED = "coma on two devices"


@pytest.mark.parametrize("case", by_day(CASES, [SHARED]))
def test_pieces_do_what_a_block_does(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_pieces, "PIECE_SECONDS", 1e-9)  # every step on its own
    trainer = make_trainer(case)
    (phase,) = trainer.algo.phases
    block, pieces = trainer.make_block(phase), make_pieces(case)
    state, other = trainer.init(jax.random.key(3)), trainer.init(jax.random.key(3))
    reports: list[StageProgress] = []
    assert pieces.measure(other) > 0  # leaves no trace
    for _ in range(3):
        state, expected = block(state, jnp.int32(1))
        result = pieces.run(other, reports.append, lambda left: False)
        assert result is not None
        other, metrics = result
        first = jax.tree.map(lambda x: np.asarray(x)[:1], (expected.learning, expected.episodes))
        chex.assert_trees_all_close((metrics.learning, metrics.episodes), first, rtol=2e-5, atol=1e-6)
        assert int(metrics.not_finite) == int(expected.not_finite) == -1 and int(metrics.iterations) == 1

    chex.assert_trees_all_close(keys_as_numbers(other), keys_as_numbers(state), rtol=2e-5, atol=1e-6)
    rollout = [done for done in reports if done.activity == "rolling out"]
    assert [done.done for done in rollout] == [*range(ENVS // trainer.chunks(), ENVS + 1, ENVS // trainer.chunks())] * 3
    updates = [done for done in reports if done.unit == "minibatches"]
    stages = len(trainer.algo.learn_stages)
    assert len(updates) == 3 * sum(stage.steps for stage in trainer.algo.learn_stages)
    assert updates[-1].seconds_left == 0.0 and sum(done.done == done.total for done in updates) == 3 * stages
    lefts = [done.seconds_left for done in reports[-len(reports) // 3 :]]
    assert all(left is not None and left >= 0 for left in lefts)


def test_an_iteration_that_is_given_up_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_pieces, "PIECE_SECONDS", 1e-9)
    trainer = make_trainer(SHARED)
    pieces, state = make_pieces(SHARED), trainer.init(jax.random.key(0))
    total = trainer.chunks() + sum(stage.steps for stage in trainer.algo.learn_stages)
    before = jax.tree.map(np.asarray, jax.device_get(state.algo.replicated))
    for piece in (1, 3, total - 1):
        remaining: list[float] = []

        def stop(left: float, remaining: list[float] = remaining, piece: int = piece) -> bool:
            remaining.append(left)
            return len(remaining) == piece

        assert pieces.run(state, lambda done: None, stop) is None and len(remaining) == piece
        chex.assert_trees_all_equal(jax.device_get(state.algo.replicated), before)
    whole = pieces.run(state, lambda done: None, lambda left: False)
    fresh, _ = trainer.make_block(trainer.algo.phases[0])(trainer.init(jax.random.key(0)), jnp.int32(1))
    assert whole is not None
    chex.assert_trees_all_close(whole[0].algo.replicated, fresh.algo.replicated, rtol=2e-5, atol=1e-6)


def test_only_long_iterations_are_run_in_pieces() -> None:
    def in_pieces_wanted(num_envs: int, backend: str) -> bool:
        env = Corridor(num_agents=AGENTS)
        algo = Coma(env.spec, DataParallel(num_envs))
        return in_pieces.needs_pieces(algo, algo.phases[0], backend)

    min_envs = in_pieces.MIN_TRANSITIONS // (AGENTS * HORIZON) + 1
    assert in_pieces_wanted(min_envs, "cpu") and in_pieces_wanted(100 * min_envs, "gpu")
    assert not in_pieces_wanted(min_envs - 1, "cpu") and not in_pieces_wanted(min_envs, "gpu")


class LearnsMore(Coma):
    """Adds a metric."""

    def learn(self, state: AlgoState, *arguments: Any) -> Any:
        state, metrics = super().learn(state, *arguments)
        return state, metrics | {"more": jnp.float32(1)}


def test_a_learn_method_of_ones_own_is_not_run_in_pieces() -> None:
    """Pieces would not call it, and which way an iteration runs must change nothing."""
    spec, layout = Corridor(num_agents=AGENTS).spec, DataParallel(in_pieces.MIN_TRANSITIONS)
    for cls, expected in ((Coma, True), (LearnsMore, False)):
        algo = cls(spec, layout)
        assert in_pieces.needs_pieces(algo, algo.phases[0], "cpu") == expected


def test_a_value_that_is_not_finite_is_named() -> None:
    trainer = make_trainer(SHARED)
    (phase,) = trainer.algo.phases
    pieces, state = make_pieces(SHARED), trainer.init(jax.random.key(0))
    params = state.algo.replicated
    weights = jax.tree.map_with_path(lambda path, x: x * jnp.nan if "fc1_bias" in str(path) else x, params.actor.params)
    actor = dataclasses.replace(params.actor, params=weights)
    algo = dataclasses.replace(state.algo, replicated=dataclasses.replace(params, actor=actor))
    bad = dataclasses.replace(state, algo=algo)
    result = pieces.run(jax.tree.map(jnp.copy, bad), lambda done: None, lambda left: False)
    _, expected = trainer.make_block(phase)(bad, jnp.int32(1))
    assert result is not None
    assert int(result[1].not_finite) == int(expected.not_finite) >= 0


def test_the_update_that_is_not_finite_is_counted_over_all_epochs() -> None:
    """Epochs that train only the critic come first: the actor's second update of three is the sixth of seven."""
    actor_loss = np.array([[0.1, np.nan, np.nan]], np.float32)
    critic_loss = np.ones((1, 7), np.float32)
    fetched = BlockMetrics({"actor_loss": actor_loss, "critic_loss": critic_loss}, {}, np.int32(0), np.int32(1), {})
    before, phase, names = Position(iterations=100, updates=700), Phase("train", 1, 7), ["actor loss"]
    failure = find_failure(fetched, names, before, phase)
    assert failure is not None
    error = str(failure.to_error([], Path("runs/1")))
    assert "actor loss is not finite at update 706 (iteration 101)" in error
    assert "lower the learning rate" in error and "environment" not in error
    failure = find_failure(fetched, names, before, phase, {"reward"})
    assert failure is not None
    blamed = str(failure.to_error([], Path("runs/1")))
    assert "the environment gave a value that is not finite (NaN or infinity) as reward, and actor loss" in blamed
    assert "learning rate" not in blamed
