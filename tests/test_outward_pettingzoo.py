"""Environments for users of PettingZoo: its own tests, equality with the batch stepped directly, the global state."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import by_day
from helpers.outward import ENVS, TEAMS, Dictionaries, Reference, close, drawn, needs_pettingzoo
from helpers.tiny import Corridor

import envs_jax
from envs_jax import Box, Discrete
from envs_jax.adapters.pettingzoo import PettingZooParallelEnv


@needs_pettingzoo
@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")  # in their imports
@pytest.mark.parametrize("mask_in_observation", [False, True])
@pytest.mark.parametrize("name", by_day(["reach", *TEAMS], ["corridors"]))
def test_pettingzoos_own_tests(name: str, mask_in_observation: bool) -> None:
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    make = functools.partial(PettingZooParallelEnv, ENVS[name](), mask_in_observation=mask_in_observation)
    parallel_api_test(make(), num_cycles=40)
    parallel_seed_test(make, num_cycles=40)


@needs_pettingzoo
@pytest.mark.parametrize("name", by_day(TEAMS, ["corridors", "snakes_team"]))
def test_the_parallel_environment_equals_the_batch(name: str) -> None:
    env = ENVS[name]()
    names = [f"agent_{i}" for i in range(env.spec.num_agents)]
    parallel, reference = PettingZooParallelEnv(env, seed=2, mask_in_observation=True), Reference(env, 1, seed=2)
    assert parallel.possible_agents == names and parallel.agents == []
    observations, infos = parallel.reset()
    ends = set()
    for action in [None, *drawn(env, 1, 30)]:
        if action is not None:
            if not parallel.agents:  # the batch resets in a step of its own
                reference.step(action)
                observations, infos = parallel.reset()
                assert parallel.agents == names
            else:
                timestep = reference.step(action)
                actions = {f"agent_{i}": one for i, one in reversed(list(enumerate(action[0])))}
                observations, rewards, terminations, truncations, infos = parallel.step(actions)
                assert close([rewards[agent] for agent in names], np.asarray(timestep.reward[0], np.float64))
                assert terminations == dict.fromkeys(names, bool(timestep.terminated[0]))
                assert truncations == dict.fromkeys(names, bool(timestep.truncated[0]))
                assert parallel.agents == ([] if timestep.done[0] else names)
                ends.add((terminations["agent_0"], truncations["agent_0"]))
        current = reference.timestep
        for i, agent in enumerate(names):
            assert close(observations[agent]["observation"], current.observation[0, i])
            assert np.array_equal(observations[agent]["action_mask"], np.asarray(current.action_mask[0, i]))
            assert np.array_equal(infos[agent]["action_mask"], observations[agent]["action_mask"])
            assert observations[agent] in parallel.observation_space(agent)
            for metric, value in current.metrics.items():
                assert close(infos[agent][metric], np.float64(value[0]))
    assert len(ends) > 1 and int(reference.state.episode[0]) >= 2
    if name == "corridors":
        assert {(True, False), (False, True)} <= ends


@needs_pettingzoo
def test_the_global_state() -> None:
    env = ENVS["coverage"]()
    parallel, reference = PettingZooParallelEnv(env), Reference(env, 1, seed=0)
    with pytest.raises(ValueError, match="call reset"):
        parallel.state()
    parallel.reset()
    global_state = reference.timestep.global_state
    parts = [np.asarray(global_state["maps"]).ravel(), np.asarray(global_state["positions"]).ravel().astype(np.float32)]
    assert close(parallel.state(), np.concatenate(parts))
    assert parallel.state() in parallel.state_space
    one = PettingZooParallelEnv(_WithGlobalState())
    one.reset()
    assert one.state().tolist() == [[1, 2], [3, 4]] and one.state() in one.state_space
    with pytest.raises(NotImplementedError, match="'corridor' has no global state"):
        PettingZooParallelEnv(Corridor()).state()


class _WithGlobalState(Corridor):
    @property
    def spec(self) -> Any:
        box = Box((2, 2), jnp.int32, 0, 4)
        return envs_jax.EnvSpec("known", 1, Box((5,)), Discrete(2), 5, metrics={"reached": "max"}, global_state=box)

    def _timestep(self, *arguments: Any) -> Any:
        return dataclasses.replace(super()._timestep(*arguments), global_state=jnp.array([[1, 2], [3, 4]]))


@needs_pettingzoo
def test_refusals_of_pettingzoo() -> None:
    parallel = PettingZooParallelEnv(Corridor(num_agents=2))
    with pytest.raises(ValueError, match=r"call reset\(\) first"):
        parallel.step({})
    parallel.reset()
    for actions in ({}, {"agent_0": 0}, {"agent_0": 0, "agent_1": 0, "agent_2": 0}):
        with pytest.raises(ValueError, match="actions must be given for agent_0, agent_1, not for"):
            parallel.step(actions)
    with pytest.raises(ValueError, match="between 0 and 1, not 5"):
        parallel.step({"agent_0": 0, "agent_1": 5})
    with pytest.raises(ValueError, match="'pair'"):
        PettingZooParallelEnv(Dictionaries())


@needs_pettingzoo
@pytest.mark.needs("supersuit")
def test_supersuit_makes_a_vector_environment() -> None:
    """It is how users of PettingZoo reach Stable-Baselines3; rows are agents, of one copy after the other."""
    import supersuit

    env = PettingZooParallelEnv(ENVS["coverage"]())
    assert env.render_mode is None
    vector = supersuit.pettingzoo_env_to_vec_env_v1(env)
    vector = supersuit.concat_vec_envs_v1(vector, 2, num_cpus=0, base_class="gymnasium")
    observations, _ = vector.reset(seed=0)
    reference = PettingZooParallelEnv(ENVS["coverage"]()).reset(seed=0)[0]
    np.testing.assert_array_equal(observations[:2], [reference["agent_0"], reference["agent_1"]])
    assert observations.shape == (4, 11, 11, 7)
