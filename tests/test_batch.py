"""Batches of environments: next-step auto-reset, lock step, episode statistics, against plain Python loops."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.programs import equations
from helpers.tiny import Corridor

from envs_jax import Box, Discrete, Environment, EnvSpec, TimeStep
from envs_jax.base import pytree
from envs_jax.batch import BatchedEnvironment, batched, finished_episodes, start_statistics, update_statistics, where

COPIES, STEPS = 6, 30


@pytree
class ClockState:
    """value float32[], t int32[]."""

    value: jax.Array
    t: jax.Array


@dataclasses.dataclass(frozen=True)
class Clock(Environment):
    """Three steps an episode. Only reset computes a sine, only step a cosine, and neither selects anything."""

    fixed: bool = True

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("clock", 1, Box((1,)), Discrete(2), horizon=3, fixed_horizon=self.fixed)

    def _timestep(self, state: ClockState) -> TimeStep:
        return TimeStep(
            observation=state.value.reshape(1, 1),
            reward=jnp.minimum(state.t, 1).astype(jnp.float32).reshape(1),
            terminated=jnp.bool_(False),
            truncated=state.t == 3,
            first=state.t == 0,
        )

    def reset(self, key: jax.Array, context: Any = None) -> tuple[ClockState, TimeStep]:
        state = ClockState(jnp.sin(jax.random.key_data(key)[0].astype(jnp.float32)), jnp.int32(0))
        return state, self._timestep(state)

    def step(self, state: ClockState, action: jax.Array, context: Any = None) -> tuple[ClockState, TimeStep]:
        state = ClockState(jnp.cos(state.value + action[0].astype(jnp.float32)), state.t + 1)
        return state, self._timestep(state)


def row(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda x: np.asarray(x)[index], tree)


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ---------------------------------------------------------------- auto-reset


@dataclasses.dataclass
class Rollout:
    """Time steps and actions of a batch: timesteps[t] is answered by actions[t]."""

    batch: BatchedEnvironment
    keys: jax.Array
    step: Any
    states: list[Any]
    timesteps: list[TimeStep]
    actions: list[np.ndarray]

    @property
    def done(self) -> np.ndarray:
        return np.array([timestep.done for timestep in self.timesteps])


def roll_out(batch: BatchedEnvironment, episode: int = 0) -> Rollout:
    keys = jax.random.split(jax.random.key(3), COPIES)
    step = jax.jit(batch.step)
    state, timestep = jax.jit(batch.reset, static_argnums=2)(keys, (), episode)
    rollout = Rollout(batch, keys, step, [state], [timestep], [])
    generator = np.random.default_rng(0)
    for _ in range(STEPS):
        rollout.actions.append(generator.integers(0, 2, (COPIES, batch.spec.num_agents)).astype(np.int32))
        state, timestep = step(state, timestep, rollout.actions[-1], ())
        rollout.states.append(state)
        rollout.timesteps.append(timestep)
    return rollout


@pytest.fixture(scope="module")
def mixed() -> Rollout:
    """Copies that end at different times, by reaching the end and by being cut."""
    return roll_out(batched(Corridor(num_agents=1, length=3, horizon=5)))


@pytest.fixture(scope="module")
def lock_step() -> Rollout:
    return roll_out(batched(Clock()))


@pytest.mark.parametrize("name", ["mixed", "lock_step"])
def test_a_batch_equals_copies_stepped_one_by_one(name: str, request: pytest.FixtureRequest) -> None:
    """An end shows the true last observation, and the next step begins an episode, whatever the action."""
    rollout: Rollout = request.getfixturevalue(name)
    env = rollout.batch.env
    step = jax.jit(env.step)
    reset = jax.jit(lambda keys, copy, episode: env.reset(jax.random.fold_in(keys[copy], episode), ()))
    for copy in range(COPIES):
        episode = 0
        state, timestep = reset(rollout.keys, copy, episode)
        for t in range(STEPS + 1):
            assert_equal(row(rollout.timesteps[t], copy), timestep)
            assert rollout.states[t].episode[copy] == episode
            if t == STEPS:
                break
            if timestep.done:
                episode += 1
                state, timestep = reset(rollout.keys, copy, episode)
            else:
                state, timestep = step(state, rollout.actions[t][copy], ())


def test_ends_are_mixed_in_the_mixed_batch(mixed: Rollout) -> None:
    terminated = np.array([timestep.terminated for timestep in mixed.timesteps])
    truncated = np.array([timestep.truncated for timestep in mixed.timesteps])
    assert terminated.any() and truncated.any() and not (terminated & truncated).any()
    assert (mixed.done.any(1) & ~mixed.done.all(1)).sum() > 5


def test_episodes_of_a_copy_differ_and_are_named_by_their_number(mixed: Rollout) -> None:
    reset = jax.jit(mixed.batch.reset)
    _, timestep = reset(jnp.broadcast_to(mixed.keys[0], 20), (), jnp.arange(20, dtype=jnp.uint32))
    assert len(np.unique(timestep.observation, axis=0)) > 1  # one copy's episodes 0 to 19
    later, restarted = reset(mixed.keys, (), 7)
    assert_equal(later.episode, np.full(COPIES, 7, np.uint32))
    alone = jax.jit(mixed.batch.env.reset)(jax.random.fold_in(mixed.keys[2], 7), ())
    assert_equal((row(later.env.position, 2), row(restarted, 2)), (alone[0].position, alone[1]))


def test_play_does_not_restart(mixed: Rollout) -> None:
    t = int(np.flatnonzero(mixed.done.any(1))[0])
    state, timestep = mixed.batch.step_without_reset(mixed.states[t], mixed.actions[t], ())
    assert not np.any(timestep.first)
    assert_equal(state.episode, mixed.states[t].episode)


# ---------------------------------------------------------------- what a reset costs


def primitives(jaxpr: Any) -> list[str]:
    """Names of all primitives in a jaxpr and in what it calls."""
    return [equation.primitive.name for equation in equations(jaxpr)]


def branches(fixed: bool) -> tuple[list[set[str]], list[str], str]:
    """Primitives of the branches of the one cond of a step, those outside of it, and the compiled program."""
    batch = batched(Clock(fixed))
    state, timestep = batch.reset(jax.random.split(jax.random.key(0), COPIES), ())
    arguments = (state, timestep, jnp.zeros((COPIES, 1), jnp.int32), ())
    jaxpr = jax.make_jaxpr(batch.step)(*arguments).jaxpr
    conds = [equation for equation in jaxpr.eqns if equation.primitive.name == "cond"]
    assert len(conds) == 1 and primitives(jaxpr).count("cond") == 1
    outside = [equation.primitive.name for equation in jaxpr.eqns if equation.primitive.name != "cond"]
    inside = [set(primitives(branch.jaxpr)) for branch in conds[0].params["branches"]]
    return inside, outside, jax.jit(batch.step).lower(*arguments).compile().as_text()


def test_lock_step_resets_in_one_branch_and_selects_nothing() -> None:
    inside, outside, program = branches(fixed=True)
    play, restart = sorted(inside, key=lambda names: "sin" in names)
    assert "cos" in play and "sin" not in play and "select_n" not in play
    assert "sin" in restart and "cos" not in restart and "select_n" not in restart
    assert not {"sin", "cos", "select_n"} & set(outside)
    assert program.count(" conditional(") == 1


def test_mixed_ends_reset_only_in_the_branch_in_which_a_copy_has_ended() -> None:
    inside, outside, program = branches(fixed=False)
    go_on, restart = sorted(inside, key=lambda names: "sin" in names)
    assert outside.count("cos") == 1 and "sin" not in outside
    assert not go_on and {"sin", "select_n"} <= restart and "cos" not in restart
    assert program.count(" conditional(") == 1


def test_where_picks_rows_of_leaves_of_any_rank() -> None:
    ones, zeros = ({"a": np.full((2, 3, 2), x, np.float32), "b": np.full(2, x, np.int32)} for x in (1, 0))
    keys = [{"c": jax.random.split(jax.random.key(seed), 2)} for seed in (0, 1)]
    yes, no = ones | keys[0], zeros | keys[1]
    picked = jax.jit(where)(np.array([True, False]), yes, no)
    assert_equal(picked["a"], np.stack([np.ones((3, 2)), np.zeros((3, 2))]))
    assert_equal(picked["b"], [1, 0])
    assert picked["c"][0] == yes["c"][0] and picked["c"][1] == no["c"][1]


def test_an_environment_brings_its_own_batch() -> None:
    class OwnBatch(BatchedEnvironment):
        pass

    class Own(Clock):
        def batched(self) -> BatchedEnvironment:
            return OwnBatch(self)

    assert type(batched(Own())) is OwnBatch
    assert type(batched(Clock())) is BatchedEnvironment


# ---------------------------------------------------------------- episode statistics

METRICS = {"final": "last", "sum": "sum", "best": "max", "ever": "any"}


@pytest.fixture(scope="module")
def stream() -> tuple[EnvSpec, list[TimeStep]]:
    """Made-up time steps of three copies with two agents whose episodes end now and then."""
    generator = np.random.default_rng(1)
    spec = EnvSpec("stream", 2, Box((1,)), Discrete(2), horizon=9, metrics=METRICS)  # type: ignore[arg-type]
    timesteps, done = [], np.ones(3, bool)
    for _ in range(40):
        first, done = done, (generator.random(3) < 0.25) & ~done
        timesteps.append(
            TimeStep(
                observation=np.zeros((3, 2, 1), np.float32),
                reward=np.where(first[:, None], 0, generator.normal(size=(3, 2))).astype(np.float32),
                terminated=done & (generator.random(3) < 0.5),
                truncated=done,
                first=first,
                metrics={
                    name: (generator.random(3) < 0.2 if kind == "any" else generator.normal(size=3)).astype(np.float32)
                    for name, kind in METRICS.items()
                },
            )
        )
    return spec, timesteps


def test_statistics_equal_a_plain_loop(stream: tuple[EnvSpec, list[TimeStep]]) -> None:
    spec, timesteps = stream
    reductions = {"last": lambda x: x[-1], "sum": sum, "max": max, "any": lambda x: float(any(x))}
    statistics = start_statistics(timesteps[0])
    update = jax.jit(lambda statistics, timestep: update_statistics(spec, statistics, timestep))
    sums = jax.jit(finished_episodes)
    episodes: list[list[TimeStep]] = [[row(timesteps[0], copy)] for copy in range(3)]
    episodes_counted = 0
    for timestep in timesteps[1:]:
        statistics = update(statistics, timestep)
        expected = {"episodes": 0.0, "return": 0.0, "length": 0.0, **dict.fromkeys(METRICS, 0.0)}
        for copy in range(3):
            one = row(timestep, copy)
            episodes[copy] = [one] if one.first else [*episodes[copy], one]
            if one.done:
                expected["episodes"] += 1
                expected["return"] += sum(float(step.reward.mean()) for step in episodes[copy])
                expected["length"] += len(episodes[copy]) - 1
                for name, kind in METRICS.items():
                    expected[name] += reductions[kind]([float(step.metrics[name]) for step in episodes[copy]])
        ended = sums(statistics, timestep)
        assert set(ended) == set(expected)
        for name, value in expected.items():
            assert float(ended[name]) == pytest.approx(value, abs=2e-5), name
        episodes_counted += int(expected["episodes"])
    assert episodes_counted > 15


def test_statistics_of_agents_are_kept_apart(stream: tuple[EnvSpec, list[TimeStep]]) -> None:
    spec, timesteps = stream
    statistics = start_statistics(timesteps[0])
    assert statistics.returns.shape == (3, 2)
    statistics = update_statistics(spec, statistics, dataclasses.replace(timesteps[1], first=jnp.zeros(3, bool)))
    assert_equal(statistics.returns, timesteps[1].reward)
