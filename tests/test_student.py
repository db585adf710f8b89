"""The student: agreement, the share of help at its corners, what it adds to rewards, and the reward of imitating."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy_cases import SAC, at_step, make_trainer
from tiny import PointMass

from envs_jax.base import Box, EnvSpec
from jaxrl.algos import student
from jaxrl.algos.student import Student
from jaxrl.parallel import Layout

ARM = EnvSpec("arm", 1, Box((5,)), Box((3,), low=-1.0, high=1.0), horizon=400)


def test_agreement_is_one_at_the_teachers_action() -> None:
    mean, deviation = jnp.array([0.1, -0.4]), jnp.array([0.2, 0.5])
    assert float(student.agreement(mean, mean, deviation)) == 1.0
    away = student.agreement(mean + jnp.array([0.2, -1.0]), mean, deviation)
    assert float(away) == pytest.approx(math.exp(-0.5 * (1 + 4)))


def test_the_help_fades() -> None:
    """Constant for init + const steps, half at half the way, nothing from the end on."""
    for step, wanted in ((0, 1), (8_000, 1), (54_000, 0.5), (100_000, 0), (200_000, 0)):
        assert float(student.share_of_help(jnp.float32(step), 8_000, 100_000)) == pytest.approx(wanted)


def test_rewards_hold_the_help() -> None:
    algo = Student(ARM, Layout(1), help_weight=2.0, help_constant=100, help_until=300)
    batch = {
        "reward": jnp.array([[[[1.0]], [[2.0]]]]),
        "answer": {"action": jnp.zeros((1, 2, 1, 3)), "rho": jnp.array([[[0.25], [1.0]]])},
    }
    for step, weight in ((100, 2.0), (200, 1.0), (300, 0.0)):
        prepared = algo._prepared(batch, jnp.float32(step))
        np.testing.assert_allclose(prepared["reward"].ravel(), [1 + weight * 0.25, 2 + weight])
        assert prepared["answer"].shape == (1, 2, 1, 3)


def test_the_teacher_is_asked_about_the_action_taken() -> None:
    """By the least deviation granted; its own weights stay as they are, and after the end it is not asked."""
    env = PointMass(tasks=2)
    algo = Student(env.spec, Layout(4), units=8, batch_size=8, help_constant=10, help_until=50, help_deviation=0.3)
    teacher = make_teacher(algo)
    policy = algo.policy(jax.jit(lambda: algo.init(jax.random.key(0), {"teacher": teacher}))())
    for a, b in zip(jax.tree.leaves(policy["teacher"]), jax.tree.leaves(teacher), strict=True):
        np.testing.assert_array_equal(a, b)
    _, timestep = jax.vmap(lambda k: env.reset(k, ()))(jax.random.split(jax.random.key(1), 4))
    act = jax.jit(
        lambda progress: algo.act(policy, (), timestep, jax.random.split(jax.random.key(2), 4), progress, "explore")
    )
    action, _, extras = act(at_step(49))
    wanted = np.exp(-0.5 * np.sum(((np.asarray(action) - math.tanh(0.2)) / 0.3) ** 2, -1))
    np.testing.assert_allclose(extras["rho"], wanted, rtol=1e-4)
    assert not act(at_step(50))[2]["rho"].any()


def make_teacher(algo: Student) -> dict:
    """An actor that always means tanh(0.2) for certain."""
    actor = jax.tree.map(jnp.zeros_like, jax.jit(lambda: algo.init(jax.random.key(5), None).replicated.teacher)())
    actor["params"]["out_bias"] = jnp.array([0.2, 0.2, -5.0, -5.0])
    return actor


def test_a_student_that_is_paid_enough_imitates() -> None:
    """Where the reward says 'go to the corner', a dear teacher that always pushes by tanh(0.2) is followed instead."""
    settings = SAC | {"help_weight": 20.0, "help_constant": 10**6, "help_until": 2 * 10**6, "help_deviation": 0.2}
    trainer = make_trainer(Student, PointMass(), 8, update_interval=4, **settings)
    state = trainer.init(jax.random.key(0), {"teacher": make_teacher(trainer.algo)})
    for phase in trainer.algo.phases:
        state, _ = trainer.make_block(phase)(state, jnp.int32(phase.iterations or 120))
    policy, timestep = trainer.algo.policy(state.algo), state.timestep
    best, _, _ = trainer.algo.act(policy, (), timestep, jax.random.split(jax.random.key(0), 8), at_step(0), "best")
    np.testing.assert_allclose(best, math.tanh(0.2), atol=0.15)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"n_step": 3}, "n_step must be 1, not 3"),
        ({"help_deviation": 0.0}, "help_deviation must be above 0"),
        ({"help_until": 4000}, r"help_until must lie above init_steps \+ help_constant \(4,000\)"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Student(ARM, Layout(1), **settings)
    assert dataclasses.replace(Student(ARM, Layout(1)), n_step=1).target_freq == 2
