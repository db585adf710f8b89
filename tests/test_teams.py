"""Teams of coverage: sizes drawn per mission, UAVs that fail, and learners that give the absent no weight."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.coverage import make
from helpers.programs import get_programs

import jaxrl
from envs_jax.base import Box, Discrete, EnvSpec, TimeStep
from envs_jax.coverage import actions, communication, starts, teams, viewer
from envs_jax.coverage.teams import Team
from envs_jax.progress import start
from envs_jax.viewing import Record
from jaxrl.algos.base import Trajectory
from jaxrl.algos.coma import Coma
from jaxrl.algos.ddpg import Ddpg
from jaxrl.algos.minibatches import Minibatches
from jaxrl.algos.ppo import Ppo
from jaxrl.algos.targets import lambda_targets
from jaxrl.common.errors import UsageError
from jaxrl.integrations.standalone import agent_settings
from jaxrl.rl.data_parallel import DataParallel

SIZE, LENGTH = 3, 5
USUAL: dict[str, Any] = {
    "failure_rate": 0.3, "delay": 2, "communication_range": 100.0, "channel_metrics": True,
}  # fmt: skip
LOSSY = make(num_agents=SIZE, **USUAL, loss_rate=0.3)


def make_pair(**settings: Any) -> tuple[Any, Any]:
    """A team of three, and the same in an array of five."""
    return make(num_agents=SIZE, **settings), make(num_agents=LENGTH, team_sizes=(SIZE,), **settings)


def draw_open_actions(rng: np.random.Generator, timestep: TimeStep) -> np.ndarray:
    """An open action int32[A] of each agent."""
    mask = np.asarray(timestep.action_mask)
    return np.argmax(np.where(mask, rng.random(mask.shape), -1), -1).astype(np.int32)


def play_pair(small: Any, large: Any, key: jax.Array) -> list[tuple[Any, Any]]:
    """Pairs ((state, time step) of both) of missions in which the first three agents do the same."""
    programs, rng = [get_programs(env) for env in (small, large)], np.random.default_rng(3)
    pair = [one.reset(key, ()) for one in programs]
    seen = [tuple(pair)]
    for _ in range(small.steps):
        action = draw_open_actions(rng, pair[1][1])
        chosen = (action[:SIZE], action)
        pair = [one.step(state, x, ()) for one, (state, _), x in zip(programs, pair, chosen, strict=True)]
        seen.append(tuple(pair))
    return seen


def assert_same_view(one: Any, other: Any) -> None:
    """Equal but for a cell in the planes of an agent and of the team: rounding decides if it is just undecided."""
    differing = ~np.isclose(one, other, rtol=0, atol=1e-6)
    assert np.sum(differing, axis=tuple(range(differing.ndim))[-3:]).max() <= 2


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"failure_rate": 0.3, "random_range": True}, marks=pytest.mark.slow),
        USUAL,
        pytest.param({"terrain": "mixed", "start": "corners", "num_actions": 27}, marks=pytest.mark.slow),
        pytest.param({"delay": 1, "map_backend": "windows", "q": 5}, marks=pytest.mark.slow),
        pytest.param({"map_backend": "windows"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_team_in_a_longer_array_flies_the_same_mission(settings: dict[str, Any]) -> None:
    small, large = make_pair(**settings)
    critic = [jax.jit(env.spec.critic_input) for env in (small, large)]
    mask = [jax.jit(env.spec.next_mask) for env in (small, large)]
    for (a, ts_a), (b, ts_b) in play_pair(small, large, jax.random.key(21)):
        np.testing.assert_array_equal(a.positions, b.positions[:SIZE])
        np.testing.assert_array_equal(a.maps.beliefs[:SIZE], b.maps.beliefs[:SIZE])
        np.testing.assert_array_equal(a.maps.beliefs[-1], b.maps.beliefs[-1])
        np.testing.assert_array_equal(ts_a.reward, ts_b.reward[:SIZE])
        assert_same_view(ts_a.observation, ts_b.observation[:SIZE])
        assert_same_view(ts_a.global_state["maps"], ts_b.global_state["maps"])
        np.testing.assert_array_equal(ts_a.action_mask, ts_b.action_mask[:SIZE])
        for name, value in ts_a.metrics.items():
            np.testing.assert_allclose(value, ts_b.metrics[name], atol=1e-6, err_msg=name)
        assert float(ts_b.metrics["uavs"]) == SIZE
        assert not np.any(ts_b.observation[SIZE:]) and np.all(np.asarray(b.maps.beliefs)[SIZE:-1] == -32768)
        assert np.asarray(ts_b.present).tolist() == [True] * SIZE + [False] * (LENGTH - SIZE)
        action = np.arange(LENGTH, dtype=np.int32) % 6
        views = [np.asarray(one(ts, action[: len(ts.reward)])) for one, ts in zip(critic, (ts_a, ts_b), strict=True)]
        assert_same_view(views[0], views[1][:SIZE])
        for agent in range(SIZE):
            masks = [
                np.asarray(one(ts.mask_state, ts.action_mask, action[: len(ts.reward)], np.int32(agent)))
                for one, ts in zip(mask, (ts_a, ts_b), strict=True)
            ]
            np.testing.assert_array_equal(*masks)


@pytest.mark.slow
def test_scripted_policies_do_the_same_in_a_longer_array() -> None:
    small, large = make_pair(start="corners")
    key = jax.random.key(4)
    for name in ("random", "ig", "ig_sequential", "lawnmower"):
        pair = []
        for env in (small, large):
            programs = get_programs(env)
            state, timestep = programs.reset(key, ())
            pair.append(np.asarray(programs.policy(name)(state, timestep, key))[:SIZE])
        np.testing.assert_array_equal(*pair, err_msg=name)


# Learners


STEPS, MISSIONS, NUMBERS, CHOICES = 5, 4, 3, 4
TRAINED: dict[str, tuple[type, dict[str, Any]]] = {
    "coma": (Coma, {"minibatch_size": 10**6, "normalize_advantage": True, "advantage": "return", "clip_ratio": 0.2}),
    "ppo": (Ppo, {"rollout_steps": 0, "num_minibatches": 1, "normalize_observation": "always"}),
}


def make_missions(team: int, absent: int) -> tuple[Trajectory, TimeStep]:
    """Made-up missions [T, B, ...] of a team, whose first agent may fail, and of `absent` agents with wild numbers."""
    rng = np.random.default_rng(0)
    wild = np.random.default_rng(1)

    def draw(steps: int, *shape: int) -> np.ndarray:
        there = rng.normal(size=(steps, MISSIONS, team, *shape))
        others = wild.normal(3.0, 3.0, (steps, MISSIONS, absent, *shape))
        return np.concatenate([there, others], axis=2).astype(np.float32)

    present = np.ones((STEPS + 1, MISSIONS, team + absent), bool)
    present[:, :, team:] = False
    present[2:, 0, 0] = False
    flags = np.zeros((STEPS + 1, MISSIONS), bool)
    over = np.arange(STEPS + 1)[:, None] * np.ones_like(flags) == STEPS
    steps = TimeStep(draw(STEPS + 1, NUMBERS), draw(STEPS + 1), over, flags, flags, present=present)
    action = draw(STEPS, CHOICES).argmax(-1).astype(np.int32)
    mask = draw(STEPS, CHOICES) < 1
    np.put_along_axis(mask, action[..., None], True, -1)
    extras = {"log_prob": -np.abs(draw(STEPS)), "mask": mask}
    return Trajectory(jax.tree.map(lambda x: x[:-1], steps), action, extras), jax.tree.map(lambda x: x[-1], steps)


@pytest.mark.parametrize("name", TRAINED)
def test_the_absent_have_no_weight_in_losses_and_gradients(name: str) -> None:
    """All transitions are one minibatch: of a team of three, and of the same among two agents that are absent."""
    cls, settings = TRAINED[name]
    learned = []
    for absent in (0, 2):
        spec = EnvSpec(
            "team", 3 + absent, Box((NUMBERS,)), Discrete(CHOICES), STEPS, fixed_horizon=True, absent_agents=True,
            critic_input_spec=Box((NUMBERS,)), critic_input=lambda timestep, action: timestep.observation,
        )  # fmt: skip
        algo = cls(spec, DataParallel(MISSIONS), hidden_size=4, depth=1, num_epochs=1, **settings)
        rollout = make_missions(3, absent)

        @jax.jit
        def learn(key: jax.Array, algo: Any = algo, rollout: Any = rollout) -> Any:
            state = algo.init(key, None)
            return algo.learn(state, *rollout, key, start(), algo.phases[0])

        state, metrics = jax.device_get(learn(jax.random.key(0)))
        learners = state.replicated.actor, state.replicated.critic
        gradients = [part.mu for one in learners for part in one.opt_state if hasattr(part, "mu")]
        learned.append((gradients, metrics, getattr(state.replicated, "statistics", ())))
    (gradients, metrics, statistics), (gradients_among, metrics_among, statistics_among) = learned
    assert len(metrics) > 5
    chex.assert_trees_all_close(metrics_among, metrics, rtol=2e-4, atol=2e-6)
    chex.assert_trees_all_close(statistics_among, statistics, rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients, gradients_among, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * np.abs(one).max())
        assert np.abs(one).max() > 1e-4


def test_an_agent_that_fails_has_terminated() -> None:
    """Values of absent agents, which nobody trains, enter no target: y = r, then r + gamma ((1 - l) v + l y)."""
    present = np.array([[[1, 1]], [[1, 1]], [[1, 0]], [[1, 0]]], bool)  # the second agent fails after two steps
    flags = np.zeros((4, 1), bool)
    reward = np.array([[[0, 0]], [[1, 1]], [[2, 2]], [[3, 3]]], np.float32)
    steps = TimeStep(np.zeros((4, 1, 2, 1)), reward, flags, flags, flags, present=present)
    trajectory = Trajectory(jax.tree.map(lambda x: x[:3], steps), np.zeros((3, 1, 2), np.int32), {})
    last = jax.tree.map(lambda x: x[3], steps)
    value = np.array([[[5, 5]], [[7, 7]], [[9, 1e6]]], np.float32)
    targets = np.asarray(lambda_targets(trajectory, last, value, np.float32([[11, 1e6]]), 0.5, 0.25))
    y = [3 + 0.5 * 11]
    y = [2 + 0.5 * (0.75 * 9 + 0.25 * y[0]), *y]
    y = [1 + 0.5 * (0.75 * 7 + 0.25 * y[0]), *y]
    np.testing.assert_allclose(targets[:, 0, 0], y)
    np.testing.assert_allclose(targets[:2, 0, 1], [1 + 0.5 * (0.75 * 7 + 0.25 * 2), 2])


def test_deviations_of_minibatches_are_those_of_what_counts() -> None:
    batches = Minibatches(DataParallel(2, 2), 1, 1, 1, 4, 1, 4)
    values = np.array([[1, 5, 9, 4], [3, 7, 8, 2]], np.float32)
    weight = np.array([[2, 0, 2, 0], [0, 2, 2, 0]], np.float32)
    expected = np.std([1, 9, 7, 8])
    np.testing.assert_allclose(batches.deviation(values, weight), np.full((2, 4), expected), rtol=1e-6)
    np.testing.assert_allclose(batches.deviation(values, weight / 5), np.full((2, 4), expected), rtol=1e-6)
    single = np.array([[0, 0, 0, 0], [0, 8, 0, 0]], np.float32)
    np.testing.assert_array_equal(batches.deviation(values, single), np.ones((2, 4)))  # of one sample there is none


def test_other_learners_refuse_teams() -> None:
    spec = make(team_sizes=(2, 4)).spec
    with pytest.raises(
        ValueError, match="ddpg cannot train with absent agents, which 'coverage' may have: use coma or ppo"
    ):
        Ddpg(spec, DataParallel(8), masking=False)
    assert not make().spec.absent_agents and make(loss_rate=0.1).spec.absent_agents


# Sizes and losses


def test_sizes_are_drawn_from_the_list() -> None:
    env = make(num_agents=6, team_sizes=(2, 4, 6))
    draw = jax.jit(jax.vmap(lambda key: env._draw_mission(key).team))
    team = jax.tree.map(np.asarray, draw(jax.random.split(jax.random.key(0), 300)))
    assert set(team.size.tolist()) == {2, 4, 6} and min(np.mean(team.size == size) for size in (2, 4, 6)) > 0.25
    np.testing.assert_array_equal(team.present, np.arange(6)[None] < team.size[:, None])


def test_agents_fail_for_good_at_the_rate() -> None:
    rate, steps = 0.2, 5
    lose = jax.jit(lambda key, k, team: teams.lose(key, k, team, rate))
    flown = np.zeros((200, steps + 1, 6), bool)
    for mission, key in enumerate(jax.random.split(jax.random.key(2), 200)):
        team = Team(jnp.int32(6), jnp.ones(6, bool))
        flown[mission, 0] = True
        for k in range(1, steps + 1):
            team = lose(key, jnp.int32(k), team)
            flown[mission, k] = team.present
    assert np.all(flown[:, 1:] <= flown[:, :-1])
    np.testing.assert_allclose(flown.mean((0, 2)), 0.8 ** np.arange(steps + 1), atol=0.05)


def test_who_failed_neither_moves_nor_measures_nor_sends() -> None:
    last_sizes = [fly_and_lose(jax.random.key(seed)) for seed in range(8)]
    assert 0 in last_sizes and max(last_sizes) > 0
    assert {"uavs", "attempts"} <= set(LOSSY.spec.labels) and "uavs" not in communication.METRICS


def fly_and_lose(key: jax.Array) -> int:
    """Fly a mission, look at those that have failed, and return how many have not."""
    programs, rng = get_programs(LOSSY), np.random.default_rng(0)
    state, timestep = programs.reset(key, ())
    sizes, attempts = [SIZE], [SIZE * (SIZE - 1)]
    for _ in range(LOSSY.steps):
        before, (state, timestep) = state, programs.step(state, draw_open_actions(rng, timestep), ())
        gone = ~np.asarray(state.team.present)
        np.testing.assert_array_equal(state.positions[gone], before.positions[gone])
        np.testing.assert_array_equal(state.maps.beliefs[:-1][gone], before.maps.beliefs[:-1][gone])
        assert not np.any(np.asarray(timestep.observation)[gone]) and np.all(np.asarray(timestep.present) == ~gone)
        np.testing.assert_array_equal(timestep.mask_state["present"], ~gone)
        flying = int(np.sum(~gone))
        sizes.append(flying)
        attempts.append(attempts[-1] + flying * (flying - 1))
        assert float(timestep.metrics["uavs"]) == flying
        if flying == 0:
            np.testing.assert_array_equal(state.maps.beliefs, before.maps.beliefs)
            assert float(timestep.reward[0]) == LOSSY.reward_offset
            continue
        drawn_numbers = np.asarray(timestep.observation)[~gone][..., 1].max(axis=(1, 2))
        np.testing.assert_allclose(drawn_numbers, (np.flatnonzero(~gone) + 1) / SIZE, atol=1e-6)
    assert float(timestep.metrics["attempts"]) == attempts[LOSSY.steps - 1]
    assert sorted(sizes, reverse=True) == sizes
    return sizes[-1]


def test_missions_are_the_same_until_somebody_fails() -> None:
    """A UAV that fails closes no cell to others either: masks look at those that fly."""
    envs = [get_programs(env) for env in (make(num_agents=SIZE, **USUAL), LOSSY)]
    rng, compared = np.random.default_rng(0), 0
    for key in jax.random.split(jax.random.key(1), 24):
        pair = [env.reset(key, ()) for env in envs]
        for _ in range(LOSSY.steps):
            action = draw_open_actions(rng, pair[0][1])
            pair = [env.step(state, action, ()) for env, (state, _) in zip(envs, pair, strict=True)]
            if not np.all(pair[1][0].team.present):
                break
            compared += 1
            np.testing.assert_array_equal(pair[0][0].maps.beliefs, pair[1][0].maps.beliefs)
            np.testing.assert_allclose(pair[0][1].observation, pair[1][1].observation, atol=1e-6)
    assert compared > 3


def test_the_absent_close_no_moves() -> None:
    positions = np.int32([[5, 5, 2], [5, 7, 2]])
    boundary = np.ones((2, 6), bool)
    chosen = np.int32([3, 0])  # agent 0 flies to y + 1, next to agent 1
    for present, is_open in (([True, True], False), ([False, True], True)):
        state = {"positions": positions, "present": np.array(present)}
        mask = actions.next_team_mask(state, boundary, chosen, jnp.int32(1), num_actions=6)
        assert bool(mask[2]) is is_open  # y - 1


def test_a_message_under_way_outlives_its_sender() -> None:
    """Agent 0 fails after measurement 0: what it sent then arrives after the next one; nothing arrives at it."""
    config = communication.ChannelConfig((0.0,), (1,), 4, 3)
    positions, full = np.int32([[2, 2, 2], [3, 2, 2], [4, 2, 2]]), Team(jnp.int32(3), jnp.ones(3, bool))
    numbers = make(num_agents=3, delay=1).numbers
    channel = communication.begin(config, numbers, jax.random.key(0), positions, None, full)
    key, comm_range = jax.random.key(0), jnp.float32(25)
    _, _, _, channel = communication.exchange(config, channel, key, jnp.int32(0), positions, comm_range, full)
    rest = Team(jnp.int32(3), jnp.array([False, True, True]))
    received, *_, channel = communication.exchange(config, channel, key, jnp.int32(1), positions, comm_range, rest)
    np.testing.assert_array_equal(received, [[0, 0, 0], [1, 1, 1], [1, 1, 1]])
    received, *_, channel = communication.exchange(config, channel, key, jnp.int32(2), positions, comm_range, rest)
    np.testing.assert_array_equal(received, [[0, 0, 0], [0, 1, 1], [0, 1, 1]])
    counts = jax.tree.map(int, channel.counts)
    assert (counts.attempts, counts.eligible, counts.delivered) == (6 + 2 + 2, 10, 4 + 2)
    np.testing.assert_array_equal(channel.latest, [[-1, -1, -1], [0, -1, 1], [0, 1, -1]])


# Starts, pictures, sentences


def test_twelve_starts_in_the_corners() -> None:
    expected = [(10, 10), (40, 10), (40, 40), (10, 40), (25, 10), (40, 25), (25, 40), (10, 25)]
    expected += [(0, 0), (50, 0), (50, 50), (0, 50)]
    positions = np.asarray(starts.draw("corners", jax.random.key(0), jax.random.key(1), 12))
    np.testing.assert_array_equal(5 * positions[:, :2], expected)
    assert np.all(positions[:, 2] == 2)


def test_pictures_show_those_that_fly() -> None:
    _, env = make_pair(**USUAL)
    states = []
    state, timestep = get_programs(env).reset(jax.random.key(2), ())
    for _ in range(4):
        states.append((state, timestep))
        state, timestep = get_programs(env).step(state, np.zeros(LENGTH, np.int32), ())
    states_, timesteps = jax.tree.map(lambda *x: jnp.stack(x), *states)
    record = Record(env, "title", "subtitle", "random", states_, timesteps, np.zeros((3, LENGTH), np.int32), {})
    scene = viewer.scene(record)
    assert scene.present[:, :3].all() and not scene.present[:, 3:].any()
    assert not scene.heard[:, 3:].any() and not scene.heard[:, :, 3:].any() and scene.heard[1:].any()
    shapes = viewer.CoverageViewer().drawing(record).panels[0].steps[1]
    styles = {shape.style for shape in shapes}
    assert "agent2" in styles and not styles & {"agent3", "agent4"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_agents": 4, "team_sizes": (2, 6)}, "team_sizes allows 6 UAVs, but num_agents is 4; raise num_agents"),
        ({"team_sizes": (0, 2)}, "team_sizes must lie between 1 and 12"),
        ({"num_agents": 13}, "num_agents must lie between 1 and 12, not 13"),
        ({"loss_rate": 1.5}, "loss_rate must lie between 0 and 1"),
    ],
    ids=str,
)
def test_impossible_teams(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**settings)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["coma", "ppo"])
def test_teams_are_trained(algo: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_envs": 8, "hidden_size": 8, "eval_every": 0, "runs": str(tmp_path)}
    sizes |= {"minibatch_size": 64} if algo == "coma" else {"rollout_steps": 4, "num_minibatches": 2}
    done = jaxrl.train(
        algo, "coverage", q=3, budget=3, num_agents=6, team_sizes=(2, 4, 6), loss_rate=0.1, total_env_steps=320, **sizes
    )
    assert 1 < np.nanmean(done.metrics["rollout/uavs"]) < 4.5
    with pytest.raises(UsageError, match="cannot tell which agents are absent"):
        agent_settings(done.policy)
