"""The default input of a centralised critic: rows worked out by hand, the contract, COMA where there is none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny import Corridor

import envs_jax
from envs_jax import Box, Discrete, EnvSpec, check_env, restart
from envs_jax.critic_input import with_critic_input
from jaxrl.cli import train


@dataclasses.dataclass(frozen=True)
class Plain(Corridor):
    """A corridor that defines no critic_input."""

    @property
    def spec(self):
        return dataclasses.replace(super().spec, critic_input=None, critic_input_spec=None)


@dataclasses.dataclass(frozen=True)
class Completed(Plain):
    """The same with the default one."""

    @property
    def spec(self):
        return with_critic_input(super().spec)


def rows(observation, action, num_actions, global_state=None):
    """By hand: the state, what the others do (own zeroed), the agent's number."""
    agents = len(observation)
    inputs = []
    for agent in range(agents):
        others = np.zeros((agents, num_actions), np.float32)
        for other in range(agents):
            if other != agent:
                others[other, action[other]] = 1
        index = np.zeros(agents, np.float32)
        index[agent] = 1
        state = observation if global_state is None else global_state
        inputs.append(np.concatenate([np.ravel(state), others.ravel(), index]))
    return np.stack(inputs)


@pytest.mark.parametrize("shared", [False, True])
def test_vectors(shared):
    spec = EnvSpec("v", 3, Box((2,), low=-3.0, high=0.5), Discrete(4), 9)
    state = np.array([7.0, 8.0, 9.0, 1.0, 2.0], np.float32)
    if shared:
        spec = dataclasses.replace(spec, global_state={"a": Box((3,)), "b": Box((2,))})
    spec = with_critic_input(spec)
    observation = np.arange(6, dtype=np.float32).reshape(3, 2)
    action = np.array([3, 0, 2], np.int32)
    extra = {"global_state": {"a": jnp.array(state[:3]), "b": jnp.array(state[3:])}} if shared else {}
    actual = jax.jit(spec.critic_input)(restart(jnp.array(observation), **extra), jnp.array(action))
    np.testing.assert_array_equal(actual, rows(observation, action, 4, state if shared else None))
    assert spec.critic_input_spec.shape == actual.shape[1:]
    bounds = spec.critic_input_spec.low, spec.critic_input_spec.high
    assert bounds == ((-np.inf, np.inf) if shared else (-3.0, 1.0))


@pytest.mark.parametrize("shared", [False, True])
def test_images(shared):
    """Images of all agents are stacked in the channels; the rest are constant planes."""
    image = Box((9, 10, 2), low=0.0, high=1.0)
    spec = with_critic_input(EnvSpec("i", 2, image, Discrete(3), 9, global_state=image if shared else None))
    observation = np.random.default_rng(0).random((2, 9, 10, 2), np.float32)
    action = jnp.array([2, 1], jnp.int32)
    extra = {"global_state": jnp.array(observation[1])} if shared else {}
    actual = np.asarray(spec.critic_input(restart(jnp.array(observation), **extra), action))
    channels = 2 if shared else 4
    assert actual.shape == (2, *spec.critic_input_spec.shape) == (2, 9, 10, channels + 2 * 3 + 2)
    expected = observation[1] if shared else np.concatenate([observation[0], observation[1]], axis=-1)
    np.testing.assert_array_equal(actual[0, ..., :channels], expected)
    np.testing.assert_array_equal(actual[1, ..., :channels], expected)
    planes = [[0, 0, 0, 0, 1, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0, 1]]
    for agent in range(2):
        np.testing.assert_array_equal(actual[agent, ..., channels:], np.broadcast_to(planes[agent], (9, 10, 8)))


def test_one_agent_sees_the_state_alone():
    spec = with_critic_input(EnvSpec("one", 1, Box((2,)), Discrete(5), 9))
    actual = spec.critic_input(restart(jnp.array([[4.0, 5.0]])), jnp.array([3]))
    np.testing.assert_array_equal(actual, [[4.0, 5.0]])


def test_own_and_continuous_specs_stay():
    spec = Corridor().spec
    assert with_critic_input(spec) is spec
    box = EnvSpec("box", 2, Box((2,)), Box((1,), low=-1.0, high=1.0), 9)
    assert with_critic_input(box) is box


def test_contract():
    """It depends on the others' actions and not on the agent's own, in the stated shape and bounds."""
    check_env(Completed(num_agents=3, length=2, horizon=4), random=False)


@pytest.mark.parametrize(
    "env",
    [
        pytest.param("test_critic_input:Plain --num_agents 1 --length 2 --horizon 4", marks=pytest.mark.slow),
        "test_critic_input:Plain --num_agents 2 --length 2 --horizon 4",
        pytest.param("snakes_2p --max_steps 4", marks=pytest.mark.slow),
    ],
)
def test_coma_trains_without_a_critic_input(tmp_path, env):
    words = f"--algo coma --env {env} --num_envs 8 --devices 1 --num_epochs 1 --hidden_size 4"
    assert train.main([*words.split(), "--total_env_steps", "64", "--memory_gb", "8", "--runs", str(tmp_path)]) == 0


def test_the_critic_of_coverage_sees_observations_in_the_dtype_in_which_they_are_stored() -> None:
    env = envs_jax.make("coverage", q=3, num_agents=2, budget=2)
    _, timestep = jax.eval_shape(env.reset, jax.random.key(0))

    def store(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float16) if leaf.dtype == jnp.float32 else leaf

    action = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert jax.eval_shape(env.spec.critic_input, jax.tree.map(store, timestep), action).dtype == jnp.float16
