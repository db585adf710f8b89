"""The channel of coverage: delayed, lost and counted messages, their draws, ages, lists and ramps."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.coverage import begin, make, proceed
from helpers.programs import get_programs

import jaxrl
from bench.parity.coverage import probability
from bench.reference.coverage import oracle
from envs_jax.coverage import communication, egocentric, terrain, viewer
from envs_jax.coverage import env as env_module
from envs_jax.progress import start

SPACING = 5


def play(env: Any, key: jax.Array, seed: int = 0, context: Any = None) -> list[tuple[Any, Any]]:
    """States and time steps of a mission whose moves depend on the seed only."""
    programs, rng = get_programs(env), np.random.default_rng(seed)
    state, timestep = programs.reset(key, env.context(start()) if context is None else context)
    steps_seen = [(state, timestep)]
    for _ in range(env.steps):
        mask = np.asarray(timestep.action_mask)
        action = np.argmax(np.where(mask, rng.random(mask.shape), -1), -1).astype(np.int32)
        state, timestep = programs.step(state, action, ())
        steps_seen.append((state, timestep))
    return steps_seen


def equal(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


# Counts


ROUTE = {"num_agents": 4, "num_actions": 4, "budget": 3, "start": "corners"}  # 10 m from the borders, 30 m apart
at_night = functools.partial(pytest.param, marks=pytest.mark.slow)
EAST, WEST, NORTH = 3, 0, 2  # x + 5 m, x - 5 m, y + 5 m


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Steps 0 to 3 have 12 attempts each. Agents 0 and 1 approach along x: they are 30, 20, 10 and 0 m apart, so
        # that 0, 2, 2, 2 messages are eligible; agents 2 and 3 fly north in parallel, 30 m apart and farther from
        # the others than 25 m.
        ({}, {"delivered": 6, "dropped": 0, "discarded": 0, "heard": 6 / 16, "delivery_ratio": 1, "age_max": 0}),
        # Those of step 1 arrive in step 3.
        ({"delay": 2}, {"delivered": 2, "discarded": 4, "delivery_ratio": 1 / 3, "age_mean": 2, "age_max": 2}),
        at_night({"delay": 3}, {"delivered": 0, "discarded": 6, "delivery_ratio": 0, "age_mean": 0, "age_max": 0}),
        # In the same place, in step 3, nothing is lost.
        at_night({"failure_rate": 1.0}, {"delivered": 2, "dropped": 4, "discarded": 0, "delivery_ratio": 1 / 3}),
        ({"failure_rate": 1.0, "delay": 1}, {"delivered": 0, "dropped": 4, "discarded": 2}),
    ],
    ids=str,
)
def test_counts_of_a_scripted_mission(settings: dict[str, Any], expected: dict[str, float]) -> None:
    env = make(**ROUTE, **settings, channel_metrics=True)
    state, timestep = begin(env, jax.random.key(3))
    seen = [{name: float(value) for name, value in timestep.metrics.items()}]
    for _ in range(env.steps):
        state, timestep = proceed(env, state, np.array([EAST, WEST, NORTH, NORTH], np.int32))
        seen.append({name: float(value) for name, value in timestep.metrics.items()})
    assert [row["attempts"] for row in seen] == [12, 24, 36, 48, 48]
    assert [row["eligible"] for row in seen] == [0, 2, 4, 6, 6]
    assert {name: seen[-1][name] for name in expected} == pytest.approx(expected)
    assert all(row["discarded"] == 0 for row in seen[:-1])
    assert seen[-1]["eligible"] == sum(seen[-1][name] for name in ("dropped", "delivered", "discarded"))
    assert set(communication.METRICS) <= set(env.spec.metrics) and set(env.spec.labels) == set(env.spec.metrics)


def test_random_ranges_are_those_of_the_original() -> None:
    drawn = jax.vmap(communication.draw_range)(jax.random.split(jax.random.key(0), 200))
    assert tuple(np.unique(drawn)) == oracle.RANDOM_RANGES


def test_the_load_is_positions_and_footprints() -> None:
    """After the first measurement: from each of the four corners to three receivers."""
    env = make(**ROUTE, channel_metrics=True)
    _, timestep = get_programs(env).reset(jax.random.key(0), ())
    boxes = [oracle.footprint((x, y, 15), 3) for x, y in oracle.CORNERS]
    cells = [(bottom - top) * (right - left) for top, bottom, left, right in boxes]
    assert float(timestep.metrics["load"]) == 3 * sum(12 + -(-count // 8) for count in cells)


def test_nothing_is_counted_where_it_is_not_asked_for() -> None:
    env = make(failure_rate=0.2)
    state = jax.eval_shape(env.reset, jax.random.key(0))[0]
    assert state.channel == () and env.context(start()) == () and env.for_evaluation() is env
    assert not set(communication.METRICS) & set(env.spec.metrics)


# The same mission under every channel


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"failure_rate": 0.3, "channel_metrics": True},
        {"failure_rate": 1.0},
        {"delay": 3},
        {"delay": 2, "failure_rate": 0.5},
        {"delay": (0, 1, 3), "failure_rate": (0.0, 0.1, 0.3), "show_ages": True},
    ],
    ids=str,
)
def test_a_key_is_the_same_mission_under_every_channel(settings: dict[str, Any]) -> None:
    usual = {"q": 3, "budget": 5, "terrain": "mixed", "random_range": True}
    key = jax.random.key(17)
    for (a, ts_a), (b, ts_b) in zip(play(make(**usual), key), play(make(**usual, **settings), key), strict=True):
        equal((a.terrain, a.positions, a.comm_range), (b.terrain, b.positions, b.comm_range))
        team = (a.maps.beliefs[-1], a.maps.probability[-1]), (b.maps.beliefs[-1], b.maps.probability[-1])
        equal(*team)
        equal((ts_a.reward, ts_a.action_mask), (ts_b.reward, ts_b.action_mask))
        np.testing.assert_allclose(ts_a.global_state["maps"], ts_b.global_state["maps"], atol=1e-6)
        equal(ts_a.metrics, {name: ts_b.metrics[name] for name in ts_a.metrics})
        equal(ts_a.observation[..., 4], ts_b.observation[..., 4])  # the own measurement


def test_more_failures_lose_what_fewer_lose_and_more() -> None:
    @jax.jit
    def draw(rate: jax.Array) -> Any:
        return jax.vmap(lambda k: communication.draw_delivered(jax.random.key(2), k, 6, rate))(jnp.arange(50))

    few, many = (np.asarray(draw(np.float32(rate))) for rate in (0.1, 0.3))
    assert not np.array_equal(many, many.swapaxes(1, 2))  # a message back may be lost or not
    assert np.all(few | ~many) and few.mean() == pytest.approx(0.9, abs=0.03)
    assert many.mean() == pytest.approx(0.7, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({"delay": (0, 2), "show_ages": True}, "dense"),
        ({"channel_metrics": True}, "dense"),
        ({"delay": (0, 2)}, "windows"),
    ],
    ids=str,
)
def test_a_channel_without_delay_is_the_plain_one(settings: dict[str, Any], backend: str) -> None:
    """Bit for bit, whatever it counts and shows; also where the delay, 0, is known only when the program runs."""
    usual = {"q": 3, "budget": 5, "failure_rate": 0.3, "map_backend": backend}
    env = make(**usual, **settings)
    draw_channel = jax.jit(lambda key: env._draw_mission(key).channel)
    key = next(key for key in jax.random.split(jax.random.key(1), 9) if int(draw_channel(key).delay) == 0)
    for (a, ts_a), (b, ts_b) in zip(play(make(**usual), key), play(env, key), strict=True):
        equal(a.maps, b.maps)
        equal(ts_a.observation, ts_b.observation[..., :7])
        equal((ts_a.reward, ts_a.global_state), (ts_b.reward, ts_b.global_state))


# Against an oracle


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def misread(key: jax.Array, k: int, agent: int, level: int, cells: np.ndarray) -> np.ndarray:
    """bool: cells that an agent misreads in measurement k, by the environment's hash in NumPy."""
    first = mix((agent // 2 * 0x9E3779B1 + k) % 2**32)
    for word in np.asarray(jax.random.key_data(key)).tolist():
        first = mix((first + word) % 2**32)
    second = mix(first ^ 0x5BD1E995)
    x = cells.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(first)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) + np.uint32(second)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return ((x >> np.uint32(16 * (agent % 2))) & np.uint32(0xFFFF)) < round(oracle.ERROR_RATES[level] * 65536)


def oracle_mission(env: Any, key: jax.Array, state: Any) -> oracle.Mission:
    """The oracle's mission of a key: its own rules, with the terrain, the start and all draws of the environment."""
    truth = np.asarray(terrain.whole(state.terrain, env.n))

    def read(k: int, agent: int, box: oracle.Box) -> np.ndarray:
        rows, columns = np.arange(box[0], box[1])[:, None], np.arange(box[2], box[3])[None]
        level = mission_positions[0][agent, 2] // SPACING - 1
        with np.errstate(over="ignore"):
            return truth[box[0] : box[1], box[2] : box[3]] ^ misread(key, k, agent, level, rows * env.n + columns)

    class Injected(oracle.Mission):
        def _messages(self) -> np.ndarray:
            step_key = jax.random.fold_in(jax.random.fold_in(key, 3), self.t)
            draws = np.asarray(jax.random.uniform(step_key, (env.num_agents,) * 2, jnp.float32))
            return oracle.received_messages(self.positions, self.range, draws, env.failure_rate)

        def _measure(self, agent: int) -> oracle.Measurement:
            mission_positions[0] = self.positions
            return super()._measure(agent)

    positions = (np.asarray(state.positions) + [0, 0, 1]) * SPACING
    mission_positions = [positions]
    names = {field.name for field in dataclasses.fields(oracle.Settings)}
    rules = {name: value for name, value in vars(env).items() if name in names}
    return Injected(oracle.Settings(**rules), truth=truth, start=positions, readings=read)


class IntegerBeliefs:
    """Local beliefs in the integer steps of int16 maps, by a rule of its own: sums of integers, clipped."""

    def __init__(self, env: Any):
        self.maps = np.zeros((env.num_agents, env.n, env.n), np.int64)
        self.gains = [round(1350.7805 * np.log((1 - e) / e)) for e in oracle.ERROR_RATES]
        self.limit = round(1350.7805 * np.log(0.9999 / 0.0001))

    def enter(self, receiver: int, measurement: oracle.Measurement, whole: bool) -> None:
        top, bottom, left, right = measurement.box
        clipped = self.maps[receiver] if whole else self.maps[receiver, top:bottom, left:right]
        np.clip(clipped, -self.limit, self.limit, out=clipped)
        gain = self.gains[measurement.altitude // SPACING - 1]
        self.maps[receiver, top:bottom, left:right] += np.where(measurement.reading, gain, -gain)

    def update(self, mission: oracle.Mission) -> None:
        for agent, measurement in enumerate(mission.measurements):
            self.enter(agent, measurement, whole=False)
        for receiver, sender in np.argwhere(mission.received & ~np.eye(len(self.maps), dtype=bool)):
            self.enter(receiver, mission.messages[sender], whole=True)


def check_missions(env: Any, missions: int) -> None:
    """Beliefs and observations of missions of the environment are those of the oracle."""
    exact = env.belief_dtype == "int16"
    arrived = 0
    for key in jax.random.split(jax.random.key(5), missions):
        state, timestep = begin(env, key)
        mission, beliefs = oracle_mission(env, key, state), IntegerBeliefs(env)
        mission._rng = np.random.default_rng(np.asarray(jax.random.key_data(key))[-1])
        while True:
            beliefs.update(mission)
            stored = np.asarray(state.maps.beliefs)
            if exact:
                np.testing.assert_array_equal(np.where(stored == -32768, 0, stored)[:-1], beliefs.maps)
            bounds = (2e-4, 3e-5) if exact else (5e-5, 1e-5)
            np.testing.assert_allclose(probability(env, stored)[:-1], mission.local_beliefs, atol=bounds[0])
            np.testing.assert_allclose(probability(env, stored)[-1], mission.global_belief, atol=bounds[0])
            view = np.maximum(mission.observe(), 0.0)
            np.testing.assert_allclose(timestep.observation, view, atol=bounds[1])
            arrived += int(np.sum(mission.received & ~np.eye(env.num_agents, dtype=bool)))
            if mission.done:
                break
            actions = mission.random_actions()
            mission.step(actions)
            state, timestep = proceed(env, state, actions.astype(np.int32))
            np.testing.assert_array_equal((np.asarray(state.positions) + [0, 0, 1]) * SPACING, mission.positions)
    assert arrived > missions


DELAYED = {"q": 4, "budget": 7, "delay": 3, "failure_rate": 0.2, "communication_range": 30.0}


@pytest.mark.parametrize("backend", ["dense", pytest.param("windows", marks=pytest.mark.slow)])
def test_delayed_missions_equal_the_oracles(backend: str) -> None:
    check_missions(make(**DELAYED, map_backend=backend), 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"belief_dtype": "float32"},
        {"belief_dtype": "int16", "q": 7, "budget": 14},
        {"belief_dtype": "float32", "map_backend": "windows", "num_agents": 5},
        {"belief_dtype": "float32", "prior": 0.3, "terrain": "mixed", "num_actions": 27, "delay": 1},
    ],
    ids=str,
)
def test_a_hundred_delayed_missions_equal_the_oracles(settings: dict[str, Any]) -> None:
    check_missions(make(**{**DELAYED, **settings}), 100)


# Links


def expected_links(env: Any, steps_seen: list[tuple[Any, Any]], k: int) -> np.ndarray:
    """Links of measurement k by a rule in NumPy; of the environment come positions, presence, and the draws."""
    first, now = steps_seen[0][0], steps_seen[k][0]
    delay = int(now.channel.delay) if now.channel else 0
    links = np.full((env.num_agents, env.num_agents), -1)
    if k < delay:
        return links
    sent = steps_seen[k - delay][0]
    places = np.asarray(sent.positions, float) * SPACING
    everyone = np.ones(env.num_agents, bool)
    flies, flew = (np.asarray(state.team.present) if env.has_teams else everyone for state in (now, sent))
    size = int(now.team.size) if env.has_teams else env.num_agents
    shape = (env.num_agents, env.num_agents)
    step_key = jax.random.fold_in(jax.random.fold_in(first.key, 3), k - delay)
    draws = np.asarray(jax.random.uniform(step_key, shape, jnp.float32)).ravel()
    for receiver in np.flatnonzero(flies):
        for sender in np.flatnonzero(flew):
            distance = np.linalg.norm(places[receiver] - places[sender])
            near = distance <= env.communication_range and draws[receiver * size + sender] >= env.failure_rate
            if receiver != sender and (near or distance == 0):
                links[receiver, sender] = delay
    return links


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"failure_rate": 0.3}, marks=pytest.mark.slow),
        {"failure_rate": 0.4, "delay": 2, "loss_rate": 0.1},
        pytest.param({"channel_metrics": True, "communication_range": 20.0}, marks=pytest.mark.slow),
        pytest.param({"delay": 1, "team_sizes": (3,), "failure_rate": 0.2}, marks=pytest.mark.slow),
        pytest.param({"delay": (0, 3), "loss_rate": 0.1, "map_backend": "windows"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_links_are_the_messages_that_arrive(settings: dict[str, Any]) -> None:
    env = make(num_agents=5, budget=5, **settings)
    assert env.spec.links and env.spec.max_link_age == env.max_delay
    seen: list[int] = []
    for key in jax.random.split(jax.random.key(12), 3):
        steps_seen = play(env, key)
        for k, (_, timestep) in enumerate(steps_seen):
            assert timestep.links.dtype == jnp.int32
            np.testing.assert_array_equal(timestep.links, expected_links(env, steps_seen, k))
            seen += np.asarray(timestep.links).ravel().tolist()
    assert set(seen) <= {-1, *(env.delays)} and max(seen) >= 0 and np.mean(np.array(seen) < 0) > 0.3


def test_a_single_agent_has_no_links() -> None:
    env = make(num_agents=1, delay=1)
    assert not env.spec.links and env.spec.max_link_age == 0
    assert jax.eval_shape(env.reset, jax.random.key(0))[1].links == ()


# Ages


@pytest.mark.slow
def test_planes_of_ages() -> None:
    """Everyone hears everyone from step 2 on, what was sent two steps before; agent 2 is out of range at first."""
    env = make(num_agents=3, num_actions=4, budget=4, delay=2, show_ages=True, communication_range=100.0)
    assert env.spec.observation.shape == (11, 11, 10) and env.spec.critic_input_spec.shape == (11, 11, 15)
    for k, (_, timestep) in enumerate(play(env, jax.random.key(0))):
        planes = np.asarray(timestep.observation)[..., 7:]
        age = 1.0 if k < 2 else 2 / 5
        expected = np.where(np.eye(3, dtype=bool), 0.0, age).astype(np.float32)
        np.testing.assert_array_equal(planes, np.broadcast_to(expected[:, None, None], planes.shape))
    silent = dataclasses.replace(env, communication_range=0.0, start="corners", delay=0)
    config, channel = silent.channel_config, silent._draw_mission(jax.random.key(0)).channel
    channel = dataclasses.replace(channel, latest=jnp.array([[-1, 0, 3], [2, -1, -1], [4, 1, -1]], jnp.int32))
    expected = [[0, 4 / 5, 1 / 5], [2 / 5, 0, 1], [0, 3 / 5, 0]]
    np.testing.assert_allclose(communication.ages(config, channel, jnp.int32(4)), expected, atol=1e-7)


def test_egocentric_views_keep_planes_of_ages() -> None:
    rng = np.random.default_rng(0)
    turn = jax.jit(egocentric.egocentric, static_argnums=(1, 2))
    for channels in (7, 12):
        view = rng.random((11, 11, channels)).astype(np.float32)
        view[..., 2] = np.arange(11)[:, None] >= 3
        with_ages = np.concatenate([view[..., :7], np.full((11, 11, 3), 0.5, np.float32), view[..., 7:]], axis=-1)
        plain, order = turn(view, 6, 0)
        aged, aged_order = turn(with_ages, 6, 3)
        np.testing.assert_array_equal(np.delete(np.asarray(aged), [7, 8, 9], axis=-1), plain)
        np.testing.assert_array_equal(aged[..., 7:10], with_ages[..., 7:10])
        np.testing.assert_array_equal(order, aged_order)


# Lists and ramps


def conditions(env: Any, context: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Failure rates and delays of 200 missions."""

    @jax.jit
    def draw(keys: jax.Array, context: Any) -> Any:
        channel = jax.vmap(lambda key: env._draw_mission(key, context).channel)(keys)
        return channel.failure_rate, channel.delay

    rates, delays = draw(jax.random.split(jax.random.key(0), 200), context)
    return np.asarray(rates), np.asarray(delays)


def test_missions_draw_their_conditions_from_lists() -> None:
    rates, delays = conditions(make(failure_rate=(0.0, 0.1, 0.3), delay=(0, 1, 3)))
    for values, allowed in ((rates, np.float32([0.0, 0.1, 0.3])), (delays, [0, 1, 3])):
        assert set(values.tolist()) == {float(value) for value in allowed}
        assert min(np.mean(values == value) for value in allowed) > 0.2
    assert abs(np.corrcoef(rates, delays)[0, 1]) < 0.2  # drawn independently
    fixed_rates, fixed_delays = conditions(make(failure_rate=0.2, delay=2))
    assert np.all(fixed_rates == np.float32(0.2)) and np.all(fixed_delays == 2)


def test_a_ramp_raises_failures_and_delays_over_training() -> None:
    env = make(failure_rate=0.4, delay=3, channel_ramp=0.5)
    expected = {0.0: (0.0, 0), 0.125: (0.1, 1), 0.25: (0.2, 2), 0.5: (0.4, 3), 1.0: (0.4, 3)}
    for fraction, (rate, delay) in expected.items():
        progress = dataclasses.replace(start(), fraction=jnp.float32(fraction))
        rates, delays = conditions(env, env.context(progress))
        np.testing.assert_allclose(rates, rate, atol=1e-6)
        assert np.all(delays == delay)
    assert np.all(conditions(env)[1] == 0)  # without a context: that of the start
    checked = env.for_evaluation()
    assert checked.context(start()) == () and np.all(conditions(checked)[1] == 3)
    assert checked == dataclasses.replace(env, channel_ramp=0.0)


@pytest.mark.slow
def test_training_follows_the_ramp(tmp_path: Path) -> None:
    sizes = {"num_envs": 8, "hidden_size": 8, "minibatch_size": 64, "num_epochs": 1, "eval_every": 0}
    result = jaxrl.train(
        "coma", "coverage", q=3, budget=3, delay=2, failure_rate=0.3, communication_range=100.0, channel_ramp=1.0,
        total_episodes=80, runs=str(tmp_path), critic_warmup=0, **sizes,
    )  # fmt: skip
    ages = result.metrics["rollout/age_max"]
    ages = ages[np.isfinite(ages)]
    assert ages[0] == 0 and ages[-1] > 1


# Pictures, sentences


@pytest.mark.slow
def test_pictures_show_the_messages_that_arrive() -> None:
    env = make(q=3, num_agents=4, communication_range=100.0, failure_rate=0.5, delay=2)
    steps_seen = play(env, jax.random.key(9))
    states = jax.tree.map(lambda *x: jnp.stack(x), *(state for state, _ in steps_seen))
    heard = viewer._heard(env, states.key, states.positions, states.comm_range, states.channel)
    latest = np.asarray(states.channel.latest)
    for k in range(len(heard)):
        arrived = latest[k] == k - 2 if k >= 2 else np.zeros((4, 4), bool)
        np.testing.assert_array_equal(np.asarray(heard[k]) & ~np.eye(4, dtype=bool), arrived)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delay": 5}, "with a delay of 5 steps no message arrives in a mission of 5 steps"),
        ({"delay": (0, 5)}, "choose at most 4"),
        ({"delay": -1}, "delay must lie between 0 and 10,000, not -1"),
        ({"delay": (0, -1)}, "delay must lie between 0 and 10,000"),
        ({"delay": 1.5}, "delay must be a whole number or a list of numbers, not 1.5"),
        ({"failure_rate": (0.0, 1.5)}, "failure_rate must lie between 0 and 1"),
        ({"delay": ()}, "delay is an empty list; give one value, or several for missions to draw from"),
        ({"failure_rate": []}, "failure_rate is an empty list"),
        ({"channel_ramp": 1.5}, "channel_ramp must lie between 0 and 1"),
    ],
    ids=str,
)
def test_impossible_channels(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**settings)


def test_a_gpu_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_module, "on_cpu", lambda: False)
    monkeypatch.setattr(env_module, "runs_triton", lambda: True)
    assert make(delay=(0, 1), team_sizes=(2,)).for_this_device().map_backend == "pallas"
    monkeypatch.setattr(env_module, "runs_triton", lambda: False)
    assert make().for_this_device().map_backend == "dense"
