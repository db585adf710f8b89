"""Environments for users of Gymnasium: its own checker, equality with the batch stepped directly, learners."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cases import by_day
from helpers.outward import ENVS, SINGLE, SNAKES, TEAMS, Dictionaries, Reference, close, drawn, needs_gymnasium
from helpers.tiny import Corridor, PointMass

import envs_jax
from envs_jax.adapters import outward
from envs_jax.adapters.gymnasium import GymnasiumEnv, GymnasiumVectorEnv

EXPECTED = ("minimum value is -infinity", "maximum value is infinity", "Not able to test alternative render modes")


@needs_gymnasium
@pytest.mark.parametrize("name", by_day(SINGLE, ["corridor", "reach"]))
def test_the_single_environment_passes_gymnasiums_checker(name: str) -> None:
    from gymnasium.utils.env_checker import check_env

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(GymnasiumEnv(ENVS[name]()))
    messages = [str(warning.message) for warning in caught]
    assert all(any(part in message for part in EXPECTED) for message in messages), messages


@needs_gymnasium
def test_names_of_gymnasium() -> None:
    import gymnasium
    from gymnasium.utils.env_checker import check_env

    env = gymnasium.make("envs_jax.adapters.gymnasium:jaxrl/snakes_1v1-v2", **SNAKES)
    check_env(env.unwrapped)  # with the checks that need a registered name
    vector = gymnasium.make_vec("jaxrl/reach-v1", num_envs=3, horizon=4)
    assert isinstance(vector, GymnasiumVectorEnv) and vector.reset()[0].shape == (3, 39)
    names = {f"jaxrl/{name}-v{envs_jax.make(name).version}" for name in ("coverage", "reach", "reach_family", "snakes")}
    assert names <= set(gymnasium.registry)
    team = gymnasium.make_vec("jaxrl/snakes_2p-v2", num_envs=4, flatten_agents=True, **SNAKES)
    assert team.num_envs == 4 and team.reset()[0].shape[0] == 4


@needs_gymnasium
@pytest.mark.parametrize("name", by_day([*SINGLE, *TEAMS], ["corridor", "corridors", "reach"]))
def test_the_vector_environment_equals_the_batch(name: str) -> None:
    env, copies = ENVS[name](), 3
    agents = env.spec.num_agents
    vector = GymnasiumVectorEnv(env, copies * agents, seed=7, flatten_agents=agents > 1)
    reference = Reference(env, copies, seed=7)
    observations, infos = vector.reset()
    ends = set()
    for action in [None, *drawn(env, copies, 30)]:
        if action is not None:
            before = reference.timestep.done
            timestep = reference.step(action)
            flat = action.reshape(-1, *env.spec.action.shape)
            observations, rewards, terminated, truncated, infos = vector.step(flat)
            assert close(rewards, np.asarray(timestep.reward, np.float64))
            assert np.array_equal(terminated.reshape(copies, agents), np.tile(timestep.terminated[:, None], agents))
            assert np.array_equal(truncated.reshape(copies, agents), np.tile(timestep.truncated[:, None], agents))
            assert not rewards[np.repeat(before, agents)].any()  # the reset step
            assert not (terminated | truncated)[np.repeat(before, agents)].any()
            assert rewards.dtype == np.float64 and terminated.dtype == truncated.dtype == bool
            ends |= set(zip(terminated.tolist(), truncated.tolist(), strict=True))
        current = reference.timestep
        assert close(observations, current.observation)
        assert observations in vector.observation_space and observations.flags.writeable
        assert set(infos) == {
            key
            for metric in (*env.spec.metrics, *(["action_mask"] if current.action_mask is not None else []))
            for key in (metric, f"_{metric}")
        }
        for metric in env.spec.metrics:
            assert close(infos[metric], np.repeat(np.asarray(current.metrics[metric]), agents))
            assert infos[f"_{metric}"].all() and infos[f"_{metric}"].shape == (copies * agents,)
        if current.action_mask is not None:
            assert np.array_equal(infos["action_mask"], np.asarray(current.action_mask).reshape(copies * agents, -1))
            vector.action_space.sample(mask=tuple(infos["action_mask"]))  # a mask that Gymnasium accepts
    assert np.asarray(reference.state.episode).min() >= 2  # several episodes, reset steps among them
    if name in ("corridor", "corridors"):  # both ends, apart
        assert ends == {(False, False), (True, False), (False, True)}


@needs_gymnasium
@pytest.mark.parametrize("name", by_day(SINGLE, ["corridor", "reach"]))
def test_one_copy_equals_gymnasiums_own_vector_environment(name: str) -> None:
    """Autoreset, final observations and infos equal Gymnasium's SyncVectorEnv in its default mode."""
    from gymnasium.vector import SyncVectorEnv

    env = ENVS[name]()
    ours, theirs = GymnasiumVectorEnv(env, 1), SyncVectorEnv([lambda: GymnasiumEnv(env)])
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    actual, expected = ours.reset(seed=3), theirs.reset(seed=3)
    for action in [None, *drawn(env, 1, 25)]:
        if action is not None:
            actual, expected = ours.step(action[0]), theirs.step(action[0])
        for mine, other in zip(actual[:-1], expected[:-1], strict=True):
            assert np.array_equal(mine, other) and mine.dtype == other.dtype
        assert actual[-1].keys() == expected[-1].keys()
        assert all(np.array_equal(actual[-1][key], expected[-1][key]) for key in actual[-1])


@needs_gymnasium
def test_seeds() -> None:
    env = Corridor(length=20)
    vector = GymnasiumVectorEnv(env, 5, seed=4)

    def episodes(**seed: Any) -> list[np.ndarray]:
        observations = [vector.reset(**seed)[0]]
        return observations + [vector.step(action[:, 0])[0] for action in drawn(env, 5, 25)]

    def same(a: Any, b: Any) -> Any:
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))

    first, second = episodes(), episodes()
    assert not same(first, second)  # without a seed, the next episodes
    assert same(first, episodes(seed=4)) and same(second, episodes())  # the next ones again
    seeded = episodes(seed=11)
    assert same(seeded, episodes(seed=11)) and not same(seeded, first)
    assert len(np.unique(seeded[0], axis=0)) > 1  # rows differ
    small = GymnasiumVectorEnv(env, 2)  # the number of rows changes nothing
    assert np.array_equal(small.reset(seed=11)[0], seeded[0][:2])
    single = GymnasiumEnv(env)
    assert np.array_equal(single.reset(seed=11)[0], seeded[0][0])
    assert not all(np.array_equal(single.reset()[0], seeded[0][0]) for _ in range(5))
    assert vector.reset(seed=outward.LARGEST_SEED)[0].shape == (5, 21)


@needs_gymnasium
def test_refusals_of_gymnasium() -> None:
    import gymnasium

    corridor, team = Corridor(), Corridor(num_agents=3)

    def check_refusal(call: Any, *parts: str, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert all(part in str(caught.value) for part in parts), str(caught.value)

    for adapter in (GymnasiumEnv, lambda env: GymnasiumVectorEnv(env, 2)):
        check_refusal(
            lambda adapter=adapter: adapter(Dictionaries()), "'pair'", "make an environment whose observation is"
        )
        check_refusal(lambda adapter=adapter: adapter("reach"), "env must be an environment", "envs_jax.make('reach')")
    check_refusal(lambda: GymnasiumEnv(team), "'corridor' has 3 agents", "PettingZooParallelEnv")
    check_refusal(lambda: GymnasiumVectorEnv(team, 3), "'corridor' has 3 agents", "flatten_agents=True")
    check_refusal(lambda: GymnasiumVectorEnv(team, 4, flatten_agents=True), "a multiple of 3", "not 4")
    for number in (0, -1, 2.0, "2"):
        check_refusal(
            lambda number=number: GymnasiumVectorEnv(corridor, number), "num_envs must be a whole number, at least 1"
        )
    for seed in (-1, 2**32):
        check_refusal(lambda seed=seed: GymnasiumEnv(corridor, seed), "seed must lie between 0 and 4,294,967,295")
    vector, single = GymnasiumVectorEnv(corridor, 3), GymnasiumEnv(corridor)
    for env, action in ((vector, [0, 0, 0]), (single, 0)):
        check_refusal(
            lambda env=env, action=action: env.step(action), "call reset() first", kind=gymnasium.error.ResetNeeded
        )
        env.reset()
    check_refusal(lambda: vector.step([0, 1]), "actions must be integers of shape (3,), not int64 of shape (2,)")
    check_refusal(lambda: vector.step(np.zeros((3, 1), int)), "shape (3,)", "(3, 1)")
    check_refusal(lambda: vector.step(np.zeros(3)), "actions must be integers", "float64")
    check_refusal(lambda: vector.step([0, 1, 2]), "actions must lie between 0 and 1, not [0, 1, 2]")
    check_refusal(lambda: single.step([0]), "shape ()")
    continuous = GymnasiumVectorEnv(PointMass(), 2)
    continuous.reset()
    check_refusal(lambda: continuous.step(np.zeros((2, 3))), "actions must be numbers of shape (2, 2)")
    single.reset(seed=0)
    while not any(single.step(1)[2:4]):
        pass
    check_refusal(lambda: single.step(0), "call reset() first", kind=gymnasium.error.ResetNeeded)
    vector.close()
    vector.close()
    check_refusal(vector.reset, "closed", kind=gymnasium.error.ClosedEnvironmentError)


# Other people's learners


WORKERS = """
import functools, sys
import gymnasium
from envs_jax.adapters.gymnasium import make_env

if __name__ == "__main__":
    envs = gymnasium.vector.AsyncVectorEnv(
        [functools.partial(make_env, "reach", seed=i, horizon=3) for i in range(2)], context=sys.argv[1]
    )
    observations, _ = envs.reset(seed=0)
    print(observations.shape)
    envs.close()
"""


@needs_gymnasium
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_gymnasium_are_spawned_not_forked(context: str, tmp_path: Path) -> None:
    """A forked worker would wait for JAX's threads for ever: it says so instead, and what to do."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(envs_jax.__file__).parents[1]), *sys.path])}
    command = [sys.executable, str(script), context]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    if context == "spawn":
        assert done.returncode == 0 and "(2, 39)" in done.stdout, done.stderr
    else:
        assert done.returncode and "start the workers with 'spawn'" in done.stderr
