"""Egocentric views of coverage, and networks that see them."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny import Corridor
from hypothesis import given, settings
from hypothesis import strategies as st

import envs_jax
import jaxrl
from envs_jax.base import Box, restart
from envs_jax.coverage import actions, egocentric, observation
from jaxrl.algos.coma import Coma
from jaxrl.algos.ppo import Ppo, central_input
from jaxrl.nn.team_policy import Situation
from jaxrl.rl.data_parallel import DataParallel

X_DOWN, Y_DOWN, Y_UP, X_UP = 1, 2, 3, 4  # of six actions; 0 and 5 change the altitude

# What happens to axes 0 and 1 of maps, and to the six actions, in the eight symmetric missions.
SYMMETRIES = [
    (mirror_x, mirror_y, exchange) for mirror_x, mirror_y, exchange in itertools.product((False, True), repeat=3)
]


def turn(view: np.ndarray, mirror_x: bool, mirror_y: bool, exchange: bool) -> np.ndarray:
    view = np.flip(view, 0) if mirror_x else view
    view = np.flip(view, 1) if mirror_y else view
    return view.transpose(1, 0, 2) if exchange else view


def turned_action(action: int, mirror_x: bool, mirror_y: bool, exchange: bool) -> int:
    """The action, one of six, in the turned mission: by the names of the moves."""
    swaps = [{X_DOWN: X_UP, X_UP: X_DOWN}] * mirror_x + [{Y_DOWN: Y_UP, Y_UP: Y_DOWN}] * mirror_y
    swaps += [{X_DOWN: Y_DOWN, Y_DOWN: X_DOWN, X_UP: Y_UP, Y_UP: X_UP}] * exchange
    for swap in swaps:
        action = swap.get(action, action)
    return action


def turn_views_and_actions(views: np.ndarray, *mirrored_by: bool) -> np.ndarray:
    """Critic inputs [A, 11, 11, 12] of the turned mission, in which the actions of the others turn, too."""
    turned = np.stack([turn(view, *mirrored_by) for view in views])
    there = np.array([0] + [turned_action(a, *mirrored_by) + 1 for a in range(6)])
    turned[..., 11] = there[np.rint(turned[..., 11] * 6).astype(int)] / 6
    return turned


turn_view = jax.jit(egocentric.egocentric, static_argnums=1)
turn_views = jax.jit(jax.vmap(lambda view: egocentric.egocentric(view, 6)))
find_neighbours = jax.jit(observation.neighbours)


def make_view(generator: np.random.Generator, positions: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Critic inputs [A, 11, 11, 12] with made-up maps, and who is where and does what."""
    agents = len(positions)
    view = generator.random((agents, 11, 11, 12)).astype(np.float32)
    view[:, :, :, 2] = find_neighbours(positions, np.ones((agents, agents), bool))
    view[:, :, :, 11] = 0
    for i, j in itertools.permutations(range(agents), 2):
        view[i, positions[j, 0], positions[j, 1], 11] = (chosen[j] + 1) / 6
    return view


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), mirrored_by=st.sampled_from(SYMMETRIES))
def test_symmetric_situations_look_the_same(seed: int, mirrored_by: tuple[bool, bool, bool]) -> None:
    """A view and its mirror image are one in the agent's frame, where every action is what its mirror image is."""
    generator = np.random.default_rng(seed)
    positions, chosen = generator.integers(0, [11, 11, 3], (4, 3), np.int32), generator.integers(0, 6, 4)
    view = make_view(generator, positions, chosen)
    other = turn_views_and_actions(view, *mirrored_by)
    (first, acts), (second, turned_acts) = turn_views(view), turn_views(other)
    for agent, (x, y, _) in enumerate(positions):
        if x == 5 or y == 5 or min(x, 10 - x) == min(y, 10 - y):
            continue  # on the middle or a diagonal: its own mirror image
        np.testing.assert_array_equal(first[agent], second[agent])
        mirrored = [turned_acts[agent, turned_action(a, *mirrored_by)] for a in range(6)]
        np.testing.assert_array_equal(acts[agent], mirrored)


@pytest.mark.parametrize("position", [(1, 3), (3, 1), (9, 3), (1, 7), (7, 9), (10, 0), (5, 8), (4, 4), (6, 4)])
def test_the_agent_lies_in_one_eighth(position: tuple[int, int]) -> None:
    """Channel 7 shows it at x <= y <= 5; a single observation is turned in the same way."""
    view = make_view(np.random.default_rng(1), np.array([[*position, 1]], np.int32), np.zeros(1, int))[0]
    view[:, :, 7] = 0
    view[*position, 7] = 2 / 3
    canonical, there = turn_view(view, 6)
    ((x, y),) = np.argwhere(canonical[:, :, 7])
    assert x <= y <= 5 and {x, y} == {min(p, 10 - p) for p in position}
    seven, same = turn_view(view[:, :, :7], 6)
    np.testing.assert_array_equal(seven[:, :, :7], canonical[:, :, :7])
    np.testing.assert_array_equal(there, same)
    assert float(canonical[x, y, 5]) == view[*position, 5]  # the map's value under the agent goes with it
    assert seven.shape == (11, 11, 10) and canonical.shape == (11, 11, 20)
    np.testing.assert_array_equal(seven[:, :, 7:], canonical[:, :, 12:15])
    for channel, around in zip(
        (3, 5, 6, 7, 8, 9, 10, 11), np.moveaxis(np.asarray(canonical[:, :, 12:]), 2, 0), strict=True
    ):
        for a, b in np.ndindex(11, 11):  # cell (5, 5) is the agent's
            row, column = x + a - 5, y + b - 5
            on_map = 0 <= row < 11 and 0 <= column < 11
            assert around[a, b] == (canonical[row, column, channel] if on_map else 0)


@pytest.mark.parametrize("num_actions", [4, 6, 27])
def test_every_action_moves_in_its_frame_as_its_image_does(num_actions: int) -> None:
    """An agent at (9, 7) is at (1, 3) in the frame, where x and y are mirrored; at (7, 9) axes are exchanged, too."""
    for position, exchange in (((9, 7), False), ((7, 9), True)):
        view = np.zeros((11, 11, 7), np.float32)
        view[:, :, 2] = find_neighbours(np.array([[*position, 1]], np.int32), np.ones((1, 1), bool))[0]
        _, there = turn_view(view, num_actions)
        assert sorted(there.tolist()) == list(range(num_actions))
        for action in range(num_actions):
            old = np.array([*position, 1]) + actions.MOVES[num_actions][action]
            new = np.array([1, 3, 1]) + actions.MOVES[num_actions][there[action]]
            mirrored = 10 - old[:2]
            np.testing.assert_array_equal(new, [*(mirrored[::-1] if exchange else mirrored), old[2]])


def make_symmetric_views() -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Views of four agents, those of a symmetric mission, and what each of the six actions is there."""
    positions = np.array([[9, 7, 0], [1, 2, 1], [3, 8, 2], [8, 4, 1]], np.int32)
    view = make_view(np.random.default_rng(0), positions, np.array([1, 2, 3, 4]))
    order = [turned_action(a, True, False, True) for a in range(6)]
    return view, turn_views_and_actions(view, True, False, True), order


def test_an_egocentric_policy_acts_alike_in_symmetric_situations() -> None:
    """Probabilities and values of mirrored views are mirrored; without the setting they are not."""
    env = envs_jax.make("coverage", q=5)
    view, other, order = make_symmetric_views()
    for seen in (True, False):
        algo = Coma(env.spec, DataParallel(8), egocentric=seen, hidden_size=8, dueling=True)

        @jax.jit
        def compute_outputs(view: Any, algo: Coma = algo) -> Any:
            """The actor's logits and the critic's values, of a step of an agent each."""
            params, rows = algo.init(jax.random.key(0), None).replicated, view[:, None, None]
            action, nothing = jnp.zeros(rows.shape[:3]), Situation((), ())
            single = {"observation": rows[..., :7], "action": action, "situation": nothing}
            return algo.logits(params.actor.params, single), algo.values(params.critic.params, rows)

        for first, second in zip(compute_outputs(view), compute_outputs(other), strict=True):
            assert np.allclose(first, np.asarray(second)[..., order], atol=1e-6) == seen


@pytest.mark.slow
def test_training_sees_them(tmp_path: Path) -> None:
    """Networks get ten and twenty channels; a loaded policy acts alike."""
    sizes = {"q": 2, "num_agents": 2, "budget": 3, "num_envs": 8, "minibatch_size": 32}
    small = {"hidden_size": 4, "depth": 0, "stride": 2, "dueling": True, "devices": 1, "eval_episodes": 2}
    done = jaxrl.train("coma", "coverage", egocentric=True, total_episodes=16, runs=str(tmp_path), **sizes, **small)
    algo, params = done.policy.algo, done.policy.params
    assert params["params"]["conv1_kernel"].shape == (5, 5, 10, 4)
    assert algo.networks["critic"].shapes["params"]["conv1_kernel"].shape == (5, 5, 20, 4)
    _, timestep = jax.jit(done.policy.env.reset)(jax.random.key(0))
    first, second = (policy(timestep)[0] for policy in (jaxrl.load(done.directory), done.policy))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("critic", ["local", "central"])
def test_an_egocentric_actor_of_ppo_acts_alike_and_its_critic_does_not_see_the_frame(critic: Any) -> None:
    """Logits of mirrored views are mirrored, and the value of a state is the same; without the setting neither is."""
    env = envs_jax.make("coverage", q=5)
    view, other, order = make_symmetric_views()
    for seen in (True, False):
        algo = Ppo(env.spec, DataParallel(8), egocentric=seen, critic=critic, hidden_size=8, initializer="torch")

        @jax.jit
        def compute_outputs(view: Any, algo: Ppo = algo) -> Any:
            """The actor's logits and the critic's value, of a step of an agent each."""
            params, rows = algo.init(jax.random.key(0), None).replicated, view[:, None, None]
            channels = {"observation": rows[..., :7], "central": rows}
            single = channels | {"situation": Situation((), ()), "carry": (), "critic_carry": ()}
            logits = algo.actor_outputs(params.actor.params, params, single)
            return logits[:, 0, 0], algo.values(params.critic.params, params, single)[0]

        (logits, value), (other_logits, other_value) = compute_outputs(view), compute_outputs(other)
        assert np.allclose(logits, np.asarray(other_logits)[:, order], atol=1e-6) == seen
        assert np.allclose(value, other_value, atol=1e-6) == seen


def test_no_frame_shows_in_actions_that_a_critic_of_states_does_not_know() -> None:
    """With four and with 27 actions their numbers turn otherwise than with six."""
    positions = np.array([[9, 7, 0], [1, 2, 1]], np.int32)
    for num_actions in (4, 6, 27):
        spec = envs_jax.make("coverage", q=5, num_agents=2, num_actions=num_actions).spec
        maps = {"maps": jnp.ones((11, 11, 4)), "positions": positions}
        timestep = restart(jnp.ones((2, 11, 11, 7)), global_state=maps)
        assert not np.any(central_input(spec, timestep)[..., 11])


def test_an_environment_without_egocentric_views_is_refused() -> None:
    for algo in (Coma, Ppo):
        with pytest.raises(ValueError, match=r"^'corridor' has no egocentric views: use --egocentric false$"):
            algo(Corridor().spec, DataParallel(8), egocentric=True)
    spec = dataclasses.replace(envs_jax.make("coverage", q=5).spec, critic_input=None)
    for algo, remedy in ((Coma, "use --egocentric false"), (Ppo, "use --critic local, or --egocentric false")):
        with pytest.raises(ValueError, match=f"^'coverage' has no critic_input, .*: {remedy}$"):
            algo(spec, DataParallel(8), egocentric=True)


def test_egocentric_views_of_normalised_observations_are_refused() -> None:
    """They are made of observations as they are: a normalised plane no longer says where the area ends."""
    spec = envs_jax.make("coverage", q=5).spec
    with pytest.raises(ValueError, match=r"use --normalize_observation never, or --egocentric false$"):
        Ppo(spec, DataParallel(8), egocentric=True, normalize_observation="always")
    Ppo(spec, DataParallel(8), egocentric=True)
    box = dataclasses.replace(spec, action=Box((2,), jnp.float32, -1.0, 1.0))
    with pytest.raises(ValueError, match=r"^egocentric views are for discrete actions, .* use --egocentric false$"):
        Ppo(box, DataParallel(8), egocentric=True)
