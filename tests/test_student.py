"""The student: agreement, the share of help at its corners, what it adds to rewards, and SAC without it."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.off_policy import SAC, TEACHER, at_step, digest, make_trainer, run
from helpers.tiny import PointMass

from envs_jax.base import Box, EnvSpec
from jaxrl.algos import student
from jaxrl.algos.collective.algorithm import Collective
from jaxrl.algos.multi_stage import UpstreamRun
from jaxrl.algos.sac import Sac
from jaxrl.algos.student import Student
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.trainer import Trainer, TrainState

pytestmark = pytest.mark.slow

ARM = EnvSpec("arm", 1, Box((5,)), Box((3,), low=-1.0, high=1.0), horizon=400)
TAUGHT = {"resolved_inputs": json.dumps(TEACHER), "env_steps_per_update": 2}


def test_the_help_fades() -> None:
    """Constant for init + const steps, half at half the way, nothing from the end on."""
    share = jax.jit(lambda step: student.teacher_weight_schedule(step, 8_000, 100_000))
    for step, expected in ((0, 1), (8_000, 1), (54_000, 0.5), (100_000, 0), (200_000, 0)):
        assert float(share(np.float32(step))) == pytest.approx(expected)


def test_rewards_hold_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """At full weight until init + const = 110, at half of it half-way to 310, at none from there on."""
    algo = Student(
        ARM,
        DataParallel(1),
        teacher_weight=2.0,
        random_steps=10,
        teacher_constant_steps=100,
        teacher_until_step=310,
        **TAUGHT,
    )
    batch = {
        "reward": np.float32([[[[1.0]], [[2.0]]]]),
        "rho": np.float32([[[[0.25]], [[1.0]]]]),
        "action": {"action": np.zeros((1, 2, 1, 3), np.float32)},
    }
    monkeypatch.setattr(Sac, "update", lambda self, params, batch, count, progress: (params, batch))
    prepare = jax.jit(lambda batch, progress: algo.update((), batch, jnp.uint32(0), progress)[1])  # what SAC is given
    for step, weight in ((0, 2.0), (110, 2.0), (210, 1.0), (310, 0.0)):
        prepared = prepare(batch, at_step(step))
        np.testing.assert_allclose(np.ravel(prepared["reward"]), [1 + weight * 0.25, 2 + weight])
        assert prepared["action"].shape == (1, 2, 1, 3)


def make_teacher(algo: Student) -> dict:
    """A collective that always means tanh(0.2) for certain, whatever the window."""
    networks = jax.jit(algo.teacher_algo.model.init)(jax.random.key(5))
    actor = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), networks["actor"])
    actor["params"]["head"]["out_bias"] = np.float32([0.2, 0.2, -5.0, -5.0])
    return {"encoder": networks["encoder"], "actor": actor}


def test_the_teacher_is_asked_about_the_action_taken() -> None:
    """By the least deviation granted, random actions included; it stays as it is, and is not asked after the end."""
    env = PointMass(tasks=2)
    sizes = {
        "hidden_size": 8, "batch_size": 8, "random_steps": 20, "teacher_constant_steps": 10, "teacher_until_step": 50,
    }  # fmt: skip
    algo = Student(env.spec, DataParallel(4), teacher_min_std=0.3, **sizes, **TAUGHT)
    teacher = make_teacher(algo)
    policy = algo.policy(jax.jit(lambda: algo.init(jax.random.key(0), {"teacher": (teacher,)}))())
    assert digest(policy["teacher"]) == digest(teacher)
    _, timestep = jax.jit(jax.vmap(lambda k: env.reset(k, ())))(jax.random.split(jax.random.key(1), 4))
    carry = jax.jit(algo.init_carry)(policy, timestep, np.arange(4))
    act = jax.jit(
        lambda progress: algo.act(policy, carry, timestep, jax.random.split(jax.random.key(2), 4), progress, "explore")
    )
    actions = []
    for step in (0, 49):
        action, after, extras = act(at_step(step))
        expected = np.exp(-0.5 * np.sum(((np.asarray(action) - math.tanh(0.2)) / 0.3) ** 2, -1))
        np.testing.assert_allclose(extras["rho"], expected, rtol=1e-4)
        np.testing.assert_array_equal(after.action, action[:, 0])
        actions.append(np.asarray(action))
    assert not np.allclose(*actions)  # random first, then its own
    assert not act(at_step(50))[2]["rho"].any()


def test_the_teacher_begins_each_episode() -> None:
    """Up to a share of guide_steps, from the fractions of multiples of the golden ratio; then the student goes on."""
    env = PointMass()
    settings = {"random_steps": 10, "teacher_constant_steps": 100, "teacher_until_step": 310, "guide_steps": 8}
    algo = Student(env.spec, DataParallel(8), teacher_weight=0.0, hidden_size=8, batch_size=8, **settings, **TAUGHT)
    policy = algo.policy(jax.jit(lambda: algo.init(jax.random.key(0), {"teacher": (make_teacher(algo),)}))())
    _, timestep = jax.jit(jax.vmap(lambda k: env.reset(k, ())))(jax.random.split(jax.random.key(1), 8))
    timestep = dataclasses.replace(timestep, first=jnp.zeros(8, bool))
    carry = jax.jit(algo.init_carry)(policy, timestep, jnp.arange(8))
    keys, numbers = jax.random.split(jax.random.key(2), 8), np.arange(8)
    act = jax.jit(lambda carry, progress: algo.act(policy, carry, timestep, keys, progress, "explore"))
    for (step, share), played in itertools.product(((0, 1.0), (110, 1.0), (210, 0.5), (310, 0.0)), range(8)):
        carry = dataclasses.replace(carry, step=np.full(8, played - 1, np.int32))  # `observe` counts the step
        action, after, extras = act(carry, at_step(step))
        taught = np.isclose(np.asarray(action)[:, 0], math.tanh(0.2), atol=1e-6).all(-1)
        np.testing.assert_array_equal(taught, played < 8 * share * (numbers * 0.6180339887 % 1.0))
        np.testing.assert_array_equal(after.action, np.asarray(action)[:, 0])
        assert (np.asarray(extras["rho"])[taught] > 0.999).all()


def taught_to_push() -> tuple[Trainer, TrainState]:
    """At the start, with a teacher of high weight that always pushes by tanh(0.2); no steps are random."""
    settings = {
        "teacher_weight": 20.0,
        "teacher_constant_steps": 10**6,
        "teacher_until_step": 2 * 10**6,
        "teacher_min_std": 0.2,
    }
    trainer = make_trainer(Student, PointMass(), 8, update_interval=4, random_steps=0, **SAC, **settings, **TAUGHT)
    return trainer, trainer.init(jax.random.key(0), {"teacher": (make_teacher(trainer.algo),)})


def test_the_teachers_window_is_that_of_the_collective() -> None:
    """States, own actions and raw rewards of the last steps, begun anew with each episode (of eight steps)."""
    trainer, state = taught_to_push()
    for phase in trainer.algo.phases:  # twelve steps in all
        state, _ = trainer.make_block(phase)(state, jnp.int32(phase.iterations or 2))
    buffer, window = jax.tree.map(np.asarray, state.algo.sharded), state.carry.window  # as it was for the newest action
    assert buffer.head[0] == 12
    for env in range(8):
        shard, lane = divmod(env, buffer.end.shape[2])
        observations = buffer.observation["observation"][shard, :12, lane, 0]
        np.testing.assert_array_equal(window.state[env], observations[[9, 9, 10, 11]])  # row 9 begins an episode
        np.testing.assert_array_equal(window.action[env, 0], 0.0)
        np.testing.assert_array_equal(window.action[env, 1:3], buffer.action["action"][shard, 9:11, lane, 0])
        np.testing.assert_array_equal(window.reward[env, :, 0], [0, *buffer.reward[shard, 10:12, lane, 0]])


def test_a_student_that_is_paid_enough_imitates() -> None:
    """Where the reward says 'go to the corner', the teacher is followed instead."""
    trainer, state = taught_to_push()
    for phase in trainer.algo.phases:
        state, _ = trainer.make_block(phase)(state, jnp.int32(phase.iterations or 120))
    np.testing.assert_allclose(best_action(trainer, state), math.tanh(0.2), atol=0.15)


def best_action(trainer, state):
    policy, timestep = trainer.algo.policy(state.algo), state.timestep
    act = jax.jit(lambda keys: trainer.algo.act(policy, (), timestep, keys, at_step(0), "greedy")[0])
    return act(jax.random.split(jax.random.key(0), 8))


def test_without_a_teacher_it_is_sac_to_the_bit() -> None:
    settings = SAC | {"update_interval": 8, "target_update_period": 2}
    states = [
        run(make_trainer(algo, PointMass(num_agents=2, tasks=2), 8, **settings, **more), 5)[0]
        for algo, more in ((Sac, {}), (Student, {"teacher_weight": 0.0}))
    ]
    assert digest(states[0]) == digest(states[1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"teacher_min_std": 0.0}, "teacher_min_std must lie between 1e-06"),
        (
            {"teacher_until_step": 4000},
            r"teacher_until_step must lie above random_steps \+ teacher_constant_steps \(4,000\)",
        ),
        ({"resolved_inputs": ""}, "a student needs a teacher: name a run of collective with --teacher RUN"),
        ({"resolved_inputs": "", "teacher_weight": 0.0, "guide_steps": 5}, "a student needs a teacher"),
        ({"resolved_inputs": "null"}, "resolved_inputs is filled in by the run itself: remove it"),
        (
            {"resolved_inputs": '{"context_length": 401}'},
            "context_length must lie between 2 and the 400 steps of an episode, not 401",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Student(ARM, DataParallel(1), **TAUGHT | settings)


def test_teachers_that_do_not_fit() -> None:
    layout = DataParallel(1)
    defaults = {name: field.default for name, field in Collective.__dataclass_fields__.items()}
    teacher = UpstreamRun("a", Collective(ARM, layout, **TEACHER), defaults | TEACHER)
    adopted = Student.resolve_inputs(ARM, {"tau": 0.1}, {"teacher": (teacher,)}, {})
    assert (
        adopted["tau"] == 0.1 and json.loads(adopted["resolved_inputs"])["context_length"] == TEACHER["context_length"]
    )
    assert Student(ARM, layout, **adopted).teacher_algo.hidden_size == TEACHER["hidden_size"]
    assert not Student.resolve_inputs(ARM, adopted, {"teacher": ()}, {})[
        "resolved_inputs"
    ]  # the former run's teacher is not ours
    sac = UpstreamRun("b", Sac(ARM, layout), {})
    for upstream, spec, sentence in (
        ((teacher, teacher), ARM, "a student has one teacher, but --teacher names 2"),
        ((sac,), ARM, "b was trained with sac: a teacher must be a run of collective"),
        ((teacher,), dataclasses.replace(ARM, name="leg"), "a was trained on 'arm', not on 'leg'"),
        ((teacher,), dataclasses.replace(ARM, observation=Box((4,))), r"a has observations of shape \(5,\), here"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Student.resolve_inputs(spec, {}, {"teacher": upstream}, {})
