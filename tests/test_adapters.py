"""Environments of other JAX libraries: each package's own stepping, ends, names, refusals; skipped without the package.

Packages made up here stand for the real ones in tests of what no real environment shows.
"""

import copy
import dataclasses
import importlib
import itertools
import pickle
import re
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax import check_env, make
from envs_jax.adapters.common import UnfitError, join_mask, quiet
from envs_jax.base import find
from jaxrl.cli import evaluate, train
from jaxrl.runtime.config import make_schema

MODULES = {
    "gymnax": "gymnax", "jumanji": "jumanji", "brax": "brax.envs", "jaxmarl": "jaxmarl",
    "playground": "mujoco_playground",
}  # fmt: skip


def load(library):
    """Return the package of a library."""
    with quiet():  # their own deprecated calls are no failures of this test
        return importlib.import_module(MODULES[library])


def with_package(*case, marks=()):
    """Return a test's parameters that begin with a library, or with a name such as "brax:fast"."""
    library = re.match(r"\w+", case[0])[0]
    return pytest.param(*case, marks=[*marks, pytest.mark.needs(MODULES[library].partition(".")[0])])


def keys_of(seed):
    """Return the raw keys of an episode's reset and of its step t."""
    key_reset, key_steps = jax.random.split(jax.random.key(seed))
    return jax.random.key_data(key_reset), lambda t: jax.random.key_data(jax.random.fold_in(key_steps, t))


def episode(env, actions, seed=0):
    """Return the time steps of one episode, step after step, on the host; actions of a team are those of all agents."""
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    state, timestep = reset(jax.random.key(seed))
    rows = [timestep]
    shape = (env.spec.num_agents, *env.spec.action.shape)
    for action in actions:
        state, timestep = step(state, jnp.asarray(action, env.spec.action.dtype).reshape(shape))
        rows.append(timestep)
    return jax.device_get(rows)


def ends(rows):
    """Return (terminated, truncated) of the last time step, after checking that none ends before."""
    assert not any(row.done for row in rows[:-1])
    return bool(rows[-1].terminated), bool(rows[-1].truncated)


# gymnax


@pytest.mark.needs("gymnax")
@pytest.mark.parametrize(("name", "action"), [("Pendulum-v1", [1.3]), ("CartPole-v1", 1)])
def test_gymnax_steps_as_gymnax_does(name, action):
    """Also the last observation, which gymnax's own step keeps in its info, equals the adapter's."""
    gymnax = load("gymnax")
    env, steps = make(f"gymnax:{name}", horizon=8), 8
    rows = episode(env, [action] * steps)
    theirs, params = gymnax.make(name)
    params = params.replace(max_steps_in_episode=8)
    key_reset, key_of = keys_of(0)
    with quiet():
        observation, state = jax.jit(theirs.reset)(key_reset, params)
        np.testing.assert_array_equal(rows[0].observation[0], observation)
        for t, row in enumerate(rows[1:]):
            clipped = jnp.asarray(action, env.spec.action.dtype)
            _, state, reward, terminated, truncated, info = jax.jit(theirs.step)(key_of(t), state, clipped, params)
            np.testing.assert_array_equal(row.observation[0], info["final_observation"])
            np.testing.assert_array_equal(row.reward, [reward])
            assert (row.terminated, row.truncated) == (terminated, truncated)
    assert ends(rows) == (False, True)


# jumanji


@pytest.mark.needs("jumanji")
def test_jumanji_steps_as_jumanji_does():
    jumanji = load("jumanji")
    rows = episode(make("jumanji:Snake-v1", observe="grid"), [1, 1, 2, 2, 3], seed=2)
    with quiet():
        theirs = jumanji.make("Snake-v1")
        assert make("jumanji:Snake-v1").spec.horizon == theirs.time_limit == 4000
        state, timestep = jax.jit(theirs.reset)(keys_of(2)[0])
        step = jax.jit(theirs.step)
        for row, action in zip(rows, [1, 1, 2, 2, 3, 0], strict=True):
            np.testing.assert_array_equal(row.observation[0], timestep.observation.grid)
            open_ = np.asarray(timestep.observation.action_mask)
            np.testing.assert_array_equal(row.action_mask[0], open_ if open_.any() else np.ones(4, bool))
            if not row.first:
                np.testing.assert_array_equal(row.reward, [timestep.reward])
                assert row.terminated == (timestep.last() and timestep.discount == 0)
            state, timestep = step(state, jnp.int32(action))


# brax and MuJoCo Playground


def compare_brax(env, theirs, action, steps):
    """Compare an adapter with its package's bare environment; return the time steps."""
    rows = episode(env, [action] * steps)
    with quiet():
        state = jax.jit(theirs.reset)(keys_of(0)[0])
        step = jax.jit(theirs.step)
        for row in rows:
            np.testing.assert_allclose(row.observation[0], state.obs, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(row.reward, [0.0 if row.first else state.reward], rtol=1e-5, atol=1e-6)
            assert row.terminated == (state.done > 0)
            state = step(state, jnp.asarray(action, jnp.float32))
    return rows


@pytest.mark.needs("brax")
def test_brax_steps_as_brax_does():
    brax = load("brax")
    env = make("brax:inverted_pendulum", backend="spring")
    assert env.spec.horizon == 1000 and env.spec.observation.shape == (4,)
    with quiet():
        theirs = brax.get_environment("inverted_pendulum", backend="spring")
    compare_brax(env, theirs, [1.0], 12)


@pytest.mark.needs("mujoco_playground")
@pytest.mark.slow
def test_playground_steps_as_playground_does():
    playground = load("playground")
    with quiet():
        theirs = playground.registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    env = make("playground:CartpoleBalance", horizon=4)
    rows = compare_brax(env, theirs, [0.5], 4)
    assert ends(rows) == (False, True)
    assert rows[-1].metrics["reward_upright"] > 0
    assert find("playground:CartpoleBalance")().horizon == 1000


# JaxMARL


def compare_jaxmarl(name, actions, seed=0, **settings):
    """Compare an adapter with the package's `step_env`; return the time steps and the package's states."""
    jaxmarl = load("jaxmarl")
    rows, theirs = episode(make(f"jaxmarl:{name}", **settings), actions, seed), []
    key_reset, key_of = keys_of(seed)
    with quiet():
        env = jaxmarl.make(name)
        observations, state = env.reset(key_reset)
        step, rewards = jax.jit(env.step_env), dict.fromkeys(env.agents, 0.0)
        for t, row in enumerate(rows):
            theirs.append(state)
            for index, agent in enumerate(env.agents):
                seen, padding = np.split(row.observation[index], [len(observations[agent])])
                np.testing.assert_array_equal(seen, observations[agent])
                np.testing.assert_array_equal(padding, 0)
                np.testing.assert_array_equal(row.reward[index], rewards[agent])
            if t < len(actions):
                actions_by_agent = dict(zip(env.agents, jnp.asarray(actions[t], jnp.int32), strict=True))
                observations, state, rewards, *_ = step(key_of(t), state, actions_by_agent)
    return env, rows, theirs


@pytest.mark.needs("jaxmarl")
def test_jaxmarl_steps_as_jaxmarl_does():
    """The limit of 25 steps truncates the 26th; without a global state the critic sees all observations."""
    actions = np.random.default_rng(0).integers(0, 5, (26, 3))
    _, rows, _ = compare_jaxmarl("MPE_simple_spread_v3", actions)
    assert ends(rows) == (False, True)
    spec = make("jaxmarl:MPE_simple_spread_v3").spec
    assert (spec.num_agents, spec.horizon, spec.global_state) == (3, 26, None)
    assert spec.critic_input_spec.shape == (3 * 18 + 3 * 5 + 3,)


@pytest.mark.needs("jaxmarl")
def test_jaxmarl_with_several_types():
    """Tag: adversaries see 16 numbers, the agent 14. A speaker of three actions, a listener of five."""
    actions = np.random.default_rng(0).integers(0, 5, (26, 4))
    _, rows, _ = compare_jaxmarl("MPE_simple_tag_v3", actions, seed=10)
    assert ends(rows) == (False, True) and rows[0].action_mask is None
    spec = make("jaxmarl:MPE_simple_tag_v3").spec
    assert (spec.observation.shape, spec.agent_types) == ((16,), (0, 0, 0, 1))
    rewards = np.array([row.reward for row in rows])
    assert rewards[:, 0].any() and (rewards[:, 3] != rewards[:, 0]).any()
    np.testing.assert_array_equal([row.metrics["return_agent"] for row in rows], rewards[:, 3])
    _, rows, _ = compare_jaxmarl("MPE_simple_speaker_listener_v4", actions[:5, :2] % 3)
    np.testing.assert_array_equal([row.action_mask for row in rows], [[[1, 1, 1, 0, 0], [1] * 5]] * 6)
    assert make("jaxmarl:MPE_simple_speaker_listener_v4").spec.agent_types == (0, 1)


@pytest.mark.needs("jaxmarl")
@pytest.mark.parametrize(
    "name", ["MPE_simple_v3", "MPE_simple_facmac_3a_v1", "HeuristicEnemySMAX", "switch_riddle", "overcooked_v2"]
)
def test_jaxmarl_cuts_episodes_where_the_package_does(name):
    """Its classes count differently: the package is played with a limit of three steps, and ends in the 3rd or 4th."""
    with quiet():
        env = load("jaxmarl").make(name)
    limit = env.max_steps
    for part in (env, getattr(env, "_env", env)):
        if "max_steps" in vars(part):
            part.max_steps = 3
    with quiet():
        _, state = env.reset(jax.random.PRNGKey(0))
        idle = {agent: 0 * env.action_space(agent).sample(jax.random.PRNGKey(0)) for agent in env.agents}
        lasted, done = 0, False
        while not done and lasted < 10:
            _, state, _, dones, _ = env.step_env(jax.random.PRNGKey(lasted), state, idle)
            lasted, done = lasted + 1, bool(dones["__all__"])
    assert make(f"jaxmarl:{name}").horizon == limit + lasted - 3
    assert lasted == (3 if name in ("switch_riddle", "overcooked_v2") else 4)


@pytest.mark.needs("jaxmarl")
def test_jaxmarl_masks_and_global_state():
    """Soldiers against scripted enemies: closed actions and the world state equal the package's."""
    env, rows, states = compare_jaxmarl("HeuristicEnemySMAX", np.full((3, 5), 1), seed=1)
    for row, state in zip(rows, states, strict=True):
        with quiet():
            masks, world = env.get_avail_actions(state), env.get_world_state(state)
        expected = np.stack([np.asarray(masks[agent]) > 0 for agent in env.agents])
        np.testing.assert_array_equal(row.action_mask, expected)
        np.testing.assert_array_equal(row.global_state, world)
    assert not expected.all()
    assert make("jaxmarl:HeuristicEnemySMAX").spec.global_state.shape == (120,)


@pytest.mark.needs("jaxmarl")
def test_jaxmarl_tells_ends_apart():
    """In the switch riddle an announcement ends the game for good, in the last step too; only time truncates."""
    env = make("jaxmarl:switch_riddle", horizon=3)
    with quiet():
        tell = int(env.env[0].game_actions["TELL"])
    idle = next(action for action in range(3) if action != tell)
    assert ends(episode(env, [[idle] * 3] * 3)) == (False, True)
    assert ends(episode(env, [[tell] * 3])) == (True, False)
    assert ends(episode(env, [[idle] * 3] * 2 + [[tell] * 3])) == (True, False)


@pytest.mark.parametrize(
    ("name", "settings", "action"),
    [
        with_package("gymnax:CartPole-v1", {}, 1),
        with_package("jumanji:Snake-v1", {}, 0),
        with_package("brax:inverted_pendulum", {"backend": "spring"}, [1.0]),
    ],
)
def test_ends_are_told_apart(name, settings, action):
    """A fall or a collision terminates, also in the very step of the limit; what still goes on there is truncated."""
    rows = episode(make(name, **settings), [action] * 20)
    end = next(t for t, row in enumerate(rows) if row.done)
    assert ends(rows[: end + 1]) == (True, False)
    assert ends(episode(make(name, **settings, horizon=end), [action] * end)) == (True, False)
    assert ends(episode(make(name, **settings, horizon=end - 1), [action] * (end - 1))) == (False, True)


# The contract

CHECKED = {
    "gymnax": [
        ("Pendulum-v1", {"horizon": 5}),
        ("Breakout-MinAtar", {"horizon": 5}),
        ("PointRobot-misc", {"horizon": 4}),
    ],
    "jumanji": [("Snake-v1", {"horizon": 4}), ("Maze-v0", {"horizon": 4})],
    "brax": [("inverted_pendulum", {"backend": "spring", "horizon": 3}), ("fast", {"horizon": 3})],
    "jaxmarl": [
        ("MPE_simple_spread_v3", {"horizon": 4}),
        ("MPE_simple_speaker_listener_v4", {"horizon": 4}),
        ("switch_riddle", {"horizon": 4}),
    ],
}
LONG = {"jaxmarl": [("HeuristicEnemySMAX", {"horizon": 3})], "playground": [("CartpoleBalance", {"horizon": 3})]}


def cases(table, *marks):
    return [with_package(library, *case, marks=marks) for library in table for case in table[library]]


@pytest.mark.parametrize(("library", "name", "settings"), [*cases(CHECKED), *cases(LONG, pytest.mark.slow)])
def test_contract(library, name, settings):
    physics = library in ("brax", "playground")  # whose sums depend on the batch by rounding
    check_env(
        make(f"{library}:{name}", **settings), copies=2, random=name != "fast", tolerance=1e-4 if physics else 1e-6
    )


# Names


@pytest.mark.needs("gymnax")
def test_names_make_one_class():
    pendulum = find("gymnax:Pendulum-v1")
    assert pendulum is find("gymnax:Pendulum-v1") and pendulum is not find("gymnax:CartPole-v1")
    env = pendulum(horizon=9)
    assert env.spec.name == f"{pendulum.__module__}:{pendulum.__qualname__}" == "gymnax:Pendulum-v1"
    assert [field.name for field in dataclasses.fields(env)] == ["horizon", "observe"]
    assert make_schema("sac", "gymnax:Pendulum-v1")["horizon"].default == 200
    for again in (pickle.loads(pickle.dumps(env)), copy.deepcopy(env), make("gymnax:Pendulum-v1", horizon=9)):
        assert again == env and type(again) is pendulum and hash(again) == hash(env)
    assert env != pendulum() and dataclasses.replace(env, horizon=200) == pendulum()


@pytest.mark.parametrize(
    ("library", "name", "closest"),
    [
        with_package("gymnax", "Pendulum", "Pendulum-v1"),
        with_package("jumanji", "Snake-v0", "Snake-v1"),
        with_package("brax", "halfcheeta", "halfcheetah"),
        with_package("jaxmarl", "MPE_simple_spred_v3", "MPE_simple_spread_v3"),
        with_package("playground", "CartpoleBalanced", "CartpoleBalance"),
    ],
)
def test_unknown_names(library, name, closest):
    with pytest.raises(ValueError, match=f"unknown environment '{library}:{name}': did you mean '{closest}'"):
        find(f"{library}:{name}")


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        with_package("jumanji:SearchAndRescue-v0", "gives several rewards in a step"),
        with_package("jaxmarl:MPE_simple_world_comm_v3", "has agents with different actions that are not all integers"),
        with_package("jaxmarl:storm_2p", "counts its time limit as an end"),
        with_package("jaxmarl:LearnedPolicyEnemySMAX", "cannot make 'jaxmarl:LearnedPolicyEnemySMAX' .TypeError"),
        with_package("jaxmarl:ant_4x2", "resets itself inside"),
        with_package("jaxmarl:coin_game", "counts its time limit as an end"),
    ],
)
def test_refusals(env, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(env)


# Without the packages


@pytest.mark.parametrize("library", sorted(MODULES))
def test_missing_package(monkeypatch, library):
    monkeypatch.setitem(sys.modules, MODULES[library], None)
    with pytest.raises(ValueError, match=rf"'{MODULES[library]}' is not installed: pip install -e '\.\[{library}\]'"):
        find(f"{library}:Absent")


def module(monkeypatch, name, **contents):
    """Put a made-up package in the place of a real one."""
    package = types.ModuleType(name)
    package.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, package)


class Space(NamedTuple):
    """A box of a made-up package."""

    shape: tuple
    low: object
    high: object
    dtype: object = np.float32


class Walk:
    """A walk on the line in the form of gymnax: the place is the observation, 10 is its end."""

    def __init__(self, space=None, observation=None, seen=None):
        self.seen = seen  # space of the observation
        self.space = space or Space((2,), np.array([-1.0, 0.0]), np.array([3.0, 4.0]))
        self.observation = observation or (lambda place: {"b": place, "a": jnp.zeros((2, 2), bool)})

    def action_space(self, params):
        return self.space

    def observation_space(self, params):
        return self.seen() if self.seen else None

    def reset_env(self, key, params):
        place = jnp.float32(0)
        return self.observation(place), {"time": 0, "place": place}

    def step_env(self, key, state, action, params):
        place = state["place"] + action.sum()
        state = {"time": state["time"] + 1, "place": place}
        return self.observation(place), state, 2, place >= 10, {}

    def is_truncated(self, state, params):
        return state["time"] >= params.limit


class Limit:
    """Parameters of `Walk`."""

    def __init__(self, limit=3):
        self.limit = self.max_steps_in_episode = limit

    def replace(self, max_steps_in_episode):
        return Limit(max_steps_in_episode)


NUMBERS = itertools.count()


def walk(monkeypatch, kind=Walk, **options):
    """Make a `Walk` known to the adapter of gymnax under a name that no other test uses."""
    name = f"Walk-{next(NUMBERS)}"
    module(monkeypatch, "gymnax", registered_envs=[name], make=lambda _: (kind(**options), Limit()))
    return make(f"gymnax:{name}")


def test_a_made_up_package(monkeypatch):
    """Bounds that differ between numbers are kept; ends, weak types and dictionaries by hand."""
    env = walk(monkeypatch)
    assert (env.spec.horizon, env.spec.observation.shape) == (3, (5,))
    assert (env.spec.action.low, env.spec.action.high) == ((-1.0, 0.0), (3.0, 4.0))
    rows = episode(env, [[-1.0, 3.0], [3.0, 4.0], [1.0, 2.0]])
    np.testing.assert_array_equal([row.observation[0] for row in rows], np.eye(5)[[4]] * [[0], [2], [9], [12]])
    assert [float(row.reward[0]) for row in rows] == [0, 2, 2, 2]
    assert ends(rows) == (True, False)
    assert ends(episode(env, [[-1.0, 0.0]] * 3)) == (False, True)
    check_env(env, random=False)


def test_every_step_has_a_key_of_its_own(monkeypatch):
    """A package draws from a key that depends on the episode and the step."""

    class Noisy(Walk):
        def step_env(self, key, state, action, params):
            place = jax.random.uniform(key)
            return self.observation(place), state | {"time": state["time"] + 1, "place": place}, 0.0, False, {}

    env = walk(monkeypatch, Noisy)
    drawn = [[float(row.observation[0, 4]) for row in episode(env, [[0.0, 0.0]] * 3, seed)[1:]] for seed in (0, 1)]
    step_key = keys_of(1)[1]
    np.testing.assert_allclose(drawn[1], [jax.random.uniform(step_key(t)) for t in range(3)])
    assert len({*drawn[0], *drawn[1]}) == 6


def test_a_number_without_a_choice(monkeypatch):
    """Actions are then scaled to [-1, 1], because a Box of ours needs a choice."""
    env = walk(monkeypatch, space=Space((2,), np.array([-1.0, 5.0]), np.array([3.0, 5.0])))
    assert (env.spec.action.low, env.spec.action.high) == (-1.0, 1.0)
    np.testing.assert_array_equal(env.to_package_action(jnp.float32([[-1, -1], [0.5, 1]])), [[-1, 5], [2, 5]])


def test_bounds_of_float64_are_not_left_by_rounding(monkeypatch):
    """float32(0.1) is above 0.1, float32(0.3) too: the nearest numbers inside are taken."""
    env = walk(monkeypatch, space=Space((2,), np.full(2, -0.1), np.array([0.3, 0.7]), np.float64))
    low, high = env.spec.action.bounds
    assert (low >= -0.1).all() and (high <= [0.3, 0.7]).all()
    np.testing.assert_allclose([low, high], [[-0.1, -0.1], [0.3, 0.7]], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"space": Space((2,), -np.inf, np.inf)}, "has actions without bounds"),
        ({"space": Space((7,), 0, 3, np.int32)}, "has actions of 7 integers with 16,384 combinations"),
        ({"space": object()}, "has actions of the kind object, but jaxrl needs integers or bound"),
        ({"observation": lambda place: {}}, r"the observation of 'gymnax:Walk-\d+' is empty"),
        (
            {"observation": lambda place: {"k": jax.random.key(0), "p": place}},
            "cannot be joined to one array: its part 'k' is key<fry>, not numbers",
        ),
    ],
)
def test_refusals_of_a_made_up_package(monkeypatch, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        walk(monkeypatch, **options)


def test_several_integers_are_one(monkeypatch):
    """The index of their combination: 1 and -1 of [-1, 1] x [-2, 2] is 2 * 5 + 1."""
    env = walk(monkeypatch, space=Space((2,), np.array([-1, -2]), np.array([1, 2]), np.int32))
    assert env.spec.action.n == 3 * 5
    rows = episode(env, [11, 14, 0])
    assert [float(row.observation[0, 4]) for row in rows] == [0, 0, 3, 0]


def test_images_of_bytes_are_divided(monkeypatch):
    """Also with a number as a plane; other bytes stay as they are."""
    image = {"image": jnp.full((9, 9, 1), 51, jnp.uint8), "flag": jnp.bool_(True)}
    env = walk(monkeypatch, observation=lambda place: image)
    spec = env.spec.observation
    rows = episode(env, [[0.0, 0.0]])
    assert (spec.shape, spec.low, spec.high) == ((9, 9, 2), 0, 1)
    np.testing.assert_allclose(rows[1].observation[0], np.broadcast_to([1, 0.2], (9, 9, 2)))
    env = walk(monkeypatch, observation=lambda place: jnp.full(4, 51, jnp.uint8))
    assert env.spec.observation.highest == np.inf and episode(env, [[0.0, 0.0]])[0].observation[0, 0] == 51


IMAGE = (9, 9, 2)


def bytes_up_to(high):
    """Return what makes a box of bytes, in arrays of JAX, as packages do."""
    return lambda: Space(IMAGE, 0, jnp.asarray(high), np.uint8)


@pytest.mark.parametrize(
    ("high", "expected"), [(4, 0.75), ([4, 30], [0.75, 0.1]), (np.inf, 3 / 255), (np.full(IMAGE, 6), 0.5)]
)
def test_images_of_bytes_are_divided_by_what_gymnax_says(monkeypatch, high, expected):
    env = walk(monkeypatch, observation=lambda _: jnp.full(IMAGE, 3, jnp.uint8), seen=bytes_up_to(high))
    rows = episode(env, [[0.0, 0.0]])
    np.testing.assert_allclose(rows[1].observation[0], np.broadcast_to(expected, IMAGE), rtol=1e-6)
    hash(env.spec)


def test_parts_of_bytes_are_divided_by_their_own_bound(monkeypatch):
    """Of dictionaries of gymnax."""
    seen = types.SimpleNamespace(spaces={"flag": Space((), 0, 1), "image": bytes_up_to(6)()})
    image = {"image": jnp.full(IMAGE, 3, jnp.uint8), "flag": jnp.bool_(True)}
    env = walk(monkeypatch, observation=lambda place: image, seen=lambda: seen)
    np.testing.assert_allclose(episode(env, [])[0].observation[0, 0, 0], [1, 0.5, 0.5])


class Grid(NamedTuple):
    """What an agent of `Boxes` sees."""

    grid: object
    step_count: object


class Boxes:
    """An environment in the form of jumanji."""

    time_limit = 3
    reward_spec = discount_spec = Space((), 0, 1)
    action_spec = types.new_class("DiscreteArray", exec_body=lambda body: body.update(num_values=2))()
    observation_spec = types.SimpleNamespace(
        grid=types.SimpleNamespace(minimum=0, maximum=4), step_count=types.SimpleNamespace(minimum=0, maximum=3)
    )

    def reset(self, key):
        return jnp.int32(0), self.look(0)

    def step(self, state, action):
        return state + 1, self.look(state + 1)

    def look(self, t):
        seen = Grid(jnp.full(IMAGE, 3, jnp.uint8), jnp.int32(t))
        return types.SimpleNamespace(observation=seen, reward=0.0, discount=1.0, last=lambda: jnp.bool_(False))


def test_images_of_bytes_are_divided_by_what_jumanji_says(monkeypatch):
    module(monkeypatch, "jumanji", registered_environments=lambda: ["Boxes-v0"], make=lambda _: Boxes())
    rows = episode(make("jumanji:Boxes-v0"), [0])
    np.testing.assert_allclose(rows[1].observation[0, 0, 0], [0.75, 0.75, 1])
    only = episode(make("jumanji:Boxes-v0", observe="grid"), [0])
    np.testing.assert_allclose(only[1].observation[0, 0, 0], [0.75, 0.75])


def test_masks_of_several_integers():
    """Of each integer, or of all combinations: open where all parts are."""
    space = Space((3,), 0, np.array([1, 2, 1]), np.int32)
    each = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 0]])
    joint = [each[0, i] and each[1, j] and each[2, k] for i in range(2) for j in range(3) for k in range(2)]
    np.testing.assert_array_equal(join_mask(each, space), np.array(joint, bool))
    np.testing.assert_array_equal(join_mask(np.reshape(joint, (2, 3, 2)), space), np.array(joint, bool))
    concatenated = [1, 0, 1, 1, 0, 0, 1]  # values of the three integers, one after the other
    expected = np.einsum("i,j,k->ijk", [1, 0], [1, 1, 0], [0, 1]).reshape(-1)
    np.testing.assert_array_equal(join_mask(concatenated, space), expected.astype(bool))
    with pytest.raises(UnfitError, match=r"a mask of shape \(2, 2\)"):
        join_mask(np.ones((2, 2)), space)


@pytest.mark.needs("jumanji")
@pytest.mark.parametrize("name", ["Tetris-v0", "MultiCVRP-v0"])
def test_jumanji_with_several_integers(name):
    """Any open combination is one that the package's own mask allows."""
    env = make(f"jumanji:{name}", horizon=3)
    rows = episode(env, [0])
    assert rows[0].action_mask.shape == (1, env.spec.action.n) and rows[0].action_mask.any()
    assert not rows[0].action_mask.all()


class Hunt:
    """A team in the form of JaxMARL whose agents differ: by agent, how much it sees and how many actions it has.

    Agents see ones times the step, or what `observe` says, in the spaces `seen`, and get their action times the number
    of what they see. `closed`: whether masks of the package close all actions but the first, at first, and later all.
    """

    max_steps = 3

    def __init__(self, team, observe=None, seen=None, closed=False):
        self.team, self.agents = team, list(team)
        if observe:
            self.observe = observe
        if seen:
            self.observation_space = seen.__getitem__
        if closed:
            self.get_avail_actions = lambda state: {
                agent: (jnp.arange(actions) == 0) & (state == 0) for agent, (_, actions) in team.items()
            }

    def action_space(self, agent):
        actions = self.team[agent][1]
        if isinstance(actions, int):
            return types.new_class("Discrete", exec_body=lambda body: body.update(n=actions))()
        return actions

    def observe(self, t):
        return {agent: jnp.full(size, t, jnp.float32) for agent, (size, _) in self.team.items()}

    def reset(self, key):
        return self.observe(0), jnp.int32(0)

    def step_env(self, key, state, actions):
        rewards = {agent: actions[agent].sum() * size for agent, (size, _) in self.team.items()}
        return self.observe(state + 1), state + 1, rewards, {"__all__": jnp.bool_(False)}, {}


def hunt(monkeypatch, team, **options):
    name = f"hunt_{next(NUMBERS)}"
    module(monkeypatch, "jaxmarl", registered_envs=[name], make=lambda _: Hunt(team, **options))
    return make(f"jaxmarl:{name}")


TWO = {"left": (1, 2), "right": (1, 2)}


def test_observations_of_a_team_are_told_by_the_names_of_its_agents(monkeypatch):
    def observe(t):
        step = jnp.full(1, t, jnp.float32)
        return {"left": step, "right": 2 * step, "world": step}

    rows = episode(hunt(monkeypatch, TWO, observe=observe), [[0, 1], [1, 1], [0, 0]])
    np.testing.assert_array_equal([row.observation for row in rows], [[[t], [2 * t]] for t in range(4)])
    assert ends(rows) == (False, True) and rows[1].reward.tolist() == [0, 1]


@pytest.mark.parametrize(
    "observe",
    [lambda t: jnp.zeros((2, 1)), lambda t: [jnp.zeros(1), jnp.zeros(1)], lambda t: {"left": jnp.zeros(1)}],
    ids=["stacked", "listed", "one"],
)
def test_observations_of_a_team_without_names_are_refused(monkeypatch, observe):
    sentence = "gives no observation for each agent by name: choose another environment"
    with pytest.raises(ValueError, match=sentence):
        hunt(monkeypatch, TWO, observe=observe)


def test_images_of_bytes_are_divided_by_what_jaxmarl_says_of_each_agent(monkeypatch):
    seen = {"left": bytes_up_to(6)(), "right": bytes_up_to(30)()}
    env = hunt(monkeypatch, TWO, observe=lambda t: dict.fromkeys(TWO, jnp.full(IMAGE, 3, jnp.uint8)), seen=seen)
    np.testing.assert_allclose(episode(env, [])[0].observation[:, 0, 0], [[0.5, 0.5], [0.1, 0.1]])


PAIR = Space((2,), 0, np.array([1, 2]), np.int32)  # six combinations of two integers


def test_a_team_of_several_types(monkeypatch):
    """By hand: zeros after the smaller observation, closed actions, each agent's integers, returns by type."""
    env = hunt(monkeypatch, {"wolf_0": (3, 2), "wolf_1": (3, 2), "hare_0": (1, PAIR)})
    assert (env.spec.observation.shape, env.spec.action.n, env.spec.agent_types) == ((3,), 6, (0, 0, 1))
    rows = episode(env, [[0, 1, 5], [1, 1, 4], [0, 0, 1]])
    seen = [[[t, t, t], [t, t, t], [t, 0, 0]] for t in range(4)]
    np.testing.assert_array_equal([row.observation for row in rows], seen)
    wolf, hare = [1, 1, 0, 0, 0, 0], [1] * 6
    np.testing.assert_array_equal([row.action_mask for row in rows], [[wolf, wolf, hare]] * 4)
    rewards = [[0, 0, 0], [0, 3, 1 + 2], [3, 3, 1 + 1], [0, 0, 0 + 1]]
    np.testing.assert_array_equal([row.reward for row in rows], rewards)
    np.testing.assert_array_equal([row.metrics["return_wolf"] for row in rows], [0, 1.5, 3, 0])
    np.testing.assert_array_equal([row.metrics["return_hare"] for row in rows], [0, 3, 2, 1])
    assert env.spec.label("return_hare") == "return of hare" and ends(rows) == (False, True)
    check_env(env, random=False)


def test_masks_of_a_team_of_several_types(monkeypatch):
    """What the package closes stays closed; where it closes all, an agent has what it can do at all, not more."""
    env = hunt(monkeypatch, {"wolf_0": (2, 2), "hare_0": (2, 3)}, closed=True)
    rows = episode(env, [[0, 0], [0, 0]])
    np.testing.assert_array_equal(rows[0].action_mask, [[1, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(rows[1].action_mask, [[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("team", "agent_types", "metrics"),
    [
        ({"a_0": (2, 2), "a_1": (2, 2)}, (), []),
        ({"wolf0": (2, 2), "hare0": (2, 2), "wolf1": (2, 2)}, (0, 1, 0), []),
        ({"a_0": (1, 2), "a_1": (2, 2), "a_2": (1, 2)}, (0, 1, 0), ["return_a_0", "return_a_1"]),
        ({"a_0": (1, 2), "b_0": (1, 3), "b_1": (1, 3)}, (0, 1, 1), ["return_a", "return_b"]),
        ({"a-1": (1, PAIR), "a-2": (1, 6)}, (0, 1), ["return_a-1", "return_a-2"]),
        ({"0": (1, 2), "1": (2, 2)}, (0, 1), ["return_0", "return_1"]),
    ],
)
def test_types_are_told_by_spaces_and_names(monkeypatch, team, agent_types, metrics):
    spec = hunt(monkeypatch, team).spec
    assert (spec.agent_types, sorted(spec.metrics)) == (agent_types, metrics)


@pytest.mark.parametrize(
    ("team", "sentence"),
    [
        ({"a_0": (1, 2), "b_0": (1, Space((2,), -1.0, 1.0))}, "has agents with different actions t"),
        (
            {"a_0": (1, Space((1,), -1, 1)), "b_0": (1, Space((2,), -1, 1))},
            "that are not all integers: choose an e",
        ),
        ({"a_0": ((9, 9, 1), 2), "b_0": (1, 2)}, "has agents with different observations, some of"),
    ],
)
def test_refused_teams_of_several_types(monkeypatch, team, sentence):
    with pytest.raises(ValueError, match=sentence):
        hunt(monkeypatch, team)


# Training

TINY = "--hidden_size 8 --num_envs 8 --devices 1 --memory_gb 8"
RUNS = {
    "gymnax": f"--algo sac --env gymnax:Pendulum-v1 --horizon 20 --total_env_steps 400 --batch_size 32 {TINY}",
    "gymnax, ddpg": f"--algo ddpg --env gymnax:Breakout-MinAtar --total_env_steps 200 --batch_size 16 {TINY}",
    "jumanji": "--algo coma --env jumanji:Snake-v1 --observe grid --horizon 5 --total_env_steps 80 "
    f"--num_epochs 1 {TINY}",
    "brax": f"--algo sac --env brax:fast --horizon 10 --total_env_steps 160 --batch_size 16 {TINY}",
    "jaxmarl, types": "--algo ppo --env jaxmarl:MPE_simple_tag_v3 --share_parameters false --rollout_steps 16 "
    f"--num_minibatches 2 --total_env_steps 256 {TINY}",
    "jaxmarl": f"--algo coma --env jaxmarl:MPE_simple_spread_v3 --horizon 4 --total_env_steps 64 --num_epochs 1 {TINY}",
}


@pytest.mark.parametrize("case", [with_package(case) for case in RUNS])
def test_trains(tmp_path, monkeypatch, capsys, case):
    """Train, resume and evaluate from the command line: a run finds its environment by the same name."""
    library = case.split(",")[0]
    monkeypatch.chdir(tmp_path)
    assert train.main([*RUNS[case].split(), "--runs", "runs"]) == 0
    run = (tmp_path / "runs" / "latest").read_text().strip()
    config = (tmp_path / "runs" / run / "config.yaml").read_text()
    assert f"env: {library}:" in config and "\nname:" not in config
    if case == library:
        assert evaluate.main([run, "--episodes", "2"]) == 0
        capsys.readouterr()
        total = int(RUNS[case].split("--total_env_steps ")[1].split()[0])
        assert train.main(["--resume", run, "--total_env_steps", str(2 * total)]) == 0
