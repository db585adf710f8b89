"""With JAX_ENABLE_X64, which many research programs set, the games are the same: the same types, draws and boards."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.outward import ENVS, SNAKES
from helpers.programs import equations
from test_adapters import walk
from test_env_contract import registered_cases

import envs_jax
from envs_jax import Box, check_env
from envs_jax.adapters import gymnax_style
from envs_jax.batch import batched, finished_episodes, start_statistics, update_statistics
from envs_jax.critic_input import with_critic_input
from envs_jax.progress import add, start, total

COPIES = 3


def describe(function: Callable[..., Any], *arguments: Any) -> tuple[Any, dict[str, list[str]]]:
    """Types that a function returns; and of its program what must not depend on x64: results, draws, wide floats."""
    traced = jax.jit(lambda *x: function(*x)).trace(*arguments)
    types = traced.out_info
    results = [
        (equation.primitive.name, str(variable.aval))
        for equation in equations(traced.jaxpr.jaxpr)
        for variable in equation.outvars
    ]
    return types, {
        "results": [f"{path}: {leaf.dtype}{leaf.shape}" for path, leaf in jax.tree_util.tree_leaves_with_path(types)],
        "draws": [kind for name, kind in results if name == "random_bits"],
        "wide floats": sorted({kind for _, kind in results if kind.startswith(("f64", "float64", "complex128"))}),
    }


def programs(env: envs_jax.Environment) -> dict[str, dict[str, list[str]]]:
    """Describe all functions of an environment that training calls, with their scripted policies."""
    batch, spec = batched(env), env.spec
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), COPIES))
    action = jax.ShapeDtypeStruct((COPIES, spec.num_agents, *spec.action.shape), spec.action.dtype)
    result = {}

    def see(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        types, result[name] = describe(function, *arguments)
        return types

    context = see("context", batch.context, jax.eval_shape(start))
    state, timestep = see("reset", batch.reset, keys, context)
    see("step", batch.step, state, timestep, action, context)
    for name, policy in env.baselines.items():
        see(name, jax.vmap(lambda *x, policy=policy: policy(env, *x)), state.env, timestep, keys)
    if spec.critic_input is not None:
        view = see("critic_input", jax.vmap(spec.critic_input), timestep, action)
        if spec.egocentric is not None:
            see("egocentric observation", jax.vmap(jax.vmap(spec.egocentric)), timestep.observation)
            see("egocentric critic_input", jax.vmap(jax.vmap(spec.egocentric)), view)
    statistics = see("start_statistics", start_statistics, timestep)
    see("update_statistics", lambda *x: update_statistics(spec, *x), statistics, timestep)
    see("finished_episodes", finished_episodes, statistics, timestep)
    return result


def assert_the_same(function: Callable[[], dict[str, dict[str, list[str]]]]) -> None:
    with jax.enable_x64(False):
        expected = function()
    with jax.enable_x64(True):
        actual = function()
    assert actual == expected
    assert expected and not any(part["wide floats"] for part in expected.values())


@pytest.mark.parametrize(("name", "settings"), list(registered_cases()))
def test_programs_of_registered_environments_are_the_same(name: str, settings: dict[str, Any]) -> None:
    assert_the_same(lambda: programs(envs_jax.make(name, **settings)))


def test_the_centralised_view_is_the_same() -> None:
    env = envs_jax.make("snakes_3v3")
    spec = with_critic_input(dataclasses.replace(env.spec, critic_input=None, critic_input_spec=None))
    assert spec.critic_input is not None and spec.num_agents == 3

    def see() -> dict[str, dict[str, list[str]]]:
        _, timestep = jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.key(0)))
        action = jax.ShapeDtypeStruct((3,), jnp.int32)
        return {"critic_input": describe(spec.critic_input, timestep, action)[1]}

    assert_the_same(see)


def test_counters_are_the_same() -> None:
    def see() -> dict[str, dict[str, list[str]]]:
        counter = jax.ShapeDtypeStruct((2,), jnp.uint32)
        return {
            "start": describe(start)[1],
            "add": describe(lambda counter: add(counter, 5), counter)[1],
            "total": describe(total, counter)[1],
        }

    assert_the_same(see)


@pytest.mark.parametrize("name", ["reach", "snakes"])
def test_the_style_of_gymnax_is_the_same(name: str) -> None:
    env = gymnax_style.GymnaxStyleEnv(ENVS[name]())

    def see() -> dict[str, dict[str, list[str]]]:
        key = jax.eval_shape(lambda: jax.random.key(0))
        (_, state), result = describe(env.reset, key)
        action = jax.ShapeDtypeStruct(env.action_space().shape, env.action_space().dtype)
        return {
            "reset": result,
            "step": describe(env.step, key, state, action)[1],
            "action": describe(env.action_space().sample, key)[1],
            "observation": describe(env.observation_space().sample, key)[1],
        }

    assert_the_same(see)


def test_a_package_behind_an_adapter_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own state may be wider; what the adapter returns of it is not."""
    env = walk(monkeypatch, "Walk-x64")

    def see() -> dict[str, dict[str, list[str]]]:
        described = {}
        key = jax.eval_shape(lambda: jax.random.key(0))
        (state, _), _ = describe(env.reset, key)
        action = jax.ShapeDtypeStruct((1, 2), jnp.float32)
        described["reset"] = describe(lambda key: env.reset(key)[1], key)[1]
        described["step"] = describe(lambda *x: env.step(*x)[1], state, action)[1]
        return described

    assert_the_same(see)
    with jax.enable_x64(True):
        check_env(env, random=False)


@pytest.mark.slow
def test_boards_are_the_same() -> None:
    """Every snake and every bean has a cell of its own."""
    env, boards = envs_jax.make("snakes_1v1", **SNAKES), []
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            state, timestep = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(3), 20))
            boards.append(jax.device_get((state.game.head, state.game.beans, timestep.observation)))
    jax.tree.map(np.testing.assert_array_equal, *boards)
    head, beans, _ = boards[0]
    for places in np.concatenate([head, beans], axis=1):
        assert len(set(places.tolist())) == len(places)
        assert ((places >> 5) < SNAKES["height"]).all() and ((places & 31) < SNAKES["width"]).all()


def test_a_sampled_box_has_the_dtype_of_the_box() -> None:
    with jax.enable_x64(True):
        box = Box((2,), jnp.float32, 0.0, 1.0)
        assert box.sample(jax.random.key(0)).dtype == jnp.float32
        assert Box((2,)).dtype == jnp.float32
